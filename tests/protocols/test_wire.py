"""The binary form: round trips, and no bytes whatsoever that crash, allocate or pass by mistake."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from securevfl.errors import WireError
from securevfl.protocols.wire import DTYPES, MAGIC, VERSION, pack, packed_size, unpack

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)
integers = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    st.text(),
    st.binary(),
    arrays,
    st.lists(integers, max_size=5),
    st.lists(st.text(max_size=5), max_size=5),
)


def same(first, second):
    if isinstance(first, np.ndarray):
        return (
            isinstance(second, np.ndarray)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and first.tobytes() == second.tobytes()
        )
    if isinstance(first, float):
        return struct.pack("<d", first) == struct.pack("<d", second)
    return type(first) is type(second) and first == second


@given(names, st.dictionaries(names, values, max_size=6))
def test_round_trip(kind, fields):
    data = pack(kind, fields)
    assert packed_size(kind, fields) == len(data)
    again_kind, again = unpack(data)
    assert again_kind == kind
    assert list(again) == list(fields)
    assert all(same(fields[name], again[name]) for name in fields)


SAMPLE = pack(
    "sample",
    {
        "none": None,
        "yes": True,
        "int": -5,
        "float": 1.5,
        "text": "häß",
        "raw": b"abc",
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "flags": np.array([True, False]),
        "ints": [1, 2],
        "texts": ["a", ""],
    },
)


def test_every_truncation_is_refused():
    for size in range(len(SAMPLE)):
        with pytest.raises(WireError):
            unpack(SAMPLE[:size])
        with pytest.raises(WireError):  # also when the announced length is made to fit
            unpack(_resized(SAMPLE[:size]))


def _resized(data):
    return data[:8] + struct.pack("<Q", len(data)) + data[16:] if len(data) >= 16 else data


@pytest.mark.parametrize("tail", [b"\0", b"n", SAMPLE])
def test_trailing_bytes_are_refused(tail):
    with pytest.raises(WireError):
        unpack(SAMPLE + tail)
    with pytest.raises(WireError):
        unpack(_resized(SAMPLE + tail))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(WireError):
        unpack(data)


@settings(max_examples=400)
@given(st.data())
def test_changed_bytes_decode_or_are_refused(data):
    """Nothing but WireError ever comes out of a changed message."""
    changed = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        unpack(bytes(changed))


def header(fields, body):
    raw = b"\x01k" + body
    return struct.pack("<4sBxHQ", MAGIC, VERSION, fields, 16 + len(raw)) + raw


@pytest.mark.parametrize(
    "body",
    [
        b"\x01xa" + struct.pack("<BB2Q", 0, 2, 2**40, 2**40),
        b"\x01xa" + struct.pack("<BB4Q", 0, 4, *[2**63] * 4),
        b"\x01xa" + struct.pack("<BB2Q", 0, 2, 0, 2**63),
        b"\x01xa" + struct.pack("<BB2Q", 0, 2, 2**64 - 1, 0),
        b"\x01xa" + struct.pack("<BB1Q", 99, 1, 0),
        b"\x01xa" + struct.pack("<BB5Q", 0, 5, 1, 1, 1, 1, 1) + bytes(8),
        b"\x01xy" + struct.pack("<Q", 2**63),
        b"\x01xs" + struct.pack("<Q", 2**64 - 1),
        b"\x01xq" + struct.pack("<Q", 2**40),
        b"\x01xq" + struct.pack("<Q", 7) + bytes(7),
        b"\x01xl" + struct.pack("<Q", 2**40),
        b"\x01xl" + struct.pack("<Q", 4) + struct.pack("<I", 2**31),
        b"\x01xl" + struct.pack("<Q", 6) + struct.pack("<I", 5) + b"ab",
        b"\x01xs" + struct.pack("<Q", 2) + b"\xff\xfe",
        b"\x01xz",
        b"\x00n",
        b"\x01xa" + struct.pack("<BB1Q", DTYPES.index("|b1"), 1, 2) + b"\x01\x02",
    ],
)
def test_hostile_fields_are_refused_without_allocating(body):
    data = header(1, body)
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # messages of some 50 bytes; a megabyte is far below any announced size


def test_headers_are_checked():
    good = header(1, b"\x01xn")
    assert unpack(good) == ("k", {"x": None})
    other_version = good[:4] + b"\x09" + good[5:]
    for bad in (b"XXXX" + good[4:], other_version, header(65, b"\x01xn"), header(2, b"\x01xn")):
        with pytest.raises(WireError):
            unpack(bad)
    with pytest.raises(WireError, match="twice"):
        unpack(header(2, b"\x01xn\x01xn"))
    with pytest.raises(WireError, match="limit"):
        unpack(good, max_bytes=len(good) - 1)
    assert unpack(good, max_bytes=len(good))


@pytest.mark.parametrize(
    "fields",
    [
        {"x": 2**63},
        {"x": object()},
        {"x": {"nested": 1}},
        {"x": [1, "a"]},
        {"x": [1.5]},
        {"x": [True]},
        {"x": np.zeros(2, np.complex128)},
        {"x": np.zeros(2, np.float16)},
        {"x": np.array([None])},
        {"x": np.zeros((1,) * 5)},
        {"": 1},
        {"ü": 1},
        {"x" * 65: 1},
        {f"x{i}": 1 for i in range(65)},
    ],
)
def test_what_the_wire_does_not_carry_is_refused(fields):
    with pytest.raises(WireError):
        pack("kind", fields)


def test_arrays_are_read_only_views_in_little_endian():
    _, fields = unpack(pack("k", {"x": np.arange(3, dtype=">u8")}))
    assert fields["x"].dtype == np.dtype("<u8")
    assert fields["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        fields["x"][0] = 1


def test_strided_arrays_are_carried_by_value():
    grid = np.arange(12.0).reshape(3, 4)[:, ::2]
    assert np.array_equal(unpack(pack("k", {"x": grid}))[1]["x"], grid)
