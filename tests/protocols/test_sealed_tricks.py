"""Ways round the checks that somebody might try: each is the label reader or the steering word in disguise.

`test_sealed_cheats.py` has the attacks as such. Here they hide: in a later batch, in one output, beyond the
records that are projected together, in columns of another group, in test figures, behind a new session, in
what only one member is told, in words that stand for the same element, and in what a burnt session told.
"""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np
import pytest
from cheating import (
    RECORDS,
    STD,
    WIDTH,
    Liar,
    P,
    Shifting,
    caught,
    cheated_round,
    drive,
    huge_rows,
    is_burnt,
    lie,
    nothing_is_left,
    read_labels,
    run_setup,
    victims,
)
from checked_federation import CheckedFederation, one_hot
from sealed_federation import copies, unit_rows

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.messages import (
    CheckedOperand,
    CheckedShare,
    Coin,
    Commitment,
    Opening,
    Ready,
)
from securevfl.protocols.sealed.proof import coin_stream
from securevfl.protocols.sealed.series import Waves

# -- rows ---------------------------------------------------------------------------------------------------


def _zeros_but(place, value):
    """Rows as long as declared, but for one entry."""

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = claim.bound
        out[place] = value
        return out

    return rows


@pytest.mark.parametrize("outputs", [1, 3])
def test_rows_that_only_a_later_batch_would_use_end_the_session(outputs):
    """Proofs are of all records, whichever of them a round takes, and whatever it multiplies them by."""
    federation = CheckedFederation(2, records=12, outputs=outputs)
    caught(federation, 1, "longer than declared", rows=_zeros_but((0, 11), 1 << 30))


@pytest.mark.parametrize("record", [0, 46_099])
def test_one_long_row_beyond_the_records_that_are_projected_together(record):
    generator, count = np.random.default_rng(1), 46_100
    federation = CheckedFederation.of(
        [unit_rows(generator, 1, count) for _ in range(2)], np.zeros((count, 1)), clip=1.0
    )
    assert [len(claim.blocks) for claim in federation.protocol.claims] == [2, 2]

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = claim.bound
        out[:2, record] = claim.bound, 1
        return out

    caught(federation, 1, "longer than declared", rows=rows)


def test_long_rows_whose_projections_cancel_are_long():
    """Pairs of opposite rows: what signs leave of them is small in half of the cases, never in all 64."""
    federation = CheckedFederation(2, records=RECORDS, width=WIDTH, seed=4)

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0, ::2], out[0, 1::2] = 1 << 40, -(1 << 40)
        return np.where((out + secrets.operand.view(np.int64)) < 0, 0, out)

    with pytest.raises(Deviation) as found:
        run_setup(federation, 1, lie(federation, 1, rows=rows))
    assert found.value.member == 1


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", ["moved", "last", "minus", "minus in the last group", "everywhere"])
def test_columns_of_another_group(form, wide):
    """As many ones as there are groups, but not one in each; wide operands have 290 columns."""
    generator, sizes = np.random.default_rng(0), (7,) * 40 + (10,) if wide else (3, 2, 4)
    operands = [one_hot(generator, (3,), 6), one_hot(generator, sizes, 6)]
    federation = CheckedFederation.of(operands, np.zeros((6, 1)), groups=((3,), sizes))
    starts = np.cumsum((0, *sizes[:-1]))

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[starts] = 1
        if form == "moved":  # the second group's one stands in the first
            out[starts[1], 2], out[1, 2] = 0, 1
        elif form == "last":  # in the last column of all, beside the last group's own
            out[claim.width - 1, 2], out[starts[0], 2] = 1, 0
        elif form.startswith("minus"):  # adds up to one; wide operands: beyond 255 columns
            first = 0 if form == "minus" else starts[-1]
            out[first, 2], out[first + 1, 2] = 2, -1
        else:
            out[: claim.width, 2] = 1
        return out

    caught(federation, 1, "add up to one|one-hot|out of range", rows=rows)


