"""Members that cheat, on real machines: the attack that read every label, and every other one we know.

What harms others' privacy must end in `Deviation` before any total exists; what cannot harm must pass.
"""

import dataclasses

import numpy as np
import pytest
from cheating import (
    RECORDS,
    STD,
    WIDTH,
    P,
    Shifting,
    Tampering,
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
from sealed_federation import Federation, unit_rows

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols import DEALER, Envelope
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.messages import CheckedShare, Coin, Commitment, Opening, Proof
from securevfl.protocols.sealed.proof import Prover
from securevfl.protocols.sealed.protocol import Phase

# -- the attack ---------------------------------------------------------------------------------------------


def test_over_long_rows_read_every_label_of_members_that_are_trusted():
    federation = victims(Federation(2, records=RECORDS, width=WIDTH, std=STD, seed=4))
    federation.parties[1].operand = huge_rows().view(np.uint64)
    federation.setup()
    total = federation.totals()[1]
    assert np.array_equal(read_labels(total), federation.labels[:, 0])


def test_over_long_rows_end_the_session_and_name_the_member():
    federation = victims(CheckedFederation(2, records=RECORDS, width=WIDTH, std=STD, seed=4))

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[:WIDTH] = huge_rows()
        return out

    caught(federation, 1, "longer than declared", rows=rows)


def _solved_modulo_p(claim, secrets):
    """Huge rows whose slack makes the squares right modulo p, every masked word staying in range."""
    generator = np.random.default_rng(1)
    out = np.zeros(claim.operand_shape, np.int64)
    out[:WIDTH] = huge_rows()
    masks = secrets.operand.astype(object)
    for record in range(claim.records):
        left = (claim.bound**2 - sum(int(v) ** 2 for v in out[:, record])) % P
        while True:
            slack = [int(v) for v in generator.integers(0, 1 << 40, 3)]
            rest = (left - sum(s * s for s in slack)) % P
            root = pow(rest, (P + 1) // 4, P)  # p = 3 modulo 4
            for last in (root, P - root, root - P, -root):
                fits = 0 <= last + int(masks[WIDTH + 3, record]) < 1 << 60
                if root * root % P == rest and fits and abs(last) < 1 << 62:
                    out[WIDTH : WIDTH + 4, record] = [*slack, last]
                    break
            else:
                continue
            break
    return out


def test_squares_solved_modulo_p_are_no_way_round():
    federation = CheckedFederation(2, records=RECORDS, width=WIDTH, seed=4)
    with pytest.raises(Deviation) as found:
        run_setup(federation, 1, lie(federation, 1, rows=_solved_modulo_p))
    assert found.value.member == 1 and ("out of range" in found.value.how)


def test_one_unit_too_long_is_too_long():
    federation = CheckedFederation(3, records=5, width=2)

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = claim.bound
        out[0, 3] = claim.bound + 1
        return out

    caught(federation, 2, "longer than declared", rows=rows)


def _in_blocks():
    """Rows of norm up to 16, of which 180 records are projected together: three blocks of 400 records."""
    generator = np.random.default_rng(2)
    labels = (generator.random((400, 1)) < 0.5).astype(float)
    federation = CheckedFederation.of(
        [16 * unit_rows(generator, 3, 400) for _ in range(2)], labels, clip=16.0
    )
    assert [len(claim.blocks) for claim in federation.protocol.claims] == [3, 3]
    return federation


def test_more_records_than_a_projection_takes_are_proved_in_blocks():
    federation = _in_blocks()
    federation.setup()
    federation.check(federation.totals())


@pytest.mark.parametrize("record", [0, 200, 399])
@pytest.mark.parametrize("form", ["one unit", "modulo p"])
def test_a_lie_in_any_block_is_found(record, form):
    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = claim.bound
        if form == "one unit":
            out[0, record] += 1
            return out
        # Its squares are right modulo p: c^2 = bound^2 - 2^80, where that is a square.
        for big in range(1 << 40, (1 << 40) + 100):
            root = pow(rest := (claim.bound**2 - big * big) % P, (P + 1) // 4, P)
            low = next((v for v in (root, root - P, P - root, -root) if _fits(v, secrets, 1, record)), None)
            if root * root % P == rest and low is not None and _fits(big, secrets, 0, record):
                out[:2, record] = big, low
                return out
        raise AssertionError("no such row")

    federation = _in_blocks()
    with pytest.raises(
        Deviation, match="longer than declared" if form == "one unit" else "out of range"
    ) as found:
        run_setup(federation, 1, lie(federation, 1, rows=rows))
    assert found.value.member == 1


def _fits(value, secrets, column, record):
    return abs(value) < 1 << 62 and 0 <= value + int(secrets.operand[column, record]) < 1 << 60


@pytest.mark.parametrize("label", [2, 1 << 20, P - 1])
def test_labels_are_0_or_1(label):
    federation = CheckedFederation(2, records=9, label_holder=1)
    labels = federation.labels[:, 0].copy().astype(object)
    labels[4] = label
    caught(federation, 1, "labels that are 0 or 1", labels=np.array(labels, np.uint64))


@pytest.mark.parametrize("form", ["two ones", "none", "two", "wrapped"])
def test_one_hot_columns_are_one_hot(form):
    generator = np.random.default_rng(0)
    operands = [one_hot(generator, (3, 2), 6), one_hot(generator, (4,), 6)]
    federation = CheckedFederation.of(operands, np.zeros((6, 1)), groups=((3, 2), (4,)))

    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = 1
        if form == "two ones":
            out[1, 2] = 1
        elif form == "none":
            out[0, 2] = 0
        elif form == "two":
            out[0, 2], out[1, 2] = 2, P - 1 - (1 << 61)  # adds up to one modulo p
        else:
            out[0, 2] = 1 - P  # a bit modulo p, and no bit
        return out

    ways = {"two ones": "add up to one", "none": "add up to one", "two": "out of range|one-hot"}
    caught(federation, 1, ways.get(form, "out of range"), rows=rows)


def test_masked_rows_that_differ_between_members_are_each_verified():
    """Harmless if each copy is proved; here one of them is changed, and its receiver says so."""
    federation = CheckedFederation(3, records=5)

    def tamper(envelope):
        if envelope.message.kind == "sealed-checked-operand" and (envelope.sender, envelope.receiver) == (
            2,
            1,
        ):
            words = envelope.message.words.copy()
            words[0, 0] += np.uint64(1 << 20)
            return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, words=words))
        return envelope

    with pytest.raises(Deviation) as found:
        run_setup(federation, -9, None, tamper)
    assert found.value.member == 2


# -- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1, 1 << 46, -(1 << 40), P - 1, P // 2])
@pytest.mark.parametrize("members", [2, 3])
def test_a_tampered_residual_has_no_total(members, error):
    federation = CheckedFederation(members, records=9)
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, Shifting, error=error)
    if members == 2:
        assert found.value.member == 1
    else:
        assert found.value.member is None and "nobody can be named" in found.value.how
    nothing_is_left(federation, 1)


