"""The Flex family's party role: uploads once per round, then trains on the snapshot it gets back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import Setup
from securevfl.algorithms.flex_clock import capacity, round_end
from securevfl.algorithms.local import build_local_model
from securevfl.algorithms.local_steps import LocalSGD, build_local_optimiser
from securevfl.algorithms.messages import HEAD
from securevfl.algorithms.sharing import SharingParty
from securevfl.errors import ProtocolError
from securevfl.models import Fusion, task_loss
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows


class FlexParty(SharingParty):
    """A party. Its embeddings go to everybody; with private labels, only gradients computed from them do.

    Args:
        setup: What the run is built from.
        party: Its name.
        waits_for_timeout: True where a round lasts at least until the timeout.
    """

    def __init__(self, setup: Setup, party: str, *, waits_for_timeout: bool) -> None:
        plan = setup.plan
        private = plan.settings.private_labels
        observers = setup.observers_of_training(party) if private else setup.everyone_but(party)
        model = build_local_model(setup, party, observers=observers)
        self.optimiser: LocalSGD | None = None
        if model.trains:
            parameters = [p for p in setup.encoders[party].parameters() if p.requires_grad]
            self.optimiser = build_local_optimiser(parameters, plan, party)
            model.optimiser = self.optimiser
        super().__init__(setup, party, model=model, observers=observers, share_labels=not private)
        self.index = setup.data.parties.index(party)
        self.waits_for_timeout = waits_for_timeout
        self.head = copy.deepcopy(setup.head)
        self.fusion = Fusion(plan.fusion, (plan.embedding,) * len(setup.data.parties))
        self._reported: tuple[int, float] | None = None

    async def _round(self, rows: Rows) -> None:
        pace = self.delay.draw()
        fits = capacity(self.setup.plan.settings.timeout, pace)
        steps, weight = self._report(fits)
        facts = {"capacity": fits, "steps": steps, "weight": weight}
        answer, released = await self._upload(rows, facts, learning=False)
        begun, steps = self.setup.clock.now(), self._checked_steps(answer)
        self._train(answer, released, rows, steps)
        end = round_end(begun, self.setup.plan.settings.timeout, steps, pace, wait=self.waits_for_timeout)
        await self.setup.clock.sleep_until(end)

    def _report(self, fits: int) -> tuple[int, float]:
        """Steps and largest weight of the round before; for the first one, what this round will have."""
        if self.optimiser is None:
            return 1, 1.0
        if self._reported is None:
            self.optimiser.rate = self.setup.rate(self.address)
            return fits, self.optimiser.largest_weight(fits)
        return self._reported

    def _checked_steps(self, answer: Packet) -> int:
        steps = answer["steps"]
        if not isinstance(steps, int) or steps < 1:
            raise ProtocolError(f"{self.address} was told to take {steps!r} steps")
        return steps

    def _train(
        self, answer: Packet, released: Released | Contribution | Inside, rows: Rows, steps: int
    ) -> None:
        """The local steps of a round (Alg. 1, lines 12 to 14)."""
        if self.optimiser is None:
            return
        due = "gradient" if self.setup.plan.settings.private_labels else "snapshot"
        if answer.kind != due:
            raise ProtocolError(f"{self.address} received {answer.kind!r}, not a {due}")
        self.optimiser.begin(float(answer["rate"]))
        values = torch.from_numpy(np.array(answer["values"], np.float32)).to(self.setup.device)
        if due == "snapshot":
            self._take_head(answer)
            values = self._without_own(values, released)
        for _ in range(steps):
            source = self.model.embed(rows)
            gradient = values if due == "gradient" else self._gradient(source, values, rows)
            self.model.learn(source, gradient.cpu().numpy(), rows)
        self._reported = (steps, self.optimiser.largest_weight(steps))

    def _take_head(self, answer: Packet) -> None:
        """Loads the server's model as it was at the start of the round."""
        state = {
            name: torch.from_numpy(np.array(answer[HEAD + name])).to(self.setup.device)
            for name in self.head.state_dict()
        }
        self.head.load_state_dict(state)

    def _without_own(self, shared: Tensor, released: Released | Contribution | Inside) -> Tensor:
        """The others' part of the snapshot: their sum, or all embeddings, one's own to be replaced."""
        if self.fusion.kind == "sum":
            if isinstance(released, Contribution):
                source: Tensor = released.source
                return shared - source.detach()
            return shared - torch.from_numpy(np.array(released.values, np.float32)).to(shared.device)
        return shared.transpose(0, 1)

    def _gradient(self, source: Tensor, others: Tensor, rows: Rows) -> Tensor:
        """Gradient of the batch's mean loss by the party's own, fresh embeddings."""
        own = source.detach().requires_grad_()
        if self.fusion.kind == "sum":
            fused = others + own
        else:
            fused = self.fusion([own if i == self.index else each for i, each in enumerate(others)])
        loss = task_loss(self.setup.data.task, self.head(fused), self._labels_of(rows))
        (gradient,) = torch.autograd.grad(loss, own)
        return gradient

    def state(self) -> dict[str, Any]:
        reported = None if self._reported is None else np.array(self._reported, np.float64)
        return super().state() | {"reported": reported}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        reported = state["reported"]
        self._reported = None if reported is None else (int(reported[0]), float(reported[1]))