@pytest.mark.parametrize("wide", [False, True])
def test_ones_that_cancel_between_records_are_two_and_none(wide):
    """One record has two ones in a group and another has none: over all records the group is right."""
    generator, sizes = np.random.default_rng(0), (7,) * 40 + (10,) if wide else (3, 2, 4)
    operands = [one_hot(generator, (3,), 6), one_hot(generator, sizes, 6)]
    federation = CheckedFederation.of(operands, np.zeros((6, 1)), groups=((3,), sizes))
    first = sum(sizes[:-1])

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[np.cumsum((0, *sizes[:-1]))] = 1
        out[first + 1, 2], out[first, 4] = 1, 0
        return out

    caught(federation, 1, "add up to one", rows=rows)


def _blocks_of_another(claim, secrets):
    """Rows in three blocks, one of the second block huge, with squares that are right modulo p."""
    out = np.zeros(claim.operand_shape, np.int64)
    out[0] = claim.bound
    for big in range(1 << 40, (1 << 40) + 200):
        root = pow(rest := (claim.bound**2 - big * big) % P, (P + 1) // 4, P)
        fits = 0 <= big + int(secrets.operand[0, 200]) < 1 << 60
        for low in (root, root - P, P - root, -root):
            inside = 0 <= low + int(secrets.operand[1, 200]) < 1 << 60
            if root * root % P == rest and fits and inside and abs(low) < 1 << 62:
                out[:2, 200] = big, low
                return out
    raise AssertionError("no such row")


class _Mixed(Liar):
    """Tells the second block the projections of the first one, which has honest rows, by the same signs."""

    def opened_bits(self, coin, session):
        claim, lying, kept = self._claim, self._rows, self._claim.projections
        first, second = claim.blocks[:2]
        self._rows = lying.copy()
        self._rows[:, second] = lying[:, first]
        mixed = lambda coin, session, block: kept(coin, session, 0 if block == 1 else block)  # noqa: E731
        object.__setattr__(claim, "projections", mixed)
        try:
            return super().opened_bits(coin, session)
        finally:
            object.__delattr__(claim, "projections")
            self._rows = lying


def test_projections_of_one_block_do_not_stand_for_another():
    generator = np.random.default_rng(2)
    federation = CheckedFederation.of(
        [16 * unit_rows(generator, 3, 400) for _ in range(2)], np.zeros((400, 1)), clip=16.0
    )
    assert [len(claim.blocks) for claim in federation.protocol.claims] == [3, 3]
    machine = federation.parties[1].setup()
    made = type("Made", (_Mixed,), {"rows": staticmethod(_blocks_of_another)})
    machine._make_prover = lambda secrets: made(secrets, machine._operand, machine._labels.astype(np.uint64))
    with pytest.raises(Deviation, match="out of range") as found:
        run_setup(federation, 1, machine)
    assert found.value.member == 1


def test_rows_that_are_long_towards_one_verifier_alone():
    """One member is told honest rows, the other huge ones: each verifies its own copy, and points."""
    federation = CheckedFederation(3, records=6, width=2)
    machine, other = federation.parties[1].setup(), {}

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = claim.bound
        out[1, 4] = 1 << 12
        return out

    def tamper(envelope):
        message = envelope.message
        if (envelope.sender, envelope.receiver) != (1, 2):
            return envelope
        if message.kind == "sealed-checked-operand":
            made = type("Made", (Liar,), {"rows": staticmethod(rows)})
            secrets = machine._prover._secrets
            other["prover"] = made(secrets, machine._operand, machine._labels.astype(np.uint64))
            message = dataclasses.replace(message, words=other["prover"].opened())
        elif message.kind == "sealed-bits":
            first = machine._coins[0].coin
            bits = other["prover"].opened_bits(first, machine._seed.session)
            message = dataclasses.replace(message, words=bits)
        elif message.kind == "sealed-proof":
            first, second = (coin.coin for coin in machine._coins)
            name, size = machine._seed.session, len(machine._seed.pairs) // 3
            pair = machine._seed.pairs[2 * size : 3 * size]
            message = dataclasses.replace(message, words=other["prover"].prove(pair, first, second, name))
        return dataclasses.replace(envelope, message=message)

    with pytest.raises(Deviation, match="longer than declared") as found:
        run_setup(federation, 1, machine, tamper)
    assert found.value.member == 1 and other


@pytest.mark.parametrize("kind", ["sealed-checked-operand", "sealed-bits", "sealed-proof"])
def test_another_members_proof_is_not_ones_own(kind):
    """Of two members, the one that comes second shows what the first has shown in the same session."""
    federation, seen = CheckedFederation(3, records=6), {}

    def tamper(envelope):
        if envelope.receiver == 0 and envelope.message.kind == kind:
            seen.setdefault(envelope.sender, envelope.message)
            words = next(iter(seen.values())).words
            return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, words=words))
        return envelope

    with pytest.raises(Deviation) as found:
        run_setup(federation, -9, None, tamper)
    assert found.value.member == list(seen)[1]


