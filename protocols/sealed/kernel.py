"""Functions of the sum of two scores as products of functions of one score each: what two members can share.

f(a + b) = alpha(a) + beta(b) + sum of +- f_i(a) g_j(b), in integers: a member knows its own score, so it
knows its own factors, and only the products have to be shared. The tables of the logistic function come
with the package: everybody multiplies the very same numbers, whose range over *all* pairs of entries is what
noise is sized for.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, ProtocolError
from securevfl.protocols.sealed.series import (
    QUARTER,
    WAVE_BITS,
    Waves,
    encode_phase,
    phase_places,
    sine_table,
)

FACTOR_BITS = 10
ADDED_BITS = 2 * FACTOR_BITS
TABLES = "logistic.table"
DIGEST = "4ebf8dc4b43b3ef6c1556042b175046c84a46dc108762a23a36f12d0015e9f83"
"""SHA-256 of the tables, which `benchmarks/kernel.py` made; members refuse each other over another one."""
ENTRIES, CLAMP, TERMS = 2049, 4.5, 4
LOW, HIGH = -5473, 1054049
"""Least and largest value over all pairs of entries, at 2^20; a test enumerates them."""

Term = tuple[int, int, int]
"""(i, j, sign) of a product of the first member's i-th and the second's j-th factor."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Kernel:
    """The logistic function of two scores, each clamped to +-4.5 by its owner.

    Attributes:
        offset: Value at 0, which the label holder adds.
        period: Four times the summed score at which both are clamped.
    """

    offset: float = 0.5
    period: float = 8 * CLAMP

    @property
    def range(self) -> tuple[float, float]:
        """Bounds of the function, whatever the scores."""
        return LOW * 2.0**-ADDED_BITS, HIGH * 2.0**-ADDED_BITS

    @property
    def rounding(self) -> float:
        """The shared evaluation is exact: tables are integers."""
        return 0.0

    @property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """The products of every output."""
        return (tuple((k, k, 1) for k in range(TERMS)),)

    def factors(self, scores: npt.NDArray[np.float64], second: bool) -> tuple[Integers, Integers]:
        """What a member adds, (rows, outputs), and its factors, (rows, K), for its own scores (rows, 1)."""
        places = entries(scores[:, 0])
        tables = logistic_tables()
        start = 2 + TERMS * second
        added = tables[int(second)][places] - (0 if second else 1 << (ADDED_BITS - 1))
        return added[:, None], tables[start : start + TERMS].T[places]

    def of(self, first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The function itself, of both members' scores, exactly as shares evaluate it."""
        one, two = np.broadcast_arrays(np.asarray(first, np.float64), np.asarray(second, np.float64))
        mine, theirs = self.factors(one.reshape(-1, 1), False), self.factors(two.reshape(-1, 1), True)
        values = mine[0] + theirs[0] + (mine[1] * theirs[1]).sum(1, keepdims=True)
        return np.asarray(values * 2.0**-ADDED_BITS + self.offset).reshape(one.shape)

    def __call__(self, scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The function of a summed score of which each member has half."""
        half = np.asarray(scores, np.float64) / 2
        return self.of(half, half)


@dataclass(frozen=True)
class WaveKernel:
    """All waves of the sum of two scores: the product of two complex numbers, one of each member.

    Args:
        waves: Period and amplitudes; the first member's factors carry these.
    """

    waves: Waves

    @property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """Sines s c + c s, then cosines c c - s s; a member's factors are its sines, then its cosines."""
        count = len(self.waves.coefficients)
        sines = tuple(((k, count + k, 1), (count + k, k, 1)) for k in range(count))
        return sines + tuple(((count + k, count + k, 1), (k, k, -1)) for k in range(count))

    def factors(self, scores: npt.NDArray[np.float64], second: bool) -> tuple[Integers, Integers]:
        """Nothing is added; sines and cosines of the own score, (rows, 2 K)."""
        table = sine_table().view(np.int64) * 2.0 ** (FACTOR_BITS - WAVE_BITS)
        sizes = np.ones(len(self.waves.coefficients)) if second else np.array(self.waves.coefficients)
        places = list(phase_places(encode_phase(scores[:, 0], self.waves.period), self.waves.harmonics))
        columns = [table[place] for place in places] + [table[place + QUARTER] for place in places]
        found = np.rint(np.stack(columns, 1) * np.concatenate([sizes, sizes]))
        return np.zeros((len(scores), self.waves.outputs), np.int64), found.astype(np.int64)


def entries(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Where the tables have scores.

    Raises:
        EncodingError: A score is not finite.
    """
    if not np.isfinite(scores).all():
        raise EncodingError("a score is not finite; lower the learning rate or the weight bound")
    unit = (np.clip(scores, -CLAMP, CLAMP) + CLAMP) * ((ENTRIES - 1) / (2 * CLAMP))
    return np.rint(unit).astype(np.intp)


def tables_digest() -> str:
    """SHA-256 of the tables, once the file was compared with it.

    Raises:
        ProtocolError: The file is not the one that came with the package.
    """
    logistic_tables()
    return DIGEST


@functools.cache
def logistic_tables() -> Integers:
    """(2 + 2 K, entries): alpha, beta at 2^20, f_k, g_k at 2^10.

    Raises:
        ProtocolError: The file is not the one that came with the package.
    """
    content = resources.files(__package__).joinpath(TABLES).read_bytes()
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ProtocolError(f"{TABLES} is not what this version was made with; install securevfl again")
    found = np.frombuffer(content, "<i4").reshape(2 + 2 * TERMS, ENTRIES).astype(np.int64)
    found.setflags(write=False)
    return found
