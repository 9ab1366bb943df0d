"""Correlations made ahead: bounded, in any order of delivery, beside rounds, each for one round alone."""

import contextlib
import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
from test_sealed_encrypted import Pair

from securevfl.errors import ProtocolError
from securevfl.protocols import Envelope
from securevfl.protocols.driver import Driver
from securevfl.protocols.sealed import encrypted
from securevfl.protocols.sealed.correlations import UNANSWERED
from securevfl.protocols.sealed.messages import Answer, EncryptedRows, Offer, RowsTaken
from securevfl.protocols.stream import KeyStream


def shuffled(seed):
    rng = np.random.default_rng(seed)
    return lambda pending: int(rng.integers(len(pending)))


def most(transcript, sent, taken):
    """Messages of a kind that were under way at once, by number."""
    under_way, largest = set(), 0
    for envelope in transcript:
        message = envelope.message
        if isinstance(message, sent):
            under_way.add((envelope.sender, getattr(message, "number", getattr(message, "chunk", None))))
        if isinstance(message, taken):
            under_way.discard(
                (envelope.receiver, getattr(message, "number", getattr(message, "chunk", None)))
            )
        largest = max(largest, len(under_way))
    return largest


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_delivery_gives_exact_totals(seed):
    pair = Pair(seed=seed).setup(0, 1, 2, 3, choose=shuffled(seed))
    for number in range(4):
        for member, found in enumerate(pair.totals(number)):
            assert np.array_equal(found, pair.exact(member))


def test_offers_wait_for_answers():
    pair = Pair().setup(*range(5))
    assert most(pair.transcript, Offer, Answer) == UNANSWERED
    machine = pair.parties[0].prepare([(n, None) for n in range(5, 9)])
    machine.start()
    sent = []
    while machine.pending:
        sent += machine.proceed()
    assert len(sent) == UNANSWERED and not machine.done
    with pytest.raises(ProtocolError, match="nothing to do before a message comes"):
        machine.proceed()


def test_chunks_of_rows_wait_for_each_other_in_any_order(monkeypatch):
    monkeypatch.setattr(encrypted, "CHUNK", 1)
    pair = Pair((33, 18), records=600)
    pair.setup(0, choose=shuffled(3))
    assert most(pair.transcript, EncryptedRows, RowsTaken) <= 2 * encrypted.UNTAKEN
    assert [len(party.rows) for party in pair.parties] == [4, 6]
    for member, found in enumerate(pair.totals(0)):
        assert np.array_equal(found, pair.exact(member))
    again = [party.setup() for party in pair.parties]
    driver = Driver(dict(enumerate(again)))
    driver.start()
    driver.run()
    chunk = next(e for e in driver.transcript if isinstance(e.message, EncryptedRows))
    for number in (chunk.message.chunk, 6, -1):
        with pytest.raises(ProtocolError):
            again[chunk.receiver].receive(
                dataclasses.replace(chunk, message=dataclasses.replace(chunk.message, chunk=number))
            )


def test_a_pool_is_filled_beside_a_round():
    """B's part is ready before the offer comes; rounds and pool share nothing that either waits for."""
    pair = Pair().setup(0)
    rounds = pair.machines(0)
    pools = [party.prepare([(1, None), (2, None)]) for party in pair.parties]
    mixed = [Driver(dict(enumerate(each))) for each in (rounds, pools)]
    for driver in mixed:
        driver.start()
    for machine in pools:
        while machine.pending:
            mixed[1].pending += machine.proceed()
    assert list(pools[1]._open) == [1]
    while any(driver.pending for driver in mixed) or any(machine.pending for machine in pools):
        for driver in mixed:
            if driver.pending:
                driver.step()
        for machine in pools:
            if machine.pending:
                mixed[1].pending += machine.proceed()
    for member, machine in enumerate(rounds):
        assert np.array_equal(machine.result(), pair.exact(member))
    for number in (1, 2):
        assert np.array_equal(pair.totals(number)[1], pair.exact(1))


