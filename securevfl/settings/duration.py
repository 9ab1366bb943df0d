"""What a run is going to do, and about how long it will take, from public facts and without torch.

The figures are processor time on one core, fitted on synthetic sets of 2,000 to 8,000 rows and 20 to 120
columns; ``python -m benchmarks.durations`` compares them with runs on other sets. An estimate, no promise.
"""

from __future__ import annotations

import math

from securevfl.data import VerticalData
from securevfl.settings.epochs import fitting_epochs
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import FACTS

START = 4.0
"""Seconds to load everything, to write the folder, and for what the label holder reaches alone."""
STEP = {"vafl": 2.5e-3, "fdml": 2.5e-3, "afsgd": 2.5e-3, "flex": 1.1e-2, "sealed": 5e-3}
"""Seconds per step of one party, its ledger entries included; sealed training has one step per epoch."""
CELL = {
    "linear": 2e-8,
    "scorecard": 2e-8,
    "auto": 2e-8,
    "profile": 2e-8,
    "mlp": 1.3e-6,
    "cnn": 1.3e-6,
    "lstm": 1.3e-6,
}
"""Sealed training: seconds per value and epoch; networks take a gradient for every record."""
SPREAD = 2.0
"""The range that is told: this factor to either side."""


def expected_seconds(plan: Plan, data: VerticalData) -> float:
    """About the processor time of a run in one process."""
    if not plan.family.federated:
        return START
    epochs, parties = fitting_epochs(plan, data.n_train, data.task), len(data.parties)
    steps = parties * epochs * math.ceil(data.n_train / min(plan.batch, data.n_train))
    seconds = START + steps * (STEP[plan.family.name] + FACTS[plan.protocol].seconds)
    if plan.family.name == "sealed":
        seconds += CELL.get(plan.model, CELL["mlp"]) * data.n_train * sum(data.widths) * epochs
    return seconds


def announcement(plan: Plan, data: VerticalData) -> str:
    """One line: what, on which data, under which protection, and how long."""
    protocol = "" if plan.protocol == "plain" else f", {plan.protocol}"
    kinds = dict.fromkeys(plan.encoders.get(party, {}).get("model", plan.model) for party in data.parties)
    what = f"{plan.algorithm}, model{'s' * (len(kinds) > 1)} {', '.join(kinds)}{protocol}"
    inputs = f"{sum(data.widths):,} inputs of {', '.join(data.parties)}"
    rows = f"{data.n_train:,} + {data.n_test:,} rows, {inputs}"
    seconds = expected_seconds(plan, data)
    low, high = in_words(seconds / SPREAD), in_words(seconds * SPREAD)
    return f"{what}: {rows}; {_passes(plan, data)}{_protection(plan)}; about {low} to {high} on a free core"


def _passes(plan: Plan, data: VerticalData) -> str:
    """How many epochs, and whether the plan says so; of sealed training and baselines the model decides."""
    if not plan.family.federated or plan.family.name == "sealed":
        return ""
    count = fitting_epochs(plan, data.n_train, data.task)
    why = "" if plan.epochs else f", which fit {data.n_train:,} rows"
    return f"{count} epoch{'s' if count > 1 else ''} of batches of {min(plan.batch, data.n_train):,}{why}; "


def _protection(plan: Plan) -> str:
    if not plan.family.federated:
        return "no organisation sends anything"
    if plan.epsilon:
        return f"epsilon {plan.epsilon:g} at delta {plan.delta:g}"
    return f"noise {plan.sigma:g} on every value" if plan.sigma else "UNPROTECTED: exact values leave"


def in_words(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
