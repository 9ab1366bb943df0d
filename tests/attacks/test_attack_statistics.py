"""Statistics against vectors made with 40 digits, against definitions, and against simulations."""

from __future__ import annotations

import bisect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from securevfl.attacks.statistics import (
    Errors,
    auc,
    balanced_accuracy_ceiling,
    epsilon_lower,
    epsilon_of,
    mean,
    mu_certified,
    mu_lower,
    noticed_mu,
    one_run_epsilon,
    proportion,
    smallest_rate,
    tpr_at,
    upper_bound,
)
from securevfl.errors import AttackError

VECTORS = json.loads(Path(__file__).with_name("statistics_vectors.json").read_text())
# scipy's beta quantiles and the normal quantile are good to about 1e-13; two of them are added.
CLOSE = 1e-10


@pytest.mark.parametrize("vector", VECTORS["games"])
def test_bounds_from_errors(vector: dict[str, Any]) -> None:
    n = vector["trials"]
    errors = Errors(vector["false_positives"], vector["false_negatives"], n, n)
    assert errors.bounds() == pytest.approx((vector["alpha"], vector["beta"]), abs=CLOSE)
    assert mu_lower(errors) == pytest.approx(vector["mu_lower"], abs=CLOSE)
    assert epsilon_lower(errors, vector["delta"]) == pytest.approx(vector["epsilon_lower"], abs=CLOSE)


@pytest.mark.parametrize("vector", VECTORS["one_run"])
def test_one_run(vector: dict[str, Any]) -> None:
    found = one_run_epsilon(
        canaries=vector["canaries"],
        guesses=vector["guesses"],
        correct=vector["correct"],
        delta=vector["delta"],
    )
    assert found == pytest.approx(vector["epsilon_lower"], abs=CLOSE)


@pytest.mark.parametrize("vector", VECTORS["ceilings"])
def test_ceilings(vector: dict[str, Any]) -> None:
    mu = vector["mu"]
    assert balanced_accuracy_ceiling(mu) == pytest.approx(vector["balanced_accuracy"], abs=CLOSE)


def test_published_figures() -> None:
    """The figures quoted in the documentation."""
    assert mu_lower(Errors(0, 0, 1000, 1000)) == pytest.approx(5.3598, abs=5e-5)
    assert epsilon_lower(Errors(0, 0, 1000, 1000), 1e-5) == pytest.approx(5.6006, abs=5e-5)
    assert mu_lower(Errors(50, 60, 1000, 1000)) == pytest.approx(2.9396, abs=5e-5)
    assert epsilon_lower(Errors(50, 60, 1000, 1000), 1e-5) == pytest.approx(2.6477, abs=5e-5)
    for m, r, v, delta, value in (
        (1000, 1000, 750, 1e-5, 0.976367),
        (1000, 100, 100, 1e-5, 3.465376),
        (1000, 100, 95, 0.0, 2.172434),
    ):
        found = one_run_epsilon(canaries=m, guesses=r, correct=v, delta=delta)
        assert found == pytest.approx(value, abs=5e-7)


# All errors together certify more than both kinds apart, unless one kind is rare.
@pytest.mark.parametrize(
    ("errors", "apart", "certified"),
    [
        (Errors(0, 0, 1000, 1000), 5.360, 5.916),
        (Errors(50, 60, 1000, 1000), 2.940, 3.037),
        (Errors(400, 410, 1000, 1000), 0.321, 0.384),
        (Errors(0, 500, 1000, 1000), 2.601, 2.401),
    ],
)
def test_all_errors_together_certify_more(errors: Errors, apart: float, certified: float) -> None:
    assert mu_lower(errors) == pytest.approx(apart, abs=1e-3)
    assert mu_certified(errors) == pytest.approx(certified, abs=1e-3)


