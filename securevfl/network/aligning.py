"""How organisations find the records that they all have: one alignment, over the same links as everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from securevfl.algorithms.exchange import Exchange
from securevfl.data.share import own_ids
from securevfl.errors import NetworkError, ProtocolError
from securevfl.network.agreement import CommonDataError
from securevfl.network.participant import Participant
from securevfl.privacy.alignments import alignments_so_far, let_align
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.payloads import Accounted
from securevfl.protocols.alignment.blinded import NotTheSame
from securevfl.protocols.alignment.protocol import HELPED, KINDS, SAME, PrivateAlignment
from securevfl.protocols.contract import HELPER, Address
from securevfl.protocols.wire import Value, pack

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What everybody must mean alike.

    Attributes:
        kind: One of `KINDS`.
        normalise: How IDs are made comparable.
        members: Those with data, the coordinator first.
        helper: Who compares, where somebody does.
    """

    kind: str
    normalise: str
    members: tuple[str, ...]
    helper: str = ""

    def fields(self) -> dict[str, Value]:
        """As fields of a control message."""
        return {
            "way": self.kind,
            "normalise": self.normalise,
            "members": ",".join(self.members),
            "helper": self.helper,
        }

    @classmethod
    def read(cls, fields: dict[str, Any], coordinator: str) -> Arrangement:
        """Reads a control message.

        Raises:
            ProtocolError: It makes no sense.
        """
        members = tuple(fields["members"].split(","))
        found = cls(
            kind=fields["way"], normalise=fields["normalise"], members=members, helper=fields["helper"]
        )
        everybody = found.everybody
        if found.kind not in KINDS or len(members) < 2 or len(set(everybody)) < len(everybody):
            raise ProtocolError(f"{coordinator} asks for an alignment {found.kind!r} of {len(members)}")
        if members[0] != coordinator or bool(found.helper) != (found.kind == HELPED):
            raise ProtocolError(f"{coordinator} asks for an alignment that somebody else leads or helps in")
        return found

    @property
    def everybody(self) -> tuple[str, ...]:
        """Members and helper."""
        return (*self.members, self.helper) if self.helper else self.members

    @property
    def places(self) -> dict[Address, str]:
        """Address in the protocol -> organisation."""
        return {**dict(enumerate(self.members)), **({HELPER: self.helper} if self.helper else {})}


class AligningExchange(Exchange):
    """Machines of an alignment take long over some messages; the connections go on meanwhile."""

    async def work(self, act: Callable[..., T], *args: Any, **named: Any) -> T:
        """In a thread of its own."""
        return await asyncio.to_thread(act, *args, **named)


async def align(
    who: Participant, phase: bytes, arranged: Arrangement, sizes: Mapping[str, int]
) -> list[str] | None:
    """Takes part in an alignment; the common IDs in an order that all know, None at the helper.

    Args:
        who: The organisation.
        phase: Whose messages belong together.
        arranged: What everybody means alike.
        sizes: How many IDs everybody with data has said it will bring.

    Raises:
        BudgetExceeded: The records were aligned as often as they may be.
        CommonDataError: All should have the same IDs, and do not.
        ProtocolError: Somebody breaks the rules, or asks for what this organisation does not take part in.
    """
    limits = who.config.alignment
    if who.name not in arranged.everybody:
        raise ProtocolError(f"an alignment of {', '.join(arranged.everybody)}, without {who.name}")
    if arranged.kind not in limits.kinds:
        raise ProtocolError(f"{who.name} takes part in no alignment of kind {arranged.kind!r}")
    protocol = PrivateAlignment(
        parties=len(arranged.members),
        normalisation=arranged.normalise,
        kind=arranged.kind,
        most=limits.ids,
        sizes=[sizes[name] for name in arranged.members],
        names=arranged.members,
        context=pack("alignment", {"run": who.session, "of": list(arranged.everybody)}),
    )
    with who.mesh.meeting(phase, arranged.everybody) as link:
        exchange = AligningExchange(link, arranged.places, protocol.read)
        if who.name == arranged.helper:
            await _follow(who, exchange, exchange.assist(protocol.machine(HELPER)))
            return None
        ids = own_ids(who.comparable(arranged.normalise))
        signing = who.mesh.authenticator(who.mesh.coordinator, dict(enumerate(arranged.members)), "")
        address = arranged.members.index(who.name)
        machine = await exchange.work(protocol.machine, address, ids, authenticator=signing)
        with _ledger(who) as ledger:
            source = let_align(
                ledger,
                machine,
                way=arranged.kind,
                observers=[name for name in arranged.everybody if name != who.name],
                ids=len(ids),
                most=limits.ids,
                times=limits.times,
                before=alignments_so_far(who.folder.ledger(who.name)),
            )
        try:
            await _follow(who, exchange, source)
        except NotTheSame as error:
            if arranged.kind != SAME:
                raise
            raise CommonDataError(
                f'{", ".join(arranged.members)} do not have exactly the same IDs; set align = "private" to '
                "find the common ones"
            ) from error
        return sorted(ids[row] for row in machine.alignment().rows.tolist())


async def _follow(who: Participant, exchange: Exchange, source: Accounted) -> None:
    """Follows a machine; whoever is there and says nothing ends the alignment, as it would end a phase."""
    seconds = who.config.network.phase_timeout
    try:
        async with asyncio.timeout(seconds or None):
            await exchange.follow(source)
    except TimeoutError as error:
        raise NetworkError(f"the alignment took more than {seconds:g} s; raise phase_timeout") from error


@contextmanager
def _ledger(who: Participant) -> Iterator[Ledger]:
    """The organisation's ledger: the site's, which writes it, or before there is one, the file's."""
    if who.site is not None and who.site.gate is not None:
        yield who.site.gate.ledger
        return
    with closing(Ledger(who.name, who.folder.ledger(who.name))) as ledger:
        yield ledger
