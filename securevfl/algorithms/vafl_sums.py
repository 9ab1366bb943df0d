"""VAFL on secure sums: the server never sees an embedding, only sums over all parties.

A party that becomes active names its records; the server obtains the sum of all parties' current embeddings
of these records, steps, and answers with the gradient of the sum. No embedding is ever stale, so there is no
initial upload and no delay bound. Every sum is a release of every party, not of the active one alone.

With a threshold (protocol ``pairwise``) a sum goes on without parties that are gone: the server steps on the
sum over the others, counts for each party how many sums are without it, and lets it in again in the next
phase. What a party that was declared gone still asks for in this phase is answered at its end.

Where encoders never change (mode ``frozen``), the server keeps each record's sum and never asks for it again:
each record is released once, and the label holder adds its own, trained part at home.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import ABSENT, SERVER, Setup
from securevfl.algorithms.channels import build_channel
from securevfl.algorithms.local import load_module_state, module_state
from securevfl.algorithms.messages import Embedding, Late
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.algorithms.vafl_party import VAFLParty
from securevfl.algorithms.vafl_server import CHUNK, VAFLServer
from securevfl.errors import ProtocolError
from securevfl.models import metrics, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside
from securevfl.privacy.rows import Rows

TRAINING = "embedding"
PURPOSES = (TRAINING, "evaluation")
"""What a party lets its embeddings be summed for."""


class SummingServer(VAFLServer):
    """The server: its model, and sums on demand.

    Args:
        setup: What the run is built from.
        wait_for: How many parties' requests one iteration takes.
        shared_schedule: True where all parties name the same records at once.
    """

    def __init__(self, setup: Setup, *, wait_for: int, shared_schedule: bool) -> None:
        super().__init__(setup, wait_for=wait_for, shared_schedule=shared_schedule)
        self.sums = SumParticipant(setup, SERVER, [build_channel(setup, SERVER)])
        self.frozen = setup.plan.encoder_training == "none"
        records = setup.data.n_train + setup.data.n_test if self.frozen else 0
        self.others = torch.zeros((records, setup.plan.embedding), device=setup.device)
        self.known = np.zeros(records, np.bool_)
        self.absent_rounds: Counter[str] = Counter()
        self._ending = False
        self._unanswered: list[Packet] = []

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self._begin(everybody=True)
        await self._end_phase()

    async def epoch(self) -> None:
        await self._begin(everybody=False)
        await super().epoch()

    async def evaluate(self) -> None:
        await self._begin(everybody=True)
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        totals = [
            await self._total(rows[start : start + CHUNK], "evaluation")
            for start in range(0, len(rows), CHUNK)
        ]
        with torch.no_grad():
            self.predictions = self.head(torch.cat(totals))
        self.test = metrics(data.task, self.predictions, self.labels[data.n_train :])
        await self._end_phase()

    async def _begin(self, *, everybody: bool) -> None:
        self._ending, self._unanswered = False, []
        self.absent.clear()
        await self.sums.begin(everybody=everybody)

    async def _end_phase(self) -> None:
        self._ending = True
        for message in self._unanswered:
            await self._late(message)
        await super()._end_phase()

    async def _receive(self) -> Packet:
        """The next message of a party that is present; one that is gone waits until the phase ends."""
        while True:
            message = await self.sums.receive()
            if message.kind == ABSENT or message.sender not in self.sums.gone:
                return message
            if message.kind == TRAINING and self._ending:
                await self._late(message)
            elif message.kind == TRAINING:
                self._unanswered.append(message)

    async def _late(self, message: Packet) -> None:
        await self.link.reply(message, Late())

    # -- sums -----------------------------------------------------------------------------------------------

    async def _total(self, rows: Rows, purpose: str) -> Tensor:
        """The sum of all parties' embeddings of rows; with a threshold, of those present."""
        if not self.frozen:
            total = await self.sums.total(rows, purpose)
            self.absent_rounds.update(total.missing)
            return self._tensor_of(total.values)
        missing = rows[~self.known[rows]]
        if missing.size:
            self.others[torch.from_numpy(missing)] = self._tensor_of(
                (await self.sums.total(missing, purpose)).summed
            )
            self.known[missing] = True
        others = self.others[torch.from_numpy(rows)]
        holder = self.setup.label_holder
        return others + await self._ask(holder, rows, purpose) if holder in self.parties else others

    def _tensor_of(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.float32)).to(self.setup.device)

    # -- iterations -----------------------------------------------------------------------------------------

    async def _iterate(self, messages: list[Packet]) -> None:
        """One iteration k: obtain the sums, update, answer."""
        self.iteration += 1
        requests = [self._rows(message) for message in messages]
        if self.shared_schedule and any(not np.array_equal(rows, requests[0]) for rows in requests):
            raise ProtocolError("parties of synchronous training named different batches")
        batches = requests[:1] if self.shared_schedule else requests
        totals = [await self._total(rows, TRAINING) for rows in batches]
        gradients, loss = self._sum_step(totals, batches)
        self._losses.append(loss)
        answers = gradients * len(messages) if self.shared_schedule else gradients
        for message, rows, gradient in zip(messages, requests, answers, strict=True):
            if message.sender in self.sums.gone:
                await self._late(message)  # its part is not in the sum, so the gradient is not for it
            else:
                await self._answer(message, rows, gradient)
        self.processed += sum(len(rows) for rows in requests)
        self.setup.report(self.processed, loss)

    def _rows(self, message: Packet) -> Rows:
        rows: Rows = message["rows"].astype(np.int64)
        if rows.size == 0 or rows.max() >= self.setup.data.n_train:
            raise ProtocolError(f"{message.sender} names rows that are not training records")
        return rows

    def _sum_step(self, totals: list[Tensor], batches: list[Rows]) -> tuple[list[Tensor], float]:
        """Updates the server's model; returns each batch's gradient of its sum, and the mean loss."""
        inputs = torch.cat(totals).requires_grad_()
        labels = self.labels[torch.from_numpy(np.concatenate(batches)).to(self.setup.device)]
        each = task_loss(self.setup.data.task, self.head(inputs), labels, reduction="none")
        sizes = [len(rows) for rows in batches]
        total = torch.stack([piece.mean() for piece in torch.split(each, sizes)]).sum()
        self._update_head(total, len(batches))
        if inputs.grad is None:
            raise ProtocolError("the server's model does not depend on the embeddings")
        return list(torch.split(inputs.grad, sizes)), float(total.detach()) / len(batches)

    def absences(self) -> dict[str, int]:
        """Sums of training that are without a party."""
        return {party: self.absent_rounds[party] for party in self.parties if self.absent_rounds[party]}

    def figures(self) -> dict[str, Any]:
        """Iterations so far; with a threshold also how many sums are without a party."""
        absent = {"absent_rounds": self.absences()} if self.setup.plan.threshold else {}
        return super().figures() | absent

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "head": module_state(self.head, self.optimiser),
            "others": self.others,
            "known": self.known,
            "round": self.sums.number,
            "iteration": self.iteration,
            "processed": self.processed,
            "epochs_done": self.epochs_done,
            "loss": self.loss,
            "test": self.test,
            "absent_rounds": dict(self.absent_rounds),
        }

    def load(self, state: dict[str, Any]) -> None:
        load_module_state(self.head, self.optimiser, state["head"])
        self.others = state["others"].to(self.setup.device)
        self.known = np.array(state["known"], np.bool_)
        self.sums.number = int(state["round"])
        self.iteration = int(state["iteration"])
        self.processed = int(state["processed"])
        self.epochs_done = int(state["epochs_done"])
        self.loss, self.test = state["loss"], state["test"]
        self.absent_rounds = Counter(state.get("absent_rounds", {}))


