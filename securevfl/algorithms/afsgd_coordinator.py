"""The coordinators of the AFSGD-VP family: they announce sums, count work and measure; they hold no model.

The label holder's organisation hosts them. The asynchronous one announces a sum for every worker that asks,
at once; the synchronous one leads all workers through the same batches, with a barrier after each.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from securevfl.algorithms.afsgd_worker import JOINT_STEP, SNAPSHOT, STEP
from securevfl.algorithms.base import SERVER, ServerRole, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.estimators import ESTIMATORS
from securevfl.algorithms.linear_block import loss_derivative, mean_loss
from securevfl.algorithms.messages import End, Labels, Over, Scores, Start, TakeSnapshot, Update
from securevfl.algorithms.sums import SumParticipant
from securevfl.errors import ProtocolError
from securevfl.models import metrics
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside, Released
from securevfl.privacy.rows import Rows

Floats = npt.NDArray[np.float64]

CHUNK = 1024


class Coordinator(ServerRole):
    """What both have in common: sharing labels, snapshots, evaluation.

    Args:
        setup: What the run is built from.
        channels: All channels of the run; the coordinator's own serves snapshots and evaluation.
        active: Names of the active workers.
        estimator: A key of `ESTIMATORS`.
    """

    def __init__(
        self, setup: Setup, *, channels: list[Channel], active: tuple[str, ...], estimator: str
    ) -> None:
        self.setup = setup
        self.link = setup.links[SERVER]
        self.sums = SumParticipant(setup, SERVER, channels)
        self.gate = setup.gates[setup.label_holder]
        self.parties = setup.data.parties
        self.active = active
        self.estimator = ESTIMATORS[estimator]
        self.processed = 0
        self.iterations = 0
        self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}
        self._losses: list[float] = []

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self.sums.begin()
        rows = np.arange(self.setup.data.n_train, dtype=np.int64)
        for party in self.active:
            labels = self._expose(np.asarray(self.setup.data.y_train), rows, party, "labels")
            await self.link.send(party, Labels(values=labels))
        await self._tell_all(End())

    async def epoch(self) -> None:
        await self.sums.begin()
        self._losses = []
        due = self._snapshot_is_due()
        if due:
            await self._share_scores()
        await self._train((self.epochs_done + 1) * len(self.parties) * self.setup.data.n_train, due)
        self.epochs_done += 1
        if self._losses:
            self.loss = float(np.mean(self._losses))
        await self._tell_all(End())

    def _snapshot_is_due(self) -> bool:
        every: dict[str, int] = {
            "never": 0,
            "once": self.setup.plan.epochs,
            "repeated": self.setup.plan.settings.snapshot_every,
        }
        period = every[self.estimator.snapshots]
        return period > 0 and self.epochs_done % period == 0

    @abstractmethod
    async def _train(self, target: int, snapshot: bool) -> None:
        """Trains until so many records have been processed, after a snapshot if the scores for it are out."""

    async def evaluate(self) -> None:
        await self.sums.begin()
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        pieces = [
            (await self.sums.total(rows[start : start + CHUNK], "evaluation")).values
            for start in range(0, len(rows), CHUNK)
        ]
        self.predictions = torch.from_numpy(np.concatenate(pieces))
        self.test = metrics(data.task, self.predictions, torch.from_numpy(np.array(data.y_test)))
        await self._tell_all(End())

    # -- what goes out --------------------------------------------------------------------------------------

    async def _tell_all(self, content: Any) -> None:
        for party in self.parties:
            await self.link.send(party, content)

    def _expose(self, values: npt.NDArray[Any], rows: Rows, party: str, kind: str) -> Released | Inside:
        """Lets something that depends on the labels out without protection."""
        observers = self.setup.observers(party, self.setup.label_holder)
        if not observers:
            return Inside(values=values)
        return self.gate.release_exact(values, rows=rows, kind=kind, observers=observers)

    def _scores_for(self, party: str, rows: Rows, scores: Floats) -> Released | Inside:
        """Active workers get the scores; passive ones the loss derivatives, which tell them the labels.

        Scores were paid for when the workers contributed to them; the head shows that entry to the receiver.
        """
        if party in self.active:
            observers = self.setup.observers(party, self.setup.label_holder)
            if not observers:
                return Inside(values=scores)
            return self.gate.hand_on(scores, kind="scores", observers=observers)
        derivative = loss_derivative(self.setup.data.task, scores, self.setup.data.y_train[rows])
        return self._expose(derivative, rows, party, "derivative")

    async def _share_scores(self) -> None:
        """Gives all workers what their full gradients at the present weights need (Algorithm 4, line 3)."""
        n_train = self.setup.data.n_train
        for start in range(0, n_train, CHUNK):
            rows = np.arange(start, min(start + CHUNK, n_train), dtype=np.int64)
            scores = (await self.sums.total(rows, SNAPSHOT)).values
            for party in self.parties:
                given = self._scores_for(party, rows, scores)
                await self.link.send(party, Scores(rows=rows, values=given))

    def _count(self, records: int) -> None:
        self.processed += records
        self.iterations += 1
        self.setup.report(self.processed, self._losses[-1] if self._losses else (self.loss or float("nan")))

    def figures(self) -> dict[str, Any]:
        """Iterations so far."""
        return {"iterations": self.iterations}

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "round": self.sums.number,
            "processed": self.processed,
            "iterations": self.iterations,
            "epochs_done": self.epochs_done,
            "loss": self.loss,
            "test": self.test,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.sums.number = int(state["round"])
        self.processed, self.iterations = int(state["processed"]), int(state["iterations"])
        self.epochs_done = int(state["epochs_done"])
        self.loss, self.test = state["loss"], state["test"]


class AsyncCoordinator(Coordinator):
    """Announces a sum whenever a worker asks; workers never wait for each other."""

    async def _train(self, target: int, snapshot: bool) -> None:
        # With the scores at home no worker needs the others for its full gradient: nobody waits for it.
        for party in self.parties:
            await self.link.send(party, Start(snapshot=snapshot))
        running = set(self.parties)
        while running:
            message = await self.sums.receive()
            if message.kind == "loss" and message.sender == self.setup.label_holder:
                self._losses.append(float(message["value"]))
            elif message.kind != "step" or message.sender not in running:
                raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
            elif self.processed >= target:
                running.discard(message.sender)
                await self.link.reply(message, Over())
            else:
                await self._announce(message)

    async def _announce(self, message: Packet) -> None:
        """Announces one worker's batch; a passive worker's total goes to the label holder."""
        rows = message["rows"].astype(np.int64)
        if rows.size == 0 or rows.max() >= self.setup.data.n_train:
            raise ProtocolError(f"{message.sender} asks for rows that are not training records")
        worker = message.sender
        channel = worker if worker in self.active else self.setup.label_holder
        request = await self.sums.announce(rows, STEP, channel=channel, requester=worker, skip=(worker,))
        await self.link.reply(message, request)
        self._count(len(rows))


class SyncCoordinator(Coordinator):
    """Leads all workers through one schedule: one sum, one step of everybody, a barrier."""

    def __init__(
        self, setup: Setup, *, channels: list[Channel], active: tuple[str, ...], estimator: str
    ) -> None:
        super().__init__(setup, channels=channels, active=active, estimator=estimator)
        self.batches = self.estimator.batches(
            setup.data.n_train, setup.plan.batch, numpy_generator(setup.plan.seed, "batches", 0)
        )

    async def _train(self, target: int, snapshot: bool) -> None:
        data = self.setup.data
        if snapshot:
            await asyncio.gather(*(self.link.call(party, TakeSnapshot()) for party in self.parties))
        while self.processed < target:
            rows = self.batches.next()
            scores = (await self.sums.total(rows, JOINT_STEP)).values
            self._losses.append(mean_loss(data.task, scores, data.y_train[rows]))
            calls = []
            for party in self.parties:
                given = self._scores_for(party, rows, scores)
                calls.append(self.link.call(party, Update(rows=rows, values=given)))
            await asyncio.gather(*calls)
            self._count(len(rows) * len(self.parties))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "batches": self.batches.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.batches.load(state["batches"])
