"""What the roles of several families share.

`LabelHolder` counts, measures and lets out what depends on labels; `Party` answers the server's messages.

FDML and the Flex family go on from `SharingServer` and `SharingParty`: labels are given to all parties before
the first epoch, as both papers do (the label holder's gate writes down that they left without protection),
and all roles walk through the records in one order, drawn from the run's seed. On a secure sum their parties
only say that they are ready; the server then obtains the sum over all of them, fresh, and never sees a
party's vectors.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from securevfl.algorithms.base import SERVER, Role, ServerRole, Setup, expect
from securevfl.algorithms.channels import Channel, build_channel
from securevfl.algorithms.local import LocalModel
from securevfl.algorithms.messages import (
    BatchReady,
    Embed,
    Embedding,
    End,
    Gradient,
    Labels,
    Received,
    SumRequest,
)
from securevfl.algorithms.steps import build_batches, build_delay
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.errors import ProtocolError
from securevfl.models import Fusion, metrics, task_loss
from securevfl.privacy.defences import DEFENCES
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.messages import Packet, Stop
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows, fixed
from securevfl.settings.protocols import FACTS
from securevfl.transfers import Index, to_device

CHUNK = 1024
Gradients = Sequence[npt.NDArray[np.float32]]


def pieces(start: int, end: int) -> list[Rows]:
    """Record indices from start to end, in pieces that fit a message."""
    rows = np.arange(start, end, dtype=np.int64)
    return [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]


def channels_of(setup: Setup, channel: Channel | None = None) -> list[Channel]:
    """The channel of a run with one sum, whose totals the server obtains; none on the plain protocol."""
    return [] if setup.plan.protocol == "plain" else [channel or build_channel(setup, SERVER)]


class LabelHolder(ServerRole):
    """A server that counts, measures, and lets out what depends on the labels."""

    kept: ClassVar[tuple[str, ...]] = ("processed", "epochs_done", "loss", "test")

    def __init__(self, setup: Setup) -> None:
        self.setup, data = setup, setup.data
        self.link = setup.links[SERVER]
        self.parties = data.parties
        self.widths = dict(zip(self.parties, setup.plan.widths(self.parties), strict=True))
        self.fusion = Fusion(setup.plan.fusion, tuple(self.widths.values()))
        self._index = Index(setup.device)
        self.labels = to_device(np.concatenate([data.y_train, data.y_test]), setup.device)
        self.processed = self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}
        self._losses: list[float] = []

    @property
    def gate(self) -> Gate:
        """The label holder's gate; baselines have none."""
        return self.setup.gates[self.setup.label_holder]

    def _count(self, records: int, loss: float | None) -> None:
        """Counts one step."""
        self.processed += records
        if loss is not None:
            self._losses.append(loss)
        if self.setup.report is not None:
            self.setup.report(self.processed, loss)

    def _close_epoch(self) -> None:
        """Counts the epoch; its loss is the mean of its steps' losses."""
        self.epochs_done += 1
        self.loss = float(np.mean(self._losses)) if self._losses else self.loss
        self._losses = []

    @property
    def test_pieces(self) -> list[Rows]:
        """The records of the test part."""
        data = self.setup.data
        return pieces(data.n_train, data.n_train + data.n_test)

    def _measure(self, outputs: Tensor) -> dict[str, float | None]:
        """The metrics of the model's outputs for the test part, which are kept as predictions."""
        data, self.predictions = self.setup.data, outputs
        return metrics(data.task, outputs, self.labels[data.n_train :], self.setup.loss())

    def _mean_loss(self, outputs: Tensor, rows: Rows, party: str = "") -> Tensor:
        """The mean loss of records: the run's, or the one that a party descends on."""
        labels = self.labels[self._index(rows)]
        return task_loss(self.setup.data.task, outputs, labels, loss=self.setup.loss(party))

    def _tensor(self, sender: str, values: Any, rows: int) -> Tensor:
        """Vectors that arrive, one per record, padded to the widest party's."""
        width = self._checked_width(sender, values, rows)
        found = to_device(np.array(values, np.float32), self.setup.device)
        missing = self.fusion.widest - width
        return functional.pad(found, (0, missing)) if missing else found

    def _checked_width(self, sender: str, values: Any, rows: int) -> int:
        width = self.widths.get(sender, self.setup.plan.embedding)
        if getattr(values, "shape", None) != (rows, width):
            raise ProtocolError(
                f"{sender} sent vectors of shape {np.shape(values)}; expected {(rows, width)}"
            )
        return width

    def _table(self, uploads: Mapping[str, Packet], rows: int) -> Tensor:
        """The vectors of all parties: (rows, parties, width), padded to the widest party's."""
        table = np.zeros((rows, len(self.parties), self.fusion.widest), np.float32)
        for place, party in enumerate(self.parties):
            if party not in uploads:
                raise ProtocolError(f"{party} has no part in a batch that all parties upload")
            values: Any = uploads[party].fields.get("values")
            table[:, place, : self._checked_width(party, values, rows)] = values
        return to_device(table, self.setup.device)

    async def _ask(self, party: str, rows: Rows, purpose: str) -> Tensor:
        answer = await self.link.call(party, Embed(rows=rows, purpose=purpose))
        return self._tensor(party, answer["values"], len(rows))

    async def _ask_all(self, rows: Rows, purpose: str) -> Tensor:
        """Embeddings of all parties: (rows, parties, width)."""
        answers = await asyncio.gather(*(self._ask(party, rows, purpose) for party in self.parties))
        return torch.stack(answers, dim=1)

    async def _tell_all(self, content: Any) -> None:
        for party in self.parties:
            await self.link.send(party, content)

    def _exact(self, values: Any, party: str, *, rows: Rows, kind: str) -> Released | Inside:
        """Lets something that depends on the labels out to a party without protection."""
        observers = self.setup.observers(party, self.setup.label_holder)
        if not observers:
            return Inside(values=values)
        return self.gate.release_exact(values, rows=rows, kind=kind, observers=observers)

    async def _send_labels(self, parties: Sequence[str]) -> None:
        labels = np.asarray(self.setup.data.y_train)
        rows = np.arange(len(labels), dtype=np.int64)
        for party in parties:
            await self.link.send(party, Labels(values=self._exact(labels, party, rows=rows, kind="labels")))


