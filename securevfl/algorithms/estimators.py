"""Stochastic gradients of one worker's block: SGD, SVRG and SAGA (AFSGD-VP, eq. 3 to 5).

For linear models a record's gradient is its loss derivative times its features, so the variance-reduced
estimators remember one number per record and output, never a vector. The regulariser's gradient is exact and
added by the step itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from securevfl.algorithms.batches import Batches, Draws
from securevfl.algorithms.linear_block import Batch, LinearBlock
from securevfl.privacy.rows import Rows

Floats = npt.NDArray[np.float64]


class SGD:
    """v = derivative times features, averaged over the batch."""

    snapshots: ClassVar[str] = "never"
    batches: ClassVar[type[Batches]] = Batches

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
    batches = Draws

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
