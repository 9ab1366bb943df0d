"""All accountants side by side, and the smallest sound figure."""

from collections.abc import Iterable

from securevfl.accountants.base import Accountant, Figure
from securevfl.accountants.events import Event
from securevfl.accountants.gaussian import CLTApproximation, GDPAccountant
from securevfl.accountants.moments import MomentsAccountant
from securevfl.accountants.numerical import PLDAccountant, PRVAccountant
from securevfl.accountants.workload import reduce_events

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
