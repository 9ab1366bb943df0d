"""Attacks on tree sums: a coalition solves the real messages it sees, and nothing but those."""

import itertools

import numpy as np
import pytest
from linear_view import view_rows
from scipy import stats

from securevfl.protocols import (
    COORDINATOR,
    Driver,
    FixedPoint,
    PlainTreeSum,
    TreePair,
    TwoTreeSum,
    build_trees,
)
from securevfl.protocols.sums.tree_sums import MaskTotal, Subtotal

ALARM = 1e-9  # false-alarm probability of each chi-square test; fewer than 1,000 are made, so below 1e-6


def play(protocol, values, number=0, attempt=0, nodes=None):
    """Runs a round; returns machines and every message sent, as a wiretap on all links would record them."""
    nodes = nodes or {address: protocol.node(address) for address in protocol.addresses}
    machines = {
        a: node.round(values[a] if a >= 0 else None, round=number, attempt=attempt, shape=np.shape(values[0]))
        for a, node in nodes.items()
    }
    own = {a: [lane.total.copy() for lane in machine._lanes] for a, machine in machines.items()}
    driver = Driver(machines)
    driver.start()
    driver.run()
    return machines, driver.transcript, own


def solve(pair, coalition, transcript, own, ring):
    """All sums over honest inputs that follow from the coalition's messages and both totals.

    Elimination on the public coefficients with the messages as right-hand sides. The coefficients are
    totally unimodular, so every pivot is 1 or -1 and the arithmetic stays exact on the ring.
    """
    coefficients = view_rows(pair, coalition)
    seen = {}
    for envelope in transcript:
        if isinstance(envelope.message, Subtotal) and {envelope.sender, envelope.receiver} & coalition:
            seen["edge", envelope.message.tree, envelope.sender] = envelope.message.total
    for number, root in zip((1, 2), pair.roots, strict=True):
        seen["total", number] = own[root][number - 1] + sum(
            e.message.total
            for e in transcript
            if isinstance(e.message, Subtotal) and e.message.tree == number and e.receiver == root
        )
    assert seen.keys() == coefficients.keys()
    honest = sorted(pair.vertices - coalition)
    work = []
    for key, row in coefficients.items():
        number = key[1]
        tree = (pair.t1, pair.t2)[number - 1]
        inside = pair.vertices if key[0] == "total" else _below(tree, key[2])
        known = sum((own[a][number - 1] for a in coalition & inside), start=np.zeros_like(seen[key]))
        work.append((np.array(row, dtype=np.int64), (seen[key] - known).astype(ring)))
    return _eliminate(work, honest, ring)


def _below(tree, top):
    return {v for v in {*tree, *tree.values()} if top in _path(tree, v)}


def _path(tree, vertex):
    yield vertex
    while vertex in tree:
        vertex = tree[vertex]
        yield vertex


def _eliminate(work, honest, ring):
    learned = {}
    width = 2 * len(honest)
    done = 0
    for column in range(width):
        pivot = next((i for i in range(done, len(work)) if work[i][0][column]), None)
        if pivot is None:
            continue
        work[done], work[pivot] = work[pivot], work[done]
        row, value = work[done]
        assert abs(row[column]) == 1
        if row[column] < 0:
            row, value = -row, -value
        work[done] = (row, value)
        for i, (other, theirs) in enumerate(work):
            if i != done and other[column]:
                factor = int(other[column])
                work[i] = (other - factor * row, theirs - ring.type(factor % 2**64) * value)
        done += 1
    for row, value in work[:done]:
        if not row[: len(honest)].any():
            members = frozenset(v for v, c in zip(honest, row[len(honest) :], strict=True) if c)
            assert set(row[len(honest) :]) <= {0, 1}
            learned[members] = value
    return learned


def encoded_sum(protocol, values, members):
    ring = protocol.fixed_point
    return sum((ring.encode(values[m], protocol.workers) for m in members), start=np.zeros(3, ring.dtype))


def check_attack(pair, coalition, seed):
    protocol = TwoTreeSum(workers=pair.workers, trees=pair, collusion=0)
    values = list(np.random.default_rng(seed).normal(size=(pair.workers, 3)))
    _, transcript, own = play(protocol, values)
    learned = solve(pair, frozenset(coalition), transcript, own, protocol.fixed_point.dtype)
    assert sorted(learned, key=min) == pair.learned_by(coalition)
    for members, value in learned.items():
        np.testing.assert_array_equal(value, encoded_sum(protocol, values, members))


