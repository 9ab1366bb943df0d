"""Do no harm: the label holder's own trees, the sealed model, or a stack of both, whichever is better.

Some training records are kept out of both trainings, and the sealed scores of these are opened to the label
holder, exactly: **they have no guarantee against it**. On them it decides, alone and locally, what it will
use. Trees depend on all of its raw records, so what they touch stays with it: the stack, the decision, its
figures. None of it enters a row, a total, a message or an exported card.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import expit

from securevfl.algorithms.solved import BoostedTrees
from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.data.columns import Columns
from securevfl.models import metrics

Floats = NDArray[np.float64]
HELD_BACK = 0.1
"""Share of the training records, the last ones: a public choice."""
FOLDS = 5


def held_back(data: VerticalData) -> VerticalData:
    """The data with the last tenth of its training records moved to the front of the test part.

    Every record keeps its index, training part first.
    """
    cut = data.n_train - count_of(data.n_train)
    blocks = tuple(_joined(train[cut:], test) for train, test in zip(data.train, data.test, strict=True))
    described = tuple(
        Columns(
            source=mine.source,
            columns=mine.columns,
            train=mine.train[:cut],
            test=np.concatenate([mine.train[cut:], mine.test]),
        )
        for mine in data.described
    )
    return replace(
        data,
        train=tuple(train[:cut] for train in data.train),
        test=blocks,
        y_train=data.y_train[:cut],
        y_test=np.concatenate([data.y_train[cut:], data.y_test]),
        ids_train=data.ids_train[:cut],
        ids_test=np.concatenate([data.ids_train[cut:], data.ids_test]),
        described=described,
    )


def count_of(train: int) -> int:
    """How many of so many training records are held back."""
    return round(HELD_BACK * train)


def records_held(kept: int) -> int:
    """How many were held back where so many are left."""
    total = round(kept / (1 - HELD_BACK))
    return next((n - kept for n in range(total - 2, total + 3) if n - count_of(n) == kept), total - kept)


def _joined(first: Any, second: Any) -> Any:
    return (
        sparse.vstack([first, second]).tocsr() if sparse.issparse(first) else np.concatenate([first, second])
    )


def decide(data: VerticalData, own: Floats, total: Floats, *, held: int, seed: int) -> dict[str, Any]:
    """What the label holder will use, and how good that is on records that decided nothing.

    Args:
        data: Held-back records first in the test part.
        own: Its own sealed scores of the test part.
        total: The summed ones.
        held: How many were held back.
        seed: Of the trees and folds.
    """
    index = data.parties.index(data.label_holder)
    trees = BoostedTrees(card_columns(data)[index], data.outputs)
    parts = [
        np.asarray(mine) if data.described else trees.raw(_flat(block))
        for mine, block in zip(
            (data.described[index].train, data.described[index].test) if data.described else (None, None),
            (data.train[index], data.test[index]),
            strict=True,
        )
    ]
    trees.fit(parts[0], data.y_train, task=data.task, seed=seed)
    alone = trees.outputs_of(parts[1])[:, 0]
    inputs = {
        "sealed": total[:, None],
        "trees": alone[:, None],
        "stack": np.column_stack([alone, own, total - own]),
    }
    labels = np.asarray(data.y_test, np.float64)
    losses = {name: _cross_validated(x[:held], labels[:held], seed) for name, x in inputs.items()}
    plain = min(("sealed", "trees"), key=lambda name: float(losses[name].mean()))
    gain = losses[plain] - losses["stack"]
    used = "stack" if gain.mean() > gain.std() / np.sqrt(held) else plain
    scores = _fitted(inputs[used][:held], labels[:held])(inputs[used][held:])
    truth = torch.from_numpy(np.array(data.y_test[held:]))
    return {
        "held_back": held,
        "guarantee": "no guarantee",
        "used": used,
        "test": metrics(data.task, torch.from_numpy(scores[:, None]), truth),
        "trees": metrics(data.task, torch.from_numpy(alone[held:, None]), truth),
    }


def _flat(block: Any) -> Any:
    return block.reshape(block.shape[0], -1) if isinstance(block, np.ndarray) else block


def _fitted(inputs: Floats, labels: Floats) -> Any:
    """A logistic function of standardised inputs."""
    from sklearn.linear_model import LogisticRegression

    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0) + 1e-12
    if len(np.unique(labels)) < 2:
        return lambda rows: rows[:, 0]
    model = LogisticRegression().fit((inputs - mean) / deviation, labels)
    return lambda rows: model.decision_function((rows - mean) / deviation)


def _cross_validated(inputs: Floats, labels: Floats, seed: int) -> Floats:
    """The log loss of each record, by a fit that has not seen it."""
    folds = np.random.default_rng(seed).permutation(len(labels)) % FOLDS
    losses = np.empty(len(labels))
    for fold in range(FOLDS):
        here = folds == fold
        chance = np.clip(expit(_fitted(inputs[~here], labels[~here])(inputs[here])), 1e-9, 1 - 1e-9)
        losses[here] = -np.where(labels[here] > 0.5, np.log(chance), np.log(1 - chance))
    return losses
