"""The packet that roles exchange: a message on its way, its wire form, and the clock that roles live by."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from securevfl.errors import ProtocolError, WireError
from securevfl.protocols.wire import Value, pack, packed_size, unpack

_MAGIC, _VERSION = b"SVFM", 1
_ENVELOPE = struct.Struct("<4sBBHqq")  # magic, version, what it has, length of the route, number, reply to
_REPLY, _HEAD = 1, 2  # what it has: an answered call, a ledger head
MAX_ADDRESS = 255
_LENGTH = 64  # of the hexadecimal hash in a ledger head
_POSITION = struct.Struct(f"<q{_LENGTH}sB")  # of a ledger head: position, hash, length of the owner's name


class Head(NamedTuple):
    """The newest entry of an owner's ledger: its position and its hash."""

    owner: str
    position: int
    digest: str


@dataclass(kw_only=True, slots=True)
class Packet:
    """One packet between two roles: a message on its way.

    Attributes:
        kind: What it is, such as ``embedding`` or ``gradient``.
        sender: Address of the role that sent it.
        receiver: Address of the role it is for.
        fields: Its content.
        number: The sender's running number; with the sender it names the message.
        reply_to: The number of the call that this message answers.
        head: The sender's ledger head, where the content passed a gate.
        checked: True where a link of this process has checked it; never on the wire.
        weight: Bytes that it counts while it waits here, where somebody counts; never on the wire.
        reach: Organisations that its payload was let out to; never on the wire.
        arrived: What a link that was asked to has noted of its content; never on the wire.
        rows: The records that it names, as a link has checked them; they cannot change.
    """

    kind: str
    sender: str
    receiver: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    number: int = 0
    reply_to: int | None = None
    head: Head | None = None
    checked: bool = field(default=False, compare=False, repr=False)
    weight: int = field(default=0, compare=False, repr=False)
    reach: tuple[str, ...] = field(default=(), compare=False, repr=False)
    arrived: Any = field(default=None, init=False, compare=False, repr=False)
    rows: Any = field(default=None, compare=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        """A field; one that is declared but not always there may be missing."""
        try:
            return self.fields[name]
        except KeyError:
            raise ProtocolError(f"{self.sender} sends {self.kind!r} without {name}") from None

    def size(self) -> int:
        """Bytes of the wire form, without building it."""
        owner = None if self.head is None else self.head.owner
        return overhead(self.sender, self.receiver, owner) + packed_size(self.kind, self.fields)

    def to_bytes(self) -> bytes:
        """The wire form: an envelope, the ledger head if there is one, and the content.

        Raises:
            WireError: Something in it does not fit the wire.
        """
        route, reply, has, head = _route(self.sender, self.receiver), self.reply_to, 0, b""
        if self.head is not None:
            has, head = _HEAD, _pack_head(self.head)
        try:
            envelope = _ENVELOPE.pack(
                _MAGIC,
                _VERSION,
                has if reply is None else has | _REPLY,
                len(route),
                self.number,
                0 if reply is None else reply,
            )
        except struct.error as error:
            raise WireError(f"message {self.kind!r} has a number that does not fit 64 bits") from error
        return b"".join((envelope, route, head, pack(self.kind, self.fields)))

    @classmethod
    def from_bytes(cls, data: bytes, start: int = 0) -> Packet:
        """Reads the wire form, from a place on.

        Raises:
            WireError: The bytes are not a message of this form.
        """
        if len(data) - start < _ENVELOPE.size:
            raise WireError(f"message of {len(data) - start} bytes is shorter than its envelope")
        magic, version, has, length, number, reply = _ENVELOPE.unpack_from(data, start)
        if magic != _MAGIC:
            raise WireError("not a securevfl message")
        if version != _VERSION:
            raise WireError(f"message has version {version}, this side has {_VERSION}: upgrade the older")
        if has & ~(_REPLY | _HEAD) or (reply and not has & _REPLY):
            raise WireError("message has an unknown form of envelope")
        begin = start + _ENVELOPE.size
        content, head = begin + length, None
        sender, receiver = _read_route(data[begin:content], length)
        if has & _HEAD:
            head, content = _read_head(data, content)
        kind, fields = unpack(data, start=content)
        return cls(
            kind=kind,
            sender=sender,
            receiver=receiver,
            fields=fields,
            number=number,
            reply_to=reply if has & _REPLY else None,
            head=head,
        )


@lru_cache(maxsize=4096)
def _route(sender: str, receiver: str) -> bytes:
    """Who sends to whom: the length of the first address, and both."""
    first, second = sender.encode(), receiver.encode()
    if max(len(first), len(second)) > MAX_ADDRESS:
        raise WireError(f"an address of more than {MAX_ADDRESS} bytes")
    return bytes([len(first)]) + first + second


@lru_cache(maxsize=4096)
def overhead(sender: str, receiver: str, owner: str | None) -> int:
    """Bytes of the wire form beside the content; `owner` is that of the ledger head, if there is one."""
    head = 0 if owner is None else _POSITION.size + len(owner.encode())
    return _ENVELOPE.size + len(_route(sender, receiver)) + head


@lru_cache(maxsize=4096)
def _read_route(raw: bytes, length: int) -> tuple[str, str]:
    """Sender and receiver."""
    middle = 1 + raw[0] if raw else 1
    if len(raw) < length or not middle <= length <= middle + MAX_ADDRESS:
        raise WireError("message does not say who sent it to whom")
    try:
        return raw[1:middle].decode(), raw[middle:].decode()
    except UnicodeDecodeError as error:
        raise WireError("an address is not UTF-8") from error


def _pack_head(head: Head) -> bytes:
    owner = head.owner.encode()
    try:
        digest = head.digest.encode("ascii")
        if len(digest) != _LENGTH:
            raise WireError(f"a ledger hash has {_LENGTH} characters, not {len(digest)}")
        return _POSITION.pack(head.position, digest, len(owner)) + owner
    except (UnicodeEncodeError, struct.error) as error:
        raise WireError(f"the ledger head of {head.owner!r} does not fit the wire") from error


def _read_head(data: bytes, begin: int) -> tuple[Head, int]:
    """A ledger head, and where it ends."""
    middle = begin + _POSITION.size
    if middle > len(data):
        raise WireError("message ends inside its ledger head")
    position, digest, length = _POSITION.unpack_from(data, begin)
    owner = data[middle : middle + length]
    if len(owner) < length:
        raise WireError("message ends inside its ledger head")
    try:
        return Head(owner.decode(), position, digest.decode("ascii")), middle + length
    except UnicodeDecodeError as error:
        raise WireError("message carries a broken ledger head") from error


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
