"""Bringing the parties' rows into one order by their record IDs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import DataError

from .checks import Index


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
    elif array.dtype.kind in "UO" and all(isinstance(value, str | int) for value in array.tolist()):
        array = np.array([str(value).strip() for value in array.tolist()])
    elif len(array):
        raise DataError(f"{where}: IDs must be whole numbers or text, found {array.tolist()[0]!r}")
    _check_unique(array.tolist(), where)
    return array


def _check_unique(ids: list[Any], where: str) -> None:
    seen: set[Any] = set()
    for row, value in enumerate(ids):
        if value == "":
            raise DataError(f"{where}: data row {row + 1} has no ID")
        if value in seen:
            raise DataError(f"{where}: ID {value!r} occurs more than once; each record needs its own ID")
        seen.add(value)


def join_on_ids(ids: Sequence[NDArray[Any]], names: Sequence[str], order_of: int) -> Join:
    """Join sources on their common IDs, in the row order of the source `order_of` (the label holder).

    Raises:
        DataError: No ID is common to all sources.
    """
    if len({array.dtype.kind for array in ids}) > 1:
        ids = [array.astype(np.str_) for array in ids]
    places = [{value: row for row, value in enumerate(array.tolist())} for array in ids]
    common = [value for value in ids[order_of].tolist() if all(value in place for place in places)]
    if not common:
        examples = ", ".join(
            f"{name} has {array[0].item()!r}" for name, array in zip(names, ids, strict=True) if len(array)
        )
        raise DataError(f"no ID is common to all {len(ids)} parties ({examples}, ...); check the ID columns")
    rows = tuple(np.array([place[value] for value in common], dtype=np.intp) for place in places)
    lost = tuple(len(array) - len(common) for array in ids)
    return Join(ids=ids[order_of][rows[order_of]], rows=rows, lost=lost)
