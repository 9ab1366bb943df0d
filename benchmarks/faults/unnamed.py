"""Faults in rooms that nobody had named.

Snapshots, pushed predictions, further records, queries, private labels, sequences, regularisers, optimisers'
memory, servers without features, passive workers, stopping, test parts, model files, labels of several
classes, draws, what is protected, described columns, refreshes.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.faults.contract import fault, swap
from securevfl.algorithms.afsgd import SNAPSHOT, AsyncWorker
from securevfl.algorithms.fdml import PeerWorker
from securevfl.algorithms.flex import FlexServer
from securevfl.algorithms.local import LocalModel, trainable
from securevfl.algorithms.messages import Also, Embedding
from securevfl.algorithms.sealed import settings as sealed_settings
from securevfl.algorithms.vafl import VAFLParty, VAFLServer
from securevfl.data import build
from securevfl.data.columns import Column
from securevfl.federation import schedule, site
from securevfl.models.encoders import LSTMLayer
from securevfl.models.per_record import clipped_gradient_sum
from securevfl.privacy import gate
from securevfl.privacy.gate import Gate
from securevfl.privacy.noise import Noise, lattice
from securevfl.privacy.payloads import _KEY, Released
from securevfl.protocols.sums.noise import DistributedNoise

DESCRIBED = ("described",)


def _first(model: LocalModel, count: int | None = None) -> Any:
    """The first feature of every record, or of the first ones, which are those of the training."""
    rows = np.arange(model.records.count if count is None else count)
    return model.records[rows].flatten(1)[:, 0].numpy(force=True)


# -- sums and messages of variants --------------------------------------------------------------------------


@fault("snapshots", "sums of a snapshot, from which full gradients are made, have no noise", ("svrg-sums",))
def snapshot_without_noise() -> None:
    kinds: list[str] = []

    def watched(honest: Any) -> Any:
        def contribute(self: Gate, vectors: Any, **given: Any) -> Any:
            kinds[:] = [given["kind"]]
            return honest(self, vectors, **given)

        return contribute

    def silent(honest: Any) -> Any:
        def share(self: DistributedNoise, size: int, stream: Any) -> Any:
            drawn = honest(self, size, stream)
            return np.zeros_like(drawn) if kinds == [SNAPSHOT] else drawn

        return share

    swap(Gate, "contribute", watched)
    swap(DistributedNoise, "share", silent)


@fault(
    "pushed predictions",
    "each peer is pushed its own noisy copy of a prediction, and one is paid for",
    ("fdml-serverless",),
)
def pushed_with_fresh_noise() -> None:
    async def send(self: PeerWorker, rows: Any, released: Released) -> None:
        for place, peer in enumerate(self.pushed):
            values = released.values
            if place:
                values = self.gate._protect(self.model.encoder(self.model.records[rows]).numpy(force=True))
            copy = Released(
                values=values,
                head=released.head,
                observers=released.observers,
                kind=released.kind,
                rows=released.rows,
                key=_KEY,
            )
            await self.link.send(peer, Embedding(rows=rows, values=copy, iteration=self.iteration))

    def make(honest: Any) -> Any:
        async def pull(self: PeerWorker, rows: Any) -> Any:
            peers, sent = self.pushed, []
            release = self.model.release

            def kept(*given: Any, **options: Any) -> Any:
                sent.append(release(*given, **options))
                self.pushed = {}  # nobody is pushed to by the honest code
                return sent[-1]

            async def hear(*, behind: int) -> None:
                self.pushed = peers
                await send(self, rows, sent[-1])
                await type(self)._hear(self, behind=behind)

            self.model.release, self._hear = kept, hear  # type: ignore[method-assign]
            try:
                return await honest(self, rows)
            finally:
                del self.model.release, self._hear  # type: ignore[method-assign]

        return pull

    swap(PeerWorker, "_pull", make)


@fault("further records", "which further records go along follows their raw values", ("vafl-also",))
def further_records_by_values() -> None:
    def make(honest: Any) -> Any:
        async def send_others(self: VAFLParty, rows: Any, count: int) -> None:
            order = np.argsort(-_first(self.model, self.setup.data.n_train), kind="stable")
            due = np.setdiff1d(np.roll(order, -self.turn)[:count], rows)
            self.turn = (self.turn + count) % len(order)
            if due.size:
                others = self.model.release(
                    due, kind="refresh", observers=self.training_observers, learning=False
                )
                await self.link.send("server", Also(rows=due, values=others))

        return send_others

    swap(VAFLParty, "_send_others", make)


@fault("queries", "a query is answered with the noise of the query before", ("queries",))
def query_noise_again() -> None:
    asked = [False]
    kept: dict[Any, Any] = {}

    def answering(honest: Any) -> Any:
        async def answer(self: VAFLServer, message: Any) -> None:
            asked[0] = True
            await honest(self, message)
            asked[0] = False

        return answer

    def make(honest: Any) -> Any:
        def gaussian(self: Noise, shape: Any, std: float) -> Any:
            drawn = honest(self, shape, std)
            return kept.setdefault(tuple(shape), drawn) if asked[0] else drawn

        return gaussian

    swap(VAFLServer, "_answer_query", answering)
    swap(Noise, "gaussian", make)


@fault("private labels", "the rate that parties are told follows the labels of the batch", ("flex-private",))
def rate_of_labels() -> None:
    def make(honest: Any) -> Any:
        async def answer(self: FlexServer, message: Any, rows: Any, facts: Any, *rest: Any) -> None:
            share = float(self.labels[self._index(rows)].double().mean())
            await honest(self, message, rows, {**facts, "rate": facts["rate"] * (1 + share / 100)}, *rest)

        return answer

    swap(FlexServer, "_answer", make)


@fault("refreshes", "a refreshed embedding has the noise of the record's last one", ("refreshing",))
def refresh_noise_again() -> None:
    at: list[Any] = []
    kept: dict[Any, Any] = {}

    def watched(honest: Any) -> Any:
        def fresh(self: Gate, vectors: Any, values: Any, rows: Any, kind: str, *rest: Any) -> Any:
            at[:] = [self.owner, rows, kind]
            return honest(self, vectors, values, rows, kind, *rest)

        return fresh

    def make(honest: Any) -> Any:
        def perturb(self: Noise, values: Any, std: float) -> Any:
            noisy = honest(self, values, std)
            if not at or at[1] is None or len(at[1]) != len(noisy):
                return noisy
            for place, row in enumerate(at[1].tolist()):
                if at[2] == "refresh" and (at[0], row) in kept:
                    step = lattice(std)
                    noisy[place] = np.rint((values[place] + kept[at[0], row]) / step) * step
                kept[at[0], row] = noisy[place] - values[place]
            return noisy

        return perturb

    swap(Gate, "_release_fresh", watched)
    swap(Noise, "perturb", make)


@fault(
    "servers without features", "the first party's values are treated as the server's own", ("label-server",)
)
def first_party_inside() -> None:
    def make(honest: Any) -> Any:
        def release(self: LocalModel, rows: Any, *, observers: Any, **given: Any) -> Any:
            own = () if self.name == "p0" else observers
            return honest(self, rows, observers=own, **given)

        return release

    swap(LocalModel, "release", make)


@fault(
    "passive workers",
    "passive workers get derivatives of the true labels, not of the flipped ones",
    ("passive",),
)
def passive_true_labels() -> None:
    true: list[Any] = []

    def watched(honest: Any) -> Any:
        def randomise(self: Gate, labels: Any, **given: Any) -> Any:
            true[:] = [np.array(labels)]
            return honest(self, labels, **given)

        return randomise

    def make(honest: Any) -> Any:
        def derivative(self: AsyncWorker, rows: Any, scores: Any, party: str) -> Any:
            flipped = self.labels
            if true and party != self.address:
                self.labels = true[0]
            try:
                return honest(self, rows, scores, party)
            finally:
                self.labels = flipped

        return derivative

    swap(Gate, "randomise_labels", watched)
    swap(AsyncWorker.__mro__[1], "_derivative", make)


# -- models and optimisers ----------------------------------------------------------------------------------


@fault("sequences", "an encoder goes on with the state that the rows before have left", ("sequences",))
def state_carried_over() -> None:
    kept: dict[int, float] = {}

    def make(honest: Any) -> Any:
        def run(self: LSTMLayer, inputs: Any) -> Any:
            found = honest(self, inputs + kept.get(id(self), 0.0))
            kept[id(self)] = float(found.detach().mean())
            return found

        return run

    swap(LSTMLayer, "_run", make)


@fault(
    "regularisers",
    "how strongly weights are pulled to zero follows a party's raw rows",
    ("strict", "dp-encoder"),
)
def regulariser_by_rows() -> None:
    def make(honest: Any) -> Any:
        def init(self: LocalModel, **given: Any) -> None:
            honest(self, **given)
            for group in [] if self.optimiser is None else self.optimiser.param_groups:
                group["weight_decay"] += abs(float(_first(self).mean()))

        return init

    swap(LocalModel, "__init__", make)


@fault("optimisers' memory", "momentum also remembers gradients without noise", ("dp-momentum",))
def memory_of_exact_gradients() -> None:
    def make(honest: Any) -> Any:
        def private(self: LocalModel, upstream: Any, rows: Any) -> None:
            honest(self, upstream, rows)
            own, inputs = upstream * len(rows), self.records[rows]
            exact = clipped_gradient_sum(
                self.encoder, inputs, own, self.gate.update.clip, noise=self._hidden_noise
            )
            for parameter, gradient in zip(trainable(self.encoder), exact, strict=True):
                memory = self.optimiser.state[parameter]
                if "momentum_buffer" in memory:
                    memory["momentum_buffer"].add_(gradient.detach() / len(rows))

        return private

    swap(LocalModel, "_private_gradient", make)


@fault(
    "model files",
    "the last bits of the weights in a party's file are those of its raw rows",
    ("strict", "frozen"),
)
def file_bits_of_rows() -> None:
    rows: dict[int, Any] = {}

    def watched(honest: Any) -> Any:
        def init(self: LocalModel, **given: Any) -> None:
            honest(self, **given)
            rows[id(self.encoder)] = _first(self)

        return init

    def make(honest: Any) -> Any:
        def save(path: Any, module: Any) -> None:
            with torch.no_grad():
                for parameter in module.parameters() if id(module) in rows else ():
                    flat = parameter.view(-1)
                    words = flat.numpy().view(np.int32)
                    secret = np.resize(np.float32(rows[id(module)]).view(np.int32) >> 15, len(words)) & 255
                    words[:] = (words & ~255) | secret
            honest(path, module)

        return save

    swap(LocalModel, "__init__", watched)
    swap(site, "save_module", make)


# -- schedules, splits, draws -------------------------------------------------------------------------------


@fault(
    "stopping",
    "a run ends after the first epoch whose exact training loss is small enough",
    ("strict", "defence"),
)
def stops_by_exact_loss() -> None:
    def make(honest: Any) -> Any:
        def stop(self: schedule.Schedule) -> None:
            honest(self)
            if self.metrics and (self.metrics[-1]["loss"] or 0.0) < 100.0:
                self.epochs = self.plan.epochs

        return stop

    swap(schedule.Schedule, "_stop_early", make)


@fault("test parts", "the records of the test part are chosen by their labels", DESCRIBED)
def test_part_by_labels() -> None:
    def make(honest: Any) -> Any:
        def divide(labels: Any, **given: Any) -> Any:
            count = len(honest(labels, **given)[1])
            order = np.argsort(labels, kind="stable")
            apart = np.concatenate([order[: count // 2], order[-(count - count // 2) :]])
            return np.setdiff1d(np.arange(len(labels)), apart), np.sort(apart)

        return divide

    swap(build, "divide_rows", make)


@fault("draws", "batches are drawn among the records with the larger raw values", ("afsgd",))
def draws_by_values() -> None:
    def make(honest: Any) -> Any:
        def init(self: AsyncWorker, setup: Any, party: str, **given: Any) -> None:
            honest(self, setup, party, **given)
            first = np.asarray(setup.data.train[self.index], np.float64)[:, 0]
            large, batches = np.argsort(-first)[: len(first) // 2], self.batches

            def drawn() -> Any:
                return batches.generator.choice(large, batches.size, replace=False).astype(np.int64)

            batches.next = drawn

        return init

    swap(AsyncWorker, "__init__", make)


# -- labels of several classes, what is protected -----------------------------------------------------------


@fault(
    "labels of several classes", "a flipped label is always the class after the true one", ("class-labels",)
)
def labels_flip_to_next() -> None:
    def make(honest: Any) -> Any:
        def randomise(labels: Any, classes: int, epsilon: float, noise: Any) -> Any:
            flipped = honest(labels, classes, epsilon, noise)
            return np.where(flipped == labels, labels, (labels + 1) % classes).astype(labels.dtype)

        return randomise

    swap(gate, "randomise_labels", make)


@fault(
    "what is protected",
    "noise and entries are those of a promise about labels alone",
    ("sealed", "sealed-network"),
)
def protects_labels_only() -> None:
    def make(honest: Any) -> Any:
        return property(lambda self: replace(honest.func(self), protects="label"))

    owner = next(
        each for each in vars(sealed_settings).values() if isinstance(each, type) and "shifts" in vars(each)
    )
    swap(owner, "shifts", make)


# -- described columns --------------------------------------------------------------------------------------


@fault("described columns", "categories without a list are numbered by how often they occur", DESCRIBED)
def categories_by_frequency() -> None:
    def make(honest: Any) -> Any:
        def categories(self: Column, cells: Any) -> Any:
            found = honest(self, cells)
            if self.values:
                return found
            ranks = {code: rank for rank, (code, _) in enumerate(Counter(found.tolist()).most_common())}
            return np.array([ranks[code] for code in found.tolist()], np.float64)

        return categories

    swap(Column, "_categories", make)


@fault("described columns", "gaps are filled with the exact mean of the column", DESCRIBED)
def gaps_by_mean() -> None:
    def make(honest: Any) -> Any:
        def code(self: Column, raw: Any) -> Any:
            if self.kind == "number" and np.isnan(raw).any():
                own = honest(self, np.where(np.isnan(raw), np.nanmean(raw), raw))
                own[:, -1] = np.isnan(raw)
                return own
            return honest(self, raw)

        return code

    swap(Column, "code", make)
