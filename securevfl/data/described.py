"""From a description and its files to `VerticalData`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.build import Construction, Rows, build
from securevfl.data.columns import OTHER, Column, Floats, Kind, coded, features_of
from securevfl.data.description import Description, PartyDescription, read_description
from securevfl.data.labels import ClassValue, find_coding, missing_labels, parse_labels, shown_classes
from securevfl.data.mapped import chunks, gather, taken
from securevfl.data.pieces import ZIP, Pieces, in_one_piece, is_large, open_pieces
from securevfl.data.readers import Table, parse_numbers, read_bytes, read_libsvm, read_table, with_point
from securevfl.data.split import clean_ids, join_on_ids
from securevfl.data.vertical import LOADERS, VerticalData
from securevfl.errors import DataError, MissingExtra, nearest

# A described column is kept with its raw values; what is wider than this belongs to `from_libsvm`.
WIDEST_LIBSVM = 1024
_LIBSVM_LINE = re.compile(rb"[ \t]*[-+.\deE]+([ \t]+\d+:[-+.\deE]+)+[ \t]*(#.*)?(\r?\n|$)")


@dataclass(frozen=True, kw_only=True)
class PartyFile:
    """One party's file, read but not yet joined."""

    ids: NDArray[Any]
    columns: tuple[Column, ...]
    raw: Floats
    labels: NDArray[Any] | None


def load_description(path: Path | str, *, seed: int) -> VerticalData:
    """See `VerticalData.from_description`."""
    described = read_description(path)
    return _load(described, [_train_source(described, party) for party in described.parties], seed)


def files_digest(path: Path | str) -> NDArray[np.uint8]:
    """SHA-256 over a description and all files that it names, in order.

    Raises:
        DataError: The description cannot be used, or one of the files cannot be read.
    """
    described, digest = read_description(path), hashlib.sha256()
    named = [file for party in described.parties for file in (party.file, party.test) if file is not None]
    for file in (described.path, *named):
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None
    return np.frombuffer(digest.digest(), np.uint8)


def absent_parties(path: Path | str) -> tuple[str, ...]:
    """The parties whose files are not at hand, where the label holder's is."""
    described = read_description(path)
    away = tuple(party.name for party in described.parties if not party.file.exists())
    return () if described.label_holder in away else away


def load_with_stand_ins(path: Path | str, *, seed: int) -> VerticalData:
    """As the description says, with chance values in place of the files that are not at hand.

    A stand-in has the columns that the description names, for the label holder's records, and tells nothing
    about a label.

    Raises:
        DataError: The columns of such a party are not described, or the test part is a file.
    """
    described, away = read_description(path), absent_parties(path)
    if away and described.test is None:
        raise DataError(
            f"{described.where('parties', away[0], 'test')}: {away[0]}'s files are not at hand, and the test "
            "part is one of them; write test = 0.2 at the top instead"
        )
    present = {p.name: _train_source(described, p) for p in described.parties if p.name not in away}
    ids, draw = present[described.label_holder].ids, np.random.default_rng(seed)
    made = {name: _stand_in(described, described.party(name), ids, draw) for name in away}
    return _load(described, [(present | made)[party.name] for party in described.parties], seed)


def _stand_in(
    described: Description, party: PartyDescription, ids: NDArray[Any], draw: np.random.Generator
) -> PartyFile:
    columns = tuple(column for column in party.columns.values() if column.kind != "ignore")
    if not columns:
        raise DataError(
            f"{described.where('parties', party.name)}: {party.file.name} is not at hand and none of its "
            f"columns is described; name them under [parties.{party.name}.columns]"
        )
    raw = np.column_stack([column.chance(len(ids), draw) for column in columns])
    return PartyFile(ids=ids, columns=columns, raw=raw, labels=None)


