"""Pairwise masks without some workers: key agreements that go on, and what a recovered round shows."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from linear_view import reduce_rows
from lying_aggregator import confirm_and_open
from sum_conformance import refuses, snapshot

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols import AGGREGATOR, Driver, Envelope, NoisySum, PairwiseMaskSum, run_setup
from securevfl.protocols.stream import KEY_BYTES, KeyStream, apply_masks
from securevfl.protocols.sums import shamir
from securevfl.protocols.sums.pairwise import (
    Confirmations,
    Encapsulations,
    KeyDirectory,
    MaskedInput,
    OpenedShares,
    RelayedShares,
    SealedShares,
    Survivors,
)
from securevfl.protocols.sums.pairwise_worker import SharingWorker, seed_check


def agree(protocol, moments):
    """A key agreement in which workers drop out after given numbers of deliveries; the nodes, the driver."""
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()}, codec=protocol)
    driver.start()
    moments, delivered = dict(moments), 0
    while driver.pending or delivered in moments:
        if delivered in moments:
            driver.drop(moments.pop(delivered))
        if driver.pending:
            driver.step()
        delivered += 1
    return nodes, driver


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


# -- key agreement


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("neighbours", [None, 6])
def test_the_key_agreement_goes_on_without_one_who_is_gone(hybrid, neighbours):
    protocol = PairwiseMaskSum(workers=8, neighbours=neighbours, hybrid=hybrid)
    values = list(np.random.default_rng(1).normal(size=(8, 3)))
    missed = set()
    for moment in range(0, 8 * (4 if hybrid else 2) + 1, 3):
        for gone in (0, 5):
            nodes, driver = agree(protocol, {moment: gone})
            assert all(machine.done for machine in driver.machines.values())
            present = nodes[AGGREGATOR].participants
            assert present >= set(range(8)) - {gone}
            missed.add(gone not in present)
            alive = {address: node for address, node in nodes.items() if address != gone}
            assert all(node.present == present | {AGGREGATOR} for node in alive.values())
            for one, other in itertools.combinations(sorted(set(alive) - {AGGREGATOR}), 2):
                if other in nodes[one].pairs:
                    assert nodes[one].fingerprints()[other] == nodes[other].fingerprints()[one]
            round_, aggregator = begin(alive, values)
            if gone in present:
                round_.pending += aggregator.drop(gone)
            round_.run()
            assert aggregator.contributors == tuple(sorted(set(range(8)) - {gone}))
            np.testing.assert_array_equal(
                aggregator.result(), exact_sum(protocol, values, aggregator.contributors)
            )
    assert missed == {True, False}


def test_one_who_missed_the_key_agreement_has_no_keys_and_no_room():
    protocol = PairwiseMaskSum(workers=5)
    nodes, _ = agree(protocol, {0: 2})
    with pytest.raises(ProtocolError, match="no keys yet"):
        nodes[2].round(np.zeros(1), round=0)
    driver, aggregator = begin({a: n for a, n in nodes.items() if a != 2}, [np.ones(1)] * 5)
    sample = next(e.message for e in driver.pending if isinstance(e.message, SealedShares))
    refuses(aggregator, Envelope(2, AGGREGATOR, sample))
    with pytest.raises(ProtocolError):
        aggregator.drop(2)


@pytest.mark.parametrize("moment", [0, 3, 5, 7])
@pytest.mark.parametrize("hybrid", [False, True])
def test_below_the_threshold_nobody_agrees(moment, hybrid):
    protocol = PairwiseMaskSum(workers=8, hybrid=hybrid)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()})
    driver.start()
    for _ in range(moment):
        driver.step()
    for gone in (1, 2, 4):
        driver.drop(gone)
    aggregator = driver.machines[AGGREGATOR]
    before = snapshot(aggregator)
    with pytest.raises(DropoutError, match="5 are needed"):
        aggregator.drop(6)
    assert snapshot(aggregator) == before
    with pytest.raises(ProtocolError, match="before"):
        aggregator.drop(1)


def test_late_keys_of_the_dropped_are_refused():
    protocol = PairwiseMaskSum(workers=5)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()})
    driver.start()
    late = next(envelope for envelope in driver.pending if envelope.sender == 2)
    driver.drop(2)
    aggregator = driver.machines[AGGREGATOR]
    refuses(aggregator, late)
    driver.run()
    refuses(aggregator, late)
    assert nodes[AGGREGATOR].participants == {0, 1, 3, 4}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    "participants",
    [
        [0, 1, 2],
        [0],
        [],
        [1, 2, 3, 4],
        [0, 1, 2, 3, 5],
        [-1, 0, 1, 2, 3],
        [1, 0, 2, 3],
        [0, 0, 1, 2, 3],
        [0, 1, 2, 3],
    ],
)
def test_a_worker_refuses_lists_that_endanger_it(participants, hybrid):
    """The last list is long enough, but its number of keys, or whom it leaves out now, does not fit."""
    protocol = PairwiseMaskSum(workers=5, hybrid=hybrid)
    driver = Driver({a: protocol.node(a).setup() for a in protocol.addresses})
    driver.start()
    while driver.pending:
        envelope = driver.pending[0]
        if envelope.receiver == 0 and isinstance(envelope.message, KeyDirectory | Encapsulations):
            forged = dataclasses.replace(envelope.message, participants=participants)
            if isinstance(envelope.message, KeyDirectory) or participants != [0, 1, 2, 3]:
                refuses(driver.machines[0], Envelope(AGGREGATOR, 0, forged))
        driver.step()
    assert driver.machines[0].done


def test_a_round_cannot_count_one_who_has_no_keys():
    """With worker 4 away, an aggregator that lists it makes three look like four."""
    protocol = PairwiseMaskSum(workers=5)
    nodes, _ = agree(protocol, {0: 4})
    driver, aggregator = begin({a: n for a, n in nodes.items() if a != 4}, [np.ones(1)] * 5)
    while not isinstance(driver.pending[0].message, RelayedShares):
        driver.step()
    relay = next(e for e in driver.pending if e.receiver == 0)
    for participants, keep in (([0, 1, 2, 4], [0, 1, 0]), ([0, 1, 2, 3, 4], [0, 1, 2, 0])):
        sealed = relay.message.sealed[keep]
        forged = dataclasses.replace(relay.message, participants=participants, sealed=sealed)
        refuses(driver.machines[0], Envelope(AGGREGATOR, 0, forged))
    driver.run()
    assert aggregator.contributors == (0, 1, 2, 3)


def test_without_recovery_a_shorter_directory_is_refused():
    protocol = PairwiseMaskSum(workers=4, threshold=4)
    driver = Driver({a: protocol.node(a).setup() for a in protocol.addresses})
    driver.start()
    while not isinstance(driver.pending[0].message, KeyDirectory):
        driver.step()
    envelope = driver.pending[0]
    short = dataclasses.replace(envelope.message, participants=[0, 1, 2], public=envelope.message.public[:2])
    refuses(driver.machines[0], Envelope(AGGREGATOR, 0, short))


# -- what a recovered round shows


class Attack:
    """A curious aggregator with colluders: opens whatever seeds its view opens, then solves for inputs."""

    def __init__(self, protocol, colluders, values, moment, gone):
        self.protocol, self.colluders = protocol, colluders
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        run_setup(nodes)
        driver, self.aggregator = begin(nodes, values)
        self.both: dict[int, dict] = {}
        self.late: list[Envelope] = []
        while driver.pending:
            late = [e for e in driver.pending if e.sender == gone and isinstance(e.message, moment)]
            if late and gone in driver.machines:
                self.late = late
                driver.drop(gone)
            if isinstance(driver.pending[0].message, Survivors):
                for each in colluders & driver.machines.keys():
                    self.both.setdefault(each, dict(driver.machines[each]._shares))
            driver.step()
        self.transcript = driver.transcript
        self.seen = [e for e in [*driver.transcript, *self.late] if e.receiver == AGGREGATOR]

    def participants(self):
        return next(e.message.participants for e in self.transcript if isinstance(e.message, RelayedShares))

    def opened(self):
        """Owners whose self seed, and whose pair seed, the shares of the view give."""
        shares = {0: {}, 1: {}}  # kind -> owner -> holder -> share
        survivors = next(e.message.survivors for e in self.transcript if isinstance(e.message, Survivors))
        for envelope in self.seen:
            if isinstance(envelope.message, OpenedShares):
                for owner, row in zip(self.participants(), envelope.message.shares, strict=True):
                    kind = int(owner not in survivors)
                    shares[kind].setdefault(owner, {})[envelope.sender] = row.tobytes()
        for holder, held in self.both.items():
            for owner, pair in held.items():
                for kind in (0, 1):
                    shares[kind].setdefault(owner, {})[holder] = pair[kind]
        found = (set(), set())
        for kind, owner in itertools.product((0, 1), self.participants()):
            checks = self.aggregator._shares[owner].checks
            if self._opens(shares[kind].get(owner, {}), checks[kind].tobytes()):
                found[kind].add(owner)
        return found

    def _opens(self, held, check):
        for chosen in itertools.combinations(sorted(held), self.protocol.threshold):
            factors = shamir.weights([holder + 1 for holder in chosen])
            secret = shamir.combine([int.from_bytes(held[holder], "big") for holder in chosen], factors)
            if secret < 1 << 128 and seed_check(secret.to_bytes(32, "big")[-16:]) == check:
                return True
        return False

    def learned(self, self_seeds, pair_seeds):
        """The basis of all mask-free combinations of the honest workers' inputs."""
        honest = [worker for worker in self.participants() if worker not in self.colluders]
        pairs = list(itertools.combinations(honest, 2))
        rows = []
        for envelope in self.seen:
            own = envelope.sender
            if isinstance(envelope.message, MaskedInput) and own in honest:
                selves = [int(own == worker and worker not in self_seeds) for worker in honest]
                masks = [
                    0 if own not in pair or {*pair} & pair_seeds else (1 if own == pair[0] else -1)
                    for pair in pairs
                ]
                rows.append(selves + masks + [int(own == worker) for worker in honest])
        hidden = len(honest) + len(pairs)
        free = [row[hidden:] for row in reduce_rows(rows) if not any(row[:hidden])]
        return honest, reduce_rows(free)


