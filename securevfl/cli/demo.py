"""`securevfl demo`: the main job on embedded data, start to finish: train, audit, say what is promised."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli.audit import audit_with_progress
from securevfl.cli.show import number, print_json, table, terminal
from securevfl.cli.train import run_with_progress
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.auditing import Report
    from securevfl.federation.run import Run

DATA = "breast-cancer"
PARTIES = 3
SOURCE = DataSource(data=DATA, parties=PARTIES)
COMMON: dict[str, Any] = {"epochs": 15, "batch": 32, "settings": {"delays": "exponential"}}

# What each variant is, in the words of the table.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "p0 alone": ("what p0 reaches with its own features; nothing leaves anybody", {"algorithm": "local"}),
    "sealed": (
        "the default, here at epsilon 8 for features and labels: only noisy totals of all are opened",
        {"algorithm": "sealed", "epsilon": 8.0},
    ),
    "frozen": (
        "encoders never see private records and each record is released once, at epsilon 8",
        {"algorithm": "vafl", "encoder_training": "none", "epsilon": 8.0, "embedding": 4},
    ),
    "as published": (
        "noise 0.1 on the embeddings of encoders trained on raw records (VAFL, section 5)",
        {"algorithm": "vafl", "sigma": 0.1},
    ),
    "unprotected": (
        "embeddings leave as they are, and gradients from which labels can be worked out",
        {"algorithm": "vafl", "unprotected": True},
    ),
}

READING = """
How to read it. p0 holds the labels and acts as server. AUC: on the test part. claim: epsilon that the paper
would state, not sound. promised: a sound bound of what p0 can learn about one record of p1; below 10 is a
promise, thousands are none, infinite means that exact data left. measured: what canaries, made-up records,
certify as a lower bound. verdict: `holds` only where every message was matched with the ledger and the noise
recomputed. labels: AUC of the best attack on the labels, 0.5 is guessing, - none
applies. beaten: how many of the attacks that apply did better than guessing without the view.

Plans, ledgers, views and models are in {folder}. Open a report:
{pages}"""


def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; by default runs/demo-TIME.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train with three parties, with and without protection, audit each run, and say what it promises."""
    from securevfl.data import VerticalData

    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    data = VerticalData.load(DATA, parties=PARTIES)
    runs: dict[str, tuple[Run, Report | None]] = {}
    for name, (_, changes) in VARIANTS.items():
        plan = _plan(changes)
        run = run_with_progress(
            data, plan, folder / name.replace(" ", "-"), quiet=json, label=f"train: {name}"
        )
        runs[name] = run, _audited(run, data, name, quiet=json) if run.privacy else None
    if json:
        content = {name: _content(run, report) for name, (run, report) in runs.items()}
        print_json({"folder": str(folder), "variants": content})
    else:
        _show(terminal(), folder, runs)


def _plan(changes: dict[str, Any]) -> Plan:
    """The common plan with a variant's changes; sealed training is best with its own defaults."""
    common = {} if changes.get("algorithm") == "sealed" else COMMON
    return Plan(**{**common, **changes, "source": SOURCE, "record_views": True})


def _audited(run: Run, data: Any, name: str, *, quiet: bool) -> Report | None:
    if run.folder is None:
        return None
    report = audit_with_progress(
        run.folder, "all", data=data, workers=2, quiet=quiet, label=f"audit: {name}:"
    )
    from securevfl.auditing.dossier import write_dossier

    write_dossier(report, run.folder, auditor="securevfl demo")
    return report


def _content(run: Run, report: Report | None) -> dict[str, Any]:
    verdict = None if report is None else report.verdict
    return {**run.result, "verdict": verdict, "owners": {} if report is None else report.owners}


def _show(console: Console, folder: Path, runs: dict[str, tuple[Run, Report | None]]) -> None:
    shown = table(
        f"{DATA}, {PARTIES} parties; epsilon of p1's records towards p0 at delta 1e-5",
        "variant", "AUC", "claim", "promised", "measured", "verdict", "labels", "beaten",
    )  # fmt: skip
    for name, (run, report) in runs.items():
        shown.add_row(name, f"{run.test['auc']:.3f}", *_figures(report))
    console.print(shown)
    for name, (meaning, _) in VARIANTS.items():
        console.print(f"  {name}: {meaning}", markup=False, soft_wrap=True)
    pages = [f"  {page}" for run, _ in runs.values() if run.folder for page in sorted(_pages(run.folder))]
    console.print(READING.format(folder=folder, pages="\n".join(pages)), markup=False, soft_wrap=True)


def _pages(folder: Path) -> list[Path]:
    return list(folder.glob("audits/*/report.html"))


def _figures(report: Report | None) -> tuple[str, ...]:
    """Claimed, promised, measured, verdict, best label attack, attacks that beat guessing."""
    if report is None:
        return ("-", "-", "-", "-", "-", "-")
    from securevfl.auditing.words import beats_baseline, verdict_words

    cell = report.owners["p1"]["observers"]["p0"]
    scored = [a for a in report.attacks if a["status"] == "scored"]
    labels = [a["score"] for a in scored if a["family"] == "label" and a["metric"] == "auc"]
    return (
        "-" if cell["claimed"] is None else number(cell["claimed"]),
        number(cell["epsilon_upper"]),
        "-" if cell["epsilon_lower"] is None else number(cell["epsilon_lower"]),
        verdict_words(cell).replace(", but the protection is", ","),
        f"{max(labels):.3f}" if labels else "-",
        f"{sum(map(beats_baseline, scored))}/{len(scored)}",
    )
