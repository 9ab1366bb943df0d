"""Signed keys of pairwise masks: what an aggregator that swaps, replays or mixes keys gets, and what not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sum_conformance import SumConformance, every_order, refuses

from securevfl.errors import ProtocolError
from securevfl.protocols import (
    AGGREGATOR,
    Authenticator,
    Driver,
    Envelope,
    NoisySum,
    PairwiseMaskSum,
    run_round,
    run_setup,
)
from securevfl.protocols.contract import name_of
from securevfl.protocols.keys import SIGNATURE_BYTES, PartyKeys, key_statement
from securevfl.protocols.sums.pairwise import Encapsulations, KeyDirectory, MaskedInput, PublicKeys
from securevfl.protocols.sums.pairwise_setup import WorkerSetup

LONG_TERM = [Ed25519PrivateKey.generate() for _ in range(10)]


class Keyring(Authenticator):
    """One worker's long-term key, the public ones of all, and a text for each key agreement."""

    def __init__(self, own: int, context: bytes = b"run 1, phase 1") -> None:
        self.own, self.context = own, context

    def sign(self, statement: bytes) -> bytes:
        return LONG_TERM[self.own].sign(self.context + statement)

    def verify(self, address: int, statement: bytes, signature: bytes) -> None:
        try:
            LONG_TERM[address].public_key().verify(signature, self.context + statement)
        except InvalidSignature as error:
            raise ProtocolError(f"keys of {name_of(address)} are not signed by it") from error


class SignedSum(PairwiseMaskSum):
    """The sum whose workers all sign."""

    def node(self, address, authenticator=None):
        return super().node(address, authenticator or (Keyring(address) if address >= 0 else None))


class SignedConformance(SumConformance):
    exhaustive_workers = ()

    def may_send(self, protocol, other, envelope):
        """All workers send alike to the aggregator, which need not check signatures."""
        return other == envelope.sender or (envelope.receiver == AGGREGATOR and 0 <= other < protocol.workers)


class TestSignedRecovering(SignedConformance):
    def make(self, workers):
        return SignedSum(workers=workers, collusion=0 if workers == 3 else 1)


class TestSignedHybridDirect(SignedConformance):
    exhaustive_workers = (3,)

    def make(self, workers):
        return SignedSum(workers=workers, threshold=workers, hybrid=True)


@pytest.mark.parametrize(("workers", "hybrid", "orders"), [(3, False, 6 * 6), (2, True, 2 * 6 * 2)])
def test_every_order_of_the_key_agreement(workers, hybrid, orders):
    protocol = SignedSum(workers=workers, collusion=0, threshold=workers, hybrid=hybrid)

    def play(choose):
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        run_setup(nodes, choose=choose, codec=protocol)
        np.testing.assert_array_equal(run_round(nodes, [np.ones(2)] * workers, round=0), [workers] * 2)

    assert every_order(play, limit=1000) == orders


def test_a_noisy_sum_takes_nodes_whose_keys_are_signed():
    inner = PairwiseMaskSum(workers=3, collusion=1, threshold=3)
    protocol = NoisySum(inner, sigma=0.5, colluders=1)
    signed = {a: inner.node(a, Keyring(a) if a >= 0 else None) for a in protocol.addresses}
    nodes = {address: protocol.node(address, signed[address]) for address in protocol.addresses}
    sent = run_setup(nodes, codec=protocol)
    offered = {len(e.message.public) for e in sent if isinstance(e.message, PublicKeys)}
    assert offered == {len(PartyKeys(hybrid=False).public) + SIGNATURE_BYTES}
    total = run_round(nodes, [np.ones(2)] * 3, round=0)
    # Three shares of std 0.5 / sqrt(2) each: 12 deviations of the total are 7.4.
    np.testing.assert_allclose(total, [3, 3], atol=7.4)
    for wrong in (signed[1], PairwiseMaskSum(workers=3, collusion=1, threshold=3).node(0)):
        with pytest.raises(ProtocolError, match="not that of worker 0"):
            protocol.node(0, wrong)


# -- an aggregator that lies


def at_directory(protocol, victim):
    """A key agreement just before a worker gets the others' keys: the nodes, the driver, that envelope."""
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()})
    driver.start()
    while not isinstance(driver.pending[0].message, KeyDirectory):
        driver.step()
    return nodes, driver, next(e for e in driver.pending if e.receiver == victim)


