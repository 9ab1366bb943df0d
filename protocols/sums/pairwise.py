"""Sums under pairwise masks: who shares masks with whom, the configuration, what participants keep secret."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from securevfl.errors import DropoutError, ProtocolError, TopologyError
from securevfl.protocols.contract import (
    AGGREGATOR,
    Address,
    Machine,
    Node,
    SecureSum,
    Shape,
    name_of,
)
from securevfl.protocols.keys import Authenticator, PairKeys
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.sums.pairwise_aggregator import CollectingAggregator, RecoveringAggregator
from securevfl.protocols.sums.pairwise_messages import (
    Confirmation,
    Confirmations,
    Encapsulations,
    KeyDirectory,
    MaskedInput,
    OpenedShares,
    PublicKeys,
    RelayedShares,
    SealedShares,
    Survivors,
)
from securevfl.protocols.sums.pairwise_setup import AggregatorSetup, WorkerSetup
from securevfl.protocols.sums.pairwise_worker import MaskingWorker, SharingWorker


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


class PairwiseMaskSum(SecureSum):
    """A sum at an aggregator under masks that cancel in pairs; it survives workers that drop out.

    Each pair of neighbours agrees on a key (X25519, with `hybrid` also ML-KEM-768) and so on a mask, which
    one adds and the other subtracts. When workers may drop out, each one adds a self mask as well and shares,
    anew in every round, the seeds of its self mask and of its pair masks among its neighbours. After the
    masked inputs are in, the neighbours confirm to each other who takes part and who survived, and open the
    self seed of those that survived or the pair seed of those that did not; a worker never reveals both of
    anyone, and pair seeds are good for one round only.

    Threat model: the aggregator and up to `collusion` workers follow the protocol and pool all they see; they
    learn their own inputs and the sum over the survivors, nothing else, as the graph of the survivors is
    checked by every worker to be (collusion + 1)-connected. With the complete graph this also holds for an
    aggregator that lies about who takes part or dropped out: a worker opens shares only once `threshold`
    workers have confirmed the lists that it was told, and as threshold > (holders + collusion) / 2 is
    enforced, one pair of lists at most gets that far. With fewer neighbours distant workers can be told
    different lists. Everything runs through the aggregator; shares are sealed end to end. An aggregator that
    swaps public keys during the setup is noticed before anything masked leaves if the workers' nodes have an
    `Authenticator`; else only if they compare `PairwiseNode.fingerprints`.

    Who learns what: the aggregator learns the sum and who contributed; the workers learn who contributed. Not
    promised: a correct sum if somebody lies. A retry over another set of workers reveals the difference.

    Dropout: recovered as long as `threshold` of each worker's holders remain and the survivors stay
    connected; otherwise `DropoutError`. The key agreement goes on under the same conditions; a worker that
    missed it has no keys and takes no part in the rounds of these nodes: to let it in again, everybody makes
    new nodes and agrees anew. With `threshold` equal to the number of holders nobody may drop out, and one
    message per worker and round is enough.

    Args:
        workers: Number of workers, at least `collusion` + 2.
        collusion: How many workers may pool their views with the aggregator.
        threshold: Shares that open a seed, out of the holders: a worker and its neighbours. With all workers
            as neighbours it is the number of workers that must stay to the end. By default the smallest
            allowed.
        neighbours: Even number of neighbours of each worker; None for all other workers.
        hybrid: Combine X25519 with ML-KEM-768.
        fixed_point: How floats become ring elements.

    Raises:
        TopologyError: The graph does not withstand that many colluders, or the threshold is unsafe.
    """

    messages = (
        PublicKeys,
        KeyDirectory,
        Encapsulations,
        SealedShares,
        RelayedShares,
        MaskedInput,
        Survivors,
        Confirmation,
        Confirmations,
        OpenedShares,
    )

    def __init__(
        self,
        *,
        workers: int,
        collusion: int = 1,
        threshold: int | None = None,
        neighbours: int | None = None,
        hybrid: bool = False,
        fixed_point: FixedPoint | None = None,
    ) -> None:
        super().__init__(workers=workers, fixed_point=fixed_point)
        self.graph = NeighbourGraph(workers, neighbours)
        self.collusion = collusion
        self.hybrid = hybrid
        connectivity = self.graph.connectivity(frozenset(range(workers)))
        if not 0 <= collusion < connectivity:
            raise TopologyError(
                f"{workers} workers with {neighbours or workers - 1} neighbours each withstand at most"
                f" {connectivity - 1} colluders, not {collusion}"
            )
        holders = (workers - 1 if neighbours is None else neighbours) + 1
        # Each pair of lists needs `threshold` confirmations. Honest workers confirm once, colluders as often
        # as they like: two pairs would need 2 * threshold <= holders + collusion, so more than that is safe.
        smallest = (holders + collusion) // 2 + 1
        self.threshold = min(smallest, holders) if threshold is None else threshold
        if not min(smallest, holders) <= self.threshold <= holders:
            raise TopologyError(
                f"a threshold of {self.threshold} among {holders} holders is not safe against {collusion}"
                f" colluders and a lying aggregator; use {smallest} to {holders}"
            )
        self.recovers = self.threshold < holders

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The workers and the aggregator."""
        return (*range(self.workers), AGGREGATOR)

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The aggregator."""
        return (AGGREGATOR,)

    def node(self, address: Address, authenticator: Authenticator | None = None) -> PairwiseNode:
        """Fresh secret state for one participant.

        Args:
            address: Of the participant.
            authenticator: Signs the worker's public keys and checks those of the others, in which case all
                workers need one; the aggregator needs none.
        """
        return PairwiseNode(self, address, authenticator)

    def holders(self, worker: Address) -> tuple[Address, ...]:
        """Who holds shares of a worker's seeds: its neighbours and itself, in ascending order."""
        return tuple(sorted((*self.graph.neighbours(worker), worker)))

    def peers(self, worker: Address, present: frozenset[Address]) -> tuple[Address, ...]:
        """The neighbours of a worker that are present, in ascending order."""
        return tuple(peer for peer in self.graph.neighbours(worker) if peer in present)

    def read_list(self, listed: object, *, allowed: frozenset[Address], own: Address) -> frozenset[Address]:
        """The workers that the aggregator lists, if the one who reads it is safe among them.

        Args:
            listed: The list, in ascending order.
            allowed: Who can be on it.
            own: The reader's address.

        Raises:
            ProtocolError: The list is malformed, names strangers or leaves the reader out.
            DropoutError: Those who are left do not hide each other, or hold too few shares.
        """
        if type(listed) is not list or not all(type(worker) is int for worker in listed):
            raise ProtocolError("the aggregator's list of workers is malformed")
        workers = frozenset(listed)
        if sorted(workers) != listed or not workers <= allowed:
            raise ProtocolError(f"list of workers {listed} is not ascending or names strangers")
        if own not in workers:
            raise ProtocolError(f"the aggregator counts {name_of(own)} as dropped, but it is here")
        self.check_present(workers)
        return workers

    def check_present(self, workers: frozenset[Address]) -> None:
        """Raises `DropoutError` unless these workers can begin: they hide each other and can open seeds."""
        self.check_survivors(workers)
        self.check_openers(workers, workers)

    def check_survivors(self, alive: frozenset[Address]) -> None:
        """Raises `DropoutError` unless these workers are still enough to hide each other."""
        if len(alive) < self.collusion + 2 or self.graph.connectivity(alive) <= self.collusion:
            raise DropoutError(
                f"the {len(alive)} workers left do not hide from {self.collusion} colluders; retry with more"
            )

    def check_openers(self, owners: frozenset[Address], openers: frozenset[Address]) -> None:
        """Raises `DropoutError` unless these openers hold enough shares of every owner's seeds."""
        for owner in owners:
            left = (owner in openers) + len(openers.intersection(self.graph.neighbours(owner)))
            if left < self.threshold:
                raise DropoutError(
                    f"{left} holders of the seeds of {name_of(owner)} are left; {self.threshold} are needed"
                )


