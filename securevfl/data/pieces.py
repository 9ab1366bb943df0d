"""Tables larger than memory: CSV and Parquet read in pieces, their features written to a file of float32."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.mapped import Mapped, gather
from securevfl.data.readers import Table, read_table
from securevfl.data.split import clean_ids
from securevfl.errors import DataError, MissingExtra
from securevfl.files import replacing

ROWS = 1 << 16
"""Rows that are in memory as text at a time."""
LARGE = 1 << 25
"""Bytes of a file above which it is read in pieces without being asked."""
ZIP = b"PK\x03\x04"

Encoded = tuple[NDArray[Any], tuple[str, ...], NDArray[np.float32], NDArray[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A file, and its rows a piece at a time.

    Attributes:
        path: The file.
        header: Its columns.
        rows: Gives its rows as tables, from the first on.
    """

    path: Path
    header: tuple[str, ...]
    rows: Callable[[], Iterator[Table]]

    def encode(self, encode: Callable[[Table], Encoded], target: Path | None = None) -> tuple[Any, ...]:
        """IDs, columns, features and labels as `encode` finds them.

        Args:
            encode: Finds them in one piece.
            target: A file for the features; None where they may be in memory, if they are few.

        Raises:
            DataError: The file has no rows, or its labels are numbers here and text there.
        """
        ids: list[NDArray[Any]] = []
        labels: list[NDArray[Any] | None] = []
        columns: list[tuple[str, ...]] = []

        def blocks() -> Iterator[NDArray[np.float32]]:
            count = 0
            for table in self.rows():
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
    """Whether a file is there, and has so many bytes that its text should not be in memory."""
    return path.is_file() and path.stat().st_size > LARGE


def in_one_piece(table: Table) -> Pieces:
    """A table that was read whole."""
    return Pieces(path=table.path, header=table.header, rows=lambda: iter((table,)))


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
        raise DataError(f"file not found: {path}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if start == b"PAR1":
        return _parquet(path)
    if start == ZIP:
        raise DataError(f"{path} is a zip archive, which cannot be read in pieces; unpack it")
    return _csv(path, delimiter, packed=start[:2] == b"\x1f\x8b")


def _csv(path: Path, delimiter: str, *, packed: bool) -> Pieces:
    def lines() -> Iterator[list[str]]:
        with gzip.open(path) if packed else path.open("rb") as raw:
            reader = csv.reader(io.TextIOWrapper(raw, "utf-8-sig", newline=""), delimiter=delimiter)
            width = 0
            try:
                for line in reader:
                    width = width or len(line)
                    if line and len(line) != width:
                        where = f"{path}, line {reader.line_num}"
                        raise DataError(f"{where}: {len(line)} cells, the header has {width}")
                    if line:
                        yield line
            except (csv.Error, UnicodeDecodeError, EOFError, OSError) as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}") from None

    header = tuple(name.strip() for name in next(lines(), ()))
    if not header:
        raise DataError(f"{path} is empty")
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise DataError(f"{path}: column {repeated[0]!r} occurs more than once in the header")

    def rows() -> Iterator[Table]:
        source = itertools.islice(lines(), 1, None)
        while piece := list(itertools.islice(source, ROWS)):
            yield Table(path=path, header=header, cells=tuple(zip(*piece, strict=True)))

    return Pieces(path=path, header=header, rows=rows)


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

    def rows() -> Iterator[Table]:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                yield Table(path=path, header=header, cells=tuple(map(_cells, batch.columns)))

    return Pieces(path=path, header=header, rows=rows)


def _cells(column: Any) -> tuple[str, ...]:
    return tuple("" if value is None else str(value) for value in column.to_pylist())
