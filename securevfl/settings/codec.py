"""Frozen settings from Python, TOML and the command line: one check of names, types and values for all.

A class of settings is a frozen dataclass whose fields are made with `whole`, `number`, `share`, `choice` and
their like, or as dataclasses make them. `check_fields` in its ``__post_init__`` makes every instance
well-formed, wherever its values came from.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from securevfl.errors import InputError, PlanError, nearest

Rule = Callable[[str, Any], str]
"""(name, value) -> what is wrong with the value; empty if nothing is."""
T = TypeVar("T")

# A name or an IPv4 address, or an IPv6 address in brackets; no URL.
_HOST = re.compile(r"[^\s/@\[\]:]+|\[[0-9a-fA-F:.]+\]")
_LISTS: dict[Any, str] = {
    int: "a list of whole numbers, such as [8, 4]",
    float: "a list of numbers, such as [0.5, 2]",
    str: "a list of text, such as ['p0']",
}
_TABLES: dict[Any, str] = {
    float: "a table of numbers, such as {p1 = 2.0}",
    str: "a table of text, such as {p1 = 'sgd'}",
    Mapping[str, Any]: "a table of tables, such as {p1 = {model = 'mlp'}}",
}


# -- fields with rules --------------------------------------------------------------------------------------


def _field(default: Any, rule: Rule) -> Any:
    """A field whose value, or each of whose values in a list or table, follows a rule."""
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


def whole(default: Any, low: int = 0) -> Any:
    """A field for whole numbers of at least `low`."""
    wanted = f"at least {low} is needed" if low else "it cannot be negative"
    return _field(default, lambda name, value: "" if value >= low else f"{name} is {value}; {wanted}")


def number(default: Any, *, above: float | None = None, most: float = math.inf) -> Any:
    """A field for finite numbers of 0 or more, or `above` a limit; all but 0 from 1 / `most` to `most`."""
    wanted = "of 0 or more" if above is None else f"above {above:g}"

    def rule(name: str, value: float) -> str:
        if not (math.isfinite(value) and (value >= 0 if above is None else value > above)):
            return f"{name} is {value}; it must be a number {wanted}"
        if 0 < value < 1 / most:
            return f"{name} is {value}; values have 32 bits, use 0 or at least {1 / most:g}"
        return "" if value <= most else f"{name} is {value}; values have 32 bits, use at most {most:g}"

    return _field(default, rule)


def share(default: float) -> Any:
    """A field for a part of the whole: at least 0 and below 1."""
    return _field(
        default,
        lambda name, value: "" if 0 <= value < 1 else f"{name} is {value}; it must be at least 0 and below 1",
    )


def within(default: float | None, high: float = math.inf) -> Any:
    """A field for numbers between 0 and `high`, infinity included, which a NaN never is."""
    most = "" if math.isinf(high) else f" and at most {high:g}"
    return _field(
        default,
        lambda name, value: (
            "" if 0 <= value <= high else f"{name} is {value!r}; it must be a number of at least 0{most}"
        ),
    )


def choice(default: Any, known: Collection[str], what: str = "") -> Any:
    """A field for one of some words; `what` is how errors call a word where the field's name does not fit."""
    return _field(
        default,
        lambda name, value: (
            "" if value in known else f"unknown {what or name} {value!r}; {nearest(value, known)}"
        ),
    )


def address(default: str = "") -> Any:
    """A field for `host:port`, or nothing."""
    return _field(default, lambda name, value: _no_address(value) if value else "")


def check_address(value: str) -> str:
    """An address of the form `host:port`.

    Raises:
        InputError: It is not.
    """
    if problem := _no_address(value):
        raise InputError(problem)
    return value


def is_address(value: str) -> bool:
    """True for a host and a port: no path, no other name server, no other kind of socket."""
    host, _, port = value.rpartition(":")
    return bool(_HOST.fullmatch(host)) and port.isascii() and port.isdigit() and int(port) < 1 << 16


def _no_address(value: str) -> str:
    if is_address(value):
        return ""
    return f"{value!r} is no address; write host:port, such as bank.example:8750"


# -- checks -------------------------------------------------------------------------------------------------


_kinds: dict[Any, dict[str, Any]] = {}


def kinds(cls: Any) -> dict[str, Any]:
    """The type of every field of a dataclass, by name."""
    if cls not in _kinds:
        hints = get_type_hints(cls)
        _kinds[cls] = {each.name: hints[each.name] for each in fields(cls)}
    return _kinds[cls]


def check_fields(settings: Any, prefix: str = "") -> None:
    """Checks a frozen dataclass: values take the fields' types (lists become tuples) and follow their rules.

    Raises:
        PlanError: A value does not; the message names it, what was expected, and the nearest known word.
    """
    types = kinds(type(settings))
    for each in fields(settings):
        name = prefix + each.name
        value = convert(name, getattr(settings, each.name), types[each.name])
        object.__setattr__(settings, each.name, value)
        if "rule" in each.metadata and value is not None:
            _follow(each.metadata["rule"], name, value)