def test_the_tampered_word_steers_members_that_are_trusted():
    """The same error without checks: the victim's total moves by the error times its own row."""
    plain, moved = (Federation(2, records=9, seed=3) for _ in range(2))
    plain.setup()
    moved.setup()
    machines = moved.machines(0)
    original = machines[1]._residual_share
    error = np.uint64(1 << 47)

    def shifted(deal):
        share = original(deal)
        share[7] += error
        return share

    machines[1]._residual_share = shifted
    moved.deliver(machines, moved.dealer.deal(round=0))
    change = machines[0].result()[:, 0] - plain.totals()[0][:, 0]
    assert np.allclose(change, plain.operands[0][:, 7] * 2.0**-14 * 2.0 ** (47 - 28), atol=1e-3)


class Late(Shifting):
    """Commits to nothing it means and opens what makes the sum zero, once it has seen the others' words."""

    def _advance(self):
        if self._own and len(self._openings) == len(self._others) and self.address not in self._openings:
            others = sum(int(opening.word[0]) for opening in self._openings.values())
            self._own = self._own[0], -others % P
        elif self._own and self.address not in self._openings and len(self._commitments) == len(self._others):
            return []  # waits for the others' openings first
        return super()._advance()


def test_a_share_of_the_check_that_is_chosen_late_names_its_owner():
    federation = CheckedFederation(3, records=6)
    federation.setup()
    with pytest.raises(Deviation, match="committed") as found:
        cheated_round(federation, 2, Late)
    assert found.value.member == 2
    nothing_is_left(federation, 2)


