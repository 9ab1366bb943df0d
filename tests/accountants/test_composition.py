"""The loss distributions against exact integrals and dp-accounting's two-sided estimates."""

import math

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from securevfl.accountants import gdp_delta, gdp_epsilon
from securevfl.accountants.composition import compose
from securevfl.accountants.pairs import GridLoss, ResponsePair, SampledGaussianPair
from securevfl.errors import AccountingError

few = settings(max_examples=10, deadline=None)


def pair(spread, rate, direction="remove"):
    return SampledGaussianPair(spread=spread, rate=rate, direction=direction)


def exact_single(spread, rate, epsilon, direction):
    """Delta of one sampled release, in closed form: P[L > e] - exp(e) Q[L > e]."""
    s, q, e = mp.mpf(spread), mp.mpf(rate), mp.mpf(epsilon)
    if direction == "remove":
        if mp.exp(e) <= 1 - q:
            return 1 - mp.exp(e)
        x = s**2 * mp.log((mp.exp(e) - 1 + q) / q) + mp.mpf(1) / 2
        tail = mp.ncdf(-x / s)
        return (1 - q - mp.exp(e)) * tail + q * mp.ncdf((1 - x) / s)
    if mp.exp(-e) <= 1 - q:
        return mp.mpf(0)
    x = s**2 * mp.log((mp.exp(-e) - 1 + q) / q) + mp.mpf(1) / 2
    return mp.ncdf(x / s) * (1 - mp.exp(e) * (1 - q)) - mp.exp(e) * q * mp.ncdf((x - 1) / s)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("spread", "rate", "epsilon"), [(1.0, 0.01, 0.2), (0.5, 0.2, 8.0), (2.0, 0.5, 1.5)])
def test_one_release_is_exact(direction, spread, rate, epsilon):
    with mp.workdps(50):
        truth = float(exact_single(spread, rate, epsilon, direction))
    found = compose([pair(spread, rate, direction)], [1]).delta(epsilon)
    assert truth * (1 - 1e-12) <= found <= truth * (1 + 1e-4) + 1e-16


@pytest.mark.parametrize(("spread", "rate", "epsilon"), [(1.0, 0.1, 9.0), (0.7, 0.05, 13.0)])
def test_two_releases_are_exact_at_tiny_delta(spread, rate, epsilon):
    """E over the first outcome of the second's delta; values near 1e-13, where plain transforms fail."""
    with mp.workdps(25):
        s, q = mp.mpf(spread), mp.mpf(rate)

        def integrand(x):
            density = (1 - q) * mp.npdf(x, 0, s) + q * mp.npdf(x, 1, s)
            loss = mp.log(1 - q + q * mp.exp((x - mp.mpf(1) / 2) / s**2))
            return density * exact_single(s, q, epsilon - loss, "remove")

        truth = float(mp.quad(integrand, mp.linspace(-10 * s, 1 + 14 * s, 16)))
    assert truth < 1e-9
    found = compose([pair(spread, rate)], [2]).delta(epsilon)
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 1e-3)


@few
@given(st.floats(-1.5, 2), st.integers(1, 10**6), st.floats(-15, -2))
def test_plain_gaussians_match_the_closed_form(exponent, count, log_delta):
    mu, delta = 10.0**exponent, 10.0**log_delta
    truth = gdp_epsilon(mu, delta)
    found = compose([pair(math.sqrt(count) / mu, 1.0)], [count]).epsilon(delta)
    # Above the truth, whose own rounding is below 1e-10; the grid adds at most 1/5400 to the variance.
    assert found >= truth * (1 - 1e-10)
    assert found <= truth * (1 + 4e-4) + 1e-3 * mu


@few
@given(st.floats(-1.5, 1.5), st.integers(1, 1000), st.floats(-4, 6))
def test_plain_deltas_match_the_closed_form(exponent, count, z):
    mu = 10.0**exponent
    epsilon = max(0.0, mu * mu / 2 + z * mu)
    truth = gdp_delta(mu, epsilon)
    found = compose([pair(math.sqrt(count) / mu, 1.0)], [count]).delta(epsilon)
    # The variance grows by at most 1/5400, which moves the tail at z by a factor of exp(z^2 / 5400).
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 0.01) + 1e-12


