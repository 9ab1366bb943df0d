"""Messages of private alignment. None holds an ID, nor anything that can be computed from an ID alone."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from securevfl.protocols.contract import Message


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignHello(Message):
    """A party is there: its part of the session's salt, its number of IDs, and what it believes is going on.

    With a helper also an X25519 key for what the helper must not know, signed where there is an identity.
    """

    kind: ClassVar[str] = "align-hello"
    nonce: bytes
    count: int
    about: bytes
    public: bytes
    signature: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignKey(Message):
    """A party's part of the key that the helper never sees, sealed for one other party."""

    kind: ClassVar[str] = "align-key"
    sealed: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignCommit(Message):
    """Hash of a list of blinded values that will follow once everybody has committed."""

    kind: ClassVar[str] = "align-commit"
    digest: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignPiece(Message):
    """The next values of a list."""

    kind: ClassVar[str] = "align-piece"
    values: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignMore(Message):
    """A piece was taken; there is room for the next."""

    kind: ClassVar[str] = "align-more"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignMarks(Message):
    """One bit per value of a list: whether it is common to all."""

    kind: ClassVar[str] = "align-marks"
    bits: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignDigest(Message):
    """What all must agree on in the end, as a hash."""

    kind: ClassVar[str] = "align-digest"
    digest: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AlignElement(Message):
    """The party's records, as one point times a secret; says nothing to who does not have the same."""

    kind: ClassVar[str] = "align-element"
    element: bytes


MESSAGES: tuple[type[Message], ...] = (
    AlignHello,
    AlignKey,
    AlignCommit,
    AlignPiece,
    AlignMore,
    AlignMarks,
    AlignDigest,
    AlignElement,
)
