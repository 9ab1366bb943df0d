"""Columns as they were described: how a cell becomes a raw value, and a raw value the features of a model.

Everything here is a function of one cell and of what the description says in public. Nothing is fitted: no
mean, no largest value, no list of the values that occur, so a record's code tells about no other record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data.mapped import CHUNK, Mapped
from securevfl.data.readers import Cells, is_missing, parse_numbers
from securevfl.errors import DataError
from securevfl.files import file_of

Kind: TypeAlias = Literal["number", "category", "flag", "ignore"]
Missing: TypeAlias = Literal["bin", "drop", "error"]
Floats: TypeAlias = NDArray[np.float64]

COLUMN_KINDS: tuple[Kind, ...] = ("number", "category", "flag", "ignore")
MISSING_RULES: tuple[Missing, ...] = ("bin", "drop", "error")
SCALES = ("linear", "log")
OTHER = "other"
BUCKETS = 64
"""Categories without a list are hashed into this many, whatever occurs."""
MAX_VALUES = 1 << 16
"""Most values of a category that another organisation may announce."""
FLAGS = dict.fromkeys(("0", "no", "false", "n"), 0.0) | dict.fromkeys(("1", "yes", "true", "y"), 1.0)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a party's file, and what everybody may know of it.

    Attributes:
        name: As in the file's header.
        kind: `number`, `category`, `flag`, or `ignore`, which is never read.
        bounds: Public (low, high) of a number; values outside count as the bound. None without any.
        scale: `log` gives a model sign(x) log(1 + |x|) in place of x.
        values: Public values of a category, `other` among them; empty for one that is hashed.
        missing: `bin` (a value of its own), `drop` (the record is left out) or `error`.
        line: The line of the description that names it; 0 for a column that is not named.
    """

    name: str
    kind: Kind = "number"
    bounds: tuple[float, float] | None = None
    scale: str = "linear"
    values: tuple[str, ...] = ()
    missing: Missing = "bin"
    line: int = 0

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Column:
        """A column from its fields, as they are read back from JSON."""
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in content.items()}
        return cls(**given)

    @property
    def facts(self) -> dict[str, Any]:
        """What other organisations are told of the column: how it is coded, no name and no value."""
        bounds = None if self.bounds is None else list(self.bounds)
        return {
            "kind": self.kind,
            "bounds": bounds,
            "scale": self.scale,
            "values": len(self.values),
            "missing": self.missing,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], name: str) -> Column:
        """The column as those know it who were told `facts`.

        Raises:
            ValueError: They are malformed.
        """
        kind, count, bounds = facts["kind"], facts["values"], facts["bounds"]
        if set(facts) != {"kind", "bounds", "scale", "values", "missing"} or kind not in COLUMN_KINDS[:3]:
            raise ValueError("a column is of no known kind")
        if facts["scale"] not in SCALES or facts["missing"] not in MISSING_RULES:
            raise ValueError("a column has a scale or a rule for missing values that is not known")
        if type(count) is not int or not 0 <= count <= MAX_VALUES or (count and kind != "category"):
            raise ValueError("a column has a number of values that it cannot have")
        if bounds is not None:
            low, high = (float(end) for end in bounds)
            if kind != "number" or not -_LARGEST <= low < high <= _LARGEST:
                raise ValueError("bounds of a column do not ascend")
            bounds = (low, high)
        return cls(
            name=name,
            kind=kind,
            bounds=bounds,
            scale=facts["scale"],
            values=tuple(map(str, range(count))),
            missing=facts["missing"],
        )

    @property
    def codes(self) -> int:
        """How many codes a category has, a missing value apart."""
        return (len(self.values) or BUCKETS) if self.kind == "category" else 0

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that a model gets."""
        if self.kind == "category":
            own = tuple(f"{self.name}={value}" for value in self.values)
            own = own or tuple(f"{self.name}#{bucket}" for bucket in range(BUCKETS))
        else:
            own = (self.name,)
        return (*own, f"{self.name} missing") if self.missing == "bin" else own

    @property
    def feature_bounds(self) -> list[tuple[float, float] | None]:
        """Public bounds of each feature; None for a number without any."""
        if self.kind != "number":
            return [(0.0, 1.0)] * len(self.features)
        own = None
        if self.bounds is not None:
            low, high = self._scaled(np.array(self.bounds)).tolist()
            own = (low, high)
        return [own, (0.0, 1.0)] if self.missing == "bin" else [own]

    def chance(self, count: int, draw: np.random.Generator) -> Floats:
        """Raw values that the column could have, drawn at random."""
        if self.kind == "number":
            return draw.normal(size=count) if self.bounds is None else draw.uniform(*self.bounds, size=count)
        return draw.integers(0, self.codes or 2, size=count).astype(np.float64)

    def read(self, cells: Cells, where: str, before: int = 0) -> Floats:
        """Raw values: numbers as they are, 0/1 for flags, codes for categories, NaN where missing.

        Args:
            cells: The column's text; of a number, perhaps read before.
            where: Whose cells, for messages.
            before: How many rows come before them.

        Raises:
            DataError: A cell cannot be read; the message names its row, never what is in it.
        """
        if self.kind == "category":
            return self._categories(cells)
        if self.kind == "flag":
            return self._flags(cells, where, before)
        values, bad = parse_numbers(cells)
        if bad is not None:
            raise DataError(
                f"{where}: column {self.name!r} is not a number in data row {before + bad + 1}; mend it, or "
                f'describe the column: {toml_key(self.name)} = {{ kind = "category" }} or '
                f'{toml_key(self.name)} = "ignore"'
            )
        large = np.flatnonzero(np.abs(values) > _LARGEST)
        if len(large):
            raise DataError(
                f"{where}: column {self.name!r} is infinite or too large in data row "
                f"{before + large[0] + 1}; mend it or leave the cell empty"
            )
        return values

    def _categories(self, cells: Sequence[str]) -> Floats:
        places = {value: place for place, value in enumerate(self.values)}
        whole = bool(places) and all(_is_whole(value) for value in self.values if value != OTHER)
        codes: dict[str, float] = {}
        for cell in set(cells):
            text = cell.strip()
            if whole and text not in places:
                text = _as_whole(text)
            if text in places:
                codes[cell] = places[text]
            elif is_missing(text):
                codes[cell] = np.nan
            else:
                codes[cell] = places[OTHER] if places else bucket_of(text)
        return np.array([codes[cell] for cell in cells], np.float64)

    def _flags(self, cells: Sequence[str], where: str, before: int) -> Floats:
        known = {cell: FLAGS.get(_as_whole(cell.strip().lower())) for cell in set(cells)}
        known |= {cell: np.nan for cell in known if is_missing(cell)}
        for row, cell in enumerate(cells):
            if known[cell] is None:
                raise DataError(
                    f"{where}: column {self.name!r} is no flag in data row {before + row + 1}; a flag is 0 "
                    "or 1, no or yes, n or y, false or true. Mend it or write "
                    f'{toml_key(self.name)} = {{ kind = "category" }}'
                )
        return np.array([known[cell] for cell in cells], np.float64)

    def code(self, raw: Floats) -> NDArray[np.float32]:
        """The features of raw values; rows of missing values are marked by the last one under `bin`."""
        gaps = np.isnan(raw)
        if self.kind == "category":
            own = np.zeros((len(raw), self.codes), np.float32)
            there = np.flatnonzero(~gaps)
            own[there, raw[there].astype(np.intp)] = 1.0
        else:
            middle, values = 0.5, raw
            if self.kind == "number":
                low, high = self.bounds or (-np.inf, np.inf)
                values = self._scaled(np.clip(raw, low, high))
                middle = 0.0 if self.bounds is None else float(self._scaled(np.array(self.bounds)).mean())
            own = np.where(gaps, middle, values).astype(np.float32)[:, None]
        return np.column_stack([own, gaps.astype(np.float32)]) if self.missing == "bin" else own

    def _scaled(self, values: Floats) -> Floats:
        return np.sign(values) * np.log1p(np.abs(values)) if self.scale == "log" else values


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """One party's described columns with their raw values, for models that bin them.

    Attributes:
        source: The description, for messages; empty for a set that comes with the library.
        columns: The columns, in the file's order.
        train: Raw values as `Column.read` gives them, rows x columns; no rows where the features of the party
            are elsewhere.
        test: The same for the test part.
    """

    source: str
    columns: tuple[Column, ...]
    train: Floats
    test: Floats

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            part.flags.writeable = False

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all features, in order."""
        return features_of(self.columns)

    def without_rows(self) -> Columns:
        """What everybody may know: the columns, and no value."""
        return Columns.without_values(self.columns, source=self.source)

    @classmethod
    def without_values(cls, columns: Sequence[Column], *, source: str = "") -> Columns:
        """Columns whose values are elsewhere, or in features alone."""
        nothing = np.zeros((0, len(columns)))
        return cls(source=source, columns=tuple(columns), train=nothing, test=nothing)


