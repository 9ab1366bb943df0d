"""Bounded functions as sine series, and the integer sine table that every party evaluates alike.

A score u is opened only as a masked phase, so that one turn of the ring is one period P. A series of odd
harmonics,

    f(u) = offset + sum_k c_k sin(2 pi k u / P),   k = 1, 3, 5, ...

repeats with f(P/2 - u) = f(u): it follows the wanted function for |u| almost up to P/2, twice as far as a
series of all harmonics of the same length, and its range is known for every u because it is periodic. That
range is what a record's influence is bounded by, so it is computed over the whole period and refused where it
is not what was expected.

Of several classes, the label holder adds half a period to the score of a record's own class before it is
masked, so that one periodic function is the residual of both kinds of records (`class_series`): around zero
a / (1 + e^-u) for the other classes, around P/2 -1 / (1 + e^u) for its own. That takes all harmonics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError
from securevfl.protocols.ring import Ring

TABLE_BITS = 16
WAVE_BITS = 14
"""Fraction bits of the public table, and of the dealt waves."""
OVERSHOOT = 0.05
"""How far a series may leave the range of the function it stands for."""

_GRID = 1 << 14  # points of the range check per half period
_HALF = np.uint32(1 << (31 - TABLE_BITS))
_SHIFT = np.uint32(32 - TABLE_BITS)
QUARTER = np.uint16(1 << (TABLE_BITS - 2))
"""From a sine to the cosine, in places of the table."""
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class SineSeries:
    """A bounded function of a score.

    Args:
        period: P. Scores beyond a good third of it are no longer represented faithfully (yet harmlessly).
        coefficients: c_1, c_3, c_5, ... of the odd harmonics.
        offset: Value at 0.
        low: Least value that is expected of the function.
        high: Largest value that is expected.
        phases: Turns of all harmonics 1, 2, 3, ..., in entries of the table; empty for odd sines alone.

    Raises:
        InputError: Somewhere in the period the series leaves [low, high] by more than `OVERSHOOT`.
    """

    period: float
    coefficients: tuple[float, ...]
    offset: float
    low: float
    high: float
    phases: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.phases and len(self.phases) != len(self.coefficients):
            raise InputError("a series needs a phase for every coefficient, or none")
        if not self.coefficients or not self.period > 0:
            raise InputError("a sine series needs a positive period and at least one coefficient")
        least, largest = self.range
        if not (least >= self.low - OVERSHOOT and largest <= self.high + OVERSHOOT):
            raise InputError(
                f"the series ranges over [{least:.3f}, {largest:.3f}], not [{self.low}, {self.high}];"
                " take a shorter period or more harmonics"
            )

    @property
    def harmonics(self) -> tuple[int, ...]:
        """1, 3, 5, ..., or with phases all of them."""
        count = len(self.coefficients)
        return tuple(range(1, count + 1)) if self.phases else odd_numbers(count)

    def share(self, delta: Ring, waves: Ring) -> Ring:
        """A share of f: sum_k sin(k d) [c_k cos(k a)] + cos(k d) [c_k sin(k a)] for the public phase d.

        Args:
            delta: The summed masked phases, (rows, outputs).
            waves: Shares of c_k sin(k a), then of c_k cos(k a), (2, harmonics, rows, outputs).
        """
        found = np.zeros(delta.shape, np.uint64)
        for sine, cosine, sines, cosines in turned(delta, self.harmonics, waves, self.phases):
            found += sine * cosines
            found += cosine * sines
        return found

    def __call__(self, scores: npt.ArrayLike) -> Floats:
        """The function itself, in floating point."""
        turns = np.asarray(scores, np.float64)[..., None] * (2 * np.pi / self.period)
        angles = turns * np.array(self.harmonics)
        if self.phases:
            angles = angles + np.array(self.phases) * (2 * np.pi * 2.0**-TABLE_BITS)
        waves: Floats = np.sin(angles) @ np.array(self.coefficients)
        return waves + self.offset

    @functools.cached_property
    def range(self) -> tuple[float, float]:
        """Bounds of the function over the whole period.

        Between two points of the grid, h apart, it exceeds the larger of them by at most h^2 max|f''| / 8.
        """
        if self.phases:
            return self.between(0.0, self.period)
        low, high = self.between(0.0, self.period / 2)  # odd: half a period, and its reflection
        swing = max(high - self.offset, self.offset - low)
        return self.offset - swing, self.offset + swing

    def between(self, low: float, high: float) -> tuple[float, float]:
        """Bounds of the function for scores from `low` to `high`."""
        step = (high - low) / _GRID
        values = self(low + np.arange(_GRID + 1) * step)
        rates = np.array(self.harmonics) * (2 * np.pi / self.period)
        beyond = step * step / 8 * float(np.abs(np.array(self.coefficients)) @ rates**2)
        return float(values.min()) - beyond, float(values.max()) + beyond

    @functools.cached_property
    def rounding(self) -> float:
        """Bound of the error of the shared evaluation against the series.

        With table and waves rounded to WAVE_BITS, each harmonic is off by (1 + |c|) 2^-WAVE_BITS / sqrt(2)
        (|sin| + |cos| <= sqrt(2)) and the product of both errors; the phase in the table is off by half an
        entry. Rounding of the score itself is rounding of the input and harmless.
        """
        unit = 2.0**-WAVE_BITS
        phase = np.pi * 2.0**-TABLE_BITS
        each = [(1 + abs(c)) * unit * 2**-0.5 + unit * unit / 2 + abs(c) * phase for c in self.coefficients]
        return float(sum(each)) * (1 + 1e-9)


@dataclasses.dataclass(frozen=True)
class Waves:
    """All waves of one score as outputs of their own: a_k sin(2 pi k u / P), then a_k cos(2 pi k u / P).

    Args:
        period: P.
        coefficients: a_1, a_3, a_5, ... of the odd harmonics.
        bits: Fraction bits of what is multiplied.
    """

    period: float
    coefficients: tuple[float, ...]
    bits: int = WAVE_BITS

    def __post_init__(self) -> None:
        if not self.coefficients or not self.period > 0:
            raise InputError("waves need a positive period and at least one amplitude")

    @property
    def harmonics(self) -> tuple[int, ...]:
        """1, 3, 5, ..."""
        return odd_numbers(len(self.coefficients))

    @property
    def outputs(self) -> int:
        """Sines and cosines."""
        return 2 * len(self.coefficients)

    def share(self, delta: Ring, waves: Ring) -> Ring:
        """Shares of all waves, (rows, outputs), from the public phase of one score: (rows, 1)."""
        found = np.empty((len(delta), self.outputs), np.uint64)
        for place, (sine, cosine, sines, cosines) in enumerate(turned(delta, self.harmonics, waves)):
            found[:, place] = (sine * cosines + cosine * sines)[:, 0]
            found[:, place + len(self.coefficients)] = (cosine * cosines - sine * sines)[:, 0]
        return found

    @property
    def rounding(self) -> float:
        """How far the shared evaluation can lengthen a vector of norm 1 that all waves of a record make.

        Table and wave of a harmonic are complex numbers of modulus at most 1 and |a|, each off by at most
        2^-bits / sqrt(2); a phase that is off turns the product and lengthens nothing. The K errors of the
        waves have norm at most sqrt(K) 2^-bits / sqrt(2).
        """
        off = 2.0**-self.bits * 2**-0.5
        return ((1 + off) * (1 + off * math.sqrt(len(self.coefficients))) - 1) * (1 + 1e-9)

    @property
    def bound(self) -> float:
        """Largest magnitude of one wave, rounding included."""
        return max(abs(c) for c in self.coefficients) + self.rounding


def odd_numbers(count: int) -> tuple[int, ...]:
    """1, 3, 5, ..."""
    return tuple(range(1, 2 * count, 2))


def turned(
    delta: Ring, harmonics: tuple[int, ...], waves: Ring, phases: tuple[int, ...] = ()
) -> Iterator[tuple[Ring, Ring, Ring, Ring]]:
    """Per harmonic: sine and cosine of the public phase by the table, shares of the mask's sines, cosines."""
    table = sine_table()
    for index, place in enumerate(phase_places(delta, harmonics)):
        if phases:
            place = place + np.uint16(phases[index])
        yield table[place], table[place + QUARTER], waves[0, index], waves[1, index]


