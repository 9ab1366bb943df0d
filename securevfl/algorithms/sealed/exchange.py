"""The talk of sealed training: with the dealer about phases, with all through machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from securevfl.accountants.records import CHECKED
from securevfl.algorithms.exchange import Exchange, machine_of
from securevfl.algorithms.messages import SealedBegin, SealedHello, SealedReady
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry
from securevfl.errors import Deviation, ProtocolError, RunError
from securevfl.privacy.gate import Gate
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Accounted, Link
from securevfl.privacy.rows import Rows
from securevfl.privacy.schemas import MESSAGES
from securevfl.protocols.contract import DEALER as DEALER_PLACE
from securevfl.protocols.contract import Envelope, Machine
from securevfl.protocols.sealed.encrypted import EncryptedParty
from securevfl.protocols.sealed.kernel import DIGEST
from securevfl.protocols.sealed.messages import Ready
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import DEALT, ENCRYPTED, THIRD, SealedProtocol, read
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.settings.plan import Plan

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
    THIRD: (
        "semi-honest, without a dealer: all members follow the protocol, and no two of them pool what they "
        "see, for any two know everything of the others; masks come from AES-128-CTR"
    ),
    ENCRYPTED: (
        "semi-honest, without a dealer: both members follow the protocol; rows and masks are encrypted with "
        "BFV (RLWE, degree 8192, 218 bits: 128-bit security), answers are re-randomised and flooded, "
        "which takes at most a hundredth of delta; random words come from AES-128-CTR; residuals are bounded "
        f"by tables {DIGEST[:16]}"
    ),
}
"""What must hold for masked values to tell nothing, by adversary; without a dealer, by who deals."""
AHEAD = 64
"""Messages of one member that may wait for their turn: nobody is more than a round ahead of anybody."""


class SealedExchange(Exchange):
    """One role's messages, and of a member the number of the next round.

    Args:
        link: The role's link.
        settings: What all roles agree on.
        gate: A member's: its ledger notes who was seen not to follow the protocol.
    """

    def __init__(self, link: Link, settings: SealedGeometry, gate: Gate | None = None) -> None:
        self._gate = gate
        self._dealt = settings.dealing == DEALT
        places: dict[int, str] = dict(enumerate(settings.members))
        super().__init__(link, places | ({DEALER_PLACE: DEALER} if self._dealt else {}), read)
        self._round = 0
        self._early: list[Packet] = []

    @property
    def index(self) -> int:
        """The member's place in the protocol."""
        return self._address_of[self.link.address]

    async def begin(self, *, session: bool) -> bool:
        """Starts a phase; returns whether masks are dealt anew.

        Args:
            session: Whether this member still has the masks of the last phase.
        """
        if not self._dealt:
            return await self._begin_among_members(session)
        await self.link.send(DEALER, SealedHello(round=self._round, session=session))
        message = await self.link.receive()
        if message.kind != SealedBegin.kind or message["round"] < 0:
            raise ProtocolError(
                f"{self.link.address} received {message.kind!r} from {message.sender} out of turn"
            )
        self._round = int(message["round"])
        return bool(message["fresh"])

    async def _begin_among_members(self, session: bool) -> bool:
        """All go on above every round that anybody has used, anew unless everybody has its masks."""
        others = {name for name in self.places.values() if name != self.link.address}
        for other in sorted(others):
            await self.link.send(other, SealedHello(round=self._round, session=session))
        heard: dict[str, Packet] = {}
        while len(heard) < len(others):
            message = await self.hear(SealedHello.kind)
            if message.sender not in others or message.sender in heard or message["round"] < 0:
                raise ProtocolError(f"{message.sender} begins a phase out of turn")
            heard[message.sender] = message
        self._round = max(self._round, *(int(each["round"]) for each in heard.values()))
        return not (session and all(each["session"] for each in heard.values()))

    async def receive(self) -> Packet:
        """The next message, whatever it is."""
        return await self._next(lambda packet: True)

    async def hear(self, kind: str) -> Packet:
        """The next message of a kind; what others have sent ahead of it waits for its turn."""
        return await self._next(lambda packet: packet.kind == kind)

    async def _next(self, fits: Callable[[Packet], bool]) -> Packet:
        for place, packet in enumerate(self._early):
            if fits(packet):
                self.link.let_go(packet)
                return self._early.pop(place)
        while not fits(packet := await self.link.receive()):
            if self._dealt:
                raise ProtocolError(
                    f"{self.link.address} received {packet.kind!r} from {packet.sender} out of turn"
                )
            self._early.append(packet)
            self.link.hold(packet)
            if sum(each.sender == packet.sender for each in self._early) > AHEAD:
                raise ProtocolError(f"{packet.sender} sends {packet.kind!r} long before its turn")
        return packet

    async def next_for(self, sources: Sequence[Accounted | Machine]) -> tuple[Packet, Accounted | Machine]:
        """The next message for one of the machines; without a dealer others may be a round or phase ahead."""
        if self._dealt:
            return await super().next_for(sources)

        def taker(packet: Packet) -> Accounted | Machine | None:
            if not MESSAGES[packet.kind].of_machine:
                return None
            return next((each for each in sources if _awaits(machine_of(each), packet)), None)

        packet = await self._next(lambda packet: taker(packet) is not None)
        return packet, taker(packet) or sources[0]

    @property
    def round(self) -> int:
        """The number that the next round gets."""
        return self._round

    def next_round(self) -> int:
        """A number that no round has had."""
        self._round += 1
        return self._round - 1

    async def started(self, machine: Machine) -> None:
        """Tells the dealer that this member is ready."""
        if self._dealt:
            await self.link.send(DEALER, SealedReady(round=machine.round, stage=0))

    async def _sent(self, source: Accounted | Machine, envelope: Envelope) -> bool:
        """Sends what a machine says; that it is ready goes to the dealer as the public fact that it is."""
        message = envelope.message
        if isinstance(message, Ready):
            await self.link.send(DEALER, SealedReady(round=message.round, stage=message.stage))
            return True
        return await super()._sent(source, envelope)

    async def follow(self, *sources: Accounted | Machine) -> None:
        """Follows machines to their end; a member that deviates is called by its organisation's name.

        Raises:
            Deviation: Somebody does not follow the protocol.
        """
        try:
            await super().follow(*sources)
        except Deviation as found:
            named = found.member
            member = self.link.hosts[self.places[named]] if isinstance(named, int) else named
            if self._gate is not None:
                with suppress(RunError):  # a full disk hides nothing: whoever runs this is told below
                    self._gate.ledger.note_deviation(member=member or "", how=found.how)
            raise Deviation(found.how, member) from None


