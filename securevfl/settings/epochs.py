"""How many epochs a plan has that names none: public facts alone decide, the same at every organisation.

Small sets need many passes until a model has taken enough steps, large ones few. Where every release counts,
more passes mean more noise for the same epsilon, or a larger epsilon for the same noise, so there are few.
"""

from __future__ import annotations

import math

from securevfl.settings.plan import Plan

STEPS = 5000
"""Steps that each party takes about, between the fewest and the most epochs."""
FEWEST, MOST = 3, 100
COUNTED_DEFENCE = "noise"
"""The one that is accounted for, by name: the table of defences would load their noise."""
COUNTED = 10
"""Epochs at most where every release counts."""


def fitting_epochs(plan: Plan, rows: int) -> int:
    """The epochs of a plan on so many training records: what it names, else what fits.

    Args:
        plan: The plan.
        rows: Number of training records.
    """
    if plan.epochs:
        return plan.epochs
    rows = max(1, rows)
    steps = math.ceil(STEPS * min(plan.batch, rows) / rows)
    return max(FEWEST, min(COUNTED if _counts_releases(plan) else MOST, steps))


def _counts_releases(plan: Plan) -> bool:
    """True where each further pass over the records costs privacy."""
    if not plan.family.federated or plan.mode == "frozen":
        return False
    return bool(plan.sigma or plan.epsilon or plan.defence == COUNTED_DEFENCE)
