"""Constants of the papers' theorems, estimated from a plan and its data, and what the theorems say of a plan.

Whoever calls this looks at everybody's rows: it belongs to simulations and benchmarks, never to an
organisation of a networked run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor, nn

from securevfl.algorithms import find_algorithm
from securevfl.algorithms.flex import Flex, capacity, gradient_weights
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.steps import known_steps
from securevfl.algorithms.vafl import VAFL
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models.encoders import HiddenLayer, LinearEncoder, MLPEncoder
from securevfl.models.losses import find_loss
from securevfl.settings.plan import Plan
from securevfl.theory import afsgd, flex, vafl
from securevfl.theory.smoothness import LayerBound


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """Smoothness of the loss of every record in the weights, for a sum of linear models.

    Attributes:
        whole: L.
        blocks: L_m of every party: how fast its own gradient changes with all weights.
        own: How fast a party's gradient changes with its own weights.
        longest: Largest squared norm of a party's row, the bias included.
        lipschitz: That of the loss in the outputs.
        records: Training records.
    """

    whole: float
    blocks: dict[str, float]
    own: dict[str, float]
    longest: float
    lipschitz: float
    records: int


def curvature(plan: Plan, data: VerticalData) -> Curvature:
    """L and L_m from the rows: the loss is smooth in x.w + b with constant c, so L = c max_i (|x_i|^2 + M).

    Args:
        plan: A completed plan.
        data: Scaled as the plan says.

    Raises:
        PlanError: The model is not a sum of linear models; then no global constant exists without bounds on
            the weights.
    """
    if not _is_linear(plan, data):
        raise PlanError(
            f"constants are known for sums of linear models (model linear, fusion sum, head sum), not for "
            f"{plan.model}, {plan.fusion}, {plan.head}"
        )
    squares = [_squared_norms(block) + 1.0 for block in data.train]
    whole = np.sum(squares, axis=0)
    loss = find_loss(plan.loss, data.task)
    factor = loss.smoothness
    return Curvature(
        whole=float(factor * whole.max() + plan.l2),
        blocks={
            party: float(factor * np.sqrt(own * whole).max() + plan.l2)
            for party, own in zip(data.parties, squares, strict=True)
        },
        own={
            party: float(factor * own.max() + plan.l2)
            for party, own in zip(data.parties, squares, strict=True)
        },
        longest=float(np.max(squares)),
        lipschitz=loss.lipschitz,
        records=data.n_train,
    )


def _squared_norms(block: Any) -> npt.NDArray[np.float64]:
    """Of every row; sparse ones stay sparse."""
    if sparse.issparse(block):
        return np.asarray(block.astype(np.float64).power(2).sum(axis=1)).ravel()
    squares: npt.NDArray[np.float64] = np.square(np.asarray(block, np.float64)).sum(axis=1)
    return squares


def theory_notes(plan: Plan, data: VerticalData) -> tuple[str, ...]:
    """Where a plan leaves the conditions of its paper's theorem, one line each.

    A plan may well train better outside them: theorems are about the worst case. Nothing is said of models
    without known constants.
    """
    rule = _RULES.get(plan.family.name)
    if rule is None:
        return ()
    plan, scaled = resolve(plan, data)
    if not _is_linear(plan, data):
        return ()
    rough = [name for name in (plan.loss, *plan.losses.values()) if _is_rough(name, data.task)]
    if rough:
        return (f"the theorem needs a smooth loss, and the gradient of {rough[0]!r} jumps",)
    return tuple(rule(plan, curvature(plan, scaled)))


def _is_rough(loss: str, task: str) -> bool:
    return math.isinf(find_loss(loss, task).smoothness)


def _is_linear(plan: Plan, data: VerticalData) -> bool:
    return plan.models(data.parties) == {"linear"} and (plan.fusion, plan.head) == ("sum", "sum")


def _vafl_notes(plan: Plan, found: Curvature) -> list[str]:
    algorithm = find_algorithm(plan.algorithm)
    together = cast(VAFL, algorithm).wait_for(plan, len(found.blocks))
    number = 1 if together == 1 else 7
    # Where all work on one batch, or sums are taken on demand, no embedding is ever stale.
    fresh = plan.algorithm == "vafl-sync" or plan.protocol != "plain"
    delay = 0 if fresh else plan.settings.delay_bound
    if not (fresh or delay):
        return [f"VAFL's Theorem {number} needs a bound of the delay: set delay_bound"]
    few = vafl.Constants(smoothness=found.whole, shares=(1.0,), variances=(0.0,), gap=0.0)
    limit = vafl.bounded_delay(few, delay=delay, iterations=1).limit / together
    return _above(
        plan, limit, f"VAFL's Theorem {number} (L = {found.whole:.3g}, D = {delay}, t = {together})"
    )


def _fdml_notes(plan: Plan, found: Curvature) -> list[str]:
    return (
        [] if plan.decay == "sqrt" else ["FDML's Proposition 1 needs rates eta / sqrt(t): set decay = 'sqrt'"]
    )


ACCURACY = 0.01
"""Sub-optimality for which the rates of AFSGD-VP's theorems are looked up; they shrink with it."""


