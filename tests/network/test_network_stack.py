"""A stack between organisations: consented to by number, opened to the label holder, decided by it alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import EVERYTHING, Federation
from test_network_described import write_tables

from securevfl import audit
from securevfl.errors import SecureVFLError
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import read_records
from securevfl.settings.plan import Plan


def federation_in(folder: Path, *, dealt: bool = False, **accepts: Any) -> Federation:
    """Without a dealer two members encrypt; with one they may cheat and are caught."""
    # Among members that may cheat so many totals are needed to see whose noise they hold.
    epochs = 40 if dealt else 4
    plan = Plan(algorithm="sealed", model="linear", epsilon=8.0, epochs=epochs, settings={"stack": True})
    plan = plan.with_changes(record_views=True, scaling="none")
    federation = Federation(
        folder,
        plan,
        parties=("bank", "shop"),
        helpers=("dealer",) if dealt else (),
        test_fraction=0.3,
    )
    federation.tables = write_tables(folder)
    for name, member in federation.members.items():
        federation.members[name] = replace(member, accept=replace(EVERYTHING, **accepts))
    return federation


@pytest.fixture(scope="module", params=[False, True], ids=["no dealer", "dealer"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    federation = federation_in(tmp_path_factory.mktemp("stack"), dealt=request.param, held_back=49)
    return federation, asyncio.run(federation.run())


def test_the_label_holder_decides_alone(trained: Any) -> None:
    _, results = trained
    found = results["bank"]["stack"]
    assert found["held_back"] == 49 and found["guarantee"] == "no guarantee"
    assert set(found["decided"]) == {"sealed", "trees", "stack"}
    # Sums of test records are nobody's: only its own trees have an exact figure.
    assert (found["test"] is None) == (found["used"] != "trees")
    assert results["bank"]["alone"]["trees"] == found["trees"]["auc"]
    assert "stack" not in results["shop"] and "alone" not in results["shop"]


def test_held_back_records_are_counted_apart(trained: Any) -> None:
    federation, results = trained
    assert results["shop"]["prediction"]["shop"]["scores"] == 49
    assert results["shop"]["privacy"]["shop"]["epsilon"] <= 8.0
    for record in read_records(federation.folder / "shop"):
        if record.rows is not None and record.mode == "sealed" and not record.is_prediction and record.mu:
            rows = np.asarray(record.rows)
            assert rows.min() == 490 if record.kind == "evaluation totals" else rows.max() < 441
        if record.is_prediction:
            assert record.kind == "held back" and record.observers == ("bank",)
            np.testing.assert_array_equal(record.rows, np.arange(441, 490))


def test_the_joint_audit_says_what_is_promised_and_what_not(trained: Any, tmp_path: Path) -> None:
    federation, _ = trained
    gather([federation.folder / name for name in federation.names], tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    report = audit(tmp_path / "joint", attacks="none", data=data, canaries=-1)
    assert report.verdict == "holds", report.content["words"]
    opened = report.content["run"]["prediction"]["shop"]
    assert opened["scores"] == 49 and opened["epsilon"] is None


@pytest.mark.parametrize("accepts", [{"held_back": None}, {"held_back": 48}])
def test_nobody_is_held_back_without_consent(accepts: dict[str, Any], tmp_path: Path) -> None:
    federation = federation_in(tmp_path, **accepts)
    with pytest.raises(SecureVFLError, match=r"held_back|scored exactly for a stack"):
        asyncio.run(federation.run())
    assert not [r for r in read_records(tmp_path / "shop") if r.mu]
