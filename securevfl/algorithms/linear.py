"""A worker's block of a linear model, and stochastic gradients: SGD, SVRG and SAGA (AFSGD-VP, eq. 3 to 5).

Gradients are hand-written, and sparse features stay sparse. For linear models a record's gradient is its loss
derivative times its features, so the variance-reduced estimators remember one number per record and output,
never a vector. The regulariser's gradient is exact and added by the step itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse, special

from securevfl.errors import PlanError, TrainingDiverged
from securevfl.models.losses import USUAL, task_loss
from securevfl.privacy.rows import Rows

Floats = npt.NDArray[np.float64]

CHUNK = 4096
"""Rows per piece of a full gradient: bounds the memory of dense blocks."""


# A model that diverges overflows first; the gate refuses what is not finite before anything leaves.
_quietly = np.errstate(over="ignore", invalid="ignore")


@_quietly
def loss_derivative(task: str, scores: Floats, labels: npt.NDArray[Any], loss: str = "auto") -> Floats:
    """The derivative of each record's loss with respect to its scores, one row per record.

    Binary: logistic loss of one score, labels 0 and 1. Multiclass: cross entropy. Regression: half the
    squared error. Other losses are differentiated by torch.
    """
    if loss not in ("auto", USUAL[task]):
        leaf = torch.from_numpy(np.array(scores)).requires_grad_()
        each = task_loss(task, leaf, torch.from_numpy(np.array(labels)), reduction="none", loss=loss)
        found: Floats = torch.autograd.grad(each.sum(), leaf)[0].numpy()
        return found
    if task == "multiclass":
        chances: Floats = special.softmax(scores, axis=1)
        chances[np.arange(len(labels)), labels.astype(np.int64)] -= 1.0
        return chances
    target = labels.astype(np.float64)[:, None]
    return special.expit(scores) - target if task == "binary" else scores - target


@_quietly
def mean_loss(task: str, scores: Floats, labels: npt.NDArray[Any], loss: str = "auto") -> float:
    """The mean loss of records, without the regulariser."""
    if loss not in ("auto", USUAL[task]):
        given = torch.from_numpy(np.array(scores)), torch.from_numpy(np.array(labels))
        return float(task_loss(task, *given, loss=loss))
    if task == "multiclass":
        chosen = scores[np.arange(len(labels)), labels.astype(np.int64)]
        return float(np.mean(special.logsumexp(scores, axis=1) - chosen))
    score, target = scores[:, 0], labels.astype(np.float64)
    if task == "binary":
        return float(np.mean(np.logaddexp(0.0, score) - target * score))
    return float(np.mean((score - target) ** 2) / 2)


class Batch:
    """The features of some records of one block; the label holder's have a constant column for the bias."""

    def __init__(self, features: Any, *, bias: bool) -> None:
        self.features = features
        self.bias = bias

    @_quietly
    def product(self, weights: Floats) -> Floats:
        """Each record's local product, one row per record."""
        inner = weights[:-1] if self.bias else weights
        product: Floats = np.asarray(self.features @ inner)
        return product + weights[-1] if self.bias else product

    @_quietly
    def gradient(self, derivative: Floats) -> Floats:
        """The sum over the records of derivative times features."""
        total = np.asarray(self.features.T @ derivative)
        return np.vstack([total, derivative.sum(axis=0)]) if self.bias else total


