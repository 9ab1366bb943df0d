"""VAFL: asynchronous (Alg. 1), t-synchronous (Alg. 2) and synchronous block-wise training.

Chen, Jin, Sun, Yin: VAFL: a Method of Vertical Asynchronous Federated Learning, 2020.

The server keeps the latest embedding of each record and party. A party that becomes active uploads the
embeddings of a batch, the server updates its model with what it has and answers with the gradient, and the
party updates its encoder. Before the first epoch every party uploads every training record once, so that the
server never works with a made-up embedding; those releases count like all others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER, Algorithm, Role, ServerRole, Setup
from securevfl.algorithms.batches import Batches
from securevfl.algorithms.local import (
    LocalModel,
    Records,
    build_optimiser,
    check_finite,
    load_module_state,
    module_state,
)
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.messages import Message
from securevfl.models import Fusion, metrics, task_loss
from securevfl.plan import Plan
from securevfl.rows import Rows
from securevfl.runtime.delays import StepDelay, read_trace
from securevfl.seeds import numpy_generator

CHUNK = 1024


class VAFLParty(Role):
    """A party: works through its batches, and answers the server's requests for fresh embeddings."""

    def __init__(self, setup: Setup, party: str, *, shared_schedule: bool) -> None:
        self.address = party
        self.setup = setup
        self.link = setup.links[party]
        self.observers = setup.observers(SERVER, party)
        index = setup.data.parties.index(party)
        self.model = build_local_model(setup, party)
        self.batches = Batches(
            setup.data.n_train,
            setup.plan.batch,
            numpy_generator(setup.plan.seed, "batches", 0 if shared_schedule else index),
        )
        self.delay = build_delay(setup, party)
        self.ready_at: float | None = None
        self._ended = asyncio.Event()

    async def prepare(self) -> None:
        await self._serve()

    async def evaluate(self) -> None:
        await self._serve()

    async def epoch(self) -> None:
        self._ended = asyncio.Event()
        listener = asyncio.create_task(self._listen())
        try:
            await self._work()
            await listener
        finally:
            listener.cancel()
        await self.link.send(SERVER, "ended", {})

    async def _serve(self) -> None:
        """Only answers requests, until the server ends the phase."""
        self._ended = asyncio.Event()
        await self._listen()
        await self.link.send(SERVER, "ended", {})

    async def _listen(self) -> None:
        while True:
            message = await self.link.receive()
            if message.kind == "end":
                self._ended.set()
                return
            if message.kind != "embed":
                raise ProtocolError(
                    f"{self.address} received {message.kind!r} from {message.sender}, not a request"
                )
            await self._answer(message)

    async def _answer(self, message: Message) -> None:
        rows = self.model.check_rows(message["rows"])
        released = self.model.release(
            rows, kind=str(message["purpose"]), observers=self.observers, learning=False
        )
        await self.link.reply(message, "embedding", {"values": released.values}, released.head)

    async def _work(self) -> None:
        """Algorithm 1, lines 3 to 7, until the server ends the epoch."""
        clock = self.setup.clock
        while not self._ended.is_set():
            if self.ready_at is None:
                self.ready_at = clock.now() + self.delay.draw()
            if not await clock.sleep_until(self.ready_at, self._ended):
                return
            self.ready_at = None
            rows = self.batches.next()
            released = self.model.release(rows, kind="embedding", observers=self.observers, learning=True)
            fields = {"rows": rows.astype(np.int32), "values": released.values}
            answer = await self.link.call(SERVER, "embedding", fields, released.head)
            if answer.kind == "gradient":
                self.model.learn(released, answer["values"], rows)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state(),
            "batches": self.batches.state(),
            "delay": {"steps": self.delay.steps, "generator": self.delay.generator.bit_generator.state},
            "ready_at": self.ready_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load(state["model"])
        self.batches.load(state["batches"])
        self.delay.steps = int(state["delay"]["steps"])
        self.delay.generator.bit_generator.state = state["delay"]["generator"]
        self.ready_at = state["ready_at"]


