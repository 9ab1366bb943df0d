"""The Flex family's server role: hands out each round's snapshot and trains its own model on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.answers import GradientAnswers
from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.flex_clock import capacity, round_end
from securevfl.algorithms.local import check_finite, load_module_state, module_state
from securevfl.algorithms.local_steps import build_local_optimiser
from securevfl.algorithms.messages import HEAD, Gradient, Received, Snapshot
from securevfl.algorithms.sharing import SharingServer
from securevfl.models import Fusion, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside, Released
from securevfl.privacy.rows import Rows


class FlexServer(SharingServer):
    """The server: collects embeddings, shares them, takes local steps of its own.

    Args:
        setup: What the run is built from.
        steps: From how many steps fit at each party and at the server, how many all take; None for each its
            own.
        adaptive: True to set everybody's rate from the steps and weights of the round before.
        waits_for_timeout: True where a round lasts at least until the timeout.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        steps: Callable[[Mapping[str, int]], int | None],
        adaptive: bool,
        waits_for_timeout: bool,
    ) -> None:
        super().__init__(setup, share_labels=not setup.plan.settings.private_labels)
        self.choose_steps = steps
        self.adaptive = adaptive
        self.waits_for_timeout = waits_for_timeout
        self.answers = GradientAnswers(setup)
        self.head = setup.head
        self.fusion = Fusion(setup.plan.fusion, (setup.plan.embedding,) * len(self.parties))
        parameters = [p for p in setup.head.parameters() if p.requires_grad]
        self.optimiser = build_local_optimiser(parameters, setup.plan, SERVER) if parameters else None
        self.pace = 1.0 / float(setup.plan.simulation.speeds.get(SERVER, 1.0))
        self.round = 0
        self.last_steps: dict[str, int] = {}
        self.last_rates: dict[str, float] = {}
        self._reported = (0, 0.0)

    async def _train(self) -> None:
        for _ in range(self.batches.per_pass):
            await self._round(self.batches.next())
        check_finite(SERVER, self.head)

    async def _round(self, rows: Rows) -> None:
        """Algorithm 1, lines 3 to 16."""
        uploads = await self._gather(rows)
        snapshot = await self._snapshot(uploads, rows)
        steps = self._steps(uploads)
        rates = self._rates(uploads)
        gradients = self._gradients(snapshot, rows)
        for index, (party, message) in enumerate(uploads.items()):
            facts = {"steps": steps[party], "rate": rates[party]}
            gradient = gradients[:, index] if gradients.ndim == 3 else gradients
            await self._answer(message, rows, facts, snapshot, gradient)
        await self._local_steps(snapshot, rows, steps[SERVER], rates[SERVER])
        self.round += 1
        self.last_steps, self.last_rates = steps, rates
        self.processed += len(rows) * len(self.parties)
        self.setup.report(self.processed, self._losses[-1])

    async def _snapshot(self, uploads: Mapping[str, Packet], rows: Rows) -> Tensor:
        """All parties' embeddings (rows, parties, width); on a secure sum, their sum (rows, width)."""
        if self.sums is not None:
            return await self._total(rows, "embedding")
        return torch.stack([self._vectors(message, len(rows)) for message in uploads.values()], dim=1)

    def _steps(self, uploads: Mapping[str, Packet]) -> dict[str, int]:
        capacities = {party: int(message["capacity"]) for party, message in uploads.items()}
        capacities[SERVER] = capacity(self.setup.plan.settings.timeout, self.pace)
        common = self.choose_steps(capacities)
        return capacities if common is None else dict.fromkeys(capacities, common)

    def _rates(self, uploads: Mapping[str, Packet]) -> dict[str, float]:
        """Everybody's learning rate in this round (Alg. 2, line 17: A / (tau * w), of the round before)."""
        setup = self.setup
        rates = {party: setup.rate(party) for party in self.parties} | {SERVER: setup.server_rate}
        if setup.plan.decay == "sqrt":
            rates = {name: rate / math.sqrt(self.round + 1) for name, rate in rates.items()}
        if not self.adaptive:
            return rates
        reports = {party: (int(m["steps"]), float(m["weight"])) for party, m in uploads.items()}
        reports[SERVER] = self._own_report(rates[SERVER])
        return {name: rate / (reports[name][0] * reports[name][1]) for name, rate in rates.items()}

    def _own_report(self, rate: float) -> tuple[int, float]:
        if self.round == 0 and self.optimiser is not None:
            steps = capacity(self.setup.plan.settings.timeout, self.pace)
            self.optimiser.rate = rate
            return steps, self.optimiser.largest_weight(steps)
        return self._reported if self.round else (1, 1.0)

    def _gradients(self, snapshot: Tensor, rows: Rows) -> Tensor:
        """Gradients of the mean loss with respect to the snapshot; the loss is noted."""
        inputs = snapshot.clone().requires_grad_()
        loss = self._loss(inputs, rows)
        (gradients,) = torch.autograd.grad(loss, inputs)
        self._losses.append(float(loss.detach()))
        return gradients

    def _loss(self, snapshot: Tensor, rows: Rows) -> Tensor:
        return task_loss(self.setup.data.task, self._outputs(snapshot), self.labels[torch.from_numpy(rows)])

    def _outputs(self, vectors: Tensor) -> Tensor:
        fused = self.fusion.join_table(vectors) if vectors.ndim == 3 else vectors
        outputs: Tensor = self.head(fused)
        return outputs

    async def _answer(
        self, message: Packet, rows: Rows, facts: Mapping[str, Any], snapshot: Tensor, gradient: Tensor
    ) -> None:
        """Sends the snapshot, or with private labels the gradient, through the label holder's gate."""
        observers = self.setup.observers(message.sender, self.setup.label_holder)
        private = self.setup.plan.settings.private_labels
        if private and observers and self.setup.plan.encoder_training == "none":
            await self._reply(message, Received(**facts))  # what cannot learn gets no gradient
            return
        if private:
            released = self.answers.release(gradient, rows=rows, observers=observers)
            await self._reply(message, Gradient(values=released, **facts))
            return
        summed = self.fusion.kind == "sum" and snapshot.ndim == 3
        shared = snapshot.sum(dim=1) if summed else snapshot
        tables = {"values": shared.cpu().numpy()}
        for name, tensor in self.head.state_dict().items():
            tables[HEAD + name] = tensor.detach().cpu().numpy().copy()
        given: Released | Inside = Inside(values=tables)
        if observers:
            given = self.gate.release_exact(tables, rows=rows, kind="snapshot", observers=observers)
        await self._reply(message, Snapshot(shared=given, **facts))

    async def _local_steps(self, snapshot: Tensor, rows: Rows, steps: int, rate: float) -> None:
        begun = self.setup.clock.now()
        if self.optimiser is not None:
            self.optimiser.begin(rate)
            for _ in range(steps):
                self.optimiser.zero_grad(set_to_none=True)
                self._loss(snapshot, rows).backward()  # type: ignore[no-untyped-call]
                self.optimiser.step()
            self._reported = (steps, self.optimiser.largest_weight(steps))
            end = round_end(
                begun, self.setup.plan.settings.timeout, steps, self.pace, wait=self.waits_for_timeout
            )
            await self.setup.clock.sleep_until(end)

    def figures(self) -> dict[str, Any]:
        """Rounds so far, and steps and rates of the last one."""
        return {"rounds": self.round, "steps": self.last_steps, "rates": self.last_rates}

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "head": module_state(self.head, None),
            "round": self.round,
            "reported": np.array(self._reported, np.float64),
            "last_steps": self.last_steps,
            "last_rates": self.last_rates,
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        load_module_state(self.head, None, state["head"])
        self.round = int(state["round"])
        self._reported = (int(state["reported"][0]), float(state["reported"][1]))
        self.last_steps, self.last_rates = dict(state["last_steps"]), dict(state["last_rates"])