def _load(described: Description, sources: Sequence[PartyFile], seed: int) -> VerticalData:
    rows, settings = _join(described, sources)
    labels = np.asarray(rows.labels)
    task, positive = described.task or _clear_task(described, labels), positive_label(described, labels)
    try:
        find_coding(labels[~missing_labels(labels)], task, positive)
    except DataError as error:
        line = described.where("task" if described.task in str(error).split() else "label")
        raise DataError(f"{line}: {error}") from None
    settings = replace(
        settings,
        seed=seed,
        test_fraction=0.2 if described.test is None else described.test,
        task=task,
        positive=positive,
        missing="drop" if described.missing == "drop" else "error",
        extra={"label_bounds": described.label_bounds},
    )
    if described.test is not None:
        return build(rows, None, settings)
    tests = [
        _test_source(described, party, source.columns)
        for party, source in zip(described.parties, sources, strict=True)
    ]
    apart, more = _join(described, tests)
    notes = tuple(f"test part: {note}" for note in more.notes)
    return build(rows, apart, replace(settings, notes=settings.notes + notes))


def own_source(path: Path | str, name: str) -> tuple[Description, PartyFile]:
    """One organisation's own table, from a description that may hold nothing else.

    Raises:
        DataError: It cannot be used; the message names the line.
    """
    described = read_description(path, complete=False)
    source = _train_source(described, described.party(name))
    kept, _ = _kept([source.columns], [source.raw])
    if source.labels is not None and described.missing == "drop":
        kept = kept[~missing_labels(source.labels[kept])]
    labels = None if source.labels is None else source.labels[kept]
    if labels is not None and described.task is None:
        _clear_task(described, labels)
    return described, replace(source, ids=source.ids[kept], raw=taken(source.raw, kept), labels=labels)


def new_source(path: Path | str, name: str, file: Path, features: Sequence[str]) -> PartyFile:
    """Records to predict: the columns that a model was trained on; labels and all else are ignored.

    Raises:
        DataError: A column or a value that the model needs is not there.
    """
    described = replace(read_description(path, complete=False), label="", label_holder="")
    party = replace(described.party(name), test=file)
    opened = _open(described, party, file, "file")
    columns = _columns(party, opened, described)
    # A column that is not named has the kind that it had in training, whatever the new rows hold.
    columns = [_as_trained(column, features) if column.line == 0 else column for column in columns]
    wanted = tuple(
        column for column in columns if column.kind != "ignore" and set(column.features) <= set(features)
    )
    missing = [feature for feature in features if feature not in features_of(wanted)]
    if missing:
        raise DataError(
            f"{file}: no column for {missing[0]!r}, which training had; {nearest(missing[0], opened.others)}"
        )
    source = _source(described, party, opened, wanted)
    for place, column in enumerate(wanted):
        if column.missing == "drop" and np.isnan(source.raw[:, place]).any():
            row = np.argmax(np.isnan(source.raw[:, place])) + 1
            raise DataError(
                f"{file}: column {column.name!r} has no value in data row {row}, and training had none such"
            )
    return source


def _as_trained(column: Column, features: Sequence[str]) -> Column:
    kind: Kind = "category" if f"{column.name}#0" in features else "number"
    return (
        replace(column, kind=kind) if column.kind in ("category", "number") and not column.values else column
    )


def read_source(path: Path, delimiter: str = "") -> tuple[Table, bool]:
    """A CSV, Parquet or LIBSVM file, told apart by its content, as columns of text; True for LIBSVM.

    LIBSVM has neither header nor IDs: its columns are f1, f2, ..., its label is `label`, and `row`, the
    number of the row from 1, is its ID.

    Raises:
        DataError: It cannot be read.
        MissingExtra: It is Parquet, and pyarrow is not installed.
    """
    content = read_bytes(path)
    if content[:4] == b"PAR1":
        return _parquet(path), False
    if _LIBSVM_LINE.match(content):
        return _libsvm(path), True
    return read_table(path, delimiter or ("\t" if ".tsv" in path.suffixes else ",")), False


def open_source(path: Path, delimiter: str = "") -> tuple[Pieces, bool]:
    """As `read_source`, a piece at a time where the file is large and its form allows it."""
    delimiter = delimiter or ("\t" if ".tsv" in path.suffixes else ",")
    if is_large(path):
        with path.open("rb") as file:
            start = file.read(1 << 16)
        if not _LIBSVM_LINE.match(start) and start[:4] != ZIP:
            return open_pieces(path, delimiter), False
    table, libsvm = read_source(path, delimiter)
    return in_one_piece(table), libsvm


