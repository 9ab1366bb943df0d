"""Any organisation but the coordinator: joins, confirms, and runs its roles when a phase begins."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from securevfl.data.share import OwnTable
from securevfl.errors import BudgetExceeded, InputError, NetworkError, ProtocolError, SecureVFLError
from securevfl.federation.site import complete_checkpoints
from securevfl.network.agreement import Facts, Understanding
from securevfl.network.aligning import Arrangement, align
from securevfl.network.config import PartyConfig
from securevfl.network.folders import commitment
from securevfl.network.participant import (
    STAY,
    Participant,
    Purpose,
    Stopped,
    Unforeseen,
    shareable,
    understanding,
)
from securevfl.network.relay import Introduction, read_introduction
from securevfl.network.training import Training

log = logging.getLogger("securevfl.network")
MEETING_SECONDS = 60.0
LAST_CALL = 10.0
"""Seconds that an organisation that has its result tries to tell a coordinator that may still wait for it."""


Confirm = Callable[[Understanding], Awaitable[bool]]
"""Asks a person; meanwhile the process must go on talking to the others and hear a stop."""


async def refuse(understanding: Understanding) -> bool:
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
        self._introductions: list[Introduction] = []
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
                await self._tell_failure(shareable(error))  # another peer refuses or breaks the rules
            raise
        except SecureVFLError as error:
            await self._tell_failure(shareable(error))
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

    async def _tell_failure(self, reason: str) -> None:
        self._tell("failed", reason=f"{self.name}: {reason}"[:1000])
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
                self._introductions.append(read_introduction(fields))
            case "meet":
                await self._begin_meeting(fields["round"], fields["away"].split(","))
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
        self.purpose.check_restart(f"{self.config.coordinator} has started anew")
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

    def comparable(self, way: str) -> OwnTable:
        """See `Participant.comparable`.

        Raises:
            ProtocolError: IDs may not be compared that way.
        """
        self.purpose.check_comparison(self, way)
        return super().comparable(way)

    async def _begin_alignment(self, fields: dict[str, Any]) -> None:
        """A newer alignment, for one who has restarted, replaces this one."""
        arranged = Arrangement.read(fields, self.config.coordinator)
        await self.stop_task(self._task)
        self._task = asyncio.create_task(self._reporting(self._align(fields["phase"], arranged)))

    async def _align(self, phase: bytes, arranged: Arrangement) -> None:
        self.part = "aligning"
        ids = await align(self, phase, arranged)
        if ids is not None:
            self.purpose.take_ids(self, ids, leads=False)
            self.say(f"{len(ids)} of {len(self.own.ids) if self.own else 0} records are common to all")
        self._tell("aligned", phase=phase)

    async def _consider(self, fields: dict[str, Any]) -> None:
        """Compares what is proposed with what is known here; asks for confirmation if none was given."""
        agreement = self.purpose.understand(self, str(fields["proposal"]))
        if agreement.digest != fields["digest"]:
            raise ProtocolError(
                f"{self.config.coordinator} understands {self.purpose.what} as {fields['digest']}, "
                f"{self.name} as {agreement.digest}; are both on the same version, and the same run?"
            )
        if not self.purpose.confirmed(self, agreement):
            await self._ask(agreement)
        self.purpose.keep(self, agreement)
        self.agreement = agreement
        self._tell("confirmed", digest=agreement.digest)

    async def _ask(self, agreement: Understanding) -> None:
        """Shows what is asked, and goes by the rules, or asks where there are none."""
        accept = self.config.accept
        for line in agreement.summary():
            self.say(line)
        if accept is not None and (objection := agreement.objection(accept)):
            raise InputError(f"{self.name} does not accept {self.purpose.what}: {objection}")
        if accept is None and not await self.confirm(agreement):
            raise InputError(f"{self.name} does not accept {self.purpose.what}")

    def _take_agreement(self, fields: dict[str, Any]) -> None:
        if self.agreement is None or fields["digest"] != self.agreement.digest:
            what = self.purpose.what
            raise ProtocolError(f"the coordinator announces {what}, which was not confirmed here")
        self.site = self.purpose.build(self, self.agreement)

    # -- phases ---------------------------------------------------------------------------------------------

    async def _begin(self, fields: dict[str, Any]) -> None:
        if self.site is None:
            raise ProtocolError("a phase begins before there is an agreement")
        phase, part, epoch, restore = (fields[key] for key in ("phase", "part", "epoch", "restore"))
        if part not in self.purpose.parts or epoch < 0 or restore < STAY:
            raise ProtocolError(f"the coordinator begins {part!r} of epoch {epoch}, going back to {restore}")
        self.purpose.begin(epoch, restore)
        await self.stop_task(self._task)
        self._task = asyncio.create_task(
            self._reporting(self._take_part(phase, part, epoch, None if restore == STAY else restore))
        )

    async def _take_part(self, phase: bytes, part: str, epoch: int, restore: int | None) -> None:
        try:
            await self.work(phase, part, epoch, restore)
            self.keep_state(part, epoch)
            self._tell("done", phase=phase)
        except BudgetExceeded as refused:
            self.say(f"refused: {refused}")
            self._tell("refused", phase=phase, reason=str(refused))

    async def _abort(self, fields: dict[str, Any]) -> None:
        with contextlib.suppress(SecureVFLError):
            await self.stop_task(self._task)
        self._tell("aborted", phase=fields["phase"], checkpoints=complete_checkpoints(self.folder))

    def _finish(self, fields: dict[str, Any]) -> None:
        self.reason = str(fields["stopped"]) or None
        self.purpose.finish(self)
        self._result = self.purpose.result(self, int(fields["epochs"]))
        self.part = "finished"
        self._tell("finished")
