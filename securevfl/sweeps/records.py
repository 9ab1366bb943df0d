"""What is kept of a finished point: one plain record, made from the files in its run folder alone.

A record can be made again from the folder at any time, so that a crash between the end of a run and the
line in the journal loses nothing and repeats nothing. The journal has one line per finished point, on disk
before the next one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securevfl.files import append_line, write_text

if TYPE_CHECKING:
    from securevfl.federation.run import Run

OK, FAILED, NO_ROOM = "ok", "failed", "no room"
MARKER = "sweep.toml"


def failed_record(name: str, error: str, status: str = FAILED) -> dict[str, Any]:
    """The record of a point that could not be run; `NO_ROOM` is not the point's fault, and is never kept."""
    return {"id": name, "status": status, "error": " ".join(error.split())}


def finished_record(name: str, run: Run, report: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The record of a point.

    Args:
        name: The point's id.
        run: The finished run.
        report: The content of its audit report.
        seconds: Wall time of the audit.
    """
    result = run.result
    return {
        "id": name,
        "status": OK,
        "error": "",
        "plan": run.plan.differing(),
        "mode": run.plan.mode,
        "parties": len(report["run"]["parties"]),
        "test": result["test"],
        "alone": _alone(result),
        "train_loss": result["loss"],
        "epochs_done": result["epochs"],
        "stopped": result["stopped"],
        "labels": result["labels"],
        "guarantee": result["guarantee"],
        "verdict": report["verdict"],
        "privacy": _privacy(run, report),
        "attacks": _attacks(report["attacks"]),
        "curve": [{"time": line["time"], "loss": line["loss"], "test": line["test"]} for line in run.metrics],
        "virtual_time": result["time"]["virtual"],
        "messages": result["messages"],
        "bytes": result["bytes"],
        "seconds": {"train": result["time"]["wall"], "audit": round(seconds, 3)},
    }


def _alone(result: Mapping[str, Any]) -> float | None:
    """The better of what the label holder reaches alone; a baseline has nothing to compare."""
    alone = result.get("alone") or {}
    return max((alone[kind] for kind in ("linear", "trees") if alone.get(kind) is not None), default=None)


def _privacy(run: Run, report: Mapping[str, Any]) -> dict[str, Any]:
    """Epsilon towards the worst observer: of those who only have features, and of the label holder.

    They are kept apart because most algorithms send exact gradients, so that the labels have no guarantee
    however well the features are protected. Infinite is written as null together with ``exposed``.
    """
    holder = report["run"]["label_holder"]
    cells = [
        (owner, observer, cell)
        for owner, row in report["owners"].items()
        for observer, cell in row["observers"].items()
    ]
    features = [cell for cell in cells if cell[0] != holder]
    labels = [cell for cell in cells if cell[0] == holder]
    worst = max(features, key=lambda found: _size(found[2]), default=None)
    everything = run.plan.algorithm == "central"
    return {
        "claimed": _largest(cell["claimed"] for _, _, cell in features),
        "sound": _bound(worst, everything),
        "measured": _largest(cell["epsilon_lower"] for _, _, cell in features),
        "mu": None if worst is None else worst[2]["mu_upper"],
        "owner": "" if worst is None else worst[0],
        "observer": "" if worst is None else worst[1],
        "releases": 0 if worst is None else worst[2]["releases"],
        "exposed": everything or (worst is not None and worst[2]["epsilon_upper"] is None),
        "labels": _bound(max(labels, key=lambda found: _size(found[2]), default=None), everything),
        "labels_exposed": everything or any(cell["epsilon_upper"] is None for _, _, cell in labels),
    }


def _size(cell: Mapping[str, Any]) -> float:
    return math.inf if cell["epsilon_upper"] is None else float(cell["epsilon_upper"])


def _bound(found: tuple[str, str, Mapping[str, Any]] | None, everything: bool) -> float | None:
    """The sound epsilon; None is infinite, and 0 where nothing left."""
    if everything:
        return None
    return 0.0 if found is None else found[2]["epsilon_upper"]


def _largest(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _attacks(attacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each attack the pair on which it did best, or why it has no score. Wall time is left out."""
    best: dict[str, dict[str, Any]] = {}
    for attack in attacks:
        if attack["name"] not in best or _worse(attack, best[attack["name"]]):
            best[attack["name"]] = attack
    kept = ("name", "metric", "owner", "observer", "score", "low", "high", "baseline", "status", "reason")
    return [{key: best[name][key] for key in kept} for name in sorted(best)]


def gain(attack: Mapping[str, Any], key: str = "score") -> float:
    """How much better than without the view: 0 is guessing, more is a leak.

    Scores that grow with the leak are compared by difference, errors by the share of the error that is
    removed. Baselines differ from run to run, so that scores alone cannot be compared.
    """
    from securevfl.attacks.contract import METRICS

    value, base = float(attack[key]), float(attack["baseline"])
    if METRICS[attack["metric"]].more_is_worse:
        return value - base
    return 1 - value / base if base else 0.0


def _worse(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True where `one` leaks more than `other`; what has no score leaks least."""
    sizes = [
        -math.inf if attack["score"] is None or attack["baseline"] is None else gain(attack)
        for attack in (one, other)
    ]
    return sizes[0] > sizes[1]


class PointLog:
    """Append-only results. Lines that a crash tore are dropped when it is opened; their points run again.

    Attributes:
        records: Point id -> its newest record.
        repaired: How many unreadable lines were dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        self.repaired = 0
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        good = []
        for line in text.splitlines(keepends=True):
            record = _parsed(line)
            if record is not None:
                good.append(line)
                self.records[record["id"]] = record
            elif line.strip():
                self.repaired += 1
        if "".join(good) != text:
            write_text(self.path, "".join(good))

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record; when this returns, it has reached the disk.

        Raises:
            RunError: The file cannot be written.
        """
        append_line(self.path, json.dumps(record, allow_nan=False))
        self.records[record["id"]] = record


def _parsed(line: str) -> dict[str, Any] | None:
    """A complete record, or None for anything else."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("id"), str) and "status" in record
    return record if whole else None
