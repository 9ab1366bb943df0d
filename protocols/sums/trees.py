"""Tree pairs for masked sums, and the exact analysis of what a coalition learns from them.

A tree is a parent map over the workers: each worker sends, once, the sum over its subtree to its parent. T1
carries value plus mask, T2 the mask alone. With independent uniform masks on the ring, the view of a
coalition S determines its own inputs and the sum over each connected component of the union graph of T1 and
T2 without S, and nothing else. This holds even when S also knows both totals, and covers every message that S
sends, receives or relays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from securevfl.errors import TopologyError
from securevfl.protocols.contract import COORDINATOR, name_of

if TYPE_CHECKING:
    from networkx import Graph

ParentMap = Mapping[int, int]
PartialSums = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class TreePair:
    """Two rooted spanning trees on the same workers; the roots may differ.

    Args:
        t1: Parent map `{child: parent}` of the tree that carries masked values. Workers are 0..q-1; the
            vertex `COORDINATOR` may stand for an external coordinator without input. The root is the vertex
            without a parent.
        t2: Parent map of the tree that carries masks.
        partial_sums: For each tree, the sets of workers whose sum some host forms on the way; by default
            those that the messages carry. Only the paper's Definition 1 looks at them.

    Raises:
        TopologyError: A map is no spanning tree, or the two do not have the same workers.
    """

    t1: ParentMap
    t2: ParentMap
    partial_sums: tuple[PartialSums, PartialSums] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        vertices = [_check_tree(tree, label) for tree, label in ((self.t1, "t1"), (self.t2, "t2"))]
        if vertices[0] != vertices[1]:
            raise TopologyError(f"t1 joins {sorted(vertices[0])} but t2 joins {sorted(vertices[1])}")
        object.__setattr__(self, "t1", MappingProxyType(dict(self.t1)))
        object.__setattr__(self, "t2", MappingProxyType(dict(self.t2)))

    @classmethod
    def pairwise(cls, first: Sequence[int], second: Sequence[int]) -> TreePair:
        """The paper's trees: neighbours in the order are added in pairs, the left one hosts the sum."""
        (t1, sums1), (t2, sums2) = _pairwise_tree(first), _pairwise_tree(second)
        return cls(t1, t2, partial_sums=(sums1, sums2))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self.t1), dict(self.t2), self.partial_sums)

    @functools.cached_property
    def vertices(self) -> frozenset[int]:
        """The workers and, where there is one, the coordinator."""
        return frozenset(self.t1) | frozenset(self.t1.values())

    @property
    def workers(self) -> int:
        """Number of workers, that is of inputs."""
        return len(self.vertices) - self.has_coordinator

    @property
    def has_coordinator(self) -> bool:
        """Whether an external coordinator takes part."""
        return COORDINATOR in self.vertices

    @property
    def roots(self) -> tuple[int, int]:
        """The roots of T1 and T2."""
        return _root(self.t1), _root(self.t2)

    def rooted_at(self, root: int) -> TreePair:
        """The same two trees hung up at another vertex: the same edges, hence the same leakage."""
        if root not in self.vertices:
            raise TopologyError(f"{name_of(root)} is not in the trees and cannot be their root")
        return TreePair(_reroot(self.t1, root), _reroot(self.t2, root))

    def learned_by(self, coalition: Iterable[int]) -> list[frozenset[int]]:
        """The sets of other workers whose sum the coalition learns, exactly.

        They partition the workers outside the coalition: one set means that the coalition learns no more than
        the total and its own inputs tell it.
        """
        members = frozenset(coalition)
        if not members <= self.vertices:
            raise TopologyError(f"{sorted(members - self.vertices)} are not in the trees")
        from networkx import connected_components

        rest = self._union.subgraph(self.vertices - members)
        parts = [frozenset(part) - {COORDINATOR} for part in connected_components(rest)]
        return sorted((part for part in parts if part), key=min)

    def max_collusion(self) -> int:
        """The largest t for which no coalition of t participants learns more than it must.

        At most workers - 2: with a single honest worker left, the total gives that worker away.
        """
        if not self.has_coordinator:
            from networkx import node_connectivity

            return min(int(node_connectivity(self._union)) - 1, self.workers - 2)
        # A cut that only isolates the coordinator reveals nothing, so connectivity would count too low. Two
        # trees never withstand 3: some worker has at most 3 neighbours, and they recover it.
        for size in range(1, min(3, self.workers - 1)):
            for coalition in itertools.combinations(sorted(self.vertices), size):
                if len(self.learned_by(coalition)) > 1:
                    return size - 1
        return min(2, self.workers - 2)

    def is_significantly_different(self) -> bool:
        """Definition 1 of the AFSGD-VP paper: no equal partial sums, except single workers and the total.

        It is not enough for security: see `learned_by`.
        """
        first, second = self.partial_sums or (_subtrees(self.t1), _subtrees(self.t2))
        return not any(1 < len(workers) < self.workers for workers in first & second)

    @functools.cached_property
    def _union(self) -> Graph:
        from networkx import Graph  # slow to import, needed by trees alone

        return Graph([*self.t1.items(), *self.t2.items()])


