"""`securevfl suggest`: which way to train under a promised epsilon, without looking at private rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from securevfl.cli.show import number, print_json, table
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan

if TYPE_CHECKING:
    from securevfl.sweeps.suggest import Suggestion, Trial


def suggest(
    data: Annotated[
        list[str], typer.Option(help="A data set by name, a data.toml, or one CSV file per party (repeat).")
    ],
    epsilon: Annotated[float, typer.Option(help="The promise.")],
    delta: Annotated[float, typer.Option(help="The promise; below 1 / number of rows.")] = 1e-5,
    parties: Annotated[int, typer.Option(help="Split a named set's columns over M parties.")] = 0,
    data_folder: Annotated[Path | None, typer.Option(help="Folder with the data set's own files.")] = None,
    id_column: Annotated[str, typer.Option(help="ID column of CSV files.")] = "id",
    label_column: Annotated[str, typer.Option(help="Label column, in one of the CSV files.")] = "label",
    public: Annotated[
        list[Path] | None,
        typer.Option(
            help="Public rows to try on instead of synthetic ones: one CSV file per party (repeat)."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Propose mode, algorithm, protocol, noise, clip and releases; tried on synthetic or public rows only."""
    from securevfl.sweeps.suggest import public_rows
    from securevfl.sweeps.suggest import suggest as make_suggestion

    source = DataSource(
        data=",".join(data),
        data_folder="" if data_folder is None else str(data_folder),
        parties=parties,
        id_column=id_column,
        label_column=label_column,
    )
    plan = Plan(source=source, epsilon=epsilon, delta=delta)
    rows = public_rows(public, plan) if public else None
    console = Console(stderr=True)
    if json or not console.is_terminal:
        found = make_suggestion(plan, public=rows)
    else:
        with Status("trying", console=console) as status:
            found = make_suggestion(
                plan, public=rows, progress=lambda what, share: status.update(f"{share:.0%} trying {what}")
            )
    given = vars(source)
    if json:
        print_json(_mapping(found, given))
    else:
        _show(Console(), found, given)


def _mapping(found: Suggestion, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "proposal": _trial(found.best),
        "worth_it": found.worth_it,
        "command": found.command(given),
        "basis": found.basis,
        "warnings": list(found.warnings),
        "candidates": [_trial(trial) for trial in found.trials],
        "references": [_trial(trial) for trial in found.references],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    plan = trial.plan
    return {
        "name": trial.name,
        "mode": None if plan is None else plan.mode,
        "algorithm": None if plan is None else plan.algorithm,
        "protocol": None if plan is None else plan.protocol,
        "sigma": None if plan is None else plan.sigma,
        "gradient_sigma": None if plan is None else plan.gradient_sigma,
        "clip": None if plan is None else plan.clip,
        "releases": trial.releases,
        "metric": trial.metric,
        "expected": trial.score,
        "fields": dict(trial.fields),
        "reason": trial.reason,
    }


def _show(console: Console, found: Suggestion, given: dict[str, Any]) -> None:
    metric = found.best.metric
    shown = table(
        f"Tried at epsilon {number(found.best.fields['epsilon'])}, delta {found.best.fields['delta']:g}",
        "way of training", "mode", "sigma", "clip", "releases", f"expected {metric}",
    )  # fmt: skip
    for trial in (*found.trials, *found.references):
        plan = trial.plan
        if plan is None:
            shown.add_row(trial.name, "-", "-", "-", "-", "not possible")
            continue
        free = not trial.releases
        shown.add_row(
            trial.name,
            "-" if free else plan.mode,
            "-" if free else number(plan.sigma),
            "-" if free else number(plan.clip),
            "-" if free else f"{trial.releases}",
            number(trial.score),
        )
    console.print(shown)
    for line in _words(found):
        console.print(line, markup=False, highlight=False)
    console.print(f"\n{found.command(given)}", markup=False, highlight=False, soft_wrap=True)


def _words(found: Suggestion) -> list[str]:
    best = found.best
    lines = [f"Tried on {found.basis}."]
    lines += [f"{trial.name} is not possible: {trial.reason}" for trial in found.trials if trial.plan is None]
    lines += [f"note: {text}." for text in found.warnings]
    if not found.worth_it:
        lines.append(
            "At this epsilon no way beats the label holder alone: nothing that may leave would help."
        )
    if best.plan is not None:
        lines.append(
            f"Proposal: {best.plan.algorithm} on protocol {best.plan.protocol}, mode {best.plan.mode}, "
            f"sigma {number(best.plan.sigma)}, clip {number(best.plan.clip)}, "
            f"{best.releases} releases per record."
        )
    return lines
