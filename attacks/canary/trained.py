"""Canaries for trained encoders: whole training runs side by side, every vector through the real gate.

A record of a trained encoder does not only leave in its own releases: it moves the weights, and with them
what is released for every other record. The scenario makes that visible with an honest server: one party
with one feature and a linear encoder; all records have the feature 1 but one, the canary, with a large
feature of either sign, whose gradient decides which way the encoder goes.

All worlds run in lockstep. Their records are stacked as rows of one gate, so that clipping, noise, lattice,
update noise and ledger are exactly those of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securevfl.algorithms.steps import Batches
from securevfl.attacks.canary.gate import OBSERVER
from securevfl.attacks.canary.results import CanaryResult, Coins, MakeGate, claims_of, conclude, guess_worlds
from securevfl.errors import AttackError
from securevfl.models.per_record import CLIP_MARGIN
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.gate import Gate
from securevfl.settings.epochs import COUNTED
from securevfl.settings.plan import Plan

Floats = NDArray[np.float64]

MAX_RELEASES = 6  # longer runs are audited by their first epochs: fewer releases only weaken the bound


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The training run that is repeated.

    Attributes:
        records: Records of the party, the canary included.
        batch: Records per step.
        releases: How often each record is released: once before training, then once per epoch.
        rate: Learning rate.
        weight: The encoder's initial weight.
        feature: Size of the canary's feature.
        seed: Decides the batches.
    """

    records: int = 256
    batch: int = 64
    releases: int = 5
    rate: float = 4.0
    weight: float = 9e-5
    feature: float = 1e4
    seed: int = 0

    @classmethod
    def raw(cls, *, clip: float = 1.0, **changes: int) -> Scenario:
        """For raw training: the canary's embedding starts below the clip, where its gradient flows."""
        return cls(weight=9e-5 * clip, rate=4 * clip, **changes)

    @classmethod
    def private(cls, *, clip: float = 1.0, **changes: int) -> Scenario:
        """For private or no training: the weight keeps its sign, so that the canary's releases differ."""
        return cls(weight=0.5 * clip, rate=clip / 8, **changes)

    @classmethod
    def for_plan(cls, plan: Plan, records: int = 256) -> Scenario:
        """The scenario that fits a plan's training, clip and epochs, with 8 to 256 records."""
        make = cls.raw if plan.encoder_training == "raw" else cls.private
        releases = min(1 + (plan.epochs or COUNTED), MAX_RELEASES)
        return make(clip=plan.clip, releases=releases, records=max(8, min(records, 256)), seed=plan.seed)

    @cached_property
    def canary(self) -> int:
        """The canary's index: a record of the first batch, before the others have moved the encoder."""
        return int(self._source().next()[0])

    def labels(self) -> NDArray[np.float32]:
        """Half of the labels are 1, so that the others' gradients balance; the canary's is 1."""
        even: NDArray[np.bool_] = (np.arange(self.records) - self.canary) % 2 == 0
        return even.astype(np.float32)

    def features(self, coins: Coins) -> NDArray[np.float32]:
        """(records, worlds): 1 everywhere but in the canary's row."""
        table: NDArray[np.float32] = np.ones((self.records, len(coins)), np.float32)
        table[self.canary] = np.where(coins, self.feature, -self.feature)
        return table

    def _source(self) -> Batches:
        return Batches(self.records, self.batch, numpy_generator(self.seed, "batches", 1))

    def epochs(self) -> Iterator[list[NDArray[np.int64]]]:
        """The batches of each epoch, as a run of the same seed draws them for its second party."""
        source = self._source()
        for _ in range(self.releases - 1):
            yield [np.sort(source.next()) for _ in range(-(-self.records // self.batch))]


class _Worlds:
    """Encoders of many worlds in lockstep. Row of record r in world k: r * worlds + k."""

    def __init__(self, gate: Gate, scenario: Scenario, coins: Coins, training: str) -> None:
        self.gate, self.scenario, self.training = gate, scenario, training
        self.count = len(coins)
        self.inputs = torch.from_numpy(scenario.features(coins))
        self.labels = torch.from_numpy(scenario.labels())
        self.weights = torch.full((self.count,), scenario.weight, requires_grad=True)

    def _rows(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        return (records[:, None] * self.count + np.arange(self.count)).ravel()

    def release(self, records: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """What leaves for these records, (records, worlds), and the clipped vectors with their graph."""
        vectors = (self.weights * self.inputs[torch.from_numpy(records)]).reshape(-1, 1)
        released = self.gate.release(
            vectors, rows=self._rows(records), kind="embedding", observers=(OBSERVER,)
        )
        return torch.from_numpy(released.values.copy()).reshape(len(records), -1), released.source

    def learn(self, records: NDArray[np.int64], seen: Tensor, source: Tensor) -> None:
        """The honest server's logistic gradient at the embeddings it saw, and the party's step on it."""
        if self.training == "none":
            return
        upstream = torch.sigmoid(seen) - self.labels[torch.from_numpy(records)][:, None]
        self.weights.grad = None
        if self.training == "raw":
            source.backward((upstream / len(records)).reshape(-1, 1))  # type: ignore[no-untyped-call]
            step = self.weights.grad
        else:
            step = self._private_sum(records, upstream) / len(records)
        if step is None:
            raise AttackError("the encoder's weights received no gradient")
        with torch.no_grad():
            self.weights -= self.scenario.rate * step

    def _private_sum(self, records: NDArray[np.int64], upstream: Tensor) -> Tensor:
        if self.gate.update is None:
            raise AttackError("private training needs a gate with a mechanism for updates")
        bound = self.gate.update.clip * CLIP_MARGIN
        each = (upstream * self.inputs[torch.from_numpy(records)]).clamp(-bound, bound)
        return self.gate.noisy_update([each.sum(0)], rows=self._rows(records))[0]


def transcript(gate: Gate, scenario: Scenario, coins: Coins, training: str) -> Floats:
    """Trains all worlds and returns what the server makes of its view: (worlds, features).

    The features are the canary's own releases, and for each epoch the mean of what the others released.
    """
    worlds = _Worlds(gate, scenario, coins, training)
    everybody = np.arange(scenario.records, dtype=np.int64)
    passes = [worlds.release(everybody)[0].numpy()]
    for batches in scenario.epochs():
        seen_all = np.empty_like(passes[0])
        for records in batches:
            seen, source = worlds.release(records)
            worlds.learn(records, seen, source)
            seen_all[records] = seen.numpy()
        passes.append(seen_all)
    return summarise(np.stack(passes), scenario)


def summarise(passes: NDArray[np.float32], scenario: Scenario) -> Floats:
    """From (releases, records, worlds) to (worlds, features)."""
    table = passes.astype(np.float64)
    others = np.delete(table, scenario.canary, axis=1).mean(1)
    return np.concatenate([table[:, scenario.canary], others]).T


def trained_canaries(
    make_gate: MakeGate,
    scenario: Scenario,
    *,
    training: str = "raw",
    worlds: int = 4000,
    delta: float = 1e-5,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> CanaryResult:
    """Trains `worlds` times with a coin each, fits the rule on the first half, and guesses the second.

    Args:
        make_gate: Makes the gate to audit for a number of records.
        scenario: The run to repeat.
        training: ``raw``, ``dp`` or ``none``, as in a plan.
        worlds: Training runs in all.
        delta: The delta of the epsilons.
        seed: Seed of the coins.
        progress: Called with the share done.
    """

    def watch(coins: Coins) -> tuple[Floats, Gate]:
        gate = make_gate(len(coins) * scenario.records)
        return transcript(gate, scenario, coins, training), gate

    guesses, gate = guess_worlds(watch, worlds, seed=seed, progress=progress)
    claims = claims_of(gate, len(guesses.worlds))
    return conclude(guesses, mode=gate.mode, accounting=gate.mode, claims=claims, delta=delta)
