"""Metrics from noisy totals: AUC, Brier score and log loss without opening a score.

With sgn(d) = sum_k c_k sin(2 pi k d / P), c_k = 4 / (pi k), k odd, |d| < P/2,

    AUC = 1/2 + 1/2 sum_k c_k (S+_k C-_k - C+_k S-_k) / (n+ n-),

where S and C are sums of sin and cos(2 pi k u / P) over the positives or the negatives. The totals are opened
as a_k S + noise with a_k^2 proportional to 1/k and sum a_k^2 = 1: a record's vector has norm 1, and replacing
a record moves the totals by at most 2. If the label changes it is sqrt 2, so the number of positives fits
beside them with noise s / sqrt 2 at no further cost. Noise that an observer knows does not count: s is the
standard deviation of what it does not know.

What enters are centred scores v = scale (u - shift): ranks, and so the AUC, do not depend on either, and all
v stay within +-P/4 whatever the rate of positives. Losses are series in v; both numbers are public.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from securevfl.accountants import checks
from securevfl.errors import AccountingError

Floats: TypeAlias = NDArray[np.float64]

_GRID = 2001
_RIDGE = 3e-6  # of the fitted losses, where amplitude^-2 is the unit


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric with its standard error: of the noise, and of noise and sampling together."""

    value: float
    noise_error: float
    standard_error: float


