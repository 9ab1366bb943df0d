"""Which rows and columns go where: joining on IDs, columns to parties, rows to the test part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data.blocks import Index, check_seed, party_names
from securevfl.errors import DataError, nearest

# A number of parties; a list of column counts; or party name -> column names, indices or view names.
ColumnSplit: TypeAlias = int | Sequence[int] | Mapping[str, Sequence[str | int]]
Shares: TypeAlias = list[tuple[str, Index]]


def divide_columns(how: ColumnSplit, views: Mapping[str, Sequence[str]]) -> Shares:
    """Resolve a column split.

    Args:
        how: See `ColumnSplit`. A number makes contiguous blocks whose sizes differ by at most one.
        views: The present parties and their columns, in order; a mapping may name a whole view.

    Returns:
        New party names with the numbers of their columns, counted over all views in order.
    """
    total = sum(len(columns) for columns in views.values())
    if isinstance(how, Mapping):
        return _by_name(how, views)
    if isinstance(how, bool | str | float):
        raise DataError(f"parties must be a number, a list of column counts or a mapping, found {how!r}")
    if isinstance(how, int | np.integer):
        return _numbered(_near_equal(int(how), total))
    return _numbered(_by_counts(list(how), total))


def _numbered(parts: list[Index]) -> Shares:
    return list(zip(party_names(None, len(parts)), parts, strict=True))


def _near_equal(parties: int, total: int) -> list[Index]:
    if parties < 1:
        raise DataError(f"found {parties} parties; vertical data needs at least one")
    if parties > total:
        raise DataError(
            f"{parties} parties cannot share {total} features; each party needs at least one column"
        )
    return [np.asarray(part, dtype=np.intp) for part in np.array_split(np.arange(total), parties)]


def _by_counts(counts: list[Any], total: int) -> list[Index]:
    if not counts:
        raise DataError("found 0 parties; vertical data needs at least one")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise DataError(f"column counts must be whole numbers >= 1, found {count!r}")
    if sum(counts) != total:
        raise DataError(f"column counts {counts} add up to {sum(counts)}, but the data has {total} features")
    return np.split(np.arange(total, dtype=np.intp), np.cumsum(counts)[:-1])


def _by_name(how: Mapping[str, Sequence[str | int]], views: Mapping[str, Sequence[str]]) -> Shares:
    names = party_names(list(how), len(how))
    catalogue = _Catalogue(views)
    owner: dict[int, str] = {}
    shares: Shares = []
    for name in names:
        wanted = how[name]
        if isinstance(wanted, str | int):
            raise DataError(f"party {name}: give a list of columns, found {wanted!r}")
        columns = [number for entry in wanted for number in catalogue.find(entry)]
        if not columns:
            raise DataError(f"party {name} gets no columns; each party needs at least one")
        for number in columns:
            if number in owner:
                raise DataError(
                    f"column {catalogue.columns[number]!r} is given to {owner[number]} and again to {name}"
                )
            owner[number] = name
        shares.append((name, np.array(columns, dtype=np.intp)))
    return shares


class _Catalogue:
    """Looks up what one entry of a mapping stands for: a column, an index or a whole view."""

    def __init__(self, views: Mapping[str, Sequence[str]]) -> None:
        self.columns = [column for columns in views.values() for column in columns]
        self._numbers: dict[str, list[int]] = {}
        for number, column in enumerate(self.columns):
            self._numbers.setdefault(column, []).append(number)
        self._views: dict[str, list[int]] = {}
        start = 0
        for view, columns in views.items():
            self._views[view] = list(range(start, start + len(columns)))
            start += len(columns)

    def find(self, entry: str | int) -> list[int]:
        if not isinstance(entry, str):
            if isinstance(entry, bool | float) or not 0 <= entry < len(self.columns):
                raise DataError(f"column index {entry!r} is not a whole number in 0..{len(self.columns) - 1}")
            return [int(entry)]
        numbers = self._numbers.get(entry, [])
        if len(numbers) > 1:
            raise DataError(
                f"column {entry!r} exists {len(numbers)} times; give its index instead, one of {numbers}"
            )
        if numbers or entry in self._views:
            return numbers or self._views[entry]
        raise DataError(f"unknown column {entry!r}; {nearest(entry, [*self._numbers, *self._views])}")


def divide_rows(labels: NDArray[Any], *, classes: bool, fraction: float, seed: int) -> tuple[Index, Index]:
    """Row numbers of the training and the test part, each ascending.

    With classes every class gives its share to the test part (largest remainder), and always keeps at least
    one row for training.
    """
    check_seed(seed)
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, found {fraction!r}")
    groups = [np.flatnonzero(labels == value) for value in np.unique(labels)] if classes else None
    groups = groups or [np.arange(len(labels))]
    generator = np.random.default_rng(seed)
    takes = _quotas([len(group) for group in groups], fraction)
    test = np.concatenate(
        [generator.permutation(group)[:take] for group, take in zip(groups, takes, strict=True)]
    )
    if not len(test):
        raise DataError(
            f"{len(labels)} rows are too few for a test part of {fraction:g}; add rows or give a test set"
        )
    kept = np.ones(len(labels), dtype=bool)
    kept[test] = False
    return np.flatnonzero(kept), np.sort(test)


def _quotas(sizes: list[int], fraction: float) -> list[int]:
    exact = [size * fraction for size in sizes]
    takes = [min(int(share), size - 1) for share, size in zip(exact, sizes, strict=True)]
    goal = max(1, round(sum(sizes) * fraction))
    by_remainder = sorted(range(len(sizes)), key=lambda i: takes[i] - exact[i])
    for i in by_remainder:
        if sum(takes) < goal and takes[i] < sizes[i] - 1:
            takes[i] += 1
    return takes


@dataclass(frozen=True, kw_only=True)
class Join:
    """The common IDs, each source's row numbers in that order, and how many rows each source lost."""

    ids: NDArray[Any]
    rows: tuple[Index, ...]
    lost: tuple[int, ...]

    def notes(self, names: Sequence[str]) -> tuple[str, ...]:
        """One sentence on what the join lost, or nothing."""
        if not any(self.lost):
            return ()
        losses = ", ".join(
            f"{name} {lost} of {lost + len(self.ids)}"
            for name, lost in zip(names, self.lost, strict=True)
            if lost
        )
        return (f"joined on {len(self.ids)} common IDs; rows without a partner left out: {losses}",)


