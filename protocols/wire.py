"""The binary form of every message that crosses a trust boundary.

A message is a kind (a short name) and named fields: None, bool, int, float, str, bytes, numpy arrays, and
lists of ints or strings. The form is versioned, length-checked and bounded, and decoding builds nothing but
these types: no pickle, no classes chosen by the sender.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import WireError

MAGIC = b"SVFL"
VERSION = 1
MAX_BYTES = 1 << 30
MAX_FIELDS = 64
MAX_NAME = 64
MAX_DIMENSIONS = 4
MAX_TEXTS = 1 << 22
"""Texts in one list: a text of 4 bytes on the wire takes more than ten times that in memory."""
DTYPES = ("<f8", "<f4", "<i8", "<i4", "<u8", "<u4", "|u1", "|b1")
_DTYPES = tuple(np.dtype(name) for name in DTYPES)
# numpy has several numbers for the same form, such as long and long long; by the number it is found fastest.
_CODES = {np.dtype(each).num: DTYPES.index(np.dtype(each).newbyteorder("<").str) for each in "dflqiLQIB?"}

Array = npt.NDArray[np.generic]
Value = None | bool | int | float | str | bytes | Array | list[int] | list[str]

_HEADER = struct.Struct("<4sBxHQ")  # magic, version, number of fields, length of the whole message
_INTEGER, _FLOAT, _SIZE, _SHORT = (struct.Struct(form) for form in ("<q", "<d", "<Q", "<I"))
_ARRAYS = tuple(struct.Struct(f"<BB{n}Q") for n in range(MAX_DIMENSIONS + 1))  # type, dimensions, shape


def pack(kind: str, fields: Mapping[str, Value]) -> bytes:
    """Encodes one message.

    Args:
        kind: The message's name, at most 64 ASCII characters.
        fields: Field names and values; order is kept.

    Raises:
        WireError: A value has a type or size that the wire does not carry.
    """
    if len(fields) > MAX_FIELDS:
        raise WireError(f"message {kind!r} has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    parts = [b"", _pack_name(kind)]
    for name, value in fields.items():
        parts.append(_pack_name(name))
        _PACKERS.get(type(value), _pack_other)(parts, name, value)
    size = _HEADER.size + sum(map(len, parts))
    if size > MAX_BYTES:
        raise WireError(f"message {kind!r} has {size} bytes; at most {MAX_BYTES} are allowed")
    parts[0] = _HEADER.pack(MAGIC, VERSION, len(fields), size)
    return b"".join(parts)


def packed_size(kind: str, fields: Mapping[str, Value]) -> int:
    """The number of bytes that `pack` would give, without packing."""
    size = _HEADER.size + 1 + len(kind)
    for name, value in fields.items():
        size += 1 + len(name) + _value_size(value)
    return size


def _value_size(value: Value) -> int:
    if isinstance(value, np.ndarray):
        return 3 + 8 * value.ndim + value.nbytes
    if isinstance(value, str):
        return 9 + len(value.encode())
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, (int, float)):
        return 9
    if isinstance(value, bytes):
        return 9 + len(value)
    return 9 + sum(4 + len(item.encode()) if isinstance(item, str) else 8 for item in value)


def unpack(
    data: bytes | memoryview, *, max_bytes: int = MAX_BYTES, start: int = 0
) -> tuple[str, dict[str, Value]]:
    """Decodes one message; arrays are read-only views into it.

    Args:
        data: Where the message is.
        max_bytes: How long it may be.
        start: Where it begins.

    Raises:
        WireError: The bytes are not exactly one well-formed message of this version.
    """
    length = len(data) - start
    if length > max_bytes:
        raise WireError(f"message of {length} bytes exceeds the limit of {max_bytes}")
    if length < _HEADER.size:
        raise WireError(f"message of {length} bytes is shorter than its header")
    data = bytes(data)  # costs little where it is bytes already
    magic, version, count, size = _HEADER.unpack_from(data, start)
    if magic != MAGIC:
        raise WireError("not a securevfl message")
    if version != VERSION:
        raise WireError(f"message has wire version {version}, this side has {VERSION}: upgrade the older")
    if size != length:
        raise WireError(f"message announces {size} bytes but has {length}")
    if count > MAX_FIELDS:
        raise WireError(f"message has {count} fields; at most {MAX_FIELDS} are allowed")
    try:
        kind, fields, end = _read_content(data, start + _HEADER.size, count)
    except (IndexError, struct.error) as error:
        raise WireError("message ends inside a field") from error
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes are left after the last field")
    return kind, fields


def _read_content(data: bytes, position: int, count: int) -> tuple[str, dict[str, Value], int]:
    """Kind, fields and where they end; IndexError or struct.error where the data end before."""
    kind, position = _read_name(data, position)
    fields: dict[str, Value] = {}
    for _ in range(count):
        name, position = _read_name(data, position)
        if name in fields:
            raise WireError(f"field {name!r} occurs twice")
        read = _READERS.get(data[position])
        if read is None:
            raise WireError(f"unknown field type {data[position : position + 1]!r}")
        fields[name], position = read(data, position + 1)
    return kind, fields, position


@lru_cache(maxsize=1024)
def _pack_name(name: str) -> bytes:
    raw = name.encode("ascii", "replace")
    if not name.isascii() or not 0 < len(raw) <= MAX_NAME:
        raise WireError(f"name {name!r} is not 1 to {MAX_NAME} ASCII characters")
    return bytes([len(raw)]) + raw


def _pack_flag(parts: list[bytes], name: str, value: bool) -> None:
    parts.append(b"t" if value else b"f")


def _pack_integer(parts: list[bytes], name: str, value: int) -> None:
    if not -(1 << 63) <= value < 1 << 63:
        raise WireError(f"field {name!r}: integer {value} does not fit 64 bits")
    parts += b"i", _INTEGER.pack(value)


def _pack_float(parts: list[bytes], name: str, value: float) -> None:
    parts += b"d", _FLOAT.pack(value)


def _pack_text(parts: list[bytes], name: str, value: str) -> None:
    raw = value.encode()
    parts += b"s", _SIZE.pack(len(raw)), raw


def _pack_bytes(parts: list[bytes], name: str, value: bytes) -> None:
    parts += b"y", _SIZE.pack(len(value)), value


def _pack_array(parts: list[bytes], name: str, array: Array) -> None:
    dtype = array.dtype
    code = _CODES.get(dtype.num)
    if code is None:
        raise WireError(f"field {name!r}: arrays of {array.dtype} are not carried; use {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMENSIONS:
        raise WireError(f"field {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed")
    raw = (array if dtype.isnative else array.astype(_DTYPES[code])).tobytes()
    parts += b"a", _ARRAYS[array.ndim].pack(code, array.ndim, *array.shape), raw


def _pack_list(parts: list[bytes], name: str, values: list[Any]) -> None:
    if all(isinstance(item, str) for item in values):
        tag, raw = b"l", pack_strings(values)
    elif all(type(item) is int for item in values):
        tag, raw = b"q", np.asarray(values, dtype="<i8").tobytes()
    else:
        raise WireError(f"field {name!r} is a list of more than integers, or of more than strings")
    parts += tag, _SIZE.pack(len(raw)), raw


def _pack_other(parts: list[bytes], name: str, value: Any) -> None:
    """Values whose class derives from one that the wire carries, such as numpy's float64."""
    for carried, packer in _PACKERS.items():
        if isinstance(value, carried):
            return packer(parts, name, value)
    raise WireError(f"field {name!r} has type {type(value).__name__}, which the wire does not carry")


