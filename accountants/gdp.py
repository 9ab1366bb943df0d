"""Gaussian differential privacy: the closed form, its inverses and composition.

The privacy curve of a mu-GDP Gaussian mechanism is exact (Balle and Wang 2018, Theorem 8; Dong, Roth and
Su 2022, Corollary 2.13):

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)

Every figure is rounded toward privacy: delta and epsilon up, mu down.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, log_ndtr

from securevfl.accountants.checks import non_negative, probability
from securevfl.errors import AccountingError

# Rounding steps granted to each of: the inputs (a mu composed of a million terms included), the
# arguments of the special functions, and the special functions themselves.
_ULPS = 64 * 2.0**-53
_BISECTIONS = 200


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return the smallest delta that a mu-GDP mechanism promises at `epsilon`, rounded up.

    With a = mu/2 - epsilon/mu and b = -mu/2 - epsilon/mu, exp(epsilon) phi(b) = phi(a); both terms are
    computed from phi(a), so that nothing overflows and little cancels. A bound of the floating-point
    error is added: the result is never below the true value, even if mu is off by a few roundings.
    """
    mu, epsilon = non_negative("mu", mu), non_negative("epsilon", epsilon)
    if mu == 0 or epsilon == math.inf:
        return 0.0 if mu < math.inf else 1.0
    if mu == math.inf:
        return 1.0
    total_variation = math.erf(mu / math.sqrt(8)) * (1 + _ULPS)
    ratio = epsilon / mu
    if ratio == math.inf:
        return math.ulp(0.0)
    a, size = mu / 2 - ratio, mu / 2 + ratio
    # d log Phi(a)/da <= 1 + |a|, and a is off by at most size roundings.
    slack = _ULPS * (1 + (1 + abs(a)) * size) + (_ULPS * size) * (_ULPS * size)
    if slack > 1:  # far in a tail, or beyond the resolution of a float: delta <= Phi(a) suffices
        bound = math.exp(log_ndtr(a + _ULPS * size))
    else:
        first = math.exp(log_ndtr(a))
        second = math.exp(-a * a / 2) * float(erfcx(size / math.sqrt(2))) / 2
        bound = first - second + (first + second) * math.expm1(slack)
    return min(1.0, total_variation, max(bound, math.ulp(0.0)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon that a mu-GDP mechanism promises at `delta`, rounded up."""
    mu, delta = non_negative("mu", mu), probability("delta", delta)
    if mu == 0 or delta == 1:
        return 0.0
    if mu == math.inf or delta == 0:
        return math.inf
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    # delta(epsilon) <= Phi(-z) <= exp(-z^2/2) at epsilon = mu^2/2 + mu z, hence `high` is sound by itself.
    low, high = 0.0, (mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))) * (1 + _ULPS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if gdp_delta(mu, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def gdp_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose curve meets (epsilon, delta), rounded down."""
    epsilon, delta = non_negative("epsilon", epsilon), probability("delta", delta)
    if epsilon == math.inf or delta == 1:
        return math.inf
    if delta == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high < math.inf and gdp_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if gdp_delta(middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    # The two bisections see different roundings; whoever checks the result with gdp_epsilon must agree.
    while gdp_epsilon(low, delta) > epsilon:
        low *= 1 - 1e-12
    return low


def compose_mu(mus: ArrayLike | Iterable[float], counts: ArrayLike | Iterable[int] | None = None) -> float:
    """Return sqrt(sum of counts * mus^2): adaptive composition of GDP mechanisms, exact for Gaussians.

    Source: Dong, Roth and Su 2022, Corollary 3.3. The result may be off by a few roundings, which
    `gdp_delta` and `gdp_epsilon` allow for.
    """
    values = _vector("mus", mus)
    weights = np.ones_like(values) if counts is None else _vector("counts", counts)
    if values.shape != weights.shape:
        raise AccountingError(
            f"counts has {weights.size} entries; expected one for each of {values.size} mus"
        )
    values, weights = values[weights > 0], weights[weights > 0]
    scale = float(values.max(initial=0.0))
    if scale in (0.0, math.inf):
        return scale
    return scale * math.sqrt(float(np.sum(weights * (values / scale) ** 2)))


def _vector(name: str, values: ArrayLike | Iterable[float]) -> NDArray[np.float64]:
    try:
        array = np.asarray(values if hasattr(values, "__len__") else list(values), dtype=np.float64)  # type: ignore[arg-type]
    except (TypeError, ValueError) as problem:
        raise AccountingError(f"{name} is not a flat list of numbers: {problem}") from problem
    if array.ndim != 1 or np.isnan(array).any() or (array < 0).any():
        raise AccountingError(f"{name} must be a flat list of numbers of at least 0")
    return array
