"""Tree pairs: construction, the leakage theorem against linear algebra, the paper's counter-examples."""

import copy
import itertools
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_view import learned_space, predicted_space

from securevfl.errors import TopologyError
from securevfl.protocols import COORDINATOR, TreePair, build_trees
from securevfl.protocols.sums.trees import _wheel

STAR = {1: 0, 2: 0, 3: 0}


def random_tree(draw, vertices):
    order = list(draw.permutation(vertices))
    return {int(order[i]): int(order[draw.integers(i)]) for i in range(1, len(order))}


def random_pair(draw, *, coordinator=False):
    vertices = list(range(int(draw.integers(2, 9)))) + [COORDINATOR] * coordinator
    return TreePair(random_tree(draw, vertices), random_tree(draw, vertices))


# -- the theorem


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize("modulus", [0, 2])
def test_learned_by_equals_linear_algebra(modulus, coordinator):
    draw = np.random.default_rng(11 + modulus)
    for _ in range(800):
        pair = random_pair(draw, coordinator=coordinator)
        size = int(draw.integers(0, pair.workers))
        coalition = frozenset(int(v) for v in draw.choice(sorted(pair.vertices), size, replace=False))
        assert learned_space(pair, coalition, modulus) == predicted_space(pair, coalition, modulus)


def test_learned_by_partitions_the_others():
    draw = np.random.default_rng(5)
    for _ in range(300):
        pair = random_pair(draw)
        for size in range(pair.workers + 1):
            coalition = set(range(size))
            parts = pair.learned_by(coalition)
            assert sorted(itertools.chain(*parts)) == list(range(size, pair.workers))


@pytest.mark.parametrize("coordinator", [False, True])
def test_max_collusion_equals_brute_force(coordinator):
    draw = np.random.default_rng(17)
    for _ in range(200):
        pair = random_pair(draw, coordinator=coordinator)
        best = 0
        for size in range(1, pair.workers - 1):
            if any(len(pair.learned_by(c)) > 1 for c in itertools.combinations(sorted(pair.vertices), size)):
                break
            best = size
        assert pair.max_collusion() == best


# Numbers of second orders q! for which Definition 1 holds, one colluder learns nothing, both, two colluders
# learn nothing, both: exhaustive over all pairwise trees with the first order fixed.
COUNTS = {
    3: (4, 4, 3, 0, 0),
    4: (16, 18, 16, 2, 2),
    5: (64, 72, 45, 0, 0),
    6: (384, 518, 384, 10, 8),
    7: (3200, 3326, 2651, 0, 0),
}


@pytest.mark.parametrize("workers", [3, 4, 5, 6, pytest.param(7, marks=pytest.mark.slow)])
def test_counts_over_all_pairwise_trees(workers):
    counts = np.zeros(5, dtype=int)
    for order in itertools.permutations(range(workers)):
        pair = TreePair.pairwise(range(workers), order)
        different, collusion = pair.is_significantly_different(), pair.max_collusion()
        counts += [
            different,
            collusion >= 1,
            different and collusion >= 1,
            collusion >= 2,
            different and collusion >= 2,
        ]
    assert tuple(counts) == COUNTS[workers]


# -- counter-examples to Definition 1 and Lemma 12 of the paper


def test_star_is_significantly_different_and_leaks_everything():
    pair = TreePair(STAR, STAR)
    assert pair.is_significantly_different()
    assert pair.learned_by({0}) == [{1}, {2}, {3}]
    assert pair.max_collusion() == 0


def test_three_workers_in_another_order_leak_everything():
    pair = TreePair.pairwise([0, 1, 2], [0, 2, 1])
    assert pair.is_significantly_different()
    assert pair.learned_by({0}) == [{1}, {2}]


def test_four_workers_leak_one_input():
    # T1 = ((0,1),(2,3)), T2 = (((0,2),1),3): each host adds its guests one after the other.
    sums1 = [{0, 1}, {2, 3}, {0, 1, 2, 3}]
    sums2 = [{0, 2}, {0, 1, 2}, {0, 1, 2, 3}]
    families = tuple(frozenset(map(frozenset, sums)) for sums in (sums1, sums2))
    pair = TreePair({1: 0, 3: 2, 2: 0}, {2: 0, 1: 0, 3: 0}, partial_sums=families)
    assert pair.is_significantly_different()
    assert {1} in pair.learned_by({0})


def test_equal_trees_are_not_significantly_different():
    assert not TreePair.pairwise(range(4), range(4)).is_significantly_different()


# -- construction


@pytest.mark.parametrize("workers", [*range(3, 34), 64, 65, 127, 128])
def test_built_pairs_withstand_one_colluder(workers):
    pair = build_trees(workers)
    assert pair.workers == workers
    assert pair.is_significantly_different()
    assert all(len(pair.learned_by({worker})) == 1 for worker in range(workers))
    assert pair.max_collusion() >= 1


