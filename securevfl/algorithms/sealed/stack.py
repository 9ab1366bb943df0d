"""Do no harm: the label holder's own trees, unless the sealed model or a stack of both is clearly better.

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
    if sparse.issparse(first):
        return sparse.vstack([first, second]).tocsr()
    if not any(first.strides):  # of somebody elsewhere: nothing that takes memory
        return np.broadcast_to(first.ravel()[:1].reshape(()), (len(first) + len(second), *first.shape[1:]))
    return np.concatenate([first, second])


def given_back(data: VerticalData) -> VerticalData:
    """The data as it was before `held_back`."""
    held = records_held(data.n_train)
    return replace(
        data,
        train=tuple(_joined(train, test[:held]) for train, test in zip(data.train, data.test, strict=True)),
        test=tuple(test[held:] for test in data.test),
        y_train=np.concatenate([data.y_train, data.y_test[:held]]),
        y_test=data.y_test[held:],
        ids_train=np.concatenate([data.ids_train, data.ids_test[:held]]),
        ids_test=data.ids_test[held:],
        described=tuple(
            Columns(
                source=mine.source,
                columns=mine.columns,
                train=np.concatenate([mine.train, mine.test[:held]]),
                test=mine.test[held:],
            )
            for mine in data.described
        ),
    )


def decide(data: VerticalData, own: Floats, total: Floats, *, held: int, seed: int) -> dict[str, Any]:
    """What the label holder will use, and how good that is on records that decided nothing.

    Its own trees are used unless something else is clearly better: the sealed model, or a stack of both, must
    gain more than one standard error on them. What is used in the end rests on trees of all its records.

    Args:
        data: Held-back records first in the test part.
        own: Its own sealed scores of the held-back records and, where a simulation knows the sums, of the
            test records that follow.
        total: The summed ones.
        held: How many were held back.
        seed: Of the folds.
    """
    labels = np.asarray(data.y_test, np.float64)
    inputs = _inputs(_trees(data)[:held], own[:held], total[:held])
    guesses = {name: _cross_validated(x, labels[:held], seed) for name, x in inputs.items()}
    losses = {name: _losses(guess, labels[:held]) for name, guess in guesses.items()}
    best = min(("sealed", "stack"), key=lambda name: float(losses[name].mean()))
    gain = losses["trees"] - losses[best]
    used = best if gain.mean() > gain.std() / np.sqrt(held) else "trees"
    alone = _trees(given_back(data))
    found = {
        "held_back": held,
        "guarantee": "no guarantee",
        "used": used,
        "decided": {name: _metrics(data, guess, labels[:held])["auc"] for name, guess in guesses.items()},
        "test": None,
        "trees": _metrics(data, alone, labels[held:]),
    }
    if used == "trees":
        return found | {"test": found["trees"]}
    if len(total) > held:
        fresh = _inputs(alone, own[held:], total[held:])[used]
        scores = _fitted(inputs[used], labels[:held])(fresh)
        found["test"] = _metrics(data, scores, labels[held:])
    return found


def _inputs(alone: Floats, own: Floats, total: Floats) -> dict[str, Floats]:
    """What each choice looks at."""
    return {
        "sealed": total[:, None],
        "trees": alone[:, None],
        "stack": np.column_stack([alone, own, total - own]),
    }


def _metrics(data: VerticalData, scores: Floats, labels: Floats) -> dict[str, Any]:
    truth = torch.from_numpy(labels.astype(np.float32))
    return metrics(data.task, torch.from_numpy(np.ascontiguousarray(scores)[:, None]), truth)


def _trees(data: VerticalData) -> Floats:
    """Scores of the test part by boosted trees on the label holder's own columns."""
    index = data.parties.index(data.label_holder)
    trees = BoostedTrees(card_columns(data)[index], data.outputs)
    if data.described:
        rows, fresh = (np.asarray(each) for each in (data.described[index].train, data.described[index].test))
    else:
        rows, fresh = (trees.raw(_flat(block)) for block in (data.train[index], data.test[index]))
    trees.fit(rows, data.y_train, task=data.task, seed=0)
    return np.asarray(trees.outputs_of(fresh)[:, 0], np.float64)


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
    """The log odds of each record, by a fit that has not seen it."""
    folds = np.random.default_rng(seed).permutation(len(labels)) % FOLDS
    found = np.empty(len(labels))
    for fold in range(FOLDS):
        here = folds == fold
        found[here] = _fitted(inputs[~here], labels[~here])(inputs[here])
    return found


def _losses(scores: Floats, labels: Floats) -> Floats:
    """The log loss of each record."""
    chance = np.clip(expit(scores), 1e-9, 1 - 1e-9)
    return np.asarray(-np.where(labels > 0.5, np.log(chance), np.log(1 - chance)))
