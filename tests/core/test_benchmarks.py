"""The benchmarks keep up with the code: all can be imported, and the one of training takes its steps."""

from __future__ import annotations

import importlib
import math
import pkgutil
from pathlib import Path

import numpy as np
import pytest

from securevfl.data import VerticalData

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


def test_a_chance_crossing_of_the_target_does_not_count() -> None:
    afsgd = importlib.import_module("benchmarks.papers.afsgd")
    times, gaps = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.1, 0.9, 0.2, 0.1, 0.3]
    assert afsgd.settled((times, gaps), 0.5, 2) == 3.0
    assert afsgd.settled((times, gaps), 0.5, 0) == 1.0
    assert math.isinf(afsgd.settled((times, gaps), 0.5, 3)), "the run ends before it has stayed that long"


def test_rates_are_tuned_by_walking_the_grid_both_ways() -> None:
    afsgd = importlib.import_module("benchmarks.papers.afsgd")
    tried: list[float] = []

    def cost(rate: float) -> float:
        tried.append(rate)
        return math.inf if rate > 2 else abs(math.log10(rate / 0.2))

    assert afsgd.climb(1.0, cost) == (0.2, 0.0)
    assert tried == [1.0, 2.0, 0.5, 0.2, 0.1]
    assert afsgd.climb(10.0, cost) == (0.2, 0.0), "rates that never get there are passed on the way down"


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
