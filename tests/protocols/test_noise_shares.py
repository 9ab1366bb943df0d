"""Distributed noise: calibration, figures for accountants, and noisy sums. Fixed keys where it is random."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sum_conformance import SumConformance

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols import (
    BFVSum,
    CKKSSum,
    DistributedNoise,
    Driver,
    FixedPoint,
    NoisySum,
    PairwiseMaskSum,
    PlainTreeSum,
    TwoTreeSum,
    run_round,
    run_setup,
)
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.noise import TAIL, convolution_gap
from securevfl.protocols.sums.pairwise import MaskedInput

ALARM = 1e-6


class TestNoisyTwoTreeSum(SumConformance):
    sigma = 1e-3
    exhaustive_workers = (3,)

    def make(self, workers):
        return NoisySum(TwoTreeSum(workers=workers), sigma=self.sigma)

    def check(self, protocol, values, result):
        """Ten standard deviations of the noise (2e-23 each), plus half a step of rounding per worker."""
        assert result.shape == np.shape(values[0])
        tolerance = 10 * protocol.noise.total_sigma + protocol.workers * protocol.fixed_point.resolution
        np.testing.assert_allclose(result, np.sum(values, axis=0), rtol=0, atol=tolerance)

    def test_many_rounds_and_attempts_on_one_setup(self):
        """A retry keeps its value here, so this differs from other sums."""
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        for number, attempt in [(0, 0), (5, 0), (5, 1), (2, 0), (2, 3)]:
            values = self.values(protocol, (4,), number)
            self.check(protocol, values, run_round(nodes, values, round=number, attempt=attempt))

    def may_send(self, protocol, other, envelope):
        return True  # senders are checked by the inner sum's own conformance test


@given(
    parties=st.integers(1, 200),
    colluders=st.integers(0, 199),
    sigma=st.floats(1e-6, 1e6),
    fraction_bits=st.integers(0, 32),
)
def test_share_std_is_the_least_that_suffices(parties, colluders, sigma, fraction_bits):
    colluders = min(colluders, parties - 1)
    ring = FixedPoint(bits=64, fraction_bits=fraction_bits)
    noise = DistributedNoise(parties=parties, colluders=colluders, sigma=sigma, fixed_point=ring)
    wanted = (Fraction(sigma) * 2**fraction_bits) ** 2 + 9
    assert noise.share_std**2 * noise.honest >= wanted
    assert (noise.share_std - 1) ** 2 * noise.honest < wanted
    assert noise.share_std >= 1
    exact = (Fraction(noise.share_std) ** 2 * noise.honest - 9) / Fraction(4) ** fraction_bits
    assert Fraction(noise.honest_sigma) ** 2 <= exact  # never claims more than there is
    assert noise.honest_sigma >= sigma * (1 - 1e-12)


@pytest.mark.parametrize(("parties", "colluders", "factor"), [(4, 1, 1.1547), (8, 4, 1.41421), (8, 0, 1.0)])
def test_price_of_collusion(parties, colluders, factor):
    noise = DistributedNoise(parties=parties, colluders=colluders, sigma=2.0)
    assert noise.total_sigma / 2.0 == pytest.approx(factor, rel=1e-4)


def test_sensitivity_covers_rounding():
    """Random neighbours at distance 2C, rounded as the ring rounds, never move farther than claimed."""
    draw = np.random.default_rng(0)
    for fraction_bits in (0, 3, 10):
        ring = FixedPoint(bits=64, fraction_bits=fraction_bits)
        noise = DistributedNoise(parties=3, colluders=1, sigma=1.0, fixed_point=ring)
        for dimension in (1, 5, 300):
            claimed = noise.sensitivity(2.0, dimension)
            assert claimed == pytest.approx(2 + np.sqrt(dimension) * 2.0**-fraction_bits, rel=1e-12)
            for _ in range(50):
                x, step = draw.normal(size=dimension) * 3, draw.normal(size=dimension)
                y = x + 2 * step / np.linalg.norm(step)
                moved = ring.decode(ring.encode(x)) - ring.decode(ring.encode(y))
                assert np.linalg.norm(moved) <= claimed
    with pytest.raises(InputError):
        noise.sensitivity(float("nan"), 3)


def convolved(std, count, reach):
    with mpmath.workdps(80):
        single = [mpmath.exp(-mpmath.mpf(k * k) / (2 * std * std)) for k in range(-reach, reach + 1)]
        norm = mpmath.fsum(single)
        single = [p / norm for p in single]
        total = single
        for _ in range(count - 1):
            out = [mpmath.mpf(0)] * (len(total) + len(single) - 1)
            for i, a in enumerate(total):
                for j, b in enumerate(single):
                    out[i + j] += a * b
            total = out
        return total


@pytest.mark.parametrize(("std", "count"), [(1, 2), (1, 3), (1, 5), (2, 2), (2, 3)])
def test_tau_bounds_the_gap_of_a_sum_of_discrete_gaussians(std, count):
    """Exact convolution at 80 digits against the discrete Gaussian of the same variance parameter.

    Single shares are cut at 26 std (relative weight exp(-338) = 1e-147), far below what is compared.
    """
    tau = convolution_gap(std, count)
    reach = 26 * std
    total = convolved(std, count, reach)
    centre = len(total) // 2
    with mpmath.workdps(80):
        variance = mpmath.mpf(count * std * std)
        span = range(-6 * std, 6 * std + 1)
        wide = range(-40 * std * count, 40 * std * count + 1)
        norm = mpmath.fsum(mpmath.exp(-mpmath.mpf(k * k) / (2 * variance)) for k in wide)
        gaps = [abs(mpmath.log(total[centre + k] * norm) + mpmath.mpf(k * k) / (2 * variance)) for k in span]
        assert max(gaps) <= tau / 2
        if count == 2:  # the first term is the true rate, so that the bound could fail
            assert max(gaps) > tau / 100


def test_gap_figures():
    assert convolution_gap(2, 8) == pytest.approx(7e-17, rel=0.05)
    with mpmath.workdps(30):
        exact = 10 * mpmath.fsum(mpmath.exp(-2 * mpmath.pi**2 * mpmath.mpf(k) / (k + 1)) for k in range(1, 5))
    assert exact <= convolution_gap(1, 5) <= exact * (1 + 1e-12)
    large = DistributedNoise(parties=8, colluders=1, sigma=5.0)
    assert 0 < large.tau < 1e-300  # rounded up from an underflow, never to zero
    assert DistributedNoise(parties=3, colluders=2, sigma=5.0).tau == 0.0
    assert large.slack(10) == 10 * (large.tau + 1e-76)


def discrete_delta(std, count, shift, epsilons):
    """Exact hockey-stick divergences of a sum of `count` discrete Gaussians from its shifted copy."""
    reach = 40 * std * count + shift
    support = np.arange(-reach, reach + 1).astype(float)
    single = np.exp(-(support**2) / (2 * std**2))
    single /= single.sum()
    total = single
    for _ in range(count - 1):
        total = np.convolve(total, single, mode="same")
    moved = np.zeros_like(total)
    moved[shift:] = total[:-shift]
    return np.array([np.maximum(moved - np.exp(epsilon) * total, 0).sum() for epsilon in epsilons])


def gaussian_delta(mu, epsilons):
    tail = stats.norm.cdf
    return tail(-epsilons / mu + mu / 2) - np.exp(epsilons) * tail(-epsilons / mu - mu / 2)


@pytest.mark.parametrize("colluders", [0, 1, 2])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 10.0])
def test_shares_are_as_private_as_the_gaussian_they_claim(sigma, colluders):
    """The whole (epsilon, delta) curve; double sums of up to 1e4 terms carry errors below 1e-12."""
    noise = DistributedNoise(
        parties=3, colluders=colluders, sigma=sigma, fixed_point=FixedPoint(fraction_bits=0)
    )
    epsilons = np.linspace(0, 5, 41)
    for shift in (1, 2, 3, 7, 20):
        true = discrete_delta(noise.share_std, noise.honest, shift, epsilons)
        claimed = gaussian_delta(shift / noise.honest_sigma, epsilons - noise.slack(1))
        assert np.all(true <= claimed * np.exp(noise.slack(1) / 2) + 1e-12)


def test_the_discrete_std_itself_would_claim_too_much():
    epsilons = np.linspace(0, 5, 41)
    true, naive = discrete_delta(4, 1, 3, epsilons), gaussian_delta(3 / 4, epsilons)
    assert np.max(true / naive) > 1.05


def test_shares_have_their_distribution():
    noise = DistributedNoise(
        parties=4, colluders=1, sigma=3.0, fixed_point=FixedPoint(bits=32, fraction_bits=8)
    )
    stream = KeyStream(bytes(16))
    shares = [noise.share(100_000, stream) for _ in range(4)]
    assert all(share.dtype == np.uint32 for share in shares)
    honest = noise.fixed_point.decode(shares[0] + shares[1] + shares[2])
    # Relative standard error of a standard deviation from 1e5 values is 0.22 %; 1.1 % is five of them.
    assert abs(honest.std() / noise.honest_sigma - 1) < 0.011
    assert honest.std() > 3.0 * (1 - 0.011)
    assert stats.kstest(honest / noise.honest_sigma, "norm").pvalue > ALARM
    assert abs(np.corrcoef(shares[0].view(np.int32), shares[1].view(np.int32))[0, 1]) < 5 / np.sqrt(100_000)


@pytest.mark.parametrize(
    "inner",
    [TwoTreeSum(workers=4), BFVSum(workers=4), PairwiseMaskSum(workers=4, collusion=2)],
    ids=["two-tree", "bfv", "pairwise"],
)
def test_noise_on_the_total(inner):
    protocol = NoisySum(inner, sigma=0.5, colluders=2)
    values = [np.full(8_000, i - 1.0) for i in range(4)]
    noise = protocol.sum(values) - 2.0
    # Six standard errors, of the standard deviation 1 / sqrt(2 * 8000) each: alarms with P < 1e-8.
    assert abs(noise.std() / protocol.noise.total_sigma - 1) < 6 / np.sqrt(16_000)
    assert abs(noise.mean()) < 6 * protocol.noise.total_sigma / np.sqrt(8_000)


def test_a_dropped_worker_takes_its_noise_along():
    """Three of four shares are left, as many as one colluder would leave: count dropouts as colluders."""
    protocol = NoisySum(PairwiseMaskSum(workers=4, collusion=1, threshold=3), sigma=0.5, colluders=1)
    nodes = ready(protocol)
    size = 8_000
    machines = {a: node.round(np.zeros(size) if a >= 0 else None, round=0) for a, node in nodes.items()}
    driver = Driver(machines)
    driver.start()
    while not any(isinstance(envelope.message, MaskedInput) for envelope in driver.pending):
        driver.step()
    driver.drop(3)
    driver.run()
    noise = machines[protocol.receivers[0]].result()
    assert abs(noise.std() / protocol.noise.honest_sigma - 1) < 6 / np.sqrt(2 * size)


def ready(protocol):
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    return nodes


def test_a_retry_is_the_same_release():
    """Averaging retries must not wash the noise out."""
    protocol = NoisySum(TwoTreeSum(workers=4), sigma=1.0)
    nodes = ready(protocol)
    values = [np.arange(50.0)] * 4
    first = run_round(nodes, values, round=0)
    for attempt in range(1, 4):
        np.testing.assert_array_equal(run_round(nodes, values, round=0, attempt=attempt), first)
    assert np.all(run_round(nodes, values, round=1) != first)
    with pytest.raises(ProtocolError, match="another value"):
        nodes[0].round(values[0] + 1, round=0, attempt=9)
    nodes[0].round(values[0], round=0, attempt=9)
    nodes[0].retire(1)
    with pytest.raises(ProtocolError):
        nodes[0].round(values[0], round=0, attempt=10)


def test_ranges_leave_room_for_noise():
    protocol = NoisySum(BFVSum(workers=4, fixed_point=FixedPoint(fraction_bits=0)), sigma=1000.0)
    top = protocol.max_integer
    assert top == protocol.inner.max_integer - TAIL * protocol.noise.share_std
    np.testing.assert_allclose(
        protocol.sum([np.full(10, float(top))] * 4), 4.0 * top, rtol=0, atol=10 * protocol.noise.total_sigma
    )
    for bad in (top + 1, -top - 1):
        with pytest.raises(EncodingError, match="noise"):
            protocol.sum([np.full(10, float(bad))] * 4)


def test_unsuitable_sums_are_refused():
    for inner in (PlainTreeSum(workers=4), CKKSSum(workers=4)):
        with pytest.raises(InputError, match="cannot carry"):
            NoisySum(inner, sigma=1.0)
    with pytest.raises(InputError, match="own share"):
        NoisySum(TwoTreeSum(workers=4), sigma=1.0, colluders=0)
    NoisySum(BFVSum(workers=4, announce=False), sigma=1.0, colluders=0)
    with pytest.raises(InputError, match="no room"):
        NoisySum(BFVSum(workers=4), sigma=1e5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"parties": 0},
        {"colluders": 4},
        {"colluders": -1},
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"sigma": float("nan")},
        {"sigma": float("inf")},
        {"sigma": 1e9},
    ],
)
def test_bad_settings(wrong):
    with pytest.raises(InputError):
        DistributedNoise(**{"parties": 4, "colluders": 1, "sigma": 1.0, **wrong})
