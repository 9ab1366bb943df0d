"""The axis of epsilons: logarithmic, with room of its own for zero, infinity and no value at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SLOT, WIDE_SLOT = 0.07, 0.12  # shares of the axis
GAP = 300.0  # values further apart than this factor, with nothing between, are moved together
BREAK = 3.0  # the factor that such a gap still takes
EDGE = 1.6  # room around values, as a factor


@dataclass(frozen=True, kw_only=True)
class EpsilonAxis:
    """From an epsilon to a place between 0 and 1.

    Attributes:
        low: Smallest value of the continuous part.
        high: Largest.
        breaks: Ends of gaps without values, which take less room.
        first: Label of the slot before the continuous part (0 or no value); empty for none.
        last: Label of the slot behind it (infinity); empty for none.
    """

    low: float
    high: float
    breaks: tuple[tuple[float, float], ...] = ()
    first: str = ""
    last: str = ""

    @classmethod
    def around(
        cls, values: Iterable[float | None], *, none: str = "0", always: bool = False, broken: bool = False
    ) -> EpsilonAxis:
        """An axis for some values; slots for the first label and for infinity appear where needed.

        Args:
            values: What it has to show.
            none: Label of the first slot.
            always: Whether there is a first slot in any case.
            broken: Whether wide gaps between values are moved together.
        """
        given = list(values)
        finite = sorted({v for v in given if v is not None and 0 < v < math.inf}) or [1.0, 10.0]
        gaps = [(a * EDGE, b / EDGE) for a, b in pairwise(finite) if broken and b > GAP * a]
        return cls(
            low=finite[0] / EDGE,
            high=finite[-1] * EDGE,
            breaks=tuple(gaps),
            first=none if always or any(not v for v in given) else "",
            last="∞" if any(v is not None and math.isinf(v) for v in given) else "",
        )

    def __call__(self, value: float | None) -> float:
        """The place of a value; None and 0 belong to the first slot."""
        room = 0.0 if not self.first else SLOT if len(self.first) < 4 else WIDE_SLOT
        if not value or value < 0:
            return room / 2
        if math.isinf(value):
            return 1 - SLOT / 2
        end = 1 - (SLOT if self.last else 0.0)
        low, high, at = (self._coordinate(v) for v in (self.low, self.high, value))
        return room + (at - low) / (high - low) * (end - room)

    def _coordinate(self, value: float) -> float:
        """The logarithm with gaps moved together."""
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
        ends = [self.low, *(end for gap in self.breaks for end in gap), self.high]
        values: list[float] = []
        for low, high in zip(ends[::2], ends[1::2], strict=True):
            lonely = bool(self.breaks) and high < 8 * low  # about one value: it is its own tick
            values += [math.sqrt(low * high)] if lonely else log_ticks(low, high, 6 if self.breaks else 9)
        first = [(self(None), self.first)] if self.first else []
        last = [(self(math.inf), self.last)] if self.last else []
        return [*first, *((self(value), _label(value)) for value in values), *last]

    def show_on(self, axis: Any) -> None:
        """Gives a matplotlib axis these ticks; a break is a double slash across it."""
        across = axis.axis_name == "x"
        axis.axes.set(**{f"{axis.axis_name}lim": (0.0, 1.0)})
        axis.set_ticks(*map(list, zip(*self.ticks(), strict=True)))
        for place in self.gaps():
            axis.axes.text(
                *((place, 0.0) if across else (0.0, place)), "//", ha="center", va="center", clip_on=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                transform=axis.axes.transAxes,
            )  # fmt: skip


def _label(value: float) -> str:
    """A number as short as it can be read."""
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.6g}"


def log_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Some round values between two ends; powers of two on a short axis of small values.

    Args:
        low: One end.
        high: The other.
        most: How many at most.
    """
    if high < min(2.0**most * low, 1024.0) and low >= 2.0**-7:
        return [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    powers = [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * power for power in powers for step in steps if low <= step * power <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / (most - 1))]
