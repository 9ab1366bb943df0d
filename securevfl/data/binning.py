"""Bins of a column from noisy counts alone: public grids, three levels, reconciled and merged.

Nothing here looks at a row except `histogram`, whose counts get noise before anything else sees them. What
follows (which cells are split, where bins end) is a function of noisy counts and public numbers, so it costs
nothing further.

Level 1 counts a public grid: half binades of both signs with zero alone, or equal cells inside public bounds.
Cells with enough records are split into 16 equal parts, twice. Each level has noise of its own; least squares
reconciles them, and neighbouring cells are merged into at most `BINS` bins.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from securevfl.data.columns import Column, numbers_of
from securevfl.data.edges import Counted, tidy
from securevfl.data.vertical import VerticalData
from securevfl.errors import DataError

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Noise: TypeAlias = Callable[[NDArray[np.float64], float], NDArray[np.float64]]
"""noise(counts, std): the counts with independent noise; the gate supplies it and writes the release down."""
Counter: TypeAlias = Callable[[int, Sequence[Floats], bool], Sequence[Floats]]
"""counter(level, edges of some intervals, count missing values too): noisy counts of their cells."""

BINS = 32
PARTS = 16
BOUNDED_CELLS = 64
FREE_VALUES = 64
"""A category list up to this length is used as it is; longer ones are counted first."""
MOST_NAMED = 4
"""Values of a list that are named where a bin holds them together."""
SPLIT = (0.5, 2.0)
"""Cells of levels 1 and 2 above this multiple of `want` are split, if significant."""
SIGNIFICANT = 2.5
"""Standard deviations of its noise that a count must exceed to be split."""


def half_binades() -> Floats:
    """Inner edges of the public grid without bounds: +-2^e, +-1.5 2^e for e = -14..47, zero alone."""
    sizes = [factor * 2.0**e for e in range(-14, 48) for factor in (1.0, 1.5)]
    return np.array([-s for s in reversed(sizes)] + [0.0, np.nextafter(0.0, 1.0)] + sizes)


def equal_cells(low: float, high: float) -> Floats:
    """Inner edges of equal cells inside public bounds; what lies outside counts with the end cells."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise DataError(f"public bounds must be finite and ascending, found {(low, high)}")
    return np.unique(np.linspace(low, high, BOUNDED_CELLS + 1)[1:-1])


def histogram(values: Floats, edges: Floats) -> Floats:
    """How many values lie in [edge, next edge), infinity included where it is the last edge."""
    inside = values[(values >= edges[0]) & ((values < edges[-1]) | (edges[-1] == np.inf))]
    places = np.minimum(np.searchsorted(edges, inside, side="right") - 1, len(edges) - 2)
    return np.bincount(places, minlength=len(edges) - 1).astype(np.float64)


@dataclass
class _Cell:
    """An interval [low, high) with a noisy count, and the parts that it was split into."""

    low: float
    high: float
    count: float
    variance: float
    parts: list[_Cell] = field(default_factory=list)

    def gather(self) -> None:
        """Combine the own count with those of the parts, from below, by inverse variance."""
        if not self.parts:
            return
        for part in self.parts:
            part.gather()
        below = math.fsum(part.count for part in self.parts)
        spread = math.fsum(part.variance for part in self.parts)
        total = self.variance + spread
        if total:
            self.count = (self.count * spread + below * self.variance) / total
            self.variance = self.variance * spread / total
        else:
            self.count = below

    def leaves(self, excess: float = 0.0) -> list[_Cell]:
        """The undivided cells; what the parent gained in `gather` is handed down by variance."""
        self.count += excess
        if not self.parts:
            return [self]
        gained = self.count - math.fsum(part.count for part in self.parts)
        spread = math.fsum(part.variance for part in self.parts)
        return [
            leaf
            for part in self.parts
            for leaf in part.leaves(gained * (part.variance / spread if spread else 1 / len(self.parts)))
        ]


@dataclass(frozen=True, kw_only=True)
class NumberBins:
    """Bins of a numeric column. Bin i holds edges[i-1] <= value < edges[i]; the last may be for gaps.

    Attributes:
        edges: Inner edges, ascending.
        missing: Bin of missing values; the last where they have one of their own.
        counts: Noisy counts of the bins.
    """

    edges: tuple[float, ...]
    missing: int
    counts: tuple[float, ...]

    ordered = True

    @property
    def size(self) -> int:
        """Number of bins."""
        return len(self.counts)

    @property
    def own_missing(self) -> bool:
        """Whether missing values have a bin of their own."""
        return self.missing == len(self.edges) + 1

    @property
    def labels(self) -> list[str]:
        """One text per bin."""
        ends = [-math.inf, *self.edges, math.inf]
        ranges = [f"[{a:.6g}, {b:.6g})" for a, b in itertools.pairwise(ends)]
        return ranges + ["missing"] * self.own_missing

    def joined(self, place: Indices) -> NumberBins:
        """The bins after neighbours were joined: bin i becomes place[i]."""
        values = len(self.edges) + 1
        kept = tuple(edge for i, edge in enumerate(self.edges) if place[i] != place[i + 1])
        counts = np.bincount(place, self.counts)
        return NumberBins(
            edges=kept if values > 1 else (), missing=int(place[self.missing]), counts=tuple(counts.tolist())
        )

    def assign(self, column: ArrayLike) -> Indices:
        """The bin of every value."""
        values = np.asarray(column, np.float64)
        places = np.searchsorted(np.asarray(self.edges), values, side="right")
        return np.where(np.isnan(values), self.missing, places).astype(np.intp)


