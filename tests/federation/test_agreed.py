"""The enforcer at each site: what the agreement does not contain is refused, whoever asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.resolve import resolve
from securevfl.errors import AgreementError
from securevfl.federation.agreed import Enforcer, Timetable
from securevfl.federation.forecast import forecast, rounded
from securevfl.privacy.ledger import Ledger, read_ledger
from securevfl.privacy.rows import Rows

PLAN = Plan(algorithm="vafl", epochs=3, batch=4, evaluate_every=1)
WHOLE = [
    ("prepare", 0),
    ("epoch", 1),
    ("evaluate", 1),
    ("epoch", 2),
    ("evaluate", 2),
    ("epoch", 3),
    ("final", 3),
]


def table(plan: Plan = PLAN, restarts: int | None = 2) -> Timetable:
    return Timetable.of_training(plan, parties=2, n_train=10, n_test=5, restarts=restarts)


def after(count: int, **given: Any) -> Enforcer:
    enforcer = Enforcer(table(**given))
    for part, epoch in WHOLE[:count]:
        enforcer.begin(part, epoch)
    return enforcer


def test_a_run_as_agreed_goes_through() -> None:
    after(len(WHOLE))


@pytest.mark.parametrize("count", range(len(WHOLE) + 1))
def test_nothing_comes_twice_and_nothing_else_comes(count: int) -> None:
    """Every part of every epoch after every beginning of the run: only what lies ahead is let through."""
    for part in ("prepare", "epoch", "evaluate", "final", "predict", "idle"):
        for epoch in range(-1, 6):
            enforcer = after(count)
            done = WHOLE[:count]
            reached = max((each for _, each in done), default=0)
            ahead = (part, epoch) in WHOLE[count:]
            ends = part == "final" and done[-1:] != [WHOLE[-1]] and max(0, reached - 1) <= epoch <= 3
            if ahead or (ends and (not done or epoch >= reached - 1)):
                enforcer.begin(part, epoch)
                continue
            with pytest.raises(AgreementError):
                enforcer.begin(part, epoch)


def test_going_back_is_counted_over_processes_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "clinic.jsonl"

    def process(*parts: tuple[str, int, int | None]) -> Enforcer:
        enforcer = Enforcer(table(restarts=2), read_ledger(path) if path.exists() else ())
        ledger = Ledger("clinic", path, agreement="a" * 64)
        try:
            for part, epoch, back in parts:
                enforcer.begin(part, epoch, back)
                ledger.begin(part, epoch, back)
        finally:
            ledger.close()
        return enforcer

    assert process(("prepare", 0, -1), ("epoch", 1, None)).restarts == 0
    assert process(("epoch", 1, 0), ("evaluate", 1, None), ("epoch", 2, None)).restarts == 1
    with pytest.raises(AgreementError, match="begins again"):
        process(("epoch", 2, None))
    assert process(("epoch", 2, 1)).restarts == 2
    with pytest.raises(AgreementError, match="gone back 2 times; 2 were agreed on"):
        process(("epoch", 2, 1))
    assert [entry.content.get("part") for entry in read_ledger(path)].count("epoch") == 4


@pytest.mark.parametrize(("part", "epoch", "back"), [("epoch", 1, 1), ("epoch", 2, 2), ("epoch", 1, -1)])
def test_going_back_leads_to_what_follows(part: str, epoch: int, back: int) -> None:
    with pytest.raises(AgreementError, match="does not follow"):
        after(4).begin(part, epoch, back)


# -- records ------------------------------------------------------------------------------------------------


def release(rows: list[int], kind: str = "evaluation") -> tuple[str, tuple[str, ...], Rows, int]:
    return kind, ("bank",), np.array(rows, np.int64), len(rows)


def test_an_evaluation_is_of_the_test_part_and_of_each_record_once() -> None:
    enforcer = after(3)  # evaluate 1
    enforcer.check_release(*release([10, 11]))
    enforcer.check_release(*release([12, 14]))
    for rows in ([11], [13, 13], [9], [15]):
        with pytest.raises(AgreementError):
            enforcer.check_release(*release(rows))
    enforcer.begin("epoch", 2)
    enforcer.begin("evaluate", 2)
    enforcer.check_release(*release([11]))


def test_training_is_of_the_training_part_and_ends() -> None:
    enforcer = after(2)  # epoch 1
    with pytest.raises(AgreementError, match="other records"):
        enforcer.check_release(*release([10], "training"))
    most = table().per_epoch
    for _ in range(most // 10):
        enforcer.check_release(*release(list(range(10)), "training"))
    with pytest.raises(AgreementError, match=f"at most {most}"):
        enforcer.check_release(*release(list(range(most % 10 + 1)), "training"))
    enforcer.begin("evaluate", 1)
    enforcer.begin("epoch", 2)
    enforcer.check_release(*release(list(range(10)), "training"))


def test_test_records_do_not_leave_before_they_are_evaluated() -> None:
    enforcer = after(1)  # prepare
    with pytest.raises(AgreementError):
        enforcer.check_release(*release([12], "initial"))
    enforcer.check_release(*release([12], "test labels"))


def test_a_prediction_is_once() -> None:
    enforcer = Enforcer(Timetable.of_prediction(3))
    enforcer.begin("predict", 0)
    enforcer.check_release(*release([70, 80, 90], "prediction"))
    with pytest.raises(AgreementError):
        enforcer.check_release(*release([100], "prediction"))
    with pytest.raises(AgreementError):
        enforcer.begin("predict", 0)


# -- what it will cost --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "vafl-sync", "sigma": 8.0},
        {"algorithm": "vafl", "sigma": 8.0, "settings": {"delay_bound": 3}},
        {"algorithm": "vafl-sync", "sigma": 8.0, "protocol": "pairwise"},
        {"algorithm": "vafl-sync", "epsilon": 20.0},
        {"algorithm": "fdml", "sigma": 8.0},
        {"algorithm": "flex", "sigma": 8.0},
        {"algorithm": "vafl-sync", "sigma": 4.0, "encoder_training": "none"},
        {"algorithm": "vafl-sync", "sigma": 4.0, "encoder_training": "dp", "gradient_sigma": 4.0},
        {"algorithm": "sealed", "model": "linear", "epsilon": 2.0, "scaling": "none", "epochs": 3},
        {"algorithm": "vafl-sync", "unprotected": True},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_the_forecast_is_what_the_ledgers_say_at_the_end_at_most(changes: dict[str, Any]) -> None:
    """Oracle: the accountants, from the ledgers of the run itself."""
    data = VerticalData.load("breast-cancer", parties=3)
    plan = Plan(**{"epochs": 2, "batch": 64, "evaluate_every": 1, **changes})
    resolved, scaled = resolve(plan, data)
    told = forecast(resolved, scaled)
    run = train(data, plan)
    for owner, spent in run.privacy.items():
        for observer, figures in spent["observers"].items() if "observers" in spent else ():
            found = float("inf") if figures["epsilon"] is None else figures["epsilon"]
            assert observer in told[owner] and found <= told[owner][observer] * (1 + 1e-3), (owner, observer)
        worst = float("inf") if spent["epsilon"] is None else spent["epsilon"]
        assert worst <= max(told[owner].values(), default=0.0) * (1 + 1e-3), owner
    assert run.privacy


@pytest.mark.parametrize("value", [1e-4, 0.1, 0.9999, 1.0, 1.001, 12.34, 99.95, 12345.6])
def test_figures_are_rounded_up_to_three_digits(value: float) -> None:
    assert value <= rounded(value) * (1 + 1e-12) and rounded(value) <= value * 1.0101
