"""Tree sums: conformance."""

from sum_conformance import SumConformance

from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.tree_sums import PlainTreeSum, Subtotal, TwoTreeSum


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
