"""Training runs: `train` makes one, `load_run` opens a finished one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from securevfl.accountants.modes import privacy_matrix
from securevfl.accountants.records import HIDDEN, ReleaseRecord
from securevfl.algorithms import Progress
from securevfl.data import VerticalData
from securevfl.engine import Engine
from securevfl.errors import PlanError, RunError, SecureVFLError
from securevfl.folder import RunFolder
from securevfl.ledger import read_records
from securevfl.plan import Plan
from securevfl.resolve import resolve


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Attributes:
        plan: The plan, with every choice filled in.
        metrics: One line per epoch.
        result: What ``train --json`` prints.
        folder: Where it is, if it was written.
        encoders: The trained encoders by party (only in the process that trained).
        head: The label holder's model (only in the process that trained).
    """

    plan: Plan
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    folder: Path | None = None
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    head: nn.Module | None = None

    @property
    def test(self) -> dict[str, float | None]:
        """Metrics on the test part."""
        return dict(self.result["test"])

    @property
    def privacy(self) -> dict[str, dict[str, Any]]:
        """What each owner has spent, for its worst observer."""
        return dict(self.result["privacy"])

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last epoch; None if it did not."""
        reason = self.result["stopped"]
        return None if reason is None else str(reason)


def train(
    data: VerticalData,
    plan: Plan | None = None,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    encoders: Mapping[str, nn.Module] | None = None,
    head: nn.Module | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Trains on vertical data, every release gated and accounted for.

    All parties run in this process, on the virtual network. What the result promises is written in
    ``run.privacy``: for each owner the accounting mode, mu and epsilon towards its worst observer.

    Args:
        data: The parties' features and the labels.
        plan: What to do; the default plan is asynchronous VAFL without noise.
        out: Folder for the results, which must not exist yet. None keeps everything in memory.
        resume: Go on with the unfinished run in `out`, from its last epoch.
        encoders: Your own encoder for some or all parties.
        head: Your own model for the label holder.
        progress: Called after every step.

    Raises:
        PlanError: The plan does not fit itself or the data.
        RunError: The folder exists, cannot be written, or belongs to another plan.
        BudgetExceeded: The budget does not even allow the first step. (If it ends training later, the run is
            returned with `stopped` set.)
    """
    resolved, scaled = resolve(plan or Plan(), data)
    if out is None and resolved.record_views:
        raise PlanError("views are written to disk; give an output folder to record them")
    folder = None if out is None else RunFolder(Path(out))
    if resume:
        _check_same_plan(folder, resolved)
    elif folder is not None:
        folder.create(resolved)
    try:
        engine = Engine(
            resolved, scaled, folder=folder, encoders=encoders or {}, head=head, progress=progress
        )
    except SecureVFLError:
        if folder is not None and not resume:
            folder.remove()  # made a moment ago; nothing has been released
        raise
    try:
        engine.run()
    finally:
        engine.close()
    records = engine.records() if folder is None else read_records_or_none(folder.path)
    result = _result(engine, records)
    if folder is not None:
        folder.write_result(result)
    return Run(
        plan=resolved,
        metrics=engine.metrics,
        result=result,
        folder=None if folder is None else folder.path,
        encoders=engine.setup.encoders,
        head=engine.setup.head,
    )


def load_run(folder: Path | str) -> Run:
    """Opens a finished run.

    Raises:
        RunError: The folder holds no finished run.
    """
    files = RunFolder(Path(folder))
    if not files.path.is_dir():
        raise RunError(f"there is no run folder {files.path}")
    return Run(
        plan=files.read_plan(), metrics=files.read_metrics(), result=files.read_result(), folder=files.path
    )


def read_records_or_none(folder: Path) -> list[ReleaseRecord]:
    """The releases of a run; none where nothing could leave."""
    return read_records(folder) if (folder / "ledger").is_dir() else []


def _check_same_plan(folder: RunFolder | None, plan: Plan) -> None:
    if folder is None:
        raise PlanError("resume needs the folder of the run to go on with")
    saved = folder.read_plan()
    changed = [f.name for f in fields(plan) if getattr(plan, f.name) != getattr(saved, f.name)]
    if changed:
        name = changed[0]
        raise RunError(
            f"{folder.path} belongs to another plan: {name} was {getattr(saved, name)!r}, "
            f"now it is {getattr(plan, name)!r}"
        )
    if folder.result_file.exists():
        raise RunError(f"the run in {folder.path} is finished; there is nothing to resume")


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def spending(records: list[ReleaseRecord], delta: float) -> dict[str, dict[str, Any]]:
    """Per owner: mode, mu and epsilon towards its worst observer; infinite is None."""
    worst = {
        owner: max(observers.values(), key=lambda spend: spend.mu)
        for owner, observers in privacy_matrix(records, delta).items()
        if observers
    }
    return {
        owner: {
            "mode": spend.mode,
            "mu": _number(spend.mu),
            "epsilon": _number(spend.epsilon),
            "delta": delta,
            "releases": spend.releases,
            "observer": spend.observer,
        }
        for owner, spend in worst.items()
    }


def predictions(records: list[ReleaseRecord]) -> dict[str, dict[str, Any]]:
    """Per owner: scores of single records that were opened beside sealed training, and to whom."""
    counted: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.is_prediction:
            mine = counted.setdefault(record.owner, {"scores": 0, "observers": [], "epsilon": None})
            mine["scores"] += record.vectors
            mine["observers"] = sorted({*mine["observers"], *record.observers})
    return counted


def _result(engine: Engine, records: list[ReleaseRecord]) -> dict[str, Any]:
    plan = engine.plan
    test = {name: _number(value) for name, value in engine.server.test.items()}
    result = {
        "algorithm": plan.algorithm,
        "protocol": plan.protocol,
        "test": test,
        "privacy": spending(records, plan.delta),
        **({"prediction": predictions(records)} if plan.mode == "sealed" else {}),
        "guarantee": "void: reproducible noise" if plan.insecure_reproducible_noise else "as accounted",
        "time": {"virtual": engine.time, "wall": round(engine.wall, 3)},
        "messages": engine.network.messages,
        "bytes": engine.network.bytes,
        "labels": label_exposure(records, engine.setup.label_holder),
        "epochs": engine.server.epochs_done,
        "loss": _number(engine.server.loss),
        "stopped": engine.stopped,
    }
    return dict(json.loads(json.dumps(result)))


def label_exposure(records: list[ReleaseRecord], label_holder: str) -> str:
    """How the labels are exposed, in words."""
    mine = [r for r in records if r.owner == label_holder and r.mechanism not in HIDDEN]
    if mine and all(record.mode == "sealed" for record in mine):
        return "sealed: only noisy totals of whole batches depend on them, as accounted"
    given = sorted({name for record in mine if record.kind == "labels" for name in record.observers})
    derived = sorted({name for record in mine for name in record.observers} - set(given))
    ways = []
    if given:
        ways.append(f"shared: all training labels were sent to {', '.join(given)}")
    if derived:
        ways.append(f"exposed: exact gradients of the loss go to {', '.join(derived)}")
    if not ways:
        return f"not exposed: {label_holder} sends nothing that depends on labels"
    return "; ".join([*ways, "no guarantee"])
