"""Secure sums behind one contract: plain, along trees, under pairwise masks, homomorphic, with noise."""

from securevfl.protocols.sums.bfv import BFVSum
from securevfl.protocols.sums.ckks import CKKSSum, Flooding
from securevfl.protocols.sums.noise import DistributedNoise, NoisySum
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
from securevfl.protocols.sums.plain import PlainSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum
from securevfl.protocols.sums.trees import TreePair, build_trees, describe, draw

__all__ = [
    "BFVSum",
    "CKKSSum",
    "DistributedNoise",
    "Flooding",
    "NoisySum",
    "PairwiseMaskSum",
    "PlainSum",
    "PlainTreeSum",
    "TreePair",
    "TwoTreeSum",
    "build_trees",
    "describe",
    "draw",
]
