"""Constants that are read off the data: against the second derivatives themselves."""

import numpy as np
import pytest
import torch
from scipy import sparse

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.constants import curvature, theory_notes
from securevfl.algorithms.resolve import resolve
from securevfl.errors import PlanError

SUM = {"fusion": "sum", "head": "sum", "sigma": 1.0}


def small(task="binary", seed=0):
    rng = np.random.default_rng(seed)
    blocks = [rng.normal(size=(40, 3)), rng.normal(size=(40, 2))]
    labels = (
        rng.normal(size=40) if task == "regression" else rng.integers(0, 2 if task == "binary" else 3, 40)
    )
    return VerticalData.from_arrays(blocks, labels, task=task)


def hessian(task, row, weights, label):
    """Second derivative of one record's loss in all weights and every party's bias, by autograd."""
    outputs = 3 if task == "multiclass" else 1

    def loss(flat):
        score = torch.as_tensor(row) @ flat.reshape(len(row), outputs)
        if task == "regression":
            return 0.5 * (score[0] - label) ** 2
        if task == "binary":
            return torch.nn.functional.binary_cross_entropy_with_logits(
                score[0], torch.tensor(float(label)).double()
            )
        return torch.nn.functional.cross_entropy(score[None], torch.tensor([int(label)]))

    return torch.autograd.functional.hessian(loss, torch.as_tensor(weights).flatten()).numpy()


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_curvature_bounds_every_records_second_derivative(task):
    data = small(task)
    plan, scaled = resolve(Plan(algorithm="vafl", l2=0.0, **SUM), data)
    found = curvature(plan, scaled)
    rng, outputs = np.random.default_rng(1), 3 if task == "multiclass" else 1
    first, second = (np.asarray(block, dtype=float) for block in scaled.train)
    whole, own, most = 0.0, 0.0, len(first)
    for i in range(most):
        row = np.concatenate([first[i], [1.0], second[i], [1.0]])
        for scale in (0.0, 0.3):
            weights = scale * rng.normal(size=(len(row), outputs))
            label = float(scaled.y_train[i])
            second_derivative = hessian(task, row, weights, label)
            whole = max(whole, np.linalg.norm(second_derivative, 2))
            mine = second_derivative.reshape(len(row), outputs, -1)[:4].reshape(4 * outputs, -1)
            own = max(own, np.linalg.norm(mine, 2))
    assert whole <= found.whole * (1 + 1e-9)
    assert own <= found.blocks["p0"] * (1 + 1e-9)
    if task != "multiclass":  # at weights 0 the binary and the squared loss reach their constants
        assert whole == pytest.approx(found.whole, rel=1e-6)


