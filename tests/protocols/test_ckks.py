"""The CKKS sum: conformance, error bound, ranges, flooding."""

import numpy as np
import pytest
from homomorphic_conformance import HomomorphicConformance, ready, run_fuzz
from scipy import stats

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols import KEY_HOLDER, CKKSSum, Driver, run_round
from securevfl.protocols.sums import Flooding
from securevfl.protocols.sums.encryption import Encryption


class Approximate(HomomorphicConformance):
    def check(self, protocol, values, result):
        """Within the documented bound, plus ten standard deviations of flooding where there is some."""
        assert result.dtype == np.float64
        assert result.shape == np.shape(values[0])
        tolerance = protocol.error_bound + 10 * protocol.flooding_std
        np.testing.assert_allclose(result, np.sum(values, axis=0), rtol=0, atol=tolerance)


class TestOutsideRoles(Approximate):
    def make(self, workers):
        return CKKSSum(workers=workers)


class TestFloodedWorkerRoles(Approximate):
    def make(self, workers):
        flooding = Flooding(bits=10, decryptions=1000, values=20)
        return CKKSSum(workers=workers, key_holder=0, aggregator=1, announce=True, flooding=flooding)


class TestOnAGrid(HomomorphicConformance):
    def make(self, workers):
        return CKKSSum(workers=workers, grid_bits=20)

    def check(self, protocol, values, result):
        """Exactly the sum of the rounded inputs: no trace of the error, which depends on the key."""
        assert result.dtype == np.float64
        assert np.array_equal(result, np.sum([np.rint(value * 2**20) for value in values], axis=0) / 2**20)


def test_a_grid_must_be_coarser_than_the_error():
    protocol = CKKSSum(workers=16, grid_bits=20)
    draw = np.random.default_rng(1)
    values = [draw.uniform(-protocol.max_abs, protocol.max_abs, 4096) for _ in range(16)]
    expected = np.sum([np.rint(value * 2**20) for value in values], axis=0) / 2**20
    assert np.array_equal(protocol.sum(values), expected)
    for workers, bits in ((16, 24), (1024, 20)):
        with pytest.raises(InputError, match="finer than the error"):
            CKKSSum(workers=workers, grid_bits=bits)


@pytest.mark.parametrize(("workers", "scale_bits"), [(2, 40), (16, 40), (3, 30), (3, 50)])
def test_error_stays_below_the_bound_over_the_whole_range(workers, scale_bits):
    protocol = CKKSSum(workers=workers, scale_bits=scale_bits)
    draw = np.random.default_rng(workers)
    top = np.nextafter(protocol.max_abs, 0)
    values = [draw.uniform(-top, top, 4096) for _ in range(workers)]
    error = protocol.sum(values) - np.sum(values, axis=0)
    assert np.abs(error).max() < protocol.error_bound
    for sign in (1, -1):
        values = [np.full(4096, sign * top)] * workers
        error = protocol.sum(values) - sign * top * workers
        assert np.abs(error).max() < protocol.error_bound


def test_error_is_as_small_as_derived():
    """The bound takes ten standard deviations; the observed spread of the noise must match its derivation."""
    protocol = CKKSSum(workers=8)
    error = protocol.sum([np.zeros(20 * 4096)] * 8) * protocol.parameters.scale
    complex_std = np.sqrt(8192 * 8 * (1 + 2 * 8192 / 3) / 12)
    # Slots are real parts: half the variance. 81920 values in 20 independent ciphertexts; the secret key's
    # weight varies by 2 %, so 10 % is more than five standard errors.
    assert abs(error.std() / (complex_std / np.sqrt(2)) - 1) < 0.1


def test_ranges_are_checked_before_encryption():
    protocol = CKKSSum(workers=4)
    assert protocol.max_abs == 2**16
    for bad in (2.0**16, -(2.0**16), np.nan, np.inf, 1e300):
        with pytest.raises(EncodingError, match="clip"):
            protocol.encode(np.array([0.0, bad]))
    for wrong in (np.array([1], np.uint64), np.array(["a"]), np.array([1j])):
        with pytest.raises(EncodingError):
            protocol.encode(wrong)


