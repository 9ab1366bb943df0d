"""Prediction with sealed models: right, counted apart, and refused where it would void a promise."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.accountants.modes import privacy_matrix
from securevfl.errors import BudgetExceeded
from securevfl.models import metrics
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View


def make(task="binary", parties=3):
    generator = np.random.default_rng(3)
    blocks = [generator.uniform(-2, 5, size=(80, 2)) for _ in range(parties)]
    score = sum(block[:, 0] for block in blocks) - 1.5 * parties
    labels = {"binary": score > 0, "multiclass": np.digitize(score, [-2, 2]), "regression": 50 + 7 * score}
    ids = [f"r{i}" for i in range(80)]
    return VerticalData.from_arrays(blocks, labels[task].astype(float), task=task, bounds=(-2, 5), ids=ids)


def strangers(data, count=None):
    return [f"n{i}" for i in range(data.n_test if count is None else count)]


PLANS = [
    ("binary", {}),
    ("binary", {"label_holder": "server"}),
    ("binary", {"wire": True, "collusion": 2}),
    ("binary", {"model": "mlp", "hidden": (3,)}),
    ("multiclass", {}),
    ("regression", {"label_low": 0.0, "label_high": 100.0}),
]


@pytest.mark.parametrize(("task", "fields"), PLANS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_predictions_measure_like_the_evaluation(task, fields, tmp_path: Path):
    data = make(task)
    run = train(
        data,
        Plan.from_flat({"algorithm": "sealed", "epsilon": 20.0, "epochs": 5, **fields}),
        tmp_path / "run",
    )
    for each in (run, load_run(tmp_path / "run")):
        found = each.predict(data.test, ids=strangers(data))
        if task == "binary":
            outputs = np.log(found / (1 - found))
        else:
            outputs = np.log(found) if task == "multiclass" else found
        values = torch.from_numpy(outputs.reshape(data.n_test, -1)).float()
        measured = metrics(task, values, torch.from_numpy(data.y_test.copy()))
        for name, value in run.test.items():
            assert measured[name] == pytest.approx(value, abs=1e-4), name


def test_the_saved_encoder_carries_its_preparation(tmp_path: Path):
    data = make()
    run = train(data, Plan(algorithm="sealed", epsilon=20.0, epochs=5), tmp_path / "run")
    blocks = zip(data.parties, data.scaled("public").test, strict=True)
    with torch.no_grad():
        scores = sum(run.encoders[party](torch.from_numpy(np.array(block))) for party, block in blocks)
        mine = torch.sigmoid(run.head(scores))[:, 0].numpy()
    # Rows are rounded toward zero at 2^-14, two columns in each of three parties, weights of norm 16 at most.
    assert np.abs(mine - run.predict(data.test, ids=strangers(data))).max() < 3 * 16 * 2**0.5 * 2.0**-14


# -- counting -----------------------------------------------------------------------------------------------


def test_predictions_are_counted_apart(tmp_path: Path):
    data = make()
    run = train(data, Plan(algorithm="sealed", epsilon=4.0, epochs=3), tmp_path / "run")
    before = run.privacy
    run.predict(data.test, ids=strangers(data))
    load_run(tmp_path / "run").predict([b[:3] for b in data.test], ids=strangers(data, 3))
    again = load_run(tmp_path / "run")
    assert again.privacy == before
    for owner in ("p1", "p2"):
        spent = again.result["prediction"][owner]
        assert spent["scores"] == data.n_test + 3
        assert spent["observers"] == ["p0"] and spent["epsilon"] is None
    assert "p0" not in again.result["prediction"]
    matrix = privacy_matrix(read_records(tmp_path / "run"), 1e-5)
    assert matrix["p1"]["p0"].predictions == data.n_test + 3
    assert matrix["p1"]["p2"].predictions == 0


def test_the_audit_shows_them_apart(tmp_path: Path):
    data = make()
    plan = Plan(algorithm="sealed", epsilon=4.0, epochs=3, record_views=True)
    run = train(data, plan, tmp_path / "run")
    run.predict(data.test, ids=strangers(data))
    report = audit(load_run(tmp_path / "run"), attacks=["mask-statistics"], data=data, canaries=-1)
    assert report.verdict == "holds"  # scores are recomputed from kept models and rows
    assert not [f for f in report.content["findings"] if f["verdict"] == "violated"]
    assert any("predicted records" in text for text in report.content["words"])
    seen = list(View(tmp_path / "run" / "views" / "p0").messages("sealed-score", sent=False))
    assert len(seen) == 2 and all(m.head is not None for m in seen)
    operands = list(View(tmp_path / "run" / "views" / "p0").messages("sealed-operand", sent=False))
    # Two of training, two of the evaluation: rows of new records leave nobody, masked or not.
    assert len(operands) == 4


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [{"epsilon": 4.0}, {"sigma": 30.0}], ids=["budget", "no budget"])
def test_records_that_were_trained_on_are_refused(noise, tmp_path: Path):
    data = make()
    run = train(data, Plan.from_flat({"algorithm": "sealed", "epochs": 2, **noise}), tmp_path / "run")
    entries = len(read_records(tmp_path / "run"))
    some = [block[:2] for block in data.train]
    with pytest.raises(BudgetExceeded, match="trained on or tested with"):
        run.predict(some, ids=[data.ids_train[0], "somebody new"])
    with pytest.raises(BudgetExceeded, match="trained on or tested with"):  # they have paid for evaluations
        run.predict([block[:1] for block in data.test], ids=data.ids_test[:1])
    with pytest.raises(BudgetExceeded, match="without IDs"):
        load_run(tmp_path / "run").predict(some)
    assert len(read_records(tmp_path / "run")) == entries
    assert run.predict(some, ids=["a", "b"]).shape == (2,)  # whoever lies about IDs is beyond help


def test_a_run_without_promise_predicts_anything():
    data = make()
    run = train(data, Plan(algorithm="sealed", epochs=2, batch=64, unprotected=True))
    assert run.predict(data.train).shape == (data.n_train,)
    assert run.predict(data.test, ids=data.ids_test).shape == (data.n_test,)


def test_own_networks_are_needed_again(tmp_path: Path):
    data = make(parties=2)
    own = {"p1": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))}
    run = train(
        data,
        Plan(algorithm="sealed", sigma=1.0, epochs=2, settings={"centring": 0.0}),
        tmp_path / "run",
        encoders=own,
    )
    like = {"p1": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))}
    again = load_run(tmp_path / "run", encoders=like)
    first = run.predict(data.test, ids=strangers(data))
    assert np.allclose(again.predict(data.test, ids=strangers(data)), first, atol=1e-7)
