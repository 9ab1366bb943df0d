"""VAFL: asynchronous (Alg. 1), t-synchronous (Alg. 2) and synchronous block-wise training.

Chen, Jin, Sun, Yin: VAFL: a Method of Vertical Asynchronous Federated Learning, 2020.

The server keeps the latest embedding of each record and party. A party that becomes active uploads the
embeddings of a batch, the server updates its model with what it has and answers with the gradient, and the
party updates its encoder. Before the first epoch every party uploads every training record once, so that the
server never works with a made-up embedding; those releases count like all others.

On secure sums the server never sees an embedding, only sums over all parties. A party that becomes active
names its records; the server obtains the sum of all parties' current embeddings of these records, steps, and
answers with the gradient of the sum. No embedding is ever stale, so there is no initial upload and no delay
bound. Every sum is a release of every party, not of the active one alone.

With a threshold (protocol ``pairwise``) a sum goes on without parties that are gone: the server steps on the
sum over the others, counts for each party how many sums are without it, and lets it in again in the next
phase. What a party that was declared gone still asks for in this phase is answered at its end.

Where encoders never change (mode ``frozen``), the server keeps each record's sum and never asks for it again:
each record is released once, and the label holder adds its own, trained part at home.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.algorithms.base import ABSENT, ONE_ORDER, SERVER, Algorithm, Role, Setup, expect
from securevfl.algorithms.channels import build_channel, check_holder_sum
from securevfl.algorithms.local import Learner, StackedModels, build_local_model
from securevfl.algorithms.messages import Also, Embed, Embedding, End, Ended, Gradient, Late, Query, Received
from securevfl.algorithms.roles import GradientAnswers, Gradients, LabelHolder, Party, pieces
from securevfl.algorithms.steps import build_batches, build_delay, build_optimiser, regularised, step_shares
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.models import task_loss
from securevfl.models.direct import DirectHead
from securevfl.privacy.messages import Packet, Stop
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows, fixed
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import PROTOCOLS

TRAINING, EVALUATION = "embedding", "evaluation"
PURPOSES = ("initial", "refresh", EVALUATION)
"""What a party lets the server ask for embeddings for."""
SUMMED = (TRAINING, EVALUATION)
"""What a party lets its embeddings be summed for."""


# -- the party ----------------------------------------------------------------------------------------------


class VAFLParty(Party):
    """A party: works through its batches, and answers the server's requests for fresh embeddings."""

    kept = ("model", "batches", "delay", "ready_at", "turn")

    def __init__(self, setup: Setup, party: str, *, shared_schedule: bool) -> None:
        super().__init__(setup, party)
        self.shared_schedule = shared_schedule
        self.observers = setup.observers(SERVER, party)
        self.training_observers = setup.observers_of_training(party)
        self.model = build_local_model(setup, party)
        self.batches = build_batches(setup, 0 if shared_schedule else self.index)
        self.delay = build_delay(setup, party)
        self.ready_at: float | None = None
        self.turn = 0
        self._open: tuple[Rows, Released | Inside] | None = None
        self.handlers = {Embed.kind: self._answer}

    async def prepare(self) -> None:
        await self._serve()

    async def evaluate(self) -> None:
        await self._serve()

    async def epoch(self) -> None:
        self._ended, self._open = Stop(), None
        async with asyncio.TaskGroup() as tasks:  # a refusal in the listener ends the work too
            tasks.create_task(self._listen())
            await self._work()
        await self.link.send(SERVER, Ended())

    async def _serve(self) -> None:
        """Only answers requests, until the server ends the phase."""
        await self._listen()
        await self.link.send(SERVER, Ended())

    async def _answer(self, message: Packet) -> None:
        rows, purpose = self.model.check_rows(message.rows), str(message["purpose"])
        if purpose not in PURPOSES:
            raise ProtocolError(f"{self.address} is asked for embeddings for {purpose!r}, not for training")
        observers = self.observers if purpose == EVALUATION else self.training_observers
        released = self.model.release(rows, kind=purpose, observers=observers, learning=False)
        await self.link.reply(message, Embedding(values=released))

    async def _work(self) -> None:
        """Algorithm 1, lines 3 to 7, until the server ends the epoch.

        On a shared schedule the party knows when that is, and releases nothing that would come too late.
        """
        clock = self.setup.clock
        left = self.batches.per_pass if self.shared_schedule else math.inf
        while not self._ended.is_set():
            if left <= 0:
                await self._ended.wait()
                return
            left -= 1
            if self.ready_at is None:
                self.ready_at = clock.now() + self.delay.draw()
            if not await clock.sleep_until(self.ready_at, self._ended):
                return
            self.ready_at = None
            await self._upload(fixed(self.batches.next()))

    async def _upload(self, rows: Rows) -> None:
        if self._open is not None:  # lines 6 and 7 of the batch before come first
            earlier, sent = self._open
            self._learn(sent, await self.link.call(SERVER, Query(rows=earlier)), earlier)
        released = self.model.release(rows, kind=TRAINING, observers=self.training_observers, learning=True)
        if self.setup.plan.settings.also:
            await self._send_others(rows, self.setup.plan.settings.also)
        answer = await self.link.call(SERVER, Embedding(rows=rows, values=released))
        if self.setup.plan.settings.query_first:
            self._open = (rows, released) if answer.kind == Received.kind else None
        else:
            self._learn(released, answer, rows)

    def _learn(self, released: Released | Inside, answer: Packet, rows: Rows) -> None:
        if answer.kind == Gradient.kind:
            self.model.learn(released, answer.fields["values"], rows)

    async def _send_others(self, rows: Rows, count: int) -> None:
        """Step 5 for records that were not selected in step 4, whose turn it is."""
        total = self.setup.data.n_train
        due = np.setdiff1d((self.turn + np.arange(min(count, total))) % total, rows)
        self.turn = (self.turn + count) % total
        if due.size:
            others = self.model.release(
                due, kind="refresh", observers=self.training_observers, learning=False
            )
            await self.link.send(SERVER, Also(rows=due, values=others))


