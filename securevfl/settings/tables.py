"""Tables of a TOML file as frozen settings: what is unknown, missing or of the wrong type is named."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from securevfl.errors import InputError

# A name or an IPv4 address, or an IPv6 address in brackets; no URL.
_HOST = re.compile(r"[^\s/@\[\]:]+|\[[0-9a-fA-F:.]+\]")
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "list": (list,),
    "dict": (dict,),
}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        InputError: It cannot be read, or is none.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from error


def take_text(path: Path, content: dict[str, Any], name: str) -> str:
    """Takes a text that must be there.

    Raises:
        InputError: It is missing, or something else.
    """
    if name not in content:
        raise InputError(f"{path}: {name} is missing")
    value = content.pop(name)
    check_type(path, name, value, "str")
    return str(value)


def take_table(path: Path, content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Takes a table out of a file's content; None if it is not there.

    Raises:
        InputError: Something else has its name.
    """
    value = content.pop(name, None)
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{path}: {name} is {value!r}; write a table, [{name}]")
    return value


def check_type(path: Path, name: str, value: Any, kind: str) -> None:
    """Raises `InputError` unless a value is of a kind, such as `float` or `list[str]`."""
    if not _fits(value, kind):
        raise InputError(f"{path}: {name} is {value!r}; expected {kind}")
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"{path}: {name} is {value!r}; expected text without a null character")


def _fits(value: Any, kind: str) -> bool:
    outer, _, inner = kind.partition("[")
    if outer not in _KINDS:
        return True
    if not isinstance(value, _KINDS[outer]) or isinstance(value, bool):
        return False
    inner = inner.removesuffix("]")
    if isinstance(value, dict):
        return all(_fits(each, inner.partition(", ")[2]) for each in value.values())
    return not isinstance(value, list) or all(_fits(each, inner) for each in value)


def check_number(path: Path, name: str, value: float, *, low: float = 0.0, high: float = math.inf) -> None:
    """Raises `InputError` unless a number is within its bounds, which a NaN never is."""
    if not low <= value <= high:
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise InputError(f"{path}: {name} is {value!r}; it must be a number of at least {low:g}{most}")


def check_address(text: str) -> str:
    """An address of the form `host:port`.

    Raises:
        InputError: It is not.
    """
    host, _, port = text.rpartition(":")
    if not (_HOST.fullmatch(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"{text!r} is no address; write host:port, such as bank.example:8750")
    return text


def build_table(
    cls: type[Any],
    path: Path,
    content: dict[str, Any],
    *,
    table: str = "",
    taken: Collection[str] = (),
    **given: Any,
) -> Any:
    """A dataclass from a table; what is left over is unknown.

    Args:
        cls: The dataclass.
        path: The file, for messages.
        content: The table.
        table: Its name; empty for the part of the file that is in none.
        taken: Other names that stand outside of tables.
        **given: Fields that were read already.

    Raises:
        InputError: A key is unknown, missing or of the wrong type; the message names it.
    """
    known = {each.name: str(each.type) for each in fields(cls)}
    for name, value in content.items():
        if name not in known or name in given:
            raise InputError(f"{path}: {_unknown(name, [*known, *taken], table)}")
        check_type(path, name, value, known[name])
    for name in ("listen", "public", "status"):
        if content.get(name):
            check_address(content[name])
    try:
        return cls(**given, **content)
    except TypeError as error:
        raise InputError(f"{path}: {_missing(cls, {**given, **content})}") from error


def _unknown(name: str, known: list[str], table: str) -> str:
    where = f" in [{table}]" if table else ""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    above = ". What belongs to no table stands above the first one" if table and not near else ""
    return f"unknown key {name!r}{where}; {hint}{above}"


def _missing(cls: type[Any], present: Mapping[str, Any]) -> str:
    names = [each.name for each in fields(cls) if each.name not in present]
    return f"one of {', '.join(names)} is missing"
