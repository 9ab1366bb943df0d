"""Plans: one to one with TOML, and every contradiction is one clear line."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from securevfl.algorithms.resolve import evaluation_count, planned_releases, resolve
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan


def test_toml_round_trip(tmp_path: Path) -> None:
    plan = Plan(
        algorithm="vafl-tsync",
        hidden=(8, 4),
        sigma=0.25,
        speeds={"p1": 2.0},
        data='with "quotes"\\',
        wire=True,
    )
    assert Plan.from_mapping(tomllib.loads(plan.to_toml())) == plan
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml())
    assert Plan.from_toml(path) == plan


def test_every_field_is_documented() -> None:
    documented = Plan.__doc__ or ""
    assert [f.name for f in fields(Plan) if f"        {f.name}: " not in documented] == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sigma": -1.0}, "sigma is -1.0; it must be a number of 0 or more"),
        ({"sigma": math.nan}, "sigma is nan"),
        ({"clip": 0.0}, "clip is 0.0; it must be a number above 0"),
        ({"delta": 0.0}, "delta is 0.0; it must lie between 0 and 1"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"epochs": 0}, "epochs is 0; at least 1"),
        ({"batch": "many"}, "batch is 'many'; expected int"),
        ({"wire": 1}, "wire is 1; expected bool"),
        ({"seed": -3}, "seed is -3"),
        ({"protocol": "two-trees"}, "did you mean 'two-tree'"),
        ({"optimiser": "sdg"}, "did you mean 'sgd'"),
        ({"sigma": 1.0, "epsilon": 2.0}, "exclude each other"),
        ({"budget_epsilon": 1.0}, "stops at the first release"),
        ({"encoder_training": "dp"}, "needs sigma and gradient_sigma"),
        ({"gradient_sigma": 1.0}, "belongs to encoder_training 'dp'"),
        ({"encoder_training": "none", "scaling": "standard"}, "couples records"),
        ({"protocol": "bfv", "fusion": "concat"}, "cannot serve fusion 'concat'"),
        ({"speeds": {"p1": 0}}, "speeds of 'p1' is 0"),
        ({"speeds": 3}, "speeds is 3; expected a table"),
        ({"learning_rates": [1, 2]}, r"learning_rates is \[1, 2\]; expected a table"),
        ({"active": 5}, "active is 5; expected a list"),
        ({"active": "p0"}, "active is 'p0'; expected a list"),
        ({"hidden": 3}, "hidden is 3; expected a list"),
        ({"optimisers": {"p1": 5}}, "unknown optimiser 5; known are adam"),
        ({"delays": "trace"}, "needs delay_trace"),
        ({"sigma": 1e300}, r"sigma is 1e\+300; values have 32 bits"),
    ],
)
def test_contradictions(changes: dict, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Plan(**changes)


def test_unknown_fields_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no field 'sigm'; did you mean 'sigma'"):
        Plan.from_mapping({"sigm": 1})
    with pytest.raises(PlanError, match="did you mean 'epochs'"):
        Plan().with_changes(epoch=3)
    with pytest.raises(PlanError, match=r"no field 'zzz'; known are active, algorithm, .*, wire"):
        Plan().with_changes(zzz=3)
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(PlanError, match="is not TOML"):
        Plan.from_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(("training", "mode"), [("raw", "strict"), ("dp", "dp-encoder"), ("none", "frozen")])
def test_the_mode_follows_from_the_plan(training: str, mode: str) -> None:
    assert Plan(encoder_training=training, epsilon=1.0).mode == mode


@pytest.fixture(scope="module")
def data() -> VerticalData:
    return VerticalData.load("breast-cancer", parties=3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "vaffle"}, "unknown algorithm 'vaffle'"),
        ({"algorithm": "vafl-tsync", "wait_for": 4}, "wait_for between 1 and 3, or 0 for half .*, not 4"),
        ({"speeds": {"p9": 1.0}}, "names 'p9'"),
        ({"algorithm": "local", "label_holder": "server"}, "it has none"),
        ({"algorithm": "fdml", "active": ("p0", "p1")}, "'fdml' has no passive ones"),
    ],
)
def test_plans_that_do_not_fit_the_data(data: VerticalData, changes: dict, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        resolve(Plan(**changes), data)


@pytest.mark.parametrize(
    ("parties", "given", "taken"), [(1, 0, 1), (2, 0, 2), (3, 0, 2), (7, 0, 3), (7, 5, 5)]
)
def test_t_of_the_t_synchronous_algorithm(parties: int, given: int, taken: int) -> None:
    data = VerticalData.load("breast-cancer", parties=parties)
    plan, _ = resolve(Plan(algorithm="vafl-tsync", wait_for=given), data)
    assert plan.wait_for == taken


def test_private_scaling_is_refused_outside_strict_mode(data: VerticalData) -> None:
    with pytest.raises(PlanError, match="statistics of private rows"):
        resolve(Plan(encoder_training="none", sigma=1.0), data.scaled("standard"))
    plan, scaled = resolve(Plan(encoder_training="none", sigma=1.0), data)
    assert plan.scaling == scaled.scaling == "public"
    assert resolve(Plan(), data)[0].scaling == "standard"


def test_evaluations_are_counted() -> None:
    assert [evaluation_count(Plan(epochs=10, evaluate_every=n)) for n in (0, 1, 3, 10, 99)] == [
        1,
        10,
        4,
        1,
        1,
    ]


def test_planned_releases_cover_every_kind(data: VerticalData) -> None:
    plan, _ = resolve(Plan(epochs=4, batch=32, evaluate_every=2, delay_bound=5), data)
    planned = planned_releases(plan, data)
    # initial upload, 4 passes, worst-case refreshes, two evaluations, and two batches of slack
    assert planned.vectors == data.n_train * (1 + 4 + 4 * 3) + 2 * 32 + 2 * data.n_test