def encode_phase(scores: npt.ArrayLike, period: float) -> Ring:
    """Scores as phases on Z_2^32: a whole turn is one period.

    Raises:
        EncodingError: A score is not finite.
    """
    turns = np.asarray(scores, np.float64) / period
    if not np.isfinite(turns).all():
        raise EncodingError("a score is not finite; lower the learning rate or the weight bound")
    turns -= np.floor(turns)
    return np.rint(turns * 2.0**32).astype(np.uint64).astype(np.uint32)  # 2^32 wraps to 0


def phase_places(delta: Ring, harmonics: tuple[int, ...]) -> Iterator[Ring]:
    """Where the table has the sine of each harmonic of a public phase."""
    for k in harmonics:
        yield ((delta * np.uint32(k) + _HALF) >> _SHIFT).astype(np.uint16)


@functools.cache
def logistic_series(*, period: float = 48.0, harmonics: int = 6) -> SineSeries:
    """The logistic function 1 / (1 + exp(-u)): with the defaults within 0.0045 for |u| <= 18."""
    return _fit(lambda u: 1 / (1 + np.exp(-u)) - 0.5, period, harmonics, offset=0.5, low=0.0, high=1.0)


@functools.cache
def identity_series(*, period: float = 8.0, harmonics: int = 6) -> SineSeries:
    """The identity, bounded: follows u for |u| <= period / 4 - 0.3 and turns back beyond; for least squares.

    With the defaults it is within 0.025 for |u| <= 1.7 and never beyond 2.
    """
    return _fit(lambda u: u, period, harmonics, offset=0.0, low=-period / 4, high=period / 4)