class SummingParty(VAFLParty):
    """A party on secure sums: names its batches, and joins every sum that the server announces."""

    def __init__(self, setup: Setup, party: str, *, shared_schedule: bool) -> None:
        super().__init__(setup, party, shared_schedule=shared_schedule)
        self.channel = build_channel(setup, SERVER)
        self.sums = SumParticipant(setup, party, [self.channel])
        self._receive = self.sums.receive
        self.handlers = {REQUEST: self._join}
        if not self.observers:
            self.handlers[Embed.kind] = self._answer
        self._active: Rows | None = None
        self._contribution: Contribution | Inside | None = None

    async def _serve(self) -> None:
        await self.sums.begin()
        await super()._serve()

    async def epoch(self) -> None:
        await self.sums.begin()
        await super().epoch()

    async def _join(self, message: Packet) -> None:
        given = self._contribute(message.rows, str(message.fields["purpose"]))
        await self.sums.join(read_request(message), given)

    async def _answer(self, message: Packet) -> None:
        """Gives the server, in the same organisation, the party's own part."""
        contribution = self._contribute(message.rows, str(message["purpose"]))
        inside = Inside(values=contribution.values.astype(np.float32))
        await self.link.reply(message, Embedding(values=inside))

    def _contribute(self, rows: Any, purpose: str) -> Contribution | Inside:
        """This party's part in a sum; of its own batch the graph is kept."""
        rows = self.model.check_rows(rows)
        if purpose not in SUMMED:
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
        if answer.kind == Gradient.kind:
            if self._contribution is None:
                raise ProtocolError(f"{self.address} received a gradient before any sum over its batch")
            self.model.learn(self._contribution, answer.fields["values"], rows)
            self._contribution = None


# -- the server ---------------------------------------------------------------------------------------------


