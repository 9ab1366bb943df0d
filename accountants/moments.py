"""The moments accountant: Rényi divergences added up, then turned into (epsilon, delta)."""

from collections.abc import Iterable

import numpy as np

from securevfl.accountants import checks
from securevfl.accountants.base import Accountant
from securevfl.accountants.events import Event
from securevfl.accountants.pairs import Array
from securevfl.accountants.renyi import (
    default_orders,
    gaussian_rdp,
    rdp_delta,
    rdp_epsilon,
    response_rdp,
    sampled_gaussian_rdp,
)
from securevfl.accountants.workload import Workload, reduce_events
from securevfl.errors import AccountingError

_UNSAMPLED = "sampling ignored: no Rényi bound for sampled releases under replace-one"


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
            note = f"{note}; {_UNSAMPLED}"
        return epsilon, note, self.name

    def _delta(self, workload: Workload, epsilon: float) -> float:
        return rdp_delta(self._orders, self._rdp(workload), epsilon)
