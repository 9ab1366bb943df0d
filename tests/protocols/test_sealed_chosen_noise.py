"""What the other's honesty carries: a member that chooses the noise of its ciphertexts reads every label."""

import struct

import numpy as np
import pytest
from test_sealed_encrypted import Pair

from securevfl.protocols.sealed import cipher, encrypted
from securevfl.protocols.sealed.cipher import DEGREE, shared_cipher
from securevfl.protocols.sealed.residues import T

WINDOW = 21
"""Low bits of a mask that the noise moves to where rounding shows them: as many as a residual has."""
STEPS = 32


def opened(data):
    """The words of a ciphertext: parts, primes, coefficients."""
    found = cipher.load(shared_cipher().seal.Ciphertext(), shared_cipher().context, data)
    words = found.dyn_array()
    return np.array([words.at(i) for i in range(words.size())], np.uint64).reshape(2, -1, DEGREE)


def written(words):
    """The ciphertext of words."""
    context, primes = shared_cipher().context, words.shape[1]
    level = context.first_parms_id() if primes > 1 else context.last_parms_id()
    body = struct.pack("<4Q", *level) + struct.pack("<BQQQdQ", 0, 2, DEGREE, primes, 1.0, 1)
    body += cipher._array(words.reshape(-1))
    return cipher._header(len(body)) + body


def noisy(keys, noise):
    """An encryption of nothing with so much noise on its constant coefficient: its receiver cannot notice."""
    words = opened(keys.encrypt(shared_cipher().plain(np.zeros(1, np.uint64))))
    for place, prime in enumerate(shared_cipher().primes):
        words[0, place, 0] = (int(words[0, place, 0]) + noise) % prime
    return written(words)


def remainders(keys, data, count):
    """What rounding took from each coefficient of an answer: by decrypting it again, moved a little."""
    words, prime = opened(data), shared_cipher().primes[0]
    first, found = keys.coefficients(data, range(count)), np.zeros(count)
    for turn in range(STEPS, 0, -1):
        moved = words.copy()
        moved[0] = (moved[0] + np.uint64(turn * prime // (STEPS * T))) % np.uint64(prime)
        found[keys.coefficients(written(moved), range(count)) != first] = turn
    return (0.5 - found / STEPS) % 1


@pytest.mark.parametrize("chosen", [False, True], ids=["honest", "chosen"])
def test_chosen_noise_reads_labels(monkeypatch, chosen):
    """B's rows carry noise 2^109, which turns the low bits of A's mask into what the flooding does not cover.

    At the first iteration residuals are 1/2 or -1/2. Honest noise is 2^70 times smaller and tells nothing.
    """
    pair = Pair((1, 1), records=300)
    pair.scores = [np.zeros((300, 1))] * 2
    unit = int(np.prod(np.array(shared_cipher().primes, object))) // T
    if chosen:
        liar = pair.parties[1]
        monkeypatch.setattr(liar, "encrypted", lambda number: noisy(liar.keys, unit >> WINDOW))
    pair.setup()
    pools = [party.prepare([(0, None)]) for party in pair.parties]
    for machine in pools:
        machine.start()
    offer = pools[0].proceed()[0]
    (answer,) = encrypted.unpack(offer.message.product, 1)
    low_bits = remainders(pair.parties[1].keys, answer, 300) * 2**WINDOW
    pools[0].receive(pools[1].receive(offer)[0])
    rounds = pair.machines(0)
    factors = [machine.start()[0] for machine in rounds]
    blinded = rounds[0].receive(factors[1])[0].message.words
    rounds[1].receive(factors[0])
    known = (T - (blinded + rounds[1]._share) % np.uint64(T)).astype(np.int64)[:, 0]
    residual = (low_bits - known + 2 ** (WINDOW - 1)) % 2**WINDOW - 2 ** (WINDOW - 1)
    right = np.mean((residual < 0) == pair.labels[:, 0])
    assert right > 0.99 if chosen else 0.35 < right < 0.65