def test_what_stands_beside_the_columns_is_in_no_total():
    """Columns that only fill up a polynomial: a one there passes as a bit, and nothing multiplies it."""
    generator = np.random.default_rng(0)
    operands = [one_hot(generator, (3,), 6), one_hot(generator, (2, 3), 6)]
    federation = CheckedFederation.of(operands, np.zeros((6, 1)), groups=((3,), (2, 3)))

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[: claim.width] = operands[1] >> 14
        out[claim.width :] = 1
        return out

    run_setup(federation, 1, lie(federation, 1, rows=rows))
    assert all(
        len(party.session.masked[1 - m]) == len(operands[1 - m]) for m, party in enumerate(federation.parties)
    )
    federation.check(federation.totals())


def test_other_rows_than_those_that_were_proved_give_a_cheater_masks_and_no_labels():
    """It proves short rows and multiplies what is opened by huge ones: the others' masks stay in it."""
    federation = victims(CheckedFederation(2, records=RECORDS, width=WIDTH, std=STD, seed=4))
    federation.setup()
    machines = federation.machines(0)
    machines[1]._operand = huge_rows().view(np.uint64)
    drive([federation.dealer.iteration(round=0), *machines])
    right = (read_labels(machines[1].result()) == federation.labels[:, 0]).sum()
    # Guesses are 32 right in the mean, 4 their deviation: 60 of 64 has probability 4e-14.
    assert right < 60


def test_a_new_session_proves_everything_again():
    """Rows that were proved, and rounds that were honest, before a restart: the new ones are too long."""
    federation = CheckedFederation(2, records=9)
    federation.setup()
    federation.check(federation.totals())
    caught(federation, 1, "longer than declared", rows=_zeros_but((0, 3), 1 << 14 | 1))
    federation.setup()
    federation.check(federation.totals())


def test_rows_that_one_member_is_not_told_yet_bring_no_coin():
    """Whoever would choose its rows by the coin waits for ever: a member without them is not ready."""
    federation = CheckedFederation(3, records=5)
    machines = [federation.dealer.session(), *(party.setup() for party in federation.parties)]
    held = []

    def tamper(envelope):
        late = isinstance(envelope.message, CheckedOperand) and (envelope.sender, envelope.receiver) == (2, 1)
        if not late:
            return envelope
        held.append(envelope)  # says that it is ready instead
        return dataclasses.replace(envelope, receiver=-1)

    seen = _deliver(machines, tamper)
    assert held and not any(isinstance(envelope.message, Coin) for envelope in seen)
    ready = [envelope.sender for envelope in seen if isinstance(envelope.message, Ready)]
    assert sorted(ready) == [0, 2]


def _deliver(machines, tamper):
    """Delivers all that can be; what `tamper` sends to nobody is lost."""
    found = {machine.address: machine for machine in machines}
    pending, seen = [e for machine in machines for e in machine.start()], []
    while pending:
        envelope = tamper(pending.pop(0))
        if envelope.receiver in found:
            seen.append(envelope)
            pending += found[envelope.receiver].receive(envelope)
    return seen


# -- residuals ----------------------------------------------------------------------------------------------


