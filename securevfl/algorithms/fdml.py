"""FDML: workers push local predictions, pull their sum, and compute their gradients at home (Alg. 1).

Hu, Niu, Yang, Zhou: FDML: A Collaborative Machine Learning Framework for Distributed Features, KDD 2019.

The model is a sum of local predictions, one logit (or value) per output. All workers hold the labels and
visit the records in the same order. The server keeps the latest prediction of each record and worker and
answers a pull with their sum, but not before the puller is at most `staleness` iterations ahead of the
slowest worker.

Two things are settled here that the paper leaves open. A prediction that was never pushed counts as 0, the
prediction of a worker without opinion; later, a worker that runs ahead uses predictions from the last visit
of the same record, one pass ago. And the bias of the sum belongs to the first worker's local model.

On a secure sum the label holder obtains each iteration's sum, nobody's prediction, and hands it to the
workers. A sum is complete only when everybody has contributed, so there is no staleness then. On encrypted
sums the server obtains no sum either: it announces the batches, adds
the workers' encrypted predictions and passes on what it cannot read. A worker of another organisation has the
key, decrypts each iteration's sum and hands it to all workers, which FDML gives it to anyway. The server gets
figures alone: the mean loss of each pass, and the metrics of the test part, for which the label holder gives
the test labels to the key holder.

A pass has every record once, so its mean loss is one and the same sum of all records' losses every time. Mean
losses of batches, mixed anew in every pass, would be a linear system for the loss of each record, and with
the label the loss of a record is its prediction.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import ONE_ORDER, SERVER, Algorithm, Role, Setup, expect
from securevfl.algorithms.channels import (
    Channel,
    build_channel,
    check_channels,
    check_holder_sum,
)
from securevfl.algorithms.local import build_local_model
from securevfl.algorithms.messages import Embedding, Labels, LabelsOfTest, MeanLoss, Metrics, Sum
from securevfl.algorithms.roles import SharingParty, SharingServer
from securevfl.algorithms.sums import read_request
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.models import SumHead, metrics, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.passing import computed, joined
from securevfl.privacy.payloads import Contribution, Inside, Passed, Released
from securevfl.privacy.rows import Rows, fixed
from securevfl.protocols.contract import AGGREGATOR
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import ENCRYPTED, PROTOCOLS
from securevfl.transfers import to_device

LEAST = 2
"""Records that a mean loss must be taken over for the server to be told."""


class Pull(NamedTuple):
    """A worker's request for the sum of one iteration's predictions."""

    message: Packet
    iteration: int
    rows: Rows


class FDMLServer(SharingServer):
    """Keeps the latest local predictions and lets nobody run more than `staleness` iterations ahead.

    The sums that it hands out depend on all workers' predictions. Those have passed their owners' gates, with
    everybody else as observers; the sums are computed from the released values alone.

    Args:
        channel: The secure sum; by default one whose totals the server obtains.
    """

    kept = (*SharingServer.kept, "pushed", "largest_lead")

    def __init__(self, setup: Setup, *, channel: Channel | None = None) -> None:
        super().__init__(setup, share_labels=True, channel=channel)
        kept = 0 if self.secure else setup.data.n_train  # on a sum nobody's predictions arrive
        shape = (kept, len(self.parties), setup.plan.embedding)
        self.local_predictions = self.gate.arrivals("local predictions", shape, device=setup.device)
        self.link.handing = frozenset({Embedding.kind})
        self.everybody = tuple(sorted(set(setup.hosts.values()) - {setup.label_holder}))
        self.pushed: dict[str, int] = dict.fromkeys(self.parties, 0)
        self.largest_lead = 0
        self._schedule: dict[int, Rows] = {}
        self._waiting: list[Pull] = []

    async def _train(self) -> None:
        """One pass of every worker; all pulls are answered when it ends."""
        if self.secure:
            for _ in range(self.batches.per_pass):
                await self._train_on_sum(self.batches.next())
            return
        left = self.batches.per_pass * len(self.parties)
        while left:
            self._waiting.append(self._push(await self._next_upload()))
            left -= await self._answer_ready()

    async def _train_on_sum(self, rows: Rows) -> None:
        """An iteration where a sum exists only once everybody has contributed: without staleness."""
        pulls = await self._gather_pulls(rows)
        total = (await self.sums.total(rows, "embedding")).given
        outputs = to_device(total.values.astype(np.float32), self.setup.device)
        for pull in pulls:
            await self._send_sum(pull, total, outputs)

    async def _gather_pulls(self, rows: Rows) -> list[Pull]:
        """Every worker's pull, once all of them are ready."""
        return [self._pull(message, rows) for message in (await self._gather(rows)).values()]

    def _pull(self, message: Packet, rows: Rows) -> Pull:
        """Counts a worker's next iteration."""
        iteration = self.pushed[message.sender] + 1
        if message["iteration"] != iteration:
            raise ProtocolError(
                f"{message.sender} pushes iteration {message['iteration']}; {iteration} is its next"
            )
        self.pushed[message.sender] = iteration
        return Pull(message, iteration, rows)

    def _push(self, message: Packet) -> Pull:
        """Stores a worker's predictions; the pull that comes with them waits its turn."""
        rows = self._rows(self.pushed[message.sender] + 1)
        self._check_rows(message, rows)
        self._checked_width(message.sender, message["values"], len(rows))
        pull = self._pull(message, rows)
        place = self.parties.index(message.sender)
        self.local_predictions.put(message.arrived, self._index(rows), place)
        return pull

    def _rows(self, iteration: int) -> Rows:
        """The records of an iteration; those that all workers have passed are forgotten."""
        slowest = min(self.pushed.values())
        self._schedule = {number: rows for number, rows in self._schedule.items() if number > slowest}
        if iteration not in self._schedule:
            self._schedule[iteration] = self.batches.next()
        return self._schedule[iteration]

    async def _answer_ready(self) -> int:
        """Answers every pull within the staleness bound; returns how many there were."""
        slowest = min(self.pushed.values())
        bound = slowest + self.setup.plan.settings.staleness
        ready = [pull for pull in self._waiting if pull.iteration <= bound]
        self._waiting = [pull for pull in self._waiting if pull.iteration > bound]
        for pull in ready:
            self.largest_lead = max(self.largest_lead, pull.iteration - slowest)
            total = self.local_predictions.sums(self._index(pull.rows))
            await self._send_sum(pull, total, total.source)
        return len(ready)

    async def _send_sum(self, pull: Pull, total: Passed, outputs: Tensor) -> None:
        self._count(len(pull.rows), float(self._mean_loss(outputs, pull.rows)))
        given = self.gate.hand_on(total, kind="sum", observers=self.everybody, dtype=np.float32)
        await self._reply(pull.message, Sum(values=given))

    def _outputs(self, vectors: Tensor) -> Tensor:
        return vectors.sum(dim=1) if vectors.ndim == 3 else vectors

    def figures(self) -> dict[str, Any]:
        """Iterations of the slowest worker, and how far ahead of it an answered pull was at most."""
        return {"iterations": min(self.pushed.values()), "lead": self.largest_lead}


