"""What every secure sum must do. A new sum inherits `SumConformance` and gets these tests for free."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols import Driver, Envelope, Machine, Message, Node, SecureSum, run_round, run_setup


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Foreign(Message):
    kind = "foreign"
    payload: bytes = b""


def snapshot(thing: object) -> object:
    """A comparable copy of a machine's state; opaque objects count by identity."""
    if isinstance(thing, np.ndarray):
        return (thing.dtype.str, thing.shape, thing.tobytes())
    if isinstance(thing, dict):
        return {key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset)):
        parts = [snapshot(item) for item in thing]
        return (type(thing), parts if isinstance(thing, (list, tuple)) else sorted(map(repr, parts)))
    if isinstance(thing, (int, float, str, bytes, bool, type(None))):
        return thing
    if isinstance(thing, Machine):
        return snapshot(vars(thing))
    return id(thing)


def refuses(machine: Machine, envelope: Envelope) -> None:
    """Asserts that the envelope is refused and changes nothing."""
    before = snapshot(machine)
    with pytest.raises(ProtocolError):
        machine.receive(envelope)
    assert snapshot(machine) == before


def mutations(message: Message) -> Iterator[Message]:
    """Copies of a message with one field broken in shape, type or length, but decodable."""
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        broken: list[object] = []
        if field.name in ("round", "attempt"):
            broken = [value + 1, value + 1000]
        elif type(value) is int:
            broken = [value + 17]
        elif isinstance(value, np.ndarray):
            other = np.uint32 if value.dtype == np.uint64 else np.uint64
            broken = [
                value.astype(other),
                value.astype(np.float64),
                np.concatenate([value.ravel()] * 2 + [[1]]),
            ]
        elif isinstance(value, bytes):
            broken = [value[:-1], b""]
        elif isinstance(value, list) and all(isinstance(item, int) for item in value):
            broken = [[*value, 10**6], [*value, *(value or [-7])]]
        for bad in broken:
            yield dataclasses.replace(message, **{field.name: bad})


def every_order(play: Callable[[Callable[[list[Envelope]], int]], None], limit: int) -> int:
    """Plays under every order of delivery and returns how many there were; fails above `limit`."""
    trail: list[list[int]] = []  # [choice, number of options] at each step of the current play
    count = 0
    while True:
        depth = 0

        def choose(pending: list[Envelope]) -> int:
            nonlocal depth
            if depth == len(trail):
                trail.append([0, len(pending)])
            assert trail[depth][1] == len(pending), "a play must be deterministic in its order"
            depth += 1
            return trail[depth - 1][0]

        play(choose)
        count += 1
        assert count <= limit, f"more than {limit} delivery orders"
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return count
        trail[-1][0] += 1