def numbers_of(names: Sequence[str], bounds: NDArray[np.float64] | None) -> tuple[Column, ...]:
    """Features that nobody described, each as a number with its public bounds, if it has any."""
    pairs = [None] * len(names) if bounds is None else [_ascending(pair) for pair in bounds]
    return tuple(
        Column(name=name, missing="error", bounds=pair) for name, pair in zip(names, pairs, strict=True)
    )


def _ascending(pair: Floats) -> tuple[float, float] | None:
    low, high = float(pair[0]), float(pair[1])
    return (low, high) if low < high else None  # unknown bounds are NaN


def count_features(described: Sequence[Mapping[str, Any]]) -> int:
    """How many features columns make by their facts, before any of their names is made.

    Raises:
        ValueError: A column has a number of values that it cannot have.
    """
    found = 0
    for facts in described:
        count = facts["values"]
        if type(count) is not int or not 0 <= count <= MAX_VALUES:
            raise ValueError("a column has a number of values that it cannot have")
        found += ((count or BUCKETS) if facts["kind"] == "category" else 1) + (facts["missing"] == "bin")
    return found


def features_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names of all features, in order."""
    return tuple(name for column in columns for name in column.features)


def code_columns(columns: Sequence[Column], raw: Floats) -> NDArray[np.float32]:
    """A party's block of features."""
    made = np.zeros((len(raw), len(features_of(columns))), np.float32)
    for start in range(0, len(raw) if columns else 0, CHUNK):
        some = slice(start, start + CHUNK)
        parts = [column.code(raw[some, place]) for place, column in enumerate(columns)]
        made[some] = np.concatenate(parts, axis=1)
    return made


def coded(columns: Sequence[Column], raw: Floats) -> NDArray[np.float32] | Mapped:
    """As `code_columns`; of raw values in a file, features are made whenever rows are read."""
    if file_of(raw) is None:
        return code_columns(columns, raw)
    made = partial(code_columns, tuple(columns))
    return Mapped(raw, steps=(made,), columns=len(features_of(columns)))


def bucket_of(text: str) -> int:
    """The public bucket of a category's value."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % BUCKETS


def toml_key(name: str) -> str:
    """A column's name as it is written in TOML."""
    bare = name.isascii() and bool(name) and all(sign.isalnum() or sign in "_-" for sign in name)
    return name if bare else toml_text(name)


def toml_text(text: str) -> str:
    """Text as it is written in TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return '"' + "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in escaped) + '"'


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdecimal()


def _as_whole(text: str) -> str:
    """`1.0`, as tools write whole numbers in columns with gaps, is 1; other text stays as it is."""
    head, dot, tail = text.partition(".")
    return head if dot and _is_whole(head) and not tail.strip("0") else text
