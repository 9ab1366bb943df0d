"""How many epochs a plan has that names none: public facts alone decide, the same at every organisation.

Small sets need many passes until a model has taken enough steps, large ones few. Where every release counts,
more passes mean more noise for the same epsilon, which costs little, or a larger epsilon for the same noise,
which is paid in full: so there are fewer of them under a target, and the fewest without one.
docs/results/passes.md has what was measured.
"""

from __future__ import annotations

import math

from securevfl.settings.plan import Plan

STEPS = 5000
"""Steps that each party takes about, between the fewest and the most epochs."""
FEWEST, MOST = 3, 100
COUNTED_DEFENCE = "noise"
"""The one that is accounted for, by name: the table of defences would load their noise."""
TARGETED = 30
"""Epochs at most where a target epsilon decides the noise of every release, for classes."""
COUNTED = 10
"""Epochs at most where the plan says the noise, so that every pass adds to epsilon."""


def fitting_epochs(plan: Plan, rows: int, task: str) -> int:
    """The epochs of a plan on so many training records: what it names, else what fits.

    Args:
        plan: The plan.
        rows: Number of training records.
        task: Of the data.
    """
    if plan.epochs:
        return plan.epochs
    rows = max(1, rows)
    steps = math.ceil(STEPS * min(plan.batch, rows) / rows)
    return max(FEWEST, min(_most(plan, task), steps))


def _most(plan: Plan, task: str) -> int:
    """How many passes are too many, by what a further one costs: nothing, noise, or epsilon.

    Gradients of classes are bounded whatever the noise; those of a squared error grow with it and diverge.
    """
    if not plan.family.federated or plan.mode == "frozen":
        return MOST
    if plan.defence == COUNTED_DEFENCE or (plan.sigma and not plan.epsilon):
        return COUNTED
    if not plan.epsilon:
        return MOST
    return COUNTED if task == "regression" else TARGETED