def _parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(
            f"{path} is Parquet; install the extra: pip install 'securevfl[parquet]'"
        ) from None
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged Parquet file: {error}") from None
    if not table.num_rows:
        raise DataError(f"{path} has columns but no rows")
    cells = tuple(
        tuple("" if value is None else str(value) for value in column.to_pylist()) for column in table.columns
    )
    return Table(path=path, header=tuple(table.column_names), cells=cells)


def _libsvm(path: Path) -> Table:
    labels, matrix, width = read_libsvm(path)
    if width > WIDEST_LIBSVM:
        raise DataError(
            f"{path} has {width} columns; a description reads at most {WIDEST_LIBSVM} of a LIBSVM file "
            "(VerticalData.from_libsvm reads more)"
        )
    cells = [tuple(map(repr, column)) for column in matrix.toarray().T.tolist()]
    numbers = tuple(str(row + 1) for row in range(len(labels)))
    names = ("row", "label", *(f"f{column + 1}" for column in range(width)))
    return Table(path=path, header=names, cells=(numbers, tuple(f"{v:g}" for v in labels.tolist()), *cells))


@dataclass(frozen=True, kw_only=True)
class _File:
    """A table, a piece at a time, with the names of its ID and, at the label holder, its label."""

    table: Pieces
    id: str
    label: str | None
    libsvm: bool = False

    @property
    def others(self) -> list[str]:
        return [name for name in self.table.header if name not in (self.id, self.label)]

    def texts(self, names: Sequence[str]) -> set[str]:
        """Those of some columns that hold anything but numbers and gaps."""
        found: set[str] = set()
        others = set(self.table.header) - set(names)
        for piece in self.table.rows(names, others) if names else ():
            numbers = [name for name in names if name not in found]
            found |= {name for name in numbers if parse_numbers(piece.column(name))[1] is not None}
        return found


def _open(described: Description, party: PartyDescription, path: Path, key: str) -> _File:
    at = ("parties", party.name)
    try:
        table, libsvm = open_source(path, party.delimiter)
    except DataError as error:
        raise DataError(f"{described.where(*at, key)}: {error}") from None
    holds = party.name == described.label_holder
    if party.decimal == ",":
        quantity = holds and described.task == "regression"
        table = _with_points(table, {described.label} if quantity else set())
    if libsvm:
        own = table if holds else in_one_piece(_without_label(next(table.rows())))
        return _File(table=own, id="row", label="label", libsvm=True)
    if party.id not in table.header:
        odd = len(table.header) == 1 and any(sign in table.header[0] for sign in ";\t|")
        hint = 'write its delimiter, such as delimiter = ";"' if odd else nearest(party.id, table.header)
        where = described.where(*at, "id") if (*at, "id") in described.lines else described.where("id")
        raise DataError(f"{where}: {path.name} has no ID column {party.id!r}; {hint}")
    if holds and described.label not in table.header:
        known = nearest(described.label, table.header)
        raise DataError(f"{described.where('label')}: {path.name} has no column {described.label!r}; {known}")
    if holds and described.label == party.id:
        raise DataError(f"{described.where('label')}: {party.id!r} is the ID column and cannot be the label")
    return _File(table=table, id=party.id, label=described.label if holds else None)


def _with_points(table: Pieces, always: set[str]) -> Pieces:
    """The file with numbers as they are read elsewhere: those of wanted columns, and of some in any case."""

    def rows(numbers: Collection[str] = (), unread: Collection[str] = ()) -> Iterator[Table]:
        for piece in table.rows((), unread):
            cells = (
                tuple(map(with_point, found)) if name in numbers or name in always else found
                for name, found in zip(piece.header, piece.cells, strict=True)
            )
            yield replace(piece, cells=tuple(cells))

    return replace(table, rows=rows)


def _without_label(table: Table) -> Table:
    place = table.header.index("label")
    return replace(
        table,
        header=table.header[:place] + table.header[place + 1 :],
        cells=table.cells[:place] + table.cells[place + 1 :],
    )