def pack_strings(values: list[str]) -> bytes:
    """Encodes strings one after the other, each with its length."""
    raws = [value.encode() for value in values]
    return b"".join(part for raw in raws for part in (_SHORT.pack(len(raw)), raw))


_PACKERS: dict[type, Callable[[list[bytes], str, Any], None]] = {
    type(None): lambda parts, name, value: parts.append(b"n"),
    bool: _pack_flag,
    int: _pack_integer,
    float: _pack_float,
    str: _pack_text,
    bytes: _pack_bytes,
    np.ndarray: _pack_array,
    list: _pack_list,
}


def _end(data: bytes, position: int, size: int) -> int:
    """Where a piece ends, which must be inside the message."""
    end = position + size
    if end > len(data):
        raise WireError("message ends inside a field")
    return end


def _read_name(data: bytes, position: int) -> tuple[str, int]:
    size, begin = data[position], position + 1
    if not 0 < size <= MAX_NAME:
        raise WireError(f"name of {size} bytes; 1 to {MAX_NAME} are allowed")
    end = begin + size
    if end > len(data):
        raise WireError("message ends inside a name")
    return _name(data[begin:end]), end


@lru_cache(maxsize=1024)
def _name(raw: bytes) -> str:
    return _text(raw)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WireError("text is not UTF-8") from error


def _read_number(form: struct.Struct, data: bytes, position: int) -> tuple[Any, int]:
    return form.unpack_from(data, position)[0], position + form.size


def _read_bytes(data: bytes, position: int) -> tuple[bytes, int]:
    size, begin = _read_number(_SIZE, data, position)
    end = _end(data, begin, size)
    return data[begin:end], end


def _read_text(data: bytes, position: int) -> tuple[str, int]:
    raw, end = _read_bytes(data, position)
    return _text(raw), end


def _read_array(data: bytes, position: int) -> tuple[Array, int]:
    code, dimensions = data[position], data[position + 1]
    if code >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
        raise WireError("array has an unknown type or too many dimensions")
    form, dtype = _ARRAYS[dimensions], _DTYPES[code]
    _, _, *shape = form.unpack_from(data, position)
    begin = position + form.size
    end = _end(data, begin, math.prod(shape) * dtype.itemsize)
    if dtype.kind == "b" and data[begin:end].strip(b"\0\1"):
        raise WireError("boolean array holds values other than 0 and 1")
    try:
        return np.ndarray(shape, dtype, data, begin), end
    except (ValueError, OverflowError) as error:
        raise WireError(f"array shape {tuple(shape)} cannot be built") from error


def _read_integers(data: bytes, position: int) -> tuple[list[int], int]:
    raw, end = _read_bytes(data, position)
    if len(raw) % 8:
        raise WireError("list of integers has a broken length")
    return [int(item) for item in np.frombuffer(raw, "<i8")], end


def _read_strings(data: bytes, position: int) -> tuple[list[str], int]:
    size, position = _read_number(_SIZE, data, position)
    end = _end(data, position, size)
    items: list[str] = []
    while position < end:
        if len(items) == MAX_TEXTS:
            raise WireError(f"list of more than {MAX_TEXTS:,} texts")
        length, position = _read_number(_SHORT, data, position)
        stop = _end(data, position, length)
        items.append(_text(data[position:stop]))
        position = stop
    if position != end:
        raise WireError("list of strings has a broken length")
    return items, end


_READERS: dict[int, Callable[[bytes, int], tuple[Value, int]]] = {
    ord("n"): lambda data, position: (None, position),
    ord("t"): lambda data, position: (True, position),
    ord("f"): lambda data, position: (False, position),
    ord("i"): partial(_read_number, _INTEGER),
    ord("d"): partial(_read_number, _FLOAT),
    ord("a"): _read_array,
    ord("s"): _read_text,
    ord("y"): _read_bytes,
    ord("q"): _read_integers,
    ord("l"): _read_strings,
}
