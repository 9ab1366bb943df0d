"""A stack of encoders computes, differentiates and steps exactly like the encoders one by one."""

import copy

import pytest
import torch
from model_fixtures import KINDS, SeededNoise, batch, encoder, generator
from torch import nn

from securevfl.errors import PlanError
from securevfl.models import (
    StackedEncoders,
    build_encoder,
    load_module,
    perturb,
    save_module,
    why_not_stackable,
)


def parties(kind, count=3):
    return [encoder(kind, seed=m) for m in range(count)], [batch(kind, 8, seed=20 + m) for m in range(count)]


def uneven():
    widths = (5, 4, 5)
    modules = [build_encoder("mlp", w, 3, generator=generator(w + i)) for i, w in enumerate(widths)]
    return modules, [torch.randn(8, w, generator=generator(30 + w)) for w in widths]


CASES = {**{kind: lambda kind=kind: parties(kind) for kind in KINDS}, "uneven": uneven}


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_steps_agree(case):
    modules, inputs = CASES[case]()
    alone = copy.deepcopy(modules)
    stack = StackedEncoders(modules)
    ours = torch.optim.Adam(stack.parameters(), lr=0.05, weight_decay=0.01)
    theirs = [torch.optim.Adam(one.parameters(), lr=0.05, weight_decay=0.01) for one in alone]
    for _ in range(3):
        out = stack(inputs)
        outs = [one(x) for one, x in zip(alone, inputs, strict=True)]
        # Sums of at most 64 float32 products of order 1 in another order.
        torch.testing.assert_close(out, torch.stack(outs), rtol=1e-4, atol=1e-5)
        ours.zero_grad()
        out.square().mean(1).sum().backward()
        ours.step()
        for each, optimiser in zip(outs, theirs, strict=True):
            optimiser.zero_grad()
            each.square().mean(0).sum().backward()
            optimiser.step()
        for mine, other in zip(modules, alone, strict=True):
            for p, q in zip(mine.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_encoders_and_stack_hold_the_same_numbers(case, tmp_path):
    modules, inputs = CASES[case]()
    before = [one(x) for one, x in zip(modules, inputs, strict=True)]
    numbers = [p.detach().clone() for one in modules for p in one.parameters()]
    stack = StackedEncoders(modules)
    now = [p for one in modules for p in one.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(now, numbers, strict=True))
    with torch.no_grad():
        for p in modules[1].parameters():
            p.mul_(1.5)
    torch.testing.assert_close(stack(inputs)[1], modules[1](inputs[1]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stack(inputs)[1], before[1])
    torch.testing.assert_close(stack(inputs)[0], before[0], rtol=1e-4, atol=1e-5)
    save_module(tmp_path / "one", modules[1])
    saved = [p.detach().clone() for p in modules[1].parameters()]
    with torch.no_grad():
        for p in stack.parameters():
            p.zero_()
    assert all((p == 0).all() for one in modules for p in one.parameters())
    load_module(tmp_path / "one", modules[1])
    assert all(torch.equal(p, q) for p, q in zip(modules[1].parameters(), saved, strict=True))
    torch.testing.assert_close(stack(inputs)[1], modules[1](inputs[1]), rtol=1e-4, atol=1e-5)


def test_padding_stays_zero():
    modules, inputs = uneven()
    stack = StackedEncoders(modules)
    optimiser = torch.optim.Adam(stack.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        stack(inputs).square().sum().backward()
        optimiser.step()
    assert (next(stack.parameters())[1, 4:] == 0).all()


def test_joined_data_can_be_cut_into_batches():
    modules, inputs = uneven()
    stack = StackedEncoders(modules)
    rows = torch.tensor([6, 1, 3])
    joined = stack.join(inputs)
    assert joined.shape == (3, 8, 5)
    cut = stack([x[rows] for x in inputs])
    torch.testing.assert_close(stack(joined[:, rows]), cut, rtol=0, atol=0)


def test_each_partys_hidden_noise_comes_from_its_own_source():
    modules, inputs = uneven()
    alone = copy.deepcopy(modules)
    for m, (one, other) in enumerate(zip(modules, alone, strict=True)):
        perturb(one, 0.5, SeededNoise(m))
        perturb(other, 0.5, SeededNoise(m))
    stack = StackedEncoders(modules)
    outs = torch.stack([one(x) for one, x in zip(alone, inputs, strict=True)])
    torch.testing.assert_close(stack(inputs), outs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stack(inputs), outs)
    stack.eval()
    assert not modules[2].training
    quiet = torch.stack([one.eval()(x) for one, x in zip(alone, inputs, strict=True)])
    torch.testing.assert_close(stack(inputs), quiet, rtol=1e-4, atol=1e-5)


def build(kind, width, **options):
    return build_encoder(kind, width, 3, generator=generator(), **options)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (list, "no encoder"),
        (lambda: [encoder("linear"), encoder("mlp")], "differ"),
        (lambda: [build("mlp", 4), build("mlp", 4, hidden=(32,))], "differ"),
        (lambda: [build("mlp", 4), build("mlp", 4, activation="tanh")], "differ"),
        (lambda: [build("mlp", 4), build("mlp", 4, activation="identity")], "differ"),
        (lambda: [build("mlp", 4), build("mlp", 4).double()], "differ"),
        (lambda: [build("linear", 4), build("linear", 4).requires_grad_(False)], "differ"),
        (lambda: [build("cnn", 16, image_shape=(4, 4)), build("cnn", 16, image_shape=(2, 8))], "differ"),
        (lambda: [build("lstm", 6, steps=3), build("lstm", 4, steps=2)], "differ"),
        (lambda: [build("linear", 2), build("linear", 40)], "columns differ too much"),
        (lambda: [encoder("linear")] * 2, "share parameters"),
        (lambda: [nn.Linear(4, 3), nn.Linear(4, 3)], "not a ready-made encoder"),
        (lambda: [perturb(encoder("cnn"), 1.0, SeededNoise()) for _ in range(2)], "in MLP encoders only"),
    ],
)
def test_what_cannot_be_stacked(modules, words):
    found = modules()
    assert words in why_not_stackable(found)
    with pytest.raises(PlanError, match="cannot be stacked"):
        StackedEncoders(found)


def test_bad_inputs():
    modules, inputs = uneven()
    stack = StackedEncoders(modules)
    with pytest.raises(PlanError, match="2 inputs for 3"):
        stack(inputs[:2])
    with pytest.raises(PlanError, match="encoder of 4 columns"):
        stack([inputs[0], inputs[0], inputs[2]])


def test_linear_encoders_are_differentiated_without_a_graph():
    encoders, inputs = parties("linear")
    stack = StackedEncoders(encoders)
    joined = stack.join(inputs)
    gradient = torch.randn(stack(joined).shape, generator=generator(3))
    stack(joined).backward(gradient)
    (parameter,) = stack.stacked
    expected = parameter.grad.clone()
    parameter.grad = None
    assert stack.linear
    stack.pull_back(joined, gradient)
    assert torch.equal(parameter.grad, expected)
    assert not StackedEncoders(parties("mlp")[0]).linear
