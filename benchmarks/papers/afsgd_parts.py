"""What AFSGD-VP's speed-up of SGD is made of: batches of one's own, the clock, stale sums.

Between synchronous SGD and Algorithm 3 stand three differences. Each is switched on alone:

- *one batch*: all blocks step on the same batch, behind a barrier (`fsgd`);
- *own batches*: the control without asynchrony; every block draws a batch of its own, all blocks step on
  sums of the same weights, behind the same barrier;
- *own pace*: no barrier, every block steps as fast as its worker is, on sums of the weights at that moment;
- *stale sums*: the sum is taken when a step begins, as in Algorithm 3 (`afsgd`).

The first and the last are also run by the product itself, which shows that these short loops tell the truth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.papers.afsgd_sets import L2, Floats, Problem
from benchmarks.papers.common import say, table
from securevfl.algorithms.linear import loss_derivative
from securevfl.algorithms.steps import Batches, Draws

LOOKS = 25
RATES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TUNING, SEEDS = (100,), tuple(range(5))
PASSES = 40
"""Passes of all workers together after which a run is given up."""
OVERHEAD = 0.1
"""Time units that a sum's messages take, on a tree of four workers with a latency of 0.02 a message."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        name: What it is called.
        own: Every block has a batch of its own.
        free: No barrier.
        stale: Sums are taken when a step begins.
        sampling: The kind of batches.
    """

    name: str
    own: bool = False
    free: bool = False
    stale: bool = False
    sampling: type[Batches] = Draws


METHODS = (
    Method(name="one batch"),
    Method(name="own batches", own=True),
    Method(name="own pace", own=True, free=True),
    Method(name="stale sums", own=True, free=True, stale=True),
    Method(name="one batch, passes", sampling=Batches),
    Method(name="stale sums, passes", own=True, free=True, stale=True, sampling=Batches),
)


class Blocks:
    """A linear model in blocks of columns, the bias with the first."""

    def __init__(self, problem: Problem, workers: int) -> None:
        self.problem = problem
        ones = np.ones((len(problem.labels), 1))
        features = np.hstack([np.asarray(problem.features), ones])
        place = np.searchsorted(np.cumsum(problem.data.widths), problem.columns, side="right")
        place = np.append(place, 0)
        self.columns = [np.flatnonzero(place == worker) for worker in range(workers)]
        self.features, self.weights = features, np.zeros((features.shape[1], 1))

    def gradient(self, rows: Any, worker: int, weights: Floats) -> Floats:
        """A block's gradient of the mean loss and of the regulariser; the bias is not regularised."""
        batch = self.features[rows]
        derivative = loss_derivative("binary", batch @ weights, self.problem.labels[rows])
        mine = self.columns[worker]
        pull = L2 * weights[mine]
        pull[mine == len(weights) - 1] = 0.0
        found: Floats = batch[:, mine].T @ derivative / len(rows) + pull
        return found


def walk(
    method: Method, blocks: Blocks, rate: float, slow: float, seed: int
) -> Iterator[tuple[float, float]]:
    """(time, passes of all workers together) after every step; the weights are in `blocks`."""
    workers, problem = len(blocks.columns), blocks.problem
    n, size = len(problem.labels), problem.batch
    order = range(workers) if method.own else [0] * workers
    batches = [method.sampling(n, size, np.random.default_rng((seed, each))) for each in order]
    shared = batches[0]
    duration = [1.0] * (workers - 1) + [slow]
    done = 0.0
    if not method.free:
        now = 0.0
        while True:
            rows = [batches[w].next() for w in range(workers)] if method.own else [shared.next()] * workers
            before = blocks.weights.copy()
            for worker in range(workers):
                step = rate * blocks.gradient(rows[worker], worker, before)
                blocks.weights[blocks.columns[worker]] -= step
            now, done = now + slow + OVERHEAD, done + sum(map(len, rows)) / (n * workers)
            yield now, done
    queue: list[tuple[float, int, Any, Floats | None]] = []
    for worker in range(workers):
        begin(method, blocks, batches[worker], worker, 0.0, duration[worker], queue)
    while True:
        now, worker, rows, step = heapq.heappop(queue)
        found = blocks.gradient(rows, worker, blocks.weights) if step is None else step
        blocks.weights[blocks.columns[worker]] -= rate * found
        done += len(rows) / (n * workers)
        begin(method, blocks, batches[worker], worker, now, duration[worker], queue)
        yield now, done


