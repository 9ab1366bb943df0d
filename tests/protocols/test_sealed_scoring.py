"""Scores are opened of agreed records alone: lies about them, and what each lie gets its author."""

import numpy as np
import pytest
from sealed_federation import Federation

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.contract import DEALER, Envelope
from securevfl.protocols.driver import drive
from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.sealed import dealer as dealing
from securevfl.protocols.sealed import scoring
from securevfl.protocols.sealed.protocol import MaskedScores, ScoreDeal, expand

SCORES = FixedPoint(bits=64, fraction_bits=32)
A, B = b"agreement A", b"agreement B"


def open_scores(
    federation, values, agreed, *, records=None, number=0, dealt=A, spoil=lambda envelope: envelope
):
    """All machines, driven with whatever each member was told; `spoil` changes what travels to the holder."""
    members = len(values)
    records = records or [b"rows"] * members
    machines = [
        party.score(values[m], round=number, agreed=agreed[m], records=records[m])
        for m, party in enumerate(federation.parties)
    ]
    waiting = federation.dealer.deal_scores(round=number, count=len(values[0]), agreed=dealt)
    seen = []
    for machine in machines:
        machine.start()
    while waiting:
        envelope = spoil(waiting.pop(0))
        seen.append(envelope)
        waiting += machines[envelope.receiver].receive(envelope)
    return machines, seen


def seen_by_holder(seen):
    """What a label holder that skips its own checks makes of its messages: the others' scores together."""
    total = 0
    for envelope in seen:
        if envelope.receiver == 0 and isinstance(envelope.message, ScoreDeal):
            total = total - envelope.message.words
        if envelope.receiver == 0 and isinstance(envelope.message, MaskedScores):
            total = total + envelope.message.words
    return total


class Reckless(scoring.ScoreMachine):
    """A label holder that checks nothing."""

    def _advance(self):
        return [] if self.address == self._holder else super()._advance()


def two_faced(monkeypatch, federation, number):
    """Member 1 scores other people than member 2, each by the agreement that it was shown."""
    values = [np.zeros((1, 1)), np.full((1, 1), 0.25), np.full((1, 1), 4.0)]
    monkeypatch.setattr("securevfl.protocols.sealed.party.ScoreMachine", Reckless)
    _, seen = open_scores(federation, values, [A, A, B], number=number)
    return int(seen_by_holder(seen)[0, 0])


def test_scores_by_two_agreements_add_up_to_noise(monkeypatch):
    """A label holder that showed members different records learns nothing at all: 512 words are uniform."""
    federation = Federation(3)
    federation.setup()
    words = [two_faced(monkeypatch, federation, number) for number in range(512)]
    assert not any(abs(word - (1 << 64) * (word >> 63)) < 64 << 32 for word in words)
    ones = np.array([[word >> bit & 1 for bit in range(64)] for word in words]).sum(axis=0)
    # 64 binomials of 512 at 1/2: standard deviation 11.3; 5.5 of them are exceeded once in 400,000 tests.
    assert np.abs(ones - 256).max() < 63


def test_without_the_agreement_in_the_masks_the_same_lie_opens_a_sum_of_two_peoples_scores(monkeypatch):
    for module in (scoring, dealing):
        monkeypatch.setattr(module, "score_mask", lambda seed, agreed, shape: expand(seed, "score", shape))
    federation = Federation(3)
    federation.setup()
    assert two_faced(monkeypatch, federation, 0) == round(4.25 * 2**32)


def told(m, other, usual):
    return [usual if each != m else other for each in range(3)]


@pytest.mark.parametrize("liar", [1, 2])
@pytest.mark.parametrize("lie", ["records", "agreement", "word", "tag", "cut", "anothers", "earlier"])
def test_a_member_that_brings_other_scores_is_named_and_nothing_opens(liar, lie):
    federation = Federation(3)
    federation.setup()
    values = [np.arange(4.0).reshape(4, 1) * (m + 1) for m in range(3)]
    first, seen = open_scores(federation, values, [A] * 3)
    kept = {e.sender: e.message for e in seen if isinstance(e.message, MaskedScores)}

    def spoil(envelope):
        sent = envelope.message
        if not isinstance(sent, MaskedScores) or envelope.sender != liar:
            return envelope
        words, tag = sent.words.copy(), sent.tag
        if lie == "word":
            words[2] += np.uint64(1)
        if lie == "tag":
            tag = bytes([tag[0] ^ 1]) + tag[1:]
        if lie == "cut":
            tag = tag[:16]
        if lie == "earlier":
            words, tag = kept[liar].words, kept[liar].tag
        if lie == "anothers":
            words, tag = kept[3 - liar].words, kept[3 - liar].tag
        return Envelope(liar, 0, MaskedScores(round=sent.round, words=words, tag=tag))

    other = lie == "records"
    with pytest.raises(Deviation, match="other records, or by another agreement") as found:
        open_scores(
            federation,
            values,
            told(liar, B, A) if lie == "agreement" else [A] * 3,
            records=told(liar, b"other rows", b"rows") if other else None,
            number=1,
            spoil=spoil,
        )
    assert found.value.member == liar
    assert np.allclose(first[0].result(), sum(values))


def test_a_label_holder_that_takes_other_records_opens_nothing():
    federation = Federation(2)
    federation.setup()
    with pytest.raises(Deviation):
        open_scores(federation, [np.ones((3, 1))] * 2, [A, A], records=[b"mine", b"theirs"])


@pytest.mark.parametrize("members", [2, 3])
def test_any_order_of_delivery_opens_the_same(members):
    values = [np.full((2, 1), m + 0.5) for m in range(members)]
    for order in range(12):
        federation = Federation(members)
        federation.setup()
        random = np.random.default_rng(order)
        machines = [p.score(values[m], round=0, agreed=A) for m, p in enumerate(federation.parties)]
        drive(
            machines,
            federation.dealer.deal_scores(round=0, count=2, agreed=A),
            choose=lambda waiting, random=random: int(random.integers(len(waiting))),
        )
        assert np.allclose(machines[0].result(), sum(values))


def test_a_dealer_cannot_pass_short_keys_and_nobody_deals_twice():
    federation = Federation(2)
    federation.setup()
    machine = federation.parties[0].score(np.ones((1, 1)), round=0, agreed=A)
    machine.start()
    words = np.zeros((1, 1), np.uint64)
    with pytest.raises(ProtocolError, match="wrong length"):
        machine.receive(Envelope(DEALER, 0, ScoreDeal(round=0, seed=b"", words=words, keys=b"")))
    good = ScoreDeal(round=0, seed=b"", words=words, keys=bytes(16))
    machine.receive(Envelope(DEALER, 0, good))
    with pytest.raises(ProtocolError, match="out of turn"):
        machine.receive(Envelope(DEALER, 0, good))
