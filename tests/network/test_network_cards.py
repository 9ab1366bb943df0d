"""Cards of several classes and of numbers between two organisations and a dealer, audited jointly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation

from securevfl import audit
from securevfl.data.share import OwnTable
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import read_records
from securevfl.settings.plan import Plan

PARTIES, ROWS = ("bank", "shop"), 900
CLASSES = ("bad", "fair", "good")
RANGE = {"label_low": 0.0, "label_high": 150.0}


def write_tables(task: str) -> dict[str, OwnTable]:
    """Columns with shapes that no line follows, at both; labels at the bank."""
    rng = np.random.default_rng(0)
    blocks = {name: rng.uniform(-3, 3, (ROWS, 4)).astype(np.float32) for name in PARTIES}
    wave, step = 2 * np.cos(2 * blocks["bank"][:, 0]), 1.5 * (blocks["shop"][:, 1] > 1)
    labels: Any = 60 + 15 * wave + 15 * step + rng.normal(0, 8, ROWS)
    if task == "multiclass":
        scores = np.stack([wave, step, np.zeros(ROWS)], axis=1) + rng.gumbel(size=(ROWS, 3))
        labels = np.array(CLASSES)[scores.argmax(axis=1)]
    ids = [f"c{i:04d}" for i in range(ROWS)]
    return {
        name: OwnTable.from_arrays(block, ids=ids, labels=labels if name == "bank" else None)
        for name, block in blocks.items()
    }


@pytest.fixture(scope="module", params=["multiclass", "regression"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = RANGE if request.param == "regression" else {}
    plan = Plan(algorithm="sealed", model="scorecard", epsilon=8.0, record_views=True, settings=settings)
    federation = Federation(
        tmp_path_factory.mktemp("card"), plan, parties=PARTIES, helpers=("dealer",), test_fraction=0.3
    )
    federation.tables = write_tables(request.param)
    return federation, asyncio.run(federation.run())


def test_the_joint_audit_tests_every_path_of_a_card(trained: Any, tmp_path: Path) -> None:
    federation, results = trained
    assert results["bank"]["model"] == "scorecard" and results["bank"]["stopped"] is None
    joint = tmp_path / "joint"
    gather([federation.folder / name for name in federation.names], joint)
    # Sound noise is called violated with probability 3e-10 (a tenth of delta / (1 + e^8)), masks and released
    # values with 1e-6 each at most: the levels of `ErrorBudget`.
    report = audit(joint, attacks="none", data=load_truth(joint, federation.tables), canaries=-1)
    assert report.verdict == "holds", report.content["words"]
    assert {finding["verdict"] for finding in report.content["findings"]} == {"holds"}
    kinds = {record.kind for record in read_records(joint) if record.mu}
    assert kinds >= {"bins", "label histogram", "first fit", "last fit"}
    assert kinds <= {finding["path"] for finding in report.content["findings"]}
    cells = [cell for row in report.content["owners"].values() for cell in row["observers"].values()]
    assert len(cells) >= 2 and all(cell["epsilon_upper"] <= 8.0 + 1e-6 for cell in cells)
