"""Pairwise masks: conformance, dropouts, curious and lying aggregators, keys."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from lying_aggregator import confirm_and_open, relist
from scipy import stats
from sum_conformance import SumConformance, every_order, refuses, snapshot

from securevfl.errors import DropoutError, ProtocolError, TopologyError
from securevfl.protocols import (
    AGGREGATOR,
    Driver,
    Envelope,
    FixedPoint,
    PairwiseMaskSum,
    run_round,
    run_setup,
)
from securevfl.protocols.keys import PartyKeys
from securevfl.protocols.sums import shamir
from securevfl.protocols.sums.pairwise import (
    Confirmation,
    Confirmations,
    Encapsulations,
    KeyDirectory,
    MaskedInput,
    OpenedShares,
    RelayedShares,
    SealedShares,
    Survivors,
)
from securevfl.protocols.sums.pairwise_worker import seed_check


class PairwiseConformance(SumConformance):
    exhaustive_workers = (3,)

    def may_send(self, protocol, other, envelope):
        """All workers send alike to the aggregator."""
        return other == envelope.sender or (envelope.receiver == AGGREGATOR and 0 <= other < protocol.workers)


class TestPairwiseRecovering(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        if workers == 3:
            return PairwiseMaskSum(workers=workers, collusion=0)
        return PairwiseMaskSum(workers=workers)


class TestPairwiseDirect(PairwiseConformance):
    exhaustive_workers = (3, 4)

    def make(self, workers):
        return PairwiseMaskSum(workers=workers, threshold=workers)


class TestPairwiseHybrid32(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        ring = FixedPoint(bits=32, fraction_bits=16)
        return PairwiseMaskSum(workers=workers, hybrid=True, fixed_point=ring)


class TestPairwiseSparse(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        return PairwiseMaskSum(workers=max(workers, 7), neighbours=4)


# -- order


PHASES = [
    (SealedShares,),
    (RelayedShares, MaskedInput),
    (Survivors, Confirmation),
    (Confirmations, OpenedShares),
]


def phase_of(envelope):
    return PHASES.index(next(phase for phase in PHASES if type(envelope.message) in phase))


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_every_order_within_a_phase(workers, phase):
    """Phases are separated by the aggregator waiting for all, so their orders are independent."""
    protocol = PairwiseMaskSum(workers=workers, collusion=0)
    nodes = ready(protocol)
    values = [np.array([float(worker), -1.5]) for worker in range(workers)]
    numbers = itertools.count()

    def play(choose):
        def chosen(pending):
            return choose(pending) if phase_of(pending[0]) == phase else 0

        total = run_round(nodes, values, round=next(numbers), choose=chosen)
        np.testing.assert_array_equal(total, np.sum(values, axis=0))

    expected = {0: math.factorial(workers)}.get(phase, math.factorial(2 * workers) // 2**workers)
    assert every_order(play, limit=5000) == expected


@pytest.mark.parametrize("threshold", [None, 4])
def test_every_kind_of_message_in_every_state(threshold):
    """Whatever kind is not awaited in a state is refused there, from whomever it comes."""
    protocol = PairwiseMaskSum(workers=4, collusion=1, threshold=threshold)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    samples = {type(e.message): e.message for e in run_setup(nodes)}
    values = [np.ones(2)] * 4
    driver, _ = begin(nodes, values, 0)
    driver.run()
    samples |= {type(e.message): e.message for e in driver.transcript}
    driver, aggregator = begin(nodes, values, 1)
    recovering = [SealedShares, MaskedInput, Confirmation, OpenedShares]
    order = {AGGREGATOR: recovering if protocol.recovers else [MaskedInput]}
    told = [RelayedShares, Survivors, Confirmations] if protocol.recovers else []
    order |= dict.fromkeys(range(4), told)
    taken = dict.fromkeys(driver.machines, 0)
    while True:
        for address, machine in driver.machines.items():
            phase = taken[address] // 4 if address == AGGREGATOR else taken[address]
            awaited = order[address][phase : phase + 1]
            for kind, message in samples.items():
                if kind not in awaited:
                    for sender in protocol.addresses:
                        wrong = dataclasses.replace(message, round=1)
                        refuses(machine, Envelope(sender, address, wrong))
        if not driver.pending:
            break
        taken[driver.pending[0].receiver] += 1
        driver.step()
    np.testing.assert_array_equal(aggregator.result(), [4.0, 4.0])


# -- dropouts


def ready(protocol):
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    return nodes


def begin(nodes, values, number=0):
    machines = {
        address: node.round(values[address] if address >= 0 else None, round=number, shape=values[0].shape)
        for address, node in nodes.items()
    }
    driver = Driver(machines)
    driver.start()
    return driver, machines[AGGREGATOR]


def exact_sum(protocol, values, workers):
    ring = protocol.fixed_point
    encoded = (ring.encode(values[worker], protocol.workers) for worker in workers)
    return ring.decode(sum(encoded, start=np.zeros(values[0].shape, ring.dtype)))


def play_with_drops(protocol, nodes, values, number, moments):
    """Drops workers after given numbers of deliveries; returns the contributors, or None if it gave up."""
    driver, aggregator = begin(nodes, values, number)
    delivered = 0
    try:
        while driver.pending or delivered in moments:
            if delivered in moments:
                driver.drop(moments.pop(delivered))
            if driver.pending:
                driver.step()
            delivered += 1
    except DropoutError:
        return None
    assert aggregator.done
    np.testing.assert_array_equal(aggregator.result(), exact_sum(protocol, values, aggregator.contributors))
    return aggregator.contributors


@pytest.mark.parametrize("neighbours", [None, 6])
def test_one_drop_at_every_moment(neighbours):
    protocol = PairwiseMaskSum(workers=8, neighbours=neighbours)
    nodes = ready(protocol)
    values = list(np.random.default_rng(0).normal(size=(8, 3)))
    numbers = itertools.count()
    seen = set()
    for moment in range(8 * 7):
        for gone in (0, 3, 7):
            kept = play_with_drops(protocol, nodes, values, next(numbers), {moment: gone})
            assert kept is not None, "one drop of eight is always survived"
            assert set(range(8)) - {gone} <= set(kept)
            seen.add(gone in kept)
    assert seen == {True, False}


def test_many_drops_down_to_the_threshold():
    draw = np.random.default_rng(9)
    protocol = PairwiseMaskSum(workers=8)
    assert protocol.threshold == 5
    nodes = ready(protocol)
    values = list(draw.normal(size=(8, 2)))
    for number in range(60):
        count = int(draw.integers(1, 4))
        gone = draw.choice(8, count, replace=False)
        moments = dict(zip(draw.choice(44, count, replace=False).tolist(), gone.tolist(), strict=True))
        kept = play_with_drops(protocol, nodes, values, number, moments)
        assert kept is not None
        assert set(range(8)) - set(gone.tolist()) <= set(kept)


def test_below_the_threshold_nothing_is_opened():
    protocol = PairwiseMaskSum(workers=8)
    nodes = ready(protocol)
    values = list(np.ones((8, 2)))
    for number, moment in enumerate([0, 9, 15, 25, 33, 42, 49]):
        driver, aggregator = begin(nodes, values, number)
        for _ in range(moment):
            driver.step()
        for gone in (1, 2, 4):
            driver.drop(gone)
        before = snapshot(aggregator)
        with pytest.raises(DropoutError):
            aggregator.drop(6)
        assert snapshot(aggregator) == before
        assert not aggregator.done


def test_survivors_of_a_sparse_graph_must_stay_connected():
    """On a ring with reach 2, workers 0, 1 and 5, 6 gone leave two arcs whose sums would be told apart."""
    graph = PairwiseMaskSum(workers=10, neighbours=4, collusion=1)
    alive = frozenset({2, 3, 4, 7, 8, 9})
    with pytest.raises(DropoutError, match="do not hide"):
        graph.check_survivors(alive)


def test_late_messages_of_the_dropped_are_refused():
    protocol = PairwiseMaskSum(workers=5)
    driver, aggregator = begin(ready(protocol), list(np.ones((5, 1))))
    late = next(envelope for envelope in driver.pending if envelope.sender == 2)
    driver.drop(2)
    refuses(aggregator, late)
    with pytest.raises(ProtocolError):
        aggregator.drop(2)
    driver.run()
    assert aggregator.contributors == (0, 1, 3, 4)


def test_without_recovery_a_drop_is_fatal_until_the_input_is_in():
    protocol = PairwiseMaskSum(workers=4, threshold=4)
    driver, aggregator = begin(ready(protocol), list(np.ones((4, 1))))
    with pytest.raises(DropoutError):
        aggregator.drop(0)
    driver.step()
    assert aggregator.drop(0) == []
    driver.run()
    assert aggregator.contributors == (0, 1, 2, 3)


def test_without_recovery_the_setup_needs_everybody():
    protocol = PairwiseMaskSum(workers=4, threshold=4)
    machines = {address: protocol.node(address).setup() for address in protocol.addresses}
    for machine in machines.values():
        machine.start()
    for address, machine in machines.items():
        with pytest.raises(DropoutError):
            machine.drop(AGGREGATOR if address >= 0 else 2)


def test_setup_runs_once():
    node = PairwiseMaskSum(workers=4).node(0)
    node.setup()
    with pytest.raises(ProtocolError, match="make a new node"):
        node.setup()


# -- a curious or lying aggregator


def until_opening(protocol, values, number=0, nodes=None):
    """Plays until the survivors' list is about to be sent; returns the driver and that list's envelopes."""
    driver, aggregator = begin(nodes or ready(protocol), values, number)
    while not isinstance(driver.pending[0].message, Survivors):
        driver.step()
    return driver, aggregator


def test_a_worker_confirms_and_opens_only_once():
    protocol = PairwiseMaskSum(workers=5)
    driver, _ = until_opening(protocol, list(np.ones((5, 2))))
    told = next(e for e in driver.pending if e.receiver == 0)
    machine = driver.machines[0]
    while driver.pending:
        envelope = driver.pending[0]
        driver.step()
        if envelope.receiver == 0:
            refuses(machine, envelope)
            for survivors in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
                refuses(machine, relist(told, survivors))


@pytest.mark.parametrize(
    "survivors",
    [
        [1, 2, 3, 4],
        [0, 1, 2],
        [0, 1],
        [0],
        [],
        [0, 1, 2, 3, 4, 5],
        [0, 2, 1, 3],
        [0, 0, 1, 2, 3],
        [-1, 0, 1, 2, 3],
        [True, 1, 2, 3],
        (0, 1, 2, 3, 4),
        None,
    ],
)
def test_lists_that_endanger_somebody_are_refused(survivors):
    protocol = PairwiseMaskSum(workers=5)
    driver, _ = until_opening(protocol, list(np.ones((5, 2))))
    envelope = next(e for e in driver.pending if e.receiver == 0)
    refuses(driver.machines[0], relist(envelope, survivors))


def lie(protocol):
    """The aggregator and worker 0 tell some workers that the last one survived and others that it dropped.

    They confirm to each worker what it was told, with all who were told the same. Yields, for every way to
    split the honest workers, whether the self seed and the pair seed open.
    """
    workers = protocol.workers
    colluder, victim = 0, workers - 1
    everybody = list(range(workers))
    without = everybody[:-1]
    honest = [worker for worker in everybody if worker not in (colluder, victim)]
    for split in range(len(honest) + 1):
        nodes = ready(protocol)
        driver, aggregator = until_opening(protocol, list(np.ones((workers, 2))), nodes=nodes)
        told = {worker: without if worker in honest[:split] else everybody for worker in everybody[1:]}
        replies = confirm_and_open(protocol, nodes, driver, told)
        own = driver.machines[colluder]._shares[victim]  # the colluder hands over both of its shares
        self_seed, pair_seed = {colluder: own[0]}, {colluder: own[1]}
        for worker, shares in replies.items():
            target = pair_seed if told[worker] is without else self_seed
            target[worker] = shares[victim]
        checks = aggregator._shares[victim].checks
        yield tuple(
            check.tobytes() == _reconstruct(shares, protocol.threshold)
            for shares, check in ((self_seed, checks[0]), (pair_seed, checks[1]))
        )


def _reconstruct(shares, threshold):
    """The check value of the seed that the best use of these shares gives; None if they are too few."""
    chosen = sorted(shares)[:threshold]
    if len(chosen) < threshold:
        return None
    factors = shamir.weights([worker + 1 for worker in chosen])
    secret = shamir.combine([int.from_bytes(shares[worker], "big") for worker in chosen], factors)
    return seed_check(secret.to_bytes(32, "big")[-16:])


@pytest.mark.parametrize("workers", [4, 5, 6, 7, 8])
def test_lying_about_a_dropout_does_not_open_both_seeds(workers):
    outcomes = list(lie(PairwiseMaskSum(workers=workers, collusion=1)))
    assert outcomes[0] == (True, False)
    assert (True, True) not in outcomes


@pytest.mark.parametrize("workers", [5, 7])
def test_with_one_share_less_lying_would_succeed(workers):
    protocol = PairwiseMaskSum(workers=workers, collusion=1)
    protocol.threshold -= 1
    assert (True, True) in list(lie(protocol))


def test_unsafe_thresholds_are_refused():
    for threshold in (0, 1, 4, 9):
        with pytest.raises(TopologyError, match="not safe"):
            PairwiseMaskSum(workers=8, threshold=threshold)
    for workers, collusion in ((2, 1), (3, 2), (8, 7), (8, -1)):
        with pytest.raises(TopologyError, match="withstand"):
            PairwiseMaskSum(workers=workers, collusion=collusion)
    with pytest.raises(TopologyError, match="withstand at most 1"):
        PairwiseMaskSum(workers=8, neighbours=2, collusion=2)


def test_a_cut_of_a_sparse_graph_gives_partial_sums_away():
    """Why the graph must be (t+1)-connected: two colluders cut a ring, and the aggregator adds up one arc."""
    protocol = PairwiseMaskSum(workers=6, neighbours=2, threshold=3, collusion=1)
    nodes = ready(protocol)
    values = list(np.random.default_rng(2).normal(size=(6, 2)))
    driver, _ = begin(nodes, values)
    masked = {e.sender: e.message.values for e in driver.pending}
    total = masked[1] + masked[2]
    for inside, colluder in ((1, 0), (2, 3)):  # the colluders 0 and 3 know the masks towards the arc 1, 2
        mask = nodes[colluder].pairs[inside].masks.at(0, 0).words(2)
        total = total - mask if inside < colluder else total + mask
    np.testing.assert_array_equal(protocol.fixed_point.decode(total), exact_sum(protocol, values, [1, 2]))


def test_an_aggregator_and_colluders_see_uniform_inputs():
    """The masked input of an honest worker, minus all masks the coalition knows, is uniform in every byte.

    65,536 words against 256 bins, at a false alarm of 1e-9 for each of the 16 tests.
    """
    protocol = PairwiseMaskSum(workers=4, collusion=2, threshold=4)
    top = protocol.fixed_point.max_abs(4)
    for value in (0.0, top):
        nodes = ready(protocol)
        driver, _ = begin(nodes, [np.full(1 << 16, value)] * 4)
        seen = next(e.message.values for e in driver.pending if e.sender == 3).copy()
        for colluder in (0, 1):
            seen += nodes[colluder].pairs[3].masks.at(0, 0).words(seen.shape)
        for shift in range(0, 64, 8):
            counts = np.bincount(((seen >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
            assert counts.min() > 0
            assert ((counts - 256.0) ** 2 / 256.0).sum() < stats.chi2.isf(1e-9, 255)


def test_recovering_a_dropout_opens_one_round_only():
    protocol = PairwiseMaskSum(workers=5)
    nodes = ready(protocol)
    seeds = []
    for number, attempt in [(0, 0), (0, 1), (1, 0)]:
        machine = nodes[0].round(np.zeros(2), round=number, attempt=attempt)
        (envelope,) = machine.start()
        seeds += [*machine._mask_seeds.values(), machine._self_seed, envelope.message.covered.tobytes()]
    assert len(set(seeds)) == len(seeds)


def test_masks_differ_for_every_retry():
    for threshold in (None, 5):
        protocol = PairwiseMaskSum(workers=5, threshold=threshold)
        nodes = ready(protocol)
        messages = []
        for number, attempt in [(0, 0), (0, 1), (1, 0), (65536, 0), (0, 65535)]:
            machines = {
                a: node.round(np.zeros(50) if a >= 0 else None, round=number, attempt=attempt)
                for a, node in nodes.items()
            }
            driver = Driver(machines)
            driver.start()
            driver.run()
            messages += [e.message.values for e in driver.transcript if isinstance(e.message, MaskedInput)]
        words = np.concatenate(messages)
        assert len(np.unique(words)) == words.size  # 1,250 words of 64 bits collide with probability 4e-14


def test_wrong_shares_are_noticed():
    protocol = PairwiseMaskSum(workers=5)
    driver, aggregator = until_opening(protocol, list(np.ones((5, 2))))
    while not isinstance(driver.pending[0].message, Confirmations):
        driver.step()
    driver.pending.append(driver.pending.pop(0))  # worker 0 answers last
    while len(driver.pending) > 1:
        driver.step()
    last = driver.pending[0]
    assert last.sender == 0
    assert isinstance(last.message, OpenedShares)
    forged = last.message.shares.copy()
    forged[0, -1] ^= 1
    for shares in (forged, np.full_like(forged, 255)):
        refuses(aggregator, Envelope(0, AGGREGATOR, dataclasses.replace(last.message, shares=shares)))
    driver.run()
    np.testing.assert_array_equal(aggregator.result(), [5.0, 5.0])


# -- keys


@pytest.mark.parametrize("hybrid", [False, True])
def test_fingerprints_agree_unless_keys_are_swapped(hybrid):
    protocol = PairwiseMaskSum(workers=3, collusion=0, hybrid=hybrid)
    nodes = ready(protocol)
    for one, other in itertools.combinations(range(3), 2):
        assert nodes[one].fingerprints()[other] == nodes[other].fingerprints()[one]
    with pytest.raises(ProtocolError, match="no keys yet"):
        protocol.node(0).fingerprints()
    swapped = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in swapped.items()})
    driver.start()
    intruder = PartyKeys(hybrid=hybrid)
    for index, envelope in enumerate(driver.pending):
        if envelope.sender == 0:
            message = dataclasses.replace(envelope.message, public=intruder.public)
            driver.pending[index] = Envelope(0, AGGREGATOR, message)
    driver.run()
    assert swapped[0].fingerprints()[1] != swapped[1].fingerprints()[0]
    assert swapped[1].fingerprints()[2] == swapped[2].fingerprints()[1]


def test_unusable_keys_are_refused():
    protocol = PairwiseMaskSum(workers=3, collusion=0)
    machine = protocol.node(0).setup()
    machine.start()
    zeros = KeyDirectory(round=-1, participants=[0, 1, 2], public=np.zeros((2, 32), np.uint8))
    refuses(machine, Envelope(AGGREGATOR, 0, zeros))
    hybrid = PairwiseMaskSum(workers=3, collusion=0, hybrid=True).node(0).setup()
    hybrid.start()
    table = np.full((2, 1216), 255, np.uint8)
    refuses(hybrid, Envelope(AGGREGATOR, 0, KeyDirectory(round=-1, participants=[0, 1, 2], public=table)))


def test_shares_are_sealed_for_one_reader_and_one_round():
    nodes = ready(PairwiseMaskSum(workers=3, collusion=0))
    sealed = nodes[0].pairs[1].seal(b"share", round=4, attempt=0)
    assert nodes[1].pairs[0].open(sealed, round=4, attempt=0) == b"share"
    readers = [(nodes[2].pairs[0], 4, 0), (nodes[0].pairs[1], 4, 0), (nodes[1].pairs[0], 5, 0)]
    for pair, number, attempt in [*readers, (nodes[1].pairs[0], 4, 1)]:
        with pytest.raises(ProtocolError):
            pair.open(sealed, round=number, attempt=attempt)
    with pytest.raises(ProtocolError):
        nodes[1].pairs[0].open(sealed[:-1] + bytes([sealed[-1] ^ 1]), round=4, attempt=0)


def test_pairs_share_all_keys_and_nobody_else_does():
    nodes = ready(PairwiseMaskSum(workers=4))
    streams = {}
    for one, other in itertools.permutations(range(4), 2):
        pair = nodes[one].pairs[other]
        words = (pair.masks.at(1, 0).words(2).tobytes(), pair.seeds.at(1, 0).words(2).tobytes())
        streams.setdefault(frozenset({one, other}), set()).add(words)
    assert all(len(found) == 1 for found in streams.values())
    assert len({word for found in streams.values() for words in found for word in words}) == 12


def test_large_sparse_group():
    protocol = PairwiseMaskSum(workers=60, neighbours=12, collusion=3)
    assert protocol.recovers
    nodes = ready(protocol)
    values = list(np.random.default_rng(1).normal(size=(60, 4)))
    kept = play_with_drops(protocol, nodes, values, 0, {10: 5, 70: 30, 190: 44})
    assert {5, 30} & set(kept) == set()
    assert 44 in kept


def test_enough_openers_are_not_enough_if_the_survivors_can_be_cut():
    """Every survivor has five of its seven holders, but two colluders could cut the ring in half."""
    protocol = PairwiseMaskSum(workers=20, neighbours=6, collusion=2)
    gone = {0, 1, 10, 11}
    alive = frozenset(range(20)) - gone
    protocol.check_openers(alive, alive)
    assert protocol.graph.connectivity(alive) == 2
    driver, _ = until_opening(protocol, list(np.ones((20, 1))))
    envelope = next(e for e in driver.pending if e.receiver == 5)
    refuses(driver.machines[5], relist(envelope, sorted(alive)))
    for phase in (SealedShares, MaskedInput):
        driver, aggregator = begin(ready(protocol), list(np.ones((20, 1))))
        while not isinstance(driver.pending[0].message, phase):
            driver.step()
        for worker in (0, 1, 10):
            driver.drop(worker)
        with pytest.raises(DropoutError, match="do not hide"):
            aggregator.drop(11)


def test_shares_outside_the_field_are_refused_at_once():
    protocol = PairwiseMaskSum(workers=5)
    driver, aggregator = until_opening(protocol, list(np.ones((5, 2))))
    while not isinstance(driver.pending[0].message, OpenedShares):
        driver.step()
    first = driver.pending[0]
    outside = dataclasses.replace(first.message, shares=np.full_like(first.message.shares, 255))
    refuses(aggregator, Envelope(first.sender, AGGREGATOR, outside))


def test_fingerprints_cover_the_ciphertexts():
    protocol = PairwiseMaskSum(workers=3, collusion=0, hybrid=True)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()})
    driver.start()
    while driver.pending:
        envelope = driver.pending[0]
        if isinstance(envelope.message, Encapsulations) and envelope.receiver == 2:
            forged = envelope.message.ciphertexts.copy()
            forged[0, 0] ^= 1  # what worker 0 sent to worker 2
            message = dataclasses.replace(envelope.message, ciphertexts=forged)
            driver.pending[0] = Envelope(AGGREGATOR, 2, message)
        driver.step()
    assert nodes[0].fingerprints()[2] != nodes[2].fingerprints()[0]
    assert nodes[1].fingerprints()[2] == nodes[2].fingerprints()[1]
