"""Any organisation but the coordinator: joins, confirms, and runs its roles when a phase begins."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, ClassVar

from securevfl.data.share import OwnTable, own_ids, rows_of
from securevfl.errors import BudgetExceeded, InputError, NetworkError, ProtocolError, RunError, SecureVFLError
from securevfl.network.agreement import (
    Agreement,
    Facts,
    Proposal,
    Understanding,
    commitment,
    load_alignment,
)
from securevfl.network.config import PartyConfig
from securevfl.network.node import STAY, Node, Stopped, Unforeseen, told_of, understanding
from securevfl.network.relay import Introduction, read_introduction
from securevfl.network.seat import PARTS, complete_checkpoints
from securevfl.protocols.alignment.protocol import AlignmentMachine, PrivateAlignment
from securevfl.protocols.contract import Envelope

log = logging.getLogger("securevfl.network")
MEETING_SECONDS = 60.0
LAST_CALL = 10.0
"""Seconds that an organisation that has its result tries to tell a coordinator that may still wait for it."""


Confirm = Callable[[Understanding], Awaitable[bool]]
"""Asks a person; meanwhile the process must go on talking to the others and hear a stop."""


async def refuse(understanding: Understanding) -> bool:
    """Where nobody can be asked, nothing is accepted."""
    return False


class Member(Node):
    """A party's or helper's process.

    Args:
        config: Its configuration.
        confirm: Asked whether an agreement is accepted, where the configuration has no rules for that.
        say: Called with what a person at the terminal should know.
    """

    config: PartyConfig
    parts: ClassVar[tuple[str, ...]] = PARTS

    def __init__(
        self,
        config: PartyConfig,
        *,
        confirm: Confirm = refuse,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(config, coordinator=config.coordinator, others=(config.coordinator,))
        self.confirm, self.say = confirm, say
        self.mesh.on_restart = self._restart
        self.mesh.on_trouble = self._trouble
        self._digest = ""
        self._table: OwnTable | None = None
        self._protocol: PrivateAlignment | None = None
        self._machine: AlignmentMachine | None = None
        self._ids: list[str] | None = None
        self._introductions: list[Introduction] = []
        self._round = b""
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
                with understanding(self.config.coordinator, kind):
                    result = await self._handle(kind, fields)
                if result is not None:
                    return result
        except NetworkError as error:
            if self._result is not None:  # all that is missing is the coordinator's goodbye
                return self._result
            if self.mesh.sessions[self.config.coordinator].connected and not isinstance(error, Stopped):
                await self._tell_failure(told_of(error))  # another peer refuses or breaks the rules
            raise
        except SecureVFLError as error:
            await self._tell_failure(told_of(error))
            raise
        finally:
            await self.stop_task(self._task)
            watch.cancel()
            await self.close()

    def _open(self) -> None:
        self._digest = self.open_folder()
        if self.folder.result_file.exists():
            self._result, self.patience = self.folder.read_result(), min(self.patience, LAST_CALL)
        self._ids = load_alignment(self.folder.path)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.mesh.tell(self.config.coordinator, kind, **fields)

    async def _tell_failure(self, reason: str) -> None:
        self._tell("failed", reason=f"{self.name}: {reason}"[:1000])
        for _ in range(20):
            await asyncio.sleep(0.05)
            if not self.mesh.sessions[self.config.coordinator].waiting:
                return

    def _join(self) -> None:
        known = self._ids
        self._tell(
            "join",
            facts=Facts.of(self.own).to_json(),
            aligned="" if known is None else commitment(self.session, known),
            checkpoints=self._checkpoints(),
            finished=self._result is not None,
            **self.mesh.introducer.introduction.fields(),
        )

    def _checkpoints(self) -> list[int]:
        return complete_checkpoints(self.folder)

    # -- control messages -----------------------------------------------------------------------------------

    async def _handle(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Does what a control message asks for; the result once the run has ended."""
        match kind:
            case "away":
                pass
            case "restarted":
                await self._start_over()
            case "introduction":
                self._introductions.append(read_introduction(fields))
            case "meet":
                await self._begin_meeting(fields["round"], fields["away"].split(","))
            case "align":
                self._begin_alignment(fields)
            case "alignment":
                self._go_on_aligning(fields)
            case "compare":
                self._compare(fields)
            case "propose":
                await self._consider(fields)
            case "agreed":
                self._take_seat(fields)
            case "begin":
                await self._begin(fields)
            case "abort":
                await self._abort(fields)
            case "stop":
                mend = "; what was done is kept, mend that before everybody starts again"
                raise Stopped(f"the coordinator stops: {fields['reason']}{'' if fields['again'] else mend}")
            case "finish":
                self._finish(fields)
            case "goodbye":
                return self._result
            case _:
                raise ProtocolError(f"the coordinator sends {kind!r}, which this version does not know")
        return None

    async def _start_over(self) -> None:
        """The coordinator is a new process: what runs here is void, and this organisation joins again."""
        self.say(f"{self.config.coordinator} has started anew")
        await self.stop_task(self._task)
        self._introductions = []
        self._join()

    async def _begin_meeting(self, round_: bytes, away: Collection[str]) -> None:
        """Takes up who the others are; a newer meeting, for one who has restarted, replaces this one."""
        await self.stop_task(self._task)
        for each in self._introductions:
            self.mesh.expect(each.name)
        self.mesh.introduce(self._introductions)
        self._introductions = []
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

    def _comparable(self, way: str) -> OwnTable:
        """The own records with IDs as they are compared, always made from the table as it was read.

        Raises:
            DataError: Two records have the same ID then, or one has none.
            InputError: There is no table.
        """
        if self.own is None:
            raise InputError(f"{self.name} has no data to align")
        self._table = self._table or self.own
        self.own = self._table.normalised(way)
        return self.own

    def _begin_alignment(self, fields: dict[str, Any]) -> None:
        own = self._comparable(fields["normalise"])
        self._round = fields["round"]
        self._protocol = PrivateAlignment(parties=fields["parties"], normalisation=fields["normalise"])
        self._machine = self._protocol.machine(fields["index"], own_ids(own))
        self._machine.start()

    def _go_on_aligning(self, fields: dict[str, Any]) -> None:
        machine, protocol = self._machine, self._protocol
        if fields["round"] != self._round:
            return
        if machine is None or protocol is None or self.own is None:
            raise ProtocolError("an alignment goes on that has not begun")
        message = protocol.decode(fields["content"])
        for envelope in machine.receive(Envelope(0, machine.address, message)):
            self._tell("alignment", round=self._round, content=envelope.message.to_bytes())
        if machine.done:
            ids = own_ids(self.own)
            self._take_ids([ids[row] for row in machine.alignment().rows])
            self._machine = None
            self._tell("aligned", round=self._round)

    def _compare(self, fields: dict[str, Any]) -> None:
        ids = sorted(own_ids(self._comparable(fields["normalise"])))
        self._take_ids(ids)
        self._tell("compared", round=fields["round"], ids=commitment(self.session, ids))

    def _take_ids(self, ids: list[str]) -> None:
        self.keep_ids(ids)
        self._ids = ids
        self.say(f"{len(ids)} of {len(own_ids(self.own)) if self.own else 0} records are common to all")

    async def _consider(self, fields: dict[str, Any]) -> None:
        """Completes the proposed plan, compares, and asks for confirmation if it was not given before."""
        proposal = Proposal.from_json(str(fields["proposal"]))
        agreement = self._understood(proposal)
        if agreement.digest != fields.get("digest"):
            raise ProtocolError(
                f"{self.config.coordinator} understands the plan as {fields.get('digest')}, {self.name} as "
                f"{agreement.digest}; are both on the same version?"
            )
        if self._digest and self._digest != agreement.digest:
            raise RunError(
                f"{self.name} agreed on {self._digest}, now it would be {agreement.digest}; choose another "
                "folder for another plan"
            )
        if not self._digest:
            await self._ask(agreement)
        self.keep_agreement(agreement)
        self._digest = agreement.digest
        self._tell("confirmed", digest=agreement.digest)

    def _understood(self, proposal: Proposal) -> Agreement:
        if proposal.run != self.config.run or self.name not in proposal.organisations:
            raise ProtocolError(f"the proposal is for run {proposal.run!r} without {self.name}")
        if self.own is None:
            return proposal.complete(self.name, None, ())
        if self._ids is None or proposal.ids != commitment(self.session, self._ids):
            raise ProtocolError("the proposal commits to other IDs than were found to be common")
        own = self._comparable(proposal.outline.normalise)
        return proposal.complete(self.name, own, rows_of(own, self._ids))

    async def _ask(self, agreement: Agreement) -> None:
        accept = self.config.accept
        objection = "" if accept is None else accept.objection(agreement.plan, agreement.digest)
        await self._decide(agreement, objection, "the plan")

    async def _decide(self, agreement: Understanding, objection: str, what: str) -> None:
        """Shows what is asked, and goes by the rules, or asks where there are none."""
        for line in agreement.summary():
            self.say(line)
        if objection:
            raise InputError(f"{self.name} does not accept {what}: {objection}")
        if self.config.accept is None and not await self.confirm(agreement):
            raise InputError(f"{self.name} does not accept {what}")

    def _take_seat(self, fields: dict[str, Any]) -> None:
        if self.agreement is None or fields.get("digest") != self.agreement.digest:
            raise ProtocolError("the coordinator announces an agreement that was not confirmed here")
        self.take_seat(self.agreement)

    # -- phases ---------------------------------------------------------------------------------------------

    async def _begin(self, fields: dict[str, Any]) -> None:
        if self.seat is None:
            raise ProtocolError("a phase begins before there is an agreement")
        await self.stop_task(self._task)
        phase, part, epoch, restore = (fields[key] for key in ("phase", "part", "epoch", "restore"))
        if part not in self.parts or epoch < 0 or restore < STAY:
            raise ProtocolError(f"the coordinator begins {part!r} of epoch {epoch}, going back to {restore}")
        self._task = asyncio.create_task(
            self._reporting(self._take_part(phase, part, epoch, None if restore == STAY else restore))
        )

    async def _take_part(self, phase: bytes, part: str, epoch: int, restore: int | None) -> None:
        seat = self.seat
        if seat is None:
            return
        try:
            await self.run_part(seat, phase, part, epoch, restore)
            if part in ("prepare", "epoch"):
                seat.save(epoch)
            self._tell("done", phase=phase)
        except BudgetExceeded as refused:
            self.say(f"refused: {refused}")
            self._tell("refused", phase=phase, reason=str(refused))

    async def _abort(self, fields: dict[str, Any]) -> None:
        with contextlib.suppress(SecureVFLError):
            await self.stop_task(self._task)
        self._tell("aborted", phase=fields["phase"], checkpoints=self._checkpoints())

    def _finish(self, fields: dict[str, Any]) -> None:
        if self.seat is None:
            raise ProtocolError("the run ends before it began")
        self.reason = str(fields["stopped"]) or None
        self.seat.finish()
        result = self.result(self.seat, int(fields["epochs"]))
        self.folder.write_result(result)
        self.part = "finished"
        self._result = result
        self._tell("finished")
