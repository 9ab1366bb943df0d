"""The folder of a run: where its files are, and that nothing in it is overwritten by accident."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from securevfl.errors import RunError
from securevfl.files import append_line, read_json, write_text
from securevfl.settings.plan import Plan


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.plan_file = self.path / "plan.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.result_file = self.path / "result.json"

    def ledger(self, owner: str) -> Path:
        """The owner's ledger."""
        return self.path / "ledger" / f"{owner}.jsonl"

    def view(self, observer: str) -> Path:
        """The observer's view."""
        return self.path / "views" / observer

    def model(self, name: str) -> Path:
        """A party's model, or the server's."""
        return self.path / "models" / f"{name}.safetensors"

    def create(self, plan: Plan) -> None:
        """Makes a new folder with the plan in it.

        Raises:
            RunError: The folder exists already or cannot be written.
        """
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise RunError(
                f"{self.path} exists already; choose another folder, or --resume to go on with it"
            ) from error
        except OSError as error:
            raise RunError(f"folder {self.path} cannot be made: {error.strerror}") from error
        if not os.access(self.path, os.W_OK):
            raise RunError(f"folder {self.path} cannot be written")
        write_text(self.plan_file, plan.to_toml())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps everybody else from releasing in this run: ledgers have one writer at a time.

        Raises:
            RunError: Another process, or another call in this one, is at it.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Removes a folder in which no run has begun."""
        shutil.rmtree(self.path)

    def read_plan(self) -> Plan:
        """The plan of an existing run.

        Raises:
            RunError: The folder holds no run.
        """
        if not self.plan_file.is_file():
            raise RunError(f"{self.path} holds no run: there is no plan.toml in it")
        return Plan.from_toml(self.plan_file)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Adds one line to ``metrics.jsonl``."""
        append_line(self.metrics_file, json.dumps(line))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; a line that a crash tore is left out."""
        if not self.metrics_file.exists():
            return []
        text = self.metrics_file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def cut_metrics(self, count: int) -> None:
        """Keeps the first `count` lines: later ones belong to epochs that will run again."""
        lines = [json.dumps(line) for line in self.read_metrics()[:count]]
        write_text(self.metrics_file, "".join(line + "\n" for line in lines))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Writes what ``train --json`` prints."""
        write_text(self.result_file, json.dumps(result, indent=1) + "\n")

    def read_result(self) -> dict[str, Any]:
        """The result of a finished run.

        Raises:
            RunError: The run has not finished, or the file is damaged.
        """
        if not self.result_file.is_file():
            self.read_plan()
            raise RunError(
                f"the run in {self.path} has not finished; go on with: securevfl train --resume {self.path}"
            )
        return dict(read_json(self.result_file))


def _lock(descriptor: int, path: Path) -> None:
    """Takes the lock, which ends with the descriptor; file systems without locks are left unlocked."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunError(
                f"{path} is in use: another process trains or predicts in it; try again when it has finished"
            ) from error