def _train_source(described: Description, party: PartyDescription) -> PartyFile:
    file = _open(described, party, party.file, "file")
    for name in party.columns:
        if name not in file.table.header:
            raise DataError(
                f"{described.where('parties', party.name, 'columns', name)}: {party.file.name} has no column "
                f"{name!r}; {nearest(name, file.others)}"
            )
    if file.label is None and described.label in file.others and described.label not in party.columns:
        raise DataError(
            f"{described.where('parties', party.name)}: {party.file.name} has the label column "
            f"{described.label!r} too, though {described.label_holder} holds the labels; write "
            f'{described.label} = "ignore" under [parties.{party.name}.columns]'
        )
    columns = _columns(party, file, described)
    return _source(described, party, file, tuple(c for c in columns if c.kind != "ignore"))


def _columns(party: PartyDescription, file: _File, described: Description) -> list[Column]:
    """How columns are read; those that are not named are numbers, or categories where they are text."""
    unnamed = [name for name in file.others if name not in party.columns and party.others is None]
    texts, found = file.texts(unnamed), list[Column]()
    for name in file.others:
        if name in party.columns:
            found.append(party.columns[name])
        elif party.others is not None:
            found.append(replace(party.others, name=name))
        else:
            kind: Kind = "category" if name in texts else "number"
            found.append(Column(name=name, kind=kind, missing=described.missing))
    # What LIBSVM does not say is 0 and never missing: no feature has to mark it.
    return [replace(each, missing="error") for each in found] if file.libsvm else found


def _test_source(described: Description, party: PartyDescription, columns: tuple[Column, ...]) -> PartyFile:
    path = party.test if party.test is not None else party.file
    file = _open(described, party, path, "test")
    for column in columns:
        if column.name not in file.table.header:
            raise DataError(
                f"{described.where('parties', party.name, 'test')}: {path.name} has no column "
                f"{column.name!r}, which {party.file.name} has; {nearest(column.name, file.others)}"
            )
    return _source(described, party, file, columns)


def _source(
    described: Description, party: PartyDescription, file: _File, columns: tuple[Column, ...]
) -> PartyFile:
    name, holds, at = file.table.path.name, party.name == described.label_holder, ("parties", party.name)
    ids, labels = list[NDArray[Any]](), list[NDArray[Any]]()
    places = [described.where(*at, "columns", column.name) for column in columns]

    def numbers() -> Iterator[Floats]:
        count = 0
        read = {column.name for column in columns} | {file.id, file.label}
        plain = [column.name for column in columns if column.kind == "number"]
        for piece in file.table.rows(plain, set(file.table.header) - read):
            ids.append(np.array(piece.column(file.id)))
            if holds:
                labels.append(np.array(piece.column(str(file.label))))
            values = [
                column.read(piece.column(column.name), f"{where} ({name})", count)
                for column, where in zip(columns, places, strict=True)
            ]
            for column, found, where in zip(columns, values, places, strict=True):
                _check_gaps(column, found, where, name, count)
            yield np.column_stack(values) if values else np.zeros((len(ids[-1]), 0))
            count += len(ids[-1])

    raw = gather(numbers())
    return PartyFile(
        ids=clean_ids(np.concatenate(ids), f"{described.where(*at)} ({name})"),
        columns=columns,
        raw=raw,
        labels=parse_labels(np.concatenate(labels).tolist()) if holds else None,
    )


def _check_gaps(column: Column, values: Floats, where: str, name: str, before: int) -> None:
    if column.missing == "error" and np.isnan(values).any():
        raise DataError(
            f"{where}: column {column.name!r} of {name} has missing values, the first in data row "
            f'{before + np.argmax(np.isnan(values)) + 1}; mend them, or write missing = "bin" or "drop"'
        )