@functools.lru_cache(maxsize=256)
def build_trees(workers: int, collusion: int = 1, *, coordinator: bool = False) -> TreePair:
    """A tree pair that withstands every coalition of `collusion` participants, verified.

    Args:
        workers: Number of workers, numbered from 0.
        collusion: How many participants, the coordinator included, may pool what they see.
        coordinator: Add an external coordinator without input as the root of both trees.

    Raises:
        TopologyError: No such pair exists; the message says why.
    """
    _check_request(workers, collusion)
    size = workers + coordinator
    pair = next((p for p in _candidates(size, collusion) if p.max_collusion() >= collusion), None)
    if pair is None:
        raise TopologyError(f"no tree pair for {workers} workers and {collusion} colluders was found")
    if coordinator:
        pair = _with_coordinator(pair)
        if pair.max_collusion() < collusion:
            raise TopologyError(f"no tree pair with a coordinator for {workers} workers was found")
    return pair


def _rebuild(t1: ParentMap, t2: ParentMap, sums: tuple[PartialSums, PartialSums] | None) -> TreePair:
    return TreePair(t1, t2, partial_sums=sums)


def _check_request(workers: int, collusion: int) -> None:
    if collusion < 0:
        raise TopologyError(f"{collusion} colluders were asked for; use 0 or more")
    if workers < collusion + 2:
        raise TopologyError(
            f"{workers} workers cannot hide from {collusion} colluders: at least {collusion + 2} are needed,"
            " else the total alone gives the last honest worker away"
        )
    if collusion > 2:
        raise TopologyError(
            f"two trees never withstand {collusion} colluders: some worker has at most 3 neighbours, and they"
            " recover its input; use PairwiseMaskSum"
        )


def _candidates(size: int, collusion: int) -> Iterator[TreePair]:
    if collusion < 2 or size % 2 == 0:
        yield _cyclic_shift(size)
    else:
        yield from _insertions(size)
    if size >= 4:
        yield _wheel(size)


def _cyclic_shift(size: int) -> TreePair:
    order = list(range(size))
    return TreePair.pairwise(order, order[1:] + order[:1])


def _insertions(size: int) -> Iterator[TreePair]:
    # With an odd number of workers two pairwise trees share a leaf, whose two neighbours recover it. So the
    # last worker goes inside an edge of each tree for one worker less.
    base, last = _cyclic_shift(size - 1), size - 1
    for (child1, parent1), (child2, parent2) in itertools.product(base.t1.items(), base.t2.items()):
        if len({child1, parent1, child2, parent2}) == 4:
            yield TreePair({**base.t1, child1: last, last: parent1}, {**base.t2, child2: last, last: parent2})


def _wheel(size: int) -> TreePair:
    # Hub 0; T1 is the path through the rim, T2 the spokes and the edge that closes the rim.
    last = size - 1
    return TreePair(
        {worker: worker - 1 for worker in range(1, size)},
        {1: last, **dict.fromkeys(range(2, size), 0)},
    )


def _with_coordinator(pair: TreePair) -> TreePair:
    # The root of T1 becomes the coordinator; every other vertex moves down by one.
    root = pair.roots[0]
    names = {vertex: vertex - (vertex > root) for vertex in pair.vertices} | {root: COORDINATOR}
    renamed = ({names[c]: names[p] for c, p in tree.items()} for tree in (pair.t1, pair.t2))
    return TreePair(*renamed).rooted_at(COORDINATOR)


def _pairwise_tree(order: Sequence[int]) -> tuple[ParentMap, PartialSums]:
    hosts = [(worker, frozenset([worker])) for worker in order]
    parents: dict[int, int] = {}
    sums = {workers for _, workers in hosts}
    while len(hosts) > 1:
        paired = []
        for (host, left), (guest, right) in zip(hosts[::2], hosts[1::2], strict=False):
            parents[guest] = host
            paired.append((host, left | right))
        hosts = paired + hosts[len(paired) * 2 :]
        sums |= {workers for _, workers in hosts}
    return parents, frozenset(sums)