def _changing(kind, sender, receiver, field, resign=None):
    """Tells one receiver something else."""

    def tamper(envelope):
        message = envelope.message
        if not isinstance(message, kind) or (envelope.sender, envelope.receiver) != (sender, receiver):
            return envelope
        words = getattr(message, field).copy()
        words.reshape(-1)[:1] += words.dtype.type(1 << 30)  # arrays wrap without a warning
        changed = dataclasses.replace(message, **{field: words})
        return Envelope(sender, receiver, resign(changed) if resign else changed)

    return tamper


def test_equivocation_about_shares_names_the_one_who_signed_both():
    federation = CheckedFederation(3, records=6)
    federation.setup()
    machines = federation.machines(0)
    liar = machines[2]

    def resign(message):
        digest = liar._digest(2, message.blinded)
        return dataclasses.replace(message, signature=liar._session.signer.sign(liar._signed(2, digest)))

    with pytest.raises(Deviation, match="signed both") as found:
        drive(
            [federation.dealer.iteration(round=0), *machines],
            _changing(CheckedShare, 2, 1, "blinded", resign),
        )
    assert found.value.member == 2
    assert all(machine._total is None for machine in machines[:2])


@pytest.mark.parametrize(("kind", "field"), [(Phase, "words"), (CheckedShare, "blinded")])
def test_what_differs_from_what_was_signed_names_its_sender(kind, field):
    federation = CheckedFederation(3, records=6)
    federation.setup()
    with pytest.raises(Deviation, match="signature") as found:
        cheated_round(federation, 2, tamper=_changing(kind, 2, 0, field))
    assert found.value.member == 2


def test_two_members_find_equivocation_by_the_tags():
    federation = CheckedFederation(2, records=6)
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, tamper=_changing(Phase, 1, 0, "words"))
    assert found.value.member == 1
    nothing_is_left(federation, 1)


def test_different_labels_for_different_members_are_caught():
    federation = CheckedFederation(3, records=6)

    def tamper(envelope):
        if envelope.message.kind == "sealed-checked-operand" and (envelope.sender, envelope.receiver) == (
            0,
            2,
        ):
            words = FIELD.add(envelope.message.labels, 1)
            return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, labels=words))
        return envelope

    with pytest.raises(Deviation) as found:
        run_setup(federation, -9, None, tamper)
    assert found.value.member == 0


def _other_labels(machine):
    """A label holder that proves other labels to member 2, as validly as those that it proves to member 1."""
    other = {}

    def tamper(envelope):
        message = envelope.message
        if (envelope.sender, envelope.receiver) != (0, 2):
            return envelope
        if message.kind == "sealed-checked-operand":
            prover = machine._prover
            flipped = 1 - machine._labels.astype(np.uint64)
            other["prover"] = Prover(prover._secrets, machine._operand, flipped)
            message = dataclasses.replace(message, labels=other["prover"].opened_labels())
        elif isinstance(message, Proof):
            first, second = (coin.coin for coin in machine._coins)
            name, size = machine._seed.session, len(machine._seed.pairs) // 3
            pair = machine._seed.pairs[2 * size : 3 * size]
            other["prover"].opened_bits(first, name)
            message = dataclasses.replace(message, words=other["prover"].prove(pair, first, second, name))
        return dataclasses.replace(envelope, message=message)

    return tamper