class FDMLWorker(SharingParty):
    """One worker. Everybody else sees its predictions, in sums at least, so all of them are observers.

    That holds for the worker that shares a house with the server too: its predictions do not go to the
    server, but the sums that the others pull contain them.

    Args:
        source: Address of the role that hands out the sums.
        channel: The secure sum; by default one whose totals the server obtains.
        told: Addresses that are told what is computed from the totals of the test part.
    """

    kept: ClassVar[tuple[str, ...]] = (*SharingParty.kept, "iteration")

    def __init__(
        self,
        setup: Setup,
        party: str,
        *,
        source: str = SERVER,
        channel: Channel | None = None,
        told: tuple[str, ...] = (),
    ) -> None:
        observers = setup.everyone_but(party)
        encoder = setup.encoders[party]
        if party == setup.data.parties[0]:
            encoder = nn.Sequential(encoder, setup.head)
        model = build_local_model(setup, party, observers=observers, encoder=encoder)
        super().__init__(
            setup, party, model=model, observers=observers, share_labels=True, channel=channel, told=told
        )
        self.source = source
        self.iteration = 0

    async def _round(self, rows: Rows) -> None:
        """Algorithm 1's loop, once: push, pull, update."""
        clock = self.setup.clock
        await clock.sleep_until(clock.now() + self.delay.draw())
        self.iteration += 1
        outputs, released = await self._pull(rows)
        task, loss = self.setup.data.task, self.setup.loss(self.address)
        gradient = output_gradient(task, outputs, self._labels_of(rows), loss)
        self.model.learn(released, gradient, rows)

    async def _pull(self, rows: Rows) -> tuple[Tensor, Released | Contribution | Inside]:
        """Pushes the batch's predictions; returns the sum over all workers, and what was pushed."""
        answer, released = await self._upload(rows, {"iteration": self.iteration}, learning=True)
        total = expect(answer, Sum.kind, sender=self.source)["values"]
        if total.shape != tuple(released.source.shape):
            raise ProtocolError(
                f"{self.address} received a sum of shape {total.shape}; it pulled {released.source.shape}"
            )
        return to_device(np.array(total, np.float32), self.setup.device), released


