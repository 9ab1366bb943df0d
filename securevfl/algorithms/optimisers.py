"""The optimisers of parties and servers, and their state as explicit data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER
from securevfl.settings.plan import Plan

MOMENTUM = 0.9


class PlainSGD(torch.optim.SGD):
    """Torch's SGD without momentum: the same updates bit for bit, without hooks.

    The blocks of vertical models are small: what torch wraps around each call (a profiler's record, hooks,
    the choice of an implementation) takes several times as long as the update itself. Its first call would
    also load torch's compiler, which takes a second of every process, only to keep it from these methods.
    """

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients; they are never kept as zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step on the gradients that are there."""
        with torch.no_grad():
            for group in self.param_groups:
                decay, rate = group["weight_decay"], group["lr"]
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        if decay:
                            gradient = gradient.add(parameter, alpha=decay)
                        parameter.add_(gradient, alpha=-rate)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps steps that do not say this


def build_optimiser(
    parameters: Iterable[Tensor], plan: Plan, rate: float, name: str = SERVER
) -> torch.optim.Optimizer:
    """The optimiser that the plan gives to `name`; weight decay is the gradient of l2/2 * ||theta||^2."""
    chosen = list(parameters)
    kind = plan.optimisers.get(name, plan.optimiser)
    if kind == "sgd" and plan.decay == "none":
        return PlainSGD(chosen, lr=rate, weight_decay=plan.l2)
    optimiser: torch.optim.Optimizer
    if kind == "adam":
        optimiser = torch.optim.Adam(chosen, lr=rate, weight_decay=plan.l2)
    else:
        momentum = MOMENTUM if kind == "momentum" else 0.0
        optimiser = torch.optim.SGD(chosen, lr=rate, weight_decay=plan.l2, momentum=momentum)
    if kind == "malicious":
        optimiser.register_step_pre_hook(enlarge_gradients)
    if plan.decay == "sqrt":
        for group in optimiser.param_groups:
            group["steps"], group["first_rate"] = 0, rate
        optimiser.register_step_pre_hook(_decay)
    return optimiser


def _decay(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    """Gives step t the rate eta / sqrt(t)."""
    for group in optimiser.param_groups:
        group["steps"] += 1
        group["lr"] = group["first_rate"] / math.sqrt(group["steps"])


def enlarge_gradients(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    """What an active attacker does to its own updates, so that the common model leans on its encoder.

    Each gradient is scaled by 1 + g_t / g_(t-1), within 1 and 5: steady steps grow. The idea is
    that of Fu et al., Label Inference Attacks Against Vertical Federated Learning, USENIX Security 2022; the
    constants are this implementation's own.
    """
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            slots, gradient = optimiser.state[parameter], parameter.grad
            if gradient is None:
                continue
            if "previous" in slots:
                ratio = 1 + gradient / (slots["previous"] + 1e-7)
                gradient.mul_(ratio.clamp(1.0, 5.0))
            slots["previous"] = gradient.detach().clone()


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimiser remembers: its slots, and how many steps have decayed its rate."""
    slots = {str(index): dict(slots) for index, slots in optimiser.state_dict()["state"].items()}
    return {"slots": slots, "steps": optimiser.param_groups[0].get("steps", 0)}


def load_optimiser_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Reverses `optimiser_state`."""
    full = optimiser.state_dict()
    full["state"] = {int(index): slots for index, slots in state["slots"].items()}
    optimiser.load_state_dict(full)
    for group in optimiser.param_groups:
        if "steps" in group:
            group["steps"] = int(state["steps"])