def begin(
    method: Method,
    blocks: Blocks,
    batches: Batches,
    worker: int,
    now: float,
    duration: float,
    queue: list[Any],
) -> None:
    """Puts a worker's next step into the queue; a stale one knows its gradient already."""
    rows = batches.next()
    step = blocks.gradient(rows, worker, blocks.weights) if method.stale else None
    heapq.heappush(queue, (now + duration + OVERHEAD, worker, rows, step))


def time_to_target(
    method: Method, problem: Problem, target: float, rate: float, slow: float, seed: int
) -> float:
    """When the sub-optimality goes below the target to stay there for a pass of all workers together."""
    blocks = Blocks(problem, len(problem.data.parties))
    looked, since, below = 0.0, math.inf, 0
    for now, done in walk(method, blocks, rate, slow, seed):
        if done < looked + 1 / LOOKS - 1e-9:
            continue
        looked, gap = done, problem.gap(blocks.weights)
        if gap <= target:
            since, below = (now if below == 0 else since), below + 1
            if below > LOOKS:
                return since
        else:
            below = 0
        if not gap < 10 or done > PASSES:
            return math.inf
    return math.inf


def tuned(cost: Callable[[float, int], float]) -> tuple[float, list[float]]:
    """The rate that is best on the tuning seeds, of the same grid for all, and times on the others."""
    means = {rate: float(np.mean([cost(rate, seed) for seed in TUNING])) for rate in RATES}
    best = min(means, key=lambda rate: means[rate])
    return best, [cost(best, seed) for seed in SEEDS]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of a 95 % t-interval."""
    if not all(map(math.isfinite, values)):
        return math.inf, math.inf
    spread = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(spread)


def ratio(before: list[float], after: list[float]) -> str:
    """How many times faster, with a 95 % interval from the logarithms (Welch)."""
    first, second = np.log(before), np.log(after)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return "-"
    parts = [np.var(each, ddof=1) / len(each) for each in (first, second)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(first) - 1) for part in parts) if sum(parts) else 1.0
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    middle = float(first.mean() - second.mean())
    return f"{math.exp(middle):.2f} ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"


def parts_table(problem: Problem, product: Callable[[str, str, float, int], float], slower: float) -> str:
    """Times of all methods and what each difference is worth.

    Args:
        problem: The problem.
        product: (algorithm, sampling, rate, seed) -> time of a run of the product itself.
        slower: How much slower the straggler is.
    """
    target, rows, times = problem.targets["sgd"], [], {}
    for method in METHODS:
        rate, found = tuned(
            lambda rate, seed, m=method: time_to_target(m, problem, target, rate, 1 + slower, seed)
        )
        times[method.name] = found
        mean, half = interval(found)
        rows.append([method.name, f"{rate:g}", f"{mean:.0f} ± {half:.0f}"])
        twin = {"one batch": "fsgd", "stale sums": "afsgd"}.get(method.name.removesuffix(", passes"))
        sampling = "passes" if method.sampling is Batches else "draws"
        real = interval([product(twin, sampling, rate, seed) for seed in SEEDS]) if twin else None
        rows[-1].append("" if real is None else f"{real[0]:.0f} ± {real[1]:.0f}")
        before = {
            "own batches": "one batch",
            "own pace": "own batches",
            "stale sums": "own pace",
            "stale sums, passes": "one batch, passes",
        }.get(method.name)
        rows[-1].append(ratio(times[before], found) if before else "")
        say(f"parts {rows[-1]}")
    rows.append(["all three", "", "", "", ratio(times["one batch"], times["stale sums"])])
    return table(["method", "rate", "time", "by the product", "times faster than"], rows)
