"""The one contract of all accountants, and the few numbers that a list of events is reduced to for them."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from securevfl.accountants import checks
from securevfl.accountants.events import (
    EVENT_TYPES,
    DPUpdate,
    EncryptedRelease,
    Event,
    ExactRelease,
    GaussianRelease,
    MaskedRelease,
    RandomisedResponse,
)
from securevfl.accountants.gdp import compose_mu
from securevfl.accountants.records import pure_mu
from securevfl.errors import AccountingError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The composition of a list of events; the order of the list does not matter.

    Attributes:
        mu: GDP parameter of all unsampled Gaussian releases and updates.
        sampled: (sigma / sensitivity, sampling rate) -> count, for releases with a hidden sample.
        responses: Randomised responses -> count.
        exact: Whether something left without noise.
        replace: Whether neighbours differ by a replacement, not by absence.
        assumptions: Under which hidden values told nothing.
    """

    mu: float
    sampled: tuple[tuple[tuple[float, float], int], ...]
    responses: tuple[tuple[RandomisedResponse, int], ...]
    exact: bool
    replace: bool
    assumptions: tuple[str, ...]

    @property
    def pure(self) -> float:
        """Sum of the epsilons of all randomised responses."""
        return math.fsum(count * float(r.epsilon or 0.0) for r, count in self.responses)

    @property
    def gaussian_mu(self) -> float:
        """GDP parameter of all Gaussian releases, sampling ignored: an upper bound by convexity."""
        ratios = [1 / ratio for (ratio, _), _ in self.sampled]
        return compose_mu([self.mu, *ratios], [1, *(count for _, count in self.sampled)])

    @property
    def response_mu(self) -> float:
        """GDP parameter that covers all randomised responses."""
        mus = [pure_mu(float(r.epsilon or 0.0)) for r, _ in self.responses]
        return compose_mu(mus, [count for _, count in self.responses])

    @property
    def total_mu(self) -> float:
        """GDP parameter of everything, sampling ignored."""
        return math.inf if self.exact else compose_mu([self.gaussian_mu, self.response_mu])


def reduce_events(events: Event | Iterable[Event]) -> Workload:
    """Check a list of events, or a single one, and reduce it.

    Raises:
        AccountingError: Something is no event, or the events name different adjacencies: their figures
            speak about different neighbours and must not be added.
    """
    items = [events] if isinstance(events, EVENT_TYPES) else _listed(events)
    adjacencies = {item.adjacency for item in items if hasattr(item, "adjacency") and item.count}
    if len(adjacencies) > 1:
        raise AccountingError(
            f"events name different adjacencies: {', '.join(sorted(adjacencies))}; expected one for all"
        )
    plain: Counter[float] = Counter()
    sampled: Counter[tuple[float, float]] = Counter()
    responses: Counter[RandomisedResponse] = Counter()
    for item in items:
        if isinstance(item, GaussianRelease) and item.sampling_rate < 1:
            sampled[item.sigma / item.sensitivity, item.sampling_rate] += item.count
        elif isinstance(item, GaussianRelease | DPUpdate):
            plain[item.mu] += item.count
        elif isinstance(item, RandomisedResponse):
            once = RandomisedResponse(keep_probability=item.keep_probability, classes=item.classes)
            responses[once] += item.count
    return Workload(
        mu=compose_mu(sorted(plain), [plain[mu] for mu in sorted(plain)]),
        sampled=tuple((key, sampled[key]) for key in sorted(sampled) if sampled[key]),
        responses=tuple((r, responses[r]) for r in sorted(responses, key=_sort_key) if responses[r]),
        exact=any(isinstance(item, ExactRelease) and item.count for item in items)
        or any(math.isinf(r.epsilon or 0.0) and n for r, n in responses.items()),
        replace="replace-one" in adjacencies,
        assumptions=tuple(sorted({i.assumption for i in items if _hidden(i) and i.count})),  # type: ignore[union-attr]
    )


def _listed(events: Iterable[Event]) -> list[Event]:
    try:
        items = list(events)
    except TypeError:
        raise AccountingError(f"events is {events!r}; expected an event or a list of events") from None
    for item in items:
        if not isinstance(item, EVENT_TYPES):
            raise AccountingError(f"{item!r} is no event; expected GaussianRelease, ExactRelease, ...")
    return items


def _hidden(event: Event) -> bool:
    return isinstance(event, MaskedRelease | EncryptedRelease)


def _sort_key(response: RandomisedResponse) -> tuple[float, float, int]:
    return float(response.epsilon or 0.0), float(response.keep_probability or 0.0), response.classes


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One accountant's answer.

    Attributes:
        accountant: Name of the accountant whose arithmetic gave the figure.
        epsilon: The epsilon; infinite if nothing is promised.
        delta: The delta it holds at.
        bound: Whether it is an upper bound; False marks an approximation that must not be filed.
        explanation: What was left out, replaced or assumed on the way; empty if nothing.
        assumptions: Under which masked or encrypted values told the observer nothing.
    """

    accountant: str
    epsilon: float
    delta: float
    bound: bool
    explanation: str = ""
    assumptions: tuple[str, ...] = ()


class Accountant(ABC):
    """Turns events into (epsilon, delta) for the adjacency that the events name.

    `bound` says whether the figures are upper bounds. Subclasses answer for the two regular cases; what
    is the same for all (nothing released, exact releases, delta 0 and 1) is answered here.
    """

    bound: bool = True

    @property
    def name(self) -> str:
        """Name of the accountant."""
        return type(self).__name__

    def epsilon(self, events: Event | Iterable[Event], delta: float) -> float:
        """Return epsilon at `delta`."""
        return self.figure(events, delta).epsilon

    def delta(self, events: Event | Iterable[Event], epsilon: float) -> float:
        """Return delta at `epsilon`."""
        workload, epsilon = reduce_events(events), checks.non_negative("epsilon", epsilon)
        if workload.exact:
            return 1.0
        if workload.gaussian_mu == 0 and epsilon >= workload.pure:
            return 0.0
        return 0.0 if epsilon == math.inf else self._delta(workload, epsilon)

    def figure(self, events: Event | Iterable[Event], delta: float) -> Figure:
        """Return epsilon at `delta` with its explanation."""
        workload, delta = reduce_events(events), checks.probability("delta", delta)
        epsilon, explanation, name = self._answer(workload, delta)
        return Figure(
            accountant=name,
            epsilon=epsilon,
            delta=delta,
            bound=self.bound,
            explanation=explanation,
            assumptions=workload.assumptions,
        )

    def _answer(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        if workload.exact:
            return math.inf, "something was released without noise", self.name
        if delta == 1:
            return 0.0, "", self.name
        pure = workload.pure if workload.gaussian_mu == 0 else math.inf
        if delta == 0 or pure == 0:
            return pure, "", self.name
        epsilon, explanation, name = self._epsilon(workload, delta)
        return min(epsilon, pure), explanation, name

    @abstractmethod
    def _epsilon(self, workload: Workload, delta: float) -> tuple[float, str, str]:
        """Return epsilon, an explanation and the accountant that answered, for delta in (0, 1)."""

    @abstractmethod
    def _delta(self, workload: Workload, epsilon: float) -> float:
        """Return delta for a finite epsilon."""
