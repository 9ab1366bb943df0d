"""How a stream begins: who talks to whom about which run, and what each side has received so far."""

from __future__ import annotations

from dataclasses import dataclass

from securevfl import __version__
from securevfl.errors import WireError
from securevfl.network.frames import Frame, Kind
from securevfl.protocols.wire import Value, pack, unpack

MAX_HELLO = 4096
MAX_REASON = 500
PREDICT = "/predict"
"""Follows a run's name where its organisations predict, so that nobody mistakes that for training."""


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
    return f"the run here is {here!r}, {peer} takes part in {there!r}"


def refusal(reason: str) -> bytes:
    """The frame that refuses a stream, on the wire."""
    return Frame(kind=Kind.REFUSE, payload=pack("refuse", {"reason": reason[:MAX_REASON]})).to_bytes()


def reason_of(frame: Frame) -> str:
    """Why the other side refuses."""
    reason = unpack(frame.payload, max_bytes=MAX_HELLO)[1].get("reason")
    return reason[:MAX_REASON] if isinstance(reason, str) else "no reason given"