def output_gradient(task: str, outputs: Tensor, labels: Tensor, loss: str = "auto") -> Tensor:
    """H of eq. (7): the gradient of the batch's mean loss with respect to the summed predictions."""
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task_loss(task, leaf, labels, loss=loss), leaf)
    return gradient


# -- encrypted sums -----------------------------------------------------------------------------------------


class AddingServer(FDMLServer):
    """Announces batches and adds ciphertexts; it has no key, and is told losses and metrics, never a sum.

    Args:
        channel: The sum, whose totals go to the key holder.
    """

    def __init__(self, setup: Setup, *, channel: Channel) -> None:
        super().__init__(setup, channel=channel)
        self.key_holder = channel.name

    async def prepare(self) -> None:
        await super().prepare()
        labels, rows = np.asarray(self.setup.data.y_test), np.concatenate(self.test_pieces)
        given = self._exact(labels, self.key_holder, rows=rows, kind="test labels")
        await self.link.send(self.key_holder, LabelsOfTest(values=given))

    async def _train(self) -> None:
        await super()._train()
        self._losses = [await self._hear_loss()]

    async def _hear_loss(self) -> float:
        """The mean loss of the pass that ends with the last round."""
        message = await self._hear(MeanLoss.kind)
        if message.fields.get("round") != self.sums.number:
            raise ProtocolError(f"{message.sender} sends no loss of the pass up to round {self.sums.number}")
        return float(message["value"])

    async def _train_on_sum(self, rows: Rows) -> None:
        await self._gather_pulls(rows)
        await self._announce(rows, "embedding")
        self._count(len(rows) * len(self.parties), None)

    async def _evaluation(self) -> dict[str, float | None]:
        for rows in self.test_pieces:
            await self._announce(rows, "evaluation")
        message = await self._hear(Metrics.kind)
        figures: dict[str, Any] = dict(message.fields)
        if any(isinstance(value, np.ndarray) for value in figures.values()):
            raise ProtocolError(f"{message.sender} sends metrics that are not numbers")
        return figures

    async def _announce(self, rows: Rows, purpose: str) -> None:
        """Announces a round and takes part in it as the one who adds."""
        await self.sums.open(await self.sums.announce(rows, purpose, channel=self.key_holder))

    async def _hear(self, kind: str) -> Packet:
        """The key holder's figures, which come when nobody else has anything to say."""
        return expect(await self.sums.receive(), kind, sender=self.key_holder)


