"""Blocks of features, the names of their parties, and the public bounds of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data import sparse
from securevfl.data.mapped import Mapped, is_mapped
from securevfl.errors import DataError, nearest

# One party's features: float32, rows first; dense with two or more dimensions, scipy CSR, or `Mapped`.
Block: TypeAlias = Any
Index: TypeAlias = NDArray[np.intp]
Pair: TypeAlias = tuple[float, float]

# Party names become file names of ledgers, views and models.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHOWN = 6


def shorten(names: Sequence[object]) -> str:
    """At most a handful of names, and how many more there are."""
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"


def party_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Checked party names; p0, p1, ... where none are given."""
    if count < 1:
        raise DataError(f"found {count} parties; vertical data needs at least one")
    if names is None:
        return tuple(f"p{i}" for i in range(count))
    if isinstance(names, str) or len(names) != count:
        raise DataError(
            f"found party names {names!r} for {count} blocks of features; give one name per block"
        )
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(f"party name {name!r} cannot be used; take letters, digits, '.', '_' and '-'")
    # Two names that differ only in case would share one file on some systems.
    if len({name.lower() for name in names}) < count:
        raise DataError(f"party names must differ from each other, found {', '.join(names)}")
    return tuple(names)


def as_block(values: Any, party: str) -> Block:
    """A private float32 copy of one party's features; values too large for float32 become infinite.

    What lies in a file, as `numpy.load(..., mmap_mode="r")` gives it, stays there.
    """
    if isinstance(values, Mapped) or is_mapped(values):
        return values if isinstance(values, Mapped) else Mapped(values)
    if sparse.issparse(values):
        block = sparse.csr_array(values, copy=True)
        if block.ndim != 2:
            raise DataError(f"party {party}: the sparse features have {block.ndim} dimensions, expected 2")
        block.sum_duplicates()
        block.data = _to_float32(block.data, party)
    else:
        block = _to_float32(values, party)
        if block.ndim < 2:
            raise DataError(
                f"party {party}: features have shape {block.shape}; expected rows x columns "
                "(reshape one column to (n, 1))"
            )
    if width(block) < 1:
        raise DataError(f"party {party}: no feature columns in a block of shape {block.shape}")
    return block


def _to_float32(values: Any, party: str) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
        if array.dtype.kind in "cmM":
            raise TypeError
        with np.errstate(over="ignore"):
            return np.array(array, dtype=np.float32, order="C")
    except (TypeError, ValueError):
        raise DataError(
            f"party {party}: features are not all numbers; encode text one-hot or leave those columns out"
        ) from None


def width(block: Block) -> int:
    """Number of features per record, all dimensions multiplied."""
    return int(np.prod(block.shape[1:]))


def flat(block: Block) -> Block:
    """The block with one row per record and one column per feature."""
    if sparse.issparse(block) or isinstance(block, Mapped):
        return block
    return block.reshape(block.shape[0], width(block))


def take(block: Block, rows: Index) -> Block:
    """Some rows of a block; those of a file stay in it."""
    return block.take(rows) if isinstance(block, Mapped) else block[rows]


def not_finite(block: Block) -> tuple[Index, Index]:
    """Row and column numbers (of the flat block) of NaN and infinite values, in row order."""
    if sparse.issparse(block):
        bad = np.flatnonzero(~np.isfinite(block.data))
        rows = np.searchsorted(block.indptr, bad, side="right") - 1
        return rows.astype(np.intp), block.indices[bad].astype(np.intp)
    if isinstance(block, Mapped):
        found = [(start, np.argwhere(~np.isfinite(piece))) for start, piece in block.pieces()]
        places = np.concatenate([np.add(where, (start, 0)) for start, where in found])
        return places[:, 0], places[:, 1]
    rows, columns = np.nonzero(~np.isfinite(flat(block)))
    return rows, columns


def check_seed(seed: int) -> int:
    """The seed, if it is a non-negative whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed must be a whole number >= 0, found {seed!r}")
    return int(seed)


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
            raise DataError(f"bounds for unknown column {name!r}; {nearest(name, known)}")
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
