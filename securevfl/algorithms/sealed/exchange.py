"""A member's side of the talk in sealed training: with the dealer about phases, with all through machines."""

from __future__ import annotations

from securevfl.algorithms.sealed.settings import DEALER, SealedSettings
from securevfl.errors import ProtocolError
from securevfl.privacy.messages import Head, Link, Packet
from securevfl.protocols.contract import DEALER as DEALER_PLACE
from securevfl.protocols.contract import Envelope, Machine
from securevfl.protocols.sealed.protocol import read

HELLO, BEGIN, READY = "sealed-hello", "sealed-begin", "sealed-ready"
ASSUMPTION = (
    "the dealer colludes with nobody and sees no message between members; masks come from AES-128-CTR; all "
    "follow the protocol, and no coalition of more than {} pools what it sees"
)


class Exchange:
    """One member's messages, and the number of the next round.

    Args:
        link: The member's link.
        settings: What all roles agree on.
        address: The member's address.
    """

    def __init__(self, link: Link, settings: SealedSettings, address: str) -> None:
        self.link, self.settings, self.address = link, settings, address
        self.index = settings.members.index(address)
        self._round = 0

    async def begin(self, *, session: bool) -> bool:
        """Starts a phase; returns whether masks are dealt anew.

        Args:
            session: Whether this member still has the masks of the last phase.
        """
        await self.link.send(DEALER, HELLO, {"round": self._round, "session": session})
        message = await self.link.receive()
        if message.kind != BEGIN or message.sender != DEALER or message["round"] < 0:
            raise ProtocolError(f"{self.address} received {message.kind!r} from {message.sender} out of turn")
        self._round = int(message["round"])
        return bool(message["fresh"])

    def next_round(self) -> int:
        """A number that no round has had."""
        self._round += 1
        return self._round - 1

    async def follow(self, machine: Machine, head: Head | None) -> None:
        """Tells the dealer that this member is ready, then follows the machine to its end."""
        for envelope in machine.start():
            await self._send(envelope, head)
        await self.link.send(DEALER, READY, {"round": machine.round})
        while not machine.done:
            message = await self.link.receive()
            for envelope in machine.receive(self._envelope(message)):
                await self._send(envelope, head)

    async def _send(self, envelope: Envelope, head: Head | None) -> None:
        receiver = self.settings.members[envelope.receiver]
        await self.link.send(receiver, envelope.message.kind, dict(vars(envelope.message)), head)

    def _envelope(self, message: Packet) -> Envelope:
        places = {name: place for place, name in enumerate(self.settings.members)} | {DEALER: DEALER_PLACE}
        if message.sender not in places:
            raise ProtocolError(f"{self.address} received {message.kind!r} from {message.sender}")
        return Envelope(places[message.sender], self.index, read(message.kind, dict(message.fields)))
