"""Organisations on one machine: folders, certificates, tables, and their processes, honest or not."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from securevfl.network.authority import create_authority, issue
from securevfl.privacy.ledger import read_ledger, read_records

PATIENCE = 20.0
COMMON = [f"both-{i:02d}" for i in range(60)]
USUAL = 'algorithm = "vafl-sync"\nepochs = 2\nbatch = 16\nsigma = 4.0'
OF_HELPERS = ("members", "algorithms", "protocols", "dealer", "adversary")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Scene:
    """A bank, which coordinates, and others, each with a folder of its own.

    Attributes:
        folder: Where everything is.
        parties: Organisations with data besides the bank.
        helpers: Organisations without data.
        server: Lines of the bank's configuration, before its tables.
        plan: Lines of the plan.
        accept: Rules of the others, over the usual ones; None leaves a rule out.
        ids: Organisation -> IDs that it has besides those that all have.
    """

    folder: Path
    parties: Sequence[str] = ("clinic",)
    helpers: Sequence[str] = ()
    server: str = 'align = "none"'
    plan: str = USUAL
    accept: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict, init=False)
    codes: dict[str, int] = field(default_factory=dict, init=False)
    peaks: dict[str, int] = field(default_factory=dict, init=False)
    gained: str = field(default="", init=False)

    def build(self) -> None:
        """Writes certificates, tables and configurations."""
        self.port, names = free_port(), ["bank", *self.parties, *self.helpers]
        issue(create_authority(self.folder / "ca", name="Consortium"), names, out=self.folder)
        usual = {
            "members": names,
            "algorithms": ["vafl-sync"],
            "protocols": ["plain"],
            "epsilon": float("inf"),
            "test_fraction": 0.2,
            "evaluations": 1,
            "alignment": {"kinds": ["none"], "ids": 100, "times": 3},
            "predictions": 0,
        }
        rules = {key: value for key, value in {**usual, **self.accept}.items() if value is not None}
        for name in names:
            own = 'run = "test"\nfolder = "run"\ncertificates = "."\n'
            data = "" if name in self.helpers else '[data]\nfile = "table.csv"\n'
            if name == "bank":
                own += (
                    f'listen = "127.0.0.1:{self.port}"\nparties = {toml(list(self.parties))}\n{self.server}\n'
                )
                data += f'label_column = "y"\n[plan]\n{self.plan}\n'
            else:
                own += f'coordinator = "bank"\naddress = "127.0.0.1:{self.port}"\n'
                stated = {key: rules[key] for key in rules if name in self.parties or key in OF_HELPERS}
                data += "[accept]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in stated.items())
            text = f"{own}{data}[network]\npatience = {PATIENCE}\n"
            (self.folder / name / "config.toml").write_text(text)
            if name not in self.helpers:
                self._write_table(name)

    def _write_table(self, name: str) -> None:
        draw = random.Random(name)
        with (self.folder / name / "table.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["id", "a", "b", "c", *(["y"] if name == "bank" else [])])
            for each in [*COMMON, *self.ids.get(name, ())]:
                row = [draw.uniform(-1, 1) for _ in range(3)]
                table.writerow([each, *row, *([int(sum(row) > 0)] if name == "bank" else [])])

    def play(self, ways: Mapping[str, Sequence[str]]) -> None:
        """Runs everybody's command to its end.

        Args:
            ways: Organisation -> what its process is started with in place of `securevfl`.
        """
        running = {name: self._start(name, ways.get(name)) for name in ["bank", *self.parties, *self.helpers]}
        watches = [threading.Thread(target=self._watch, args=each) for each in running.items()]
        for watch in watches:
            watch.start()
        try:
            for name, process in running.items():
                self.said[name], _ = process.communicate(timeout=8 * PATIENCE)
                self.codes[name] = process.returncode
        finally:
            for process in running.values():
                process.kill()
                process.wait()
            for watch in watches:
                watch.join()

    def _watch(self, name: str, process: subprocess.Popen[str]) -> None:
        """Notes the most memory, in KiB, that a process has taken; where the system tells."""
        self.peaks[name] = 0
        while process.returncode is None:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/status").read_text()
                self.peaks[name] = max(
                    self.peaks[name], *map(int, re.findall(r"VmHWM:\s+(\d+)", text) or [0])
                )
            time.sleep(0.2)

    def _start(self, name: str, way: Sequence[str] | None) -> subprocess.Popen[str]:
        command = ["serve" if name == "bank" else "join", "--config", "config.toml"]
        return subprocess.Popen(
            [*(way or (sys.executable, "-m", "securevfl.cli")), *command],
            cwd=self.folder / name,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    # -- what is left of it ---------------------------------------------------------------------------------

    def releases(self, name: str) -> list[Any]:
        """What an organisation's ledger says that it let out."""
        folder = self.folder / name / "run"
        return [each for each in read_records(folder) if each.vectors] if (folder / "ledger").exists() else []

    def alignments(self, name: str) -> int:
        """How often an organisation's ledger says that its records were compared with others'."""
        path = self.folder / name / "run" / "ledger" / f"{name}.jsonl"
        return sum(each.content["kind"] == "alignment" for each in read_ledger(path)) if path.exists() else 0

    def note(self, name: str) -> list[str]:
        """What a lying process has written down of its success."""
        path = self.folder / name / "got.txt"
        return path.read_text().splitlines() if path.exists() else []


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return "inf" if value == float("inf") else json.dumps(value)
