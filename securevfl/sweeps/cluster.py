"""Sweeps on a Ray cluster: one task is one point, everything inside a point stays in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from securevfl.federation.actors import connect
from securevfl.sweeps.executors import Record, Task
from securevfl.sweeps.records import failed_record

WINDOW = 1000  # tasks handed to Ray at a time: waiting for many more is slow


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
        self._ray = connect(address)
        from securevfl.sweeps.work import run_alone

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
