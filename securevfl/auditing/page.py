"""The report as one self-contained page: opens from disk, asks no network, prints well."""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files
from typing import Any

from securevfl.auditing import charts
from securevfl.auditing.report import HOLDS, VIOLATED
from securevfl.auditing.words import beats_baseline, strength


def render(content: dict[str, Any]) -> str:
    """The page of a report."""
    run = content["run"]
    title = f"Privacy audit: {run['algorithm']} on {run['data'] or run['folder']}"
    sections = [
        _verdict(content),
        _matrix(content),
        _canary(content),
        _attacks(content["attacks"]),
        _seen(content["seen"]),
        _checks(content["checks"]),
        _run(run),
        _resource("method.html"),
        _environment(content["environment"]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_resource('page.css')}</style></head><body>"
        f"<h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def _resource(name: str) -> str:
    return (files("securevfl.auditing") / name).read_text(encoding="utf-8")


def _css(verdict: str) -> str:
    return {HOLDS: "holds", VIOLATED: "violated"}.get(verdict, "none")


def _verdict(content: dict[str, Any]) -> str:
    words = "".join(f"<li>{escape(text)}</li>" for text in content["words"][1:])
    guarantee = content["run"]["guarantee"]
    void = "" if guarantee == "as accounted" else f"<p><strong>Guarantee {escape(guarantee)}.</strong></p>"
    verdict, first = content["verdict"], escape(content["words"][0])
    return (
        f'<div class="verdict {_css(verdict)}"><strong>{escape(verdict.upper())}</strong>'
        f"<p>{first}</p>{void}</div><ul>{words}</ul>"
    )


def _table(
    caption: str, head: list[str], rows: list[list[str]], numbers: frozenset[int] = frozenset()
) -> str:
    """A table; cells are HTML already."""
    right = [" class=n" if place in numbers else "" for place in range(len(head))]
    top = "".join(
        f"<th scope='col'{side}>{escape(name)}</th>" for name, side in zip(head, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if place in numbers else ''}>{cell}</td>" for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class='scroll'><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(value: float | None, missing: str = "infinite") -> str:
    """A number as people read it."""
    if value is None:
        return missing
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _matrix(content: dict[str, Any]) -> str:
    rows = [
        [
            escape(owner),
            escape(observer),
            escape(cell["mode"]),
            f"{cell['releases']:,}",
            figure(cell["claimed"], "–"),
            figure(cell["epsilon_upper"]),
            figure(cell["epsilon_lower"], "–"),
            _stamp(cell),
        ]
        for owner, row in content["owners"].items()
        for observer, cell in row["observers"].items()
    ]
    caption = (
        f"Epsilon at delta {content['run']['delta']:g}. Claimed: what the algorithm's paper would state, "
        "not sound. Promised: sound upper bound. Measured: certified lower bound of the canary audit."
    )
    head = ["owner", "observer", "mode", "releases", "claimed", "promised", "measured", "verdict"]
    body = (
        _table(caption, head, rows, frozenset({3, 4, 5, 6}))
        if rows
        else "<p>Nothing left any organisation.</p>"
    )
    return f"<h2>Who promises what to whom</h2>{body}"


def _stamp(cell: dict[str, Any]) -> str:
    """The verdict with its reason."""
    verdict, comment = cell["verdict"], escape(_comment(cell))
    return (
        f"<strong class='{_css(verdict)}'>{escape(verdict)}</strong><br><span class='small'>{comment}</span>"
    )


def _comment(cell: dict[str, Any]) -> str:
    if cell["verdict"] == HOLDS:
        notes = [f"{strength(cell['epsilon_upper'])} protection", *cell["assumptions"]]
        return "; ".join(notes)
    return "; ".join([*cell["reasons"], *cell["assumptions"]])


CANARIES = {
    "releases": "What leaves for one record",
    "sums": "What leaves for one record in a secure sum",
    "updates": "Noisy updates of the encoder",
    "training": "Whole training runs",
    "party": "Whole sealed runs: a record of a party without labels",
    "label-holder": "Whole sealed runs: a record of the label holder",
    "statistics": "Noisy statistics that centre and scale a party's columns",
}


def _canary(content: dict[str, Any]) -> str:
    if not content["canaries"]:
        return ""
    parts = ["<h2>Canary audit</h2>"]
    for name, result in content["canaries"].items():
        parts += [
            f"<h3>{escape(CANARIES.get(name, name))}</h3>",
            charts.trade_off(result),
            _canary_words(result),
        ]
    parts.append(
        "<p class='small'>Solid curve: no attacker may get below it if the promise is kept. Cross: the "
        "attacker's measured errors. Dashed curve: the promise if only a record's own releases counted, or "
        "of sealed training only the totals that the attacker obtains itself.</p>"
    )
    return "".join(parts)


def _canary_words(result: dict[str, Any]) -> str:
    trials = result["positives"] + result["negatives"]
    how = f", for records of {', '.join(result['owners'])}," if result["owners"] else ""
    text = (
        f"<p>{trials:,} trials{escape(how)} with the run's own protection: mu is at least "
        f"<strong>{figure(result['mu_lower'])}</strong> (95 % confidence), at most "
        f"{figure(result['claims'][result['accounting']])} is promised for these trials. Without assuming "
        f"Gaussian privacy, epsilon is at least {figure(result['epsilon_free'])}; by the one-run bound, "
        f"{figure(result['epsilon_one_run'])}.</p>"
    )
    return text + _refuted(result)


REFUTED = {
    "per-record": (
        "Counting only a record's own releases",
        "training on raw records spreads each record into what leaves for all others",
    ),
    "own totals": (
        "Counting only the totals that the observer obtains itself",
        "other parties' weights carry their totals into later ones",
    ),
}


def _refuted(result: dict[str, Any]) -> str:
    """What the trials say about accountings that count too little."""
    return "".join(
        f"<p>{what} (mu {figure(result['claims'][name])}) would be <strong>refuted</strong> by the trials: "
        f"{why}.</p>"
        for name, (what, why) in REFUTED.items()
        if name != result["accounting"] and result["mu_lower"] > (result["claims"].get(name) or math.inf)
    )


def _attacks(attacks: list[dict[str, Any]]) -> str:
    if not attacks:
        return "<h2>Attacks</h2><p>No attacks were asked for.</p>"
    scored = [a for a in attacks if a["status"] == "scored"]
    shown = [
        a for a in scored if a["score"] is not None and a["metric"] in ("auc", "accuracy", "recovered", "tpr")
    ]
    rows = [
        [
            escape(a["name"]),
            escape(a["owner"]),
            escape(a["observer"]),
            escape(a["metric"]),
            figure(a["score"]),
            f"{figure(a['low'])} – {figure(a['high'])}",
            figure(a["baseline"], "–"),
            figure(a["ceiling"], "–"),
            "<strong>beats the baseline</strong>" if beats_baseline(a) else "no better than guessing",
            escape(a["note"]),
        ]
        for a in scored
    ]
    head = [
        "attack",
        "owner",
        "observer",
        "metric",
        "score",
        "95 % interval",
        "baseline",
        "ceiling",
        "reading",
        "note",
    ]
    caption = (
        "Each attack had the observer's view and its declared knowledge, nothing else. "
        "Ceiling: the most that the promise allows."
    )
    parts = ["<h2>Attacks</h2>"]
    if shown:
        legend = (
            "Bar: score; whisker: 95 % interval; solid tick: baseline; dashed tick: ceiling of the promise."
        )
        parts += [charts.bars(shown), f"<p class='small'>{legend}</p>"]
    parts.append(
        _table(caption, head, rows, frozenset({4, 5, 6, 7}))
        if rows
        else "<p>No attack applies to this run.</p>"
    )
    return "".join(parts) + _not_applicable([a for a in attacks if a["status"] != "scored"])


def _not_applicable(attacks: list[dict[str, Any]]) -> str:
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for a in attacks:
        reasons.setdefault((a["name"], a["status"], a["reason"]), []).append(
            f"{a['owner']} by {a['observer']}"
        )
    if not reasons:
        return ""
    rows = [
        [escape(name), escape(status), escape(", ".join(pairs)), escape(reason)]
        for (name, status, reason), pairs in reasons.items()
    ]
    table = _table("Attacks without a score", ["attack", "status", "owner and observer", "reason"], rows)
    return f"<details><summary>{len(rows)} attacks without a score, and why</summary>{table}</details>"


def _seen(seen: list[dict[str, Any]]) -> str:
    rows = [
        [
            escape(s["observer"]),
            escape(s["sender"]),
            escape(s["kind"]),
            f"{s['messages']:,}",
            f"{s['bytes']:,}",
        ]
        for s in seen
    ]
    if not rows:
        return "<h2>Who saw what</h2><p>No views were recorded.</p>"
    head = ["observer", "sender", "kind", "messages", "bytes"]
    return "<h2>Who saw what</h2>" + _table(
        "Messages that each organisation received", head, rows, frozenset({3, 4})
    )


def _checks(checks: list[dict[str, Any]]) -> str:
    rows = [
        [
            escape(c["name"]),
            escape(c["owner"] or "all"),
            f"<strong>{escape(c['status'])}</strong>",
            escape(c["detail"]),
        ]
        for c in checks
    ]
    return "<h2>Books against views</h2>" + _table(
        "Checks that need no attack", ["check", "whose", "result", "detail"], rows
    )


def _run(run: dict[str, Any]) -> str:
    test = ", ".join(f"{name} {value:.4f}" for name, value in run["test"].items() if value is not None)
    facts = {
        "algorithm": run["algorithm"],
        "protocol": run["protocol"],
        "accounting mode": run["mode"],
        "data": run["data"] or "–",
        "parties": ", ".join(run["parties"]),
        "label holder": run["label_holder"],
        "clip C": f"{run['clip']:g}",
        "noise sigma": f"{run['sigma']:g}",
        "epochs": str(run["epochs"]),
        "test": test or "not evaluated",
        "truth for scoring": run["truth"],
    }
    rows = [[escape(name), escape(value)] for name, value in facts.items()]
    return "<h2>The run</h2>" + _table("", ["", ""], rows)


def _environment(environment: dict[str, str]) -> str:
    text = ", ".join(f"{name} {version}" for name, version in environment.items())
    return f"<p class='small'>Made with {escape(text)}.</p>"