def with_row(envelope, index, row):
    """The directory with another row."""
    public = envelope.message.public.copy()
    public[index] = np.frombuffer(row, np.uint8)
    return Envelope(AGGREGATOR, envelope.receiver, dataclasses.replace(envelope.message, public=public))


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("threshold", [4, 3])
def test_swapped_keys_are_refused_by_everybody_and_nothing_leaves(threshold, hybrid):
    protocol = SignedSum(workers=4, threshold=threshold, hybrid=hybrid)
    intruder = PartyKeys(hybrid=hybrid).public
    for victim in range(4):
        nodes, driver, envelope = at_directory(protocol, victim)
        machine, peers = driver.machines[victim], [peer for peer in range(4) if peer != victim]
        for index, peer in enumerate(peers):
            row = envelope.message.public[index].tobytes()
            old_signature = row[-SIGNATURE_BYTES:]
            colluder = peers[index - 1]
            forged = [
                intruder + old_signature,
                intruder + bytes(SIGNATURE_BYTES),
                intruder + Keyring(colluder).sign(key_statement(peer, intruder)),
                intruder + Keyring(colluder).sign(key_statement(colluder, intruder)),
                intruder + Keyring(peer, b"run 1, phase 0").sign(key_statement(peer, intruder)),
                envelope.message.public[index - 1].tobytes(),  # another's, rightly signed for its own slot
            ]
            for each in forged:
                bad = with_row(envelope, index, each)
                refuses(machine, bad)
                with pytest.raises(ProtocolError, match=f"worker {peer} "):
                    machine.receive(bad)
        assert nodes[victim].pairs is None
        with pytest.raises(ProtocolError, match="no keys yet"):
            nodes[victim].round(np.ones(1), round=0)


@pytest.mark.parametrize("hybrid", [False, True])
def test_keys_without_signatures_are_refused_where_keys_are_signed(hybrid):
    protocol = SignedSum(workers=4, hybrid=hybrid)
    _, driver, envelope = at_directory(protocol, 0)
    bare = envelope.message.public[:, :-SIGNATURE_BYTES]
    refuses(driver.machines[0], Envelope(AGGREGATOR, 0, dataclasses.replace(envelope.message, public=bare)))
    plain = PairwiseMaskSum(workers=4, hybrid=hybrid).node(0).setup()
    plain.start()
    refuses(plain, envelope)


def test_the_aggregator_refuses_a_mixture_of_signed_and_bare_keys():
    protocol = PairwiseMaskSum(workers=4)
    aggregator = protocol.node(AGGREGATOR).setup()
    aggregator.start()
    signing, bare = protocol.node(0, Keyring(0)).setup(), protocol.node(1).setup()
    aggregator.receive(signing.start()[0])
    refuses(aggregator, bare.start()[0])


def man_in_the_middle(protocol):
    """The aggregator agrees with each worker in all others' names; returns what it can read of worker 0."""
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    driver = Driver({address: node.setup() for address, node in nodes.items()})
    driver.start()
    fakes = {}
    for worker in range(1, protocol.workers):  # the same machine that workers use, with the intruder's keys
        fake = PairwiseMaskSum(workers=protocol.workers, threshold=protocol.workers).node(worker)
        fakes[worker] = fake, WorkerSetup(fake)
        fakes[worker][1].start()
    sent = {e.sender: e.message.public for e in driver.pending if isinstance(e.message, PublicKeys)}
    width = len(sent[0])
    everybody = list(range(protocol.workers))
    table = np.zeros((protocol.workers - 1, width), np.uint8)
    for index, worker in enumerate(fakes):
        table[index, :32] = np.frombuffer(fakes[worker][1]._keys.public, np.uint8)
        table[index, 32:] = np.frombuffer(sent[worker][32:], np.uint8)
    driver.machines[0].receive(
        Envelope(AGGREGATOR, 0, KeyDirectory(round=-1, participants=everybody, public=table))
    )
    (masked,) = nodes[0].round(np.array([1.5, -2.0]), round=0).start()
    assert isinstance(masked.message, MaskedInput)
    opened = masked.message.values.copy()
    for _, setup in fakes.values():
        pair = setup._pair(0, sent[0][:32])
        opened -= pair.masks.at(0, 0).words(2)
    return protocol.fixed_point.decode(opened)