class LinearBlock:
    """A worker's features and weights.

    Args:
        train: Training rows, dense or CSR; they are not copied.
        test: Test rows; record indices go on after the training part.
        weights: (features, outputs), with one more row for the bias if there is one.
        bias: True where the block has a constant column.
    """

    def __init__(self, train: Any, test: Any, weights: Floats, *, bias: bool) -> None:
        self.parts = tuple(_flat(part) for part in (train, test))
        self.weights = weights
        self.bias = bias

    def state(self) -> dict[str, Any]:
        """The weights, as explicit data."""
        return {"weights": self.weights}

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        self.weights = np.array(state["weights"])

    @property
    def n_train(self) -> int:
        """Number of training records."""
        return int(self.parts[0].shape[0])

    def batch(self, rows: Rows) -> Batch:
        """The features of records, all of the training part or all of the test part.

        Raises:
            PlanError: The rows do not exist, repeat, or mix the two parts.
        """
        test = bool(rows.size and rows.min() >= self.n_train)
        part = self.parts[test]
        local = rows - self.n_train if test else rows
        if (
            not rows.size
            or local.min() < 0
            or local.max() >= part.shape[0]
            or np.unique(rows).size != rows.size
        ):
            raise PlanError("rows were asked for that do not exist, repeat, or mix training and test part")
        return Batch(part[local], bias=self.bias)

    def product(self, rows: Rows) -> Floats:
        """Local products with the weights as they are now."""
        return self.batch(rows).product(self.weights)

    @_quietly
    def full_gradient(self, derivatives: Floats) -> Floats:
        """The mean over all training records of derivative times features."""
        total = np.zeros_like(self.weights)
        for start in range(0, self.n_train, CHUNK):
            piece = Batch(self.parts[0][start : start + CHUNK], bias=self.bias)
            total += piece.gradient(derivatives[start : start + CHUNK])
        return total / self.n_train

    @_quietly
    def step(self, direction: Floats, rate: float, l2: float) -> None:
        """One gradient step on the loss and on l2/2 * ||weights||^2, the bias left out."""
        pull = l2 * self.weights
        if self.bias:
            pull[-1] = 0.0
        self.weights -= rate * (direction + pull)

    @_quietly
    def check_finite(self, name: str) -> None:
        """Raises `TrainingDiverged` if a weight is no longer a number in the model's 32 bits."""
        if not np.isfinite(self.weights.astype(np.float32)).all():
            raise TrainingDiverged(f"{name}: the model is no longer finite; lower the learning rate")


def _flat(part: Any) -> Any:
    return sparse.csr_array(part) if sparse.issparse(part) else np.asarray(part).reshape(len(part), -1)


# -- estimators ---------------------------------------------------------------------------------------------


class SGD:
    """v = derivative times features, averaged over the batch."""

    snapshots: ClassVar[str] = "never"
    draws: ClassVar[bool] = False
    """Whether it is unbiased only where batches are drawn independently."""

    def __init__(self, block: LinearBlock) -> None:
        self.block = block

    def direction(self, batch: Batch, rows: Rows, derivative: Floats) -> Floats:
        """The estimate of the gradient of the mean loss."""
        return batch.gradient(derivative) / len(rows)

    def remember(self, rows: Rows, derivative: Floats) -> None:
        """Takes the derivatives of records at a snapshot."""

    def finish_snapshot(self) -> None:
        """Computes the full gradient once all derivatives are in."""

    def state(self) -> dict[str, Any]:
        """What is remembered, as explicit data."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""


class SVRG(SGD):
    """v = (derivative - derivative at the snapshot) times features + full gradient at the snapshot."""

    snapshots = "repeated"
    draws = True

    def __init__(self, block: LinearBlock) -> None:
        super().__init__(block)
        self.remembered = np.zeros((block.n_train, block.weights.shape[1]))
        self.mean = np.zeros_like(block.weights)

    def direction(self, batch: Batch, rows: Rows, derivative: Floats) -> Floats:
        return batch.gradient(derivative - self.remembered[rows]) / len(rows) + self.mean

    def remember(self, rows: Rows, derivative: Floats) -> None:
        self.remembered[rows] = derivative

    def finish_snapshot(self) -> None:
        self.mean = self.block.full_gradient(self.remembered)

    def state(self) -> dict[str, Any]:
        return {"remembered": self.remembered, "mean": self.mean}

    def load(self, state: dict[str, Any]) -> None:
        self.remembered, self.mean = np.array(state["remembered"]), np.array(state["mean"])


class SAGA(SVRG):
    """v = (derivative - the record's last one) times features + mean of all records' last ones."""

    snapshots = "once"

    def direction(self, batch: Batch, rows: Rows, derivative: Floats) -> Floats:
        change = batch.gradient(derivative - self.remembered[rows])
        estimate: Floats = change / len(rows) + self.mean
        self.mean += change / self.block.n_train
        self.remembered[rows] = derivative
        return estimate


ESTIMATORS: dict[str, type[SGD]] = {"sgd": SGD, "svrg": SVRG, "saga": SAGA}
