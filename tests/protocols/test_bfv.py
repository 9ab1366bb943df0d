"""The BFV sum: conformance, keys, ranges, hostile bytes."""

import dataclasses

import numpy as np
import pytest
from homomorphic_conformance import HomomorphicConformance, ready, run_fuzz

from securevfl.errors import DropoutError, EncodingError, InputError, ProtocolError
from securevfl.protocols import AGGREGATOR, KEY_HOLDER, BFVSum, Driver, Envelope, FixedPoint
from securevfl.protocols.sums.bfv import MAX_WORKERS, PARAMETERS, PLAIN_MODULUS
from securevfl.protocols.sums.encryption import ContextFrame, Encryption, check_public
from securevfl.protocols.sums.homomorphic import (
    EncryptedTotal,
    EncryptedValue,
    OpenedTotal,
    PublicKey,
)


class TestOutsideRoles(HomomorphicConformance):
    def make(self, workers):
        return BFVSum(workers=workers)


class TestWorkerRoles(HomomorphicConformance):
    """The label holder, worker 0, has the key; worker 1 adds."""

    def make(self, workers):
        return BFVSum(workers=workers, key_holder=0, aggregator=1)


def play(protocol, values):
    nodes, transcript = ready(protocol)
    machines = {a: node.round(values[a] if a >= 0 else None, round=0) for a, node in nodes.items()}
    driver = Driver(machines)
    driver.start()
    driver.run()
    return nodes, machines, transcript + driver.transcript


def test_plain_modulus():
    n = PLAIN_MODULUS
    assert n.bit_length() == 40
    assert n % (2 * PARAMETERS.degree) == 1
    assert all(pow(a, n - 1, n) == 1 for a in (2, 3, 5, 7, 11, 13))  # wrong only for Carmichael numbers


def test_a_silent_key_holder_keeps_the_total():
    protocol = BFVSum(workers=3, announce=False)
    assert protocol.receivers == (KEY_HOLDER,)
    _, machines, transcript = play(protocol, [np.full(2, i + 1.0) for i in range(3)])
    np.testing.assert_array_equal(machines[KEY_HOLDER].result(), [6, 6])
    assert not any(isinstance(envelope.message, OpenedTotal) for envelope in transcript)
    assert all(machine.done for machine in machines.values())


def test_more_values_than_slots(capfd):
    protocol = BFVSum(workers=3)
    values = [np.random.default_rng(i).uniform(-100, 100, (3, 3000)) for i in range(3)]
    exact = sum(protocol.fixed_point.encode(value).view(np.int64) for value in values)
    np.testing.assert_array_equal(protocol.sum(values), exact * 2.0**-20)
    assert capfd.readouterr() == ("", "")  # TenSEAL warns on standard output about vectors beyond its slots


@pytest.mark.parametrize("workers", [2, 3, 7, 16])
def test_the_whole_range_is_exact_and_one_more_is_refused(workers):
    protocol = BFVSum(workers=workers, fixed_point=FixedPoint(bits=64, fraction_bits=0))
    top = protocol.max_integer
    assert 2 * workers * top < PLAIN_MODULUS < 2 * workers * (top + 1)
    for sign in (1, -1):
        values = [np.array([sign * top, 0.0])] * workers
        np.testing.assert_array_equal(protocol.sum(values), [sign * top * workers, 0])
        with pytest.raises(EncodingError, match="clip"):
            protocol.encode(np.array([0.0, sign * (top + 1)]))
        raw = np.array([sign * (top + 1)]).view(np.uint64)
        with pytest.raises(EncodingError):
            protocol.encode(raw)  # also where the caller encoded, for instance to add noise


def test_a_refused_value_is_not_quoted():
    """Over a network others are told why a worker stops; its prediction is none of their business."""
    with pytest.raises(EncodingError) as refused:
        BFVSum(workers=3).encode(np.array([0.5, 87654321.0, -1.0]))
    assert "8765" not in str(refused.value) and "8.765" not in str(refused.value)


def test_the_smallest_integer_is_refused():
    """abs() of the most negative 64-bit integer is negative; the check must not rely on it."""
    with pytest.raises(EncodingError):
        BFVSum(workers=2).encode(np.array([1 << 63], dtype=np.uint64))


def test_key_holder_is_never_the_aggregator():
    for address in (0, 2):
        with pytest.raises(InputError, match="key holder and aggregator"):
            BFVSum(workers=3, key_holder=address, aggregator=address)
    for wrong in (
        {"key_holder": 3},
        {"aggregator": 3},
        {"key_holder": AGGREGATOR},
        {"aggregator": KEY_HOLDER},
    ):
        with pytest.raises(InputError):
            BFVSum(workers=3, **wrong)


