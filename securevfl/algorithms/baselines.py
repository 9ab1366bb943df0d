"""What federated training is measured against: all features in one place, and the label holder's alone.

Neither is federated: `central` is what the parties would get by pooling their data, `local` what the label
holder has without them. Nothing leaves anybody, so there is nothing to account for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Algorithm, Role, ServerRole, Setup
from securevfl.algorithms.batches import Batches
from securevfl.algorithms.local import Records, check_finite
from securevfl.algorithms.optimisers import build_optimiser, load_optimiser_state, optimiser_state
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models import Fusion, metrics, task_loss
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan


class PooledTrainer(ServerRole):
    """Trains the whole block model, encoders and head, on one machine."""

    def __init__(self, setup: Setup, parties: tuple[str, ...]) -> None:
        self.setup = setup
        plan, data = setup.plan, setup.data
        self.parties = parties
        indices = [data.parties.index(party) for party in parties]
        self.records = [Records(data.train[i], data.test[i], setup.device) for i in indices]
        self.encoders = nn.ModuleList([setup.encoders[party] for party in parties])
        self.head = setup.head
        self.fusion = Fusion(plan.fusion, (plan.embedding,) * len(parties))
        self.optimisers = self._optimisers()
        self.labels = torch.from_numpy(np.concatenate([data.y_train, data.y_test])).to(setup.device)
        self.batches = Batches(data.n_train, plan.batch, numpy_generator(plan.seed, "batches", 0))
        self.processed = 0
        self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        setup = self.setup
        owners = [(party, setup.encoders[party], setup.rate(party)) for party in self.parties]
        owners.append((SERVER, self.head, setup.server_rate))
        chosen = [
            ([p for p in module.parameters() if p.requires_grad], rate, name) for name, module, rate in owners
        ]
        return [
            build_optimiser(parameters, setup.plan, rate, name)
            for parameters, rate, name in chosen
            if parameters
        ]

    def _outputs(self, rows: Rows) -> Tensor:
        embeddings = [
            encoder(records[rows]) for encoder, records in zip(self.encoders, self.records, strict=True)
        ]
        outputs: Tensor = self.head(self.fusion(embeddings))
        return outputs

    async def epoch(self) -> None:
        losses = []
        target = (self.epochs_done + 1) * self.setup.data.n_train
        count = len(self.setup.data.parties)
        self.encoders.train()
        while self.processed < target:
            rows = self.batches.next()
            losses.append(self._step(rows))
            self.processed += len(rows)
            self.setup.report(self.processed * count, losses[-1])
        self.epochs_done += 1
        self.loss = float(np.mean(losses))
        check_finite(self.setup.plan.algorithm, self.encoders)

    def _step(self, rows: Rows) -> float:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = task_loss(self.setup.data.task, self._outputs(rows), self.labels[torch.from_numpy(rows)])
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in self.optimisers:
            optimiser.step()
        return float(loss.detach())

    async def evaluate(self) -> None:
        data = self.setup.data
        rows = np.arange(data.n_train, data.n_train + data.n_test, dtype=np.int64)
        self.encoders.eval()
        with torch.no_grad():
            self.predictions = torch.cat(
                [self._outputs(piece) for piece in np.array_split(rows, -(-len(rows) // 1024))]
            )
        self.test = metrics(data.task, self.predictions, self.labels[data.n_train :])

    def state(self) -> dict[str, Any]:
        return {
            "encoders": dict(self.encoders.state_dict()),
            "head": dict(self.head.state_dict()),
            "optimisers": {str(i): optimiser_state(each) for i, each in enumerate(self.optimisers)},
            "batches": self.batches.state(),
            "processed": self.processed,
            "epochs_done": self.epochs_done,
            "loss": self.loss,
            "test": self.test,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.encoders.load_state_dict(state["encoders"])
        self.head.load_state_dict(state["head"])
        for number, optimiser in enumerate(self.optimisers):
            load_optimiser_state(optimiser, state["optimisers"][str(number)])
        self.batches.load(state["batches"])
        self.processed, self.epochs_done = int(state["processed"]), int(state["epochs_done"])
        self.loss, self.test = state["loss"], state["test"]


class Central(Algorithm):
    """All features in one place."""

    name = "central"
    summary = "baseline, not federated: the same block model trained on pooled features"
    federated = False

    def parties(self, setup: Setup) -> tuple[str, ...]:
        """Whose features are used."""
        return setup.data.parties

    def role(self, setup: Setup, address: str) -> Role:
        """One role that does everything."""
        return PooledTrainer(setup, self.parties(setup))


class Local(Central):
    """The label holder's features alone."""

    name = "local"
    summary = "baseline, not federated: the label holder trains on its own features"

    def parties(self, setup: Setup) -> tuple[str, ...]:
        """The label holder."""
        return (setup.label_holder,)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """The label holder needs features."""
        if plan.label_holder == "server" or data.label_holder not in data.parties:
            raise PlanError("algorithm 'local' trains on the label holder's features, but it has none")
