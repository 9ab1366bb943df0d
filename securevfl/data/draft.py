"""A first `data.toml` from the files themselves: kinds of columns, and suggestions as comments.

Bounds and lists of values that were read from private rows are a release that no ledger counts, so a draft
never puts them into force: its owner has to replace them by what everybody knows.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from securevfl.data.columns import FLAGS, toml_key, toml_text
from securevfl.data.described import read_source
from securevfl.data.readers import Table, is_missing, parse_numbers, read_bytes, with_point
from securevfl.errors import DataError
from securevfl.files import create

MOST_VALUES = 20
LEAST_COUNT = 10
"""A value that fewer rows have is never suggested."""
LEAST_SHARED = 0.1
"""Columns of different names are one ID from this share of common values on, of the shorter one."""
NEARLY = 0.9
"""Share of different values from which on a column is called a damaged ID."""
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)*(\s*[^\d\s]{1,4})?$")
"""A number, maybe with a comma in it or a unit behind it; parts of dates and codes of letters are none."""
_COMMA = re.compile(r"\d,(\d{1,2}|\d{4,})$")
"""A decimal comma for certain; 1,234 may be thousands."""
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d)(?!\d)")
_HEAD = """\
# The description of the data: what everybody in the federation may know of it. Fill in these three lines.
label = ""            # the column to predict
label_holder = ""     # who has it: {parties}
task = ""             # binary, multiclass or regression

name = {name}
id = {id}{others}
test = 0.2            # share of the records that are set apart for testing
missing = "bin"       # bin: missing is a value of its own; drop: leave the record out; error: refuse
# positive = "..."    # binary: which label counts as 1; otherwise the last in sorted order
# label_bounds = [LOW, HIGH]    # regression needs it: a range of the label that everybody may know

# "could be" below was read from private rows. To use it as it stands is a release that no ledger counts:
# write what everybody knows anyway instead (an age lies between 0 and 120), or leave the column as it is.
# Without bounds a number is binned on a public grid, without a list a category is hashed into 64 buckets.
# Delete the comments before you pass this file on.
"""


@dataclass(frozen=True, kw_only=True)
class _Party:
    name: str
    file: Path
    table: Table
    libsvm: bool
    delimiter: str
    comma: bool
    """Whether its numbers have a decimal comma."""


def draft_description(files: Sequence[Path | str], out: Path | str) -> Path:
    """Writes a first description of one file per party; it is valid once its three open lines are filled.

    Args:
        files: CSV, Parquet or LIBSVM files; each party is called by its file's stem.
        out: The description to write; it must not exist.

    Raises:
        DataError: A file cannot be read, no column can be the ID, or `out` exists.
    """
    out = Path(out)
    if out.exists():
        raise DataError(f"{out} exists; a draft overwrites nothing, give another --out")
    if len(files) < 2:
        raise DataError(f"found {len(files)} files; a draft needs one file for each of at least two parties")
    parties = [_party(Path(file)) for file in files]
    names = [party.name for party in parties]
    if len({name.lower() for name in names}) < len(names):
        raise DataError(f"parties are called by their files, and two are called alike: {', '.join(names)}")
    text = _text(parties, out)
    try:
        create(out, text.encode())
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error
    return out


def _party(file: Path) -> _Party:
    names = read_bytes(file).partition(b"\n")[0].decode(errors="replace")
    odd = "" if "," in names else next((sign for sign in ";\t|" if sign in names), "")
    table, libsvm = read_source(file, odd)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.name.partition(".")[0]).strip("-._")
    comma = bool(odd) and not libsvm and _has_commas(table)
    return _Party(name=stem or "party", file=file, table=table, libsvm=libsvm, delimiter=odd, comma=comma)


def _has_commas(table: Table) -> bool:
    """Whether numbers are written with a decimal comma, and none with a decimal point."""
    found = False
    for cells in table.cells:
        filled = [cell.strip() for cell in cells if not is_missing(cell)]
        if len(_strange([with_point(cell) for cell in filled])) < LEAST_COUNT:
            found |= any(_COMMA.search(cell) for cell in filled)
        elif parse_numbers(filled)[1] is None:
            return False
    return found


def _text(parties: Sequence[_Party], out: Path) -> str:
    first, *others = _id_columns(parties) or [""]
    own = {} if first else _ids_by_values(parties)
    if own:
        first = own[parties[0].name]
    head = _HEAD.format(
        parties=", ".join(party.name for party in parties),
        name=toml_text(" and ".join(party.name for party in parties)),
        id=toml_text(first),
        others=f"    # or {', '.join(others)}" if others else "",
    )
    return head + "".join(_section(party, first, own.get(party.name, first), out) for party in parties)


def _id_columns(parties: Sequence[_Party]) -> list[str]:
    """Columns that every file has with a different value in each row, the likeliest first."""
    tables = [party.table for party in parties if not party.libsvm]
    if not tables:
        return ["row"]
    names = [
        name
        for name in tables[0].header
        if all(name in table.header and _is_unique(table.column(name)) for table in tables)
    ]
    # Numbers that happen to differ from row to row are no IDs; a name that says so, or text, is.
    return sorted(names, key=lambda name: ("id" not in name.lower(), _is_fraction(tables[0].column(name))))


def _ids_by_values(parties: Sequence[_Party]) -> dict[str, str]:
    """Each party's column of different values that shares most of them with the same column of the first."""
    first, *others = [(party.name, _unique_columns(party)) for party in parties]
    for column, values in first[1].items():
        found = {first[0]: column}
        for name, columns in others:
            shared = {
                each: len(values & own) / max(1, min(len(values), len(own))) for each, own in columns.items()
            }
            best = max(shared, key=shared.__getitem__, default=None)
            if best is not None and shared[best] >= LEAST_SHARED:
                found[name] = best
        if len(found) == len(parties):
            return found
    if almost := _almost(parties):
        raise DataError(almost)
    raise DataError(
        "no column is in all files with a different value in each row, so none can be the ID; give the "
        "ID column the same name in every file"
    )


