"""Numerical accountants: privacy loss distributions (PLD) and privacy random variables (PRV)."""

import math
import warnings
from typing import Any

from securevfl.accountants import checks
from securevfl.accountants.base import Accountant
from securevfl.accountants.composition import Composition, Pair, compose
from securevfl.accountants.moments import MomentsAccountant
from securevfl.accountants.pairs import Direction, ResponsePair, SampledGaussianPair
from securevfl.accountants.workload import Workload
from securevfl.errors import AccountingError


class PLDAccountant(Accountant):
    """Pessimistic privacy loss distributions: the tightest upper bound for sampled releases.

    Same discretisation as dp-accounting, but composed under an exponential tilt with all rounding
    bounded, so that it stays an upper bound down to delta 1e-15 and costs at most some 0.3 GB and seconds
    whatever the counts. Under replace-one the sensitivity of a *sampled* release must be twice its clip
    norm, both neighbours' vectors being anywhere in the ball.
    """

    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        composed = compositions(workload)
        note = "grid widened to fit memory" if any(c.widened for c in composed) else ""
        return max(c.epsilon(delta) for c in composed), note, self.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        return max(c.delta(epsilon) for c in compositions(workload))


def compositions(workload: Workload) -> list[Composition]:
    """Return the composition for each direction of the adjacency; the larger figure counts."""
    directions: tuple[Direction, ...] = ("replace",) if workload.replace else ("remove", "add")
    if not workload.sampled:
        directions = ("remove",)
    return [compose(*_pairs(workload, direction)) for direction in directions]


def _pairs(workload: Workload, direction: Direction) -> tuple[list[Pair], list[int]]:
    pairs: list[Pair] = []
    counts = []
    if workload.mu > 0:
        pairs.append(SampledGaussianPair(spread=1 / workload.mu, rate=1.0, direction="remove"))
        counts.append(1)
    for (ratio, rate), count in workload.sampled:
        spread = 2 * ratio if direction == "replace" else ratio
        pairs.append(SampledGaussianPair(spread=spread, rate=rate, direction=direction))
        counts.append(count)
    for response, count in workload.responses:
        epsilon, keep = float(response.epsilon or 0.0), float(response.keep_probability or 0.0)
        if epsilon > 0:
            pairs.append(ResponsePair(epsilon=epsilon, keep=keep, classes=response.classes))
            counts.append(count)
    return pairs, counts


class PRVAccountant(Accountant):
    """The *upper* output of prv-accountant (Gopi, Lee and Wutschitz 2021), where that library is safe.

    Its memory and time grow with the square root of the count, and its round-off with the count. Both are
    predicted first; where the prediction is bad, or the event is one that the library does not know, the
    figure is the PLD accountant's and the explanation says why.

    Args:
        epsilon_error: Width of the library's bracket; the upper figure exceeds the truth by about as much.
        points: Largest grid that the library may use (1,000,000 points take about 2 s and 0.3 GB).
    """

    def __init__(self, *, epsilon_error: float = 0.01, points: int = 1_000_000) -> None:
        self._error = checks.positive("epsilon_error", epsilon_error)
        self._points = checks.count("points", points, least=1)

    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        reason = self._obstacle(workload, delta)
        if not reason:
            try:
                return self._library(workload, delta), f"within {self._error:g} of the truth", self.name
            except (ArithmeticError, AssertionError, RuntimeError, ValueError) as problem:
                reason = f"prv-accountant failed ({problem})"
        fallback = PLDAccountant()
        return fallback._epsilon(workload, delta)[0], f"PLD figure: {reason}", fallback.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        # The library needs its delta error beforehand, which depends on the answer: use the sound peer.
        return PLDAccountant()._delta(workload, epsilon)

    def _obstacle(self, workload: Workload, delta: float) -> str:
        """Return why the library must not be called, or nothing."""
        if workload.sampled and workload.replace:
            return "prv-accountant knows sampled releases under add-remove only"
        if workload.responses:
            return "prv-accountant is not used for randomised response"
        count = self._count(workload)
        if count * 2.0**-49 > delta / 1000:
            return f"round-off of {count} compositions would show at delta {delta:g}"
        points = 2 * self._domain(workload, delta) / self._mesh(count, delta)
        return f"it would need {points:.1e} grid points" if points > self._points else ""

    def _count(self, workload: Workload) -> int:
        return sum(count for _, count in workload.sampled) + (1 if workload.mu else 0)

    def _mesh(self, count: int, delta: float) -> float:
        """Return the step that the library will choose (Theorem 5.5 of the paper)."""
        return self._error / math.sqrt(count / 2 * math.log(12_000 / delta))

    def _domain(self, workload: Workload, delta: float) -> float:
        """Return a safe half-width of the grid (Remark 5.6), from this package's own Rényi bound."""
        moments = MomentsAccountant()
        whole = moments._epsilon(workload, delta / 4000)[0]
        count = self._count(workload)
        singles = [
            Workload(mu=0.0, sampled=((key, 1),), responses=(), exact=False, replace=False, assumptions=())
            for key, _ in workload.sampled
        ]
        each = [moments._epsilon(single, delta / 8000 / count)[0] for single in singles]
        return max([whole, self._error, *each]) + 3

    def _library(self, workload: Workload, delta: float) -> float:
        from prv_accountant import PRVAccountant as LibraryAccountant
        from prv_accountant.privacy_random_variables import (
            GaussianMechanism,
            PoissonSubsampledGaussianMechanism,
        )

        variables: list[Any] = [
            PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=ratio)
            for (ratio, rate), _ in workload.sampled
        ]
        counts = [count for _, count in workload.sampled]
        if workload.mu:
            variables.append(GaussianMechanism(noise_multiplier=1 / workload.mu))
            counts.append(1)
        with warnings.catch_warnings():
            # It warns that the given domain is assumed to be large enough, and of underflow in the tails.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            accountant = LibraryAccountant(
                prvs=variables,
                max_self_compositions=counts,
                eps_error=self._error,
                delta_error=delta / 1000,
                eps_max=self._domain(workload, delta),
            )
            upper = float(accountant.compute_epsilon(delta, counts)[2])
        if not math.isfinite(upper):
            raise AccountingError(f"prv-accountant returned {upper}")
        return max(0.0, upper)