class Spread(CheckedRound):
    """Errors on several words at once: (record, output) -> error."""

    errors: ClassVar[dict] = {}

    def _share_residual(self, deal):
        super()._share_residual(deal)
        added = np.zeros_like(self._blinded)
        for place, error in self.errors.items():
            added[place] = error % P
        self._blinded = FIELD.add(self._blinded, added)

    def _verify(self):
        """Does not mind."""


class Careless(CheckedRound):
    """Does not check what others open."""

    def _verify(self):
        """Does not mind."""


CANCELLING = {
    "between records": {(3, 0): 1 << 46, (4, 0): -(1 << 46)},
    "between outputs": {(3, 0): 1 << 46, (3, 1): -(1 << 46)},
    "many": {(i, k): (-1) ** (i + k) << 40 for i, k in itertools.product(range(8), range(2))},
    "one output": {(5, 1): 1},
}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("errors", CANCELLING.values(), ids=CANCELLING)
def test_errors_that_cancel_are_errors(errors, number):
    """Whoever got the dealt waves, the dealt tags or neither in this round."""
    federation = CheckedFederation(2, records=8, outputs=2)
    federation.setup()
    for before in range(number):
        federation.totals(before)
    with pytest.raises(Deviation, match="not what was dealt and proved") as found:
        cheated_round(federation, 1, Spread, number=number, errors=errors)
    assert found.value.member == 1
    nothing_is_left(federation, 1)


class Tags(CheckedRound):
    """Changes its share of one tag, or of the key, and no residual."""

    of = "tag"

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if self.of == "tag":
            tags = self._tags.copy()
            tags[3] = FIELD.add(tags[3], 1 << 50)
            self._tags = tags
        else:
            self._session.key = (self._session.key + 1) % P


@pytest.mark.parametrize("of", ["tag", "key"])
@pytest.mark.parametrize(("members", "liar"), [(2, 0), (2, 1), (3, 1)])
def test_a_share_of_a_tag_that_is_changed_in_the_last_iteration_alone(members, liar, of):
    """All iterations before it were honest; it ends without a total, as the first one would."""
    federation = CheckedFederation(members, records=8)
    federation.setup()
    for number in range(3):
        federation.check(federation.totals(number))
    with pytest.raises(Deviation, match="not what was dealt and proved") as found:
        cheated_round(federation, liar, Tags, number=3, of=of)
    assert found.value.member in ((0, 1) if members == 2 else (None,))
    assert federation.unverified and all(is_burnt(p) for p in federation.parties if p._proof.session.burnt)
    assert any(p._proof.session.burnt for p in federation.parties)


@pytest.mark.parametrize("place", [0, 2])
def test_an_error_in_a_mini_batch(place):
    federation = CheckedFederation(2, records=20)
    federation.setup()
    federation.totals(0, np.array([3, 1, 19]))
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, Spread, number=1, rows=np.array([7, 8, 2]), errors={(place, 0): 1 << 47})
    assert found.value.member == 1
    nothing_is_left(federation, 1)


@pytest.mark.parametrize("taken", [[4, 4, 4], [3, 1, 18]])
def test_another_batch_than_the_others_take(taken):
    """One record thrice, or another one: its labels' shares are others than those that were tagged."""
    federation = CheckedFederation(2, records=20, label_holder=1)
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, Careless, rows=np.array([3, 1, 19]), _rows=np.array(taken))
    assert found.value.member == 1
    nothing_is_left(federation, 1)


@pytest.mark.parametrize("word", [P, P + 1, 2**61, 2**64 - 1])
def test_words_that_stand_for_the_same_element_are_refused(word):
    """B + p would be the same residual in the field, and another one in the ring."""
    federation = CheckedFederation(2, records=6)
    federation.setup()

    def tamper(envelope):
        if not isinstance(envelope.message, CheckedShare) or envelope.sender != 1:
            return envelope
        words = envelope.message.blinded.copy()
        words[3] = word
        return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, blinded=words))

    with pytest.raises(Deviation, match="no element") as found:
        cheated_round(federation, 1, Careless, tamper)
    assert found.value.member == 1
    nothing_is_left(federation, 1)


