"""Features that stay in their file: rows are read, and scaled, when they are asked for."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import DataError
from securevfl.files import give_back

CHUNK = 1 << 16
"""Rows that are looked at together."""
READ_BYTES = 1 << 27
"""How much is read before what was read is given back."""
HELD_BYTES = 1 << 28
"""Largest array that is made in memory where it could lie in a file."""


class Mapped:
    """One party's features in a file, (rows, columns) of float32 when they are read.

    Args:
        source: The file, memory-mapped: the features, or numbers that a step makes them of.
        rows: Which of its rows, in which order; all by default.
        steps: Codings and scalings, in their order; each takes and returns an array.
        columns: How many features there are, where the file has another number of columns.
    """

    ndim = 2

    def __init__(
        self,
        source: NDArray[Any],
        rows: NDArray[np.intp] | None = None,
        steps: tuple[Any, ...] = (),
        columns: int | None = None,
    ) -> None:
        self._source, self._rows, self._steps = source, rows, steps
        width = source.shape[1] if columns is None else columns
        self.shape = (len(source) if rows is None else len(rows), width)
        self.dtype = np.dtype(np.float32)
        self._read = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | NDArray[Any]) -> NDArray[np.float32]:
        """Rows, as they are scaled."""
        found = np.array(self._source[which if self._rows is None else self._rows[which]])
        self._read += found.nbytes
        if self._read > READ_BYTES:
            give_back(self._source)
            self._read = 0
        for step in self._steps:
            found = step(found)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All rows, in memory."""
        return np.asarray(self[:], dtype)

    def take(self, rows: NDArray[np.intp]) -> Mapped:
        """Some of the rows, still in the file."""
        some = rows if self._rows is None else self._rows[rows]
        return Mapped(self._source, some, self._steps, self.shape[1])

    def scaled(self, step: Any) -> Mapped:
        """The same rows with one more scaling."""
        return Mapped(self._source, self._rows, (*self._steps, step), self.shape[1])

    def pieces(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All rows a piece at a time, each with the number of its first row."""
        for start in range(0, len(self), CHUNK):
            yield start, self[start : start + CHUNK]


def is_mapped(values: Any) -> bool:
    """True for an array that lies in a file and can stay there."""
    return isinstance(values, np.memmap) and values.dtype == np.float32 and values.ndim == 2


def gather(pieces: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Pieces of rows, one after the other; from `HELD_BYTES` on in a file without a name.

    Only its owner can read such a file, and it ends with the process.

    Raises:
        DataError: There is no room for it.
    """
    held, file, rows = list[NDArray[Any]](), None, 0
    try:
        for piece in pieces:
            held.append(piece)
            if sum(each.nbytes for each in held) > HELD_BYTES:
                file = file or tempfile.TemporaryFile()  # noqa: SIM115 - closed below
                rows += _spill(held, file)
        if file is None:
            return held[0] if len(held) == 1 else np.concatenate(held)
        like = piece
        rows += _spill(held, file)
        file.flush()
        whole = mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise DataError(
            f"no room for numbers read from a large file in {tempfile.gettempdir()} ({error.strerror}); "
            "make room, or name another folder in TMPDIR"
        ) from None
    finally:
        if file is not None:
            file.close()
    return np.frombuffer(whole, like.dtype).reshape(rows, *like.shape[1:])


def _spill(held: list[NDArray[Any]], file: IO[bytes]) -> int:
    """Writes what is held; returns how many rows."""
    rows = 0
    for each in held:
        file.write(np.ascontiguousarray(each).data)
        rows += len(each)
    held.clear()
    return rows


def chunks(values: NDArray[Any], rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Some rows a piece at a time; where the array lies in a file, not all of it stays in memory."""
    pieces = max(1, READ_BYTES // max(1, CHUNK * values[:1].nbytes))
    for piece, start in enumerate(range(0, len(rows), CHUNK), start=1):
        yield rows[start : start + CHUNK]
        if piece % pieces == 0:
            give_back(values)


def taken(values: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
    """Some rows of an array, not copied where they are all in order; many again in a file."""
    if len(rows) == len(values) and bool((rows == np.arange(len(rows))).all()):
        return values
    if len(rows) * values[:1].nbytes <= HELD_BYTES:
        return values[rows]
    return gather(values[some] for some in chunks(values, rows))
