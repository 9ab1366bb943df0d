"""A run keeps torch to one thread while its steps are small, and leaves the process as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_info

from securevfl import Plan, VerticalData, audit, train
from securevfl.federation import threads
from securevfl.models import threads as models

DATA = VerticalData.load("synthetic:rows=100,features=8,informative=4")
PLAN = Plan(algorithm="vafl", sigma=1.0, epochs=1)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen(plan: Plan) -> set[int]:
    """How many threads there were at every step of a run."""
    counts: set[int] = set()
    train(DATA, plan, progress=lambda now: counts.add(torch.get_num_threads()))
    assert torch.get_num_threads() == 2
    return counts


def test_small_steps_have_one_thread() -> None:
    assert seen(PLAN) == {1}


def test_large_steps_keep_torchs_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LARGE", threads.step_work(PLAN, DATA) - 1)
    assert seen(PLAN) == {2}


def test_the_users_own_number_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert seen(PLAN) == {2}


def pools() -> set[int]:
    """Threads of OpenMP's and of linear algebra's pools."""
    return {pool["num_threads"] for pool in threadpool_info()}


def test_boosted_trees_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are OpenMP's, not torch's, and belong to what the label holder reaches alone."""
    fit, counts = HistGradientBoostingClassifier.fit, []
    monkeypatch.setattr(
        HistGradientBoostingClassifier,
        "fit",
        lambda *given: (counts.append(pools()), fit(*given))[1],
    )
    before = pools()
    train(DATA, Plan(algorithm="central", model="trees"))
    assert counts == [{1}] and pools() == before


def test_an_audit_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: set[int] = set()
    train(DATA, PLAN, tmp_path / "run")
    found = audit(
        tmp_path / "run",
        attacks="none",
        data=DATA,
        canaries=-1,
        progress=lambda *_: counts.update(pools(), [torch.get_num_threads()]),
    )
    assert found is not None and counts == {1} and torch.get_num_threads() == 2


def test_a_run_that_fails_leaves_the_process_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="stop"):
        train(DATA, PLAN, progress=lambda now: (_ for _ in ()).throw(RuntimeError("stop")))
    assert torch.get_num_threads() == 2


def test_work_counts_batch_columns_and_width() -> None:
    wide = Plan(algorithm="vafl", model="mlp", hidden=(32, 16), batch=64, sigma=1.0)
    assert threads.step_work(wide, DATA) == 64 * 4 * 32  # 4 of 8 columns each
    assert threads.step_work(Plan(algorithm="sealed", epsilon=1.0), DATA) == DATA.n_train * 4
