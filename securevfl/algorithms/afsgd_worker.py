"""A worker of the AFSGD-VP family: a block of the linear model, a listener, and its own updating loop.

The listener joins every announced sum with the product of the weights as they are at that moment, beside the
updating loop. Active workers have the labels and obtain totals themselves; a passive worker's totals go to
the label holder, which answers with the derivative of the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from securevfl.algorithms.base import SERVER, Role, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.estimators import ESTIMATORS
from securevfl.algorithms.linear_block import Batch, LinearBlock, loss_derivative, mean_loss
from securevfl.algorithms.messages import Derivative, Done, Loss, Step, SumRequest
from securevfl.algorithms.pace import build_delay
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.errors import PlanError, ProtocolError
from securevfl.models import LinearEncoder, SumHead
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside
from securevfl.privacy.rows import Rows

Floats = npt.NDArray[np.float64]

STEP, JOINT_STEP, SNAPSHOT = "product", "joint product", "snapshot"
SHARED = (JOINT_STEP, SNAPSHOT)
"""Sums whose totals the coordinator hands to all workers."""
PURPOSES = (STEP, *SHARED, "evaluation")
"""What a worker lets its products be summed for."""


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


class LinearWorker(Role):
    """A worker that only listens: takes part in sums and steps when the coordinator says so.

    Args:
        setup: What the run is built from.
        party: The worker.
        channels: All channels of the run.
        estimator: A key of `ESTIMATORS`.
        active: Whether the worker gets the labels.
    """

    def __init__(
        self, setup: Setup, party: str, *, channels: list[Channel], estimator: str, active: bool
    ) -> None:
        self.address = party
        self.setup = setup
        self.link = setup.links[party]
        self.sums = SumParticipant(setup, party, channels)
        self.gate = setup.gates[setup.hosts[party]]
        self.active = active
        self.block = build_block(setup, party)
        self.estimator = ESTIMATORS[estimator](self.block)
        self.labels: npt.NDArray[Any] | None = None
        self.delay = build_delay(setup, party)
        self.handlers: dict[str, Callable[[Packet], Awaitable[None]]] = {
            REQUEST: self._join,
            "labels": self._take_labels,
            "scores": self._remember,
            "take-snapshot": self._take_snapshot,
            "update": self._update,
        }

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self.sums.begin()
        await self._listen()

    async def epoch(self) -> None:
        await self.sums.begin()
        await self._listen()
        self.block.check_finite(self.address)
        self.publish()

    async def evaluate(self) -> None:
        self.publish()
        await self.sums.begin()
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
        while True:
            message = await self.sums.receive()
            source = self.setup.label_holder if message.kind == "derivative" else SERVER
            if message.sender != source or message.kind not in ("end", *self.handlers):
                raise ProtocolError(f"{self.address} received {message.kind!r} from {message.sender}")
            if message.kind == "end":
                return
            await self.handlers[message.kind](message)

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
        if not isinstance(labels, np.ndarray) or labels.shape != (self.setup.data.n_train,):
            raise ProtocolError(f"{self.address} received labels that are not one per record")
        self.labels = labels

    def _derivative(self, rows: Rows, scores: Floats) -> Floats:
        if self.labels is None:
            raise ProtocolError(f"{self.address} has no labels to compare scores with")
        return loss_derivative(self.setup.data.task, scores, self.labels[rows])

    def _read(self, message: Packet) -> tuple[Rows, Floats]:
        """Rows and loss derivatives that the coordinator sends: to active workers as scores."""
        rows, values = message["rows"], message["values"]
        shape = len(rows), self.block.weights.shape[1]
        if not isinstance(values, np.ndarray) or values.shape != shape:
            raise ProtocolError(f"{self.address} received values of shape {np.shape(values)}, not {shape}")
        rows = np.asarray(rows).astype(np.int64)
        return rows, self._derivative(rows, values) if self.active else values

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
        self.block.step(direction, self.setup.rate(self.address), self.setup.plan.l2)

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.block.weights,
            "estimator": self.estimator.state(),
            "labels": self.labels,
            "delay": {"steps": self.delay.steps, "generator": self.delay.generator.bit_generator.state},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.block.weights = np.array(state["weights"])
        self.estimator.load(state["estimator"])
        self.labels = None if state["labels"] is None else np.array(state["labels"])
        self.delay.steps = int(state["delay"]["steps"])
        self.delay.generator.bit_generator.state = state["delay"]["generator"]
        self.publish()


class AsyncWorker(LinearWorker):
    """A worker that also steps by itself, as fast as it can and without locks (Algorithms 3 to 5)."""

    def __init__(
        self, setup: Setup, party: str, *, channels: list[Channel], estimator: str, active: bool
    ) -> None:
        super().__init__(setup, party, channels=channels, estimator=estimator, active=active)
        index = setup.data.parties.index(party)
        self.batches = self.estimator.batches(
            setup.data.n_train, setup.plan.batch, numpy_generator(setup.plan.seed, "batches", index)
        )
        self.postponed: Rows | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._derivatives: dict[int, asyncio.Future[Floats]] = {}
        self.handlers |= {"start": self._start, "derivative": self._take_derivative}

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
            if answer.kind == "over":
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
        derivative = self._derivative(request.rows, scores)
        if self.address == self.setup.label_holder and self.labels is not None:
            loss = mean_loss(self.setup.data.task, scores, self.labels[request.rows])
            await self.link.send(SERVER, Loss(value=Inside(values=loss)))
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
        number, values = message["round"], message["values"]
        waiting = self._derivatives.get(number) if isinstance(number, int) else None
        if waiting is None or not isinstance(values, np.ndarray):
            raise ProtocolError(f"{self.address} received a derivative that it did not ask for")
        waiting.set_result(values)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "batches": self.batches.state(), "postponed": self.postponed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.batches.load(state["batches"])
        self.postponed = None if state["postponed"] is None else np.asarray(state["postponed"], np.int64)
