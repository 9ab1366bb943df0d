"""The label holder's top model: fused embeddings in, raw outputs (logits or values) out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from securevfl.errors import PlanError
from securevfl.models.build import seeded
from securevfl.models.encoders import check_positive


class SumHead(nn.Module):
    """Outputs = fused embeddings + bias, starting at zero.

    With sum fusion and linear encoders the whole model is exactly logistic, softmax or ridge regression on
    the joined columns.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, fused: Tensor) -> Tensor:
        """Adds the bias to (rows, outputs)."""
        return fused + self.bias


def _linear(width: int, outputs: int, hidden: Sequence[int], generator: torch.Generator) -> nn.Module:
    return seeded(lambda: nn.Linear(width, outputs), generator)


def _mlp(width: int, outputs: int, hidden: Sequence[int], generator: torch.Generator) -> nn.Module:
    if not hidden:
        raise PlanError("an MLP head needs at least one hidden width; use the linear head for none")
    for size in hidden:
        check_positive(hidden_width=size)

    def make() -> nn.Module:
        steps = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise((width, *hidden))]
        return nn.Sequential(*(part for step in steps for part in step), nn.Linear(hidden[-1], outputs))

    return seeded(make, generator)


def _relu(width: int, outputs: int, hidden: Sequence[int], generator: torch.Generator) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.ReLU(), nn.Linear(width, outputs)), generator)


def _sum(width: int, outputs: int, hidden: Sequence[int], generator: torch.Generator) -> nn.Module:
    if width != outputs:
        raise PlanError(
            f"the sum head gives back its {width} inputs, but the task has {outputs} outputs; "
            f"use sum fusion with embeddings of length {outputs}, or another head"
        )
    return SumHead(outputs)


HEADS: dict[str, Callable[[int, int, Sequence[int], torch.Generator], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "relu": _relu,
    "sum": _sum,
}


def build_head(
    name: str, width: int, outputs: int, *, generator: torch.Generator, hidden: Sequence[int] = (64,)
) -> nn.Module:
    """Builds a head with weights from `generator` alone.

    Args:
        name: `linear`; `mlp`; `relu`, a linear map of the rectified input, which on summed linear encoders is
            exactly a network with one hidden layer; `sum`, the input plus a bias.
        width: Length of the fused embedding.
        outputs: Outputs of the task, see `output_width`.
        generator: A CPU generator, seeded by the caller.
        hidden: Hidden widths (`mlp`).

    Raises:
        PlanError: The name is unknown or the sizes do not fit together.
    """
    if name not in HEADS:
        raise PlanError(f"unknown head {name!r}; choose one of {', '.join(HEADS)}")
    check_positive(width=width, outputs=outputs)
    return HEADS[name](width, outputs, hidden, generator)