class GradientAnswers:
    """Answers uploads with gradients of the batch's mean loss, as the plan's defence changes them."""

    def __init__(self, setup: Setup) -> None:
        plan, parties = setup.plan, setup.data.parties
        self.link, self.frozen = setup.links[SERVER], plan.encoder_training == "none"
        self.observers = {party: setup.observers(party, setup.label_holder) for party in parties}
        self.places = {party: place for place, party in enumerate(parties)}
        self.widths = plan.widths(parties)
        self.name = plan.defence
        self.defence = DEFENCES[plan.defence]
        self.level = plan.defence_level or self.defence.level
        self.gate = setup.gates[setup.label_holder]
        self.labels = np.asarray(setup.data.y_train)
        # What a party learns is in its later embeddings, and in a plain tree other parties read these.
        others = tuple(sorted(set(setup.hosts.values()) - {setup.label_holder}))
        self.readers = others if FACTS[plan.protocol].parts_are_read else ()
        self.mechanism = Mechanism(clip=plan.gradient_clip, sigma=self.level * plan.gradient_clip)

    async def send(self, messages: Sequence[Packet], rows: Sequence[Rows], gradients: Gradients) -> None:
        """Answers uploads, all together.

        Args:
            messages: The uploads.
            rows: The records of each.
            gradients: For each, as `content` takes it.
        """
        with self.gate.ledger.together() if len(messages) > 1 else nullcontext():
            contents = [
                self.content(message.sender, gradient, batch)
                for message, batch, gradient in zip(messages, rows, gradients, strict=True)
            ]
        for message, content in zip(messages, contents, strict=True):
            await self.link.reply(message, content)

    def content(
        self, party: str, gradient: npt.NDArray[np.float32], rows: Rows, **facts: Any
    ) -> Gradient | Received:
        """What a party is answered: its own part of a gradient.

        Frozen encoders of others cannot learn and get none.

        Args:
            party: Who has uploaded.
            gradient: One row per record; of tables of all parties' embeddings (rows, parties, width).
            rows: The records.
            facts: Other fields of the answer.
        """
        observers = self.observers[party]
        if observers and self.frozen:
            return Received(**facts)
        if gradient.ndim == 3:
            place = self.places[party]
            gradient = gradient[:, place, : self.widths[place]]
        return Gradient(values=self._release(gradient, rows, observers), **facts)

    def _release(
        self, values: npt.NDArray[np.float32], rows: Rows, observers: tuple[str, ...]
    ) -> Released | Inside:
        """What may be sent; without observers nothing is changed, and it stays inside."""
        if not observers:
            return Inside(values=values)
        observers = self.readers or observers
        if self.defence.counted:
            # A record's own gradient is its share of the mean, times the number of records.
            return self.gate.release_noisy(
                values.astype(np.float64) * len(rows),
                self.mechanism,
                rows=rows,
                kind="gradient",
                observers=observers,
                divisor=len(rows),
            )
        if self.name == "none":
            return self.gate.release_exact(values, rows=rows, kind="gradient", observers=observers)
        return self.gate.release_exact(
            values,
            rows=rows,
            kind=f"gradient ({self.name})",
            observers=observers,
            change=lambda each: self.defence.change(each, self.labels[rows], self.level, self.gate.noise),
        )


