"""AFSGD-VP's six algorithms as short loops, and what makes the asynchronous ones faster, each thing alone.

Between a synchronous algorithm and its asynchronous counterpart stand three differences. Each is switched on
alone:

- *one batch*: all blocks step on the same batch, behind a barrier (`fsgd`, `fsvrg`, `fsaga`);
- *own batches*: the control without asynchrony; every block draws a batch of its own, all blocks step on
  sums of the same weights, behind the same barrier;
- *own pace*: no barrier, every block steps as fast as its worker is, on sums of the weights at that moment;
- *stale sums*: the sum is taken when a step begins, as in Algorithms 3 to 5 (`afsgd`, `afsvrg`, `afsaga`).

The first and the last are the product's algorithms, without its messages, gates and ledgers: they draw the
batches that the product draws from the same seed, and a test holds their weights to the product's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.papers.afsgd_sets import Floats, Problem
from securevfl.algorithms.linear import ESTIMATORS, Batch, LinearBlock, loss_derivative
from securevfl.algorithms.steps import Draws
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.rows import Rows

PASSES = {"sgd": 40, "svrg": 120, "saga": 120}
"""Passes of all workers together after which a run is given up."""
LATENCY = 0.02

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        name: What it is called.
        own: Every block has a batch of its own.
        free: No barrier.
        stale: Sums are taken when a step begins.
    """

    name: str
    own: bool = False
    free: bool = False
    stale: bool = False


METHODS = (
    Method(name="one batch"),
    Method(name="own batches", own=True),
    Method(name="own pace", own=True, free=True),
    Method(name="stale sums", own=True, free=True, stale=True),
)
SYNCHRONOUS, CONTROL, _, ASYNCHRONOUS = METHODS


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides a run.

    Attributes:
        problem: The set, its optimum and its targets.
        method: How to train.
        estimator: `sgd`, `svrg` or `saga`.
        rate: Of all workers, and of the straggler that times `factor`.
        slower: By how much the last worker is slower than the others, 3 is 300 %.
        seed: Of the draws.
        inner: Passes between two full gradients of SVRG.
        unit: Time that a step takes a worker that is not the straggler.
        looks: At the objective, per pass of all workers.
    """

    problem: Problem
    method: Method
    estimator: str
    rate: float
    slower: float
    seed: int
    factor: float = 1.0
    inner: int = 4
    unit: float = 1.0
    looks: int = 25

    @property
    def workers(self) -> int:
        """q."""
        return len(self.problem.data.parties)

    @property
    def durations(self) -> list[float]:
        """Of a step of every worker, the messages of its sum left out."""
        return [self.unit] * (self.workers - 1) + [self.unit * (1.0 + self.slower)]

    @property
    def messages(self) -> float:
        """Time that the messages of a sum take: asking for it, one for every level of the tree, an answer."""
        return LATENCY * (3 + math.ceil(math.log2(self.workers)))


class Workers:
    """A linear model in blocks of columns, the bias last in the first, each with its estimator."""

    def __init__(self, run: Run) -> None:
        self.run, problem = run, run.problem
        place = np.searchsorted(np.cumsum(problem.data.widths), problem.columns, side="right")
        wide = sparse.issparse(problem.features)
        ones = np.ones((len(problem.labels), 1))
        parts, self.blocks = [], []
        for worker in range(run.workers):
            columns = problem.features[:, place == worker]
            if worker == 0:
                columns = sparse.hstack([columns, ones]).tocsr() if wide else np.hstack([columns, ones])
            parts.append(columns if wide else np.ascontiguousarray(columns))
        self.pooled: Any = sparse.hstack(parts).tocsr() if wide else np.hstack(parts)
        self.rough = self.pooled.astype(np.float32)
        edges = np.cumsum([0, *(part.shape[1] for part in parts)])
        self.weights = np.zeros((edges[-1], 1))
        self.spans = [slice(*edges[each : each + 2]) for each in range(run.workers)]
        self.parts = parts
        for worker, part in enumerate(parts):
            # The blocks' weights are parts of one array, so that a sum of all products is one product.
            weights = self.weights[self.spans[worker]]
            self.blocks.append(LinearBlock(part, part[:1], weights, bias=worker == 0))
        self.estimators = [ESTIMATORS[run.estimator](_Constant(block)) for block in self.blocks]

    def derivative(self, rows: Rows) -> Floats:
        """Derivatives of the loss at the weights as they are."""
        scores = np.asarray(_rows_of(self.pooled, rows) @ self.weights)
        return loss_derivative(self.run.problem.data.task, scores, self.run.problem.labels[rows])

    def step(self, worker: int, rows: Rows, derivative: Floats) -> None:
        """One worker's step."""
        last = worker == self.run.workers - 1
        batch = Batch(_rows_of(self.parts[worker], rows), bias=False)
        direction = self.estimators[worker].direction(batch, rows, derivative)
        rate = self.run.rate * (self.run.factor if last else 1.0)
        self.blocks[worker].step(direction, rate, self.run.problem.l2)

    def remember(self) -> None:
        """A full gradient of everybody at the present weights."""
        rows = np.arange(len(self.run.problem.labels))
        derivative = self.derivative(rows)
        for estimator in self.estimators:
            estimator.remember(rows, derivative)
            estimator.finish_snapshot()

    def gap(self) -> float:
        """Sub-optimality; scores in single precision are exact to 10^-6, targets are 10^-4 and more."""
        scores = np.asarray(self.rough @ self.weights.astype(np.float32), np.float64)
        bias = self.spans[0].stop - 1
        return self.run.problem.gap_of(scores, np.delete(self.weights, bias, axis=0))


