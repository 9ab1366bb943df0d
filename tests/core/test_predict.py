"""Prediction for new records: the same figures as evaluation, through the gates, counted and refused."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from securevfl import Plan, Run, VerticalData, audit, load_run, train
from securevfl.accountants.records import Filter, ReleaseRecord
from securevfl.algorithms import SERVER
from securevfl.algorithms.messages import Absent
from securevfl.algorithms.prediction import PredictingParty
from securevfl.errors import AccountingError, BudgetExceeded, DataError, DropoutError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View

BOUNDS = (-6.0, 6.0)


def make(task: str = "binary", parties: int = 3, **more: Any) -> VerticalData:
    generator = np.random.default_rng(3)
    blocks = [generator.normal(2.0, 1.5, size=(60, 2)) for _ in range(parties)]
    score = sum(block[:, 0] for block in blocks) - 2.0 * parties
    labels = {"binary": score > 0, "multiclass": np.digitize(score, [-1, 1]), "regression": 50 + 7 * score}
    return VerticalData.from_arrays(
        blocks, labels[task].astype(float), task=task, bounds=BOUNDS, ids=[f"r{i}" for i in range(60)], **more
    )


def exact(data: VerticalData, run: Run) -> Any:
    """The outputs on the test part, computed in one place."""
    scaled = data.scaled(run.plan.scaling)  # type: ignore[arg-type]
    with torch.no_grad():
        embeddings = [
            run.encoders[party].eval()(torch.from_numpy(np.array(block)))
            for party, block in zip(scaled.parties, scaled.test, strict=True)
        ]
        fused = sum(embeddings) if run.plan.fusion == "sum" else torch.cat(embeddings, dim=1)
        assert run.head is not None
        return run.head(fused).double().numpy()


PLANS = [
    {"algorithm": "vafl"},
    {"algorithm": "vafl-sync", "model": "mlp", "hidden": (4,)},
    {"algorithm": "vafl", "label_holder": "server", "wire": True, "latency": 0.5},
    {"algorithm": "vafl", "protocol": "two-tree"},
    {"algorithm": "vafl", "protocol": "pairwise", "label_holder": "server"},
    {"algorithm": "afsgd"},
    {"algorithm": "afsgd", "protocol": "two-tree"},
    {"algorithm": "fdml"},
    {"algorithm": "fdml", "protocol": "bfv"},
    {"algorithm": "fdml", "protocol": "ckks", "label_holder": "server"},
    {"algorithm": "flex"},
    {"algorithm": "central"},
    {"algorithm": "vafl", "encoder_training": "none"},
]


@pytest.mark.parametrize("fields", PLANS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_prediction_is_the_model_on_scaled_rows(fields: dict[str, Any], tmp_path: Path) -> None:
    data = make()
    run = train(
        data,
        Plan.from_flat({"algorithm": "vafl", "unprotected": True, "epochs": 1, "batch": 16, **fields}),
        tmp_path / "run",
    )
    expected = 1 / (1 + np.exp(-exact(data, run)[:, 0]))
    # Fixed point with 32 fraction bits and float32 messages: a few units of 1e-7.
    assert np.allclose(run.predict(data.test), expected, atol=1e-6)
    assert np.allclose(load_run(tmp_path / "run").predict(data.test), expected, atol=1e-6)


@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_tasks(task: str) -> None:
    data = make(task)
    run = train(data, Plan(algorithm="vafl", epochs=2, batch=16, unprotected=True))
    outputs = exact(data, run)
    if task == "multiclass":
        odds = np.exp(outputs)
        expected = odds / odds.sum(axis=1, keepdims=True)
    else:
        expected = outputs[:, 0] * data.y_train.std() + data.y_train.mean()
    assert np.allclose(run.predict(dict(zip(data.parties, data.test, strict=True))), expected, atol=1e-4)


def test_local_baseline_uses_the_label_holder_alone() -> None:
    data = make()
    run = train(data, Plan(algorithm="local", epochs=1))
    others = [np.zeros_like(block) for block in data.test[1:]]
    assert np.array_equal(run.predict(data.test), run.predict([data.test[0], *others]))


def test_sparse_rows() -> None:
    generator = np.random.default_rng(0)
    blocks = [sparse.random_array((50, 30), density=0.2, rng=generator, format="csr") for _ in range(2)]
    data = VerticalData.from_arrays(blocks, np.arange(50) % 2)
    run = train(data, Plan(algorithm="vafl", epochs=1, unprotected=True))
    dense = [block.toarray() for block in data.test]
    assert np.allclose(run.predict(data.test), run.predict(dense), atol=1e-6)


# -- counting -----------------------------------------------------------------------------------------------


def test_releases_stand_in_the_ledger_and_in_the_result(tmp_path: Path) -> None:
    data = make()
    run = train(data, Plan(algorithm="vafl", epochs=1, sigma=3.0), tmp_path / "run")
    before = dict(run.privacy["p1"])
    run.predict(data.test)
    written = [r for r in read_records(tmp_path / "run") if r.kind == "prediction"]
    assert {r.owner for r in written} == {"p1", "p2"}  # the label holder's own embeddings stay inside
    assert all(
        r.observers == ("p0",) and r.vectors == data.n_test and r.mechanism == "gaussian" for r in written
    )
    assert all(np.array_equal(r.rows, 60 + np.arange(data.n_test)) for r in written)  # type: ignore[arg-type]
    after = run.privacy["p1"]
    assert after["mu"] ** 2 - before["mu"] ** 2 == pytest.approx(data.n_test * (2 / 3.0) ** 2, rel=1e-9)
    assert load_run(tmp_path / "run").privacy == run.privacy


def test_noise_is_on_the_predictions() -> None:
    data = make(parties=2)
    run = train(data, Plan(algorithm="vafl", epochs=1, sigma=1.0))
    assert not np.allclose(run.predict(data.test), run.predict(data.test))


def test_modes_per_record_charge_ids_and_everybody_without_ids(tmp_path: Path) -> None:
    data = make()
    run = train(data, Plan(algorithm="vafl", encoder_training="none", sigma=4.0, epochs=1), tmp_path / "run")
    unit = (2 * 1.0 / 4.0) ** 2
    squares = lambda: round(run.privacy["p1"]["mu"] ** 2 / unit, 6)  # noqa: E731
    assert squares() == 1  # released once
    new = [block[:4] for block in data.test]
    run.predict(new, ids=["n0", "n1", "n2", "n3"])
    assert squares() == 1  # four strangers, one release each
    run = load_run(tmp_path / "run")
    run.predict(new, ids=["n0", "n1", "n2", "r7"])
    assert squares() == 2  # known again in another process
    run.predict(new)
    assert squares() == 2 + 4  # they may all be the same record


def test_over_budget_nothing_leaves(tmp_path: Path) -> None:
    data = make()
    run = train(
        data, Plan(algorithm="vafl", encoder_training="none", epsilon=2.0, epochs=1), tmp_path / "run"
    )
    for each in (run, load_run(tmp_path / "run")):
        entries = len(read_records(tmp_path / "run"))
        with pytest.raises(BudgetExceeded, match="prediction of 12 more"):
            each.predict(data.test, ids=data.ids_test)
        assert len(read_records(tmp_path / "run")) == entries
    assert run.predict(data.test, ids=[f"n{i}" for i in range(12)]).shape == (12,)


def test_the_audit_of_a_run_with_predictions_holds(tmp_path: Path) -> None:
    data = make()
    plan = Plan(algorithm="vafl", encoder_training="none", epsilon=4.0, epochs=1, record_views=True)
    run = train(data, plan, tmp_path / "run")
    run.predict(data.test, ids=[f"n{i}" for i in range(data.n_test)])
    seen = list(View(tmp_path / "run" / "views" / "p0").messages("prediction", sent=False))
    assert len(seen) == 2 and all(m.head is not None for m in seen)
    numbers = [m.number for m in View(tmp_path / "run" / "views" / "p0") if m.sent]
    assert len(set(numbers)) == len(numbers)
    report = audit(load_run(tmp_path / "run"), attacks="none", data=data)
    assert report.verdict != "violated"
    assert "violated" not in {each["verdict"] for each in report.content["findings"]}


def test_private_files(tmp_path: Path) -> None:
    train(make(), Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    files = sorted((tmp_path / "run" / "models").glob("*.json"))
    assert [path.stem for path in files] == ["p0", "p1", "p2", "server"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert json.loads(files[1].read_text())["scales"][0]["clip"] is False


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:2], "one block of rows for each of p0, p1, p2, found 2"),
        (lambda b: [b[0], b[1], b[2][:, :1]], r"party p2: rows have shape \(1,\)"),
        (lambda b: [b[0], b[1][:3], b[2]], r"have \[3, 12\] rows"),
        (lambda b: [block[:0] for block in b], "at least one"),
        (lambda b: [b[0], np.where(b[1] > 2, np.nan, b[1]), b[2]], "party p1: row .* is not a finite number"),
        (lambda b: {"p0": b[0], "p1": b[1], "x": b[2]}, "expected p0, p1, p2"),
        (lambda b: b[0], "one block of rows for each"),
    ],
)
def test_rows_that_do_not_fit(change: Any, message: str) -> None:
    data = make()
    run = train(data, Plan(algorithm="vafl", epochs=1, batch=60, unprotected=True))
    with pytest.raises(DataError, match=message):
        run.predict(change(data.test))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a"] * 12, "comes twice"),
        (["a"], "expected 12"),
        (np.zeros(12), "type float64"),
        ([None] * 12, "type"),
    ],
)
def test_ids_that_do_not_fit(ids: Any, message: str) -> None:
    data = make()
    run = train(data, Plan(algorithm="vafl", epochs=1, batch=60, unprotected=True))
    with pytest.raises(DataError, match=message):
        run.predict(data.test, ids=ids)


def test_own_encoders_are_needed_again(tmp_path: Path) -> None:
    data = make()
    mine = {"p1": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))}
    run = train(data, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run", encoders=mine)
    with pytest.raises(RunError, match="load_run"):
        load_run(tmp_path / "run").predict(data.test)
    like = {"p1": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))}
    again = load_run(tmp_path / "run", encoders=like)
    assert np.array_equal(again.predict(data.test), run.predict(data.test))


def test_missing_or_damaged_files(tmp_path: Path) -> None:
    data = make()
    train(data, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    path = tmp_path / "run" / "models" / "p1.json"
    path.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        load_run(tmp_path / "run").predict(data.test)
    path.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        load_run(tmp_path / "run").predict(data.test)


def test_scales_follow_the_columns() -> None:
    data = make().scaled("public").scaled("standard")
    again = data.split(2)
    raw = make().split(2)
    for steps, block, expected in zip(again.scales, raw.test, again.test, strict=True):
        for step in steps:
            block = step(block)
        assert np.array_equal(block, expected)


def test_a_filter_grows() -> None:
    budget = Filter(mode="frozen", budget_mu=1.0, records=2)
    late = ReleaseRecord(
        owner="a", mechanism="gaussian", clip=1.0, sigma=4.0, rows=np.array([4]), mode="frozen"
    )
    with pytest.raises(AccountingError, match="out of range"):
        budget.check(late)
    budget.grow(5)
    budget.charge(late)
    budget.grow(3)  # never shrinks
    assert budget.records == 5 and budget.spent_mu == 0.5


# -- one writer at a time ------------------------------------------------------------------------------------


def test_a_folder_serves_one_prediction_at_a_time(tmp_path: Path) -> None:
    data = make()
    run = train(data, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    script = """