@few
@given(
    st.floats(0.4, 4),
    st.floats(-3, -0.4),
    st.integers(1, 3000),
    st.sampled_from(["remove", "add", "replace"]),
)
def test_between_the_references_two_estimates(spread, log_rate, count, direction):
    rate = 10.0**log_rate
    found = compose([pair(spread, rate, direction)], [count]).epsilon(1e-5)
    # Near 745 the reference's exp(-loss) underflows: it then takes P[loss > epsilon] for delta, and both of
    # its estimates come out about 1 too large.
    assume(found < 600)
    kind = reference.privacy_loss_mechanism.AdjacencyType[direction.upper()]
    optimistic, pessimistic = (
        _reference_epsilon(spread, rate, count, kind, pessimistic_estimate=side) for side in (False, True)
    )
    assert optimistic <= found * (1 + 1e-9)
    assert found <= max(pessimistic, 0.0) + 1e-3 + 1e-3 * pessimistic


def _reference_epsilon(spread, rate, count, kind, *, pessimistic_estimate):
    loss = reference.privacy_loss_mechanism.GaussianPrivacyLoss(
        spread, sampling_prob=rate, adjacency_type=kind, pessimistic_estimate=pessimistic_estimate
    )
    pmf = reference._create_pld_pmf_from_monotone_privacy_loss(
        loss,
        pessimistic_estimate=pessimistic_estimate,
        value_discretization_interval=1e-3,
        use_connect_dots=pessimistic_estimate,
    )
    return pmf.self_compose(count).get_epsilon_for_delta(1e-5)


def test_different_pairs_compose():
    """A Gaussian in two halves is a Gaussian."""
    halves = compose([pair(2.0, 1.0), pair(3.0, 1.0)], [3, 5])
    mu = math.sqrt(3 / 4 + 5 / 9)
    assert halves.epsilon(1e-6) == pytest.approx(gdp_epsilon(mu, 1e-6), rel=1e-5)
    assert halves.delta(2.0) == pytest.approx(gdp_delta(mu, 2.0), rel=1e-5)


def test_randomised_response_composes_binomially():
    """Delta of n binary responses is a sum over the binomial number of flips."""
    epsilon, count, target = 0.8, 12, 3.0
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    likely = [keep ** (count - k) * (1 - keep) ** k for k in range(count + 1)]
    gains = [max(0.0, a - math.exp(target) * b) for a, b in zip(likely, likely[::-1], strict=True)]
    truth = sum(math.comb(count, k) * gain for k, gain in enumerate(gains))
    found = compose([ResponsePair(epsilon=epsilon, keep=keep, classes=2)], [count]).delta(target)
    assert truth * (1 - 1e-12) <= found <= truth * (1 + 1e-3)


def test_a_small_grid_is_widened_and_stays_sound():
    fine = compose([pair(1.0, 0.05)], [500])
    coarse = compose([pair(1.0, 0.05)], [500], cells=500)
    assert coarse.widened and not fine.widened
    assert coarse.epsilon(1e-5) >= fine.epsilon(1e-5)


def test_both_directions_mirror_without_sampling():
    remove, add = (compose([pair(3.0, 1.0, direction)], [7]) for direction in ("remove", "add"))
    assert remove.epsilon(1e-5) == pytest.approx(add.epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("spread", "rate"), [(0.3, 0.2), (1.0, 0.01), (5.0, 1e-4), (2.0, 1.0)])
def test_outcome_inverts_loss(direction, spread, rate):
    chosen = pair(spread, rate, direction)
    outcomes = np.linspace(-3 * spread, 1 + 3 * spread, 41)
    losses = chosen.loss(outcomes)
    # A loss near log(1-q) hardly depends on the outcome; there the inverse is ill-conditioned by 1/slope.
    slope = np.gradient(losses, outcomes)
    keeps = slope > 1e-6
    assert np.allclose(chosen.outcome(losses)[keeps], outcomes[keeps], atol=1e-8)


def test_loss_of_wrong_total_mass_is_refused():
    with pytest.raises(AccountingError, match="total mass"):
        GridLoss.of(step=0.1, first=0, mass=np.array([0.5, 0.4]), infinite=0.0)