@pytest.mark.parametrize("signs", ["once", "both"])
def test_a_label_holder_that_proves_each_member_other_labels_is_named(signs):
    """Every proof holds; what it signs in the first round covers the labels that each was told."""
    federation = CheckedFederation(3, records=6)
    liar = federation.parties[0].setup()
    run_setup(federation, 0, liar, _other_labels(liar))
    assert all(party.session for party in federation.parties)
    machines = federation.machines(0)
    told = federation.parties[2].session.told

    def resigned(envelope):
        if not isinstance(envelope.message, CheckedShare) or (envelope.sender, envelope.receiver) != (0, 2):
            return envelope
        mine, machines[0]._session.told = machines[0]._session.told, told
        digest = machines[0]._digest(0, envelope.message.blinded)
        machines[0]._session.told = mine
        signature = machines[0]._session.signer.sign(machines[0]._signed(0, digest))
        return dataclasses.replace(
            envelope, message=dataclasses.replace(envelope.message, signature=signature)
        )

    with pytest.raises(Deviation, match="signature" if signs == "once" else "signed both") as found:
        drive([federation.dealer.iteration(round=0), *machines], resigned if signs == "both" else None)
    assert found.value.member == 0
    assert all(machine._total is None for machine in machines[1:])


@pytest.mark.parametrize("kind", [Coin, Commitment, Opening, CheckedShare])
def test_nothing_that_judges_comes_twice(kind):
    """A second coin, commitment, opening or share, as after a lost connection: the session is burnt."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    machines = federation.machines(0)
    driver = Tampering({m.address: m for m in [federation.dealer.iteration(round=0), *machines]})
    driver.start()
    while driver.pending:
        envelope = driver.pending[0]
        driver.step()
        if isinstance(envelope.message, kind) and envelope.receiver == 0:
            message = envelope.message
            if kind is Coin:
                message = dataclasses.replace(message, coin=bytes(32))
            if machines[0].done:
                break
            with pytest.raises(ProtocolError, match="out of turn"):
                machines[0].receive(dataclasses.replace(envelope, message=message))
            with pytest.raises(ProtocolError, match="burnt"):
                machines[0].receive(driver.pending[0] if driver.pending else envelope)
            assert is_burnt(federation.parties[0])
            return
    assert kind is Opening  # with two members the last opening ends the round at once


def test_messages_of_another_session_or_round_are_refused():
    federation = CheckedFederation(2, records=6)
    federation.setup()
    federation.totals(0)
    old = [e for e in federation.transcript if e.receiver == 0 and e.message.round == 0]
    for envelope in old:
        federation.setup()
        machine = federation.parties[0].round(round=0, scores=federation.scores[0])
        machine.start()
        if envelope.message.kind in ("sealed-checked-deal", "sealed-phase", "sealed-checked-share"):
            continue  # masked words that fit any session; the tags of this one do not
        with pytest.raises(ProtocolError):
            machine.receive(envelope)


def test_a_replayed_session_fails_its_tags():
    """All of an earlier session's messages of one member, played to the other in a new one."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    federation.totals(0)
    old = {e.message.kind: e for e in federation.transcript if (e.sender, e.receiver) == (1, 0)}
    federation.setup()

    def tamper(envelope):
        recorded = old.get(envelope.message.kind)
        return recorded if (envelope.sender, envelope.receiver) == (1, 0) and recorded else envelope

    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, tamper=tamper)
    assert found.value.member == 1