def test_limits():
    with pytest.raises(InputError):
        BFVSum(workers=MAX_WORKERS + 1)
    with pytest.raises(InputError):
        BFVSum(workers=1)
    with pytest.raises(InputError):
        BFVSum(workers=3, fixed_point=FixedPoint(bits=32, fraction_bits=10))


def test_noise_leaves_room_for_the_largest_number_of_workers():
    """1024 times the noise of one fresh ciphertext (worse than a sum of 1024) still decrypts exactly."""
    key = Encryption.generate(PARAMETERS)
    numbers = np.full(PARAMETERS.slots, 3)
    total = key.load(key.encrypt(numbers)[0])
    for _ in range(10):
        total.add_(total.copy())
    np.testing.assert_array_equal(key.decrypt(total), numbers * MAX_WORKERS)


def test_exhausted_noise_is_refused_and_not_decrypted_wrongly():
    key = Encryption.generate(PARAMETERS)
    total = key.load(key.encrypt(np.ones(PARAMETERS.slots, dtype=np.int64))[0])
    with pytest.raises(ProtocolError, match="noisy"):
        for _ in range(30):
            total.add_(total.copy())
            key.decrypt(total)


def test_only_the_key_holder_has_the_secret_key():
    protocol = BFVSum(workers=3)
    values = [np.full(5, i + 1.0) for i in range(3)]
    nodes, _, transcript = play(protocol, values)
    assert [a for a, node in nodes.items() if node.encryption.is_private] == [KEY_HOLDER]
    for envelope in transcript:
        if not isinstance(envelope.message, EncryptedValue):
            continue
        for address, node in nodes.items():
            vector = node.encryption.load(envelope.message.ciphertexts)
            if address != KEY_HOLDER:
                with pytest.raises(ProtocolError, match="key holder"):
                    node.encryption.decrypt(vector)
                with pytest.raises(ValueError, match="secret"):
                    vector.decrypt()
    # A key of one's own does not help: it decrypts to nothing that was sent, or is noticed as noise.
    own = Encryption.generate(protocol.parameters)
    sent = next(e.message for e in transcript if isinstance(e.message, EncryptedTotal))
    with pytest.raises(ProtocolError, match="noisy"):
        own.decrypt(own.load(sent.ciphertexts))


def test_two_sums_use_different_keys():
    first, second = (ready(BFVSum(workers=2))[0][KEY_HOLDER] for _ in range(2))
    ciphertext = first.encryption.encrypt(np.arange(10))[0]
    with pytest.raises(ProtocolError):
        second.encryption.decrypt(second.encryption.load(ciphertext))


def secret_key_windows(encryption, tmp_path):
    """The serialised secret key, cut into windows of 24 bytes at every offset."""
    path = tmp_path / "secret"
    encryption._context.secret_key().data.save(str(path))
    raw = path.read_bytes()
    whole = encryption._context.serialize(False, True, False, False)
    return {data[i : i + 24] for data in (raw, whole) for i in range(400, len(data) - 24)}


def test_nothing_sent_contains_bytes_of_the_secret_key(tmp_path):
    """Serialised keys are incompressible after their headers, so a shared window of 24 bytes is no chance."""
    nodes, _, transcript = play(BFVSum(workers=3), [np.zeros(5)] * 3)
    key_holder = nodes[KEY_HOLDER].encryption
    windows = secret_key_windows(key_holder, tmp_path)
    with_secret = key_holder._context.serialize(True, True, False, False)
    assert any(with_secret[i : i + 24] in windows for i in range(len(with_secret)))  # the search does find it
    for envelope in transcript:
        data = envelope.message.to_bytes()
        assert not any(data[i : i + 24] in windows for i in range(len(data) - 24))


def tenseal_context(**changes):
    import tenseal

    settings = {
        "poly_modulus_degree": 4096,
        "plain_modulus": PLAIN_MODULUS,
        "coeff_mod_bit_sizes": [60, 49],
        "n_threads": 1,
    }
    return tenseal.context(tenseal.SCHEME_TYPE.BFV, **{**settings, **changes})