class SumConformance(ABC):
    """Inherit, and define `make`. The other attributes have defaults for exact sums on the ring."""

    workers = 4
    more_workers = 9
    exhaustive_workers: tuple[int, ...] = (3, 4)
    exhaustive_limit = 50_000
    random_orders = 20
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (0,), (2, 0))

    @abstractmethod
    def make(self, workers: int) -> SecureSum:
        """The protocol under test."""

    def expected(self, protocol: SecureSum, values: list[np.ndarray]) -> np.ndarray:
        """The exact sum on the ring."""
        ring = protocol.fixed_point
        total = np.zeros(np.shape(values[0]), dtype=ring.dtype)
        for value in values:
            total = np.asarray(total + ring.encode(value, protocol.workers))
        return ring.decode(total)

    def check(self, protocol: SecureSum, values: list[np.ndarray], result: np.ndarray) -> None:
        """Exact equality; approximate sums override it with a derived tolerance."""
        assert result.dtype == np.float64
        assert result.shape == np.shape(values[0])
        np.testing.assert_array_equal(result, self.expected(protocol, values))

    def values(self, protocol: SecureSum, shape: tuple[int, ...] = (3,), seed: int = 0) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.normal(scale=3.0, size=shape) for _ in range(protocol.workers)]

    def ready(self, protocol: SecureSum) -> dict[int, Node]:
        """Nodes of all participants after their setup."""
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        run_setup(nodes)
        return nodes

    def round(self, nodes: dict[int, Node], values: list[np.ndarray], **where: int) -> dict[int, Machine]:
        """Machines of one round."""
        return {
            address: node.round(values[address], **where)
            if address >= 0
            else node.round(None, shape=np.shape(values[0]), **where)
            for address, node in nodes.items()
        }

    # -- results

    @pytest.mark.parametrize("workers", [3, 4, 5, 8])
    def test_sum_is_right(self, workers):
        protocol = self.make(workers)
        for seed, shape in enumerate(self.shapes):
            values = self.values(protocol, shape, seed)
            self.check(protocol, values, protocol.sum(values))

    def test_receivers_agree_and_others_get_nothing(self):
        protocol = self.make(self.workers)
        values = self.values(protocol)
        machines = self.round(self.ready(protocol), values, round=0)
        driver = Driver(machines)
        driver.start()
        driver.run()
        assert set(protocol.receivers) <= set(protocol.addresses)
        for address, machine in machines.items():
            assert machine.done
            if address in protocol.receivers:
                self.check(protocol, values, machine.result())
            else:
                with pytest.raises(ProtocolError):
                    machine.result()

    def test_many_rounds_and_attempts_on_one_setup(self):
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        for seed, (number, attempt) in enumerate([(0, 0), (5, 0), (5, 1), (2, 0), (2, 3)]):
            values = self.values(protocol, (4,), seed)
            self.check(protocol, values, run_round(nodes, values, round=number, attempt=attempt))

    def test_interleaved_rounds(self):
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        plays = []
        for number in range(3):
            values = self.values(protocol, (2,), number)
            machines = self.round(nodes, values, round=number)
            plays.append((values, machines, Driver(machines)))
        for _, _, driver in reversed(plays):
            driver.start()
        while any(driver.pending for _, _, driver in plays):
            for _, _, driver in plays:
                if driver.pending:
                    driver.step()
        for values, machines, _ in plays:
            self.check(protocol, values, machines[protocol.receivers[0]].result())

    # -- input

    def test_bad_values_are_refused(self):
        protocol = self.make(self.workers)
        values = self.values(protocol)
        for bad in (np.nan, np.inf, -np.inf, 1e300, 2.0 * protocol.fixed_point.max_abs(self.workers)):
            broken = [*values[:-1], np.full(3, bad)]
            with pytest.raises(EncodingError):
                protocol.sum(broken)
        with pytest.raises(InputError):
            protocol.sum(values[:-1])
        with pytest.raises(InputError):
            protocol.sum([*values[:-1], np.zeros(4)])

    def test_refused_value_leaves_the_round_usable(self):
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        with pytest.raises(EncodingError):
            nodes[0].round(np.array([np.nan]), round=0)
        values = self.values(protocol)
        self.check(protocol, values, run_round(nodes, values, round=0))

    def test_inputs_belong_to_workers_only(self):
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        for address, node in nodes.items():
            with pytest.raises(InputError):
                node.round(None if address >= 0 else np.zeros(3), round=0)
        with pytest.raises(InputError):
            protocol.node(protocol.workers)
        with pytest.raises(InputError):
            protocol.node(-99)

    # -- rounds

    def test_a_round_and_attempt_serve_once(self):
        protocol = self.make(self.workers)
        for address, node in self.ready(protocol).items():
            value = np.zeros(2) if address >= 0 else None
            node.round(value, round=3)
            with pytest.raises(ProtocolError):
                node.round(value, round=3)
            node.round(value, round=3, attempt=1)
            node.retire(4)
            for number in (0, 3):
                with pytest.raises(ProtocolError):
                    node.round(value, round=number, attempt=2)
            node.round(value, round=4)
            with pytest.raises(InputError):
                node.round(value, round=-1)
            with pytest.raises(InputError):
                node.round(value, round=5, attempt=-1)
            with pytest.raises(InputError):
                node.round(value, round=2**32)
            with pytest.raises(TypeError):
                node.round(value, round=5.0)
            machine = node.round(value, round=np.int64(5))
            assert type(machine.round) is int

    def test_rounds_need_the_setup(self):
        protocol = self.make(self.workers)
        for address in protocol.addresses:
            node = protocol.node(address)
            if node.setup() is not None:
                with pytest.raises(ProtocolError):
                    node.round(np.zeros(2) if address >= 0 else None, round=0)

    # -- order

    def play(self, protocol: SecureSum, nodes: dict[int, Node], number: int, choose, codec=None) -> None:
        values = self.values(protocol, (2,), 1)
        self.check(protocol, values, run_round(nodes, values, round=number, choose=choose, codec=codec))

    def test_every_delivery_order(self):
        for workers in self.exhaustive_workers:
            protocol = self.make(workers)
            nodes = self.ready(protocol)
            numbers = iter(range(self.exhaustive_limit + 1))
            count = every_order(
                lambda choose, p=protocol, n=nodes, i=numbers: self.play(p, n, next(i), choose),
                self.exhaustive_limit,
            )
            assert count >= 1

    def test_random_delivery_orders(self):
        draw = np.random.default_rng(7)
        protocol = self.make(self.more_workers)
        for number in range(self.random_orders):
            nodes = {address: protocol.node(address) for address in protocol.addresses}
            run_setup(nodes, choose=lambda pending: int(draw.integers(len(pending))))
            self.play(protocol, nodes, number, lambda pending: int(draw.integers(len(pending))))

    def test_through_the_wire(self):
        protocol = self.make(self.workers)
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        run_setup(nodes, codec=protocol)
        self.play(protocol, nodes, 0, None, codec=protocol)

    # -- messages

    def test_calls_out_of_order(self):
        protocol = self.make(self.workers)
        nodes = self.ready(protocol)
        machines = self.round(nodes, self.values(protocol), round=0)
        for address, machine in machines.items():
            with pytest.raises(ProtocolError):
                machine.result()
            refuses(machine, Envelope(protocol.addresses[0], address, Foreign(round=0)))
            with pytest.raises(ProtocolError):
                machine.drop(protocol.addresses[0])
            machine.start()
            with pytest.raises(ProtocolError):
                machine.start()
            for stranger in (protocol.workers, -99, address):
                with pytest.raises(ProtocolError):
                    machine.drop(stranger)

    def test_bad_messages_change_nothing(self):
        protocol = self.make(self.workers)
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        setups = {a: machine for a, node in nodes.items() if (machine := node.setup()) is not None}
        self.hammer(protocol, setups)
        values = self.values(protocol)
        machines = self.round(nodes, values, round=6, attempt=2)
        self.hammer(protocol, machines)
        for address in protocol.receivers:
            self.check(protocol, values, machines[address].result())

    def hammer(self, protocol: SecureSum, machines: dict[int, Machine]) -> None:
        """Delivers every message once rightly and in all wrong ways before and after."""
        driver = Driver(machines)
        driver.start()
        while driver.pending:
            envelope = driver.pending[0]
            machine = machines[envelope.receiver]
            for bad in self.bad_envelopes(protocol, envelope):
                refuses(machine, bad)
            for other in machines.values():
                if other is not machine:
                    refuses(other, envelope)
            driver.step()
            refuses(machine, envelope)
            for past in driver.transcript:
                refuses(machines[past.receiver], past)

    def bad_envelopes(self, protocol: SecureSum, envelope: Envelope) -> Iterator[Envelope]:
        sender, receiver, message = envelope.sender, envelope.receiver, envelope.message
        yield Envelope(sender, receiver, Foreign(round=message.round, attempt=message.attempt))
        for bad in mutations(message):
            yield Envelope(sender, receiver, bad)
        for other in (*protocol.addresses, protocol.workers, -99):
            if not self.may_send(protocol, other, envelope):
                yield Envelope(other, receiver, message)

    def may_send(self, protocol: SecureSum, other: int, envelope: Envelope) -> bool:
        """Whether `other` could rightly have sent this very message at this moment.

        Nothing in an honest peer's masked message tells whose it is: only the transport does. Protocols where
        several peers send alike override this.
        """
        return other == envelope.sender

    def test_messages_are_of_declared_kinds(self):
        protocol = self.make(self.workers)
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        sent = run_setup(nodes)
        driver = Driver(self.round(nodes, self.values(protocol), round=0))
        driver.start()
        driver.run()
        kinds = {type(envelope.message) for envelope in sent + driver.transcript}
        assert kinds <= set(protocol.messages)
        assert len({message.kind for message in protocol.messages}) == len(protocol.messages)
        for envelope in sent + driver.transcript:
            again = type(envelope.message).from_bytes(envelope.message.to_bytes())
            assert snapshot(vars(again)) == snapshot(vars(envelope.message))
