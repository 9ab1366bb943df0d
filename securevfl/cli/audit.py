"""`securevfl audit`: what did each observer see, what is promised, what could be inferred?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli import completion
from securevfl.cli.show import LONGEST, cell, number, print_json, say, table, terminal
from securevfl.errors import InputError, Interrupted, RunError, readable
from securevfl.interrupts import end_in_order
from securevfl.settings.plan import plan_file

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.auditing import Report
    from securevfl.data import VerticalData

EXIT_VIOLATED, EXIT_LIMIT, EXIT_NOT_HELD = 10, 11, 12
FEWEST_CANARIES = 100
MOST_SECONDS = 86_400


def audit(
    run: Annotated[Path | None, typer.Argument(help="Folder of the run.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The run's data: a folder with the files that the plan names, a data.toml, the name of a "
            "data set, or CSV files with commas between them.",
            autocompletion=completion.data_sets,
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="server.toml or party.toml of a networked run: its table is the truth (repeat)."),
    ] = None,
    attacks: Annotated[str, typer.Option(help="all, none, or names separated by commas.")] = "all",
    canaries: Annotated[
        int | None, typer.Option(help="Canary trials, -1 for none.", show_default="the mode's")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            envvar="SECUREVFL_AUDIT_SECONDS",
            help="Processor time for canaries through whole training runs; 0 for none.",
        ),
    ] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of attacks and canaries.")] = 0,
    workers: Annotated[int, typer.Option(help="Attack processes at once.")] = 2,
    html: Annotated[Path | None, typer.Option(help="Write the page here too.")] = None,
    auditor: Annotated[str, typer.Option(help="Who audits, for the dossier.")] = "",
    sign: Annotated[
        Path | None, typer.Option(help="Sign the dossier with this key (PEM; P-256 or Ed25519).")
    ] = None,
    verify: Annotated[Path | None, typer.Option(help="Check a dossier instead: files and signature.")] = None,
    forget: Annotated[
        Path | None,
        typer.Option(help="Delete the evidence of this run instead: views and journals, which are raw data."),
    ] = None,
    fail_if_violated: Annotated[
        bool, typer.Option("--fail-if-violated", help=f"Exit with {EXIT_VIOLATED} if a promise is broken.")
    ] = False,
    fail_unless_holds: Annotated[
        bool,
        typer.Option("--fail-unless-holds", help=f"Exit with {EXIT_NOT_HELD} unless every promise holds."),
    ] = False,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", help=f"METRIC=VALUE; exit with {EXIT_LIMIT} if it is exceeded (repeat)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Audit a finished run with exactly what its observers saw; writes a dossier in RUN/audits."""
    if verify is not None:
        _verify(verify, json)
        return
    if forget is not None:
        _forget(forget, json)
        return
    if run is None:
        raise InputError("name the folder of a run to audit, or a dossier with --verify")
    names: Any = attacks if attacks in ("all", "none") else [name.strip() for name in attacks.split(",")]
    limits = dict(_limit(text, names) for text in maximum or [])
    if canaries is not None and canaries != -1 and canaries < FEWEST_CANARIES:
        raise InputError(
            f"--canaries {canaries} is too few to measure anything; give at least {FEWEST_CANARIES}, "
            "-1 for none, or leave it out"
        )
    if workers < 1:
        raise InputError(f"--workers {workers}: at least one process is needed")
    if not 0 <= seconds <= MOST_SECONDS:
        raise InputError(f"--seconds {seconds}: expected 0 to {MOST_SECONDS:,}")
    if html is not None and not html.parent.is_dir():
        raise InputError(f"--html {html}: there is no folder {html.parent}")
    plan_file(run)  # what is not there is said before anything heavy is loaded
    options = {"canaries": canaries or 0, "seconds": seconds, "seed": seed, "workers": workers}
    try:
        report, folder = _audited(run, data, config, auditor, sign, names=names, quiet=json, **options)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; no dossier was written") from None
    if html is not None:
        from securevfl.auditing.page import render
        from securevfl.files import write_text

        write_text(html, render(report.content))
    if json:
        print_json({**report.content, "dossier": str(folder)})
    else:
        show_report(terminal(), report, html or folder / "report.html")
    _gate(report, limits, fail_if_violated, fail_unless_holds)


def _audited(
    run: Path,
    data: str | None,
    config: list[Path] | None,
    auditor: str,
    sign: Path | None,
    **options: Any,
) -> tuple[Report, Path]:
    """Audits and writes the dossier; nothing is written before the audit is over."""
    from securevfl.auditing.auditor import check_folder
    from securevfl.auditing.dossier import read_key, write_dossier

    key = None if sign is None else read_key(sign)
    check_folder(run)
    truth = _truth(run, config) if config else _data(run, data)
    report = audit_with_progress(run, data=truth, **options)
    return report, write_dossier(report, run, auditor=auditor, key=key)


def _verify(folder: Path, json: bool) -> None:
    if not folder.is_dir():
        raise RunError(f"{folder} is no dossier: it is no folder")
    from securevfl.auditing.dossier import verify_dossier

    found = verify_dossier(folder)
    if json:
        print_json(found)
        return
    signed = f"signed by the key {found['signed_by'][:16]}" if found["signed_by"] else "not signed"
    by = f" by {found['auditor']}" if found["auditor"] else ""
    words = f"dossier {found['number']} of {found['run']}{by}, {found['verdict']}: unchanged, {signed}"
    typer.echo(readable(words))