class VAFLServer(ServerRole):
    """The server: latest embeddings, its model, the staleness rule.

    Args:
        setup: What the run is built from.
        wait_for: How many parties' uploads one iteration takes (1 is Algorithm 1).
        shared_schedule: True where all parties upload the same records at once.
    """

    def __init__(self, setup: Setup, *, wait_for: int, shared_schedule: bool) -> None:
        self.setup = setup
        self.link = setup.links[SERVER]
        data, plan = setup.data, setup.plan
        self.parties = data.parties
        self.wait_for = wait_for
        self.shared_schedule = shared_schedule
        self.gate = setup.gates[setup.label_holder]
        self.head = setup.head
        self.fusion = Fusion(plan.fusion, (plan.embedding,) * len(self.parties))
        parameters = [p for p in setup.head.parameters() if p.requires_grad]
        self.optimiser = build_optimiser(parameters, plan, setup.server_rate) if parameters else None
        self.labels = torch.from_numpy(np.concatenate([data.y_train, data.y_test])).to(setup.device)
        self.embeddings: Tensor | None = None
        self.updated_at: npt.NDArray[np.int64] = np.zeros((data.n_train, len(self.parties)), np.int64)
        self.iteration = 0
        self.processed = 0
        self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}
        self.oldest_used = 0
        self._losses: list[float] = []

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        rows = np.arange(self.setup.data.n_train, dtype=np.int64)
        self.embeddings = await self._collect(rows, "initial")
        await self._end_phase()

    async def epoch(self) -> None:
        self._losses = []
        target = (self.epochs_done + 1) * len(self.parties) * self.setup.data.n_train
        while self.processed < target:
            await self._iterate(await self._gather_uploads())
        self.epochs_done += 1
        self.loss = float(np.mean(self._losses))
        check_finite(SERVER, self.head)
        await self._end_phase()

    async def evaluate(self) -> None:
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        embeddings = await self._collect(rows, "evaluation")
        with torch.no_grad():
            self.predictions = self._outputs(embeddings)
        self.test = metrics(data.task, self.predictions, self.labels[data.n_train :])
        await self._end_phase()

    async def _end_phase(self) -> None:
        """Tells all parties that the phase is over and answers what is still under way."""
        for party in self.parties:
            await self.link.send(party, "end", {})
        running = set(self.parties)
        while running:
            message = await self.link.receive()
            if message.kind == "ended":
                running.discard(message.sender)
            else:
                self._store(*self._upload(message))
                await self.link.reply(message, "late", {})

    async def _collect(self, rows: Rows, purpose: str) -> Tensor:
        """Fresh embeddings of rows from all parties: (rows, parties, embedding)."""
        pieces = []
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            pieces.append(torch.stack(await self._ask_all(chunk, purpose), dim=1))
        return torch.cat(pieces)

    async def _ask_all(self, rows: Rows, purpose: str) -> list[Tensor]:
        return list(await asyncio.gather(*(self._ask(party, rows, purpose) for party in self.parties)))

    async def _ask(self, party: str, rows: Rows, purpose: str) -> Tensor:
        fields = {"rows": rows.astype(np.int32), "purpose": purpose}
        answer = await self.link.call(party, "embed", fields)
        return self._tensor(party, answer["values"], len(rows))

    def _tensor(self, party: str, values: Any, rows: int) -> Tensor:
        width = self.setup.plan.embedding
        if not isinstance(values, np.ndarray) or values.shape != (rows, width):
            raise ProtocolError(
                f"{party} sent embeddings of shape {np.shape(values)}; expected {(rows, width)}"
            )
        return torch.from_numpy(np.array(values, np.float32)).to(self.setup.device)

    # -- iterations -----------------------------------------------------------------------------------------

    async def _gather_uploads(self) -> list[Message]:
        """Uploads of `wait_for` distinct parties, in order of arrival."""
        uploads: dict[str, Message] = {}
        while len(uploads) < self.wait_for:
            message = await self.link.receive()
            if message.kind != "embedding" or message.sender not in self.parties or message.sender in uploads:
                raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
            uploads[message.sender] = message
        return list(uploads.values())

    def _upload(self, message: Message) -> tuple[int, Rows, Tensor]:
        rows = np.asarray(message["rows"]).astype(np.int64)
        if rows.ndim != 1 or rows.size == 0 or rows.min() < 0 or rows.max() >= self.setup.data.n_train:
            raise ProtocolError(f"{message.sender} uploads rows that are not training records")
        return (
            self.parties.index(message.sender),
            rows,
            self._tensor(message.sender, message["values"], len(rows)),
        )

    def _store(self, party: int, rows: Rows, values: Tensor) -> None:
        if self.embeddings is None:
            raise ProtocolError("an upload arrived before the initial embeddings")
        self.embeddings[torch.from_numpy(rows), party] = values
        self.updated_at[rows, party] = self.iteration

    async def _iterate(self, messages: list[Message]) -> None:
        """One iteration k: store the uploads, refresh what is too old, update, answer."""
        self.iteration += 1
        uploads = [self._upload(message) for message in messages]
        for upload in uploads:
            self._store(*upload)
        for party, rows, _ in uploads:
            await self._refresh(party, rows)
        gradients, loss = self._step(uploads)
        self._losses.append(loss)
        for message, (_, rows, _), gradient in zip(messages, uploads, gradients, strict=True):
            await self._answer(message, rows, gradient)
        self.processed += sum(len(rows) for _, rows, _ in uploads)
        self.setup.report(self.processed, loss)

    def _outputs(self, embeddings: Tensor) -> Tensor:
        """The model's outputs for (rows, parties, width) embeddings."""
        outputs: Tensor = self.head(self.fusion(embeddings.transpose(0, 1)))
        return outputs

    async def _refresh(self, uploading: int, rows: Rows) -> None:
        """Asks for embeddings older than the delay bound D before they are used (section 2.3 of the paper)."""
        ages = self.iteration - self.updated_at[rows]
        bound = self.setup.plan.delay_bound
        if bound:
            for party, name in enumerate(self.parties):
                stale = rows[ages[:, party] > bound]
                if party != uploading and stale.size:
                    self._store(party, stale, await self._ask(name, stale, "refresh"))
            ages = self.iteration - self.updated_at[rows]
        self.oldest_used = max(self.oldest_used, int(ages.max()))

    def _step(self, uploads: list[tuple[int, Rows, Tensor]]) -> tuple[list[Tensor], float]:
        """Updates the server's model; returns each upload's gradient and the mean loss."""
        if self.embeddings is None:
            raise ProtocolError("a step was asked for before the initial embeddings")
        if self.shared_schedule:
            batches = [uploads[0][1]]
        else:
            batches = [rows for _, rows, _ in uploads]
        index = torch.from_numpy(np.concatenate(batches)).to(self.setup.device)
        inputs = self.embeddings[index].requires_grad_()
        task = self.setup.data.task
        each = task_loss(task, self._outputs(inputs), self.labels[index], reduction="none")
        means = [piece.mean() for piece in torch.split(each, [len(rows) for rows in batches])]
        total = torch.stack(means).sum()
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        if self.optimiser is not None:
            for parameter in self.optimiser.param_groups[0]["params"]:
                parameter.grad /= len(batches)
            self.optimiser.step()
        return self._split_gradient(inputs.grad, uploads), float(total.detach()) / len(batches)

    def _split_gradient(
        self, gradient: Tensor | None, uploads: list[tuple[int, Rows, Tensor]]
    ) -> list[Tensor]:
        if gradient is None:
            raise ProtocolError("the server's model does not depend on the embeddings")
        if self.shared_schedule:
            return [gradient[:, party] for party, _, _ in uploads]
        pieces = torch.split(gradient, [len(rows) for _, rows, _ in uploads])
        return [piece[:, party] for piece, (party, _, _) in zip(pieces, uploads, strict=True)]

    async def _answer(self, message: Message, rows: Rows, gradient: Tensor) -> None:
        """Sends the gradient through the label holder's gate; frozen encoders get an empty answer."""
        observers = self.setup.observers(message.sender, self.setup.label_holder)
        if observers and self.setup.plan.encoder_training == "none":
            await self.link.reply(message, "received", {})
            return
        head = None
        if observers:
            head = self.gate.release_exact(rows=rows, vectors=len(rows), kind="gradient", observers=observers)
        await self.link.reply(message, "gradient", {"values": gradient.cpu().numpy()}, head)

    def figures(self) -> dict[str, Any]:
        """Iterations so far, and the age of the oldest embedding that was used."""
        return {"iterations": self.iteration, "oldest": self.oldest_used}

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "head": module_state(self.head, self.optimiser),
            "embeddings": self.embeddings,
            "updated_at": self.updated_at,
            "iteration": self.iteration,
            "processed": self.processed,
            "epochs_done": self.epochs_done,
            "loss": self.loss,
            "test": self.test,
            "oldest_used": self.oldest_used,
        }

    def load(self, state: dict[str, Any]) -> None:
        load_module_state(self.head, self.optimiser, state["head"])
        self.embeddings = state["embeddings"].to(self.setup.device)
        self.updated_at = np.array(state["updated_at"], np.int64)
        self.iteration = int(state["iteration"])
        self.processed = int(state["processed"])
        self.epochs_done = int(state["epochs_done"])
        self.loss, self.test = state["loss"], state["test"]
        self.oldest_used = int(state["oldest_used"])


