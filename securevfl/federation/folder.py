"""The folder of a run: where its files are, and that nothing in it is overwritten by accident.

Checkpoints are the state of every role at an epoch boundary, without pickle: nested dictionaries of numbers,
text, None, lists, arrays and tensors. Arrays go to one safetensors file, the rest to the JSON in its header.
A checkpoint replaces the one before it in one step.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from securevfl.errors import RunError
from securevfl.files import append_line, check_new, read_json, write_bytes, write_text
from securevfl.settings.plan import Plan, plan_file

EVIDENCE = ("views", "journal")
"""Folders of a run that are as private as the data."""


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

    def journal(self, owner: str) -> Path:
        """The owner's private journal."""
        return self.path / "journal" / owner

    def model(self, name: str) -> Path:
        """A party's model, or the server's."""
        return self.path / "models" / f"{name}.safetensors"

    def create(self, plan: Plan) -> None:
        """Makes a new folder with the plan in it.

        Raises:
            RunError: The folder holds something already or cannot be written.
        """
        check_new(self.path)
        try:
            if self.path.is_dir():  # an empty one; of several processes that want it, one makes it anew
                self.path.rmdir()
            self.path.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"folder {self.path} cannot be made: {error.strerror}") from error
        if not os.access(self.path, os.W_OK):
            raise RunError(f"folder {self.path} cannot be written")
        try:
            write_text(self.plan_file, plan.to_toml())
        except BaseException:  # Ctrl-C too
            self.remove()  # or the same command would be refused later
            raise

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

    def forget_evidence(self) -> list[str]:
        """Deletes all views and journals, which hold private material; returns what was deleted.

        Ledgers, receipts, models and results stay; attacks and replay have nothing to read any more.
        """
        found = [name for name in EVIDENCE if (self.path / name).is_dir()]
        for name in found:
            shutil.rmtree(self.path / name)
        return found

    def remove(self) -> None:
        """Removes a folder in which no run has begun."""
        shutil.rmtree(self.path)

    def read_plan(self) -> Plan:
        """The plan of an existing run.

        Raises:
            RunError: The folder holds no run.
        """
        return Plan.from_toml(plan_file(self.path))

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


CHECKPOINT = "checkpoint.safetensors"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; a crash leaves the old one or the new one, never half of one."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _split(state, "", tensors)
    write_bytes(folder / CHECKPOINT, save(tensors, {"state": json.dumps(plain)}))


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Reads the checkpoint of a run folder; None if there is none yet.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"checkpoint {path} is damaged: {error}") from error
    state = _join(plain, tensors)
    return dict(state)


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Moves arrays and tensors into `tensors` and leaves a mark in their place."""
    if isinstance(value, dict):
        return {str(key): _split(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"~tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {"~array": path}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _join(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"~tensor"}:
        return tensors[value["~tensor"]]
    if set(value) == {"~array"}:
        return tensors[value["~array"]].numpy()
    return {key: _join(item, tensors) for key, item in value.items()}
