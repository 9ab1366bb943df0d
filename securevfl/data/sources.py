"""Data from files: one CSV file per party, joined on record IDs, or one file in LIBSVM form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data import sparse
from securevfl.data.blocks import Block, party_names, take
from securevfl.data.build import Construction, Rows, build
from securevfl.data.labels import parse_labels
from securevfl.data.pieces import Encoded, Pieces, open_pieces
from securevfl.data.readers import Table, numbers, read_libsvm, read_table
from securevfl.data.readers import one_hot as indicators
from securevfl.data.split import ColumnSplit, clean_ids, join_on_ids
from securevfl.data.vertical import LOADERS, VerticalData
from securevfl.errors import DataError, nearest

# Up to this width dense rows are small and faster to train on; above it only thin data stays sparse.
_NARROW = 1024
_THIN = 0.2


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How to read the files: which columns are what."""

    names: tuple[str, ...]
    id_columns: tuple[str, ...]
    label_column: str
    leave_out: frozenset[str]
    one_hot: Mapping[str, Sequence[Any]]
    delimiter: str
    keep_in: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One party's file, read and encoded but not yet joined."""

    name: str
    ids: NDArray[Any]
    columns: tuple[str, ...]
    block: Block
    labels: NDArray[Any] | None


def from_csv(
    files: Sequence[Path | str] | Mapping[str, Path | str],
    *,
    id_column: str | Sequence[str],
    label_column: str,
    test_files: Sequence[Path | str] | None,
    parties: Sequence[str] | None,
    leave_out: Sequence[str],
    one_hot: Mapping[str, Sequence[Any]],
    bounds: Mapping[str, tuple[float, float]] | None,
    delimiter: str,
    keep_in: Path | str | None,
    name: str | None,
    **options: Any,
) -> VerticalData:
    """See `VerticalData.from_csv`."""
    if isinstance(files, Mapping):
        parties, files = list(files), list(files.values())
    if isinstance(files, str | Path):
        raise DataError(f"files must be a list with one file per party, found {str(files)!r}")
    if isinstance(leave_out, str):
        raise DataError(f"leave_out must be a list of columns, found {leave_out!r}")
    form = _Form(
        names=party_names(parties, len(files)),
        id_columns=_id_columns(id_column, len(files)),
        label_column=label_column,
        leave_out=frozenset(leave_out),
        one_hot=one_hot,
        delimiter=delimiter,
        keep_in=None if keep_in is None else Path(keep_in),
    )
    sources = _read_sources(files, form)
    rows, settings = _join(sources, form, name or "+".join(Path(file).name for file in files))
    coded = {f"{column}={value}": (0.0, 1.0) for column, values in one_hot.items() for value in values}
    settings = replace(settings, bounds={**coded, **(bounds or {})} or None, **options)
    return build(rows, _test_rows(test_files, sources, form, settings), settings)


def _id_columns(given: str | Sequence[str], files: int) -> tuple[str, ...]:
    columns = (given,) * files if isinstance(given, str) else tuple(given)
    if len(columns) != files:
        raise DataError(f"{len(columns)} ID columns for {files} files; give one name, or one per file")
    return columns


def _read_sources(files: Sequence[Path | str], form: _Form, part: str = "train") -> list[_Source]:
    if form.keep_in is not None:
        return _read_pieces(files, form, form.keep_in, part)
    tables = [read_table(file, form.delimiter) for file in files]
    _check_columns(tables, form)
    return [
        _encode(table, party, id_column, form)
        for table, party, id_column in zip(tables, form.names, form.id_columns, strict=True)
    ]


def _read_pieces(files: Sequence[Path | str], form: _Form, folder: Path, part: str) -> list[_Source]:
    every = [open_pieces(file, form.delimiter) for file in files]
    _check_columns(every, form)
    sources = []
    for pieces, party, id_column in zip(every, form.names, form.id_columns, strict=True):

        def encode(table: Table, party: str = party, id_column: str = id_column) -> Encoded:
            found = _encode(table, party, id_column, form)
            return found.ids, found.columns, found.block, found.labels

        texts = {id_column, form.label_column, *form.leave_out, *form.one_hot}
        ids, columns, block, labels = pieces.encode(encode, folder / f"{party}-{part}.f32", texts)
        sources.append(_Source(name=party, ids=ids, columns=columns, block=block, labels=labels))
    return sources


def _check_columns(tables: Sequence[Table | Pieces], form: _Form) -> None:
    every = [column for table in tables for column in table.header]
    for table, id_column in zip(tables, form.id_columns, strict=True):
        if id_column not in table.header:
            odd = len(table.header) == 1 and any(sign in table.header[0] for sign in ";\t|")
            hint = "the cells seem to have another delimiter" if odd else nearest(id_column, table.header)
            raise DataError(
                f"{table.path}: no ID column {id_column!r}; {hint}; name it (--id-column), or describe "
                "the files: securevfl data draft FILES... --out data.toml"
            )
    for column in (*form.leave_out, *form.one_hot):
        if column not in every:
            raise DataError(f"unknown column {column!r}; {nearest(column, every)}")
    holders = [str(table.path) for table in tables if form.label_column in table.header]
    if not holders:
        raise DataError(
            f"no file has the label column {form.label_column!r}; {nearest(form.label_column, every)}"
        )
    if len(holders) > 1:
        raise DataError(
            f"label column {form.label_column!r} is in {' and '.join(holders)}; expected it in one file"
        )
    if form.label_column in {*form.leave_out, *form.one_hot, *form.id_columns}:
        raise DataError(
            f"label column {form.label_column!r} cannot be an ID, left-out or one-hot column as well"
        )


