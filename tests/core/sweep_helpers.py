"""Small sweeps, an executor without processes, and made-up records for tests of the table and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from securevfl.attacks.jobs import InProcess as AttacksHere
from securevfl.sweeps.records import PointLog
from securevfl.sweeps.results import Results
from securevfl.sweeps.spec import Sweep, parse_sweep
from securevfl.sweeps.work import run_point

ANY = """
title = "Tiny"
data = "synthetic:rows=60,features=4"
parties = 2
epochs = 1
batch = 16
unprotected = true

[audit]
attacks = "none"
canaries = -1
"""
TINY = ANY.replace("batch", 'algorithm = "vafl"\nbatch')
FOUR = ANY + "[grid]\nalgorithm = ['vafl', 'local']\nseed = [0, 1]\n"


class InProcess:
    """Runs tasks, attacks included, in this process, in order, and counts them."""

    def __init__(self, most: int | None = None) -> None:
        self.done: list[str] = []
        self.most = most
        self.closed = False

    def run(self, tasks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for task in tasks:
            if self.most is not None and len(self.done) >= self.most:
                raise KeyboardInterrupt
            self.done.append(task["id"])
            with patch("securevfl.attacks.runner.AttackProcess", AttacksHere):
                record = run_point(task)
            yield record

    def close(self) -> None:
        self.closed = True


def invented(point: Any, **changes: Any) -> dict[str, Any]:
    """A record as a finished run would leave it."""
    sound = changes.pop("sound", 1.0)
    score = changes.pop("auc", 0.8)
    return {
        "id": point.id,
        "status": "ok",
        "error": "",
        "plan": {**point.fields, "sigma": 2.5},
        "mode": "frozen",
        "parties": 2,
        "test": {"auc": score, "accuracy": 0.7, "loss": 0.5},
        "train_loss": 0.4,
        "epochs_done": 2,
        "stopped": None,
        "labels": "not exposed",
        "guarantee": "as accounted",
        "verdict": "holds",
        "privacy": {
            "claimed": changes.pop("claimed", None),
            "sound": sound,
            "measured": 0.5,
            "mu": 0.3,
            "owner": "p1",
            "observer": "p0",
            "releases": 3,
            "exposed": sound is None,
            "labels": None,
            "labels_exposed": True,
        },
        "attacks": [
            {
                "name": "spectral",
                "metric": "auc",
                "owner": "p0",
                "observer": "p1",
                "score": 0.6,
                "low": 0.5,
                "high": 0.7,
                "baseline": 0.5,
                "status": "scored",
                "reason": "",
            }
        ],
        "curve": [{"time": 1.0, "loss": 0.6, "test": {}}, {"time": 2.0, "loss": 0.4, "test": {"auc": score}}],
        "virtual_time": 2.0,
        "messages": 10,
        "bytes": 1000,
        "seconds": {"train": 0.1, "audit": 0.2},
        **changes,
    }


def made_up(folder: Path, text: str, records: dict[int, dict[str, Any]]) -> Results:
    """Results of a sweep with records by number of point."""
    sweep: Sweep = parse_sweep(text)
    return Results(
        sweep=sweep, folder=folder, records={sweep.points[n].id: record for n, record in records.items()}
    )


def journal_of(folder: Path) -> PointLog:
    return PointLog(folder / "journal.jsonl")
