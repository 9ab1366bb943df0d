"""Dominating pairs of one release and their privacy loss on a grid ("connect the dots").

Every mechanism here is a pair (P, Q) of distributions on the line whose log-likelihood ratio grows with
the outcome. The loss is put on the grid such that the mass under P *and* under Q of every cell is kept;
the resulting pair dominates the true one (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022).
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from securevfl.errors import AccountingError

Array: TypeAlias = NDArray[np.float64]
Mixture: TypeAlias = tuple[tuple[float, float], ...]
Direction: TypeAlias = Literal["remove", "add", "replace"]

# Beyond 11 standard deviations a Gaussian has 2e-28 of its mass: far below any delta in use.
_REACH = 11.0
_LARGE = 600.0  # losses beyond are rounded up, since exp(loss) would overflow


@dataclass(frozen=True, kw_only=True)
class GridLoss:
    """Privacy loss of one release: mass exp(`log_mass`) at losses `cells * step`, the rest infinite.

    Attributes:
        step: Step of the grid.
        cells: The multiples of the step that carry mass, ascending.
        log_mass: Logarithm of their mass.
        infinite: Mass at infinity.
    """

    step: float
    cells: NDArray[np.int64]
    log_mass: Array
    infinite: float

    @classmethod
    def of(cls, *, step: float, first: int, mass: Array, infinite: float) -> "GridLoss":
        """Build from the masses of consecutive cells, of which some may be zero."""
        if abs(float(mass.sum()) + infinite - 1) > 1e-9:
            raise AccountingError(f"the privacy loss has total mass {float(mass.sum()) + infinite!r}, not 1")
        carried = np.flatnonzero(mass)
        return cls(step=step, cells=carried + first, log_mass=np.log(mass[carried]), infinite=infinite)

    def log_moment(self, order: float) -> float:
        """Return log of the sum of mass * exp(order * loss)."""
        terms = self.log_mass + (order * self.step) * self.cells
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).sum()))


@dataclass(frozen=True, kw_only=True)
class SampledGaussianPair:
    """A Gaussian sum over a secret Poisson sample, scaled to means 0 and 1 (and -1 for `replace`).

    The pairs are those of Zhu, Dong and Wang 2022 (`remove`, `add`) and of dp-accounting's REPLACE_ONE
    (`replace`): (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2), the same swapped, and
    against (1-q) N(0, s^2) + q N(-1, s^2). With rate 1 it is the plain Gaussian mechanism.
    """

    spread: float
    rate: float
    direction: Direction

    @property
    def upper(self) -> Mixture:
        """Weights and means of P; `add` is mirrored, so that the loss grows with the outcome."""
        return ((1.0, 0.0),) if self.direction == "add" else self._mixture(1.0)

    @property
    def lower(self) -> Mixture:
        """Weights and means of Q."""
        return ((1.0, 0.0),) if self.direction == "remove" else self._mixture(-1.0)

    def _mixture(self, mean: float) -> Mixture:
        return ((1 - self.rate, 0.0), (self.rate, mean)) if self.rate < 1 else ((1.0, mean),)

    def loss(self, outcome: Array) -> Array:
        """Return the log-likelihood ratio at each outcome."""
        up, down = self._log_ratio(outcome), self._log_ratio(-outcome)
        losses: dict[Direction, Array] = {"remove": up, "add": -down, "replace": up - down}
        return losses[self.direction]

    def _log_ratio(self, outcome: Array) -> Array:
        """Return log((1-q) + q exp((x - 1/2)/s^2))."""
        log_rest = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        return np.logaddexp(log_rest, math.log(self.rate) + (outcome - 0.5) / self.spread**2)

    def outcome(self, loss: Array) -> Array:
        """Return the outcome above which the loss exceeds each given one; infinite where none or all do."""
        if self.direction == "remove":
            return self._mixture_outcome(loss)
        if self.direction == "add":
            return -self._mixture_outcome(-loss)
        half = loss / 2
        log_odds = (math.log1p(-self.rate) if self.rate < 1 else -math.inf) - math.log(self.rate)
        with np.errstate(divide="ignore"):
            log_sinh = np.abs(half) + np.log(-np.expm1(-2 * np.abs(half)) / 2)
        exponent = log_odds + 0.5 / self.spread**2 + log_sinh
        asinh = np.logaddexp(exponent, 0.5 * np.logaddexp(2 * exponent, 0.0))
        outcome: Array = self.spread**2 * (half + np.sign(loss) * asinh)
        return outcome

    def _mixture_outcome(self, loss: Array) -> Array:
        """Solve log((1-q) + q exp((x - 1/2)/s^2)) = loss for x."""
        with np.errstate(divide="ignore", invalid="ignore"):
            small = np.log(np.maximum(np.expm1(np.minimum(loss, 30.0)) + self.rate, 0.0))
        large = loss + np.log1p(-(1 - self.rate) * np.exp(-np.abs(loss)))
        log_excess: Array = np.where(loss < 30, small, large)
        return self.spread**2 * (log_excess - math.log(self.rate)) + 0.5

    def limits(self) -> tuple[float, float]:
        """Return the losses between which all but a negligible mass of P lies."""
        reach = _REACH * self.spread
        means = [mean for _, mean in self.upper]
        low, high = self.loss(np.array([min(means) - reach, max(means) + reach]))
        return float(low), float(high)

    def deviation(self) -> float:
        """Return roughly the standard deviation of the loss under P."""
        steps = np.linspace(-9.0, 9.0, 301)
        points = np.concatenate([mean + self.spread * steps for _, mean in self.upper])
        weights = np.concatenate([weight * np.exp(-(steps**2) / 2) for weight, _ in self.upper])
        losses = self.loss(points)
        mean = np.average(losses, weights=weights)
        return float(np.sqrt(np.average((losses - mean) ** 2, weights=weights)))

    def on_grid(self, step: float) -> GridLoss:
        """Return the pessimistic discretisation."""
        low, high = self.limits()
        first, last = math.floor(low / step), math.ceil(high / step)
        losses: Array = step * np.arange(first, last + 1).astype(np.float64)
        edges = self.outcome(losses)
        mass = np.zeros(losses.size)
        cell = _mixture_mass(self.upper, edges, self.spread)
        up = _upper_share(cell, _mixture_mass(self.lower, edges, self.spread), losses[:-1], step)
        mass[:-1] += cell - up
        mass[1:] += up
        mass[0] += sum(w * float(ndtr((edges[0] - m) / self.spread)) for w, m in self.upper)
        beyond = sum(w * float(ndtr((m - edges[-1]) / self.spread)) for w, m in self.upper)
        return GridLoss.of(step=step, first=first, mass=mass, infinite=beyond)


@dataclass(frozen=True, kw_only=True)
class ResponsePair:
    """Randomised response between two labels: losses epsilon, 0 and -epsilon."""

    epsilon: float
    keep: float
    classes: int

    def limits(self) -> tuple[float, float]:
        """Return the extreme losses."""
        return -self.epsilon, self.epsilon

    def deviation(self) -> float:
        """Return roughly the standard deviation of the loss."""
        return self.epsilon

    def on_grid(self, step: float) -> GridLoss:
        """Return the pessimistic discretisation."""
        other = (1 - self.keep) / (self.classes - 1)
        likely, unlikely = max(self.keep, other), min(self.keep, other)
        last = math.floor(self.epsilon / step) + 1
        mass = np.zeros(2 * last + 1)
        rest = max(0.0, 1 - likely - unlikely)
        for loss, weight in ((self.epsilon, likely), (-self.epsilon, unlikely), (0.0, rest)):
            cell = math.floor(loss / step)
            up = min(1.0, max(0.0, math.expm1(cell * step - loss) / math.expm1(-step)))
            mass[cell + last] += weight * (1 - up)
            mass[min(cell + 1 + last, 2 * last)] += weight * up
        return GridLoss.of(step=step, first=-last, mass=mass, infinite=0.0)


def _mixture_mass(parts: Mixture, edges: Array, spread: float) -> Array:
    """Return the mass of a Gaussian mixture between consecutive edges."""
    total = np.zeros(edges.size - 1)
    for weight, mean in parts:
        points = (edges - mean) / spread
        # Differences are taken between the smaller tails: no cancellation far out.
        tail, above = ndtr(-np.abs(points)), points > 0
        rise = tail[1:] - tail[:-1]
        across = 1 - tail[1:] - tail[:-1]
        total += weight * np.where(above[:-1], -rise, np.where(above[1:], across, rise))
    return total


def _upper_share(upper: Array, lower: Array, losses: Array, step: float) -> Array:
    """Return what of each cell's mass goes to its upper end so that its mass under Q is kept too."""
    share = upper - np.exp(np.minimum(losses, _LARGE)) * lower
    share = np.where(losses < _LARGE, share / -math.expm1(-step), upper)
    return np.clip(share, 0.0, upper)
