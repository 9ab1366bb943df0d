"""One organisation's share of a federation: its own table, and what it knows of the others'.

In a federation over a network nobody holds everybody's features. An organisation reads its own table; an
`Outline` says in public numbers what the whole looks like; `share` puts both together as `VerticalData` in
which the blocks of all others, and for most the labels, are absent: arrays of the right shape that are NaN
throughout, so that nothing computed from them by mistake passes a gate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.blocks import Block, Bounds, Index, as_block, make_bounds, not_finite, take
from securevfl.data.columns import (
    Column,
    Columns,
    code_columns,
    coded,
    count_features,
    features_of,
    numbers_of,
)
from securevfl.data.described import new_source, own_source, positive_label
from securevfl.data.labels import TASKS, ClassValue, Coding, Task, find_coding, missing_labels, raw_labels
from securevfl.data.mapped import taken
from securevfl.data.pieces import open_table
from securevfl.data.sources import encode_table
from securevfl.data.split import clean_ids, divide_rows
from securevfl.data.vertical import VerticalData
from securevfl.errors import DataError, nearest
from securevfl.protocols.alignment.ids import MAX_IDS, NORMALISATIONS, prepare_ids

OUTLINE_FILE = "outline.json"
MAX_COLUMNS = 1 << 20
"""Columns that an organisation may say it has: everybody else keeps a name for each, at its word."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTable:
    """What one organisation brings: features, labels, or both.

    Attributes:
        ids: Record IDs, all different.
        columns: Names of the features; empty for an organisation that brings labels alone.
        block: The features, one row per ID.
        labels: Raw labels, or None.
        bounds: Public (low, high) per column, NaN where unknown; None without any.
        positive: Binary: the label that counts as 1; None takes the last in sorted order.
        described: Its columns, where a description says how they are coded; empty otherwise.
        raw: Their values as they were read; only beside `described`.
    """

    ids: NDArray[Any]
    columns: tuple[str, ...]
    block: Block
    labels: NDArray[Any] | None = None
    bounds: NDArray[np.float64] | None = None
    positive: ClassValue | None = None
    described: tuple[Column, ...] = ()
    raw: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        where, column = not_finite(self.block)
        if len(where):
            raise DataError(
                f"column {self.columns[column[0]]!r}, row {where[0] + 1}: the value is missing, infinite or "
                "too large; mend it or leave the row out"
            )
        if self.labels is not None and missing_labels(self.labels).any():
            first = np.argmax(missing_labels(self.labels)) + 1
            raise DataError(f"the label of row {first} is missing or infinite; mend it or leave the row out")

    @classmethod
    def from_csv(
        cls,
        path: Path | str,
        *,
        id_column: str,
        label_column: str | None = None,
        leave_out: Sequence[str] = (),
        one_hot: Mapping[str, Sequence[str | int]] | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        delimiter: str = ",",
    ) -> OwnTable:
        """Reads a CSV file with a header.

        Raises:
            DataError: The file or a column is missing or unusable; the message names it.
        """
        table, coded = open_table(path, delimiter), dict(one_hot or {})
        for column in (id_column, *([label_column] if label_column else []), *leave_out, *coded):
            if column not in table.header:
                raise DataError(f"{table.path}: no column {column!r}; {nearest(column, table.header)}")
        encode = partial(
            encode_table,
            where=str(table.path),
            id_column=id_column,
            label_column=label_column,
            leave_out=leave_out,
            one_hot=coded,
        )
        texts = {id_column, label_column, *leave_out, *coded}
        ids, columns, block, labels = table.encode(encode, texts=texts)
        known = {f"{column}={value}": (0.0, 1.0) for column, values in coded.items() for value in values}
        known |= {name: (float(low), float(high)) for name, (low, high) in (bounds or {}).items()}
        (limits,) = make_bounds(known or None, ("here",), (columns,))
        return cls(ids=ids, columns=columns, block=block, labels=labels, bounds=limits)

    @classmethod
    def of_new_records(
        cls,
        path: Path | str,
        *,
        id_column: str,
        columns: Sequence[str],
        one_hot: Mapping[str, Sequence[str | int]] | None = None,
        delimiter: str = ",",
    ) -> OwnTable:
        """Reads records to predict: IDs and the features that the model was trained on; all else is ignored.

        Args:
            path: A CSV file with a header.
            id_column: Name of the column with the IDs.
            columns: The features in the order of the model, as `from_csv` named them.
            one_hot: Column -> its possible values, as in training.
            delimiter: What separates cells.

        Raises:
            DataError: The file or a column is missing or unusable; the message names it.
        """
        table, coded = open_table(path, delimiter), dict(one_hot or {})
        made = {f"{column}={value}": column for column, values in coded.items() for value in values}
        needed = list(dict.fromkeys(made.get(each, each) for each in columns))
        missing = [column for column in (id_column, *needed) if column not in table.header]
        if missing:
            raise DataError(
                f"{table.path}: no column {missing[0]!r}, which training had; "
                f"{nearest(missing[0], table.header)}"
            )
        if not columns:
            return cls.from_arrays(
                None, ids=[each for piece in table.rows() for each in piece.column(id_column)]
            )
        encode = partial(
            encode_table,
            where=str(table.path),
            id_column=id_column,
            label_column=None,
            leave_out=set(table.header) - {*needed, id_column},
            one_hot=coded,
        )
        ids, found, block, _ = table.encode(encode, texts=set(table.header) - {*needed} | {id_column, *coded})
        if set(columns) != set(found):
            other = min(set(columns) ^ set(found))
            raise DataError(f"{table.path}: one_hot gives or lacks {other!r}, unlike in training")
        order = [found.index(column) for column in columns]
        return cls(ids=ids, columns=tuple(columns), block=block[:, order])

    @classmethod
    def from_description(cls, path: Path | str, party: str) -> OwnTable:
        """Reads an organisation's own table of a description, `[parties.PARTY]`; others need not be in it.

        Raises:
            DataError: The description or the file cannot be used; the message names the line.
        """
        described, source = own_source(path, party)
        pairs = [pair for column in source.columns for pair in column.feature_bounds]
        features = features_of(source.columns)
        (limits,) = make_bounds([pairs] if pairs else None, (party,), (features,))
        return cls(
            ids=source.ids,
            columns=features,
            block=coded(source.columns, source.raw),
            labels=source.labels,
            bounds=None if limits is None or np.isnan(limits).all() else limits,
            positive=None if source.labels is None else positive_label(described, source.labels),
            described=source.columns,
            raw=source.raw,
        )

    @classmethod
    def of_described_records(
        cls, path: Path | str, party: str, file: Path, columns: Sequence[str]
    ) -> OwnTable:
        """Reads records to predict as a description says; see `of_new_records`."""
        source = new_source(path, party, file, columns)
        found = features_of(source.columns)
        block = code_columns(source.columns, source.raw)[:, [found.index(column) for column in columns]]
        return cls(ids=source.ids, columns=tuple(columns), block=block)

    def normalised(self, way: str) -> OwnTable:
        """The table with IDs as they are compared.

        Args:
            way: One of `protocols.alignment.NORMALISATIONS`.

        Raises:
            DataError: Two records have the same ID then, or one has none.
        """
        if way == "exact":
            return self
        return replace(self, ids=np.array([raw.decode() for raw in prepare_ids(own_ids(self), way)]))

    @classmethod
    def from_arrays(
        cls,
        block: Any,
        *,
        ids: Any,
        labels: Any = None,
        columns: Sequence[str] | None = None,
        bounds: Any = None,
    ) -> OwnTable:
        """A table from arrays in memory."""
        names = clean_ids(np.asarray(ids), "this organisation")
        features = np.zeros((len(names), 0), np.float32) if block is None else as_block(block, "features")
        width = int(np.prod(features.shape[1:]))
        titles = tuple(columns or (f"x{i}" for i in range(width)))
        (limits,) = make_bounds(bounds, ("here",), (titles,))
        raw = None if labels is None else raw_labels(labels)
        for what, count in (("features", features.shape[0]), ("labels", len(names if raw is None else raw))):
            if count != len(names):
                raise DataError(f"{len(names)} IDs but {count} rows of {what}")
        return cls(ids=names, columns=titles, block=features, labels=raw, bounds=limits)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What everybody knows of a federation's data: names, shapes and public bounds, no values.

    Attributes:
        parties: Those that hold features, in order.
        widths: Number of columns of each.
        bounds: Public bounds of each, as nested lists; None where a party gives none.
        described: How each party's columns are coded (`Column.facts`); None for one that describes none.
        label_holder: Who holds the labels.
        task: `binary`, `multiclass` or `regression`.
        classes: How many classes; 0 for regression.
        n_train: Training records.
        n_test: Test records.
        test_fraction: The share of records in the test part.
        split_seed: Seed of the split, which looks at no label.
        name: What the data is called in reports.
        normalise: How IDs are made comparable.
    """

    parties: tuple[str, ...]
    widths: tuple[int, ...]
    bounds: tuple[Any, ...]
    label_holder: str
    task: Task
    classes: int
    n_train: int
    n_test: int
    test_fraction: float
    split_seed: int
    name: str = "federation"
    normalise: str = "exact"
    described: tuple[Any, ...] = ()

    def to_json(self) -> str:
        """As text, the same for the same outline."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Outline:
        """Reads it back.

        Raises:
            DataError: It is not an outline.
        """
        try:
            content = json.loads(text)
            for name in ("parties", "widths", "bounds", "described"):
                content[name] = tuple(content[name])
            outline = cls(**content)
            outline._check()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"the outline of the data cannot be read: {error}") from error
        return outline

    def _check(self) -> None:
        counts = (*self.widths, self.n_train, self.n_test)
        if not all(type(count) is int and 0 < count < 1 << 40 for count in counts):
            raise ValueError("a count of columns or records is not a positive number")
        if self.records > MAX_IDS:
            raise ValueError(f"more than {MAX_IDS:,} records, which nobody can align")
        if max(self.widths, default=0) > MAX_COLUMNS:
            raise ValueError(f"an organisation with more than {MAX_COLUMNS:,} columns")
        if type(self.classes) is not int or not 0 <= self.classes <= self.records:
            raise ValueError("more classes than records")
        if not len(self.parties) == len(self.widths) == len(self.bounds) or self.task not in TASKS:
            raise ValueError("parties, widths, bounds and task do not fit together")
        if self.normalise not in NORMALISATIONS:
            raise ValueError(f"IDs cannot be compared by {self.normalise!r}")
        for width, facts in zip(self.widths, self.described, strict=False):
            if facts is not None and count_features(facts) != width:
                raise ValueError("described columns do not make the features that are announced")
        self.columns()

    def columns(self) -> tuple[tuple[Column, ...], ...]:
        """Every party's columns as all know them; empty where nobody has described any.

        Raises:
            ValueError: A column is not what a column can be.
        """
        if not any(each is not None for each in self.described):
            return ()
        found = []
        for party, width, facts, table in zip(
            self.parties, self.widths, self.described, self.tables(), strict=True
        ):
            if facts is None:
                found.append(numbers_of([f"{party}.{i}" for i in range(width)], table))
            else:
                found.append(tuple(Column.from_facts(each, f"{party}.{i}") for i, each in enumerate(facts)))
        return tuple(found)

    @property
    def records(self) -> int:
        """All records."""
        return self.n_train + self.n_test

    def tables(self) -> Bounds:
        """The public bounds as arrays."""
        return tuple(None if table is None else np.asarray(table, np.float64) for table in self.bounds)


