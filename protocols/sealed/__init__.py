"""Sealed gradients: secret-shared residuals, of which only noisy totals are opened."""

from __future__ import annotations

from typing import Any

from securevfl.protocols.sealed.checked_dealer import CheckedDealer
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.dealer import SealedDealer
from securevfl.protocols.sealed.encrypted import EncryptedParty
from securevfl.protocols.sealed.kernel import Kernel
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import ENCRYPTED, THIRD, SealedProtocol
from securevfl.protocols.sealed.series import (
    SineSeries,
    Waves,
    class_series,
    identity_series,
    logistic_series,
)
from securevfl.protocols.sealed.third import ThirdParty

__all__ = [
    "CheckedDealer",
    "CheckedParty",
    "EncryptedParty",
    "Kernel",
    "SealedDealer",
    "SealedParty",
    "SealedProtocol",
    "SineSeries",
    "ThirdParty",
    "Waves",
    "class_series",
    "identity_series",
    "logistic_series",
    "party_of",
]


def party_of(protocol: SealedProtocol, index: int, *, labels: Any = None, **inputs: Any) -> SealedParty:
    """The member of a protocol, by where its masks come from and whether it is checked.

    Args:
        protocol: The public configuration.
        index: Which member.
        labels: Of a checked label holder: what its session proves.
        inputs: `operand` and `noise`, see `SealedParty`.
    """
    if protocol.checked:
        return CheckedParty(protocol, index, labels=labels, **inputs)
    others: dict[str, type[SealedParty]] = {THIRD: ThirdParty, ENCRYPTED: EncryptedParty}
    return others.get(protocol.dealing, SealedParty)(protocol, index, **inputs)
