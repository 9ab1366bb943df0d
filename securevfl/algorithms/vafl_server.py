"""VAFL's server role: the latest embedding of each record and party, the top model, the staleness rule."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.algorithms.answers import GradientAnswers
from securevfl.algorithms.base import ABSENT, SERVER, ServerRole, Setup
from securevfl.algorithms.local import check_finite, load_module_state, module_state
from securevfl.algorithms.messages import Embed, End, Gradient, Late, Received
from securevfl.algorithms.optimisers import build_optimiser
from securevfl.errors import ProtocolError
from securevfl.models import Fusion, metrics, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.rows import Rows

CHUNK = 1024
_NONE = np.empty(0, np.int32)


class Upload(NamedTuple):
    """One party's upload, checked: whose, of which records (as rows and as a tensor), the embeddings."""

    party: int
    rows: Rows
    where: Tensor
    values: Tensor


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
        self.answers = GradientAnswers(setup)
        self.observers = {party: setup.observers(party, setup.label_holder) for party in self.parties}
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
        self.absent: set[str] = set()
        self._losses: list[float] = []

    # -- phases ---------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        self.absent.clear()
        rows = np.arange(self.setup.data.n_train, dtype=np.int64)
        self.embeddings = await self._collect(rows, "initial")
        await self._end_phase()

    async def epoch(self) -> None:
        self._losses = []
        self.absent.clear()
        target = (self.epochs_done + 1) * len(self.parties) * self.setup.data.n_train
        while self.processed < target:
            await self._iterate(await self._gather_uploads())
        self.epochs_done += 1
        self.loss = float(np.mean(self._losses))
        check_finite(SERVER, self.head)
        await self._end_phase()

    async def evaluate(self) -> None:
        self.absent.clear()
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
            await self.link.send(party, End())
        running = set(self.parties)
        while running - self.absent:
            message = await self._receive()
            if message.kind == "ended":
                running.discard(message.sender)
            elif message.kind == ABSENT:
                self.absent.add(message.sender)
            else:
                await self._late(message)

    async def _receive(self) -> Packet:
        return await self.link.receive()

    async def _late(self, message: Packet) -> None:
        """Keeps an upload that came after the end; it is too late for a step."""
        self._store(self._upload(message))
        await self.link.reply(message, Late())

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
        answer = await self.link.call(party, Embed(rows=rows, purpose=purpose))
        return self._tensor(party, answer["values"], len(rows))

    def _tensor(self, party: str, values: Any, rows: int) -> Tensor:
        width = self.setup.plan.embedding
        if not isinstance(values, np.ndarray) or values.shape != (rows, width):
            raise ProtocolError(
                f"{party} sent embeddings of shape {np.shape(values)}; expected {(rows, width)}"
            )
        return torch.from_numpy(np.array(values, np.float32)).to(self.setup.device)

    # -- iterations -----------------------------------------------------------------------------------------

    async def _gather_uploads(self) -> list[Packet]:
        """Uploads of `wait_for` distinct parties, or of all that are present, in order of arrival."""
        uploads: dict[str, Packet] = {}
        while len(uploads) < max(1, min(self.wait_for, len(self.parties) - len(self.absent))):
            message = await self._receive()
            if message.kind == ABSENT:
                self.absent.add(message.sender)
                continue
            if message.kind != "embedding" or message.sender not in self.parties or message.sender in uploads:
                raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
            uploads[message.sender] = message
        return list(uploads.values())

    def _upload(self, message: Packet) -> Upload:
        fields: Mapping[str, Any] = message.fields
        rows = fields.get("rows", _NONE).astype(np.int64)
        if rows.size == 0 or rows.max() >= len(self.updated_at):
            raise ProtocolError(f"{message.sender} uploads rows that are not training records")
        party = self.parties.index(message.sender)
        return self._upload_of(party, rows, self._tensor(message.sender, fields.get("values"), len(rows)))

    def _upload_of(self, party: int, rows: Rows, values: Tensor) -> Upload:
        return Upload(party, rows, torch.from_numpy(rows).to(self.setup.device), values)

    def _store(self, upload: Upload) -> None:
        if self.embeddings is None:
            raise ProtocolError("an upload arrived before the initial embeddings")
        self.embeddings.select(1, upload.party).index_copy_(0, upload.where, upload.values)
        self.updated_at[upload.rows, upload.party] = self.iteration

    def _shared_uploads(self, messages: list[Packet]) -> list[Upload]:
        """Uploads of one batch by all parties; its records are checked once."""
        first = self._upload(messages[0])
        uploads = [first]
        for message in messages[1:]:
            if not np.array_equal(message["rows"], first.rows):
                raise ProtocolError("parties of synchronous training uploaded different batches")
            values = self._tensor(message.sender, message["values"], len(first.rows))
            uploads.append(first._replace(party=self.parties.index(message.sender), values=values))
        return uploads

    def _store_all(self, uploads: list[Upload]) -> None:
        """Stores uploads; one batch of all parties is written at once."""
        if not self.shared_schedule or len(uploads) < len(self.parties):
            for upload in uploads:
                self._store(upload)
            return
        if self.embeddings is None:
            raise ProtocolError("an upload arrived before the initial embeddings")
        ordered = sorted(uploads, key=lambda upload: upload.party)
        table = torch.stack([upload.values for upload in ordered], dim=1)
        self.embeddings.index_copy_(0, ordered[0].where, table)
        self.updated_at[ordered[0].rows] = self.iteration

    async def _iterate(self, messages: list[Packet]) -> None:
        """One iteration k: store the uploads, refresh what is too old, update, answer."""
        self.iteration += 1
        if self.shared_schedule:
            uploads = self._shared_uploads(messages)
        else:
            uploads = [self._upload(message) for message in messages]
        self._store_all(uploads)
        for upload in uploads[:1] if self.shared_schedule else uploads:
            await self._refresh(upload)
        gradients, loss = self._step(uploads)
        self._losses.append(loss)
        for message, upload, gradient in zip(messages, uploads, gradients, strict=True):
            await self._answer(message, upload.rows, gradient)
        self.processed += sum(len(upload.rows) for upload in uploads)
        self.setup.report(self.processed, loss)

    def _outputs(self, embeddings: Tensor) -> Tensor:
        """The model's outputs for (rows, parties, width) embeddings."""
        outputs: Tensor = self.head(self.fusion.join_table(embeddings))
        return outputs

    async def _refresh(self, upload: Upload) -> None:
        """Asks for embeddings older than the delay bound D before they are used (VAFL, section 2.3)."""
        rows, bound = upload.rows, self.setup.plan.settings.delay_bound
        if bound:
            ages = self.iteration - self.updated_at[rows]
            for party, name in enumerate(self.parties):
                stale = rows[ages[:, party] > bound]
                if party != upload.party and stale.size:
                    self._store(self._upload_of(party, stale, await self._ask(name, stale, "refresh")))
        self.oldest_used = max(self.oldest_used, self.iteration - int(self.updated_at[rows].min()))

    def _step(self, uploads: list[Upload]) -> tuple[list[Tensor], float]:
        """Updates the server's model; returns each upload's gradient and the mean loss."""
        if self.embeddings is None:
            raise ProtocolError("a step was asked for before the initial embeddings")
        batches = [each.where for each in (uploads[:1] if self.shared_schedule else uploads)]
        index = batches[0] if len(batches) == 1 else torch.cat(batches)
        inputs = self.embeddings.index_select(0, index).requires_grad_()
        task, labels = self.setup.data.task, self.labels.index_select(0, index)
        if len(batches) == 1:
            total = task_loss(task, self._outputs(inputs), labels)
        else:
            each = task_loss(task, self._outputs(inputs), labels, reduction="none")
            pieces = torch.split(each, [len(rows) for rows in batches])
            total = torch.stack([piece.mean() for piece in pieces]).sum()
        self._update_head(total, len(batches))
        return self._split_gradient(inputs.grad, uploads), total.item() / len(batches)

    def _update_head(self, total: Tensor, batches: int) -> None:
        """One step on the mean of the batches' losses; leaves the gradient of their sum at the inputs."""
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        if self.optimiser is not None:
            for parameter in self.optimiser.param_groups[0]["params"] if batches > 1 else ():
                parameter.grad /= batches
            self.optimiser.step()

    def _split_gradient(self, gradient: Tensor | None, uploads: list[Upload]) -> list[Tensor]:
        if gradient is None:
            raise ProtocolError("the server's model does not depend on the embeddings")
        if self.shared_schedule or len(uploads) == 1:
            return [gradient.select(1, each.party) for each in uploads]
        pieces = torch.split(gradient, [len(each.rows) for each in uploads])
        return [piece.select(1, each.party) for piece, each in zip(pieces, uploads, strict=True)]

    async def _answer(self, message: Packet, rows: Rows, gradient: Tensor) -> None:
        """Sends the gradient through the label holder's gate; frozen encoders get an empty answer."""
        observers = self.observers[message.sender]
        if observers and self.setup.plan.encoder_training == "none":
            await self.link.reply(message, Received())
            return
        released = self.answers.release(gradient, rows=rows, observers=observers)
        await self.link.reply(message, Gradient(values=released))

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
