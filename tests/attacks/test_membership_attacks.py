"""Membership attacks find members of overfitted models, and nobody where models generalise."""

from __future__ import annotations

import numpy as np
import pytest
from attack_cases import Runs, SlowConformance, case_of, outcome
from attack_conformance import Case

from securevfl import VerticalData
from securevfl.attacks.membership import EmbeddingMembership, PredictionMembership, likelihood_ratio
from securevfl.attacks.source import Source

OVERFIT = {"model": "mlp", "hidden": (32,), "epochs": 30, "batch": 32, "learning_rate": 0.5}


@pytest.fixture(scope="module")
def noise_labels() -> VerticalData:
    """Labels that no feature explains: whatever a model gets right, it remembers."""
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(240, 20)).astype(np.float32) for _ in range(2)]
    return VerticalData.from_arrays(blocks, rng.integers(0, 2, 240), test_fraction=0.5)


@pytest.fixture(scope="module")
def overfitted(runs: Runs, noise_labels: VerticalData) -> Source:
    return runs(noise_labels, **OVERFIT)


class TestPredictionMembership(SlowConformance):
    attack = PredictionMembership

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, overfitted: Source) -> Case:
        return case_of(overfitted, cls.attack, "p0", "p1")


class TestEmbeddingMembership(SlowConformance):
    attack = EmbeddingMembership

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, overfitted: Source) -> Case:
        return case_of(overfitted, cls.attack, "p1", "p0")


def area(note: str) -> float:
    return float(note.partition("AUC ")[2].partition(";")[0])


def test_overfitted_models_give_members_away(overfitted: Source) -> None:
    found = outcome(overfitted, PredictionMembership, "p0", "p1").score
    assert found is not None and found.low > found.baseline and area(found.note) > 0.75


def test_one_step_gives_nobody_away(runs: Runs, noise_labels: VerticalData) -> None:
    """60 members and 60 others: six standard errors of the AUC are .31."""
    source = runs(noise_labels, epochs=1, batch=120, learning_rate=1e-3)
    found = outcome(source, PredictionMembership, "p0", "p1").score
    assert found is not None and abs(area(found.note) - 0.5) < 0.31
    assert found.low <= found.baseline <= found.high


def test_rate_of_false_positives_is_one_that_can_be_resolved(overfitted: Source) -> None:
    found = outcome(overfitted, PredictionMembership, "p0", "p1").score
    assert found is not None and found.baseline == pytest.approx(10 / 60)


def test_who_is_not_attacked_and_why(runs: Runs, overfitted: Source, cancer: VerticalData) -> None:
    assert "same for every owner" in outcome(overfitted, PredictionMembership, "p1", "p0").reason
    assert "no embedding" in outcome(overfitted, EmbeddingMembership, "p0", "p1").reason
    frozen = runs(cancer, encoder_training="none", scaling="none", sigma=1.0, epochs=1)
    assert "not trained" in outcome(frozen, EmbeddingMembership, "p1", "p0").reason
    assert outcome(frozen, PredictionMembership, "p0", "p1").status == "scored"


def test_likelihood_ratio_of_two_known_gaussians() -> None:
    """With many shadow models the score is that of N(1, 1) against N(0, 1): x - 1/2, per candidate."""
    rng = np.random.default_rng(0)
    inside = rng.random((4000, 3)) < 0.5
    answers = (inside + rng.normal(size=inside.shape))[:, :, None]
    observed = np.array([[0.0], [1.0], [2.0]])
    # Means have standard errors of 1 / sqrt(2000) = .022, variances half of that: .25 is above six of them.
    assert np.abs(likelihood_ratio(observed, answers, inside) - (observed[:, 0] - 0.5)).max() < 0.25
