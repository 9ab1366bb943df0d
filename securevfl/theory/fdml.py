"""FDML, Proposition 1: the regret of training with staleness at most tau and rates eta / sqrt(t).

Slips of the paper, repaired here: the statement says O(1/sqrt(tau)) where its proof shows O(1/sqrt(T)); (20)
takes D_t <= D^2 although D_t is at most D^2 / 2; and (30) bounds the first tau iterations by eta_1 t, which
holds for parties that lag behind, not for parties that are *ahead* (a negative lag): up to tau of their steps
after t count, so eta tau^2 replaces eta tau (tau + 1) / 2.
"""

from __future__ import annotations

import math

from securevfl.errors import InputError
from securevfl.theory.checks import at_least_zero, positive


def regret(
    *,
    rate: float,
    iterations: int,
    parties: int,
    staleness: int,
    smoothness: float,
    gradient: float,
    diameter: float,
) -> float:
    """Bounds the mean loss of T iterations above the best model's.

    Args:
        rate: eta; the t-th step has rate eta / sqrt(t).
        iterations: T.
        parties: m.
        staleness: tau.
        smoothness: L_max, the largest Lipschitz constant of a block's gradient.
        gradient: G: a bound on the norm of the gradient (of every block, and so of each).
        diameter: D: no iterate is further than D from the best model.
    """
    positive(rate=rate, iterations=iterations, parties=parties, diameter=diameter)
    at_least_zero(staleness=staleness, smoothness=smoothness, gradient=gradient)
    root = math.sqrt(iterations)
    steps = rate * parties * gradient**2 * root
    start = diameter**2 * root / (2 * rate)
    return (
        steps + start + rate * _stale(iterations, parties, staleness, smoothness, gradient, diameter)
    ) / iterations


def best_rate(
    *, iterations: int, parties: int, staleness: int, smoothness: float, gradient: float, diameter: float
) -> float:
    """The eta for which `regret` is smallest: it has the form a eta + b / eta."""
    positive(iterations=iterations, parties=parties, diameter=diameter)
    at_least_zero(staleness=staleness, smoothness=smoothness, gradient=gradient)
    root = math.sqrt(iterations)
    rise = parties * gradient**2 * root
    rise += _stale(iterations, parties, staleness, smoothness, gradient, diameter)
    if rise == 0:
        raise InputError("gradients are bounded by 0: every rate is best")
    return diameter * math.sqrt(root / (2 * rise))


def _stale(
    iterations: int, parties: int, staleness: int, smoothness: float, gradient: float, diameter: float
) -> float:
    """G D m^1.5 L_max sum_t sum_q eta_q / eta, at most tau^2 + 2 tau sqrt(T)."""
    lag = staleness**2 + 2 * staleness * math.sqrt(iterations)
    return gradient * diameter * parties * math.sqrt(parties) * smoothness * lag
