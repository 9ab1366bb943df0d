"""Where a networked run is, as one organisation knows it: for its terminal and for its status page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from securevfl.accountants.gdp import gdp_epsilon
from securevfl.settings.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """What one organisation knows of a run.

    Attributes:
        epoch: The last epoch that ended here.
        epochs: All epochs of the plan; fewer may do.
        epsilon: What this organisation has spent by its own ledger; infinite where something left exactly.
        forecast: About what it will have spent at the end, and never more than its budget.
        delta: The delta of both.
        away: Organisations without a connection just now.
        resumed: The epoch that the run went back to last; None if it has not been interrupted.
    """

    epoch: int
    epochs: int
    epsilon: float
    forecast: float
    delta: float
    away: tuple[str, ...]
    resumed: int | None = None

    @property
    def words(self) -> str:
        """One line for a terminal."""
        where = f"epoch {self.epoch} of {self.epochs}"
        spent = f"epsilon {_figure(self.epsilon)} spent, about {_figure(self.forecast)} at the end"
        if math.isinf(self.epsilon):
            spent = "exact values leave: no guarantee"
        return f"{where}: {spent}" + (f"; away: {', '.join(self.away)}" if self.away else "")

    @property
    def figures(self) -> dict[str, Any]:
        """For the status page."""
        return {
            "epochs": self.epochs,
            "epsilon": self.epsilon,
            "epsilon_forecast": self.forecast,
            "delta": self.delta,
            "away": ", ".join(self.away),
            "resumed_at": -1 if self.resumed is None else self.resumed,
        }


def forecast_mu(plan: Plan, mu: float, epoch: int, begun: float = 0.0) -> float:
    """About the mu at the end of a run, by what its epochs have cost so far.

    Squared mu adds up release by release, and epochs release about equally much; frozen encoders release
    once, at the start.

    Args:
        plan: The plan.
        mu: What has been spent.
        epoch: Epochs that have ended.
        begun: The mu before the first epoch, where it is known.
    """
    if plan.mode == "frozen" or epoch < 1 or math.isinf(mu):
        return mu
    start = min(begun, mu) ** 2
    return math.sqrt(start + (mu**2 - start) * max(1.0, plan.epochs / epoch))


def run_progress(
    plan: Plan, *, mu: float, epoch: int, away: tuple[str, ...], resumed: int | None, begun: float = 0.0
) -> RunProgress:
    """The progress of an organisation that has spent `mu`, `begun` of it before the first epoch."""
    forecast = gdp_epsilon(forecast_mu(plan, mu, epoch, begun), plan.delta)
    spent = gdp_epsilon(mu, plan.delta)
    limit = plan.budget_epsilon or math.inf
    return RunProgress(
        epoch=max(0, epoch),
        epochs=plan.epochs,
        epsilon=spent,
        forecast=max(spent, min(forecast, limit)),
        delta=plan.delta,
        away=away,
        resumed=resumed,
    )


def _figure(epsilon: float) -> str:
    return f"{epsilon:.3g}"