@pytest.mark.parametrize("workers", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("collusion", [1, 2])
def test_coalitions_of_built_pairs_get_only_the_total(workers, collusion):
    if workers < collusion + 2:
        return
    pair = build_trees(workers, collusion)
    for coalition in itertools.combinations(range(workers), collusion):
        assert len(pair.learned_by(coalition)) == 1
        check_attack(pair, coalition, seed=workers)


@pytest.mark.parametrize("coalition", [{COORDINATOR}, {0}, {COORDINATOR, 2}, {1, 3}])
def test_coalitions_with_a_coordinator(coalition):
    check_attack(build_trees(5, 2, coordinator=True), coalition, seed=1)


def test_larger_coalitions_get_exactly_what_is_predicted():
    pair = build_trees(7)
    for size in (2, 3, 4, 5):
        for coalition in itertools.combinations(range(7), size):
            check_attack(pair, coalition, seed=size)


@pytest.mark.parametrize(
    "pair",
    [
        TreePair({1: 0, 2: 0, 3: 0}, {1: 0, 2: 0, 3: 0}),
        TreePair.pairwise([0, 1, 2], [0, 2, 1]),
        TreePair({1: 0, 3: 2, 2: 0}, {2: 0, 1: 0, 3: 0}),
    ],
    ids=["star", "three", "four"],
)
def test_the_counter_examples_give_a_single_input_away(pair):
    """Definition 1 of the paper holds for these; worker 0 recovers an input exactly."""
    assert any(len(part) == 1 for part in pair.learned_by({0}))
    check_attack(pair, {0}, seed=4)


def test_random_pairs_and_coalitions():
    draw = np.random.default_rng(23)
    for seed in range(100):
        workers = int(draw.integers(3, 8))
        trees = []
        for _ in range(2):
            order = draw.permutation(workers)
            trees.append({int(order[i]): int(order[draw.integers(i)]) for i in range(1, workers)})
        coalition = draw.choice(workers, int(draw.integers(1, workers)), replace=False)
        check_attack(TreePair(*trees), {int(v) for v in coalition}, seed)


def test_plain_tree_shows_inputs():
    protocol = PlainTreeSum(workers=4)
    values = list(np.random.default_rng(0).normal(size=(4, 3)))
    _, transcript, _ = play(protocol, values)
    leaf = next(e for e in transcript if e.sender == 1)
    np.testing.assert_array_equal(leaf.message.total, encoded_sum(protocol, values, [1]))


# -- masks


def bins(words, shift):
    size = words.dtype.type
    return np.bincount(((words >> size(shift)) & size(255)).astype(int), minlength=256)


@pytest.mark.parametrize("ring", [FixedPoint(), FixedPoint(bits=32, fraction_bits=16)], ids=["u64", "u32"])
def test_messages_are_uniform_on_the_whole_ring_whatever_the_value(ring):
    """Each byte of every message; 2^16 words per message, so 256 expected per bin."""
    protocol = TwoTreeSum(workers=4, fixed_point=ring)
    threshold = stats.chi2.isf(ALARM, 255)
    top = ring.max_abs(4)
    counts = {}
    for value in (0.0, top, -top, 0.3):
        _, transcript, _ = play(protocol, [np.full(1 << 16, value)] * 4)
        for envelope in transcript:
            if isinstance(envelope.message, MaskTotal):
                continue
            for shift in range(0, ring.bits, 8):
                found = bins(envelope.message.total, shift)
                assert found.min() > 0  # the end points 0 and 255 included
                assert ((found - 256.0) ** 2 / 256.0).sum() < threshold
                counts.setdefault((envelope.message.tree, envelope.sender, shift), []).append(found)
    for rows in counts.values():  # the distributions under the four values do not differ either
        assert stats.chi2_contingency(np.array(rows))[1] > ALARM


def test_masks_are_fresh_for_every_query_element_and_retry():
    protocol = TwoTreeSum(workers=4)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    values = [np.zeros(500)] * 4
    masks = []
    for number, attempt in [(0, 0), (0, 1), (0, 2), (1, 0), (7, 0)]:
        _, _, own = play(protocol, values, number, attempt, nodes)
        masks += [lanes[1] for lanes in own.values()]
    words = np.concatenate(masks)
    assert len(np.unique(words)) == words.size  # 10^4 words of 64 bits collide with probability 3e-12


def test_nodes_never_share_masks():
    protocol = TwoTreeSum(workers=3)
    first, second = (play(protocol, [np.zeros(9)] * 3)[2] for _ in range(2))
    assert not np.array_equal(first[0][1], second[0][1])
