"""The schedule, on a carrier that only notes what it is asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from securevfl import Plan
from securevfl.errors import BudgetExceeded
from securevfl.federation.folder import RunFolder
from securevfl.federation.schedule import Carrier, Schedule, drive


class Scripted(Carrier):
    """Gives the losses that it is told, and refuses where it is told.

    Args:
        losses: The loss of each epoch.
        plan: The plan.
        start: Epochs that are done already; -1 for none.
        refuses: Part and epoch at which a gate refuses.
        folder: Where metrics are kept.
    """

    def __init__(
        self,
        losses: list[float],
        plan: Plan,
        *,
        start: int = -1,
        refuses: tuple[str, int] | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        self.plan, self.folder, self.start, self.refuses = plan, folder, start, refuses
        self.losses, self.done, self.saved = losses, list[tuple[str, int]](), list[int]()
        loss = losses[start - 1] if start > 0 else None
        self.role: Any = SimpleNamespace(
            processed=100 * max(0, start), loss=loss, test={"auc": None}, figures=dict
        )
        self.ended: tuple[int, str | None] | None = None

    @property
    def home(self) -> Any:
        return SimpleNamespace(server=self.role)

    async def phase(self, part: str, epoch: int) -> None:
        if (part, epoch) == self.refuses:
            raise BudgetExceeded("owner 'p1' has spent its budget")
        self.done.append((part, epoch))
        if part == "epoch":
            self.role.loss, self.role.processed = self.losses[epoch - 1], 100 * epoch
        if part in ("evaluate", "final"):
            self.role.test = {"auc": 0.5 + epoch / 100}

    def spent(self) -> dict[str, float]:
        return {"p1": 1.0, "p2": float("inf"), "p3": 0.0}

    def figures(self) -> dict[str, Any]:
        return {"time": 1.0, "messages": 2, "bytes": 3}

    def restore(self) -> int:
        return self.start

    def save(self, epoch: int) -> None:
        self.saved.append(epoch)

    async def finish(self, epochs: int, stopped: str | None) -> None:
        self.ended = epochs, stopped


def folder_with(path: Path, losses: list[float]) -> RunFolder:
    folder = RunFolder(path)
    for epoch, loss in enumerate(losses, start=1):
        folder.append_metrics({"epoch": epoch, "loss": loss})
    return folder


def trained(carrier: Scripted) -> Schedule:
    schedule = Schedule(carrier)
    drive(schedule.train())
    return schedule


def test_all_parts_in_their_order() -> None:
    carrier = Scripted([3.0, 2.0, 1.0], Plan(algorithm="vafl", epochs=3, evaluate_every=1, unprotected=True))
    schedule = trained(carrier)
    assert carrier.done == [
        *(("prepare", 0), ("epoch", 1), ("evaluate", 1), ("epoch", 2), ("evaluate", 2), ("epoch", 3)),
        ("final", 3),
    ]
    assert carrier.saved == [0, 1, 2, 3] and carrier.ended == (3, None)
    assert [line["loss"] for line in schedule.metrics] == [3.0, 2.0, 1.0]
    assert schedule.metrics[-1]["test"] == {"auc": 0.53}
    assert schedule.metrics[0]["mu"] == {"p1": 1.0, "p2": None}  # infinite is unknown, nothing is left out


@pytest.mark.parametrize(
    ("losses", "epochs"), [([3, 2, 2, 2, 1], 4), ([3, 3, 3, 1, 1], 3), ([5, 4, 3, 2, 1], 5)]
)
def test_it_stops_when_nothing_improves(losses: list[float], epochs: int) -> None:
    carrier = Scripted(losses, Plan(algorithm="vafl", epochs=5, patience=2, unprotected=True))
    schedule = trained(carrier)
    assert schedule.epochs == epochs and (schedule.stopped is not None) == (epochs < 5)
    assert carrier.done[-1] == ("final", epochs)


def test_a_run_that_had_stopped_early_does_not_train_on(tmp_path: Path) -> None:
    """It was interrupted in its final evaluation."""
    folder = folder_with(tmp_path, [3.0, 3.0, 3.0])
    carrier = Scripted(
        [3.0, 3.0, 3.0, 1.0],
        Plan(algorithm="vafl", epochs=4, patience=2, unprotected=True),
        start=3,
        folder=folder,
    )
    schedule = trained(carrier)
    assert carrier.done == [("final", 3)] and str(schedule.stopped).startswith("early")


def test_lines_are_those_of_the_epochs_that_are_kept(tmp_path: Path) -> None:
    """One line too many belongs to an epoch that runs again; one too few was lost in a crash."""
    for written in ([3.0, 2.0, 9.0], [3.0]):
        path = tmp_path / str(len(written))
        path.mkdir()
        carrier = Scripted(
            [3.0, 2.0, 1.0],
            Plan(algorithm="vafl", epochs=3, unprotected=True),
            start=2,
            folder=folder_with(path, written),
        )
        trained(carrier)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [(line["epoch"], line["loss"]) for line in lines] == [(1, 3.0), (2, 2.0), (3, 1.0)]
        assert carrier.done == [("epoch", 3), ("final", 3)]


def test_a_refusal_ends_training_and_leaves_the_final_evaluation() -> None:
    carrier = Scripted(
        [3.0, 2.0, 1.0], Plan(algorithm="vafl", epochs=3, unprotected=True), refuses=("epoch", 3)
    )
    schedule = trained(carrier)
    assert schedule.epochs == 2 and schedule.stopped == "budget: owner 'p1' has spent its budget"
    assert carrier.done[-1] == ("final", 2) and carrier.ended == (2, schedule.stopped)


def test_where_even_the_evaluation_is_refused_the_figures_are_unknown() -> None:
    carrier = Scripted([3.0], Plan(algorithm="vafl", epochs=1, unprotected=True), refuses=("final", 1))
    schedule = trained(carrier)
    assert schedule.metrics[-1]["test"] == {"auc": None} and str(schedule.stopped).startswith("budget")


def test_a_budget_for_nothing_is_an_error() -> None:
    carrier = Scripted([3.0], Plan(algorithm="vafl", epochs=1, unprotected=True), refuses=("epoch", 1))
    with pytest.raises(BudgetExceeded, match="not one step fits"):
        trained(carrier)
    assert carrier.ended is None


def test_a_prediction_is_one_part() -> None:
    carrier = Scripted([], Plan(algorithm="vafl", unprotected=True))
    drive(Schedule(carrier).predict())
    assert carrier.done == [("predict", 0)] and carrier.ended == (0, None) and not carrier.saved


def test_a_carrier_that_waits_is_awaited() -> None:
    class Waiting(Scripted):
        async def phase(self, part: str, epoch: int) -> None:
            await asyncio.sleep(0)
            await super().phase(part, epoch)

    with pytest.raises(TypeError, match="await it instead"):
        drive(Schedule(Waiting([1.0], Plan(algorithm="vafl", epochs=1, unprotected=True))).train())
    carrier = Waiting([1.0], Plan(algorithm="vafl", epochs=1, unprotected=True))
    asyncio.run(Schedule(carrier).train())
    assert carrier.ended == (1, None)
