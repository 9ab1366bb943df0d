"""Frames: what was written is read back, and nothing else is read at all."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.errors import WireError
from securevfl.network import frames
from securevfl.network.frames import NUMBERED, Frame, Kind

NUMBERS = st.integers(1, 2**64 - 1)


@st.composite
def any_frame(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    return Frame(
        kind=kind,
        payload=draw(st.binary(max_size=200)),
        number=draw(NUMBERS) if kind in NUMBERED else 0,
        acknowledged=draw(st.integers(0, 2**64 - 1)),
    )


@given(any_frame())
def test_a_frame_survives_the_wire(frame):
    assert Frame.from_bytes(frame.to_bytes()) == frame


@given(any_frame(), st.integers(0, 2**64 - 1))
def test_the_acknowledgement_may_be_newer_than_the_frame(frame, number):
    read = Frame.from_bytes(frame.to_bytes(number))
    assert read.acknowledged == number
    assert (read.kind, read.payload, read.number) == (frame.kind, frame.payload, frame.number)


def changed(offset: int, value: bytes) -> bytes:
    raw = bytearray(Frame(kind=Kind.DATA, payload=b"content", number=1).to_bytes())
    raw[offset : offset + len(value)] = value
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes"),
        (changed(0, b"")[:23], "23 bytes"),
        (changed(0, b"SVFL"), "not a securevfl frame"),
        (changed(4, b"\x07"), "speaks version 7 of the network protocol, this side 3: upgrade the older"),
        (changed(5, b"\x00"), "unknown kind 0"),
        (changed(5, b"\x08"), "unknown kind 8"),
        (changed(6, b"\x01"), "unknown kind"),
        (changed(8, bytes(8)), "DATA frame with number 0"),
        (changed(5, bytes([Kind.ACK])), "ACK frame with number 1"),
        (changed(5, bytes([Kind.HELLO])), "HELLO frame with number 1"),
    ],
)
def test_a_malformed_frame_is_refused(raw, message):
    with pytest.raises(WireError, match=message):
        Frame.from_bytes(raw)


def test_a_frame_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    Frame.from_bytes(Frame(kind=Kind.ACK, payload=bytes(76)).to_bytes())
    with pytest.raises(WireError, match="a frame of 101 bytes; 24 to 100 are allowed"):
        Frame.from_bytes(Frame(kind=Kind.ACK, payload=bytes(77)).to_bytes())


@given(st.binary(max_size=64))
def test_random_bytes_are_no_frame(raw):
    with pytest.raises(WireError):
        Frame.from_bytes(raw)


@given(st.tuples(st.integers(0, 255), st.integers(0, 65535), NUMBERS, NUMBERS), st.binary(max_size=20))
def test_any_header_is_a_frame_or_refused(rest, payload):
    raw = struct.pack("<4sBBHQQ", b"SVFN", 1, *rest) + payload
    try:
        frame = Frame.from_bytes(raw)
    except WireError:
        return
    assert frame.to_bytes() == raw