def build_local_model(setup: Setup, party: str) -> LocalModel:
    """A party's model. Encoders whose embeddings never leave are trained raw in every mode."""
    plan, data = setup.plan, setup.data
    index = data.parties.index(party)
    encoder = setup.encoders[party]
    leaves = bool(setup.observers(SERVER, party))
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    frozen = (leaves and plan.encoder_training == "none") or not parameters
    return LocalModel(
        name=party,
        records=Records(data.train[index], data.test[index], setup.device),
        encoder=encoder,
        optimiser=None if frozen else build_optimiser(parameters, plan, setup.rate(party)),
        gate=setup.gates[setup.hosts[party]],
        private=leaves and plan.encoder_training == "dp",
    )


def build_delay(setup: Setup, party: str) -> StepDelay:
    """How long a party's steps take."""
    plan, parties = setup.plan, setup.data.parties
    index = parties.index(party)
    trace = read_trace(Path(plan.delay_trace), parties)[party] if plan.delays == "trace" else ()
    return StepDelay(
        plan.delays,
        party=index,
        parties=len(parties),
        speed=float(plan.speeds.get(party, 1.0)),
        generator=numpy_generator(plan.seed, "delays", index),
        trace=trace,
    )


def step_shares(plan: Plan, parties: tuple[str, ...]) -> dict[str, float]:
    """Each party's expected share of all steps, from the mean duration of its steps."""
    traces = read_trace(Path(plan.delay_trace), parties) if plan.delays == "trace" else {}
    rates = {}
    for index, party in enumerate(parties):
        mean = {
            "constant": 1.0,
            "poisson": (index + 1) / len(parties),
            "exponential": index + 1.0,
            "trace": float(np.mean(traces.get(party, (1.0,)))),
        }[plan.delays]
        rates[party] = 1.0 / max(mean / float(plan.speeds.get(party, 1.0)) + 2 * plan.latency, 1e-9)
    slack = 1.25 if plan.delays in ("poisson", "exponential") else 1.0
    return {party: min(1.0, slack * rate / sum(rates.values())) for party, rate in rates.items()}