@pytest.mark.parametrize("workers", [*range(4, 34), 64, 65])
def test_built_pairs_withstand_two_colluders(workers):
    pair = build_trees(workers, 2)
    assert pair.max_collusion() == 2
    if workers < 20:
        assert all(len(pair.learned_by(two)) == 1 for two in itertools.combinations(range(workers), 2))


def depth(tree, vertex):
    return 0 if vertex not in tree else 1 + depth(tree, tree[vertex])


@pytest.mark.parametrize("workers", [8, 33, 64, 65])
def test_built_pairs_are_shallow(workers):
    for collusion in (1, 2):
        pair = build_trees(workers, collusion)
        deepest = max(depth(tree, vertex) for tree in (pair.t1, pair.t2) for vertex in pair.vertices)
        assert deepest <= workers.bit_length() + 1  # ceil(log2 q) for a pairwise tree, plus one inserted


@pytest.mark.parametrize("collusion", [1, 2])
@pytest.mark.parametrize("workers", range(4, 17))
def test_built_pairs_with_a_coordinator(workers, collusion):
    pair = build_trees(workers, collusion, coordinator=True)
    assert pair.roots == (COORDINATOR, COORDINATOR)
    assert pair.workers == workers
    for coalition in itertools.combinations(sorted(pair.vertices), collusion):
        assert len(pair.learned_by(coalition)) == 1


def test_two_workers_and_a_coordinator_leak_both():
    pair = TreePair({0: COORDINATOR, 1: COORDINATOR}, {0: COORDINATOR, 1: COORDINATOR})
    assert pair.learned_by({COORDINATOR}) == [{0}, {1}]
    with pytest.raises(TopologyError, match="at least 3"):
        build_trees(2, 1, coordinator=True)


def coordinated(order):
    """Pairwise additions whose last two partial sums go to the coordinator, as the paper draws them."""
    hosts, tree = list(order), {}
    while len(hosts) > 2:
        tree |= dict(zip(hosts[1::2], hosts[::2], strict=False))
        hosts = hosts[::2]
    return tree | dict.fromkeys(hosts, COORDINATOR)


def test_the_papers_coordinator_and_one_worker_sometimes_recover_inputs():
    leaking = []
    for workers in range(3, 14):
        order = list(range(workers))
        pair = TreePair(coordinated(order), coordinated(order[1:] + order[:1]))
        assert len(pair.learned_by({COORDINATOR})) == 1
        if any(len(pair.learned_by({COORDINATOR, worker})) > 1 for worker in order):
            leaking.append(workers)
    assert leaking == [3, 5, 9]


@pytest.mark.parametrize("size", range(4, 20))
def test_wheel_withstands_two(size):
    assert _wheel(size).max_collusion() == 2


@pytest.mark.parametrize(
    ("workers", "collusion", "reason"),
    [(2, 1, "at least 3"), (3, 2, "at least 4"), (9, 3, "Pairwise"), (9, -1, "0 or more"), (0, 0, "least 2")],
)
def test_impossible_requests_say_why(workers, collusion, reason):
    with pytest.raises(TopologyError, match=reason):
        build_trees(workers, collusion)


def test_no_two_trees_withstand_three():
    draw = np.random.default_rng(3)
    for _ in range(200):
        pair = random_pair(draw)
        if pair.workers >= 5:
            assert pair.max_collusion() <= 2


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {0: 0},
        {1: 0, 2: 1, 0: 2},
        {1: 0, 3: 2},
        {1: 0, 3: 0},
        {1: 2, 2: 1, 3: 0},
        {"1": "0"},
        {1: None},
        {-2: 0, 1: 0},
        {1: 0.0},
    ],
)
def test_maps_that_are_no_trees_are_refused(tree):
    with pytest.raises(TopologyError):
        TreePair(tree, {1: 0})
    with pytest.raises(TopologyError):
        TreePair({1: 0}, tree)


def test_trees_over_different_workers_are_refused():
    with pytest.raises(TopologyError):
        TreePair({1: 0}, {1: 0, 2: 0})


def test_unknown_colluders_are_refused():
    with pytest.raises(TopologyError):
        build_trees(4).learned_by({4})
    with pytest.raises(TopologyError):
        build_trees(4).rooted_at(COORDINATOR)


def test_pair_is_independent_of_the_maps_it_was_made_from():
    tree = {1: 0, 2: 1}
    pair = TreePair(tree, {1: 0, 2: 0})
    tree[2] = 0
    assert pair.t1[2] == 1
    with pytest.raises(TypeError):
        pair.t1[2] = 0


def test_pairs_can_be_copied_and_pickled():
    for pair in (build_trees(5), TreePair({1: 0, 2: 1}, {1: 0, 2: 0})):
        for again in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
            assert again == pair
            assert again.is_significantly_different() == pair.is_significantly_different()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_new_roots_keep_the_edges(seed):
    pair = random_pair(np.random.default_rng(seed))
    for root in pair.vertices:
        moved = pair.rooted_at(root)
        assert moved.roots == (root, root)
        for before, after in ((pair.t1, moved.t1), (pair.t2, moved.t2)):
            assert nx.utils.graphs_equal(nx.Graph(list(before.items())), nx.Graph(list(after.items())))