@pytest.mark.parametrize("together", [0, 1 << 46])
def test_two_members_whose_errors_cancel_have_changed_nothing_and_others_are_caught(together):
    federation = CheckedFederation(3, records=9)
    federation.setup()
    machines = federation.machines(0)
    for member, error in ((1, 1 << 50), (2, together - (1 << 50))):
        machines[member].__class__ = Spread
        machines[member].errors = {(3, 0): error}
    every = [federation.dealer.iteration(round=0), *machines]
    if not together:
        drive(every)
        federation.check([machine.result() for machine in machines])
        return
    with pytest.raises(Deviation, match="nobody can be named"):
        drive(every)
    assert machines[0]._total is None and is_burnt(federation.parties[0])


class Copies(Shifting):
    """Commits to what another member has committed to, and opens what that one opens."""

    def _take_coin(self, message):
        super()._take_coin(message)
        return []

    def _advance(self):
        sent = [e for e in super()._advance() if not isinstance(e.message, Opening)]
        if len(self._commitments) == len(self._others) and not self.__dict__.get("_copied"):
            self._copied = True
            sent += self._to_all(self._commitments[0])
        if 0 in self._openings and not self.__dict__.get("_opened_copy"):
            self._opened_copy = True
            sent += self._to_all(self._openings[0])
        return sent


def test_a_commitment_is_of_its_member_alone():
    federation = CheckedFederation(2, records=6)
    federation.setup()
    with pytest.raises(Deviation, match="committed") as found:
        cheated_round(federation, 1, Copies)
    assert found.value.member == 1
    nothing_is_left(federation, 1)


