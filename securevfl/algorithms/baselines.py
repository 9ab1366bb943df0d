"""What federated training is measured against: all features in one place, and the label holder's alone.

Neither is federated: `central` is what the parties would get by pooling their data, `local` what the label
holder has without them. Nothing leaves anybody, so there is nothing to account for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Algorithm, Finished, Role, ServerRole, Setup
from securevfl.algorithms.local import Records, Trained, trainable
from securevfl.algorithms.roles import LabelHolder
from securevfl.algorithms.steps import build_batches, build_optimiser
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models import Fusion
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan


class PooledTrainer(LabelHolder):
    """Trains the whole block model, encoders and head, on one machine."""

    kept = (*LabelHolder.kept, "models", "batches")

    def __init__(self, setup: Setup, parties: tuple[str, ...]) -> None:
        super().__init__(setup)
        plan, data = setup.plan, setup.data
        indices = [data.parties.index(party) for party in parties]
        self.records = [Records(data.train[i], data.test[i], setup.device) for i in indices]
        self.models: dict[str, Trained] = {}
        for name in (*parties, SERVER):
            module = setup.head if name == SERVER else setup.encoders[name]
            rate = setup.server_rate if name == SERVER else setup.rate(name)
            parameters = trainable(module)
            optimiser = build_optimiser(parameters, plan, rate, name) if parameters else None
            self.models[name] = Trained(name, module, optimiser)
        self.encoders = nn.ModuleList([self.models[party].module for party in parties])
        self.fusion = Fusion(plan.fusion, (plan.embedding,) * len(parties))
        self.batches = build_batches(setup)

    def _outputs(self, rows: Rows) -> Tensor:
        embeddings = [
            encoder(records[rows]) for encoder, records in zip(self.encoders, self.records, strict=True)
        ]
        outputs: Tensor = self.models[SERVER].module(self.fusion(embeddings))
        return outputs

    async def epoch(self) -> None:
        target = (self.epochs_done + 1) * self.setup.data.n_train
        count = len(self.setup.data.parties)
        self.encoders.train()
        while self.processed < target:
            rows = self.batches.next()
            self._losses.append(self._step(rows))
            self.processed += len(rows)
            self.setup.report(self.processed * count, self._losses[-1])
        self._close_epoch()
        Trained(self.setup.plan.algorithm, self.encoders, None).check_finite()

    def _step(self, rows: Rows) -> float:
        optimisers = [model.optimiser for model in self.models.values() if model.optimiser is not None]
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self._mean_loss(self._outputs(rows), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in optimisers:
            optimiser.step()
        return float(loss.detach())

    async def evaluate(self) -> None:
        self.encoders.eval()
        with torch.no_grad():
            self.test = self._measure(torch.cat([self._outputs(rows) for rows in self.test_pieces]))


class PooledPredictor(Finished, ServerRole):
    """Applies a model that is in one place, as the baselines train it."""

    def __init__(self, setup: Setup, parties: tuple[str, ...]) -> None:
        self.setup, self.parties = setup, parties

    async def evaluate(self) -> None:
        data, plan = self.setup.data, self.setup.plan
        rows = np.arange(data.n_train)
        embeddings = []
        with torch.no_grad():
            for party in self.parties:
                block = data.train[data.parties.index(party)]
                encoder = self.setup.encoders[party].eval()
                embeddings.append(encoder(Records(block, block[:0], self.setup.device)[rows]))
            fusion = Fusion(plan.fusion, (plan.embedding,) * len(self.parties))
            self.predictions = self.setup.head.eval()(fusion(embeddings))


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


class PooledPredicting(Algorithm):
    """Applies the model of a baseline; nothing leaves anybody."""

    name = "predict-pooled"
    summary = "applies a baseline's model to new records"
    federated = False

    def role(self, setup: Setup, address: str) -> Role:
        """One role that does everything."""
        alone = setup.plan.algorithm == "local"
        return PooledPredictor(setup, (setup.label_holder,) if alone else setup.data.parties)
