"""Where attacks run: in a process of their own, or in this one for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from securevfl.attacks.contract import Guess
from securevfl.attacks.jobs import ERROR, GUESS, Job, load_arrays
from securevfl.errors import AttackError

Report: TypeAlias = Callable[[float], None]


class AttackProcess:
    """One process that runs jobs, one after the other; started when needed, killed at a timeout."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Job, *, timeout: float, progress: Report) -> Guess:
        """Runs a job.

        Raises:
            AttackError: The attack broke off, took too long, or returned something else than arrays.
        """
        with tempfile.TemporaryDirectory(prefix="attack-") as name:
            folder = Path(name)
            job.write(folder)
            self._serve(folder, timeout, progress, job.attack.name)
            if (folder / ERROR).exists():
                raise AttackError((folder / ERROR).read_text(encoding="utf-8"))
            return load_arrays(folder / GUESS)

    def _serve(self, folder: Path, timeout: float, progress: Report, name: str) -> None:
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise AttackError("the attack process has no pipes")
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            for line in process.stdout:
                word, _, share = line.strip().partition(" ")
                if word == "done":
                    return
                progress(float(share))
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self.close()
        raise AttackError(
            f"{name} took longer than {timeout:g} s" if late.is_set() else f"the process of {name} died"
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "securevfl.attacks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=tempfile.gettempdir(),
            )
        return self._process

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> AttackProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcess:
    """Runs jobs in this process: for tests and debugging, without isolation or timeout."""

    def run(self, job: Job, *, timeout: float, progress: Report) -> Guess:
        """Runs a job; see `AttackProcess.run`."""
        return job.execute(progress)

    def close(self) -> None:
        """Nothing to end."""
