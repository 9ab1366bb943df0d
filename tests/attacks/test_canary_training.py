"""Canaries through `train` itself: sound software is never refuted, noise that is missing is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from securevfl import Plan, VerticalData
from securevfl.algorithms.resolve import resolve
from securevfl.attacks.canary.real import (
    FAR,
    FEW,
    RECORDS,
    VICTIMS,
    RunShape,
    shape_of,
    training_again,
    trials_of,
)
from securevfl.attacks.statistics import usual_mu
from securevfl.errors import AttackError
from securevfl.privacy.noise import Noise
from securevfl.protocols.sealed.party import SealedParty

PARTIES = ("p0", "p1", "p2")
SHAPE = RunShape(parties=PARTIES, widths=(2, 2, 2), label_holder="p0")


def plan_of(**options: Any) -> Plan:
    data = VerticalData.load("synthetic:rows=60,features=6,informative=4", parties=3)
    return resolve(Plan(batch=24, epochs=1, **options), data)[0]


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger says one thing, what leaves is another."""
    monkeypatch.setattr(Noise, "perturb", lambda self, values, std: np.asarray(values, np.float64))
    honest = SealedParty.noise_for
    monkeypatch.setattr(SealedParty, "noise_for", lambda self, target: np.zeros_like(honest(self, target)))


PLANS: dict[str, dict[str, Any]] = {
    "strict": {"algorithm": "vafl-sync", "sigma": 50.0},
    "frozen": {"algorithm": "vafl-sync", "sigma": 50.0, "encoder_training": "none"},
    "sealed": {"algorithm": "sealed", "model": "linear", "sigma": 200.0},
}


@pytest.mark.parametrize(
    "name",
    [
        "strict",
        pytest.param("frozen", marks=pytest.mark.slow),
        pytest.param("sealed", marks=pytest.mark.slow),
    ],
)
def test_missing_noise_is_refuted_and_noise_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(**PLANS[name])
    honest = training_again(plan, SHAPE, seconds=0.0)
    assert honest and not any(result.violated for result in honest.values())
    assert all(0 < result.claim < 2.5 for result in honest.values())
    with monkeypatch.context() as patch:
        without_noise(patch)
        broken = training_again(plan, SHAPE, seconds=0.0)
    assert any(result.violated for result in broken.values()), broken


def test_runs_are_as_long_as_the_seconds_certify_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten milliseconds a run and one an epoch: many seconds buy long runs, few do not."""
    epochs = {}
    for seconds in (0.0, 1.0, 100.0):
        trials = trials_of(plan_of(**PLANS["strict"]), SHAPE, "p1", "p0")
        trials.mu = 0.1
        monkeypatch.setattr(trials, "_costs", lambda first: (0.01, 0.001))
        trials._lengthen(seconds)
        epochs[seconds] = trials.plan.epochs
    assert epochs[0.0] == 1 and epochs[100.0] > 8 * epochs[0.0]


def test_what_trials_would_certify_is_said() -> None:
    few, many = (usual_mu(count, count, 0.5) for count in (20, 20_000))
    assert few == 0 and 0.45 < many < 0.5
    found = training_again(plan_of(**PLANS["strict"]), SHAPE, seconds=0.0)
    said = next(iter(found.values())).to_mapping()
    assert 0 <= said["usual"] < said["most"]


def test_every_party_of_a_strict_run_has_a_canary_of_its_own() -> None:
    """Many coins in one run, each of another owner, in runs whose promise is mostly the canary's."""
    crowd = SHAPE.crowded()
    trials = trials_of(plan_of(**PLANS["strict"]), SHAPE, "p1", "p0")
    assert trials.canaries == VICTIMS and trials.victims == crowd.parties[1:] and crowd.parties[0] == "p0"
    coins = np.arange(VICTIMS) % 2 == 0
    data = crowd.data(trials.victims, coins, FEW, FAR)
    canaries = [np.sign(np.asarray(block)[0, 0]) for block in data.train[1:]]
    assert canaries == np.where(coins, 1, -1).tolist() and data.n_train == FEW


def test_the_worlds_differ_in_one_record_of_the_victim_alone() -> None:
    here, there = (SHAPE.data(["p1"], np.array([coin]), RECORDS, 1.0) for coin in (False, True))
    for mine, other, name in zip(here.train, there.train, PARTIES, strict=True):
        changed = np.flatnonzero((np.asarray(mine) != np.asarray(other)).any(1)).tolist()
        assert changed == ([0] if name == "p1" else [])
    assert np.array_equal(here.y_train, there.y_train) and here.n_train == RECORDS
    labels = [SHAPE.data(["p0"], np.array([coin]), RECORDS, 1.0).y_train for coin in (False, True)]
    assert np.flatnonzero(labels[0] != labels[1]).tolist() in ([], [0])


def test_scorecards_have_canaries_of_their_own_and_widths_are_bounded() -> None:
    with pytest.raises(AttackError, match="canaries of its own"):
        training_again(Plan(algorithm="sealed", model="scorecard", epsilon=1.0), SHAPE, seconds=1.0)
    shape = shape_of(["a", "b"], "a", widths=(1, 300))
    assert shape.widths == (1, 4)
