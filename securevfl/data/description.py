"""`data.toml`: what a federation's data is, in public words. See docs/data.md.

The reader says of everything that is wrong which line it is on, what it found there and what to write.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from securevfl.data.blocks import party_names
from securevfl.data.columns import COLUMN_KINDS, MISSING_RULES, OTHER, SCALES, Column, Missing, toml_key
from securevfl.data.labels import TASKS
from securevfl.data.readers import not_found
from securevfl.errors import DataError, nearest

TO_FILL = ("label", "label_holder", "task")
EVERY_OTHER = "*"
"""Stands for all columns of a party that are not named."""
_TOP = ("name", "id", *TO_FILL, "positive", "label_bounds", "test", "missing", "parties")
_PARTY = ("file", "test", "id", "delimiter", "decimal", "columns")
_COLUMN = ("kind", "bounds", "scale", "values", "missing")
_PART = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER, _LINE_KEY = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]"), re.compile(rf"\s*({_DOTTED})\s*=")

LineNumbers = Mapping[tuple[str, ...], int]


@dataclass(frozen=True, kw_only=True)
class PartyDescription:
    """One party's files and columns.

    Attributes:
        name: The party.
        file: Its CSV, Parquet or LIBSVM file.
        test: A file of the same form for the test part; None where a share is set apart.
        id: Its ID column.
        delimiter: What separates the cells of a CSV file.
        decimal: `.`, or `,` where numbers are written 1.234,5.
        columns: The columns that the description names.
        others: How the columns that it does not name are read; None to follow from their cells.
    """

    name: str
    file: Path
    test: Path | None
    id: str
    delimiter: str
    decimal: str
    columns: Mapping[str, Column]
    others: Column | None


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `data.toml` says.

    Attributes:
        path: The file, as errors name it.
        name: What the data is called in reports.
        label: The label column, in the label holder's file; empty in one that is not complete.
        label_holder: The party with the labels; empty in one that is not complete.
        task: `binary`, `multiclass` or `regression`; None to follow from labels that leave no doubt.
        positive: Binary: the label that counts as 1; None takes the last in sorted order.
        label_bounds: Regression: public (low, high) of the labels.
        test: Share of the records in the test part; None where every party has a test file.
        missing: What becomes of missing values where a column does not say.
        parties: The parties, in order.
        lines: Where each key stands.
    """

    path: Path
    name: str
    label: str
    label_holder: str
    task: str | None
    positive: str | int | float | None
    label_bounds: tuple[float, float] | None
    test: float | None
    missing: Missing
    parties: tuple[PartyDescription, ...]
    lines: LineNumbers = field(default_factory=dict, repr=False, compare=False)

    def where(self, *keys: str) -> str:
        """The file and the line of a key, or of the nearest table around it."""
        return _where(self.path, self.lines, keys)

    def party(self, name: str) -> PartyDescription:
        """One party's own table.

        Raises:
            DataError: It is not described.
        """
        for party in self.parties:
            if party.name == name:
                return party
        known = nearest(name, [party.name for party in self.parties])
        raise DataError(f"{self.where('parties')}: there is no table [parties.{name}]; {known}")


def is_description(data: str) -> bool:
    """True for the name of one description."""
    return data.lower().endswith(".toml") and "," not in data


