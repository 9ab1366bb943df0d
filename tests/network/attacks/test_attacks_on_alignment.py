"""Attacks on the alignment of honest organisations, whose processes are the commands themselves."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import free_port
from warm import Command

from securevfl.errors import NetworkError, SecureVFLError
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import read_party_config, read_server_config
from securevfl.network.coordinator import Coordinator
from securevfl.network.member import Member
from securevfl.privacy.ledger import read_ledger
from securevfl.protocols.alignment import protocol
from securevfl.protocols.alignment.two import TwoPartyMachine

OF_BANK = [f"bank-{i:03d}" for i in range(60)]
SHARED = [f"both-{i:03d}" for i in range(20)]
OF_CLINIC = [f"clinic-{i:03d}" for i in range(40)]

SERVER = """
run = "credit"
folder = "run"
certificates = "certificates"
listen = "ADDRESS"
parties = ["clinic"]
[data]
file = "table.csv"
label_column = "y"
[plan]
algorithm = "vafl"
epochs = 1
sigma = 1.0
[network]
patience = 60.0
"""
PARTY = """
run = "credit"
folder = "run"
certificates = "certificates"
coordinator = "bank"
address = "ADDRESS"
[data]
file = "table.csv"
[network]
patience = 60.0
[accept]
members = ["bank", "clinic"]
algorithms = ["vafl"]
protocols = ["plain"]
epsilon = inf
test_fraction = 0.2
evaluations = 1
predictions = 0
alignment = { kinds = ["private"], ids = 100, times = 2 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bank and a clinic with tables of their own, ready to train."""
    authority = create_authority(tmp_path / "ca", name="test")
    issue(authority, ("bank", "clinic"), out=tmp_path / "issued")
    address = f"127.0.0.1:{free_port()}"
    for name, own, text in (("bank", OF_BANK, SERVER), ("clinic", OF_CLINIC, PARTY)):
        (tmp_path / name).mkdir()
        (tmp_path / "issued" / name).rename(tmp_path / name / "certificates")
        config = "server.toml" if name == "bank" else "party.toml"
        (tmp_path / name / config).write_text(text.replace("ADDRESS", address))
        write_table(tmp_path / name / "table.csv", [*own, *SHARED], labels=name == "bank")
    return tmp_path


def write_table(path: Path, ids: Sequence[str], *, labels: bool) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (len(ids), 2))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "a", "b", *(["y"] if labels else [])])
        for name, row in zip(ids, values, strict=True):
            table.writerow([name, *row, *([int(row[0] > 0)] if labels else [])])


def victim(folder: Path, name: str) -> Command:
    """An honest organisation's own process."""
    command = ["serve", "--config", "server.toml"] if name == "bank" else ["join", "--config", "party.toml"]
    return Command(command, folder / name)


def outcome(process: Command) -> tuple[int | None, str]:
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, said


async def attack(node: Any) -> SecureVFLError | None:
    try:
        async with asyncio.timeout(240):
            await node.run()
    except SecureVFLError as error:
        return error
    return None


def alignments(folder: Path, name: str) -> list[dict[str, Any]]:
    entries = read_ledger(folder / name / "run" / "ledger" / f"{name}.jsonl")
    return [dict(each.content) for each in entries if each.content["kind"] == "alignment"]


# -- attack 1: a member repeats its own elements ------------------------------------------------------------


class Repeats(TwoPartyMachine):
    """Sends one of its elements in all places, and keeps whatever it receives."""

    __module__ = TwoPartyMachine.__module__  # whoever attacks has changed the shipped machine
    seen: list[Any]

    def _own_list(self, salt: bytes) -> Any:
        points, order = super()._own_list(salt)
        return points[[0] * len(points)], order

    def receive(self, envelope: Any) -> Any:
        self.seen.append(envelope.message)
        return super().receive(envelope)


def test_a_member_that_repeats_its_elements_is_refused_and_gets_no_id(folder, monkeypatch):
    Repeats.seen = []
    monkeypatch.setattr(protocol, "TwoPartyMachine", Repeats)
    bank = victim(folder, "bank")
    assert bank.has_said("listens")
    error = asyncio.run(attack(Member(read_party_config(folder / "clinic" / "party.toml"))))
    code, said = outcome(bank)
    assert code and "clinic" not in said.splitlines()[-1].partition(":")[0]
    assert "not in order, or holds one twice" in said and "Traceback" not in said
    assert isinstance(error, NetworkError)
    text = repr([vars(each) for each in Repeats.seen]) + said + str(error)
    assert not any(name in text for name in (*OF_BANK, *SHARED))
    assert not (folder / "clinic" / "run" / "alignment.json").exists()
    assert len(alignments(folder, "bank")) == 1  # it was tried, and that is on record


# -- attack 2: a coordinator asks again and again, before there is an agreement -----------------------------


class Guessing(Coordinator):
    """Has guesses answered, and starts over with the next ones before there is anything to agree on."""

    guesses: list[list[str]]
    answers: list[str]

    async def _agree(self) -> None:
        self.answers += self.purpose.ids or ()
        if self.guesses:
            self.guess()
            self.joined = {name: replace(each, aligned="") for name, each in self.joined.items()}
            self.purpose.remembered = lambda who: None  # type: ignore[method-assign]
            await self._introduce()
            await self._invite()
            await self._align()
            await self._agree()

    def guess(self) -> None:
        names, own = self.guesses.pop(0), self.own
        count = len(names)
        self.own = self._table = replace(
            own,
            ids=np.array(names),
            block=np.resize(own.block, (count, 2)),
            labels=np.resize(own.labels, count),
        )


def guessing(folder: Path, answers: list[str], guesses: list[list[str]]) -> Guessing:
    (folder / "bank" / "run" / "alignment.json").unlink(missing_ok=True)
    node = Guessing(read_server_config(folder / "bank" / "server.toml"))
    node.guesses, node.answers = guesses, answers
    node.guess()
    return node


def test_a_coordinator_gets_as_many_guesses_as_it_was_granted_over_all_restarts(folder):
    """Of 40 people it learns about those that it named in two rounds, and the clinic's ledger shows both."""
    candidates = [[*OF_CLINIC[i : i + 5], *(f"nobody-{i}-{j}" for j in range(50))] for i in range(0, 40, 5)]
    answers: list[str] = []
    clinic = victim(folder, "clinic")
    asyncio.run(attack(guessing(folder, answers, list(candidates))))
    code, said = outcome(clinic)
    assert code and "were aligned 2 times and may be 2 times" in said
    assert answers == [*OF_CLINIC[:5], *OF_CLINIC[5:10]]
    for _ in range(1):  # both start again, with guesses that were not answered yet
        clinic = victim(folder, "clinic")
        asyncio.run(attack(guessing(folder, answers, candidates[2:])))
        code, said = outcome(clinic)
        assert code and "were aligned 2 times and may be 2 times" in said
    assert len(answers) == 10
    found = alignments(folder, "clinic")
    assert [each["observers"] for each in found] == [["bank"], ["bank"]]
    assert {each["most"] for each in found} == {100}
    assert json.loads((folder / "clinic" / "run" / "alignment.json").read_text()) == OF_CLINIC[5:10]


def test_more_guesses_at_once_than_were_granted_are_not_answered(folder):
    answers: list[str] = []
    clinic = victim(folder, "clinic")
    many = [*OF_CLINIC, *(f"nobody-{i}" for i in range(61))]
    asyncio.run(attack(guessing(folder, answers, [many])))
    code, said = outcome(clinic)
    assert code and "101 IDs; at most 100" in said
    assert answers == [] and not (folder / "clinic" / "run" / "alignment.json").exists()


def test_a_coordinator_that_asks_for_the_whole_list_at_once_is_refused(folder):
    """`align = "none"`, to which the clinic's rules do not agree."""
    config = folder / "bank" / "server.toml"
    config.write_text(config.read_text().replace("[data]", 'align = "none"\n[data]', 1))
    clinic = victim(folder, "clinic")
    asyncio.run(attack(Coordinator(read_server_config(config))))
    code, said = outcome(clinic)
    assert code and "'none'" in said
    assert not (folder / "clinic" / "run" / "ledger").exists() or alignments(folder, "clinic") == []
