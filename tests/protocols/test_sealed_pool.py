"""Scores under masks that were dealt ahead: exact, once, of the same people, by whom they claim to be."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.contract import DEALER
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed import SealedProtocol, logistic_series
from securevfl.protocols.sealed.pool import PairPool, ScorePool, deal_pool, opened
from securevfl.protocols.sealed.protocol import SCORES, MaskedScores

COUNT = 64
ROWS = np.array([7, 3, 9])


def protocol_of(members: int) -> SealedProtocol:
    return SealedProtocol(
        widths=(0,) * members,
        clips=(1.0,) * members,
        records=1,
        batch=1,
        outputs=2,
        static=(False,) * members,
        series=logistic_series(),
        label_holder=0,
        share_stds=((0,) * members,) * members,
    )


class Members:
    """Everybody's masks of one pool that a dealer has dealt."""

    def __init__(self, members: int = 3, agreed: tuple[bytes, ...] = ()) -> None:
        self.protocol = protocol_of(members)
        said = agreed or (b"agreed",) * (members + 1)
        dealt = deal_pool(self.protocol, round=4, agreed=said[-1], count=COUNT)
        assert {each.sender for each in dealt} == {DEALER}
        self.pools = {
            each.receiver: ScorePool(
                self.protocol, each.receiver, each.message, agreed=said[each.receiver], count=COUNT
            )
            for each in dealt
        }
        self.holder = self.pools[0]

    def answer(
        self, member: int, values: Ring, *, start: int = 0, name: str = "a", rows: Ring = ROWS
    ) -> MaskedScores:
        machine = self.pools[member].answer(values, round=1, start=start, name=name, rows=rows)
        (sent,) = machine.start()
        assert (sent.receiver, machine.done) == (0, True)
        return sent.message

    def total(self, answers: dict[int, MaskedScores], own: Ring, *, start: int = 0, name: str = "a") -> Ring:
        total = own - self.holder.masks(start, name=name, rows=ROWS)
        for member, each in answers.items():
            total = total + self.holder.verify(member, each, start=start, name=name, rows=ROWS)
        return total


class Pairs(Members):
    """Everybody's masks, made of seeds that every two share."""

    def __init__(self, members: int = 3, agreed: tuple[bytes, ...] = ()) -> None:
        self.protocol = protocol_of(members)
        said = agreed or (b"agreed",) * members
        seeds = {frozenset(pair): os.urandom(32) for pair in itertools.combinations(range(members), 2)}
        shared = {
            m: {other: seeds[frozenset((m, other))] for other in range(members) if other != m}
            for m in range(members)
        }
        self.pools = {m: PairPool(self.protocol, m, shared[m], agreed=said[m]) for m in range(members)}
        self.holder = self.pools[0]


@pytest.fixture(params=[Members, Pairs], ids=["dealt", "without a dealer"])
def made(request) -> type[Members]:
    return request.param


def words(seed: int, members: int) -> list[Ring]:
    values = np.random.default_rng(seed).normal(0, 3, (members, len(ROWS), 2))
    return [SCORES.encode(each, members) for each in values]


@pytest.mark.parametrize("members", [2, 3, 5])
def test_sums_are_exact_and_the_same_when_a_request_is_repeated(made, members):
    everybody, values = made(members), words(0, members)
    for start in (0, 3, 20):
        answers = {m: everybody.answer(m, values[m], start=start) for m in range(1, members)}
        found = everybody.total(answers, values[0], start=start)
        assert (found == np.sum(values, axis=0, dtype=np.uint64)).all()
        np.testing.assert_array_equal(opened(found), SCORES.decode(np.sum(values, axis=0, dtype=np.uint64)))


def test_a_place_serves_once(made):
    everybody, values = made(), words(1, 3)
    everybody.answer(1, values[1], start=5)
    end = everybody.pools[1].next + everybody.pools[1].left
    for start in (5, 7, 0, end - 2, -1):
        with pytest.raises(ProtocolError, match="masks"):
            everybody.answer(1, values[1], start=start)
    everybody.answer(1, values[1], start=8)
    assert everybody.pools[1].left == end - 11


