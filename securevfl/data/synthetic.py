"""A seeded generator of any size, so that nothing has to be downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.blocks import check_seed
from securevfl.data.build import Construction, Rows, build
from securevfl.data.split import ColumnSplit
from securevfl.data.vertical import VerticalData
from securevfl.errors import DataError, nearest

# The declared public bounds of every column: values are drawn from N(0, 1) and clipped here.
REACH = 4.0


def make_synthetic(
    *,
    rows: int = 1000,
    features: int = 20,
    classes: int = 2,
    informative: int | None = None,
    task: str | None = None,
    noise: float = 1.0,
    positive: float = 0.5,
    seed: int = 0,
    parties: ColumnSplit = 2,
    test_fraction: float = 0.2,
) -> VerticalData:
    """Linear scores of standard normal features, plus noise; every column lies in the public bounds [-4, 4].

    The informative columns are spread evenly over all columns, so every party of a near-equal split has some.

    Args:
        rows: Number of records, test part included.
        features: Number of columns.
        classes: Number of classes; ignored for regression.
        informative: Columns that the label depends on; half of them by default.
        task: `regression`, or None to follow from `classes`.
        noise: Scale of the noise on the scores, whose own deviation is 3; at 1 the best binary AUC is about
            0.92.
        positive: Share of class 1 in a binary set.
        seed: Seed of the features, the labels and the train/test split.
        parties: How to split the columns.
        test_fraction: Share of rows for the test part.
    """
    useful = max(1, features // 2) if informative is None else informative
    _check(rows=rows, features=features, classes=classes, informative=useful, noise=noise, positive=positive)
    if task not in (None, "binary", "multiclass", "regression"):
        raise DataError(f"unknown task {task!r}; {nearest(task, ('binary', 'multiclass', 'regression'))}")
    if (task == "binary" and classes != 2) or (task == "multiclass" and classes < 3):
        raise DataError(f"task {task} does not go with classes={classes}")
    generator = np.random.default_rng(check_seed(seed))
    block = generator.standard_normal((rows, features), dtype=np.float32)
    np.clip(block, -REACH, REACH, out=block)
    columns = np.linspace(0, features - 1, useful).round().astype(np.intp)
    outputs = 1 if task == "regression" or classes == 2 else classes
    weights = generator.standard_normal((useful, outputs))
    weights *= 3.0 / np.linalg.norm(weights, axis=0)
    scores = block[:, columns] @ weights.astype(np.float32)
    settings = Construction(
        parties=("p0",),
        columns=(tuple(f"x{i}" for i in range(features)),),
        label_holder="p0",
        name="synthetic",
        bounds=(-REACH, REACH),
        task="regression" if task == "regression" else "binary" if classes == 2 else "multiclass",
        test_fraction=test_fraction,
        seed=seed,
    )
    labels = _labels(scores, generator, settings.task, noise, positive)
    return build(Rows(blocks=(block,), labels=labels, ids=np.arange(rows)), None, settings).split(parties)


def _labels(
    scores: NDArray[Any], generator: np.random.Generator, task: str | None, noise: float, positive: float
) -> NDArray[Any]:
    if task == "regression":
        return np.asarray(scores[:, 0] + noise * generator.standard_normal(len(scores)), dtype=np.float64)
    if task == "multiclass":
        return np.asarray(np.argmax(scores + noise * generator.gumbel(size=scores.shape), axis=1))
    # Ranking instead of a fixed threshold gives exactly the share of class 1 that was asked for.
    noisy = scores[:, 0] + noise * generator.logistic(size=len(scores))
    labels = np.zeros(len(noisy), dtype=np.int64)
    labels[np.argsort(-noisy, kind="stable")[: max(1, round(positive * len(noisy)))]] = 1
    return labels


def _check(
    *, rows: int, features: int, classes: int, informative: int, noise: float, positive: float
) -> None:
    for name, value, least in (("rows", rows, 4), ("features", features, 1), ("classes", classes, 2)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise DataError(f"synthetic: {name} must be a whole number >= {least}, found {value!r}")
    if not isinstance(informative, int | np.integer) or not 1 <= informative <= features:
        raise DataError(f"synthetic: informative must be between 1 and {features}, found {informative!r}")
    if not (np.isfinite(noise) and noise >= 0):
        raise DataError(f"synthetic: noise must be >= 0, found {noise!r}")
    if not 0 < positive < 1:
        raise DataError(f"synthetic: positive must be between 0 and 1, found {positive!r}")


_OPTIONS: dict[str, type] = {
    "rows": int,
    "features": int,
    "classes": int,
    "informative": int,
    "task": str,
    "noise": float,
    "positive": float,
    "seed": int,
}


def parse_options(text: str) -> dict[str, Any]:
    """The options in a name such as `synthetic:rows=1000,features=20`, without `synthetic:`."""
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _OPTIONS:
            raise DataError(f"synthetic: unknown option {key!r}; {nearest(key, _OPTIONS)}")
        try:
            options[key] = _OPTIONS[key](value)
        except ValueError:
            raise DataError(f"synthetic: {key}={value!r} is not a {_OPTIONS[key].__name__}") from None
    return options
