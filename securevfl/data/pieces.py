"""Tables larger than memory: CSV and Parquet read in pieces, their features written to a file of float32."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.mapped import Mapped, gather
from securevfl.data.readers import Cells, Table, not_found, read_table
from securevfl.data.split import clean_ids
from securevfl.errors import DataError, MissingExtra
from securevfl.files import replacing

ROWS = 1 << 16
"""Rows that are in memory as text at a time."""
LARGE = 1 << 25
"""Bytes of text above which a file is read in pieces without being asked."""
_PACKED = 8
"""Bytes of text that a byte of a packed file is taken for; gzip and Parquet of few digits come to that."""
_WIDEST = 64
"""Characters of a cell of text, from which on a piece is read cell by cell."""
_UNREADABLE = (csv.Error, UnicodeDecodeError, EOFError, OSError, zlib.error)
ZIP = b"PK\x03\x04"

Encoded = tuple[NDArray[Any], tuple[str, ...], NDArray[np.float32], NDArray[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A file, and its rows a piece at a time.

    Attributes:
        path: The file.
        header: Its columns.
        rows: Gives its rows as tables, from the first on. Columns that are named first are wanted as numbers,
            which is faster, and columns that are named second are not wanted.
    """

    path: Path
    header: tuple[str, ...]
    rows: Callable[..., Iterator[Table]]

    def encode(
        self,
        encode: Callable[[Table], Encoded],
        target: Path | None = None,
        texts: Collection[str | None] = (),
    ) -> tuple[Any, ...]:
        """IDs, columns, features and labels as `encode` finds them.

        Args:
            encode: Finds them in one piece.
            texts: Columns that it reads as text, or not at all.
            target: A file for the features; None where they may be in memory, if they are few.

        Raises:
            DataError: The file has no rows, or its labels are numbers here and text there.
        """
        ids: list[NDArray[Any]] = []
        labels: list[NDArray[Any] | None] = []
        columns: list[tuple[str, ...]] = []

        def blocks() -> Iterator[NDArray[np.float32]]:
            count = 0
            for table in self.rows([name for name in self.header if name not in texts]):
                try:
                    found, names, block, own = encode(table)
                except DataError as error:
                    far = f" (counted from data row {count + 1})" if count else ""
                    raise DataError(f"{error}{far}") from None
                ids.append(found)
                labels.append(own)
                columns[:] = [names]
                count += len(found)
                yield block

        features = gather(blocks()) if target is None else _written(blocks(), target)
        if not columns:
            raise DataError(f"{self.path} has a header but no rows")
        known = [each for each in labels if each is not None]
        if len({each.dtype.kind for each in known}) > 1:
            raise DataError(
                f"{self.path}: the labels are numbers in one part of the file and text in another"
            )
        every = clean_ids(np.concatenate(ids), str(self.path))
        return every, columns[0], features, np.concatenate(known) if known else None


def _written(blocks: Iterator[NDArray[np.float32]], target: Path) -> Mapped | NDArray[np.float32]:
    shape = [0, 0]
    with replacing(target) as file:
        for block in blocks:
            file.write(np.ascontiguousarray(block).data)
            shape = [shape[0] + len(block), block.shape[1]]
    if not all(shape):
        return np.zeros(shape, np.float32)
    return Mapped(np.memmap(target, np.float32, "r", shape=tuple(shape)))


def is_large(path: Path) -> bool:
    """Whether a file is there, and may have so much text that it should not be in memory as a whole."""
    try:
        with path.open("rb") as file:
            packed = file.read(4).startswith((b"\x1f\x8b", b"PAR1"))
        return path.stat().st_size * (_PACKED if packed else 1) > LARGE
    except OSError:
        return False  # whoever reads it says what is wrong


def in_one_piece(table: Table) -> Pieces:
    """A table that was read whole."""
    return Pieces(path=table.path, header=table.header, rows=lambda *_: iter((table,)))


def open_table(path: Path | str, delimiter: str = ",") -> Pieces:
    """A text file with a header: in pieces if it is large."""
    if is_large(Path(path)):
        with Path(path).open("rb") as file:
            packed = file.read(4) == ZIP
        if not packed:
            return open_pieces(path, delimiter)
    return in_one_piece(read_table(path, delimiter))


