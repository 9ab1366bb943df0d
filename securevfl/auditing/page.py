"""The report as one self-contained page: what the template ``report.html`` shows, and its charts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from securevfl import pages
from securevfl.auditing.verdicts import Verdict
from securevfl.auditing.words import GLOSSARY, POOR, beats_baseline, power_words, strength, verdict_words
from securevfl.pages import number
from securevfl.pages.charts import SOFT, Chart

Cells = list[Any]

CANARIES = {
    "releases": "What leaves for one record",
    "sums": "What leaves for one record in a secure sum",
    "updates": "Noisy updates of the encoder",
    "training": "Whole training runs, simulated",
    "party": "Whole sealed runs, simulated: a record of a party without labels",
    "label-holder": "Whole sealed runs, simulated: a record of the label holder",
    "party, last fit": "The last fit of a scorecard, simulated: a record of a party without labels",
    "label-holder, last fit": "The last fit of a scorecard, simulated: a record of the label holder",
    "training again (party)": "Whole training runs by the real code: a record of a party without labels",
    "training again (label holder)": "Whole training runs by the real code: a record of the label holder",
    "statistics": "Noisy statistics that centre and scale a party's columns",
    "evaluation totals": "Noisy totals over the test part, which metrics are made of",
}
# Accountings that count less than a record spreads to, and why they fail; shown beside the promise.
TOO_LITTLE = {
    "per-record": (
        "Counting only a record's own releases",
        "training on raw records spreads each record into what leaves for all others",
    ),
    "own totals": (
        "Counting only the totals that the observer obtains itself",
        "other parties' weights carry their totals into later ones",
    ),
}
SHARES = ("auc", "accuracy", "recovered", "tpr")
"""Metrics between 0 and 1, which fit into one chart."""


def render(content: dict[str, Any]) -> str:
    """The page of a report."""
    run = content["run"]
    scored = [a for a in content["attacks"] if a["status"] == "scored"]
    charted = [a for a in scored if a["score"] is not None and a["metric"] in SHARES]
    return pages.render(
        "auditing/report.html",
        **content,
        title=f"Privacy audit: {run['algorithm']} on {run['data'] or run['folder']}",
        pairs=_pairs(content["owners"]),
        canary_audits=[_canary(*found) for found in content["canaries"].items()],
        attack_chart=_attack_chart(charted).svg("attacks") if charted else "",
        scored=[_scored(a) for a in scored],
        not_scored=_not_scored([a for a in content["attacks"] if a["status"] != "scored"]),
        received=[
            [s["observer"], s["sender"], s["kind"], f"{s['messages']:,}", f"{s['bytes']:,}"]
            for s in content["seen"]
        ],
        finding_rows=_findings(content["findings"]),
        facts=_facts(run),
        glossary=GLOSSARY,
        public=False,
        poor=_poor(content),
    )


def render_public(content: dict[str, Any]) -> str:
    """The page that may leave those who hold the data, of what `securevfl.auditing.dossier.public` keeps."""
    run = content["run"]
    return pages.render(
        "auditing/report.html",
        **content,
        title=f"Privacy audit, public part: {run['algorithm']} on {run['data'] or run['folder']}",
        pairs=_pairs(content["owners"]),
        canary_audits=[_canary(*found) for found in content["canaries"].items()],
        facts=_facts(run),
        glossary=GLOSSARY,
        public=True,
        poor=_poor(content),
    )


def _poor(content: dict[str, Any]) -> bool:
    """Whether promises that hold are worth little: their verdict is not shown as good news."""
    cells = [cell for row in content["owners"].values() for cell in row["observers"].values()]
    holds = content["verdict"] == Verdict.HOLDS.value
    return holds and any(strength(cell["epsilon_upper"]) in POOR for cell in cells)


def _findings(findings: list[dict[str, Any]]) -> list[Cells]:
    """One row for each path and verdict with the same words, with all the promises that it concerns."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    for each in findings:
        words = "; ".join(each["reasons"] or each["tested"])
        rows.setdefault((each["path"], each["verdict"], words, each["power"]), []).append(each["promise"])
    return [
        [path, ", ".join(promises), {"stamp": verdict}, "" if power is None else f"{power:.0%}", words]
        for (path, verdict, words, power), promises in rows.items()
    ]


