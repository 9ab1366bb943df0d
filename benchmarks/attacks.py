"""The canary audit: a million trials through the real gate, and the audits that one report needs.

Goal: a million trials of the frozen audit in under 10 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from securevfl.attacks.canary import CanaryResult, canary_audits
from securevfl.attacks.canary.gate import ROWS, gate_canaries, release_door
from securevfl.attacks.canary.results import gate_of
from securevfl.settings.plan import Plan

MILLION = 1_000_000
GOAL_SECONDS = 10.0


def _million(width: int) -> CanaryResult:
    plan = Plan(algorithm="vafl", encoder_training="none", sigma=2.0)
    return gate_canaries(release_door(gate_of(plan)(ROWS * MILLION)), trials=MILLION, width=width)


def _timed(name: str, audit: Callable[[], list[CanaryResult]]) -> float:
    begun = time.perf_counter()
    results = audit()
    seconds = time.perf_counter() - begun
    found = ", ".join(f"mu >= {one.mu_lower:.3f} (claim {one.claim:.3f})" for one in results)
    print(f"{name:<44} {seconds:7.2f} s   {found}")
    return seconds


def main() -> None:
    seconds = _timed("frozen, 1,000,000 canaries of width 1", lambda: [_million(1)])
    _timed("frozen, 1,000,000 canaries of width 8", lambda: [_million(8)])
    plans = {
        "frozen": Plan(algorithm="vafl", encoder_training="none", sigma=2.0),
        "strict": Plan(algorithm="vafl", sigma=2.0),
        "dp-encoder": Plan(algorithm="vafl", encoder_training="dp", sigma=2.0, gradient_sigma=2.0),
        "sealed": Plan(algorithm="sealed", sigma=15.0, epochs=80, embedding=1),
    }
    for mode, plan in plans.items():
        _timed(f"audit of a plan in mode {mode}", lambda plan=plan: list(canary_audits(plan).values()))
    verdict = "met" if seconds < GOAL_SECONDS else "MISSED"
    print(f"goal: a million frozen trials in under {GOAL_SECONDS:g} s: {verdict}")


if __name__ == "__main__":
    main()
