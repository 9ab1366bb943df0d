"""Sweeps on a Ray cluster: one task is one point, everything inside a point stays in one process.

Ray has no identities inside a cluster and runs whatever its members send: use it within one
organisation only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from securevfl.errors import InputError, MissingExtra
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
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # must be set before the import
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise MissingExtra("--ray needs Ray: pip install 'securevfl[ray]'") from error
        options: dict[str, Any] = {} if address == "local" else {"address": address}
        if address == "local":
            options["include_dashboard"] = False
        try:
            self._ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise InputError(
                f"no Ray cluster at {address!r}: {first}; "
                "start one with 'ray start --head', or use --ray local"
            ) from error
        from securevfl.sweeps.work import run_alone

        self._task = self._ray.remote(max_retries=2, num_cpus=1)(run_alone)
        self._running: dict[Any, str] = {}

    @property
    def workers(self) -> int:
        """Points that run at the same time."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

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
