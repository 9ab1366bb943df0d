"""Trackers: callbacks that log a run to TensorBoard or MLflow. Each is an extra of its own.

What is logged is the plan, the metrics and the privacy spent; never a record, an embedding or a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from securevfl.errors import MissingExtra, PlanError, nearest
from securevfl.federation.callbacks import Callback
from securevfl.settings.plan import Plan

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "build_tracker"]


def scalars(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All finite numbers of nested mappings, with their path as the name."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


class TensorBoard(Callback):
    """Logs to TensorBoard event files.

    Args:
        folder: Where the event files go.

    Raises:
        MissingExtra: TensorBoard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            writers = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        self._writer: Any = writers.SummaryWriter(str(folder))
        self._epoch = 0

    def on_start(self, plan: Plan) -> None:
        """Logs the plan as text."""
        self._writer.add_text("plan", f"```toml\n{plan.to_toml()}```")

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        """Logs every number of the line, at the epoch's step."""
        self._epoch = int(line["epoch"])
        self._log({name: value for name, value in line.items() if name != "epoch"})

    def on_finish(self, result: Mapping[str, Any]) -> None:
        """Logs test metrics and privacy, and closes the file."""
        self._log({"final": {name: result[name] for name in ("test", "privacy", "time")}})
        self._writer.close()

    def on_error(self, error: BaseException) -> None:
        """Closes the file."""
        self._writer.close()

    def _log(self, content: Mapping[str, Any]) -> None:
        for name, value in scalars(content):
            self._writer.add_scalar(name, value, self._epoch)
        self._writer.flush()


class MLflow(Callback):
    """Logs to an MLflow run of its own.

    Args:
        experiment: Name of the experiment; made if there is none.
        uri: Tracking server or folder; MLflow's own default if empty.

    Raises:
        MissingExtra: MLflow is not installed.
    """

    def __init__(self, experiment: str = "securevfl", *, uri: str = "") -> None:
        try:
            mlflow = import_module("mlflow")
        except ImportError as error:
            raise _missing("MLflow", "mlflow") from error
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri or None)
        self._experiment = experiment
        self._run = ""
        self._epoch = 0

    def on_start(self, plan: Plan) -> None:
        """Begins a run with the plan's fields as parameters."""
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=plan.algorithm).info.run_id
        for name, value in plan.to_flat().items():
            self._client.log_param(self._run, name, str(value))

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        """Logs every number of the line, at the epoch's step."""
        self._epoch = int(line["epoch"])
        self._log({name: value for name, value in line.items() if name != "epoch"})

    def on_finish(self, result: Mapping[str, Any]) -> None:
        """Logs test metrics and privacy, and ends the run."""
        self._log({"final": {name: result[name] for name in ("test", "privacy", "time")}})
        self._client.set_terminated(self._run, "FINISHED")

    def on_error(self, error: BaseException) -> None:
        """Ends the run as failed."""
        if self._run:
            self._client.set_terminated(self._run, "FAILED")

    def _log(self, content: Mapping[str, Any]) -> None:
        for name, value in scalars(content):
            self._client.log_metric(self._run, name, value, step=self._epoch)


def _missing(what: str, extra: str) -> MissingExtra:
    return MissingExtra(f"{what} is not installed; install it with: pip install 'securevfl[{extra}]'")


TRACKERS = ("tensorboard", "mlflow")


def build_tracker(name: str, folder: Path) -> Callback:
    """The tracker of that name for a run in `folder`, with its defaults.

    TensorBoard writes to ``<folder>-tensorboard``, beside the run, because the run makes its own folder.
    MLflow takes its address from the environment (``MLFLOW_TRACKING_URI``).

    Raises:
        PlanError: There is none of that name.
        MissingExtra: It is not installed.
    """
    if name == "tensorboard":
        return TensorBoard(folder.with_name(f"{folder.name}-tensorboard"))
    if name == "mlflow":
        return MLflow()
    raise PlanError(f"unknown tracker {name!r}; {nearest(name, TRACKERS)}")