def read_outline(folder: Path) -> Outline | None:
    """The outline in the folder of a run over a network; None in any other.

    Raises:
        DataError: It is damaged.
    """
    path = folder / OUTLINE_FILE
    return Outline.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def split_rows(count: int, fraction: float, seed: int) -> tuple[Index, Index]:
    """Training and test part of aligned records; everybody computes the same, and no label is looked at."""
    return divide_rows(np.zeros(count), classes=False, fraction=fraction, seed=seed)


def own_ids(own: OwnTable) -> list[str]:
    """The IDs as text, as they are compared."""
    return [str(each) for each in own.ids.tolist()]


def rows_of(own: OwnTable, ids: Sequence[str]) -> list[int]:
    """Where the common IDs are in an organisation's table.

    Raises:
        DataError: One is not there.
    """
    places = {text: row for row, text in enumerate(own_ids(own))}
    missing = sum(text not in places for text in ids)
    if missing:
        raise DataError(f"{missing} of the {len(ids)} common IDs are not in the table any more")
    return [places[text] for text in ids]


def coding_of(own: OwnTable, rows: Sequence[int], task: str | None) -> Coding:
    """The task that the label holder's labels of the common records make."""
    if own.labels is None:
        raise DataError("this organisation holds no labels")
    return find_coding(own.labels[np.asarray(rows)], task, own.positive)


