"""Composition of privacy losses by the fast Fourier transform, tilted so that tiny deltas stay exact.

The losses are tilted exponentially (weight exp(t * loss)) before the transform, t being the order that
Chernoff's bound prefers, and tilted back afterwards. Floating-point noise of the transform is then
relative to the answer, not to 1, which is where plain transforms fail below delta = 1e-10. Every
truncation and the noise of the transform are bounded and added: the figures are upper bounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft

from securevfl.accountants.pairs import Array, GridLoss, ResponsePair, SampledGaussianPair

Pair: TypeAlias = SampledGaussianPair | ResponsePair

_FINEST = 1e-4  # step of the grid, as in dp-accounting, for totals of moderate size
_CELLS = 1 << 21  # most cells of a transform: about 0.2 GB and 1 s; beyond, the step is widened
_SINGLE_CELLS = 1 << 18  # most cells of a single loss
_RESOLUTION = 1e-8  # of a loss that hardly varies, relative to its size
_COARSER = 16
_NEGLIGIBLE = 1e-9  # truncated mass, relative to delta
_ROUNDING = 2.0**-53
_SMALLEST = 1e-250  # deltas below are reported as this; their logarithms are still safe
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Composition:
    """`counts[i]` releases of each pair, on one grid; answers are upper bounds.

    Attributes:
        losses: The discretised pairs.
        coarse: The same on a grid `_COARSER` times wider, which bounds every moment from above: good enough
            to choose the tilt and the window.
        counts: How often each is composed with itself.
        widened: Whether the step is wider than the losses ask for, to save memory; the bound is then looser.
    """

    losses: tuple[GridLoss, ...]
    coarse: tuple[GridLoss, ...]
    counts: tuple[int, ...]
    widened: bool

    @property
    def step(self) -> float:
        """Step of the grid."""
        return self.losses[0].step

    def order(self, delta: float) -> float:
        """Return the tilt: the order at which Chernoff's bound of epsilon at `delta` is smallest."""
        return _minimise(lambda t: (self._log_moment(t) - math.log(delta)) / t)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon at `delta` in (0, 1)."""
        spare = delta - self._infinite()
        if spare <= 0:
            return math.inf
        order = self.order(spare)
        # Two plain bounds that no rounding of the transform can touch: all losses at once, and Chernoff's.
        largest = sum(n * int(loss.cells[-1]) for loss, n in zip(self.losses, self.counts, strict=True))
        chernoff = (_total_log_moment(self.losses, self.counts, order) - math.log(spare)) / order
        plain = max(0.0, min(largest * self.step, chernoff))
        tail = self._tail(order, delta)
        found = None if tail is None else tail.epsilon(delta)
        return (plain if found is None else min(found, plain)) + self._drift()

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of delta at a finite `epsilon`."""
        epsilon = max(0.0, epsilon - self._drift())
        order = _minimise(lambda t: self._log_moment(t) - t * epsilon)
        exponent = min(0.0, self._log_moment(order) - order * epsilon)
        chernoff = max(math.exp(exponent), _SMALLEST)
        tail = self._tail(order, chernoff)
        bound = 1.0 if tail is None else tail.delta(epsilon)
        return min(1.0, bound, chernoff + self._infinite())

    def _drift(self) -> float:
        """Bound of the loss' shift by rounding in the shares of the cells, some 2^-50 for each release."""
        return sum(self.counts) * 2.0**-48

    def _infinite(self) -> float:
        terms = zip(self.losses, self.counts, strict=True)
        return -math.expm1(math.fsum(count * math.log1p(-loss.infinite) for loss, count in terms))

    def _log_moment(self, order: float) -> float:
        """Return an upper bound of log E exp(order * loss), the infinite mass left out."""
        return _total_log_moment(self.coarse, self.counts, order)

    def window(self, order: float, delta: float) -> tuple[int, int]:
        """Return the cells outside of which both the plain and the tilted composition are negligible.

        What lies outside is folded back by the transform. Plain mass lost at the top is added to the
        bound; tilted mass that arrives from either side enlarges it, hence must be small to be tight.
        """
        room, margin = -math.log(_NEGLIGIBLE * delta), -math.log(_NEGLIGIBLE)
        base = self._log_moment(order)
        plain = _least(lambda t: (self._log_moment(t) + room) / t)
        above = _least(lambda gap: (margin + self._log_moment(order + gap) - base) / gap)
        low = -_least(lambda gap: (margin + self._log_moment(order - gap) - base) / gap)
        high = max(plain, above)
        terms = list(zip(self.losses, self.counts, strict=True))
        least = sum(count * int(loss.cells[0]) for loss, count in terms)
        most = sum(count * int(loss.cells[-1]) for loss, count in terms)
        first = min(max(math.floor(low / self.step), least), most)
        return first, max(min(math.ceil(high / self.step), most), first)

    def _tail(self, order: float, delta: float) -> "_Tail | None":
        """Return the composed tail, None if its cells cannot be numbered by 64-bit integers."""
        first, last = self.window(order, delta)
        if max(-first, last) >= 1 << 62:
            return None
        size = int(next_fast_len(max(last - first + 1, 16), real=True))
        spectrum = self._spectrum(order, size)
        mass = np.maximum(irfft(spectrum, size), 0.0)
        norm = math.sqrt(2) * float(np.linalg.norm(spectrum))
        # Relative error of a transform: a few roundings per level; a power multiplies it by the count.
        noise = 8 * _ROUNDING * math.log2(size) * (sum(self.counts) * norm + math.sqrt(size))
        cells = np.arange(max(0, first), max(0, last) + 1)
        return _Tail(
            losses=self.step * cells.astype(np.float64),
            mass=np.roll(mass, -(int(cells[0]) % size))[: cells.size],
            order=order,
            log_moment=_total_log_moment(self.losses, self.counts, order),
            noise=noise,
            lost=_NEGLIGIBLE * delta + self._infinite(),
        )

    def _spectrum(self, order: float, size: int) -> NDArray[np.complex128]:
        """Return the transform of the tilted composition; frequencies below 1e-26 are left out."""
        factors = [rfft(_tilted(loss, order, size)) for loss in self.losses]
        with np.errstate(divide="ignore"):
            logs = (count * np.log(np.abs(f)) for f, count in zip(factors, self.counts, strict=True))
            keep = sum(logs) > -60
        spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
        terms = zip(factors, self.counts, strict=True)
        spectrum[keep] = np.exp(sum(count * np.log(f[keep]) for f, count in terms))
        return spectrum


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """The tilted composition on its non-negative losses, ready to be read."""

    losses: Array
    mass: Array
    order: float
    log_moment: float
    noise: float
    lost: float

    def _weight(self, losses: Array) -> Array:
        """Return the factor that undoes the tilt."""
        return np.exp(np.minimum(self.log_moment - self.order * losses, 700.0))

    def _sums(self) -> tuple[Array, Array]:
        """Return, from each loss l upward, the sums of mass and of mass * exp(l - loss)."""
        from scipy.signal import lfilter  # slow to import, needed by few

        mass = (self.mass * self._weight(self.losses))[::-1]
        decay = math.exp(self.losses[0] - self.losses[1]) if self.losses.size > 1 else 0.0
        upper, lower = np.cumsum(mass)[::-1], lfilter([1.0], [1.0, -decay], mass)[::-1]
        return np.append(upper, 0.0), np.append(lower, 0.0)

    def delta(self, epsilon: float) -> float:
        """Return the bound of delta at `epsilon`; 1 below the window, where mass is missing."""
        if epsilon < self.losses[0]:
            return 1.0
        upper, lower = self._sums()
        above = int(np.searchsorted(self.losses, epsilon, side="right"))
        gap = epsilon - self.losses[above] if above < self.losses.size else 0.0
        at = np.array([epsilon])
        return float(self._bound(upper[above : above + 1], math.exp(gap) * lower[above : above + 1], at)[0])

    def epsilon(self, delta: float) -> float | None:
        """Return the smallest epsilon whose bound meets `delta`, None if no loss does."""
        upper, lower = self._sums()
        decay = math.exp(self.losses[0] - self.losses[1]) if self.losses.size > 1 else 0.0
        meets = np.flatnonzero(self._bound(upper[1:], decay * lower[1:], self.losses) <= delta)
        if not meets.size:
            return None
        index = int(meets[0])
        if index == 0:
            return float(self.losses[0])
        before, after = float(self.losses[index - 1]), float(self.losses[index])
        spare = self.lost + self.noise * float(self._weight(self.losses[index - 1 : index])[0])
        excess = float(upper[index]) + spare - delta
        if excess <= 0:
            return before
        within = after + math.log(excess / lower[index]) if lower[index] > 0 else after
        return min(after, max(before, within))

    def _bound(self, upper: Array, lower: Array, epsilons: Array) -> Array:
        return np.maximum(upper - lower, 0.0) + self.lost + self.noise * self._weight(epsilons)


