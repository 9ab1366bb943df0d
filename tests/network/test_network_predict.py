"""Predicting over gRPC with a model that was trained over gRPC: right, counted, confirmed, and not repeated."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation, identities

from securevfl import load_run
from securevfl.accountants.modes import privacy_matrix
from securevfl.algorithms import recommended
from securevfl.errors import BudgetExceeded, DataError, InputError, NetworkError, ProtocolError, RunError
from securevfl.folder import RunFolder
from securevfl.ledger import read_ledger, read_records
from securevfl.network.config import Acceptance
from securevfl.network.gather import gather
from securevfl.network.predicting import PredictingConductor, PredictingMember, read_new_records
from securevfl.plan import Plan
from securevfl.trained import Trained

PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, learning_rate=0.5)
COUNT = 7


def new_rows(names: Sequence[str], count: int = COUNT, seed: int = 5) -> dict[str, np.ndarray]:
    """New people's features, by party."""
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-1, 1, (count, 3)).astype(np.float32) for name in names}


def strangers(count: int = COUNT, first: int = 0) -> list[str]:
    return [f"new{i:03d}" for i in range(first, first + count)]


class Prediction:
    """All processes of one prediction, with a file of new records for each.

    Args:
        federation: Who, with their configurations as in training.
        blocks: Party -> features of the new records.
        ids: Their IDs, for everybody or by party.
        out: Name of the scores' file.
    """

    def __init__(
        self,
        federation: Federation,
        blocks: Mapping[str, np.ndarray],
        ids: Sequence[str] | Mapping[str, Sequence[str]],
        out: str = "scores.csv",
    ) -> None:
        self.federation, self.said = federation, dict[str, list[str]]()
        self.out = federation.folder / out
        self.files = {}
        for name, block in blocks.items():
            mine = ids[name] if isinstance(ids, Mapping) else ids
            self.files[name] = write_table(federation.folder / f"new-{name}.csv", mine, block)

    def conductor(self) -> PredictingConductor:
        config, name = self.federation.server, self.federation.names[0]
        new = read_new_records(config, self.files[name])
        return PredictingConductor(config, new=new, out=self.out, say=self._listener(name))

    def member(self, name: str, **options: Any) -> PredictingMember:
        config = self.federation.members[name]
        new = read_new_records(config, self.files.get(name, Path("-")))
        return PredictingMember(config, new=new, say=self._listener(name), **options)

    def _listener(self, name: str) -> Any:
        return self.said.setdefault(name, []).append

    def nodes(self) -> dict[str, Any]:
        members = {name: self.member(name) for name in self.federation.members}
        return {self.federation.names[0]: self.conductor()} | members

    def run(self, **given: Any) -> dict[str, Any]:
        """Runs everybody, or what is given instead; organisation -> result or error."""

        async def all_of_them() -> list[Any]:
            async with asyncio.timeout(60):
                return await asyncio.gather(
                    *(node.run() for node in nodes.values()), return_exceptions=True
                )

        nodes = self.nodes() | given
        return dict(zip(nodes, asyncio.run(all_of_them()), strict=True))

    def scores(self) -> dict[str, list[float]]:
        with self.out.open(newline="") as file:
            _, *lines = csv.reader(file)
        return {line[0]: [float(cell) for cell in line[1:]] for line in lines}


def write_table(path: Path, ids: Sequence[str], block: np.ndarray) -> Path:
    """Columns in another order than in training, and one that training never had."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["note", "x2", "id", "x0", "x1"])
        table.writerows(["?", row[2], each, row[0], row[1]] for each, row in zip(ids, block.tolist(), strict=True))
    return path


def trained(folder: Path, plan: Plan = PLAN, **options: Any) -> Federation:
    federation = Federation(folder, plan, **options)
    asyncio.run(federation.run())
    return federation


def joint_predictions(
    federation: Federation, blocks: Mapping[str, np.ndarray], ids: Sequence[str]
) -> np.ndarray:
    """What the model gives in one process, from everybody's folder; its ledgers are copies."""
    folder = federation.folder
    gather([folder / name for name in federation.names if name != "dealer"], folder / "joint")
    return load_run(folder / "joint").predict(dict(blocks), ids=list(ids))


def predictions_of(folder: Path) -> list[Any]:
    return [record for record in read_records(folder) if record.kind == "prediction"]


def fine(results: Mapping[str, Any]) -> None:
    for name, each in results.items():
        assert isinstance(each, dict), f"{name}: {each!r}"


# -- scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["relayed", "direct"])
@pytest.mark.parametrize(
    ("algorithm", "protocol"),
    [
        ("vafl-sync", "plain"),
        ("vafl-sync", "two-tree"),
        ("vafl-sync", "bfv"),
        ("vafl", "pairwise"),
        ("flex", "plain-tree"),
        ("fdml", "ckks"),
        ("fsgd", "two-tree"),
    ],
)
def test_scores_are_those_of_the_same_model_in_one_process(tmp_path, algorithm, protocol, direct):
    federation = trained(tmp_path, PLAN.with_changes(algorithm=algorithm, protocol=protocol), direct=direct)
    blocks, ids = new_rows(federation.names), strangers()
    prediction = Prediction(federation, blocks, ids)
    fine(prediction.run())
    expected = joint_predictions(federation, blocks, ids)
    found = prediction.scores()
    assert list(found) == ids
    assert len(set(np.round(expected, 4))) > 3  # the model tells people apart
    # Both take float32 embeddings; CKKS sums are exact to 2^-20.
    np.testing.assert_allclose([found[each][0] for each in ids], expected, rtol=0, atol=3e-6)
    assert stat.S_IMODE(prediction.out.stat().st_mode) == 0o600