def share(
    outline: Outline, name: str, own: OwnTable | None, rows: Sequence[int], coding: Coding | None = None
) -> VerticalData:
    """What one organisation has of the federation.

    Args:
        outline: The federation.
        name: The organisation.
        own: Its table; None for one that brings no data.
        rows: Its rows of the common records, in the common order.
        coding: The label holder's coding; None for everybody else.

    Raises:
        DataError: The table does not fit the outline.
    """
    if own is not None and (len(rows) != outline.records or min(rows, default=0) < 0):
        raise DataError(f"{name} has {len(rows)} of the {outline.records} common records")
    kept, apart = split_rows(outline.records, outline.test_fraction, outline.split_seed)
    if (len(kept), len(apart)) != (outline.n_train, outline.n_test):
        raise DataError("the outline's training and test part are not what its seed gives")
    picked = np.asarray(rows, np.int64)
    blocks: list[tuple[Block, Block]] = []
    columns: list[tuple[str, ...]] = []
    for party, width in zip(outline.parties, outline.widths, strict=True):
        if party == name and own is not None:
            if len(own.columns) != width:
                raise DataError(f"{name} has {len(own.columns)} columns; the outline says {width}")
            blocks.append((take(own.block, picked[kept]), take(own.block, picked[apart])))
            columns.append(own.columns)
        else:
            blocks.append((absent_block(len(kept), width), absent_block(len(apart), width)))
            columns.append(tuple(f"{party}.{i}" for i in range(width)))
    described = [Columns.without_values(columns) for columns in outline.columns()]
    if own is not None and own.raw is not None and own.described:
        place = outline.parties.index(name)
        if not described or outline.described[place] != [column.facts for column in own.described]:
            raise DataError(f"the columns that {name} describes are not those of the outline")
        train, test = (taken(own.raw, picked[part]) for part in (kept, apart))
        described[place] = Columns(source="", columns=own.described, train=train, test=test)
    labels = _labels(outline, own, picked, coding)
    ids = np.arange(outline.records) if own is None else own.ids[picked]
    return VerticalData(
        parties=outline.parties,
        train=tuple(block for block, _ in blocks),
        test=tuple(block for _, block in blocks),
        y_train=labels[kept],
        y_test=labels[apart],
        task=outline.task,
        classes=tuple(range(outline.classes)) if coding is None else coding.classes,
        ids_train=ids[kept],
        ids_test=ids[apart],
        columns=tuple(columns),
        bounds=outline.tables(),
        label_holder=outline.label_holder,
        name=outline.name,
        absent=tuple(party for party in outline.parties if party != name or own is None),
        labels_absent=coding is None,
        described=tuple(described),
    )


