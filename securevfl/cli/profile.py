"""`securevfl profile`: what everybody wants to know before any model, through the gates, with one budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from securevfl.cli import completion
from securevfl.errors import PlanError

if TYPE_CHECKING:
    from securevfl.auditing.profiles import ColumnProfile


def profile(
    data: Annotated[
        list[str],
        typer.Option(
            help="A data set by name, a data.toml, or one CSV file per party.",
            autocompletion=completion.data_sets,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; it must not exist.")],
    epsilon: Annotated[float, typer.Option(help="What all counts together may cost each person.")] = 0.25,
    delta: Annotated[float, typer.Option(help="The delta of epsilon.")] = 1e-5,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder with the data set's own files, or with a folder of its name.")
    ] = None,
    parties: Annotated[int | None, typer.Option(help="Split a named set's columns over M parties.")] = None,
    id_column: Annotated[str, typer.Option(help="ID column of CSV files.")] = "id",
    label_column: Annotated[str, typer.Option(help="Label column, in one of the CSV files.")] = "label",
    collusion: Annotated[int, typer.Option(help="How many members may pool what they see.")] = 1,
    record_views: Annotated[
        bool, typer.Option("--record-views", help="Write what each observer saw, for an audit.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Missing rates, distributions and information value of every column of every party, at one epsilon."""
    if not epsilon > 0:
        raise PlanError(f"--epsilon is {epsilon}; a profile needs a target above 0")
    from securevfl.cli.show import print_json
    from securevfl.cli.train import checked_parties, named, run_with_progress
    from securevfl.files import check_new, write_text
    from securevfl.settings.plan import Plan
    from securevfl.settings.source import load_planned

    source = {
        "data": named(data),
        "data_folder": "" if data_folder is None else str(data_folder),
        "parties": checked_parties(parties) or 0,
        "id_column": id_column,
        "label_column": label_column,
    }
    plan = Plan(
        algorithm="sealed",
        model="profile",
        epsilon=epsilon,
        delta=delta,
        collusion=collusion,
        record_views=record_views,
        source=source,
    )
    check_new(out)
    rows = load_planned(plan)
    from securevfl.auditing.profiles import profile_page, read_profile  # torch: once every name is right

    run = run_with_progress(rows, plan, out, quiet=json, label="profile")
    columns = read_profile(out)
    if html is not None:
        spent = f"epsilon {epsilon:g} at delta {delta:g} for each person, all columns together"
        write_text(html, profile_page(columns, title=f"Profile of {out.resolve().name}", spent=spent))
    if json:
        print_json(
            {
                "privacy": run.result["privacy"],
                "columns": [each.to_mapping() for each in columns],
                "out": str(out),
            }
        )
    else:
        _show(columns, epsilon, delta)
        typer.echo(f"files in {out}")


def _show(columns: list[ColumnProfile], epsilon: float, delta: float) -> None:
    from securevfl.auditing.profiles import missing_text
    from securevfl.cli.show import table, terminal

    title = f"epsilon {epsilon:g} at delta {delta:g} for each person, all columns together"
    shown = table(
        title, "party", "column", "information value", "missing", "bins", "positive, lowest to highest"
    )
    for each in columns:
        rates = [part.positive for part in each.bins if part.positive is not None]
        ends = f"{min(rates):.1%} to {max(rates):.1%}" if rates else "–"
        shown.add_row(
            each.party,
            each.column[:32],
            f"{each.information:.3f}",
            missing_text(each),
            str(len(each.bins)),
            ends,
        )
    terminal().print(shown)
