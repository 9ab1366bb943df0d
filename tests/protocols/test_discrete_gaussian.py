"""The discrete Gaussian sampler against its own distribution. Streams have fixed keys: no false alarms."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from securevfl.errors import InputError
from securevfl.protocols.discrete_gaussian import (
    MAX_STD,
    DiscreteGaussian,
    _build_slices,
    bernoulli_exp,
    exp_bounds,
)
from securevfl.protocols.stream import KeyStream

ALARM = 1e-6


def stream(label: int) -> KeyStream:
    return KeyStream(label.to_bytes(16, "big"))


def pmf(std, reach):
    support = np.arange(-reach, reach + 1)
    weights = np.exp(-(support.astype(float) ** 2) / (2 * float(std) ** 2))
    return support, weights / weights.sum()


def assert_fits(samples, std):
    """Pearson's test, cells with fewer than 10 expected samples pooled into the two tails."""
    support, probability = pmf(std, int(40 * std) + 5)
    expected = probability * len(samples)
    inner = support[expected >= 10]
    clipped = np.clip(samples, inner[0] - 1, inner[-1] + 1)
    observed = np.bincount(clipped - (inner[0] - 1), minlength=len(inner) + 2)
    left, right = expected[support < inner[0]].sum(), expected[support > inner[-1]].sum()
    cells = np.concatenate([[left], expected[expected >= 10], [right]])
    keep = cells >= 1
    assert observed[~keep].sum() <= 20  # a Poisson count of mean below 2 exceeds 20 with probability < 1e-14
    statistic = ((observed[keep] - cells[keep]) ** 2 / cells[keep]).sum()
    assert statistic < stats.chi2.isf(ALARM, keep.sum() - 1)


@pytest.mark.parametrize("std", [Fraction(1, 3), Fraction(7, 10), 1, Fraction(5, 2), 8, 31, 32, 33, 50, 100])
def test_small_std_fits_the_distribution(std):
    assert_fits(DiscreteGaussian(std).sample(200_000, stream(1)), std)


def test_a_wrong_distribution_is_noticed():
    rounded = np.rint(np.random.default_rng(0).normal(0, 1, 200_000)).astype(np.int64)
    with pytest.raises(AssertionError):
        assert_fits(rounded, 1)


@pytest.mark.parametrize("std", [Fraction(2, 3), 3, 40])
def test_the_exact_path_alone_fits_the_distribution(std):
    """Six-bit words and an acceptance margin of one send nearly every decision to interval arithmetic."""
    sampler = DiscreteGaussian(std)
    sampler._word_bits = 6
    sampler._margin = 1.0
    assert_fits(sampler.sample(6_000, stream(2)), std)


def test_exact_path_agrees_with_the_vectorised_decisions():
    """Both paths read the same words until one needs more, so equal words give equal samples."""
    fast, exact = DiscreteGaussian(1000), DiscreteGaussian(1000)
    exact._margin = 1.0
    assert np.array_equal(fast.sample(4_000, stream(3)), exact.sample(4_000, stream(3)))


