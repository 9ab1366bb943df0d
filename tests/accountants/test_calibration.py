"""Calibration meets the promise, and a little less noise does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.accountants import (
    GaussianRelease,
    best_upper_bound,
    calibrate_sigma,
    gdp_epsilon,
    gdp_mu,
    max_releases,
    party_sigma,
    rounded_sensitivity,
    sealed_mu,
    sealed_sensitivity,
    sealed_sigma,
)
from securevfl.errors import AccountingError, AmplificationRefused

few = settings(max_examples=60, deadline=None)
epsilons = st.floats(-3, 5).map(lambda x: 10.0**x)
deltas = st.floats(-15, -2).map(lambda x: 10.0**x)


def figure(sigma, releases, reach, delta):
    event = GaussianRelease(sigma=sigma, sensitivity=reach, count=releases, adjacency="replace-one")
    return best_upper_bound(event, delta).epsilon


@few
@given(epsilons, deltas, st.integers(1, 10**7), st.floats(0.01, 100))
def test_calibrated_noise_meets_the_target_and_less_does_not(epsilon, delta, releases, clip):
    sigma = calibrate_sigma(epsilon=epsilon, delta=delta, releases=releases, mode="frozen", clip=clip)
    assert figure(sigma, releases, 2 * clip, delta) <= epsilon
    assert figure(0.999 * sigma, releases, 2 * clip, delta) > epsilon


@few
@given(epsilons, deltas, st.floats(0.5, 1000))
def test_max_releases_is_the_last_that_fits(epsilon, delta, sigma):
    fits = max_releases(epsilon=epsilon, delta=delta, sigma=sigma, mode="strict", clip=1.0)
    if fits:
        assert figure(sigma, fits, 2.0, delta) <= epsilon
    # Counts above 1e13 differ by less than a float can show in mu.
    if fits < 1e12:
        assert figure(sigma, fits + 1, 2.0, delta) > epsilon


def test_reference_costs():
    """Epsilon 8 at delta 1e-5, C = 1, 20 epochs over 10,000 records."""
    promise = {"epsilon": 8, "delta": 1e-5, "clip": 1.0}
    assert calibrate_sigma(releases=1, mode="frozen", **promise) == pytest.approx(1.20, abs=0.005)
    assert calibrate_sigma(releases=20, mode="frozen", **promise) == pytest.approx(5.37, abs=0.005)
    assert calibrate_sigma(releases=200_000, mode="strict", **promise) == pytest.approx(537, abs=0.5)


def test_updates_take_their_part_of_the_budget():
    sigma = calibrate_sigma(
        epsilon=8,
        delta=1e-5,
        releases=5,
        mode="dp-encoder",
        clip=1.0,
        updates=20,
        gradient_clip=1.0,
        gradient_sigma=10.0,
    )
    mu = math.sqrt(5 * (2 / sigma) ** 2 + 20 * (2 / 10) ** 2)
    assert gdp_epsilon(mu, 1e-5) <= 8
    assert mu == pytest.approx(gdp_mu(8, 1e-5), rel=1e-8)
    with pytest.raises(AccountingError, match="updates alone"):
        calibrate_sigma(
            epsilon=1,
            delta=1e-5,
            releases=5,
            mode="dp-encoder",
            clip=1.0,
            updates=99,
            gradient_clip=1.0,
            gradient_sigma=1.0,
        )


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_hidden_samples_need_less_noise(adjacency):
    common = {"epsilon": 2.0, "delta": 1e-5, "releases": 300, "clip": 1.0, "adjacency": adjacency}
    sigma = calibrate_sigma(**common, sampling_rate=0.02, ids_visible=False)
    reach = 2.0 if adjacency == "replace-one" else 1.0
    hidden = {"sampling_rate": 0.02, "ids_visible": False, "adjacency": adjacency, "count": 300}

    def epsilon(noise):
        return best_upper_bound(GaussianRelease(sigma=noise, sensitivity=reach, **hidden), 1e-5).epsilon

    assert epsilon(sigma) <= 2.0 < epsilon(0.999 * sigma)
    assert sigma < 0.2 * calibrate_sigma(**common)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    ("epsilon", "delta", "releases", "rate"),
    [(1e-3, 1e-2, 1000, 0.01), (1e-3, 1e-15, 1, 0.5), (0.3, 1e-12, 10**5, 1e-3), (200.0, 1e-2, 10, 0.99)],
)
def test_hidden_samples_far_from_the_central_limit(adjacency, epsilon, delta, releases, rate):
    hidden = {"sampling_rate": rate, "ids_visible": False, "adjacency": adjacency}
    sigma = calibrate_sigma(epsilon=epsilon, delta=delta, releases=releases, sensitivity=1.0, **hidden)

    def figure(noise):
        event = GaussianRelease(sigma=noise, sensitivity=1.0, count=releases, **hidden)
        return best_upper_bound(event, delta).epsilon

    assert figure(sigma) <= epsilon < figure(0.999 * sigma)


def test_visible_samples_are_refused():
    with pytest.raises(AmplificationRefused):
        calibrate_sigma(epsilon=1, delta=1e-5, releases=5, clip=1.0, sampling_rate=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"epsilon": 0},
        {"epsilon": math.inf},
        {"delta": 0},
        {"delta": 1},
        {"releases": 0},
        {"releases": 2.5},
        {"clip": 0},
        {"clip": None},
        {"sensitivity": 1.0},
        {"mode": "none"},
        {"mode": "relaxed"},
        {"mode": "sealed"},
        {"updates": 3},
        {"adjacency": "x"},
    ],
)
def test_refuses_bad_input(fields):
    with pytest.raises(AccountingError):
        calibrate_sigma(
            **{"epsilon": 1.0, "delta": 1e-5, "releases": 3, "clip": 1.0, "mode": "strict", **fields}
        )


def test_no_release_fits_a_spent_budget():
    assert max_releases(epsilon=0.1, delta=1e-9, sigma=0.1, clip=1.0) == 0
    spent = {"updates": 99, "gradient_clip": 1.0, "gradient_sigma": 1.0, "mode": "dp-encoder"}
    assert max_releases(epsilon=1, delta=1e-5, sigma=5.0, clip=1.0, **spent) == 0


@pytest.mark.parametrize(("parties", "colluders", "factor"), [(4, 1, 1.155), (8, 4, 1.414)])
def test_secure_sum_split_covers_colluders(parties, colluders, factor):
    share = party_sigma(sigma=3.0, parties=parties, colluders=colluders)
    honest = math.sqrt(parties - colluders) * share
    assert honest == pytest.approx(3.0)
    # Splitting over all parties would have left the honest ones this factor short.
    assert honest / (3.0 / math.sqrt(parties) * math.sqrt(parties - colluders)) == pytest.approx(
        factor, abs=1e-3
    )
    with pytest.raises(AccountingError, match="colluders"):
        party_sigma(sigma=1.0, parties=3, colluders=3)


def test_rounding_enlarges_the_sensitivity():
    assert rounded_sensitivity(clip=1.0, fraction_bits=10, dimension=16) == 2 * 1024 + 4


def test_sealed_sensitivities_of_three_parties():
    assert sealed_sensitivity([1, 1, 1]) == pytest.approx(2.0064, abs=1e-4)
    assert sealed_sensitivity([1, 1, 1], protects="label") == pytest.approx(1.7321, abs=1e-4)
    assert sealed_sensitivity([1, 1, 1], protects="person") == pytest.approx(3.4753, abs=1e-4)
    assert sealed_sensitivity([1, 3], party=0) == pytest.approx(1.00644 * math.sqrt(10))
    assert sealed_sensitivity([1, 3], party=1) == sealed_sensitivity([1, 3]) == pytest.approx(2 * 1.00322 * 3)


@pytest.mark.parametrize(
    ("epsilon", "features", "person"),
    [(0.5, 126.19, 218.57), (1, 66.95, 115.96), (2, 35.78, 61.97), (8, 10.77, 18.66)],
)
def test_sealed_reference_noise(epsilon, features, person):
    for protects, expected in (("features", features), ("person", person)):
        reach = sealed_sensitivity([1, 1, 1], protects=protects)
        sigma = calibrate_sigma(epsilon=epsilon, delta=1e-5, releases=80, mode="sealed", sensitivity=reach)
        assert sigma == pytest.approx(expected, abs=0.006)
        assert gdp_epsilon(sealed_mu(sensitivity=reach, sigma=sigma, iterations=80), 1e-5) <= epsilon
        assert sealed_sigma(sensitivity=reach, mu=gdp_mu(epsilon, 1e-5), iterations=80) == pytest.approx(
            sigma
        )


@pytest.mark.parametrize(
    ("clips", "fields"),
    [([], {}), ([0], {}), ([1], {"protects": "all"}), ([1, 1], {"party": 2}), ([1], {"party": -1})],
)
def test_sealed_refuses(clips, fields):
    with pytest.raises(AccountingError):
        sealed_sensitivity(clips, **fields)
