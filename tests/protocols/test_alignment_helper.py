"""Alignment with a helper: what it sees, and how it is caught when it lies."""

import hashlib
import math

import numpy as np
import pytest

from securevfl.errors import ProtocolError
from securevfl.protocols import Envelope, PrivateAlignment, drive
from securevfl.protocols.alignment import helper as helping
from securevfl.protocols.alignment.helper import HelpedMachine, HelperMachine
from securevfl.protocols.alignment.keyed import COPIES, DUMMIES, KeyedList, as_values
from securevfl.protocols.alignment.messages import AlignHello, AlignMarks, AlignMore, AlignPiece
from securevfl.protocols.contract import HELPER
from securevfl.protocols.keys import SIGNATURE_BYTES, Authenticator

SETS = [[f"p{i}" for i in range(30)], [f"p{i}" for i in range(20, 60)]]
HELPED = PrivateAlignment(parties=2, kind="helper")


def lying(change):
    """A helper that compares as it should and then changes marks; `change(party, marks)`."""

    counts = {i: COPIES * len(ids) + 2 * DUMMIES for i, ids in enumerate(SETS)}

    class Lies(HelperMachine):
        def _send(self, receiver, message):
            if isinstance(message, AlignMarks):
                marks = np.unpackbits(np.frombuffer(message.bits, np.uint8), count=counts[receiver])
                bits = np.packbits(change(receiver, marks.astype(bool))).tobytes()
                message = AlignMarks(round=0, bits=bits)
            super()._send(receiver, message)

    return Lies(HELPER, others=[0, 1], about=HELPED._about(), most=1000)


def run_with(helper):
    parties = [HELPED.machine(i, ids) for i, ids in enumerate(SETS)]
    return parties, drive([*parties, helper])


def flipped(marks, places):
    marks[places] = ~marks[places]
    return marks


