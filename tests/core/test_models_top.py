"""Fusion, heads, losses, metrics and model files."""

import math
import stat
import warnings

import numpy as np
import pytest
import torch
from model_fixtures import encoder, generator
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score
from torch import nn

from securevfl.errors import DataError, PlanError, RunError
from securevfl.models import (
    HEADS,
    Fusion,
    LinearEncoder,
    area_under_curve,
    build_encoder,
    build_head,
    decisions,
    load_module,
    metrics,
    output_width,
    predictions,
    save_module,
    task_loss,
)
from securevfl.models.direct import DirectHead


@pytest.mark.parametrize("kind", ["concat", "sum"])
def test_fusion_of_lists_and_stacks_and_its_gradients(kind):
    fusion = Fusion(kind, (3, 3))
    parts = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    stack = torch.stack([p.detach() for p in parts]).requires_grad_()
    joined = fusion(parts)
    assert joined.shape == (4, fusion.width) and torch.equal(joined, fusion(stack))
    assert torch.equal(joined, fusion.join_table(stack.transpose(0, 1)))
    expected = torch.cat(parts, 1) if kind == "concat" else parts[0] + parts[1]
    assert torch.equal(joined, expected)
    weight = torch.randn(4, fusion.width)
    found = torch.autograd.grad(joined, parts, weight)
    want = weight.split(3, dim=1) if kind == "concat" else [weight, weight]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    (stacked,) = torch.autograd.grad(fusion(stack), stack, weight)
    assert torch.equal(stacked, torch.stack(list(want)))


def test_fusion_of_one_party_and_of_unequal_lengths():
    one = torch.randn(4, 3)
    assert torch.equal(Fusion("sum", (3,))([one]), one) and torch.equal(Fusion("concat", (3,))([one]), one)
    assert Fusion("concat", (1, 2, 5)).width == 8


@pytest.mark.parametrize(
    ("kind", "widths", "words"),
    [
        ("max", (1,), "unknown fusion 'max'"),
        ("sum", (1, 2), "equal length"),
        ("sum", (), "make no input"),
        ("concat", (1, 0), "make no input"),
    ],
)
def test_bad_fusions(kind, widths, words):
    with pytest.raises(PlanError, match=words):
        Fusion(kind, widths)


