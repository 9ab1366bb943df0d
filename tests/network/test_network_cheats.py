"""Members that cheat over a real network: caught before anything of the iteration is kept, and named."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cheats import HARMLESS, Reused, apply
from federation import Federation, free_port

from securevfl import audit
from securevfl.auditing.page import _facts as facts_of
from securevfl.data.share import OwnTable
from securevfl.errors import Deviation, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.network.consent import agreement_lines
from securevfl.network.folders import gather, load_truth
from securevfl.privacy.journal import TOTAL
from securevfl.privacy.ledger import read_records
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="sealed", model="linear", epochs=4, scaling="none", epsilon=8.0)


def _outcomes(federation, nodes=()):
    """Organisation -> result, or the error it ended with."""
    nodes = nodes or [federation.coordinator(), *(federation.member(name) for name in federation.names[1:])]

    async def everybody():
        async with asyncio.timeout(100):
            return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    return dict(zip(federation.names, asyncio.run(everybody()), strict=True))


def _two(tmp_path, **changes):
    plan = PLAN.with_changes(**changes) if changes else PLAN
    return Federation(tmp_path, plan, parties=("bank", "clinic"), helpers=("dealer",), patience=8.0)


def test_between_organisations_members_are_not_trusted(tmp_path):
    """Consent, dossier and ledger say so, first of all."""
    federation = _two(tmp_path)
    nodes = [federation.coordinator(), federation.member("clinic"), federation.member("dealer")]
    outcomes = _outcomes(federation, nodes)
    assert all(isinstance(each, dict) for each in outcomes.values()), outcomes
    plan = RunFolder(tmp_path / "bank").read_plan()
    assert plan.settings.adversary == "malicious"
    shown = agreement_lines(nodes[1].agreement, "clinic")
    assert shown[0].startswith("members are   malicious: at most 1 of them may do anything")
    assert shown[1].startswith("dealer        dealer: trusted to follow the protocol")
    facts = facts_of(audit(tmp_path / "bank", attacks="none", canaries=-1).content["run"])
    assert facts[0] == ["members", plan.adversary_in_words]
    for name in ("bank", "clinic"):
        assumptions = {r.assumption for r in read_records(tmp_path / name) if r.assumption}
        assert len(assumptions) == 1 and assumptions.pop().startswith("malicious: members may do anything")


@pytest.mark.parametrize("kind", ["shifting", "late"])
def test_a_tampered_residual_stops_the_run_and_is_never_kept(tmp_path, monkeypatch, kind):
    apply(kind, 1, monkeypatch.setattr)
    federation = _two(tmp_path)
    found = _outcomes(federation)["bank"]
    assert isinstance(found, Deviation), found
    assert found.member == "clinic" and "clinic does not follow the protocol" in str(found)
    totals = [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    assert len(totals) == 2  # the ledger has counted the second, whose total was never verified
    assert not (tmp_path / "bank" / "result.json").exists()


@pytest.mark.parametrize("change", ["too-long", "one-unit"])
def test_rows_that_are_too_long_stop_the_run_before_it_begins(tmp_path, monkeypatch, change):
    apply(change, 1, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["bank"]
    assert isinstance(found, Deviation) and found.member == "clinic", outcomes
    assert not [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    assert all(isinstance(each, SecureVFLError) for each in outcomes.values())


def test_a_label_that_is_none_stops_the_run_and_names_the_label_holder(tmp_path, monkeypatch):
    apply("label", 0, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["clinic"]
    assert isinstance(found, Deviation) and found.member == "bank", outcomes
    assert "labels" in found.how


def test_a_second_commitment_ends_the_session(tmp_path, monkeypatch):
    """As after a lost connection: nothing is judged twice."""
    apply("twice", 1, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["bank"]
    assert isinstance(found, Deviation) and found.member == "clinic", outcomes
    assert "sends 'sealed-commitment' out of turn" in found.how
    assert len([r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]) == 2
    assert not (tmp_path / "bank" / "result.json").exists()


def test_of_three_members_the_one_that_signed_two_things_is_named(tmp_path, monkeypatch):
    apply("equivocates", 1, monkeypatch.setattr)
    federation = Federation(
        tmp_path, PLAN, parties=("bank", "clinic", "shop"), helpers=("dealer",), patience=8.0
    )
    outcomes = _outcomes(federation)
    found = [outcomes[name] for name in ("bank", "shop") if isinstance(outcomes[name], Deviation)]
    assert found and all(each.member == "clinic" for each in found), outcomes
    assert any("signed both" in each.how for each in found)
    for name in ("bank", "shop"):
        assert len([r for r in read_records(tmp_path / name) if r.kind.startswith("totals")]) == 2


def test_a_label_holder_whose_test_record_counts_twice_is_named_before_a_figure_exists(tmp_path, monkeypatch):
    apply("two-classes", 0, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["clinic"]
    assert isinstance(found, Deviation) and found.member == "bank", outcomes
    assert not [r for r in read_records(tmp_path / "clinic") if r.kind == "evaluation totals"]


# -- deviations that harm nobody else ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "phases" else pytest.mark.slow) for each in HARMLESS]
)
def test_a_harmless_deviation_passes_and_the_honest_members_audit_finds_nothing(tmp_path, monkeypatch, kind):
    """What the bank's records pay is right whatever the clinic does, and the bank's own audit says so."""
    Reused.kept.clear()
    apply(kind, 1, monkeypatch.setattr)
    federation = _two(tmp_path, record_views=True, epochs=24)
    outcomes = _outcomes(federation)
    assert all(isinstance(each, dict) for each in outcomes.values()), outcomes
    assert outcomes["bank"]["privacy"]["bank"]["epsilon"] <= 8.0
    monkeypatch.undo()
    report = audit(tmp_path / "bank", attacks="none", canaries=-1)
    assert report.verdict == "not tested"  # the clinic's journal would be needed to recompute the noise
    assert {each["verdict"] for each in report.content["findings"]} <= {"holds", "not tested"}
    gather([tmp_path / name for name in federation.names], tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    joint = audit(tmp_path / "joint", attacks="none", canaries=-1, data=data)
    assert joint.content["owners"]["bank"]["observers"]["clinic"]["verdict"] == "holds", joint.content[
        "words"
    ]


def test_a_member_that_quits_leaves_an_unverified_total_that_is_counted_and_not_used(tmp_path, monkeypatch):
    apply("quits", 1, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path, record_views=True))
    assert all(isinstance(each, SecureVFLError) for each in outcomes.values()), outcomes
    totals = [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    journal = (tmp_path / "bank" / "journal" / "bank" / "messages.jsonl").read_text()
    assert len(totals) == 2 and journal.count(f'"{TOTAL}"') == 1
    monkeypatch.undo()
    report = audit(tmp_path / "bank", attacks="none", canaries=-1)
    assert report.verdict == "not tested"


@pytest.mark.slow
def test_a_card_of_three_members_that_may_cheat_is_audited_together(tmp_path):
    plan = Plan(algorithm="sealed", model="scorecard", epsilon=4.0, record_views=True)
    names = ("bank", "clinic", "shop")
    federation = Federation(tmp_path, plan, parties=names, helpers=("dealer",), patience=60.0)
    generator, count = np.random.default_rng(0), 1500
    blocks = {name: generator.uniform(-1, 1, (count, 12)).astype(np.float32) for name in names}
    labels = (sum(block.sum(axis=1) for block in blocks.values()) > 0).astype(int)
    federation.tables = {
        name: OwnTable.from_arrays(
            block,
            ids=[f"id{i:04d}" for i in range(count)],
            labels=labels if name == "bank" else None,
            bounds=(-1.0, 1.0),
        )
        for name, block in blocks.items()
    }
    outcomes = _outcomes(federation)
    assert all(isinstance(each, dict) for each in outcomes.values()), outcomes
    assert RunFolder(tmp_path / "bank").read_plan().settings.adversary == "malicious"
    gather([tmp_path / name for name in federation.names], tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    report = audit(tmp_path / "joint", attacks="none", canaries=-1, data=data)
    assert report.verdict == "holds", report.content["words"]


# -- separate processes -------------------------------------------------------------------------------------

SECUREVFL = str(Path(sys.executable).with_name("securevfl"))
RULES = """
[accept]
members = ["bank", "clinic", "dealer"]
algorithms = ["sealed"]
protocols = ["plain"]
dealer = "dealer"
adversary = "malicious"
"""
OWNERS = """epsilon = 8
delta = 1e-5
test_fraction = 0.2
evaluations = 1
predictions = 1000
alignment = { kinds = ["none"], ids = 1000, times = 3 }
"""


def _folders(base: Path, port: int) -> None:
    given = Federation(base / "unused", PLAN, parties=("bank", "clinic"), helpers=("dealer",))
    command = [SECUREVFL, "certificates"]
    quiet = {"cwd": base, "check": True, "capture_output": True}
    subprocess.run([*command, "init", "--name", "Test", "--folder", "ca"], **quiet)
    subprocess.run([*command, "issue", "bank", "clinic", "dealer", "--folder", "ca", "--out", "."], **quiet)
    for name, table in given.tables.items():
        titles = [
            "id",
            *(f"{name}{c}" for c in range(table.block.shape[1])),
            *(["y"] if name == "bank" else []),
        ]
        rows = [
            ",".join([str(i), *map(str, values), *([str(int(table.labels[n]))] if name == "bank" else [])])
            for n, (i, values) in enumerate(zip(table.ids, table.block, strict=True))
        ]
        (base / name / "table.csv").write_text("\n".join([",".join(titles), *rows]) + "\n")
    common = 'run = "test"\nfolder = "run"\ncertificates = "."\n'
    plan = '[plan]\nalgorithm = "sealed"\nmodel = "linear"\nepochs = 4\nscaling = "none"\nepsilon = 8.0\n'
    plan += '[plan.sealed]\ndealer = "dealer"\n'
    data = '[data]\nfile = "table.csv"\nid_column = "id"\n'
    join = f'{common}coordinator = "bank"\naddress = "127.0.0.1:{port}"\n'
    serve = f'{common}listen = "127.0.0.1:{port}"\nparties = ["clinic"]\nalign = "none"\n'
    (base / "bank" / "config.toml").write_text(f'{serve}{data}label_column = "y"\n{plan}')
    (base / "clinic" / "config.toml").write_text(f"{join}{data}{RULES}{OWNERS}")
    (base / "dealer" / "config.toml").write_text(f"{join}{RULES}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cheater"),
    [
        ("too-long", "clinic"),
        ("one-unit", "clinic"),
        ("label", "bank"),
        ("shifting", "clinic"),
        ("late", "clinic"),
        ("shifting", "bank"),
        ("two-classes", "bank"),
    ],
)
def test_a_process_that_cheats_is_named_on_the_others_terminals(tmp_path, kind, cheater):
    _folders(tmp_path, free_port())
    program = str(Path(__file__).with_name("cheats.py"))
    running = {}
    for place, name in enumerate(("bank", "clinic", "dealer")):
        command = ["serve" if name == "bank" else "join", "--config", "config.toml"]
        start = [sys.executable, program, kind, str(place)] if name == cheater else [SECUREVFL]
        running[name] = subprocess.Popen(
            [*start, *command],
            cwd=tmp_path / name,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        said = {name: process.communicate(timeout=120)[0] for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    honest = "clinic" if cheater == "bank" else "bank"
    assert f"{cheater} does not follow the protocol" in " ".join(said[honest].split()), said
    assert all(process.returncode for process in running.values()), said
    assert not (tmp_path / honest / "run" / "result.json").exists()
    kept = [r for r in read_records(tmp_path / honest / "run") if r.kind.startswith("totals")]
    assert len(kept) == {"shifting": 2, "late": 2, "two-classes": 4}.get(kind, 0)