DRAW = np.random.default_rng(11)
LIES = {
    "nothing is common": lambda party, marks: marks & False,
    "everything is common": lambda party, marks: marks | True,
    "one value is not": lambda party, marks: flipped(marks, DRAW.choice(np.flatnonzero(marks), 1)),
    "three values are not": lambda party, marks: flipped(marks, DRAW.choice(np.flatnonzero(marks), 3, False)),
    "three more are": lambda party, marks: flipped(marks, DRAW.choice(np.flatnonzero(~marks), 3, False)),
    "half of all": lambda party, marks: DRAW.random(len(marks)) < 0.5,
    "the other way round": lambda party, marks: ~marks,
    "to one party only": lambda party, marks: marks & False if party else marks,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_helper_that_lies_is_caught(lie):
    with pytest.raises(ProtocolError, match="withholds common records or makes some up"):
        run_with(lying(lie))


def test_an_honest_helper_is_not():
    parties, _ = run_with(lying(lambda party, marks: marks))
    assert [len(each.alignment().rows) for each in parties] == [10, 10]


def test_a_helper_that_knew_which_values_belong_together_would_be_caught_by_the_other_party():
    """It withholds one record from one party, all three values of it: the digests differ."""
    keys = []

    class Knows(KeyedList):
        def __init__(self, *args):
            super().__init__(*args)
            keys.append(self)

    def withhold(party, marks):
        if party == 0:
            mine = keys[0]
            places = np.empty(mine.count, int)
            places[np.concatenate(mine._places)] = np.arange(mine.count)
            n = len(mine._hashes)
            flipped(marks, places[[25, n + 25, 2 * n + 25]])
        return marks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("securevfl.protocols.alignment.helper.KeyedList", Knows)
        with pytest.raises(ProtocolError, match="other common records"):
            run_with(lying(withhold))


def test_the_chance_to_withhold_records_unseen():
    """It must hit all copies of k of the m common records, and nothing else, among values that look alike."""
    worst = max(
        math.comb(m, k) / math.comb(COPIES * m + DUMMIES, COPIES * k)
        for m in (*range(1, 400), 10**4, 10**6)
        for k in range(1, min(m, 40) + 1)
    )
    assert worst == pytest.approx(4.6e-6, rel=0.02)
    everything = max(1 / math.comb(COPIES * m + DUMMIES, DUMMIES) for m in range(1, 2000))
    assert everything < 5e-6


def test_the_helper_sees_sizes_and_nothing_that_it_could_try_out():
    _, sent = run_with(HELPED.machine(HELPER))
    seen = [each.message for each in sent if each.receiver == HELPER]
    assert {message.kind for message in seen} == {"align-hello", "align-piece"}
    hellos = [message for message in seen if isinstance(message, AlignHello)]
    assert [(each.count - 2 * DUMMIES) // COPIES for each in hellos] == [30, 40]
    assert all(not any(each.nonce) and not each.public for each in hellos)  # nothing of the key agreement
    values = {
        m.values[i : i + 16] for m in seen if isinstance(m, AlignPiece) for i in range(0, len(m.values), 16)
    }
    for text in {*SETS[0], *SETS[1]}:
        raw = text.encode()
        known = [b"", bytes(32), *(m.about for m in hellos)]
        tried = {hashlib.blake2b(raw, key=key, digest_size=16).digest() for key in known}
        assert not tried & values


@pytest.mark.parametrize("piece", [64, 1 << 16])
def test_when_a_helper_asks_for_more_tells_the_order_of_pieces_and_nothing_else(piece, monkeypatch):
    """A member that has the key, and chooses its values, times the helper: it waits for whoever is behind.

    When it asks follows from the last values of pieces alone, one comparison for 65,536 values; of lists that
    are one piece, as those of up to 21,674 IDs are, nothing.
    """
    monkeypatch.setattr(helping, "PIECE", piece)
    asked = []
    for others in (SETS[0], SETS[1], [f"q{i}" for i in range(len(SETS[1]))]):
        parties = [HELPED.machine(i, ids) for i, ids in enumerate([SETS[0], others])]
        sent = drive([*parties, HELPED.machine(HELPER)])
        order = [each.receiver for each in sent if isinstance(each.message, AlignMore)]
        ends = [
            [
                int(as_values(e.message.values)[-1, 0])
                for e in sent
                if isinstance(e.message, AlignPiece) and e.sender == i
            ]
            for i in range(2)
        ]
        last, expected, left = [-1, -1], [], [list(each) for each in ends]
        while any(left):
            party = min((i for i in range(2) if left[i]), key=lambda i: last[i])
            last[party] = left[party].pop(0)
            expected.append(party)
        assert order == expected
        asked.append(order)
    assert piece == 64 or asked == [[0, 1]] * 3
    assert 1 << 16 >= COPIES * 21_674 + 2 * DUMMIES > (1 << 16) - COPIES


def test_values_say_nothing_about_which_are_copies_or_dummies():
    """Each of the kinds of values falls everywhere in the order: mean places agree to five deviations."""
    listed = KeyedList(b"k" * 32, 0, SETS[0] * 1 + [f"q{i}" for i in range(3000)], "exact")
    values = np.concatenate(list(listed.sorted_parts()))
    assert values.tobytes() == as_values(values.tobytes()).tobytes() and len(values) == listed.count
    places = np.empty(listed.count)
    places[np.concatenate(listed._places)] = (np.arange(listed.count) + 0.5) / listed.count
    n = len(listed._hashes)
    for part in (*np.split(places[: 3 * n], 3), places[3 * n :][:DUMMIES], places[3 * n :][DUMMIES:]):
        assert abs(part.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(part))


def test_sessions_share_no_values():
    runs = [run_with(HELPED.machine(HELPER))[1] for _ in range(2)]
    seen = [
        {
            m.message.values[i : i + 16]
            for m in sent
            if isinstance(m.message, AlignPiece)
            for i in range(0, 1600, 16)
        }
        for sent in runs
    ]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("change", ["order", "twice", "short"])
def test_the_helper_refuses_lists_that_are_no_lists(change):
    parties = [HELPED.machine(i, ids) for i, ids in enumerate(SETS)]
    helper = HELPED.machine(HELPER)
    pending = [each for machine in (*parties, helper) for each in machine.start()]
    changes = {
        "order": lambda raw: raw[16:32] + raw[:16] + raw[32:],
        "twice": lambda raw: raw[:16] + raw[:16] + raw[32:],
        "short": lambda raw: raw[:-16],
    }
    match = "bytes, which is not what is due" if change == "short" else "not in order, or holds one twice"
    with pytest.raises(ProtocolError, match=match):
        while pending:
            envelope = pending.pop(0)
            if isinstance(envelope.message, AlignPiece):
                message = AlignPiece(round=0, values=changes[change](envelope.message.values))
                envelope = Envelope(envelope.sender, envelope.receiver, message)
            machine = helper if envelope.receiver == HELPER else parties[envelope.receiver]
            pending += machine.receive(envelope)


def test_nobody_brings_the_helper_more_than_it_has_announced():
    class Understates(HelpedMachine):
        def _hello(self, count, public=b"", signature=b""):
            return super()._hello(10, public, signature)

    cheat = Understates(
        0, ids=SETS[0], count=30, normalisation="exact", others=[1, HELPER], about=HELPED._about(), most=100
    )
    with pytest.raises(ProtocolError, match="bring other numbers than they announced"):
        drive([cheat, HELPED.machine(1, SETS[1]), HELPED.machine(HELPER)])


def test_copies_and_dummies_used_for_guesses_are_noticed():
    """A party has 3 n + 256 places for values; whoever puts n IDs' worth of guesses into each is caught."""

    class Guesses(KeyedList):
        def _copies(self):
            first, *_, dummies = super()._copies()
            more = [
                KeyedList(self._key, 0, [f"p{20 + 30 * k + i}" for i in range(30)], "exact") for k in (0, 1)
            ]
            yield from (first, *(each._hashes for each in more), dummies)

    honest = HELPED.machine(1, SETS[1])
    cheat = HELPED.machine(0, [f"x{i}" for i in range(30)])

    def keyed(key, address, ids, normalisation):
        return (Guesses if address == 0 else KeyedList)(key, address, ids, normalisation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("securevfl.protocols.alignment.helper.KeyedList", keyed)
        with pytest.raises(ProtocolError, match="withholds common records or makes some up"):
            drive([cheat, honest, HELPED.machine(HELPER)])


class Signs(Authenticator):
    """Signs with a secret of the parties' own, for tests."""

    def __init__(self, key):
        self.key = key

    def sign(self, statement):
        return hashlib.blake2b(statement, key=self.key, digest_size=SIGNATURE_BYTES).digest()

    def verify(self, address, statement, signature):
        if signature != self.sign(statement):
            raise ProtocolError(f"worker {address} did not sign this")


def test_keys_are_signed_where_parties_have_identities():
    def party(address, key):
        return HELPED.machine(address, SETS[address], authenticator=None if key is None else Signs(key))

    parties = [party(0, b"k"), party(1, b"k")]
    drive([*parties, HELPED.machine(HELPER)])
    assert len(parties[0].alignment().rows) == 10
    for key in (b"another", None):
        with pytest.raises(ProtocolError, match=r"did not sign this|is not signed"):
            drive([party(0, b"k"), party(1, key), HELPED.machine(HELPER)])
