"""The scenario of the sealed canary audit: who attacks whom, with which canary, and what the totals then are.

Scores of ordinary records are the victim's weight times a row that is the same for all of them, with labels
that balance at weight zero. The observer's first column belongs to the canary alone, its second to all
ordinary records. The victim's rate is such that its noise moves its weight by about `SPREAD`; the number of
ordinary records is such that this stands out in the observer's totals, and their pull takes the weight back
to zero within one iteration, so that each iteration shows the last one's total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securevfl.algorithms.sealed.settings import SealedSettings

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]

SPREAD = 1.0 / 48  # std of the victim's weight, in periods of the series
VISIBLE = 5.0  # how far the victim's secret noise stands out in the observer's totals
PULL = 2.0**-7  # share of the canary's row that sets its score, through a large public weight


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One record in two worlds: sign of its row, score at weight zero, and label.

    Attributes:
        signs: Of the victim's row.
        scores: What public initial weights make of the record.
        labels: Its label.
    """

    signs: tuple[float, float]
    scores: tuple[float, float]
    labels: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One victim, the coalition that faces the least noise, and the canary that shifts the totals most.

    Attributes:
        settings: The settings of the run.
        victim: Index of the member whose record is the canary.
    """

    NAIVE: ClassVar[str] = "own totals"
    """The accounting that counts only the totals that the observer obtains itself."""

    settings: SealedSettings
    victim: int

    @cached_property
    def coalition(self) -> frozenset[int]:
        """The worst of those that the victim is protected against."""
        shifts, variances = self.settings.shifts, self.settings.variances
        candidates = shifts.coalitions(self.settings.plan.collusion, without=self.victim)
        return max(filter(None, candidates), key=lambda s: shifts.squared_mu(variances, s))

    @cached_property
    def observer(self) -> int:
        """The member of the coalition whose totals carry least unknown noise, measured by its clip."""
        return min(self.coalition, key=self._unknown)

    def _noise(self, member: int, *, known: bool) -> float:
        """Noise on a member's total that the coalition knows, or does not know, in units of its clip."""
        row = self.settings.variances[member]
        variance = sum(v for j, v in enumerate(row) if (j in self.coalition) == known)
        return math.sqrt(variance) / self.settings.clips[member]

    def _unknown(self, member: int) -> float:
        return self._noise(member, known=False)

    # -- the canary -----------------------------------------------------------------------------------------

    @cached_property
    def canary(self) -> Canary:
        """Of the changes that the promise covers, the one that shifts the two totals most."""
        return max(self._candidates(), key=lambda canary: math.hypot(*self._distances(canary)))

    def _candidates(self) -> list[Canary]:
        series, (least, most) = self.settings.series, self.settings.label_range
        grid = np.linspace(-series.period / 4, series.period / 4, 4097)
        low, high = float(grid[series(grid).argmin()]), float(grid[series(grid).argmax()])
        if self.settings.plan.settings.protect == "label":
            return [Canary(signs=(1, 1), scores=(0, 0), labels=(most, least))]
        known = (
            self.settings.plan.settings.protect == "features" or self.settings.label_holder in self.coalition
        )
        return [
            Canary(signs=(-1, 1), scores=(low, low), labels=(most, most)),
            Canary(signs=(1, 1), scores=(low, high), labels=(most, most if known else least)),
        ]

    def _distances(self, canary: Canary) -> tuple[float, float]:
        """How far apart the worlds are in the victim's and the observer's total, in deviations of noise."""
        coins = np.array([False, True])
        residuals = self._residual(canary, np.zeros(2), coins)
        theirs = float(np.diff(np.asarray(canary.signs) * residuals)[0]) / self._unknown(self.victim)
        return theirs, float(np.diff(residuals)[0]) / self._unknown(self.observer)

    def _residual(self, canary: Canary, weight: Floats, coins: Coins) -> Floats:
        pairs = (canary.signs, canary.scores, canary.labels)
        sign, score, label = (np.where(coins, there, here) for here, there in pairs)
        return np.asarray(self.settings.series(score + sign * weight) - label)

    # -- one iteration --------------------------------------------------------------------------------------

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the victim's weight."""
        return SPREAD * self.settings.series.period

    @cached_property
    def slope(self) -> float:
        """Of the series at zero."""
        series, step = self.settings.series, 1e-4
        return float(series(step) - series(-step)) / (2 * step)

    @cached_property
    def row(self) -> float:
        """The victim's row of an ordinary record, in units of its clip."""
        return min(1.0, self._unknown(self.victim) / (VISIBLE * self._unknown(self.observer)))

    @cached_property
    def rate(self) -> float:
        """What a total, in units of the clip, moves the weight by."""
        return self.spread / math.hypot(self._unknown(self.victim), self._noise(self.victim, known=True))

    @cached_property
    def ordinary(self) -> int:
        """How many ordinary records there are, an even number."""
        secret = self.rate * self._unknown(self.victim)
        return 2 * math.ceil(VISIBLE * self._unknown(self.observer) / (2 * self.slope * self.row * secret))

    def totals(self, weight: Floats, coins: Coins) -> tuple[Floats, Floats]:
        """Exact totals: the observer's two columns, (2, ...) like `weight`, and the victim's column."""
        series, clips = self.settings.series, self.settings.clips
        residual = self._residual(self.canary, weight, coins)
        pull = self.ordinary * (series(self.row * weight) - series.offset)
        mine = np.stack([residual, pull]) * clips[self.observer]
        here, there = self.canary.signs
        signs = np.where(coins, there, here) * math.sqrt(1 - PULL * PULL)
        return mine, np.asarray((self.row * pull + signs * residual) * clips[self.victim])

    def step(self, weight: Floats, total: Floats) -> Floats:
        """The victim's next weight, from its noisy total alone."""
        limit = 8 * self.spread
        moved = weight - self.rate * total / self.settings.clips[self.victim]
        return np.clip(moved, -limit, limit)

    def naive_mu(self, iterations: int) -> float:
        """What the observer's own totals alone would promise after so many iterations."""
        shifts = self.settings.shifts
        known = shifts.protects == "features" or shifts.label_holder in self.coalition
        change = shifts.residual_change if known else 2 * shifts.residual_bound
        change = shifts.label_change if shifts.protects == "label" else change
        return change * math.sqrt(self.settings.data.outputs * iterations) / self._unknown(self.observer)