def _forget(run: Path, json: bool) -> None:
    """Deletes what only an audit needs; ledgers, receipts, models, results and dossiers stay."""
    plan_file(run)
    from securevfl.federation.folder import RunFolder

    files = RunFolder(run)
    files.read_plan()
    with files.locked():
        gone = files.forget_evidence()
    if json:
        print_json({"run": str(run), "deleted": gone})
    else:
        typer.echo(f"deleted {' and '.join(gone)} of {run}" if gone else f"{run} holds no views or journals")


def _limit(text: str, attacks: Any) -> tuple[str, float]:
    """A limit whose figure this audit will have."""
    from securevfl.attacks import ATTACKS
    from securevfl.attacks.contract import METRICS

    name, equals, value = (part.strip() for part in text.partition("="))
    try:
        limit = float(value if equals else "")
    except ValueError as error:
        raise InputError(f"--max {text!r} is not of the form METRIC=VALUE") from error
    if math.isnan(limit):
        raise InputError(f"--max {text!r}: nothing exceeds what is not a number; give one")
    if name not in ("epsilon", "mu", *METRICS, *ATTACKS):
        raise InputError(
            f"--max {name}: unknown figure; known are {', '.join(METRICS)}, and names of attacks"
        )
    if name not in ("epsilon", "mu") and attacks == "none":
        raise InputError(f"--max {name} needs attacks, and none are asked for")
    return name, limit


def _data(run: Path, text: str | None) -> VerticalData | None:
    """The data that is named on the command line, in the form that the run had it."""
    if text is None:
        return None
    from securevfl.federation.folder import RunFolder
    from securevfl.settings.source import load_planned

    plan = RunFolder(run).read_plan()
    if Path(text).is_dir() or Path(text).suffix == ".toml":
        return load_planned(plan, text)
    ledgers = {path.stem for path in (run / "ledger").glob("*.jsonl")} - {"server", "dealer"}
    parties = 0 if "," in text else plan.source.parties or len(ledgers)
    return load_planned(plan.with_changes(source={"data": text, "parties": parties}))


def _truth(run: Path, configs: list[Path]) -> VerticalData:
    from securevfl.network.config import read_tables
    from securevfl.network.gathering import load_truth

    return load_truth(run, read_tables(configs))


def audit_with_progress(run: Path, names: Any, *, quiet: bool, label: str = "", **options: Any) -> Report:
    """Audits with a progress bar on standard error."""
    from securevfl.auditing import audit as run_audit

    end_in_order()
    console = terminal(stderr=True)
    if quiet or not console.is_terminal:
        return run_audit(run, names, **options)
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("audit", total=1.0)

        def update(what: str, share: float) -> None:
            bar.update(task, completed=share, description=f"{label} {what}".strip())

        return run_audit(run, names, progress=update, **options)


def _gate(report: Report, limits: dict[str, float], if_violated: bool, unless_holds: bool) -> None:
    from securevfl.auditing import Verdict

    broken = report.verdict == Verdict.VIOLATED.value
    if (if_violated and broken) or (unless_holds and report.verdict != Verdict.HOLDS.value):
        typer.echo(readable(f"securevfl: {report.verdict}: {report.content['words'][0]}", LONGEST), err=True)
        raise typer.Exit(EXIT_VIOLATED if if_violated and broken else EXIT_NOT_HELD)
    problems = report.over_limits(limits)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        typer.echo(readable(f"securevfl: {problems[0]}{more}", LONGEST), err=True)
        raise typer.Exit(EXIT_LIMIT)


def show_report(console: Console, report: Report, page: Path) -> None:
    """Prints the verdict, the matrix, and the attacks that succeeded."""
    from securevfl.auditing.words import attacks_that_ran, beats_baseline

    console.print(readable(f"{report.verdict.upper()}: {report.content['words'][0]}", LONGEST), markup=False)
    console.print(matrix_table(report))
    scored = [a for a in report.attacks if a["status"] == "scored"]
    better = [a for a in scored if beats_baseline(a)]
    if better:
        console.print(attack_table(better, attacks_that_ran(report.content)))
    elif scored:
        console.print(f"none of {attacks_that_ran(report.content)} did better than guessing")
    for finding in report.content["findings"]:
        if finding["verdict"] == "violated":
            said = f"{finding['promise']}, {finding['path']}: {'; '.join(finding['reasons'])}"
            say(console, said)
    say(console, f"report in {page}")


def matrix_table(report: Report) -> Any:
    """Owner x observer with the three figures and the verdict."""
    from securevfl.auditing.words import verdict_words

    shown = table(
        "epsilon: claimed by the paper / promised (sound) / measured (lower bound)",
        "owner", "observer", "mode", "claimed", "promised", "measured", "verdict",
    )  # fmt: skip
    for owner, observer, found in report.cells():
        shown.add_row(
            cell(owner),
            cell(observer),
            cell(found["mode"]),
            "-" if found["claimed"] is None else number(found["claimed"]),
            number(found["epsilon_upper"]),
            "-" if found["epsilon_lower"] is None else number(found["epsilon_lower"]),
            cell(verdict_words(found)),
        )
    return shown


def attack_table(better: list[dict[str, Any]], those: str) -> Any:
    """The attacks that did better than guessing."""
    shown = table(
        f"{len(better)} of {those} did better than guessing",
        "attack", "owner", "observer", "metric", "score", "baseline",
    )  # fmt: skip
    for a in better:
        shown.add_row(
            a["name"],
            cell(a["owner"]),
            cell(a["observer"]),
            a["metric"],
            number(a["score"]),
            number(a["baseline"]),
        )
    return shown
