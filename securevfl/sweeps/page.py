"""``sweep.html``: one self-contained page; opens from disk, asks no network, works without scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from securevfl.files import write_text
from securevfl.sweeps import charts
from securevfl.sweeps.charts import number, target_words
from securevfl.sweeps.findings import kept_table, promise_table, sentences
from securevfl.sweeps.looks import Look, looks_of
from securevfl.sweeps.results import Results, Row
from securevfl.sweeps.spec import DEFAULTS
from securevfl.sweeps.summary import Group, attack_names, data_sets, groups_of, scored_attacks

COLUMNS = {
    "label": "variant", "data": "data", "algorithm": "algorithm", "protocol": "protocol", "mode": "mode",
    "sigma": "sigma", "target_epsilon": "target ε", "seed": "seed", "auc": "AUC", "accuracy": "accuracy",
    "r2": "R²", "claimed_epsilon": "claimed ε", "sound_epsilon": "sound ε", "measured_epsilon": "measured ε",
    "label_epsilon": "labels ε", "verdict": "verdict", "virtual_time": "virtual time", "bytes": "bytes",
}  # fmt: skip


def write_page(results: Results) -> None:
    """Writes ``sweep.html``."""
    write_text(results.folder / "sweep.html", render(results))


def render(results: Results) -> str:
    """The page."""
    groups = groups_of(results)
    looks = looks_of([group.series for group in groups])
    title = escape(results.sweep.title)
    sections = [_head(results), *_findings(groups), *_pictures(results, groups, looks), _table(results)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_resource('sweep.css')}</style></head><body>"
        f"<h1>{title}</h1>{''.join(sections)}{_failed(results)}{_reading()}"
        f'<script type="application/json" id="plans">{_plans(results)}</script>{_resource("script.html")}'
        "</body></html>\n"
    )


def _resource(name: str) -> str:
    return (files("securevfl.sweeps") / name).read_text(encoding="utf-8")


def _head(results: Results) -> str:
    total, done, failed = len(results.sweep.points), len(results.finished), len(results.failed)
    words = [f"{done} of {total} points finished"]
    if failed:
        words.append(f'<a href="#failed">{failed} failed</a>')
    if not results.complete:
        words.append("unfinished: run the same command again to go on")
    return f'<p>{"; ".join(words)}. The whole table: <a href="results.csv">results.csv</a>.</p>'


def _findings(groups: Sequence[Group]) -> list[str]:
    """The tables that answer what users come for, one pair per data set."""
    parts = []
    for name, found in data_sets(groups).items():
        words = "".join(f"<li>{escape(text)}</li>" for text in sentences(found))
        heading = f"What was found on {escape(name)}"
        tables = [
            _html_table(*made) for made in (kept_table(found), promise_table(found)) if made is not None
        ]
        if words or tables:
            parts.append(f"<h2>{heading}</h2><ul>{words}</ul>{''.join(tables)}")
    return parts


def _html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(
        f'<th scope="col"{"" if order == 0 else " class=n"}>{escape(cell)}</th>'
        for order, cell in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if order == 0 else ' class=n'}>{_unbroken(cell)}</td>" for order, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="found"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _unbroken(cell: str) -> str:
    """A cell whose figures stay on one line each: a share in brackets may go below."""
    return escape(cell).replace(" ± ", "\u00a0±\u00a0")


def _pictures(results: Results, groups: Sequence[Group], looks: dict[str, Look]) -> list[str]:
    if not groups:
        return ["<p>No point has finished yet.</p>"]
    parts = [_filters(results), '<div id="detail" class="detail" aria-live="polite" hidden></div>']
    parts.append(charts.legend(looks))
    for name, found in data_sets(groups).items():
        if any(group.mean is not None for group in found):
            parts.append(f"<h2>Privacy against utility: {escape(name)}</h2>{charts.frontier(found, looks)}")
    parts.append(
        '<p class="small">Large marks: mean over seeds with its 95 % interval. Small marks: single runs, '
        "each a link to its audit. Grey staircase: the Pareto line, the best utility at no more epsilon. "
        "Epsilon is that of the features towards the worst observer; labels are in the table.</p>"
    )
    if any(row["sound_epsilon"] for group in groups for row in group.rows):
        parts.append(f"<h2>Claimed against sound epsilon</h2>{charts.claimed_against_sound(groups, looks)}")
        parts.append(
            '<p class="small">Above the dashed diagonal the paper claims more than holds. Short bars: what '
            "canaries certify at least.</p>"
        )
    return parts + _attacks(results, groups, looks) + _times(results, groups, looks)


def _attacks(results: Results, groups: Sequence[Group], looks: dict[str, Look]) -> list[str]:
    series = {row["id"]: group.series for group in groups for row in group.rows}
    by_chart: dict[tuple[str, str], list[Any]] = {}
    for row, attack in scored_attacks(results):
        by_chart.setdefault((attack["name"], str(row["data"])), []).append((row, attack))
    several = len(data_sets(groups)) > 1
    parts = []
    for (name, data), mine in sorted(by_chart.items()):
        picture = charts.attack_chart(name, mine, series, looks)
        heading = escape(f"{name}: {data}" if several else name)
        parts.append(f'<div class="attack" data-attack="{escape(name)}"><h3>{heading}</h3>{picture}</div>')
    if not parts:
        return []
    note = "How much better an attacker does with the view than without it; 0 is guessing."
    return [
        f"<h2>Attacks against epsilon</h2><p class='small'>{note}</p><div class='attacks'>",
        *parts,
        "</div>",
    ]


def _times(results: Results, groups: Sequence[Group], looks: dict[str, Look]) -> list[str]:
    parts = []
    for name, found in data_sets(groups).items():
        racing = [group for group in found if group.first["virtual_time"]]
        there = [group for group in racing if any(row["time_to_target"] is not None for row in group.rows)]
        if there:
            words = f"Time until {target_words(results.targets[name])}: {name}"
            parts.append(f"<h2>{escape(words)}</h2>{charts.times(there, looks)}")
            if len(there) < len(racing):
                parts.append(f'<p class="small">{len(racing) - len(there)} other plans never got there.</p>')
    return parts


def _filters(results: Results) -> str:
    """Choices that scripts act on; without scripts they stay hidden."""
    rows = results.finished
    choices = {
        "algorithm": sorted({str(row["algorithm"]) for row in rows}),
        "protocol": sorted({str(row["protocol"]) for row in rows}),
        "attack": attack_names(results),
    }
    fields = "".join(
        f'<label>{name} <select data-filter="{name}"><option value="">all</option>'
        + "".join(f"<option>{escape(value)}</option>" for value in values)
        + "</select></label>"
        for name, values in choices.items()
        if values
    )
    return f'<form id="filters" hidden>{fields}<span id="count" class="small"></span></form>'


def _table(results: Results) -> str:
    rows = results.finished
    if not rows:
        return ""
    shown = {name: text for name, text in COLUMNS.items() if any(row[name] not in (None, "") for row in rows)}
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in shown.values())
    body = "".join(
        f'<tr class="f" {charts.tags(row)}><td><a href="{escape(row["report"])}">audit</a></td>'
        + "".join(f"<td>{escape(_text(name, row[name]))}</td>" for name in shown)
        + "</tr>"
        for row in rows
    )
    return (
        '<h2>All points</h2><div class="scroll"><table class="points"><caption>One row per run; epsilon at '
        "the plan's delta.</caption><thead><tr><th scope='col'>report</th>"
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if value is None:
        return "∞" if name == "label_epsilon" else "–"
    return f"{value:,}" if name == "bytes" else str(value)


def _failed(results: Results) -> str:
    rows = [
        [f"{row['point']}: {row['label'] or row['algorithm']}", str(row["error"])] for row in results.failed
    ]
    if not rows:
        return ""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(error)}</td></tr>" for name, error in rows)
    return (
        '<h2 id="failed">Points that failed</h2><div class="scroll"><table><thead><tr>'
        '<th scope="col">point</th>'
        f'<th scope="col">error</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _reading() -> str:
    return _resource("reading.html")


def _plans(results: Results) -> str:
    """What the page shows for a mark: its plan and its figures, by id."""
    fields = {point.id: point.fields for point in results.sweep.points}
    content = {row["id"]: _facts(fields[row["id"]], row) for row in results.finished}
    # "</" would end the script element whatever stands around it
    return json.dumps(content, default=list).replace("</", "<\\/").replace("<!--", "<\\!--")


def _facts(fields: Any, row: Row) -> list[list[str]]:
    plan = [
        [name, _plain(value)] for name, value in fields.items() if name in DEFAULTS and name != "data_folder"
    ]
    figures = [[text, _text(name, row[name])] for name, text in COLUMNS.items() if name not in fields]
    return plan + [pair for pair in figures if pair[1] not in ("", "–")]


def _plain(value: Any) -> str:
    return json.dumps(value, default=list) if isinstance(value, list | tuple | dict) else str(value)
