"""The table of a sweep: one row per point, in the order of the sweep file, the same for the same seeds.

Wall times differ from run to run, so they stand in a table of their own, ``timings.csv``.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from securevfl.files import replacing, write_text
from securevfl.settings.plan import KINDS, UNPROTECTED
from securevfl.sweeps.records import OK
from securevfl.sweeps.spec import Point, Sweep, Target

Row = dict[str, Any]

# Always shown, in this order; further fields of the plan follow where the sweep varies them.
PLAN_COLUMNS = (
    "data", "algorithm", "protocol", "mode", "parties", "model", "clip", "sigma", "gradient_sigma",
    "target_epsilon", "delta", "epochs", "batch", "learning_rate", "seed",
)  # fmt: skip
# Beyond these, a field has a column of its own only where it varies.
USUAL = (*PLAN_COLUMNS, "epsilon", "encoder_training", "data_folder", "record_views")
LOWER = ("loss", "mae")
"""Metrics of which less is better."""
METRICS = ("auc", "accuracy", "top5", "r2", "mae", "loss")
# Text even where a whole column is empty.
TEXTS = (
    "id", "label", "status", "data", "algorithm", "protocol", "mode", "model", "stopped", "owner", "observer",
    "labels", "verdict", "guarantee", "report", "error",
)  # fmt: skip
TIMINGS = ("point", "id", "train_seconds", "audit_seconds")


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a sweep has found so far.

    Attributes:
        sweep: The sweep.
        folder: Its folder.
        records: Point id -> record.
        repaired: Unreadable lines that were dropped from the journal.
    """

    sweep: Sweep
    folder: Path
    records: Mapping[str, dict[str, Any]]
    repaired: int = 0

    @cached_property
    def rows(self) -> list[Row]:
        """One row per finished or failed point."""
        found = [(p, self.records[p.id]) for p in self.sweep.points if p.id in self.records]
        attacks = sorted({a["name"] for _, record in found for a in record.get("attacks", ())})
        varied = [name for name in varied_fields(self.sweep.points) if name not in USUAL]
        return [
            _row(point, record, varied, attacks, self.targets[point.fields.get("data", "")])
            for point, record in found
        ]

    @cached_property
    def targets(self) -> dict[str, Target]:
        """For each data set what the time to target is about, with its value."""
        by_data: dict[str, list[dict[str, Any]]] = {}
        for point in self.sweep.points:
            if point.id in self.records:
                by_data.setdefault(point.fields.get("data", ""), []).append(self.records[point.id])
        return {name: settled(self.sweep.target, found) for name, found in by_data.items()}

    @property
    def finished(self) -> list[Row]:
        """The rows of points that were run."""
        return [row for row in self.rows if row["status"] == OK]

    @property
    def unprotected(self) -> list[str]:
        """Variants that ran without protection, each with what became of the labels."""
        exposed = [row for row in self.finished if row["guarantee"] == UNPROTECTED]
        return list(
            dict.fromkeys(f"{row['label'] or row['algorithm']}: labels {row['labels']}" for row in exposed)
        )

    @property
    def failed(self) -> list[Row]:
        """The rows of points that failed."""
        return [row for row in self.rows if row["status"] != OK]

    @property
    def complete(self) -> bool:
        """True where every point has a record."""
        return len(self.rows) == len(self.sweep.points)

    def to_mapping(self) -> dict[str, Any]:
        """What ``sweep --json`` prints; infinite or unknown is null."""
        return {
            "folder": str(self.folder),
            "points": len(self.sweep.points),
            "finished": len(self.finished),
            "failed": len(self.failed),
            "results": "results.csv",
            "page": "sweep.html",
            "rows": [{name: _json(value) for name, value in row.items()} for row in self.rows],
        }


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def varied_fields(points: Sequence[Point]) -> list[str]:
    """Fields of the plan that differ between points, in the plan's order."""
    seen: dict[str, set[str]] = {name: set() for name in KINDS}
    for point in points:
        chosen = point.values
        for name, values in seen.items():
            values.add(json.dumps(chosen[name], default=list, sort_keys=True))
    return [name for name, values in seen.items() if len(values) > 1]


