"""Frames: what travels in one gRPC message, and how a stream begins.

A fixed header (magic, version, kind, number, acknowledgement) and a payload. Numbered frames are delivered
once and in order; `session.py` sees to that. Nothing in a frame is trusted before its sender's certificate,
its size and its form have been checked.

A stream begins with a greeting of each side: who talks to whom about which run, and what each has received so
far. Control messages are what the coordinator and everybody else tell each other between and around phases.
Each kind has fixed fields of fixed types. A message of another form is refused where it arrives, so that
whoever handles one can rely on it, and nothing from outside passes for an event of this process.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from securevfl import __version__
from securevfl.errors import NOTICES, WireError
from securevfl.protocols.wire import Value, pack, unpack

MAGIC = b"SVFN"
VERSION = 3
MAX_FRAME = 256 << 20
PHASE_BYTES = 16
MAX_HELLO = 4096
PREDICT = "/predict"
"""Follows a run's name where its organisations predict, so that nobody mistakes that for training."""
SCORE = "/score"
"""Follows it where a service scores."""
STAY = -2
"""In place of an epoch to go back to: go on from where you are."""

_HEADER = struct.Struct("<4sBBHQQ")  # magic, version, kind, nothing, number, acknowledged number
MAX_PAYLOAD = MAX_FRAME - _HEADER.size


class OtherVersion(WireError):
    """The other side speaks another version of the network protocol."""

    notice = "version"


