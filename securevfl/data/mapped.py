"""Features that stay in their file: rows are read, and scaled, when they are asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 16
"""Rows that are looked at together."""
READ_BYTES = 1 << 27
"""How much is read before what was read is given back."""


class Mapped:
    """One party's features in a file, (rows, columns) of float32.

    Args:
        source: The file, memory-mapped.
        rows: Which of its rows, in which order; all by default.
        steps: Scalings, in their order; each takes and returns an array.
    """

    ndim = 2

    def __init__(
        self, source: NDArray[np.float32], rows: NDArray[np.intp] | None = None, steps: tuple[Any, ...] = ()
    ) -> None:
        self._source, self._rows, self._steps = source, rows, steps
        self.shape = (len(source) if rows is None else len(rows), source.shape[1])
        self.dtype = np.dtype(np.float32)
        self._read = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | NDArray[Any]) -> NDArray[np.float32]:
        """Rows, as they are scaled."""
        found = np.array(self._source[which if self._rows is None else self._rows[which]])
        self._give_back(found.nbytes)
        for step in self._steps:
            found = step(found)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All rows, in memory."""
        return np.asarray(self[:], dtype)

    def _give_back(self, size: int) -> None:
        self._read += size
        kept = getattr(self._source, "_mmap", None)
        if self._read > READ_BYTES and kept is not None and hasattr(kept, "madvise"):
            kept.madvise(mmap.MADV_DONTNEED)
            self._read = 0

    def take(self, rows: NDArray[np.intp]) -> Mapped:
        """Some of the rows, still in the file."""
        return Mapped(self._source, rows if self._rows is None else self._rows[rows], self._steps)

    def scaled(self, step: Any) -> Mapped:
        """The same rows with one more scaling."""
        return Mapped(self._source, self._rows, (*self._steps, step))

    def pieces(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All rows a piece at a time, each with the number of its first row."""
        for start in range(0, len(self), CHUNK):
            yield start, self[start : start + CHUNK]


def is_mapped(values: Any) -> bool:
    """True for an array that lies in a file and can stay there."""
    return isinstance(values, np.memmap) and values.dtype == np.float32 and values.ndim == 2
