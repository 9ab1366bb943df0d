"""What a cheater may try on the rules around the check: an old signature, a check left open, no form at all.

Each of the first two is an attack that works without the rule it is about: the same test shows that as well.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from cheating import P, Shifting, caught, cheated_round, drive, is_burnt, run_setup
from checked_federation import CheckedFederation
from sealed_federation import copies

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.sealed.checked import CheckedRound, commitment
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.messages import (
    Bits,
    CheckedOperand,
    CheckedShare,
    Coin,
    Commitment,
    Opening,
    Proof,
)
from securevfl.protocols.sealed.proof import coin_stream
from securevfl.protocols.sealed.protocol import Phase

SIZE = 32 + 64
"""Of a digest and its signature in what members have seen."""


def _changing(kind, change, sender=1, receiver=0):
    def tamper(envelope):
        message = envelope.message
        if not isinstance(message, kind) or (envelope.sender, envelope.receiver) != (sender, receiver):
            return envelope
        return dataclasses.replace(envelope, message=change(message))

    return tamper


# -- old signatures -----------------------------------------------------------------------------------------


def _blamed(members=3):
    """Whom members blame: the last one shifts a residual, and shows 0 what 1 signed a round ago."""
    federation = CheckedFederation(members, records=6)
    federation.setup()
    federation.totals(0)
    liar = members - 1
    old = next(
        e.message.seen[SIZE : 2 * SIZE]
        for e in federation.transcript
        if isinstance(e.message, Commitment) and e.sender == liar
    )

    def blame(message):
        return dataclasses.replace(message, seen=message.seen[:SIZE] + old + message.seen[2 * SIZE :])

    machines = federation.machines(1)
    machines[liar].__class__ = Shifting
    return _verdicts([federation.dealer.iteration(round=1), *machines], _changing(Commitment, blame, liar, 0))


def _verdicts(machines, tamper):
    """Member -> whom it blames; everybody goes on until it raises itself."""
    found = {machine.address: machine for machine in machines}
    pending, blamed = [e for machine in machines for e in machine.start()], {}
    while pending:
        envelope = tamper(pending.pop(0))
        try:
            pending += found[envelope.receiver].receive(envelope)
        except Deviation as fault:
            blamed[envelope.receiver] = fault.member
    return blamed


@pytest.mark.parametrize("members", [3, 8])
def test_a_signature_of_an_earlier_round_blames_whoever_shows_it(members):
    blamed = _blamed(members)
    assert blamed == {0: members - 1} | dict.fromkeys(range(1, members - 1))


def test_signatures_of_digests_alone_would_blame_an_honest_member(monkeypatch):
    monkeypatch.setattr(CheckedRound, "_signed", lambda self, sender, digest: digest)
    assert _blamed()[0] == 1


# -- checks that are left open ------------------------------------------------------------------------------


class Learning(CheckedRound):
    """Errs in the first round to learn the key of all tags, and makes the check of the second one pass."""

    __module__ = CheckedRound.__module__
    error, record, key = 1 << 40, 3, 0

    def _share_residual(self, deal):
        super()._share_residual(deal)
        shifted = self._blinded.copy()
        shifted[self.record] = FIELD.add(shifted[self.record], self.error)
        self._blinded = shifted

    def _take_coin(self, message):
        sent = super()._take_coin(message)
        stream = coin_stream(message.coin, self._session.name, f"round/{self.round}")
        self.weight = int(FIELD.draw(stream, self._shape)[self.record, 0]) * self.error % P
        if not self.key:
            return sent
        # All shares of the check add up to - alpha times the weighted error.
        nonce, word = self._own
        self._own = nonce, (word + self.key * self.weight) % P
        digest = commitment(self._session.name, self.round, self.address, *self._own)
        return self._to_all(Commitment(round=self.round, digest=digest, seen=self._report()))

    def _verify(self):
        """Does not mind."""


def _first_round(federation):
    """The cheater keeps its opening to itself; what it now knows of the key."""
    machines = federation.machines(0)
    machines[1].__class__ = Learning

    def tamper(envelope):
        kept = isinstance(envelope.message, Opening) and envelope.sender == 1
        return dataclasses.replace(envelope, receiver=9) if kept else envelope

    drive([federation.dealer.iteration(round=0), *machines, _Lost()], tamper)
    total = sum(int(opening.word[0]) for opening in machines[1]._openings.values())
    key = -total * pow(machines[1].weight, -1, P) % P
    assert key == federation.dealer._key  # the attack reads the key of all tags
    assert machines[0]._total is None and not machines[0]._failed
    return key


class _Lost:
    """Where messages go that never arrive."""

    address, done, pending = 9, True, False

    def start(self):
        return []

    def receive(self, envelope):
        return []


def _second_round(federation, key):
    machines = federation.machines(1)
    machines[1].__class__, machines[1].key = Learning, key
    drive([federation.dealer.iteration(round=1), *machines])
    return machines[0].result()


def test_no_round_follows_one_whose_check_was_left_open():
    federation = CheckedFederation(2, records=9, seed=3)
    federation.setup()
    key = _first_round(federation)
    with pytest.raises(ProtocolError, match="burnt"):
        _second_round(federation, key)
    assert is_burnt(federation.parties[0])
    federation.setup()
    federation.check(federation.totals())


def test_with_the_key_from_a_check_left_open_the_next_one_would_accept_anything():
    federation = CheckedFederation(2, records=9, seed=3)
    federation.setup()
    key = _first_round(federation)
    federation.parties[0].session.unjudged = federation.parties[1].session.unjudged = False
    moved = _second_round(federation, key)[:, 0]
    row = federation.operands[0][:, 3] * 2.0**-14 * 2.0 ** (40 - 28)
    assert np.abs(moved - row).max() < 20 < np.abs(row).max()  # nine residuals of at most 1.002 and the error


def test_a_round_of_a_session_that_was_begun_anew_says_nothing():
    """Its machine is still there when the coin comes; the session behind it is not."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    machines = federation.machines(0)
    late = []

    def tamper(envelope):
        if isinstance(envelope.message, Coin) and envelope.receiver == 0:
            late.append(envelope)
            return dataclasses.replace(envelope, receiver=9)
        return envelope

    drive([federation.dealer.iteration(round=0), *machines, _Lost()], tamper)
    assert not machines[0]._failed
    federation.setup()
    with pytest.raises(ProtocolError, match="burnt"):
        machines[0].receive(late[0])
    assert machines[0]._own is None


