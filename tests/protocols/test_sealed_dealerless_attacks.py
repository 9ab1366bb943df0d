"""Attacks on members without a dealer: lengths, reuse, masks that meet, keys, what two can do together."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from scipy.stats import chi2
from sealed_federation import Federation
from test_sealed_encrypted import Pair

from securevfl.errors import ProtocolError
from securevfl.protocols.sealed import cipher, residues, third
from securevfl.protocols.sealed.cipher import DEGREE, Keys, Receiver, shared_cipher
from securevfl.protocols.sealed.messages import CipherKey
from securevfl.protocols.sealed.protocol import SealedProtocol, Share
from securevfl.protocols.stream import KeyStream

RESIDUAL = 2.0**-28


# -- what anybody can see of messages -----------------------------------------------------------------------


def forms(transcript):
    """Who said what to whom, in which order; and how long each was."""
    said = [(each.sender, each.receiver, each.message.kind) for each in transcript]
    values = [value for each in transcript for value in vars(each.message).values()]
    return said, [len(v) if isinstance(v, bytes) else np.size(v) for v in values]


@pytest.mark.parametrize("members", [2, 3])
def test_lengths_and_order_tell_nothing_of_rows_scores_or_labels(members):
    """Ciphertexts are compressed when they are written: of zeros they are as long as of anything else.

    Keys and answers vary by some hundred of 131,000 bytes, as uniform words do.
    """
    found = []
    for extreme in (False, True):
        made = Pair((3, 2), records=600) if members == 2 else Federation(3, records=600, dealing="third")
        if extreme:
            for member, party in enumerate(made.parties):
                party.operand[:] = 0
                if members == 2:
                    party.packed[:] = 0
                made.scores[member][:] = 0
            made.labels[:] = 1
        if members == 2:
            made.setup(0, 1)
        else:
            made.setup()
        made.totals(0)
        found.append(forms(made.transcript))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=0.005, abs=0)


# -- correlations of something else -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(SealedProtocol)])
def test_no_part_of_a_configuration_can_change_under_a_correlation(name):
    """Noise, clips, batches, tables, whatever is added to the configuration later: all of it is bound."""
    party = Pair().setup().parties[0]
    before = party.binding(None)
    other = copy.copy(party.protocol)
    object.__setattr__(other, name, "something else")
    party.protocol = other
    party.joined = {}
    assert name in ("widths", "fewer") or party.binding(None) != before
    if name == "widths":
        party.told = 99
        assert party.binding(None) != before


# -- masks that meet ----------------------------------------------------------------------------------------


def looks_uniform(words):
    """Chi-square of the top and bottom byte; a false alarm once in 10^12."""
    table = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    for byte in (table[:, 0], table[:, -1]):
        counts = np.bincount(byte, minlength=256)
        if chi2.sf(((counts - len(byte) / 256) ** 2).sum() / (len(byte) / 256), 255) < 1e-12:
            return False
    return True


def met(member, monkeypatch, flaw=False):
    """Pairs of vectors in a view of two rounds in two sessions with the same data that share a mask."""
    if flaw:
        monkeypatch.setattr(
            third.ThirdRound,
            "_expand",
            lambda self, other, purpose, shape, dtype=np.uint64: third.expand(
                self._seeds[other], purpose, shape, dtype
            ),
        )
    made = Federation(4, records=6000, width=2, dealing="third")
    for _ in range(2):
        made.setup()
        for number in range(2):
            made.totals(number)
    seen = [
        line
        for each in made.transcript
        if each.receiver == member
        for value in vars(each.message).values()
        if isinstance(value, np.ndarray) and value.dtype == np.uint64 and value.size >= 6000
        for line in (value.reshape(-1, 6000) if value.size > 6000 else [value.reshape(-1)])
    ]
    assert len(seen) >= 8 and all(map(looks_uniform, seen))
    return [
        (i, j)
        for (i, one), (j, two) in itertools.combinations(enumerate(seen), 2)
        if not (looks_uniform(one - two) and looks_uniform(one + two))
    ]


@pytest.mark.parametrize("member", [0, 3])
def test_no_two_vectors_that_a_member_sees_share_a_mask(member, monkeypatch):
    """Of four members: one who holds a share, and one who only totals, over rounds and sessions."""
    assert not met(member, monkeypatch)


def test_masks_that_serve_two_rounds_meet(monkeypatch):
    assert met(3, monkeypatch, flaw=True)


# -- keys ---------------------------------------------------------------------------------------------------


def special():
    """The prime that every fresh ciphertext is divided by."""
    return shared_cipher().seal.CoeffModulus.Create(DEGREE, list(cipher.PRIME_BITS))[-1].value()


def key_of(keys, second):
    """A public key whose second half is a constant."""
    found = cipher.load(shared_cipher().seal.PublicKey(), shared_cipher().context, keys.public)
    words = found.data().dyn_array()
    words = np.array([words.at(i) for i in range(words.size())], np.uint64).reshape(2, 4, DEGREE)
    for place, prime in enumerate([*shared_cipher().primes, special()]):
        words[1, place] = second % prime
    level = found.data().parms_id()
    body = cipher.struct.pack("<4Q", *level) + cipher.struct.pack("<BQQQdQ", 1, 2, DEGREE, 4, 1.0, 1)
    body += cipher._array(words.reshape(-1))
    return cipher._header(len(body)) + body


@pytest.mark.parametrize("second", [0, 1])
def test_a_key_that_refreshes_nothing_is_refused(second):
    """Under it a fresh encryption of zero would leave c1 as it was, and the quotient is the mask."""
    pair = Pair()
    (theirs,) = (e for e in pair.parties[0].setup().start() if isinstance(e.message, CipherKey))
    mine = pair.parties[1].setup()
    mine.start()
    key = dataclasses.replace(theirs.message, key=key_of(pair.parties[0].keys, second))
    with pytest.raises(ProtocolError, match="no key"):
        mine.receive(dataclasses.replace(theirs, message=key))


@pytest.mark.parametrize("chosen", [False, True], ids=["honest", "chosen"])
def test_a_chosen_key_reads_the_others_mask(chosen):
    """What honesty carries: a key may look like one and refresh with small numbers alone.

    Its holder sends "rows" whose second half is 2^100; what comes back is 2^100 V and something small.
    """
    shared, stream = shared_cipher(), KeyStream.from_os_entropy()
    keys = Keys(shared)
    receiver = Receiver(shared, key_of(keys, special()) if chosen else keys.public)
    secret = residues.draw(stream, 4)
    answer = shared.seal.Ciphertext()
    receiver.encryptor.encrypt_zero(answer)  # c1 = u + e under the chosen key: a few units
    words, modulus = answer.dyn_array(), int(np.prod(np.array(shared.primes, object)))
    read = []
    for place, word in enumerate(secret):
        value = int(word) << 100
        residual = [(value + words.at((3 + i) * DEGREE + place)) % p for i, p in enumerate(shared.primes)]
        parts = [
            r * (modulus // p) * pow(modulus // p, -1, p)
            for r, p in zip(residual, shared.primes, strict=True)
        ]
        whole = sum(parts) % modulus
        read.append((whole + (1 << 99)) >> 100)
    assert (read == [int(word) for word in secret]) is chosen


# -- two together -------------------------------------------------------------------------------------------


def test_two_of_three_that_pool_what_they_see_read_every_label():
    """Why collusion is 1: D knows V, S has r_H - V and its own share, and together they have the residual."""
    made = Federation(3, records=40, scale=0.5, dealing="third")
    made.setup()
    made.totals(0)
    shares = {
        (e.receiver, e.sender): e.message.blinded for e in made.transcript if isinstance(e.message, Share)
    }
    dealer, shape = made.parties[2], (40, 1)
    total = np.zeros(shape, np.uint64)
    for member, holder in ((1, 0), (0, 1)):
        blind = third.expand(dealer.seeds[holder], f"blind/{member}/{holder}/0", shape)
        total += shares[member, holder] + blind
    residual = total.view(np.int64) * RESIDUAL
    assert np.array_equal(residual < 0, made.labels == 1)
    alone = shares[1, 0].view(np.int64) * RESIDUAL
    assert np.abs(alone).max() > 2**20, "S alone has uniform words"