def _follow(rule: Rule, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        parts = [(f"{name} of {key!r}", item) for key, item in value.items()]
    else:
        parts = [(name, item) for item in value] if isinstance(value, tuple | list) else [(name, value)]
    for label, item in parts:
        if problem := rule(label, item):
            raise PlanError(problem)


def convert(name: str, value: Any, kind: Any) -> Any:
    """The value as a type has it: whole numbers may stand for numbers, lists for tuples.

    Raises:
        PlanError: It is of another type.
    """
    try:
        return _converted(value, kind)
    except ValueError as error:
        raise PlanError(f"{name} is {value!r}; expected {error}") from None
    except (TypeError, OverflowError):
        raise PlanError(f"{name} is {value!r}; expected {_expected(kind)}") from None


def _expected(kind: Any) -> str:
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (tuple, list):
        return _LISTS.get(inner[0], "a list")
    if outer in (dict, Mapping):
        return _TABLES.get(inner[1], "a table of lists")
    return str(getattr(kind, "__name__", kind))


def _converted(value: Any, kind: Any) -> Any:
    outer, inner = get_origin(kind), get_args(kind)
    if isinstance(value, str) and "\0" in value:
        raise ValueError("text without a null character")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (str, bool, int, float):
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise TypeError
    if outer in (tuple, list):
        if not isinstance(value, list | tuple):
            raise TypeError
        return outer(_converted(item, inner[0]) for item in value)
    if outer in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError
        return {_converted(key, str): _converted(item, inner[1]) for key, item in value.items()}
    if outer is UnionType and NoneType in inner:
        return None if value is None else _converted(value, inner[0])
    return value


# -- TOML and text ------------------------------------------------------------------------------------------


def read_toml(path: Path, what: str = "", error: type[InputError] = InputError) -> dict[str, Any]:
    """The content of a TOML file; `what` stands before its name in messages.

    Raises:
        InputError: It cannot be read, or is none; of the kind that `error` says.
    """
    name = f"{what} {path}".strip()
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{name} cannot be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(f"{name} is not TOML: {problem}") from problem


def to_toml(content: Mapping[str, Any], table: str = "") -> str:
    """The text of a TOML file: what is in no table first, then each table, tables within it included."""
    lines = [
        f"{_key(name)} = {_text(value)}" for name, value in content.items() if not isinstance(value, Mapping)
    ]
    text = "".join(f"{line}\n" for line in lines)
    for name, value in content.items():
        if isinstance(value, Mapping):
            inner = f"{table}.{_key(name)}" if table else _key(name)
            text += f"\n[{inner}]\n{to_toml(value, inner)}"
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: Any) -> str:
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise PlanError(f"text {value!r} has characters that a file cannot hold")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return repr(value)


def parse_assignment(text: str, types: Mapping[str, Any]) -> tuple[str, Any]:
    """Reads name=value from a command line; text needs no quotes where the field takes text.

    Raises:
        PlanError: It is not of that form.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"--set {text!r} is not of the form name=value")
    name = name.strip().replace("-", "_")
    if types.get(name) is str:
        return name, value.strip()
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise PlanError(
            f"--set {name}: {value!r} is not a TOML value such as 3, 0.5, true, [8, 8]"
        ) from error


def check_names(found: Collection[str], known: Collection[str], where: str) -> None:
    """Raises `PlanError` for the first name that is not known, with the nearest that is."""
    for name in found:
        if name not in known:
            raise PlanError(f"{where} has no key {name!r}; {nearest(name, known)}")


def take_table(content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Takes a table out of a file's content; None if it is not there.

    Raises:
        PlanError: Something else has its name.
    """
    value = content.pop(name, None)
    if value is not None and not isinstance(value, dict):
        raise PlanError(f"{name} is {value!r}; write a table, [{name}]")
    return value


def build(
    cls: type[T], content: Mapping[str, Any], *, table: str = "", others: Collection[str] = (), **given: Any
) -> T:
    """A dataclass of settings from a table; what is left over is unknown.

    Args:
        cls: The dataclass.
        content: The table.
        table: Its name; empty for the part of a file that is in none.
        others: Other names that stand outside of tables.
        **given: Fields that were read already.

    Raises:
        PlanError: A key is unknown, missing or of the wrong type; the message names it.
    """
    types = kinds(cls)
    for name, value in content.items():
        if name not in types or name in given:
            raise PlanError(_unknown(name, [*types, *others], table))
        convert(name, value, types[name])
    present = {**given, **content}
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in present and each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{each.name} is missing" + (f" in [{table}]" if table else ""))
    return cls(**present)


def _unknown(name: str, known: list[str], table: str) -> str:
    where, hint = f" in [{table}]" if table else "", nearest(name, known)
    above = ". What belongs to no table stands above the first one" if table and "did you" not in hint else ""
    return f"unknown key {name!r}{where}; {hint}{above}"