@pytest.mark.parametrize("level", [0.001, 0.05])
@pytest.mark.parametrize("mu", [0.27, 1.0, 3.0])
@pytest.mark.parametrize(("negatives", "positives"), [(20, 20), (150, 150), (30, 300), (1, 60)])
def test_no_threshold_makes_a_mechanism_exceed_its_mu_more_often_than_the_level_says(
    negatives: int, positives: int, mu: float, level: float
) -> None:
    """Every outcome of a Gaussian mechanism, with its probability, at good thresholds and at bad ones."""

    def fewest(a: int) -> int:
        """With so many errors of world 1 the bound is no longer above mu; more errors never raise it."""
        errors = range(positives + 1)
        return bisect.bisect(
            errors, 0, key=lambda b: mu_certified(Errors(a, b, negatives, positives), level) <= mu
        )

    enough = np.array([fewest(a) for a in range(negatives + 1)])
    for threshold in (mu / 2 + math.log(negatives / positives) / mu, mu / 2, 0.0, mu, -2.0):
        p = stats.binom.pmf(np.arange(negatives + 1), negatives, stats.norm.sf(threshold))
        above = p @ stats.binom.cdf(enough - 1, positives, stats.norm.cdf(threshold - mu))
        assert above <= level


def test_the_delta_term_counts() -> None:
    without = one_run_epsilon(canaries=1000, guesses=100, correct=95, delta=0.0)
    assert one_run_epsilon(canaries=1000, guesses=100, correct=95, delta=1e-5) < without
    assert one_run_epsilon(canaries=1000, guesses=100, correct=95, delta=1e-2) == 0.0


def test_infinite_mu_allows_everything() -> None:
    assert balanced_accuracy_ceiling(math.inf) == 1.0
    assert balanced_accuracy_ceiling(0.0) == 0.5


def test_epsilon_of_a_lower_bound_is_not_above_the_truth() -> None:
    # Exact value for mu = 1, delta = 1e-5 to 13 digits: 4.3771780956812.
    assert 4.3771780956812 * (1 - 2e-9) < epsilon_of(1.0, 1e-5) < 4.3771780956812
    assert epsilon_of(0.0, 1e-5) == 0.0


@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e-5, 0.1]),
)
def test_bounds_are_never_better_than_the_plain_estimate(
    negatives: int, positives: int, a: float, b: float, delta: float
) -> None:
    errors = Errors(round(a * negatives), round(b * positives), negatives, positives)
    alpha, beta = errors.bounds()
    assert alpha >= errors.false_positives / negatives and beta >= errors.false_negatives / positives
    assert 0 <= mu_lower(errors) < 12 and 0 <= epsilon_lower(errors, delta) < 12
    more = Errors(min(errors.false_positives + 1, negatives), *errors[1:])
    assert mu_lower(more) <= mu_lower(errors)


@given(st.integers(1, 300), st.floats(0, 1))
def test_proportion_contains_its_value(trials: int, share: float) -> None:
    value, low, high = proportion(round(share * trials), trials)
    assert 0 <= low <= value <= high <= 1


def test_clopper_pearson_covers() -> None:
    """Exact coverage at every probability of a grid: the definition, not a simulation."""
    from scipy.stats import binom

    trials = 30
    bounds = np.array([upper_bound(k, trials) for k in range(trials + 1)])
    for p in np.linspace(0.001, 0.999, 200):
        missed = binom.pmf(np.arange(trials + 1), trials, p)[bounds < p].sum()
        assert missed <= 0.025 + 1e-12


def test_impossible_counts_are_refused() -> None:
    for events, trials in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(AttackError):
            upper_bound(events, trials)
    with pytest.raises(AttackError):
        one_run_epsilon(canaries=10, guesses=11, correct=5, delta=0.0)
    with pytest.raises(AttackError):
        one_run_epsilon(canaries=10, guesses=5, correct=6, delta=0.0)


