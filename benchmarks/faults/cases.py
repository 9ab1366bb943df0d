"""The small plans that faults are tried in, one for every mode and protocol."""

from __future__ import annotations

from typing import Any

from securevfl import Plan

DATA = "synthetic:rows=200,features=24,informative=12"
STACKED = "synthetic:rows=300,features=24,informative=12"
"""A stack wants 200 records to train on."""
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
_SEALED = {**_COMMON, "algorithm": "sealed", "model": "linear", "epochs": 3, "learning_rate": 1.0}
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
    "sealed-card": {"algorithm": "sealed", "model": "scorecard", "epsilon": 4.0, "record_views": True},
    "defence": {**_WIDE, "algorithm": "vafl-sync", "defence": "noise"},
    "labels": {**_WIDE, "label_epsilon": 1.0},
    "budget": {**_WIDE, "sigma": 200.0, "epochs": 6, "evaluate_every": 0, "budget_epsilon": 1.0},
    "sealed-longer": {
        **_COMMON,
        "algorithm": "sealed",
        "model": "linear",
        "epochs": 48,
        "learning_rate": 1.0,
    },
    "dp-encoder-longer": {**_ONCE, **_PRIVATE, "epochs": 6},
    "frozen-predicted": {**_ONCE, "encoder_training": "none", "predict": 24},
    "strict-predicted": {**_WIDE, "predict": 24},
    "sealed-predicted": {**_SEALED, "predict": 24},
    "sealed-checked": {**_SEALED, "settings": {"adversary": "malicious"}},
    "sealed-profile": {"algorithm": "sealed", "model": "profile", "epsilon": 4.0, "record_views": True},
    "network": {**_ONCE, "algorithm": "vafl-sync", "encoder_training": "none", "align": "none"},
    "network-aligned": {**_ONCE, "algorithm": "vafl-sync", "encoder_training": "none", "align": "private"},
    "network-sealed": {
        **_SEALED,
        "align": "none",
        "settings": {"dealer": "dealer", "adversary": "malicious"},
    },
    "scored": {
        **_SEALED,
        "align": "none",
        "serve": 24,
        "settings": {"dealer": "dealer", "adversary": "semi-honest"},
    },
    "scored-embeddings": {
        **_ONCE,
        "algorithm": "vafl-sync",
        "encoder_training": "none",
        "align": "none",
        "serve": 24,
    },
    "pair": {**_SEALED, "parties": 2, "settings": {"dealer": "none"}},
    "pair-predicted": {**_SEALED, "parties": 2, "predict": 24, "settings": {"dealer": "none"}},
    "trio": {**_SEALED, "settings": {"dealer": "none"}},
    "number-card": {
        "algorithm": "sealed",
        "model": "scorecard",
        "epsilon": 4.0,
        "record_views": True,
        "data": f"{DATA},task=regression",
        "settings": {"label_low": -10.0, "label_high": 10.0},
    },
    "classes": {**_SEALED, "data": f"{DATA},classes=3"},
    "svrg-sums": {**_COMMON, "algorithm": "afsvrg", "protocol": "two-tree"},
    "sums-predicted": {**_WIDE, "protocol": "two-tree", "predict": 48},
    "card-continued": {
        "algorithm": "sealed",
        "model": "scorecard",
        "epsilon": 4.0,
        "record_views": True,
        "profile": 2.0,
    },
    "sealed-words": {
        **_SEALED,
        "epochs": 24,
        "record_words": True,
        "settings": {"adversary": "malicious"},
    },
    "private-mlp": {**_ONCE, **_PRIVATE, "model": "mlp", "hidden": (4,)},
    "bfv": {**_WIDE, "protocol": "bfv", "epochs": 1},
    "sealed-target": {"algorithm": "sealed", "model": "linear", "epsilon": 4.0, "record_views": True},
    "sealed-stack": {**_SEALED, "data": STACKED, "settings": {"stack": True}},
    "collusion": {**_WIDE, "protocol": "pairwise", "parties": 4, "collusion": 2},
    "hidden": {**_WIDE, "model": "mlp", "hidden": (4,), "hidden_noise": (0.3,)},
    "resumed": {**_WIDE, "broken": 0.75},
    "recorded": {**_ONCE, "algorithm": "vafl-sync", "encoder_training": "none", "foreign": 2},
    "fdml-serverless": {**_COMMON, "algorithm": "fdml", "settings": {"decentralised": True}},
    "vafl-also": {**_WIDE, "settings": {"also": 10}},
    "queries": {**_WIDE, "settings": {"query_first": True}, "defence": "noise"},
    "flex-private": {**_WIDE, "algorithm": "flex", "settings": {"private_labels": True}, "defence": "noise"},
    "refreshing": {**_WIDE, "settings": {"delay_bound": 2}},
    "label-server": {**_WIDE, "label_holder": "server"},
    "passive": {**_COMMON, "algorithm": "afsgd", "settings": {"active": ("p0",)}, "label_epsilon": 1.0},
    "sequences": {**_ONCE, "encoder_training": "none", "model": "lstm", "units": 4},
    "dp-momentum": {**_ONCE, **_PRIVATE, "optimiser": "momentum"},
    "class-labels": {**_WIDE, "label_epsilon": 1.0, "data": f"{DATA},classes=3"},
    "described": {**_ONCE, "algorithm": "vafl-sync", "encoder_training": "none", "described": True},
}
"""What each case changes of a plan; `parties` is the number of parties, `predict` how many new records are
predicted afterwards, `profile` the epsilon of a profile that the run goes on from, `serve` the quota of a
scoring service, `broken` the share of its
training after which a run is broken off to be resumed, `foreign` the epochs of a program that only records;
`described` stands for tables of text that a description names;
`align` stands for a run over a network and says
how its records are aligned."""

