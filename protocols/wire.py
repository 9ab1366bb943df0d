"""The binary form of every message that crosses a trust boundary.

A message is a kind (a short name) and named fields: None, bool, int, float, str, bytes, numpy arrays, and
lists of ints or strings. The form is versioned, length-checked and bounded, and decoding builds nothing but
these types: no pickle, no classes chosen by the sender.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from securevfl.errors import WireError

MAGIC = b"SVFL"
VERSION = 1
MAX_BYTES = 1 << 30
MAX_FIELDS = 64
MAX_NAME = 64
MAX_DIMENSIONS = 4
DTYPES = ("<f8", "<f4", "<i8", "<i4", "<u8", "<u4", "|u1", "|b1")

Array = npt.NDArray[np.generic]
Value = None | bool | int | float | str | bytes | Array | list[int] | list[str]

_HEADER = struct.Struct("<4sBxHQ")  # magic, version, number of fields, length of the whole message
_INTEGER, _FLOAT, _SIZE, _SHORT = (struct.Struct(form) for form in ("<q", "<d", "<Q", "<I"))


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
    parts: list[bytes | memoryview] = [_pack_name(kind)]
    for name, value in fields.items():
        parts += [_pack_name(name), *_pack_value(name, value)]
    size = _HEADER.size + sum(len(part) for part in parts)
    if size > MAX_BYTES:
        raise WireError(f"message {kind!r} has {size} bytes; at most {MAX_BYTES} are allowed")
    return b"".join([_HEADER.pack(MAGIC, VERSION, len(fields), size), *parts])


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


def unpack(data: bytes | memoryview, *, max_bytes: int = MAX_BYTES) -> tuple[str, dict[str, Value]]:
    """Decodes one message; arrays are read-only views into `data`.

    Raises:
        WireError: The bytes are not exactly one well-formed message of this version.
    """
    view = memoryview(data)
    if len(view) > max_bytes:
        raise WireError(f"message of {len(view)} bytes exceeds the limit of {max_bytes}")
    if len(view) < _HEADER.size:
        raise WireError(f"message of {len(view)} bytes is shorter than its header")
    magic, version, count, size = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError("not a securevfl message")
    if version != VERSION:
        raise WireError(f"message has wire version {version}, this side has {VERSION}: upgrade the older")
    if size != len(view):
        raise WireError(f"message announces {size} bytes but has {len(view)}")
    if count > MAX_FIELDS:
        raise WireError(f"message has {count} fields; at most {MAX_FIELDS} are allowed")
    reader = _Reader(view)
    kind = reader.name()
    fields: dict[str, Value] = {}
    for _ in range(count):
        name = reader.name()
        if name in fields:
            raise WireError(f"field {name!r} occurs twice")
        fields[name] = reader.value()
    if reader.position != len(view):
        raise WireError(f"{len(view) - reader.position} bytes are left after the last field")
    return kind, fields


@lru_cache(maxsize=1024)
def _pack_name(name: str) -> bytes:
    raw = name.encode("ascii", "replace")
    if not name.isascii() or not 0 < len(raw) <= MAX_NAME:
        raise WireError(f"name {name!r} is not 1 to {MAX_NAME} ASCII characters")
    return bytes([len(raw)]) + raw


def _pack_value(name: str, value: Value) -> list[bytes | memoryview]:
    match value:
        case None:
            return [b"n"]
        case bool():
            return [b"t" if value else b"f"]
        case int():
            if not -(1 << 63) <= value < 1 << 63:
                raise WireError(f"field {name!r}: integer {value} does not fit 64 bits")
            return [b"i", _INTEGER.pack(value)]
        case float():
            return [b"d", _FLOAT.pack(value)]
        case str():
            return _sized(b"s", value.encode())
        case bytes():
            return _sized(b"y", value)
        case np.ndarray():
            return _pack_array(name, value)
        case list() if all(isinstance(item, str) for item in value):
            return _sized(b"l", pack_strings(value))  # type: ignore[arg-type]
        case list() if all(type(item) is int for item in value):
            return _sized(b"q", np.asarray(value, dtype="<i8").tobytes())
    raise WireError(f"field {name!r} has type {type(value).__name__}, which the wire does not carry")


def _sized(tag: bytes, raw: bytes) -> list[bytes | memoryview]:
    return [tag, _SIZE.pack(len(raw)), raw]


def pack_strings(values: list[str]) -> bytes:
    """Encodes strings one after the other, each with its length."""
    raws = [value.encode() for value in values]
    return b"".join(part for raw in raws for part in (struct.pack("<I", len(raw)), raw))


def _pack_array(name: str, array: Array) -> list[bytes | memoryview]:
    dtype = array.dtype.newbyteorder("<").str
    if dtype not in DTYPES:
        raise WireError(f"field {name!r}: arrays of {array.dtype} are not carried; use {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMENSIONS:
        raise WireError(f"field {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed")
    raw = np.ascontiguousarray(array, dtype=dtype)
    head = struct.pack(f"<BB{array.ndim}Q", DTYPES.index(dtype), array.ndim, *array.shape)
    return [b"a", head, raw.tobytes()]


class _Reader:
    """Reads names and values from a buffer and never past its end."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.position = _HEADER.size

    def take(self, size: int) -> memoryview:
        begin = self.position
        end = begin + size
        if end > len(self.view):
            raise WireError("message ends inside a field")
        self.position = end
        return self.view[begin:end]

    def byte(self) -> int:
        begin = self.position
        if begin >= len(self.view):
            raise WireError("message ends inside a field")
        self.position = begin + 1
        return self.view[begin]

    def number(self, form: struct.Struct) -> int:
        begin = self.position
        end = begin + form.size
        if end > len(self.view):
            raise WireError("message ends inside a field")
        self.position = end
        found: int = form.unpack_from(self.view, begin)[0]
        return found

    def name(self) -> str:
        size = self.byte()
        if not 0 < size <= MAX_NAME:
            raise WireError(f"name of {size} bytes; 1 to {MAX_NAME} are allowed")
        return self.text(self.take(size))

    @staticmethod
    def text(raw: memoryview) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise WireError("text is not UTF-8") from error

    def value(self) -> Value:
        tag = self.byte()
        read = _READERS.get(tag)
        if read is None:
            raise WireError(f"unknown field type {bytes([tag])!r}")
        return read(self)

    def sized(self) -> memoryview:
        return self.take(self.number(_SIZE))

    def array(self) -> Array:
        code, dimensions = self.byte(), self.byte()
        if code >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
            raise WireError("array has an unknown type or too many dimensions")
        shape = tuple([self.number(_SIZE) for _ in range(dimensions)])
        dtype = np.dtype(DTYPES[code])
        raw = self.take(math.prod(shape) * dtype.itemsize)
        if dtype.kind == "b" and np.any(np.frombuffer(raw, np.uint8) > 1):
            raise WireError("boolean array holds values other than 0 and 1")
        try:
            return np.frombuffer(raw, dtype).reshape(shape)
        except ValueError as error:
            raise WireError(f"array shape {shape} cannot be built") from error

    def integers(self) -> list[int]:
        size = self.number(_SIZE)
        if size % 8:
            raise WireError("list of integers has a broken length")
        return [int(item) for item in np.frombuffer(self.take(size), "<i8")]

    def strings(self) -> list[str]:
        size = self.number(_SIZE)
        end = self.position + size
        if end > len(self.view):
            raise WireError("message ends inside a field")
        items = []
        while self.position < end:
            items.append(self.text(self.take(self.number(_SHORT))))
        if self.position != end:
            raise WireError("list of strings has a broken length")
        return items


_READERS: dict[int, Callable[[_Reader], Value]] = {
    ord("n"): lambda reader: None,
    ord("t"): lambda reader: True,
    ord("f"): lambda reader: False,
    ord("i"): lambda reader: reader.number(_INTEGER),
    ord("d"): lambda reader: float(reader.number(_FLOAT)),
    ord("a"): _Reader.array,
    ord("s"): lambda reader: reader.text(reader.sized()),
    ord("y"): lambda reader: bytes(reader.sized()),
    ord("q"): _Reader.integers,
    ord("l"): _Reader.strings,
}
