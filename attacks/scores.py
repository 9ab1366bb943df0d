"""Linear scores that tell two worlds apart, fixed beforehand or fitted on held-out trials."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import AttackError

Floats = NDArray[np.float64]

# Added to the covariance, relative to the features' size: without any noise it would not be invertible.
_RIDGE = 1e-9


@dataclass(frozen=True, kw_only=True)
class LinearScore:
    """Guesses world 1 where the weighted sum of the features exceeds the threshold.

    Attributes:
        weights: One weight per feature.
        threshold: Where the guess changes.
        origin: How it was found, for the report.
    """

    weights: Floats
    threshold: float
    origin: str

    @classmethod
    def fixed(cls, weights: Floats, threshold: float) -> LinearScore:
        """A score that was fixed before any trial."""
        return cls(weights=np.asarray(weights, np.float64), threshold=threshold, origin="fixed beforehand")

    @classmethod
    def fitted(cls, features: Floats, worlds: NDArray[np.bool_]) -> LinearScore:
        """Fisher's linear discriminant of held-out trials, with the threshold half way between the worlds.

        For Gaussian releases this is the likelihood ratio, and half way is the best threshold (mu/2).

        Raises:
            AttackError: One of the worlds has fewer than two trials.
        """
        one, zero = features[worlds], features[~worlds]
        if min(len(one), len(zero)) < 2:
            raise AttackError(f"{len(zero)} and {len(one)} held-out trials are too few to fit a score")
        centres = [zero.mean(0), one.mean(0)]
        spread = np.concatenate([zero - centres[0], one - centres[1]])
        covariance = spread.T @ spread / max(1, len(spread) - 2)
        difference = centres[1] - centres[0]
        ridge = _RIDGE * (np.trace(covariance) + difference @ difference + np.finfo(np.float64).tiny)
        weights = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), difference)
        threshold = float(weights @ (centres[0] + centres[1]) / 2)
        return cls(weights=weights, threshold=threshold, origin=f"fitted on {len(worlds)} held-out trials")

    def __call__(self, features: Floats) -> Floats:
        """The scores, with the threshold at 0."""
        return np.asarray(features @ self.weights - self.threshold, np.float64)
