"""Any organisation but the coordinator: joins, confirms, and runs its roles when a phase begins."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature

from securevfl.algorithms.prediction import KIND
from securevfl.data.share import OwnTable
from securevfl.errors import (
    AgreementError,
    BudgetExceeded,
    InputError,
    NetworkError,
    ProtocolError,
    SecureVFLError,
    readable,
)
from securevfl.federation.site import PARTS, complete_checkpoints
from securevfl.files import append_line, read_json, write_json
from securevfl.network.agreement import Agreement, Facts, Invitation
from securevfl.network.aligning import Arrangement, align
from securevfl.network.config import PartyConfig
from securevfl.network.consent import agreement_lines, invitation_lines
from securevfl.network.folders import EVIDENCE_FILE, commitment
from securevfl.network.frames import MAX_CHECKPOINTS, STAY, in_words
from securevfl.network.participant import (
    NotAccepted,
    Participant,
    Purpose,
    Stopped,
    Unforeseen,
    understanding,
)
from securevfl.network.relay import Introduction, read_introduction
from securevfl.network.signing import phase_statement, verify
from securevfl.network.training import Training
from securevfl.privacy.chain import LedgerReader

log = logging.getLogger("securevfl.network")
MEETING_SECONDS = 60.0
LAST_CALL = 10.0
"""Seconds that an organisation that has its result tries to tell a coordinator that may still wait for it."""


EVIDENCE_BYTES = 16 << 20
"""Bytes of what was refused after which only signed phases are added."""
LONGEST_KEPT = 1 << 16
"""Letters of one text that was refused that are kept; of a longer one its digest is."""


Confirm = Callable[[str], Awaitable[bool]]
"""Asks a person a question; meanwhile the process must go on talking to the others and hear a stop."""


def _kept(value: Any) -> Any:
    """What is kept of a field of a message that was refused."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str) and len(value) > LONGEST_KEPT:
        return f"{len(value):,} letters, SHA-256 {hashlib.sha256(value.encode()).hexdigest()}"
    return f"{len(value):,} values" if isinstance(value, list) and len(value) > MAX_CHECKPOINTS else value


async def refuse(question: str) -> bool:
    """Where nobody can be asked, nothing is accepted."""
    return False


