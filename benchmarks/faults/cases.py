"""The small plans that faults are tried in, one for every mode and protocol."""

from __future__ import annotations

from typing import Any

from securevfl import Plan

DATA = "synthetic:rows=200,features=24,informative=12"
PARTIES = 3

# In strict mode every vector that leaves counts for every record: promises of a few epsilon take much noise.
_COMMON: dict[str, Any] = {
    "algorithm": "vafl",
    "epochs": 2,
    "batch": 40,
    "sigma": 20.0,
    "learning_rate": 0.02,
    "record_views": True,
}
_WIDE = {**_COMMON, "embedding": 4, "evaluate_every": 1}
_ONCE = {**_WIDE, "sigma": 3.0}
_PRIVATE = {"encoder_training": "dp", "gradient_clip": 0.05, "gradient_sigma": 0.1}

CASES: dict[str, dict[str, Any]] = {
    "strict": _WIDE,
    "frozen": {**_ONCE, "encoder_training": "none"},
    "dp-encoder": {**_ONCE, **_PRIVATE},
    "dp-sums": {**_ONCE, **_PRIVATE, "protocol": "two-tree", "model": "mlp", "hidden": (4,)},
    "fdml": {**_COMMON, "algorithm": "fdml"},
    "flex": {**_WIDE, "algorithm": "flex"},
    "afsgd": {**_COMMON, "algorithm": "afsgd"},
    "two-tree": {**_WIDE, "protocol": "two-tree"},
    "pairwise": {**_WIDE, "protocol": "pairwise"},
    "pairwise-recovering": {**_WIDE, "protocol": "pairwise", "threshold": 3, "parties": 4},
    "fdml-sums": {**_COMMON, "algorithm": "fdml", "protocol": "two-tree"},
    "flex-sums": {**_WIDE, "algorithm": "flex", "protocol": "two-tree"},
    "afsgd-sums": {**_COMMON, "algorithm": "afsgd", "protocol": "two-tree"},
    "sealed": {**_COMMON, "algorithm": "sealed", "epochs": 4, "learning_rate": 1.0},
    "sealed-network": {**_COMMON, "algorithm": "sealed", "model": "mlp", "hidden": (4,)},
    "defence": {**_WIDE, "algorithm": "vafl-sync", "defence": "noise"},
    "labels": {**_WIDE, "label_epsilon": 1.0},
    "budget": {**_WIDE, "sigma": 200.0, "epochs": 6, "evaluate_every": 0, "budget_epsilon": 1.0},
}
"""What each case changes of a plan; `parties` is the number of parties."""


def plan_of(case: str, seed: int = 0) -> Plan:
    """The plan of a case."""
    changes = dict(CASES[case])
    source = {"data": DATA, "parties": changes.pop("parties", PARTIES)}
    return Plan(**changes, seed=seed, source=source)
