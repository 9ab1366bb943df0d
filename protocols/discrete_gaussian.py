"""Exact discrete Gaussian samples on the integers, vectorised.

P(y) is proportional to exp(-y^2 / (2 std^2)) for every integer y, exactly: not a rounded real Gaussian, no
cut tail. The sampler is a rejection sampler in slices. With a slice width W (a power of two),

    |y| = k W + j,   k >= 0 drawn with weight exp(-(k W)^2 / (2 std^2)),   j uniform on [0, W),
    accepted with probability exp(-j (2 k W + j) / (2 std^2)),

and a random sign, where minus zero is rejected. W is at most std / 16, so that hardly a proposal is lost.

Each random decision compares a uniform word with an irrational number. The vectorised code settles it only
where the word is farther from that number than a proven error bound; the few open cases draw further bits and
go through integer interval arithmetic until they are settled. So no decision rests on a rounded number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError
from securevfl.protocols.stream import KeyStream

WORD_BITS = 64
MAX_STD = 1 << 56  # |y| < 2^60 up to the table's end, so 2 k W + j stays an exact int64
CHUNK = 1 << 14  # proposals per round: all temporaries stay in the cache

# Bound on the error of the float64 acceptance test for gamma = j (2kW+j) / (2 std^2) <= 0.75, which uses sums
# and products only (correctly rounded by IEEE 754). gamma has four roundings, so exp(-gamma) moves by less
# than 4 * 2^-53; the Taylor polynomial of degree 15 is off by 0.75^16 / 16! < 2^-50, its Horner scheme by
# less than 16 * 2 * 2^-53, the uniform word by 2^-53. Sum: below 2^-46. A larger gamma, which needs
# k W > 11 std, is always settled exactly.
MARGIN = 2.0**-40
MAX_GAMMA = 0.75
_TAYLOR = [(-1.0) ** n / math.factorial(n) for n in range(15, -1, -1)]

Integers = npt.NDArray[np.int64]


def exp_bounds(exponent: Fraction, bits: int) -> tuple[int, int]:
    """Integers low <= 2^bits exp(-exponent) <= high for exponent >= 0, usually one or two apart."""
    if exponent < 0:
        raise ValueError(f"exponent {exponent} is negative")
    if exponent > bits:
        return 0, 1
    # exp(-x) = 1 / exp(x / 2^m)^(2^m); each squaring doubles the relative error, hence the guard bits.
    halvings = max(0, math.ceil(exponent).bit_length())
    precision = bits + 2 * halvings + 16
    one = 1 << precision
    scaled = exponent * one / (1 << halvings)
    low, high = _exp_series(math.floor(scaled), precision)[0], _exp_series(math.ceil(scaled), precision)[1]
    for _ in range(halvings):
        low, high = (low * low) >> precision, -((-high * high) >> precision)
    unit = 1 << (precision + bits)
    return min(unit // high, 1 << bits), min(-(-unit // low), 1 << bits)


def _exp_series(scaled: int, precision: int) -> tuple[int, int]:
    """Bounds of 2^precision exp(x) for x = scaled / 2^precision in [0, 1]; each term is rounded both ways."""
    low = high = term_low = term_high = 1 << precision
    n = 0
    while term_high > 1:
        n += 1
        term_low = (term_low * scaled >> precision) // n
        term_high = -((-term_high * scaled >> precision) // n)
        low, high = low + term_low, high + term_high
    return low, high + 2 * term_high  # the terms left out sum to less than twice the last one


@dataclass(frozen=True, kw_only=True)
class _Slices:
    """Thresholds of the slice number k at a finite precision, as integer bounds in units of 2^-bits."""

    low: list[int]
    high: list[int]
    bits: int

    def find(self, word: int) -> int | None:
        """The slice of every real in [word, word + 1) / 2^bits, or None if that is not settled."""
        k = next((n for n, bound in enumerate(self.high) if word < bound), len(self.high))
        return k if k < len(self.low) and word < self.low[k] else None


def _build_slices(step: Fraction, bits: int) -> _Slices:
    """Cumulative probabilities of k with weights exp(-step k^2), bounded from both sides."""
    precision = bits + 32
    lows, highs = [0], [0]
    k = 0
    while step * k * k <= precision:
        low, high = exp_bounds(step * k * k, precision)
        lows.append(lows[-1] + low)
        highs.append(highs[-1] + high)
        k += 1
    # sum_{i>=k} exp(-step i^2) <= exp(-step k^2) / (1 - exp(-2 k step)) <= 1 + 1 / (2 k step) in our unit.
    total_low, total_high = lows[-1], highs[-1] + 1 + math.ceil(1 / (2 * k * step))
    return _Slices(
        low=[(low << bits) // total_high for low in lows[1:]],
        high=[-(-(high << bits) // total_low) for high in highs[1:]],
        bits=bits,
    )


class DiscreteGaussian:
    """The distribution on the integers with P(y) proportional to exp(-y^2 / (2 std^2)).

    Samples are exact given uniform words; with `KeyStream` words they are computationally indistinguishable
    from exact ones. The running time depends on rejections and is not constant: somebody who can time single
    samples learns a little about them.

    Args:
        std: Positive rational standard deviation parameter, at most 2^56. A float is taken at its exact
            binary value. (For std >= 1 the distribution's own standard deviation equals it up to 1e-6.)
    """

    def __init__(self, std: int | float | Fraction) -> None:
        try:
            exact = Fraction(std)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"standard deviation {std!r} is not a finite number") from error
        if not 0 < exact <= MAX_STD:
            raise InputError(f"standard deviation {std} is outside (0, 2^{MAX_STD.bit_length() - 1}]")
        self.std = exact
        self._two_variance = 2 * exact * exact
        self._width = 1 << max(0, math.floor(exact / 16).bit_length() - 1)
        self._word_bits = WORD_BITS
        self._margin = MARGIN

    def sample(self, count: int, stream: KeyStream) -> Integers:
        """Draws `count` independent samples from the words of a secret stream."""
        if count < 0:
            raise InputError(f"cannot draw {count} samples")
        out = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            wanted = count - filled
            # At least 97 % of the proposals survive (half of the zeros are lost besides).
            fresh = self._propose(min(CHUNK, wanted + wanted // 16 + 16), stream)[:wanted]
            out[filled : filled + len(fresh)] = fresh
            filled += len(fresh)
        return out

    def _propose(self, count: int, stream: KeyStream) -> Integers:
        slices = self._draw_slices(count, stream)
        words = stream.words(count)
        sign = 1 - 2 * (words >> np.uint64(63)).astype(np.int64)
        inside = (words & np.uint64(self._width - 1)).astype(np.int64)
        size = slices * self._width + inside
        keep = (size > 0) | (sign > 0)
        if self._width > 1:
            keep &= self._accept(inside, size, stream)
        return (sign * size)[keep]

    @cached_property
    def _table(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        slices = _slices(self._step, self._word_bits)
        usable = sum(high < 1 << self._word_bits for high in slices.high)
        low = [*slices.low[:usable], 0]  # words beyond the last threshold are never settled here
        return np.array(low, dtype=np.uint64), np.array(slices.high[:usable], dtype=np.uint64)

    @property
    def _step(self) -> Fraction:
        return self._width * self._width / self._two_variance

    def _draw_slices(self, count: int, stream: KeyStream) -> Integers:
        low, high = self._table
        words = stream.words(count) >> np.uint64(64 - self._word_bits)
        slices = np.searchsorted(high, words, side="right")
        for index in np.flatnonzero(words >= low[slices]):
            slices[index] = self._settle_slice(int(words[index]), stream)
        return slices.astype(np.int64, copy=False)

    def _settle_slice(self, word: int, stream: KeyStream) -> int:
        bits = self._word_bits
        while True:
            found = _slices(self._step, bits).find(word)
            if found is not None:
                return found
            word = word << 64 | int(stream.words(1)[0])
            bits += 64

    def _accept(self, inside: Integers, size: Integers, stream: KeyStream) -> npt.NDArray[np.bool_]:
        words = stream.words(len(size))
        uniform = words * 2.0**-64
        gamma = inside.astype(np.float64) * (2 * size - inside) * float(1 / self._two_variance)
        accepted = uniform < 1 - gamma - self._margin  # exp(-gamma) >= 1 - gamma
        rest = np.flatnonzero(~accepted)
        distance = np.polyval(_TAYLOR, gamma[rest]) - uniform[rest]
        accepted[rest] = distance > 0
        for index in rest[(np.abs(distance) <= self._margin) | (gamma[rest] > MAX_GAMMA)]:
            numerator = int(inside[index]) * (2 * int(size[index]) - int(inside[index]))
            accepted[index] = bernoulli_exp(numerator / self._two_variance, stream, int(words[index]))
        return accepted


def bernoulli_exp(exponent: Fraction, stream: KeyStream, word: int | None = None) -> bool:
    """True with probability exactly exp(-exponent), exponent >= 0.

    Args:
        exponent: Exact exponent.
        stream: Source of further bits.
        word: The first 64 bits of the uniform number, if they were drawn already.
    """
    bits = 64
    word = int(stream.words(1)[0]) if word is None else word
    while True:
        low, high = exp_bounds(exponent, bits + 16)
        if (word + 1) << 16 <= low:
            return True
        if word << 16 >= high:
            return False
        word = word << 64 | int(stream.words(1)[0])
        bits += 64


@lru_cache(maxsize=64)
def _slices(step: Fraction, bits: int) -> _Slices:
    return _build_slices(step, bits)
