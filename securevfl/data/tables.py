"""Text tables: parsing, columns of numbers, one-hot codes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import DataError

from .checks import nearest, shorten
from .files import read_text

_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file with a header, kept as columns of text."""

    path: Path
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> tuple[str, ...]:
        """The cells of one column.

        Raises:
            DataError: No such column; the message names the nearest.
        """
        if name not in self.header:
            raise DataError(f"{self.path}: no column {name!r}{nearest(name, self.header)}")
        return self.cells[self.header.index(name)]


def read_table(path: Path | str, delimiter: str = ",") -> Table:
    """Read a text file whose first line names the columns.

    Raises:
        DataError: The file is missing, empty, has no rows, a repeated column or a line of another length.
    """
    header, rows = _read_lines(path, delimiter)
    header = [name.strip() for name in header]
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise DataError(f"{path}: column {repeated[0]!r} occurs more than once in the header")
    if not rows:
        raise DataError(f"{path} has a header but no rows")
    return Table(path=Path(path), header=tuple(header), cells=tuple(zip(*rows, strict=True)))


def _read_lines(path: Path | str, delimiter: str) -> tuple[list[str], list[list[str]]]:
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise DataError(f"delimiter must be one character, found {delimiter!r}")
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter)
    header: list[str] | None = None
    rows: list[list[str]] = []
    try:
        for line in reader:
            if not line:
                continue
            if header is None:
                header = line
            elif len(line) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(line)} cells, the header has {len(header)}"
                )
            else:
                rows.append(line)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
    if header is None:
        raise DataError(f"{path} is empty")
    return header, rows


def numbers(cells: Sequence[str], *, where: str, column: str, ids: Sequence[object]) -> NDArray[np.float64]:
    """The cells as numbers, NaN where missing.

    Raises:
        DataError: A cell is neither; the message says how to use or leave out the column.
    """
    try:
        return _parse(cells)
    except ValueError:
        pass
    try:
        return _parse([cell if cell.strip().lower() not in _MISSING else "nan" for cell in cells])
    except ValueError:
        row = next(row for row, cell in enumerate(cells) if not _is_number(cell))
    values = sorted({cell.strip() for cell in cells})
    raise DataError(
        f"{where}: column {column!r} is not numeric (ID {ids[row]!r} has {cells[row]!r}); leave it "
        f"out (leave_out=[{column!r}]) or list its values (one_hot={{{column!r}: [...]}}; found "
        f"{shorten(values)})"
    )


def _parse(cells: Sequence[str]) -> NDArray[np.float64]:
    # Python reads 1_000 as a number; in a data file it is a typing error or text.
    if "_" in "".join(cells):
        raise ValueError("underscore in a number")
    return np.array(cells, dtype=np.float64)


def _is_number(cell: str) -> bool:
    try:
        _parse([cell if cell.strip().lower() not in _MISSING else "nan"])
    except ValueError:
        return False
    return True


def one_hot(
    cells: Sequence[str], values: Sequence[object], *, where: str, column: str, unknown: str | None = None
) -> NDArray[np.float32]:
    """One 0/1 column per value, in the order of `values`; cells equal to `unknown` give a row of zeros.

    The values come from a public description of the column and not from its rows, so that a record's code
    does not depend on other records.
    """
    known = {str(value).strip(): place for place, value in enumerate(values)}
    if len(known) < len(values) or not known:
        raise DataError(
            f"one_hot values of column {column!r} must be different from each other and not empty"
        )
    coded = np.zeros((len(cells), len(known)), dtype=np.float32)
    for row, cell in enumerate(cells):
        place = known.get(cell.strip())
        if place is not None:
            coded[row, place] = 1.0
        elif cell.strip() != unknown:
            raise DataError(
                f"{where}: column {column!r} has the value {cell.strip()!r}, not among its one_hot values "
                f"{shorten(list(known))}"
            )
    return coded
