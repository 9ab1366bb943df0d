"""Runs a sweep: what is finished stays finished, what fails is written down, the rest goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.errors import RunError
from securevfl.files import write_text
from securevfl.sweeps.charts import write_plots
from securevfl.sweeps.check import without_impossible
from securevfl.sweeps.executors import Executor, LocalExecutor, task_of
from securevfl.sweeps.page import write_page
from securevfl.sweeps.records import FAILED, MARKER, NO_ROOM, PointLog
from securevfl.sweeps.results import Results, write_tables
from securevfl.sweeps.spec import Sweep

TABLES_EVERY = 5.0  # seconds between two writings of the tables while points come in


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Where a sweep is.

    Attributes:
        done: Points with a record, those of earlier sessions included.
        total: All points.
        failed: How many of `done` failed.
        left: Seconds until the end, by the pace of this session; None before its first point.
        last: The record that has just come in; None at the start.
    """

    done: int
    total: int
    failed: int
    left: float | None = None
    last: dict[str, Any] | None = None


def run_sweep(
    sweep: Sweep,
    out: Path | str,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    retry_failed: bool = False,
    skip_impossible: bool = False,
    progress: Callable[[SweepProgress], None] = lambda now: None,
) -> Results:
    """Runs all points of a sweep that have no result yet, and writes tables, plots and page.

    Every point is checked against its data before the first one runs.

    The same seeds give the same ``results.csv`` whatever the number of workers, as far as seeds decide: they
    never decide noise. Points with noise repeat exactly only with ``insecure_reproducible_noise``, which
    voids their guarantees.

    Args:
        sweep: The points.
        out: Folder of the sweep: a new one, or that of an earlier session, which is taken up.
        workers: Worker processes of this machine.
        executor: Runs the points instead; closed at the end.
        retry_failed: Run the points again that failed in an earlier session.
        skip_impossible: Leave out points that cannot run instead of refusing the sweep.
        progress: Called at the start and after every point.

    Raises:
        PlanError: Points cannot run; nothing was started.
        RunError: The folder holds something else, or another sweep works in it.
        AttackError: An attack of the audit is unknown.
    """
    _check_attacks(sweep)
    sweep = without_impossible(sweep, skip=skip_impossible)
    folder = Path(out).absolute()
    with _claimed(folder):
        write_text(folder / MARKER, sweep.text)
        journal = PointLog(folder / "journal.jsonl")
        runner = executor or LocalExecutor(workers, folder / "workers.log")
        try:
            _run_missing(sweep, folder, journal, runner, retry_failed, progress)
        finally:
            runner.close()
            # Whatever ended the session, the folder shows what there is: an interrupt may have come between a
            # line on disk and its copy in memory.
            written = PointLog(journal.path).records
            results = Results(sweep=sweep, folder=folder, records=written, repaired=journal.repaired)
            write_tables(results)
            write_page(results)
        write_plots(results)
        return results


def _check_attacks(sweep: Sweep) -> None:
    from securevfl.attacks.registry import find_attack

    if isinstance(sweep.audit.names, list):
        for name in sweep.audit.names:
            find_attack(name)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The sweep's folder, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = not (folder / MARKER).is_file() and any(folder.iterdir())
        if strange:
            raise RunError(f"{folder} holds other files and no sweep; choose another folder")
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise RunError(f"folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise RunError(f"another sweep works in {folder}; wait for it or choose another folder") from error
    try:
        yield
    finally:
        os.close(handle)


def _run_missing(
    sweep: Sweep,
    folder: Path,
    journal: PointLog,
    runner: Executor,
    retry_failed: bool,
    progress: Callable[[SweepProgress], None],
) -> None:
    """Runs the points without a record."""
    missing = [
        point
        for point in sweep.points
        if point.id not in journal.records or (retry_failed and journal.records[point.id]["status"] == FAILED)
    ]
    tasks = [task_of(point, sweep.audit, folder) for point in missing]
    pace = _Pace(sweep, journal, len(tasks), progress)
    pace.report(None)
    written = time.monotonic()
    for record in runner.run(tasks) if tasks else ():
        if record["status"] == NO_ROOM:
            raise RunError(record["error"]) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        journal.append(record)
        pace.report(record)
        if time.monotonic() - written > TABLES_EVERY:
            write_tables(Results(sweep=sweep, folder=folder, records=journal.records))
            written = time.monotonic()


class _Pace:
    """Counts points and estimates the time left."""

    def __init__(
        self, sweep: Sweep, journal: PointLog, tasks: int, progress: Callable[[SweepProgress], None]
    ) -> None:
        self.sweep, self.journal, self.tasks, self.progress = sweep, journal, tasks, progress
        self.begun, self.finished = time.monotonic(), 0

    def report(self, last: dict[str, Any] | None) -> None:
        self.finished += last is not None
        known = [r for p in self.sweep.points if (r := self.journal.records.get(p.id)) is not None]
        elapsed = time.monotonic() - self.begun
        left = elapsed / self.finished * (self.tasks - self.finished) if self.finished else None
        self.progress(
            SweepProgress(
                done=len(self.sweep.points) - self.tasks + self.finished,
                total=len(self.sweep.points),
                failed=sum(record["status"] == FAILED for record in known),
                left=left,
                last=last,
            )
        )