def test_contexts_with_other_keys_are_refused():
    """The tutorials' mistake, one secret key at every client."""
    import tenseal

    def received(*keys):
        return tenseal.context_from(tenseal_context().serialize(*keys), n_threads=1)

    with pytest.raises(ProtocolError, match="secret key"):
        check_public(received(True, True, False, False))
    with pytest.raises(ProtocolError, match="no evaluation keys"):
        check_public(received(True, False, False, True))
    with pytest.raises(ProtocolError, match="public key"):
        check_public(received(False, False, False, False))
    check_public(received(True, False, False, False))


def test_only_a_public_key_is_read():
    """Whole contexts, secret keys and keys of other parameters are no public keys."""
    context = tenseal_context()
    for keys in ((True, False, False, False), (True, True, False, False), (False, True, False, False)):
        with pytest.raises(ProtocolError):
            Encryption.from_public_key(PARAMETERS, context.serialize(*keys))
    for changes in ({"plain_modulus": 1032193}, {"coeff_mod_bit_sizes": [49, 60]}):
        _, key = ContextFrame.split(tenseal_context(**changes).serialize(True, False, False, False))
        with pytest.raises(ProtocolError, match="cannot be read"):
            Encryption.from_public_key(PARAMETERS, key)
    for size in (0, PARAMETERS.max_key_bytes + 1):
        with pytest.raises(ProtocolError, match="bytes"):
            Encryption.from_public_key(PARAMETERS, bytes(size))
    with pytest.raises(ProtocolError, match="TenSEAL"):
        ContextFrame.split(context.serialize(True, True, False, False))


def test_a_public_key_makes_a_public_context():
    data = Encryption.generate(PARAMETERS).public_key()
    assert len(data) < 130_000
    again = Encryption.from_public_key(PARAMETERS, data)
    assert not again.is_private
    assert again.public_key() == data
    check_public(again._context)


def test_a_second_key_is_refused():
    protocol = BFVSum(workers=3)
    nodes, _ = ready(protocol)
    machine = nodes[1].setup()
    machine.start()
    foreign = PublicKey(round=-1, key=Encryption.generate(PARAMETERS).public_key())
    with pytest.raises(ProtocolError, match="already has a key"):
        machine.receive(Envelope(KEY_HOLDER, 1, foreign))


def test_equal_values_give_different_ciphertexts():
    key = Encryption.generate(PARAMETERS)
    assert key.encrypt(np.zeros(3, np.int64)) != key.encrypt(np.zeros(3, np.int64))


def test_hostile_bytes_raise_and_never_crash():
    run_fuzz("bfv", "PARAMETERS", "PARAMETERS")


def test_hostile_shapes_are_refused():
    protocol = BFVSum(workers=3)
    nodes, _ = ready(protocol)
    machines = {a: node.round(np.zeros(3) if a >= 0 else None, round=0) for a, node in nodes.items()}
    envelopes = [e for machine in machines.values() for e in machine.start()]
    good, aggregator = envelopes[0], machines[AGGREGATOR]
    for changes in (
        {"shape": [-1]},
        {"shape": [-1, -3]},
        {"shape": [10**9, 10**9]},
        {"shape": [0, 10**18], "sizes": [], "ciphertexts": b""},
        {"shape": [1] * 70},
        {"shape": [], "sizes": []},
        {"sizes": [-5]},
        {"sizes": [len(good.message.ciphertexts) + 5, -5]},
        {"ciphertexts": good.message.ciphertexts * 2},
    ):
        with pytest.raises(ProtocolError):
            aggregator.receive(
                Envelope(good.sender, AGGREGATOR, dataclasses.replace(good.message, **changes))
            )
    for envelope in envelopes:
        sent = aggregator.receive(envelope)
    opened = machines[KEY_HOLDER].receive(sent[0])
    assert {type(e.message) for e in opened} == {OpenedTotal}


def test_dropouts():
    protocol = BFVSum(workers=3)
    nodes, _ = ready(protocol)
    machines = {a: node.round(np.zeros(3) if a >= 0 else None, round=0) for a, node in nodes.items()}
    envelopes = {a: machine.start() for a, machine in machines.items()}
    aggregator = machines[AGGREGATOR]
    aggregator.receive(envelopes[0][0])
    assert aggregator.drop(0) == []  # its value is in the total already
    with pytest.raises(DropoutError, match="worker 1"):
        aggregator.drop(1)
    for gone in (AGGREGATOR, KEY_HOLDER):
        with pytest.raises(DropoutError):
            machines[2].drop(gone)
    setup = protocol.node(1).setup()
    setup.start()
    with pytest.raises(DropoutError):
        setup.drop(KEY_HOLDER)
