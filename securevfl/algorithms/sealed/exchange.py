"""The talk of sealed training: with the dealer about phases, with all through machines."""

from __future__ import annotations

from securevfl.algorithms.exchange import Exchange
from securevfl.algorithms.messages import SealedBegin, SealedHello, SealedReady
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry
from securevfl.errors import ProtocolError
from securevfl.privacy.payloads import Link
from securevfl.protocols.contract import DEALER as DEALER_PLACE
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed.protocol import read

ASSUMPTION = (
    "the dealer colludes with nobody and sees no message between members; masks come from AES-128-CTR; all "
    "follow the protocol, and no coalition of more than {} pools what it sees"
)


class SealedExchange(Exchange):
    """One role's messages, and of a member the number of the next round.

    Args:
        link: The role's link.
        settings: What all roles agree on.
    """

    def __init__(self, link: Link, settings: SealedGeometry) -> None:
        super().__init__(link, {**dict(enumerate(settings.members)), DEALER_PLACE: DEALER}, read)
        self._round = 0

    @property
    def index(self) -> int:
        """The member's place in the protocol."""
        return self._address_of[self.link.address]

    async def begin(self, *, session: bool) -> bool:
        """Starts a phase; returns whether masks are dealt anew.

        Args:
            session: Whether this member still has the masks of the last phase.
        """
        await self.link.send(DEALER, SealedHello(round=self._round, session=session))
        message = await self.link.receive()
        if message.kind != SealedBegin.kind or message["round"] < 0:
            raise ProtocolError(
                f"{self.link.address} received {message.kind!r} from {message.sender} out of turn"
            )
        self._round = int(message["round"])
        return bool(message["fresh"])

    def next_round(self) -> int:
        """A number that no round has had."""
        self._round += 1
        return self._round - 1

    async def started(self, machine: Machine) -> None:
        """Tells the dealer that this member is ready."""
        await self.link.send(DEALER, SealedReady(round=machine.round))