def test_the_total_is_not_announced_without_flooding():
    with pytest.raises(InputError, match="flooding"):
        CKKSSum(workers=3, announce=True)
    assert CKKSSum(workers=3).receivers == (KEY_HOLDER,)


def test_flooding_noise_is_as_computed():
    flooding = Flooding(bits=12, decryptions=4, values=20_000)
    protocol = CKKSSum(workers=3, announce=True, flooding=flooding)
    expected = protocol.error_bound * np.sqrt(4 * 20_000) * 2**12 / np.sqrt(2 * np.pi)
    assert expected <= protocol.flooding_std < 1.01 * expected
    total = protocol.sum([np.full(20_000, 2.5)] * 3)
    z = (total - 7.5) / protocol.flooding_std
    # Standard error of a standard deviation from 20000 values is 0.5 %; 3 % is six of them, P < 1e-8.
    assert abs(z.std() - 1) < 0.03
    assert stats.kstest(z, "norm").pvalue > 1e-7


def test_all_receivers_get_the_same_flooded_total():
    protocol = CKKSSum(workers=3, announce=True, flooding=Flooding(bits=12, decryptions=1, values=5))
    nodes, _ = ready(protocol)
    machines = {a: node.round(np.zeros(5) if a >= 0 else None, round=0) for a, node in nodes.items()}
    driver = Driver(machines)
    driver.start()
    driver.run()
    results = [machines[address].result() for address in protocol.receivers]
    assert all(np.array_equal(results[0], result) for result in results)
    assert np.any(results[0] != 0)


def test_flooding_limits_are_enforced():
    protocol = CKKSSum(workers=3, announce=True, flooding=Flooding(bits=5, decryptions=2, values=5))
    nodes, _ = ready(protocol)
    for number in range(2):
        run_round(nodes, [np.zeros(5)] * 3, round=number)
    with pytest.raises(ProtocolError, match="new key"):
        nodes[KEY_HOLDER].round(None, round=2)
    with pytest.raises(ProtocolError, match="5 values"):
        protocol.sum([np.zeros(6)] * 3)


def test_impossible_flooding_is_refused():
    with pytest.raises(InputError, match="BFVSum"):
        CKKSSum(workers=8, announce=True, flooding=Flooding(bits=40, decryptions=100, values=4096))
    for wrong in ({"bits": 0}, {"decryptions": 0}, {"values": -1}):
        with pytest.raises(InputError):
            Flooding(**{"bits": 10, "decryptions": 10, "values": 10, **wrong})


def test_limits():
    for wrong in (
        {"workers": 1025},
        {"scale_bits": 20},
        {"scale_bits": 60},
        {"key_holder": 1, "aggregator": 1},
    ):
        with pytest.raises(InputError):
            CKKSSum(**{"workers": 3, **wrong})


def test_nobody_else_decrypts():
    protocol = CKKSSum(workers=3)
    nodes, _ = ready(protocol)
    ciphertext = nodes[0].encryption.encrypt(np.full(10, 5.0))[0]
    for address, node in nodes.items():
        assert node.encryption.is_private == (address == KEY_HOLDER)
    with pytest.raises(ProtocolError):
        nodes[1].encryption.decrypt(nodes[1].encryption.load(ciphertext))
    own = Encryption.generate(protocol.parameters)
    garbage = own.decrypt(own.load(ciphertext))
    # Uniform over a range of 2^19: one value in 260,000 comes near by chance, three of ten with P < 1e-14.
    assert (np.abs(garbage[:10] - 5) < 1).sum() < 3


def test_a_ciphertext_of_another_scale_is_refused():
    other = CKKSSum(workers=3, scale_bits=41)
    mine = CKKSSum(workers=3)
    ciphertext = ready(other)[0][0].encryption.encrypt(np.zeros(4))[0]
    with pytest.raises(ProtocolError):
        ready(mine)[0][0].encryption.load(ciphertext)


def test_hostile_bytes_raise_and_never_crash():
    run_fuzz("ckks", "CKKSSum", "CKKSSum(workers=3).parameters")