class TopModelServer(LabelHolder):
    """What the server does on every protocol: phases, its model, its answers.

    Args:
        wait_for: How many parties' uploads one iteration takes (1 is Algorithm 1).
        shared_schedule: True where all parties upload the same records at once.
    """

    kept: ClassVar[tuple[str, ...]] = (*LabelHolder.kept, "top", "iteration")

    def __init__(self, setup: Setup, *, wait_for: int, shared_schedule: bool) -> None:
        super().__init__(setup)
        self.wait_for, self.shared_schedule = wait_for, shared_schedule
        self.answers = GradientAnswers(setup)
        groups = regularised(setup.head.named_parameters(), setup.plan, SERVER)
        optimiser = build_optimiser(groups, setup.plan, setup.server_rate) if groups else None
        self.top = Learner(SERVER, setup.head, optimiser)
        self.n_train = setup.data.n_train
        self.loss_of_run = setup.loss()
        self.direct = DirectHead.of(setup.head, self.fusion, setup.data.task, self.loss_of_run)
        self.iteration = 0
        self.absent: set[str] = set()

    # -- phases ---------------------------------------------------------------------------------------------

    async def epoch(self) -> None:
        await self._begin()
        target = (self.epochs_done + 1) * len(self.parties) * self.setup.data.n_train
        while self.processed < target:
            self.iteration += 1
            await self._iterate(await self._gather_uploads())
        self._close_epoch()
        self.top.check_finite()
        await self._end_phase()

    async def evaluate(self) -> None:
        await self._begin(everybody=True)
        inputs = torch.cat([await self._collect(rows, EVALUATION) for rows in self.test_pieces])
        with torch.no_grad():
            self.test = self._measure(self._outputs(inputs))
        await self._end_phase()

    async def _begin(self, *, everybody: bool = False) -> None:
        """Starts a phase."""
        self.absent.clear()
        self._losses = []

    async def _end_phase(self) -> None:
        """Tells all parties that the phase is over and answers what is still under way."""
        await self._tell_all(End())
        running = set(self.parties)
        while running - self.absent:
            message = await self._receive()
            if message.kind == Ended.kind:
                running.discard(message.sender)
            elif message.kind == ABSENT:
                self.absent.add(message.sender)
            else:
                await self._late(message)

    async def _receive(self) -> Packet:
        return await self.link.receive()

    async def _late(self, message: Packet) -> None:
        """Answers an upload that is too late for a step."""
        await self.link.reply(message, Late())

    async def _gather_uploads(self) -> list[Packet]:
        """Uploads of `wait_for` distinct parties, or of all that are present, in order of arrival."""
        uploads: dict[str, Packet] = {}
        while len(uploads) < max(1, min(self.wait_for, len(self.parties) - len(self.absent))):
            message = await self._receive()
            if message.kind != Embedding.kind:
                self.absent.add(expect(message, ABSENT, Embedding.kind).sender)
            elif message.sender in uploads:
                raise ProtocolError(f"{message.sender} uploads twice before it is answered")
            else:
                uploads[message.sender] = message
        return list(uploads.values())

    def _rows(self, message: Packet) -> Rows:
        """The records of an upload."""
        rows: Rows | None = message.rows
        if rows is None or rows.size == 0 or rows.max() >= self.n_train:
            raise ProtocolError(f"{message.sender} uploads rows that are not training records")
        return rows

    def _rows_of_all(self, messages: list[Packet]) -> list[Rows]:
        """The distinct batches of uploads: one each, or one of all parties on a shared schedule."""
        if not self.shared_schedule:
            return [self._rows(message) for message in messages]
        first = self._rows(messages[0])
        for message in messages[1:]:
            if message.rows is not first and not np.array_equal(message.rows, first):
                raise ProtocolError("parties of synchronous training uploaded different batches")
        return [first]

    # -- one iteration --------------------------------------------------------------------------------------

    @abstractmethod
    async def _collect(self, rows: Rows, purpose: str) -> Tensor:
        """Fresh embeddings of rows, or their sum: what the model takes."""

    @abstractmethod
    async def _iterate(self, messages: list[Packet]) -> None:
        """One iteration k: take the uploads in, update, answer."""

    def _outputs(self, inputs: Tensor) -> Tensor:
        """The model's outputs for embeddings (rows, parties, width), or for their sums (rows, width)."""
        fused = self.fusion.join_table(inputs) if inputs.ndim == 3 else inputs
        outputs: Tensor = self.top.module(fused)
        return outputs

    def _step(
        self, inputs: Tensor, index: Tensor, sizes: list[int], senders: Sequence[str]
    ) -> tuple[Gradients, float]:
        """One step on the mean of the batches' mean losses.

        Args:
            inputs: What the model takes, of all batches.
            index: Their records.
            sizes: How many records each batch has.
            senders: Whom the gradients are for: one per batch, or on a shared schedule all for the one.

        Returns:
            For each sender the gradient of its batch's mean loss with respect to the inputs, by the loss that
            it descends on; and the mean loss of the run.
        """
        own = self._own_gradients(inputs, index, sizes, senders) if self.setup.plan.losses else {}
        labels = self.labels.index_select(0, index)
        if self.direct is not None and len(sizes) == 1:
            loss, gradient = self.direct.differentiate(inputs, labels)
        else:
            loss, gradient = self._differentiate(inputs, labels, sizes)
        if self.top.optimiser is not None:
            self.top.optimiser.step()
        every = gradient.cpu().numpy()
        found = np.split(every, np.cumsum(sizes[:-1])) if len(sizes) > 1 else [every]
        if self.shared_schedule:
            found *= len(senders)
        for place, each in own.items():
            found[place] = each
        return found, loss

    def _differentiate(self, inputs: Tensor, labels: Tensor, sizes: list[int]) -> tuple[float, Tensor]:
        """The mean loss, and the gradient of the batches' losses in what the model takes."""
        inputs.requires_grad_()
        outputs, task = self._outputs(inputs), self.setup.data.task
        if len(sizes) == 1:
            total = task_loss(task, outputs, labels, loss=self.loss_of_run)
        else:
            each = task_loss(task, outputs, labels, reduction="none", loss=self.loss_of_run)
            total = torch.stack([piece.mean() for piece in torch.split(each, sizes)]).sum()
        if self.top.optimiser is not None:
            self.top.optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        if self.top.optimiser is not None:
            for parameter in self.top.optimiser.param_groups[0]["params"] if len(sizes) > 1 else ():
                parameter.grad /= len(sizes)
        if inputs.grad is None:
            raise ProtocolError("the server's model does not depend on the embeddings")
        return total.item() / len(sizes), inputs.grad

    def _own_gradients(
        self, inputs: Tensor, index: Tensor, sizes: list[int], senders: Sequence[str]
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Place -> gradient, for the parties that descend on a loss of their own."""
        found = {}
        for place, sender in enumerate(senders):
            if sender in self.setup.plan.losses:
                batch = 0 if self.shared_schedule else place
                leaf = torch.split(inputs, sizes)[batch].detach().clone().requires_grad_()
                labels = self.labels.index_select(0, torch.split(index, sizes)[batch])
                loss = self.setup.loss(sender)
                mean = task_loss(self.setup.data.task, self._outputs(leaf), labels, loss=loss)
                found[place] = torch.autograd.grad(mean, leaf)[0].cpu().numpy()
        return found


class Upload(NamedTuple):
    """One party's upload, checked: whose, of which records (as rows and as a tensor), the embeddings."""

    party: int
    rows: Rows
    where: Tensor
    values: Tensor


class VAFLServer(TopModelServer):
    """The server: the latest embedding of each record and party, its model, the staleness rule."""

    kept = (*TopModelServer.kept, "embeddings", "updated_at", "oldest_used")

    def __init__(self, setup: Setup, *, wait_for: int, shared_schedule: bool) -> None:
        super().__init__(setup, wait_for=wait_for, shared_schedule=shared_schedule)
        shape = setup.data.n_train, len(self.parties)
        self.embeddings = torch.zeros((*shape, self.fusion.widest), device=setup.device)
        self.updated_at: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        self.oldest_used = 0
        self.query_first = setup.plan.settings.query_first
        self._open: dict[str, Rows] = {}

    async def prepare(self) -> None:
        await self._begin()
        every = pieces(0, self.setup.data.n_train)
        self.embeddings = torch.cat([await self._collect(rows, "initial") for rows in every])
        await self._end_phase()

    async def _collect(self, rows: Rows, purpose: str) -> Tensor:
        return await self._ask_all(rows, purpose)

    async def _begin(self, *, everybody: bool = False) -> None:
        await super()._begin(everybody=everybody)
        self._open = {}

    async def _receive(self) -> Packet:
        """The next message that begins or ends something; others are kept or answered on the way."""
        while True:
            message = await super()._receive()
            if message.kind == Also.kind:
                self._store(self._upload(message, self._rows(message)))
            elif message.kind == Query.kind:
                await self._answer_query(message)
            else:
                return message

    async def _answer_query(self, message: Packet) -> None:
        """Algorithm 1, lines 11 to 13: the gradient by the embeddings that there are now."""
        rows = self._rows(message)
        if not np.array_equal(self._open.pop(message.sender, ()), rows):
            raise ProtocolError(f"{message.sender} asks for gradients of records that it did not upload last")
        leaf = self.embeddings.index_select(0, self._index(rows)).requires_grad_()
        loss = self._mean_loss(self._outputs(leaf), rows, message.sender)
        (gradient,) = torch.autograd.grad(loss, leaf)
        await self.answers.send([message], [rows], [gradient.cpu().numpy()])

    async def _late(self, message: Packet) -> None:
        """Keeps an upload that came after the end; it is too late for a step."""
        self._store(self._upload(message, self._rows(message)))
        await super()._late(message)

    def _upload(self, message: Packet, rows: Rows) -> Upload:
        values = self._tensor(message.sender, message.fields.get("values"), len(rows))
        return Upload(self.parties.index(message.sender), rows, self._index(rows), values)

    def _store(self, upload: Upload) -> None:
        self.embeddings.select(1, upload.party).index_copy_(0, upload.where, upload.values)
        self.updated_at[upload.rows, upload.party] = self.iteration

    async def _store_all(self, messages: list[Packet], batches: list[Rows]) -> tuple[Tensor, Tensor]:
        """Stores the uploads, refreshes what is too old; what the model takes then, and of which records."""
        if self.shared_schedule:  # one batch of all parties, none of it old
            table = self._table({message.sender: message for message in messages}, len(batches[0]))
            index = self._index(batches[0])
            self.embeddings.index_copy_(0, index, table)
            self.updated_at[batches[0]] = self.iteration
            return table, index
        uploads = [self._upload(message, rows) for message, rows in zip(messages, batches, strict=True)]
        for upload in uploads:
            self._store(upload)
        for upload in uploads:
            await self._refresh(upload)
        index = uploads[0].where if len(uploads) == 1 else torch.cat([upload.where for upload in uploads])
        return self.embeddings.index_select(0, index), index

    async def _iterate(self, messages: list[Packet]) -> None:
        """Stores the uploads, refreshes what is too old, updates, answers."""
        batches = self._rows_of_all(messages)
        inputs, index = await self._store_all(messages, batches)
        senders, sizes = [message.sender for message in messages], [len(rows) for rows in batches]
        gradients, loss = self._step(inputs, index, sizes, senders)
        named = batches * len(messages) if self.shared_schedule else batches
        self._count(sum(map(len, named)), loss)
        if self.query_first:
            for message, rows in zip(messages, named, strict=True):
                self._open[message.sender] = rows
                await self.link.reply(message, Received())
        else:
            await self.answers.send(messages, named, gradients)

    async def _refresh(self, upload: Upload) -> None:
        """Asks for embeddings older than the delay bound D before they are used (VAFL, section 2.3)."""
        rows, bound = upload.rows, self.setup.plan.settings.delay_bound
        if bound:
            ages = self.iteration - self.updated_at[rows]
            for party, name in enumerate(self.parties):
                stale = rows[ages[:, party] > bound]
                if party != upload.party and stale.size:
                    values = await self._ask(name, stale, "refresh")
                    self._store(Upload(party, stale, self._index(stale), values))
        self.oldest_used = max(self.oldest_used, self.iteration - int(self.updated_at[rows].min()))

    def figures(self) -> dict[str, Any]:
        """Iterations so far, and the age of the oldest embedding that was used."""
        return {"iterations": self.iteration, "oldest": self.oldest_used}


class SummingServer(TopModelServer):
    """The server on secure sums: its model, and sums on demand."""

    kept = (*TopModelServer.kept, "others", "known", "sums", "absent_rounds")

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

    async def _begin(self, *, everybody: bool = False) -> None:
        await super()._begin()
        self._ending, self._unanswered = False, []
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
                self.sums.link.hold(message)

    # -- sums -----------------------------------------------------------------------------------------------

    async def _collect(self, rows: Rows, purpose: str) -> Tensor:
        """The sum of all parties' embeddings of rows; with a threshold, of those present."""
        if not self.frozen:
            total = await self.sums.total(rows, purpose)
            self.absent_rounds.update(total.missing)
            return self._tensor(SERVER, total.values, len(rows))
        missing = rows[~self.known[rows]]
        if missing.size:
            summed = (await self.sums.total(missing, purpose)).summed
            self.others[self._index(missing)] = self._tensor(SERVER, summed, len(missing))
            self.known[missing] = True
        others = self.others[self._index(rows)]
        holder = self.setup.label_holder
        return others + await self._ask(holder, rows, purpose) if holder in self.parties else others

    async def _iterate(self, messages: list[Packet]) -> None:
        """Obtains the sums, updates, answers."""
        batches = self._rows_of_all(messages)
        totals = torch.cat([await self._collect(rows, TRAINING) for rows in batches])
        index, senders = self._index(np.concatenate(batches)), [message.sender for message in messages]
        gradients, loss = self._step(totals, index, [len(rows) for rows in batches], senders)
        named = batches * len(messages) if self.shared_schedule else batches
        self._count(sum(map(len, named)), loss)
        for message, rows, gradient in zip(messages, named, gradients, strict=True):
            if message.sender in self.sums.gone:
                await self._late(message)  # its part is not in the sum, so the gradient is not for it
            else:
                await self.answers.send([message], [rows], [gradient])

    def absences(self) -> dict[str, int]:
        """Sums of training that are without a party."""
        return {party: self.absent_rounds[party] for party in self.parties if self.absent_rounds[party]}

    def figures(self) -> dict[str, Any]:
        """Iterations so far; with a threshold also how many sums are without a party."""
        absent = {"absent_rounds": self.absences()} if self.setup.plan.threshold else {}
        return {"iterations": self.iteration, "oldest": 0} | absent


# -- the algorithms -----------------------------------------------------------------------------------------


class VAFL(Algorithm):
    """Asynchronous VAFL."""

    name = "vafl"
    summary = "asynchronous: the server steps on every upload, with the latest embeddings of the others"
    protocols = PROTOCOLS
    optimisers = ("sgd", "momentum", "adam", "malicious")
    shared_schedule = False
    initial_upload = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """How many uploads one iteration takes."""
        return 1

    def answers_with_gradients(self, plan: Plan) -> bool:
        """Unless encoders are frozen, every upload is answered with gradients."""
        return plan.encoder_training != "none"

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party."""
        plain = setup.plan.protocol == "plain"
        if address != SERVER:
            party = VAFLParty if plain else SummingParty
            return party(setup, address, shared_schedule=self.shared_schedule)
        server = VAFLServer if plain else SummingServer
        wait_for = self.wait_for(setup.plan, len(setup.data.parties))
        return server(setup, wait_for=wait_for, shared_schedule=self.shared_schedule)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """Secure sums are always fresh and must be possible with these parties."""
        footnote = plan.settings.also or plan.settings.query_first
        if footnote and (plan.protocol != "plain" or self.name != VAFL.name):
            raise PlanError("also and query_first are variants of algorithm 'vafl' on protocol 'plain'")
        if plan.settings.also > plan.batch or (plan.settings.also and plan.encoder_training == "none"):
            raise PlanError(
                f"also is {plan.settings.also}; it may be as large as the batch ({plan.batch}), and frozen "
                "encoders have nothing newer to send"
            )
        if plan.protocol == "plain":
            return
        if plan.settings.delay_bound:
            raise PlanError("delay_bound has no meaning on secure sums: their embeddings are never stale")
        check_holder_sum(plan, data)

    def tolerates_absence(self, plan: Plan) -> bool:
        """On the plain protocol the server has everybody's latest embeddings; with a threshold, sums go on.

        Where the age of embeddings is bounded it waits instead.
        """
        if plan.protocol != "plain":
            return bool(plan.threshold) and not self.needs_everybody(plan)
        return not self.shared_schedule and not plan.settings.delay_bound

    def needs_everybody(self, plan: Plan) -> str:
        """Frozen encoders and a schedule for all leave no room for steps without a party."""
        if self.shared_schedule:
            return ONE_ORDER
        if plan.encoder_training == "none":
            return "with frozen encoders each record is summed once, and its sum would stay without the party"
        return ""

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """The fastest party's share of all steps; random delays get a quarter on top.

        On a secure sum every party's step releases all parties' embeddings.
        """
        return float(self.updates(plan, data) * (1 + plan.settings.also / min(plan.batch, data.n_train)))

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """The passes without records that are sent besides."""
        if self.shared_schedule:
            return float(plan.epochs)
        if plan.protocol != "plain":
            return float(plan.epochs * len(data.parties))
        sending = [p for p in data.parties if plan.label_holder == "server" or p != data.label_holder]
        shares = step_shares(plan, data.parties)
        return plan.epochs * max((shares[p] for p in sending), default=0.0) * len(data.parties)


class VAFLTSync(VAFL):
    """The t-synchronous variant."""

    name = "vafl-tsync"
    summary = "the server waits for uploads of t different parties (plan field wait_for)"

    def check(self, plan: Plan, data: VerticalData) -> None:
        """T is at most the number of parties."""
        super().check(plan, data)
        if plan.settings.wait_for > len(data.parties):
            raise PlanError(
                f"vafl-tsync needs wait_for between 1 and {len(data.parties)}, or 0 for half of the parties, "
                f"not {plan.settings.wait_for}"
            )

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Waits for half of the parties, for two at least, where the plan does not say for how many."""
        parties = len(data.parties)
        wait_for = plan.settings.wait_for or min(parties, max(2, parties // 2))
        return plan.with_changes(settings={"wait_for": wait_for})

    def wait_for(self, plan: Plan, parties: int) -> int:
        """The plan's t."""
        return int(plan.settings.wait_for)


class VAFLSync(VAFL):
    """Synchronous block-wise training: all parties work on the same batch."""

    name = "vafl-sync"
    summary = "synchronous baseline: all parties upload the same batch, one joint step"
    shared_schedule = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """All of them."""
        return parties

    def combine(self, setup: Setup, parties: Sequence[Role]) -> None:
        """Parties with encoders of one shape are computed together."""
        models = [role.model for role in parties if isinstance(role, VAFLParty)]
        stack = StackedModels.of(models, setup.plan) if setup.plan.protocol == "plain" else None
        for model in models:
            model.stack = stack
