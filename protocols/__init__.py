"""Secure sums, trees, masks and private ID alignment. Loads no torch."""

from securevfl.protocols.alignment import PrivateAlignment
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
from securevfl.protocols.driver import Driver, drive, run_round, run_setup
from securevfl.protocols.keys import Authenticator
from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.sealed import SealedDealer, SealedParty, SealedProtocol
from securevfl.protocols.sums import (
    BFVSum,
    CKKSSum,
    DistributedNoise,
    NoisySum,
    PairwiseMaskSum,
    PlainTreeSum,
    TreePair,
    TwoTreeSum,
    build_trees,
)

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
    "drive",
    "run_round",
    "run_setup",
]
