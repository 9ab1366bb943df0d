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
from securevfl.data.readers import Table, is_missing, parse_numbers, read_bytes
from securevfl.errors import DataError
from securevfl.files import create

MOST_VALUES = 20
LEAST_COUNT = 10
"""A value that fewer rows have is never suggested."""
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)*(\s*[^\d\s]{1,4})?$")
"""A number, maybe with a comma in it or a unit behind it; parts of dates and codes of letters are none."""
_HEAD = """\
# The description of the data: what everybody in the federation may know of it. Fill in these three lines.
label = ""            # the column to predict
label_holder = ""     # who has it: {parties}
task = ""             # binary, multiclass or regression

name = {name}
id = {id}{others}
test = 0.2            # share of the records that are set apart for testing
missing = "bin"       # bin: missing is a value of its own; drop: leave the record out; error: refuse
# positive = "..."    # binary: which label is 1
# label_bounds = [LOW, HIGH]    # regression: public range of the label

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
    return _Party(name=stem or "party", file=file, table=table, libsvm=libsvm, delimiter=odd)


def _text(parties: Sequence[_Party], out: Path) -> str:
    first, *others = _id_columns(parties)
    head = _HEAD.format(
        parties=", ".join(party.name for party in parties),
        name=toml_text(" and ".join(party.name for party in parties)),
        id=toml_text(first),
        others=f"    # or {', '.join(others)}" if others else "",
    )
    return head + "".join(_section(party, first, out) for party in parties)


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
    if not names:
        raise DataError(
            "no column is in all files with a different value in each row, so none can be the ID; give the "
            "ID column the same name in every file"
        )
    # Numbers that happen to differ from row to row are no IDs; a name that says so, or text, is.
    return sorted(names, key=lambda name: ("id" not in name.lower(), _is_fraction(tables[0].column(name))))


def _is_unique(cells: Sequence[str]) -> bool:
    return len({cell.strip() for cell in cells}) == len(cells) and not any(map(is_missing, cells))


def _is_fraction(cells: Sequence[str]) -> bool:
    values, bad = parse_numbers(cells)
    return bad is None and bool(np.any(values != np.round(values)))


def _section(party: _Party, id_column: str, out: Path) -> str:
    path = os.path.relpath(party.file, out.parent)
    lines = [f"\n[parties.{toml_key(party.name)}]", f"file = {toml_text(path)}"]
    if party.delimiter:
        lines.append(f"delimiter = {toml_text(party.delimiter)}")
    lines.append(f"[parties.{toml_key(party.name)}.columns]")
    if party.libsvm:
        lines.append('"*" = { kind = "number" }    # every column: f1, f2, ...; rows are numbered from 1')
    else:
        names = [name for name in party.table.header if name != id_column]
        lines += [_line(name, party.table.column(name)) for name in names]
    return "\n".join(lines) + "\n"


def _line(name: str, cells: Sequence[str]) -> str:
    """A column with its kind; what the rows suggest stands behind it as a comment."""
    key, filled = toml_key(name), [cell.strip() for cell in cells if not is_missing(cell)]
    gaps = "" if len(filled) < len(cells) else '; no gaps: missing = "error" saves a feature'
    if not filled:
        return f'{key} = "ignore"    # empty'
    if {cell.lower() for cell in filled} <= set(FLAGS):
        return f'{key} = {{ kind = "flag" }}' + (f"    # {gaps[2:]}" if gaps else "")
    values, bad = parse_numbers(filled)
    common = _common(filled)
    if bad is None:
        low, high = _round_bounds(float(values.min()), float(values.max()))
        hint = f"{{ bounds = [{low:g}, {high:g}] }}"
        if common and np.all(values == np.round(values)):
            hint += f" or, if these are codes, {{ values = [{', '.join(common)}] }}"
        return f'{key} = {{ kind = "number" }}    # could be {hint}{gaps}'
    if sum(map(_begins_like_a_number, filled)) > len(filled) / 2:
        return f'{key} = {{ kind = "category" }}    # numbers with a unit or a comma? Write them as 1234.5'
    if len(set(filled)) > max(MOST_VALUES, len(filled) / 2):
        return f'{key} = "ignore"    # text that differs from row to row'
    hint = f"could be {{ values = [{', '.join(map(toml_text, common))}] }}{gaps}" if common else gaps[2:]
    return f'{key} = {{ kind = "category" }}' + (f"    # {hint}" if hint else "")


def _begins_like_a_number(cell: str) -> bool:
    return _NUMBER.match(cell) is not None


def _common(cells: Sequence[str]) -> list[str]:
    """The values of a short list, those of a handful of rows left out; empty where there are too many."""
    counts = Counter(cells)
    return sorted(v for v, n in counts.items() if n >= LEAST_COUNT) if len(counts) <= MOST_VALUES else []


def _round_bounds(low: float, high: float) -> tuple[float, float]:
    """Outward to one digit of the larger end, so that no row's own value is shown."""
    reach = max(abs(low), abs(high)) or 1.0
    step = 10.0 ** math.floor(math.log10(reach))
    return math.floor(low / step) * step, (math.floor(high / step) + 1) * step
