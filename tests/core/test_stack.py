"""The stack: decided on records that no training used, by the label holder alone, never under epsilon."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.algorithms.alone import reached_alone
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.stack import count_of, decide, given_back, held_back, records_held
from securevfl.errors import PlanError
from securevfl.privacy.ledger import read_records


def plan(**settings: object) -> Plan:
    return Plan(algorithm="sealed", epsilon=1.0, record_views=True, settings={"stack": True, **settings})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerticalData, Path]:
    data = VerticalData.load("credit")
    folder = tmp_path_factory.mktemp("stack") / "run"
    train(data, plan(), folder)
    return data, folder


@pytest.mark.parametrize("total", [200, 201, 999, 24_000, 32_561, 120_003])
def test_how_many_are_held_back_follows_from_what_is_left(total: int) -> None:
    assert records_held(total - count_of(total)) == count_of(total)


def test_every_record_keeps_its_index() -> None:
    data = VerticalData.load("credit")
    moved = held_back(data)
    assert moved.n_train == data.n_train - 1600 and moved.n_test == data.n_test + 1600
    for before, after in ((data.ids_train, moved.ids_train), (data.y_train, moved.y_train)):
        np.testing.assert_array_equal(before[: moved.n_train], after)
    ids = np.concatenate([data.ids_train, data.ids_test])
    np.testing.assert_array_equal(ids, np.concatenate([moved.ids_train, moved.ids_test]))
    for here, there in zip(data.described, moved.described, strict=True):
        rows = np.concatenate([here.train, here.test])
        np.testing.assert_array_equal(rows, np.concatenate([there.train, there.test]))


def test_it_is_no_worse_than_the_holders_trees(made: tuple[VerticalData, Path]) -> None:
    _, folder = made
    found = load_run(folder).result["stack"]
    assert found["used"] in ("stack", "trees", "sealed") and found["held_back"] == 1600
    # 4,000 test records with 15 % positives: a standard error of .01 for each AUC, of far less for their gap.
    assert found["test"]["auc"] >= found["trees"]["auc"] - 0.002
    assert set(found["decided"]) == {"sealed", "trees", "stack"}


def test_held_back_records_enter_no_training_and_no_epsilon(made: tuple[VerticalData, Path]) -> None:
    _, folder = made
    run = load_run(folder)
    assert all(spend["epsilon"] <= 1.0 for spend in run.privacy.values())
    opened = run.result["prediction"]["p1"]
    assert opened["scores"] == 1600 and opened["epsilon"] is None
    assert run.result["stack"]["guarantee"] == "no guarantee"
    for record in read_records(folder):
        if record.mode == "sealed" and not record.is_prediction and record.rows is not None:
            rows = np.asarray(record.rows)
            assert rows.min() == 16_000 if record.kind == "evaluation totals" else rows.max() < 14_400


def test_nothing_of_it_leaves_the_label_holder(made: tuple[VerticalData, Path], tmp_path: Path) -> None:
    """The same run without a stack sends all but nine messages: those that open scores."""
    data, folder = made
    again = train(held_back(data), Plan(algorithm="sealed", epsilon=1.0), tmp_path / "run")
    run = load_run(folder)
    assert run.result["messages"] == again.result["messages"] + 9
    assert audit(run, attacks="none", data=data).verdict == "holds"


def test_the_gate_takes_a_stack_only_for_a_clear_gain() -> None:
    """Scores of noise beside good trees: the trees are used as they are."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, 2)).astype(np.float32)
    labels = (rng.random(3000) < 1 / (1 + np.exp(-3 * rows[:, 0]))).astype(int)
    data = VerticalData.from_arrays(
        [rows[:, :1], rows[:, 1:]], labels[:], test=([rows[:500, :1], rows[:500, 1:]], labels[:500])
    )
    data = held_back(data)
    noise = rng.normal(size=(2, data.n_test))
    held = records_held(data.n_train)
    found = decide(data, noise[0], noise.sum(axis=0), held=held, seed=0)
    assert found["used"] == "trees"
    # Trees of all its records, the held-back ones too: exactly what it reaches alone.
    alone = reached_alone(given_back(data))
    assert alone is not None and found["test"]["auc"] == found["trees"]["auc"] == alone["trees"]
    # Between organisations the sums of test records are nobody's; what was decided is the same.
    apart = decide(data, noise[0][:held], noise.sum(axis=0)[:held], held=held, seed=0)
    assert apart == found


def test_scores_that_know_more_are_used() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(2500, 2)).astype(np.float32)
    labels = (rng.random(2500) < 1 / (1 + np.exp(-2 * rows.sum(axis=1)))).astype(int)
    blocks = [rows[:, :1], rows[:, 1:]]
    test = ([block[2000:] for block in blocks], labels[2000:])
    data = held_back(VerticalData.from_arrays([b[:2000] for b in blocks], labels[:2000], test=test))
    own, other = (2 * np.asarray(block, np.float64)[:, 0] for block in data.test)
    held = records_held(data.n_train)
    found = decide(data, own, own + other, held=held, seed=0)
    assert found["used"] in ("sealed", "stack") and found["test"]["auc"] > found["trees"]["auc"] + 0.03
    apart = decide(data, own[:held], (own + other)[:held], held=held, seed=0)
    assert apart == found | {"test": None}


def test_what_was_held_back_can_be_given_back() -> None:
    data = VerticalData.load("credit")
    again = given_back(held_back(data))
    for name in ("y_train", "y_test", "ids_train", "ids_test"):
        np.testing.assert_array_equal(getattr(again, name), getattr(data, name))
    for here, there in zip((*data.train, *data.test), (*again.train, *again.test), strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize(
    "data, changes, said",
    [
        ("diabetes", {"settings": {"stack": True, "label_low": 0.0, "label_high": 400.0}}, "two classes"),
        ("credit", {"label_holder": "server", "settings": {"stack": True}}, "no features of its own"),
        ("credit", {"model": "profile", "settings": {"stack": True}}, "a profile has no scores"),
    ],
)
def test_where_there_can_be_none(data: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        resolve(Plan(algorithm="sealed", epsilon=1.0, **changes), VerticalData.load(data))  # type: ignore[arg-type]