import sys
from pathlib import Path
from securevfl.federation.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        entries = len(read_records(tmp_path / "run"))
        with pytest.raises(RunError, match="in use: another process"):
            run.predict(data.test)
        with pytest.raises(RunError, match="in use"):
            load_run(tmp_path / "run").predict(data.test)
        assert len(read_records(tmp_path / "run")) == entries
        other.communicate("")
    assert run.predict(data.test).shape == (data.n_test,)


def test_the_lock_holds_within_a_process_too(tmp_path: Path) -> None:
    files = RunFolder(tmp_path / "run")
    files.create(Plan(algorithm="vafl", unprotected=True))
    with files.locked(), pytest.raises(RunError, match="in use"), files.locked():
        pass


def test_a_score_is_never_of_a_sum_that_somebody_is_missing_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training above a threshold goes on without a party; a score would be of another model, unsaid."""
    data = make(parties=4)
    run = train(
        data, Plan(algorithm="vafl", protocol="pairwise", threshold=3, epochs=1, batch=16, unprotected=True)
    )
    join = PredictingParty._join

    async def leaving(self: PredictingParty, message: Any) -> None:
        if self.address == "p2":
            await self.link.send(SERVER, Absent())
        else:
            await join(self, message)

    monkeypatch.setattr(PredictingParty, "_join", leaving)
    with pytest.raises(DropoutError, match="p2 is gone, and this phase needs everybody"):
        run.predict(list(data.test))
