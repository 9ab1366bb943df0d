"""Real processes, killed in every phase and at random: all finish, ledgers verify, no result is wrong."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import models
from federation import ACCEPT_EVERYTHING, free_port, tables, together
from warm import Command

from securevfl import Plan, train
from securevfl.algorithms import find_algorithm
from securevfl.data.share import OwnTable
from securevfl.network.authority import create_authority, issue
from securevfl.privacy.ledger import read_ledger, read_records
from securevfl.privacy.views import View, read_heads
from securevfl.settings.protocols import PROTOCOLS as SUMS

PARTIES = ("bank", "clinic", "shop")
KILLS = 4
SECONDS = 400
"""That processes may take to begin, or to go on, on a busy machine."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vafl": ("vafl", {"sigma": 20.0, "budget_epsilon": 8.0, "delta": 1e-3}),
    "two-tree": ("vafl-sync", {"protocol": "two-tree"}),
    "pairwise": ("fdml", {"protocol": "pairwise"}),
    "no server": ("fdml", {"decentralised": True}),
    "sealed": ("sealed", {"sigma": 4.0}),
    "no dealer": ("sealed", {"sigma": 4.0, "dealer": "none", "model": "linear", "batch": 2**31 - 1}),
}


PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{protocol: ("vafl-sync", {"protocol": protocol}) for protocol in SUMS},
    "sealed": ("sealed", {"sigma": 4.0}),
    "two encrypt": ("sealed", {"sigma": 4.0, "dealer": "none", "model": "linear", "batch": 32}),
    "third deals": ("sealed", {"sigma": 4.0, "dealer": "none", "model": "linear", "batch": 32}),
}
NO_MESSAGE = ("contributions", "scale")
"""Entries that are not of a message: who passes values on, and the second half of a sealed preparation."""
WATCH = """
import os, random
from securevfl.protocols.sealed.correlations import PoolMachine
drawn, keep = os.urandom, PoolMachine._keep
file = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def note(secret):
    os.write(file, secret.hex().encode() + b"\\n")
    return secret
def kept(machine, number):
    made, _ = machine._open[number]
    for words in (made.factors, made.products, made.blind, made.received, made.noise):
        note(words.tobytes()[:32])
    keep(machine, number)
os.urandom, PoolMachine._keep = lambda count: note(drawn(count)), kept
random._urandom = os.urandom  # the module's own, which `secrets` draws from
"""
"""Runs at the start of a process: tells the test every seed and the beginning of every correlation."""
SERIALISED = bytes.fromhex("5ea11004")
"""How keys and ciphertexts begin. Public keys alone, which views may keep, are larger than 400,000 bytes."""
PHASES = (("joining", 0), ("prepare", 0), ("epoch", 1), ("evaluate", 1), ("epoch", 2), ("final", 3))