def test_only_sums_of_linear_models_have_global_constants():
    data = small()
    plan, scaled = resolve(Plan(algorithm="vafl", model="mlp", sigma=1.0), data)
    with pytest.raises(PlanError, match="sums of linear models"):
        curvature(plan, scaled)
    assert theory_notes(Plan(algorithm="vafl", model="mlp", sigma=1.0), data) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "vafl"}, "set delay_bound"),
        ({"algorithm": "vafl", "settings": {"delay_bound": 4}}, "Theorem 1"),
        ({"algorithm": "fdml", "decay": "none"}, "set decay = 'sqrt'"),
        ({"algorithm": "flex"}, "rate 0.1 of p0, p1 is above"),
        ({"algorithm": "fsgd", "l2": 0.0}, "strong convexity"),
        ({"algorithm": "afsgd"}, "Theorem 4 for a sub-optimality of 0.01"),
        ({"algorithm": "afsvrg"}, "Theorem 6"),
        ({"algorithm": "afsaga"}, "Theorem 8"),
        ({"algorithm": "vafl", "loss": "hinge"}, "gradient of 'hinge' jumps"),
        ({"algorithm": "vafl-tsync", "settings": {"wait_for": 2}}, "Theorem 7 needs a bound"),
        ({"algorithm": "flex-adaptive"}, "(20) admits of A"),
        ({"algorithm": "p-bcd"}, "(1 local step,"),
        ({"algorithm": "flex", "settings": {"timeout": 3.0, "speeds": {"p1": 2}}}, "(6 local steps,"),
        ({"algorithm": "sync-min", "settings": {"timeout": 3.0, "speeds": {"p1": 2}}}, "(3 local steps,"),
        ({"algorithm": "sync-max", "settings": {"timeout": 3.0, "speeds": {"p1": 2}}}, "(6 local steps,"),
    ],
)
def test_a_plan_outside_its_theorem_is_told(changes, said):
    plan = Plan(**{**SUM, **changes})
    assert any(said in note for note in theory_notes(plan, small()))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "vafl", "settings": {"delay_bound": 4}, "learning_rate": 1e-4},
        {"algorithm": "fdml"},
        {"algorithm": "flex", "learning_rate": 1e-5},
        {"algorithm": "fsgd"},
        {"algorithm": "afsgd", "learning_rate": 1e-12},
        {"algorithm": "vafl", "protocol": "plain-tree", "learning_rate": 1e-4},
        {"algorithm": "vafl-sync", "learning_rate": 1e-4},
    ],
)
def test_a_plan_within_its_theorem_is_not(changes):
    assert theory_notes(Plan(**{**SUM, **changes}), small()) == ()


@pytest.mark.parametrize("algorithm", ["flex", "flex-adaptive", "sync-min", "sync-max", "p-bcd", "vafl-sync"])
def test_the_rate_that_a_note_names_is_admitted_and_a_larger_one_is_not(algorithm):
    changes = {"algorithm": algorithm, "settings": {"speeds": {"p1": 2}}}
    (note,) = theory_notes(Plan(**SUM, **changes, learning_rate=1.0), small())[:1]
    limit = float(note.split("above ")[1].split(",")[0])  # three digits
    assert theory_notes(Plan(**SUM, **changes, learning_rate=1.01 * limit), small()) != ()
    assert not any(
        note.endswith(said.split("the most")[1])
        for said in theory_notes(Plan(**SUM, **changes, learning_rate=0.99 * limit), small())
    )


def test_losses_without_bounded_gradients_leave_the_theorems_of_afsgd():
    notes = theory_notes(Plan(**{**SUM, "algorithm": "afsgd"}), small("regression"))
    assert notes == (
        "AFSGD-VP's theorems need bounded gradients (Assumption 3), and those of this loss are not",
    )


def test_sparse_rows_stay_sparse(monkeypatch):
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(40, 5)) * (rng.random((40, 5)) < 0.3) for _ in range(2)]
    labels = rng.integers(0, 2, 40)
    plan = Plan(algorithm="p-bcd", scaling="none", **SUM)
    expected = curvature(*resolve(plan, VerticalData.from_arrays(blocks, labels, task="binary")))
    thin = VerticalData.from_arrays(list(map(sparse.csr_array, blocks)), labels, task="binary")
    monkeypatch.setattr(sparse.csr_array, "toarray", None)
    monkeypatch.setattr(sparse.csr_array, "todense", None)
    found = curvature(*resolve(plan, thin))
    assert found.whole == pytest.approx(expected.whole)
    assert found.own == pytest.approx(expected.own)


def test_a_run_in_python_has_the_notes_that_the_command_prints():
    data = small()
    plan = Plan(algorithm="p-bcd", fusion="sum", head="sum", unprotected=True, epochs=1)
    (note,) = train(data, plan).notes
    assert "rate 0.3 of p0, p1 is above" in note
    assert theory_notes(plan, data) == (note,)


def test_nothing_is_said_of_models_that_are_not_the_plans_own():
    plan = Plan(algorithm="p-bcd", fusion="sum", head="sum", unprotected=True, epochs=1)
    assert train(small(), plan, encoders={"p1": torch.nn.Linear(2, 1)}).notes == ()
