"""Models of one place that are solved as a whole: linear ones to convergence, and boosted trees.

Scikit-learn does the fitting. What it finds is kept as tensors, so that a model file holds no code and the
trees can be applied without scikit-learn's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from securevfl.data.binning import raw_columns
from securevfl.data.columns import Column
from securevfl.errors import PlanError, TrainingDiverged
from securevfl.models.threads import few_threads
from securevfl.transfers import OnHost, to_device

Floats = NDArray[np.float64]
ROUNDS, LEAVES = 100, 31
"""Scikit-learn's own defaults, which a baseline is expected to have."""
NODES = 2 * LEAVES - 1
MOST_CODES = 255
"""Categories that trees split as such; longer lists are split as numbers."""
MOST_CELLS = 1 << 28
NEVER = 20.0
"""Logit of what training has never seen otherwise."""
_FIELDS = {  # scikit-learn's name -> type of the buffer
    "feature_idx": torch.int64,
    "num_threshold": torch.float64,
    "missing_go_to_left": torch.bool,
    "left": torch.int64,
    "right": torch.int64,
    "is_leaf": torch.bool,
    "is_categorical": torch.bool,
    "value": torch.float64,
}


def fit_linear(
    rows: Any, labels: NDArray[Any], *, task: str, outputs: int, l2: float
) -> tuple[Floats, Floats]:
    """Logistic, softmax or ridge regression to convergence: weights (outputs, columns) and biases.

    Args:
        rows: Features, dense or sparse; scaled by the caller.
        labels: As the task has them.
        task: One of `securevfl.models.TASKS`.
        outputs: Outputs of the task.
        l2: Coefficient of l2/2 * ||weights||^2 beside the mean loss.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    weights, biases = np.zeros((outputs, rows.shape[1])), np.zeros(outputs)
    least = max(l2, 1e-9)  # separable classes have no finite solution without it
    if task == "regression":
        model: Any = Ridge(alpha=least * rows.shape[0])
        model.fit(rows, labels)
        place = np.arange(outputs)
    else:
        place, biases = _places(labels, outputs)
        if not len(place):
            return weights, biases
        model = LogisticRegression(C=1 / (least * rows.shape[0]), max_iter=5000, tol=1e-5)
        model.fit(rows, labels)
    weights[place], biases[place] = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
    if not (np.isfinite(weights).all() and np.isfinite(biases).all()):
        raise TrainingDiverged("the linear baseline is not finite; look for columns of extreme size")
    return weights, biases


def _places(labels: NDArray[Any], outputs: int) -> tuple[NDArray[np.intp], Floats]:
    """Which outputs scikit-learn's scores belong to, and the biases of the others.

    It has one score for two classes, and none at all for classes that the labels do not have; nothing is to
    be learnt where there is one class.
    """
    present = np.unique(np.asarray(labels)).astype(np.intp)
    if outputs == 1:
        return np.zeros(len(present) - 1, np.intp), np.full(1, -NEVER if not present.any() else NEVER)
    biases = np.full(outputs, -NEVER)
    biases[present] = 0.0
    return (present if len(present) > 2 else present[1:]), biases


class BoostedTrees(OnHost):
    """Scikit-learn's HistGradientBoosting as tensors; the input is the columns of all parties side by side.

    Args:
        columns: What everybody knows of the columns; categories are split as such.
        outputs: Outputs of the task.
    """

    codes: Tensor
    left_codes: Tensor
    baseline: Tensor

    def __init__(self, columns: Sequence[Column], outputs: int) -> None:
        super().__init__()
        self.columns, self.outputs = tuple(columns), outputs
        trees = ROUNDS * outputs
        self.categorical = [0 < column.codes <= MOST_CODES for column in self.columns]
        most = max((column.codes for column in self.columns), default=0)
        for name, kind in _FIELDS.items():
            self.register_buffer(name, torch.zeros((trees, NODES), dtype=kind))
        self.is_leaf.fill_(True)  # type: ignore[operator]
        self.register_buffer("codes", torch.full((len(self.columns), most), -1, dtype=torch.int64))
        self.register_buffer("left_codes", torch.zeros((trees, NODES, 8), dtype=torch.int64))
        self.register_buffer("baseline", torch.zeros(outputs, dtype=torch.float64))

    def fit(self, raw: Floats, labels: NDArray[Any], *, task: str, seed: int) -> None:
        """Fits the trees to raw values of the columns, see `raw`, with scikit-learn's defaults."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        for column in np.flatnonzero(self.categorical):
            known = np.unique(raw[~np.isnan(raw[:, column]), column]).astype(np.intp)
            self.codes[column] = -1
            self.codes[column, known] = torch.arange(len(known))
        place, biases = np.arange(self.outputs, dtype=np.intp), np.zeros(self.outputs)
        if task != "regression":
            place, biases = _places(labels, self.outputs)
        if not len(place):
            self._take([], place, biases, np.zeros(0))
            return
        kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
        flags = [self.categorical[column] for column in self._order]
        model = kind(categorical_features=flags if any(flags) else None, random_state=seed)
        rows = self._coded(raw)
        rows[:, np.isnan(rows).all(axis=0)] = (
            0.0  # a column without a value is never split; the bins need one
        )
        with few_threads(raw.size):
            model.fit(rows, labels)
        self._take(model._predictors, place, biases, np.ravel(model._baseline_prediction))

    def _take(
        self, grown: Sequence[Any], outputs: NDArray[np.intp], biases: Floats, baseline: Floats
    ) -> None:
        self.is_leaf.fill_(True)  # type: ignore[operator]
        self.value.zero_()  # type: ignore[operator]
        biases[outputs] = baseline
        self.baseline.copy_(torch.from_numpy(biases))
        placed = [
            (round_ * self.outputs + output, tree)
            for round_, together in enumerate(grown)
            for output, tree in zip(outputs, together, strict=True)
        ]
        for place, tree in placed:
            nodes = tree.nodes
            for name, kind in _FIELDS.items():
                found = torch.from_numpy(np.ascontiguousarray(nodes[name])).to(kind)
                getattr(self, name)[place, : len(nodes)] = found
            split = np.flatnonzero(nodes["is_categorical"])
            sets = tree.raw_left_cat_bitsets[nodes["bitset_idx"][split]].astype(np.int64)
            self.left_codes[place, split] = torch.from_numpy(sets)

    @property
    def _order(self) -> list[int]:
        """Categories first, as scikit-learn has them inside."""
        return sorted(range(len(self.columns)), key=lambda place: not self.categorical[place])

    def raw(self, rows: Any) -> Floats:
        """Raw values of the columns from rows of features.

        Raises:
            PlanError: The rows do not fit in memory once they are dense.
        """
        if np.prod(rows.shape) > MOST_CELLS:
            raise PlanError(
                f"boosted trees need dense rows, and {rows.shape[0]:,} x {rows.shape[1]:,} do not fit; "
                "use model 'linear'"
            )
        dense = rows.toarray() if sparse.issparse(rows) else np.asarray(rows)
        parts = raw_columns(self.columns, np.asarray(dense, np.float64))
        return np.stack(parts, axis=1)

    def _coded(self, raw: Floats) -> Floats:
        """Columns in scikit-learn's order; a category that training has not seen counts as missing."""
        out = raw[:, self._order]
        for place, own in enumerate(self._order):
            if self.categorical[own]:
                gaps = np.isnan(out[:, place])
                found = self.codes[own].numpy()[np.where(gaps, 0, out[:, place]).astype(np.intp)]
                out[:, place] = np.where(gaps | (found < 0), np.nan, found)
        return out

    def forward(self, inputs: Tensor) -> Tensor:
        """Raw outputs (rows, outputs): logits, or values."""
        rows = self.raw(inputs.detach().cpu().double().numpy().reshape(len(inputs), -1))
        return to_device(self.outputs_of(rows), inputs.device)

    def outputs_of(self, raw: Floats) -> Floats:
        """Raw outputs (rows, outputs) from raw values of the columns."""
        rows = self._coded(raw)
        total = np.tile(self.baseline.numpy(), (len(rows), 1))
        fields = {name: getattr(self, name).numpy() for name in _FIELDS}
        for tree in range(len(fields["value"])):
            mine = {name: values[tree] for name, values in fields.items()}
            if not (mine["is_leaf"][0] and mine["value"][0] == 0):
                total[:, tree % self.outputs] += _walk(rows, mine, self.left_codes[tree].numpy())
        return total


def _walk(rows: Floats, tree: dict[str, Any], sets: NDArray[np.int64]) -> Floats:
    """The value of the leaf that each row ends in."""
    place = np.zeros(len(rows), np.intp)
    going = np.flatnonzero(~tree["is_leaf"][place])
    while len(going):
        at = place[going]
        values = rows[going, tree["feature_idx"][at]]
        gaps = np.isnan(values)
        codes = np.where(gaps | ~tree["is_categorical"][at], 0, values).astype(np.int64)
        listed = (sets[at, codes // 32] >> (codes % 32)) & 1 == 1
        left = np.where(tree["is_categorical"][at], listed, values <= tree["num_threshold"][at])
        left = np.where(gaps, tree["missing_go_to_left"][at], left)
        place[going] = np.where(left, tree["left"][at], tree["right"][at])
        going = going[~tree["is_leaf"][place[going]]]
    found: Floats = tree["value"][place]
    return found
