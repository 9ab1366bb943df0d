"""Parties that differ: model, width of embeddings, optimiser, rate and loss of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.resolve import resolve
from securevfl.errors import PlanError
from securevfl.models import FMEncoder, Fusion, MLPEncoder, task_loss
from securevfl.models.encoders import CNNEncoder, LinearEncoder, LSTMEncoder

KINDS: dict[str, dict[str, Any]] = {
    "p1": {"model": "cnn", "embedding": 5, "channels": [2]},
    "p2": {"model": "lstm", "embedding": 3, "units": 2, "steps": 3},
    "p3": {"model": "linear", "embedding": 2},
}
BASE = Plan(
    algorithm="vafl-sync",
    model="mlp",
    hidden=(4,),
    embedding=4,
    encoders=KINDS,
    optimisers={"p2": "adam", "p3": "momentum"},
    learning_rate=0.1,
    learning_rates={"p2": 0.01},
    epochs=2,
    batch=40,
    unprotected=True,
)


@pytest.fixture(scope="module")
def four() -> VerticalData:
    return VerticalData.load("synthetic:rows=300,features=24", parties=4)


def parameters(run: Any) -> dict[str, np.ndarray]:
    modules = {**run.encoders, "server": run.head}
    return {
        f"{name}/{key}": value.detach().numpy()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def test_every_party_has_the_encoder_that_the_plan_gives_it(four: VerticalData) -> None:
    encoders = train(four, BASE).encoders
    kinds = [MLPEncoder, CNNEncoder, LSTMEncoder, LinearEncoder]
    assert [type(each) for each in encoders.values()] == kinds
    assert [each.output.out_features for each in encoders.values()] == [4, 5, 3, 2]
    assert encoders["p1"].hidden[0].affine.out_channels == 2
    assert encoders["p2"].sequence_shape == (3, 2) and encoders["p2"].hidden[0].units == 2


def test_new_records_are_predicted_by_what_was_measured(four: VerticalData) -> None:
    run = train(four, BASE)
    chances = run.predict([np.asarray(block) for block in four.test])
    accuracy = float(((chances > 0.5) == (four.y_test == 1)).mean())
    assert accuracy == pytest.approx(run.test["accuracy"])


def test_parties_of_four_kinds_learn_what_one_machine_would_learn(four: VerticalData) -> None:
    """Synchronous training is centralised training, whatever widths and models there are."""
    ours, central = (
        parameters(train(four, BASE.with_changes(algorithm=a))) for a in ("vafl-sync", "central")
    )
    assert ours.keys() == central.keys()
    for name, values in central.items():
        # float32 over 12 steps of rate 0.1.
        np.testing.assert_allclose(ours[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("vafl", {"delay_bound": 3}),
        ("vafl-tsync", {"wait_for": 2}),
        ("flex", {"timeout": 2.0}),
        ("flex-adaptive", {"timeout": 2.0, "private_labels": True}),
        ("p-bcd", {}),
    ],
)
def test_every_algorithm_on_embeddings_takes_them(
    algorithm: str, settings: dict[str, Any], four: VerticalData
) -> None:
    flex = algorithm not in ("vafl", "vafl-tsync")
    plan = BASE.with_changes(
        algorithm=algorithm, settings=settings, optimisers={"p1": "momentum"} if flex else {"p1": "adam"}
    )
    first, last = train(four, plan), train(four, plan.with_changes(epochs=8))
    assert last.result["loss"] < first.result["loss"] < 0.8


def test_one_step_of_flex_with_private_labels_is_the_same_as_with_shared_ones(four: VerticalData) -> None:
    """One local step on the snapshot: the server's gradients and the parties' own are the same numbers."""
    plan = BASE.with_changes(
        algorithm="flex", optimisers={}, losses={"p1": "hinge"}, settings={"timeout": 1.0}, epochs=1
    )
    shared = parameters(train(four, plan))
    private = parameters(train(four, plan.with_changes(settings={"private_labels": True})))
    for name, values in shared.items():
        np.testing.assert_allclose(private[name], values, atol=1e-6, err_msg=name)


def test_fdml_sums_predictions_of_any_models(four: VerticalData) -> None:
    """FDML names factorisation machines and networks among its local models; pairs of columns need them."""
    features = np.random.default_rng(2).normal(size=(800, 4)).astype(np.float32)
    labels = (features[:, 0] * features[:, 1] + features[:, 2] * features[:, 3] > 0).astype(int)
    data = VerticalData.from_arrays([features[:, :2], features[:, 2:]], labels)
    plan = Plan(algorithm="fdml", model="fm", units=4, epochs=15, batch=20, unprotected=True)
    machines = train(data, plan)
    mixed = train(data, plan.with_changes(encoders={"p1": {"model": "mlp"}}))
    linear = train(data, plan.with_changes(model="linear"))
    assert [type(each) for each in mixed.encoders.values()] == [FMEncoder, MLPEncoder]
    assert linear.test["auc"] < 0.6 and min(machines.test["auc"], mixed.test["auc"]) > 0.9
    with pytest.raises(PlanError, match="local predictions have 1 values, not 2"):
        train(four, plan.with_changes(encoders={"p1": {"embedding": 2}}))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"units": 4}, "names units, but its model 'linear' has no sizes"),
        (
            {"model": "mlp", "channels": [4], "units": 2},
            "names channels, units, but its model 'mlp' has hidden",
        ),
        ({"model": "fm", "steps": 2}, "names steps, but its model 'fm' has units"),
    ],
)
def test_a_size_that_a_partys_model_does_not_have_is_refused(four: VerticalData, own, said) -> None:
    with pytest.raises(PlanError, match=said):
        train(four, Plan(algorithm="vafl", encoders={"p1": own}, unprotected=True))


# -- losses of single parties -------------------------------------------------------------------------------


def test_the_same_loss_by_name_changes_nothing(four: VerticalData) -> None:
    losses = dict.fromkeys(four.parties, "logistic")
    usual, named = (parameters(train(four, BASE.with_changes(losses=each))) for each in ({}, losses))
    for name, values in usual.items():
        np.testing.assert_allclose(named[name], values, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("algorithm", ["vafl-sync", "fdml", "fsgd"])
def test_a_party_descends_on_its_own_loss(algorithm: str) -> None:
    """One step on one batch of everything, beside a gradient that is computed here."""
    data = VerticalData.load("synthetic:rows=120,features=6", parties=2)
    plan = Plan(
        algorithm=algorithm,
        fusion="sum",
        losses={"p1": "hinge"},
        batch=10_000,
        epochs=1,
        learning_rate=0.5,
        decay="none",
        l2=0.0,
        unprotected=True,
    )
    run = train(data, plan)
    start = train(data, plan.with_changes(learning_rate=1e-12))
    _, scaled = resolve(plan, data)
    rows = [torch.from_numpy(np.array(block, np.float32)) for block in scaled.train]
    labels = torch.from_numpy(np.array(scaled.y_train))
    for party, loss in (("p0", "logistic"), ("p1", "hinge")):
        leaves = [each.output.weight.detach().clone().requires_grad_() for each in start.encoders.values()]
        outputs = sum(x @ w.T for x, w in zip(rows, leaves, strict=True)) + start.head.bias.detach()
        place = data.parties.index(party)
        (gradient,) = torch.autograd.grad(task_loss("binary", outputs, labels, loss=loss), leaves[place])
        moved = run.encoders[party].output.weight.detach() - leaves[place].detach()
        torch.testing.assert_close(moved, -0.5 * gradient, atol=2e-6, rtol=1e-4)


# -- parts --------------------------------------------------------------------------------------------------


def test_a_factorisation_machine_is_the_sum_over_all_pairs() -> None:
    encoder, rows = FMEncoder(5, 2, 3).double(), torch.randn(4, 5, dtype=torch.float64)
    factors = encoder.factors.weight.detach().reshape(2, 3, 5)
    for output in range(2):
        pairs = sum(
            float(factors[output, :, i] @ factors[output, :, j]) * rows[:, i] * rows[:, j]
            for i in range(5)
            for j in range(i + 1, 5)
        )
        linear = rows @ encoder.output.weight[output].detach()
        torch.testing.assert_close(encoder(rows)[:, output].detach(), linear + pairs)


def test_tables_of_unequal_widths_leave_padding_alone() -> None:
    fusion, table = Fusion("concat", (1, 3, 2)), torch.randn(4, 3, 3, requires_grad=True)
    joined = fusion.join_table(table)
    expected = torch.cat([table[:, 0, :1], table[:, 1], table[:, 2, :2]], dim=1)
    assert torch.equal(joined, expected) and fusion.width == 6
    joined.sum().backward()
    assert table.grad is not None
    assert table.grad[:, 0, 1:].abs().max() == 0 == table.grad[:, 2, 2:].abs().max()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoders": {"p9": {"model": "mlp"}}}, "encoders names 'p9'"),
        ({"losses": {"p9": "hinge"}}, "losses names 'p9'"),
        ({"fusion": "sum"}, "one width; found p0 4, p1 5, p2 3, p3 2"),
        ({"protocol": "two-tree"}, "fusion 'sum' adds embeddings"),
        ({"algorithm": "sealed", "optimisers": {}, "learning_rates": {}, "unprotected": False}, "one kind"),
        ({"encoders": {"p1": {"model": "lstm", "steps": 4}}}, "6 columns do not divide into 4 steps"),
    ],
)
def test_what_does_not_fit_says_so(changes: dict[str, Any], said: str, four: VerticalData) -> None:
    with pytest.raises(PlanError, match=said):
        train(four, BASE.with_changes(**changes))
