"""The coordinator: gathers everybody, aligns, proposes, and leads from phase to phase.

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
from dataclasses import dataclass
from typing import Any, ClassVar

from securevfl.data.labels import Coding
from securevfl.data.share import Outline, coding_of, own_ids, rows_of, split_rows
from securevfl.errors import (
    BudgetExceeded,
    DataError,
    NetworkError,
    ProtocolError,
    RunError,
    SecureVFLError,
)
from securevfl.network.agreement import (
    CommonDataError,
    Facts,
    Proposal,
    commitment,
    load_alignment,
)
from securevfl.network.config import ServerConfig
from securevfl.network.controls import ROUND_BYTES
from securevfl.network.frames import PHASE_BYTES
from securevfl.network.node import STAY, Node, Restarted, Unforeseen, told_of, understanding
from securevfl.network.relay import Introduction, read_introduction
from securevfl.network.seat import Seat
from securevfl.protocols.alignment.protocol import PrivateAlignment
from securevfl.protocols.contract import Envelope

log = logging.getLogger("securevfl.network")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """An organisation that has joined, as its process introduced itself."""

    facts: Facts
    introduction: Introduction
    aligned: str
    checkpoints: tuple[int, ...]


class Conductor(Node):
    """The coordinator's process.

    Args:
        config: Its configuration.
        on_epoch: Called with each line of metrics.
        say: Called with what a person at the terminal should know.
    """

    config: ServerConfig
    back_to: ClassVar[str] = "the last common epoch"

    def __init__(
        self,
        config: ServerConfig,
        *,
        on_epoch: Callable[[dict[str, Any]], None] = lambda line: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(config, coordinator=config.identity.name, others=config.others)
        self.on_epoch, self.say = on_epoch, say
        self.joined: dict[str, Joined] = {}
        self.mesh.on_restart = self._restart
        self.mesh.on_refused = self._tell_refused
        self._refused: set[str] = set()
        self._rows: list[int] = []
        self._coding: Coding | None = None
        self._members = tuple(config.others)
        self._ids: list[str] = []
        self._away: set[str] = set()
        self._fresh: set[str] = set()
        self._epochs = 0
        self._round = b""
        self._restore = STAY
        self._task: asyncio.Task[None] | None = None

    def _restart(self, peer: str) -> None:
        self.joined.pop(peer, None)
        self._fresh.add(peer)
        self.mesh.control.put_nowait((peer, "restarted", {}))

    def _tell_refused(self, peer: str, reason: str) -> None:
        """Whoever waits for a peer should know why it does not come in; once for each, the log has all."""
        if peer in self.mesh.sessions and peer not in self._refused:
            self._refused.add(peer)
            self.say(f"{peer} was refused: {reason}")

    # -- the whole run --------------------------------------------------------------------------------------

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
                    log.warning("going back", extra={"reason": str(restarted)})
                    self.say(f"{restarted}; everybody goes back to {self.back_to}")
        except SecureVFLError as error:
            await self._stop(told_of(error), again=isinstance(error, NetworkError))
            raise
        except asyncio.CancelledError:
            news = f"{self.name} was interrupted; what was done is kept, start again to go on"
            await self._stop(news, again=True)
            raise
        finally:
            watch.cancel()
            await self.close()

    def _open(self) -> None:
        self.open_folder()
        if self.folder.result_file.exists():
            raise RunError(
                f"the run in {self.folder.path} is finished; choose another folder for a new one, or predict "
                "with --predict FILE --out FILE"
            )

    async def _lead(self) -> dict[str, Any]:
        self._away.clear()
        await self._gather()
        await self._introduce()
        await self._align()
        seat = await self._agree()
        self._fresh.clear()
        start = self._common_epoch(seat)
        await self._train(seat, start)
        return await self._finish(seat)

    async def _stop(self, reason: str, *, again: bool = False) -> None:
        """Tells everybody that the run stops, and gives the news a moment to leave."""
        self.mesh.tell_all("stop", reason=reason, again=again)
        await self.delivered()

    async def delivered(self) -> None:
        """Gives what was told a moment to leave."""
        for _ in range(20):
            await asyncio.sleep(0.05)
            if not any(session.connected and session.waiting for session in self.mesh.sessions.values()):
                return

    # -- control messages -----------------------------------------------------------------------------------

    async def _collect(self, kind: str, who: Collection[str], **match: Any) -> dict[str, dict[str, Any]]:
        """One control message of a kind from each that is not away; what breaks the run off is raised."""
        found: dict[str, dict[str, Any]] = {}
        while set(who) - set(found) - self._away:
            peer, got, fields = await self.next_control()
            if got in ("away", "restarted") and self._can_do_without(peer):
                self._leave_out(peer)
                continue
            if got in ("away", "restarted") and peer not in self._away:
                self._say_why_waiting(peer, back=got == "restarted")
            self._check_event(peer, got, fields)
            fits = all(fields.get(key) == value for key, value in match.items())
            if got == kind and peer in who and peer not in found and fits:
                found[peer] = fields
        return found

    def _check_event(self, peer: str, kind: str, fields: dict[str, Any]) -> None:
        if kind == "restarted":
            raise Restarted(f"{peer} has started anew")
        if kind == "failed":
            raise ProtocolError(f"{peer} stops: {fields.get('reason')}")
        if kind == "refused" and fields["phase"] == self.mesh.last_phase:
            raise BudgetExceeded(str(fields.get("reason")))
        if kind == "join":
            with understanding(peer, kind):
                self._take_join(peer, fields)

    # -- absence --------------------------------------------------------------------------------------------

    def is_needed(self, peer: str) -> bool:
        """Everybody, except one that training goes on without."""
        return peer not in self._away or self.part != "epoch"

    def _can_do_without(self, peer: str) -> bool:
        seat = self.seat
        tolerant = seat is not None and seat.algorithm.tolerates_absence(seat.plan)
        if not tolerant or self.part != "epoch" or peer not in self.config.parties:
            return False
        return self._missed(self._away | {peer}) <= 0

    def _missed(self, away: Collection[str]) -> int:
        """How many more parties training would need if these are away; 0 or less if it can go on."""
        if self.seat is None:
            return 0
        plan, parties = self.seat.plan, self.seat.data.parties
        return self.seat.algorithm.fewest(plan) - sum(party not in away for party in parties)

    def _say_why_waiting(self, peer: str, *, back: bool) -> None:
        """Says that everybody waits for one that is away, or that too few are left to go on without it."""
        away = self._away | {peer}
        if self.seat is not None and self.part == "epoch" and self._missed(away) > 0:
            fewest = self.seat.algorithm.fewest(self.seat.plan)
            log.warning("too few parties", extra={"peer": peer})
            self.say(f"{', '.join(sorted(away))} away: sums need {fewest} parties (threshold); waiting")
        elif not back:
            log.warning("waiting for", extra={"peer": peer})
            self.say(f"{peer} is away; waiting for it for up to {self.patience:g} s")

    def _leave_out(self, peer: str) -> None:
        """Goes on without an organisation, until a phase begins and it is back."""
        if peer not in self._away:
            self._away.add(peer)
            log.warning("going on without", extra={"peer": peer})
            self.say(f"{peer} is away; training goes on without it")
            self.tell_absent(peer)

    async def _readmit(self, part: str) -> None:
        """Lets those take part again who are back; waits for them where a phase needs everybody."""
        while self._away:
            self._away -= {
                name for name in self._away if name in self.joined and self.mesh.sessions[name].connected
            }
            if new := sorted(self._fresh & set(self.joined) - self._away):
                self.part = "readmitting"
                self._check_remembers(new)
                await self._introduce()
                await self._confirm(new)
            enough = len(self._away) < len(self.config.parties) and self._missed(self._away) <= 0
            if not self._away or (part == "epoch" and enough):
                return
            self.part = "waiting"
            peer, kind, fields = await self.next_control()
            if kind not in ("away", "restarted"):
                self._check_event(peer, kind, fields)

    def _check_remembers(self, new: Collection[str]) -> None:
        """Raises `Restarted` if one comes back without the common IDs: only all together find them again."""
        ids = commitment(self.session, self._ids)
        for name in new:
            if name in self.config.parties and self.joined[name].aligned != ids:
                raise Restarted(f"{name} has started anew with an empty folder")

    def _take_join(self, peer: str, fields: dict[str, Any]) -> None:
        introduction = read_introduction(fields)
        introduction.check(self.session, self.config.identity.ca_pem)
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

    # -- before training ------------------------------------------------------------------------------------

    async def _gather(self) -> None:
        """Waits until everybody has joined, as the process that is connected now."""
        self.part = "gathering"
        if self.own is not None:
            self.own = self.own.normalised(self.config.normalise)
        while set(self.joined) != set(self._members):
            peer, kind, fields = await self.next_control()
            if kind != "restarted":
                self._check_event(peer, kind, fields)

    async def _introduce(self) -> None:
        """Everybody learns who the others are now, and reaches those that can be reached."""
        self.mesh.introduce(each.introduction for each in self.joined.values())
        for each in (self.mesh.introducer.introduction, *(j.introduction for j in self.joined.values())):
            self.mesh.tell_all("introduction", **each.fields())
        self._round = secrets.token_bytes(ROUND_BYTES)
        self.mesh.tell_all("meet", round=self._round, away=",".join(sorted(self._away)))
        await self._collect("met", self._members, round=self._round)

    async def _align(self) -> None:
        """Finds the common IDs, unless everybody remembers them."""
        if self.own is None:
            raise DataError("the coordinator has no data")
        with_data = self._with_data()
        known = load_alignment(self.folder.path)
        if known is not None:
            mark = commitment(self.session, known)
            if all(self.joined[name].aligned == mark for name in with_data):
                self._take_ids(known)
                return
        ids = await self._common_ids(with_data)
        self.keep_ids(ids)
        self._take_ids(ids)
        self.say(f"{len(ids)} records are common to all")

    def _with_data(self) -> list[str]:
        """The others that bring records."""
        return [name for name in self._members if name in self.config.parties]

    async def _common_ids(self, with_data: list[str]) -> list[str]:
        """The IDs that are in everybody's table, in an order that all know."""
        self.part = "aligning"
        ids = await (
            self._align_privately(with_data) if self.config.align == "psi" else self._compare(with_data)
        )
        if not ids:
            raise CommonDataError("the organisations have no ID in common")
        return ids

    def _take_ids(self, ids: list[str]) -> None:
        if self.own is not None:
            self._ids, self._rows = ids, rows_of(self.own, ids)
            self._coding = coding_of(self.own, self._rows, self.config.task or None)

    async def _align_privately(self, with_data: list[str]) -> list[str]:
        """Private set intersection, with the coordinator as its leader."""
        protocol = PrivateAlignment(parties=len(with_data) + 1, normalisation=self.config.normalise)
        machine = protocol.machine(0, own_ids(self.own))  # type: ignore[arg-type]
        for index, name in enumerate(with_data, start=1):
            self.mesh.tell(
                name,
                "align",
                round=self._round,
                index=index,
                parties=len(with_data) + 1,
                normalise=self.config.normalise,
            )
        self._send_alignment(machine.start(), with_data)
        while not machine.done:
            peer, kind, fields = await self.next_control()
            self._check_event(peer, kind, fields)
            if kind == "alignment" and peer in with_data and fields["round"] == self._round:
                message = protocol.decode(fields["content"])
                self._send_alignment(
                    machine.receive(Envelope(with_data.index(peer) + 1, 0, message)), with_data
                )
        await self._collect("aligned", with_data, round=self._round)
        found = machine.alignment()
        return [own_ids(self.own)[row] for row in found.rows]  # type: ignore[arg-type]

    def _send_alignment(self, envelopes: list[Envelope], with_data: list[str]) -> None:
        for envelope in envelopes:
            peer = with_data[envelope.receiver - 1]
            self.mesh.tell(peer, "alignment", round=self._round, content=envelope.message.to_bytes())

    async def _compare(self, with_data: list[str]) -> list[str]:
        """Without private alignment all tables must hold the same IDs."""
        ids = sorted(own_ids(self.own))  # type: ignore[arg-type]
        for name in with_data:
            self.mesh.tell(name, "compare", round=self._round, normalise=self.config.normalise)
        answers = await self._collect("compared", with_data, round=self._round)
        for name, fields in answers.items():
            if fields.get("ids") != commitment(self.session, ids):
                raise CommonDataError(
                    f'{name} does not have exactly the IDs of {self.name}; set align = "psi" to find the '
                    "common ones"
                )
        return ids

    async def _agree(self) -> Seat:
        """Proposes the plan, and waits until everybody has confirmed the same understanding of it."""
        self.part = "agreeing"
        agreement = self._proposal().complete(self.name, self.own, self._rows, self._coding)
        earlier = self.open_folder()
        if earlier and earlier != agreement.digest:
            raise RunError(
                f"the run in {self.folder.path} was agreed on as {earlier}, now it would be "
                f"{agreement.digest}; choose another folder for another plan or other data"
            )
        for line in agreement.summary() if not earlier else ():
            self.say(line)
        self.agreement = agreement
        await self._confirm(self._members)
        return self.take_seat(agreement)

    async def _confirm(self, who: Collection[str]) -> None:
        """Has organisations confirm the agreement; nobody takes part before it has."""
        if self.agreement is None:
            raise ProtocolError("there is nothing to agree on yet")
        proposal, digest = self.agreement.proposal.to_json(), self.agreement.digest
        await self._propose(who, proposal, digest)
        self.keep_agreement(self.agreement)
        for name in who:
            self.mesh.tell(name, "agreed", digest=digest)

    async def _propose(self, who: Collection[str], proposal: str, digest: str) -> None:
        for name in who:
            self.mesh.tell(name, "propose", proposal=proposal, digest=digest)
        await self._collect("confirmed", who, digest=digest)

    def _proposal(self) -> Proposal:
        config, own = self.config, self.own
        if own is None or self._coding is None:
            raise DataError("the coordinator has no labels")
        facts = {name: self.joined[name].facts for name in config.parties}
        if own.columns:
            facts = {self.name: Facts.of(own)} | facts
        kept, apart = split_rows(len(self._ids), config.test_fraction, config.plan.seed)
        outline = Outline(
            parties=tuple(facts),
            widths=tuple(each.columns for each in facts.values()),
            bounds=tuple(each.bounds for each in facts.values()),
            label_holder=self.name,
            task=self._coding.task,
            classes=len(self._coding.classes),
            n_train=len(kept),
            n_test=len(apart),
            test_fraction=config.test_fraction,
            split_seed=config.plan.seed,
            name=config.run,
            normalise=config.normalise,
        )
        return Proposal(
            run=config.run,
            plan=config.plan,
            outline=outline,
            organisations=(self.name, *self._members),
            ids=commitment(self.session, self._ids),
            time_unit=config.time_unit,
        )

    # -- training -------------------------------------------------------------------------------------------

    def _common_epoch(self, seat: Seat) -> int:
        """The newest epoch that everybody can go back to; -1 if there is none."""
        common = set(seat.checkpoints())
        for name, each in self.joined.items():
            if name in self.config.parties and seat.algorithm.tolerates_absence(seat.plan):
                oldest = min(each.checkpoints, default=math.inf)  # it was away for the epochs in between
                common = {epoch for epoch in common if epoch >= oldest}
            else:
                common &= set(each.checkpoints)
        return max(common, default=-1)

    async def _train(self, seat: Seat, start: int) -> None:
        """All epochs after `start`; the first phase takes everybody back to it."""
        self._restore, self._epochs, plan = start, max(0, start), seat.plan
        self.folder.cut_metrics(self._epochs)
        try:
            if start < 0:
                await self._phase(seat, "prepare", 0)
            for epoch in range(self._epochs + 1, plan.epochs + 1):
                await self._phase(seat, "epoch", epoch)
                self._epochs = epoch
                if plan.evaluate_every and epoch % plan.evaluate_every == 0 and epoch < plan.epochs:
                    await self._evaluate(seat, epoch)
                self._record(seat, epoch)
        except BudgetExceeded as refused:
            if seat.server is None or seat.server.processed == 0:
                raise
            self.reason = f"budget: {refused}"

    async def _phase(self, seat: Seat, part: str, epoch: int) -> None:
        """Runs one part of all roles everywhere."""
        await self._readmit(part)
        self.part = part
        phase, restore, self._restore = secrets.token_bytes(PHASE_BYTES), self._restore, STAY
        for name in [name for name in self._members if name not in self._away]:
            back_to = self._epochs if name in self._fresh else restore
            self.mesh.tell(name, "begin", phase=phase, part=part, epoch=epoch, restore=back_to)
            self._fresh.discard(name)
        task = asyncio.create_task(
            self.run_part(seat, phase, part, epoch, None if restore == STAY else restore, tuple(self._away))
        )
        task.add_done_callback(self._own_part_done)
        self._task = task
        try:
            await self._collect("done", (*self._members, self.name), phase=phase)
            if part in ("prepare", "epoch"):
                seat.save(epoch)
        except BaseException as error:
            await self.stop_task(task)
            if isinstance(error, Restarted | BudgetExceeded):
                await self._abort(phase)
            raise

    async def _evaluate(self, seat: Seat, epoch: int) -> None:
        """Evaluates the test part, which needs everybody; while somebody is away the figures are unknown."""
        if not self._away:
            await self._phase(seat, "evaluate", epoch)
        elif seat.server is not None:
            seat.server.test = dict.fromkeys(seat.server.test)

    def _own_part_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task is not self._task:
            return
        error = task.exception()
        if error is None:
            self.mesh.control.put_nowait((self.name, "done", {"phase": self.mesh.last_phase}))
        elif isinstance(error, SecureVFLError):
            self.mesh.control.put_nowait(error)
        else:
            self.mesh.control.put_nowait(Unforeseen(f"{self.part} fails at {self.name}", error))

    async def _abort(self, phase: bytes) -> None:
        """Ends a phase everywhere; those that restarted have no part in it and join anew.

        Raises:
            Restarted: Somebody has restarted meanwhile.
        """
        self.part, restarted = "aborting", ""
        waiting = {name for name in self._members if name in self.joined}
        for name in waiting:
            self.mesh.tell(name, "abort", phase=phase)
        while waiting:
            peer, kind, fields = await self.next_control()
            if kind == "restarted":
                restarted = peer
                waiting.discard(peer)
            elif kind in ("join", "failed"):
                self._check_event(peer, kind, fields)
            elif kind == "aborted" and fields["phase"] == phase and peer in waiting & set(self.joined):
                waiting.discard(peer)
                known = vars(self.joined[peer])
                self.joined[peer] = Joined(**{**known, "checkpoints": tuple(fields["checkpoints"])})
        if restarted:
            raise Restarted(f"{restarted} has started anew")

    def _record(self, seat: Seat, epoch: int) -> None:
        line = seat.line(epoch)
        for party, count in line.get("absent_rounds", {}).items():
            log.warning("sums without", extra={"peer": party, "epoch": epoch, "count": count})
            self.say(f"sums of training without {party} so far: {count:,}")
        self.folder.append_metrics(line)
        self.on_epoch(line)

    async def _finish(self, seat: Seat) -> dict[str, Any]:
        """The final evaluation; then everybody writes what belongs to it and leaves."""
        try:
            await self._phase(seat, "final", self._epochs)
        except BudgetExceeded as refused:
            self.reason = self.reason or f"budget: {refused}"
            if seat.server is not None:
                seat.server.test = dict.fromkeys(seat.server.test)
        seat.finish()
        self.mesh.tell_all("finish", epochs=self._epochs, stopped=self.reason or "")
        await self._all_finished()
        result = self.result(seat, self._epochs)
        self.folder.write_result(result)
        self.part = "finished"
        self.mesh.tell_all("goodbye")
        await asyncio.sleep(0.2)
        return result

    async def _all_finished(self) -> None:
        """Waits until everybody has written what belongs to it.

        Raises:
            Restarted: A process died before it had.
        """
        waiting = set(self._members)
        while waiting:
            peer, kind, fields = await self.next_control()
            if kind != "restarted":  # its joining says whether it had finished
                self._check_event(peer, kind, fields)
            if kind == "finished" or (kind == "join" and fields["finished"]):
                waiting.discard(peer)
            elif kind == "join":
                await self._abort(secrets.token_bytes(PHASE_BYTES))  # all say which checkpoints they have now
                raise Restarted(f"{peer} has started anew")
