"""Local steps of linear models, written out.

Between two messages a party of the Flex family takes many small steps on one batch. For a linear encoder
below a linear head each of them is two products and the slope of the loss; a graph around them would cost ten
times as much. Features and weights stay in the model's 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import nn

from securevfl.algorithms.linear import loss_derivative
from securevfl.models.encoders import LinearEncoder
from securevfl.models.heads import Fusion, SumHead
from securevfl.models.losses import USUAL

Floats = npt.NDArray[np.float32]
Slope = Callable[[Floats], Floats]


def loss_slope(
    task: str, loss: str, labels: npt.NDArray[Any], *, fixed: Floats, mix: Floats | None = None
) -> Slope:
    """The gradient of a batch's mean loss in the vectors that a model adds to the outputs.

    Args:
        task: The task.
        loss: The loss, by its name.
        labels: One per record.
        fixed: The part of the outputs that does not change: (rows, outputs).
        mix: What the head makes of the model's vectors: (width, outputs); None where they are the outputs.
    """
    share, target = np.float32(1 / len(labels)), labels.astype(np.float32)[:, None]

    def logistic(outputs: Floats) -> Floats:
        slope: Floats = (special.expit(outputs) - target) * share
        return slope

    def other(outputs: Floats) -> Floats:
        each = loss_derivative(task, outputs.astype(np.float64), labels, loss)
        return each.astype(np.float32) * share

    each = logistic if task == "binary" and loss in ("auto", USUAL[task]) else other
    if mix is None:
        return lambda vectors: each(fixed + vectors)
    across = mix.T
    return lambda vectors: each(fixed + vectors @ mix) @ across


def written_out(module: nn.Module) -> bool:
    """Whether the steps of an encoder or a head, or what it takes, are written out here: on the CPU."""
    if not all(each.device.type == "cpu" and each.dtype == torch.float32 for each in module.parameters()):
        return False
    if isinstance(module, LinearEncoder):
        return type(module) is LinearEncoder and module.output.bias is None
    return type(module) is SumHead or (type(module) is nn.Linear and module.bias is not None)


def others_part(
    fusion: Fusion, shared: Floats, own: Floats, index: int, weight: Floats | None, bias: Floats
) -> tuple[Floats, Floats | None]:
    """What the others' embeddings add to the outputs, and what the head makes of a party's own.

    Args:
        fusion: How the head joins embeddings.
        shared: All of them (rows, parties, width), or their sum (rows, width).
        own: Those of the party that are in the sum.
        index: The party.
        weight: The head's weight (outputs, width); None of a head that only adds a bias.
        bias: The head's bias.
    """
    if shared.ndim == 2:
        others: Floats = shared - own
        fixed: Floats = (others if weight is None else others @ weight.T) + bias
        return fixed, None if weight is None else weight.T
    if weight is None:
        raise TypeError("a head without weights takes sums")
    if fusion.even:
        joined = shared.reshape(len(shared), -1)
    else:
        joined = np.hstack([shared[:, place, :width] for place, width in enumerate(fusion.widths)])
    end = sum(fusion.widths[: index + 1])
    mine = slice(end - fusion.widths[index], end)
    of_others = weight.copy()
    of_others[:, mine] = 0.0
    return joined @ of_others.T + bias, weight[:, mine].T


def through_clipping(vectors: Floats, clip: float, slope: Slope) -> Floats:
    """The gradient in vectors of a function of the same vectors, each scaled to norm at most `clip`."""
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-30))
    scale = np.minimum(clip / norms, np.float32(1.0))
    back = scale * slope(vectors * scale)
    along = (vectors * back).sum(axis=1, keepdims=True) / norms**2
    found: Floats = np.where(scale < 1, back - along * vectors, back)
    return found


def weight_slope(features: Floats, slope: Slope, clip: float | None = None) -> Slope:
    """The gradient in a linear encoder's weights (columns, width), from that in its vectors.

    Args:
        features: The batch.
        slope: The gradient in the vectors as they are released.
        clip: The norm that released vectors are clipped to; None where they are not.
    """
    across = features.T
    if clip is None:
        return lambda weights: across @ slope(features @ weights)
    return lambda weights: across @ through_clipping(features @ weights, clip, slope)


class HeadSteps:
    """A head's own steps on fused embeddings that stay as they are.

    Args:
        head: A head that is written out.
        fused: Its inputs.
    """

    def __init__(self, head: nn.Module, fused: Floats) -> None:
        ones = np.ones((len(fused), 1), np.float32)
        self.head, parameters = head, [each.detach().numpy() for each in head.parameters()]
        if isinstance(head, SumHead):
            self.features, self.fixed, self.weights = ones, fused, parameters[0][None, :]
        else:
            weight, bias = parameters
            self.features, self.fixed = np.hstack([fused, ones]), np.zeros((1, 1), np.float32)
            self.weights = np.vstack([weight.T, bias])

    def put(self, weights: Floats) -> None:
        """Sets what the steps have led to."""
        bias = torch.from_numpy(weights[-1].copy())
        with torch.no_grad():
            if isinstance(self.head, nn.Linear):
                self.head.weight.copy_(torch.from_numpy(weights[:-1].T.copy()))
            self.head.bias.copy_(bias)  # type: ignore[operator]
