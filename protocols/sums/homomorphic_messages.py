"""The messages of a homomorphic sum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from securevfl.protocols.contract import Message


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublicKey(Message):
    """The key holder's public key, sent to every worker before the first round."""

    kind: ClassVar[str] = "he-key"
    key: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncryptedValue(Message):
    """One worker's ciphertexts, to the aggregator."""

    kind: ClassVar[str] = "he-value"
    shape: list[int]
    sizes: list[int]
    ciphertexts: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncryptedTotal(EncryptedValue):
    """The added ciphertexts, from the aggregator to the key holder."""

    kind: ClassVar[str] = "he-total"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedTotal(Message):
    """The decrypted sum as 64-bit integers, from the key holder to the workers."""

    kind: ClassVar[str] = "he-opened"
    total: npt.NDArray[np.int64]