def test_without_signatures_a_swap_of_keys_reads_an_input_and_with_them_it_is_refused():
    np.testing.assert_array_equal(man_in_the_middle(PairwiseMaskSum(workers=4, threshold=4)), [1.5, -2.0])
    with pytest.raises(ProtocolError, match="worker 1 are not signed"):
        man_in_the_middle(SignedSum(workers=4, threshold=4))


@pytest.mark.parametrize("threshold", [4, 3])
def test_an_old_key_of_the_same_worker_only_makes_the_sum_fail(threshold):
    """Where nothing tells two key agreements apart, an old signature passes; but its secret is gone."""
    protocol = SignedSum(workers=4, threshold=threshold)
    _, old, _ = at_directory(protocol, 0)
    stale = old.machines[AGGREGATOR]._public[1]
    nodes, driver, envelope = at_directory(protocol, 0)
    driver.pending[driver.pending.index(envelope)] = with_row(envelope, 0, stale)
    driver.run()
    assert nodes[0].fingerprints()[1] != nodes[1].fingerprints()[0]
    assert nodes[0].pairs[1]._key != nodes[1].pairs[0]._key
    check_sum_fails(protocol, nodes, refusing={0, 1})


def test_an_old_key_of_another_key_agreement_is_refused():
    protocol = SignedSum(workers=4)
    past = protocol.node(1, Keyring(1, b"run 1, phase 0")).setup()
    stale = past.start()[0].message.public
    _, driver, envelope = at_directory(protocol, 0)
    refuses(driver.machines[0], with_row(envelope, 0, stale))


@pytest.mark.parametrize("threshold", [4, 3])
@pytest.mark.parametrize("own", [False, True], ids=["flipped", "own secret"])
def test_a_changed_ciphertext_only_makes_the_sum_fail(threshold, own):
    """Also one that the aggregator made itself and whose secret it knows: the X25519 part stays closed."""
    protocol = SignedSum(workers=4, threshold=threshold, hybrid=True)
    nodes, driver, _ = at_directory(protocol, 0)
    public = driver.machines[AGGREGATOR]._public
    secret, ciphertext = PartyKeys(hybrid=True).encapsulate(public[2][:-SIGNATURE_BYTES])
    while driver.pending:
        envelope = driver.pending[0]
        if isinstance(envelope.message, Encapsulations) and envelope.receiver == 2:
            forged = envelope.message.ciphertexts.copy()
            forged[0] = np.frombuffer(ciphertext, np.uint8) if own else forged[0] ^ 1  # from worker 0
            message = dataclasses.replace(envelope.message, ciphertexts=forged)
            driver.pending[0] = Envelope(AGGREGATOR, 2, message)
        driver.step()
    assert nodes[0].pairs[2]._key != nodes[2].pairs[0]._key
    assert nodes[0].pairs[1]._key == nodes[1].pairs[0]._key
    if own:  # all that the aggregator knows: both public keys, its secret, an X25519 key of its own
        guess = driver.machines[2]._keys.decapsulate(ciphertext)
        assert guess == secret
    check_sum_fails(protocol, nodes, refusing={0, 2})


def check_sum_fails(protocol, nodes, refusing):
    """Shares do not open at those whose keys differ; without shares the total is not the sum."""
    values = [np.full(2, float(worker)) for worker in range(4)]
    machines = {
        address: node.round(values[address] if address >= 0 else None, round=0, shape=(2,))
        for address, node in nodes.items()
    }
    driver = Driver(machines)
    driver.start()
    if not protocol.recovers:
        driver.run()
        assert not np.any(machines[AGGREGATOR].result() == sum(values))
        return
    sent = set()
    while driver.pending:
        envelope = driver.pending[0]
        if envelope.receiver in refusing:
            with pytest.raises(ProtocolError, match="changed on its way"):
                driver.machines[envelope.receiver].receive(envelope)
            driver.pending.pop(0)
            continue
        driver.step()
        sent |= {e.sender for e in driver.transcript if isinstance(e.message, MaskedInput)}
    assert sent == set(range(4)) - refusing
