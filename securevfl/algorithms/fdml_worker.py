"""FDML's worker role: pushes local predictions, pulls their sum, updates its local model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.local import build_local_model
from securevfl.algorithms.sharing import SharingParty
from securevfl.errors import ProtocolError
from securevfl.models import task_loss
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows


class FDMLWorker(SharingParty):
    """One worker. Everybody else sees its predictions, in sums at least, so all of them are observers.

    That holds for the worker that shares a house with the server too: its predictions do not go to the
    server, but the sums that the others pull contain them.

    Args:
        setup: What the run is built from.
        party: Its name.
        source: Address of the role that hands out the sums.
        channel: The secure sum; by default one whose totals the server obtains.
        told: Addresses that are told what is computed from the totals of the test part.
    """

    def __init__(
        self,
        setup: Setup,
        party: str,
        *,
        source: str = SERVER,
        channel: Channel | None = None,
        told: tuple[str, ...] = (),
    ) -> None:
        observers = setup.everyone_but(party)
        encoder = setup.encoders[party]
        if party == setup.data.parties[0]:
            encoder = nn.Sequential(encoder, setup.head)
        model = build_local_model(setup, party, observers=observers, encoder=encoder)
        super().__init__(
            setup, party, model=model, observers=observers, share_labels=True, channel=channel, told=told
        )
        self.source = source
        self.iteration = 0

    async def _round(self, rows: Rows) -> None:
        """Algorithm 1's loop, once: push, pull, update."""
        clock = self.setup.clock
        await clock.sleep_until(clock.now() + self.delay.draw())
        self.iteration += 1
        outputs, released = await self._pull(rows)
        gradient = output_gradient(self.setup.data.task, outputs, self._labels_of(rows).cpu())
        self.model.learn(released, gradient.numpy(), rows)

    async def _pull(self, rows: Rows) -> tuple[Tensor, Released | Contribution | Inside]:
        """Pushes the batch's predictions; returns the sum over all workers, and what was pushed."""
        answer, released = await self._upload(rows, {"iteration": self.iteration}, learning=True)
        pulled = answer.kind == "sum" and answer.sender == self.source
        total = answer["values"] if pulled else None
        if not isinstance(total, np.ndarray) or total.shape != tuple(released.source.shape):
            raise ProtocolError(
                f"{self.address} received {answer.kind!r} from {answer.sender}, not the sum that it pulled"
            )
        return torch.from_numpy(np.array(total, np.float32)), released

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
