"""Private ID alignment: parties find the IDs they all have.

The leader (party 0) keeps a running intersection, first its own IDs, and meets the other parties in turn in a
two-party private set intersection (elliptic-curve Diffie-Hellman, openmined-psi). Each meeting is one request
and one response; at the end the leader announces the common IDs.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from securevfl.errors import DataError, DropoutError, InputError, ProtocolError
from securevfl.protocols.alignment.psi import Client, Server, require_library
from securevfl.protocols.contract import Address, Envelope, Machine, Message, read_message
from securevfl.protocols.driver import drive
from securevfl.protocols.wire import unpack

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


MAX_ID_BYTES = 1024

NORMALISATIONS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "trim": lambda text: unicodedata.normalize("NFC", text).strip(),
    "trim-casefold": lambda text: unicodedata.normalize("NFC", text.strip().casefold()),
}
"""How IDs are made comparable; all parties have to use the same one."""


def prepare_ids(ids: Sequence[str], normalisation: str = "exact") -> dict[str, int]:
    """Normalised IDs and their positions.

    Raises:
        DataError: An ID is no string, empty or too long, or two are equal after normalisation.
    """
    if normalisation not in NORMALISATIONS:
        raise InputError(
            f"normalisation {normalisation!r} is unknown; use one of {', '.join(NORMALISATIONS)}"
        )
    if len(ids) > MAX_IDS:
        raise DataError(f"{len(ids)} IDs were given; at most {MAX_IDS} can be aligned")
    positions: dict[str, int] = {}
    for position, original in enumerate(ids):
        if not isinstance(original, str):
            raise DataError(f"ID in position {position} is no string; convert it first")
        text = NORMALISATIONS[normalisation](original)
        if not 0 < _utf8_length(text) <= MAX_ID_BYTES:
            raise DataError(
                f"ID in position {position} is empty, not Unicode text or longer than {MAX_ID_BYTES} bytes"
            )
        if text in positions:
            raise DataError(
                f"one ID occurs in positions {positions[text]} and {position}"
                f" (normalisation {normalisation!r}); remove duplicates first"
            )
        positions[text] = position
    return positions


def _utf8_length(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # half a surrogate pair, as a careless decoder leaves it
        return 0


class PrivateAlignment:
    """The intersection of all parties' IDs, revealed to all of them.

    Semi-honest parties learn the following, and nothing about other IDs:

    - everybody: the common IDs;
    - the leader: the size of every other set, and each running intersection, that is, which of its own IDs
      the first 1, 2, ... other parties all have. With two parties this is the result itself;
    - every other party: how many IDs the running intersection had when its turn came.

    That an ID is missing from the result tells each party that had it that somebody else did not. The star
    that runs one intersection with every party would show the leader all pairwise ones; this chain does not.
    The leader and any other parties together learn no more than their sets, the leader's view and the common
    IDs tell. Other parties without the leader learn no more than their own views. Every meeting uses fresh
    one-time keys, so requests to two parties cannot be linked.

    Not covered: a party that puts invented IDs into its set tests whether others have them; nothing forces
    the announced result to be the true one (a party does refuse IDs that it does not have). If any party
    drops out, the alignment fails and has to start anew.

    Args:
        parties: Number of parties, at least 2.
        normalisation: How IDs are made comparable: "exact", "trim" or "trim-casefold".
    """

    messages: ClassVar[tuple[type[Message], ...]] = (AlignRequest, AlignResponse, CommonIds)

    def __init__(self, *, parties: int, normalisation: str = "exact") -> None:
        if parties < 2:
            raise InputError(f"alignment needs at least 2 parties, not {parties}")
        prepare_ids([], normalisation)
        require_library()
        self.parties = parties
        self.normalisation = normalisation

    def machine(self, address: Address, ids: Sequence[str], *, round: int = 0) -> AlignmentMachine:  # noqa: A002
        """One party's role. The IDs are checked here, before anything is sent."""
        if not 0 <= address < self.parties:
            raise InputError(f"party {address} takes no part; parties are 0 to {self.parties - 1}")
        positions = prepare_ids(ids, self.normalisation)
        role = LeaderMachine if address == LEADER else MemberMachine
        return role(
            address,
            parties=self.parties,
            normalisation=self.normalisation,
            positions=positions,
            round=round,
        )

    def decode(self, data: bytes | memoryview) -> Message:
        """Decodes any message of this protocol from its binary form."""
        return read_message(self.messages, *unpack(data), "the alignment")

    def align(self, ids: Sequence[Sequence[str]]) -> list[Alignment]:
        """Runs all parties in this process; one result per party."""
        if len(ids) != self.parties:
            raise InputError(f"{len(ids)} lists of IDs were given for {self.parties} parties")
        machines = [self.machine(address, own) for address, own in enumerate(ids)]
        drive(machines)
        return [machine.alignment() for machine in machines]
