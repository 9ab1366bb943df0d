"""Which workers share pairwise masks, and how many of them an attacker must own to cut them apart."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from securevfl.errors import TopologyError


@dataclasses.dataclass(frozen=True)
class NeighbourGraph:
    """Every worker shares masks with its `degree` nearest workers on a ring; with all of them for None.

    By the same theorem as for trees, a coalition together with the aggregator learns the sums over the
    connected components that are left when the coalition and the dropped workers are taken out. So t
    colluders learn nothing but the total if and only if the graph of the survivors is (t+1)-connected.

    Args:
        workers: Number of workers.
        degree: Even number of neighbours of each worker; None for the complete graph.
    """

    workers: int
    degree: int | None = None

    def __post_init__(self) -> None:
        if self.degree is not None and (self.degree % 2 or not 2 <= self.degree < self.workers):
            raise TopologyError(
                f"{self.degree} neighbours among {self.workers} workers: use an even number below the number"
                " of workers, or None for all"
            )

    def neighbours(self, worker: int) -> tuple[int, ...]:
        """The workers that share masks with this one, in ascending order."""
        return _neighbours(self.workers, self.degree, worker)

    def connectivity(self, alive: frozenset[int]) -> int:
        """How many of the living workers have to be removed to cut the rest apart, or to leave only one."""
        if self.degree is None:
            return len(alive) - 1
        return _ring_connectivity(self.workers, self.degree // 2, alive)


@functools.lru_cache(maxsize=4096)
def _neighbours(workers: int, degree: int | None, worker: int) -> tuple[int, ...]:
    if degree is None:
        return tuple(other for other in range(workers) if other != worker)
    reach = range(1, degree // 2 + 1)
    return tuple(sorted({(worker + sign * step) % workers for step in reach for sign in (1, -1)}))


@functools.lru_cache(maxsize=1024)
def _ring_connectivity(workers: int, reach: int, alive: frozenset[int]) -> int:
    # Consecutive living workers are neighbours unless `reach` or more in a row between them are gone. So a
    # cut consists of two windows of `reach` places with somebody alive on both sides; take the cheapest two.
    living = np.zeros(workers, dtype=np.int64)
    living[list(alive)] = 1
    before = np.concatenate([[0], np.cumsum(np.concatenate([living, living, living]))])
    start = np.arange(workers)
    cost = before[start + reach] - before[start]
    first, second = start[:, None], start[None, :]
    apart = (second >= first + reach) & (second + reach <= first + workers)
    left = before[second] - before[np.minimum(first + reach, second)]
    right = before[first + workers] - before[np.minimum(second + reach, first + workers)]
    cuts = np.where(apart & (left > 0) & (right > 0), cost[:, None] + cost[None, :], len(alive))
    return int(min(cuts.min(), len(alive) - 1))
