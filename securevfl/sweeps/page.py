"""``sweep.html``: one self-contained page; opens from disk, asks no network, works without scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from securevfl import pages
from securevfl.files import write_text
from securevfl.pages import number
from securevfl.settings.plan import KINDS
from securevfl.settings.source import shown_data
from securevfl.sweeps.charts import SweepCharts
from securevfl.sweeps.results import Results, Row, varied_fields
from securevfl.sweeps.spec import Point
from securevfl.sweeps.summary import Group, attack_names, data_sets, kept_table, promise_table, sentences

SETTINGS = {
    "label": "variant", "data": "data", "algorithm": "algorithm", "protocol": "protocol", "mode": "mode",
    "sigma": "sigma", "target_epsilon": "target ε", "seed": "seed",
}  # fmt: skip
FIGURES = {
    "auc": "AUC", "accuracy": "accuracy", "top5": "top-5", "r2": "R²", "mae": "MAE", "alone": "alone",
    "claimed_epsilon": "claimed ε",
    "sound_epsilon": "sound ε", "measured_epsilon": "measured ε", "label_epsilon": "labels ε",
    "verdict": "verdict", "virtual_time": "virtual time", "bytes": "bytes",
}  # fmt: skip
LOCAL = ("data_folder", "record_views")
"""Fields that make no difference between points."""


def write_page(results: Results) -> None:
    """Writes ``sweep.html``."""
    write_text(results.folder / "sweep.html", render(results))


def render(results: Results) -> str:
    """The page."""
    charts = SweepCharts(results)
    scored = charts.scored()
    several = len(data_sets(charts.groups)) > 1
    return pages.render(
        "sweeps/sweep.html",
        title=results.sweep.title,
        finished=len(results.finished),
        total=len(results.sweep.points),
        unfinished=not results.complete,
        failed=[
            [f"{row['point']}: {row['label'] or row['algorithm']}", row["error"]] for row in results.failed
        ],
        unprotected=results.unprotected,
        findings=_findings(charts.groups),
        frontiers=charts.frontiers(),
        claimed=charts.claimed(),
        attacks=[
            (name, f"{name}: {data}" if several else name, charts.attacks({name: rows}))
            for (name, data), rows in scored.items()
        ],
        times=charts.times(),
        **_filters(results),
        **_table(results),
    )


def _findings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The tables that answer what users come for, one pair per data set."""
    found = []
    for name, mine in data_sets(groups).items():
        tables = [made for made in (kept_table(mine), promise_table(mine)) if made is not None]
        if tables or sentences(mine):
            found.append({"data": name, "sentences": sentences(mine), "tables": tables})
    return found


def _filters(results: Results) -> dict[str, Any]:
    """Every field that varies with its values, and for each point its values, its plan and its figures."""
    points = {point.id: point for point in results.sweep.points}
    names = [name for name in varied_fields(results.sweep.points) if name not in LOCAL]
    plans: dict[str, dict[str, Any]] = {}
    for row in results.finished:
        point = points[row["id"]]
        chosen = point.values
        fields = {"variant": point.label, **{name: _plain(chosen[name]) for name in names}}
        plans[row["id"]] = {"fields": fields, "facts": _facts(point.fields, row)}
    values = {
        name: sorted({plan["fields"][name] for plan in plans.values()} - {""}, key=_order)
        for name in ("variant", *names)
    }
    filters = {name: found for name, found in values.items() if len(found) > 1}
    if attacks := attack_names(results):
        filters["attack"] = attacks
    return {"filters": filters, "plans": plans}


def _order(text: str) -> tuple[float, str]:
    """Numbers by size, before everything else."""
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text


def _facts(fields: Mapping[str, Any], row: Row) -> list[list[str]]:
    """What the page shows for a mark: its plan and its figures."""
    plan = [
        [name, _text(name, value) if name == "data" else _plain(value)]
        for name, value in fields.items()
        if name in KINDS and name not in LOCAL
    ]
    shown = {**SETTINGS, **FIGURES}
    figures = [[text, _text(name, row[name])] for name, text in shown.items() if name not in fields]
    return plan + [pair for pair in figures if pair[1] not in ("", "–")]


def _table(results: Results) -> dict[str, Any]:
    """All points; settings that are the same in all rows stand in the caption."""
    rows = results.finished
    settings = SETTINGS | {name: name for name in _unlabelled(results) if rows and name in rows[0]}
    columns = {
        name: text
        for name, text in (settings | FIGURES).items()
        if any(row[name] not in (None, "") for row in rows)
    }
    same = [
        name
        for name in columns
        if name in settings and len(rows) > 1 and len({str(r[name]) for r in rows}) == 1
    ]
    caption = "One row per run; epsilon at the plan's delta."
    if same:
        caption += (
            f" The same in all rows: {'; '.join(f'{columns[n]} {_text(n, rows[0][n])}' for n in same)}."
        )
    shown = {name: text for name, text in columns.items() if name not in same}
    numbers = [
        order
        for order, name in enumerate(shown, 1)
        if all(isinstance(row[name], int | float | None) for row in rows)
    ]
    return {
        "head": ["report", *shown.values()],
        "rows": [
            [{"href": row["report"], "text": "audit"}, *(_text(name, row[name]) for name in shown)]
            for row in rows
        ],
        "ids": [row["id"] for row in rows],
        "caption": caption,
        "numbers": numbers,
    }


def _unlabelled(results: Results) -> list[str]:
    """Fields that vary between points of one label, so that the label does not stand for them."""
    by_label: dict[str, list[Point]] = {}
    for point in results.sweep.points:
        by_label.setdefault(point.label, []).append(point)
    varied = {name for points in by_label.values() for name in varied_fields(points)}
    return sorted(varied - {"epsilon", *SETTINGS, *LOCAL})


def _text(name: str, value: Any) -> str:
    if name == "data":
        return shown_data(str(value))
    if isinstance(value, float):
        return number(value)
    if value is None:
        return "∞" if name == "label_epsilon" else "–"
    return f"{value:,}" if name == "bytes" else str(value)


def _plain(value: Any) -> str:
    return json.dumps(value, default=list) if isinstance(value, list | tuple | dict) else str(value)
