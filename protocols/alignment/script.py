"""A machine whose part is written down from beginning to end, and waits where it needs a message.

Messages of one sender come in the order in which they were sent; those of different senders in any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Generator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.alignment.lists import Incoming, Outgoing
from securevfl.protocols.alignment.messages import AlignDigest, AlignHello, AlignMore, AlignPiece
from securevfl.protocols.contract import Address, Envelope, Machine, Message, name_of
from securevfl.protocols.wire import Value, pack

NONCE_BYTES = 32
MAX_QUEUE = 64  # more than a partner that follows the protocol can be ahead

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Script = Generator[Collection[Address], tuple[Address, Message], T]
"""Yields whom it waits for, is sent what the first of them said."""
Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """What a party takes away: positions in its own list, in an order that is the same at all parties."""

    rows: Rows


class AlignmentMachine(Machine):
    """One participant's part in one alignment. An error ends it: nothing more is sent or taken.

    Args:
        address: Who.
        others: All other participants.
        about: What all must believe is going on.
        most: How many IDs another party may bring.
        sizes: How many IDs each party has said it will bring; nothing was said, if empty.
        names: How messages to people name the parties; their numbers, if empty.
        round: Number of the round.
    """

    def __init__(
        self,
        address: Address,
        *,
        others: Sequence[Address],
        about: bytes,
        most: int,
        sizes: Sequence[int] = (),
        names: Sequence[str] = (),
        round: int = 0,  # noqa: A002
    ) -> None:
        super().__init__(address, round=round)
        self._parties = [other for other in others if other >= 0]
        self._about, self._most, self._sizes, self._names = about, most, sizes, names
        self._queues: dict[Address, deque[Message]] = {other: deque() for other in others}
        self._wanted: Collection[Address] = ()
        self._script: Script[Rows | None] = self._play()
        self._out: list[Envelope] = []
        self._rows: Rows | None = None
        self._over = self._failed = False

    @abstractmethod
    def _play(self) -> Script[Rows | None]:
        """The whole part; returns the common positions, None for who brings no list."""

    # -- the machine ----------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether this participant has nothing left to send or to wait for."""
        return self._over

    def alignment(self) -> Alignment:
        """The common positions in this party's list.

        Raises:
            ProtocolError: They are not known, or this participant brought no list.
        """
        if self._rows is None:
            raise ProtocolError(
                f"the alignment of {self._name(self.address)} is not done, or not its to know"
            )
        return Alignment(rows=self._rows)

    def _start(self) -> list[Envelope]:
        return self._advance(first=True)

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if self._failed or self._over or sender not in self._queues:
            state = "has failed" if self._failed else "is over" if self._over else "is not with it"
            raise ProtocolError(f"{message.kind!r} of {self._name(sender)}: the alignment {state}")
        if len(self._queues[sender]) >= MAX_QUEUE:
            raise ProtocolError(f"{self._name(sender)} floods the alignment")
        self._queues[sender].append(message)
        return self._advance()

    def _drop(self, address: Address) -> list[Envelope]:
        if address not in self._queues:
            raise ProtocolError(f"{self._name(address)} is no other participant of this alignment")
        if not self._over:
            self._fail()
            raise DropoutError(f"{self._name(address)} is gone; start the alignment anew without it")
        return []

    def _advance(self, *, first: bool = False) -> list[Envelope]:
        try:
            if first:
                self._wanted = next(self._script)
            while (sender := next((each for each in self._wanted if self._queues[each]), None)) is not None:
                self._wanted = self._script.send((sender, self._queues[sender].popleft()))
        except StopIteration as end:
            self._rows, self._over = end.value, True
            self._end()
        except BaseException:
            self._fail()
            raise
        sent, self._out = self._out, []
        return sent

    def _fail(self) -> None:
        self._failed, self._out = True, []
        self._end()

    def _name(self, address: Address) -> str:
        return self._names[address] if 0 <= address < len(self._names) else name_of(address)

    def _end(self) -> None:
        """Lets go of what the part needed: processes, keys."""

    # -- what scripts are made of ---------------------------------------------------------------------------

    def _send(self, receiver: Address, message: Message) -> None:
        self._out.append(Envelope(self.address, receiver, message))

    def _get(self, sender: Address, kind: type[M]) -> Script[M]:
        """The next message of a participant, which must be of a kind."""
        _, message = yield (sender,)
        return self._of_kind(sender, message, kind)

    def _of_kind(self, sender: Address, message: Message, kind: type[M]) -> M:
        if type(message) is not kind:
            raise ProtocolError(
                f"{self._name(sender)} sends {message.kind!r} where {kind.kind!r} is expected"
            )
        return message

    def _hello(self, count: int, public: bytes = b"", signature: bytes = b"") -> Script[_Greeted]:
        """Everybody greets everybody else; the salt is made of what all have contributed."""
        own = AlignHello(
            round=self.round,
            nonce=os.urandom(NONCE_BYTES),
            count=count,
            about=self._about,
            public=public,
            signature=signature,
        )
        hellos = {self.address: own}
        for other in self._parties:
            self._send(other, own)
        for other in self._parties:
            hellos[other] = yield from self._get(other, AlignHello)
            self._check_hello(other, hellos[other])
        counts = {address: hellos[address].count for address in sorted(hellos)}
        parts = b"".join(hellos[address].nonce + hellos[address].public for address in counts)
        fields: dict[str, Value] = {"about": self._about, "counts": list(counts.values()), "parts": parts}
        salt = hashlib.sha256(pack("securevfl alignment salt 1", fields)).digest()
        return _Greeted(hellos=hellos, counts=counts, salt=salt)

    def _check_hello(self, sender: Address, hello: AlignHello) -> None:
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError(f"{self._name(sender)} brings {len(hello.nonce)} bytes of salt")
        if hello.about != self._about:
            raise ProtocolError(
                f"{self._name(sender)} aligns in another way, or for another purpose: compare the kind of "
                "alignment, the number of parties and the normalisation"
            )
        if not 0 <= hello.count <= self._most:
            raise ProtocolError(
                f"{self._name(sender)} brings {hello.count} IDs; at most {self._most} are accepted here"
            )
        if self._sizes and hello.count != self._sizes[sender]:
            raise ProtocolError(
                f"{self._name(sender)} brings {hello.count} IDs and has said {self._sizes[sender]}"
            )

    def _exchange(self, sends: dict[Address, Outgoing], takes: dict[Address, Incoming]) -> Script[None]:
        """Sends lists and takes lists, piece by piece; a sender waits until there is room for more."""
        for receiver, outgoing in sends.items():
            for piece in outgoing.first():
                self._send(receiver, AlignPiece(round=self.round, values=piece))
        while True:
            open_ = {each for each, outgoing in sends.items() if not outgoing.done}
            open_ |= {each for each, incoming in takes.items() if not incoming.done}
            if not open_:
                return
            sender, message = yield open_
            if type(message) is AlignMore and sender in sends and not sends[sender].done:
                following = sends[sender].next()
                if following is not None:
                    self._send(sender, AlignPiece(round=self.round, values=following))
                continue
            piece_message = self._of_kind(sender, message, AlignPiece)
            if sender not in takes or takes[sender].done:
                raise ProtocolError(f"{self._name(sender)} sends more values than it announced")
            takes[sender].take(piece_message.values)
            self._send(sender, AlignMore(round=self.round))

    def _agree(self, digest: bytes, what: str) -> Script[None]:
        """All parties must have come to the same."""
        for other in self._parties:
            self._send(other, AlignDigest(round=self.round, digest=digest))
        for other in self._parties:
            found = yield from self._get(other, AlignDigest)
            if found.digest != digest:
                raise ProtocolError(
                    f"{self._name(other)} has {what}; somebody cheats or fails, nothing is used"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Greeted:
    """What is known after everybody has greeted everybody.

    Attributes:
        hellos: Party -> what it said, this one included.
        counts: Party -> number of its IDs.
        salt: The session's salt.
    """

    hellos: dict[Address, AlignHello]
    counts: dict[Address, int]
    salt: bytes