def compose(pairs: Sequence[Pair], counts: Sequence[int], *, cells: int = _CELLS) -> Composition:
    """Put the pairs on one grid that is as fine as they need and as coarse as memory demands."""
    spreads = np.array([pair.deviation() for pair in pairs])
    total = math.sqrt(float(np.dot(spreads**2, counts)))
    limits = [pair.limits() for pair in pairs]
    width = max(high - low for low, high in limits)
    size = max(max(-low, high) for low, high in limits)
    ideal = min(max(_FINEST, _FINEST * total / 5), float(spreads.min()) / 30)
    # A loss with rare huge values would ask for cells without end; beyond this they buy nothing.
    step = max(ideal, width / _SINGLE_CELLS, size * _RESOLUTION)
    while True:
        coarse = tuple(pair.on_grid(step * _COARSER) for pair in pairs)
        draft = Composition(losses=coarse, coarse=coarse, counts=tuple(counts), widened=step > ideal)
        first, last = draft.window(draft.order(1e-16), 1e-16)
        excess = (last - first) * _COARSER / cells
        if excess < 1:
            return replace(draft, losses=tuple(pair.on_grid(step) for pair in pairs))
        step *= 1.1 * excess


def _total_log_moment(losses: Sequence[GridLoss], counts: Sequence[int], order: float) -> float:
    return math.fsum(count * loss.log_moment(order) for loss, count in zip(losses, counts, strict=True))


def _tilted(loss: GridLoss, order: float, size: int) -> Array:
    """Return the tilted, normalised mass folded onto a circle, the cell of loss 0 first."""
    weight = np.exp(loss.log_mass + order * loss.step * loss.cells - loss.log_moment(order))
    folded: Array = np.bincount(loss.cells % size, weight, minlength=size).astype(np.float64)
    return folded


def _minimise(objective: Callable[[float], float]) -> float:
    """Return a positive argument near the minimum of a function with one valley; any is sound.

    Golden-section search over the exponent: 1e-6 to 1e6, to within a tenth of the factor e.
    """
    low, high = -14.0, 14.0
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = objective(math.exp(left)), objective(math.exp(right))
    while high - low > 0.2:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = objective(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = objective(math.exp(right))
    return math.exp((low + high) / 2)


def _least(objective: Callable[[float], float]) -> float:
    return objective(_minimise(objective))
