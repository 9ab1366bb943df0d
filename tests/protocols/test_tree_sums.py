"""Tree sums: conformance, dropouts, roots."""

import numpy as np
import pytest
from sum_conformance import SumConformance, refuses, snapshot

from securevfl.errors import DropoutError, InputError, TopologyError
from securevfl.protocols import (
    COORDINATOR,
    Driver,
    Envelope,
    FixedPoint,
    PlainTreeSum,
    TreePair,
    TwoTreeSum,
    build_trees,
    run_round,
)
from securevfl.protocols.sums.tree_sums import MaskTotal, Subtotal


class TreeConformance(SumConformance):
    def may_send(self, protocol, other, envelope):
        """Another child of the same host in the same tree sends alike."""
        if other == envelope.sender:
            return True
        if not isinstance(envelope.message, Subtotal):
            return False
        return protocol.parent_maps[envelope.message.tree - 1].get(other) == envelope.receiver


class TestPlainTreeSum(TreeConformance):
    def make(self, workers):
        return PlainTreeSum(workers=workers)


class TestTwoTreeSum(TreeConformance):
    def make(self, workers):
        return TwoTreeSum(workers=workers)


class TestTwoTreeSum32(TreeConformance):
    def make(self, workers):
        return TwoTreeSum(workers=workers, fixed_point=FixedPoint(bits=32, fraction_bits=16))


class TestTwoTreeSumOneRoot(TreeConformance):
    def make(self, workers):
        return TwoTreeSum(workers=workers, root=workers - 1)


class TestTwoTreeSumCoordinator(TreeConformance):
    def make(self, workers):
        return TwoTreeSum(workers=workers, coordinator=True)


PROTOCOLS = [
    PlainTreeSum(workers=5),
    TwoTreeSum(workers=5),
    TwoTreeSum(workers=5, collusion=2, root=3),
    TwoTreeSum(workers=5, coordinator=True),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=["plain", "two-tree", "one-root", "coordinator"])
def test_drops_at_every_moment(protocol):
    """A drop is fatal exactly at neighbours that still wait for, or owe something to, the dropped worker."""
    values = [np.arange(2.0)] * 5
    for gone in protocol.addresses:
        step = 0
        while True:
            nodes = {address: protocol.node(address) for address in protocol.addresses}
            machines = {
                a: node.round(values[a] if a >= 0 else None, round=0, shape=(2,)) for a, node in nodes.items()
            }
            driver = Driver(machines)
            driver.start()
            for _ in range(step):
                if driver.pending:
                    driver.step()
            finished = not driver.pending
            fatal = 0
            for address, machine in machines.items():
                if address == gone:
                    continue
                before = snapshot(machine)
                try:
                    assert machine.drop(gone) == []
                except DropoutError:
                    fatal += 1
                assert snapshot(machine) == before
            if finished:
                assert fatal == 0
                break
            if step == 0 and gone not in protocol.receivers:
                assert fatal >= 1  # its parent waits for it
            step += 1


def test_root_alone_receives():
    for root in range(5):
        assert TwoTreeSum(workers=5, root=root).receivers == (root,)
    assert TwoTreeSum(workers=5, coordinator=True).receivers == (COORDINATOR,)


def test_unsafe_trees_are_refused():
    star = TreePair({1: 0, 2: 0, 3: 0}, {1: 0, 2: 0, 3: 0})
    with pytest.raises(TopologyError, match="withstand 0"):
        TwoTreeSum(workers=4, trees=star)
    with pytest.raises(TopologyError, match="4 workers, not 5"):
        TwoTreeSum(workers=5, trees=build_trees(4))
    with pytest.raises(TopologyError, match="no coordinator"):
        TwoTreeSum(workers=4, trees=build_trees(4), coordinator=True)
    with pytest.raises(TopologyError):
        TwoTreeSum(workers=2)
    with pytest.raises(TopologyError):
        TwoTreeSum(workers=6, collusion=3)
    with pytest.raises(TopologyError):
        PlainTreeSum(workers=3, tree={1: 0})


def test_coordinator_learns_the_shape_from_the_first_message():
    protocol = TwoTreeSum(workers=4, coordinator=True)
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    machines = {a: node.round(np.ones((2, 3)) if a >= 0 else None, round=0) for a, node in nodes.items()}
    driver = Driver(machines)
    driver.start()
    driver.run()
    np.testing.assert_array_equal(machines[COORDINATOR].result(), np.full((2, 3), 4.0))


def test_inner_coordinator_needs_a_shape_only_as_a_leaf():
    pair = TreePair({COORDINATOR: 0, 1: 0, 2: 1, 3: 2}, {COORDINATOR: 1, 0: 3, 3: 2, 2: 1})
    protocol = TwoTreeSum(workers=4, trees=pair, collusion=0)
    with pytest.raises(InputError, match="shape"):
        protocol.node(COORDINATOR).round(round=0)
    values = [np.full(2, float(i)) for i in range(4)]
    np.testing.assert_array_equal(protocol.sum(values), [6.0, 6.0])


def test_a_mask_total_before_the_masks_is_refused():
    pair = TreePair({1: 0, 2: 1, 3: 1}, {2: 0, 0: 3, 1: 2})
    protocol = TwoTreeSum(workers=4, trees=pair, collusion=0)
    machine = protocol.node(0).round(np.zeros(2), round=0)
    machine.start()
    early = MaskTotal(round=0, total=np.zeros(2, np.uint64))
    refuses(machine, Envelope(3, 0, early))
    machine.receive(Envelope(2, 0, Subtotal(round=0, tree=2, total=np.zeros(2, np.uint64))))
    assert machine.receive(Envelope(3, 0, early)) == []


def test_ring_elements_pass_as_they_are():
    protocol = TwoTreeSum(workers=3)
    ring = protocol.fixed_point
    values = [np.array([2**63 + i], dtype=np.uint64) for i in range(3)]
    kept = [value.copy() for value in values]
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    total = np.array([(3 * 2**63 + 3) % 2**64], dtype=np.uint64)
    np.testing.assert_array_equal(run_round(nodes, values, round=0), ring.decode(total))
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("dtype", [np.uint64, np.uint32, np.int8, np.float32, bool])
def test_sums_take_any_numbers_as_numbers(dtype):
    for ring in (FixedPoint(), FixedPoint(32, 8)):
        total = TwoTreeSum(workers=3, fixed_point=ring).sum([np.ones(2, dtype=dtype)] * 3)
        np.testing.assert_array_equal(total, [3.0, 3.0])


def test_sent_arrays_cannot_be_changed():
    protocol = PlainTreeSum(workers=3)
    machine = protocol.node(1).round(np.zeros(3), round=0)
    (envelope,) = machine.start()
    with pytest.raises(ValueError, match="read-only"):
        envelope.message.total[0] = 1
