"""From raw blocks, labels and IDs to checked `VerticalData`; every constructor ends here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.blocks import (
    Block,
    Index,
    as_block,
    make_bounds,
    not_finite,
    party_names,
    take,
    width,
)
from securevfl.data.columns import Column, Columns
from securevfl.data.labels import ClassValue, find_coding, missing_labels, raw_labels
from securevfl.data.mapped import taken
from securevfl.data.split import clean_ids, divide_rows, join_on_ids
from securevfl.data.vertical import LOADERS, VerticalData
from securevfl.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Aligned rows: row i of every block, of the labels, of the IDs and of raw values is one record."""

    blocks: tuple[Block, ...]
    labels: NDArray[Any]
    ids: NDArray[Any]
    raw: tuple[NDArray[np.float64], ...] = ()

    def take(self, rows: Index) -> Rows:
        """The given rows, in that order."""
        return Rows(
            blocks=tuple(take(block, rows) for block in self.blocks),
            labels=self.labels[rows],
            ids=self.ids[rows],
            raw=tuple(taken(values, np.asarray(rows)) for values in self.raw),
        )


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What the constructors pass through: names, public knowledge and how to split the rows."""

    parties: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    label_holder: str
    name: str
    bounds: Any = None
    test_fraction: float = 0.2
    seed: int = 0
    task: str | None = None
    positive: ClassValue | None = None
    missing: str = "error"
    notes: tuple[str, ...] = ()
    rows_lost: tuple[int, ...] = ()
    described: tuple[tuple[Column, ...], ...] = ()
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def build(train: Rows, test: Rows | None, settings: Construction) -> VerticalData:
    """Check the rows, encode the labels, set apart a test part where none is given."""
    if settings.missing not in ("error", "drop"):
        raise DataError(f"missing must be 'error' or 'drop', found {settings.missing!r}")
    bounds = make_bounds(settings.bounds, settings.parties, settings.columns)
    train, notes = _without_gaps(train, settings)
    if test is not None:
        test, more = _without_gaps(test, settings)
        notes += more
    coding = find_coding(train.labels, settings.task, settings.positive)
    if test is None:
        classes = coding.task != "regression"
        kept, apart = divide_rows(
            train.labels, classes=classes, fraction=settings.test_fraction, seed=settings.seed
        )
        train, test = train.take(kept), train.take(apart)
    _check_disjoint(train.ids, test.ids)
    return VerticalData(
        parties=settings.parties,
        train=train.blocks,
        test=test.blocks,
        y_train=coding.encode(train.labels),
        y_test=coding.encode(test.labels),
        task=coding.task,
        classes=coding.classes,
        ids_train=train.ids,
        ids_test=test.ids,
        columns=settings.columns,
        bounds=bounds,
        label_holder=settings.label_holder,
        name=settings.name,
        notes=settings.notes + notes,
        rows_lost=settings.rows_lost or (0,) * len(settings.parties),
        described=tuple(
            Columns(source=settings.source, columns=columns, train=mine, test=apart)
            for columns, mine, apart in zip(settings.described, train.raw, test.raw, strict=True)
        ),
        **settings.extra,
    )


def _without_gaps(rows: Rows, settings: Construction) -> tuple[Rows, tuple[str, ...]]:
    """Refuse or drop rows with NaN or infinite features or no label."""
    bad = missing_labels(rows.labels)
    if bad.any() and settings.missing == "error":
        raise DataError(
            f"{bad.sum()} of {len(bad)} labels (held by {settings.label_holder}) are missing or infinite; "
            f"mend them or take missing='drop'"
        )
    for block, party, names in zip(rows.blocks, settings.parties, settings.columns, strict=True):
        where, column = not_finite(block)
        if len(where) and settings.missing == "error":
            raise DataError(
                f"party {party}, column {names[column[0]]!r}: {len(set(where[column == column[0]]))} of "
                f"{len(bad)} values are missing, infinite or too large; mend them or pass missing='drop'"
            )
        bad[where] = True
    if not len(bad):
        raise DataError(f"{settings.name}: no rows")
    if bad.all():
        raise DataError(f"{settings.name}: every one of the {len(bad)} rows has a missing value")
    if not bad.any():
        return rows, ()
    return rows.take(np.flatnonzero(~bad)), (f"{bad.sum()} of {len(bad)} rows with missing values left out",)


def _check_disjoint(train: NDArray[Any], test: NDArray[Any]) -> None:
    common = len(np.intersect1d(train, test, assume_unique=True))
    if common:
        raise DataError(f"{common} IDs are in the training part and in the test part")


def from_arrays(
    blocks: Sequence[Any] | Mapping[str, Any],
    labels: Any,
    ids: Any,
    *,
    test: Sequence[Any] | None,
    parties: Sequence[str] | None,
    columns: Sequence[Sequence[str]] | None,
    label_holder: str | None,
    name: str,
    **options: Any,
) -> VerticalData:
    """See `VerticalData.from_arrays`."""
    if isinstance(blocks, Mapping):
        parties, blocks = list(blocks), list(blocks.values())
    if not isinstance(blocks, list | tuple):
        raise DataError(f"blocks must be a list with one array per party, found {type(blocks).__name__}")
    names = party_names(parties, len(blocks))
    holder = names[0] if label_holder is None else label_holder
    if holder not in (*names, "server"):
        raise DataError(f"label holder {holder!r} is no party; {nearest(holder, [*names, 'server'])}")
    train, lost, notes = _align(blocks, labels, ids, names, holder)
    settings = Construction(
        parties=names,
        columns=_column_names(columns, names, train.blocks),
        label_holder=holder,
        name=name,
        notes=notes,
        rows_lost=lost,
        **options,
    )
    apart = None
    if test is not None:
        apart, notes = _align_test(test, names, holder, train)
        settings = replace(settings, notes=settings.notes + notes)
    return build(train, apart, settings)


def _align_test(
    test: Sequence[Any], names: tuple[str, ...], holder: str, train: Rows
) -> tuple[Rows, tuple[str, ...]]:
    if not isinstance(test, list | tuple) or len(test) not in (2, 3):
        raise DataError("test must be (blocks, labels) or (blocks, labels, ids)")
    blocks, labels, ids = test if len(test) == 3 else (*test, None)
    if isinstance(blocks, Mapping):
        if set(blocks) != set(names):
            raise DataError(f"test blocks are for {', '.join(blocks)}; expected {', '.join(names)}")
        blocks = [blocks[name] for name in names]
    if len(blocks) != len(names):
        raise DataError(f"{len(blocks)} test blocks for {len(names)} parties")
    if ids is None:
        ids = _fresh_ids(train.ids, len(labels))
    rows, _, notes = _align(blocks, labels, ids, names, holder)
    for name, mine, theirs in zip(names, rows.blocks, train.blocks, strict=True):
        if mine.shape[1:] != theirs.shape[1:]:
            raise DataError(
                f"party {name}: test records have shape {mine.shape[1:]}, training {theirs.shape[1:]}"
            )
    return rows, tuple(f"test part: {note}" for note in notes)


def _fresh_ids(taken: NDArray[Any], count: int) -> NDArray[Any]:
    """IDs for a test part that has none, of the training IDs' kind."""
    if taken.dtype.kind == "U" or not len(taken):
        return np.array([f"test{i}" for i in range(count)], dtype=np.str_)
    return np.arange(count) + int(taken.max()) + 1