@pytest.mark.parametrize(("workers", "threshold", "collusion"), [(4, 3, 1), (5, 4, 1), (6, 4, 1), (7, 6, 2)])
@pytest.mark.parametrize("moment", [SealedShares, MaskedInput, OpenedShares])
def test_a_recovered_round_shows_the_survivors_sum_and_nothing_else(workers, threshold, collusion, moment):
    """Also with what the dropped worker sent too late: its masked input is in the view, its self seed not."""
    protocol = PairwiseMaskSum(workers=workers, threshold=threshold, collusion=collusion)
    values = list(np.random.default_rng(workers).normal(size=(workers, 2)))
    gone = workers - 1
    attack = Attack(protocol, frozenset(range(collusion)), values, moment, gone)
    contributors = attack.aggregator.contributors
    assert (gone in contributors) == (moment is OpenedShares)
    np.testing.assert_array_equal(attack.aggregator.result(), exact_sum(protocol, values, contributors))
    for envelope in attack.late:
        refuses(attack.aggregator, envelope)
    self_seeds, pair_seeds = attack.opened()
    assert self_seeds == set(contributors)
    assert pair_seeds == set(attack.participants()) - self_seeds
    honest, space = attack.learned(self_seeds, pair_seeds)
    assert space == [[int(worker in contributors) for worker in honest]]


