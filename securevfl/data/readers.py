"""Reading local files: plain, gzip or zip; text tables, one-hot codes and the LIBSVM form."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data import sparse
from securevfl.data.blocks import shorten
from securevfl.data.labels import raw_labels
from securevfl.errors import DataError, nearest, similar

Cells: TypeAlias = Any
"""A column: text, or an array of float64 with NaN where a cell is missing."""
_MISSING = frozenset(("", "-", "na", "n/a", "nan", "null", "none", "?"))
_COMMA = re.compile(r"([-+]?)(\d{1,3}(?:\.\d{3})+|\d*)(?:,(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file with a header, kept as columns of text, or of numbers where a reader has found nothing else."""

    path: Path
    header: tuple[str, ...]
    cells: tuple[Cells, ...]

    def column(self, name: str) -> Cells:
        """The cells of one column.

        Raises:
            DataError: No such column; the message names the nearest.
        """
        if name not in self.header:
            raise DataError(f"{self.path}: no column {name!r}; {nearest(name, self.header)}")
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


def numbers(cells: Cells, *, where: str, column: str) -> NDArray[np.float64]:
    """The cells as numbers, NaN where missing.

    Raises:
        DataError: A cell is neither; the message says how to use or leave out the column.
    """
    values, bad = parse_numbers(cells)
    if bad is None:
        return values
    raise DataError(
        f"{where}: column {column!r} is not numeric in data row {bad + 1}; describe the "
        "files (securevfl data draft FILES... --out data.toml), or leave it out "
        f"(leave_out=[{column!r}]) or list its values (one_hot={{{column!r}: [...]}})"
    )


def parse_numbers(cells: Cells) -> tuple[NDArray[np.float64], int | None]:
    """The cells as numbers, NaN where missing, and the first row that is no number."""
    if isinstance(cells, np.ndarray):
        return cells, None
    with suppress(ValueError):
        return _parse(cells), None
    with suppress(ValueError):
        return _parse(["nan" if is_missing(cell) else cell for cell in cells]), None
    return np.full(len(cells), np.nan), next(row for row, cell in enumerate(cells) if not _is_number(cell))


def is_missing(cell: str) -> bool:
    """True for an empty cell and for the usual words for one."""
    return cell.strip().lower() in _MISSING


def with_point(cell: str) -> str:
    """A number with a decimal comma, 1.234,5, as Python reads it; with a point alone it is none."""
    text = cell.strip()
    found = _COMMA.fullmatch(text) if "," in text or "." in text else None
    if found is None:
        return text.replace(".", ",")
    sign, whole, rest = found.groups()
    return f"{sign}{whole.replace('.', '')}.{rest or 0}"


def _parse(cells: Sequence[str]) -> NDArray[np.float64]:
    # Python reads 1_000 as a number; in a data file it is a typing error or text.
    if "_" in "".join(cells):
        raise ValueError("underscore in a number")
    return np.array(cells, dtype=np.float64)


def _is_number(cell: str) -> bool:
    try:
        _parse(["nan" if is_missing(cell) else cell])
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
                f"{where}: column {column!r} has a value in data row {row + 1} that is not among its one_hot "
                f"values {shorten(list(known))}"
            )
    return coded


def is_file_name(name: str) -> bool:
    """True for what can only be a file: data sets have neither folders nor endings."""
    return "/" in name or Path(name).suffix[1:2].isalpha()


def not_found(path: Path) -> DataError:
    """The error for a file that is not there, with the name beside it that is most like it."""
    beside: list[str] = []
    with suppress(OSError):
        beside = [each.name for each in path.parent.iterdir() if each.is_file()]
    hint = similar(path.name, beside)
    return DataError(f"file not found: {path}" + (f"; {hint}" if hint else ""))


