"""Callbacks follow a run; trackers log it where they are installed, and say what is missing where not."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.errors import MissingExtra, PlanError, SecureVFLError
from securevfl.federation.callbacks import Callback
from securevfl.trackers import MLflow, TensorBoard, build_tracker, scalars

PLAN = Plan(algorithm="vafl", epochs=2, batch=20, sigma=1.0)


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    generator = np.random.default_rng(0)
    return VerticalData.from_arrays([generator.normal(size=(40, 2)) for _ in range(2)], np.arange(40) % 2)


class Diary(Callback):
    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def on_start(self, plan: Plan) -> None:
        self.lines.append(("start", plan))

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        self.lines.append(("epoch", dict(line)))

    def on_finish(self, result: Mapping[str, Any]) -> None:
        self.lines.append(("finish", result))

    def on_error(self, error: BaseException) -> None:
        self.lines.append(("error", error))


def test_callbacks_are_told_in_order(tiny: VerticalData) -> None:
    first, second = Diary(), Diary()
    run = train(tiny, PLAN, callbacks=[first, second])
    assert [kind for kind, _ in first.lines] == ["start", "epoch", "epoch", "finish"]
    assert first.lines[0][1] == run.plan
    assert [line["loss"] for kind, line in first.lines if kind == "epoch"] == [m["loss"] for m in run.metrics]
    assert first.lines[-1][1] == run.result
    assert [kind for kind, _ in second.lines] == [kind for kind, _ in first.lines]


def test_an_error_is_told_and_goes_on_to_the_caller(tiny: VerticalData) -> None:
    class Failing(Diary):
        def on_epoch(self, line: Mapping[str, Any]) -> None:
            raise ZeroDivisionError

    diary = Failing()
    with pytest.raises(ZeroDivisionError):
        train(tiny, PLAN, callbacks=[diary])
    assert [kind for kind, _ in diary.lines] == ["start", "error"]


def test_a_refused_plan_starts_nothing(tiny: VerticalData) -> None:
    diary = Diary()
    with pytest.raises(SecureVFLError):
        train(tiny, Plan(algorithm="vafl", protocol="two-tree", unprotected=True), callbacks=[diary])
    assert diary.lines == []


def test_scalars_are_finite_numbers_with_their_path() -> None:
    content = {"a": 1, "b": {"c": 2.5, "d": None, "e": "text", "f": float("inf")}, "g": True}
    assert dict(scalars(content)) == {"a": 1.0, "b/c": 2.5}


class StandInWriter:
    """What TensorBoard's writer was told."""

    made: ClassVar[list[StandInWriter]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.texts, self.values, self.closed = folder, {}, [], False
        StandInWriter.made.append(self)

    def add_text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> type[StandInWriter]:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = StandInWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(StandInWriter, "made", [])
    return StandInWriter


def test_tensorboard(tiny: VerticalData, tensorboard: type[StandInWriter], tmp_path: Path) -> None:
    run = train(tiny, PLAN, callbacks=[TensorBoard(tmp_path)])
    (writer,) = tensorboard.made
    logged = {(name, step): value for name, value, step in writer.values}
    assert logged["loss", 1] == run.metrics[0]["loss"] and logged["loss", 2] == run.metrics[1]["loss"]
    assert logged["final/test/accuracy", 2] == run.test["accuracy"]
    assert logged["final/privacy/p1/epsilon", 2] == run.privacy["p1"]["epsilon"]
    assert "sigma = 1.0" in writer.texts["plan"] and writer.closed


class StandInClient:
    """What MLflow's client was told."""

    made: ClassVar[list[StandInClient]] = []

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.uri, self.parameters, self.values, self.status = tracking_uri, {}, [], ""
        StandInClient.made.append(self)

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"number of {name}"

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert experiment == "number of securevfl"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))

    def log_param(self, run: str, name: str, value: str) -> None:
        self.parameters[name] = value

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.values.append((run, name, value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.status = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[StandInClient]:
    module = types.ModuleType("mlflow")
    module.MlflowClient = StandInClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr(StandInClient, "made", [])
    return StandInClient


def test_mlflow(tiny: VerticalData, mlflow: type[StandInClient]) -> None:
    run = train(tiny, PLAN, callbacks=[MLflow(uri="somewhere")])
    (client,) = mlflow.made
    assert client.uri == "somewhere" and client.status == "FINISHED"
    assert client.parameters["sigma"] == "1.0" and client.parameters["algorithm"] == "vafl"
    assert ("vafl", "loss", run.metrics[1]["loss"], 2) in client.values
    assert ("vafl", "final/privacy/p1/mu", run.privacy["p1"]["mu"], 2) in client.values


def test_mlflow_marks_a_broken_run(tiny: VerticalData, mlflow: type[StandInClient]) -> None:
    class Failing(Callback):
        def on_epoch(self, line: Mapping[str, Any]) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tiny, PLAN, callbacks=[MLflow(), Failing()])
    assert mlflow.made[0].status == "FAILED"


@pytest.mark.parametrize(
    ("module", "name"), [("torch.utils.tensorboard", "tensorboard"), ("mlflow", "mlflow")]
)
def test_missing_extras_are_named(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"securevfl\[{name}\]"):
        build_tracker(name, tmp_path)


def test_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="did you mean 'mlflow'"):
        build_tracker("mlfow", tmp_path)


def test_command_line(tensorboard: type[StandInWriter], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from securevfl.cli import app

    line = [
        "train",
        "--algorithm",
        "vafl",
        "--unprotected",
        "--data",
        "breast-cancer",
        "--parties",
        "2",
        "--epochs",
        "1",
        "--json",
    ]
    done = CliRunner().invoke(app, [*line, "--tracker", "tensorboard", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert tensorboard.made[0].folder == str(tmp_path / "run-tensorboard") and tensorboard.made[0].closed
