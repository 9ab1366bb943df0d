"""What the label holder reaches without anybody: a linear model and boosted trees on its own features.

Both are fitted to its raw records, so they stay with it: nothing of them enters a message, a row, a ledger or
the public part of a dossier. They are computed once per data set and kept in the holder's own cache.
"""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securevfl.algorithms.solved import BoostedTrees, fit_linear
from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.data.mapped import Mapped
from securevfl.data.scaling import standard
from securevfl.errors import RunError
from securevfl.files import read_json, write_json
from securevfl.models import metrics
from securevfl.privacy.journal import fingerprint

METRICS = ("auc", "r2", "accuracy")
"""The figure that is compared: the first of them that a task has."""
MOST_WORK = 2e8
"""Cells times outputs above which trees would take many minutes."""


def main_metric(test: dict[str, Any]) -> str:
    """The name of the figure by which models of a task are compared."""
    return next((name for name in METRICS if name in test), "")


def reached_alone(data: VerticalData, *, holds_features: bool = True) -> dict[str, Any] | None:
    """The label holder's own test metric: ``metric``, ``linear`` and ``trees``.

    None without features, or where they are larger than memory.

    Args:
        data: The data, or the label holder's share of it.
        holds_features: False where the plan gives the labels to somebody without features.
    """
    holder = data.label_holder
    if not holds_features or holder not in data.parties or holder in data.absent:
        return None
    index = data.parties.index(holder)
    if isinstance(data.train[index], Mapped):
        return None  # both fits hold all rows in memory
    own = [data.train[index], data.test[index], data.y_train, data.y_test]
    if data.described:
        own += [data.described[index].train, data.described[index].test]
    version = importlib.metadata.version("scikit-learn")
    kept = cache_folder() / f"{fingerprint(own).tobytes().hex()}-{version}.json"
    try:
        found: dict[str, Any] = dict(read_json(kept))
    except RunError:
        found = _measured(data, index)
        with suppress(RunError):  # a cache that cannot be written costs time, nothing else
            write_json(kept, found)
    return found


def cache_folder() -> Path:
    """Where the holder's figures are kept, readable by itself alone."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "securevfl" / "alone"


def below_alone(result: dict[str, Any]) -> str:
    """A few words if a run ends below what its label holder reaches alone; empty otherwise."""
    alone, name = result.get("alone"), main_metric(result["test"])
    reached = result["test"].get(name)
    if not alone or reached is None or alone["metric"] != name:
        return ""
    best = max(("trees", "linear"), key=lambda kind: -np.inf if alone[kind] is None else alone[kind])
    if alone[best] is None or reached >= alone[best]:
        return ""
    words = {
        "trees": "boosted trees on its own features reach",
        "linear": "a linear model on its own features reaches",
    }
    return (
        f"below the label holder alone: {name} {reached:.4f}, and {words[best]} {alone[best]:.4f}; "
        "federation did not pay"
    )


def _measured(data: VerticalData, index: int) -> dict[str, Any]:
    linear = _linear(data, index)
    name = main_metric(linear)
    cells = data.n_train * data.widths[index] * data.outputs
    return {
        "metric": name,
        "linear": linear[name],
        "trees": _trees(data, index)[name] if cells <= MOST_WORK else None,
    }


def _linear(data: VerticalData, index: int) -> dict[str, Any]:
    scale = standard(data.train[index])
    rows, fresh = (_flat(scale(block)) for block in (data.train[index], data.test[index]))
    weights, biases = fit_linear(
        rows, data.y_train, task=data.task, outputs=data.outputs, l2=1 / max(1, data.n_train)
    )
    return _metrics(data, np.asarray(fresh @ weights.T + biases))


def _trees(data: VerticalData, index: int) -> dict[str, Any]:
    trees = BoostedTrees(card_columns(data)[index], data.outputs)
    if data.described:
        raw, fresh = data.described[index].train, data.described[index].test
    else:
        raw, fresh = (trees.raw(_flat(block)) for block in (data.train[index], data.test[index]))
    trees.fit(raw, data.y_train, task=data.task, seed=0)
    return _metrics(data, trees.outputs_of(fresh))


def _flat(block: Any) -> Any:
    return block.reshape(block.shape[0], -1) if isinstance(block, np.ndarray) else block


def _metrics(data: VerticalData, outputs: Any) -> dict[str, Any]:
    return metrics(data.task, torch.from_numpy(outputs), torch.from_numpy(np.array(data.y_test)))
