"""The benchmarks keep up with the code: all can be imported, and the one of training takes its steps."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from securevfl import Plan, VerticalData
from securevfl.algorithms.resolve import resolve
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_all_can_be_imported() -> None:
    package = importlib.import_module("benchmarks")
    names = [each.name for each in pkgutil.walk_packages(package.__path__, "benchmarks.")]
    assert "benchmarks.papers.afsgd" in names and "benchmarks.network" in names
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)


@pytest.mark.parametrize("algorithm", ["vafl", "vafl-sync"])
@pytest.mark.parametrize("ledger", [True, False])
def test_training_is_measured(algorithm: str, ledger: bool) -> None:
    core = importlib.import_module("benchmarks.core")
    data = VerticalData.load("synthetic", parties=2)
    assert core.runtime(data, ledger=ledger, algorithm=algorithm, batch=100)() > 0


def test_points_are_measured_once_for_the_same_code(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = importlib.import_module("benchmarks.papers.common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "commit", lambda: "abc1234")
    made: list[int] = []

    def point(points, seed: int) -> float:
        return points.get({"plan": {"rate": 0.1}, "seed": seed}, lambda: made.append(seed) or math.inf)

    first = common.Points("trial")
    assert [point(first, seed) for seed in (1, 1, 2)] == [math.inf] * 3 and made == [1, 2]
    assert first.figures_of() == "Figures of commit `abc1234`."
    again = common.Points("trial", seconds=-1)
    assert point(again, 2) == math.inf and made == [1, 2], "another process goes on from there"
    with pytest.raises(common.OutOfTime):
        point(again, 3)
    monkeypatch.setattr(common, "code_digest", lambda: "other")
    monkeypatch.setattr(common, "commit", lambda: "def5678")
    newer = common.Points("trial")
    point(newer, 1)
    assert made == [1, 2, 1], "other code measures anew"
    older = common.Points("trial", older=True)
    assert (point(older, 1), point(older, 2)) == (math.inf, math.inf) and made == [1, 2, 1]
    assert older.figures_of() == "Figures of commit `abc1234`, `def5678`.", "its own where there is one"


def test_a_section_that_there_was_no_time_for_stays_as_the_page_has_it(tmp_path, monkeypatch) -> None:
    common = importlib.import_module("benchmarks.papers.common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "commit", lambda: "abc1234")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n## Table 1: old title\n\nFigures of commit `0000000`.\n\n"
        "## Table 10: x\n\nold\n\n## Table 2\n\nold\n"
    )
    points = common.Points("trial")
    points.get({"seed": 1}, lambda: 0.5)
    points.end = -math.inf

    def made(seed: int) -> list[str]:
        return [str(points.get({"seed": 1}, lambda: 0)), str(points.get({"seed": seed}, lambda: 0))]

    found = common.sections(
        page,
        points,
        {"Table 1: longer title": lambda: made(2), "Table 2": lambda: made(1), "Table 3": lambda: made(3)},
    )
    first = "## Table 1: old title\n\nFigures of commit `0000000`."
    assert found == [first, "## Table 2", "Figures of commit `abc1234`.", "0.5", "0.5"]


@pytest.mark.parametrize("estimator", ["sgd", "svrg", "saga"])
def test_the_loops_take_the_steps_of_the_product(estimator: str, monkeypatch) -> None:
    sets = importlib.import_module("benchmarks.papers.afsgd_sets")
    parts = importlib.import_module("benchmarks.papers.afsgd_parts")
    afsgd = importlib.import_module("benchmarks.papers.afsgd")
    data = sets.deal(sets.prepare(VerticalData.load("breast-cancer", parties=2)), 4)
    problem = sets.pose("trial", data, dict.fromkeys(("sgd", "svrg", "saga"), 1e-9), 20)
    plan = {"batch": problem.batch, "learning_rate": 0.2, "l2": problem.l2, "epochs": 3, "seed": 3}
    plan |= {"decay": "none", "sampling": "draws", "latency": parts.LATENCY, "snapshot_every": 1}
    plan |= {"scaling": "none", "protocol": "plain-tree", "unprotected": True, "speeds": {"p3": 0.25}}
    monkeypatch.setattr(parts, "PASSES", {estimator: 3})
    for prefix, method in afsgd.FACTOR_OF.items():
        mine = Plan.from_flat({**plan, "algorithm": prefix + estimator})
        times, gaps = afsgd.measure(problem, mine, 1e-9)
        run = parts.Run(
            problem=problem, method=method, estimator=estimator, rate=0.2, slower=3.0, seed=3, inner=1
        )
        curve = parts.follow(run)
        if prefix == "f":  # the very steps, and the clock but for the messages of full gradients
            count = min(len(gaps), len(curve[1]))
            assert count > 50 and gaps[:count] == pytest.approx(curve[1][:count], rel=1e-6)
            assert times[:count] == pytest.approx(curve[0][:count], abs=0.5)
        else:  # the product's steps end with an epoch, so that after as many passes the path is not the same
            assert gaps[-1] == pytest.approx(curve[1][-1], rel=0.1)


def test_the_loops_take_asynchrony_apart() -> None:
    sets = importlib.import_module("benchmarks.papers.afsgd_sets")
    parts = importlib.import_module("benchmarks.papers.afsgd_parts")
    data = sets.prepare(VerticalData.load("breast-cancer", parties=2))
    problem = sets.pose("trial", data, dict.fromkeys(("sgd", "svrg", "saga"), 0.2), 20)
    took = {}
    for method in parts.METHODS:
        for estimator in ("sgd", "svrg", "saga"):
            settings = {"problem": problem, "estimator": estimator, "slower": 3.0, "seed": 0, "inner": 2}
            curve = parts.follow(parts.Run(method=method, rate=0.5, **settings))
            took[method.name, estimator] = parts.settled(curve, 0.2, 25)
    assert all(map(math.isfinite, took.values()))
    for estimator in ("sgd", "svrg", "saga"):
        assert took["own pace", estimator] < took["own batches", estimator], "a barrier waits for the slowest"
    full = 20 * 4.0  # a pass of the straggler, before anybody steps behind a barrier
    assert took["one batch", "saga"] >= full + 4.1 > took["own pace", "saga"]


def test_gradient_norms_of_runs_are_set_beside_their_bounds() -> None:
    bounds = importlib.import_module("benchmarks.papers.bounds")
    data, points = VerticalData.load("breast-cancer", parties=bounds.PARTIES), SimpleNamespace(get=_make)
    for case in bounds.CASES:
        found = bounds.measured(points, case, data, 0, 1)
        assert 0 < found["mean"][-1] < found["bound"]
        assert found["iterations"] == len(found["mean"]) >= 10
    plan = Plan(l2=0.1, batch=10, algorithm="vafl", unprotected=True)
    objective = bounds.Objective(plan, data, [True, False, True])
    weights = np.random.default_rng(0).normal(size=len(objective.pulled)) / 1000
    gradient, step = objective.value(weights)[1], 1e-5 * np.eye(len(weights))
    for place in (0, len(weights) - 2, len(weights) - 1):  # weights and a bias
        ends = [objective.value(weights + sign * step[place])[0] for sign in (1, -1)]
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)


def test_parties_upload_as_often_as_the_bounds_say() -> None:
    bounds = importlib.import_module("benchmarks.papers.bounds")
    assert bounds.upload_shares(3, 1) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert sum(bounds.upload_shares(3, 2)) == pytest.approx(2)
    data = VerticalData.load("breast-cancer", parties=3)
    for case in bounds.CASES[1:3]:
        plan = {**bounds.COMMON, "algorithm": case.algorithm, "epochs": 8, "seed": 0, **case.fields}
        carrier = VirtualCarrier(*resolve(Plan.from_flat(plan | {"learning_rate": 1e-4}), data))
        server, uploads = carrier.roles[0], list[str]()
        iterate = server._iterate

        async def count(messages, iterate=iterate, uploads=uploads):
            uploads.extend(message.sender for message in messages)
            await iterate(messages)

        server._iterate = count
        drive(Schedule(carrier).train())
        iterations = len(uploads) / case.together
        if case.together == 1:  # and whoever uploaded before does not matter
            share, pairs = bounds.upload_shares(3, 1)[0] ** 2, len(uploads) - 1
            twice = sum(pair == ("p0", "p0") for pair in itertools.pairwise(uploads))
            # Neighbouring pairs overlap: their variance is at most three times that of independent ones.
            assert abs(twice / pairs - share) < 3.5 * math.sqrt(3 * share * (1 - share) / pairs)
        for party, share in zip(data.parties, bounds.upload_shares(3, case.together), strict=True):
            error = math.sqrt(share * (1 - share) / iterations)  # of a mean of independent draws
            assert abs(uploads.count(party) / iterations - share) < 3.5 * error


def _make(_: object, make: Callable[[], object]) -> object:
    return make()


def test_a_chance_crossing_of_the_target_does_not_count() -> None:
    afsgd = importlib.import_module("benchmarks.papers.afsgd_parts")
    times, gaps = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.1, 0.9, 0.2, 0.1, 0.3]
    assert afsgd.settled((times, gaps), 0.5, 2) == 3.0
    assert afsgd.settled((times, gaps), 0.5, 0) == 1.0
    assert math.isinf(afsgd.settled((times, gaps), 0.5, 3)), "the run ends before it has stayed that long"


def test_rates_are_tuned_by_walking_both_ways_from_the_same_one(monkeypatch) -> None:
    afsgd = importlib.import_module("benchmarks.papers.afsgd")
    tried: list[tuple[float, float]] = []

    def time(self, method, rate, seed, factor=1.0, *, until=math.inf) -> float:
        tried.append((rate, until))
        return math.inf if rate > most else 1 + abs(math.log10(rate / 0.2))

    monkeypatch.setattr(afsgd.Bench, "time", time)
    problem = SimpleNamespace(name="trial")
    bench, most = afsgd.Bench(points=None, problem=problem, estimator="saga"), 2.0
    assert bench.tuned(afsgd.SYNCHRONOUS) == (0.2, 1.0)
    assert [rate for rate, _ in tried] == [1.0, 2.0, 0.5, 0.2, 0.1]
    assert tried[0][1] == math.inf and tried[-1][1] == 1.0
    most = 0.5
    tried.clear()
    assert bench.tuned(afsgd.SYNCHRONOUS) == (0.2, 1.0), (
        "rates that never get there are passed on the way down"
    )
    assert [rate for rate, _ in tried] == [1.0, 2.0, 0.5, 0.2, 0.1]


def test_figure_seven_counts_the_steps_of_the_clock() -> None:
    afsgd = importlib.import_module("benchmarks.papers.afsgd")
    rows = [line.split(" | ") for line in afsgd.figure_seven(8).splitlines()]
    assert [row[-1].rstrip(" |") for row in rows if row[1] == "all"] == ["8.0", "26.8"]  # 7 * 4.12 / 1.12 + 1
    assert afsgd.clock_bound(4, 3.0) == pytest.approx(3.25)
    assert afsgd.clock_bound(8, 3.0) == pytest.approx(3.625)


def test_records_with_gaps_are_left_out_and_ages_become_columns() -> None:
    sets = importlib.import_module("benchmarks.papers.afsgd_sets")
    rows = [[30, 5, 0, 7], [41, 0, 1, 8], [30, 6, 0, 9], [52, 4, 0, 1]]
    columns = ["age", "MonthlyIncome", "MonthlyIncome missing", "lines"]
    data = VerticalData.from_arrays(
        [np.array(rows, np.float32)],
        np.array([0, 1, 1, 0]),
        test=([np.array(rows[:1], np.float32)], np.array([0])),
        columns=[columns],
        task="binary",
    )
    made = sets.ages_as_columns(data)
    assert made.train[0].tolist() == [[5, 7, 1, 0], [6, 9, 1, 0], [4, 1, 0, 1]]
    assert made.y_train.tolist() == [0, 1, 0] and made.test[0].tolist() == [[5, 7, 1, 0]]