class PairwiseNode(Node):
    """One participant's keys with each neighbour; the aggregator has none.

    `participants` are the workers that agreed on keys. A worker that was gone by then has none, and no round
    of this node has room for it.
    """

    protocol: PairwiseMaskSum

    def __init__(
        self, protocol: PairwiseMaskSum, address: Address, authenticator: Authenticator | None = None
    ) -> None:
        super().__init__(protocol, address)
        self.authenticator = authenticator
        self.pairs: dict[Address, PairKeys] | None = None
        self.participants = frozenset(range(protocol.workers))
        self._setup_begun = False

    def setup(self) -> Machine:
        """The key agreement, once per run."""
        if self._setup_begun:
            raise ProtocolError(f"{name_of(self.address)} has begun its key agreement; make a new node")
        self._setup_begun = True
        return AggregatorSetup(self) if self.address == AGGREGATOR else WorkerSetup(self)

    @property
    def present(self) -> frozenset[Address]:
        """The workers that agreed on keys, and the aggregator."""
        return self.participants | {AGGREGATOR}

    def fingerprints(self) -> dict[Address, str]:
        """What to compare with each neighbour over another channel: equal unless somebody swapped keys."""
        return {peer: pair.fingerprint for peer, pair in self.agreed().items()}

    def agreed(self) -> dict[Address, PairKeys]:
        """The keys with each neighbour; raises `ProtocolError` before the setup has run."""
        if self.pairs is None:
            raise ProtocolError(f"{name_of(self.address)} has no keys yet; run its setup first")
        return self.pairs

    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> Machine:
        pairs = self.agreed()
        if encoded is None:
            aggregator = RecoveringAggregator if self.protocol.recovers else CollectingAggregator
            return aggregator(self, shape, **where)
        worker = SharingWorker if self.protocol.recovers else MaskingWorker
        return worker(self, pairs, encoded, **where)
