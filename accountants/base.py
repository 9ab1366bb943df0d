"""The one contract of all accountants."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from securevfl.accountants import checks
from securevfl.accountants.events import Event
from securevfl.accountants.workload import Workload, reduce_events


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