def test_the_attack_would_find_a_late_input_if_both_seeds_were_open():
    protocol = PairwiseMaskSum(workers=5, threshold=4)
    values = list(np.random.default_rng(3).normal(size=(5, 2)))
    attack = Attack(protocol, frozenset({0}), values, MaskedInput, 4)
    self_seeds, pair_seeds = attack.opened()
    assert any(isinstance(e.message, MaskedInput) for e in attack.late)
    _, space = attack.learned(self_seeds | {4}, pair_seeds)
    assert [0, 0, 0, 1] in space


def test_one_who_is_counted_as_dropped_opens_nothing():
    """It refuses a list without itself, and cannot be made to open shares for that round."""
    protocol = PairwiseMaskSum(workers=5)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    driver, _ = begin(nodes, [np.ones(1)] * 5)
    while not isinstance(driver.pending[0].message, Survivors):
        driver.step()
    told = next(e for e in driver.pending if e.receiver == 4)
    without = dataclasses.replace(told.message, survivors=[0, 1, 2, 3])
    refuses(driver.machines[4], Envelope(AGGREGATOR, 4, without))


# -- noise


@pytest.mark.parametrize(("workers", "threshold", "collusion"), [(4, 3, 1), (6, 4, 1), (6, 5, 2), (9, 6, 2)])
def test_the_smallest_sum_less_the_colluders_shares_has_the_wanted_noise(workers, threshold, collusion):
    inner = PairwiseMaskSum(workers=workers, threshold=threshold, collusion=collusion)
    missing = workers - threshold
    protocol = NoisySum(inner, sigma=0.5, colluders=collusion + missing)
    units = 0.5 * 2**inner.fixed_point.fraction_bits
    assert (threshold - collusion) * protocol.noise.share_std**2 >= units**2
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    size = 8_000
    driver, aggregator = begin(nodes, [np.zeros(size)] * workers)
    known = [nodes[worker]._shares[0][1] for worker in range(collusion)]
    while not isinstance(driver.pending[0].message, MaskedInput):
        driver.step()
    for gone in range(workers - missing, workers):
        driver.drop(gone)
    driver.run()
    assert len(aggregator.contributors) == threshold
    left = aggregator.result() - sum(inner.fixed_point.decode(share) for share in known)
    # The deviation of n Gaussians has standard error 1 / sqrt(2n); six of them: P < 1e-8.
    assert left.std() > 0.5 * (1 - 6 / np.sqrt(2 * size))
    assert left.std() < 0.5 * (1 + 6 / np.sqrt(2 * size))
    enough = NoisySum(inner, sigma=0.5, colluders=collusion)
    assert (threshold - collusion) * enough.noise.share_std**2 < units**2  # dropouts not counted: too little