def _encode(table: Table, party: str, id_column: str, form: _Form) -> _Source:
    where = f"party {party} ({table.path.name})"
    label = form.label_column if form.label_column in table.header else None
    ids, columns, block, labels = encode_table(
        table,
        where=where,
        id_column=id_column,
        label_column=label,
        leave_out=form.leave_out,
        one_hot=form.one_hot,
    )
    return _Source(name=party, ids=ids, columns=columns, block=block, labels=labels)


def encode_table(
    table: Table,
    *,
    where: str,
    id_column: str,
    label_column: str | None,
    leave_out: Collection[str],
    one_hot: Mapping[str, Sequence[Any]],
) -> tuple[NDArray[Any], tuple[str, ...], NDArray[np.float32], NDArray[Any] | None]:
    """IDs, column names, features and labels (None without a label column) of one file.

    Raises:
        DataError: A cell is no number, or the file has neither features nor the label.
    """
    ids = clean_ids(np.array(table.column(id_column)), where)
    apart = {id_column, label_column, *leave_out}
    columns: list[str] = []
    parts: list[NDArray[Any]] = []
    for column in (name for name in table.header if name not in apart):
        cells = table.column(column)
        if column in one_hot:
            values = one_hot[column]
            columns += [f"{column}={value}" for value in values]
            parts.append(indicators(cells, values, where=where, column=column))
        else:
            columns.append(column)
            parts.append(numbers(cells, where=where, column=column)[:, None])
    with np.errstate(over="ignore"):
        stacked = np.concatenate(parts, axis=1) if parts else np.zeros((len(ids), 0))
        block = stacked.astype(np.float32)
    if not columns and label_column is None:
        raise DataError(f"{where}: no feature columns besides the ID; every file needs features or the label")
    labels = None if label_column is None else parse_labels(table.column(label_column))
    return ids, tuple(columns), block, labels


def _join(sources: Sequence[_Source], form: _Form, name: str) -> tuple[Rows, Construction]:
    """Joined rows of the parties with features; a label holder without features only lends its order."""
    at = next(i for i, source in enumerate(sources) if source.labels is not None)
    join = join_on_ids([source.ids for source in sources], form.names, at)
    holding = [i for i, source in enumerate(sources) if source.columns]
    if not holding:
        raise DataError("no file has feature columns")
    notes = join.notes(form.names)
    if at not in holding:
        notes += (f"{form.names[at]} holds the labels and no features",)
    rows = Rows(
        blocks=tuple(take(sources[i].block, join.rows[i]) for i in holding),
        labels=np.asarray(sources[at].labels)[join.rows[at]],
        ids=join.ids,
    )
    settings = Construction(
        parties=tuple(form.names[i] for i in holding),
        columns=tuple(sources[i].columns for i in holding),
        label_holder=form.names[at],
        name=name,
        notes=notes,
        rows_lost=tuple(join.lost[i] for i in holding),
    )
    return rows, settings


def _test_rows(
    files: Sequence[Path | str] | None, training: Sequence[_Source], form: _Form, settings: Construction
) -> Rows | None:
    if files is None:
        return None
    if isinstance(files, str | Path) or len(files) != len(training):
        raise DataError(f"give one test file per party ({len(training)}), found {files!r}")
    sources = _read_sources(files, form, "test")
    for mine, theirs in zip(sources, training, strict=True):
        if mine.columns != theirs.columns or (mine.labels is None) != (theirs.labels is None):
            raise DataError(f"party {mine.name}: the test file has other columns than the training file")
    rows, _ = _join(sources, form, settings.name)
    return rows


def from_libsvm(
    train_file: Path | str,
    test_file: Path | str | None,
    *,
    n_features: int | None,
    parties: ColumnSplit,
    bounds: Any,
    keep_sparse: bool | None,
    name: str | None,
    **options: Any,
) -> VerticalData:
    """See `VerticalData.from_libsvm`."""
    parsed = [read_libsvm(file) for file in (train_file, test_file) if file is not None]
    found = max(columns for _, _, columns in parsed)
    total = found if n_features is None else n_features
    if total < max(found, 1):
        raise DataError(f"n_features is {total}, but {Path(train_file).name} has a feature {found}")
    matrices = [_with_columns(matrix, total) for _, matrix, _ in parsed]
    if keep_sparse is None:
        keep_sparse = total > _NARROW and matrices[0].nnz < _THIN * matrices[0].shape[0] * total
    rows: list[Rows] = []
    for (labels, _, _), matrix in zip(parsed, matrices, strict=True):
        first = len(rows[0].ids) if rows else 0
        block: Block = matrix if keep_sparse else matrix.toarray()
        rows.append(Rows(blocks=(block,), labels=labels, ids=np.arange(first, first + len(labels))))
    settings = Construction(
        parties=("p0",),
        columns=(tuple(f"f{i + 1}" for i in range(total)),),
        label_holder="p0",
        name=name or Path(train_file).name,
        bounds=bounds,
        **options,
    )
    return build(rows[0], rows[1] if len(rows) > 1 else None, settings).split(parties)


def _with_columns(matrix: Any, columns: int) -> Any:
    return sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=(matrix.shape[0], columns))


LOADERS["csv"] = from_csv
LOADERS["libsvm"] = from_libsvm
