"""Losses, predictions and metrics of the three tasks.

A loss declares how steep and how curved it is in a model's outputs. The theorems of the papers are about
those numbers, so what is declared is tried out when a loss is registered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from securevfl.errors import DataError, PlanError, nearest

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


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of single records.

    Attributes:
        name: How plans call it.
        tasks: What it can serve.
        values: (outputs (rows, width), labels (rows,), reduction) -> the loss: of every record with reduction
            ``none``, their mean with ``mean``. It must be differentiable by torch almost everywhere.
        lipschitz: Largest norm of a record's gradient in its outputs; infinite where there is none.
        smoothness: Lipschitz constant of that gradient; infinite where it jumps.
        slope: (outputs, labels) -> the gradient of the mean loss in the outputs, written out; None leaves it
            to torch.
    """

    name: str
    tasks: tuple[str, ...]
    values: Callable[[Tensor, Tensor, str], Tensor]
    lipschitz: float
    smoothness: float
    slope: Callable[[Tensor, Tensor], Tensor] | None = None


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each.mean() if reduction == "mean" else each


def _logistic(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    target = labels.to(outputs.dtype)
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], target, reduction=reduction)


def _softmax(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(outputs, labels.long(), reduction=reduction)


def _squared(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(outputs[:, 0], labels.to(outputs.dtype), reduction=reduction) / 2


# Slopes do what torch does on the way back, operation by operation, so that the numbers are the same.


def _logistic_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.sigmoid().sub_(labels.to(outputs.dtype).unsqueeze(1)).div_(len(labels))


def _softmax_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    share = 1 / len(labels)
    slope = functional.log_softmax(outputs, 1).exp_().mul_(share)
    return slope.scatter_add_(1, labels.long().unsqueeze(1), slope.new_full((len(labels), 1), -share))


def _squared_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels.to(outputs.dtype).unsqueeze(1)).mul_(1 / len(labels))


def _l1(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.l1_loss(outputs[:, 0], labels.to(outputs.dtype), reduction=reduction)


def _huber(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.huber_loss(outputs[:, 0], labels.to(outputs.dtype), reduction=reduction)


def _hinge(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return _reduced(functional.relu(1 - (2 * labels.to(outputs.dtype) - 1) * outputs[:, 0]), reduction)


def _multiclass_hinge(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Crammer and Singer's: by how much the best wrong class comes closer than 1 to the right one."""
    right = labels.long()[:, None]
    others = outputs.scatter(1, right, -math.inf).amax(1)
    return _reduced(functional.relu(1 + others - outputs.gather(1, right)[:, 0]), reduction)


LOSSES: dict[str, Loss] = {
    each.name: each
    for each in (
        Loss(
            name="logistic",
            tasks=("binary",),
            values=_logistic,
            lipschitz=1.0,
            smoothness=0.25,
            slope=_logistic_slope,
        ),
        Loss(
            name="softmax",
            tasks=("multiclass",),
            values=_softmax,
            lipschitz=math.sqrt(2),
            smoothness=0.5,
            slope=_softmax_slope,
        ),
        Loss(
            name="squared",
            tasks=("regression",),
            values=_squared,
            lipschitz=math.inf,
            smoothness=1.0,
            slope=_squared_slope,
        ),
        Loss(name="l1", tasks=("regression",), values=_l1, lipschitz=1.0, smoothness=math.inf),
        Loss(name="huber", tasks=("regression",), values=_huber, lipschitz=1.0, smoothness=1.0),
        Loss(name="hinge", tasks=("binary",), values=_hinge, lipschitz=1.0, smoothness=math.inf),
        Loss(
            name="multiclass-hinge",
            tasks=("multiclass",),
            values=_multiclass_hinge,
            lipschitz=math.sqrt(2),
            smoothness=math.inf,
        ),
    )
}
USUAL = {"binary": "logistic", "multiclass": "softmax", "regression": "squared"}
"""What `auto` means for each task."""


def find_loss(name: str, task: str) -> Loss:
    """The loss that a plan names, or with ``auto`` the task's usual one.

    Raises:
        PlanError: There is no such loss, or it is for other tasks.
    """
    check_task(task)
    name = USUAL[task] if name == "auto" else name
    if name not in LOSSES:
        raise PlanError(
            f"unknown loss {name!r}; {nearest(name, ['auto', *LOSSES])}; register_loss adds one's own"
        )
    if task not in LOSSES[name].tasks:
        fitting = ", ".join(each.name for each in LOSSES.values() if task in each.tasks)
        raise PlanError(f"loss {name!r} is for {', '.join(LOSSES[name].tasks)}; {task} has {fitting}")
    return LOSSES[name]


def register_loss(loss: Loss) -> Loss:
    """Makes a loss known to this process under its name. Over a network every organisation registers it.

    Raises:
        PlanError: The name is taken, or the declared constants are refuted, see `refute`.
    """
    if loss.name in LOSSES or loss.name == "auto":
        raise PlanError(f"there is a loss {loss.name!r} already; choose another name")
    for task in loss.tasks:
        if problem := refute(loss, task):
            raise PlanError(problem)
    LOSSES[loss.name] = loss
    return loss


def refute(loss: Loss, task: str, *, pairs: int = 512, seed: int = 0) -> str:
    """Tries a loss on random outputs; says what of its declared constants is wrong, empty if nothing is.

    That finds gross errors only: it is a test, not a proof.
    """
    generator = torch.Generator().manual_seed(seed)
    width = output_width(task, 4)
    spread = torch.randn((pairs, 1), generator=generator, dtype=torch.float64).mul(2).exp()
    points = spread * torch.randn((2, pairs, width), generator=generator, dtype=torch.float64)
    if task == "regression":
        labels = torch.randn(pairs, generator=generator, dtype=torch.float64)
    else:
        labels = torch.randint(max(width, 2), (pairs,), generator=generator)
    leaves = points.clone().requires_grad_()
    total = torch.stack([loss.values(each, labels, "none").sum() for each in leaves]).sum()
    (gradients,) = torch.autograd.grad(total, leaves)
    steepest = float(gradients.norm(dim=2).max())
    change = (gradients[0] - gradients[1]).norm(dim=1) / (points[0] - points[1]).norm(dim=1)
    near = 1 + 1e-9  # double precision
    if steepest > loss.lipschitz * near:
        return f"loss {loss.name!r} declares a Lipschitz constant of {loss.lipschitz:g}; found {steepest:.4g}"
    if float(change.max()) > loss.smoothness * near:
        return f"loss {loss.name!r} declares a smoothness of {loss.smoothness:g}; found {change.max():.4g}"
    return ""


def task_loss(
    task: str, outputs: Tensor, labels: Tensor, *, reduction: str = "mean", loss: str = "auto"
) -> Tensor:
    """The loss of raw outputs against labels.

    Usual are, binary: cross entropy of one logit, labels 0 and 1; multiclass: cross entropy, labels 0..K-1;
    regression: **half** the squared error, so that the gradient is the residual.

    Args:
        task: One of `TASKS`.
        outputs: (rows, `output_width`).
        labels: (rows,).
        reduction: `mean` over the rows, or `none` for a value per record.
        loss: A name in `LOSSES`, or ``auto`` for the usual one.

    Raises:
        PlanError: The task, the loss or the reduction is unknown.
        DataError: Outputs and labels do not belong together.
    """
    found = find_loss(loss, task)
    if reduction not in ("mean", "none"):
        raise PlanError(f"unknown reduction {reduction!r}; choose 'mean' or 'none'")
    check_shapes(task, outputs, labels)
    return found.values(outputs, labels, reduction)


def check_shapes(task: str, outputs: Tensor, labels: Tensor) -> None:
    """Raises `DataError` unless these are the outputs of a task, and labels for each of them."""
    wide = outputs.ndim == 2 and (outputs.shape[1] >= 2 if task == "multiclass" else outputs.shape[1] == 1)
    if not wide or labels.shape != outputs.shape[:1]:
        raise DataError(
            f"a {task} task cannot compare outputs of shape {tuple(outputs.shape)} "
            f"with labels of shape {tuple(labels.shape)}"
        )


def predictions(task: str, outputs: Tensor) -> Tensor:
    """What a user wants to know: P(label = 1), the classes' probabilities (rows, K), or the value.

    Of losses other than logistic and softmax the probabilities are scores between 0 and 1, no more.
    """
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


TOP = 5


def metric_names(task: str, outputs: int = 1) -> tuple[str, ...]:
    """What `metrics` tells of a task with so many outputs."""
    if task == "regression":
        return "loss", "r2", "mae"
    return ("auc", "accuracy", "loss", *(("top5",) if outputs > TOP else ()))


def metrics(task: str, outputs: Tensor, labels: Tensor, loss: str = "auto") -> dict[str, float | None]:
    """How good raw outputs are: `auc`, `accuracy`, `loss`; for a regression `loss`, `r2`, `mae`.

    With more than five classes also `top5`: the share of records whose class is among the five likeliest.
    `loss` is that of the plan.

    `auc` of a multiclass task is the plain mean of the one-against-rest areas over the classes that have both
    members and others among the labels. What cannot be known is None: every figure if there are no rows or an
    output is not finite, a figure that overflows, `auc` with labels of one class, `r2` with constant labels.

    Raises:
        PlanError: The task is unknown.
        DataError: Shapes do not agree, or a label is not one of the task's.
    """
    check_task(task)
    outputs, labels = outputs.detach().cpu().double(), labels.detach().cpu()
    check_shapes(task, outputs, labels)
    if outputs.shape[0] == 0 or not torch.isfinite(outputs).all():
        return dict.fromkeys(metric_names(task, outputs.shape[1]))
    if task == "regression":
        truth = labels.double()
        return {
            "loss": _known(float(task_loss(task, outputs, truth, loss=loss))),
            "r2": _known(_r2(float(task_loss(task, outputs, truth)), truth.numpy())),
            "mae": _known(float((outputs[:, 0] - truth).abs().mean())),
        }
    _check_classes(labels, 2 if task == "binary" else outputs.shape[1])
    truth = labels.long()
    found = {
        "auc": _mean_auc(task, predictions(task, outputs), outputs, truth.numpy()),
        "accuracy": float((decisions(task, outputs) == truth).double().mean()),
        "loss": _known(float(task_loss(task, outputs, truth, loss=loss))),
    }
    if outputs.shape[1] > TOP:
        likely = outputs.topk(TOP, dim=1).indices
        found["top5"] = float((likely == truth[:, None]).any(1).double().mean())
    return found


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
