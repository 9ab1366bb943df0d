"""Runs attacks apart from everything they must not see, and has their guesses scored.

An attack runs in a process of its own that gets a job folder (views, declared auxiliary data, public facts)
and nothing else. The scorer works here, after the attack has ended, with the truth from the `Source`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from securevfl.attacks.contract import Attack, Score
from securevfl.attacks.jobs import AttackProcess, InProcess, Job, Report
from securevfl.attacks.source import Source
from securevfl.errors import SecureVFLError


@dataclass(frozen=True, kw_only=True)
class AttackOutcome:
    """What came of one attack on one owner by one observer or coalition.

    Attributes:
        status: ``scored``; ``n/a`` where the attack does not apply; ``failed`` where it broke off.
        reason: Why there is no score.
        score: The score, if there is one.
        seconds: How long the attack took.
    """

    name: str
    family: str
    metric: str
    owner: str
    observers: tuple[str, ...]
    status: Literal["scored", "n/a", "failed"]
    reason: str = ""
    score: Score | None = None
    seconds: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        """The outcome ready for JSON; infinite or unknown is None."""
        figures = {} if self.score is None else vars(self.score)
        named = {name: _number(figures.get(name)) for name in ("score", "low", "high", "baseline")}
        return {
            "name": self.name,
            "family": self.family,
            "owner": self.owner,
            "observer": "+".join(self.observers),
            "metric": self.metric,
            **named,
            "applicable": self.status != "n/a",
            "status": self.status,
            "reason": self.reason,
            "note": figures.get("note", ""),
            "seconds": round(self.seconds, 3),
        }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def pairs(source: Source, attack: type[Attack]) -> list[tuple[str, tuple[str, ...]]]:
    """Every (owner, observers) that the attack could be about, in order.

    Label attacks are about the label holder, all others about each party with features. Observers are all
    other organisations, in groups of the attack's coalition size.
    """
    everybody = sorted({*source.parties, source.label_holder})
    owners = [source.label_holder] if attack.family == "label" else list(source.parties)
    return [
        (owner, group)
        for owner in owners
        for group in itertools.combinations([name for name in everybody if name != owner], attack.coalition)
    ]


def evaluate(
    source: Source,
    attack: type[Attack],
    owner: str,
    observers: tuple[str, ...],
    *,
    seed: int = 0,
    timeout: float = 600.0,
    runner: AttackProcess | InProcess | None = None,
    progress: Report = lambda share: None,
) -> AttackOutcome:
    """Runs and scores one attack.

    Args:
        source: The run and its data.
        attack: The attack.
        owner: Whose data it is after.
        observers: Whose views it gets.
        seed: Seed of the attack.
        timeout: Seconds after which the attack is ended.
        runner: Where it runs; a process for this call by default.
        progress: Called with the share done.
    """
    info = source.info(owner, observers)
    outcome = partial(
        AttackOutcome,
        name=attack.name,
        family=attack.family,
        metric=attack.metric,
        owner=owner,
        observers=observers,
    )
    found = attack().applies(info)
    if not found.applicable:
        return outcome(status="n/a", reason=found.reason)
    begun = time.monotonic()
    own = runner or AttackProcess()
    try:
        job = Job(
            attack=attack,
            info=info,
            views={name: source.view_folder(name) for name in observers},
            auxiliary=source.auxiliary(attack.needs, info),
            seed=seed,
        )
        guess = own.run(job, timeout=timeout, progress=progress)
        score = attack.score(guess, source.truth(attack.truth, info), info)
    except SecureVFLError as error:
        return outcome(status="failed", reason=str(error))
    except Exception as error:  # one broken attack must not cost the audit of all others
        return outcome(status="failed", reason=f"{type(error).__name__}: {error}")
    finally:
        if runner is None:
            own.close()
    return outcome(status="scored", score=score, seconds=time.monotonic() - begun)


def evaluate_all(
    source: Source,
    attacks: Iterable[type[Attack]],
    *,
    seed: int = 0,
    timeout: float = 600.0,
    workers: int = 1,
    isolated: bool = True,
    progress: Callable[[int, int, AttackOutcome], None] = lambda done, total, outcome: None,
) -> list[AttackOutcome]:
    """Runs and scores attacks on every owner and observer of a run.

    Args:
        source: The run and its data.
        attacks: The attacks.
        seed: Seed of all attacks; each draws from a generator of its own.
        timeout: Seconds for one attack.
        workers: How many attack processes work at once.
        isolated: False runs everything in this process, for tests.
        progress: Called with (done, total, outcome) after each attack, from the worker's thread.
    """
    todo = [(attack, *pair) for attack in attacks for pair in pairs(source, attack)]
    local = threading.local()
    runners: list[AttackProcess | InProcess] = []
    done = itertools.count(1)

    def one(item: tuple[type[Attack], str, tuple[str, ...]]) -> AttackOutcome:
        if not hasattr(local, "runner"):
            local.runner = AttackProcess() if isolated else InProcess()
            runners.append(local.runner)
        outcome = evaluate(source, *item, seed=seed, timeout=timeout, runner=local.runner)
        progress(next(done), len(todo), outcome)
        return outcome

    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            return list(pool.map(one, todo))
    finally:
        for runner in runners:
            runner.close()
