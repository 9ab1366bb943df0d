"""Arithmetic modulo a Mersenne prime, exact and vectorised: what authenticates sealed training.

Elements are uint64 in [0, p). Products of vectors and matrices go through float64 in limbs of 16 bits, where
every partial sum is an integer below 2^53; all else is shifts and adds, because 2^bits = 1 modulo p.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.stream import KeyStream

Elements = npt.NDArray[np.uint64]
_LIMB = 16
_LIMBS = 4
_PIECE = 1 << 15
"""Terms of an inner product at a time: limbs stay in the cache, and 2^15 * 2^32 * 4 is below 2^53."""
MERSENNE = (2, 3, 5, 7, 13, 17, 19, 31, 61)


@dataclass(frozen=True)
class Field:
    """The integers modulo 2^bits - 1.

    Args:
        bits: 61 everywhere but in tests, which search small fields to the end.
    """

    bits: int = 61

    def __post_init__(self) -> None:
        if self.bits not in MERSENNE:
            raise InputError(f"2^{self.bits} - 1 is no prime this field is made for; use one of {MERSENNE}")

    @functools.cached_property
    def p(self) -> int:
        """The modulus."""
        return (1 << self.bits) - 1

    @functools.cached_property
    def _modulus(self) -> np.uint64:
        return np.uint64(self.p)

    # -- elements -------------------------------------------------------------------------------------------

    def reduce(self, words: npt.NDArray[Any]) -> Elements:
        """Any uint64 words modulo p, or signed integers of a smaller magnitude than p."""
        if words.dtype.kind == "i":
            signed = words.astype(np.int64, copy=False)
            return np.asarray(signed + ((signed >> 63) & self.p)).view(np.uint64)
        found = words
        for _ in range(self._folds):
            found = (found & self._modulus) + (found >> np.uint64(self.bits))
        return self._below(found)

    @functools.cached_property
    def _folds(self) -> int:
        """How often the upper bits of a word are added to its lower ones until it is below 2 p."""
        return 1 if self.bits > 32 else -(-64 // self.bits)

    def _small(self, words: Elements) -> Elements:
        """Words below 2^57, as sums of limbs are, modulo p: of the large field they are elements already."""
        return words if self.bits == 61 else self.reduce(words)

    def _below(self, words: Elements) -> Elements:
        """Words below 2 p, modulo p: what falls below 0 wraps around 2^64, and the lesser one is right."""
        return np.asarray(np.minimum(words, words - self._modulus))

    def centred(self, elements: Elements) -> npt.NDArray[np.int64]:
        """The integers of least magnitude that elements stand for."""
        signed = elements.view(np.int64)
        return np.asarray(np.where(signed > self.p // 2, signed - self.p, signed))

    def check(self, words: object, shape: tuple[int, ...]) -> Elements:
        """Returns `words` if they are elements of that shape.

        Raises:
            ProtocolError: They are not.
        """
        if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.shape != shape:
            found = (
                f"{words.dtype}{list(words.shape)}" if isinstance(words, np.ndarray) else type(words).__name__
            )
            raise ProtocolError(
                f"message carries {found}; field elements of shape {list(shape)} are expected"
            )
        if words.size and int(words.max()) >= self.p:
            raise ProtocolError(
                f"message carries a word that is no element of the field of 2^{self.bits} - 1"
            )
        return words

    def draw(self, stream: KeyStream, shape: int | tuple[int, ...]) -> Elements:
        """Uniform elements from a stream; the word that equals p is drawn again."""
        out = np.empty(shape, np.uint64)
        flat = out.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            self._draw(stream, flat[start : start + _PIECE])
        return out

    def _draw(self, stream: KeyStream, out: Elements) -> Elements:
        """Fills a piece; pieces stay in the cache, and everybody draws the same ones."""
        stream.fill(out)
        out >>= np.uint64(64 - self.bits)
        while out.max(initial=0) == self.p:
            again = np.flatnonzero(out == self._modulus)
            out[again] = stream.words(again.size) >> np.uint64(64 - self.bits)
        return out

    def subtract_drawn(self, out: Elements, stream: KeyStream) -> None:
        """Subtracts, in place, the elements that `draw` would give."""
        flat, words = out.reshape(-1), np.empty(min(_PIECE, out.size), np.uint64)
        for start in range(0, flat.size, _PIECE):
            piece = flat[start : start + _PIECE]
            piece -= self._draw(stream, words[: piece.size])
            piece += (piece >> np.uint64(63)) * self._modulus  # what fell below 0 has wrapped around 2^64

    # -- entry by entry -------------------------------------------------------------------------------------

    def add(self, one: Elements, two: Elements | int) -> Elements:
        """The sum."""
        return self._below(one + (np.uint64(two % self.p) if isinstance(two, int) else two))

    def negative(self, elements: Elements) -> Elements:
        """The negative."""
        return self._below(self._modulus - elements)

    def sub(self, one: Elements, two: Elements) -> Elements:
        """The difference."""
        found = one - two
        return np.asarray(np.minimum(found, found + self._modulus))

    def shift(self, elements: Elements, places: int) -> Elements:
        """Times a power of two: the bits turn round."""
        places %= self.bits
        if not places:
            return elements.copy()
        return ((elements << np.uint64(places)) & self._modulus) | (elements >> np.uint64(self.bits - places))

    def mul(self, one: Elements, two: Elements | int) -> Elements:
        """The product."""
        other: Any = np.uint64(two % self.p) if isinstance(two, int) else two
        if self.bits <= 31:
            return np.asarray((one * other) % self._modulus)
        half, rest = np.uint64(31), np.uint64((1 << 31) - 1)
        a, b, c, d = one >> half, one & rest, other >> half, other & rest
        middle = a * d + b * c  # below 2^62; its upper 32 bits wrap onto the lowest
        low = (middle & np.uint64((1 << 30) - 1)) << half
        # a c 2^62 = 2 a c; the four terms stay below 2^61 + 2^32 + 2^61 + 2^62.
        return self.reduce(np.uint64(2) * (a * c) + (middle >> np.uint64(30)) + low + b * d)

    # -- sums of products -----------------------------------------------------------------------------------

    def matmul(self, left: Elements, right: Elements) -> Elements:
        """The matrix product of (m, n) and (n, k)."""
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            raise InputError(f"a product of shapes {left.shape} and {right.shape} does not exist")
        total = np.zeros((left.shape[0], right.shape[1]), np.uint64)
        for start in range(0, left.shape[1], _PIECE):
            one = _limbs(left[:, start : start + _PIECE])
            two = _limbs(right[start : start + _PIECE].T)
            for places in range(2 * _LIMBS - 1):
                pairs = [(a, places - a) for a in range(_LIMBS) if 0 <= places - a < _LIMBS]
                part = np.asarray(sum(one[a] @ two[b].T for a, b in pairs)).astype(np.uint64)
                total = self.add(total, self.shift(self._small(part), _LIMB * places))
        return total

    def combine(self, factors: list[int], rows: Elements) -> Elements:
        """sum_l factors[l] rows[l] for rows (l, n): few factors, many columns."""
        flat = rows.reshape(len(rows), -1)
        spread = np.zeros((2 * _LIMBS - 1, _LIMBS, len(rows)))
        for place, factor in enumerate(factors):
            for a in range(_LIMBS):
                limb = (factor % self.p >> _LIMB * a) & ((1 << _LIMB) - 1)
                for b in range(_LIMBS):
                    spread[a + b, b, place] = limb
        out = np.empty(flat.shape[1], np.uint64)
        size = max(64, _PIECE // max(1, len(rows)))
        for start in range(0, flat.shape[1], size):
            limbs = _limbs(flat[:, start : start + size]).reshape(_LIMBS * len(rows), -1)
            sums = (spread.reshape(2 * _LIMBS - 1, -1) @ limbs).astype(np.uint64)
            # Each sum is below 2^53: two of them, 16 places apart, may be joined before the bits turn round.
            pairs = sums[0::2].copy()
            pairs[:-1] += (sums[1::2] & np.uint64((1 << 40) - 1)) << np.uint64(_LIMB)
            carry = sums[1::2] >> np.uint64(40)
            found = self._small(pairs[0])
            for place in range(1, _LIMBS):
                found = self.add(found, self.shift(self._small(pairs[place]), 2 * _LIMB * place))
            if carry.any():
                for place, more in enumerate(carry):
                    found = self.add(found, self.shift(self._small(more), 2 * _LIMB * place + _LIMB + 40))
            out[start : start + size] = found
        return out.reshape(rows.shape[1:])

    def dot(self, one: Elements, two: Elements) -> int:
        """The inner product of all entries."""
        return int(self.matmul(one.reshape(1, -1), two.reshape(-1, 1))[0, 0])

    def dots(self, one: Elements, *others: Elements) -> list[int]:
        """The inner products of the same entries with several others."""
        right = np.stack([other.reshape(-1) for other in others]).T
        return [int(value) for value in self.matmul(one.reshape(1, -1), right)[0]]

    def total(self, elements: Elements) -> int:
        """The sum of all entries."""
        low = int((elements & np.uint64((1 << 32) - 1)).sum(dtype=np.uint64))
        return (low + (int((elements >> np.uint64(32)).sum(dtype=np.uint64)) << 32)) % self.p

    def by_small(self, factors: npt.NDArray[np.int64], elements: Elements) -> Elements:
        """sum_k factors[k] elements[k] over the first axis, for integers of magnitude below 2^15.

        Limbs of 31 bits times 15 bits leave room for 2^12 terms below p.
        """
        if len(factors) > 1 << 12 or self.bits != 61:
            raise InputError(f"{len(factors)} terms; at most 4096 fit a word of 61 bits")
        shape, one = elements.shape[1:], factors.reshape(len(factors), -1)
        two = elements.reshape(len(elements), -1)
        lower = np.einsum("kn,kn->n", one, (two & np.uint64((1 << 31) - 1)).view(np.int64))
        upper = np.einsum("kn,kn->n", one, (two >> np.uint64(31)).view(np.int64))
        # upper 2^31 = (upper mod 2^30) 2^31 + floor(upper / 2^30) 2^61, and 2^61 = 1. All of it lies between
        # -2^59 and 2^61 + 2^59; p more is positive.
        lower += (upper & ((1 << 30) - 1)) << 31
        lower += upper >> 30
        lower += self.p
        return self.reduce(lower.view(np.uint64)).reshape(shape)

    def weighted_sums(self, weights: Elements, integers: npt.NDArray[np.int64], bound: int) -> list[int]:
        """sum_i weights[i] integers[l, i] for every l, of integers of magnitude at most `bound`."""
        return [row[0] for row in self._weighted(weights, integers, np.ones((1, len(weights))), bound)]

    def weighted_gram(
        self, weights: Elements, integers: npt.NDArray[np.int64], bound: int
    ) -> list[list[int]]:
        """sum_i weights[i] integers[l, i] integers[k, i] for all pairs."""
        return self._weighted(weights, integers, integers, bound * bound)

    def _weighted(
        self, weights: Elements, one: npt.NDArray[Any], two: npt.NDArray[Any], bound: int
    ) -> list[list[int]]:
        """Sums of weight times products of at most `bound`, in pieces whose float64 sums are exact."""
        size = min(_PIECE, 1 << (52 - _LIMB - max(0, bound - 1).bit_length()))
        total = np.zeros((_LIMBS, len(one), len(two)), object)
        for start in range(0, len(weights), _PIECE):
            piece = slice(start, start + _PIECE)
            size = min(size, max(1, len(weights) - start))
            left, right = _cut(one[:, piece], size), _cut(two[:, piece], size)
            for limb, factors in enumerate(_limbs(weights[None, piece])):
                sums = (left * _cut(factors, size)) @ right.swapaxes(1, 2)  # (pieces, l, k)
                total[limb] += sums.astype(np.int64).sum(0)
        found = sum(total[limb] * (1 << (_LIMB * limb)) for limb in range(_LIMBS)) % self.p
        return [[int(value) for value in row] for row in found]

    def inverse(self, value: int) -> int:
        """1 / value."""
        if operator.index(value) % self.p == 0:
            raise InputError("0 has no inverse")
        return pow(value, -1, self.p)


def _limbs(rows: Elements) -> npt.NDArray[np.float64]:
    """(limbs, m, n): 16 bits each, lowest first."""
    words = np.ascontiguousarray(rows, "<u8").view("<u2").reshape(*rows.shape, _LIMBS)
    return np.ascontiguousarray(np.moveaxis(words, -1, 0), np.float64)


def _cut(rows: npt.NDArray[Any], size: int) -> npt.NDArray[np.float64]:
    """(pieces, m, size), filled up with zeros."""
    count = -(-rows.shape[1] // size)
    out = np.zeros((len(rows), count * size))
    out[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(out.reshape(len(rows), count, size).swapaxes(0, 1))


FIELD = Field()
