"""A list of events, checked and reduced to the few numbers that every accountant needs."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
