"""FDML's worker role: pushes local predictions, pulls their sum, updates its local model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import Setup
from securevfl.algorithms.local import build_local_model
from securevfl.algorithms.sharing import SharingParty
from securevfl.errors import ProtocolError
from securevfl.models import task_loss
from securevfl.rows import Rows


class FDMLWorker(SharingParty):
    """One worker. Everybody else sees its predictions, in sums at least, so all of them are observers.

    That holds for the worker that shares a house with the server too: its predictions do not go to the
    server, but the sums that the others pull contain them.
    """

    def __init__(self, setup: Setup, party: str) -> None:
        observers = setup.everyone_but(party)
        encoder = setup.encoders[party]
        if party == setup.data.parties[0]:
            encoder = nn.Sequential(encoder, setup.head)
        model = build_local_model(setup, party, observers=observers, encoder=encoder)
        super().__init__(setup, party, model=model, observers=observers, share_labels=True)
        self.iteration = 0

    async def _round(self, rows: Rows) -> None:
        """Algorithm 1's loop, once: push, pull, update."""
        clock = self.setup.clock
        await clock.sleep_until(clock.now() + self.delay.draw())
        self.iteration += 1
        answer, released = await self._upload(rows, {"iteration": self.iteration}, learning=True)
        total = answer["values"] if answer.kind == "sum" else None
        if not isinstance(total, np.ndarray) or total.shape != tuple(released.source.shape):
            raise ProtocolError(f"{self.address} received {answer.kind!r}, not the sum that it pulled")
        outputs = torch.from_numpy(np.array(total, np.float32))
        gradient = output_gradient(self.setup.data.task, outputs, self._labels_of(rows).cpu())
        self.model.learn(released, gradient.numpy(), rows)

    def state(self) -> dict[str, Any]:
        return super().state() | {"iteration": self.iteration}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.iteration = int(state["iteration"])


def output_gradient(task: str, outputs: Tensor, labels: Tensor) -> Tensor:
    """H of eq. (7): the gradient of the batch's mean loss with respect to the summed predictions."""
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task_loss(task, leaf, labels), leaf)
    return gradient
