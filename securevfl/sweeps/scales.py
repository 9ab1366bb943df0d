"""Axes: from a value to a place, with room of its own for zero, infinity and no value at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SLOT, WIDE_SLOT = 46.0, 76.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One axis.

    Attributes:
        start: Place of its beginning.
        end: Place of its end; smaller than `start` for an axis that goes up the page.
        low: Smallest value of the continuous part.
        high: Largest.
        log: Logarithmic.
        first: Label of the slot before the continuous part (0 or no value); empty for none.
        last: Label of the slot behind it (infinity); empty for none.
    """

    start: float
    end: float
    low: float
    high: float
    log: bool = False
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
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return left + (at - low) / (high - low) * (right - left)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels, slots included."""
        values = log_ticks(self.low, self.high) if self.log else _steps(self.low, self.high)
        found = [(self(value), label(value)) for value in values]
        if self.first:
            found.insert(0, (self(None), self.first))
        if self.last:
            found.append((self(math.inf), self.last))
        return found


def label(value: float) -> str:
    """A number as short as it can be read."""
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.6g}"


def log_ticks(low: float, high: float) -> list[float]:
    """At most nine round values between two ends of a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [
            step * 10.0**power
            for power in range(first, last + 1)
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(found) <= 9:
            return found
    return found[:: math.ceil(len(found) / 8)]


def _steps(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def epsilon_scale(
    values: Sequence[float | None], *, start: float, end: float, none: str = "0", always: bool = False
) -> Scale:
    """A logarithmic axis for epsilons; slots for the first label and for infinity appear where needed."""
    finite = [v for v in values if v is not None and 0 < v < math.inf]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    return Scale(
        start=start,
        end=end,
        low=low / 1.6,
        high=high * 1.6,
        log=True,
        first=none if always or any(v is None or v == 0 for v in values) else "",
        last="∞" if any(v is not None and math.isinf(v) for v in values) else "",
    )


def linear_scale(values: Sequence[float], *, start: float, end: float, pad: float = 0.08) -> Scale:
    """A linear axis around the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = (high - low) * pad or max(abs(high), 1.0) * 0.05
    return Scale(start=start, end=end, low=low - room, high=high + room)