# -- an aggregator that tells different lists


def until_listed(nodes, values):
    """Plays until the survivors' list is about to be sent."""
    driver, _ = begin(nodes, values)
    while not isinstance(driver.pending[0].message, Survivors):
        driver.step()
    return driver


def ready(protocol):
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    return nodes


@pytest.fixture(params=[True, False], ids=["confirmed", "unconfirmed"])
def confirmed(request, monkeypatch):
    """Whether workers check that the others were told the same; without that, the attacks succeed."""
    if not request.param:
        monkeypatch.setattr(SharingWorker, "_check_confirmed", lambda *_: None)
    return request.param


def seeds_of(protocol, driver, opened, told):
    """Whose self seeds, and whose pair seeds, these shares and those of worker 0 open."""
    shares = {(o, kind): {0: driver.machines[0]._shares[o][kind]} for o in range(6) for kind in (0, 1)}
    for opener, held in opened.items():
        for owner, share in held.items():
            shares[owner, int(owner not in told[opener])][opener] = share
    found = {}
    for (owner, kind), held in shares.items():
        if len(held) >= protocol.threshold:
            points = sorted(held)[: protocol.threshold]
            parts = [int.from_bytes(held[point], "big") for point in points]
            whole = shamir.combine(parts, shamir.weights(tuple(point + 1 for point in points)))
            found[owner, kind] = whole.to_bytes(shamir.SHARE_BYTES, "big")[-KEY_BYTES:]
    return found


def test_different_lists_of_survivors_open_nothing(confirmed):
    """Six workers, threshold 4, worker 0 colludes: without confirmations a sum of 3 lies open."""
    protocol = PairwiseMaskSum(workers=6, threshold=4)
    nodes = ready(protocol)
    driver = until_listed(nodes, [np.ones(1)] * 6)
    told = {1: [0, 1, 2, 5], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3], 4: [0, 1, 2, 4], 5: [0, 1, 2, 5]}
    opened = confirm_and_open(protocol, nodes, driver, told)
    seeds = set(seeds_of(protocol, driver, opened, told))
    assert seeds == (set() if confirmed else {(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)})
    assert bool(opened) != confirmed