def _almost(parties: Sequence[_Party]) -> str:
    """What is wrong with a column of all files that is nearly an ID; empty where there is none."""
    tables = [party.table for party in parties if not party.libsvm]
    for name in tables[0].header:
        if not all(name in table.header and _is_nearly_unique(table.column(name)) for table in tables):
            continue
        for table in tables:
            seen, wrong = set[str](), list[int]()
            for row, cell in enumerate(table.column(name), start=1):
                if is_missing(cell) or cell.strip() in seen:
                    wrong.append(row)
                seen.add(cell.strip())
            if wrong:
                return (
                    f"{name!r} could be the ID, but {len(wrong)} of {len(table.column(name)):,} rows of "
                    f"{table.path.name} have none or one that a row before has, the first is data row "
                    f"{wrong[0]}; keep one row for each ID"
                )
    return ""


def _unique_columns(party: _Party) -> dict[str, set[str]]:
    """Columns that could be IDs, with their values."""
    cells = {} if party.libsvm else {name: party.table.column(name) for name in party.table.header}
    return {
        name: {cell.strip() for cell in column}
        for name, column in cells.items()
        if _is_unique(column) and not _is_fraction(column)
    }


def _is_unique(cells: Sequence[str]) -> bool:
    return len({cell.strip() for cell in cells}) == len(cells) and not any(map(is_missing, cells))


def _is_nearly_unique(cells: Sequence[str]) -> bool:
    return len({cell.strip() for cell in cells}) > NEARLY * len(cells) and not _is_fraction(cells)


def _is_fraction(cells: Sequence[str]) -> bool:
    values, bad = parse_numbers(cells)
    return bad is None and bool(np.any(values != np.round(values)))


