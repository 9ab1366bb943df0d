"""One point of a sweep, from its plan to its record: what every executor runs, wherever it is."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from securevfl.data import VerticalData
from securevfl.errors import RunError, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.federation.run import Run, load_run, train
from securevfl.files import is_full
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan
from securevfl.settings.source import load_planned
from securevfl.sweeps.records import FAILED, MARKER, NO_ROOM, failed_record, finished_record


def run_alone(task: Mapping[str, Any]) -> dict[str, Any]:
    """`run_point` in a process of its own: one thread, so that results do not depend on who else works."""
    import torch

    torch.set_num_threads(1)
    return run_point(task)


def run_point(task: Mapping[str, Any]) -> dict[str, Any]:
    """Trains and audits one point; whatever goes wrong becomes the point's record."""
    try:
        return _run(task)
    except Exception as error:
        known = isinstance(error, SecureVFLError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return failed_record(task["id"], text, NO_ROOM if is_full(error) else FAILED)


def _run(task: Mapping[str, Any]) -> dict[str, Any]:
    root = Path(task["folder"])
    if not (root / MARKER).is_file():
        raise RunError(f"{root} is not the sweep's folder on this machine; use one that all machines share")
    plan = Plan.from_flat(task["fields"])
    # Attacks need views; a point may say that its own would be too large.
    wanted = task["fields"].get("record_views", task["keep_views"] or task["attacks"] != "none")
    plan = plan.with_changes(record_views=wanted)
    data = planned_data(plan.source, plan.seed)
    folder = root / "runs" / task["id"]
    run = _trained(plan, data, folder)
    begun = time.monotonic()
    report = _audited(run, data, folder, task)
    if not task["keep_views"]:
        RunFolder(folder).forget_evidence()
    return finished_record(task["id"], run, report, time.monotonic() - begun)


def _trained(plan: Plan, data: VerticalData, folder: Path) -> Run:
    """The run; one that finished before is taken as it is, one that was cut off starts again."""
    if (folder / "result.json").is_file():
        return load_run(folder)
    if folder.exists():
        shutil.rmtree(folder)
    return train(data, plan, folder)


def _audited(run: Run, data: VerticalData, folder: Path, task: Mapping[str, Any]) -> dict[str, Any]:
    saved = folder / "report.json"
    if saved.is_file() and (folder / "report.html").is_file():
        return dict(json.loads(saved.read_text(encoding="utf-8")))
    from securevfl.auditing import audit

    report = audit(run, task["attacks"], data=data, canaries=task["canaries"], seed=run.plan.seed, workers=1)
    report.save(folder)
    return report.content


@lru_cache(maxsize=4)
def planned_data(source: DataSource, seed: int) -> VerticalData:
    """The data of a plan, kept for the next point that has the same."""
    return load_planned(Plan(source=source, seed=seed))


def serve() -> None:
    """A worker process: takes tasks from standard input, one JSON object per line, and answers likewise.

    It ends with its parent: when standard input closes, it and the attack processes it started are gone at
    once, so that a killed sweep leaves nobody who still writes to its folder.
    """
    tasks: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    # What a run prints must not be mistaken for an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        while True:
            answers.write(json.dumps(run_alone(tasks.get()), allow_nan=False) + "\n")


def _listen(tasks: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