class KeyHolder(FDMLWorker):
    """The worker that decrypts the sums: hands them to all workers, and figures to the server.

    Args:
        channel: The sum, whose totals it obtains.
    """

    def __init__(self, setup: Setup, party: str, *, channel: Channel) -> None:
        super().__init__(setup, party, source=party, channel=channel, told=(SERVER,))
        self.link.handing = frozenset({Labels.kind, LabelsOfTest.kind})
        self.train_labels = self.gate.arrivals("train labels", (0,), device=setup.device)
        self.test_labels = self.gate.arrivals("test labels", (0,), device=setup.device)
        self._pass: list[tuple[Passed, Rows]] = []
        self._tested: list[Passed] = []
        self._last = -1

    async def prepare(self) -> None:
        data = self.setup.data
        self.train_labels.put((await self._receive_labels(Labels.kind, data.n_train)).arrived)
        self.test_labels.put((await self._receive_labels(LabelsOfTest.kind, data.n_test)).arrived)
        self.labels = self.train_labels.values

    async def _pull(self, rows: Rows) -> tuple[Tensor, Released | Contribution | Inside]:
        """Decrypts the sum and hands it on."""
        request, contribution = await self._join(rows, {"iteration": self.iteration}, learning=True)
        total = (await self.sums.obtain(request)).given
        everybody = self.setup.everyone_but(self.address)
        given = self.gate.hand_on(total, kind=Sum.kind, observers=everybody, dtype=np.float32)
        self._pass.append((total, rows))
        self._last = request.number
        for party in self.setup.data.parties:
            if party != self.address:
                await self.link.send(party, Sum(values=given))
        return to_device(np.array(given.values), self.setup.device), contribution

    async def epoch(self) -> None:
        self._pass = []
        await super().epoch()
        # Every record counts the same, however the pass was cut into batches.
        outputs = joined([total for total, _ in self._pass])
        labels = joined([self.train_labels.rows(self._index(rows)) for _, rows in self._pass])
        loss = computed(task_loss, self.setup.data.task, outputs, labels, loss=self.setup.loss())
        given = self.gate.hand_on(loss, kind=MeanLoss.kind, observers=self._server)
        await self.link.send(SERVER, MeanLoss(round=self._last, value=given))

    @property
    def _server(self) -> tuple[str, ...]:
        return self.setup.observers(SERVER, self.address)

    async def evaluate(self) -> None:
        self._tested = []
        await super().evaluate()

    async def _sum_evaluation(self, message: Packet) -> None:
        """Takes the test part's records in their order; the server gets metrics of all of them at once."""
        data, request = self.setup.data, read_request(message)
        done = data.n_train + sum(len(each.values) for each in self._tested)
        due = np.arange(done, done + len(request.rows))
        if not np.array_equal(request.rows, due) or done + len(due) > data.n_train + data.n_test:
            raise ProtocolError(f"{self.address} is asked for other records than the test part's next")
        await super()._sum_evaluation(message)
        self._tested.append((await self.sums.obtain(request)).given)
        if done + len(due) < data.n_train + data.n_test:
            return
        outputs, labels = joined(self._tested), self.test_labels.rows(slice(None))
        figures = computed(metrics, data.task, outputs, labels, loss=self.setup.loss())
        given = self.gate.hand_on(figures, kind=Metrics.kind, observers=self._server)
        await self.link.send(SERVER, Metrics(figures=given))


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


# -- without a server ---------------------------------------------------------------------------------------


class Push(NamedTuple):
    """Predictions of another worker for the records of one iteration."""

    peer: str
    iteration: int
    rows: Rows
    values: Any


