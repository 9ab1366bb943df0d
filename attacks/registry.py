"""Every attack by name. A new attack is added here, explicitly."""

from __future__ import annotations

from securevfl.attacks.contract import Attack
from securevfl.attacks.equality import EqualitySolving, GenerativeRegression
from securevfl.attacks.exact import (
    ApproximateInference,
    ExactInference,
    ReverseMultiplication,
    TotalsInference,
)
from securevfl.attacks.feature import AttributeInference, BlackBoxInversion, WhiteBoxInversion
from securevfl.attacks.label import DirectLabels, GradientDirection, GradientNorm, Spectral
from securevfl.attacks.label_models import ActiveModelCompletion, BatchLabelInversion, ModelCompletion
from securevfl.attacks.membership import EmbeddingMembership, PredictionMembership
from securevfl.attacks.protocol import KeyScan, MaskStatistics, TreeCollusion, TreeLeak
from securevfl.errors import AttackError, nearest

_CLASSES: tuple[type[Attack], ...] = (
    GradientNorm,
    GradientDirection,
    DirectLabels,
    Spectral,
    ModelCompletion,
    ActiveModelCompletion,
    BatchLabelInversion,
    ExactInference,
    TotalsInference,
    ApproximateInference,
    EqualitySolving,
    GenerativeRegression,
    BlackBoxInversion,
    WhiteBoxInversion,
    ReverseMultiplication,
    AttributeInference,
    PredictionMembership,
    EmbeddingMembership,
    TreeLeak,
    TreeCollusion,
    MaskStatistics,
    KeyScan,
)

ATTACKS: dict[str, type[Attack]] = {attack.name: attack for attack in _CLASSES}


def find_attack(name: str) -> type[Attack]:
    """The attack of that name.

    Raises:
        AttackError: There is none; the nearest name is suggested.
    """
    if name not in ATTACKS:
        raise AttackError(f"unknown attack {name!r}; {nearest(name, ATTACKS)}")
    return ATTACKS[name]
