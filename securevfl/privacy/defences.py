"""What a label holder can do to its labels, and to the gradients that it answers with.

Two of these carry a guarantee. Randomised response flips each label once, before anything is computed from
it, so that everything later is post-processing: labels are epsilon-differentially private whatever comes
next. ``noise`` clips and perturbs every gradient that leaves; each is a Gaussian release of the label holder
and counted like one. All others are heuristics from the literature: they lower the score of known attacks and
promise nothing, which the result of a run says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.privacy.noise import Noise

Floats = npt.NDArray[np.float64]
LabelArray = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Defence:
    """One way to change gradients before they leave.

    Attributes:
        summary: What it does, in one line.
        level: Level that the plan takes where it gives none; what it means is in the summary.
        change: (gradients of the batch's mean loss, one row per record; labels; level; noise) -> gradients.
        binary: True where it knows two classes only.
        counted: True where each release is accounted for; all others carry no guarantee.
    """

    summary: str
    level: float
    change: Callable[[Floats, LabelArray, float, Noise], Floats]
    binary: bool = False
    counted: bool = False


def _unchanged(gradients: Floats, labels: LabelArray, level: float, noise: Noise) -> Floats:
    return gradients


def _max_norm(gradients: Floats, labels: LabelArray, level: float, noise: Noise) -> Floats:
    """Noise along each gradient, so that all have the same expected squared norm (after Li et al. 2022)."""
    squares = (gradients**2).sum(axis=1, keepdims=True)
    excess = squares.max() / np.where(squares > 0, squares, np.inf) - 1
    std = level * np.sqrt(np.maximum(excess, 0))
    return np.asarray(gradients * (1 + std * noise.gaussian(std.shape, 1.0)))


def _sign(gradients: Floats, labels: LabelArray, level: float, noise: Noise) -> Floats:
    """Only signs, at the batch's mean magnitude times the level."""
    return np.asarray(np.sign(gradients) * np.abs(gradients).mean() * level)


def _discrete(gradients: Floats, labels: LabelArray, level: float, noise: Noise) -> Floats:
    """Rounds to evenly spaced values within two deviations of the batch's mean (after Fu et al. 2022)."""
    centre, reach = gradients.mean(), 2 * gradients.std()
    if reach == 0:
        return gradients
    step = 2 * reach / level
    return np.asarray(centre + np.clip(np.rint((gradients - centre) / step) * step, -reach, reach))


def _marvell(gradients: Floats, labels: LabelArray, level: float, noise: Noise) -> Floats:
    """Noise per class that makes the classes' gradients look alike, at a given power (Li et al. 2022)."""
    positive = labels > 0.5
    if positive.all() or not positive.any():
        return gradients
    gap = gradients[positive].mean(axis=0) - gradients[~positive].mean(axis=0)
    square, width = float(gap @ gap), gradients.shape[1]
    if square == 0:
        return gradients
    spreads = [float(gradients[side].var(axis=0).mean()) for side in (~positive, positive)]
    shares = [float((~positive).mean()), float(positive.mean())]
    along, across = marvell_variances(spreads, shares, square, width, level * square)
    direction = gap / math.sqrt(square)
    noisy = gradients.copy()
    for number, side in enumerate((~positive, positive)):
        count = int(side.sum())
        drawn = noise.gaussian((count, width), math.sqrt(across[number]))
        extra = noise.gaussian((count, 1), math.sqrt(along[number] - across[number]))
        noisy[side] += drawn + extra * direction
    return noisy


def marvell_variances(
    spreads: list[float], shares: list[float], square: float, width: int, power: float
) -> tuple[list[float], list[float]]:
    """Variances along the classes' difference and across it that minimise the symmetric KL divergence.

    Args:
        spreads: Variance per coordinate of the gradients of class 0 and 1.
        shares: Frequency of class 0 and 1.
        square: Squared distance of the classes' mean gradients.
        width: Number of coordinates.
        power: Expected squared norm of the noise, averaged over the classes.

    Returns:
        Variances along (class 0, class 1) and across (class 0, class 1); along is at least across.
    """
    from scipy.optimize import minimize

    low, high = spreads

    def divergence(x: Floats) -> float:
        along0, along1, across0, across1 = np.maximum(x, 0)
        left, right = along0 + low + 1e-12 * square, along1 + high + 1e-12 * square
        side0, side1 = across0 + low + 1e-12 * square, across1 + high + 1e-12 * square
        other = (width - 1) * (side0 / side1 + side1 / side0)
        return float(other + (left + square) / right + (right + square) / left)

    def spare(x: Floats) -> float:
        used = shares[0] * (x[0] + (width - 1) * x[2]) + shares[1] * (x[1] + (width - 1) * x[3])
        return float((power - used) / square)

    start = np.array([power, power, 0.0, 0.0])
    found = minimize(
        divergence,
        start,
        method="SLSQP",
        bounds=[(0.0, None)] * 4,
        constraints=[
            {"type": "ineq", "fun": spare},
            {"type": "ineq", "fun": lambda x: (x[0] - x[2]) / square},
            {"type": "ineq", "fun": lambda x: (x[1] - x[3]) / square},
        ],
    )
    best = found.x if divergence(found.x) < divergence(start) and spare(found.x) > -1e-6 else start
    along, across = np.maximum(best[:2], 0), np.maximum(best[2:], 0)
    return list(np.maximum(along, across)), list(across)


DEFENCES: dict[str, Defence] = {
    "none": Defence(summary="gradients leave as they are", level=0.0, change=_unchanged),
    "noise": Defence(
        summary="clips each record's gradient and adds Gaussian noise of `level` clips; counted",
        level=10.0,
        change=_unchanged,
        counted=True,
    ),
    "max-norm": Defence(
        summary="stretches gradients at random towards the longest one; `level` scales the noise",
        level=1.0,
        change=_max_norm,
    ),
    "marvell": Defence(
        summary="noise of `level` squared class distances that makes the classes look alike",
        level=1.0,
        change=_marvell,
        binary=True,
    ),
    "sign": Defence(summary="only the gradients' signs, times `level` mean sizes", level=1.0, change=_sign),
    "discrete": Defence(
        summary="rounds gradients to `level` steps within two deviations", level=6.0, change=_discrete
    ),
}
"""Every defence of gradients by name. Only those that are counted carry a guarantee."""


def keep_probability(epsilon: float, classes: int) -> float:
    """How often randomised response keeps a label: e^epsilon / (e^epsilon + classes - 1), rounded down."""
    return float(np.nextafter(1 / (1 + (classes - 1) * math.exp(-epsilon)), 0.0))


def randomise_labels(labels: LabelArray, classes: int, epsilon: float, noise: Noise) -> LabelArray:
    """Randomised response: keeps a label or replaces it by one of the others, all equally likely.

    The result is epsilon-differentially private for each label, by itself and in everything that is computed
    from it, as long as the original is used for nothing else that leaves. Drawing anew would spend epsilon
    again.

    Args:
        labels: Class codes 0 to classes - 1, of any numeric type.
        classes: Number of classes, at least 2.
        epsilon: Per label.
        noise: Source of the coins.
    """
    codes = np.rint(labels).astype(np.int64)
    coins, others = noise.uniform((2, len(codes)), 0.5) + 0.5
    kept = coins < keep_probability(epsilon, classes)
    # A jump of 1 to classes - 1 reaches each other class once.
    jump = 1 + np.minimum((others * (classes - 1)).astype(np.int64), classes - 2)
    flipped = np.where(kept, codes, (codes + jump) % classes)
    return np.asarray(flipped.astype(labels.dtype))
