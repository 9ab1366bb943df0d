"""Faults that were thought of once the audit was finished, in rooms that the others do not name.

They were written down before any of them was run; the page reports how many were caught then, and how many
after the gaps that they showed were closed.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch

from benchmarks.faults.contract import SEALED, TREES, fault, swap
from securevfl.algorithms import roles
from securevfl.algorithms.local import Records
from securevfl.algorithms.steps import Batches
from securevfl.federation import folder as folders
from securevfl.federation import site as sites
from securevfl.federation.schedule import Schedule
from securevfl.privacy import gate as gates
from securevfl.privacy import views
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import Journal
from securevfl.protocols.sealed import dealer
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.noise import DistributedNoise

LATER: tuple[str, ...] = (
    "schedule",
    "evaluation",
    "batches",
    "rows",
    "clipping",
    "journal",
    "sketches",
    "resuming",
    "scorecards",
    "models",
    "dealer",
    "labels used",
)
"""Their rooms."""
EMBED = ("strict", "frozen", "dp-encoder")
CARD = ("sealed-card",)


@fault("schedule", "one epoch more is trained than the plan says", ("strict", "dp-encoder", "sealed"))
def epoch_too_many() -> None:
    def make(honest: Any) -> Any:
        async def longer(self: Schedule) -> None:
            await self._epoch(self.plan.epochs)
            await honest(self)

        return longer

    swap(Schedule, "_final_evaluation", make)


@fault("schedule", "the final evaluation is made twice", ("strict", "two-tree", "sealed"))
def evaluated_twice() -> None:
    def make(honest: Any) -> Any:
        async def twice(self: Schedule) -> None:
            await self.carrier.phase("final", self.epochs)
            await honest(self)

        return twice

    swap(Schedule, "_final_evaluation", make)


@fault("evaluation", "the stated accuracy is that of other labels", ("strict", "sealed"))
def figures_of_other_labels() -> None:
    def make(honest: Any) -> Any:
        return lambda task, outputs, labels, *rest: honest(task, outputs, torch.roll(labels, 1), *rest)

    swap(roles, "metrics", make)


@fault("evaluation", "the result states a better figure than was measured", ("strict", "sealed"))
def result_embellished() -> None:
    def make(honest: Any) -> Any:
        def better(self: Any, result: Any) -> None:
            figures = {name: value and value**0.5 for name, value in result["test"].items()}
            honest(self, {**result, "test": figures})

        return better

    swap(folders.RunFolder, "write_result", make)


@fault("batches", "the sizes of raw values decide the order of batches", ("strict", "dp-encoder", "fdml"))
def batches_sorted() -> None:
    known: list[Any] = []

    def keep(honest: Any) -> Any:
        def begun(self: Records, train: Any, test: Any, device: Any) -> None:
            honest(self, train, test, device)
            known.append(np.asarray(train)[:, 0])

        return begun

    swap(Records, "__init__", keep)

    def make(honest: Any) -> Any:
        def sorted_by_value(self: Batches) -> Any:
            rows = honest(self)
            return rows[np.argsort(known[0][rows])] if known else rows

        return sorted_by_value

    swap(Batches, "next", make)


@fault("rows", "every record has the features of the one before it", EMBED)
def rows_shifted() -> None:
    def make(honest: Any) -> Any:
        return lambda self, rows: honest(self, np.maximum(rows - 1, 0))

    swap(Records, "__getitem__", make)


@fault("rows", "a record that is asked for again has its neighbour's features", ("strict", "dp-encoder"))
def rows_swapped_later() -> None:
    calls: list[int] = []

    def make(honest: Any) -> Any:
        def other(self: Records, rows: Any) -> Any:
            calls.append(1)
            return honest(self, rows if len(calls) < 12 else (rows + 1) % self.count)

        return other

    swap(Records, "__getitem__", make)


def _clipped(change: Any) -> None:
    swap(gates, "clip_rows", lambda honest: lambda vectors, clip: change(vectors, clip))
    swap(gates, "clip_exactly", lambda honest: lambda values, clip: values)


@fault("clipping", "vectors are clipped by their largest entry instead of their length", EMBED)
def clip_by_entry() -> None:
    def change(vectors: Any, clip: float) -> Any:
        largest = vectors.abs().amax(1, keepdim=True).clamp_min(1e-30)
        return vectors * (3 * clip / largest).clamp(max=1.0)

    _clipped(change)


@fault("clipping", "a batch is scaled by its longest vector, so that records depend on each other", EMBED)
def clip_by_batch() -> None:
    def change(vectors: Any, clip: float) -> Any:
        longest = torch.linalg.vector_norm(vectors, dim=1).max().clamp_min(1e-30)
        return vectors * (clip / longest)

    _clipped(change)


@fault("clipping", "every vector is made as long as the clip", EMBED)
def clip_normalises() -> None:
    def change(vectors: Any, clip: float) -> Any:
        return clip * vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-30)

    _clipped(change)


@fault("journal", "one value in three is not written down", (*EMBED, "two-tree", "sealed"))
def journal_loses_values() -> None:
    count: list[int] = []

    def make(honest: Any) -> Any:
        def losing(self: Journal, kind: str, values: Any, **options: Any) -> Any:
            count.append(1)
            return values if len(count) % 3 == 0 else honest(self, kind, values, **options)

        return losing

    swap(Journal, "keep", make)


@fault("journal", "values are written down as rounded to half precision", (*EMBED, "two-tree", "sealed"))
def journal_rounds() -> None:
    def make(honest: Any) -> Any:
        def rounding(self: Journal, kind: str, values: Any, **options: Any) -> Any:
            array = np.asarray(values)
            kept = array.astype(np.float16).astype(array.dtype) if array.dtype.kind == "f" else array
            honest(self, kind, kept, **options)
            return values

        return rounding

    swap(Journal, "keep", make)


@fault("sketches", "a view's digests are of other words than were sent", (*TREES[:2], *SEALED))
def sketch_of_other_words() -> None:
    def make(honest: Any) -> Any:
        def other(words: Any) -> Any:
            return honest(KeyStream.from_os_entropy().words(words.shape, words.dtype))

        return other

    swap(views, "sketch_of", make)


@fault("resuming", "each epoch begins with the noise of the one before", ("strict", "dp-encoder", "fdml"))
def noise_restored() -> None:
    kept: dict[str, Any] = {}

    def make(honest: Any) -> Any:
        def begin(self: sites.Site, part: str, epoch: int) -> bool:
            if self.gate is not None and part == "epoch":
                secret = kept.setdefault(self.name, os.urandom(16))
                self.gate.noise._stream = KeyStream(secret)
            return bool(honest(self, part, epoch))

        return begin

    swap(sites.Site, "begin", make)


@fault("resuming", "what was released once is forgotten at each epoch and released anew", ("frozen",))
def cache_forgotten() -> None:
    def make(honest: Any) -> Any:
        def begin(self: sites.Site, part: str, epoch: int) -> bool:
            if self.gate is not None and self.gate._cache is not None and part == "epoch":
                self.gate._cache = {}
            return bool(honest(self, part, epoch))

        return begin

    swap(sites.Site, "begin", make)


@fault("scorecards", "the counts that bins are made of have no noise", CARD)
def card_counts_exact() -> None:
    def make(honest: Any) -> Any:
        def counting(self: Gate, **options: Any) -> Any:
            honest(self, **options)
            return lambda counts, std: np.asarray(counts, np.float64)

        return counting

    swap(Gate, "noisy_counts", make)


@fault("scorecards", "histograms of labels have a third of their noise", CARD)
def card_histograms_weak() -> None:
    def make(honest: Any) -> Any:
        def weak(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            return noise if self.protocol.series is not None else (noise.view(np.int64) // 3).view(np.uint64)

        return weak

    swap(SealedParty, "noise_for", make)


@fault("models", "the model that is kept is the one before the last step", ("strict", "dp-encoder", "sealed"))
def model_of_before() -> None:
    first: dict[str, Any] = {}

    def note(honest: Any) -> Any:
        def begin(self: sites.Site, part: str, epoch: int) -> bool:
            if part == "epoch":
                first.update({name: copy.deepcopy(module) for name, module in self.encoders.items()})
            return bool(honest(self, part, epoch))

        return begin

    swap(sites.Site, "begin", note)

    def make(honest: Any) -> Any:
        return lambda path, module: honest(path, first.get(path.stem, module))

    swap(sites, "save_module", make)


@fault("dealer", "two members get the same mask for their rows", SEALED)
def dealer_twins() -> None:
    def make(honest: Any) -> Any:
        def setup(self: dealer.SealedDealer) -> Any:
            drawn: list[bytes] = []
            real = dealer.os

            class Twins:
                @staticmethod
                def urandom(size: int) -> bytes:
                    drawn.append(real.urandom(size))
                    return drawn[1] if len(drawn) == 3 else drawn[-1]

            dealer.os = Twins  # type: ignore[assignment,misc]
            try:
                return honest(self)
            finally:
                dealer.os = real  # type: ignore[misc]

        return setup

    swap(dealer.SealedDealer, "setup", make)


@fault(
    "labels used", "training uses the true labels, not the flipped ones that are written down", ("labels",)
)
def labels_true() -> None:
    def make(honest: Any) -> Any:
        def randomise(self: Gate, labels: Any, **options: Any) -> Any:
            honest(self, labels, **options)
            return np.array(labels)

        return randomise

    swap(Gate, "randomise_labels", make)


@fault("sums", "a party's share is the one of the round before with the other sign", TREES[:2])
def shares_alternate() -> None:
    last: dict[tuple[int, int], Any] = {}

    def make(honest: Any) -> Any:
        def share(self: DistributedNoise, size: int, stream: Any) -> Any:
            before = last.pop((id(stream), size), None)
            if before is not None:
                return (0 - before).astype(before.dtype)
            last[id(stream), size] = honest(self, size, stream)
            return last[id(stream), size]

        return share

    swap(DistributedNoise, "share", make)
