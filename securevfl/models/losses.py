"""Losses, predictions and metrics of the three tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from securevfl.errors import DataError, PlanError

TASKS = ("binary", "multiclass", "regression")

_Floats = npt.NDArray[np.float64]


def check_task(task: str) -> None:
    """Raises `PlanError` unless the task is one of `TASKS`."""
    if task not in TASKS:
        raise PlanError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")


def output_width(task: str, classes: int = 2) -> int:
    """Outputs of a model: one logit (binary), a logit per class, or one value."""
    check_task(task)
    if task == "multiclass" and classes < 2:
        raise PlanError(f"a multiclass task has at least 2 classes, not {classes}")
    return classes if task == "multiclass" else 1


def task_loss(task: str, outputs: Tensor, labels: Tensor, *, reduction: str = "mean") -> Tensor:
    """The loss of raw outputs against labels.

    Binary: cross entropy of one logit, labels 0 and 1. Multiclass: cross entropy, labels 0..K-1. Regression:
    **half** the squared error, so that the gradient is the residual.

    Args:
        task: One of `TASKS`.
        outputs: (rows, `output_width`).
        labels: (rows,).
        reduction: `mean` over the rows, or `none` for a value per record.

    Raises:
        PlanError: The task or the reduction is unknown.
        DataError: Outputs and labels do not belong together.
    """
    check_task(task)
    if reduction not in ("mean", "none"):
        raise PlanError(f"unknown reduction {reduction!r}; choose 'mean' or 'none'")
    _check_shapes(task, outputs, labels)
    if task == "multiclass":
        return functional.cross_entropy(outputs, labels.long(), reduction=reduction)
    column, target = outputs[:, 0], labels.to(outputs.dtype)
    if task == "binary":
        return functional.binary_cross_entropy_with_logits(column, target, reduction=reduction)
    return functional.mse_loss(column, target, reduction=reduction) / 2


def _check_shapes(task: str, outputs: Tensor, labels: Tensor) -> None:
    wide = outputs.ndim == 2 and (outputs.shape[1] >= 2 if task == "multiclass" else outputs.shape[1] == 1)
    if not wide or labels.shape != outputs.shape[:1]:
        raise DataError(
            f"a {task} task cannot compare outputs of shape {tuple(outputs.shape)} "
            f"with labels of shape {tuple(labels.shape)}"
        )


def predictions(task: str, outputs: Tensor) -> Tensor:
    """What a user wants to know: P(label = 1), the classes' probabilities (rows, K), or the value."""
    check_task(task)
    if task == "multiclass":
        return torch.softmax(outputs, dim=1)
    return torch.sigmoid(outputs[:, 0]) if task == "binary" else outputs[:, 0]


def decisions(task: str, outputs: Tensor) -> Tensor:
    """The predicted class of each record, or the value for a regression."""
    check_task(task)
    if task == "multiclass":
        return outputs.argmax(dim=1)
    return (outputs[:, 0] > 0).long() if task == "binary" else outputs[:, 0]


def metric_names(task: str) -> tuple[str, ...]:
    """What `metrics` tells of a task."""
    return ("loss", "r2") if task == "regression" else ("auc", "accuracy", "loss")


def metrics(task: str, outputs: Tensor, labels: Tensor) -> dict[str, float | None]:
    """How good raw outputs are: `auc`, `accuracy`, `loss`; for a regression `loss`, `r2`.

    `auc` of a multiclass task is the plain mean of the one-against-rest areas over the classes that have both
    members and others among the labels. What cannot be known is None: every figure if there are no rows or an
    output is not finite, a figure that overflows, `auc` with labels of one class, `r2` with constant labels.

    Raises:
        PlanError: The task is unknown.
        DataError: Shapes do not agree, or a label is not one of the task's.
    """
    check_task(task)
    outputs, labels = outputs.detach().cpu().double(), labels.detach().cpu()
    _check_shapes(task, outputs, labels)
    if outputs.shape[0] == 0 or not torch.isfinite(outputs).all():
        return dict.fromkeys(metric_names(task))
    if task == "regression":
        loss = float(task_loss(task, outputs, labels.double()))
        return {"loss": _known(loss), "r2": _known(_r2(loss, labels.double().numpy()))}
    _check_classes(labels, 2 if task == "binary" else outputs.shape[1])
    truth = labels.long()
    return {
        "auc": _mean_auc(task, predictions(task, outputs), outputs, truth.numpy()),
        "accuracy": float((decisions(task, outputs) == truth).double().mean()),
        "loss": _known(float(task_loss(task, outputs, truth))),
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_classes(labels: Tensor, classes: int) -> None:
    odd = (labels != labels.long()) | (labels < 0) | (labels >= classes)
    if odd.any():
        raise DataError(f"label {labels[odd][0].item()} is not one of the classes 0 to {classes - 1}")


def _r2(half_mse: float, truth: _Floats) -> float | None:
    spread = float(truth.var())
    return 1 - 2 * half_mse / spread if spread > 0 else None


def _mean_auc(task: str, chances: Tensor, outputs: Tensor, truth: npt.NDArray[np.int64]) -> float | None:
    if task == "binary":
        return area_under_curve(outputs[:, 0].numpy(), truth == 1)  # logits: probabilities saturate into ties
    areas = [area_under_curve(chances[:, k].numpy(), truth == k) for k in range(chances.shape[1])]
    known = [area for area in areas if area is not None]
    return float(np.mean(known)) if known else None


def area_under_curve(scores: npt.NDArray[Any], positive: npt.NDArray[np.bool_]) -> float | None:
    """P(score of a positive > score of a negative), ties counting half; None if one side is empty."""
    here = int(positive.sum())
    there = positive.size - here
    if here == 0 or there == 0:
        return None
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # from 1; ties share the mean of their ranks
    return float((ranks[positive].sum() - here * (here + 1) / 2) / (here * there))
