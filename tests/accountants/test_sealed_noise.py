"""Noise of sealed training per coalition: against brute force, the plain formulas, and every coalition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.accountants import Filter, ReleaseRecord, SealedShifts, privacy_matrix, sealed_sensitivity
from securevfl.errors import AccountingError

R, RHO = 1.00322, 1.00644


def shifts(clips=(1.0, 1.0), label_holder=0, protects="person", outputs=1):
    return SealedShifts(
        clips=tuple(clips),
        label_holder=label_holder,
        protects=protects,
        residual_bound=R,
        residual_change=RHO,
        outputs=outputs,
    )


clip_lists = st.lists(st.floats(0.05, 4.0), min_size=2, max_size=5)


@given(clip_lists, st.data(), st.sampled_from(["person", "features", "label"]))
def test_calibrated_noise_meets_the_target_against_every_coalition(clips, data, protects):
    holder = data.draw(st.integers(0, len(clips) - 1))
    t = data.draw(st.integers(1, len(clips) - 1))
    found = shifts(clips, holder, protects)
    noise = found.variances(mu=0.3, colluders=t)
    worst = [
        found.squared_mu(noise, frozenset(group))
        for size in range(t + 1)
        for group in itertools.combinations(range(len(clips)), size)
    ]
    assert max(worst) <= 0.09 * (1 + 1e-9)
    assert max(worst) >= 0.09 * (1 - 1e-9)  # and no more noise than its shape needs
    assert found.mu(noise, colluders=t) == pytest.approx(0.3, rel=1e-9)


@given(clip_lists, st.data(), st.integers(0, 2**31))
def test_no_replacement_moves_the_totals_farther(clips, data, seed):
    """Random replacements of what a coalition does not hold, residuals at the ends and in between."""
    holder = data.draw(st.integers(0, len(clips) - 1))
    coalition = frozenset(data.draw(st.sets(st.integers(0, len(clips) - 1), max_size=len(clips) - 1)))
    generator = np.random.default_rng(seed)
    noise = tuple(tuple(row) for row in generator.uniform(0.5, 3.0, (len(clips), len(clips))))
    bound = shifts(clips, holder).squared_mu(noise, coalition)
    low, high = 1 - R, R  # the range of the series, y being 0 or 1
    for _ in range(60):
        scores = generator.choice([low, high, generator.uniform(low, high)], 2)
        labels = generator.integers(0, 2, 2) if holder not in coalition else [generator.integers(0, 2)] * 2
        residuals = scores - labels
        moved = 0.0
        for m, clip in enumerate(clips):
            rows = _rows(generator, clip, m in coalition)
            shift = np.linalg.norm(residuals[0] * rows[0] - residuals[1] * rows[1])
            moved += shift**2 / sum(v for j, v in enumerate(noise[m]) if j not in coalition)
        assert moved <= bound * (1 + 1e-9)


def _rows(generator, clip, fixed):
    rows = generator.standard_normal((2, 3))
    rows *= clip / np.linalg.norm(rows, axis=1, keepdims=True)
    if generator.random() < 0.5:
        rows[1] = rows[0] * generator.choice([-1.0, 1.0])
    if fixed:
        rows[1] = rows[0]
    return rows


@pytest.mark.parametrize("protects", ["person", "features", "label"])
@pytest.mark.parametrize("clips", [(1.0, 1.0), (1.0, 1.0, 1.0), (2.0, 0.5, 1.0)])
def test_the_diameter_is_the_formula_for_all_observers(protects, clips):
    plain = sealed_sensitivity(clips, protects=protects, residual_bound=R, residual_change=RHO)
    assert shifts(clips, protects=protects).diameter == pytest.approx(plain, rel=1e-12)


def test_features_get_the_isotropic_noise_of_the_plain_formula():
    found = shifts((1.0, 1.0, 1.0), protects="features")
    noise = found.variances(mu=0.5, colluders=2)
    assert np.allclose(noise, (found.diameter / 0.5) ** 2)


def test_two_parties_need_less_than_the_plain_formula_gives():
    found = shifts()
    noise = found.variances(mu=1.0, colluders=1)
    plain = 2 * found.diameter**2  # both parties' shares at the full deviation
    first, second = (sum(row) for row in noise)  # the noise on each total: what utility pays
    assert first < 0.6 * plain and second < 0.76 * plain


def test_outsiders_face_at_least_what_members_do():
    found = shifts((1.0, 0.7, 1.3), label_holder=1)
    noise = found.variances(mu=1.0, colluders=1)
    assert found.squared_mu(noise, frozenset()) <= 1.0


def test_a_coalition_that_knows_all_noise_has_no_bound():
    noise = ((1.0, 0.0), (1.0, 0.0))
    assert math.isinf(shifts().squared_mu(noise, frozenset({0})))
    assert shifts(protects="label").squared_mu(noise, frozenset({0})) == 0.0  # it holds the label itself


def test_a_label_holder_without_features_protects_its_labels():
    found = shifts((0.25, 1.0, 1.0))
    noise = found.variances(mu=1.0, colluders=2)
    assert found.mu(noise, colluders=2, owner=0) <= 1.0 + 1e-9


def test_outputs_multiply_squared_shifts():
    one, ten = shifts(), shifts(outputs=10)
    noise = one.variances(mu=1.0, colluders=1)
    assert ten.squared_mu(noise, frozenset({1})) == pytest.approx(10 * one.squared_mu(noise, frozenset({1})))


@pytest.mark.parametrize(
    "changes",
    [
        {"clips": (1.0,)},
        {"clips": (0.0, 0.0)},
        {"label_holder": 2},
        {"protects": "all"},
        {"clips": (1.0, -1.0)},
    ],
)
def test_what_makes_no_sense_is_refused(changes):
    with pytest.raises(AccountingError):
        shifts(**changes)


@pytest.mark.parametrize("colluders", [0, 2])
def test_coalitions_that_leave_nobody_honest_are_refused(colluders):
    with pytest.raises(AccountingError, match="colluders"):
        shifts().variances(mu=1.0, colluders=colluders)


def entry(kind, mechanism, rows, **fields):
    return ReleaseRecord(
        owner="p1",
        observers=("p0",),
        kind=kind,
        mechanism=mechanism,
        mode="sealed",
        rows=np.arange(*rows),
        **fields,
    )


def test_predictions_neither_spend_the_training_budget_nor_spoil_its_figure():
    budget = Filter(mode="sealed", budget_mu=0.5, records=20)
    totals = entry("totals (person)", "gaussian", (0, 15), sigma=10.0, sensitivity=3.0)
    scores = entry("prediction", "exact", (15, 20), vectors=5)
    for record in (totals, scores, totals):
        budget.charge(record)
    assert budget.spent_mu == pytest.approx(0.3 * math.sqrt(2))
    spend = privacy_matrix([totals, scores, totals], 1e-5)["p1"]["p0"]
    assert (spend.mu, spend.releases, spend.predictions) == (pytest.approx(0.3 * math.sqrt(2)), 2, 5)
    assert spend.exact == 0


def test_exact_totals_are_no_predictions():
    opened = entry("totals (person)", "exact", (0, 15))
    assert math.isinf(privacy_matrix([opened], 1e-5)["p1"]["p0"].mu)
    elsewhere = ReleaseRecord(owner="p1", kind="prediction", mechanism="exact", mode="strict")
    assert not elsewhere.is_prediction  # other modes count predictions with everything else
