"""`securevfl suggest`: whether and how to train together under a promised epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli import completion
from securevfl.cli.show import number, print_json, terminal
from securevfl.cli.train import checked_parties
from securevfl.interrupts import end_in_order
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.sweeps.suggest import Suggestion


def suggest(
    data: Annotated[
        list[str],
        typer.Option(
            help="A data set by name, a data.toml, or one CSV file per party (repeat).",
            autocompletion=completion.data_sets,
        ),
    ],
    epsilon: Annotated[float, typer.Option(help="The promise.")] = 1.0,
    delta: Annotated[float, typer.Option(help="The promise; below 1 / number of rows.")] = 1e-5,
    parties: Annotated[int | None, typer.Option(help="Split a named set's columns over M parties.")] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder with the data set's own files, or with a folder of its name.")
    ] = None,
    id_column: Annotated[str, typer.Option(help="ID column of CSV files.")] = "id",
    label_column: Annotated[str, typer.Option(help="Label column, in one of the CSV files.")] = "label",
    public: Annotated[
        list[Path] | None,
        typer.Option(help="Public rows to forecast on instead: one CSV file per party (repeat)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether training together pays at an epsilon, what to expect, and the command for it."""
    source = DataSource(
        data=",".join(data),
        data_folder="" if data_folder is None else str(data_folder),
        parties=checked_parties(parties) or 0,
        id_column=id_column,
        label_column=label_column,
    )
    plan = Plan(source=source, epsilon=epsilon, delta=delta)
    from securevfl.settings.source import rows_at_hand

    at_hand = rows_at_hand(plan, stand_ins=not public)
    from securevfl.sweeps import suggest as adviser  # torch: once the data has been found

    end_in_order()
    rows = adviser.public_rows(public, plan) if public else None
    console = terminal(stderr=True)
    if json or not console.is_terminal:
        found = adviser.suggest(plan, at_hand=at_hand, public=rows)
    else:
        from rich.status import Status

        with Status("reading", console=console) as status:
            found = adviser.suggest(
                plan,
                at_hand=at_hand,
                public=rows,
                progress=lambda what, share: status.update(f"{share:.0%} {what}"),
            )
    if json:
        print_json(_mapping(found, source))
    else:
        _show(terminal(), found, source)


def _mapping(found: Suggestion, source: DataSource) -> dict[str, Any]:
    return {
        "command": found.command(source),
        "worth_it": found.worth_it,
        "metric": found.metric or None,
        "expected": found.expected,
        "low": found.low,
        "high": found.high,
        "alone": None if found.alone is None else dict(found.alone),
        "model": None if found.plan is None else found.plan.model,
        "basis": found.basis,
        "absent": list(found.absent),
        "reasons": list(found.reasons),
        "warnings": list(found.warnings),
    }


def _show(console: Console, found: Suggestion, source: DataSource) -> None:
    for line in _words(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if command := found.command(source):
        console.print(f"\n{command}", markup=False, highlight=False, soft_wrap=True)


def _words(found: Suggestion) -> list[str]:
    """The verdict, the forecast and what it rests on."""
    if found.plan is None:
        lines = ["Do not federate for this as it stands: no way of training fits the data."]
        return [*lines, *(f"  {reason}" for reason in found.reasons)]
    alone = "" if found.best_alone is None else f"the label holder alone reaches {number(found.best_alone)}"
    if found.absent:
        return _words_without_files(found, alone)
    verdict = f"It pays: {alone}." if alone else "The label holder has no features to go alone with."
    if not found.worth_it:
        verdict = f"Do not federate for this: {alone}, at no cost in privacy."
    between = f"between {number(found.low)} and {number(found.high)} in nine runs of ten"
    return [
        verdict,
        f"Forecast: {found.metric} {number(found.expected)}, {between}; sealed, model {found.plan.model}.",
        f"It rests on {found.basis}.",
        *(f"note: {text}." for text in found.warnings),
    ]


def _words_without_files(found: Suggestion, alone: str) -> list[str]:
    """What can be said where somebody's file is elsewhere: the price, not the gain."""
    names = ", ".join(found.absent)
    return [
        f"Not known here: it depends on the columns of {names}, whose files are not at hand.",
        f"Even if those are worth nothing, 19 runs of 20 end above {found.metric} {number(found.low)}"
        + (f"; {alone}." if alone else "."),
        f"Sealed, model {'' if found.plan is None else found.plan.model}. It rests on {found.basis}.",
        "What they are worth shows before any training: securevfl profile, with all organisations.",
        *(f"note: {text}." for text in found.warnings),
    ]