def test_different_lists_of_participants_do_not_open_a_single_input(confirmed):
    """Six workers, threshold 4, worker 0 colludes: without confirmations it is the input of worker 1."""
    protocol = PairwiseMaskSum(workers=6, threshold=4)
    nodes = ready(protocol)
    values = [np.array([worker + 0.25, -worker]) for worker in range(6)]
    driver, _ = begin(nodes, values)
    worker, colluder = driver.machines, driver.machines[0]
    while not isinstance(driver.pending[0].message, RelayedShares):
        driver.step()
    covered = {owner: shares.covered for owner, shares in worker[AGGREGATOR]._shares.items()}
    relayed = {e.receiver: e.message for e in driver.pending}
    # Worker 1 hears that 2 and 3 take no part, so it adds no mask that they share with it.
    short = dataclasses.replace(relayed[1], participants=[0, 1, 4, 5], sealed=relayed[1].sealed[[0, 3, 4]])
    masked = {
        each: worker[each].receive(Envelope(AGGREGATOR, each, short if each == 1 else relayed[each]))
        for each in range(6)
    }
    told = {1: [0, 1, 4, 5], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 5: [0, 1, 2, 3, 5]}
    driver.pending = [Envelope(AGGREGATOR, each, Survivors(round=0, survivors=[])) for each in told]
    opened = confirm_and_open(protocol, nodes, driver, told)
    seeds = seeds_of(protocol, driver, opened, told)
    if confirmed:
        assert not opened and not seeds
        return
    plus, minus = [], [KeyStream(seeds[1, 0])]
    plus.append(KeyStream(colluder._mask_seeds[1]))  # worker 1 is above 0: it has subtracted their mask
    for gone in (4, 5):
        table = covered[gone] ^ KeyStream(seeds[gone, 1]).words(covered[gone].shape, np.uint8)
        minus.append(KeyStream(table[1].tobytes()))  # of their neighbours 0, 1, 2, ... worker 1
    found = apply_masks(masked[1][0].message.values.copy(), plus, minus)
    np.testing.assert_allclose(protocol.fixed_point.decode(found), values[1], atol=1e-9)


def smallest_opened(workers, threshold, lists, *, confirm):
    """How many honest inputs the smallest sum has that lies open to the aggregator and worker 0.

    Args:
        workers: All of them; 0 colludes.
        threshold: Shares that open a seed, and confirmations that a worker waits for.
        lists: Honest worker -> (whom it is told to take no part, whom to have dropped out later).
        confirm: Whether workers wait for confirmations.
    """
    honest = range(1, workers)
    told = Counter(lists.values())
    openers = [each for each in lists.values() if not confirm or 1 + told[each] >= threshold]
    known = [
        {w for w in honest if 1 + sum(w not in out | gone for out, gone in openers) >= threshold},
        {w for w in honest if 1 + sum(w in gone for out, gone in openers) >= threshold},
    ]
    for size in honest:
        for group in itertools.combinations(sorted(known[0]), size):
            left = set(honest) - set(group)
            if all(other in lists[w][0] or other in known[1] for w in group for other in left):
                return size
    return None


def lists_for(own, workers, threshold):
    """All lists that a worker accepts: whom it is told to take no part, and whom to have dropped out."""
    others = [other for other in range(1, workers) if other not in own]
    for missing in range(workers - threshold + 1):
        for absent in itertools.combinations(others, missing):
            for split in itertools.product((0, 1), repeat=missing):
                yield tuple(
                    frozenset(w for w, each in zip(absent, split, strict=True) if each == kind)
                    for kind in (0, 1)
                )


@pytest.mark.parametrize(("workers", "threshold"), [(4, 3), (5, 4), (6, 4)])
def test_no_lists_open_a_sum_of_fewer_than_the_threshold(workers, threshold):
    """All lies, up to the names of workers, by which anybody opens anything.

    That takes threshold - 1 honest workers who were told the same and are on their own list. All others may
    be told whatever they accept.
    """
    same = range(1, threshold)
    rest = [lists_for({other}, workers, threshold) for other in range(threshold, workers)]
    found = set()
    for common, *told in itertools.product(lists_for(set(same), workers, threshold), *rest):
        lists = dict.fromkeys(same, common) | dict(enumerate(told, start=threshold))
        found.add(smallest_opened(workers, threshold, lists, confirm=True))
    assert min(size for size in found if size is not None) == threshold - 1