def _check_tree(tree: ParentMap, label: str) -> frozenset[int]:
    vertices = frozenset(tree) | frozenset(tree.values())
    if not all(type(vertex) is int for vertex in vertices):
        raise TopologyError(f"{label} must map workers to workers, numbered from 0; found {dict(tree)}")
    workers = vertices - {COORDINATOR}
    if len(workers) < 2 or workers != frozenset(range(len(workers))):
        raise TopologyError(f"{label} must join workers 0..q-1, at least two; found {sorted(vertices)}")
    if len(tree) != len(vertices) - 1:
        roots = sorted(vertices - frozenset(tree))
        raise TopologyError(f"{label} must have exactly one root; vertices without a parent: {roots}")
    for start in tree:
        vertex = start
        for _ in range(len(tree)):
            if vertex not in tree:
                break
            vertex = tree[vertex]
        else:
            if vertex in tree:
                raise TopologyError(f"{label} has a cycle above {name_of(start)}")
    return vertices


def _root(tree: ParentMap) -> int:
    return next(parent for parent in tree.values() if parent not in tree)


def _reroot(tree: ParentMap, root: int) -> ParentMap:
    flipped = dict(tree)
    path = [root]
    while path[-1] in tree:
        path.append(tree[path[-1]])
    for child, parent in itertools.pairwise(path):
        flipped[parent] = child
    flipped.pop(root, None)
    return flipped


def _subtrees(tree: ParentMap) -> PartialSums:
    below: dict[int, set[int]] = {vertex: {vertex} for vertex in [*tree, _root(tree)]}
    for vertex in tree:
        host = vertex
        while host in tree:
            host = tree[host]
            below[host].add(vertex)
    return frozenset(frozenset(workers - {COORDINATOR}) for workers in below.values())


def draw(pair: TreePair) -> str:
    """Both trees as indented text, roots first."""
    blocks = []
    titles = ("T1 (values plus masks)", "T2 (masks)")
    for title, tree, root in zip(titles, (pair.t1, pair.t2), pair.roots, strict=True):
        blocks.append("\n".join([title, label(root), *_branches(tree, root, "")]))
    return "\n\n".join(blocks)


def describe(pair: TreePair) -> dict[str, Any]:
    """What every single participant and the worst coalition learns, as plain data for JSON.

    `singles` lists, for each participant, the sets of other workers whose sum it learns; one set is the total
    alone. `worst_coalition` is a smallest coalition that learns more than the total, None if none does.
    """
    worst = worst_coalition(pair)
    return {
        "workers": pair.workers,
        "coordinator": pair.has_coordinator,
        "t1": {label(child): label(parent) for child, parent in sorted(pair.t1.items())},
        "t2": {label(child): label(parent) for child, parent in sorted(pair.t2.items())},
        "roots": [label(root) for root in pair.roots],
        "max_collusion": pair.max_collusion(),
        "significantly_different": pair.is_significantly_different(),
        "singles": {label(vertex): _sets(pair, (vertex,)) for vertex in sorted(pair.vertices)},
        "worst_coalition": None
        if worst is None
        else {"members": [label(vertex) for vertex in worst], "learns": _sets(pair, worst)},
    }


def worst_coalition(pair: TreePair) -> tuple[int, ...] | None:
    """A smallest coalition that learns more than the total; if possible one that isolates a single worker."""
    size = pair.max_collusion() + 1
    if size > pair.workers - 2:
        return None
    around = [_neighbours(pair, worker) for worker in range(pair.workers)]
    candidates = [tuple(sorted(group)) for group in around if len(group) == size]
    if size < 3:  # three are always some worker's neighbours, two or one need not be
        candidates += itertools.combinations(sorted(pair.vertices), size)
    return next((coalition for coalition in candidates if len(pair.learned_by(coalition)) > 1), None)


def _neighbours(pair: TreePair, worker: int) -> set[int]:
    edges = [*pair.t1.items(), *pair.t2.items()]
    return {a if b == worker else b for a, b in edges if worker in (a, b)}


def label(vertex: int) -> str:
    """The short name of a participant in drawings and JSON."""
    return "coordinator" if vertex == COORDINATOR else str(vertex)


def _sets(pair: TreePair, coalition: tuple[int, ...]) -> list[list[int]]:
    return [sorted(part) for part in pair.learned_by(coalition)]


def _branches(tree: ParentMap, host: int, indent: str) -> list[str]:
    lines = []
    children = sorted(child for child, parent in tree.items() if parent == host)
    for number, child in enumerate(children):
        last = number == len(children) - 1
        lines.append(f"{indent}{'└── ' if last else '├── '}{label(child)}")
        lines += _branches(tree, child, indent + ("    " if last else "│   "))
    return lines
