"""Victims: organisations that run the unmodified commands as processes of their own."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from federation import free_port
from warm import Command

from securevfl.network.authority import create_authority, issue
from securevfl.network.config import read_server_config
from securevfl.network.coordinator import Coordinator

SERVER = """
run = "test"
folder = "run"
certificates = "certificates"
listen = "127.0.0.1:{port}"
parties = {parties}
align = "none"
{more}
[data]
file = "table.csv"
label_column = "y"
[network]
patience = 20.0
[plan]
algorithm = "vafl-sync"
epochs = 2
batch = 16
sigma = 4.0
{plan}
"""
PARTY = """
run = "test"
folder = "run"
certificates = "certificates"
coordinator = "bank"
address = "127.0.0.1:{port}"
[data]
file = "table.csv"
[network]
patience = 20.0
[accept]
members = {members}
algorithms = ["vafl-sync"]
protocols = ["plain", "two-tree"]
epsilon = inf
test_fraction = 0.2
evaluations = 1
alignment = {{ kinds = ["none"], ids = 60, times = 3 }}
predictions = 100
"""


class Consortium:
    """Folders of a bank that attacks, and of parties that run `securevfl join` unmodified."""

    def __init__(
        self, folder: Path, parties: Sequence[str] = ("clinic",), plan: str = "", more: str = ""
    ) -> None:
        self.folder, self.parties, self.port = folder, tuple(parties), free_port()
        names = ["bank", *parties]
        issue(create_authority(folder / "ca", name="test"), [*names, "stranger"], out=folder / "keys")
        random = np.random.default_rng(0)
        blocks = {name: random.uniform(-1, 1, (60, 3)) for name in names}
        labels = sum(block.sum(axis=1) for block in blocks.values()) > 0
        texts = {name: PARTY.format(port=self.port, members=json.dumps(names)) for name in parties}
        texts["bank"] = SERVER.format(port=self.port, parties=json.dumps(list(parties)), plan=plan, more=more)
        for name in names:
            (folder / name).mkdir()
            (folder / "keys" / name).rename(folder / name / "certificates")
            (folder / name / "config.toml").write_text(texts[name])
            with (folder / name / "table.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["id", "a", "b", "c", *(["y"] if name == "bank" else [])])
                for row, values in enumerate(blocks[name].tolist()):
                    table.writerow([f"id{row:03d}", *values, *([int(labels[row])] if name == "bank" else [])])

    def bank(self, cls: type[Coordinator] = Coordinator, **options: Any) -> Coordinator:
        """The coordinator, in this process, of whatever class."""
        return cls(read_server_config(self.folder / "bank" / "config.toml"), **options)

    def join(self, name: str) -> Command:
        """A party's process."""
        return Command(["join", "--config", str(self.folder / name / "config.toml")])

    def play(self, bank: Coordinator) -> tuple[Any, dict[str, str]]:
        """Everybody to the end: what the bank ends with, and what each party's terminal says."""

        async def attempt() -> Any:
            async with asyncio.timeout(240):
                return (await asyncio.gather(bank.run(), return_exceptions=True))[0]

        processes = {name: self.join(name) for name in self.parties}
        try:
            ended = asyncio.run(attempt())
            said = {name: process.communicate(timeout=300)[0] for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        return ended, said

    def run_folder(self, name: str) -> Path:
        """Where a party's run is."""
        return self.folder / name / "run"

    def evidence(self, name: str) -> list[dict[str, Any]]:
        """What a party has kept of what was not agreed on."""
        path = self.run_folder(name) / "evidence.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plain(text: str) -> str:
    """Text without what a terminal would obey; equal to it where there is nothing of that kind."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)