class Company:
    """Organisations in folders of their own, as processes of the command line."""

    def __init__(
        self, folder: Path, plan: Plan, helpers: tuple[str, ...], parties: tuple[str, ...] = PARTIES
    ) -> None:
        if "dealer" in helpers and plan.settings.dealer == "auto":
            plan = plan.with_changes(settings={"dealer": "dealer"})
        self.folder, self.parties, self.names = folder, parties, (*parties, *helpers)
        self.running: dict[str, Command] = {}
        self.alone = getattr(plan.settings, "dealer", "") == "none"
        self.tables = tables(parties, rows=80)
        issue(create_authority(folder / "ca", name="test"), self.names, out=folder)
        address = f"127.0.0.1:{free_port()}"
        for name in self.names:
            self._write_config(name, address, plan.record_views)
            if name in self.tables:
                write_table(folder / name / "table.csv", self.tables[name])
        (folder / "bank" / "plan.toml").write_text(plan.to_toml())
        (folder / "watch").mkdir()

    def _write_config(self, name: str, address: str, views: bool) -> None:
        lines = ['run = "kill"', 'certificates = "."', 'folder = "run"']
        if name == "bank":
            others = json.dumps(self.parties[1:])
            lines += [f'listen = "{address}"', f"parties = {others}", 'plan = "plan.toml"']
            lines += ['align = "none"', "time_unit = 0.01"]
        else:
            lines += ['coordinator = "bank"', f'address = "{address}"']
        lines += ["[network]", "patience = 120"] + ([] if name == "bank" else ACCEPT_EVERYTHING.splitlines())
        lines += [] if name == "bank" else ["[local]", f"record_views = {str(views).lower()}"]
        if name in self.tables:
            lines += ["[data]", 'file = "table.csv"'] + (['label_column = "y"'] if name == "bank" else [])
            lines += ["[data.bounds]", *(f"x{i} = [-1.0, 1.0]" for i in range(3))]
        (self.folder / name / "config.toml").write_text("\n".join(lines) + "\n")

    def start(self, name: str) -> None:
        command = ["serve" if name == "bank" else "join", "--config", str(self.folder / name / "config.toml")]
        places = {place: self.folder / name / place for place in ("temporary", "here")}
        for place in places.values():
            place.mkdir(exist_ok=True)
        own = {"TMPDIR": str(places["temporary"]), "WATCHED": str(self.folder / "watch" / name)}
        self.running[name] = Command(
            command, places["here"], self.folder / f"{name}.out", environment=own, first=WATCH
        )

    def check_files(self) -> int:
        """Without a dealer no file of anybody, temporary ones too, holds a key, seed or mask; of how many."""
        if not self.alone:
            return 0
        watched = [path for name in self.names if (path := self.folder / "watch" / name).exists()]
        secrets = {line for path in watched for line in path.read_text().split() if len(line) >= 32}
        for name in self.names:
            for path in (path for path in (self.folder / name).rglob("*") if path.is_file()):
                content = path.read_bytes()
                sizes = [int.from_bytes(content[at + 8 : at + 16], "little") for at in places_of(content)]
                assert all(size > 400_000 for size in sizes), (path, sizes)
                found = [
                    each for each in secrets if bytes.fromhex(each) in content or each.encode() in content
                ]
                assert not found, path
        return len(secrets)

    def progress(self, name: str) -> int:
        """Grows with everything that an organisation writes down."""
        while True:
            try:
                files = [path for path in (self.folder / name / "run").rglob("*") if path.is_file()]
                lines = (path.read_bytes().count(b"\n") for path in files if path.suffix == ".jsonl")
                return len(files) + sum(lines)
            except FileNotFoundError:  # an old checkpoint was deleted meanwhile
                continue

    def phases(self, name: str) -> set[tuple[str, int]]:
        """The phases that an organisation's process has begun, of which epoch."""
        file = self.folder / name / "run.log"
        events = [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
        begun = {(each["part"], each["epoch"]) for each in events if each["event"] == "phase begins"}
        return begun | ({("joining", 0)} if events else set())

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def restart(self, name: str) -> None:
        """Starts a killed process again, but for a coordinator that had finished: nothing is left to do."""
        del self.running[name]
        if name != "bank" or not (self.folder / name / "run" / "result.json").exists():
            self.start(name)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def wait(self) -> None:
        for name, process in self.running.items():
            assert process.wait(timeout=300) == 0, f"{name}: {self.said(name)}"

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def places_of(content: bytes) -> list[int]:
    """Where keys and ciphertexts begin."""
    return [found.start() for found in re.finditer(re.escape(SERIALISED), content)]


def write_table(path: Path, table: OwnTable) -> None:
    labels = table.labels
    head = ["id", *(f"x{i}" for i in range(table.block.shape[1])), *([] if labels is None else ["y"])]
    lines = [",".join(head)]
    for row, key in enumerate(table.ids):
        values = [repr(float(value)) for value in table.block[row]]
        lines.append(",".join([str(key), *values, *([] if labels is None else [str(labels[row])])]))
    path.write_text("\n".join(lines) + "\n")


def kill_at_random(company: Company, chance: random.Random) -> int:
    """Kills one after the other, each after some more progress, and starts it again; how many it got."""
    killed = 0
    for turn in range(KILLS):
        name = company.names[turn % len(company.names)]
        goal = company.progress(name) + chance.randrange(40)
        deadline = time.monotonic() + SECONDS
        while company.progress(name) < goal and company.running[name].poll() is None:
            assert time.monotonic() < deadline, f"{name} hangs: {company.said(name)}"
            time.sleep(0.01)
        if company.running[name].poll() is not None:
            break
        company.kill(name)
        killed += 1
        company.restart(name)
        if name not in company.running:
            break
    return killed


def kill_in_every_phase(company: Company, victim: str) -> int:
    """Kills one organisation once in each phase, a little later in each, and starts it again."""
    killed = 0
    for number, (phase, epoch) in enumerate(PHASES):
        deadline = time.monotonic() + SECONDS
        while (phase, epoch) not in company.phases(victim):
            assert time.monotonic() < deadline, f"no {phase} of {epoch}: {company.said(victim)}"
            assert company.running[victim].poll() is None, company.said(victim)
            time.sleep(0.002)
        time.sleep(0.005 * number)
        if company.running[victim].poll() is None:
            company.kill(victim)
            company.check_files()
            killed += 1
            (company.folder / victim / "run.log").unlink()
            company.restart(victim)
    return killed


def unseen_releases(company: Company, owner: str) -> list[int]:
    """For each process of an organisation, how many entries its ledger has beyond what others received."""
    run = company.folder / owner / "run"
    heads = [head for name in company.names for head in read_heads(company.folder / name / "run")]
    seen = {head.position for head in heads if head.owner == owner}
    counts: list[int] = []
    for entry in read_ledger(run / "ledger" / f"{owner}.jsonl"):
        if entry.is_session:
            counts.append(0)
        elif entry.is_release and entry.content["kind"] not in NO_MESSAGE:
            counts[-1] = 0 if entry.index in seen else counts[-1] + 1
    return counts


def check_ledgers(company: Company) -> None:
    heads = [head for name in company.names for head in read_heads(company.folder / name / "run")]
    for name in company.names:
        run = company.folder / name / "run"
        read_records(run)
        read_ledger(run / "ledger" / f"{name}.jsonl", heads=heads)


def repeated_words(company: Company) -> list[str]:
    """Digests of masked words that an organisation was sent more than once, in all its processes together.

    A round that is repeated after a kill has the same scores: under the same masks its words would repeat.
    """
    found: Counter[str] = Counter()
    for name in company.names:
        for line in View(company.folder / name / "run" / "views" / name).headers():
            if line["receiver"] == name and line["kind"].startswith("sealed-"):
                full = {field for field, stored in line["arrays"].items() if all(stored[2])}
                sketches = [each for field, each in line["sketches"].items() if field in full]
                found.update(f"{name} {line['kind']} {digest}" for digest, *_ in sketches)
    assert found
    return [each for each, count in found.items() if count > 1]


def compare(company: Company, plan: Plan, results: Mapping[str, Any]) -> None:
    """Without noise and asynchrony the model is the one that was trained without any kill."""
    local = train(together(company.tables, plan), plan, company.folder / "local")
    assert results["bank"]["test"]["loss"] == pytest.approx(local.test["loss"], abs=1e-4)
    expected = models(company.folder)
    for name in company.parties:
        for key, value in models(company.folder / name).items():
            owner, weight = key.split("/")[-2:]
            reference = expected[f"local/{owner}/{weight}"]
            np.testing.assert_allclose(value, reference, rtol=0, atol=2e-6, err_msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_kills_at_random_moments(tmp_path, case, seed):
    algorithm, changes = CASES[case]
    settings = {"algorithm": algorithm, "epochs": 4, "batch": 16, "seed": 5, **changes}
    plan = Plan.from_flat({"algorithm": "vafl", "unprotected": True, **settings})
    company = Company(tmp_path / "all", plan, tuple(find_algorithm(algorithm).assistants(plan).values()))
    for name in company.names:
        company.start(name)
    try:
        killed = kill_at_random(company, random.Random(seed))
        company.wait()
    finally:
        company.stop()
    assert killed >= 1
    check_ledgers(company)
    results = {
        name: json.loads((company.folder / name / "run" / "result.json").read_text())
        for name in company.names
    }
    for name, spent in results["clinic"]["privacy"].items():
        bound = plan.budget_epsilon or float("inf")
        assert spent["epsilon"] is None or spent["epsilon"] <= bound, (name, spent)
    if case in ("two-tree", "pairwise", "no server"):
        compare(company, plan, results)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["clinic", "bank"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_kill_in_every_phase_of_every_protocol(tmp_path, protocol, victim):
    algorithm, changes = PROTOCOLS[protocol]
    settings = {
        "algorithm": algorithm,
        "epochs": 3,
        "batch": 8,
        "seed": 5,
        "record_views": True,
        "evaluate_every": 1,
    }
    plan = Plan.from_flat({"algorithm": "vafl", "unprotected": True, **settings, **changes})
    helpers = tuple(find_algorithm(algorithm).assistants(plan).values())
    company = Company(tmp_path / "all", plan, helpers, PARTIES[:2] if protocol == "two encrypt" else PARTIES)
    for name in company.names:
        company.start(name)
    try:
        killed = kill_in_every_phase(company, victim)
        company.wait()
    finally:
        company.stop()
    assert killed >= len(PHASES) - 1  # the last phase is short
    searched = company.check_files()
    assert searched > 20 or not company.alone
    check_ledgers(company)
    results = {
        name: json.loads((company.folder / name / "run" / "result.json").read_text())
        for name in company.names
    }
    assert all(each["epochs"] == 3 and each["stopped"] is None for each in results.values())
    if victim == "clinic":  # whoever was killed itself may have lost the last of what it saw
        assert max(unseen_releases(company, victim)) <= 1
    if algorithm == "sealed":  # whose shares are rounded at random
        assert repeated_words(company) == []
    else:
        compare(company, plan, results)