def _rows_of(part: Any, rows: Rows) -> Any:
    return part[rows] if sparse.issparse(part) else part.take(rows, axis=0)


class _Constant(LinearBlock):
    """A block whose constant column is among its columns."""

    def __init__(self, block: LinearBlock) -> None:
        super().__init__(*block.parts, block.weights, bias=False)


class Walk:
    """One run: (time, passes of all workers together) after every step."""

    def __init__(self, run: Run) -> None:
        self.run, self.workers = run, Workers(run)
        problem = run.problem
        self.records = len(problem.labels)
        self.steps = math.ceil(self.records / problem.batch)
        order = range(run.workers) if run.method.own else [0]
        self.batches = [
            Draws(self.records, problem.batch, numpy_generator(run.seed, "batches", each)) for each in order
        ]
        self.snapshots = self.workers.estimators[0].snapshots
        self.done, self.taken = 0.0, 0

    def due(self) -> bool:
        """Whether a full gradient is due; SVRG takes one every so many passes, SAGA only the first."""
        if self.snapshots == "never" or (self.snapshots == "once" and self.taken):
            return False
        return self.done >= self.taken * self.run.inner - 1e-9

    def snapshot(self) -> None:
        """A full gradient; it takes a worker as long as the steps of a pass."""
        self.workers.remember()
        self.taken += 1

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return self.freely() if self.run.method.free else self.behind_a_barrier()

    def behind_a_barrier(self) -> Iterator[tuple[float, float]]:
        """All workers step together, as slow as the slowest."""
        now, slow, own = 0.0, max(self.run.durations), self.run.method.own
        while True:
            if self.due():
                self.snapshot()
                now += self.steps * slow
            rows = [each.next() for each in self.batches]
            found = [self.workers.derivative(each) for each in rows]
            for worker in range(self.run.workers):
                which = worker if own else 0
                self.workers.step(worker, rows[which], found[which])
            now, self.done = now + slow + self.run.messages, self.done + len(rows[0]) / self.records
            yield now, self.done

    def freely(self) -> Iterator[tuple[float, float]]:
        """Every worker at its own pace; before a full gradient all finish their step."""
        queue: list[tuple[float, int, Rows, Floats | None]] = []
        waiting, now = list(range(self.run.workers)), 0.0
        while True:
            due = self.due()
            if due and not queue:
                self.snapshot()
                for worker in waiting:
                    self.begin(worker, now + self.steps * self.run.durations[worker], queue)
                waiting, due = [], False
            while waiting and not due:
                self.begin(waiting.pop(0), now, queue)
            now, worker, rows, derivative = heapq.heappop(queue)
            found = self.workers.derivative(rows) if derivative is None else derivative
            self.workers.step(worker, rows, found)
            self.done += len(rows) / (self.records * self.run.workers)
            waiting.append(worker)
            yield now, self.done

    def begin(self, worker: int, now: float, queue: list[Any]) -> None:
        """Puts a worker's next step into the queue; a stale one knows its sum already."""
        rows = self.batches[worker].next()
        known = self.workers.derivative(rows) if self.run.method.stale else None
        heapq.heappush(queue, (now + self.run.durations[worker] + self.run.messages, worker, rows, known))


def settled(curve: Curve, target: float, looks: int) -> float:
    """When a curve goes below the target to stay there for so many more looks; infinite if it never does.

    A first look below the target may be luck where the objective swings.
    """
    below = 0
    for index, gap in enumerate(curve[1]):
        below = below + 1 if gap <= target else 0
        if below > looks:
            return curve[0][index - looks]
    return math.inf


def follow(run: Run, *, until: float = math.inf) -> Curve:
    """The sub-optimality until it has stayed below the target for a pass, or is above it at that time."""
    walk = Walk(run)
    curve: Curve = ([0.0], [walk.workers.gap()])
    target, looked, below = run.problem.targets[run.estimator], 0.0, 0
    for now, done in walk:
        if done < looked + 1 / run.looks - 1e-9:
            continue
        looked, gap = done, walk.workers.gap()
        curve[0].append(now)
        curve[1].append(gap)
        below = below + 1 if gap <= target else 0
        lost = now > until and not below
        if below > run.looks or lost or not gap < 10 or done > PASSES[run.estimator]:
            return curve
    raise AssertionError("a walk has no end")