def test_a_correlation_is_held_for_its_round_and_records_alone():
    pair = Pair(batch=10).setup()
    rows = np.arange(10)
    first, second = pair.parties
    pair.run([party.prepare([(0, rows), (1, rows + 10)]) for party in pair.parties])
    assert first.holds(0, rows) and not first.holds(0, rows + 10) and not first.holds(2, rows)
    pair.totals(1, rows + 10)  # round 0 was left out: what was made for it never serves
    assert not first.pool and not second.pool
    with pytest.raises(ProtocolError):
        pair.machines(0, rows)


# -- attacks ------------------------------------------------------------------------------------------------


def offered(pair, *numbers):
    """Machines of a pool, and A's first offer."""
    machines = [party.prepare([(n, None) for n in numbers]) for party in pair.parties]
    for machine in machines:
        machine.start()
    return machines, machines[0].proceed()[0]


def test_asking_twice_for_a_product_is_refused():
    """Two answers of one V would differ by their noise alone: the second request gets none."""
    machines, offer = offered(Pair().setup(), 0, 1)
    assert isinstance(machines[1].receive(offer)[0].message, Answer)
    with pytest.raises(ProtocolError, match="out of turn"):
        machines[1].receive(offer)
    machines[1].proceed()
    with pytest.raises(ProtocolError, match="out of turn"):  # not while the next one is prepared, either
        machines[1].receive(offer)


def test_an_offer_that_failed_is_answered_once_and_with_one_mask():
    machines, offer = offered(Pair(std=1000).setup(), 0)
    machines[1].proceed()
    blind = machines[1]._open[0][0].blind.copy()
    with pytest.raises(ProtocolError):
        machines[1].receive(dataclasses.replace(offer, message=dataclasses.replace(offer.message, masks=b"")))
    machines[1].receive(offer)
    assert np.array_equal(machines[1]._party.pool[0].blind, blind)
    with pytest.raises(ProtocolError):
        machines[1].receive(offer)


def test_an_offer_of_another_session_tells_nothing():
    """Ciphertexts of an earlier session are under a key that is gone: noise, under fresh masks."""
    pair = Pair().setup()
    _, old = offered(pair, 0)
    pair.setup()
    machines, _ = offered(pair, 0)
    answer = machines[1].receive(old)[0]
    machines[0].receive(Envelope(1, 0, answer.message))
    assert not np.array_equal(pair.totals(0)[0], pair.exact(0))


def test_a_ciphertext_that_is_offered_twice_is_masked_twice():
    """A reuses Enc(x) in two offers: B's z and rho are fresh, so the opened words are unrelated."""
    pair = Pair(records=2000).setup()
    machines, first = offered(pair, 0, 1)
    second = dataclasses.replace(first, message=dataclasses.replace(first.message, number=1))
    opened = []
    for envelope in (first, second):
        answer = machines[1].receive(envelope)[0].message
        piece = encrypted.unpack(answer.products, 1)[0]
        opened.append(pair.parties[0].keys.slots(piece)[:2000])
    apart = (opened[0].astype(object) - opened[1].astype(object)) % encrypted.residues.T
    assert len(set(apart.tolist())) > 1990
    left, right = (pair.parties[1].pool[n] for n in (0, 1))
    assert not np.array_equal(left.factors, right.factors) and not np.array_equal(left.blind, right.blind)


# -- the simulation of benchmarks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"widths": (20, 3), "records": 700, "std": 2**20}, {"series": None, "outputs": 2, "std": 2**20}],
    ids=["small", "blocks", "labels"],
)
def test_the_simulation_without_encryption_is_the_same_word_for_word(monkeypatch, changes):
    """All random words given, ciphertexts and plaintexts make the very same pools and totals."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    clear = importlib.import_module("benchmarks.clear")
    found = []
    for around in (contextlib.nullcontext, clear.in_the_clear):
        with around():
            pair = Pair(**changes)
            for member, party in enumerate(pair.parties):
                party._stream, party._noise = (KeyStream(bytes([member, place] * 8)) for place in (0, 1))
            pair.setup(0, 1)
            pools = [dict(vars(party.pool[n])) for party in pair.parties for n in (0, 1)]
            found.append((pools, pair.totals(0)))
    for real, simulated in zip(found[0][0], found[1][0], strict=True):
        assert all(np.array_equal(real[name], simulated[name]) for name in real)
    assert all(map(np.array_equal, found[0][1], found[1][1]))
