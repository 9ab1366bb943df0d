"""Prediction for new records: the trained model's roles run once more, and what they release counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special
from torch import nn

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import Algorithm, find_algorithm
from securevfl.algorithms.baselines import PooledPredicting
from securevfl.algorithms.prediction import Predicting
from securevfl.algorithms.sealed.prediction import SealedPredicting
from securevfl.data import VerticalData
from securevfl.errors import RunError
from securevfl.federation.folder import RunFolder
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.trained import Trained
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import kept_records, read_records
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model with everything that releases of new records need.

    Attributes:
        plan: The resolved plan of the run.
        folder: The run's folder; None if it is kept in memory.
        encoders: Trained encoders by party; those that are missing are read from the folder.
        head: The label holder's trained model, or None to read it.
        trained: Of a run in memory: how new rows are taken, and which records have paid.
        gates: Of a run in memory: the gates that go on counting, by organisation.
    """

    plan: Plan
    folder: RunFolder | None = None
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    head: nn.Module | None = None
    trained: Trained | None = None
    gates: Mapping[str, Gate] = field(default_factory=dict)

    def predict(self, blocks: Sequence[Any] | Mapping[str, Any], ids: Sequence[Any] | None) -> Floats:
        """See `securevfl.federation.run.Run.predict`."""
        with nullcontext() if self.folder is None else self.folder.locked():
            return self._predict(blocks, ids)

    def _predict(self, blocks: Sequence[Any] | Mapping[str, Any], ids: Sequence[Any] | None) -> Floats:
        trained = self._trained()
        rows = trained.take(blocks)
        carrier = self._carrier(trained, rows, self._algorithm(trained, ids, rows.n_train))
        try:
            drive(Schedule(carrier).predict())
        finally:
            self._finish(trained, carrier)
        return in_label_units(rows, carrier.server.predictions.detach().cpu().double().numpy())

    def records(self) -> list[ReleaseRecord]:
        """All releases so far."""
        if self.folder is not None:
            return written_records(self.folder.path)
        return [record for gate in self.gates.values() for record in kept_records(gate.ledger)]

    def _trained(self) -> Trained:
        """A folder is read anew each time: others may have predicted with it meanwhile."""
        if self.folder is not None:
            return Trained.load(self.folder)
        if self.trained is None:
            raise RunError("this run keeps no model to predict with")
        return self.trained

    def _algorithm(self, trained: Trained, ids: Sequence[Any] | None, count: int) -> Algorithm:
        if not find_algorithm(self.plan.algorithm).federated:
            return PooledPredicting()
        numbers = trained.number(ids, count)
        if self.folder is not None:
            trained.save_records(self.folder)  # before anything is charged to these indices
        return predicting(self.plan, numbers, identified=ids is not None)

    def _carrier(self, trained: Trained, rows: VerticalData, algorithm: Algorithm) -> VirtualCarrier:
        for gate in self.gates.values():
            gate.budget.grow(trained.records)
        carrier = VirtualCarrier(
            self.plan,
            rows,
            folder=self.folder,
            encoders=self.encoders,
            head=self.head,
            algorithm=algorithm,
            records=trained.records,
            gates=self.gates,
        )
        carrier.time = trained.time
        for link in carrier.network.links.values():
            link.number = trained.messages
        return carrier

    def _finish(self, trained: Trained, carrier: VirtualCarrier) -> None:
        trained.time = carrier.time
        trained.messages = max(link.number for link in carrier.network.links.values())
        if self.folder is not None:
            trained.save_records(self.folder)
            carrier.ask("write_observed")
            carrier.close()


def predicting(plan: Plan, numbers: Rows, *, identified: bool) -> Algorithm:
    """The roles that apply a federated model to new records.

    Args:
        plan: The resolved plan of the run.
        numbers: Record index of each new record.
        identified: False where the records have no IDs, so that they may be earlier ones.
    """
    if plan.mode == "sealed":
        return SealedPredicting(numbers if identified else None)
    # In mode strict every record pays for every release anyway.
    return Predicting(numbers, all_new=identified or plan.mode == "strict")


def written_records(folder: Path) -> list[ReleaseRecord]:
    """The releases of a run's ledgers; none where nothing could leave."""
    return read_records(folder) if (folder / "ledger").is_dir() else []


def in_label_units(data: VerticalData, outputs: Floats) -> Floats:
    """Chances of classes, or values in the units of the labels, from a model's outputs."""
    if data.task == "multiclass":
        chances: Floats = special.softmax(outputs, axis=1)
        return chances
    if data.task == "binary":
        chance: Floats = special.expit(outputs[:, 0])
        return chance
    mean, deviation = data.label_scaling or (0.0, 1.0)
    return outputs[:, 0] * deviation + mean
