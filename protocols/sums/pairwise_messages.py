"""The messages of sums under pairwise masks; all of them pass the aggregator."""

from __future__ import annotations

import dataclasses

import numpy as np

from securevfl.protocols.contract import Message


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublicKeys(Message):
    """A worker's public keys, followed by its signature where keys are signed, to the aggregator."""

    kind = "pairwise.public-keys"
    public: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeyDirectory(Message):
    """Who takes part, and the public keys of the receiver's neighbours among them.

    One row per neighbour, in ascending order of address, as that neighbour sent it.
    """

    kind = "pairwise.key-directory"
    participants: list[int]
    public: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Encapsulations(Message):
    """ML-KEM ciphertexts: to the aggregator, for the higher neighbours; from it, of the lower ones.

    On the way from the aggregator, `participants` are those who still take part; to it, the list is empty.
    """

    kind = "pairwise.encapsulations"
    participants: list[int]
    ciphertexts: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SealedShares(Message):
    """A worker's seeds, shared among its neighbours.

    `sealed` has one row per neighbour, readable by that neighbour alone; `covered` the seeds of the masks
    shared with each neighbour, hidden under the pair seed; `checks` tells whether an opened seed is right.
    """

    kind = "pairwise.sealed-shares"
    fresh = ("checks",)
    sealed: np.ndarray
    covered: np.ndarray
    checks: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RelayedShares(Message):
    """Who takes part, and the rows that participating neighbours sealed for the receiver."""

    kind = "pairwise.relayed-shares"
    participants: list[int]
    sealed: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskedInput(Message):
    """A worker's input under all its masks."""

    kind = "pairwise.masked-input"
    uniform = ("values",)
    values: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Survivors(Message):
    """The participants whose masked input has arrived."""

    kind = "pairwise.survivors"
    survivors: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Confirmation(Message):
    """A worker's marks on the lists that it was told, one row for each surviving neighbour to check."""

    kind = "pairwise.confirmation"
    marks: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Confirmations(Message):
    """The receiver's neighbours that have confirmed their lists, and their marks for the receiver."""

    kind = "pairwise.confirmations"
    confirmed: list[int]
    marks: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedShares(Message):
    """One share per participant known to the sender: of its self seed if it survived, else its pair seed."""

    kind = "pairwise.opened-shares"
    shares: np.ndarray