def _pairs(owners: dict[str, Any]) -> list[Cells]:
    """Each promise with its verdict first, so that no screen is too narrow for it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for owner, row in owners.items():
        for observer, cell in row["observers"].items():
            rows.setdefault((verdict_words(cell), owner, *_figures(cell)), []).append(observer)
    return [
        [{"stamp": verdict}, owner, ", ".join(observers), *figures]
        for (verdict, owner, *figures), observers in rows.items()
    ]


def _figures(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        number(cell["epsilon_upper"], "infinite"),
        strength(cell["epsilon_upper"]),
        number(cell["claimed"]),
        number(cell["epsilon_lower"]),
        power_words(cell),
        f"{cell['releases']:,}",
        _note(cell),
    )


def _note(cell: dict[str, Any]) -> str:
    """What stands behind a verdict, and what it rests on besides."""
    trust = [f"rests on: {text}" for text in cell["assumptions"]]
    covers = [f"covers {cell['covers']}"] if cell["covers"] else []
    said = cell["reasons"] or ["every path was reconciled and replayed"]
    return "; ".join([f"mode {cell['mode']}", *said, *covers, *trust])


def _canary(name: str, result: dict[str, Any]) -> dict[str, Any]:
    refuted = [
        {"what": what, "why": why, "mu": result["claims"][accounting]}
        for accounting, (what, why) in TOO_LITTLE.items()
        if accounting != result["accounting"]
        and result["mu_lower"] > (result["claims"].get(accounting) or math.inf)
    ]
    chart = _trade_off(result).svg(f"canary-{name}")
    return {**result, "title": CANARIES.get(name, name), "chart": chart, "refuted": refuted}


def _trade_off(canary: dict[str, Any]) -> Chart:
    """Errors of the best attacker: the promised curve below which nobody may get, and the measured point."""
    fp = canary["false_positives"] / max(canary["negatives"], 1)
    fn = canary["false_negatives"] / max(canary["positives"], 1)
    chart = Chart(f"Trade-off of the canary audit: measured errors {fp:.3f} and {fn:.3f}", 5.2, 3.9)
    axes = chart.axes[0]
    axes.plot([0, 1], [1, 0], color=SOFT, linestyle=":", linewidth=1)
    promised = canary["claims"].get(canary["accounting"])
    for name, mu in canary["claims"].items():
        if mu is not None and name == canary["accounting"]:
            axes.plot(*_gaussian_curve(mu), color="#0b3d91", linewidth=2, label="promised")
        elif mu is not None and name in TOO_LITTLE and mu != promised:
            axes.plot(*_gaussian_curve(mu), color="#b34700", linewidth=1.7, linestyle="--", label=name)
    axes.plot(
        [fp], [fn], "+", color="black", markersize=11, markeredgewidth=2.5, clip_on=False, linestyle="",
        label=f"measured: {fp:.3f}, {fn:.3f}",
    )  # fmt: skip
    axes.set(xlabel="false alarms of the attacker", ylabel="misses of the attacker", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper right", framealpha=0.9)
    return chart


def _gaussian_curve(mu: float) -> tuple[Any, Any]:
    """G_mu: the smallest rate of misses for each rate of false alarms under mu-GDP."""
    edge = np.geomspace(1e-6, 0.02, 40)
    alarms = np.concatenate([edge, np.linspace(0.02, 0.98, 120), 1 - edge[::-1]])
    return alarms, ndtr(ndtri(1 - alarms) - mu)


def _attack_chart(attacks: list[dict[str, Any]]) -> Chart:
    """Scores between 0 and 1 with their intervals and baselines."""
    chart = Chart(
        "Attack scores with intervals and baselines; the table below has the figures",
        5.2,
        0.5 + 0.45 * len(attacks),
    )
    axes = chart.axes[0]
    for place, attack in enumerate(attacks):
        axes.barh(place, attack["score"], height=0.34, color="#9db7d8", edgecolor="#2c4a73")
        axes.plot([attack["low"], attack["high"]], [place] * 2, "|-", color="black", linewidth=1)
        if attack["baseline"] is not None:
            axes.vlines(min(attack["baseline"], 1.0), place - 0.24, place + 0.24, "black", "-", linewidth=2)
        name = f"{attack['name']}: {attack['owner']} by {attack['observer']}"
        axes.text(0.0, place - 0.26, f" {name}", verticalalignment="bottom", fontsize=8.5)
        axes.text(1.02, place, f"{attack['score']:.3f}", verticalalignment="center")
    axes.set(xlim=(0, 1), ylim=(len(attacks) - 0.5, -0.8), yticks=[])
    return chart


def _scored(attack: dict[str, Any]) -> Cells:
    return [
        attack["name"],
        attack["owner"],
        attack["observer"],
        attack["metric"],
        number(attack["score"], "infinite"),
        f"{number(attack['low'], 'infinite')} – {number(attack['high'], 'infinite')}",
        number(attack["baseline"]),
        {"stamp": "beats the baseline"} if beats_baseline(attack) else "no better than guessing",
        attack["note"],
    ]


def _not_scored(attacks: list[dict[str, Any]]) -> list[Cells]:
    """One row for each reason, with all the pairs that it concerns."""
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for a in attacks:
        pairs.setdefault((a["name"], a["status"], a["reason"]), []).append(f"{a['owner']} by {a['observer']}")
    return [[name, status, ", ".join(found), reason] for (name, status, reason), found in pairs.items()]


def _facts(run: dict[str, Any]) -> list[Cells]:
    test = ", ".join(
        f"{name} {value:.4f}" for name, value in run.get("test", {}).items() if value is not None
    )
    exact = [["test", test or "not evaluated"], ["truth for scoring", run["truth"]]] if "test" in run else []
    return [
        *([["members", run["adversary"]]] if run.get("adversary") else []),
        *([["dealer", run["dealer"]]] if run.get("dealer") else []),
        *([["agreement", run["agreement"]]] if run.get("agreement") else []),
        *(["seen to deviate", said] for said in run.get("deviations", [])),
        ["algorithm", run["algorithm"]],
        ["protocol", run["protocol"]],
        ["accounting mode", run["mode"]],
        ["data", run["data"] or "–"],
        ["parties", ", ".join(run["parties"])],
        ["label holder", run["label_holder"]],
        ["clip C", f"{run['clip']:g}"],
        ["noise sigma", f"{run['sigma']:g}"],
        ["epochs", str(run["epochs"])],
        *exact,
    ]
