"""What federated training is measured against: all features in one place, and the label holder's alone.

Neither is federated: `central` is what the parties would get by pooling their data, `local` what the label
holder has without them. Nothing leaves anybody, so there is nothing to account for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Algorithm, Finished, Role, ServerRole, Setup
from securevfl.algorithms.local import Learner, Records
from securevfl.algorithms.roles import LabelHolder, pieces
from securevfl.algorithms.solved import BoostedTrees, fit_linear
from securevfl.algorithms.steps import build_batches, build_optimiser, regularised
from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.errors import PlanError
from securevfl.models import Fusion
from securevfl.models.encoders import LinearEncoder
from securevfl.models.heads import SumHead
from securevfl.privacy.rows import Rows
from securevfl.settings.families import FULL_BATCH
from securevfl.settings.plan import Plan

TREES = "trees"
SOLVED = "exact"
"""The optimiser of models that are solved as a whole."""
HELD_OUT = 0.1
"""Share of the training records by whose loss a network is stopped."""
STEPS = 4000
"""Steps that a network may take at most, of records that follow their number."""
_STEPWISE = (
    "epochs",
    "batch",
    "learning_rate",
    "learning_rates",
    "server_learning_rate",
    "optimiser",
    "optimisers",
    "decay",
    "patience",
    "embedding",
    "fusion",
    "head",
)


def joined(plan: Plan, parties: tuple[str, ...]) -> Callable[[Sequence[Tensor]], Tensor]:
    """How the parties' embeddings become the head's input; trees take the columns side by side."""
    if plan.model == TREES:
        return lambda blocks: torch.cat([block.flatten(1) for block in blocks], dim=1)
    return Fusion(plan.fusion, plan.widths(parties))


def pooled_trees(data: VerticalData, *, alone: bool) -> BoostedTrees:
    """Boosted trees on everybody's columns, or on the label holder's."""
    columns = dict(zip(data.parties, card_columns(data), strict=True))
    used = [data.label_holder] if alone else list(data.parties)
    return BoostedTrees([column for party in used for column in columns[party]], data.outputs)


class PooledTrainer(LabelHolder):
    """Trains the whole block model, encoders and head, on one machine.

    Where the plan is patient and the model a network, a tenth of the training records is held out: the loss
    is theirs, and the model is the one that had the least.
    """

    kept = (*LabelHolder.kept, "models", "batches", "best", "least")

    def __init__(self, setup: Setup, parties: tuple[str, ...]) -> None:
        super().__init__(setup)
        plan, data = setup.plan, setup.data
        indices = [data.parties.index(party) for party in parties]
        self.records = [Records(data.train[i], data.test[i], setup.device) for i in indices]
        self.models: dict[str, Learner] = {}
        for name in (*parties, SERVER):
            module = setup.head if name == SERVER else setup.encoders[name]
            rate = setup.server_rate if name == SERVER else setup.rate(name)
            groups = regularised(module.named_parameters(), plan, name)
            optimiser = build_optimiser(groups, plan, rate, name) if groups else None
            self.models[name] = Learner(name, module, optimiser)
        self.encoders = nn.ModuleList([self.models[party].module for party in parties])
        self.join = joined(plan, parties)
        holds = plan.patience > 0 and plan.models(parties) != {"linear"} and data.n_train >= 20
        self.held_out = np.arange(data.n_train - holds * round(HELD_OUT * data.n_train), data.n_train)
        count = data.n_train - len(self.held_out)
        self.batches = build_batches(setup, records=count)
        self.best: dict[str, dict[str, Tensor]] = {}
        self.least = np.inf

    def _outputs(self, rows: Rows) -> Tensor:
        embeddings = [
            encoder(records[rows]) for encoder, records in zip(self.encoders, self.records, strict=True)
        ]
        outputs: Tensor = self.models[SERVER].module(self.join(embeddings))
        return outputs

    async def epoch(self) -> None:
        target = (self.epochs_done + 1) * self.batches.records
        count = len(self.setup.data.parties)
        self.encoders.train()
        losses: list[Tensor] = []
        while self.processed < target:
            rows = self.batches.next()
            losses.append(self._step(rows))
            self.processed += len(rows)
            if self.setup.report is not None:
                # Elsewhere than on the CPU a number now would make every step wait.
                shown = losses[-1].item() if losses[-1].device.type == "cpu" else self.loss
                self.setup.report(self.processed * count, shown)
        self._losses = torch.stack(losses).cpu().tolist()
        if len(self.held_out):
            self._look_at_held_out()
        self._close_epoch()
        Learner(self.setup.plan.algorithm, self.encoders, None).check_finite()

    def _look_at_held_out(self) -> None:
        """The epoch's loss is that of the records held out; the best model is kept."""
        self.encoders.eval()
        with torch.no_grad():
            now = float(self._mean_loss(self._outputs(self.held_out), self.held_out))
        self._losses = [now]
        if now < self.least:
            self.best = {
                name: {key: value.clone() for key, value in model.module.state_dict().items()}
                for name, model in self.models.items()
            }
            self.least = now

    def _step(self, rows: Rows) -> Tensor:
        optimisers = [model.optimiser for model in self.models.values() if model.optimiser is not None]
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self._mean_loss(self._outputs(rows), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in optimisers:
            optimiser.step()
        return loss.detach()

    async def evaluate(self) -> None:
        for name, state in self.best.items():
            self.models[name].module.load_state_dict(state)
        self.encoders.eval()
        with torch.no_grad():
            self.test = self._measure(torch.cat([self._outputs(rows) for rows in self.test_pieces]))


class SolvedTrainer(PooledTrainer):
    """Fits the whole model at once, to convergence: linear ones and boosted trees."""

    async def epoch(self) -> None:
        data, head = self.setup.data, self.models[SERVER].module
        rows = [records.first(data.n_train) for records in self.records]
        pooled = (
            sparse.hstack(rows).tocsr()
            if all(map(sparse.issparse, rows))
            else np.hstack([*map(_dense, rows)])
        )
        if isinstance(head, BoostedTrees):
            head.fit(head.raw(pooled), data.y_train, task=data.task, seed=self.setup.plan.seed)
        else:
            self._solve(pooled)
        with torch.no_grad():
            outputs = torch.cat([self._outputs(piece) for piece in pieces(0, data.n_train)])
            self._losses = [float(self._mean_loss(outputs, np.arange(data.n_train)))]
        self.processed = data.n_train
        if self.setup.report is not None:
            self.setup.report(self.processed * len(data.parties), self._losses[-1])
        self._close_epoch()

    def _solve(self, rows: Any) -> None:
        """Writes the solution into the parties' weights and the head's bias."""
        data, head = self.setup.data, self.models[SERVER].module
        linear = [encoder for encoder in self.encoders if isinstance(encoder, LinearEncoder)]
        if not isinstance(head, SumHead) or len(linear) < len(self.encoders):
            raise PlanError(
                f"optimiser {SOLVED!r} solves the plan's own linear model; train modules of your own in "
                "steps: name epochs and an optimiser"
            )
        weights, biases = fit_linear(
            rows, data.y_train, task=data.task, outputs=data.outputs, l2=self.setup.plan.l2
        )
        ends = np.cumsum([encoder.output.in_features for encoder in linear])
        with torch.no_grad():
            for encoder, part in zip(linear, np.split(weights, ends[:-1], axis=1), strict=True):
                encoder.output.weight.copy_(torch.from_numpy(part))
            head.bias.copy_(torch.from_numpy(biases))


def _dense(rows: Any) -> Any:
    return rows.toarray() if sparse.issparse(rows) else rows


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
            self.predictions = self.setup.head.eval()(joined(plan, self.parties)(embeddings))


class Central(Algorithm):
    """All features in one place."""

    name = "central"
    summary = "baseline, not federated: the same block model trained on pooled features"
    federated = False
    optimisers = (*Algorithm.optimisers, SOLVED)

    def parties(self, setup: Setup) -> tuple[str, ...]:
        """Whose features are used."""
        return setup.data.parties

    def role(self, setup: Setup, address: str) -> Role:
        """One role that does everything."""
        kind = SolvedTrainer if setup.plan.optimiser == SOLVED else PooledTrainer
        return kind(setup, self.parties(setup))

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Trains to convergence where the plan says nothing about steps: a baseline must not underfit."""
        usual = Plan(algorithm=plan.algorithm)
        l2 = 1 / data.n_train if plan.l2 == usual.l2 else plan.l2  # scikit-learn's usual C = 1
        stepwise = any(getattr(plan, name) != getattr(usual, name) for name in _STEPWISE)
        if plan.model == TREES:
            return plan.with_changes(
                optimiser=SOLVED,
                epochs=1,
                batch=FULL_BATCH,
                embedding=1,
                fusion="sum",
                head="sum",
                scaling="none",
            )
        solvable = plan.model in ("linear", "auto") and not plan.encoders and plan.loss == "auto"
        if plan.optimiser == SOLVED or (solvable and not stepwise):
            if not solvable:
                raise PlanError(
                    f"optimiser {SOLVED!r} is for models 'linear' and 'trees' of all parties with their "
                    f"usual loss, not for {plan.model!r} with loss {plan.loss!r}"
                )
            return plan.with_changes(
                model="linear",
                optimiser=SOLVED,
                l2=l2,
                epochs=1,
                batch=FULL_BATCH,
                embedding=data.outputs,
                fusion="sum",
                head="sum",
            )
        if stepwise:
            return plan
        batch = min(256, max(16, data.n_train // 20))
        epochs = max(20, min(500, -(-STEPS * batch // data.n_train)))
        return plan.with_changes(
            optimiser="adam", learning_rate=0.003, batch=batch, epochs=epochs, patience=max(5, epochs // 10)
        )


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
