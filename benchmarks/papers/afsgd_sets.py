"""The sets of the AFSGD-VP reproduction: prepared as the paper does, with the lowest objective of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from benchmarks.papers.common import sample
from securevfl import Plan, VerticalData
from securevfl.algorithms.linear import Batch, loss_derivative, mean_loss
from securevfl.algorithms.resolve import resolve

Floats = npt.NDArray[np.float64]

L2 = 1e-4
SPARSE = {
    "sparse": (1_355_191, 8, "binary"),
    "sparse-16": (3_231_961, 16, "binary"),
    "sparse-regression": (150_360, 4, "regression"),
}
"""Columns, workers and task of the synthetic sets that are as wide as news20, url and E2006-tfidf."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set, the lowest objective, and the pooled features that occur in it.

    Weights of columns that never occur stay zero, in the optimum and in every run that starts at zero.
    """

    name: str
    data: VerticalData
    columns: npt.NDArray[np.int64]
    features: Any
    labels: npt.NDArray[Any]
    l2: float
    lowest: float
    targets: Mapping[str, float]
    steps: int  # per pass; a batch is that part of the records

    @property
    def batch(self) -> int:
        """Records per step."""
        return max(1, len(self.labels) // self.steps)

    def gap(self, weights: Floats) -> float:
        """Sub-optimality of pooled weights, the bias last."""
        return self.gap_of(Batch(self.features, bias=True).product(weights), weights[:-1])

    def gap_of(self, scores: Floats, pulled: Floats) -> float:
        """The same from all scores and the weights without the bias; of ridge regression twice ours."""
        pull = self.l2 / 2 * float((pulled**2).sum())
        gap = mean_loss(self.data.task, scores, self.labels) + pull - self.lowest
        return 2 * gap if self.data.task == "regression" else gap


def load(name: str, folder: Path, *, quick: bool) -> VerticalData:
    """A set by the name of its row in the paper's table."""
    if name == "motor":
        return deal(motor(folder / "fate_hetero"), 4)
    if name in SPARSE:
        columns, parties, task = SPARSE[name]
        return wide_sparse(rows=500, columns=60_000 if quick else columns, parties=parties, task=task)
    if name == "regression":
        return deal(correlated(2000 if quick else 25_000), 4)
    known = {"uci-credit": "uci-credit-one-hot"}.get(name, name)
    data = VerticalData.load(known, parties=1, folder=folder / name.replace("-", "_"))
    if name == "give-me-some-credit":
        data = ages_as_columns(data)
    data = prepare(sample(data, 3000, 500) if quick else data)
    return deal(data, 4)


def correlated(rows: int) -> VerticalData:
    """90 columns, as YearPredictionMSD has: 12 hidden ones and as much noise of their own; a number."""
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(rows, 12))
    features = hidden @ generator.normal(size=(12, 90)) / np.sqrt(12) + generator.normal(size=(rows, 90))
    features = (features / features.std(axis=0)).astype(np.float32)
    score = features @ generator.normal(size=90)
    labels = score / score.std() + generator.normal(size=rows)
    return VerticalData.from_arrays([features], labels, task="regression", name="regression")


def motor(folder: Path) -> VerticalData:
    """FATE's motor set: the speed of an electric motor from 11 readings at three parties, 800 records."""
    parts = {}
    for name, file in (("text", "guest"), ("video", "host_1"), ("audio", "host_2")):
        path = folder / f"motor_hetero_{file}.csv.gz"
        table = np.genfromtxt(path, delimiter=",", skip_header=1, dtype=np.float64)
        parts[name] = table[np.argsort(table[:, 0]), 1:]
    speed = parts["text"][:, 0]
    parts["text"] = parts["text"][:, 1:]
    return VerticalData.from_arrays(parts, speed, task="regression", name="motor")


def ages_as_columns(data: VerticalData) -> VerticalData:
    """Complete records only, a 0/1 column for each age: 120,269 records of 92 features, as in the paper."""
    (names,) = data.columns
    marks = [i for i, name in enumerate(names) if name.endswith(" missing")]
    age = names.index("age")
    others = [i for i in range(len(names)) if i != age and i not in marks]
    whole = [~np.asarray(part[0][:, marks], bool).any(axis=1) for part in (data.train, data.test)]
    kept = [np.asarray(part[0])[rows] for part, rows in zip((data.train, data.test), whole, strict=True)]
    ages = np.unique(np.concatenate([rows[:, age] for rows in kept]))
    train, test = (np.hstack([rows[:, others], rows[:, [age]] == ages]).astype(np.float32) for rows in kept)
    labels = data.y_train[whole[0]], data.y_test[whole[1]]
    return VerticalData.from_arrays(
        [train], labels[0], test=([test], labels[1]), task="binary", name=data.name
    )


