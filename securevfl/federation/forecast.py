"""What a run will have cost each owner at its end, towards each observer, computed before anything leaves.

The figures follow from the resolved plan and public facts of the data, so every organisation computes the
same. Where the plan has a budget the gate refuses whatever exceeds it, and the budget is the figure.
"""

from __future__ import annotations

import math

from securevfl.accountants.gdp import gdp_epsilon
from securevfl.algorithms.resolve import planned_releases
from securevfl.algorithms.sealed.card import CARD, geometry_of
from securevfl.data import VerticalData
from securevfl.federation.agreed import Timetable
from securevfl.settings.plan import Plan

Forecast = dict[str, dict[str, float]]
"""Owner -> observer -> epsilon at the plan's delta; infinite without a guarantee."""


def forecast(plan: Plan, data: VerticalData) -> Forecast:
    """What each owner will have let each observer learn, if nothing interrupts the run.

    Args:
        plan: The resolved plan.
        data: The data, of which names and counts are read.
    """
    holder = data.label_holder
    with_data = tuple(dict.fromkeys((*data.parties, holder)))
    found: Forecast = {}
    for owner in with_data:
        epsilon = _of_labels(plan, data) if owner == holder else _of_features(plan, data)
        hears = (holder,) if plan.mode == "frozen" else with_data
        found[owner] = {each: epsilon for each in hears if each != owner and epsilon}
    return found


def _of_features(plan: Plan, data: VerticalData) -> float:
    if plan.insecure_reproducible_noise or not plan.sigma:
        return math.inf
    if plan.mode == "sealed" and plan.settings.protect == "label":
        return math.inf
    return plan.budget_epsilon or rounded(gdp_epsilon(_planned_mu(plan, data), plan.accounted_delta))


def _of_labels(plan: Plan, data: VerticalData) -> float:
    """Of the label holder, whose gradients carry no guarantee; frozen encoders get none."""
    if plan.mode == "sealed" and plan.sigma and not plan.insecure_reproducible_noise:
        return plan.budget_epsilon or rounded(gdp_epsilon(_planned_mu(plan, data), plan.accounted_delta))
    return 0.0 if plan.mode == "frozen" else math.inf


def _planned_mu(plan: Plan, data: VerticalData) -> float:
    if plan.mode == "sealed":
        openings = 1.0 if plan.model == CARD else plan.epochs / (1 - plan.settings.centring)
        return geometry_of(plan, data).shifts.diameter / plan.sigma * math.sqrt(openings)
    planned, each = planned_releases(plan, data), 2 * plan.clip / plan.sigma
    square = (planned.vectors if plan.mode == "strict" else planned.per_record) * each * each
    if plan.mode == "dp-encoder":
        square += planned.updates * (2 * plan.gradient_clip / plan.gradient_sigma) ** 2
    return math.sqrt(square)


def worst_case(plan: Plan, table: Timetable) -> float:
    """The largest epsilon that the enforcer allows in mode `strict` where there is no budget.

    That is all that may be asked for, after as many restarts as were agreed on.
    """
    if plan.budget_epsilon or plan.mode != "strict" or not plan.sigma or plan.insecure_reproducible_noise:
        return plan.budget_epsilon or math.inf
    vectors = table.n_train + table.epochs * table.per_epoch + table.evaluations * table.n_test
    square = vectors * (1 + (table.restarts or 0)) * (2 * plan.clip / plan.sigma) ** 2
    return rounded(gdp_epsilon(math.sqrt(square), plan.delta))


def rounded(epsilon: float) -> float:
    """Three digits, rounded up: no machine's last digit decides whether all agree."""
    if not math.isfinite(epsilon) or not epsilon:
        return epsilon
    scale = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return math.ceil(epsilon / scale) * scale
