"""The coordinator: the carrier over gRPC, which leads everybody through the schedule from phase to phase.

It decides when a phase begins and when it is over; what leaves an organisation is decided by that
organisation's gate alone. A process that starts anew makes everybody go back to the newest checkpoint that
all have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection
from typing import Any

from securevfl.errors import BudgetExceeded, NetworkError, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.federation.schedule import Carrier, Schedule
from securevfl.federation.site import Site, complete_checkpoints
from securevfl.network.config import ServerConfig
from securevfl.network.folders import commitment
from securevfl.network.frames import PHASE_BYTES, STAY
from securevfl.network.joining import Gathering, Joined
from securevfl.network.participant import Purpose, Restarted
from securevfl.network.signing import SERIES_BYTES, numbered_phase, phase_statement, sign
from securevfl.network.training import Training

log = logging.getLogger("securevfl.network")


class Coordinator(Gathering, Carrier):
    """The coordinator's process: the label holder's.

    Args:
        config: Its configuration.
        purpose: What everybody comes together for; training if it is left out.
        on_epoch: Called with each line of metrics.
        say: Called with what a person at the terminal should know.
    """

    folder: RunFolder

    def __init__(
        self,
        config: ServerConfig,
        purpose: Purpose | None = None,
        *,
        on_epoch: Callable[[dict[str, Any]], None] = lambda line: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(config, purpose or Training(), say)
        self.on_epoch = on_epoch
        self.epochs = 0
        self._back_to = STAY
        self._series, self._phases = secrets.token_bytes(SERIES_BYTES), 0
        self._task: asyncio.Task[None] | None = None

    # -- the whole run --------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.purpose.open(self, leads=True)

    async def _live(self) -> dict[str, Any]:
        """Leads the run to its end."""
        port = await self.mesh.transport.listen(self.config.listen)
        self.say(f"{self.name} listens at {self.config.listen.rpartition(':')[0]}:{port}")
        watch = asyncio.create_task(self.watch())
        try:
            while True:
                try:
                    return await self._lead()
                except Restarted as restarted:
                    self.purpose.check_restart(str(restarted))
                    log.warning("going back", extra={"reason": str(restarted)})
                    self.say(f"{restarted}; everybody goes back to {self.purpose.back_to}")
        except SecureVFLError as error:
            about = getattr(error, "peer", self.name)
            await self._stop(error.notice, about, again=isinstance(error, NetworkError))
            raise
        except asyncio.CancelledError:
            await self._stop("interrupted", self.name, again=True)
            raise
        finally:
            watch.cancel()
            await self.close()

    async def _lead(self) -> dict[str, Any]:
        await self.gather()
        self.plan = self.home.plan
        schedule = Schedule(self, on_epoch=self._tell_epoch)
        await self.purpose.follow(schedule)
        result = self.purpose.result(self, schedule.epochs)
        self.part = "finished"
        self.mesh.tell_all("goodbye")
        await self._delivered()
        return result

    def _tell_epoch(self, line: dict[str, Any]) -> None:
        for party, count in line.get("absent_rounds", {}).items():
            log.warning("sums without", extra={"peer": party, "epoch": line["epoch"], "count": count})
            self.say(f"sums of training without {party} so far: {count:,}")
        self.on_epoch(line)

    async def _stop(self, reason: str, about: str, *, again: bool = False) -> None:
        """Tells everybody that the run stops and because of whom, and gives the news a moment to leave."""
        self.mesh.tell_all("stop", reason=reason, about=about, again=again)
        await self._delivered()

    async def _delivered(self) -> None:
        """Gives what was told a moment to leave."""
        for _ in range(20):
            await asyncio.sleep(0.05)
            if not any(session.connected and session.waiting for session in self.mesh.sessions.values()):
                return

    # -- the carrier ----------------------------------------------------------------------------------------

    @property
    def home(self) -> Site:
        """The label holder's site, which is the coordinator's."""
        return self._built()

    def spent(self) -> dict[str, float]:
        """The coordinator's own mu; what others have spent is theirs to know."""
        return {self.name: self.home.spent()}

    def figures(self) -> dict[str, Any]:
        """See `Carrier.figures`."""
        return {"time": self.clock.now(), "messages": self.mesh.messages, "bytes": self.mesh.bytes}

    def restore(self) -> int:
        """The newest epoch that everybody can go back to; the others do with the next phase."""
        self._back_to = self._common_epoch()
        self._restore(self.home, self._back_to)
        self.epochs = max(0, self._back_to)
        return self._back_to

    def _common_epoch(self) -> int:
        site, common = self.home, set(complete_checkpoints(self.folder))
        for name, each in self.joined.items():
            if name in self.config.parties and site.algorithm.tolerates_absence(site.plan):
                oldest = min(each.checkpoints, default=math.inf)  # it was away for the epochs in between
                common = {epoch for epoch in common if epoch >= oldest}
            else:
                common &= set(each.checkpoints)
        return max(common, default=-1)

    def save(self, epoch: int) -> None:
        """Every site has kept its own state when its part was done, so that no evaluation can lose it."""

    async def phase(self, part: str, epoch: int) -> None:
        """See `Carrier.phase`; while somebody is away the figures of an evaluation are unknown."""
        if part == "evaluate" and self.away:
            self.server.test = dict.fromkeys(self.server.test)
            return
        await self._readmit(part)
        self.part = part
        phase, back_to, self._back_to = self._next_phase(), self._back_to, STAY
        self.purpose.begin()
        for name in [name for name in self.members if name not in self.away]:
            own = self.epochs if name in self.anew else back_to
            self._begin(name, phase=phase, part=part, epoch=epoch, restore=own)
            self.anew.discard(name)
        self._task = task = asyncio.create_task(self.work(phase, part, epoch, None, tuple(self.away)))
        task.add_done_callback(self._own_part_done)
        try:
            await self.collect("done", (*self.members, self.name), phase=phase)
            self.keep_state(part, epoch)
        except BaseException as error:
            await self.stop_task(task)
            if isinstance(error, Restarted | BudgetExceeded):
                await self._abort(phase)
            raise
        self.epochs = epoch

    def _next_phase(self) -> bytes:
        """A name that no phase had, and that says which one of this process it is."""
        self._phases += 1
        return numbered_phase(self._series, self._phases - 1)

    def _begin(self, name: str, *, phase: bytes, part: str, epoch: int, restore: int) -> None:
        statement = phase_statement(self.mesh.agreement, phase, part, epoch, restore)
        signature = sign(self.config.identity, statement)
        self.mesh.tell(
            name, "begin", phase=phase, part=part, epoch=epoch, restore=restore, signature=signature
        )

    def _own_part_done(self, task: asyncio.Task[None]) -> None:
        if task is self._task:
            self._tell_own("done", self.mesh.last_phase, task)

    async def _abort(self, phase: bytes) -> None:
        """Ends a phase everywhere; those that restarted have no part in it and join anew.

        Raises:
            Restarted: Somebody has restarted meanwhile.
        """
        self.part, restarted = "aborting", ""
        waiting = {name for name in self.members if name in self.joined}
        for name in waiting:
            self.mesh.tell(name, "abort", phase=phase)
        while waiting:
            peer, kind, fields = await self.next_control()
            if kind == "restarted":
                restarted = peer
                waiting.discard(peer)
            elif kind in ("join", "failed"):
                self.check_event(peer, kind, fields)
            elif kind == "aborted" and fields["phase"] == phase and peer in waiting & set(self.joined):
                waiting.discard(peer)
                known = vars(self.joined[peer])
                self.joined[peer] = Joined(**{**known, "checkpoints": tuple(fields["checkpoints"])})
        if restarted:
            raise Restarted(f"{restarted} has started anew")

    async def finish(self, epochs: int, stopped: str | None) -> None:
        """Everybody writes what belongs to it."""
        self.reason = stopped
        self.purpose.finish(self)
        self.mesh.tell_all("finish", epochs=epochs, stopped=stopped or "")
        await (self._let_go() if self.home.predicts else self._all_finished())

    async def _all_finished(self) -> None:
        """Waits until everybody has written what belongs to it.

        Raises:
            Restarted: A process died before it had.
        """
        waiting = set(self.members)
        while waiting:
            peer, kind, fields = await self.next_control()
            if kind != "restarted":  # its joining says whether it had finished
                self.check_event(peer, kind, fields)
            if kind == "finished" or (kind == "join" and fields["finished"]):
                waiting.discard(peer)
            elif kind == "join":
                await self._abort(secrets.token_bytes(PHASE_BYTES))  # all say which checkpoints they have now
                raise Restarted(f"{peer} has started anew")

    async def _let_go(self) -> None:
        """Waits until everybody has written what belongs to it; the scores do not depend on that any more."""
        waiting = set(self.members)
        try:
            while waiting:
                peer, kind, _ = await self.next_control()
                if kind in ("finished", "failed", "restarted"):
                    waiting.discard(peer)
                if kind == "restarted":
                    self.mesh.tell(peer, "stop", reason="over", about=self.name, again=True)
        except SecureVFLError as error:
            self.say(f"the scores are written, but: {error}")

    # -- absence --------------------------------------------------------------------------------------------

    def is_needed(self, peer: str) -> bool:
        """Everybody, except one that training goes on without."""
        return peer not in self.away or self.part != "epoch"

    def goes_on_without(self, peer: str, *, back: bool) -> bool:
        """Whether training goes on while one is away; if not, it is said why everybody waits."""
        site, away = self.site, self.away | {peer}
        training = site is not None and self.part == "epoch"
        tolerant = site is not None and site.algorithm.tolerates_absence(site.plan)
        if training and tolerant and peer in self.config.parties and self._missed(away) <= 0:
            self._leave_out(peer)
            return True
        if peer in self.away:
            return False
        if site is not None and training and self._missed(away) > 0:
            fewest = site.algorithm.fewest(site.plan)
            log.warning("too few parties", extra={"peer": peer})
            self.say(f"{', '.join(sorted(away))} away: sums need {fewest} parties (threshold); waiting")
            return False
        return super().goes_on_without(peer, back=back)

    def _missed(self, away: Collection[str]) -> int:
        """How many more parties training would need if these are away; 0 or less if it can go on."""
        site = self.home
        return site.algorithm.fewest(site.plan) - sum(party not in away for party in site.data.parties)

    def _leave_out(self, peer: str) -> None:
        """Goes on without an organisation, until a phase begins and it is back."""
        if peer not in self.away:
            self.away.add(peer)
            log.warning("going on without", extra={"peer": peer})
            self.say(f"{peer} is away; training goes on without it")
            self.tell_absent(peer)

    async def _readmit(self, part: str) -> None:
        """Lets those take part again who are back; waits for them where a phase needs everybody."""
        while self.away:
            self.away -= {
                name for name in self.away if name in self.joined and self.mesh.sessions[name].connected
            }
            if new := sorted(self.anew & set(self.joined) - self.away):
                self.part = "readmitting"
                self._check_remembers(new)
                await self._introduce()
                await self.confirm(new)
            enough = len(self.away) < len(self.config.parties) and self._missed(self.away) <= 0
            if not self.away or (part == "epoch" and enough):
                return
            self.part = "waiting"
            peer, kind, fields = await self.next_control()
            if kind not in ("away", "restarted"):
                self.check_event(peer, kind, fields)

    def _check_remembers(self, new: Collection[str]) -> None:
        """Raises `Restarted` if one comes back without the common IDs: only all together find them again."""
        ids = commitment(self.session, self.purpose.ids or [])
        for name in new:
            if name in self.config.parties and self.joined[name].aligned != ids:
                raise Restarted(f"{name} has started anew with an empty folder")