def clean_ids(ids: Any, where: str) -> NDArray[Any]:
    """IDs as a flat int64 or str array without duplicates.

    Text is compared as it stands ("007" is not "7"), without surrounding blanks.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise DataError(f"{where}: IDs have shape {array.shape}; expected one ID per row")
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    elif array.dtype.kind == "U":
        array = np.char.strip(array)
    elif array.dtype.kind == "O" and all(isinstance(value, str | int) for value in array.tolist()):
        array = np.array([str(value).strip() for value in array.tolist()])
    elif len(array):
        raise DataError(f"{where}: IDs must be whole numbers or text, found {array.dtype}")
    if len(np.unique(array)) < len(array) or (array.dtype.kind == "U" and (array == "").any()):
        _check_unique(array.tolist(), where)
    return array


def _check_unique(ids: list[Any], where: str) -> None:
    seen: set[Any] = set()
    for row, value in enumerate(ids):
        if value == "":
            raise DataError(f"{where}: data row {row + 1} has no ID")
        if value in seen:
            raise DataError(
                f"{where}: the ID of data row {row + 1} occurs more than once; each record needs its own ID"
            )
        seen.add(value)


def join_on_ids(ids: Sequence[NDArray[Any]], names: Sequence[str], order_of: int) -> Join:
    """Join sources on their common IDs, in the row order of the source `order_of` (the label holder).

    Raises:
        DataError: No ID is common to all sources.
    """
    if len({array.dtype.kind for array in ids}) > 1:
        ids = [array.astype(np.str_) for array in ids]
    places = [_places(array, ids[order_of]) for array in ids]
    common = np.all([place >= 0 for place in places], axis=0)
    if not common.any():
        found = ", ".join(f"{name} has {_form(array)}" for name, array in zip(names, ids, strict=True))
        raise DataError(f"no ID is common to all {len(ids)} parties ({found}); check the ID columns")
    rows = tuple(place[common] for place in places)
    lost = tuple(len(array) - int(common.sum()) for array in ids)
    return Join(ids=ids[order_of][rows[order_of]], rows=rows, lost=lost)


def _places(ids: NDArray[Any], wanted: NDArray[Any]) -> Index:
    """Where each wanted ID is among the others; -1 where it is not."""
    if np.array_equal(ids, wanted):
        return np.arange(len(ids))
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids, wanted, sorter=order)
    found = order[np.minimum(at, len(ids) - 1)] if len(ids) else np.zeros(len(wanted), np.intp)
    same = ids[found] == wanted if len(ids) else np.zeros(len(wanted), bool)
    return np.where(same, found, -1)


def _form(ids: NDArray[Any]) -> str:
    """What the IDs look like, without showing one."""
    texts = [str(value) for value in ids.tolist()]
    if not texts:
        return "none"
    lengths = {len(text) for text in texts}
    digits = "digits" if all(text.isdecimal() for text in texts) else "characters"
    return f"{len(texts)} IDs of {min(lengths)} to {max(lengths)} {digits}"