def test_the_search_would_find_the_single_input_that_lies_without_confirmations_open():
    everybody = frozenset(range(6))
    participants = {1: {0, 1, 4, 5}}
    survivors = {1: {0, 1, 4, 5}, 2: {0, 1, 2, 3}, 3: {0, 1, 2, 3}, 4: {0, 1, 2, 3, 4}, 5: {0, 1, 2, 3, 5}}
    lists = {}
    for worker, alive in survivors.items():
        present = participants.get(worker, everybody)
        lists[worker] = (frozenset(everybody - present), frozenset(present - alive))
    assert smallest_opened(6, 4, lists, confirm=False) == 1
    assert smallest_opened(6, 4, lists, confirm=True) is None


# -- confirmations


def at_confirmations(protocol, nodes, number=0, attempt=0):
    """A round just before the confirmations are passed on: the driver, and what worker 0 is to get."""
    machines = {
        address: node.round(np.ones(1) if address >= 0 else None, round=number, attempt=attempt, shape=(1,))
        for address, node in nodes.items()
    }
    driver = Driver(machines)
    driver.start()
    while not isinstance(driver.pending[0].message, Confirmations):
        driver.step()
    return driver, driver.pending[0]


def test_only_the_marks_of_this_round_and_receiver_confirm():
    protocol = PairwiseMaskSum(workers=5)
    nodes = ready(protocol)
    _, earlier = at_confirmations(protocol, nodes)
    _, retried = at_confirmations(protocol, nodes, 1, attempt=1)
    driver, envelope = at_confirmations(protocol, nodes, 1)
    true, machine = envelope.message, driver.machines[0]
    other = next(e.message for e in driver.pending if e.receiver == 1)
    own = driver.machines[AGGREGATOR]._marks[0]
    flipped = true.marks.copy()
    flipped[2, 0] ^= 1
    reflected = np.stack([np.frombuffer(own[peer], np.uint8) for peer in true.confirmed])
    elsewhere = (earlier.message.marks, retried.message.marks, other.marks, true.marks[::-1])
    for marks in (*elsewhere, flipped, reflected):
        bad = Envelope(AGGREGATOR, 0, dataclasses.replace(true, marks=np.ascontiguousarray(marks)))
        refuses(machine, bad)
        with pytest.raises(ProtocolError, match="was told of other participants or survivors in round 1"):
            machine.receive(bad)
    assert machine.receive(envelope)


@pytest.mark.parametrize(
    ("confirmed", "kept", "reason"),
    [
        ([1, 2], [0, 1], "3 workers confirm the survivors of round 0; 4 are needed"),
        ([], [], "1 workers confirm"),
        ([1, 1, 2, 3], [0, 0, 1, 2], "malformed"),
        ([2, 1, 3], [1, 0, 2], "malformed"),
        ([0, 1, 2, 3], [0, 0, 1, 2], "malformed"),
        ([1, 2, 3, 7], [0, 1, 2, 3], "malformed"),
        ([1, 2, 3, 4], [0, 1, 2], "rows"),
    ],
)
def test_too_few_or_strange_confirmations_open_nothing(confirmed, kept, reason):
    protocol = PairwiseMaskSum(workers=5)
    driver, envelope = at_confirmations(protocol, ready(protocol))
    marks = envelope.message.marks[kept]
    bad = Envelope(AGGREGATOR, 0, dataclasses.replace(envelope.message, confirmed=confirmed, marks=marks))
    refuses(driver.machines[0], bad)
    with pytest.raises(ProtocolError, match=reason):
        driver.machines[0].receive(bad)
    marks = envelope.message.marks[[0, 1, 3]]
    enough = dataclasses.replace(envelope.message, confirmed=[1, 2, 4], marks=marks)
    assert isinstance(driver.machines[0].receive(Envelope(AGGREGATOR, 0, enough))[0].message, OpenedShares)


def test_one_who_is_gone_after_confirming_still_counts():
    protocol = PairwiseMaskSum(workers=5)
    nodes = ready(protocol)
    driver = until_listed(nodes, [np.ones(1)] * 5)
    aggregator = driver.machines[AGGREGATOR]
    while 4 not in aggregator._marks:
        index = next(i for i, e in enumerate(driver.pending) if 4 in (e.sender, e.receiver))
        driver.pending.insert(0, driver.pending.pop(index))
        driver.step()
    driver.drop(4)
    driver.run()
    assert aggregator.contributors == (0, 1, 2, 3, 4)
    passed = next(e.message for e in driver.transcript if isinstance(e.message, Confirmations))
    assert 4 in passed.confirmed