def _section(party: _Party, everybody: str, id_column: str, out: Path) -> str:
    path = os.path.relpath(party.file, out.parent)
    lines = [f"\n[parties.{toml_key(party.name)}]", f"file = {toml_text(path)}"]
    if id_column != everybody:
        lines.append(f"id = {toml_text(id_column)}    # its values are those of {toml_text(everybody)}")
    if party.delimiter:
        lines.append(f"delimiter = {toml_text(party.delimiter)}")
    if party.comma:
        lines.append('decimal = ","    # 1.234,5 is read as 1234.5')
    lines.append(f"[parties.{toml_key(party.name)}.columns]")
    if party.libsvm:
        lines.append('"*" = { kind = "number" }    # every column: f1, f2, ...; rows are numbered from 1')
    else:
        names = [name for name in party.table.header if name != id_column]
        lines += [_line(name, party.table.column(name), party.comma) for name in names]
    return "\n".join(lines) + "\n"


def _line(name: str, cells: Sequence[str], comma: bool) -> str:
    """A column with its kind; what the rows suggest stands behind it as a comment."""
    key, filled = toml_key(name), [cell.strip() for cell in cells if not is_missing(cell)]
    gaps = "" if len(filled) < len(cells) else '; no gaps: missing = "error" saves a feature'
    if not filled:
        return f'{key} = "ignore"    # empty'
    if {cell.lower() for cell in filled} <= set(FLAGS):
        return f'{key} = {{ kind = "flag" }}' + (f"    # {gaps[2:]}" if gaps else "")
    values, bad = parse_numbers([with_point(cell) for cell in filled] if comma else filled)
    common = _common(filled)
    if bad is None:
        low, high = _round_bounds(float(values.min()), float(values.max()))
        hint = f"{{ bounds = [{low:g}, {high:g}] }}"
        if common and np.all(values == np.round(values)):
            codes = sorted(common, key=float)
            hint += f" or, if these are codes, {{ values = [{', '.join(codes)}] }}"
        return f'{key} = {{ kind = "number" }}    # could be {hint}{gaps}'
    strange = _strange([with_point(cell) for cell in cells] if comma else cells)
    if len(strange) < min(LEAST_COUNT, len(filled) / 2):
        return f'{key} = "ignore"    # no number in data row {strange[0]}; {len(strange)} to mend in all'
    if _mostly(_DATE, filled):
        return f'{key} = "ignore"    # dates; to use them, write them as numbers: days before a public day'
    if not common and _mostly(_NUMBER, filled):
        return f'{key} = "ignore"    # numbers with a unit or a comma? To use them, write them as 1234.5'
    if len(set(filled)) > max(MOST_VALUES, len(filled) / 2):
        return f'{key} = "ignore"    # text that differs from row to row'
    hint = f"could be {{ values = [{', '.join(map(toml_text, common))}] }}{gaps}" if common else gaps[2:]
    return f'{key} = {{ kind = "category" }}' + (f"    # {hint}" if hint else "")


def _strange(cells: Sequence[str]) -> list[int]:
    """Rows whose cell is neither a number nor missing; numpy says at once if there is none."""
    if parse_numbers(cells)[1] is None:
        return []
    known = {cell: is_missing(cell) or parse_numbers([cell])[1] is None for cell in set(cells)}
    return [row for row, cell in enumerate(cells, start=1) if not known[cell]]


def _mostly(pattern: re.Pattern[str], cells: Sequence[str]) -> bool:
    return sum(pattern.match(cell) is not None for cell in cells) > len(cells) / 2


def _common(cells: Sequence[str]) -> list[str]:
    """The values of a short list, those of a handful of rows left out; empty where there are too many."""
    counts = Counter(cells)
    return sorted(v for v, n in counts.items() if n >= LEAST_COUNT) if len(counts) <= MOST_VALUES else []


def _round_bounds(low: float, high: float) -> tuple[float, float]:
    """Outward to one digit of the larger end, so that no row's own value is shown."""
    reach = max(abs(low), abs(high)) or 1.0
    step = 10.0 ** math.floor(math.log10(reach))
    return math.floor(low / step) * step, (math.floor(high / step) + 1) * step