def _afsgd_notes(plan: Plan, found: Curvature) -> list[str]:
    if not plan.l2 > 0:
        return ["AFSGD-VP's theorems need strong convexity: set l2 above 0"]
    rule = {"afsgd": afsgd.sgd, "afsvrg": afsgd.svrg, "afsaga": afsgd.saga}.get(plan.algorithm)
    if rule is None:
        return []
    if math.isinf(found.lipschitz):
        return ["AFSGD-VP's theorems need bounded gradients (Assumption 3), and those of this loss are not"]
    # While the slowest worker makes one step the others make `visits`, and a product is used as long.
    speeds = [plan.simulation.speeds.get(party, 1.0) for party in found.blocks]
    visits = math.ceil(max(speeds) / min(speeds))
    known = afsgd.Constants(
        convexity=plan.l2,
        smoothness=found.whole,
        block_smoothness=max(found.own.values()),
        gradient=found.lipschitz**2 * found.longest,
        workers=len(found.blocks),
        gap=1.0,
        visits=visits,
        overlap=visits * len(found.blocks),
        overlapping=visits,
        records=found.records,
    )
    number = {"afsgd": 4, "afsvrg": 6, "afsaga": 8}[plan.algorithm]
    theorem = f"AFSGD-VP's Theorem {number} for a sub-optimality of {ACCURACY:g} (L = {found.whole:.3g})"
    return _above(plan, rule(known, ACCURACY).rate, theorem)


def _flex_notes(plan: Plan, found: Curvature) -> list[str]:
    algorithm, parties = cast(Flex, find_algorithm(plan.algorithm)), tuple(found.blocks)
    durations, timeout = known_steps(plan, parties), plan.settings.timeout
    # Random durations are not known: one step is what everybody takes at least.
    capacities = {name: capacity(timeout, min(each)) if each else 1 for name, each in durations.items()}
    common = algorithm.steps(capacities)
    notes: dict[tuple[str, str], list[str]] = {}
    for party, block in found.blocks.items():
        rate = plan.learning_rates.get(party, plan.learning_rate)
        steps = capacities[party] if common is None else common
        if algorithm.adaptive:
            limit = flex.adaptive_limit(smoothness=found.whole, block_smoothness=block, slowest_change=1.0)
            theorem = f"Flex-VFL's (20) admits of A, where speeds stay the same (L = {found.whole:.3g})"
        else:
            kind = plan.optimisers.get(party, plan.optimiser)
            weights = gradient_weights(kind, steps, rate=rate, proximal=plan.settings.proximal)
            limit = flex.rate_limit(smoothness=found.whole, block_smoothness=block, weights=weights.tolist())
            words = f"{steps} local step{'s' * (steps > 1)}"
            theorem = f"Flex-VFL's Theorem 1 admits ({words}, L = {found.whole:.3g})"
        if rate > limit:
            said = f"is above {limit:.3g}, the most that {theorem}"
            notes.setdefault((f"rate {rate:g}", said), []).append(party)
    return [f"{rate} of {', '.join(who)} {said}" for (rate, said), who in notes.items()]


def _above(plan: Plan, limit: float, theorem: str) -> list[str]:
    rate = max([plan.learning_rate, *plan.learning_rates.values()])
    return [f"rate {rate:g} is above {limit:.3g}, the most that {theorem} admits"] if rate > limit else []


_RULES = {"vafl": _vafl_notes, "fdml": _fdml_notes, "afsgd": _afsgd_notes, "flex": _flex_notes}

# Lipschitz constant and |sigma(0)| of one unit.
_UNITS: dict[type[nn.Module], tuple[float, float]] = {
    nn.ReLU: (1.0, 0.0),
    nn.Tanh: (1.0, 0.0),
    nn.Identity: (1.0, 0.0),
    nn.Sigmoid: (0.25, 0.5),
}


def layer_bounds(encoder: nn.Module, levels: Sequence[float], release_std: float) -> list[LayerBound]:
    """The layers of a linear or MLP encoder **at its present weights**; after a step they must be read again.

    Args:
        encoder: A `LinearEncoder` or `MLPEncoder`.
        levels: c_l of every hidden layer.
        release_std: Standard deviation of the gate's Gaussian noise.

    Raises:
        PlanError: Another kind of encoder, another number of hidden layers, or a layer whose weights are all
            zero.
    """
    if not isinstance(encoder, LinearEncoder | MLPEncoder):
        raise PlanError(
            f"layer bounds are known for linear and MLP encoders, not for {type(encoder).__name__}"
        )
    layers = [cast(HiddenLayer, layer) for layer in encoder.hidden]
    if len(levels) != len(layers):
        raise PlanError(f"{len(levels)} noise levels for {len(layers)} hidden layers; give one for each")
    found = [
        _bound(cast(nn.Linear, layer.affine), _UNITS[type(layer.activation)], level)
        for layer, level in zip(layers, levels, strict=True)
    ]
    return [*found, _bound(encoder.output, (1.0, 0.0), release_std)]


def _bound(affine: nn.Linear, unit: tuple[float, float], level: float) -> LayerBound:
    norm = float(torch.linalg.matrix_norm(affine.weight.detach().double(), 2))
    bias = cast(Tensor | None, affine.bias)
    if norm == 0:
        raise PlanError("a layer's weights are all zero; bounds need a positive norm")
    return LayerBound(
        width=affine.out_features,
        weight_norm=norm,
        level=level,
        lipschitz=unit[0],
        bias_norm=0.0 if bias is None else float(bias.detach().double().norm()),
        offset=unit[1] * math.sqrt(affine.out_features),
    )
