"""The accountants: closed form, moments, privacy loss distributions; and the smallest sound figure of all."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from securevfl.accountants import checks
from securevfl.accountants.base import Accountant, Figure, Workload, reduce_events
from securevfl.accountants.composition import Composition, Pair, compose
from securevfl.accountants.events import Event
from securevfl.accountants.gdp import compose_mu, gdp_delta, gdp_epsilon
from securevfl.accountants.pairs import Array, Direction, ResponsePair, SampledGaussianPair
from securevfl.accountants.renyi import (
    default_orders,
    gaussian_rdp,
    rdp_delta,
    rdp_epsilon,
    response_rdp,
    sampled_gaussian_rdp,
)
from securevfl.errors import AccountingError

_UNSAMPLED = "sampling ignored: GDP has no exact form for sampled releases"


class GDPAccountant(Accountant):
    """Gaussian differential privacy: exact for Gaussian releases, an upper bound for everything else.

    A hidden sample is ignored (sound, by convexity of the hockey-stick divergence). Randomised response
    counts as the weakest GDP mechanism that covers it, or by adding its pure epsilon, whichever is less.
    """

    def mu(self, events: Event | Iterable[Event]) -> float:
        """Return the GDP parameter of the composition; infinite if something was exact."""
        return reduce_events(events).total_mu

    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        both = gdp_epsilon(workload.total_mu, delta)
        apart = gdp_epsilon(workload.gaussian_mu, delta) + workload.pure
        return min(both, apart), _UNSAMPLED if workload.sampled else "", self.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        both = gdp_delta(workload.total_mu, epsilon)
        if epsilon < workload.pure:
            return both
        return min(both, gdp_delta(workload.gaussian_mu, epsilon - workload.pure))


class CLTApproximation(Accountant):
    """The central-limit approximation of sampled Gaussian releases. **Not a bound**, never a verdict.

    mu = q sqrt(T (exp(1/s^2) - 1)) (Bu, Dong, Long and Su 2020), s being sigma over the clip norm; under
    replace-one q sqrt(2 T (exp(1/s^2) - exp(-1/s^2))), the same first-order variance for that pair. It is
    what some libraries print as "GDP"; it under-reports by more than 40 % in published settings.
    """

    bound = False

    def mu(self, events: Event | Iterable[Event]) -> float:
        """Return the approximate GDP parameter."""
        workload = reduce_events(events)
        return math.inf if workload.exact else _limit_mu(workload)

    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        note = "central-limit approximation, may be too low" if workload.sampled else ""
        return gdp_epsilon(_limit_mu(workload), delta), note, self.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        return gdp_delta(_limit_mu(workload), epsilon)


def _limit_mu(workload: Workload) -> float:
    mus = [workload.mu, workload.response_mu]
    for (ratio, rate), count in workload.sampled:
        inverse = (2 * ratio if workload.replace else ratio) ** -2
        if inverse > 700:
            return math.inf
        spread = 2 * (math.exp(inverse) - math.exp(-inverse)) if workload.replace else math.expm1(inverse)
        mus.append(rate * math.sqrt(count * spread))
    return compose_mu(mus)


_NO_RENYI_BOUND = "sampling ignored: no Rényi bound for sampled releases under replace-one"


class MomentsAccountant(Accountant):
    """Rényi differential privacy (Abadi et al. 2016; Mironov 2017): an upper bound, seldom the smallest.

    Args:
        orders: Orders above 1 to optimise over. The default reaches down to 1.0001, without which large
            budgets come out several times too large.
    """

    def __init__(self, orders: Iterable[float] | None = None) -> None:
        chosen = default_orders() if orders is None else [checks.positive("order", o) for o in orders]
        self._orders: Array = np.array(sorted(chosen), dtype=np.float64)
        if not self._orders.size or self._orders[0] <= 1:
            raise AccountingError("orders must be a non-empty list of numbers above 1")

    def rdp(self, events: Event | Iterable[Event]) -> tuple[Array, Array]:
        """Return the orders and the Rényi divergence at each."""
        workload = reduce_events(events)
        return self._orders, np.full_like(self._orders, np.inf) if workload.exact else self._rdp(workload)

    def _rdp(self, workload: Workload) -> Array:
        total = gaussian_rdp(workload.mu, self._orders)
        for (ratio, rate), count in workload.sampled:
            if workload.replace:
                total = total + count * gaussian_rdp(1 / ratio, self._orders)
            else:
                total = total + count * sampled_gaussian_rdp(ratio, rate, self._orders)
        for response, count in workload.responses:
            epsilon, keep = float(response.epsilon or 0.0), float(response.keep_probability or 0.0)
            total = total + count * response_rdp(epsilon, keep, response.classes, self._orders)
        return total

    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        epsilon, order = rdp_epsilon(self._orders, self._rdp(workload), delta)
        note = f"order {order:g}"
        if workload.sampled and workload.replace:
            note = f"{note}; {_NO_RENYI_BOUND}"
        return epsilon, note, self.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        return rdp_delta(self._orders, self._rdp(workload), epsilon)


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
            except ModuleNotFoundError:
                reason = "prv-accountant is not installed"
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


ACCOUNTANTS: dict[str, type[Accountant]] = {
    "gdp": GDPAccountant,
    "moments": MomentsAccountant,
    "prv": PRVAccountant,
    "pld": PLDAccountant,
    "clt": CLTApproximation,
}


def best_upper_bound(events: Event | Iterable[Event], delta: float) -> Figure:
    """Return the smallest sound upper figure, and which accountant it is from.

    Without a hidden sample and without randomised response the closed form is exact and nothing can be
    smaller. Otherwise the loss distribution is asked too; the moments join in only where its grid had to
    be widened, since elsewhere they cannot win, and PRV never can: its upper end lies above by design.
    """
    items = [events] if not isinstance(events, Iterable) else list(events)
    workload = reduce_events(items)
    best = GDPAccountant().figure(items, delta)
    if workload.exact or not (workload.sampled or workload.responses):
        return best
    numeric = PLDAccountant().figure(items, delta)
    others = [numeric]
    if numeric.explanation:
        others.append(MomentsAccountant().figure(items, delta))
    return min([best, *others], key=lambda figure: figure.epsilon)


def compare(events: Event | Iterable[Event], delta: float) -> dict[str, Figure]:
    """Return every accountant's figure, by short name."""
    items = [events] if not isinstance(events, Iterable) else list(events)
    return {name: accountant().figure(items, delta) for name, accountant in ACCOUNTANTS.items()}