@pytest.mark.parametrize("std", [1 << 20, (1 << 42) * 7 // 3, 1 << 50, MAX_STD])
def test_large_std_moments_and_tail(std):
    count = 400_000
    z = DiscreteGaussian(std).sample(count, stream(4)) / float(std)
    limit = stats.norm.isf(ALARM / 2)
    assert abs(z.mean()) < limit / np.sqrt(count)
    assert abs((z**2).mean() - 1) < limit * np.sqrt(2 / count)  # Var z^2 = 2
    assert abs((z**4).mean() - 3) < limit * np.sqrt(96 / count)  # Var z^4 = 105 - 9
    for threshold in (0.1, 1.0, 3.0, 4.0):
        tail = stats.norm.sf(threshold)
        for side in (z, -z):
            hits = int((side > threshold).sum())
            assert stats.binom.ppf(ALARM, count, tail) <= hits <= stats.binom.isf(ALARM, count, tail)
    assert stats.kstest(z, "norm").pvalue > ALARM


@pytest.mark.parametrize("std", [1 << 50, 999_999_937])
def test_low_bits_and_sign_are_uniform(std):
    """At a large std the residue mod 16 is uniform up to exp(-2 pi^2 std^2 / 256): no coarse grid."""
    samples = DiscreteGaussian(std).sample(160_000, stream(5))
    low = np.bincount((samples % 16).astype(int), minlength=16)
    assert ((low - 10_000) ** 2 / 10_000).sum() < stats.chi2.isf(ALARM, 15)
    positive = int((samples > 0).sum())
    assert abs(positive - 80_000) < stats.norm.isf(ALARM / 2) * 200  # sqrt(160000) / 2


def test_slice_borders_carry_no_step():
    """Around each slice border the density is smooth: the counts left and right agree with the pmf."""
    std = 64  # slices of width 4
    assert_fits(DiscreteGaussian(std).sample(600_000, stream(6)), std)


@given(
    st.fractions(min_value=0, max_value=400, max_denominator=10**12),
    st.integers(min_value=8, max_value=300),
)
def test_exp_bounds_enclose_the_exponential_tightly(exponent, bits):
    low, high = exp_bounds(exponent, bits)
    with mpmath.workprec(bits + 800):
        exact = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * mpmath.mpf(2) ** bits
        assert low <= exact <= high
    assert high - low <= 2


@pytest.mark.parametrize("std", [Fraction(1, 5), 1, 17, 1000, 1 << 50])
@pytest.mark.parametrize("bits", [8, 64, 128])
def test_slice_thresholds_enclose_the_cumulative_weights(std, bits):
    sampler = DiscreteGaussian(std)
    slices = _build_slices(sampler._step, bits)
    with mpmath.workprec(bits + 200):
        step = mpmath.mpf(sampler._step.numerator) / sampler._step.denominator
        weights = [mpmath.exp(-step * k * k) for k in range(2 * len(slices.low) + 40)]
        total, cumulative = mpmath.fsum(weights), mpmath.mpf(0)
        for weight, low, high in zip(weights, slices.low, slices.high, strict=False):
            cumulative += weight
            assert low <= cumulative / total * mpmath.mpf(2) ** bits <= high
            assert high - low <= 2


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(5, 2), Fraction(8)])
def test_bernoulli_exp(exponent):
    count, source = 5_000, stream(7)
    hits = sum(bernoulli_exp(exponent, source) for _ in range(count))
    probability = float(np.exp(-float(exponent)))
    assert stats.binom.ppf(ALARM, count, probability) <= hits <= stats.binom.isf(ALARM, count, probability)


def test_bernoulli_exp_reads_further_words_on_a_tie():
    """The first 64 bits equal those of exp(-1), so only the next word can decide."""
    low, _ = exp_bounds(Fraction(1), 192)
    first, rest = low >> 128, low & (1 << 128) - 1

    class Words:
        def __init__(self, word):
            self.word = word

        def words(self, count):
            return np.array([self.word], dtype=np.uint64)

    assert bernoulli_exp(Fraction(1), Words((rest >> 64) - 1), first)
    assert not bernoulli_exp(Fraction(1), Words((rest >> 64) + 1), first)


@pytest.mark.parametrize("std", [0, -1, MAX_STD + 1, float("nan"), float("inf"), "x", None])
def test_impossible_std_is_refused(std):
    with pytest.raises(InputError):
        DiscreteGaussian(std)


def test_counts():
    sampler = DiscreteGaussian(3)
    assert sampler.sample(0, stream(8)).shape == (0,)
    assert sampler.sample(100_001, stream(8)).shape == (100_001,)
    with pytest.raises(InputError):
        sampler.sample(-1, stream(8))


def test_equal_streams_give_equal_samples_and_others_differ():
    sampler = DiscreteGaussian(1 << 40)
    first = sampler.sample(1_000, stream(9))
    assert np.array_equal(first, sampler.sample(1_000, stream(9)))
    assert not np.intersect1d(first, sampler.sample(1_000, stream(10))).size