@dataclass(frozen=True, kw_only=True)
class CategoryBins:
    """Bins of a category column: one per value of a public list, the last for everything else.

    Attributes:
        values: The list; None hashes every value into `FREE_VALUES` public buckets.
        groups: Bin of each value (or bucket) and, last, of everything else.
    """

    values: tuple[str, ...] | None
    groups: tuple[int, ...]

    ordered = False
    own_missing = False

    @property
    def size(self) -> int:
        """Number of bins."""
        return max(self.groups) + 1

    @property
    def labels(self) -> list[str]:
        """One text per bin."""
        named = self.values or tuple(f"bucket {i}" for i in range(FREE_VALUES))
        found: list[list[str]] = [[] for _ in range(self.size)]
        for value, group in zip((*named, "other"), self.groups, strict=True):
            found[group].append(value)
        return ["other" if "other" in names else ", ".join(names) for names in found]

    def assign(self, column: Sequence[object]) -> Indices:
        """The bin of every value; a gap is like a value that is not on the list."""
        place = dict(zip(self.values or (), self.groups, strict=False))
        cells = [str(cell).strip() for cell in column]
        known = {c: place.get(c, self.groups[-1]) if self.values else self._bucket(c) for c in set(cells)}
        return np.array([known[cell] for cell in cells], np.intp)

    def _bucket(self, cell: str) -> int:
        return (
            self.groups[hashlib.sha256(cell.encode()).digest()[0] % FREE_VALUES] if cell else self.groups[-1]
        )


@dataclass(frozen=True, kw_only=True)
class CodeBins:
    """Bins of a column of codes (categories, flags).

    Attributes:
        groups: Bin of each code and, last, of a missing value.
    """

    groups: tuple[int, ...]

    ordered = False
    own_missing = False

    @property
    def size(self) -> int:
        """Number of bins."""
        return max(self.groups) + 1

    def joined(self, place: Indices) -> CodeBins:
        """The bins after some were joined: bin i becomes place[i]."""
        return CodeBins(groups=tuple(int(place[group]) for group in self.groups))

    def assign(self, column: ArrayLike) -> Indices:
        """The bin of every code; NaN is a missing value."""
        values = np.asarray(column, np.float64)
        codes = np.where(np.isnan(values), len(self.groups) - 1, values).astype(np.intp)
        return np.asarray(self.groups, np.intp)[codes]


def number_bins(
    counter: Counter,
    *,
    records: int,
    stds: Sequence[float],
    bounds: tuple[float, float] | None = None,
    bins: int = BINS,
    readable: bool = True,
) -> NumberBins:
    """Bins of a numeric column from what `counter` says about public intervals.

    Args:
        counter: Noisy counts; the only way in which rows have a say.
        records: N, public.
        stds: Noise of the three levels.
        bounds: Public bounds; None takes the half binades.
        bins: Most bins that values get (missing values may have one more).
        readable: Whether edges are moved to round numbers.
    """
    inner = half_binades() if bounds is None else equal_cells(*bounds)
    want = records / bins
    first = counter(0, [np.array([-np.inf, *inner, np.inf])], True)
    gaps, counts = float(first[0][-1]), first[0][:-1]
    ends = [-np.inf, *inner, np.inf] if bounds is None else [bounds[0], *inner, bounds[1]]
    cells = [_Cell(a, b, float(c), stds[0] ** 2) for a, b, c in zip(ends[:-1], ends[1:], counts, strict=True)]
    level = cells
    for number, factor in enumerate(SPLIT, start=1):
        level = _split(
            level, counter, number, max(factor * want, SIGNIFICANT * stds[number - 1]), stds[number]
        )
    for cell in cells:
        cell.gather()
    leaves = [leaf for cell in cells for leaf in cell.leaves()]
    edges, totals = _merge(leaves, want=want, smallest=max(0.002 * records, 3 * stds[0]), bins=bins)
    if readable:
        counted = [Counted(low=c.low, high=c.high, count=c.count, variance=c.variance) for c in leaves]
        edges, totals = tidy(edges, totals, counted)
    if gaps > max(3 * stds[0], records / 400):
        return NumberBins(edges=edges, missing=len(edges) + 1, counts=(*totals, gaps))
    return NumberBins(edges=edges, missing=int(np.argmax(totals)), counts=totals)


