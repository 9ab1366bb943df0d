"""Feature attacks from embeddings and predictions: exact where algebra says so, beaten by enough noise."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from attack_cases import REPEATED, Runs, SlowConformance, case_of, outcome, score
from attack_conformance import Case
from sklearn.datasets import load_digits

from securevfl import VerticalData
from securevfl.attacks.contract import Attack
from securevfl.attacks.equality import EqualitySolving, GenerativeRegression
from securevfl.attacks.feature import AttributeInference, BlackBoxInversion, WhiteBoxInversion, decode
from securevfl.attacks.source import Source

EMBEDDING = [BlackBoxInversion, WhiteBoxInversion, AttributeInference]
WIDE = {"model": "linear", "embedding": 10, "epochs": 2}


@pytest.fixture(scope="module")
def open_run(runs: Runs, cancer: VerticalData) -> Source:
    """Embeddings as wide as the features, without noise."""
    return runs(cancer, **WIDE)


@pytest.fixture(scope="module")
def noisy_run(runs: Runs, cancer: VerticalData) -> Source:
    return runs(cancer, sigma=30.0, **REPEATED, **WIDE)


@functools.cache
def digits_with(unknown: int) -> VerticalData:
    """The owner p1 has `unknown` pixels, the observer p0 all others; pixels in [0, 1]."""
    features, labels = load_digits(return_X_y=True)
    pixels = features[:300] / 16
    order = np.argsort(-pixels.std(axis=0))  # constant border pixels would make the equations singular
    pixels = pixels[:, order]
    blocks = [pixels[:, unknown:], pixels[:, :unknown]]
    bounds = [[(0.0, 1.0)] * block.shape[1] for block in blocks]
    return VerticalData.from_arrays(blocks, labels[:300], bounds=bounds)


class FeatureConformance(SlowConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, open_run: Source) -> Case:
        return case_of(open_run, cls.attack, "p1", "p0")


class TestBlackBoxInversion(FeatureConformance):
    attack = BlackBoxInversion


class TestWhiteBoxInversion(FeatureConformance):
    attack = WhiteBoxInversion


class TestAttributeInference(FeatureConformance):
    attack = AttributeInference


class TestEqualitySolving(FeatureConformance):
    attack = EqualitySolving


class TestGenerativeRegression(FeatureConformance):
    attack = GenerativeRegression


# -- equality solving --------------------------------------------------------------------------------------


def test_as_many_equations_as_unknowns_are_solved_exactly(runs: Runs) -> None:
    """Nine unknown columns, ten classes. Answers are float32: 2^-24 relative, times the condition."""
    data = digits_with(9)
    assert score(runs(data, fusion="sum", scaling="none", epochs=3), EqualitySolving, "p1", "p0") < 1e-6


def test_more_unknowns_than_equations_leave_an_error(runs: Runs) -> None:
    """The reference: MSE .033 at 12 unknowns, .144 at 30, .25 for random values."""
    errors = [
        score(runs(digits_with(width), fusion="sum", scaling="none", epochs=3), EqualitySolving, "p1", "p0")
        for width in (9, 12, 30)
    ]
    assert errors[0] < 1e-6 < errors[1] < errors[2]


def test_generator_learns_something_of_the_features(runs: Runs) -> None:
    source = runs(digits_with(9), fusion="sum", scaling="none", epochs=3)
    assert score(source, GenerativeRegression, "p1", "p0") < 0.25  # uniform random values


# -- embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [BlackBoxInversion, WhiteBoxInversion], ids=lambda attack: attack.name)
def test_wide_embeddings_are_inverted(open_run: Source, attack: type[Attack]) -> None:
    found = outcome(open_run, attack, "p1", "p0").score
    assert found is not None and found.score < 0.2 * found.baseline


def test_attribute_is_read_from_embeddings(open_run: Source) -> None:
    found = outcome(open_run, AttributeInference, "p1", "p0").score
    assert found is not None and found.low > found.baseline and found.score > 0.9


@pytest.mark.parametrize("attack", [BlackBoxInversion, WhiteBoxInversion], ids=lambda attack: attack.name)
def test_noise_brings_inversion_down_to_its_baseline(noisy_run: Source, attack: type[Attack]) -> None:
    """Thirty clips of noise leave nothing; a tenth covers what guessing the mean from few records costs."""
    found = outcome(noisy_run, attack, "p1", "p0").score
    assert found is not None and found.score > 0.9 * found.baseline


def test_noise_brings_attribute_inference_down_to_its_baseline(noisy_run: Source) -> None:
    found = outcome(noisy_run, AttributeInference, "p1", "p0").score
    assert found is not None and found.low < found.baseline


@pytest.mark.parametrize("attack", EMBEDDING, ids=lambda attack: attack.name)
def test_secure_sums_hide_single_embeddings(runs: Runs, cancer: VerticalData, attack: type[Attack]) -> None:
    found = outcome(runs(cancer, protocol="two-tree", epochs=1), attack, "p1", "p0")
    assert found.status == "n/a" and "no embedding of p1 by itself" in found.reason


def test_flex_hands_embeddings_to_every_party(runs: Runs, cancer: VerticalData) -> None:
    source = runs(cancer, algorithm="flex", **WIDE)
    assert outcome(source, BlackBoxInversion, "p2", "p1").status == "scored"


@pytest.mark.parametrize("attack", EMBEDDING, ids=lambda attack: attack.name)
def test_parties_see_nothing_of_each_other_in_vafl(open_run: Source, attack: type[Attack]) -> None:
    assert outcome(open_run, attack, "p2", "p1").status == "n/a"


def test_reasons_of_prediction_attacks(runs: Runs, cancer: VerticalData, noisy_run: Source) -> None:
    deep = runs(cancer, model="mlp", epochs=1)
    assert "no linear equations" in outcome(deep, EqualitySolving, "p1", "p0").reason
    assert "clipped" in outcome(noisy_run, EqualitySolving, "p1", "p0").reason


def test_decoder_finds_a_linear_map() -> None:
    rng = np.random.default_rng(0)
    inputs, map_back = rng.normal(size=(80, 4)), rng.normal(size=(4, 3))
    found = decode(inputs[:40], inputs[:40] @ map_back, inputs[40:])
    # The smallest ridge is 1e-6 of the largest eigenvalue per record: errors stay below a thousandth.
    assert np.abs(found - inputs[40:] @ map_back).max() < 1e-2
