"""How everybody comes together: joining, introductions, the common records, and what is agreed on."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from securevfl.errors import NOTICES, BudgetExceeded, DataError, ProtocolError, SecureVFLError
from securevfl.network.agreement import CommonDataError, Facts, Invitation
from securevfl.network.aligning import Arrangement, align
from securevfl.network.config import ServerConfig
from securevfl.network.consent import agreement_lines
from securevfl.network.folders import commitment
from securevfl.network.frames import PHASE_BYTES, ROUND_BYTES
from securevfl.network.participant import (
    Participant,
    PeerStops,
    Purpose,
    Restarted,
    Unforeseen,
    understanding,
)
from securevfl.network.relay import Introduction, read_introduction
from securevfl.protocols.alignment.protocol import HELPED

log = logging.getLogger("securevfl.network")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """An organisation that has joined, as its process introduced itself."""

    facts: Facts
    introduction: Introduction
    aligned: str
    checkpoints: tuple[int, ...]


class Gathering(Participant):
    """The coordinator's process until everybody has agreed; and again when somebody comes back.

    Args:
        config: Its configuration.
        purpose: What everybody comes together for.
        say: Called with what a person at the terminal should know.
    """

    config: ServerConfig

    def __init__(self, config: ServerConfig, purpose: Purpose, say: Callable[[str], None]) -> None:
        super().__init__(config, purpose, coordinator=config.identity.name, others=config.others)
        self.say = say
        self.joined: dict[str, Joined] = {}
        self.members = tuple(config.others)
        self.away: set[str] = set()
        self.anew: set[str] = set()
        self.mesh.on_restart = self._restart
        self._round = b""

    def _restart(self, peer: str) -> None:
        self.joined.pop(peer, None)
        self.anew.add(peer)
        self.mesh.control.put_nowait((peer, "restarted", {}))

    async def gather(self) -> None:
        """Brings everybody together: nobody goes on before all have confirmed the same understanding."""
        self.away.clear()
        await self._join()
        await self._introduce()
        await self._invite()
        await self._align()
        await self._agree()
        self.anew.clear()

    # -- control messages -----------------------------------------------------------------------------------

    async def collect(self, kind: str, who: Collection[str], **match: Any) -> dict[str, dict[str, Any]]:
        """One control message of a kind from each that is not away; what breaks the run off is raised."""
        found: dict[str, dict[str, Any]] = {}
        while set(who) - set(found) - self.away:
            peer, got, fields = await self.next_control()
            if got in ("away", "restarted") and self.goes_on_without(peer, back=got == "restarted"):
                continue
            self.check_event(peer, got, fields)
            fits = all(fields.get(key) == value for key, value in match.items())
            if got == kind and peer in who and peer not in found and fits:
                found[peer] = fields
        return found

    def goes_on_without(self, peer: str, *, back: bool) -> bool:
        """Whether the others go on while one is away; here they wait for it.

        Args:
            peer: Who is away.
            back: True if it has come back as a new process.
        """
        if not back:
            log.warning("waiting for", extra={"peer": peer})
            limit = f" for up to {self.patience:g} s" if math.isfinite(self.patience) else ""
            self.say(f"{peer} is away; waiting for it{limit}")
        return False

    def check_event(self, peer: str, kind: str, fields: dict[str, Any]) -> None:
        """Takes up who joins; what breaks the run off is raised."""
        if kind == "restarted":
            raise Restarted(f"{peer} has started anew")
        if kind == "failed":
            raise PeerStops(peer, str(fields["reason"]))
        if kind == "refused" and fields["phase"] == self.mesh.last_phase:
            raise BudgetExceeded(f"{peer}: {NOTICES['budget']}")
        if kind == "join":
            with understanding(peer, kind):
                self._take_join(peer, fields)

    def _take_join(self, peer: str, fields: dict[str, Any]) -> None:
        if peer in self.joined:  # what it says of its table may be large, and is read while others wait
            raise ProtocolError(f"{peer} joins twice; a process joins once")
        introduction = read_introduction(fields)
        introduction.check(self.session, self.config.identity)
        if introduction.name != peer:
            raise ProtocolError(f"{peer} introduces itself as another")
        if introduction.incarnation != self.mesh.sessions[peer].incarnation:
            return  # it has restarted since, and will join again
        facts = Facts.from_json(str(fields.get("facts")))
        if (facts.columns == 0) != (peer not in self.config.parties):
            raise CommonDataError(f"{peer} brings {facts.columns} columns; a party needs some, a helper none")
        self.joined[peer] = Joined(
            facts=facts,
            introduction=introduction,
            aligned=str(fields.get("aligned")),
            checkpoints=tuple(fields["checkpoints"]),
        )
        log.info("joined", extra={"peer": peer})
        self.say(f"{peer} has joined")

    # -- joining --------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Waits until everybody has joined, as the process that is connected now."""
        self.part = "gathering"
        self.comparable(self.config.normalise)
        while set(self.joined) != set(self.members):
            peer, kind, fields = await self.next_control()
            if kind != "restarted":
                self.check_event(peer, kind, fields)

    async def _introduce(self) -> None:
        """Everybody learns who the others are now, and reaches those that can be reached."""
        self.mesh.introduce(each.introduction for each in self.joined.values())
        for each in (self.mesh.introducer.introduction, *(j.introduction for j in self.joined.values())):
            self.mesh.tell_all("introduction", **each.fields())
        self._round = secrets.token_bytes(ROUND_BYTES)
        self.mesh.tell_all("meet", round=self._round, away=",".join(sorted(self.away)))
        await self.collect("met", self.members, round=self._round)

    async def _invite(self) -> None:
        """Everybody consents to who takes part and how records are compared, before any are."""
        invitation = Invitation(
            run=self.config.run,
            purpose=self.purpose.name,
            members=self.keys((self.name, *self.members)),
            kind=self.config.align,
            normalise=self.config.normalise,
            sizes=self._sizes(),
        )
        self.part, self.mesh.agreement = "inviting", ""
        self.mesh.tell_all("invite", round=self._round, invitation=invitation.to_json())
        await self.collect("invited", self.members, round=self._round)

    def _sizes(self) -> dict[str, int]:
        """How many IDs everybody with data brings."""
        others = {name: self.joined[name].facts.records for name in self.config.parties}
        return {self.name: 0 if self.own is None else len(self.own.ids), **others}

    # -- the common records ---------------------------------------------------------------------------------

    async def _align(self) -> None:
        """Finds the common IDs, unless everybody remembers them."""
        if self.own is None:
            raise DataError("the coordinator has no data")
        with_data = [name for name in self.members if name in self.config.parties]
        ids = self.purpose.remembered(self)
        mark = "" if ids is None else commitment(self.session, ids)
        if ids is None or any(self.joined[name].aligned != mark for name in with_data):
            self.part = "aligning"
            ids = await self._align_all(with_data)
            if not ids:
                raise CommonDataError("the organisations have no ID in common")
            self.say(f"{len(ids)} of {len(self.own.ids)} records are common to all")
        self.purpose.take_ids(self, ids, leads=True)
        for name in with_data if self.purpose.numbers else ():
            self.mesh.tell(name, "records", numbers=list(self.purpose.numbers), salt=self.purpose.salt)

    async def _align_all(self, with_data: list[str]) -> list[str]:
        """Has everybody with data, and the helper where there is one, find the common IDs."""
        config, phase = self.config, secrets.token_bytes(PHASE_BYTES)
        helper = config.comparing if config.align == HELPED else ""
        arranged = Arrangement(
            kind=config.align, normalise=config.normalise, members=(self.name, *with_data), helper=helper
        )
        for name in arranged.everybody[1:]:
            self.mesh.tell(name, "align", phase=phase, **arranged.fields())
        task = asyncio.create_task(align(self, phase, arranged, self._sizes()))
        task.add_done_callback(lambda done: self._tell_own("aligned", phase, done))
        try:
            await self.collect("aligned", arranged.everybody, phase=phase)
        except BaseException:
            await self.stop_task(task)
            raise
        return task.result() or []

    def _tell_own(self, kind: str, phase: bytes, task: asyncio.Task[Any]) -> None:
        """What runs here has ended: as if this organisation, like the others, had told the coordinator."""
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.mesh.control.put_nowait((self.name, kind, {"phase": phase}))
        elif isinstance(error, SecureVFLError):
            self.mesh.control.put_nowait(error)
        else:
            self.mesh.control.put_nowait(Unforeseen(f"{self.part} fails at {self.name}", error))

    # -- the agreement --------------------------------------------------------------------------------------

    async def _agree(self) -> None:
        """Proposes, and waits until everybody has confirmed the same understanding of it."""
        self.part = "agreeing"
        facts = {name: self.joined[name].facts for name in self.config.parties}
        agreement = self.purpose.propose(self, facts)
        if not self.purpose.confirmed(self, agreement):
            for line in agreement_lines(agreement, self.name):
                self.say(line)
        self.agreement = agreement
        await self.confirm(self.members)

    async def confirm(self, who: Collection[str]) -> None:
        """Has organisations confirm the agreement; nobody takes part before it has."""
        agreement = self.agreement
        if agreement is None:
            raise ProtocolError("there is nothing to agree on yet")
        self.mesh.agreement = agreement.digest
        own = agreement.sign(self.config.identity)
        await self._propose(who, agreement.proposal.to_json(), agreement.digest, own)
        self.take_signatures(agreement, {**self.signatures, self.name: own})
        for name in who:
            self.mesh.tell(name, "agreed", digest=agreement.digest, signatures=json.dumps(self.signatures))

    async def _propose(self, who: Collection[str], proposal: str, digest: str, signature: str) -> None:
        for name in who:
            self.mesh.tell(name, "propose", proposal=proposal, digest=digest, signature=signature)
        answers = await self.collect("confirmed", who, digest=digest)
        self.signatures |= {name: str(fields["signature"]) for name, fields in answers.items()}
