"""What every way of sealed rounds must do, whoever deals: subclasses say what is made."""

import dataclasses
import itertools

import numpy as np
import pytest
from sealed_federation import copies

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols import DEALER, Envelope


def wrong(envelope):
    """Variants of an envelope that no member may accept."""
    sender, receiver, message = envelope.sender, envelope.receiver, envelope.message
    other = dataclasses.replace
    yield Envelope(sender, receiver, other(message, round=message.round + 1))
    yield Envelope(sender, receiver, other(message, attempt=1))
    yield Envelope(sender, (receiver + 1) % 3, message)
    yield Envelope(receiver, receiver, message)
    yield Envelope(99, receiver, message)
    yield Envelope(DEALER if sender != DEALER else (receiver + 1) % 3, receiver, message)
    for name, value in vars(message).items():
        if isinstance(value, np.ndarray) and value.size:
            yield Envelope(sender, receiver, other(message, **{name: value[..., None]}))
            yield Envelope(sender, receiver, other(message, **{name: value.astype(np.float64)}))
            yield Envelope(sender, receiver, other(message, **{name: np.append(value, value[:1])}))
        if isinstance(value, bytes):
            yield Envelope(sender, receiver, other(message, **{name: value + b"0"}))


def deliver_with_intruder(machines, pending):
    """Runs machines to their end; before each message arrives wrong variants and all earlier ones do."""
    for machine, envelope in zip(machines, pending, strict=False):
        with pytest.raises(ProtocolError, match="before its round"):
            machine.receive(envelope)
    for machine in machines:
        pending = pending + machine.start()
        with pytest.raises(ProtocolError, match="already started"):
            machine.start()
    delivered = []
    while pending:
        envelope = pending.pop(0)
        for bad in (*wrong(envelope), *(e for e in delivered if e.receiver == envelope.receiver)):
            with pytest.raises(ProtocolError):
                machines[envelope.receiver].receive(bad)
        pending += machines[envelope.receiver].receive(envelope)
        delivered.append(envelope)
    assert all(machine.done for machine in machines)


def _key(envelope):
    return envelope.receiver, envelope.message.kind


def same(one, two):
    return all(np.array_equal(value, getattr(two, name)) for name, value in vars(one).items())


class SealedConformance:
    """A federation as `sealed_federation.Federation` is one, `made` anew for every test."""

    members: tuple[int, ...]

    def made(self, members, **changes):
        """Members that have not been set up, at noise `std`, with data by `seed`."""
        raise NotImplementedError

    def ready(self, members, **changes):
        federation = self.made(members, **changes)
        federation.setup()
        return federation

    @pytest.fixture(params=(0, -1), ids=("fewest", "most"))
    def count(self, request):
        return self.members[request.param]

    @pytest.mark.parametrize("seed", range(3))
    def test_totals_are_the_plain_gradient_in_any_order_and_over_the_wire(self, count, seed):
        generator = np.random.default_rng(seed)
        federation = self.made(count, seed=seed, codec=True)
        federation.setup(lambda pending: int(generator.integers(len(pending))))
        for number in range(3):
            federation.check(federation.totals(number, choose=lambda p: int(generator.integers(len(p)))))

    def test_every_order_of_one_members_messages_gives_the_same(self, count):
        """Machines meet only in messages, so all orders at each receiver are all orders there are."""
        federation = self.ready(count)
        federation.transcript.clear()
        machines = federation.machines(0)
        fresh = copies(machines)
        federation.deliver(machines, federation.dealer.deal(round=0))
        for member, machine in enumerate(machines):
            sent = {_key(e): e.message for e in federation.transcript if e.sender == member}
            orders = list(itertools.permutations(e for e in federation.transcript if e.receiver == member))
            for order in orders[:: max(1, len(orders) // 120)]:  # 7 messages: a fixed sample of 5,040
                again = copies([fresh[member]])[0]
                out = again.start()
                for envelope in order:
                    out += again.receive(envelope)
                assert again.done and np.array_equal(again.result(), machine.result())
                assert {_key(e) for e in out} == set(sent)
                assert all(same(e.message, sent[_key(e)]) for e in out)

    def test_wrong_messages_change_nothing(self, count):
        federation = self.ready(count)
        machines = federation.machines(0)
        deliver_with_intruder(machines, federation.dealer.deal(round=0))
        federation.check([machine.result() for machine in machines])

    def test_a_round_serves_once_and_never_backwards(self, count):
        federation = self.made(count)
        if federation.protocol.static[0]:  # rows that change are masked in their round
            with pytest.raises(ProtocolError, match="setup"):
                federation.machines(0)
        federation.setup()
        federation.totals(2)
        for number in (0, 2):
            with pytest.raises(ProtocolError, match="used round"):
                federation.machines(number)
        federation.check(federation.totals(3))

    def test_a_new_session_repeats_no_masked_word(self, count):
        """The same rounds of the same data: what hides them is drawn anew, so nothing comes twice."""
        federation = self.made(count, std=2**20)
        for _ in range(2):
            federation.setup()
            federation.totals(0)
        said = [
            value.tobytes() if isinstance(value, np.ndarray) else value
            for each in federation.transcript
            for name, value in vars(each.message).items()
            if isinstance(value, (np.ndarray, bytes)) and len(value) and name != "binding"  # public
        ]
        half = len(said) // 2
        assert not set(said[:half]) & set(said[half:])

    def test_nobody_can_be_left_out_and_nothing_is_told_before_the_end(self, count):
        federation = self.ready(count)
        for machine in (*federation.machines(0), federation.parties[0].setup()):
            machine.start()
            with pytest.raises(DropoutError, match="cannot go on without"):
                machine.drop((machine.address + 1) % count)
            with pytest.raises(ProtocolError):
                machine.result()

    def test_inputs_are_left_alone(self, count):
        federation = self.made(count)
        given = [*federation.operands, *federation.scores, federation.labels]
        before = [each.copy() for each in given]
        federation.setup()
        federation.totals(0)
        assert all(map(np.array_equal, given, before))

    def test_every_total_has_noise_that_differs_from_round_to_round(self, count):
        federation = self.ready(count, std=2**41)
        found = [federation.totals(number) for number in (0, 1)]
        assert all((np.abs(one - two) > 0).all() for one, two in zip(*found, strict=True))