class TestAUC:
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.lists(st.integers(0, 6), min_size=1))
    def test_equals_the_definition(self, positives: list[int], negatives: list[int]) -> None:
        pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
        value, low, high = auc(positives, negatives)
        assert value == pytest.approx(np.mean(pairs), abs=1e-12)
        assert 0 <= low <= value <= high <= 1

    def test_variance_is_delongs(self) -> None:
        rng = np.random.default_rng(5)
        positives, negatives = rng.normal(0.8, 1, 60), rng.normal(0, 1, 90)
        table = (positives[:, None] > negatives) + 0.5 * (positives[:, None] == negatives)
        variance = table.mean(1).var(ddof=1) / 60 + table.mean(0).var(ddof=1) / 90
        value, low, high = auc(positives, negatives)
        centre = math.log(value / (1 - value))
        half = 1.959963984540054 * math.sqrt(variance) / (value * (1 - value))
        assert math.log(low / (1 - low)) == pytest.approx(centre - half)
        assert math.log(high / (1 - high)) == pytest.approx(centre + half)

    def test_interval_covers_the_true_area(self) -> None:
        rng = np.random.default_rng(11)
        truth, misses, rounds = float(ndtr(1.5 / math.sqrt(2))), 0, 400
        for _ in range(rounds):
            _, low, high = auc(rng.normal(1.5, 1, 40), rng.normal(0, 1, 60))
            misses += not low <= truth <= high
        # At 5 % true misses P[Bin(400, .05) > 44] < 1e-6; the seed is fixed besides.
        assert misses <= 44

    def test_perfect_separation_is_not_certain(self) -> None:
        value, low, high = auc(np.arange(10) + 100.0, np.arange(30))
        assert value == high == 1.0 and low == pytest.approx(0.025 ** (1 / 10))
        assert auc([0.0, 1.0], [2.0, 3.0]).value == 0.0

    def test_useless_scores(self) -> None:
        assert auc(np.zeros(50), np.zeros(50)).value == 0.5
        with pytest.raises(AttackError):
            auc([], [1.0])
        with pytest.raises(AttackError):
            auc([math.nan], [1.0])


class TestRates:
    def test_only_resolvable_rates(self) -> None:
        assert smallest_rate(1000) == 0.01
        with pytest.raises(AttackError, match="cannot be resolved by 999 non-members"):
            tpr_at(0.01, np.ones(5), np.zeros(999))
        assert tpr_at(0.01, np.ones(5), np.zeros(1000)).value == 1.0

    def test_false_positives_never_exceed_the_rate(self) -> None:
        others = np.repeat(np.arange(100.0), 10)  # ties at every value
        for fpr in (0.01, 0.025, 0.1, 0.5, 1.0):
            members = np.arange(-1, 100.0)
            found = round(tpr_at(fpr, members, others).value * len(members))
            threshold = members[len(members) - found] if found else math.inf
            assert (others >= threshold).mean() <= fpr + 1e-12


class TestMean:
    def test_student_interval(self) -> None:
        value, low, high = mean([1.0, 2.0, 3.0, 4.0])
        half = 3.182446305284263 * math.sqrt(5 / 3) / 2  # t quantile of 3 degrees of freedom
        assert (value, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))

    def test_range(self) -> None:
        assert mean([0.0, 0.0, 9.0], low=0.0).low == 0.0
        assert mean([3.0], low=0.0) == (3.0, 0.0, math.inf)
        with pytest.raises(AttackError):
            mean([1.0, math.inf])


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.floats(0.5, 1), st.floats(0.1, 1))
def test_one_run_is_monotone(canaries: int, share: float, guessed: float) -> None:
    guesses = max(1, round(guessed * canaries))
    correct = round(share * guesses)
    found = one_run_epsilon(canaries=canaries, guesses=guesses, correct=correct, delta=1e-6)
    if correct < guesses:
        more = one_run_epsilon(canaries=canaries, guesses=guesses, correct=correct + 1, delta=1e-6)
        assert more >= found - 1e-12


def test_statistics_load_no_torch() -> None:
    code = "import sys, securevfl.attacks.statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("mu", "trials"), [(0.5, 10_000), (1.0, 2_700), (2.0, 920), (4.0, 740)])
def test_what_trials_would_notice_agrees_with_known_numbers_of_trials(mu: float, trials: int) -> None:
    assert noticed_mu(trials, trials, 0.9 * mu) == pytest.approx(mu, rel=0.03)
    assert noticed_mu(trials // 4, trials // 4, 0.9 * mu) > 1.04 * mu
    assert noticed_mu(10, 10, 4.0) == math.inf, "ten trials certify no mu of 4"
