"""The messages and the two roles of an ID alignment: the leader asks, the members answer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.alignment.psi import Client, Server
from securevfl.protocols.contract import Address, Envelope, Machine, Message

LEADER: Address = 0
MAX_IDS = 10_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignRequest(Message):
    """The leader's running intersection under its one-time key, to one other party."""

    kind: ClassVar[str] = "align-request"
    normalisation: str
    count: int
    request: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignResponse(Message):
    """The request under both keys, and the sender's own IDs under its one-time key."""

    kind: ClassVar[str] = "align-response"
    setup: bytes
    response: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CommonIds(Message):
    """The result, from the leader to all others."""

    kind: ClassVar[str] = "align-common"
    ids: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """What a party takes away: the common IDs, sorted, and where they are in its own list."""

    ids: tuple[str, ...]
    rows: tuple[int, ...]


class AlignmentMachine(Machine):
    """What leader and members share."""

    def __init__(
        self,
        address: Address,
        *,
        parties: int,
        normalisation: str,
        positions: dict[str, int],
        round: int,  # noqa: A002
    ) -> None:
        super().__init__(address, round=round)
        self._parties = parties
        self._normalisation = normalisation
        self._positions = positions
        self._common: tuple[str, ...] | None = None

    @property
    def done(self) -> bool:
        """Whether the common IDs are known."""
        return self._common is not None

    def alignment(self) -> Alignment:
        """The common IDs and this party's rows.

        Raises:
            ProtocolError: They are not known yet.
        """
        if self._common is None:
            raise ProtocolError(f"the alignment of party {self.address} is not done")
        return Alignment(ids=self._common, rows=tuple(self._positions[text] for text in self._common))

    def _drop(self, address: Address) -> list[Envelope]:
        if address == self.address or not 0 <= address < self._parties:
            raise ProtocolError(f"party {address} is no other party of this alignment")
        if not self.done:
            raise DropoutError(f"party {address} is gone; start the alignment anew without it")
        return []


class LeaderMachine(AlignmentMachine):
    """Meets party 1, 2, ... in turn with the running intersection."""

    def __init__(self, address: Address, **rest: Any) -> None:
        super().__init__(address, **rest)
        self._running = sorted(self._positions)
        self._partner = 0
        self._client: Client | None = None

    def _start(self) -> list[Envelope]:
        return self._next()

    def _next(self) -> list[Envelope]:
        self._partner += 1
        if self._partner == self._parties or not self._running:
            self._common, self._client = tuple(self._running), None
            message = CommonIds(round=self.round, ids=self._running)
            return [Envelope(self.address, other, message) for other in range(1, self._parties)]
        self._client = Client(self._running)
        request = AlignRequest(
            round=self.round,
            normalisation=self._normalisation,
            count=len(self._running),
            request=self._client.request,
        )
        return [Envelope(self.address, self._partner, request)]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if self._client is None or not isinstance(message, AlignResponse) or sender != self._partner:
            raise ProtocolError(
                f"the leader does not expect a {message.kind!r} message from party {sender} now"
            )
        self._running = self._client.intersect(message.setup, message.response)
        return self._next()


class MemberMachine(AlignmentMachine):
    """Answers one request and takes the result."""

    def __init__(self, address: Address, **rest: Any) -> None:
        super().__init__(address, **rest)
        self._asked: int | None = None

    def _start(self) -> list[Envelope]:
        return []

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender == LEADER and self._common is None:
            if isinstance(message, AlignRequest) and self._asked is None:
                return self._answer(message)
            if isinstance(message, CommonIds):
                return self._finish(message.ids)
        raise ProtocolError(
            f"party {self.address} does not expect a {message.kind!r} message from {sender} now"
        )

    def _answer(self, message: AlignRequest) -> list[Envelope]:
        if not 0 < message.count <= MAX_IDS:
            raise ProtocolError(f"a request about {message.count} IDs is refused; 1 to {MAX_IDS} are allowed")
        if message.normalisation != self._normalisation:
            raise ProtocolError(
                f"the leader normalises IDs by {message.normalisation!r},"
                f" this party by {self._normalisation!r}"
            )
        server = Server(sorted(self._positions))
        setup, response = server.answer(message.request, message.count)
        self._asked = message.count
        reply = AlignResponse(round=self.round, setup=setup, response=response)
        return [Envelope(self.address, LEADER, reply)]

    def _finish(self, ids: list[str]) -> list[Envelope]:
        # Without a question before it, only an empty result can be true: the intersection died out earlier.
        if len(ids) > (self._asked or 0):
            raise ProtocolError(
                f"{len(ids)} common IDs were announced after a question about {self._asked or 0}"
            )
        if sorted(set(ids)) != ids or not self._positions.keys() >= set(ids):
            raise ProtocolError("the announced IDs are unsorted, doubled or not all in this party's set")
        self._common = tuple(ids)
        return []
