"""The talk of sealed training: with the dealer about phases, with all through machines."""

from __future__ import annotations

from securevfl.accountants.records import CHECKED
from securevfl.algorithms.exchange import Exchange
from securevfl.algorithms.messages import SealedBegin, SealedHello, SealedReady
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry
from securevfl.errors import Deviation, ProtocolError
from securevfl.privacy.payloads import Accounted, Link
from securevfl.protocols.contract import DEALER as DEALER_PLACE
from securevfl.protocols.contract import Envelope, Machine
from securevfl.protocols.sealed.messages import Ready
from securevfl.protocols.sealed.protocol import read

ASSUMPTIONS = {
    "semi-honest": (
        "semi-honest: all members follow the protocol; the dealer colludes with nobody and sees no message "
        "between members; masks come from AES-128-CTR; no coalition of more than {} pools what it sees"
    ),
    "malicious": (
        f"{CHECKED}members may do anything, rows and labels are proved and every opening is authenticated; "
        "the dealer follows the protocol, colludes with nobody, sees no message between members and draws "
        "coins only after all are ready; masks come from AES-128-CTR, commitments from SHA-256; no coalition "
        "of more than {} pools what it sees; not promised are a correct or useful model, true rows or "
        "labels, and that a run ends"
    ),
}
"""What must hold for masked values to tell nothing, by the plan's adversary."""


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
        await self.link.send(DEALER, SealedReady(round=machine.round, stage=0))

    async def send(self, source: Accounted | Machine, envelope: Envelope) -> bool:
        """Sends what a machine says; that it is ready goes to the dealer as the public fact that it is."""
        message = envelope.message
        if isinstance(message, Ready):
            await self.link.send(DEALER, SealedReady(round=message.round, stage=message.stage))
            return True
        return await super().send(source, envelope)

    async def follow(self, source: Accounted | Machine) -> None:
        """Follows one machine to its end; a member that deviates is called by its organisation's name.

        Raises:
            Deviation: Somebody does not follow the protocol.
        """
        try:
            await super().follow(source)
        except Deviation as found:
            if not isinstance(found.member, int):
                raise
            raise Deviation(found.how, self.link.hosts[self.places[found.member]]) from None
