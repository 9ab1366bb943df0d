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
from securevfl.privacy.passing import Totals
from securevfl.privacy.payloads import (
    _KEY,
    Accounted,
    Contribution,
    Link,
    Masked,
)
from securevfl.protocols.alignment.helper import HelperMachine
from securevfl.protocols.contract import Address, Envelope, Machine, Message, Node, is_shipped
from securevfl.protocols.sealed.messages import DEALT as CHECKED_DEALT
from securevfl.protocols.sealed.protocol import Deal, ScoreDeal, Seed
from securevfl.protocols.sums.plain import PlainSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum
from securevfl.protocols.wire import Value

T = TypeVar("T")
DEALT = (Seed, Deal, ScoreDeal, *CHECKED_DEALT)
"""What a dealer sends: made of fresh randomness and public numbers alone."""
READABLE = (PlainSum, PlainTreeSum)
"""Sums that hide nothing from those who pass contributions on."""


def machine_of(source: Accounted | Machine) -> Machine:
    """The machine itself."""
    found: Machine = source.machine if isinstance(source, Accounted) else source
    return found


def _of_protocol(node: Node) -> type[Node]:
    """The class of a participant's state; what a role has written itself could make a machine of anything."""
    protocol = getattr(node, "protocol", None)
    parts = [
        each for each in vars(protocol).values() if type(each).__module__ != "builtins" or callable(each)
    ]
    for each in (node, protocol, *parts):
        if not is_shipped(each):
            raise EgressError(f"{type(each).__name__} is not of a protocol that is shipped")
    signing = getattr(node, "authenticator", None)
    if signing is not None and not is_shipped(signing, place="securevfl.network."):
        raise EgressError(f"{type(signing).__name__} does not sign with a certificate")
    return type(node)


def _working(source: Accounted | Machine) -> Machine:
    """The machine itself, if it does what its class says."""
    machine = machine_of(source)
    if not is_shipped(machine):
        raise EgressError(f"{type(machine).__name__} is not a machine of a protocol that is shipped")
    return machine


class Exchange:
    """What one role's machines of one protocol say to the others, and hear from them.

    Args:
        link: The role's link.
        places: Protocol address -> address of the role that plays it.
        read: Checks kind and fields of a message and makes it, as the protocol does.
        channel: Name that tells protocols apart where a link carries several; empty where it carries one.
        totals: Where the organisation's gate keeps the totals of sums; None where no sum is entered here.
    """

    def __init__(
        self,
        link: Link,
        places: Mapping[Address, str],
        read: Callable[[str, dict[str, Value]], Message],
        *,
        channel: str = "",
        totals: Totals | None = None,
    ) -> None:
        self.link, self.places, self.read, self.channel = link, places, read, channel
        self.totals = totals
        self.organisations = tuple(sorted({link.hosts[place] for place in places.values()}))
        self._address_of = {place: address for address, place in places.items()}

    # -- machines -------------------------------------------------------------------------------------------

    def agree(self, node: Node, head: Head) -> Accounted | None:
        """The machine of a participant's key agreement, which has no input; None where there is none.

        Args:
            node: The participant's state.
            head: The sender's newest ledger head.
        """
        machine = _of_protocol(node).setup(node)
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
        if self.totals is None:
            raise EgressError(f"{self.link.address}: nobody knows here who may learn its part of a sum")
        shape = contribution.values.shape
        machine = _of_protocol(node).round(node, contribution.values, round=round, shape=shape)
        # Where those who pass contributions on can read them, they go to those they were written down for.
        readable = isinstance(node.protocol, READABLE)
        observers = contribution.observers if readable else self.organisations
        self.totals.enter(self.channel, round, contribution)
        return Accounted(machine=machine, head=contribution.head, observers=observers, key=_KEY)

    def attend(self, node: Node, *, round: int, shape: tuple[int, ...], head: Head) -> Accounted:  # noqa: A002
        """The machine of a round for a participant without an input.

        Args:
            node: The participant's state.
            round: Number of the round.
            shape: Shape of the total.
            head: The sender's newest ledger head.
        """
        machine = _of_protocol(node).round(node, None, round=round, shape=shape)
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

    async def act(self, source: Accounted | Machine, what: str, *args: Any) -> list[Envelope]:
        """Lets a machine work and sends what it says to others; gives back what is for this role itself.

        Args:
            source: The machine. Nothing but what it says itself is sent in its name.
            what: ``start``, ``receive``, ``proceed`` or ``drop``.
            args: As that takes them.

        Raises:
            EgressError: The machine has an input that no gate has accounted for.
        """
        machine = _working(source)
        here = []
        for envelope in getattr(type(machine), what)(machine, *args):
            if not await self._sent(source, envelope):
                here.append(envelope)
        return here

    async def _sent(self, source: Accounted | Machine, envelope: Envelope) -> bool:
        """Sends what a machine says; False where it is for this role itself."""
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
            await self._act(source, "start")
            await self.started(machine_of(source))
        while not all(machine_of(source).done for source in sources):
            busy = next((each for each in sources if machine_of(each).pending), None)
            if busy is not None:
                await self._act(busy, "proceed")
                continue
            packet, source = await self.next_for(sources)
            await self._act(source, "receive", self.envelope(packet))

    async def _act(self, source: Accounted | Machine, what: str, *args: Any) -> None:
        """As `act`, where the carrier wants long work to be done."""
        machine = _working(source)
        aside = self.link.aside if machine.heavy else None
        for envelope in await (aside or self.work)(getattr(type(machine), what), machine, *args):
            await self._sent(source, envelope)

    async def next_for(self, sources: Sequence[Accounted | Machine]) -> tuple[Packet, Accounted | Machine]:
        """The next message for machines that are followed, and whose it is."""
        return await self.link.receive(), sources[0]

    async def work(self, act: Callable[..., T], *args: Any, **named: Any) -> T:
        """Lets a machine work, here and now."""
        return act(*args, **named)

    async def started(self, machine: Machine) -> None:
        """Called once a machine that is followed has started."""