@dataclass(frozen=True, kw_only=True)
class MetricTotals:
    """The totals of one evaluation: what they are, what they cost, what they say.

    Args:
        period: P; the difference of two scores stays below half of it.
        harmonics: K odd harmonics.
        rounding: How far the protocol's waves lengthen a record's vector; the series' own bound.
    """

    period: float = 48.0
    harmonics: int = 24
    rounding: float = 0.0

    def __post_init__(self) -> None:
        checks.positive("period", self.period)
        checks.count("harmonics", self.harmonics, least=1)
        checks.non_negative("rounding", self.rounding)

    @cached_property
    def orders(self) -> Floats:
        """The odd numbers 1, 3, 5, ..."""
        return np.arange(1.0, 2 * self.harmonics, 2)

    @cached_property
    def amplitudes(self) -> Floats:
        """a_k."""
        squares = 1 / self.orders
        found: Floats = np.sqrt(squares / squares.sum())
        return found

    def clamp(self, members: int) -> float:
        """Bound of each member's score, so that two sums of them differ by at most P/2."""
        return self.period / (4 * checks.count("members", members, least=1))

    def sigma(self, *, mu: float, evaluations: int = 1) -> float:
        """Noise s that an observer must not know, for `mu` after some evaluations of a record."""
        times = checks.count("evaluations", evaluations, least=1)
        return 2 * (1 + self.rounding) * math.sqrt(times) / checks.positive("mu", mu)

    def mu(self, *, sigma: float, evaluations: int = 1) -> float:
        """What `evaluations` of a record cost."""
        times = checks.count("evaluations", evaluations)
        return 2 * (1 + self.rounding) * math.sqrt(times) / checks.positive("sigma", sigma)

    def share(self, *, sigma: float, members: int, colluders: int) -> tuple[float, float]:
        """Noise of each member's share, and of an opened total: all shares, the label holder's included."""
        if not 0 <= checks.count("colluders", colluders) < members:
            raise AccountingError(f"{colluders} colluders among {members} members leave nobody honest")
        each = checks.positive("sigma", sigma) / math.sqrt(members - colluders)
        return each, each * math.sqrt(members)

    def vectors(self, scores: ArrayLike, labels: ArrayLike) -> Floats:
        """Every record's part of the opened totals, [record, (S+, C+, S-, C-), k], amplitudes included."""
        turns = np.asarray(scores, np.float64)[:, None] * (2 * np.pi / self.period) * self.orders
        waves = np.stack([np.sin(turns), np.cos(turns)], axis=1) * self.amplitudes
        positive = np.asarray(labels, np.float64)[:, None, None]
        return np.concatenate([waves * positive, waves * (1 - positive)], axis=1)

    def totals(self, scores: ArrayLike, labels: ArrayLike) -> Floats:
        """The exact totals [(S+, C+, S-, C-), k] in the opened scale."""
        scores, labels = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
        chunks = range(0, len(scores), 8192)
        found = sum(self.vectors(scores[i : i + 8192], labels[i : i + 8192]).sum(axis=0) for i in chunks)
        return np.asarray(found, np.float64)

    def auc(
        self, totals: Floats, *, positives: float, records: int, noise: float, positives_noise: float = 0.0
    ) -> Estimate:
        """AUC from opened totals; unbiased, so it may leave [0, 1] by the noise.

        Args:
            totals: The opened totals.
            positives: n+, exact only if the result stays with the label holder.
            records: n.
            noise: Standard deviation of the noise on every opened total.
            positives_noise: Standard deviation of the noise on `positives`.
        """
        n, rest = _classes(positives, records)
        s_pos, c_pos, s_neg, c_neg = totals / self.amplitudes
        weights = 4 / (np.pi * self.orders)
        gain = 0.5 * float(weights @ (s_pos * c_neg - c_pos * s_neg)) / (n * rest)
        tau = (noise / self.amplitudes) ** 2
        # |F|^2 of noisy totals is too large by 2 tau^2 on average
        power = np.maximum(s_pos**2 + c_pos**2 + s_neg**2 + c_neg**2 - 4 * tau, 0.0)
        spread = float(weights**2 @ (tau * power + 2 * tau**2)) / (4 * n**2 * rest**2)
        spread += (gain * positives_noise * (1 / n - 1 / rest)) ** 2  # d/dn of 1 / (n (N - n))
        return Estimate(
            value=0.5 + gain,
            noise_error=math.sqrt(spread),
            standard_error=math.sqrt(spread + _sampling(min(max(0.5 + gain, 0.0), 1.0), n, rest)),
        )

    def brier(self, totals: Floats, **known: Any) -> Estimate:
        """Mean squared difference of probability and label; takes what `loss` takes."""
        return self.loss(lambda u: (1 / (1 + np.exp(-u))) ** 2, totals, **known)

    def log_loss(self, totals: Floats, **known: Any) -> Estimate:
        """Mean negative log likelihood; takes what `loss` takes."""
        return self.loss(lambda u: np.logaddexp(0, u), totals, **known)

    def loss(
        self,
        function: Callable[[Floats], Floats],
        totals: Floats,
        *,
        positives: float,
        records: int,
        noise: float,
        positives_noise: float = 0.0,
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> Estimate:
        """The mean of function(-u) over positives and function(u) over negatives.

        Args:
            function: Of a score.
            totals: The opened totals.
            positives: n+.
            records: n.
            noise: Standard deviation of the noise on every opened total.
            positives_noise: Standard deviation of the noise on `positives`.
            scale: What scores were multiplied by.
            shift: What was subtracted from scores before.
        """
        n, rest = _classes(positives, records)

        def mean(power: int) -> tuple[float, float]:
            above = self._fitted(lambda v: function(-(v / scale + shift)) ** power)
            below = self._fitted(lambda v: function(v / scale + shift) ** power)
            weights = np.concatenate([above[1], below[1]])
            value = (above[0] * n + below[0] * rest + float((weights * totals).sum())) / records
            apart = (above[0] - below[0]) * positives_noise
            return value, math.hypot(noise * math.sqrt(float((weights**2).sum())), apart) / records

        value, spread = mean(1)
        sampling = max(mean(2)[0] - value**2, 0.0) / records
        return Estimate(value=value, noise_error=spread, standard_error=math.sqrt(spread**2 + sampling))

    def _fitted(self, function: Callable[[Floats], Floats]) -> tuple[float, Floats]:
        """Offset and [(sin, cos), k] coefficients on opened totals, least squares with a ridge on |v| <= P/4.

        The ridge keeps the noise of the sum small; the offset is free, as the number of records is public.
        Odd harmonics change their sign over half a period, so with the offset they follow any function there.
        """
        places, solve = self._least_squares
        found = solve @ function(places)
        return float(found[0]), np.asarray(found[1:].reshape(2, -1), np.float64)

    @cached_property
    def _least_squares(self) -> tuple[Floats, Floats]:
        """Places of a function's values, and the matrix that turns these into coefficients."""
        v = np.linspace(-self.period / 4, self.period / 4, _GRID)
        waves = self.vectors(v, np.ones(_GRID))[:, :2].reshape(_GRID, -1)
        design = np.column_stack([np.ones(_GRID), waves])
        pull = np.diag([0.0] + [_RIDGE * _GRID] * waves.shape[1])
        return v, np.asarray(np.linalg.solve(design.T @ design + pull, design.T), np.float64)


def _classes(positives: float, records: int) -> tuple[float, float]:
    n = checks.real("positives", positives, "the number of positive records")
    rest = checks.count("records", records, least=1) - n
    if n <= 0 or rest <= 0:
        raise AccountingError(
            f"{n:g} positives of {records} records; both classes are needed: take more records or less noise"
        )
    return n, rest


def _sampling(auc: float, n: float, rest: float) -> float:
    """Variance of an AUC over samples of records (Hanley and McNeil 1982)."""
    first, second = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    top = auc * (1 - auc) + (n - 1) * (first - auc * auc) + (rest - 1) * (second - auc * auc)
    return max(top, 0.0) / (n * rest)
