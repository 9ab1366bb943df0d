"""The optimisers that a plan gives to parties and servers."""

from __future__ import annotations

import pytest
import torch

from securevfl import Plan
from securevfl.algorithms.steps import (
    PlainSGD,
    build_optimiser,
    load_optimiser_state,
    optimiser_state,
    regularised,
)


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 4), (4,), (2,))]


def walk(optimiser: torch.optim.Optimizer, values: list[torch.Tensor], steps: int) -> None:
    for step in range(steps):
        optimiser.zero_grad()
        # The last parameter takes no part in every other loss: without a gradient it must not decay.
        loss = sum(p.cos().sum() for p in values[: 3 - step % 2])
        loss.backward()
        optimiser.step()


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "momentum"), [("sgd", 0.0), ("momentum", 0.9)])
def test_plain_sgd_takes_the_steps_of_torch_bit_for_bit(l2: float, kind: str, momentum: float) -> None:
    ours, theirs = parameters(), parameters()
    built = build_optimiser(
        [{"params": ours, "weight_decay": l2}],
        Plan(algorithm="vafl", l2=l2, optimiser=kind, learning_rate=0.1, unprotected=True),
        0.05,
    )
    assert isinstance(built, PlainSGD)
    walk(built, ours, 20)
    walk(torch.optim.SGD(theirs, lr=0.05, weight_decay=l2, momentum=momentum), theirs, 20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], parameters()[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"optimiser": "momentum"},
        {"optimiser": "adam"},
        {"optimiser": "malicious"},
        {"decay": "sqrt"},
        {"decay": "inverse"},
        {"decay": "step"},
    ],
)
def test_optimisers_with_memory_or_hooks_keep_them(changes: dict[str, str]) -> None:
    plan = Plan.from_flat({**changes, "decay_steps": 3})  # type: ignore[arg-type]
    whole, halves = parameters(), parameters()
    built = build_optimiser([{"params": whole}], plan, 0.05)
    assert isinstance(built, PlainSGD) == (plan.optimiser in ("sgd", "momentum"))
    walk(built, whole, 8)
    first = build_optimiser([{"params": halves}], plan, 0.05)
    walk(first, halves, 4)
    second = build_optimiser([{"params": halves}], plan, 0.05)
    load_optimiser_state(second, optimiser_state(first))
    walk(second, halves, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_the_regulariser_is_about_the_parties_weights_alone() -> None:
    """As in the papers: neither biases nor the server's model decay, in whatever module they are."""
    plan = Plan(algorithm="vafl", l2=0.5, sigma=1.0)
    module = torch.nn.ModuleDict({"lstm": torch.nn.LSTM(3, 2), "out": torch.nn.Linear(2, 1)})
    decays = {
        id(p): g["weight_decay"]
        for g in regularised(module.named_parameters(), plan, "p1")
        for p in g["params"]
    }
    for name, parameter in module.named_parameters():
        assert decays[id(parameter)] == (0.0 if "bias" in name else 0.5)
    assert [g["weight_decay"] for g in regularised(module.named_parameters(), plan, "server")] == [0.0]
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert regularised(module.named_parameters(), plan, "p1") == []