def _awaits(machine: Machine, packet: Packet) -> bool:
    return not isinstance(machine, SealedMachine) or machine.awaits(packet.kind, packet.fields)


def hidden(
    exchange: SealedExchange, gate: Gate, machine: Machine, protocol: SealedProtocol, plan: Plan
) -> Accounted:
    """A machine that hands out what masks or ciphertexts hide, written down with what that rests on."""
    named = plan.settings.adversary if protocol.dealing == DEALT else protocol.dealing
    hosts = {exchange.link.hosts[place] for at, place in exchange.places.items() if at != DEALER_PLACE}
    return gate.hide(
        machine,
        mechanism="encrypted" if protocol.dealing == ENCRYPTED else "masked",
        observers=tuple(sorted(hosts - {gate.owner})),
        assumption=ASSUMPTIONS[named].format(plan.collusion),
    )


def ahead(
    exchange: SealedExchange,
    gate: Gate,
    party: SealedParty,
    rounds: Sequence[tuple[int, Rows | None]],
    plan: Plan,
) -> list[Accounted]:
    """What makes ahead of time what rounds need; nothing where others deal in the round."""
    if not isinstance(party, EncryptedParty) or not rounds:
        return []
    return [hidden(exchange, gate, party.prepare(rounds), party.protocol, plan)]