def read_description(path: Path | str, *, complete: bool = True) -> Description:
    """Reads a description.

    Args:
        path: The file.
        complete: False where labels do not matter, and for an organisation that has only its own table.

    Raises:
        DataError: It cannot be used; the message names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise not_found(path) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; convert it first") from error
    return parse_description(text, path, complete=complete)


def parse_description(text: str, path: Path, *, complete: bool = True) -> Description:
    """The description in a text; files are looked for beside `path`."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path} is not TOML: {error}") from error
    return _Reader(path, key_lines(text)).description(content, complete)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line on which each key, and each table, first stands; `tomllib` does not tell."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.match(line), _LINE_KEY.match(line)
        if header is not None:
            table = keys = _parts(header[1])
        elif key is not None:
            keys = (*table, *_parts(key[1]))
        else:
            continue
        for end in range(1, len(keys) + 1):
            found.setdefault(keys[:end], number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    parts: list[str] = []
    try:
        content: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:  # a line of a longer text that only looks like a key
        return ()
    while isinstance(content, dict):
        ((part, content),) = content.items()
        parts.append(part)
    return tuple(parts)


def _where(path: Path, lines: LineNumbers, keys: tuple[str, ...]) -> str:
    for end in range(len(keys), 0, -1):
        if keys[:end] in lines:
            return f"{path}, line {lines[keys[:end]]}"
    return str(path)


class _Reader:
    """Takes a parsed file apart; the first thing that is wrong ends it."""

    def __init__(self, path: Path, lines: LineNumbers) -> None:
        self.path = path
        self.lines = lines

    def fail(self, keys: tuple[str, ...], message: str) -> NoReturn:
        raise DataError(f"{_where(self.path, self.lines, keys)}: {message}")

    def description(self, content: dict[str, Any], complete: bool) -> Description:
        self.known(content, _TOP, ())
        if complete:
            self.filled(content)
        else:
            content = {key: value for key, value in content.items() if value != "" or key not in TO_FILL}
        parties = content.get("parties")
        if not isinstance(parties, dict) or not parties:
            self.fail(
                ("parties",), "no party is described; write a table such as [parties.bank] with its file"
            )
        try:
            party_names(list(parties), len(parties))
        except DataError as error:
            self.fail(("parties",), str(error))
        missing = self.choice(content, (), "missing", MISSING_RULES, "bin")
        common = self.text(content, (), "id", "")
        read = tuple(self.party(name, table, common, missing) for name, table in parties.items())
        label, holder = (self.text(content, (), key, "") for key in ("label", "label_holder"))
        if holder not in parties and complete:
            self.fail(("label_holder",), f"label_holder is {holder!r}, no party; {nearest(holder, parties)}")
        task = self.choice(content, (), "task", TASKS, None)
        label_bounds = self.bounds(content, (), "label_bounds")
        if label_bounds is not None and task != "regression":
            self.fail(("label_bounds",), f'label_bounds are for task = "regression"; the task is {task!r}')
        positive = content.get("positive")
        if isinstance(positive, bool) or not isinstance(positive, str | int | float | None):
            self.fail(("positive",), f"positive is {positive!r}; write the label that counts as 1")
        if positive is not None and task in ("multiclass", "regression"):
            self.fail(("positive",), f'positive is for task = "binary"; the task is {task!r}')
        return Description(
            path=self.path,
            name=self.text(content, (), "name", self.path.stem),
            label=label,
            label_holder=holder,
            task=task,
            positive=positive,
            label_bounds=label_bounds,
            test=self.test(content, read),
            missing=missing,
            parties=read,
            lines=self.lines,
        )

    def filled(self, content: dict[str, Any]) -> None:
        """A draft leaves three lines open; all are named at once."""
        empty = [key for key in TO_FILL if content.get(key) == ""]
        if empty:
            named = ", ".join(f"{key} (line {self.lines.get((key,), '?')})" for key in empty)
            raise DataError(f"{self.path} is a draft; fill in {named}")
        for key in ("label", "label_holder"):
            if key not in content:
                self.fail((key,), f"{key} is missing; write it at the top, such as " + _EXAMPLES[key])

    def test(self, content: dict[str, Any], parties: tuple[PartyDescription, ...]) -> float | None:
        with_file = [party.name for party in parties if party.test is not None]
        if with_file:
            without = [party.name for party in parties if party.test is None]
            if without:
                self.fail(
                    ("parties", with_file[0], "test"),
                    f"{with_file[0]} has a test file and {without[0]} has none; give all one, or none",
                )
            if "test" in content:
                self.fail(("test",), "test is given as a share and as files; keep one of them")
            return None
        share = content.get("test", 0.2)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            self.fail(
                ("test",),
                f"test is {share!r}; write a share between 0 and 1, such as test = 0.2, or a file per party: "
                'test = "..." in every [parties.X]',
            )
        return float(share)

    def party(self, name: str, table: Any, common: str, missing: Missing) -> PartyDescription:
        at = ("parties", name)
        if not isinstance(table, dict):
            self.fail(at, f"{name} is {table!r}; write a table [parties.{name}] with its file")
        self.known(table, _PARTY, at)
        own = self.text(table, at, "id", common)
        if not own:
            self.fail(at, 'no ID column; write it at the top, such as id = "customer"')
        delimiter = table.get("delimiter", "")
        if "delimiter" in table and not (isinstance(delimiter, str) and len(delimiter) == 1):
            self.fail((*at, "delimiter"), f"delimiter is {delimiter!r}; write one character")
        decimal = self.choice(table, at, "decimal", (".", ","), ".")
        if decimal == delimiter:
            self.fail(
                (*at, "decimal"), f"decimal and delimiter are both {decimal!r}; write what the file has"
            )
        described = table.get("columns", {})
        if not isinstance(described, dict):
            self.fail((*at, "columns"), f"columns is {described!r}; write a table [parties.{name}.columns]")
        columns = {
            key: self.column(key, value, (*at, "columns", key), missing) for key, value in described.items()
        }
        test = self.text(table, at, "test", "")
        return PartyDescription(
            name=name,
            file=self.path.parent / self.text(table, at, "file"),
            test=self.path.parent / test if test else None,
            id=own,
            delimiter=delimiter,
            decimal=decimal,
            others=columns.pop(EVERY_OTHER, None),
            columns=columns,
        )

    def column(self, name: str, value: Any, at: tuple[str, ...], missing: Missing) -> Column:
        table = {"kind": value} if isinstance(value, str) else value
        if not isinstance(table, dict):
            self.fail(at, f'{name} is {value!r}; write {toml_key(name)} = {{ kind = "number" }} or "ignore"')
        self.known(table, _COLUMN, at)
        values = self.values(name, table, at)
        kind = self.choice(table, at, "kind", COLUMN_KINDS, "category" if values else "number")
        for key, only in (("values", "category"), ("bounds", "number"), ("scale", "number")):
            if key in table and kind != only:
                self.fail((*at, key), f"{name} is a {kind}, and {key} belong to a {only}; keep one of them")
        return Column(
            name=name,
            kind=kind,
            bounds=self.bounds(table, at, "bounds"),
            scale=self.choice(table, at, "scale", SCALES, "linear"),
            values=values,
            missing=self.choice(table, at, "missing", MISSING_RULES, missing),
            line=self.lines.get(at, 0),
        )

    def values(self, name: str, table: dict[str, Any], at: tuple[str, ...]) -> tuple[str, ...]:
        if "values" not in table:
            return ()
        given = table["values"]
        fine = isinstance(given, list) and all(
            isinstance(v, str | int) and not isinstance(v, bool) for v in given
        )
        texts = tuple(str(value).strip() for value in given) if fine else ()
        if not texts or len(set(texts)) < len(texts) or "" in texts:
            self.fail(
                (*at, "values"),
                f'values of {name} are {given!r}; write a list of different values, such as ["clerk"]',
            )
        return texts if OTHER in texts else (*texts, OTHER)

    def known(self, table: dict[str, Any], names: Collection[str], at: tuple[str, ...]) -> None:
        for key in table:
            if key not in names:
                self.fail((*at, key), f"unknown key {key!r}; {nearest(key, names)}")

    def text(self, table: dict[str, Any], at: tuple[str, ...], key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if value is None:
            self.fail((*at, key), f"{key} is missing; write it, such as " + _EXAMPLES[key])
        if not isinstance(value, str) or (key in table and not value.strip()):
            self.fail((*at, key), f"{key} is {value!r}; expected text")
        return value

    def choice(self, table: dict[str, Any], at: tuple[str, ...], key: str, among: Any, default: Any) -> Any:
        value = table.get(key, default)
        if key in table and value not in among:
            self.fail((*at, key), f"{key} is {value!r}; {nearest(value, among)}")
        return value

    def bounds(self, table: dict[str, Any], at: tuple[str, ...], key: str) -> tuple[float, float] | None:
        if key not in table:
            return None
        pair = table[key]
        fine = isinstance(pair, list) and len(pair) == 2 and all(_is_finite(end) for end in pair)
        if not fine or not pair[0] < pair[1]:
            self.fail(
                (*at, key), f"{key} are {pair!r}; write two ascending numbers, such as {key} = [0, 100]"
            )
        return float(pair[0]), float(pair[1])


_EXAMPLES = {
    "label": 'label = "default"',
    "label_holder": 'label_holder = "bank"',
    "file": 'file = "bank.csv"',
}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
