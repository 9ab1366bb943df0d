"""Passes and draws: who visits which records, what draws cost, and rates that decay."""

from __future__ import annotations

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.resolve import planned_releases, resolve
from securevfl.algorithms.steps import Draws, decayed, most_visits
from securevfl.errors import PlanError


@pytest.fixture(scope="module")
def two() -> VerticalData:
    return VerticalData.load("synthetic:rows=200,features=6", parties=2)


def visits(records: int, size: int, passes: int, seed: int) -> np.ndarray:
    draws = Draws(records, size, np.random.default_rng(seed))
    drawn = [draws.next() for _ in range(passes * draws.per_pass)]
    return np.bincount(np.concatenate(drawn), minlength=records)


def test_no_record_is_drawn_more_often_than_planned() -> None:
    plan = Plan(algorithm="afsgd", batch=16)
    assert plan.sampling == "draws" and Plan(algorithm="vafl").sampling == "passes"
    bound = most_visits(plan, 100, 10)
    # 100 runs: each may exceed the bound with chance 1e-6; and the bound is not idle.
    found = [visits(100, 16, 10, seed).max() for seed in range(100)]
    assert max(found) <= bound <= 1.6 * max(found)
    assert most_visits(plan.with_changes(sampling="passes"), 100, 10) == 10


@pytest.mark.parametrize("algorithm", ["vafl-sync", "flex"])
def test_draws_stay_within_their_epsilon(algorithm: str) -> None:
    """Per-record counting with draws: calibrated to more visits than passes have, and never exceeded."""
    rng = np.random.default_rng(1)
    blocks = [rng.uniform(-1, 1, (160, 3)) for _ in range(2)]
    data = VerticalData.from_arrays(blocks, rng.integers(0, 2, 160), bounds=(-1, 1))
    plan = Plan(
        algorithm=algorithm, encoder_training="dp", epsilon=50.0, epochs=3, batch=16, sampling="draws"
    )
    run = train(data, plan)
    sigmas = [resolve(plan.with_changes(sampling=s), data)[0].sigma for s in ("passes", "draws")]
    assert sigmas[0] < sigmas[1] < 3 * sigmas[0]
    assert run.result["stopped"] is None
    assert 0 < run.privacy["p1"]["epsilon"] <= 50.0


def test_strict_counting_knows_that_drawn_batches_are_all_full(two: VerticalData) -> None:
    plan = Plan(algorithm="vafl-sync", batch=48, sigma=1.0, epochs=4, sampling="draws")
    planned = planned_releases(*resolve(plan, two))
    assert train(two, plan).privacy["p1"]["releases"] <= planned.vectors


def test_encrypted_fdml_keeps_to_passes(two: VerticalData) -> None:
    data = two.split(3)
    with pytest.raises(PlanError, match="linear system"):
        train(data, Plan(algorithm="fdml", protocol="bfv", sampling="draws", unprotected=True))


def test_rates_of_the_theorems() -> None:
    rates = {
        name: [decayed(Plan(algorithm="vafl", decay=name, decay_steps=3), t) for t in range(1, 8)]
        for name in ("none", "sqrt", "inverse", "step")
    }
    k = np.arange(7)
    np.testing.assert_allclose(rates["none"], np.ones(7))
    np.testing.assert_allclose(rates["sqrt"], 1 / np.sqrt(k + 1))
    np.testing.assert_allclose(rates["inverse"], 3 / (k + 3))  # proportional to 1 / (k + K_0)
    np.testing.assert_allclose(rates["step"], [1, 1, 1, 0.5, 0.5, 0.5, 0.25])
