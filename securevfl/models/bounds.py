"""Reads the constants that `smoothness` needs from an encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from securevfl.errors import PlanError
from securevfl.models.encoders import LinearEncoder, MLPEncoder
from securevfl.models.layers import HiddenLayer
from securevfl.models.smoothness import LayerBound

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
