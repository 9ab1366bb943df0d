"""Fixed-point numbers on the ring Z_2^k, where masks hide values perfectly."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.parallel import in_parts
from securevfl.protocols.stream import KeyStream

Ring = npt.NDArray[Any]
"""An array of uint32 or uint64; its addition wraps, which is the ring's addition."""

CHUNK = 1 << 16  # 512 KB of float64: quantising stays in the second-level cache
_LARGEST_EXACT = 1 << 53


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Floats as integers modulo 2^bits, with `fraction_bits` after the binary point.

    A sum of `terms` encoded values decodes to the true sum within `terms * resolution / 2` (within
    `terms * resolution` for stochastic rounding), and never wraps around unnoticed: `encode` refuses a
    value v unless terms * (|v| * 2^fraction_bits + 1/2) < 2^(bits - 1), with 1 for 1/2 if stochastic.

    Args:
        bits: 32 or 64.
        fraction_bits: Bits after the binary point.
    """

    bits: int = 64
    fraction_bits: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise InputError(f"a ring of {self.bits} bits is not offered; use 32 or 64")
        if not 0 <= self.fraction_bits < self.bits - 1:
            raise InputError(
                f"{self.fraction_bits} fraction bits do not fit a ring of {self.bits} bits;"
                f" use 0 to {self.bits - 2}"
            )

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The unsigned integer type of the ring."""
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    @functools.cached_property
    def resolution(self) -> float:
        """The step between neighbouring numbers."""
        return 2.0**-self.fraction_bits

    def max_abs(self, terms: int = 1) -> float:
        """The largest magnitude that `encode` accepts for a sum of `terms` values."""
        return _largest(self.bits, terms, False) * self.resolution

    def encode(self, array: npt.ArrayLike, terms: int = 1, *, stochastic: KeyStream | None = None) -> Ring:
        """Rounds floats to ring elements.

        Args:
            array: Floats or integers.
            terms: How many such values will be summed; the sum must not wrap.
            stochastic: Round up with probability equal to the fraction, drawn from this stream, so that the
                expectation is exact; None rounds to nearest, ties to even.

        Raises:
            EncodingError: A value is NaN or infinite, or the sum could overflow.
        """
        values = np.asarray(array)
        if values.dtype == np.float32:  # widened piece by piece, without a copy
            values = np.ascontiguousarray(values).reshape(values.shape)
        else:
            values = as_floats(values)
        out = np.empty(values.shape, dtype=self.dtype)
        self._encode_into(values.reshape(-1), out.reshape(-1), terms, stochastic)
        return out

    def _encode_into(
        self, values: npt.NDArray[Any], out: Ring, terms: int, stochastic: KeyStream | None
    ) -> None:
        largest = _largest(self.bits, terms, stochastic is not None)
        signed = out.view(np.int32 if self.bits == 32 else np.int64)

        def part(first: int, last: int) -> None:
            scratch = np.empty(min(CHUNK, last - first), dtype=np.float64)
            for start in range(first, last, CHUNK):
                piece = values[start : min(start + CHUNK, last)]
                with np.errstate(over="ignore", invalid="ignore"):  # what these would warn about is refused
                    scaled = scratch[: piece.size]
                    np.multiply(piece, 2.0**self.fraction_bits, out=scaled, dtype=np.float64)
                    self._check(scaled, largest, terms, start)
                if stochastic is None:
                    np.rint(scaled, out=scaled)
                else:
                    _round_stochastically(scaled, stochastic)
                np.copyto(signed[start : start + piece.size], scaled, casting="unsafe")

        if stochastic is None:
            in_parts(values.size, CHUNK, part)
        else:  # one stream, hence one thread
            part(0, values.size)

    def _check(self, scaled: npt.NDArray[np.float64], largest: float, terms: int, start: int) -> None:
        # Scaling by a power of two is exact, so this compares the true value; min and max pass NaN on, and
        # NaN fails both comparisons.
        if scaled.min() >= -largest and scaled.max() <= largest:
            return
        index = int(np.argmin(np.abs(scaled) <= largest))
        # The value itself is private and does not belong in a message that may end up in a log.
        fault = "is NaN" if np.isnan(scaled[index]) else "is infinite or too large"
        raise EncodingError(
            f"value {start + index} cannot be encoded, it {fault}: a sum of {terms} in {self.bits} bits,"
            f" {self.fraction_bits} of them fraction, needs |value| <= {self.max_abs(terms):.6g};"
            " clip it or use fewer fraction bits"
        )

    def check(self, array: object, shape: tuple[int, ...] | None) -> Ring:
        """Returns `array` if it holds ring elements of that shape, any shape for None.

        Raises:
            ProtocolError: It does not.
        """
        if not isinstance(array, np.ndarray) or array.dtype != self.dtype:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ProtocolError(f"message carries {found}; an array of {self.dtype} is expected")
        if shape is not None and array.shape != shape:
            raise ProtocolError(f"message carries an array of shape {array.shape}; {shape} is expected")
        return array

    def decode(self, ring: Ring) -> npt.NDArray[np.float64]:
        """The floats that ring elements stand for; the upper half of the ring is negative."""
        if ring.dtype != self.dtype:
            raise EncodingError(f"ring elements of type {ring.dtype} were given; {self.dtype} is expected")
        signed = np.ascontiguousarray(ring).view(np.int32 if self.bits == 32 else np.int64)
        out: npt.NDArray[np.float64] = np.multiply(signed, self.resolution, dtype=np.float64)
        return out.reshape(ring.shape)


def as_floats(array: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The same numbers as a C-contiguous array of float64.

    Raises:
        EncodingError: They are no real numbers, or integers that float64 does not hold exactly.
    """
    values = np.asarray(array)
    if values.dtype.kind not in "fiub":
        raise EncodingError(f"values of type {values.dtype} cannot be encoded; pass floats or integers")
    if (
        values.dtype.kind in "iu"
        and values.size
        and not (int(values.min()) >= -_LARGEST_EXACT and int(values.max()) <= _LARGEST_EXACT)
    ):
        raise EncodingError("integers beyond 2^53 cannot be encoded exactly; scale them down")
    with np.errstate(over="ignore"):  # a number too large for float64 becomes infinite and is refused
        return np.ascontiguousarray(values, dtype=np.float64).reshape(values.shape)


@functools.lru_cache(maxsize=1024)
def _largest(bits: int, terms: int, stochastic: bool) -> float:
    """The largest float m with terms * (m + 1/2) < 2^(bits - 1), or m + 1 for stochastic rounding."""
    if terms < 1:
        raise InputError(f"a sum of {terms} terms has no range; at least 1 term is needed")
    bound = Fraction(1 << (bits - 1), terms) - (Fraction(1) if stochastic else Fraction(1, 2))
    largest = float(bound)
    while largest >= bound:  # a float against a fraction is compared exactly
        largest = math.nextafter(largest, -math.inf)
    return largest


def _round_stochastically(scaled: npt.NDArray[np.float64], stream: KeyStream) -> None:
    floor = np.floor(scaled)
    coin = stream.words(scaled.shape, np.uint64) >> np.uint64(11)
    up = coin < (scaled - floor) * _LARGEST_EXACT
    np.add(floor, up, out=scaled)
