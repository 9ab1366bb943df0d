"""Frames: what travels in one gRPC message.

A fixed header (magic, version, kind, number, acknowledgement) and a payload. Numbered frames are delivered
once and in order; `session.py` sees to that. Nothing in a frame is trusted before its sender's certificate,
its size and its form have been checked.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from securevfl.errors import WireError

MAGIC = b"SVFN"
VERSION = 1
MAX_FRAME = 256 << 20
PHASE_BYTES = 16

_HEADER = struct.Struct("<4sBBHQQ")  # magic, version, kind, nothing, number, acknowledged number
MAX_PAYLOAD = MAX_FRAME - _HEADER.size


class Kind(IntEnum):
    """What a frame carries."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    ACK = 4
    DATA = 5
    CONTROL = 6
    RELAY = 7


NUMBERED = frozenset({Kind.DATA, Kind.CONTROL, Kind.RELAY})
_KINDS = {int(kind): (kind, kind in NUMBERED) for kind in Kind}


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: What it carries.
        payload: The content.
        number: Its place among the sender's numbered frames, from 1; 0 for those without a number.
        acknowledged: The highest number that the sender has received from the other side.
    """

    kind: Kind
    payload: bytes = b""
    number: int = 0
    acknowledged: int = 0

    def to_bytes(self, acknowledged: int | None = None) -> bytes:
        """The form on the wire.

        Args:
            acknowledged: Takes the place of the frame's own, where it is written later than it was made.
        """
        told = self.acknowledged if acknowledged is None else acknowledged
        return _HEADER.pack(MAGIC, VERSION, self.kind, 0, self.number, told) + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        """Reads the form on the wire.

        Raises:
            WireError: The bytes are no frame of this version.
        """
        if not _HEADER.size <= len(data) <= MAX_FRAME:
            raise WireError(f"a frame of {len(data)} bytes; {_HEADER.size} to {MAX_FRAME} are allowed")
        magic, version, code, nothing, number, acknowledged = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise WireError("not a securevfl frame")
        if version != VERSION:
            raise WireError(
                f"the other side speaks version {version} of the network protocol, this side {VERSION}: "
                "upgrade the older"
            )
        if code not in _KINDS or nothing:
            raise WireError(f"unknown kind {code} of frame")
        kind, numbered = _KINDS[code]
        if numbered != (number > 0):
            raise WireError(f"a {kind.name} frame with number {number}")
        return cls(kind, data[_HEADER.size :], number, acknowledged)
