"""Neighbour graphs: the closed form of their connectivity against networkx."""

import networkx as nx
import numpy as np
import pytest

from securevfl.errors import TopologyError
from securevfl.protocols.sums.pairwise import NeighbourGraph


def as_networkx(graph):
    found = nx.Graph()
    found.add_nodes_from(range(graph.workers))
    found.add_edges_from((a, b) for a in range(graph.workers) for b in graph.neighbours(a))
    return found


def test_connectivity_equals_networkx():
    draw = np.random.default_rng(2)
    for _ in range(600):
        workers = int(draw.integers(3, 14))
        options = [None, *range(2, workers, 2)]
        degree = options[draw.integers(len(options))]
        graph = NeighbourGraph(workers, degree)
        size = int(draw.integers(2, workers + 1))
        alive = frozenset(int(x) for x in draw.choice(workers, size, replace=False))
        assert graph.connectivity(alive) == nx.node_connectivity(as_networkx(graph).subgraph(alive))


def test_neighbours_are_mutual_and_ascending():
    for degree in (None, 2, 4, 8):
        graph = NeighbourGraph(9, degree)
        for worker in range(9):
            peers = graph.neighbours(worker)
            assert list(peers) == sorted(set(peers) - {worker})
            assert len(peers) == (degree or 8)
            assert all(worker in graph.neighbours(peer) for peer in peers)


@pytest.mark.parametrize("degree", [0, 3, -2, 9, 10])
def test_bad_degrees_are_refused(degree):
    with pytest.raises(TopologyError):
        NeighbourGraph(9, degree)
