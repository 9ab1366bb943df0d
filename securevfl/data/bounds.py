"""Public bounds of columns: what everybody may know about their range without looking at a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import DataError

from .checks import nearest

Columns: TypeAlias = Sequence[Sequence[str]]
# One (columns, 2) array of low and high per party, NaN where unknown; None where a party has none at all.
Bounds: TypeAlias = tuple[NDArray[np.float64] | None, ...]


def make_bounds(given: Any, parties: Sequence[str], columns: Columns) -> Bounds:
    """Bounds per party from what a caller may write.

    Args:
        given: None; one `(low, high)` for every column; a mapping column -> `(low, high)`; or a list with
            one entry per party, each None, one pair, or one pair (or None) per column.
        parties: Party names, for messages.
        columns: Column names per party.
    """
    if given is None:
        return tuple(None for _ in parties)
    if isinstance(given, Mapping):
        return _from_mapping(given, columns)
    if _is_pair(given):
        given = [given] * len(parties)
    if isinstance(given, str) or len(given) != len(parties):
        raise DataError(f"bounds: expected one entry per party ({len(parties)}), found {given!r}")
    return tuple(
        _of_party(entry, party, names) for entry, party, names in zip(given, parties, columns, strict=True)
    )


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(np.isscalar(end) for end in entry)


def _from_mapping(given: Mapping[str, Any], columns: Columns) -> Bounds:
    known = [name for names in columns for name in names]
    for name in given:
        if name not in known:
            raise DataError(f"bounds for unknown column {name!r}{nearest(str(name), known)}")
    tables = [_table([given.get(name) for name in names], names) for names in columns]
    return tuple(None if np.isnan(table).all() else table for table in tables)


def _of_party(entry: Any, party: str, names: Sequence[str]) -> NDArray[np.float64] | None:
    if entry is None:
        return None
    pairs = [entry] * len(names) if _is_pair(entry) else list(entry)
    if len(pairs) != len(names):
        raise DataError(f"party {party}: {len(pairs)} bounds for {len(names)} columns; give one pair each")
    return _table(pairs, names)


def _table(pairs: Sequence[Any], names: Sequence[str]) -> NDArray[np.float64]:
    table = np.full((len(names), 2), np.nan)
    for row, (pair, name) in enumerate(zip(pairs, names, strict=True)):
        if pair is None or np.isnan(pair).all():
            continue
        low, high = (float(end) for end in pair)
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise DataError(f"bounds of column {name!r} must be finite and ascending, found {(low, high)}")
        table[row] = low, high
    return table
