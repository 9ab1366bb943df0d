"""`securevfl sweep`: many runs, one table of privacy against utility."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli import completion
from securevfl.cli.show import print_json, table, terminal
from securevfl.errors import Interrupted, PlanError, RunError
from securevfl.files import is_full
from securevfl.interrupts import end_in_order

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.sweeps import Results, Sweep, SweepProgress

_AGAIN = "the same command with the same --out goes on where it stopped"
WIDE = 110  # columns of a terminal on which shares fit beside intervals


def sweep(
    file: Annotated[Path | None, typer.Argument(help="The sweep file: a plan with lists.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A ready sweep instead: quick or papers.", autocompletion=completion.presets),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep; an unfinished one is resumed.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes of this machine.")] = 2,
    ray: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster instead: its address, auto, or local.")
    ] = None,
    data_folder: Annotated[
        Path | None,
        typer.Option(help="Folder with the data sets' own files, or with a folder of each one's name."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run points again that failed before.")
    ] = False,
    skip_impossible: Annotated[
        bool,
        typer.Option("--skip-impossible", help="Leave out points that cannot run; else they stop the sweep."),
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the preset's sweep file and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run all points of a sweep; writes results.csv, plots and sweep.html, and resumes where it stopped."""
    from securevfl.sweeps import preset as preset_text
    from securevfl.sweeps import run_sweep

    if show and preset is not None:
        typer.echo(preset_text(preset))
        return
    chosen = _chosen(file, preset, data_folder)
    if out is None:
        raise PlanError("give a folder for the results: --out DIR")
    if workers < 1:
        raise PlanError(f"--workers is {workers}; at least 1 is needed")
    executor = None
    if ray is not None:
        from securevfl.sweeps.executors import RayExecutor

        executor = RayExecutor(ray)
    end_in_order()
    try:
        with _progress(quiet=json) as progress:
            results = run_sweep(
                chosen,
                out,
                workers=workers,
                executor=executor,
                retry_failed=retry_failed,
                skip_impossible=skip_impossible,
                progress=progress,
            )
    except KeyboardInterrupt:
        kept = f"finished points are in {out / 'results.csv'}"
        raise Interrupted(f"interrupted; {kept}; {_AGAIN}") from None
    except RunError as error:
        if not is_full(error):
            raise
        raise RunError(f"{out}: no space left on the disk; free some, and {_AGAIN}") from error
    if json:
        print_json(results.to_mapping())
    else:
        show_results(terminal(), results)
    if results.failed:
        raise typer.Exit(1)


def _chosen(file: Path | None, preset: str | None, data_folder: Path | None) -> Sweep:
    from securevfl.sweeps import parse_sweep, read_sweep
    from securevfl.sweeps import preset as preset_text

    if (file is None) == (preset is None):
        raise PlanError("give a sweep file or --preset quick, one of them")
    overrides: dict[str, Any] = {}
    if data_folder is not None:
        if not data_folder.is_dir():
            raise PlanError(f"--data-folder {data_folder} is not a folder")
        overrides["data_folder"] = str(data_folder.absolute())
    if file is not None:
        return read_sweep(file, overrides=overrides)
    return parse_sweep(preset_text(str(preset)), source=f"preset {preset}", overrides=overrides)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[SweepProgress], None]]:
    """A bar on a terminal, a line per point in a log, nothing with --json."""
    console = terminal(stderr=True)
    if quiet:
        yield lambda now: None
        return
    if not console.is_terminal:
        yield lambda now: typer.echo(_line(now), err=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("sweep"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("sweep", words="")
        yield lambda now: bar.update(task, total=now.total, completed=now.done, words=_words(now))


def _line(now: SweepProgress) -> str:
    return f"{now.done}/{now.total} points, {_words(now)}"


def _words(now: SweepProgress) -> str:
    from securevfl.settings.duration import in_words

    failed = f", {now.failed} failed" if now.failed else ""
    if now.done == now.total:
        return f"done{failed}"
    return (f"about {in_words(now.left)} left" if now.left is not None else "working") + failed


def show_results(console: Console, results: Results) -> None:
    """Prints the findings, the failures, and where everything is."""
    from securevfl.sweeps.results import has_parquet
    from securevfl.sweeps.summary import data_sets, groups_of, kept_table, promise_table, sentences

    for text in results.unprotected:
        console.print(f"UNPROTECTED, nothing is promised: {text}", markup=False, highlight=False)
    for name, groups in data_sets(groups_of(results)).items():
        console.print(f"{name}:", markup=False, highlight=False)
        for made in (kept_table(groups, shares=console.width >= WIDE), promise_table(groups)):
            if made is not None:
                console.print(_table(*made))
        for text in sentences(groups):
            console.print(f"  {text}", markup=False, highlight=False)
    for row in results.failed:
        what = f"point {row['point']} ({row['label'] or row['algorithm']}) failed: {row['error']}"
        console.print(what, markup=False, highlight=False)
    if results.sweep.left_out:
        console.print(f"note: {results.sweep.left_out} points that cannot run were left out")
    if results.repaired:
        console.print(
            f"note: {results.repaired} half-written lines of the journal were dropped and done again"
        )
    if not has_parquet():
        console.print(
            "note: for results.parquet install the extra: pip install 'securevfl[parquet]'", markup=False
        )
    done, total = len(results.finished), len(results.sweep.points)
    failed = f", {len(results.failed)} failed (run them again with --retry-failed)" if results.failed else ""
    lines = [f"{done} of {total} points finished{failed}", f"page {results.folder / 'sweep.html'}"]
    lines += [f"table {results.folder / 'results.csv'}", f"pictures {results.folder / 'plots'}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _table(caption: str, head: list[str], rows: list[list[str]]) -> Any:
    """A table whose numbers are never cut: the names give way."""
    shown = table(caption, *head)
    shown.columns[0].no_wrap = False
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*(cell.replace(" ± ", "±") for cell in row))
    return shown