def read_bytes(path: Path | str) -> bytes:
    """The unpacked content of a file.

    Raises:
        DataError: The file is missing, unreadable, empty or a damaged archive.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise not_found(path) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        content = _unpack(raw, path)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is a damaged archive: {error}") from None
    if not content:
        raise DataError(f"{path} is empty")
    return content


def _unpack(raw: bytes, path: Path) -> bytes:
    if raw[:2] == b"\x1f\x8b":
        return gzip.decompress(raw)
    if raw[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [name for name in archive.namelist() if not name.endswith("/")]
            if len(members) != 1:
                raise DataError(f"{path} holds {len(members)} files; expected a zip with exactly one")
            return archive.read(members[0])
    return raw


def read_text(path: Path | str) -> str:
    """The unpacked content as UTF-8 text, without a byte order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def find_files(data_set: str, folder: Path | str | None, names: tuple[str, ...]) -> list[Path]:
    """The paths of a set's own files in `folder` or in its folder of that name, each plain, .gz or .zip.

    Raises:
        DataError: No folder was given, or a file is not there; the message lists all files expected.
    """
    expected = ", ".join(names)
    if folder is None:
        raise DataError(
            f"data set {data_set!r} is read from local files: give the folder with {expected} (or .gz)"
        )
    base = Path(folder)
    if not base.is_dir():
        raise DataError(f"data set {data_set!r}: {base} is not a folder; expected one that holds {expected}")
    for place in (base, *_own_folders(base, data_set)):
        found = [next((p for p in _candidates(place, name) if p.is_file()), None) for name in names]
        if None not in found:
            return [path for path in found if path is not None]
    absent = [name for name in names if not any(p.is_file() for p in _candidates(base, name))]
    raise DataError(
        f"data set {data_set!r}: {', '.join(absent)} not found in {base}; expected {expected} (or .gz)"
    )


def _own_folders(base: Path, data_set: str) -> list[Path]:
    """Folders of the set's name in one that holds several sets; names may go on, as in parkinson_speech."""
    plain = data_set.replace("-", "_")
    inner = sorted(place for place in base.iterdir() if place.is_dir())
    exact = [place for place in inner if place.name in (data_set, plain)]
    return exact + [place for place in inner if place.name.startswith(f"{plain}_")]


def _candidates(base: Path, name: str) -> list[Path]:
    return [base / name, base / f"{name}.gz", base / f"{name}.zip"]


def read_libsvm(path: Path | str) -> tuple[NDArray[Any], Any, int]:
    """Labels, CSR matrix (float32) and the largest feature index of a file.

    Raises:
        DataError: A line is not of the form; the message names the line.
    """
    heads: list[str] = []
    tokens: list[str] = []
    lengths: list[int] = []
    lines: list[int] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        head, *features = line.partition("#")[0].split() or [""]
        if not head:
            continue
        heads.append(head)
        tokens += features
        lengths.append(len(features))
        lines.append(number)
    if not heads:
        raise DataError(f"{path} has no records")
    for head, number in zip(heads, lines, strict=True):
        if not _is_float(head):
            raise DataError(f"{path}, line {number}: expected a numeric label first")
    try:
        matrix = _matrix(_pairs(tokens), lengths)
    except ValueError:
        raise DataError(_first_bad_line(path, tokens, lengths, lines)) from None
    return raw_labels(np.array(heads, dtype=np.float64)), matrix, matrix.shape[1]


def _pairs(tokens: list[str]) -> NDArray[np.float64]:
    # Joined and split again in one go, which is only right if every token has exactly one colon.
    if any(token.count(":") != 1 for token in tokens):
        raise ValueError("not index:value")
    cells = ":".join(tokens).split(":") if tokens else []
    return np.array(cells, dtype=np.float64).reshape(-1, 2)


def _matrix(pairs: NDArray[np.float64], lengths: list[int]) -> Any:
    index = pairs[:, 0]
    row = np.repeat(np.arange(len(lengths)), lengths)
    ascending = (np.diff(index) > 0) | (np.diff(row) > 0)
    whole = (index >= 1) & (index == np.floor(index))
    if not whole.all() or not ascending.all():
        raise ValueError("bad index")
    columns = int(index.max()) if len(index) else 0
    if columns > np.iinfo(np.int32).max:
        raise ValueError("index too large")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    with np.errstate(over="ignore"):
        values = pairs[:, 1].astype(np.float32)
    return sparse.csr_array((values, (index - 1).astype(np.int32), starts), shape=(len(lengths), columns))


def _first_bad_line(path: Path | str, tokens: list[str], lengths: list[int], lines: list[int]) -> str:
    start = 0
    for number, length in zip(lines, lengths, strict=True):
        last = 0
        for place, token in enumerate(tokens[start : start + length], start=1):
            index, colon, value = token.partition(":")
            fine = bool(colon) and index.isdecimal() and last < int(index) < 2**31 and _is_float(value)
            if not fine:
                return (
                    f"{path}, line {number}: entry {place} is not index:value with indices that ascend from 1"
                )
            last = int(index)
        start += length
    return f"{path} is not in LIBSVM form: label index:value ..."


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return ":" not in text