class Party(Role):
    """A party's role, which answers messages as `handlers` says."""

    handlers: dict[str, Callable[[Packet], Awaitable[None]]]

    def __init__(self, setup: Setup, party: str) -> None:
        self.address, self.setup = party, setup
        self.link = setup.links[party]
        self.gate = setup.gates[setup.hosts[party]]
        self.index = setup.data.parties.index(party)
        # Those who take part in sums get what is left for the role.
        self._receive: Callable[[], Awaitable[Packet]] = self.link.receive
        self._ended = Stop()

    async def _listen(self) -> None:
        """Answers until the server ends the phase."""
        while (message := await self._receive()).kind != End.kind:
            if message.kind not in self.handlers:
                expect(message, *self.handlers)
            await self.handlers[message.kind](message)
        self._ended.set()


# -- one order of records, labels at every party ------------------------------------------------------------


class SharingServer(LabelHolder):
    """A label holder that hands out labels and knows the schedule.

    Args:
        share_labels: False where the labels stay with the server.
        channel: The secure sum; by default one whose totals the server obtains.
    """

    kept: ClassVar[tuple[str, ...]] = (*LabelHolder.kept, "batches", "sums")

    def __init__(self, setup: Setup, *, share_labels: bool, channel: Channel | None = None) -> None:
        super().__init__(setup)
        self.share_labels = share_labels
        self.batches = build_batches(setup)
        self.secure = setup.plan.protocol != "plain"
        self.sums = SumParticipant(setup, SERVER, channels_of(setup, channel))

    async def prepare(self) -> None:
        if self.share_labels:
            await self._send_labels(self.parties)

    async def epoch(self) -> None:
        await self.sums.begin()
        await self._train()
        self._close_epoch()

    @abstractmethod
    async def _train(self) -> None:
        """One pass through the training records."""

    @abstractmethod
    def _outputs(self, vectors: Tensor) -> Tensor:
        """The model's outputs for vectors (rows, parties, width), or for their sums (rows, width)."""

    async def evaluate(self) -> None:
        await self.sums.begin()
        self.test = await self._evaluation()
        await self._tell_all(End())

    async def _evaluation(self) -> dict[str, float | None]:
        collect = self._total if self.secure else self._ask_all
        vectors = torch.cat([await collect(rows, "evaluation") for rows in self.test_pieces])
        with torch.no_grad():
            return self._measure(self._outputs(vectors))

    async def _total(self, rows: Rows, purpose: str) -> Tensor:
        """The sum of all parties' vectors, by the secure sum."""
        total = (await self.sums.total(rows, purpose)).values
        return to_device(total.astype(np.float32), self.setup.device)

    async def _gather(self, rows: Rows) -> dict[str, Packet]:
        """One message of each party, in their order: its upload, or on a secure sum that it is ready."""
        found: dict[str, Packet] = {}
        while len(found) < len(self.parties):
            message = await self._next_upload()
            if not self.secure:
                self._check_rows(message, rows)
            if message.sender in found:
                raise ProtocolError(f"{message.sender} comes twice where everybody comes once")
            found[message.sender] = message
        return {party: found[party] for party in self.parties}

    async def _next_upload(self) -> Packet:
        return expect(await self.sums.receive(), BatchReady.kind if self.secure else Embedding.kind)

    def _check_rows(self, message: Packet, rows: Rows) -> None:
        """Raises `ProtocolError` unless the upload is of exactly the records that are due."""
        if message.rows is not rows and not np.array_equal(message["rows"], rows):
            raise ProtocolError(f"{message.sender} uploads other records than the schedule says")

    async def _reply(self, message: Packet, content: Any) -> None:
        """Answers an upload; one who was only ready waits for a message, not for an answer."""
        if self.secure:
            await self.link.send(message.sender, content)
        else:
            await self.link.reply(message, content)


