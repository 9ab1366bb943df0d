"""Baselines as good as one place can be: solved linear models, boosted trees, networks that stop in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from securevfl import Plan, VerticalData, load_run, train
from securevfl.algorithms.solved import BoostedTrees, fit_linear
from securevfl.data.columns import Column, code_columns
from securevfl.errors import PlanError
from securevfl.sklearn import VerticalClassifier

NUMBER = Column(name="x", missing="bin")
LONG = Column(name="far", kind="category", values=(*(f"v{i}" for i in range(300)), "other"), missing="error")
COLOUR = Column(name="colour", kind="category", values=("red", "green", "blue", "other"))
FLAG = Column(name="flag", kind="flag", missing="error")
COLUMNS = (NUMBER, COLOUR, LONG, FLAG)


def raw_rows(rows: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    raw = np.column_stack(
        [
            draw.normal(size=rows),
            draw.integers(0, 4, rows),
            draw.integers(0, 301, rows),
            draw.integers(0, 2, rows),
        ]
    ).astype(float)
    raw[draw.random(rows) < 0.1, 0] = np.nan
    raw[draw.random(rows) < 0.1, 1] = np.nan
    return raw


@pytest.mark.parametrize("task, outputs", [("binary", 1), ("multiclass", 3), ("regression", 1)])
def test_trees_are_those_of_scikit_learn(task: str, outputs: int) -> None:
    """Missing values, categories that training has not seen, long lists: leaf by leaf the same outputs."""
    raw, fresh = raw_rows(600, 0), raw_rows(400, 1)
    raw = raw[raw[:, 1] != 2]  # blue is in the new rows alone
    signal = np.nan_to_num(raw[:, 0]) + (raw[:, 1] == 1) * 1.5 + raw[:, 3]
    labels = signal if task == "regression" else np.digitize(signal, np.quantile(signal, [0.4, 0.7]))
    labels = (labels > 0).astype(float) if task == "binary" else labels
    trees = BoostedTrees(COLUMNS, outputs)
    trees.fit(trees.raw(code_columns(COLUMNS, raw)), labels, task=task, seed=0)
    kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
    theirs: Any = kind(categorical_features=[False, True, False, False], random_state=0)
    theirs.fit(raw.astype(np.float32), labels)
    ours = trees(torch.from_numpy(code_columns(COLUMNS, fresh))).numpy()
    expected = theirs._raw_predict(fresh.astype(np.float32))
    # The same leaves; sums of 100 values of size below 10 in another order.
    np.testing.assert_allclose(ours, expected.reshape(ours.shape), atol=1e-10)


@pytest.mark.parametrize(
    "labels, outputs", [([0.0] * 30, 1), ([1.0] * 30, 1), ([1, 3] * 15, 4), ([2] * 30, 4)]
)
def test_classes_that_training_has_not(labels: list[float], outputs: int) -> None:
    rows = np.random.default_rng(0).normal(size=(30, 2))
    rows[:, 0] += np.array(labels)
    task = "binary" if outputs == 1 else "multiclass"
    trees = BoostedTrees([Column(name=n, missing="error") for n in "ab"], outputs)
    trees.fit(rows, np.array(labels), task=task, seed=0)
    weights, biases = fit_linear(rows, np.array(labels), task=task, outputs=outputs, l2=1e-3)
    for found in (trees(torch.from_numpy(rows)).numpy(), rows @ weights.T + biases):
        decided = (found[:, 0] > 0).astype(int) if outputs == 1 else found.argmax(axis=1)
        assert set(decided) <= set(map(int, labels))


def test_linear_baselines_are_solved() -> None:
    data = VerticalData.load("breast-cancer", parties=3)
    run = train(data, Plan(algorithm="central"))
    rows, fresh = np.hstack(data.train), np.hstack(data.test)
    scaler = StandardScaler().fit(rows)
    theirs = LogisticRegression(max_iter=5000, tol=1e-8).fit(scaler.transform(rows), data.y_train)
    expected = roc_auc_score(data.y_test, theirs.decision_function(scaler.transform(fresh)))
    # A pair of the 42 x 72 test records may change places by the solver's tolerance.
    assert run.test["auc"] == pytest.approx(expected, abs=2 / 3000)
    assert run.plan.optimiser == "exact" and run.plan.epochs == 1 and not run.privacy
    scores = theirs.predict_proba(scaler.transform(fresh))[:, 1]
    np.testing.assert_allclose(run.predict(data.test), scores, atol=1e-3)


def test_steps_that_are_asked_for_are_taken() -> None:
    data = VerticalData.load("breast-cancer")
    run = train(data, Plan(algorithm="local", epochs=3))
    assert run.plan.optimiser == "sgd" and run.result["epochs"] == 3


def test_networks_stop_by_records_held_out() -> None:
    data = VerticalData.load("breast-cancer")
    run = train(data, Plan(algorithm="central", model="mlp"))
    assert run.stopped is not None and run.result["epochs"] < run.plan.epochs
    assert run.test["auc"] >= 0.99
    assert run.result["loss"] >= min(line["loss"] for line in run.metrics)


def test_trees_are_saved_and_read_back(tmp_path: Path) -> None:
    data = VerticalData.load("credit")
    run = train(data, Plan(algorithm="local", model="trees"), tmp_path / "run")
    linear = train(data, Plan(algorithm="local"))
    assert run.test["auc"] > linear.test["auc"] + 0.05  # the set has a shape that linear models miss
    again = load_run(tmp_path / "run")
    np.testing.assert_array_equal(again.predict(data.test), run.predict(data.test))


def test_trees_for_several_classes_and_values() -> None:
    digits = train(VerticalData.load("digits"), Plan(algorithm="local", model="trees"))
    assert digits.test["accuracy"] > 0.8
    values = train(VerticalData.load("diabetes"), Plan(algorithm="central", model="trees"))
    assert values.test["r2"] > 0.3


def test_trees_belong_to_baselines() -> None:
    data = VerticalData.load("breast-cancer")
    with pytest.raises(PlanError, match=r"trees.*central.*local"):
        train(data, Plan(algorithm="vafl", model="trees", sigma=1.0))
    with pytest.raises(PlanError, match="'linear' and 'trees'"):
        train(data, Plan(algorithm="central", model="mlp", optimiser="exact"))


def test_trees_as_estimator() -> None:
    data = VerticalData.load("breast-cancer")
    X, y = np.hstack(data.train), data.y_train
    model = VerticalClassifier(algorithm="central", model="trees").fit(X, y)
    theirs = HistGradientBoostingClassifier(random_state=0).fit(X.astype(np.float32), y)
    ours = model.predict_proba(np.hstack(data.test))
    assert np.abs(ours - theirs.predict_proba(np.hstack(data.test).astype(np.float32))).max() < 1e-6