# -- no form, or no place -----------------------------------------------------------------------------------


def _cut(name):
    def change(message):
        value = getattr(message, name)
        return dataclasses.replace(
            message, **{name: value[:-1] if isinstance(value, bytes) else value[..., :-1].copy()}
        )

    return change


def _filled(name, word):
    return lambda message: dataclasses.replace(message, **{name: np.full_like(getattr(message, name), word)})


def _elsewhere(message):
    return dataclasses.replace(message, round=3)


SET_UP = {
    "rows cut": (CheckedOperand, _cut("words")),
    "labels cut": (CheckedOperand, _cut("labels")),
    "labels equal to p": (CheckedOperand, _filled("labels", P)),
    "bits cut": (Bits, _cut("words")),
    "bits equal to p": (Bits, _filled("words", P)),
    "digest cut": (Bits, _cut("keys")),
    "proof cut": (Proof, _cut("words")),
    "proof equal to p": (Proof, _filled("words", P)),
    "another round": (Bits, _elsewhere),
}


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("form", SET_UP)
def test_whoever_sends_a_proof_of_no_form_is_named(form, members):
    federation = CheckedFederation(members, records=6, label_holder=1)
    with pytest.raises(Deviation) as found:
        run_setup(federation, -9, None, _changing(*SET_UP[form]))
    assert found.value.member == 1
    with pytest.raises(ProtocolError, match="no verified session"):
        federation.parties[0].round(round=0, scores=federation.scores[0])


ROUND = {
    "phase cut": (Phase, _cut("words")),
    "share equal to p": (CheckedShare, _filled("blinded", P)),
    "product cut": (CheckedShare, _cut("product")),
    "signature of nothing": (CheckedShare, lambda m: dataclasses.replace(m, signature=b"x")),
    "digest cut": (Commitment, _cut("digest")),
    "report too long": (Commitment, lambda m: dataclasses.replace(m, seen=m.seen + b"x")),
    "another nonce": (Opening, _cut("nonce")),
    "word equal to p": (Opening, _filled("word", P)),
    "another round": (Phase, _elsewhere),
}


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("form", ROUND)
def test_whoever_sends_a_message_of_no_form_is_named(form, members):
    federation = CheckedFederation(members, records=6)
    federation.setup()
    with pytest.raises(Deviation) as found:
        cheated_round(federation, 1, tamper=_changing(*ROUND[form]))
    assert found.value.member == 1 and federation.unverified
    assert is_burnt(federation.parties[0])


def test_a_message_in_ones_own_name_blames_nobody():
    federation = CheckedFederation(2, records=6)
    federation.setup()
    machines = federation.machines(0)

    def tamper(envelope):
        if isinstance(envelope.message, Phase) and envelope.receiver == 0:
            return dataclasses.replace(envelope, sender=0)
        return envelope

    with pytest.raises(ProtocolError, match="out of turn") as found:
        drive([federation.dealer.iteration(round=0), *machines], tamper)
    assert not isinstance(found.value, Deviation) and is_burnt(federation.parties[0])


def test_members_that_are_given_different_keys_do_not_begin():
    """Else one could sign two things with two keys, and nobody would hold both."""
    federation = CheckedFederation(3, records=6)
    change = _changing(CheckedOperand, lambda m: dataclasses.replace(m, key=bytes(32)), 2, 0)
    with pytest.raises(Deviation, match="different keys") as found:
        run_setup(federation, -9, None, change)
    assert found.value.member is None
    assert all(party._proof.session is None for party in federation.parties[:2])


