"""Synchronous parties of one process, computed together.

All parties of synchronous training embed the same rows at the same time. Where their encoders have the same
shape, one batched product does the work of many small ones. This only changes who computes: each party's
embeddings still depend on its own rows and weights, and leave through its own gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.local import LocalModel
from securevfl.algorithms.optimisers import build_optimiser
from securevfl.errors import ProtocolError
from securevfl.models import StackedEncoders, why_not_stackable
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan


class Lockstep:
    """The encoders of all parties as one stack, with one step for all of them.

    Args:
        models: Every party's model. Use `of`, which checks that they fit.
        plan: The plan; its learning rate serves all.
    """

    def __init__(self, models: Sequence[LocalModel], plan: Plan) -> None:
        self.stack = StackedEncoders([model.encoder for model in models])
        everything = np.arange(models[0].records.count)
        self.inputs = self.stack.join([model.records[everything] for model in models])
        self.optimiser = build_optimiser(self.stack.parameters(), plan, plan.learning_rate)
        self._rows: Rows | None = None
        self._outputs: Tensor | None = None
        self._leaves: tuple[Tensor, ...] = ()
        self._gradients: dict[int, Tensor] = {}

    @classmethod
    def of(cls, models: Sequence[LocalModel], plan: Plan) -> Lockstep | None:
        """A lockstep of these models; None where they must be computed one by one.

        Optimisers with a memory and rates of single parties stay with the parties. With random delays or
        latency a party could be at its next batch before another has learned from this one.
        """
        if plan.simulation.delays != "constant" or plan.simulation.latency:
            return None
        alike = not (plan.optimisers or plan.learning_rates)
        plain = plan.optimiser == "sgd" and alike and not plan.hidden_noise
        dense = all(model.trains and not model.private and not model.records.sparse for model in models)
        if not plain or not dense or len(models) < 2 or why_not_stackable([m.encoder for m in models]):
            return None
        return cls(models, plan)

    def embed(self, place: int, rows: Rows) -> Tensor:
        """The embeddings of one party, as a leaf of the graph that its gate goes on with."""
        if self._outputs is None or self._rows is None or not np.array_equal(self._rows, rows):
            if self._gradients:
                raise ProtocolError("a party is at its next batch before all have learned from the last one")
            index = torch.from_numpy(rows).to(self.inputs.device)
            self._rows = rows
            with torch.enable_grad():
                self._outputs = self.stack(self.inputs.index_select(1, index))
            self._leaves = self._outputs.detach().unbind()
        return self._leaves[place].requires_grad_()

    def learn(self, place: int, gradient: Tensor) -> None:
        """Takes one party's gradient; the last one makes the step of all."""
        self._gradients[place] = gradient
        if self._outputs is None or len(self._gradients) < len(self._leaves):
            return
        self.optimiser.zero_grad(set_to_none=True)
        gradients = torch.stack([self._gradients[place] for place in range(len(self._leaves))])
        self._outputs.backward(gradients)  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self._outputs, self._gradients = None, {}
