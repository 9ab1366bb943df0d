"""The registry of losses: what they declare, what training descends on, and metrics to match."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.metrics import hinge_loss, mean_absolute_error, top_k_accuracy_score
from torch import Tensor

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.linear import loss_derivative, mean_loss
from securevfl.errors import PlanError
from securevfl.models import LOSSES, Loss, metrics, register_loss, task_loss
from securevfl.models.losses import refute

EACH = [(name, task) for name, loss in LOSSES.items() for task in loss.tasks]


@pytest.fixture(scope="module")
def three() -> VerticalData:
    return VerticalData.load("synthetic:rows=300,features=9", parties=3)


def rows_of(task: str, count: int = 400) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(3)
    outputs = torch.from_numpy(rng.normal(size=(count, 7 if task == "multiclass" else 1)) * 2)
    labels = rng.normal(size=count) if task == "regression" else rng.integers(0, outputs.shape[1] + 1, count)
    return outputs, torch.from_numpy(np.minimum(labels, 6) if task == "multiclass" else labels)


@pytest.mark.parametrize(("name", "task"), EACH)
def test_declared_constants_are_right_and_tight(name: str, task: str) -> None:
    loss = LOSSES[name]
    assert refute(loss, task, pairs=20_000) == ""
    for field in ("lipschitz", "smoothness"):
        # What is declared is the least constant, up to what random outputs can show of it.
        if math.isfinite(getattr(loss, field)):
            less = Loss(**{**vars(loss), field: 0.7 * getattr(loss, field)})
            assert "declares a" in refute(less, task, pairs=20_000)


def test_losses_are_those_of_others() -> None:
    outputs, labels = rows_of("binary")
    assert float(task_loss("binary", outputs, labels, loss="hinge")) == pytest.approx(
        hinge_loss(2 * labels.numpy() - 1, outputs[:, 0].numpy())
    )
    outputs, labels = rows_of("multiclass")
    assert float(task_loss("multiclass", outputs, labels, loss="multiclass-hinge")) == pytest.approx(
        hinge_loss(labels.numpy(), outputs.numpy(), labels=range(7))
    )
    assert metrics("multiclass", outputs, labels)["top5"] == pytest.approx(
        top_k_accuracy_score(labels.numpy(), outputs.numpy(), k=5, labels=range(7))
    )
    outputs, labels = rows_of("regression")
    found = metrics("regression", outputs, labels, "l1")
    assert found["mae"] == pytest.approx(mean_absolute_error(labels.numpy(), outputs[:, 0].numpy()))
    assert found["loss"] == found["mae"]
    assert found["r2"] == metrics("regression", outputs, labels)["r2"]


@pytest.mark.parametrize(("name", "task"), EACH)
def test_derivatives_of_linear_models_are_those_of_torch(name: str, task: str) -> None:
    outputs, labels = rows_of(task)
    leaf = outputs.clone().requires_grad_()
    each = task_loss(task, leaf, labels, reduction="none", loss=name)
    (gradient,) = torch.autograd.grad(each.sum(), leaf)
    found = loss_derivative(task, outputs.numpy(), labels.numpy(), name)
    np.testing.assert_allclose(found, gradient.numpy(), atol=1e-12)
    assert mean_loss(task, outputs.numpy(), labels.numpy(), name) == pytest.approx(
        float(each.detach().mean())
    )


# -- one's own --------------------------------------------------------------------------------------------


def squared_hinge(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    each = torch.relu(1 - (2 * labels.to(outputs.dtype) - 1) * outputs[:, 0]).square() / 2
    return each.mean() if reduction == "mean" else each


@pytest.fixture
def _clean() -> Iterator[None]:
    yield
    LOSSES.pop("squared-hinge", None)


@pytest.mark.usefixtures("_clean")
def test_ones_own_loss_trains(three: VerticalData) -> None:
    made = Loss(
        name="squared-hinge", tasks=("binary",), values=squared_hinge, lipschitz=math.inf, smoothness=1.0
    )
    plan = Plan(algorithm="fsgd", loss="squared-hinge", epochs=4, batch=16, unprotected=True)
    with pytest.raises(PlanError, match=r"unknown loss 'squared-hinge'.*register_loss"):
        train(three, plan)
    for wrong, said in (({"lipschitz": 1.0}, "Lipschitz constant of 1; found"), ({"smoothness": 0.1}, "0.1")):
        with pytest.raises(PlanError, match=said):
            register_loss(Loss(**{**vars(made), **wrong}))
    register_loss(made)
    with pytest.raises(PlanError, match="already"):
        register_loss(made)
    assert train(three, plan).test["auc"] > 0.8


def test_a_loss_of_another_task_is_refused(three: VerticalData) -> None:
    with pytest.raises(PlanError, match="'l1' is for regression; binary has logistic, hinge"):
        train(three, Plan(algorithm="vafl", loss="l1", unprotected=True))
    with pytest.raises(PlanError, match="did you mean 'hinge'"):
        train(three, Plan(algorithm="vafl", losses={"p1": "hinges"}, unprotected=True))
    with pytest.raises(PlanError, match="loss of its own"):
        train(three, Plan(loss="hinge"))


# -- the papers' objectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["vafl-sync", "fdml", "flex", "afsgd", "central"])
def test_every_family_descends_on_the_loss_it_is_given(algorithm: str) -> None:
    """FDML names a support vector machine among its models: a sum of linear models with the hinge loss."""
    data = VerticalData.load("breast-cancer", parties=2)
    plan = Plan(
        algorithm=algorithm, loss="hinge", epochs=8, learning_rate=0.1, decay="sqrt", unprotected=True
    )
    run = train(data, plan)
    assert run.test["accuracy"] > 0.9
    assert run.test["loss"] < 0.3  # of a constant it is 0.75 at least


def test_an_absolute_loss_does_not_run_after_outliers() -> None:
    """Flex-VFL's MOSEI objective: sentiments are learned by their absolute error, which is measured too."""
    rng = np.random.default_rng(4)
    features = rng.normal(size=(600, 6)).astype(np.float32)
    labels = (features @ rng.normal(size=6) + 0.1 * rng.normal(size=600)).astype(np.float32)
    labels[:450][rng.random(450) < 0.1] += 15  # only training records are corrupted
    blocks = {"text": features[:, :3], "audio": features[:, 3:]}
    data = VerticalData.from_arrays(
        {name: block[:450] for name, block in blocks.items()},
        labels[:450],
        test=({name: block[450:] for name, block in blocks.items()}, labels[450:]),
        task="regression",
    )
    plan = Plan(algorithm="flex", epochs=6, batch=45, learning_rate=0.03, fusion="sum", unprotected=True)
    mae = {name: train(data, plan.with_changes(loss=name)).test["mae"] for name in ("squared", "l1", "huber")}
    assert max(mae["l1"], mae["huber"]) < 0.5 * mae["squared"]
