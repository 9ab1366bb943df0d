"""The label holder's side: how it joins the parties' embeddings, and its top model.

Concatenation needs every embedding by itself, so only noise protects them. The sum is all a secure sum gives.
Both are differentiable: autograd routes the loss's gradient back to each embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from securevfl.errors import PlanError
from securevfl.models.build import seeded
from securevfl.models.encoders import check_positive

FUSIONS = ("concat", "sum")


@dataclass(frozen=True)
class Fusion:
    """Joins one embedding per party into the head's input.

    Args:
        kind: `concat` or `sum`.
        widths: The length of each party's embedding, in the parties' order; all equal for `sum`.
    """

    kind: str
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in FUSIONS:
            raise PlanError(f"unknown fusion {self.kind!r}; choose one of {', '.join(FUSIONS)}")
        if not self.widths or min(self.widths) < 1:
            raise PlanError(f"embedding lengths {self.widths} make no input; each party needs at least 1")
        if self.kind == "sum" and len(set(self.widths)) > 1:
            raise PlanError(f"sum fusion needs embeddings of equal length, found {self.widths}")

    @property
    def width(self) -> int:
        """Length of the head's input."""
        return sum(self.widths) if self.kind == "concat" else self.widths[0]

    @cached_property
    def widest(self) -> int:
        """Length of the longest embedding, and of every one in a table."""
        return max(self.widths)

    @cached_property
    def even(self) -> bool:
        """Whether all embeddings are of one length."""
        return min(self.widths) == self.widest

    def __call__(self, embeddings: Sequence[Tensor] | Tensor) -> Tensor:
        """Joins a list of (rows, width) tensors, or a stack (parties, rows, width), to (rows, self.width).

        Raises:
            PlanError: The number of parties or a length is not what the fusion was made for.
        """
        found = _lengths(embeddings)
        if found != self.widths:
            raise PlanError(f"embeddings have lengths {found}; the fusion was made for {self.widths}")
        if isinstance(embeddings, Tensor):
            return self.join_table(embeddings.transpose(0, 1))
        if self.kind == "concat":
            return torch.cat(tuple(embeddings), dim=1)
        total = embeddings[0]
        for one in embeddings[1:]:
            total = total + one
        return total

    def join_table(self, table: Tensor) -> Tensor:
        """Joins a table (rows, parties, width) to (rows, self.width); shorter embeddings are padded.

        Raises:
            PlanError: The number of parties or a length is not what the fusion was made for.
        """
        if table.ndim != 3 or table.shape[1:] != (len(self.widths), self.widest):
            raise PlanError(f"a table of shape {tuple(table.shape)} does not hold lengths {self.widths}")
        if self.kind == "sum":
            return table.sum(1)
        if self.even:
            return table.flatten(1)
        return torch.cat([table[:, place, :width] for place, width in enumerate(self.widths)], dim=1)


def _lengths(embeddings: Sequence[Tensor] | Tensor) -> tuple[int, ...]:
    if isinstance(embeddings, Tensor):
        return (embeddings.shape[-1],) * embeddings.shape[0]
    return tuple(one.shape[-1] for one in embeddings)


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