def test_a_label_holder_that_asks_two_parties_for_different_people_gets_noise(made):
    """Without what the parties add, the difference of two people's scores at one party would be read off."""
    seen = []
    for seed in range(200):
        everybody, values = made(), words(seed, 3)
        first = everybody.answer(1, values[1], rows=ROWS)
        second = everybody.answer(2, values[2], rows=np.array([7, 3, 8]))
        total = values[0] - everybody.holder.masks(0, name="a", rows=ROWS) + first.words + second.words
        assert (total != np.sum(values, axis=0, dtype=np.uint64)).all()
        seen.append(total)
    shares = np.array(seen).ravel() / 2.0**64
    # Of n uniform words the Kolmogorov distance exceeds 3.3 / sqrt(n) with probability 7e-10.
    distance = np.abs(np.sort(shares) - np.arange(len(shares)) / len(shares)).max()
    assert distance < 3.3 / np.sqrt(len(shares))


def test_other_names_and_agreements_do_not_cancel_either(made):
    values = words(2, 3)
    for agreed in itertools.product((b"one", b"other"), repeat=2):
        everybody = made(agreed=(b"one", *agreed, b"one"))
        answers = {m: everybody.answer(m, values[m]) for m in (1, 2)}
        raw = values[0] - everybody.holder.masks(0, name="a", rows=ROWS) + answers[1].words + answers[2].words
        same = agreed == (b"one", b"one")
        assert (raw == np.sum(values, axis=0, dtype=np.uint64)).all() == same
    everybody = made()
    raw = everybody.answer(1, values[1], name="a").words + everybody.answer(2, values[2], name="b").words
    own = values[0] - everybody.holder.masks(0, name="a", rows=ROWS)
    assert (own + raw != np.sum(values, axis=0, dtype=np.uint64)).all()


def test_an_answer_that_was_changed_or_replayed_is_refused_and_its_sender_named(made):
    everybody, values = made(), words(3, 3)
    honest = everybody.answer(1, values[1], start=0, name="first")
    later = {"start": 10, "name": "second", "rows": ROWS}
    moved = honest.words.copy()
    moved[0, 0] += np.uint64(1)
    cases = {
        "replayed": (honest, later),
        "other records": (honest, {"start": 0, "name": "first", "rows": ROWS[::-1].copy()}),
        "changed": (replace(honest, words=moved), {"start": 0, "name": "first", "rows": ROWS}),
        "other round": (replace(honest, round=2), {"start": 0, "name": "first", "rows": ROWS}),
        "no tag": (replace(honest, tag=b""), {"start": 0, "name": "first", "rows": ROWS}),
    }
    for message, said in cases.values():
        with pytest.raises(Deviation, match="member 1"):
            everybody.holder.verify(1, message, **said)
    with pytest.raises(Deviation, match="member 2"):  # another's answer
        everybody.holder.verify(2, honest, start=0, name="first", rows=ROWS)
    with pytest.raises(ProtocolError, match="shape"):
        everybody.holder.verify(1, replace(honest, words=moved[:2]), start=0, name="first", rows=ROWS)
    everybody.holder.verify(1, honest, start=0, name="first", rows=ROWS)


def test_a_sum_beyond_reason_is_refused():
    with pytest.raises(Deviation, match="not plausible"):
        opened(SCORES.encode(np.array([[1.0], [5000.0]])))


def test_what_the_label_holder_sees_of_one_party_is_uniform(made):
    """Two parties whose parts differ, the sum does not: the words of either are the same to the eye."""
    first, second = [], []
    for _ in range(300):
        everybody = made()
        for part, seen in ((5.0, first), (-5.0, second)):
            start = everybody.pools[1].next
            answer = everybody.answer(1, SCORES.encode(np.full((3, 2), part), 3), start=start)
            seen.append(answer.words)
    for seen in (first, second):
        shares = np.array(seen).ravel() / 2.0**64
        distance = np.abs(np.sort(shares) - np.arange(len(shares)) / len(shares)).max()
        assert distance < 3.3 / np.sqrt(len(shares))  # as above


def test_a_repeated_request_is_masked_anew_without_a_dealer():
    """Else a party whose values have changed meanwhile would show by how much."""
    everybody, values = Pairs(), words(4, 3)
    first = everybody.answer(1, values[1], start=0)
    again = everybody.answer(1, values[1], start=3)
    assert (first.words != again.words).all()


def test_one_party_cannot_take_the_masks_off_anothers_answer_without_a_dealer():
    """Whoever is not asked knows no seed of the pair: its own masks take nothing off."""
    everybody, values = Pairs(4), words(5, 4)
    sent = everybody.answer(1, values[1])
    spy = everybody.pools[3]
    for other, seed in spy._seeds.items():
        known = PairPool(everybody.protocol, 1, {0: seed, 2: seed, 3: seed}, agreed=b"agreed")
        assert (sent.words - known.masks(0, name="a", rows=ROWS) != values[1]).all(), other
