"""What is said besides, where members may cheat: proofs, tagged shares, coins, commitments, openings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy.typing as npt

from securevfl.protocols.contract import Message


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProofSeed(Message):
    """Dealer to member, once a session: its seeds, and what a seed cannot hold of the label mask's shares.

    `locked` is the seed under a key that only the dealer has, for a joint audit.
    """

    kind: ClassVar[str] = "sealed-proof-seed"
    secret: ClassVar[tuple[str, ...]] = ("seed", "pairs")
    opaque: ClassVar[tuple[str, ...]] = ("locked",)
    uniform: ClassVar[tuple[str, ...]] = ("share", "tags")
    widths: ClassVar[Mapping[str, int]] = {"share": 61, "tags": 61}
    session: bytes
    seed: bytes
    locked: bytes
    pairs: bytes
    share: npt.NDArray[Any]
    tags: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProofKeys(Message):
    """Dealer to verifier, once a session and prover: a secret point, and the masks' polynomials there."""

    kind: ClassVar[str] = "sealed-proof-keys"
    secret: ClassVar[tuple[str, ...]] = ("point", "operand", "bits", "labels", "masks")
    prover: int
    point: npt.NDArray[Any]
    operand: npt.NDArray[Any]
    bits: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    masks: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CheckedOperand(Message):
    """Member to all others: masked rows and labels, and the key of its signatures in this session."""

    kind: ClassVar[str] = "sealed-checked-operand"
    uniform: ClassVar[tuple[str, ...]] = ("words", "labels")
    widths: ClassVar[Mapping[str, int]] = {"words": 60, "labels": 61}
    words: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    key: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ready(Message):
    """Member to dealer: everything before a coin is in. It travels as a public fact."""

    kind: ClassVar[str] = "sealed-stage"
    stage: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Coin(Message):
    """Dealer to all, once everybody is ready: what is checked; with the proof's second coin, corrections."""

    kind: ClassVar[str] = "sealed-coin"
    unmasked: ClassVar[tuple[str, ...]] = ("corrections",)
    fresh: ClassVar[tuple[str, ...]] = ("coin",)
    stage: int
    coin: bytes
    corrections: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Bits(Message):
    """Prover to all others: masked bits of the projections, and a digest of all members' keys."""

    kind: ClassVar[str] = "sealed-bits"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    widths: ClassVar[Mapping[str, int]] = {"words": 61}
    words: npt.NDArray[Any]
    keys: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proof(Message):
    """Prover to one verifier: values of the masked polynomials."""

    kind: ClassVar[str] = "sealed-proof"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    widths: ClassVar[Mapping[str, int]] = {"words": 61}
    words: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CheckedDeal(Message):
    """Dealer to member, every round: a seed, c_m; to one member wave shares, to another their tags.

    `locked` is the seed under a key that only the dealer has, for a joint audit.
    """

    kind: ClassVar[str] = "sealed-checked-deal"
    secret: ClassVar[tuple[str, ...]] = ("seed",)
    opaque: ClassVar[tuple[str, ...]] = ("locked",)
    uniform: ClassVar[tuple[str, ...]] = ("product", "waves", "tags")
    widths: ClassVar[Mapping[str, int]] = {"waves": 61, "tags": 61}
    seed: bytes
    locked: bytes
    product: npt.NDArray[Any]
    waves: npt.NDArray[Any]
    tags: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CheckedShare(Message):
    """Member j to member m: the blinded residual share, signed with j's phase, and m's masked product."""

    kind: ClassVar[str] = "sealed-checked-share"
    uniform: ClassVar[tuple[str, ...]] = ("blinded", "product")
    widths: ClassVar[Mapping[str, int]] = {"blinded": 61}
    blinded: npt.NDArray[Any]
    product: npt.NDArray[Any]
    signature: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Commitment(Message):
    """Member to all others, once the coin is known: a digest of what it will open, and what it has seen.

    `seen` holds for each sender the digest and signature of what arrived; nothing with two members.
    """

    kind: ClassVar[str] = "sealed-commitment"
    fresh: ClassVar[tuple[str, ...]] = ("digest",)
    digest: bytes
    seen: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Opening(Message):
    """Member to all others, once all commitments are in: its share of the check, which must add up to 0."""

    kind: ClassVar[str] = "sealed-opening"
    unmasked: ClassVar[tuple[str, ...]] = ("word",)
    fresh: ClassVar[tuple[str, ...]] = ("nonce",)
    nonce: bytes
    word: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairSeed(Message):
    """Without a dealer, once a session: the lower of two members tells the other the seed they share."""

    kind: ClassVar[str] = "sealed-pair-seed"
    secret: ClassVar[tuple[str, ...]] = ("seed",)
    seed: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PeerDeal(Message):
    """Member to the member it deals for, every round: corrections, and to one a share of the waves."""

    kind: ClassVar[str] = "sealed-peer-deal"
    uniform: ClassVar[tuple[str, ...]] = ("product", "waves")
    product: npt.NDArray[Any]
    waves: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CipherKey(Message):
    """Of two members without a dealer, once a session: the public key, and the digest of the tables."""

    kind: ClassVar[str] = "sealed-public-key"
    key: bytes
    tables: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncryptedRows(Message):
    """Some ciphertexts of a member's rows, of so many columns; views keep digests of ciphertexts."""

    kind: ClassVar[str] = "sealed-encrypted-rows"
    secret: ClassVar[tuple[str, ...]] = ("data",)
    columns: int
    chunk: int
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowsTaken(Message):
    """The other has them; the next may come."""

    kind: ClassVar[str] = "sealed-rows-taken"
    chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Offer(Message):
    """Ahead of round `number`: the first member's encrypted masks, and its answer to the other's rows."""

    kind: ClassVar[str] = "sealed-offer"
    secret: ClassVar[tuple[str, ...]] = ("masks", "product")
    number: int
    binding: bytes
    masks: bytes
    product: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Message):
    """The second member's answers: products of masks, and of the other's rows."""

    kind: ClassVar[str] = "sealed-answer"
    secret: ClassVar[tuple[str, ...]] = ("products", "product")
    number: int
    products: bytes
    product: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Factors(Message):
    """Member to the other: factors of its scores, masked, (rows, factors)."""

    kind: ClassVar[str] = "sealed-factors"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    widths: ClassVar[Mapping[str, int]] = {"words": 50}
    words: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blinded(Message):
    """Member to the other: its share of the residuals, masked, (rows, outputs)."""

    kind: ClassVar[str] = "sealed-blinded"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    widths: ClassVar[Mapping[str, int]] = {"words": 50}
    words: npt.NDArray[Any]


ENCRYPTED_MESSAGES: tuple[type[Message], ...] = (
    CipherKey,
    EncryptedRows,
    RowsTaken,
    Offer,
    Answer,
    Factors,
    Blinded,
)
PEERS: tuple[type[Message], ...] = (PairSeed, PeerDeal, *ENCRYPTED_MESSAGES)
DEALT: tuple[type[Message], ...] = (ProofSeed, ProofKeys, Coin, CheckedDeal)
BETWEEN: tuple[type[Message], ...] = (CheckedOperand, Bits, Proof, CheckedShare, Commitment, Opening)
CHECKED_MESSAGES: tuple[type[Message], ...] = (*DEALT, *BETWEEN, Ready)