def test_what_a_failed_check_tells_is_of_no_use():
    """One failed check tells the key of all tags: its session is gone, and the next one has another key."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    key = federation.dealer._key
    machines, seen = federation.machines(0), []
    machines[1].__class__, machines[1].error, machines[1].record = Shifting, 1, 3

    def noting(envelope):
        seen.append(envelope)
        return envelope

    with pytest.raises(Deviation):
        drive([federation.dealer.iteration(round=0), *machines], noting)
    left = sum(int(opening.word[0]) for opening in machines[0]._openings.values())
    coin = next(e.message.coin for e in seen if isinstance(e.message, Coin))
    assert _key_of(federation, coin, left) == key  # the attack works that far
    assert is_burnt(federation.parties[0])
    with pytest.raises(ProtocolError, match="no verified session"):
        federation.parties[0].round(round=1, scores=federation.scores[0])
    for envelope in seen:
        if envelope.receiver == 0:
            with pytest.raises(ProtocolError, match="burnt"):
                machines[0].receive(envelope)
    federation.setup()
    assert federation.dealer._key != key
    federation.check(federation.totals())


def _key_of(federation, coin, left):
    """alpha from what a check of the error 1 on record 3 leaves: -alpha chi_3."""
    name = federation.dealer._name
    factor = int(FIELD.draw(coin_stream(coin, name, "round/0"), (6, 1))[3, 0])
    return -left * pow(factor, -1, P) % P


# -- histograms and test figures ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1, 1 << 46])
def test_an_error_in_a_label_histogram(error):
    generator, records = np.random.default_rng(1), 10
    sizes = ((3, 2), (4,))
    labels = (generator.random((records, 1)) < 0.5).astype(float)
    federation = CheckedFederation.of(
        [one_hot(generator, each, records) for each in sizes],
        np.column_stack([labels, 1 - labels]),
        groups=sizes,
        series=None,
        complement=True,
    )
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, Spread, errors={(3, 0): error, (3, 1): -error})
    assert found.value.member == 1
    nothing_is_left(federation, 1)


class Figures(CheckedFederation):
    """Totals of all waves over (y, 1 - y), as test figures need them."""

    @classmethod
    def make(cls, records=8):
        labels = (np.arange(records) % 3 == 0).astype(np.int32)
        operand = np.stack([labels, 1 - labels]) << 14
        empty = np.zeros((0, records), np.int32)
        return cls.of(
            [operand, empty],
            np.zeros((records, 4)),
            series=Waves(24.0, (0.8, 0.6)),
            groups=((2,), ()),
            clip=1.0,
        )

    def party(self, member):
        kept, self.labels = self.labels, None
        try:
            return super().party(member)
        finally:
            self.labels = kept

    def machines(self, number, rows=None):
        scores = [each[:, :1] for each in self.scores]
        return [party.round(round=number, scores=scores[m]) for m, party in enumerate(self.parties)]


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("output", [0, 3])
def test_an_error_in_the_waves_of_a_test_figure(liar, output):
    federation = Figures.make()
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, liar, Spread, errors={(3, output): 1 << 44})
    assert found.value.member == liar
    nothing_is_left(federation, liar)


@pytest.mark.parametrize("entry", [2, 1 << 20])
def test_a_test_record_that_counts_more_than_once(entry):
    federation = Figures.make()

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = 1
        out[0, 3], out[1, 3] = entry, 1 - entry
        return out

    caught(federation, 0, "one-hot|out of range", rows=rows)


# -- what nobody may decide by a total that was not verified -------------------------------------------------


@pytest.mark.parametrize("error", [1 << 46, 1 << 59, -(1 << 59)])
def test_a_failure_tells_nothing_of_the_victims_row(error):
    """A test of the moved total (its range, whether weights stay finite) would tell whether a row is small.

    What the victim sends after the error, and why it stops, is the same for a row of zeros and a long one;
    its total is not even computed.
    """
    outcomes = []
    for entry in (0, 1 << 14):
        federation = CheckedFederation(2, records=9, width=1)
        federation.operands[0][:] = 0
        federation.operands[0][0, 3] = entry
        federation.parties = [federation.party(m) for m in range(2)]
        federation.setup()
        sent, opened = [], []

        def noting(envelope, sent=sent):
            if envelope.sender == 0:
                sent.append((envelope.receiver, envelope.message.kind, len(envelope.message.to_bytes())))
            return envelope

        machines = federation.machines(0)
        machines[0]._open = opened.append
        machines[1].__class__, machines[1].error, machines[1].record = Shifting, error, 3
        with pytest.raises(Deviation) as found:
            drive([federation.dealer.iteration(round=0), *machines], noting)
        assert not opened and is_burnt(federation.parties[0])
        outcomes.append((str(found.value), sent))
    assert outcomes[0] == outcomes[1]


# -- all orders of the check ---------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3])
def test_every_order_of_commitments_and_openings_ends_alike(members):
    """Once the coin is there: every order in which two others' commitments and openings can arrive."""
    federation = CheckedFederation(members, records=5, seed=1)
    federation.setup()
    federation.transcript.clear()
    machines = federation.machines(0)
    fresh = copies(machines[:1])[0]
    federation.run([federation.dealer.iteration(round=0), *machines])
    mine = [e for e in federation.transcript if e.receiver == 0]
    late = [e for e in mine if isinstance(e.message, (Commitment, Opening))]
    assert len(late) == 2 * (members - 1)
    for order in itertools.permutations(late):
        again = copies([fresh])[0]
        again.start()
        for envelope in (*(e for e in mine if e not in late), *order):
            again.receive(envelope)
        assert again.done and np.array_equal(again.result(), machines[0].result())


@pytest.mark.parametrize("members", [2, 3])
def test_every_order_of_the_set_up_ends_alike(members):
    """Of seeds, keys and masked rows; coins, bits and proofs follow from them and from each other."""
    federation = CheckedFederation(members, records=5, seed=1)
    machines = [party.setup() for party in federation.parties]
    fresh = copies(machines)
    federation.run([federation.dealer.session(), *machines])
    for machine in machines[:2] if members == 2 else machines[1:2]:
        mine = [e for e in federation.transcript if e.receiver == machine.address]
        first = next(place for place, e in enumerate(mine) if isinstance(e.message, Coin))
        assert len(mine[:first]) == 1 + 2 * (members - 1)
        for order in itertools.permutations(mine[:first]):
            again = copies([fresh[machine.address]])[0]
            again.start()
            for envelope in (*order, *mine[first:]):
                again.receive(envelope)
            assert again.done and again.session.key == machine.session.key
            assert np.array_equal(again.session.labels, machine.session.labels)
