"""The local optimisers of the Flex family, and the weights that they put on gradients (Flex-VFL, eq. 6 to 8).

A round starts from theta_0, takes tau steps, and its whole update can be written as
``eta * sum_t w_t g_t``. The weights say how strongly an optimiser amplifies gradients; the adaptive
algorithm divides its rate by the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.algorithms.optimisers import MOMENTUM
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan

LOCAL_OPTIMISERS = ("sgd", "momentum", "proximal", "decaying")


def gradient_weights(kind: str, steps: int, *, rate: float, proximal: float) -> npt.NDArray[np.float64]:
    """The weight w_t of each of a round's gradients, t = 0 .. steps - 1.

    Args:
        kind: One of `LOCAL_OPTIMISERS`.
        steps: tau, the number of local steps.
        rate: eta, the round's learning rate.
        proximal: Coefficient mu of the proximal term.
    """
    left = np.arange(steps, 0, -1, dtype=np.float64)  # tau - t
    match kind:
        case "sgd":
            return np.ones(steps)
        case "momentum":
            return np.asarray((1 - MOMENTUM**left) / (1 - MOMENTUM))
        case "proximal":
            # The paper prints the exponent tau - t + 1; its own recursion gives tau - 1 - t.
            return np.asarray((1 - rate * proximal) ** (left - 1))
        case "decaying":
            return np.asarray(1 / np.sqrt(np.arange(1, steps + 1, dtype=np.float64)))
    raise PlanError(f"no weights are known for optimiser {kind!r}; use one of {', '.join(LOCAL_OPTIMISERS)}")


class LocalSGD(torch.optim.SGD):
    """SGD whose memory lasts one round: plain, with momentum, proximal, or with a rate eta / sqrt(t + 1).

    Call `begin` at the start of a round.
    """

    def __init__(self, parameters: Iterable[Tensor], *, kind: str, proximal: float, l2: float) -> None:
        momentum = MOMENTUM if kind == "momentum" else 0.0
        super().__init__(list(parameters), lr=0.0, weight_decay=l2, momentum=momentum)
        self.kind = kind
        self.proximal = proximal
        self.rate = 0.0
        self.taken = 0
        self._anchors: list[Tensor] = []

    def begin(self, rate: float) -> None:
        """Starts a round: forgets momentum, remembers where the round starts."""
        self.state.clear()
        self.rate, self.taken = rate, 0
        if self.kind == "proximal":
            self._anchors = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        """One local step on the gradients that are there."""
        rate = self.rate / math.sqrt(self.taken + 1) if self.kind == "decaying" else self.rate
        for group in self.param_groups:
            group["lr"] = rate
        with torch.no_grad():
            for parameter, anchor in zip(self._parameters(), self._anchors, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - anchor, alpha=self.proximal)
        self.taken += 1
        return super().step(closure)

    def largest_weight(self, steps: int) -> float:
        """The largest weight of a round of so many steps at the present rate."""
        return float(gradient_weights(self.kind, steps, rate=self.rate, proximal=self.proximal).max())


def build_local_optimiser(parameters: Iterable[Tensor], plan: Plan, name: str) -> LocalSGD:
    """The optimiser that the plan gives to a party or to the server."""
    kind = plan.optimisers.get(name, plan.optimiser)
    return LocalSGD(parameters, kind=kind, proximal=plan.settings.proximal, l2=plan.l2)