# -- what belongs to another round, or to nobody -------------------------------------------------------------


class Stale(CheckedRound):
    """Takes waves, masks or tags of the last round, or of its key nothing."""

    __module__ = CheckedRound.__module__
    old, what = None, ""

    def _share_residual(self, deal):
        if self.what == "key":
            self._session.key, self._session.constants = 0, None
        elif self.what == "seed":
            deal = dataclasses.replace(deal, seed=self.old.seed)
        elif self.what:
            deal = dataclasses.replace(deal, **{self.what: getattr(self.old, self.what)})
        super()._share_residual(deal)

    def _verify(self):
        """Does not mind."""


@pytest.mark.parametrize("what", ["seed", "waves", "tags", "key"])
def test_waves_masks_and_tags_of_another_round_fail_the_check(what):
    """Member 0 gets the dealt waves in rounds 0 and 2, the dealt tags in 1 and 3."""
    federation = CheckedFederation(2, records=6)
    federation.setup()
    first, liar = {"tags": (1, 0)}.get(what, (0, 0))
    kept = []
    for number in range(first, first + 2):
        federation.totals(number)
    kept = [
        e.message for e in federation.transcript if e.receiver == liar and e.message.kind.endswith("deal")
    ]
    with pytest.raises(Deviation) as found:
        cheated_round(federation, liar, Stale, number=first + 2, old=kept[0], what=what)
    assert found.value.member == liar and federation.unverified
    assert is_burnt(federation.parties[1 - liar])


def _committed(session, envelope, word):
    """Commitment or opening of member 2 in round 0, to another word."""
    nonce = bytes(32)
    if isinstance(envelope.message, Commitment):
        changed = {"digest": commitment(session, 0, 2, nonce, word)}
    else:
        changed = {"nonce": nonce, "word": np.array([word], np.uint64)}
    return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, **changed))


@pytest.mark.parametrize("told", [0, 1])
def test_who_commits_to_one_member_after_the_other_has_opened_passes_with_neither(told):
    """Member `told` has all commitments first and opens; the cheater then commits to the other by that."""
    federation = CheckedFederation(3, records=6)
    federation.setup()
    machines, other = federation.machines(0), 1 - told
    liar = machines[2]
    liar.__class__ = Shifting
    held, blamed, words = [], {}, []
    found = {machine.address: machine for machine in [federation.dealer.iteration(round=0), *machines]}
    pending = [e for machine in found.values() for e in machine.start()]
    while pending or held:
        if not pending:  # the other one waits for a commitment: it is made now, by what was opened
            words.append((liar._own[1] - int(liar._openings[told].word[0])) % P)
            pending, held = [_committed(liar._session.name, e, words[0]) for e in held], []
        envelope = pending.pop(0)
        judged = isinstance(envelope.message, (Commitment, Opening))
        if judged and not words and (envelope.sender, envelope.receiver) == (2, other):
            held.append(envelope)
            continue
        try:
            pending += found[envelope.receiver].receive(envelope)
        except Deviation as fault:
            blamed[envelope.receiver] = fault.member
    assert words and not held
    assert blamed == {0: None, 1: None} and all(each._total is None for each in machines[:2])


@pytest.mark.parametrize("members", [2, 3])
def test_every_order_of_coins_bits_and_proofs_ends_alike(members):
    """Bits may come before the coin that asks for them, and proofs before the second one."""
    federation = CheckedFederation(members, records=5, seed=1)
    machines = [party.setup() for party in federation.parties]
    fresh = copies(machines)
    federation.run([federation.dealer.session(), *machines])
    for place, machine in enumerate(machines):
        mine = [e for e in federation.transcript if e.receiver == place]
        coins = [e for e in mine if isinstance(e.message, Coin)]
        bits = [coins[0], *(e for e in mine if isinstance(e.message, Bits))]
        proofs = [coins[1], *(e for e in mine if isinstance(e.message, Proof))]
        before = [e for e in mine if e not in bits and e not in proofs]
        for one, two in itertools.product(itertools.permutations(bits), itertools.permutations(proofs)):
            again = copies([fresh[place]])[0]
            again.start()
            for envelope in (*before, *one, *two):
                again.receive(envelope)
            assert again.done and again.session.key == machine.session.key


# -- eight members ------------------------------------------------------------------------------------------


def test_eight_members_see_what_two_see():
    def rows(claim, secrets):
        out = np.zeros(claim.operand_shape, np.int64)
        out[0] = 1 << 20
        return out

    caught(CheckedFederation(8, records=6), 5, "longer than declared", rows=rows)
    federation = CheckedFederation(8, records=6, outputs=2)
    federation.setup()
    with pytest.raises(Deviation, match="nobody can be named"):
        cheated_round(federation, 5, Shifting, rows=np.array([4, 1, 3, 5]))
    assert federation.unverified
