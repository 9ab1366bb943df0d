"""The benchmarks keep up with the code: all can be imported, and the one of training takes its steps."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

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
