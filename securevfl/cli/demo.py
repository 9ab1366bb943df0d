"""`securevfl demo`: the main job on embedded data, start to finish."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from securevfl.cli.show import number, print_json, table
from securevfl.cli.train import run_with_progress
from securevfl.plan import Plan

DATA = "breast-cancer"
PARTIES = 3
COMMON = Plan(
    algorithm="vafl", data=DATA, parties=PARTIES, epochs=20, batch=32, delays="exponential", record_views=True
)

# What each variant is, in the words of the table.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "p0 alone": ("what p0 reaches with its own features; nothing leaves anybody", {"algorithm": "local"}),
    "no protection": ("embeddings leave as they are", {}),
    "as published": (
        "noise 0.1 on embeddings of raw-trained encoders (VAFL, section 5); accounted soundly as mode strict",
        {"sigma": 0.1},
    ),
    "dp-encoder": (
        "noisy embeddings, and local updates clipped and noised per record; epsilon 8 per record",
        {"encoder_training": "dp", "epsilon": 8.0, "epochs": 5},
    ),
    "frozen": (
        "encoders never see private records, each record is released once; epsilon 8 per record",
        {"encoder_training": "none", "epsilon": 8.0, "embedding": 4},
    ),
}

READING = """
How to read it: epsilon bounds what p0, who knows the record IDs, can learn about one record of the owner.
Below 10 is a promise, thousands are none, infinite means that exact data left. Labels are 'exposed' where p0
sends gradients back: they reveal the labels, whatever the noise on the embeddings.

Plans, metrics, ledgers, views and models are in {folder}"""


def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; by default runs/demo-TIME.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train VAFL with three parties, with and without protection, and say what each way promises."""
    from securevfl.data import VerticalData

    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    data = VerticalData.load(DATA, parties=PARTIES)
    runs = {}
    for name, (_, changes) in VARIANTS.items():
        plan = COMMON.with_changes(**changes)
        runs[name] = run_with_progress(data, plan, folder / name.replace(" ", "-"), quiet=json, label=name)
    if json:
        print_json({"folder": str(folder), "variants": {name: run.result for name, run in runs.items()}})
        return
    _show(Console(), folder, runs)


def _show(console: Console, folder: Path, runs: dict[str, Any]) -> None:
    shown = table(
        f"VAFL on {DATA}: {PARTIES} parties, p0 holds the labels; epsilon at delta 1e-5",
        "variant",
        "AUC",
        "owner",
        "mode",
        "mu",
        "epsilon",
        "labels",
    )
    for name, run in runs.items():
        first = [name, number(run.test["auc"])]
        exposed = "exposed" if run.result["labels"].startswith("exposed") else "safe"
        owners = [(owner, spend) for owner, spend in sorted(run.privacy.items()) if owner != "p0"]
        if not owners:
            shown.add_row(*first, "", "", "", "", exposed)
        for owner, spend in owners:
            if owner:
                shown.add_row(
                    *first, owner, spend["mode"], number(spend["mu"]), number(spend["epsilon"]), exposed
                )
                first, exposed = ["", ""], ""
    console.print(shown)
    for name, (meaning, _) in VARIANTS.items():
        console.print(f"  {name}: {meaning}", markup=False)
    console.print(READING.format(folder=folder), markup=False, soft_wrap=True)
