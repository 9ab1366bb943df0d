"""Metrics from totals: exact without noise, unbiased with it, errors as printed, no record moves them far."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from securevfl.accountants.metric_totals import MetricTotals
from securevfl.errors import AccountingError

METRICS = MetricTotals()


def people(n=4000, rate=0.22, gap=1.2, seed=0):
    generator = np.random.default_rng(seed)
    labels = (generator.random(n) < rate).astype(float)
    scores = generator.standard_normal(n) * 1.3 + gap * labels - 1.5
    return scores, labels


def exact_auc(scores, labels):
    ranks, n = rankdata(scores), labels.sum()
    return (ranks[labels == 1].sum() - n * (n + 1) / 2) / (n * (len(labels) - n))


def opened(scores, labels):
    return METRICS.totals(scores, labels)


def noisy(exact, noise, trials, seed):
    return exact + np.random.default_rng(seed).normal(0, noise, (trials, *exact.shape))


def arguments(labels):
    return {"positives": labels.sum(), "records": len(labels)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.05, 0.22, 0.5])
def test_without_noise_it_is_the_auc(seed, rate):
    scores, labels = people(seed=seed, rate=rate, n=20_000)
    found = METRICS.auc(opened(scores, labels), **arguments(labels), noise=0.0)
    assert found.value == pytest.approx(exact_auc(scores, labels), abs=2e-4) and found.noise_error == 0


def test_ties_count_half():
    labels = np.array([0.0, 1.0, 1.0, 0.0])
    assert METRICS.auc(opened(np.zeros(4), labels), **arguments(labels), noise=0.0).value == pytest.approx(
        0.5
    )


def test_noise_neither_shifts_the_auc_nor_exceeds_the_printed_error():
    scores, labels = people()
    noise = METRICS.share(sigma=METRICS.sigma(mu=0.5), members=2, colluders=1)[1]
    totals, trials = opened(scores, labels), 4000
    found = [METRICS.auc(t, **arguments(labels), noise=noise) for t in noisy(totals, noise, trials, 1)]
    values = np.array([each.value for each in found])
    exact = METRICS.auc(totals, **arguments(labels), noise=0.0).value
    spread = values.std()
    assert abs(values.mean() - exact) < 4 * spread / math.sqrt(trials)  # four standard errors
    # The deviation of a sample of 4000 is off by 1 / sqrt(2 n) = 1.1 %; four of those.
    printed = math.sqrt(np.mean([each.noise_error**2 for each in found]))
    assert printed == pytest.approx(spread, rel=4 / math.sqrt(2 * trials))


def test_the_noise_error_shrinks_with_epsilon_as_published():
    """6,000 records, 22 % positive, K = 12, P = 24: about .0066 at epsilon 1; K = 24, P = 48 a fifth more."""
    scores, labels = people(n=6000, gap=0.9)
    errors = []
    for metrics in (MetricTotals(period=24.0, harmonics=12), METRICS):
        noise = metrics.sigma(mu=0.268051)
        errors.append(
            metrics.auc(metrics.totals(scores, labels), **arguments(labels), noise=noise).noise_error
        )
    assert 0.005 < errors[0] < 0.008 and 1.1 < errors[1] / errors[0] < 1.3


@given(st.floats(-12, 12), st.floats(-12, 12), st.integers(0, 1), st.integers(0, 1), st.integers(1, 30))
def test_no_replacement_moves_the_totals_farther(u, v, y, z, harmonics):
    metrics = MetricTotals(harmonics=harmonics)
    moved = metrics.vectors([u], [y])[0] - metrics.vectors([v], [z])[0]
    squared = float((moved**2).sum()) + 2 * (y - z) ** 2  # with n+ at noise s / sqrt 2
    sigma = metrics.sigma(mu=0.3)
    assert math.sqrt(squared) / sigma <= 0.3 * (1 + 1e-12)
    if y != z:
        assert squared == pytest.approx(4)


def test_opposite_scores_meet_the_bound():
    moved = METRICS.vectors([12.0], [1])[0] - METRICS.vectors([-12.0], [1])[0]
    assert float((moved**2).sum()) == pytest.approx(4)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_clamped_scores_never_wrap(members):
    bound = METRICS.clamp(members)
    sums = [sum(signs) for signs in itertools.product((-bound, bound), repeat=members)]
    assert max(sums) - min(sums) <= METRICS.period / 2


def test_a_share_leaves_the_noise_that_colluders_do_not_know():
    each, total = METRICS.share(sigma=3.0, members=4, colluders=2)
    assert each * math.sqrt(4 - 2) == pytest.approx(3.0) and total == pytest.approx(each * 2)


def test_losses_are_close_without_noise_and_their_error_is_the_deviation():
    scores, labels = people(n=6000)
    p = 1 / (1 + np.exp(-scores))
    exact = {
        "brier": float(np.mean((p - labels) ** 2)),
        "log_loss": float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))),
    }
    totals, trials, noise = opened(scores, labels), 2000, 10.0
    for name, tolerance in (("brier", 1e-3), ("log_loss", 7e-3)):
        metric = getattr(METRICS, name)
        alone = metric(totals, **arguments(labels), noise=0.0)
        assert alone.value == pytest.approx(exact[name], abs=tolerance)
        found = [metric(t, **arguments(labels), noise=noise) for t in noisy(totals, noise, trials, 2)]
        spread = np.std([each.value for each in found])
        assert found[0].noise_error == pytest.approx(spread, rel=4 / math.sqrt(2 * trials))
        assert found[0].noise_error < 0.03


def test_an_evaluation_repeated_costs_more():
    assert METRICS.mu(sigma=METRICS.sigma(mu=0.2, evaluations=9), evaluations=9) == pytest.approx(0.2)
    assert METRICS.sigma(mu=0.2, evaluations=4) == 2 * METRICS.sigma(mu=0.2)


@pytest.mark.parametrize("positives", [0.0, -3.0, 10.0])
def test_one_class_has_no_auc(positives):
    with pytest.raises(AccountingError, match="both classes"):
        METRICS.auc(np.zeros((4, 24)), positives=positives, records=10, noise=1.0)