def prepare(data: VerticalData) -> VerticalData:
    """The paper's preparation: 0/1 columns stay, all others are standardised."""
    train, test = [], []
    for first, second in zip(data.train, data.test, strict=True):
        many = np.array([len(np.unique(column)) > 2 for column in first.T])
        shift, scale = np.where(many, first.mean(0), 0.0), np.where(many, first.std(0), 1.0)
        # A few extreme values (incomes of millions) would force a tiny rate on every algorithm.
        train.append(np.clip((first - shift) / scale, -5, 5))
        test.append(np.clip((second - shift) / scale, -5, 5))
    return VerticalData.from_arrays(
        train, data.y_train, test=(test, data.y_test), task="binary", name=data.name
    )


def deal(data: VerticalData, parties: int) -> VerticalData:
    """Columns dealt out at random, so that no worker's block is special."""
    pooled = np.hstack(data.train), np.hstack(data.test)
    order = np.random.default_rng(0).permutation(pooled[0].shape[1])
    train, test = (np.array_split(part[:, order], parties, axis=1) for part in pooled)
    return VerticalData.from_arrays(
        train, data.y_train, test=(test, data.y_test), task=data.task, name=data.name
    )


def wide_sparse(*, rows: int, columns: int, parties: int, task: str = "binary") -> VerticalData:
    """Text-like features, as wide as news20: words by a power law, weighed as in rcv1, rows of norm 1.

    The usual weight, (1 + log count) * log(rows / rows with that word), matters: with bare counts a handful
    of words outweighs all others, and no rate suits both.
    """
    generator = np.random.default_rng(0)
    lengths = generator.integers(200, 700, rows)
    words = (columns ** generator.random(lengths.sum())).astype(np.int64) - 1
    # Frequent words are spread over all parties, as they are over the columns of a text collection.
    words = (words * 777_767_777) % columns
    documents = np.repeat(np.arange(rows), lengths)
    features = sparse.csr_array(
        (np.ones(len(words), np.float32), (documents, words)), shape=(rows, columns)
    ).tocsr()
    features.sum_duplicates()
    spread = np.bincount(features.indices, minlength=columns)[features.indices]
    features.data = (1 + np.log(features.data)) * np.log(rows / spread)
    norms = np.sqrt(np.asarray(features.multiply(features).sum(axis=1)).ravel())
    features = sparse.csr_array(sparse.diags_array(1 / norms) @ features).astype(np.float32)
    scores = features @ generator.normal(size=columns)
    labels = scores + 0.3 * scores.std() * generator.normal(size=rows)
    labels = labels / scores.std() if task == "regression" else (labels > np.median(scores)).astype(np.int64)
    edges = np.linspace(0, columns, parties + 1).astype(int)
    blocks = [features[:, a:b] for a, b in itertools.pairwise(edges)]
    return VerticalData.from_arrays(blocks, labels, task=task, name="sparse")


def pose(name: str, data: VerticalData, targets: Mapping[str, float], steps: int) -> Problem:
    """Scales the data as a run does and finds the optimum with a quasi-Newton method."""
    plan = Plan(algorithm="fsgd", scaling="none", protocol="plain-tree", unprotected=True)
    scaled = resolve(plan, data)[1]
    blocks = [sparse.csr_array(b) if sparse.issparse(b) else np.asarray(b, np.float64) for b in scaled.train]
    joined = sparse.hstack(blocks).tocsr() if sparse.issparse(blocks[0]) else np.hstack(blocks)
    features = joined.astype(np.float64)
    columns = np.flatnonzero(abs(features).sum(axis=0))
    features, labels = features[:, columns], scaled.y_train
    # The paper's ridge loss is the squared error, ours half of it: so is the regulariser.
    l2 = L2 / 2 if data.task == "regression" else L2
    return Problem(
        name=name,
        data=data,
        columns=columns,
        features=features,
        labels=labels,
        l2=l2,
        lowest=lowest(features, labels, data.task, l2),
        targets=targets,
        steps=steps,
    )


def lowest(features: Any, labels: npt.NDArray[Any], task: str, l2: float) -> float:
    """The lowest objective; the bias, which comes last, is not regularised.

    In the weights the objective is l2-strongly convex, and in the bias it is no flatter here, so that it lies
    at most |gradient|^2 / (2 l2) lower; that is less than a thousandth of the smallest target.
    """
    pooled = Batch(features, bias=True)

    def objective(flat: Floats) -> tuple[float, Floats]:
        weights = flat[:, None]
        scores = pooled.product(weights)
        gradient = pooled.gradient(loss_derivative(task, scores, labels)) / len(labels)
        pull = np.append(flat[:-1], 0.0)
        value = mean_loss(task, scores, labels) + l2 / 2 * float(pull @ pull)
        return value, gradient.ravel() + l2 * pull

    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": 1e-8, "maxcor": 30}
    start = np.zeros(features.shape[1] + 1)
    found = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    missing = float(found.jac @ found.jac) / (2 * l2)
    if missing > 1e-7:
        raise ArithmeticError(f"the optimum is known to {missing:.1g} only; allow more iterations")
    return float(found.fun)