class PeerWorker(FDMLWorker):
    """A worker that pushes its predictions to all others and adds up what they push.

    It waits until nobody is more than `staleness` iterations behind, and leaves predictions of whoever is
    further ahead than that for its next iteration.
    """

    kept: ClassVar[tuple[str, ...]] = (*FDMLWorker.kept, "pushed", "local_predictions")

    def __init__(self, setup: Setup, party: str) -> None:
        super().__init__(setup, party)
        data = setup.data
        self.places = {name: place for place, name in enumerate(data.parties)}
        self.pushed: dict[str, int] = {name: 0 for name in data.parties if name != party}
        self.local_predictions = torch.zeros(
            (data.n_train, len(data.parties), setup.plan.embedding), device=setup.device
        )
        self._pass: list[Rows] = []
        self._before = 0
        self._early: list[Push] = []
        self._mail: asyncio.Future[Packet] | None = None

    async def epoch(self) -> None:
        """One pass, until all predictions of it have come."""
        self._pass = [fixed(self.batches.next()) for _ in range(self.batches.per_pass)]
        self._before, self._early, self._mail = self.iteration, [], None
        for rows in self._pass:
            await self._round(rows)
        await self._hear(behind=0)
        self.model.check_finite()

    async def _pull(self, rows: Rows) -> tuple[Tensor, Released | Contribution | Inside]:
        """Pushes the batch's predictions to everybody; returns the sum of the newest, and what was pushed."""
        released = self.model.release(rows, kind=Embedding.kind, observers=self.observers, learning=True)
        for peer in self.pushed:
            await self.link.send(peer, Embedding(rows=rows, values=released, iteration=self.iteration))
        self._put(Push(self.address, self.iteration, rows, released.values))
        await self._hear(behind=self.setup.plan.settings.staleness)
        outputs = self.local_predictions[self._index(rows)].sum(dim=1)
        if self.address == self.setup.label_holder:
            loss = task_loss(self.setup.data.task, outputs, self._labels_of(rows), loss=self.setup.loss())
            await self.link.send(SERVER, MeanLoss(value=Inside(values=float(loss))))
        return outputs, released

    async def _hear(self, *, behind: int) -> None:
        """Takes the pushes that are here, and waits for those of workers that are further behind."""
        while (mail := self._expected()) is not None:
            if not mail.done() and min(self.pushed.values()) + behind >= self.iteration:
                break
            self._early.append(self._read(await mail))
            self._mail = None
        pushes, self._early = self._early, []
        for push in pushes:
            if push.iteration > self._furthest:
                self._early.append(push)
            else:
                self._put(push)

    def _expected(self) -> asyncio.Future[Packet] | None:
        """The next push of this pass, which may not be here yet; none once all have come."""
        if self._mail is None and any(each < self._before + len(self._pass) for each in self.pushed.values()):
            self._mail = self.link.receive()
        return self._mail

    @property
    def _furthest(self) -> int:
        """The newest iteration of others whose predictions are used now."""
        return self.iteration + int(self.setup.plan.settings.staleness)

    def _read(self, message: Packet) -> Push:
        """A push, once it is its sender's next, of the right records, and no further ahead than may be."""
        sender, iteration = expect(message, Embedding.kind).sender, message.fields.get("iteration")
        if sender not in self.pushed:
            raise ProtocolError(f"{self.address} receives predictions of {sender}, which is no other worker")
        due = self.pushed[sender] + 1
        # Whoever has passed iteration i had this worker's push of i - staleness, and may then push i + 1.
        last = min(self._furthest + 1, self._before + len(self._pass))
        if iteration != due or due > last:
            raise ProtocolError(
                f"{sender} pushes iteration {iteration!r} to {self.address}; {due} is its next,"
                f" {last} the last that may come now"
            )
        rows = self._pass[due - self._before - 1]
        if not np.array_equal(message["rows"], rows):
            raise ProtocolError(f"{sender} uploads other records than the schedule says")
        values, shape = message["values"], (len(rows), self.local_predictions.shape[-1])
        if values.shape != shape:
            raise ProtocolError(f"{sender} sent vectors of shape {values.shape}; expected {shape}")
        self.pushed[sender] = due
        return Push(sender, due, rows, values)

    def _put(self, push: Push) -> None:
        values = to_device(np.array(push.values, np.float32), self.setup.device)
        self.local_predictions[self._index(push.rows), self.places[push.peer]] = values