def _align(
    blocks: Sequence[Any], labels: Any, ids: Any, names: tuple[str, ...], holder: str
) -> tuple[Rows, tuple[int, ...], tuple[str, ...]]:
    """Aligned rows, rows lost per party and notes."""
    ready = [as_block(block, name) for block, name in zip(blocks, names, strict=True)]
    y = raw_labels(labels)
    if not _one_per_party(ids):
        _check_lengths(
            {name: block.shape[0] for name, block in zip(names, ready, strict=True)} | {"labels": len(y)}
        )
        common = np.arange(len(y)) if ids is None else clean_ids(ids, "IDs")
        _check_lengths({"labels": len(y), "IDs": len(common)})
        return Rows(blocks=tuple(ready), labels=y, ids=common), (0,) * len(names), ()
    if holder not in names:
        raise DataError("a label holder without features needs one list of IDs common to all parties")
    if len(ids) != len(names):
        raise DataError(f"{len(ids)} sequences of IDs for {len(names)} parties; give one per party")
    cleaned = [clean_ids(each, f"party {name}") for each, name in zip(ids, names, strict=True)]
    for block, each, name in zip(ready, cleaned, names, strict=True):
        _check_lengths({f"features of {name}": block.shape[0], "its IDs": len(each)})
    at = names.index(holder)
    _check_lengths({"labels": len(y), f"rows of label holder {holder}": ready[at].shape[0]})
    join = join_on_ids(cleaned, names, at)
    aligned = tuple(take(block, rows) for block, rows in zip(ready, join.rows, strict=True))
    return Rows(blocks=aligned, labels=y[join.rows[at]], ids=join.ids), join.lost, join.notes(names)


def _one_per_party(ids: Any) -> bool:
    """True for a list of ID sequences, False for one sequence of IDs (or none)."""
    if ids is None:
        return False
    first: Any = next(iter(ids), None)
    return not isinstance(first, str) and bool(np.ndim(first))


def _check_lengths(lengths: dict[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        raise DataError("row counts differ: " + ", ".join(f"{name} {n}" for name, n in lengths.items()))


def _column_names(
    given: Sequence[Sequence[str]] | None, names: tuple[str, ...], blocks: tuple[Block, ...]
) -> tuple[tuple[str, ...], ...]:
    widths = [width(block) for block in blocks]
    if given is None:
        ends = np.cumsum(widths)
        return tuple(
            tuple(f"x{i}" for i in range(end - size, end)) for end, size in zip(ends, widths, strict=True)
        )
    if len(given) != len(names):
        raise DataError(f"{len(given)} lists of column names for {len(names)} parties")
    for name, columns, size in zip(names, given, widths, strict=True):
        if len(columns) != size or len(set(columns)) != size:
            raise DataError(f"party {name}: {size} different column names needed, found {len(set(columns))}")
    return tuple(tuple(str(column) for column in columns) for columns in given)


LOADERS["arrays"] = from_arrays
