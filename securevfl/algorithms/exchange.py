"""The one way to drive protocol machines over a link.

Machines do no I/O: they say what has to be sent. An exchange sends it, as messages of declared kinds that
carry the ledger head of the entry which stands for the machine's input, and turns what arrives into envelopes
for machines. It drives only machines that were made here from a gate's contribution, that a gate has
accounted for, or that have no input at all; this is the one place outside the gate that makes payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from securevfl.errors import EgressError, ProtocolError
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.payloads import (
    _KEY,
    Accounted,
    Contribution,
    Link,
    Masked,
)
from securevfl.protocols.alignment.helper import HelperMachine
from securevfl.protocols.contract import Address, Envelope, Machine, Message, Node
from securevfl.protocols.sealed.messages import DEALT as CHECKED_DEALT
from securevfl.protocols.sealed.protocol import Deal, ScoreDeal, Seed
from securevfl.protocols.wire import Value

T = TypeVar("T")
DEALT = (Seed, Deal, ScoreDeal, *CHECKED_DEALT)
"""What a dealer sends: made of fresh randomness and public numbers alone."""


def machine_of(source: Accounted | Machine) -> Machine:
    """The machine itself."""
    found: Machine = source.machine if isinstance(source, Accounted) else source
    return found


class Exchange:
    """What one role's machines of one protocol say to the others, and hear from them.

    Args:
        link: The role's link.
        places: Protocol address -> address of the role that plays it.
        read: Checks kind and fields of a message and makes it, as the protocol does.
        channel: Name that tells protocols apart where a link carries several; empty where it carries one.
        hides: Whether contributions are hidden from those who pass them on; where they are not, they go only
            to those whom they were written down for.
    """

    def __init__(
        self,
        link: Link,
        places: Mapping[Address, str],
        read: Callable[[str, dict[str, Value]], Message],
        *,
        channel: str = "",
        hides: bool = True,
    ) -> None:
        self.link, self.places, self.read, self.channel, self.hides = link, places, read, channel, hides
        self.organisations = tuple(sorted({link.hosts[place] for place in places.values()}))
        self._address_of = {place: address for address, place in places.items()}

    # -- machines -------------------------------------------------------------------------------------------

    def agree(self, node: Node, head: Head) -> Accounted | None:
        """The machine of a participant's key agreement, which has no input; None where there is none.

        Args:
            node: The participant's state.
            head: The sender's newest ledger head.
        """
        machine = node.setup()
        if machine is None:
            return None
        return Accounted(machine=machine, head=head, observers=self.organisations, key=_KEY)

    def enter(
        self,
        node: Node,
        contribution: Contribution,
        *,
        round: int,  # noqa: A002
    ) -> Accounted:
        """The machine of a round that a party takes part in with what its gate let into the sum.

        Args:
            node: The party's state.
            contribution: From the gate.
            round: Number of the round.
        """
        if type(contribution) is not Contribution or getattr(contribution, "_made_with", None) is not _KEY:
            raise EgressError(f"{self.link.address}: {type(contribution).__name__} did not pass the gate")
        machine = node.round(contribution.values, round=round, shape=contribution.values.shape)
        observers = self.organisations if self.hides else contribution.observers
        return Accounted(machine=machine, head=contribution.head, observers=observers, key=_KEY)

    def attend(self, node: Node, *, round: int, shape: tuple[int, ...], head: Head) -> Accounted:  # noqa: A002
        """The machine of a round for a participant without an input.

        Args:
            node: The participant's state.
            round: Number of the round.
            shape: Shape of the total.
            head: The sender's newest ledger head.
        """
        machine = node.round(None, round=round, shape=shape)
        return Accounted(machine=machine, head=head, observers=self.organisations, key=_KEY)

    def assist(self, machine: Machine) -> Accounted:
        """The machine of a participant that has no data at all, and compares what others send.

        Raises:
            EgressError: It is another machine.
        """
        if type(machine) is not HelperMachine:
            raise EgressError(f"{self.link.address}: {type(machine).__name__} is not the machine of a helper")
        return Accounted(machine=machine, head=None, observers=self.organisations, key=_KEY)

    # -- sending --------------------------------------------------------------------------------------------

    async def send(self, source: Accounted | Machine, envelope: Envelope) -> bool:
        """Sends what a machine says; False where it is for this role itself, and was not sent.

        Raises:
            EgressError: The machine has an input that no gate has accounted for.
        """
        place = self.places[envelope.receiver]
        if place == self.link.address:
            return False
        if type(source) is not Accounted or getattr(source, "_made_with", None) is not _KEY:
            raise EgressError(f"{self.link.address}: a machine that no gate has accounted for wants to send")
        await self._send(place, envelope, source.head, source.observers)
        return True

    async def deal(self, envelopes: Iterable[Envelope]) -> None:
        """Sends what a dealer, who has no data, deals.

        Raises:
            EgressError: It is something else.
        """
        for envelope in envelopes:
            if type(envelope.message) not in DEALT:
                raise EgressError(
                    f"{self.link.address} deals {envelope.message.kind!r}, which no dealer sends"
                )
            await self._send(self.places[envelope.receiver], envelope, None, self.organisations)

    async def _send(
        self, place: str, envelope: Envelope, head: Head | None, observers: tuple[str, ...]
    ) -> None:
        route: dict[str, Value] = {}
        if self.channel:
            route = {"channel": self.channel, "from": envelope.sender, "to": envelope.receiver}
        content = Masked(message=envelope.message, route=route, head=head, observers=observers, key=_KEY)
        await self.link.send(place, content)

    # -- receiving ------------------------------------------------------------------------------------------

    def envelope(self, packet: Packet) -> Envelope:
        """What a packet says to a machine here.

        Raises:
            ProtocolError: It is malformed, or its sender does not play the address that it speaks for.
        """
        fields: dict[str, Any] = dict(packet.fields)
        if self.channel:
            del fields["channel"]
            sender, receiver = fields.pop("from"), fields.pop("to")
            if self.places.get(sender) != packet.sender or self.places.get(receiver) != self.link.address:
                raise ProtocolError(
                    f"{packet.sender} does not play address {sender} of channel {self.channel!r}"
                )
        else:
            sender, receiver = self._address_of.get(packet.sender), self._address_of[self.link.address]
            if sender is None:
                raise ProtocolError(f"{self.link.address} received {packet.kind!r} from {packet.sender}")
        return Envelope(sender, receiver, self.read(packet.kind, fields))

    async def follow(self, *sources: Accounted | Machine) -> None:
        """Follows machines beside each other to their end, where a role has nothing else to listen to.

        Work that needs no message comes before the next message: what is sent, and in which order, depends
        on what was received alone.
        """
        for source in sources:
            await self._act(source, machine_of(source).start)
            await self.started(machine_of(source))
        while not all(machine_of(source).done for source in sources):
            busy = next((each for each in sources if machine_of(each).pending), None)
            if busy is not None:
                await self._act(busy, machine_of(busy).proceed)
                continue
            packet, source = await self.next_for(sources)
            await self._act(source, machine_of(source).receive, self.envelope(packet))

    async def _act(self, source: Accounted | Machine, act: Callable[..., list[Envelope]], *args: Any) -> None:
        """Lets a machine work, where the carrier wants long work to be done, and sends what it says."""
        aside = self.link.aside if machine_of(source).heavy else None
        for envelope in await (self.work(act, *args) if aside is None else aside(act, *args)):
            await self.send(source, envelope)

    async def next_for(self, sources: Sequence[Accounted | Machine]) -> tuple[Packet, Accounted | Machine]:
        """The next message for machines that are followed, and whose it is."""
        return await self.link.receive(), sources[0]

    async def work(self, act: Callable[..., T], *args: Any, **named: Any) -> T:
        """Lets a machine work, here and now."""
        return act(*args, **named)

    async def started(self, machine: Machine) -> None:
        """Called once a machine that is followed has started."""