def _split(cells: list[_Cell], counter: Counter, level: int, least: float, std: float) -> list[_Cell]:
    """Divide the cells above `least` into equal parts and count those."""
    chosen, edges = [], []
    for cell in cells:
        if cell.count > least and math.isfinite(cell.low) and math.isfinite(cell.high):
            parts = np.unique(np.linspace(cell.low, cell.high, PARTS + 1))
            if len(parts) > 2:
                chosen.append(cell)
                edges.append(parts)
    if not chosen:
        return []
    made = []
    for cell, ends, counts in zip(chosen, edges, counter(level, edges, False), strict=True):
        cell.parts = [
            _Cell(float(a), float(b), float(c), std**2)
            for a, b, c in zip(ends[:-1], ends[1:], counts, strict=True)
        ]
        made += cell.parts
    return made


def _merge(
    leaves: list[_Cell], *, want: float, smallest: float, bins: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Inner edges and counts of the bins: heavy cells alone, the rest in groups of about equal mass."""
    mass = np.array([leaf.count if leaf.count >= 1.5 * leaf.variance**0.5 else 0.0 for leaf in leaves])
    mass = np.maximum(mass, 0.0)
    heavy = mass >= max(want, smallest)
    target = max(float(mass[~heavy].sum()) / max(bins - int(heavy.sum()), 1), smallest)
    groups: list[tuple[float, float, bool]] = []  # low edge, mass, heavy
    is_open = False
    for leaf, amount, alone in zip(leaves, mass.tolist(), heavy.tolist(), strict=True):
        if alone or not is_open:
            groups.append((leaf.low, amount, alone))
            is_open = not alone
        else:
            groups[-1] = (groups[-1][0], groups[-1][1] + amount, False)
        if is_open and groups[-1][1] >= target:
            is_open = False
    while len(groups) > 1:
        weak = min(range(len(groups)), key=lambda i: groups[i][1])
        if groups[weak][1] >= smallest and len(groups) <= bins:
            break
        near = [i for i in (weak - 1, weak + 1) if 0 <= i < len(groups)]
        other = min(near, key=lambda i: (groups[i][2], groups[i][1]))  # rather not into a heavy one
        low, high = min(weak, other), max(weak, other)
        joined = (groups[low][0], groups[low][1] + groups[high][1], groups[low][2] or groups[high][2])
        groups[low : high + 1] = [joined]
    return tuple(float(group[0]) for group in groups[1:]), tuple(float(group[1]) for group in groups)


def noisy_counter(
    column: ArrayLike, noise: Noise, *, stds: Sequence[float], bounds: tuple[float, float] | None = None
) -> Counter:
    """Counts of a column's values (and gaps) with noise: the only place that looks at rows."""
    every = np.asarray(column, np.float64)
    values = every[~np.isnan(every)]
    if bounds is not None:
        values = np.clip(values, bounds[0], np.nextafter(bounds[1], bounds[0]))

    def counter(level: int, edges: Sequence[Floats], missing: bool) -> Sequence[Floats]:
        exact = [histogram(values, ends) for ends in edges]
        if missing:
            exact[0] = np.append(exact[0], every.size - values.size)
        joined = np.concatenate(exact)
        return np.split(noise(joined, stds[level]), np.cumsum([len(e) for e in exact])[:-1])

    return counter


def bin_numbers(
    column: ArrayLike,
    noise: Noise,
    *,
    stds: Sequence[float],
    bounds: tuple[float, float] | None = None,
    bins: int = BINS,
    readable: bool = True,
) -> NumberBins:
    """Count a column with noise, level by level, and bin it."""
    counter = noisy_counter(column, noise, stds=stds, bounds=bounds)
    records = int(np.size(column))
    return number_bins(counter, records=records, stds=stds, bounds=bounds, bins=bins, readable=readable)


def bin_categories(
    column: Sequence[object],
    values: Sequence[str] | None,
    noise: Noise,
    *,
    std: float,
) -> CategoryBins:
    """Bins of a category column: free up to `FREE_VALUES`, by one level of noisy counts beyond.

    Args:
        column: The cells; looked at only where the list is long.
        values: The agreed list; None for hashing.
        noise: Noise of the counts.
        std: Its standard deviation.
    """
    if values is None:
        return CategoryBins(values=None, groups=tuple(range(FREE_VALUES + 1)))
    named = tuple(str(value).strip() for value in values if str(value).strip() != "other")
    if len(set(named)) < len(named) or not named:
        raise DataError("a category list must have values that differ from each other")
    each = CategoryBins(values=named, groups=tuple(range(len(named) + 1)))
    if len(named) <= FREE_VALUES:
        return each
    counts = noise(np.bincount(each.assign(column), minlength=each.size).astype(np.float64), std)
    return CategoryBins(values=named, groups=grouped_values(counts[:-1], records=len(column), std=std))


def grouped_values(counts: Floats, *, records: int, std: float) -> tuple[int, ...]:
    """Bins of a long list from noisy counts: the most frequent values alone, the rest with `other`."""
    least = max(0.002 * records, 3 * std)
    order = np.argsort(-counts, kind="stable")[:FREE_VALUES]
    alone = sorted(int(i) for i in order if counts[i] >= least)
    place = {value: group for group, value in enumerate(alone)}
    return (*(place.get(i, len(alone)) for i in range(len(counts))), len(alone))


# -- columns of a card, from what everybody knows of a party's features --------------------------------------


def card_columns(data: VerticalData) -> tuple[tuple[Column, ...], ...]:
    """The columns of every party: as they were described, or else one number for each feature. Public."""
    if data.described:
        return tuple(mine.columns for mine in data.described)
    return tuple(numbers_of(*each) for each in zip(data.columns, data.bounds, strict=True))


def is_binned(column: Column) -> bool:
    """Whether a column's bins come from noisy counts; short lists of categories and flags are free."""
    return column.kind == "number" or column.codes > FREE_VALUES


def is_flag(column: Column) -> bool:
    """Whether a column has two values, as far as everybody knows."""
    return column.kind == "flag" or (column.kind == "number" and column.bounds == (0.0, 1.0))


def most_bins(column: Column) -> int:
    """The most bins that a column can get: public, so that nobody learns how many it has."""
    gap = int(column.missing == "bin")
    if column.kind == "number":
        return BINS + gap
    if column.kind == "flag":
        return 2 + gap
    return column.codes + gap if column.codes <= FREE_VALUES else FREE_VALUES + 1


def raw_values(column: Column, features: Floats) -> Floats:
    """A column's values from its features: numbers or codes, NaN where missing.

    Args:
        column: The column.
        features: Its part of the party's block, (rows, features).
    """
    if column.kind == "category":
        own = features[:, : column.codes]
        gaps = own.max(axis=1) <= 0.5
        values = own.argmax(axis=1).astype(np.float64)
    else:
        values = np.array(features[:, 0], np.float64)
        gaps = features[:, -1] > 0.5 if column.missing == "bin" else np.isnan(values)
        if column.kind == "flag":
            values = (values > 0.5).astype(np.float64)
    return np.where(gaps, np.nan, values)


def raw_columns(columns: Sequence[Column], rows: Floats) -> list[Floats]:
    """Raw values of every column from rows of features."""
    ends = np.cumsum([0, *(len(column.features) for column in columns)])
    return [raw_values(column, rows[:, ends[i] : ends[i + 1]]) for i, column in enumerate(columns)]


def bin_column(
    column: Column,
    values: Floats,
    noise: Noise,
    *,
    stds: Sequence[float],
    list_std: float,
    bins: int = BINS,
) -> NumberBins | CodeBins:
    """A column's bins; rows have a say only through counts with noise.

    Args:
        column: The column.
        values: As `raw_values` gives them.
        noise: Noise of counts.
        stds: Its standard deviations by level, for numbers.
        list_std: For long lists of categories.
        bins: Most bins of a number.
    """
    if column.kind == "number":
        low, high = column.feature_bounds[0] or (0.0, 0.0)
        bounds = (low, high) if low < high else None
        linear = column.scale == "linear"  # edges of others would be round on a scale that nobody reads
        return bin_numbers(values, noise, stds=stds, bounds=bounds, bins=bins, readable=linear)
    codes = column.codes or 2
    if not is_binned(column):
        return CodeBins(groups=(*range(codes), codes if column.missing == "bin" else codes - 1))
    counts = np.bincount(values[~np.isnan(values)].astype(np.intp), minlength=codes)
    noisy = noise(counts.astype(np.float64), list_std)
    return CodeBins(groups=grouped_values(noisy, records=len(values), std=list_std))


def bin_labels(column: Column, bins: NumberBins | CodeBins) -> list[str]:
    """One text per bin."""
    if isinstance(bins, NumberBins):
        return bins.labels
    names = column.values or (("no", "yes") if column.kind == "flag" else ())
    named = names or tuple(f"bucket {i}" for i in range(column.codes))
    found: list[list[str]] = [[] for _ in range(bins.size)]
    for name, group in zip((*named, "missing"), bins.groups, strict=True):
        if name != "missing" or column.missing == "bin":
            found[group].append(name)
    return ["other" if "other" in each else _few(each) for each in found]


def _few(names: Sequence[str]) -> str:
    """Names in a line: of many the first two and how many follow."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