class OtherRun(WireError):
    """The other side takes part in another run."""

    notice = "run"


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
        origin: Who gave it to us to pass on, if anybody; never on the wire.
    """

    kind: Kind
    payload: bytes = b""
    number: int = 0
    acknowledged: int = 0
    origin: str = ""

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
            raise OtherVersion(
                f"the other side speaks version {version} of the network protocol, this side {VERSION}: "
                "upgrade the older"
            )
        if code not in _KINDS or nothing:
            raise WireError(f"unknown kind {code} of frame")
        kind, numbered = _KINDS[code]
        if numbered != (number > 0):
            raise WireError(f"a {kind.name} frame with number {number}")
        return cls(kind, data[_HEADER.size :], number, acknowledged)


# -- greetings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """The first frame of each side.

    Attributes:
        sender: The organisation that greets.
        receiver: The one that is greeted.
        run: Name of the run.
        incarnation: The sender's process.
        known: The receiver's process as the sender knows it; empty if it does not.
        received: How many frames of that process the sender has received.
    """

    sender: str
    receiver: str
    run: str
    incarnation: bytes
    known: bytes
    received: int

    def to_bytes(self, kind: Kind) -> bytes:
        """The frame on the wire, a HELLO or a WELCOME."""
        payload = pack("hello", {"software": __version__, **vars(self)})
        return Frame(kind=kind, payload=payload).to_bytes()


def read_greeting(frame: Frame) -> Greeting:
    """Reads the first frame of the other side; what it claims is still to be checked.

    Raises:
        WireError: It is malformed.
    """
    kind, fields = unpack(frame.payload, max_bytes=MAX_HELLO)
    received = fields.get("received")
    if kind != "hello":
        raise WireError("a greeting that is none")
    if type(received) is not int or received < 0:
        raise WireError("a greeting that does not say what was received")
    incarnation, known = _raw(fields.get("incarnation")), _raw(fields.get("known"))
    if len(incarnation) != 16:
        raise WireError("a greeting without incarnation")
    sender, receiver, run = (_text(fields.get(key)) for key in ("sender", "receiver", "run"))
    return Greeting(
        sender=sender, receiver=receiver, run=run, incarnation=incarnation, known=known, received=received
    )


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise WireError("a greeting that does not say who talks to whom about what")
    return value


def _raw(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise WireError("a greeting without incarnation")
    return value


def other_run(here: str, peer: str, there: str) -> str:
    """Why two that take part in different runs cannot talk."""
    if there == here + PREDICT:
        return f"{here!r} is trained here, {peer} wants to predict; both must do the same"
    if here == there + PREDICT:
        return f"{there!r} predicts here, {peer} wants to train; it must join with --predict, too"
    if (here.endswith(SCORE)) != (there.endswith(SCORE)):
        return (
            f"{here!r} here, {there!r} at {peer}: one of the two is a scoring service; both must do the same"
        )
    return f"the run here is {here!r}, {peer} takes part in {there!r}"


def refusal(notice: str) -> bytes:
    """The frame that refuses a stream, on the wire; of why, it says a key of `NOTICES`."""
    return Frame(kind=Kind.REFUSE, payload=pack("refuse", {"reason": notice})).to_bytes()


def reason_of(frame: Frame) -> str:
    """Why the other side refuses, in words of this version."""
    return in_words(unpack(frame.payload, max_bytes=MAX_HELLO)[1].get("reason"))


def in_words(notice: Value) -> str:
    """What a notice of others means; one that this version does not know says nothing."""
    return NOTICES.get(notice if isinstance(notice, str) else "", NOTICES["failed"])


# -- control messages ---------------------------------------------------------------------------------------

ROUND_BYTES = 8
SALT_BYTES = 32
MAX_CONTROL = 1 << 20
MAX_LARGE = 64 << 20
LARGE = frozenset({"propose", "join", "records"})
"""Kinds that carry record numbers, plans or bounds, and may have `MAX_LARGE` bytes."""

_INTRODUCTION: dict[str, Any] = {
    "name": str,
    "address": str,
    "incarnation": bytes,
    "public_key": bytes,
    "certificate": bytes,
    "signature": bytes,
}

OF_COORDINATOR: Mapping[str, Mapping[str, Any]] = {
    "introduction": _INTRODUCTION,
    "meet": {"round": bytes, "away": str},
    "invite": {"round": bytes, "invitation": str},
    "align": {"phase": bytes, "way": str, "normalise": str, "members": str, "helper": str},
    "records": {"numbers": list, "salt": bytes},
    "propose": {"proposal": str, "digest": str, "signature": str},
    "agreed": {"digest": str, "signatures": str},
    "begin": {"phase": bytes, "part": str, "epoch": int, "restore": int, "signature": bytes},
    "abort": {"phase": bytes},
    "stop": {"reason": str, "about": str, "again": bool},
    "finish": {"epochs": int, "stopped": str},
    "goodbye": {},
}

OF_MEMBERS: Mapping[str, Mapping[str, Any]] = {
    "join": {**_INTRODUCTION, "facts": str, "aligned": str, "checkpoints": list, "finished": bool},
    "met": {"round": bytes},
    "invited": {"round": bytes},
    "aligned": {"phase": bytes},
    "confirmed": {"digest": str, "signature": str},
    "done": {"phase": bytes},
    "refused": {"phase": bytes},
    "failed": {"reason": str},
    "aborted": {"phase": bytes, "checkpoints": list},
    "finished": {},
}

MAX_CHECKPOINTS = 1024
_LISTS = {"checkpoints": "epochs", "numbers": "record numbers"}
_LENGTHS = {
    "phase": PHASE_BYTES,
    "round": ROUND_BYTES,
    "incarnation": 16,
    "public_key": 32,
    "salt": SALT_BYTES,
}


def read_control(payload: bytes, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A control message's kind and fields.

    Args:
        payload: What arrived.
        known: The kinds that its sender may send, `OF_COORDINATOR` or `OF_MEMBERS`.

    Raises:
        WireError: It is none of them, or has other fields.
    """
    kind, fields = unpack(payload, max_bytes=MAX_LARGE)
    form = known.get(kind)
    if form is None:
        raise WireError(f"a control message {kind!r}, which this version does not know")
    if len(payload) > MAX_CONTROL and kind not in LARGE:
        raise WireError(f"a control message {kind!r} of {len(payload):,} bytes")
    if fields.keys() != form.keys():
        raise WireError(f"{kind!r} has the fields {sorted(fields)}, expected {sorted(form)}")
    for name, expected in form.items():
        _check_field(kind, name, fields[name], expected)
    return kind, fields


def _check_field(kind: str, name: str, value: Value, expected: Any) -> None:
    if type(value) is not expected:
        raise WireError(f"{kind!r}: {name} is of type {type(value).__name__}, expected {expected.__name__}")
    if isinstance(value, list) and not all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        raise WireError(f"{kind!r}: {name} is not a list of {_LISTS[name]}")
    if name == "checkpoints" and len(value) > MAX_CHECKPOINTS:  # type: ignore[arg-type]
        raise WireError(f"{kind!r}: {len(value):,} checkpoints; nobody keeps so many")  # type: ignore[arg-type]
    if isinstance(value, bytes) and len(value) != _LENGTHS.get(name, len(value)):
        raise WireError(f"{kind!r}: {name} has {len(value)} bytes, expected {_LENGTHS[name]}")
