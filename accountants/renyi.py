"""Rényi divergences of one release, computed so that nothing cancels; vectorised over orders."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from securevfl.accountants.pairs import Array

# More points than this mean a noise so small that a fractional order brings nothing.
_POINTS = 200_000


def gaussian_rdp(mu: float, orders: Array) -> Array:
    """Return orders * mu^2 / 2 (Mironov 2017, Corollary 3)."""
    return orders * (mu * mu / 2)


def response_rdp(epsilon: float, keep: float, classes: int, orders: Array) -> Array:
    """Return the exact divergence of randomised response between two labels."""
    other = (1 - keep) / (classes - 1)
    likely, unlikely = max(keep, other), min(keep, other)
    rest = max(1 - likely - unlikely, 0.0)
    up = np.log(likely) + (orders - 1) * epsilon
    down = np.log(unlikely) - (orders - 1) * epsilon
    with np.errstate(divide="ignore"):
        total = np.logaddexp(np.logaddexp(up, down), np.log(rest))
    divergence: Array = np.clip(total / (orders - 1), 0.0, epsilon)
    return divergence


def sampled_gaussian_rdp(spread: float, rate: float, orders: Array) -> Array:
    """Return the divergence of a Gaussian sum over a secret Poisson sample, add-remove adjacency.

    Integer orders by the binomial formula, others by quadrature (Mironov, Talwar and Zhang 2019, Theorem 4
    and Section 3.3). Orders that cannot be computed are infinite, which only leaves them unused.
    """
    return np.array([_log_excess(spread, rate, float(order)) / (order - 1) for order in orders])


def _log_excess(spread: float, rate: float, order: float) -> float:
    """Return log A(order), A - 1 being summed from positive terms only."""
    integer = order.is_integer()
    log_rest = _log_binomial(spread, rate, int(order)) if integer else _log_integral(spread, rate, order)
    return float(np.logaddexp(0.0, log_rest))


def _log_binomial(spread: float, rate: float, order: int) -> float:
    """Return log of sum over k >= 2 of C(order, k) (1-q)^(order-k) q^k (exp(k(k-1)/2s^2) - 1)."""
    k = np.arange(2, order + 1)
    choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    weight = choose + (order - k) * math.log1p(-rate) + k * math.log(rate)
    exponent = k * (k - 1) / (2 * spread**2)
    return float(logsumexp(weight + exponent + np.log(-np.expm1(-exponent))))


def _log_integral(spread: float, rate: float, order: float) -> float:
    """Return log E[(1+y)^order - 1 - order y], y = q (exp((x - 1/2)/s^2) - 1), x ~ N(0, s^2).

    E[y] = 0, so this is A - 1, and the integrand is positive. It is analytic in a strip of half-width
    pi s^2 and Gaussian otherwise: the trapezoidal rule with this step errs by less than exp(-70).
    """
    step = min(spread / 6, spread**2 / 4)
    low, high = -12 * spread, order + 12 * spread
    if (high - low) / step > _POINTS:
        return math.inf
    x = np.arange(low, high, step)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / spread**2)
    log_density = -((x / spread) ** 2) / 2 + math.log(step / (spread * math.sqrt(2 * math.pi)))
    return float(logsumexp(log_density + _log_bend(log_ratio, rate, order, (x - 0.5) / spread**2)))


def _log_bend(log_ratio: Array, rate: float, order: float, exponent: Array) -> Array:
    """Return log((1+y)^order - 1 - order y) where log(1+y) = log_ratio; a series where y is small."""
    y = rate * np.expm1(np.minimum(exponent, 700.0))
    z = np.clip(y, -1e-3, 1e-3)
    series = order * (order - 1) / 2 * z**2 * (1 + (order - 2) / 3 * z * (1 + (order - 3) / 4 * z))
    power = order * log_ratio
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        direct = np.log(np.maximum(np.expm1(np.minimum(power, 600.0)) - order * y, 0.0))
        small = np.log(np.maximum(series, 0.0))
    # Beyond exp(600) the power alone counts, which can only enlarge the value.
    bend: Array = np.where(np.abs(y) < 1e-4, small, np.where(power < 600, direct, power))
    return bend


def rdp_epsilon(orders: Array, rdp: Array, delta: float) -> tuple[float, float]:
    """Return the smallest epsilon at `delta` and its order (Canonne, Kamath and Steinke 2020, Prop. 12)."""
    values = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    best = int(np.argmin(values))
    return max(0.0, float(values[best])), float(orders[best])


def rdp_delta(orders: Array, rdp: Array, epsilon: float) -> float:
    """Return the smallest delta at `epsilon`, by the same proposition."""
    logs = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    return float(np.exp(min(0.0, float(logs.min()))))


def default_orders() -> Sequence[float]:
    """Orders close to 1 for large budgets, integers for small ones."""
    near = 1 + np.logspace(-4, 0, 41)[:-1]
    between = np.arange(2, 12, 0.5)
    far = np.unique(np.round(np.logspace(math.log10(12), math.log10(4096), 60)))
    return [float(order) for order in np.concatenate([near, between, far])]