class SummingParty(VAFLParty):
    """A party: names its batches, and joins every sum that the server announces."""

    def __init__(self, setup: Setup, party: str, *, shared_schedule: bool) -> None:
        super().__init__(setup, party, shared_schedule=shared_schedule)
        self.channel = build_channel(setup, SERVER)
        self.sums = SumParticipant(setup, party, [self.channel])
        self._active: Rows | None = None
        self._contribution: Contribution | Inside | None = None

    async def _serve(self) -> None:
        await self.sums.begin()
        await super()._serve()

    async def epoch(self) -> None:
        await self.sums.begin()
        await super().epoch()

    async def _listen(self) -> None:
        while True:
            message = await self.sums.receive()
            if message.kind == "end":
                self._ended.set()
                return
            if message.kind == REQUEST:
                request = read_request(message)
                await self.sums.join(request, self._contribute(request.rows, request.purpose))
            elif message.kind == "embed" and not self.observers:
                contribution = self._contribute(message["rows"], str(message["purpose"]))
                inside = Inside(values=contribution.values.astype(np.float32))
                await self.link.reply(message, Embedding(values=inside))
            else:
                raise ProtocolError(
                    f"{self.address} received {message.kind!r} from {message.sender}, not a request"
                )

    def _contribute(self, rows: Any, purpose: str) -> Contribution | Inside:
        """This party's part in a sum; of its own batch the graph is kept."""
        rows = self.model.check_rows(rows)
        if purpose not in PURPOSES:
            raise ProtocolError(f"{self.address} is asked into a sum for {purpose!r}, not for training")
        learning = purpose == TRAINING and self._active is not None and np.array_equal(rows, self._active)
        also = self.training_observers if purpose == TRAINING else ()
        contribution = self.model.contribute(
            rows, kind=purpose, channel=self.channel, learning=learning, also=also
        )
        if learning:
            self._contribution = contribution
        return contribution

    async def _upload(self, rows: Rows) -> None:
        self._active, self._contribution = rows, None
        answer = await self.link.call(SERVER, Embedding(rows=rows))
        self._active = None
        if answer.kind == "gradient":
            if self._contribution is None:
                raise ProtocolError(f"{self.address} received a gradient before any sum over its batch")
            self.model.learn(self._contribution, answer["values"], rows)
            self._contribution = None
