"""AFSGD-VP and its SVRG and SAGA variants, with their synchronous counterparts.

Gu, Xu, Huo, Deng, Huang: Privacy-preserving asynchronous federated learning algorithms for vertically
partitioned data, 2020. Linear models only: logistic, softmax or ridge regression with an l2 regulariser. A
worker's step needs the sum of all workers' products for its batch, obtained on demand through Algorithm 1
(protocol ``plain-tree``), Algorithm 2 (``two-tree``) or any other sum.

All workers are active by default: each has the labels, as in the paper's experiments. With ``active`` in the
plan only the named ones have; the others receive derivatives of the loss, which tell the labels just as well.

The coordinator announces sums, counts work and measures; it holds no model. The label holder's organisation
hosts it. The asynchronous one announces a sum for every worker that asks, at once; the synchronous one leads
all workers through the same batches, with a barrier after each. A worker's listener joins every announced sum
with the product of the weights as they are at that moment, beside the updating loop. Active workers have the
labels and obtain totals themselves; a passive worker's totals go to the label holder, which answers with the
derivative of the loss.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from securevfl.algorithms.base import SERVER, Algorithm, Role, Setup, expect
from securevfl.algorithms.channels import Channel, build_channel, check_channels
from securevfl.algorithms.linear import ESTIMATORS, Batch, Floats, LinearBlock, loss_derivative, mean_loss
from securevfl.algorithms.messages import (
    Derivative,
    Done,
    End,
    Labels,
    MeanLoss,
    Over,
    Scores,
    Start,
    Step,
    SumRequest,
    TakeSnapshot,
    Update,
)
from securevfl.algorithms.roles import LabelHolder, Party, pieces
from securevfl.algorithms.steps import build_batches, build_delay, decayed
from securevfl.algorithms.sums import REQUEST, SumParticipant, Total, read_request
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.models import LinearEncoder, SumHead
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import PROTOCOLS

STEP, JOINT_STEP, SNAPSHOT = "product", "joint product", "snapshot"
SHARED = (JOINT_STEP, SNAPSHOT)
"""Sums whose totals the coordinator hands to all workers."""
PURPOSES = (STEP, *SHARED, "evaluation")
"""What a worker lets its products be summed for."""


# -- workers ------------------------------------------------------------------------------------------------


def build_block(setup: Setup, party: str) -> LinearBlock:
    """A party's block, starting at its encoder's weights; the label holder's has the head's bias.

    Raises:
        PlanError: The encoder is not a linear map without bias.
    """
    data, encoder = setup.data, setup.encoders[party]
    index = data.parties.index(party)
    if not isinstance(encoder, LinearEncoder) or encoder.output.bias is not None:
        raise PlanError(f"the encoder of {party} is not linear; this algorithm trains linear models")
    if not isinstance(setup.head, SumHead):
        raise PlanError("this algorithm adds the parties' products; the head can only be a bias")
    weights = encoder.output.weight.detach().cpu().double().numpy().T
    bias = party == setup.label_holder
    if bias:
        weights = np.vstack([weights, setup.head.bias.detach().cpu().double().numpy()])
    return LinearBlock(data.train[index], data.test[index], np.array(weights, order="C"), bias=bias)


class LinearWorker(Party):
    """A worker that only listens: takes part in sums and steps when the coordinator says so.

    Args:
        channels: All channels of the run.
        estimator: A key of `ESTIMATORS`.
        active: Whether the worker gets the labels.
    """

    kept: ClassVar[tuple[str, ...]] = ("block", "estimator", "labels", "delay", "steps")

    def __init__(
        self, setup: Setup, party: str, *, channels: list[Channel], estimator: str, active: bool
    ) -> None:
        super().__init__(setup, party)
        self.sums = SumParticipant(setup, party, channels)
        self._receive = self.sums.receive
        self.active = active
        self.block = build_block(setup, party)
        self.estimator = ESTIMATORS[estimator](self.block)
        self.labels: npt.NDArray[Any] | None = None
        self.delay = build_delay(setup, party)
        self.steps = 0
        self.handlers = {
            REQUEST: self._join,
            Labels.kind: self._take_labels,
            Scores.kind: self._remember,
            TakeSnapshot.kind: self._take_snapshot,
            Update.kind: self._update,
        }

    async def prepare(self) -> None:
        await self._listen()

    async def epoch(self) -> None:
        await self._listen()
        self.block.check_finite(self.address)
        self.publish()

    async def evaluate(self) -> None:
        self.publish()
        await self._listen()

    def publish(self) -> None:
        """Writes the weights into the party's encoder, and the bias into the head."""
        weights = torch.from_numpy(self.block.weights)
        encoder = self.setup.encoders[self.address]
        with torch.no_grad():
            if self.block.bias:
                self.setup.head.get_parameter("bias").copy_(weights[-1])
                weights = weights[:-1]
            encoder.get_parameter("output.weight").copy_(weights.T)

    # -- the listener ---------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        await self.sums.begin()
        await super()._listen()

    async def _join(self, message: Packet) -> None:
        request = read_request(message)
        await self.sums.join(request, self._contribute(request, self.block.batch(request.rows)))

    def _contribute(self, request: SumRequest, batch: Batch) -> Contribution | Inside:
        """The local product, through the gate."""
        if request.purpose not in PURPOSES:
            raise ProtocolError(
                f"{self.address} is asked into a sum for {request.purpose!r}, not for training"
            )
        product = torch.from_numpy(batch.product(self.block.weights))
        also = self._reached(request)
        return self.sums.channel(request.channel).protect(
            self.gate, product, party=self.address, rows=request.rows, kind=request.purpose, also=also
        )

    def _reached(self, request: SumRequest) -> tuple[str, ...]:
        """Who gets the total, or something computed from it, beside the one who obtains it.

        A step changes the requester's weights, and with them every product that it lets out afterwards, so a
        step of another worker's reaches everybody. What comes of one's own passes one's own gate again.
        """
        trains = request.purpose == STEP and request.requester != self.address
        return self.sums.parties if trains or request.purpose in SHARED else (request.requester,)

    async def _take_labels(self, message: Packet) -> None:
        labels = message["values"]
        if len(labels) != self.setup.data.n_train:
            raise ProtocolError(f"{self.address} received {len(labels)} labels, not one per record")
        self.labels = labels

    def _derivative(self, rows: Rows, scores: Floats, party: str) -> Floats:
        """Derivatives of the loss that a party descends on."""
        if self.labels is None:
            raise ProtocolError(f"{self.address} has no labels to compare scores with")
        return loss_derivative(self.setup.data.task, scores, self.labels[rows], self.setup.loss(party))

    def _read(self, message: Packet) -> tuple[Rows, Floats]:
        """Rows and loss derivatives that the coordinator sends: to active workers as scores."""
        rows, values = message.rows, message["values"]
        shape = len(rows), self.block.weights.shape[1]
        if values.shape != shape:
            raise ProtocolError(f"{self.address} received values of shape {values.shape}, not {shape}")
        return rows, self._derivative(rows, values, self.address) if self.active else values

    async def _remember(self, message: Packet) -> None:
        self.estimator.remember(*self._read(message))

    async def _take_snapshot(self, message: Packet) -> None:
        """A synchronous snapshot."""
        await self._finish_snapshot()
        await self.link.reply(message, Done())

    async def _finish_snapshot(self) -> None:
        """Computes the full gradient, which takes as long as the steps of one pass."""
        steps = -(-self.block.n_train // self.setup.plan.batch)
        await self._compute(sum(self.delay.draw() for _ in range(steps)))
        self.estimator.finish_snapshot()

    async def _update(self, message: Packet) -> None:
        """A synchronous step."""
        rows, derivative = self._read(message)
        await self._compute(self.delay.draw())
        self._step(self.block.batch(rows), rows, derivative)
        await self.link.reply(message, Done())

    async def _compute(self, duration: float) -> None:
        await self.setup.clock.sleep_until(self.setup.clock.now() + duration)

    def _step(self, batch: Batch, rows: Rows, derivative: Floats) -> None:
        direction = self.estimator.direction(batch, rows, derivative)
        self.steps += 1
        rate = self.setup.rate(self.address) * decayed(self.setup.plan, self.steps)
        self.block.step(direction, rate, self.setup.plan.l2)

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.publish()


class AsyncWorker(LinearWorker):
    """A worker that also steps by itself, as fast as it can and without locks (Algorithms 3 to 5)."""

    kept = (*LinearWorker.kept, "batches", "postponed")

    def __init__(
        self, setup: Setup, party: str, *, channels: list[Channel], estimator: str, active: bool
    ) -> None:
        super().__init__(setup, party, channels=channels, estimator=estimator, active=active)
        self.batches = build_batches(setup, self.index)
        self.postponed: Rows | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._derivatives: dict[int, asyncio.Future[Floats]] = {}
        self.handlers |= {Start.kind: self._start, Derivative.kind: self._take_derivative}

    async def epoch(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await super().epoch()
        finally:
            self._tasks = None

    async def _start(self, message: Packet) -> None:
        if self._tasks is not None:
            self._tasks.create_task(self._work(snapshot=bool(message["snapshot"])))

    async def _work(self, *, snapshot: bool) -> None:
        """Steps until the coordinator says that the epoch is over."""
        if snapshot:
            await self._finish_snapshot()
        while True:
            rows = self.batches.next() if self.postponed is None else self.postponed
            self.postponed = rows
            answer = await self.link.call(SERVER, Step(rows=rows))
            if answer.kind == Over.kind:
                return
            self.postponed = None
            request, batch = read_request(answer), self.block.batch(rows)
            derivative = await self._obtain(request, batch)
            await self._compute(self.delay.draw())
            self._step(batch, rows, derivative)

    async def _obtain(self, request: SumRequest, batch: Batch) -> Floats:
        """The loss derivatives of a batch, from the total or from the label holder that obtains it."""
        if not self.active:
            self._derivatives[request.number] = asyncio.get_running_loop().create_future()
        await self.sums.join(request, self._contribute(request, batch))
        if not self.active:
            derivative = await self._derivatives[request.number]
            del self._derivatives[request.number]
            return derivative
        return await self._resolve(request)

    async def _resolve(self, request: SumRequest) -> Floats:
        """Waits for a total and compares it with the labels; the label holder reports the loss."""
        scores = (await self.sums.result(request)).values
        derivative = self._derivative(request.rows, scores, request.requester)
        if self.address == self.setup.label_holder and self.labels is not None:
            loss = mean_loss(self.setup.data.task, scores, self.labels[request.rows], self.setup.loss())
            await self.link.send(SERVER, MeanLoss(value=Inside(values=loss)))
        return derivative

    async def _join(self, message: Packet) -> None:
        await super()._join(message)
        request = read_request(message)
        if request.channel == self.address and self._tasks is not None:
            self._tasks.create_task(self._help(request))

    async def _help(self, request: SumRequest) -> None:
        """Answers a passive worker, which gets the derivative of the loss; that tells it the label."""
        derivative = await self._resolve(request)
        observers = self.setup.observers(request.requester, self.address)
        given = self.gate.release_exact(derivative, rows=request.rows, kind="derivative", observers=observers)
        await self.link.send(request.requester, Derivative(round=request.number, values=given))

    async def _take_derivative(self, message: Packet) -> None:
        waiting = self._derivatives.get(message["round"])
        if waiting is None or message.sender != self.setup.label_holder:
            raise ProtocolError(
                f"{self.address} received a derivative from {message.sender} that it did not ask for"
            )
        waiting.set_result(message["values"])


# -- coordinators -------------------------------------------------------------------------------------------


class SumCoordinator(LabelHolder):
    """What both have in common: sharing labels, snapshots, evaluation.

    Args:
        channels: All channels of the run; the coordinator's own serves snapshots and evaluation.
        active: Names of the active workers.
        estimator: A key of `ESTIMATORS`.
    """

    kept: ClassVar[tuple[str, ...]] = (*LabelHolder.kept, "sums", "iterations")

    def __init__(
        self, setup: Setup, *, channels: list[Channel], active: tuple[str, ...], estimator: str
    ) -> None:
        super().__init__(setup)
        self.sums = SumParticipant(setup, SERVER, channels)
        self.active = active
        self.estimator = ESTIMATORS[estimator]
        self.iterations = 0

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self.sums.begin()
        await self._send_labels(self.active)
        await self._tell_all(End())

    async def epoch(self) -> None:
        await self.sums.begin()
        self._losses = []
        due = self._snapshot_is_due()
        if due:
            await self._share_scores()
        await self._train((self.epochs_done + 1) * len(self.parties) * self.setup.data.n_train, due)
        self._close_epoch()
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
        totals = [(await self.sums.total(rows, "evaluation")).values for rows in self.test_pieces]
        self.test = self._measure(torch.from_numpy(np.concatenate(totals)))
        await self._tell_all(End())

    # -- what goes out --------------------------------------------------------------------------------------

    def _scores_for(self, party: str, rows: Rows, total: Total) -> Released | Inside:
        """Active workers get the scores; passive ones the loss derivatives, which tell them the labels.

        Scores were paid for when the workers contributed to them; the head shows that entry to the receiver.
        """
        if party in self.active:
            observers = self.setup.observers(party, self.setup.label_holder)
            if observers:
                return self.gate.hand_on(total.given, kind="scores", observers=observers)
            return Inside(values=total.values)
        data, loss = self.setup.data, self.setup.loss(party)
        derivative = loss_derivative(data.task, total.values, data.y_train[rows], loss)
        return self._exact(derivative, party, rows=rows, kind="derivative")

    async def _share_scores(self) -> None:
        """Gives all workers what their full gradients at the present weights need (Algorithm 4, line 3)."""
        for rows in pieces(0, self.setup.data.n_train):
            total = await self.sums.total(rows, SNAPSHOT)
            for party in self.parties:
                given = self._scores_for(party, rows, total)
                await self.link.send(party, Scores(rows=rows, values=given))

    def _count_step(self, records: int) -> None:
        self.processed += records
        self.iterations += 1
        if self.setup.report is not None:
            shown = self._losses[-1] if self._losses else (self.loss or float("nan"))
            self.setup.report(self.processed, shown)

    def figures(self) -> dict[str, Any]:
        """Iterations so far."""
        return {"iterations": self.iterations}


class AsyncCoordinator(SumCoordinator):
    """Announces a sum whenever a worker asks; workers never wait for each other."""

    async def _train(self, target: int, snapshot: bool) -> None:
        # With the scores at home no worker needs the others for its full gradient: nobody waits for it.
        await self._tell_all(Start(snapshot=snapshot))
        running = set(self.parties)
        while running:
            message = expect(await self.sums.receive(), MeanLoss.kind, Step.kind)
            if message.kind == MeanLoss.kind:
                value = expect(message, MeanLoss.kind, sender=self.setup.label_holder)["value"]
                self._losses.append(value)
            elif message.sender not in running:
                raise ProtocolError(f"{message.sender} asks for a step after the epoch is over for it")
            elif self.processed >= target:
                running.discard(message.sender)
                await self.link.reply(message, Over())
            else:
                await self._announce(message)

    async def _announce(self, message: Packet) -> None:
        """Announces one worker's batch; a passive worker's total goes to the label holder."""
        rows = message.rows
        if rows.size == 0 or rows.max() >= self.setup.data.n_train:
            raise ProtocolError(f"{message.sender} asks for rows that are not training records")
        worker = message.sender
        channel = worker if worker in self.active else self.setup.label_holder
        request = await self.sums.announce(rows, STEP, channel=channel, requester=worker, skip=(worker,))
        await self.link.reply(message, request)
        self._count_step(len(rows))


class SyncCoordinator(SumCoordinator):
    """Leads all workers through one schedule: one sum, one step of everybody, a barrier."""

    kept = (*SumCoordinator.kept, "batches")

    def __init__(
        self, setup: Setup, *, channels: list[Channel], active: tuple[str, ...], estimator: str
    ) -> None:
        super().__init__(setup, channels=channels, active=active, estimator=estimator)
        self.batches = build_batches(setup)

    async def _train(self, target: int, snapshot: bool) -> None:
        data = self.setup.data
        if snapshot:
            await asyncio.gather(*(self.link.call(party, TakeSnapshot()) for party in self.parties))
        while self.processed < target:
            rows = self.batches.next()
            total = await self.sums.total(rows, JOINT_STEP)
            self._losses.append(mean_loss(data.task, total.values, data.y_train[rows], self.setup.loss()))
            calls = []
            for party in self.parties:
                given = self._scores_for(party, rows, total)
                calls.append(self.link.call(party, Update(rows=rows, values=given)))
            await asyncio.gather(*calls)
            self._count_step(len(rows) * len(self.parties))


# -- the algorithms -----------------------------------------------------------------------------------------


class AFSGD(Algorithm):
    """Asynchronous SGD (Algorithm 3)."""

    name = "afsgd"
    summary = "asynchronous SGD on linear models: every worker steps on its own demand-driven sums"
    protocols = PROTOCOLS
    optimisers = ("sgd",)
    estimator: ClassVar[str] = "sgd"
    synchronous: ClassVar[bool] = False

    def role(self, setup: Setup, address: str) -> Role:
        """The coordinator, or a party's worker."""
        active = setup.plan.settings.active or setup.data.parties
        passive = len(active) < len(setup.data.parties)
        channels = [build_channel(setup, SERVER, hands_on=self.synchronous or self.estimator != "sgd")]
        if not self.synchronous:
            channels += [build_channel(setup, party, hands_on=passive) for party in active]
        if address == SERVER:
            coordinator = SyncCoordinator if self.synchronous else AsyncCoordinator
            return coordinator(setup, channels=channels, active=active, estimator=self.estimator)
        worker = LinearWorker if self.synchronous else AsyncWorker
        return worker(setup, address, channels=channels, estimator=self.estimator, active=address in active)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """The plan must describe a linear model whose label holder has features, and a sum that can run."""
        odd = plan.hidden_noise or any("hidden_noise" in own for own in plan.encoders.values())
        wide = set(plan.widths(data.parties)) - {0, data.outputs}
        if plan.models(data.parties) != {"linear"} or odd or wide:
            raise PlanError(f"{self.name} trains linear models; set model 'linear' and leave the embedding")
        if plan.fusion == "concat" or plan.head not in ("auto", "sum"):
            raise PlanError(f"{self.name} sums the parties' products; leave fusion and head on 'auto'")
        if plan.encoder_training != "raw":
            raise PlanError(f"{self.name} trains on raw records; encoder_training can only be 'raw'")
        if ESTIMATORS[self.estimator].draws and plan.sampling != "draws":
            raise PlanError(f"{self.name} remembers gradients and is unbiased only with sampling 'draws'")
        if plan.label_holder == "server" or data.label_holder not in data.parties:
            raise PlanError(f"{self.name} needs a label holder with features: active workers have both")
        unknown = set(plan.settings.active) - set(data.parties)
        if unknown:
            raise PlanError(f"active names {min(unknown)!r}, but the parties are {', '.join(data.parties)}")
        if plan.settings.active and data.label_holder not in plan.settings.active:
            raise PlanError(f"the label holder {data.label_holder} is always active; name it in active too")
        active = (
            [] if self.synchronous else [data.parties.index(p) for p in plan.settings.active or data.parties]
        )
        check_channels(plan, len(data.parties), (data.parties.index(data.label_holder), *active))

    def needs_everybody(self, plan: Plan) -> str:
        """Workers receive sums themselves, or step behind a barrier."""
        if self.synchronous:
            return "its workers step together, behind a barrier that waits for all of them"
        return "active workers receive sums of their own, and whoever receives cannot be missing"

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Products are summed whatever the protocol."""
        return plan.with_changes(fusion="sum", head="sum")

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """Every step of any worker releases all workers' products; so does every record of a snapshot."""
        steps = plan.epochs * (1 if self.synchronous else len(data.parties))
        snapshots = {"never": 0, "once": 1, "repeated": -(-plan.epochs // plan.settings.snapshot_every)}
        return float(steps + snapshots[ESTIMATORS[self.estimator].snapshots])


class AFSVRG(AFSGD):
    """Asynchronous SVRG (Algorithm 4); an inner loop is as many epochs as the plan's ``snapshot_every``."""

    name = "afsvrg"
    summary = "asynchronous SVRG on linear models: a full gradient every few epochs (field snapshot_every)"
    estimator = "svrg"


class AFSAGA(AFSGD):
    """Asynchronous SAGA (Algorithm 5), with one number per record and output."""

    name = "afsaga"
    summary = "asynchronous SAGA on linear models: every record's last derivative is remembered"
    estimator = "saga"


class FSGD(AFSGD):
    """Synchronous SGD."""

    name = "fsgd"
    summary = "synchronous counterpart of afsgd: one batch for all workers, a barrier after each step"
    synchronous = True


class FSVRG(FSGD):
    """Synchronous SVRG."""

    name = "fsvrg"
    summary = "synchronous counterpart of afsvrg"
    estimator = "svrg"


class FSAGA(FSGD):
    """Synchronous SAGA."""

    name = "fsaga"
    summary = "synchronous counterpart of afsaga"
    estimator = "saga"
