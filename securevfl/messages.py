"""The message that roles exchange, and the links and clocks that carry it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from securevfl.errors import WireError
from securevfl.protocols.wire import Value, pack, packed_size, unpack


class Head(NamedTuple):
    """The newest entry of an owner's ledger: its position and its hash."""

    owner: str
    position: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message between two roles.

    Attributes:
        kind: What it is, such as ``embedding`` or ``gradient``.
        sender: Address of the role that sent it.
        receiver: Address of the role it is for.
        fields: Its content.
        number: The sender's running number; with the sender it names the message.
        reply_to: The number of the call that this message answers.
        head: The sender's ledger head, where the content passed a gate.
    """

    kind: str
    sender: str
    receiver: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    number: int = 0
    reply_to: int | None = None
    head: Head | None = None

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def size(self) -> int:
        """Bytes of the wire form, without building it or its envelope."""
        size = packed_size(self.kind, self.fields) + _ENVELOPE
        size += len(self.sender.encode()) + len(self.receiver.encode())
        if self.reply_to is not None:
            size += _REPLY
        if self.head is not None:
            size += _HEAD + len(self.head.owner.encode()) + len(self.head.digest)
        return size

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack(self.kind, self._envelope())

    def _envelope(self) -> dict[str, Value]:
        head: dict[str, Value] = {}
        if self.head is not None:
            head = {"~owner": self.head.owner, "~position": self.head.position, "~digest": self.head.digest}
        return {
            "~sender": self.sender,
            "~receiver": self.receiver,
            "~number": self.number,
            "~reply": self.reply_to,
            **head,
            **self.fields,
        }

    @classmethod
    def from_bytes(cls, data: bytes, start: int = 0) -> Message:
        """Reads the wire form, from a place on.

        Raises:
            WireError: The bytes are not a message of this form.
        """
        kind, fields = unpack(data, start=start)
        sender, receiver = fields.pop("~sender", None), fields.pop("~receiver", None)
        number, reply_to = fields.pop("~number", None), fields.pop("~reply", None)
        if not (isinstance(sender, str) and isinstance(receiver, str)):
            raise WireError(f"message {kind!r} does not say who sent it to whom")
        if not isinstance(number, int) or not isinstance(reply_to, int | None):
            raise WireError(f"message {kind!r} has no number")
        return cls(
            kind=kind,
            sender=sender,
            receiver=receiver,
            number=number,
            reply_to=reply_to,
            head=_take_head(kind, fields),
            fields=fields,
        )


def _added_size(fields: Mapping[str, Value]) -> int:
    return packed_size("", fields) - packed_size("", {})


_ENVELOPE = _added_size({"~sender": "", "~receiver": "", "~number": 0, "~reply": None})
_REPLY = _added_size({"~reply": 0}) - _added_size({"~reply": None})
_HEAD = _added_size({"~owner": "", "~position": 0, "~digest": ""})


def _take_head(kind: str, fields: dict[str, Value]) -> Head | None:
    owner, position, digest = (fields.pop(name, None) for name in ("~owner", "~position", "~digest"))
    if owner is None and position is None and digest is None:
        return None
    if not (isinstance(owner, str) and isinstance(position, int) and isinstance(digest, str)):
        raise WireError(f"message {kind!r} carries a broken ledger head")
    return Head(owner, position, digest)


class Link(Protocol):
    """How a role reaches the others. It never says on which runtime it is."""

    address: str

    async def send(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Sends a message and does not wait for an answer."""
        ...

    async def call(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> Message:
        """Sends a message and waits for the answer to it."""
        ...

    async def reply(
        self, message: Message, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Answers a call."""
        ...

    async def receive(self) -> Message:
        """The next message that is not the answer to a call."""
        ...


class Stop(asyncio.Event):
    """An event that ends sleeps. Each sleeper leaves a future here, which costs less than a timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.sleepers: set[asyncio.Future[bool]] = set()

    def set(self) -> None:
        """Wakes everybody who waits or sleeps."""
        super().set()
        for sleeper in self.sleepers:
            if not sleeper.done():
                sleeper.set_result(False)


class Clock(Protocol):
    """The time that roles live in."""

    def now(self) -> float:
        """Time units since the run began."""
        ...

    async def sleep_until(self, when: float, stop: Stop | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        ...
