"""Edges of bins that people can read, chosen from noisy counts: no further cost.

Bins begin as cells of a binary grid, with ends like 2.00391 or 0.0546875. Where noisy counts say that a
column holds whole numbers, 3 parts the same people as 2.00391 and says so; elsewhere an edge moves by a small
part of the bins beside it, to the roundest number there. What is in a bin is counted afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

REACH = 1 / 8
"""How far an edge may move, in widths of the narrower bin beside it."""
CHANGED = 1 / 4
"""How many people may change their bin by it, as a share of the smaller bin."""
NOTHING = 1.5
"""Standard deviations of its noise below which an interval counts as empty, as where bins are made."""
SURE = 3.0
"""Standard deviations by which counts must differ before a column is taken for whole numbers."""
ABOVE_ZERO = math.nextafter(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """An interval low <= value < high with a noisy count and the variance of its noise."""

    low: float
    high: float
    count: float
    variance: float

    @property
    def whole(self) -> bool:
        """Whether it holds a whole number."""
        return math.ceil(self.low) < self.high


def tidy(
    edges: Sequence[float], counts: Sequence[float], cells: Sequence[Counted]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Edges moved to round numbers, and the counts of their bins; what can hold no whole number is joined.

    Args:
        edges: Inner edges, ascending.
        counts: Of the bins, one more.
        cells: The intervals that were counted, of which the bins were made.
    """
    whole = holds_whole_numbers(cells)
    starts, totals = _whole(edges, counts) if whole else (list(edges), list(counts))
    ends = [-math.inf, *starts, math.inf]
    least = 1.0 if whole else 0.0
    moved = [
        _moved(edge, (ends[i], ends[i + 2]), CHANGED * min(totals[i : i + 2]), cells, step=least)
        for i, edge in enumerate(starts)
    ]
    ascending = all(a < b for a, b in itertools.pairwise(moved))
    return tuple(moved if ascending else starts), tuple(totals)


def _whole(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    starts: list[float] = []
    totals = [counts[0]]
    for edge, count in zip(map(math.ceil, edges), counts[1:], strict=True):
        if starts and starts[-1] == edge:
            totals[-1] += count
        else:
            starts.append(float(edge))
            totals.append(count)
    return starts, totals


def holds_whole_numbers(cells: Sequence[Counted]) -> bool:
    """Whether narrow intervals with a whole number in them have people, and those without have none."""
    narrow = [cell for cell in cells if cell.high - cell.low < 1]
    groups = [[cell for cell in narrow if cell.whole is whole] for whole in (True, False)]
    (inside, spread), (outside, noise) = (
        (math.fsum(c.count for c in group), math.fsum(c.variance for c in group)) for group in groups
    )
    least, more = SURE * math.sqrt(noise), SURE * math.sqrt(spread)
    return bool(groups[1]) and outside <= least < inside - outside - more


def _moved(
    edge: float, ends: tuple[float, float], most: float, cells: Sequence[Counted], *, step: float
) -> float:
    """The roundest number near an edge; zero and what lies right above it stay apart.

    Args:
        edge: Where two bins meet.
        ends: Where the one begins and the other ends.
        most: How many people may change their bin, as far as counts can tell.
        cells: All that were counted.
        step: Smallest step between round numbers.
    """
    if edge in (0.0, ABOVE_ZERO):
        return edge
    reach = REACH * min(edge - ends[0], ends[1] - edge, abs(edge))
    below = (cell for cell in reversed(cells) if cell.high <= edge)
    above = (cell for cell in cells if cell.low >= edge)
    low = max(edge - reach, edge - _room(below, most))
    high = min(edge + reach, edge + _room(above, most))
    return _held(roundest(low, high, edge, step=step))


def _held(value: float) -> float:
    """The largest number of 32 bits, as rows are held, that is not above: with it a cell of 0.7 is at 0.7."""
    near = np.float32(value)
    return float(near if float(near) <= value else np.nextafter(near, np.float32(-np.inf)))


def _room(cells: Iterable[Counted], most: float) -> float:
    """How far an edge can go through these intervals: past light ones, into the next by a part of it."""
    room = people = 0.0
    for cell in cells:
        width = cell.high - cell.low
        people += cell.count if cell.count >= NOTHING * math.sqrt(cell.variance) else 0.0
        if people > most:
            return room + (REACH * width if math.isfinite(width) else 0.0)
        room += width
    return room


def roundest(low: float, high: float, near: float, *, step: float = 0.0) -> float:
    """The multiple of the largest 5 10^k, 2 10^k or 10^k between low and high; of several the nearest.

    Args:
        low: Least value.
        high: Largest value.
        near: What is given back if nothing rounder is found.
        step: Smallest size of a step; 0 for any.
    """
    first = math.floor(math.log10(max(abs(low), abs(high), 1e-300))) + 1
    for power, factor in itertools.product(range(first, first - 7, -1), (5, 2, 1)):
        size = factor * 10.0**power
        if size < step:
            break
        multiples = (round(near / size), math.ceil(low / size), math.floor(high / size))
        for found in (float(f"{multiple * size:.12g}") for multiple in multiples):
            if low <= found <= high:
                return found
    return near