class SharingParty(Party):
    """A party that holds a copy of the labels and answers requests for embeddings of the test part.

    Args:
        model: Its local model.
        observers: Who sees what it uploads in training.
        share_labels: False where it never gets the labels.
        channel: The secure sum; by default one whose totals the server obtains.
        told: Addresses that the receiver tells what it computes from the totals of the test part.
    """

    kept: ClassVar[tuple[str, ...]] = ("model", "batches", "delay", "labels")

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
        super().__init__(setup, party)
        self.model, self.observers, self.share_labels, self.told = model, observers, share_labels, told
        self.labels: Tensor | None = None
        self._index = model.records.index
        self.batches = build_batches(setup)
        self.delay = build_delay(setup, party)
        self.secure = setup.plan.protocol != "plain"
        self.sums = SumParticipant(setup, party, channels_of(setup, channel))
        self._receive = self.sums.receive
        self.handlers = {REQUEST: self._sum_evaluation, Embed.kind: self._answer_evaluation}

    async def prepare(self) -> None:
        if self.share_labels:
            message = await self._receive_labels(Labels.kind, self.setup.data.n_train)
            self.labels = to_device(np.array(message["values"]), self.setup.device)

    async def _receive_labels(self, kind: str, count: int) -> Packet:
        message = expect(await self.link.receive(), kind)
        if (found := len(message["values"])) != count:
            raise ProtocolError(f"{self.address} received {found} labels, not one per record ({count})")
        return message

    def _labels_of(self, rows: Rows) -> Tensor:
        if self.labels is None:
            raise ProtocolError(f"{self.address} trains before it has the labels")
        return self.labels[self._index(rows)]

    async def epoch(self) -> None:
        await self.sums.begin()
        for _ in range(self.batches.per_pass):
            await self._round(fixed(self.batches.next()))
        self.model.check_finite()

    @abstractmethod
    async def _round(self, rows: Rows) -> None:
        """What the party does with one batch."""

    async def _upload(
        self, rows: Rows, facts: Mapping[str, Any], *, learning: bool
    ) -> tuple[Packet, Released | Contribution | Inside]:
        """Lets the batch's vectors out, with public facts for the server; returns the answer, and them."""
        if not self.secure:
            released = self.model.release(rows, kind="embedding", observers=self.observers, learning=learning)
            return await self.link.call(SERVER, Embedding(rows=rows, values=released, **facts)), released
        _, contribution = await self._join(rows, facts, learning=learning)
        return await self.sums.receive(), contribution

    async def _join(
        self, rows: Rows, facts: Mapping[str, Any], *, learning: bool
    ) -> tuple[SumRequest, Contribution | Inside]:
        """Says that the batch is ready and, once its sum is announced, lets the vectors into it."""
        await self.link.send(SERVER, BatchReady(**facts))
        request = read_request(expect(await self.sums.receive(), REQUEST))
        if not np.array_equal(request.rows, rows):
            raise ProtocolError(f"{self.address} is asked for other records than the schedule says")
        return request, await self._contribute(request, "embedding", learning=learning, also=self.observers)

    async def _contribute(
        self, request: SumRequest, kind: str, *, learning: bool, also: tuple[str, ...]
    ) -> Contribution | Inside:
        rows, channel = self.model.check_rows(request.rows), self.sums.channel(request.channel)
        given = self.model.contribute(rows, kind=kind, channel=channel, learning=learning, also=also)
        await self.sums.join(request, given)
        return given

    async def evaluate(self) -> None:
        await self.sums.begin()
        await self._listen()

    async def _answer_evaluation(self, message: Packet) -> None:
        rows, observers = self.model.check_rows(message.rows), self.setup.observers(SERVER, self.address)
        released = self.model.release(rows, kind="evaluation", observers=observers, learning=False)
        await self.link.reply(message, Embedding(values=released))

    async def _sum_evaluation(self, message: Packet) -> None:
        await self._contribute(read_request(message), "evaluation", learning=False, also=self.told)