def open_pieces(path: Path | str, delimiter: str = ",") -> Pieces:
    """A CSV file, plain or packed by gzip, or a Parquet file, told apart by their content.

    Raises:
        DataError: It cannot be read.
        MissingExtra: It is Parquet, and pyarrow is not installed.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError:
        raise not_found(path) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if start == b"PAR1":
        return _parquet(path)
    if start == ZIP:
        raise DataError(f"{path} is a zip archive, which cannot be read in pieces; unpack it")
    return _csv(path, delimiter, packed=start[:2] == b"\x1f\x8b")


def _csv(path: Path, delimiter: str, *, packed: bool) -> Pieces:
    with _opened(path, packed) as text:
        header, _ = _header(path, text, delimiter)

    def rows(numbers: Collection[str] = (), unread: Collection[str] = ()) -> Iterator[Table]:
        types = [("f8" if n in numbers else "U1" if n in unread else f"U{_WIDEST}") for n in header]
        fast = bool(numbers) and delimiter != " "
        with _opened(path, packed) as text:
            _, place = _header(path, text, delimiter)
            while piece := _lines(path, text, place):
                plain = _unquoted(piece, delimiter)
                cells = _parsed(plain, types, delimiter) if fast and plain is not None else None
                if cells is not None:
                    yield Table(path=path, header=header, cells=cells)
                else:
                    # A quoted cell may go on in the next line, so that from here on lines are no rows.
                    source = itertools.chain(piece, text) if plain is None else piece
                    yield from _tables(path, header, _records(path, source, delimiter, place, len(header)))
                place += len(piece)

    return Pieces(path=path, header=header, rows=rows)


@contextmanager
def _opened(path: Path, packed: bool) -> Iterator[Iterator[str]]:
    with gzip.open(path) if packed else path.open("rb") as raw:
        yield io.TextIOWrapper(raw, "utf-8-sig", newline="")


def _header(path: Path, text: Iterator[str], delimiter: str) -> tuple[tuple[str, ...], int]:
    """The names of the columns, and how many lines they take."""
    place = itertools.count(1)
    reader = _records(path, (line for line in text if next(place)), delimiter)
    header = tuple(name.strip() for name in next(reader, ()))
    if not header:
        raise DataError(f"{path} is empty")
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise DataError(f"{path}: column {repeated[0]!r} occurs more than once in the header")
    return header, next(place) - 1


def _lines(path: Path, text: Iterator[str], place: int) -> list[str]:
    try:
        return list(itertools.islice(text, ROWS))
    except _UNREADABLE as error:
        raise DataError(f"{path}, after line {place}: {error}") from None


def _records(
    path: Path, lines: Iterable[str], delimiter: str, place: int = 0, width: int = 0
) -> Iterator[list[str]]:
    """Rows of cells that stand in some lines.

    Args:
        path: The file, for messages.
        lines: The lines.
        delimiter: What separates cells.
        place: How many lines come before them.
        width: How many cells a row has; the first row tells it by default.
    """
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        for row in reader:
            width = width or len(row)
            if row and len(row) != width:
                where = f"{path}, line {place + reader.line_num}"
                raise DataError(f"{where}: {len(row)} cells, the header has {width}")
            if row:
                yield row
    except _UNREADABLE as error:
        raise DataError(f"{path}, line {place + reader.line_num}: {error}") from None


def _tables(path: Path, header: tuple[str, ...], rows: Iterator[list[str]]) -> Iterator[Table]:
    while piece := list(itertools.islice(rows, ROWS)):
        yield Table(path=path, header=header, cells=tuple(zip(*piece, strict=True)))


def _unquoted(lines: Sequence[str], delimiter: str) -> list[str] | None:
    """Lines that are not empty, with no quotes around their cells; None where quotes are of use."""
    filled = [line for line in lines if line.strip("\r\n")]
    if not any('"' in line or "\0" in line for line in filled):
        return filled
    sign = re.escape(delimiter)
    cell = re.compile(rf'"(?<![^{sign}\r\n]")([^"{sign}\r\n\0]*)"(?![^{sign}\r\n])')
    bare = [cell.sub(r"\1", line) for line in filled]
    return None if any('"' in line or "\0" in line for line in bare) else bare


def _parsed(lines: Sequence[str], types: Sequence[str], delimiter: str) -> tuple[Cells, ...] | None:
    """Columns of lines without quotes whose numbers have no gaps; None where that is not so.

    Three times as fast as cells of text, with the same result: whatever is odd is left to those.
    """
    form = np.dtype([(f"c{place}", each) for place, each in enumerate(types)])
    if not lines:
        return None
    try:
        found = np.loadtxt(lines, form, delimiter=delimiter, comments=None, ndmin=1)
    except ValueError:
        return None
    if len(found) != len(lines):
        return None
    cells: list[Cells] = []
    for name, kind in zip(form.names or (), types, strict=True):
        column = found[name]
        if kind == f"U{_WIDEST}" and np.char.str_len(column).max() == _WIDEST:
            return None  # it may have been cut
        cells.append(column if kind == "f8" else tuple(column.tolist()))
    return tuple(cells)


def _parquet(path: Path) -> Pieces:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(
            f"{path} is Parquet; install the extra: pip install 'securevfl[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            header = tuple(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged Parquet file: {error}") from None

    def rows(numbers: Collection[str] = (), unread: Collection[str] = ()) -> Iterator[Table]:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                cells = (
                    () if name in unread else _cells(column, name in numbers)
                    for name, column in zip(header, batch.columns, strict=True)
                )
                yield Table(path=path, header=header, cells=tuple(cells))

    return Pieces(path=path, header=header, rows=rows)


def _cells(column: Any, numbers: bool) -> Cells:
    from pyarrow import types

    if numbers and (types.is_integer(column.type) or types.is_floating(column.type)):
        return column.to_numpy(zero_copy_only=False).astype(np.float64)
    return tuple("" if value is None else str(value) for value in column.to_pylist())
