"""Pairwise masks: conformance."""

from sum_conformance import SumConformance

from securevfl.protocols.contract import AGGREGATOR
from securevfl.protocols.pairwise import PairwiseMaskSum
from securevfl.protocols.ring import FixedPoint


class PairwiseConformance(SumConformance):
    exhaustive_workers = (3,)

    def may_send(self, protocol, other, envelope):
        """All workers send alike to the aggregator."""
        return other == envelope.sender or (envelope.receiver == AGGREGATOR and 0 <= other < protocol.workers)


class TestPairwiseRecovering(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        if workers == 3:
            return PairwiseMaskSum(workers=workers, collusion=0)
        return PairwiseMaskSum(workers=workers)


class TestPairwiseDirect(PairwiseConformance):
    exhaustive_workers = (3, 4)

    def make(self, workers):
        return PairwiseMaskSum(workers=workers, threshold=workers)


class TestPairwiseHybrid32(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        ring = FixedPoint(bits=32, fraction_bits=16)
        return PairwiseMaskSum(workers=workers, hybrid=True, fixed_point=ring)


class TestPairwiseSparse(PairwiseConformance):
    exhaustive_workers = ()

    def make(self, workers):
        return PairwiseMaskSum(workers=max(workers, 7), neighbours=4)
