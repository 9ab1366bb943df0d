"""Faults of noise that has the right size, and of a model that is chosen by exact figures.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from benchmarks.faults.contract import fault, swap
from securevfl.algorithms.vafl import TopModelServer
from securevfl.privacy.noise import Noise, lattice

TRIED = ("strict", "frozen", "dp-encoder")


@fault(
    "noise that leans", "the noise of each vector has the sign with which it leans against the vector", TRIED
)
def noise_leans_inwards() -> None:
    def make(honest: Any) -> Any:
        def perturb(self: Noise, values: Any, std: float) -> Any:
            exact, step = np.asarray(values, np.float64), lattice(std)
            noise = self.gaussian(exact.shape, std)
            along = (noise * exact).sum(-1, keepdims=True)
            return np.rint((exact + np.where(along > 0, -noise, noise)) / step) * step

        return perturb

    swap(Noise, "perturb", make)


@fault("noise generator", "the angles that noise is made of are one of 256", TRIED)
def noise_of_few_angles() -> None:
    def make(honest: Any) -> Any:
        def gaussian(self: Noise, shape: tuple[int, ...], std: float) -> Any:
            count = math.prod(shape)
            pairs = (count + 1) // 2
            unit = self._unit(2 * pairs)
            radius = np.sqrt(-2.0 * np.log(unit[:pairs])) * std
            angle = (np.ceil(unit[pairs:] * 256) / 256 + 0.001) * (2.0 * np.pi)
            return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].reshape(shape)

        return gaussian

    swap(Noise, "gaussian", make)


@fault("model selection", "after each evaluation the label holder goes back to its best model so far", TRIED)
def model_of_best_figures() -> None:
    def make(honest: Any) -> Any:
        async def evaluate(self: TopModelServer) -> None:
            await honest(self)
            best = vars(self).get("_best")
            if best is None or self.test["loss"] < best[0]:
                vars(self)["_best"] = self.test["loss"], copy.deepcopy(self.top.module.state_dict())
            else:
                self.top.module.load_state_dict(best[1])

        return evaluate

    swap(TopModelServer, "evaluate", make)