class Member(Participant):
    """A party's or helper's process.

    Args:
        config: Its configuration.
        purpose: What it has come for; training if it is left out.
        confirm: Asked whether an agreement is accepted, where the configuration has no rules for that.
        say: Called with what a person at the terminal should know.
    """

    config: PartyConfig

    def __init__(
        self,
        config: PartyConfig,
        purpose: Purpose | None = None,
        *,
        confirm: Confirm = refuse,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        others = (config.coordinator,)
        super().__init__(config, purpose or Training(), coordinator=config.coordinator, others=others)
        self.confirm, self.say = confirm, say
        self.mesh.on_restart = self._restart
        self.mesh.on_trouble = self._trouble
        self._introductions: dict[str, Introduction] = {}
        self._invitation: Invitation | None = None
        self._aligned_for: Invitation | None = None
        self._heard: tuple[str, dict[str, Any]] = ("", {})
        self._result: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def is_needed(self, peer: str) -> bool:
        """Only the coordinator; how others are reached is for the phases to find out."""
        return peer == self.config.coordinator

    def _trouble(self, peer: str, reason: str) -> None:
        self.say(f"{peer} cannot be reached yet ({reason}); trying again")

    def _restart(self, peer: str) -> None:
        if peer == self.config.coordinator:
            self.mesh.control.put_nowait((peer, "restarted", {}))

    async def _live(self) -> dict[str, Any]:
        """Takes part until the run ends."""
        if self.config.listen:
            await self.mesh.transport.listen(self.config.listen)
        self.mesh.transport.dial(self.config.coordinator, self.config.address)
        watch = asyncio.create_task(self.watch())
        self._join()
        try:
            while True:
                _, kind, fields = await self.next_control()
                self._heard = kind, fields
                with understanding(self.config.coordinator, kind):
                    result = await self._handle(kind, fields)
                if result is not None:
                    return result
        except NetworkError as error:
            if self._result is not None:  # all that is missing is the coordinator's goodbye
                return self._result
            if self.mesh.sessions[self.config.coordinator].connected and not isinstance(error, Stopped):
                await self._tell_failure(error)  # another peer refuses or breaks the rules
            raise
        except SecureVFLError as error:
            if isinstance(error, AgreementError):
                self._witness(error)
            await self._tell_failure(error)
            raise
        finally:
            await self.stop_task(self._task)
            watch.cancel()
            await self.close()

    def _open(self) -> None:
        self._result = self.purpose.open(self, leads=False)
        if self._result is not None:
            self.patience = min(self.patience, LAST_CALL)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.mesh.tell(self.config.coordinator, kind, **fields)

    async def _tell_failure(self, error: SecureVFLError) -> None:
        self._tell("failed", reason=error.notice)
        for _ in range(20):
            await asyncio.sleep(0.05)
            if not self.mesh.sessions[self.config.coordinator].waiting:
                return

    def _join(self) -> None:
        known = self.purpose.remembered(self)
        self._tell(
            "join",
            facts=Facts.of(self.own).to_json(),
            aligned="" if known is None else commitment(self.session, known),
            checkpoints=complete_checkpoints(self.folder),
            finished=self._result is not None,
            **self.mesh.introducer.introduction.fields(),
        )

    # -- control messages -----------------------------------------------------------------------------------

    async def _handle(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Does what a control message asks for; the result once the run has ended."""
        match kind:
            case "away":
                pass
            case "restarted":
                await self._start_over()
            case "introduction":
                self._hear_of(read_introduction(fields))
            case "meet":
                await self._begin_meeting(fields["round"], fields["away"].split(","))
            case "invite":
                await self._consider_invitation(fields)
            case "align":
                await self._begin_alignment(fields)
            case "records":
                self.purpose.take_numbers(self, fields["numbers"], fields["salt"])
            case "propose":
                await self._consider(fields)
            case "agreed":
                self._take_agreement(fields)
            case "begin":
                await self._begin(fields)
            case "abort":
                await self._abort(fields)
            case "stop":
                mend = "; what was done is kept, mend that before everybody starts again"
                why = f"{readable(fields['about'], 63)}: {in_words(fields['reason'])}"
                raise Stopped(f"the coordinator stops: {why}{'' if fields['again'] else mend}")
            case "finish":
                self._finish(fields)
            case "goodbye":
                return self._result
            case _:
                raise ProtocolError(f"the coordinator sends {kind!r}, which this version does not know")
        return None

    async def _start_over(self) -> None:
        """The coordinator is a new process: what runs here is void, and this organisation joins again."""
        self.purpose.check_restart(f"{self.config.coordinator} has started anew")
        self.say(f"{self.config.coordinator} has started anew")
        await self.stop_task(self._task)
        self._introductions.clear()
        self._join()

    def _hear_of(self, other: Introduction) -> None:
        """Keeps one introduction of each that can sign one, so that there is an end to them."""
        if other.name == self.name:
            return
        if other != self.mesh.introductions.get(other.name):
            other.check(self.session, self.config.identity)
        self._introductions[other.name] = other

    async def _begin_meeting(self, round_: bytes, away: Collection[str]) -> None:
        """Takes up who the others are; a newer meeting, for one who has restarted, replaces this one."""
        await self.stop_task(self._task)
        for name in self._introductions:
            self.mesh.expect(name)
        self.mesh.introduce(self._introductions.values())
        self._introductions.clear()
        self._task = asyncio.create_task(self._reporting(self._meet(round_, away)))

    async def _meet(self, round_: bytes, away: Collection[str]) -> None:
        """Connects to those that can be reached and are not away."""
        try:
            async with asyncio.timeout(MEETING_SECONDS):
                await self.mesh.settled(away)
        except TimeoutError as error:
            raise InputError(f"{self.name} cannot reach {', '.join(self.mesh.unsettled(away))}") from error
        self._tell("met", round=round_)

    async def _reporting(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work beside the control messages; what goes wrong in it ends this process's part."""
        try:
            await work
        except SecureVFLError as error:
            self.mesh.control.put_nowait(error)
        except Exception as error:
            self.mesh.control.put_nowait(Unforeseen(f"{self.part} fails at {self.name}", error))

    # -- alignment and agreement ----------------------------------------------------------------------------

    def comparable(self, way: str) -> OwnTable:
        """See `Participant.comparable`.

        Raises:
            ProtocolError: IDs may not be compared that way.
        """
        self.purpose.check_comparison(self, way)
        return super().comparable(way)

    async def _consider_invitation(self, fields: dict[str, Any]) -> None:
        """Looks at who invites whom to what; nothing is compared before this organisation has consented."""
        invitation = Invitation.from_json(fields["invitation"])
        self._check_invitation(invitation)
        if not (self.purpose.has_agreed() and vars(invitation) == self._invited_before()):
            accept = self.config.accept
            for line in invitation_lines(invitation, self.name):
                self.say(line)
            objection = "" if accept is None else accept.objection_to_invitation(invitation, self.name)
            await self._decide("the invitation", objection, f"Join {invitation.run!r} with these?")
        self._invitation, self.mesh.agreement = invitation, ""
        self._tell("invited", round=fields["round"])

    @property
    def _invitation_file(self) -> Path:
        return self.folder.path / f"invitation{self.purpose.suffix.replace('/', '-')}.json"

    def _invited_before(self) -> Any:
        """The invitation to what was agreed on in this folder; another one is another question."""
        return read_json(self._invitation_file) if self._invitation_file.is_file() else None

    def _check_invitation(self, invitation: Invitation) -> None:
        own = len(self.own.ids) if self.own is not None else None
        if (invitation.run, invitation.purpose) != (self.config.run, self.purpose.name):
            raise AgreementError(f"an invitation to {invitation.purpose} in run {invitation.run!r}")
        if (
            next(iter(invitation.members), "") != self.config.coordinator
            or self.name not in invitation.members
        ):
            raise AgreementError(f"an invitation without {self.name}, or led by somebody else")
        if invitation.members != self.keys(invitation.members):
            raise AgreementError("an invitation with other keys than everybody has introduced itself with")
        if invitation.sizes.get(self.name) != own:
            raise AgreementError(f"an invitation that says {self.name} brings other records")

    async def _begin_alignment(self, fields: dict[str, Any]) -> None:
        """A newer alignment, for one who has restarted, replaces this one."""
        arranged, invited = Arrangement.read(fields, self.config.coordinator), self._invitation
        if invited is None or (arranged.kind, arranged.normalise) != (invited.kind, invited.normalise):
            raise AgreementError(f"an alignment {arranged.kind!r}, to which {self.name} was not invited")
        if set(arranged.members) != set(invited.sizes) or not set(arranged.everybody) <= set(invited.members):
            raise AgreementError("an alignment of others than were invited")
        if self._aligned_for is invited:
            raise AgreementError(f"a second alignment for one invitation; {self.name} consents to each")
        self._aligned_for = invited
        await self.stop_task(self._task)
        work = self._align(fields["phase"], arranged, invited.sizes)
        self._task = asyncio.create_task(self._reporting(work))

    async def _align(self, phase: bytes, arranged: Arrangement, sizes: Mapping[str, int]) -> None:
        self.part = "aligning"
        ids = await align(self, phase, arranged, sizes)
        if ids is not None:
            self.purpose.take_ids(self, ids, leads=False)
            self.say(f"{len(ids)} of {len(self.own.ids) if self.own else 0} records are common to all")
        self._tell("aligned", phase=phase)

    async def _consider(self, fields: dict[str, Any]) -> None:
        """Compares what is proposed with what is known here; asks for confirmation if none was given."""
        agreement = self.purpose.understand(self, str(fields["proposal"]))
        self._check_members(agreement)
        if agreement.digest != fields["digest"]:
            raise AgreementError(
                f"{self.config.coordinator} understands {self.purpose.what} as {fields['digest']}, "
                f"{self.name} as {agreement.digest}; are both on the same version, and the same run?"
            )
        if not self.purpose.confirmed(self, agreement):
            for line in agreement_lines(agreement, self.name):
                self.say(line)
            accept = self.config.accept
            objection = "" if accept is None else accept.objection(agreement, self.name, self._scored())
            await self._decide(self.purpose.what, objection, f"Take part as agreed ({agreement.digest})?")
        self.purpose.keep(self, agreement)
        if self.purpose.has_agreed() and self._invitation is not None:
            write_json(self._invitation_file, vars(self._invitation))
        self.agreement, self.mesh.agreement = agreement, agreement.digest
        signature = agreement.sign(self.config.identity)
        self._tell("confirmed", digest=agreement.digest, signature=signature)

    def _check_members(self, agreement: Agreement) -> None:
        members = agreement.members
        if next(iter(members), "") != self.config.coordinator or members != self.keys(members):
            raise AgreementError("the proposal is of others than have introduced themselves")
        if self._invitation is None and not self.purpose.has_agreed():
            raise AgreementError(f"a proposal to which {self.name} was not invited")
        if self._invitation is not None and members != self._invitation.members:
            raise AgreementError("the proposal is of others than were invited")
        with_data = {*agreement.outline.parties, agreement.outline.label_holder}
        if self._invitation is not None and with_data != set(self._invitation.sizes):
            raise AgreementError("the proposal has features of others than compared their records")

    async def _decide(self, what: str, objection: str, question: str) -> None:
        """Goes by the rules, or asks where there are none."""
        if objection:
            raise NotAccepted(f"{self.name} does not accept {what}: {objection}")
        if self.config.accept is None and not await self.confirm(question):
            raise NotAccepted(f"{self.name} does not accept {what}")

    def _scored(self) -> int:
        """How many records were scored with the model before, by this organisation's ledger."""
        path = self.folder.ledger(self.name)
        entries = LedgerReader(path, thorough=False).entries(KIND) if path.exists() else ()
        return sum(int(each.content["vectors"]) for each in entries)

    def _take_agreement(self, fields: dict[str, Any]) -> None:
        if self.agreement is None or fields["digest"] != self.agreement.digest:
            what = self.purpose.what
            raise AgreementError(f"the coordinator announces {what}, which was not confirmed here")
        self.take_signatures(
            self.agreement, {str(k): str(v) for k, v in json.loads(fields["signatures"]).items()}
        )

    def _witness(self, error: SecureVFLError) -> None:
        """Keeps what was asked for and not agreed on, with the signature of whoever asked.

        A proposal may have 64 MB, and whoever is started again is asked again: what nobody has signed is kept
        short, and only while there is room. Phases prove something, and always are.
        """
        path, (kind, fields) = self.folder.path / EVIDENCE_FILE, self._heard
        if kind != "begin" and path.exists() and path.stat().st_size > EVIDENCE_BYTES:
            log.warning("evidence is full", extra={"reason": str(error)})
            return
        asked = {key: _kept(value) for key, value in fields.items()}
        line = {"reason": str(error)[:LONGEST_KEPT], "by": self.config.coordinator, "asked": kind, **asked}
        line["agreement"] = self.mesh.agreement
        append_line(path, json.dumps(line))

    # -- phases ---------------------------------------------------------------------------------------------

    async def _begin(self, fields: dict[str, Any]) -> None:
        if self.site is None:
            raise ProtocolError("a phase begins before there is an agreement")
        phase, part, epoch, restore = (fields[key] for key in ("phase", "part", "epoch", "restore"))
        if part not in PARTS or epoch < 0 or restore < STAY:
            raise AgreementError(f"the coordinator begins {part!r} of epoch {epoch}, going back to {restore}")
        self._check_signed(fields)
        self.purpose.begin()
        await self.stop_task(self._task)
        self.site.announced = {"phase": phase.hex(), "signed": fields["signature"].hex()}
        self._task = asyncio.create_task(
            self._reporting(self._take_part(phase, part, epoch, None if restore == STAY else restore))
        )

    def _check_signed(self, fields: dict[str, Any]) -> None:
        """The coordinator stands by what it begins."""
        about = {key: fields[key] for key in ("phase", "part", "epoch", "restore")}
        name = self.config.coordinator
        try:
            statement = phase_statement(self.mesh.agreement, **about)
            verify(self.mesh.certificates()[name], name, statement, fields["signature"])
        except (InvalidSignature, KeyError) as error:
            raise ProtocolError(f"{name} begins a phase without signing it") from error

    async def _take_part(self, phase: bytes, part: str, epoch: int, restore: int | None) -> None:
        try:
            await self.work(phase, part, epoch, restore)
            self.keep_state(part, epoch)
            self._tell("done", phase=phase)
        except BudgetExceeded as refused:
            self.say(f"refused: {refused}")
            self._tell("refused", phase=phase)

    async def _abort(self, fields: dict[str, Any]) -> None:
        with contextlib.suppress(SecureVFLError):
            await self.stop_task(self._task)
        self._tell("aborted", phase=fields["phase"], checkpoints=complete_checkpoints(self.folder))

    def _finish(self, fields: dict[str, Any]) -> None:
        if self.site is None:
            raise ProtocolError("the run ends before it began")
        self.site.check_end(fields["epochs"])
        self.reason = readable(fields["stopped"]) or None
        self.purpose.finish(self)
        self._result = self.purpose.result(self, fields["epochs"])
        self.part = "finished"
        self._tell("finished")
