"""FDML's server role: the matrix of local predictions, their sums, and the staleness bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.messages import Sum
from securevfl.algorithms.sharing import SharingServer
from securevfl.errors import ProtocolError
from securevfl.models import task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A worker's request for the sum of one iteration's predictions."""

    message: Packet
    iteration: int
    rows: Rows


class FDMLServer(SharingServer):
    """Keeps the latest local predictions and lets nobody run more than `staleness` iterations ahead.

    The sums that it hands out depend on all workers' predictions. Those have passed their owners' gates, with
    everybody else as observers; the sums are computed from the released values alone.

    Args:
        setup: What the run is built from.
        channel: The secure sum; by default one whose totals the server obtains.
    """

    def __init__(self, setup: Setup, *, channel: Channel | None = None) -> None:
        super().__init__(setup, share_labels=True, channel=channel)
        kept = setup.data.n_train if self.sums is None else 0  # on a sum nobody's predictions arrive
        shape = (kept, len(self.parties), setup.plan.embedding)
        self.local_predictions = torch.zeros(shape, device=setup.device)
        self.everybody = tuple(sorted(set(setup.hosts.values()) - {setup.label_holder}))
        self.pushed: dict[str, int] = dict.fromkeys(self.parties, 0)
        self.largest_lead = 0
        self._schedule: dict[int, Rows] = {}
        self._waiting: list[Pull] = []

    async def _train(self) -> None:
        """One pass of every worker; all pulls are answered when it ends."""
        if self.sums is not None:
            await self._train_on_sums()
            return
        left = self.batches.per_pass * len(self.parties)
        while left:
            self._waiting.append(self._push(await self.link.receive()))
            left -= await self._answer_ready()

    async def _train_on_sums(self) -> None:
        """The same where a sum exists only once everybody has contributed: without staleness."""
        for _ in range(self.batches.per_pass):
            rows = self.batches.next()
            pulls = await self._gather_pulls(rows)
            total = await self._total(rows, "embedding")
            for pull in pulls:
                await self._send_sum(pull, total)

    async def _gather_pulls(self, rows: Rows) -> list[Pull]:
        """Every worker's pull, once all of them are ready."""
        pulls = []
        for party, message in (await self._gather(rows)).items():
            self.pushed[party] += 1
            self._check_iteration(message, self.pushed[party])
            pulls.append(Pull(message=message, iteration=self.pushed[party], rows=rows))
        return pulls

    def _push(self, message: Packet) -> Pull:
        """Stores a worker's predictions; the pull that comes with them waits its turn."""
        self._check_turn(message)
        iteration = self.pushed[message.sender] + 1
        rows = self._rows(iteration)
        self._check_rows(message, rows)
        self._check_iteration(message, iteration)
        party = self.parties.index(message.sender)
        self.local_predictions[torch.from_numpy(rows), party] = self._vectors(message, len(rows))
        self.pushed[message.sender] = iteration
        return Pull(message=message, iteration=iteration, rows=rows)

    def _check_iteration(self, message: Packet, iteration: int) -> None:
        if message["iteration"] != iteration:
            raise ProtocolError(
                f"{message.sender} pushes iteration {message['iteration']}; {iteration} is its next"
            )

    def _rows(self, iteration: int) -> Rows:
        """The records of an iteration; those that all workers have passed are forgotten."""
        slowest = min(self.pushed.values())
        self._schedule = {number: rows for number, rows in self._schedule.items() if number > slowest}
        if iteration not in self._schedule:
            self._schedule[iteration] = self.batches.next()
        return self._schedule[iteration]

    async def _answer_ready(self) -> int:
        """Answers every pull within the staleness bound; returns how many there were."""
        slowest = min(self.pushed.values())
        bound = slowest + self.setup.plan.settings.staleness
        ready = [pull for pull in self._waiting if pull.iteration <= bound]
        self._waiting = [pull for pull in self._waiting if pull.iteration > bound]
        for pull in ready:
            self.largest_lead = max(self.largest_lead, pull.iteration - slowest)
            await self._send_sum(pull, self._outputs(self.local_predictions[torch.from_numpy(pull.rows)]))
        return len(ready)

    async def _send_sum(self, pull: Pull, total: Tensor) -> None:
        labels = self.labels[torch.from_numpy(pull.rows)]
        loss = float(task_loss(self.setup.data.task, total, labels))
        self._losses.append(loss)
        self.processed += len(pull.rows)
        self.setup.report(self.processed, loss)
        given = self.gate.hand_on(total.cpu().numpy(), kind="sum", observers=self.everybody)
        await self._reply(pull.message, Sum(values=given))

    def _outputs(self, vectors: Tensor) -> Tensor:
        return vectors.sum(dim=1) if vectors.ndim == 3 else vectors

    def figures(self) -> dict[str, Any]:
        """Iterations of the slowest worker, and how far ahead of it an answered pull was at most."""
        return {"iterations": min(self.pushed.values()), "lead": self.largest_lead}

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "predictions": self.local_predictions,
            "pushed": np.array([self.pushed[party] for party in self.parties], np.int64),
            "largest_lead": self.largest_lead,
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.local_predictions = state["predictions"].to(self.setup.device)
        self.pushed = {party: int(n) for party, n in zip(self.parties, state["pushed"], strict=True)}
        self.largest_lead = int(state["largest_lead"])
