"""A Ray cluster for tests: started by `ray start` with a home of its own, ended with the test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'securevfl[ray]'"
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster with two workers."""

    address: str
    home: Path
    environment: dict[str, str]

    def run(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A securevfl command in a process of its own."""
        return subprocess.run(
            command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            check=check,
            timeout=300,
        )

    def workers(self, name: str) -> list[int]:
        """Processes of this cluster that work on a task or actor of that name."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_worker(path, name)]

    def _is_worker(self, path: Path, name: str) -> bool:
        try:
            ours = f"HOME={self.home}".encode() in (path / "environ").read_bytes().split(b"\0")
            return ours and (path / "cmdline").read_bytes().startswith(f"ray::{name}".encode())
        except OSError:  # it has ended
            return False


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "securevfl.cli", *map(str, arguments)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    # Ray's sockets live below this folder, and the path of a socket is short.
    home = Path(tempfile.mkdtemp(prefix="vfl-", dir="/tmp"))
    port = free_port()
    address = f"127.0.0.1:{port}"
    environment = {
        **os.environ,
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": address,
    }
    start = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={home}/ray",
        "--object-store-memory=100000000", "--min-worker-port=20000", "--max-worker-port=29999",
    ]  # fmt: skip
    with (home / "log").open("w") as log:
        process = subprocess.Popen(start, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_open(process, port, home / "log")
        yield Cluster(address=address, home=home, environment=environment)
    finally:
        process.terminate()  # it ends what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        if "Ray runtime started" in log.read_text():
            return
        time.sleep(0.1)
    raise RuntimeError(f"the cluster on port {port} did not start: {log.read_text()}")
