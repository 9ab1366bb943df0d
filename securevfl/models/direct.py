"""Gradients of linear heads, written out.

The label holder's model is small: the graph that torch builds around it costs several times the products
themselves. Where head and loss are known, the products alone give the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from securevfl.models.heads import Fusion, SumHead
from securevfl.models.losses import check_shapes, find_loss


class DirectHead:
    """A head whose step needs no graph: linear, or the fused embeddings plus a bias.

    Use `of`, which checks that head and loss are known.

    Args:
        head: The model.
        fusion: How it joins embeddings, which are of one length.
        task: The task.
        loss: A loss whose slope is written out.
    """

    def __init__(self, head: nn.Linear | SumHead, fusion: Fusion, task: str, loss: str) -> None:
        found = find_loss(loss, task)
        if found.slope is None:
            raise TypeError(f"the slope of loss {loss!r} is not written out")
        self.head, self.task, self.summed = head, task, fusion.kind == "sum"
        self._values, self._slope = found.values, found.slope

    @classmethod
    def of(cls, head: nn.Module, fusion: Fusion, task: str, loss: str) -> DirectHead | None:
        """The head, if it is one of these; None where torch has to differentiate it."""
        written = find_loss(loss, task).slope is not None and fusion.even
        if written and (type(head) is nn.Linear or type(head) is SumHead):
            return cls(head, fusion, task, loss)
        return None

    def differentiate(self, inputs: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        """The mean loss and its gradient in the inputs; that in the parameters is set as `grad`.

        Args:
            inputs: Embeddings (rows, parties, width), or fused ones (rows, width).
            labels: One per row.
        """
        head, apart = self.head, inputs.ndim == 3
        with torch.no_grad():
            fused = inputs if not apart else inputs.sum(1) if self.summed else inputs.flatten(1)
            outputs = head(fused)
            check_shapes(self.task, outputs, labels)
            back = slope = self._slope(outputs, labels)
            if head.bias is not None and head.bias.requires_grad:
                head.bias.grad = slope.sum(0)
            if isinstance(head, nn.Linear):
                if head.weight.requires_grad:
                    head.weight.grad = slope.t().mm(fused)
                back = slope.mm(head.weight)
            if apart:
                back = back.unsqueeze(1).expand_as(inputs) if self.summed else back.view_as(inputs)
            return self._values(outputs, labels, "mean").item(), back