class VAFL(Algorithm):
    """Asynchronous VAFL."""

    name = "vafl"
    summary = "asynchronous: the server steps on every upload, with the latest embeddings of the others"
    shared_schedule = False

    def wait_for(self, plan: Plan, parties: int) -> int:
        """How many uploads one iteration takes."""
        return 1

    def roles(self, setup: Setup) -> tuple[ServerRole, list[Role]]:
        """The server role and one role per party."""
        count = len(setup.data.parties)
        server = VAFLServer(
            setup, wait_for=self.wait_for(setup.plan, count), shared_schedule=self.shared_schedule
        )
        parties: list[Role] = [
            VAFLParty(setup, party, shared_schedule=self.shared_schedule) for party in setup.data.parties
        ]
        return server, parties

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """The fastest party's share of all steps; random delays get a quarter on top."""
        if self.shared_schedule:
            return float(plan.epochs)
        sending = [p for p in data.parties if plan.label_holder == "server" or p != data.label_holder]
        shares = step_shares(plan, data.parties)
        return plan.epochs * max((shares[p] for p in sending), default=0.0) * len(data.parties)


class VAFLTSync(VAFL):
    """t-synchronous VAFL."""

    name = "vafl-tsync"
    summary = "the server waits for uploads of t different parties (plan field wait_for)"

    def check(self, plan: Plan, data: VerticalData) -> None:
        """t must lie between 1 and the number of parties."""
        if not 1 <= plan.wait_for <= len(data.parties):
            raise PlanError(
                f"vafl-tsync waits for t parties: set wait_for between 1 and {len(data.parties)}, not {plan.wait_for}"
            )

    def wait_for(self, plan: Plan, parties: int) -> int:
        """The plan's t."""
        return plan.wait_for


class VAFLSync(VAFL):
    """Synchronous block-wise training: all parties work on the same batch."""

    name = "vafl-sync"
    summary = "synchronous baseline: all parties upload the same batch, one joint step"
    shared_schedule = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """All of them."""
        return parties
