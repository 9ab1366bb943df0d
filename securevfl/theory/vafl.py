"""VAFL, Theorems 1 to 4 (asynchronous) and 7 to 10 (t-synchronous): rates and bounds with their constants.

The paper states orders, O(1/sqrt K) and O(1/K); its appendices B to D hold constants, with slips. What is
computed here follows the same Lyapunov argument with these repairs:

* Theorem 1: the last line of B.2 has 16 D L where 16 (1 + D) L follows, and c_eta (F0 - F*) where it must
  divide; here the line before is evaluated, so neither matters.
* Theorem 2 is stated with min sqrt(q_m), its proof needs min q_m; the variance term has 1 / min q_m where the
  squared rate gives 1 / (min q_m)^2; one of the equations for gamma_D has eta where eta^2 belongs.
* Theorem 3 is stated with min_m sqrt(c_m), its proof needs the maximum; (35) loses the minus sign and the
  server's variance; (31) lets the error of block m depend on the staleness of block m alone, although its
  gradient is taken at everybody's stale embeddings: with sum_m q_m c_m in the denominator it holds.
* Theorem 4: gamma_{m,1} adds xi_m where c_m xi_m follows from the recursion, K_0 is half of what
  eta^0 <= eta_bar asks for, and the variance term carries Theorem 2's constant instead of 4 / nu^2.
* Theorems 7 to 10: with q'_m = q_m / t and parties' rates eta / t they *are* Theorems 1 to 4; the server's
  variance is divided by t^2 in D.1, which even t independent records do not give. No division is used here.
  7 and 9 print these rates, 8 and 10 equal ones for parties and server; here all four have eta / t.

One thing is read into Assumption 2: the error of a stale gradient is bounded record by record, so L and L_m
must hold for the loss of every single record, not only for their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from securevfl.errors import InputError
from securevfl.theory.checks import at_least_zero, positive


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the theorems know of a federation.

    Attributes:
        smoothness: L of Assumption 2, for every record; it also bounds every block's L_m.
        shares: q_m, how likely party m uploads in an iteration; with `together` = t they add up to t.
        variances: sigma_m^2 of the parties' gradients (of a batch, where batches are used).
        server_variance: sigma_0^2.
        gap: F(start) - F*, or an upper bound.
        together: t of the t-synchronous algorithm; 1 is asynchronous.
    """

    smoothness: float
    shares: Sequence[float]
    variances: Sequence[float]
    gap: float
    server_variance: float = 0.0
    together: int = 1

    def __post_init__(self) -> None:
        positive(smoothness=self.smoothness, together=self.together)
        at_least_zero(gap=self.gap, server_variance=self.server_variance)
        if not self.shares or len(self.shares) != len(self.variances):
            raise InputError(
                f"{len(self.shares)} shares, {len(self.variances)} variances; expected one of each per party"
            )
        for share, variance in zip(self.shares, self.variances, strict=True):
            positive(share=share)
            at_least_zero(variance=variance)
            if share > 1 + 1e-9:
                raise InputError(f"a share is {share}; it is a probability")
        total = sum(self.shares)
        if abs(total - self.together) > 1e-6 * self.together:  # room for shares rounded to six digits
            raise InputError(f"the shares add up to {total}; expected {self.together}, the uploads at a time")

    @property
    def rarest(self) -> float:
        """min_m q'_m."""
        return min(self.shares) / self.together

    def noise(self, forces: Sequence[float]) -> float:
        """R: what one step's variance adds, in units of eta^2; `forces` are the parties' gamma_{m,1}."""
        own = self.smoothness * self.server_variance
        return own + sum(
            share * (2 * force + self.smoothness) * variance / self.together**2
            for share, force, variance in zip(self.shares, forces, self.variances, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Nonconvex:
    """A bound on the mean squared gradient norm of the first K iterations.

    Attributes:
        rate: eta of the server; parties take eta / t.
        limit: The largest rate that the theorem admits.
        bound: The bound at `rate`.
    """

    rate: float
    limit: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class StronglyConvex:
    """A bound on E F - F* after K iterations with rates `numerator` / (k + `offset`).

    Attributes:
        numerator: Of the server's rate; parties take it divided by t.
        offset: K_0.
        bound: The bound after K iterations.
    """

    numerator: float
    offset: float
    bound: float


def bounded_delay(
    constants: Constants, *, delay: int, iterations: int, rate: float | None = None
) -> Nonconvex:
    """Theorem 1, and Theorem 7 for t > 1: no embedding is older than D iterations.

    Args:
        constants: Of the federation.
        delay: D.
        iterations: K.
        rate: A rate of at most the limit; without one the rate that makes the bound smallest is taken.
    """
    _check_counts(delay=delay, iterations=iterations)
    limit = 1 / (4 * (1 + delay) * constants.smoothness)

    def forces(eta: float) -> list[float]:
        step = delay * eta * constants.smoothness
        gamma = 1.5 * delay * step * constants.smoothness / (1 - 2 * step**2)
        return [gamma] * len(constants.shares)

    return _nonconvex(constants, iterations, limit, rate, forces)


def stochastic_delay(
    constants: Constants, *, tails: Sequence[float], decay: float, iterations: int, rate: float | None = None
) -> Nonconvex:
    """Theorem 3, and Theorem 9 for t > 1: P(delay of party m = d) <= p_m rho^d.

    Args:
        constants: Of the federation.
        tails: p_m.
        decay: rho, below 1.
        iterations: K.
        rate: As for `bounded_delay`.
    """
    _check_counts(iterations=iterations)
    spreads = delay_spreads(tails, decay)
    _check_parties(constants, spreads)
    limit = 1 / (4 * (1 + math.sqrt(max(spreads))) * constants.smoothness)
    return _nonconvex(
        constants, iterations, limit, rate, lambda eta: _stochastic_forces(constants, spreads, eta, 1.5)
    )


def bounded_delay_convex(
    constants: Constants, *, convexity: float, delay: int, iterations: int
) -> StronglyConvex:
    """Theorem 2, and Theorem 8 for t > 1: F is mu-strongly convex and delays are at most D."""
    _check_counts(delay=delay, iterations=iterations)
    _check_convexity(constants, convexity)
    smooth, pull = constants.smoothness, convexity * constants.rarest
    largest = 1 / (4 * (1 + delay) * smooth + 2 * pull * delay)
    step = delay * largest * smooth
    gamma = 1.5 * delay * step * smooth / (1 - 2 * step**2 - pull * delay * largest / 2)
    return _strongly_convex(
        constants, iterations, contraction=pull / 2, largest=largest, forces=[gamma] * len(constants.shares)
    )


def stochastic_delay_convex(
    constants: Constants, *, convexity: float, tails: Sequence[float], decay: float, iterations: int
) -> StronglyConvex:
    """Theorem 4, and Theorem 10 for t > 1.

    With xi = eta_bar L^2 / 4 the recursion gives gamma_{m,1} = c_m 1.75 eta_bar L^2 / (1 - 2 sum_m q_m c_m
    eta_bar^2 L^2), and a share of at least (1 - rho) / 2 of every gamma is lost to xi; nu is the smaller of
    that and mu min q_m / 2.
    """
    _check_counts(iterations=iterations)
    _check_convexity(constants, convexity)
    spreads = delay_spreads(tails, decay)
    _check_parties(constants, spreads)
    smooth = constants.smoothness
    largest = 1 / (4 * (1 + math.sqrt(max(spreads))) * smooth)
    mean = _mean_spread(constants, spreads)
    kept = (1 - decay) * (1 - 2 * mean * (largest * smooth) ** 2) / 14 / largest
    return _strongly_convex(
        constants,
        iterations,
        contraction=min(kept, convexity * constants.rarest / 2),
        largest=largest,
        forces=_stochastic_forces(constants, spreads, largest, 1.75),
    )


def delay_spreads(tails: Sequence[float], decay: float) -> list[float]:
    """c_m = p_m (rho / (1 - rho)^2 + 2 rho^2 / (1 - rho)^3), from the tails p_m rho^d of the delays."""
    if not 0 < decay < 1:
        raise InputError(f"the tails of the delays decay by {decay}; expected a number between 0 and 1")
    for tail in tails:
        positive(tail=tail)
    return [tail * (decay / (1 - decay) ** 2 + 2 * decay**2 / (1 - decay) ** 3) for tail in tails]


def _mean_spread(constants: Constants, spreads: Sequence[float]) -> float:
    pairs = zip(constants.shares, spreads, strict=True)
    return sum(share * spread for share, spread in pairs) / constants.together


def _stochastic_forces(
    constants: Constants, spreads: Sequence[float], eta: float, factor: float
) -> list[float]:
    """gamma_{m,1} = c_m factor eta L^2 / (1 - 2 mean(c) eta^2 L^2); factor 1.5, or 1.75 with xi."""
    step = eta * constants.smoothness
    scale = factor * step * constants.smoothness / (1 - 2 * _mean_spread(constants, spreads) * step**2)
    return [spread * scale for spread in spreads]


def _nonconvex(
    constants: Constants,
    iterations: int,
    limit: float,
    rate: float | None,
    forces: Callable[[float], Sequence[float]],
) -> Nonconvex:
    """(29) summed: K min q' eta / 4 times the mean squared norm is at most the gap and K eta^2 R."""

    def bound(eta: float) -> float:
        spent = constants.gap + iterations * eta**2 * constants.noise(forces(eta))
        return 4 * spent / (constants.rarest * eta * iterations)

    if rate is None:
        noise = constants.noise(forces(limit))  # gammas grow with eta: the choice is good, the bound exact
        rate = limit if noise == 0 else min(limit, math.sqrt(constants.gap / (iterations * noise)) or limit)
    positive(rate=rate)
    if rate > limit * (1 + 1e-12):
        raise InputError(f"rate {rate:.3g} is above the theorem's limit of {limit:.3g}")
    return Nonconvex(rate=rate, limit=limit, bound=bound(rate))


def _strongly_convex(
    constants: Constants, iterations: int, *, contraction: float, largest: float, forces: Sequence[float]
) -> StronglyConvex:
    """EV' <= (1 - nu eta) EV + eta^2 R with eta = 2 / (nu (k + K_0)): 1 - nu eta = 1 - 2 / (k + K_0)."""
    offset = max(2 / (contraction * largest), 2.0)
    numerator = 2 / contraction
    left = (iterations + offset - 2) * (iterations + offset - 1)
    noise = constants.noise(forces) * numerator**2 * iterations
    return StronglyConvex(
        numerator=numerator,
        offset=offset,
        bound=((offset - 2) * (offset - 1) * constants.gap + noise) / left if left > 0 else constants.gap,
    )


def _check_counts(*, iterations: int, delay: int = 0) -> None:
    if iterations < 1:
        raise InputError(f"{iterations} iterations; expected at least 1")
    if delay < 0:
        raise InputError(f"a delay of {delay}; expected at least 0")


def _check_convexity(constants: Constants, convexity: float) -> None:
    positive(convexity=convexity)
    if convexity > constants.smoothness:
        raise InputError(f"strong convexity {convexity} exceeds the smoothness {constants.smoothness}")


def _check_parties(constants: Constants, spreads: Sequence[float]) -> None:
    if len(spreads) != len(constants.shares):
        raise InputError(f"{len(spreads)} tails for {len(constants.shares)} parties; expected one for each")