def test_fusion_counts_its_inputs():
    fusion = Fusion("sum", (3, 3))
    for wrong in ([torch.ones(2, 3)], [torch.ones(2, 3), torch.ones(2, 1)], torch.ones(3, 2, 3)):
        with pytest.raises(PlanError, match="the fusion was made for"):
            fusion(wrong)
    for wrong in (torch.ones(4, 3, 3), torch.ones(4, 2, 1), torch.ones(4, 6)):
        with pytest.raises(PlanError, match="does not hold lengths"):
            fusion.join_table(wrong)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_seeded(name):
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first, second, other = (build_head(name, 4, 4, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    rows = torch.randn(3, 4)
    assert first(rows).shape == (3, 4) and torch.equal(first(rows), second(rows))
    assert torch.equal(first(rows), other(rows)) == (name == "sum")  # its bias starts at zero


def test_bad_heads():
    for name, width, outputs, words in [
        ("tree", 4, 1, "unknown head 'tree'"),
        ("sum", 4, 1, "sum fusion with embeddings of length 1"),
        ("linear", 0, 1, "width is 0"),
        ("mlp", 4, 1, "at least one hidden width"),
    ]:
        with pytest.raises(PlanError, match=words):
            build_head(name, width, outputs, generator=generator(), hidden=())


@pytest.mark.parametrize(("head", "width"), [("sum", 3), ("relu", 16)])
def test_split_linear_encoders_are_the_centralised_model(head, width):
    """Sum fusion of linear encoders: softmax regression (sum), or a network with one hidden layer (relu)."""
    encoders = [build_encoder("linear", w, width, generator=generator(w)) for w in (3, 4)]
    top = build_head(head, width, 3, generator=generator())
    rows = torch.randn(6, 7)
    out = top(Fusion("sum", (width, width))([encoders[0](rows[:, :3]), encoders[1](rows[:, 3:])]))
    joined = nn.Linear(7, width, bias=False)
    joined.weight.data = torch.cat([one.output.weight.data for one in encoders], dim=1)
    torch.testing.assert_close(out, top(joined(rows)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_losses_per_record_and_mean(task):
    outputs = torch.randn(6, 3 if task == "multiclass" else 1, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    each = task_loss(task, outputs, labels, reduction="none")
    assert each.shape == (6,)
    mean = task_loss(task, outputs, labels)
    torch.testing.assert_close(mean, each.mean())
    (slope,) = torch.autograd.grad(mean, outputs)
    guess = predictions(task, outputs.detach())
    residual = guess - nn.functional.one_hot(labels, 3) if task == "multiclass" else (guess - labels)[:, None]
    torch.testing.assert_close(6 * slope, residual, rtol=1e-5, atol=1e-6)


def test_output_width():
    assert [output_width(task, 7) for task in ("binary", "multiclass", "regression")] == [1, 7, 1]
    with pytest.raises(PlanError, match="unknown task 'ranking'"):
        output_width("ranking")
    with pytest.raises(PlanError, match="at least 2 classes"):
        output_width("multiclass", 1)


def test_metrics_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    logits = np.round(rng.normal(size=200) + labels, 1)  # rounded, so that there are ties
    found = metrics("binary", torch.from_numpy(logits)[:, None].float(), torch.from_numpy(labels))
    chances = 1 / (1 + np.exp(-logits.astype(np.float32).astype(float)))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found["accuracy"] == accuracy_score(labels, logits > 0)
    assert found["loss"] == pytest.approx(log_loss(labels, chances), abs=1e-9)
    classes = rng.integers(0, 4, 200)
    scores = torch.from_numpy(rng.normal(size=(200, 4)) + np.eye(4)[classes])
    found = metrics("multiclass", scores, torch.from_numpy(classes))
    guess = torch.softmax(scores, 1).numpy()
    assert found["auc"] == pytest.approx(roc_auc_score(classes, guess, multi_class="ovr"), abs=1e-12)
    assert found["accuracy"] == accuracy_score(classes, guess.argmax(1))
    assert found["loss"] == pytest.approx(log_loss(classes, guess), abs=1e-9)
    values = scores[:, :1] + 3
    found = metrics("regression", values, torch.from_numpy(classes))
    assert found["r2"] == pytest.approx(r2_score(classes, values[:, 0].numpy()), abs=1e-12)
    assert found["loss"] == pytest.approx(((values[:, 0].numpy() - classes) ** 2).mean() / 2, abs=1e-12)


def test_keys():
    assert list(metrics("binary", torch.ones(2, 1), torch.tensor([0, 1]))) == ["auc", "accuracy", "loss"]
    assert list(metrics("multiclass", torch.ones(2, 3), torch.tensor([0, 1]))) == ["auc", "accuracy", "loss"]
    assert list(metrics("regression", torch.ones(2, 1), torch.tensor([0.0, 1]))) == ["loss", "r2", "mae"]
    assert list(metrics("multiclass", torch.ones(2, 6), torch.tensor([0, 1])))[-1] == "top5"


def test_what_cannot_be_known_is_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = metrics("binary", torch.ones(3, 1), torch.ones(3))
        assert one["auc"] is None and one["accuracy"] == 1.0
        assert metrics("multiclass", torch.eye(3), torch.zeros(3))["auc"] is None
        # Class 0: area 1; class 1: one pair right, one tied; class 2 has no member.
        assert metrics("multiclass", torch.eye(3), torch.tensor([0, 1, 1]))["auc"] == (1 + 0.75) / 2
        assert metrics("regression", torch.ones(3, 1), torch.ones(3)) == {
            "loss": 0.0,
            "r2": None,
            "mae": 0.0,
        }
        for task, width in (("binary", 1), ("multiclass", 3), ("regression", 1)):
            empty = metrics(task, torch.ones(0, width), torch.ones(0))
            assert set(empty.values()) == {None}
            broken = metrics(task, torch.full((2, width), math.nan), torch.ones(2))
            assert set(broken.values()) == {None}


def test_an_overflowing_loss_is_none():
    huge = torch.full((2, 1), 1e200, dtype=torch.float64)
    found = metrics("regression", huge, torch.tensor([0.0, 1.0]))
    assert found == {"loss": None, "r2": None, "mae": 1e200}


def test_saturated_logits_keep_their_order():
    outputs = torch.tensor([[50.0], [60.0], [70.0], [80.0]])
    assert metrics("binary", outputs, torch.tensor([0, 0, 1, 1]))["auc"] == 1.0


def test_area_by_pairs():
    rng = np.random.default_rng(1)
    scores, positive = rng.integers(0, 5, 60), rng.random(60) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert area_under_curve(scores, positive) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_decisions():
    assert decisions("binary", torch.tensor([[-1.0], [2.0], [0.0]])).tolist() == [0, 1, 0]
    assert decisions("multiclass", torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
    assert decisions("regression", torch.tensor([[1.5]])).tolist() == [1.5]


@pytest.mark.parametrize(
    ("task", "outputs", "labels", "words"),
    [
        ("binary", torch.ones(2, 1), torch.tensor([0, 2]), "label 2 is not one of the classes 0 to 1"),
        ("binary", torch.ones(2, 1), torch.tensor([0.0, 0.5]), "label 0.5"),
        ("multiclass", torch.ones(2, 3), torch.tensor([-1, 2]), "label -1"),
        ("binary", torch.ones(2, 2), torch.tensor([0, 1]), r"shape \(2, 2\)"),
        ("binary", torch.ones(2), torch.tensor([0, 1]), r"shape \(2,\)"),
        ("multiclass", torch.ones(2, 1), torch.tensor([0, 1]), r"shape \(2, 1\)"),
        ("regression", torch.ones(2, 1), torch.ones(2, 1), r"labels of shape \(2, 1\)"),
        ("regression", torch.ones(3, 1), torch.ones(2), r"labels of shape \(2,\)"),
    ],
)
def test_labels_that_do_not_fit(task, outputs, labels, words):
    with pytest.raises(DataError, match=words):
        metrics(task, outputs, labels)


def test_unknown_task_and_reduction():
    with pytest.raises(PlanError, match="unknown task"):
        task_loss("rank", torch.ones(1, 1), torch.ones(1))
    with pytest.raises(PlanError, match="unknown reduction"):
        task_loss("binary", torch.ones(1, 1), torch.ones(1), reduction="sum")


def test_model_files_are_private_and_come_back(tmp_path):
    module, path = encoder("cnn", seed=1), tmp_path / "p0.safetensors"
    save_module(path, module)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    twin = encoder("cnn", seed=2)
    load_module(path, twin)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))
    path.chmod(0o644)
    save_module(path, twin)  # replaces
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["p0.safetensors"]


def test_bad_model_files(tmp_path):
    path = tmp_path / "model"
    module = LinearEncoder(3, 2)
    before = module.output.weight.detach().clone()
    with pytest.raises(RunError, match="cannot read the model file"):
        load_module(path, module)
    path.write_bytes(b"\x80\x04not a model")
    with pytest.raises(RunError, match="not a safetensors file"):
        load_module(path, module)
    for other, words in [
        (LinearEncoder(4, 2), "expected \\(2, 3\\)"),
        (LinearEncoder(3, 2, bias=True), "names differ \\(output.bias\\)"),
        (LinearEncoder(3, 2).double(), "float64"),
    ]:
        save_module(path, other)
        with pytest.raises(RunError, match=words):
            load_module(path, module)
    assert torch.equal(module.output.weight, before)
    with pytest.raises(RunError, match=r"model/p0 cannot be written: Not a directory"):
        save_module(path / "p0", module)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"code": 1}


def test_state_that_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(RunError, match="only tensors can be saved"):
        save_module(tmp_path / "model", Extra(2, 2))


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
@pytest.mark.parametrize(("kind", "name"), [("concat", "linear"), ("sum", "linear"), ("sum", "sum")])
def test_gradients_written_out_are_those_of_torch(task, kind, name):
    outputs = output_width(task, 4)
    fusion = Fusion(kind, (outputs,) * 3)
    table = torch.randn((50, 3, outputs), generator=generator())
    labels = torch.randint(4 if task == "multiclass" else 2, (50,), generator=generator(1))
    labels = labels.float() if task == "regression" else labels
    head = build_head(name, fusion.width, outputs, generator=generator(2))
    direct = DirectHead.of(head, fusion, task, "auto")
    for inputs in (table, fusion.join_table(table)):
        leaf = inputs.clone().requires_grad_()
        head.zero_grad()
        loss = task_loss(task, head(fusion.join_table(leaf) if leaf.ndim == 3 else leaf), labels)
        loss.backward()
        expected = [leaf.grad, *(parameter.grad.clone() for parameter in head.parameters())]
        value, gradient = direct.differentiate(inputs, labels)
        assert value == loss.item()
        for found, wanted in zip([gradient, *(p.grad for p in head.parameters())], expected, strict=True):
            # The same operations; only sums may run in another order (a few units in the last place).
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_what_is_not_written_out_is_left_to_torch():
    even, uneven = Fusion("concat", (2, 2)), Fusion("concat", (1, 3))
    assert DirectHead.of(nn.Linear(4, 1), even, "binary", "auto") is not None
    assert DirectHead.of(nn.Linear(4, 1), uneven, "binary", "auto") is None
    assert DirectHead.of(nn.Linear(4, 1), even, "binary", "hinge") is None
    assert DirectHead.of(nn.Sequential(nn.Linear(4, 1)), even, "binary", "auto") is None
    frozen = nn.Linear(4, 1).requires_grad_(False)
    DirectHead.of(frozen, even, "binary", "auto").differentiate(torch.randn(3, 4), torch.ones(3))
    assert frozen.weight.grad is None
    assert frozen.bias.grad is None
    with pytest.raises(DataError):
        DirectHead.of(nn.Linear(4, 3), even, "binary", "auto").differentiate(torch.randn(3, 4), torch.ones(3))
