"""FDML on homomorphic sums: the server adds ciphertexts, a worker of another organisation holds the key.

The server announces the batches, adds the workers' encrypted predictions and passes on what it cannot read.
The key holder decrypts each iteration's sum and hands it to all workers, which FDML gives it to anyway. The
server gets figures alone: the mean loss of each pass, and the metrics of the test part, for which the label
holder gives the test labels to the key holder.

A pass has every record once, so its mean loss is one and the same sum of all records' losses every time. Mean
losses of batches, mixed anew in every pass, would be a linear system for the loss of each record, and with
the label the loss of a record is its prediction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER, Role, Setup
from securevfl.algorithms.channels import Channel, build_channel, check_channels
from securevfl.algorithms.fdml_server import FDMLServer
from securevfl.algorithms.fdml_worker import FDMLWorker
from securevfl.algorithms.messages import LabelsOfTest, Loss, Metrics, Sum, SumRequest
from securevfl.algorithms.sums import SumParticipant
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError, RunError
from securevfl.models import metrics, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import AGGREGATOR
from securevfl.settings.plan import Plan

LOSS, METRICS, TEST_LABELS = "loss", "metrics", "test-labels"
LEAST = 2
"""Records that a mean loss must be taken over for the server to be told."""


def key_holder_among(parties: tuple[str, ...], host: str) -> str:
    """The first worker that is not of the server's organisation; the first of all where there is no other."""
    return next((party for party in parties if party != host), parties[0])


def check_encrypted(plan: Plan, data: VerticalData) -> None:
    """Raises `PlanError` if the server would learn a sum, or the key holder another worker's predictions."""
    host = SERVER if plan.label_holder == "server" else data.label_holder
    receiver = data.parties.index(key_holder_among(data.parties, host))
    check_channels(plan, len(data.parties), (receiver,), aggregator=AGGREGATOR)
    for what, count in (("training part", data.n_train), ("test part", data.n_test)):
        if count < LEAST:
            raise PlanError(
                f"fdml on {plan.protocol!r} tells the server mean losses instead of predictions; that of a"
                f" {what} of {count} would tell the prediction itself, so use at least {LEAST} records"
            )


def encrypted_role(setup: Setup, address: str) -> Role:
    """The server, the worker with the key, or another worker."""
    key_holder = key_holder_among(setup.data.parties, setup.hosts[SERVER])
    channel = build_channel(setup, key_holder, hands_on=True, aggregator=SERVER)
    if address == SERVER:
        return AddingServer(setup, channel=channel)
    if address == key_holder:
        return KeyHolder(setup, address, channel=channel)
    return FDMLWorker(setup, address, source=key_holder, channel=channel, told=(SERVER,))


class AddingServer(FDMLServer):
    """Announces batches and adds ciphertexts; it has no key, and is told losses and metrics, never a sum.

    Args:
        setup: What the run is built from.
        channel: The sum, whose totals go to the key holder.
    """

    def __init__(self, setup: Setup, *, channel: Channel) -> None:
        super().__init__(setup, channel=channel)
        self.key_holder = channel.name

    async def prepare(self) -> None:
        await super().prepare()
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        observers = self.setup.observers(self.key_holder, self.setup.label_holder)
        given = self.gate.release_exact(
            np.asarray(data.y_test), rows=rows, kind="test labels", observers=observers
        )
        await self.link.send(self.key_holder, LabelsOfTest(values=given))

    async def _train_on_sums(self) -> None:
        for _ in range(self.batches.per_pass):
            rows = self.batches.next()
            await self._gather_pulls(rows)
            request = await self._announce(rows, "embedding")
            self.processed += len(rows) * len(self.parties)
            self.setup.report(self.processed, None)
        self._losses = [self._read_loss(await self._hear(LOSS), request)]

    async def _measure(self, pieces: list[Rows]) -> dict[str, float | None]:
        for rows in pieces:
            await self._announce(rows, "evaluation")
        message = await self._hear(METRICS)
        return {name: _figure(message, name) for name in message.fields}

    async def _announce(self, rows: Rows, purpose: str) -> SumRequest:
        """Announces a round and takes part in it as the one who adds."""
        if self.sums is None:
            raise ProtocolError("protocol 'plain' has no sums")
        request = await self.sums.announce(rows, purpose, channel=self.key_holder)
        await self.sums.open(request)
        return request

    async def _hear(self, kind: str) -> Packet:
        """The key holder's figures, which come when nobody else has anything to say."""
        message = await self._receive()
        if message.kind != kind or message.sender != self.key_holder:
            raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
        return message

    def _read_loss(self, message: Packet, request: SumRequest) -> float:
        """The mean loss of the pass that ends with a round."""
        loss = _figure(message, "value")
        if message.fields.get("round") != request.number or loss is None:
            raise ProtocolError(f"{message.sender} sends no loss of the pass up to round {request.number}")
        return loss