@functools.cache
def class_series(classes: int, *, period: float = 48.0, harmonics: int = 10) -> SineSeries:
    """Residuals of one class among several, for scores up to `class_reach` either way.

    Around 0, for records of other classes: a / (1 + exp(-u)) with a = 1 / sqrt(classes - 1). Around half a
    period, for its own records: 1 / (1 + exp(-u)) - 1. All residuals of a record then have norm sqrt(2).
    """
    if classes < 2:
        raise InputError(f"{classes} classes; at least 2 are needed")
    weight, reach = (classes - 1) ** -0.5, class_reach(period)
    scores = np.linspace(-period / 4, 3 * period / 4, 8000, endpoint=False)
    own = scores > period / 4
    inner = np.where(own, scores - period / 2, scores)
    logistic = 1 / (1 + np.exp(-np.clip(inner, -reach, reach)))
    wanted, trust = np.where(own, logistic - 1, weight * logistic), np.abs(inner) <= reach
    # Between the two, where no score is, a straight line that need not be met.
    wanted = np.interp(scores, scores[trust], wanted[trust], period=period)
    root = np.sqrt(np.where(trust, 1.0, 0.02))
    angles = np.outer(scores, np.arange(1, harmonics + 1)) * (2 * np.pi / period)
    waves = np.concatenate([np.ones((len(scores), 1)), np.sin(angles), np.cos(angles)], axis=1)
    found = np.linalg.lstsq(waves * root[:, None], wanted * root, rcond=None)[0]
    sines, cosines = found[1 : harmonics + 1], found[harmonics + 1 :]
    turns = np.rint(np.arctan2(cosines, sines) * (2.0**TABLE_BITS / (2 * np.pi))).astype(int)
    return SineSeries(
        period,
        _on_grid(np.hypot(sines, cosines)),
        _on_grid(found[:1])[0],
        low=-1.0,
        high=weight,
        phases=tuple(int(turn) % (1 << TABLE_BITS) for turn in turns),
    )


def class_reach(period: float = 48.0) -> float:
    """How far scores of classes may go."""
    return period * 3 / 16


def _on_grid(coefficients: npt.NDArray[Any]) -> tuple[float, ...]:
    """On a grid of 2^-30, so that linear algebra libraries that differ in the last bits agree."""
    return tuple(float(np.rint(c * 2.0**30) / 2.0**30) for c in coefficients)


def _fit(
    function: Callable[[Floats], Floats],
    period: float,
    harmonics: int,
    *,
    offset: float,
    low: float,
    high: float,
) -> SineSeries:
    """Least squares over a quarter period, which decides the whole of it; coefficients on a grid of 2^-30."""
    if harmonics < 1 or not period > 0:
        raise InputError(f"{harmonics} harmonics of period {period} make no series")
    scores = np.linspace(0, period / 4, 4001)
    waves = np.sin(np.outer(scores, np.arange(1, 2 * harmonics, 2)) * (2 * np.pi / period))
    found = np.linalg.lstsq(waves, function(scores), rcond=None)[0]
    return SineSeries(period, _on_grid(found), offset, low, high)


@functools.cache
def sine_table() -> Ring:
    """round(2^14 sin(2 pi j / 2^16)) modulo 2^64 for all j.

    Computed with integers: all parties must multiply their shares by the very same numbers, and math
    libraries differ in the last bit.
    """
    quarter = 1 << (TABLE_BITS - 2)
    precision = 192
    sine, cosine = _first_step(precision)
    twice = 2 * cosine
    before, value, values = 0, sine, [0]
    for _ in range(quarter):
        values.append(value)
        before, value = value, (twice * value >> precision) - before  # sin((j+1)h) = 2 cos(h) sin(jh) - ...
    shift = precision - WAVE_BITS
    first = np.array([(v + (1 << (shift - 1))) >> shift for v in values], np.int64)
    half = np.concatenate([first[:-1], first[:0:-1]])
    table = np.concatenate([half, -half]).view(np.uint64)
    table.setflags(write=False)
    return table


def _first_step(precision: int) -> tuple[int, int]:
    """Sine and cosine of 2 pi / 2^16 as integers scaled by 2^precision, by their Taylor series."""
    angle = _pi(precision) >> (TABLE_BITS - 1)
    sums, term, n = [0, 0, 0, 0], 1 << precision, 0
    while term:
        sums[n % 4] += term
        n += 1
        term = (term * angle >> precision) // n
    return sums[1] - sums[3], sums[0] - sums[2]


def _pi(precision: int) -> int:
    """Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""

    def arc(inverse: int) -> int:
        power, total, n, sign = (1 << (precision + 16)) // inverse, 0, 1, 1
        while power:
            total += sign * (power // n)
            power, n, sign = power // (inverse * inverse), n + 2, -sign
        return total

    return (16 * arc(5) - 4 * arc(239)) >> 16
