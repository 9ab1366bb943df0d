"""Sealed training among members that may cheat: honest runs are right, in every order."""

import itertools

import numpy as np
import pytest
from checked_federation import CheckedFederation, one_hot
from sealed_federation import copies

from securevfl.errors import DropoutError, EncodingError, InputError, ProtocolError
from securevfl.protocols import DEALER
from securevfl.protocols.sealed.messages import Coin, Ready


def _random(seed):
    generator = np.random.default_rng(seed)
    return lambda pending: int(generator.integers(len(pending)))


@pytest.mark.parametrize("members", range(2, 9))
def test_verified_totals_equal_the_plain_gradient(members):
    federation = CheckedFederation(members, seed=members, label_holder=members - 1, codec=True)
    federation.setup(_random(members))
    for number in range(members + 1):  # every member once gets the dealt waves, and once the dealt tags
        federation.check(federation.totals(number, choose=_random(number)))


def test_several_outputs_and_batches():
    federation = CheckedFederation(3, outputs=4, records=20, seed=5, codec=True)
    federation.setup()
    for number, rows in enumerate([np.array([3, 1, 19]), np.arange(20), np.array([7])]):
        federation.check(federation.totals(number, rows), rows)


def test_one_hot_columns_and_label_histograms():
    """Columns in 40 groups, 290 in all: more than the 255 that a norm proof takes at once."""
    generator, records = np.random.default_rng(1), 50
    sizes = ((7,) * 40 + (10,), (3, 1))
    operands = [one_hot(generator, each, records) for each in sizes]
    labels = (generator.random((records, 1)) < 0.5).astype(float)
    federation = CheckedFederation.of(
        operands, np.column_stack([labels, 1 - labels]), groups=sizes, series=None, complement=True
    )
    federation.setup()
    for member, total in enumerate(federation.totals()):
        exact = operands[member] @ np.column_stack([labels, 1 - labels]) / 2**14
        assert np.array_equal(total, exact)


@pytest.mark.parametrize("members", [2, 3])
def test_every_order_of_delivery_gives_the_same(members):
    """Of a round's messages to one member: all orders that their senders can cause end alike."""
    federation = CheckedFederation(members, records=5, seed=1)
    federation.setup()
    federation.transcript.clear()
    machines = federation.machines(0)
    fresh = copies(machines)
    federation.run([federation.dealer.iteration(round=0), *machines])
    for member, machine in enumerate(machines):
        mine = [e for e in federation.transcript if e.receiver == member]
        early = [e for e in mine if e.message.kind.endswith(("deal", "phase", "share"))]
        late = [e for e in mine if e.message.kind.endswith(("coin", "commitment"))]
        last = [e for e in mine if e.message.kind.endswith("opening")]
        for order in itertools.permutations(early):
            # The check's own words depend on a nonce, so the first copy replays the recorded ones.
            again = copies([fresh[member]])[0]
            out = again.start()
            for envelope in order:
                out += again.receive(envelope)
            assert [e for e in out if e.receiver == DEALER]
            for envelope in (*late, *last):
                again.receive(envelope)
            assert again.done and np.array_equal(again.result(), machine.result())
        for checks in itertools.permutations(late):
            again = copies([fresh[member]])[0]
            again.start()
            for envelope in (*early, *checks, *last):
                again.receive(envelope)
            assert again.done


def test_there_is_no_result_before_the_check():
    federation = CheckedFederation(2)
    federation.setup()
    machines = federation.machines(0)
    dealer = federation.dealer.iteration(round=0)
    pending = dealer.start()
    for machine in machines:
        machine.start()
    while pending:
        envelope = pending.pop(0)
        if isinstance(envelope.message, Ready):
            continue  # the dealer never hears that members are ready
        pending += machines[envelope.receiver].receive(envelope)
    for machine in machines:
        assert not machine.done
        with pytest.raises(ProtocolError, match="not verified"):
            machine.result()


def test_a_coin_comes_once_and_only_when_all_are_ready():
    federation = CheckedFederation(3)
    federation.setup()
    dealer = federation.dealer.iteration(round=0)
    machines = federation.machines(0)
    federation.transcript.clear()
    federation.run([dealer, *machines])
    coins = [e for e in federation.transcript if isinstance(e.message, Coin)]
    assert len({e.message.coin for e in coins}) == 1 and len(coins) == 3
    first_coin = next(i for i, e in enumerate(federation.transcript) if isinstance(e.message, Coin))
    shares = [i for i, e in enumerate(federation.transcript) if e.message.kind == "sealed-checked-share"]
    assert max(shares) < first_coin
    for envelope in federation.seen_by_dealer():
        with pytest.raises(ProtocolError, match="out of turn"):
            dealer.receive(envelope)
    with pytest.raises(ProtocolError, match="dealt before"):
        federation.dealer.iteration(round=0)


def test_the_dealer_hears_nothing_but_that_members_are_ready():
    federation = CheckedFederation(3, codec=True)
    federation.setup()
    federation.totals()
    heard = [e.message for e in federation.seen_by_dealer()]
    assert len(heard) == 9 and all(vars(m).keys() == {"round", "attempt", "stage"} for m in heard)


def test_dealt_corrections_take_turns():
    federation = CheckedFederation(3, records=40)
    federation.setup()
    federation.transcript.clear()
    for number in range(3):
        federation.totals(number)
    sizes = np.zeros(3)
    for envelope in federation.transcript:
        if envelope.sender == DEALER:
            sizes[envelope.receiver] += len(envelope.message.to_bytes())
    assert sizes.max() / sizes.min() < 1.02  # heads of arrays differ by a few bytes


def test_a_session_that_failed_is_never_used_again():
    federation = CheckedFederation(2)
    federation.setup()
    machine = federation.machines(0)[0]
    machine.start()
    with pytest.raises(DropoutError):
        machine.drop(1)
    with pytest.raises(ProtocolError, match="burnt"):
        machine.receive(federation.transcript[0])
    with pytest.raises(ProtocolError, match="no verified session"):
        federation.parties[0].round(round=1, scores=federation.scores[0])
    federation.setup()
    federation.check(federation.totals())


def test_what_cannot_be_proved_is_refused():
    with pytest.raises(InputError, match="every round"):
        CheckedFederation(2, static=False)
    federation = CheckedFederation(2)
    labels = federation.labels.copy()
    labels[3] = 0.5
    federation.labels = labels
    with pytest.raises(EncodingError, match="0 or 1"):
        federation.party(0)
    generator = np.random.default_rng(0)
    operands = [one_hot(generator, (3,), 6), one_hot(generator, (2,), 6)]
    operands[1][:, 2] = 1 << 14  # two ones in a group: norms would pass, groups do not
    federation = CheckedFederation.of(operands, np.zeros((6, 1)), groups=((3,), (2,)), clip=2.0)
    with pytest.raises(EncodingError, match="one-hot"):
        federation.setup()
