"""`securevfl audit`: what did each observer see, what is promised, what could be inferred?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from securevfl.cli.show import number, print_json, table
from securevfl.errors import InputError

if TYPE_CHECKING:
    from securevfl.auditing import Report
    from securevfl.data import VerticalData

EXIT_VIOLATED, EXIT_LIMIT = 10, 11


def audit(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    data: Annotated[
        str | None,
        typer.Option(help="Folder with the run's data, or a data.toml, if not where the plan says."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="server.toml or party.toml of a networked run: its table is the truth (repeat)."),
    ] = None,
    attacks: Annotated[str, typer.Option(help="all, none, or names separated by commas.")] = "all",
    canaries: Annotated[int, typer.Option(help="Canary trials; 0 is the mode's default, -1 none.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of attacks and canaries.")] = 0,
    workers: Annotated[int, typer.Option(help="Attack processes at once.")] = 2,
    html: Annotated[Path | None, typer.Option(help="Write the page here too.")] = None,
    fail_if_violated: Annotated[
        bool, typer.Option("--fail-if-violated", help=f"Exit with {EXIT_VIOLATED} if a promise is broken.")
    ] = False,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", help=f"METRIC=VALUE; exit with {EXIT_LIMIT} if it is exceeded (repeat)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Audit a finished run with exactly what its observers saw; writes report.html and report.json."""
    limits = dict(_limit(text) for text in maximum or [])
    names: Any = attacks if attacks in ("all", "none") else [name.strip() for name in attacks.split(",")]
    truth = _truth(run, config) if config else _data(run, data)
    report = audit_with_progress(
        run, names, data=truth, canaries=canaries, seed=seed, workers=workers, quiet=json
    )
    report.save(run)
    if html is not None:
        from securevfl.auditing.page import render
        from securevfl.files import write_text

        write_text(html, render(report.content))
    if json:
        print_json(report.content)
    else:
        show_report(Console(), report, html or run / "report.html")
    _gate(report, limits, fail_if_violated)


def _limit(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        return name.strip(), float(value if equals else "")
    except ValueError as error:
        raise InputError(f"--max {text!r} is not of the form METRIC=VALUE") from error


def _data(run: Path, folder: str | None) -> VerticalData | None:
    if folder is None:
        return None
    from securevfl.algorithms.resolve import load_planned
    from securevfl.federation.folder import RunFolder

    return load_planned(RunFolder(run).read_plan(), folder)


def _truth(run: Path, configs: list[Path]) -> VerticalData:
    from securevfl.network.config import read_tables
    from securevfl.network.gather import load_truth

    return load_truth(run, read_tables(configs))


def audit_with_progress(run: Path, names: Any, *, quiet: bool, label: str = "", **options: Any) -> Report:
    """Audits with a progress bar on standard error."""
    from securevfl.auditing import audit as run_audit

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return run_audit(run, names, **options)
    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("audit", total=1.0)

        def update(what: str, share: float) -> None:
            bar.update(task, completed=share, description=f"{label} {what}".strip())

        return run_audit(run, names, progress=update, **options)


def _gate(report: Report, limits: dict[str, float], fail_if_violated: bool) -> None:
    from securevfl.auditing import VIOLATED

    if fail_if_violated and report.verdict == VIOLATED:
        typer.echo(f"securevfl: {report.content['words'][0]}", err=True)
        raise typer.Exit(EXIT_VIOLATED)
    problems = report.over_limits(limits)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        typer.echo(f"securevfl: {problems[0]}{more}", err=True)
        raise typer.Exit(EXIT_LIMIT)


def show_report(console: Console, report: Report, page: Path) -> None:
    """Prints the verdict, the matrix, and the attacks that succeeded."""
    from securevfl.auditing.report import beats_baseline

    console.print(f"{report.verdict.upper()}: {report.content['words'][0]}", markup=False)
    console.print(matrix_table(report))
    scored = [a for a in report.attacks if a["status"] == "scored"]
    better = [a for a in scored if beats_baseline(a)]
    if better:
        console.print(attack_table(better, len(scored)))
    elif scored:
        console.print(f"none of {len(scored)} attacks did better than guessing")
    failed = [c for c in report.content["checks"] if c["status"] == "failed"]
    for check in failed:
        console.print(f"check failed: {check['name']}: {check['detail']}", markup=False)
    console.print(f"report in {page}", markup=False, soft_wrap=True)


def matrix_table(report: Report) -> Any:
    """Owner x observer with the three figures and the verdict."""
    shown = table(
        "epsilon: claimed by the paper / promised (sound) / measured (lower bound)",
        "owner", "observer", "mode", "claimed", "promised", "measured", "verdict",
    )  # fmt: skip
    for owner, observer, cell in report.cells():
        shown.add_row(
            owner,
            observer,
            cell["mode"],
            "-" if cell["claimed"] is None else number(cell["claimed"]),
            number(cell["epsilon_upper"]),
            "-" if cell["epsilon_lower"] is None else number(cell["epsilon_lower"]),
            cell["verdict"],
        )
    return shown


def attack_table(better: list[dict[str, Any]], scored: int) -> Any:
    """The attacks that did better than guessing."""
    shown = table(
        f"{len(better)} of {scored} attacks did better than guessing",
        "attack", "owner", "observer", "metric", "score", "baseline",
    )  # fmt: skip
    for a in better:
        shown.add_row(
            a["name"], a["owner"], a["observer"], a["metric"], number(a["score"]), number(a["baseline"])
        )
    return shown