def _join(described: Description, sources: Sequence[PartyFile]) -> tuple[Rows, Construction]:
    """Joined and coded rows of the parties with features."""
    names = [party.name for party in described.parties]
    at = names.index(described.label_holder)
    try:
        join = join_on_ids([source.ids for source in sources], names, at)
    except DataError as error:
        raise DataError(f"{described.where('id')}: {error}") from None
    holding = [place for place, source in enumerate(sources) if source.columns]
    if not holding:
        raise DataError(f"{described.where('parties')}: no file has feature columns besides ID and label")
    raw = [taken(sources[place].raw, join.rows[place]) for place in holding]
    kept, notes = _kept([sources[place].columns for place in holding], raw)
    notes = (*join.notes(names), *notes, *_strangers(described, sources))
    if at not in holding:
        notes = (*notes, f"{names[at]} holds the labels and no features")
    labels = np.asarray(sources[at].labels)[join.rows[at]][kept]
    if described.missing != "drop" and missing_labels(labels).any():
        raise DataError(
            f"{described.where('label')}: {missing_labels(labels).sum()} of {len(labels)} records have no "
            f'label in column {described.label!r}; mend them, or write missing = "drop" at the top'
        )
    raw = [taken(values, kept) for values in raw]
    columns = tuple(sources[place].columns for place in holding)
    rows = Rows(
        blocks=tuple(coded(mine, values) for mine, values in zip(columns, raw, strict=True)),
        labels=labels,
        ids=join.ids[kept],
        raw=tuple(raw),
    )
    return rows, settings_of(
        columns,
        parties=tuple(names[place] for place in holding),
        label_holder=described.label_holder,
        name=described.name,
        source=str(described.path),
        notes=notes,
        rows_lost=tuple(join.lost[place] for place in holding),
    )


def settings_of(columns: tuple[tuple[Column, ...], ...], **more: Any) -> Construction:
    """Feature names and public bounds of described columns.

    Raises:
        DataError: Two features of a party would have the same name.
    """
    features = tuple(features_of(mine) for mine in columns)
    for names in features:
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"two features would be called {twice!r}; rename that column, or ignore it")
    bounds = [[pair for column in mine for pair in column.feature_bounds] for mine in columns]
    return Construction(columns=features, described=columns, bounds=bounds, **more)


def _kept(
    columns: Sequence[Sequence[Column]], raw: Sequence[Floats]
) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """The rows that no column with `missing = "drop"` leaves out."""
    out = np.zeros(len(raw[0]), bool)
    for mine, values in zip(columns, raw, strict=True):
        dropping = [place for place, column in enumerate(mine) if column.missing == "drop"]
        for some in chunks(values, np.arange(len(values))) if dropping else ():
            out[some] |= np.isnan(values[some][:, dropping]).any(axis=1)
    if out.all():
        raise DataError(
            f"every one of the {len(out)} records has a missing value; nothing is left to train on"
        )
    note = (f"{out.sum()} of {len(out)} rows with missing values left out",) if out.any() else ()
    return np.flatnonzero(~out), note


def _strangers(described: Description, sources: Sequence[PartyFile]) -> tuple[str, ...]:
    """Lists of values of which none occurs are most likely misspelt."""
    notes = []
    for party, source in zip(described.parties, sources, strict=True):
        for place, column in enumerate(source.columns):
            if len(column.values) > 1 and _only(source.raw, place, column.values.index(OTHER)):
                where = described.where("parties", party.name, "columns", column.name)
                notes.append(
                    f"{where}: none of the values of column {column.name!r} occurs; all count as other"
                )
    return tuple(notes)


def _only(raw: Floats, place: int, code: int) -> bool:
    """Whether a column has no other code than one, and gaps."""
    every = (raw[some, place] for some in chunks(raw, np.arange(len(raw))))
    return all(bool((codes[~np.isnan(codes)] == code).all()) for codes in every)


def _clear_task(described: Description, labels: NDArray[Any]) -> str | None:
    """None, to follow from labels that leave no doubt; whole numbers may be classes or a quantity."""
    known = labels[~missing_labels(labels)]
    if known.dtype.kind != "U" and len(known) and bool(np.all(known == np.round(known))):
        raise DataError(
            f"{described.where('label')}: the labels are whole numbers, which may be classes or a quantity; "
            'write task = "binary", task = "multiclass" or task = "regression"'
        )
    return None


def positive_label(described: Description, labels: NDArray[Any]) -> ClassValue | None:
    """The label that counts as 1, in the type of the labels."""
    given = described.positive
    if given is None:
        return None
    known = sorted(set(labels[~missing_labels(labels)].tolist()))
    found = next((value for value in known if value == given or str(value) == str(given)), None)
    if found is None:
        raise DataError(
            f"{described.where('positive')}: positive is {given!r}, which no label is; "
            f"the labels have {len(known)} values{shown_classes(known)}"
        )
    return int(found) if isinstance(found, float) and found.is_integer() else found


LOADERS["description"] = load_description
