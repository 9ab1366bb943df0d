"""A member's own noise, taken out of what it sent once its seeds are unlocked."""

import numpy as np
import pytest
from checked_federation import CheckedFederation

from securevfl.protocols.contract import DEALER, SETUP_ROUND
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.messages import CheckedDeal, CheckedOperand, CheckedShare, ProofSeed
from securevfl.protocols.sealed.unlocked import (
    Kept,
    is_as_proved,
    lock,
    opened_rows,
    own_noise,
    phases_of,
    residual_excess,
)

STD = 1 << 40


def _federation(members=2, **settings):
    generator = np.random.default_rng(1)
    operands = [generator.integers(-4000, 4000, (5 + m, 30)).astype(np.int32) for m in range(members)]
    labels = generator.integers(0, 2, (30, 1)).astype(float)
    federation = CheckedFederation.of(operands, labels, std=STD, clip=1.0, **settings)
    federation.setup()
    return federation


def _messages(federation, kind):
    """(sender, receiver) -> the last message of a kind."""
    found = [e for e in federation.transcript if isinstance(e.message, kind)]
    return {(e.sender, e.receiver): e.message for e in found}


def _kept(federation, member):
    """What a member's view keeps of the last round."""
    deal = _messages(federation, CheckedDeal)[DEALER, member]
    shares, operands = _messages(federation, CheckedShare), _messages(federation, CheckedOperand)
    others = federation.parties[member].others
    return Kept(
        seed=lock(federation.dealer.lock_key, deal.locked, round=deal.round, member=member),
        correction=deal.product,
        masked={m: operands[m, member].words for m in others},
        blinded={member: shares[member, others[0]].blinded} | {m: shares[m, member].blinded for m in others},
        sent={m: shares[member, m].product for m in others},
        received={m: shares[m, member].product for m in others},
    )


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("rows", [None, np.array([3, 1, 17, 29])])
def test_a_members_own_noise_is_what_its_machine_drew(members, rows):
    federation = _federation(members)
    machines = federation.machines(0, rows)
    drawn = [{m: words.view(np.int64).copy() for m, words in each._noise.items()} for each in machines]
    federation.run([federation.dealer.iteration(round=0, rows=rows), *machines])
    for member, machine in enumerate(machines):
        found = own_noise(machine.brought, _kept(federation, member), machine.result())
        for target, words in drawn[member].items():
            # The total is kept in double precision: its last digits are far below the noise.
            assert np.abs(found[target] - words).max() <= (2**12 if target == member else 0)


def test_what_another_member_does_leaves_it_as_it_is():
    """Other phases and a product that is far off change nothing of what is found of the honest member."""
    federation = _federation()
    machines = federation.machines(0)
    machines[1]._phase = np.arange(30, dtype=np.uint32).reshape(30, 1) * np.uint32(1 << 26)
    machines[1]._noise = {m: words + np.uint64(1 << 61) for m, words in machines[1]._noise.items()}
    drawn = {m: words.view(np.int64).copy() for m, words in machines[0]._noise.items()}
    federation.run([federation.dealer.iteration(round=0), *machines])
    found = own_noise(machines[0].brought, _kept(federation, 0), machines[0].result())
    assert all(np.abs(found[m] - drawn[m]).max() <= 2**12 for m in drawn)


def test_phases_residuals_and_rows_are_made_again():
    federation = _federation(3)
    machines = federation.machines(0)
    federation.run([federation.dealer.iteration(round=0), *machines])
    seeds = {m: _kept(federation, m).seed for m in range(3)}
    opened = _kept(federation, 1).opened
    assert 0.3 < residual_excess(federation.protocol, seeds, opened) <= 1
    further = opened.copy()
    further[4] = FIELD.add(further[4], 1 << 30)
    assert residual_excess(federation.protocol, seeds, further) > 1
    session = _messages(federation, ProofSeed)
    for member, machine in enumerate(machines):
        sent = next(
            e.message
            for e in federation.transcript
            if e.sender == member and e.message.kind == "sealed-phase"
        )
        assert np.array_equal(phases_of(machine.brought, seeds[member]), sent.words)
        key = federation.dealer.lock_key
        seed = lock(key, session[DEALER, member].locked, round=SETUP_ROUND, member=member)
        told = _messages(federation, CheckedOperand)[member, (member + 1) % 3]
        claim = federation.protocol.claims[member]
        rows, labels = opened_rows(claim, seed, told.words, told.labels)
        assert np.array_equal(rows, federation.operands[member]) and is_as_proved(claim, rows, labels)
        assert len(labels) == (30 if member == 0 else 0)
        assert not is_as_proved(claim, rows + 16000, labels)
        assert not is_as_proved(claim, rows + (1 << 62), labels)
        assert not is_as_proved(claim, rows, np.array([2], np.uint64))


def test_one_hot_columns_are_judged_by_group():
    from checked_federation import one_hot

    generator = np.random.default_rng(0)
    operands = [one_hot(generator, (3, 2), 20) for _ in range(2)]
    federation = CheckedFederation.of(operands, np.zeros((20, 1)), groups=((3, 2), (3, 2)), clip=2**0.5)
    claim, nothing = federation.protocol.claims[0], np.empty(0, np.uint64)
    rows = (operands[0] >> 14).astype(np.int64)
    assert is_as_proved(claim, rows, nothing)
    rows[:, 7] = [1, 1, 0, 0, 0]
    assert not is_as_proved(claim, rows, nothing)


def test_a_lock_gives_nothing_without_its_key_and_no_pad_serves_twice():
    key, seed = bytes(range(32)), bytes(16)
    pads = {lock(key, seed, round=r, member=m) for r in range(-1, 4) for m in range(3)}
    assert len(pads) == 15 and seed not in pads
    assert (
        lock(key, lock(key, b"0123456789abcdef", round=2, member=1), round=2, member=1) == b"0123456789abcdef"
    )
    assert lock(bytes(32), seed, round=0, member=0) not in pads


def test_a_new_session_has_a_new_lock():
    federation = _federation()
    first = federation.dealer.lock_key
    federation.setup()
    assert federation.dealer.lock_key != first and len(first) == 32