def _figure(message: Packet, name: str) -> float | None:
    """A number that the key holder sends; None where there is none to tell."""
    value = message.fields.get(name)
    if value is not None and not isinstance(value, float):
        raise ProtocolError(f"{message.sender} sends {message.kind!r} whose {name!r} is not a number")
    return value


class KeyHolder(FDMLWorker):
    """The worker that decrypts the sums: hands them to all workers, and figures to the server.

    Args:
        setup: What the run is built from.
        party: Its name.
        channel: The sum, whose totals it obtains.
    """

    def __init__(self, setup: Setup, party: str, *, channel: Channel) -> None:
        super().__init__(setup, party, source=party, channel=channel, told=(SERVER,))
        self.gate = setup.gates[setup.hosts[party]]
        self.test_labels: Tensor | None = None
        self._outputs: list[Tensor] = []
        self._losses: list[float] = []
        self._last = -1

    async def prepare(self) -> None:
        await super().prepare()
        self.test_labels = await self._receive_labels(TEST_LABELS, self.setup.data.n_test)

    async def _pull(self, rows: Rows) -> tuple[Tensor, Released | Contribution | Inside]:
        """Decrypts the sum and hands it on."""
        if self.sums is None:
            raise ProtocolError("protocol 'plain' has no sums")
        request, contribution = await self._join(
            self.sums, rows, {"iteration": self.iteration}, learning=True
        )
        total = await self._obtain(self.sums, request)
        loss = float(task_loss(self.setup.data.task, total, self._labels_of(rows).cpu()))
        self._losses.append(loss * len(rows))
        self._last = request.number
        given = self._hand_on(total.numpy(), "sum")
        for party in self.setup.data.parties:
            if party != self.address:
                await self.link.send(party, Sum(values=given))
        return total, contribution

    async def _obtain(self, sums: SumParticipant, request: SumRequest) -> Tensor:
        total = (await sums.obtain(request)).values
        return torch.from_numpy(total.astype(np.float32))

    async def epoch(self) -> None:
        self._losses = []
        await super().epoch()
        # Every record counts the same, however the pass was cut into batches.
        loss = math.fsum(self._losses) / self.setup.data.n_train
        await self.link.send(SERVER, Loss(round=self._last, value=self._hand_on(loss, LOSS)))

    def _hand_on(self, values: Any, kind: str) -> Released:
        """What the key holder computes from totals; everybody was written down as an observer of those."""
        return self.gate.hand_on(values, kind=kind, observers=self.setup.everyone_but(self.address))

    async def evaluate(self) -> None:
        self._outputs = []
        await super().evaluate()

    async def _join_evaluation(self, sums: SumParticipant, request: SumRequest) -> None:
        """Takes the test part's records in their order; the server gets metrics of all of them at once."""
        data = self.setup.data
        done = data.n_train + sum(map(len, self._outputs))
        due = np.arange(done, done + len(request.rows))
        if not np.array_equal(request.rows, due) or done + len(due) > data.n_train + data.n_test:
            raise ProtocolError(f"{self.address} is asked for other records than the test part's next")
        await super()._join_evaluation(sums, request)
        self._outputs.append(await self._obtain(sums, request))
        if done + len(due) == data.n_train + data.n_test:
            await self.link.send(SERVER, Metrics(figures=self._hand_on(self._metrics(), METRICS)))

    def _metrics(self) -> dict[str, float | None]:
        if self.test_labels is None:
            raise ProtocolError(f"{self.address} measures before it has the test labels")
        return metrics(self.setup.data.task, torch.cat(self._outputs), self.test_labels.cpu())

    def state(self) -> dict[str, Any]:
        return super().state() | {"test_labels": self.test_labels}

    def load(self, state: dict[str, Any]) -> None:
        if "test_labels" not in state:
            raise RunError(f"{self.address} had no key when this run was begun; start the run anew")
        super().load(state)
        labels = state["test_labels"]
        self.test_labels = None if labels is None else labels.to(self.setup.device)
