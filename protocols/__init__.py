"""Secure sums, trees, masks and private ID alignment. Loads no torch."""

from securevfl.protocols.alignment.protocol import PrivateAlignment
from securevfl.protocols.contract import (
    AGGREGATOR,
    COORDINATOR,
    DEALER,
    KEY_HOLDER,
    Envelope,
    Machine,
    Message,
    Node,
    SecureSum,
)
from securevfl.protocols.driver import Driver, run_round, run_setup
from securevfl.protocols.keys import Authenticator
from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.sealed.dealer import SealedDealer
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.protocols.sums.bfv import BFVSum
from securevfl.protocols.sums.ckks import CKKSSum
from securevfl.protocols.sums.noise import DistributedNoise, NoisySum
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum
from securevfl.protocols.sums.trees import TreePair, build_trees

__all__ = [
    "AGGREGATOR",
    "COORDINATOR",
    "DEALER",
    "KEY_HOLDER",
    "Authenticator",
    "BFVSum",
    "CKKSSum",
    "DistributedNoise",
    "Driver",
    "Envelope",
    "FixedPoint",
    "Machine",
    "Message",
    "Node",
    "NoisySum",
    "PairwiseMaskSum",
    "PlainTreeSum",
    "PrivateAlignment",
    "SealedDealer",
    "SealedParty",
    "SealedProtocol",
    "SecureSum",
    "TreePair",
    "TwoTreeSum",
    "build_trees",
    "run_round",
    "run_setup",
]
