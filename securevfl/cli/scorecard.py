"""`securevfl scorecard`: the card of a finished run as a table, a CSV file or a page."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli.show import print_json
from securevfl.settings.plan import plan_file

if TYPE_CHECKING:
    from securevfl.auditing.cards import Line


def scorecard(
    run: Annotated[Path, typer.Argument(help="Folder of a run of --algorithm sealed --model scorecard.")],
    csv: Annotated[Path | None, typer.Option(help="Write the card to this CSV file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with shapes.")] = None,
    party: Annotated[str, typer.Option(help="Only this party's columns.")] = "",
    pdo: Annotated[float, typer.Option(help="Points that double the odds.")] = 20.0,
    base_score: Annotated[float, typer.Option(help="Points at the base odds.")] = 600.0,
    base_odds: Annotated[float, typer.Option(help="Negative to positive labels at the base score.")] = 50.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a scorecard: points, evidence, information value and noisy counts of every bin."""
    plan_file(run)  # before anything heavy is loaded
    from securevfl.auditing.cards import about_buckets, facts_of, read_card, to_csv, to_page
    from securevfl.files import write_text

    lines = read_card(run, party=party, pdo=pdo, base=base_score, odds=base_odds)
    facts = [*facts_of(run, pdo=pdo, base=base_score, odds=base_odds), *about_buckets(lines)]
    written = {"card": csv, "page": html}
    if csv is not None:
        write_text(csv, to_csv(lines))
    if html is not None:
        write_text(html, to_page(lines, title=f"Scorecard of {run.resolve().name}", facts=facts))
    if json:
        print_json({"facts": dict(facts), "lines": [_mapping(line) for line in lines]})
        return
    for what, path in written.items():
        if path is not None:
            typer.echo(f"{what}: {path}")
    if csv is None and html is None:
        for name, text in facts:
            typer.echo(f"{name}: {text}")
        _show(lines)


def _mapping(line: Line) -> dict[str, Any]:
    """The line as JSON has it: an end that is open is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(line).items()
    }


def _show(lines: list[Line]) -> None:
    from securevfl.auditing.cards import class_labels, in_figures, predicts_numbers
    from securevfl.cli.show import table, terminal

    if labels := class_labels(lines):
        _show_classes(lines, labels)
        return
    numbers = predicts_numbers(lines)
    title = f"{lines[0].points:.0f} points to start with; more are better odds of a negative label"
    if numbers:
        title = f"{lines[0].points:,.4g} to start with; bins add up to the predicted label"
    shown = table(
        title,
        "party",
        "column",
        "IV",
        "bin",
        "points",
        "±",
        "mean" if numbers else "WOE",
        "records",
    )
    last = ("", "")
    for line in lines[1:]:
        new = (line.party, line.column) != last
        last = line.party, line.column
        shown.add_row(
            line.party if new else "",
            line.column if new else "",
            f"{line.information:.3f}" if new else "",
            line.bin + (" or missing" if line.missing and line.bin != "missing" else ""),
            *in_figures(line, numbers=numbers),
            f"{max(line.positives + line.negatives, 0.0):,.0f}",
        )
    terminal().print(shown)


def _show_classes(lines: list[Line], labels: list[str]) -> None:
    """The points of a bin in one cell: classes may be too many for a column each."""
    from securevfl.auditing.cards import by_bin
    from securevfl.cli.show import table, terminal

    starts = ", ".join(f"{line.label} {line.points:+.0f}" for line in lines[: len(labels)])
    title = f"points for each class; all start with {starts}; classes without points are left out"
    shown = table(title, "party", "column", "IV", "bin", "records", "points by class")
    last = ("", "")
    for each in by_bin(lines[len(labels) :], len(labels)):
        line = each[0]
        new = (line.party, line.column) != last
        last = line.party, line.column
        shown.add_row(
            line.party if new else "",
            line.column if new else "",
            f"{line.information:.3f}" if new else "",
            line.bin,
            f"{max(line.positives + line.negatives, 0.0):,.0f}",
            ", ".join(f"{one.label} {one.points:+.0f}" for one in each if round(one.points)) or "0",
        )
    terminal().print(shown)
