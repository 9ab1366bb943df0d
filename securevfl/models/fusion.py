"""How the label holder joins the parties' embeddings before its head.

Concatenation needs every embedding by itself, so only noise protects them. The sum is all a secure sum gives.
Both are differentiable: autograd routes the loss's gradient back to each embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from securevfl.errors import PlanError

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
        """Joins a table (rows, parties, width) to (rows, self.width).

        Raises:
            PlanError: The number of parties or a length is not what the fusion was made for.
        """
        if table.ndim != 3 or (table.shape[2],) * table.shape[1] != self.widths:
            raise PlanError(f"a table of shape {tuple(table.shape)} does not hold lengths {self.widths}")
        return table.sum(1) if self.kind == "sum" else table.flatten(1)


def _lengths(embeddings: Sequence[Tensor] | Tensor) -> tuple[int, ...]:
    if isinstance(embeddings, Tensor):
        return (embeddings.shape[-1],) * embeddings.shape[0]
    return tuple(one.shape[-1] for one in embeddings)
