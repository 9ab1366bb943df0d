"""What FDML and the Flex family have in common: labels given to all parties, one schedule, one evaluation.

The server shares the training labels before the first epoch, as both papers do; the label holder's gate
writes down that they left without protection. All roles walk through the records in the same order, drawn
from the run's seed.

On a secure sum the parties only say that they are ready; the server then obtains the sum over all of them,
fresh, and never sees a party's vectors.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER, Role, ServerRole, Setup
from securevfl.algorithms.batches import Batches
from securevfl.algorithms.channels import Channel, build_channel, check_channels
from securevfl.algorithms.local import LocalModel
from securevfl.algorithms.messages import Embed, Embedding, End, Labels, Ready, SumRequest
from securevfl.algorithms.pace import build_delay
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.data import VerticalData
from securevfl.errors import ProtocolError
from securevfl.models import metrics
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan

CHUNK = 1024


def shared_batches(setup: Setup) -> Batches:
    """The one order of all roles."""
    return Batches(setup.data.n_train, setup.plan.batch, numpy_generator(setup.plan.seed, "batches", 0))


def check_sums(plan: Plan, data: VerticalData) -> None:
    """Raises `PlanError` if the plan's protocol cannot sum these parties' vectors for the label holder."""
    if plan.protocol != "plain":
        holder = data.label_holder if plan.label_holder == "party" else None
        receiver = data.parties.index(holder) if holder in data.parties else None
        check_channels(plan, len(data.parties), (receiver,))


class SharingServer(ServerRole):
    """A label holder that hands out labels and knows the schedule.

    Args:
        setup: What the run is built from.
        share_labels: False where the labels stay with the server.
        channel: The secure sum; by default one whose totals the server obtains.
    """

    def __init__(self, setup: Setup, *, share_labels: bool, channel: Channel | None = None) -> None:
        self.setup = setup
        self.link = setup.links[SERVER]
        self.parties = setup.data.parties
        self.gate = setup.gates[setup.label_holder]
        self.share_labels = share_labels
        data = setup.data
        self.labels = torch.from_numpy(np.concatenate([data.y_train, data.y_test])).to(setup.device)
        self.batches = shared_batches(setup)
        self.sums: SumParticipant | None = None
        if setup.plan.protocol != "plain":
            self.sums = SumParticipant(setup, SERVER, [channel or build_channel(setup, SERVER)])
        self.processed = 0
        self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}
        self._losses: list[float] = []

    async def prepare(self) -> None:
        if self.share_labels:
            for party in self.parties:
                await self._send_labels(party)

    async def epoch(self) -> None:
        if self.sums is not None:
            await self.sums.begin()
        await self._train()
        self.epochs_done += 1
        self.loss = float(np.mean(self._losses))
        self._losses = []

    @abstractmethod
    async def _train(self) -> None:
        """One pass through the training records."""

    async def _send_labels(self, party: str) -> None:
        observers = self.setup.observers(party, self.setup.label_holder)
        labels = np.asarray(self.setup.data.y_train)
        given: Released | Inside = Inside(values=labels)
        if observers:
            rows = np.arange(len(labels), dtype=np.int64)
            given = self.gate.release_exact(labels, rows=rows, kind="labels", observers=observers)
        await self.link.send(party, Labels(values=given))

    @abstractmethod
    def _outputs(self, vectors: Tensor) -> Tensor:
        """The model's outputs for vectors (rows, parties, width), or for their sums (rows, width)."""

    async def evaluate(self) -> None:
        if self.sums is not None:
            await self.sums.begin()
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        self.test = await self._measure([rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)])
        for party in self.parties:
            await self.link.send(party, End())

    async def _measure(self, pieces: list[Rows]) -> dict[str, float | None]:
        """The metrics of the test part, whose records come in pieces."""
        vectors = torch.cat([await self._collect(rows) for rows in pieces])
        with torch.no_grad():
            self.predictions = self._outputs(vectors)
        data = self.setup.data
        return metrics(data.task, self.predictions, self.labels[data.n_train :])

    async def _collect(self, rows: Rows) -> Tensor:
        if self.sums is not None:
            return await self._total(rows, "evaluation")
        asked = Embed(rows=rows, purpose="evaluation")
        answers = await asyncio.gather(*(self.link.call(party, asked) for party in self.parties))
        return torch.stack([self._vectors(answer, len(rows)) for answer in answers], dim=1)

    async def _total(self, rows: Rows, purpose: str) -> Tensor:
        """The sum of all parties' vectors, by the secure sum."""
        if self.sums is None:
            raise ProtocolError("protocol 'plain' has no sums")
        total = (await self.sums.total(rows, purpose)).values
        return torch.from_numpy(total.astype(np.float32)).to(self.setup.device)

    async def _gather(self, rows: Rows) -> dict[str, Packet]:
        """One message of each party, in their order: its upload, or on a secure sum that it is ready."""
        found: dict[str, Packet] = {}
        while len(found) < len(self.parties):
            message = await self._receive()
            self._check_turn(message)
            if self.sums is None:
                self._check_rows(message, rows)
            if message.sender in found:
                raise ProtocolError(f"{message.sender} comes twice where everybody comes once")
            found[message.sender] = message
        return {party: found[party] for party in self.parties}

    async def _receive(self) -> Packet:
        return await (self.link.receive() if self.sums is None else self.sums.receive())

    async def _reply(self, message: Packet, content: Any) -> None:
        """Answers an upload; one who was only ready waits for a message, not for an answer."""
        if self.sums is None:
            await self.link.reply(message, content)
        else:
            await self.link.send(message.sender, content)

    def _vectors(self, message: Packet, rows: int) -> Tensor:
        """The vectors of a message, checked."""
        values, width = message["values"], self.setup.plan.embedding
        if not isinstance(values, np.ndarray) or values.shape != (rows, width):
            raise ProtocolError(
                f"{message.sender} sent vectors of shape {np.shape(values)}; expected {(rows, width)}"
            )
        return torch.from_numpy(np.array(values, np.float32)).to(self.setup.device)

    def _check_turn(self, message: Packet) -> None:
        """Raises `ProtocolError` unless a party uploads, or on a secure sum, is ready."""
        due = "embedding" if self.sums is None else "ready"
        if message.kind != due or message.sender not in self.parties:
            raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")

    def _check_rows(self, message: Packet, rows: Rows) -> None:
        """Raises `ProtocolError` unless the upload is of exactly the records that are due."""
        if not np.array_equal(message["rows"], rows):
            raise ProtocolError(f"{message.sender} uploads other records than the schedule says")

    def state(self) -> dict[str, Any]:
        return {
            "batches": self.batches.state(),
            "sums": -1 if self.sums is None else self.sums.number,
            "processed": self.processed,
            "epochs_done": self.epochs_done,
            "loss": self.loss,
            "test": self.test,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.batches.load(state["batches"])
        if self.sums is not None:
            self.sums.number = int(state["sums"])
        self.processed, self.epochs_done = int(state["processed"]), int(state["epochs_done"])
        self.loss, self.test = state["loss"], state["test"]


class SharingParty(Role):
    """A party that holds a copy of the labels and answers requests for embeddings of the test part.

    Args:
        setup: What the run is built from.
        party: Its name.
        model: Its local model.
        observers: Who sees what it uploads in training.
        share_labels: False where it never gets the labels.
        channel: The secure sum; by default one whose totals the server obtains.
        told: Addresses that the receiver tells what it computes from the totals of the test part.
    """

    def __init__(
        self,
        setup: Setup,
        party: str,
        *,
        model: LocalModel,
        observers: tuple[str, ...],
        share_labels: bool,
        channel: Channel | None = None,
        told: tuple[str, ...] = (),
    ) -> None:
        self.address = party
        self.setup = setup
        self.link = setup.links[party]
        self.model = model
        self.observers = observers
        self.share_labels = share_labels
        self.told = told
        self.labels: Tensor | None = None
        self.batches = shared_batches(setup)
        self.delay = build_delay(setup, party)
        self.sums: SumParticipant | None = None
        if setup.plan.protocol != "plain":
            self.channel = channel or build_channel(setup, SERVER)
            self.sums = SumParticipant(setup, party, [self.channel])

    async def prepare(self) -> None:
        if self.share_labels:
            self.labels = await self._receive_labels("labels", self.setup.data.n_train)

    async def _receive_labels(self, kind: str, count: int) -> Tensor:
        message = await self.link.receive()
        due = message.kind == kind and message.sender == SERVER
        labels = message["values"] if due else None
        if not isinstance(labels, np.ndarray) or labels.shape != (count,):
            raise ProtocolError(f"{self.address} received {message.kind!r}, not one label per record")
        return torch.from_numpy(np.array(labels)).to(self.setup.device)

    def _labels_of(self, rows: Rows) -> Tensor:
        if self.labels is None:
            raise ProtocolError(f"{self.address} trains before it has the labels")
        return self.labels[torch.from_numpy(rows)]

    async def epoch(self) -> None:
        if self.sums is not None:
            await self.sums.begin()
        for _ in range(self.batches.per_pass):
            await self._round(self.batches.next())
        self.model.check_finite()

    @abstractmethod
    async def _round(self, rows: Rows) -> None:
        """What the party does with one batch."""

    async def _upload(
        self, rows: Rows, facts: Mapping[str, Any], *, learning: bool
    ) -> tuple[Packet, Released | Contribution | Inside]:
        """Lets the batch's vectors out, with public facts for the server; returns the answer, and them."""
        if self.sums is None:
            released = self.model.release(rows, kind="embedding", observers=self.observers, learning=learning)
            return await self.link.call(SERVER, Embedding(rows=rows, values=released, **facts)), released
        _, contribution = await self._join(self.sums, rows, facts, learning=learning)
        return await self.sums.receive(), contribution

    async def _join(
        self, sums: SumParticipant, rows: Rows, facts: Mapping[str, Any], *, learning: bool
    ) -> tuple[SumRequest, Contribution | Inside]:
        """Says that the batch is ready and, once its sum is announced, lets the vectors into it."""
        await self.link.send(SERVER, Ready(**facts))
        request = await sums.receive()
        if request.kind != REQUEST or not np.array_equal(request["rows"], rows):
            raise ProtocolError(f"{self.address} is asked for other records than the schedule says")
        announced = read_request(request)
        contribution = self.model.contribute(
            rows, kind="embedding", channel=self.channel, learning=learning, also=self.observers
        )
        await sums.join(announced, contribution)
        return announced, contribution

    async def evaluate(self) -> None:
        if self.sums is not None:
            await self._sum_evaluation(self.sums)
            return
        observers = self.setup.observers(SERVER, self.address)
        while (message := await self.link.receive()).kind != "end":
            if message.kind != "embed":
                raise ProtocolError(f"{self.address} received {message.kind!r}, not a request")
            rows = self.model.check_rows(message["rows"])
            released = self.model.release(rows, kind="evaluation", observers=observers, learning=False)
            await self.link.reply(message, Embedding(values=released))

    async def _sum_evaluation(self, sums: SumParticipant) -> None:
        await sums.begin()
        while (message := await sums.receive()).kind != "end":
            if message.kind != REQUEST:
                raise ProtocolError(f"{self.address} received {message.kind!r}, not a request")
            await self._join_evaluation(sums, read_request(message))

    async def _join_evaluation(self, sums: SumParticipant, request: SumRequest) -> None:
        rows = self.model.check_rows(request.rows)
        contribution = self.model.contribute(
            rows, kind="evaluation", channel=self.channel, learning=False, also=self.told
        )
        await sums.join(request, contribution)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state(),
            "batches": self.batches.state(),
            "delay": {"steps": self.delay.steps, "generator": self.delay.generator.bit_generator.state},
            "labels": self.labels,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load(state["model"])
        self.batches.load(state["batches"])
        self.delay.steps = int(state["delay"]["steps"])
        self.delay.generator.bit_generator.state = state["delay"]["generator"]
        self.labels = None if state["labels"] is None else state["labels"].to(self.setup.device)