def whole(outline: Outline, tables: Mapping[str, OwnTable], ids: Sequence[str]) -> VerticalData:
    """Everybody's data in one place, as an auditor needs it who may see it.

    Args:
        outline: The federation.
        tables: Organisation -> its table.
        ids: The common IDs, in the common order.

    Raises:
        DataError: A table or a record is missing.
    """
    holder, shares = outline.label_holder, {}
    for name in dict.fromkeys((*outline.parties, holder)):
        if name not in tables:
            raise DataError(f"the table of {name} is missing")
        own = tables[name]
        rows = rows_of(own.normalised(outline.normalise), ids)
        coding = coding_of(own, rows, outline.task) if name == holder else None
        shares[name] = share(outline, name, own, rows, coding)
    parts = [shares[name] for name in outline.parties]
    return replace(
        shares[holder],
        train=tuple(part.train[i] for i, part in enumerate(parts)),
        test=tuple(part.test[i] for i, part in enumerate(parts)),
        columns=tuple(part.columns[i] for i, part in enumerate(parts)),
        described=tuple(part.described[i] for i, part in enumerate(parts) if part.described),
        absent=(),
    )


def absent_block(*shape: int) -> NDArray[np.float32]:
    """Stands for features that are elsewhere: NaN throughout, without taking memory."""
    return np.broadcast_to(np.float32(np.nan), shape).view()


def absent_labels(task: Task, count: int) -> NDArray[Any]:
    """Stands for labels that are elsewhere: no class, no number."""
    nothing = np.int64(np.iinfo(np.int64).min) if task == "multiclass" else np.float32(np.nan)
    return np.full(count, nothing)


def _labels(outline: Outline, own: OwnTable | None, rows: Index, coding: Coding | None) -> NDArray[Any]:
    if coding is None:
        return absent_labels(outline.task, outline.records)
    if own is None or own.labels is None:
        raise DataError("only the organisation with the labels can code them")
    return coding.encode(own.labels[rows])