class LabelKeeper(SharingServer):
    """The label holder's role beside peers: gives the labels out, counts, and measures the test part.

    In training it hears the losses of its own organisation's worker, and nothing of anybody else.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, share_labels=True)

    async def _train(self) -> None:
        for _ in range(self.batches.per_pass):
            message = expect(await self.link.receive(), MeanLoss.kind, sender=self.setup.label_holder)
            self._count(len(self.batches.next()) * len(self.parties), float(message["value"]))

    def _outputs(self, vectors: Tensor) -> Tensor:
        return vectors.sum(dim=1)


def check_decentralised(plan: Plan, data: VerticalData) -> None:
    """Raises `PlanError` where somebody would obtain a sum for others, or the label holder is no worker."""
    if plan.protocol != "plain":
        raise PlanError(
            f"decentralised workers push predictions to each other, and protocol {plan.protocol!r} would add "
            "them up for a receiver; take 'plain', or algorithm 'afsgd', whose workers obtain sums themselves"
        )
    holder = SERVER if plan.label_holder == "server" else data.label_holder
    if holder not in data.parties:
        raise PlanError(
            f"decentralised workers have no server, but the labels are at {holder!r}, which has no features; "
            "give them to a party or leave decentralised off"
        )


# -- the algorithm ------------------------------------------------------------------------------------------


class FDML(Algorithm):
    """Stale synchronous training on the sum of local predictions."""

    name = "fdml"
    summary = (
        "workers push predictions and pull their sum, at most `staleness` iterations apart; shares labels"
    )

    protocols = PROTOCOLS

    def head_at(self, setup: Setup) -> str:
        return setup.data.parties[0]  # the bias is part of the first worker's prediction

    def check(self, plan: Plan, data: VerticalData) -> None:
        """The model is a plain sum of predictions, trained by the workers."""
        if plan.fusion == "concat" or plan.head not in ("auto", "sum"):
            raise PlanError(
                "fdml sums local predictions; leave fusion and head at 'auto' or set both to 'sum'"
            )
        odd = set(plan.widths(data.parties)) - {0, data.outputs}
        if odd:
            raise PlanError(
                f"fdml's local predictions have {data.outputs} values, not {min(odd)}; leave embedding at 0"
            )
        if plan.encoder_training == "none":
            raise PlanError("fdml trains local models only; with encoder_training 'none' nothing would learn")
        if plan.protocol != "plain" and plan.settings.staleness:
            raise PlanError(
                f"protocol {plan.protocol!r} has a sum only when every worker has contributed; "
                "set staleness to 0"
            )
        if plan.protocol in ENCRYPTED and plan.sampling != "passes":
            raise PlanError(
                f"fdml on {plan.protocol!r} tells the server mean losses; those of drawn records would be a "
                "linear system for each record's: set sampling to 'passes'"
            )
        if plan.settings.decentralised:
            check_decentralised(plan, data)
        elif plan.protocol in ENCRYPTED:
            check_encrypted(plan, data)
        else:
            check_holder_sum(plan, data)

    def needs_everybody(self, plan: Plan) -> str:
        """Workers go through the records together."""
        return ONE_ORDER

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Sum fusion of one prediction per output."""
        return plan.with_changes(fusion="sum", head="sum", embedding=data.outputs)

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party's worker."""
        if not isinstance(setup.head, SumHead):
            raise PlanError("fdml has no model on top of the sum; do not give a head")
        if setup.plan.settings.decentralised:
            return LabelKeeper(setup) if address == SERVER else PeerWorker(setup, address)
        if setup.plan.protocol in ENCRYPTED:
            return encrypted_role(setup, address)
        return FDMLServer(setup) if address == SERVER else FDMLWorker(setup, address)
