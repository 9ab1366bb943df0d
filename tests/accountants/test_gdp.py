"""The closed form against mpmath, and its rounding toward privacy."""

import json
import math
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.accountants import compose_mu, gdp_delta, gdp_epsilon, gdp_mu
from securevfl.errors import AccountingError

CASES = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))["cases"]
few = settings(max_examples=60, deadline=None)
mus = st.floats(-4, 2.7).map(lambda x: 10.0**x)
deltas = st.floats(-15, -2).map(lambda x: 10.0**x)


def exact_delta(mu, epsilon):
    # exp(epsilon) enlarges the second term's relative error by exp(epsilon): digits to match.
    with mp.workdps(60):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "gdp-delta"])
def test_delta_vectors(case):
    found = gdp_delta(case["mu"], case["epsilon"])
    # 64 roundings on the argument, which is of size mu/2 + epsilon/mu: below 1e-9 for mu = 400.
    assert case["value"] * (1 - 1e-15) <= found <= case["value"] * (1 + 1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "gdp-epsilon"])
def test_epsilon_vectors(case):
    found = gdp_epsilon(case["mu"], case["delta"])
    assert case["value"] * (1 - 1e-15) <= found <= case["value"] * (1 + 1e-11)


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "gdp-mu"])
def test_mu_vectors(case):
    found = gdp_mu(case["epsilon"], case["delta"])
    assert case["value"] * (1 - 1e-9) <= found <= case["value"] * (1 + 1e-15)


def test_the_published_table():
    table = {0.1: 0.34066936468433, 0.5: 1.9930914044151, 1: 4.3771780956812, 2: 9.9972561464343}
    for mu, epsilon in table.items():
        assert gdp_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=1e-9)
    assert gdp_delta(1, 1) == pytest.approx(0.1269367375066439, abs=1e-12)
    assert gdp_delta(0.1, 0.5) == pytest.approx(6.856582455838727e-9, rel=1e-8)
    assert gdp_mu(1, 1e-5) == pytest.approx(0.268051123211, abs=1e-9)
    assert gdp_mu(8, 1e-5) == pytest.approx(1.66603059785, abs=1e-9)


@few
@given(mus, st.floats(-3, 9))
def test_delta_is_never_below_the_truth(mu, z):
    epsilon = max(0.0, mu * mu / 2 + mu * z)
    truth, found = exact_delta(mu, epsilon), gdp_delta(mu, epsilon)
    assert found >= truth
    # Cancellation between two nearly equal terms costs a factor of about (1 + |z|)^2 / mu roundings.
    assert found <= truth * (1 + 1e-11 * (1 + z * z) * (1 + 1 / mu + mu))


@few
@given(mus, deltas)
def test_epsilon_meets_delta_and_is_tight(mu, delta):
    epsilon = gdp_epsilon(mu, delta)
    assert exact_delta(mu, epsilon) <= delta
    if epsilon:
        assert exact_delta(mu, epsilon * (1 - 1e-7)) > delta


@few
@given(st.floats(-3, 5).map(lambda x: 10.0**x), deltas)
def test_mu_meets_the_promise_and_is_tight(epsilon, delta):
    mu = gdp_mu(epsilon, delta)
    assert exact_delta(mu, epsilon) <= delta
    assert exact_delta(mu * (1 + 1e-7), epsilon) > delta
    assert gdp_epsilon(mu, delta) <= epsilon


@few
@given(mus, deltas, st.floats(1.001, 3))
def test_monotone(mu, delta, factor):
    assert gdp_epsilon(mu * factor, delta) >= gdp_epsilon(mu, delta)
    assert gdp_epsilon(mu, min(1.0, delta * factor)) <= gdp_epsilon(mu, delta)


@pytest.mark.parametrize("mu", [1e-300, 1e-12, 1e8, 1e15, 1e100, 1e160, 1e300])
def test_extreme_mu_stays_sound(mu):
    for delta in (1e-2, 1e-15):
        epsilon = gdp_epsilon(mu, delta)
        assert epsilon >= 0
        if mu > 1:
            # Phi(mu/2 - epsilon/mu) > delta below mu^2/2, whatever the tail.
            assert epsilon >= mu / 2 * mu


def test_edges():
    assert gdp_epsilon(0, 1e-5) == gdp_epsilon(1, 1) == gdp_delta(0, 0) == 0
    assert gdp_epsilon(math.inf, 1e-5) == gdp_epsilon(1, 0) == math.inf
    assert gdp_delta(math.inf, 5) == 1
    assert gdp_delta(1, math.inf) == 0
    assert gdp_mu(math.inf, 0.1) == gdp_mu(1, 1) == math.inf
    assert gdp_mu(1, 0) == 0
    assert gdp_delta(1e-3, 1e5) > 0


@pytest.mark.parametrize("bad", [-1, math.nan, "1", None, True, 1j])
def test_refuses_bad_input(bad):
    for call in (lambda: gdp_delta(bad, 1), lambda: gdp_delta(1, bad), lambda: gdp_mu(bad, 1e-5)):
        with pytest.raises(AccountingError):
            call()
    with pytest.raises(AccountingError):
        gdp_epsilon(1, bad)


def test_composition():
    assert compose_mu([]) == 0
    assert compose_mu([3, 4]) == 5
    assert compose_mu([1.0], [25]) == 5
    assert compose_mu(np.array([1e200, 1e200])) == pytest.approx(math.sqrt(2) * 1e200)
    assert compose_mu([1e-200] * 4) == pytest.approx(2e-200)
    assert compose_mu([math.inf, 1], [0, 4]) == 2
    assert compose_mu([math.inf, 1]) == math.inf
    assert compose_mu(x for x in (3, 4)) == 5


@pytest.mark.parametrize(
    ("mus", "counts"),
    [([1, 2], [1]), ([-1], None), ([math.nan], None), ([[1]], None), (["a"], None), (3, None)],
)
def test_composition_refuses(mus, counts):
    with pytest.raises(AccountingError):
        compose_mu(mus, counts)