def test_a_replayed_proof_names_its_prover():
    """Rows and proofs of an earlier session of the same rows: its masks are gone, and its points too."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    kinds = ("sealed-checked-operand", "sealed-bits", "sealed-proof")
    old = {e.message.kind: e for e in federation.transcript if (e.sender, e.receiver) == (1, 0)}
    assert set(kinds) <= set(old)
    for kind in kinds:  # each alone, and what follows from the new session

        def tamper(envelope, kind=kind):
            mine = (envelope.sender, envelope.receiver) == (1, 0) and envelope.message.kind == kind
            return old[kind] if mine else envelope

        with pytest.raises(Deviation) as found:
            run_setup(federation, -9, None, tamper)
        assert found.value.member == 1
        with pytest.raises(ProtocolError, match="no verified session"):
            federation.parties[0].round(round=0, scores=federation.scores[0])


# -- what cannot harm ---------------------------------------------------------------------------------------


def _add(field, word):
    def change(message):
        words = getattr(message, field).copy()
        words += words.dtype.type(word)
        return dataclasses.replace(message, **{field: words})

    return change


def test_a_wrong_product_moves_the_victims_total_by_what_the_cheater_knows():
    federation = CheckedFederation(2, records=9, seed=5)
    federation.setup()
    error = 1 << 44

    def tamper(envelope):
        if isinstance(envelope.message, CheckedShare) and envelope.sender == 1:
            return dataclasses.replace(envelope, message=_add("product", error)(envelope.message))
        return envelope

    machines = cheated_round(federation, 1, tamper=tamper)
    federation.check([machines[0].result() - error * 2.0**-42, machines[1].result()])


def test_lying_about_scores_stays_within_the_series():
    """Any phase at all: residuals remain within R, so totals stay within R times the sum of the rows."""
    federation = CheckedFederation(2, records=40, width=1, seed=6)
    federation.setup()
    machines = federation.machines(0)
    machines[1]._phase = np.random.default_rng(0).integers(0, 1 << 32, (40, 1), dtype=np.uint32)
    drive([federation.dealer.iteration(round=0), *machines])
    limit = np.abs(federation.operands[0]).sum() * 2.0**-14 * federation.protocol.residual_bound
    assert np.abs(machines[0].result()).max() <= limit


def test_leaving_out_noise_passes():
    federation = CheckedFederation(2, records=9, std=1 << 40)
    federation.setup()
    machines = federation.machines(0)
    machines[1]._noise = {m: np.zeros_like(words) for m, words in machines[1]._noise.items()}
    drive([federation.dealer.iteration(round=0), *machines])
    assert all(machine.done for machine in machines)


def test_rows_within_the_norm_and_labels_within_range_are_anybodys_choice():
    federation = CheckedFederation(2, records=9)
    federation.operands[1] = np.zeros_like(federation.operands[1])
    federation.operands[1][0] = 1 << 14
    federation.labels = 1 - federation.labels
    federation.parties = [federation.party(m) for m in range(2)]
    federation.setup()
    federation.check(federation.totals())


def test_stopping_early_leaves_nothing():
    federation = CheckedFederation(2, records=9)
    federation.setup()
    machines = federation.machines(0)

    class Gone(Exception):
        pass

    def tamper(envelope):
        if isinstance(envelope.message, Opening) and envelope.sender == 1:
            raise Gone
        return envelope

    with pytest.raises(Gone):
        drive([federation.dealer.iteration(round=0), *machines], tamper)
    assert not machines[0].done and machines[0]._total is None


def test_a_dealer_that_is_asked_twice_deals_once():
    federation = CheckedFederation(2)
    federation.setup()
    dealer = federation.dealer.iteration(round=0)
    dealer.start()
    ready = [e for e in federation.transcript if e.receiver == DEALER]
    again = dataclasses.replace(ready[0], message=dataclasses.replace(ready[0].message, round=0, stage=1))
    assert dealer.receive(again) == []
    with pytest.raises(ProtocolError, match="out of turn"):
        dealer.receive(again)


def test_proofs_are_bound_to_their_verifier():
    federation = CheckedFederation(3, records=5)
    kept = {}

    def tamper(envelope):
        if isinstance(envelope.message, Proof) and envelope.sender == 2:
            kept.setdefault("first", envelope.message)
            return dataclasses.replace(envelope, message=kept["first"])
        return envelope

    with pytest.raises(Deviation) as found:
        run_setup(federation, -9, None, tamper)
    assert found.value.member == 2