_ROUNDS = {**_COMMON, "protocol": "two-tree"}
MORE: dict[str, dict[str, Any]] = {
    "vafl-sync": {**_WIDE, "algorithm": "vafl-sync"},
    "vafl-tsync": {**_WIDE, "algorithm": "vafl-tsync"},
    "frozen-sync": {**_ONCE, "algorithm": "vafl-sync", "encoder_training": "none"},
    "frozen-sums": {**_ONCE, "encoder_training": "none", "protocol": "two-tree"},
    "plain-tree": {**_WIDE, "protocol": "plain-tree"},
    "ckks": {**_WIDE, "protocol": "ckks", "epochs": 1},
    "fdml-pairwise": {**_COMMON, "algorithm": "fdml", "protocol": "pairwise"},
    "flex-adaptive": {**_WIDE, "algorithm": "flex-adaptive"},
    "sync-min": {**_WIDE, "algorithm": "sync-min"},
    "p-bcd": {**_WIDE, "algorithm": "p-bcd"},
    "afsvrg": {**_COMMON, "algorithm": "afsvrg"},
    "afsaga": {**_COMMON, "algorithm": "afsaga"},
    "fsgd": {**_ROUNDS, "algorithm": "fsgd"},
    "fsaga": {**_ROUNDS, "algorithm": "fsaga"},
    "sealed-batches": {**_COMMON, "algorithm": "sealed", "model": "linear", "epochs": 3, "batch": 100},
    "sealed-pair": {**_COMMON, "algorithm": "sealed", "model": "linear", "epochs": 3, "parties": 2},
    "five": {**_WIDE, "parties": 5},
    "defence-sums": {**_WIDE, "algorithm": "vafl-sync", "defence": "noise", "protocol": "two-tree"},
}
"""More sound plans, which no fault is tried in: false alarms are counted over these and all cases."""


def plan_of(case: str, seed: int = 0) -> Plan:
    """The plan of a case."""
    changes = dict((CASES | MORE)[case])
    for later in ("predict", "profile", "serve", "broken", "foreign"):
        changes.pop(later, None)
    if changes.pop("align", "") or changes.pop("described", False):  # organisations bring tables of their own
        return Plan(**changes, seed=seed)
    source = {"data": changes.pop("data", DATA), "parties": changes.pop("parties", PARTIES)}
    return Plan(**changes, seed=seed, source=source)
