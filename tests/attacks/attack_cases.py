"""Runs to attack, and the cases that the conformance suite wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attack_conformance import AttackConformance, Case, same

from securevfl import Plan, VerticalData, train
from securevfl.attacks.contract import Attack, Guess
from securevfl.attacks.jobs import InProcess
from securevfl.attacks.runner import AttackOutcome, evaluate
from securevfl.attacks.source import Source

# Noise that repeats: scores of attacks on fresh noise scatter, and an interval misses the truth now and then.
REPEATED = {"insecure_reproducible_noise": True}


class Runs:
    """Trains each plan on the same data once and keeps the folder, which tests only read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[Source, VerticalData]] = {}  # with the data, whose id must not be reused

    def __call__(self, data: VerticalData, **plan: Any) -> Source:
        key = f"{id(data)} {sorted(plan.items())}"
        if key not in self._known:
            place = self.folder / f"run{len(self._known)}"
            train(
                data,
                Plan.from_flat(
                    {"algorithm": "vafl", "unprotected": True, "record_views": True, "epochs": 2, **plan}
                ),
                place,
            )
            self._known[key] = Source(place, data), data
        return self._known[key][0]


def case_of(source: Source, attack: type[Attack], owner: str, *observers: str) -> Case:
    """What the conformance suite needs to know of an attack on a run."""
    info = source.info(owner, observers)
    return Case(
        info=info,
        views={name: source.view_folder(name) for name in observers},
        auxiliary=source.auxiliary(attack.needs, info),
        truth=source.truth(attack.truth, info),
    )


def outcome(source: Source, attack: type[Attack], owner: str, *observers: str) -> AttackOutcome:
    """The attack's result in this process."""
    return evaluate(source, attack, owner, observers, runner=InProcess())


def score(source: Source, attack: type[Attack], owner: str, *observers: str) -> float:
    """The score; fails where there is none."""
    found = outcome(source, attack, owner, *observers)
    assert found.score is not None, found.reason
    return found.score.score


def rare_positives(share: float, records: int = 1500, seed: int = 0) -> VerticalData:
    """Two parties of six columns that tell something about a label with this share of positives."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(records) < share).astype(np.int64)
    blocks = [(rng.normal(size=(records, 6)) + 0.4 * labels[:, None]).astype(np.float32) for _ in range(2)]
    return VerticalData.from_arrays(blocks, labels)


class SlowConformance(AttackConformance):
    """The conformance suite for attacks that train models: only the test of determinism runs them twice."""

    _kept: ClassVar[dict[tuple[str, int], Guess]] = {}

    def guess(self, case: Case, seed: int = 3) -> Guess:
        key = (self.attack.name, seed)
        if key not in self._kept:
            self._kept[key] = super().guess(case, seed)
        return self._kept[key]

    def test_same_seed_same_guess(self, case: Case) -> None:
        assert same(super().guess(case), self.guess(case))
