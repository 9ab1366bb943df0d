"""Where the points of a sweep run: worker processes of this machine, or a Ray cluster.

Only those who run points load torch: see `securevfl.sweeps.work`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from securevfl.errors import InputError
from securevfl.files import appending
from securevfl.sweeps.records import failed_record
from securevfl.sweeps.spec import AuditSettings, Point

Task = dict[str, Any]
Record = dict[str, Any]
WINDOW = 1000  # tasks handed to Ray at a time: waiting for many more is slow


def task_of(point: Point, audit: AuditSettings, folder: Path) -> Task:
    """What an executor is given: plain values, so that they travel as JSON."""
    return {
        "id": point.id,
        "fields": dict(point.fields),
        "attacks": audit.names,
        "canaries": audit.canaries,
        "keep_views": audit.keep_views,
        "folder": str(folder),
    }


class Executor(Protocol):
    """Runs tasks; one task is one whole point."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """Yields one record per task, in whatever order they finish."""

    def close(self) -> None:
        """Ends everything that still runs."""


class WorkerProcess:
    """One worker process, started when needed and replaced if it dies."""

    def __init__(self, log: IO[str]) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def run(self, task: Task) -> Record:
        """The record of a task. A worker that dies gets one more try, then the point has failed."""
        for _ in range(2):
            answer = self._ask(task)
            if answer:
                return dict(json.loads(answer))
            code = self._end()
            if self._closed:
                break
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return failed_record(task["id"], f"the worker process died twice ({how}); was there enough memory?")

    def _ask(self, task: Task) -> str:
        if self._closed:
            return ""
        process = self._started()
        if process.stdin is None or process.stdout is None:
            return ""
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except (OSError, ValueError):  # the pipe broke, or was closed under way
            return ""

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            # One thread each: results do not depend on the number of workers, and workers do not compete.
            threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            # A session of its own: Ctrl-C reaches the sweep alone, which then ends its workers in order.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from securevfl.sweeps.work import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env={**os.environ, **threads},
                start_new_session=True,
            )
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what could not be written any more
                if pipe is not None:
                    pipe.close()
        return code

    def close(self) -> None:
        """Kills the worker and what it started."""
        self._closed = True
        self._end()


class LocalExecutor:
    """Worker processes of this machine.

    Args:
        workers: How many; each has one thread.
        log: File for whatever they print.
    """

    def __init__(self, workers: int = 1, log: Path | None = None) -> None:
        if workers < 1:
            raise InputError(f"workers is {workers}; at least 1 is needed")
        self.workers = workers
        self._log = appending(log or os.devnull)
        self._processes: list[WorkerProcess] = []
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """See `Executor.run`."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        answers: queue.SimpleQueue[Record] = queue.SimpleQueue()
        for _ in range(min(self.workers, len(tasks))):
            process = WorkerProcess(self._log)
            self._processes.append(process)
            thread = threading.Thread(target=self._serve, args=(process, waiting, answers), daemon=True)
            self._threads.append(thread)
            thread.start()
        for _ in tasks:
            yield answers.get()

    def _serve(
        self, process: WorkerProcess, waiting: queue.SimpleQueue[Task], answers: queue.SimpleQueue[Record]
    ) -> None:
        while not self._stopping.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            record = process.run(task)
            if not self._stopping.is_set():
                answers.put(record)

    def close(self) -> None:
        """Ends all workers at once; what they were doing is not recorded."""
        self._stopping.set()
        for process in self._processes:
            process.close()
        for thread in self._threads:
            thread.join(timeout=10)
        self._log.close()


class RayExecutor:
    """Runs points on a Ray cluster. The sweep's folder must be visible to all its machines.

    Args:
        address: Address of a running cluster, ``auto`` for the one of this machine, ``local`` to start one
            here for the time of the sweep.

    Raises:
        MissingExtra: Ray is not installed.
        InputError: No cluster answers.
    """

    def __init__(self, address: str) -> None:
        from securevfl.federation.actors import connect
        from securevfl.sweeps.work import run_alone

        self._ray = connect(address)
        self._task = self._ray.remote(max_retries=2, num_cpus=1)(run_alone)
        self._running: dict[Any, str] = {}

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """See `Executor.run`."""
        waiting = iter(tasks)
        for _ in tasks:
            while len(self._running) < WINDOW and (task := next(waiting, None)) is not None:
                self._running[self._task.remote(task)] = task["id"]
            ready, _ = self._ray.wait(list(self._running), num_returns=1)
            name = self._running.pop(ready[0])
            try:
                yield dict(self._ray.get(ready[0]))
            except self._ray.exceptions.RayError as error:
                yield failed_record(name, f"Ray: {str(error).splitlines()[0]}")

    def close(self) -> None:
        """Cancels what still runs and leaves the cluster."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.shutdown()
