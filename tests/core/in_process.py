"""Documents' commands and programs inside the test's own process: each new process would load torch again.

Attacks and points of sweeps, which have processes of their own elsewhere, run in this one, too.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from sweep_helpers import InProcess as Points

from securevfl.attacks.jobs import InProcess
from securevfl.cli import main


@contextmanager
def here() -> Iterator[None]:
    """Attacks and points of sweeps run in this process."""
    with (
        patch("securevfl.attacks.runner.AttackProcess", InProcess),
        patch("securevfl.sweeps.engine.LocalExecutor", lambda workers, log: Points()),
    ):
        yield


def run_command(line: str) -> int:
    """Runs ``securevfl ...`` in the current folder; returns its exit code."""
    with here(), patch.object(sys, "argv", shlex.split(line, comments=True)):
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def run_program(path: Path) -> None:
    """Runs a Python file as if it were called by name. Warnings are errors, as in all tests."""
    with here(), patch.object(sys, "argv", [str(path)]):
        runpy.run_path(str(path), run_name="__main__")


def run_shell(code: str) -> None:
    """Runs a shell script in the current folder, its ``securevfl`` lines in this process."""
    for part in re.split(r"^(securevfl .*\n)", code, flags=re.MULTILINE):
        if part.startswith("securevfl "):
            assert run_command(part) == 0, part
        elif part:
            subprocess.run(["bash", "-e", "-c", part], check=True)