def _row(
    point: Point, record: Mapping[str, Any], varied: list[str], attacks: list[str], target: Target
) -> Row:
    plan = {**point.values, **record.get("plan", {})}
    plan |= {
        "mode": record.get("mode"),
        "parties": record.get("parties", plan["parties"]),
        "target_epsilon": point.fields.get("epsilon") or None,
    }
    return {
        "point": point.number,
        "id": point.id,
        "label": point.label,
        "status": record["status"],
        **{name: plan[name] for name in PLAN_COLUMNS},
        **{name: _cell(plan[name]) for name in varied},
        **{name: record.get("test", {}).get(name) for name in METRICS},
        **{name: record.get(name) for name in ("alone", "train_loss", "epochs_done", "stopped")},
        **_privacy(record, record.get("privacy", {})),
        **_scores(record.get("attacks", []), attacks),
        **{name: record.get(name) for name in ("virtual_time", "messages", "bytes")},
        "time_to_target": time_to_target(record, target),
        "report": f"runs/{point.id}/report.html" if record["status"] == OK else None,
        "error": record["error"],
    }


def _cell(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | tuple | dict) else value


def _privacy(record: Mapping[str, Any], privacy: Mapping[str, Any]) -> Row:
    sound = math.inf if privacy.get("exposed") else privacy.get("sound")
    labels = math.inf if privacy.get("labels_exposed") else privacy.get("labels")
    return {
        "claimed_epsilon": privacy.get("claimed"),
        "sound_epsilon": sound,
        "measured_epsilon": privacy.get("measured"),
        "sound_mu": math.inf if privacy.get("exposed") else privacy.get("mu"),
        "owner": privacy.get("owner"),
        "observer": privacy.get("observer"),
        "releases": privacy.get("releases"),
        "label_epsilon": labels,
        "labels": record.get("labels"),
        "verdict": record.get("verdict"),
        "guarantee": record.get("guarantee"),
    }


def _scores(found: Sequence[Mapping[str, Any]], names: list[str]) -> Row:
    by_name = {attack["name"]: attack for attack in found}
    row: Row = {}
    for name in names:
        row[f"attack.{name}"] = by_name.get(name, {}).get("score")
        row[f"attack.{name}.baseline"] = by_name.get(name, {}).get("baseline")
    return row


def settled(target: Target, records: Sequence[Mapping[str, Any]]) -> Target:
    """The target with its value; if the sweep names none, one tenth above the lowest loss of the records.

    Only records with a virtual time count: the baselines are not in the race.
    """
    if target.value is not None:
        return target
    losses = [
        line["loss"]
        for record in records
        if record.get("virtual_time")
        for line in record["curve"]
        if line["loss"] is not None
    ]
    return Target(metric="loss", value=1.1 * min(losses)) if losses else target


def time_to_target(record: Mapping[str, Any], target: Target) -> float | None:
    """Virtual time at the end of the first epoch that reached the target; None if none did."""
    if target.value is None:
        return None
    for line in record.get("curve", ()):
        value = line["loss"] if target.metric == "loss" else line["test"].get(target.metric)
        if value is not None and (value <= target.value if target.metric in LOWER else value >= target.value):
            return float(line["time"])
    return None


def write_tables(results: Results) -> None:
    """Writes ``results.csv``, ``timings.csv`` and, with pyarrow, ``results.parquet``."""
    rows = results.rows
    write_text(results.folder / "results.csv", _csv(list(rows[0]) if rows else ["point"], rows))
    write_text(results.folder / "timings.csv", _csv(list(TIMINGS), _timings(results)))
    if has_parquet() and rows:
        _write_parquet(results.folder / "results.parquet", rows)


def _timings(results: Results) -> list[Row]:
    found = []
    for point in results.sweep.points:
        seconds = results.records.get(point.id, {}).get("seconds")
        if seconds is not None:
            figures = (point.number, point.id, seconds["train"], seconds["audit"])
            found.append(dict(zip(TIMINGS, figures, strict=True)))
    return found


def _csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = {name: _column(arrow, name, [row[name] for row in rows]) for name in rows[0]}
    with replacing(path) as file:
        parquet.write_table(arrow.table(columns), file)


def _column(arrow: Any, name: str, values: list[Any]) -> Any:
    """A column of one type: truth, whole numbers, numbers or text. Without any value it holds numbers."""
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if name in TEXTS or not kinds <= {bool, int, float} or (bool in kinds and len(kinds) > 1):
        return arrow.array([None if value is None else str(value) for value in values], arrow.string())
    if kinds == {bool}:
        return arrow.array(values, arrow.bool_())
    if kinds == {int}:
        return arrow.array(values, arrow.int64())
    return arrow.array([None if value is None else float(value) for value in values], arrow.float64())
