"""Sealed gradients: secret-shared residuals, of which only noisy totals are opened."""

from securevfl.protocols.sealed.checked_dealer import CheckedDealer
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.dealer import SealedDealer
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.protocols.sealed.series import (
    SineSeries,
    Waves,
    class_series,
    identity_series,
    logistic_series,
)

__all__ = [
    "CheckedDealer",
    "CheckedParty",
    "SealedDealer",
    "SealedParty",
    "SealedProtocol",
    "SineSeries",
    "Waves",
    "class_series",
    "identity_series",
    "logistic_series",
]
