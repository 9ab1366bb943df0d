"""Axes: from a value to a place, with room of its own for zero, infinity and no value at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SLOT, WIDE_SLOT = 46.0, 76.0
GAP = 300.0  # values further apart than this factor, with nothing between, are moved together
BREAK = 3.0  # the factor that such a gap still takes
EDGE = 1.6  # room around values, as a factor


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One axis.

    Attributes:
        start: Place of its beginning.
        end: Place of its end; smaller than `start` for an axis that goes up the page.
        low: Smallest value of the continuous part.
        high: Largest.
        log: Logarithmic.
        breaks: Ends of gaps without values, which take less room; of a logarithmic axis only.
        first: Label of the slot before the continuous part (0 or no value); empty for none.
        last: Label of the slot behind it (infinity); empty for none.
    """

    start: float
    end: float
    low: float
    high: float
    log: bool = False
    breaks: tuple[tuple[float, float], ...] = ()
    first: str = ""
    last: str = ""

    @property
    def _direction(self) -> int:
        return 1 if self.end > self.start else -1

    @property
    def _room(self) -> float:
        """Room for the first slot."""
        return 0.0 if not self.first else SLOT if len(self.first) < 4 else WIDE_SLOT

    def __call__(self, value: float | None) -> float:
        """The place of a value; None and 0 on a logarithmic axis belong to the first slot."""
        direction, room = self._direction, self._room
        if value is None or (self.log and value <= 0):
            return self.start + direction * room / 2
        if math.isinf(value):
            return self.end - direction * SLOT / 2
        left = self.start + direction * room
        right = self.end - direction * (SLOT if self.last else 0)
        low, high, at = (self._coordinate(v) for v in (self.low, self.high, value))
        return left + (at - low) / (high - low) * (right - left)

    def _coordinate(self, value: float) -> float:
        """The value itself, or its logarithm with gaps moved together."""
        if not self.log:
            return value
        at = math.log(value)
        for begin, end in self.breaks:
            inside = min(max(math.log(value / begin), 0.0), math.log(end / begin))
            at -= inside * (1 - math.log(BREAK) / math.log(end / begin))
        return at

    def gaps(self) -> list[float]:
        """Places at which the axis is broken."""
        return [self(math.sqrt(begin * end)) for begin, end in self.breaks]

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels, slots included."""
        values = self._log_ticks() if self.log else _steps(self.low, self.high)
        found = [(self(value), label(value)) for value in values]
        if self.first:
            found.insert(0, (self(None), self.first))
        if self.last:
            found.append((self(math.inf), self.last))
        return found

    def _log_ticks(self) -> list[float]:
        """Round values of every part between gaps."""
        ends = [self.low, *(end for gap in self.breaks for end in gap), self.high]
        parts = zip(ends[::2], ends[1::2], strict=True)
        most = 6 if self.breaks else 9
        found = []
        for low, high in parts:
            lonely = bool(self.breaks) and high < 8 * low  # about one value: it is its own tick
            found += [math.sqrt(low * high)] if lonely else log_ticks(low, high, most=most)
        return found


def label(value: float) -> str:
    """A number as short as it can be read."""
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.6g}"


def log_ticks(low: float, high: float, *, most: int = 9) -> list[float]:
    """Some round values between two ends of a logarithmic axis; powers of two on a short one of small values.

    Args:
        low: One end.
        high: The other.
        most: How many at most.
    """
    if high < min(2.0**most * low, 1024.0) and low >= 2.0**-7:
        return [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [
            step * 10.0**power
            for power in range(first, last + 1)
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / (most - 1))]


def _steps(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def epsilon_scale(
    values: Sequence[float | None],
    *,
    start: float,
    end: float,
    none: str = "0",
    always: bool = False,
    broken: bool = False,
) -> Scale:
    """A logarithmic axis for epsilons; slots for the first label and for infinity appear where needed.

    Args:
        values: What it has to show.
        start: Place of its beginning.
        end: Place of its end.
        none: Label of the first slot.
        always: Whether there is a first slot in any case.
        broken: Whether wide gaps between values are moved together.
    """
    finite = sorted({v for v in values if v is not None and 0 < v < math.inf}) or [1.0, 10.0]
    low, high = finite[0], finite[-1]
    gaps = [(a * EDGE, b / EDGE) for a, b in pairwise(finite) if broken and b > GAP * a]
    return Scale(
        start=start,
        end=end,
        low=low / EDGE,
        high=high * EDGE,
        log=True,
        breaks=tuple(gaps),
        first=none if always or any(v is None or v == 0 for v in values) else "",
        last="∞" if any(v is not None and math.isinf(v) for v in values) else "",
    )


def linear_scale(values: Sequence[float], *, start: float, end: float, pad: float = 0.08) -> Scale:
    """A linear axis around the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = (high - low) * pad or max(abs(high), 1.0) * 0.05
    return Scale(start=start, end=end, low=low - room, high=high + room)
