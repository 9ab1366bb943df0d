"""Members that cheat over a real network: caught before anything of the iteration is kept, and named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cheats import HARMLESS, Again, Reused, apply
from federation import Federation, free_port
from warm import Command

from securevfl import audit
from securevfl.auditing.page import _facts as facts_of
from securevfl.data.share import OwnTable
from securevfl.errors import Deviation, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.network.consent import agreement_lines
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.journal import TOTAL
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.protocols.sealed.messages import Coin, ProofSeed
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="sealed", model="linear", epochs=4, scaling="none", epsilon=8.0)


def _outcomes(federation, nodes=()):
    """Organisation -> result, or the error it ended with."""
    nodes = nodes or [federation.coordinator(), *(federation.member(name) for name in federation.names[1:])]

    async def everybody():
        async with asyncio.timeout(240):
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


def _coins(run, name):
    """Rounds of the coins that somebody was told; -1 is the set-up."""
    return [seen.fields["round"] for seen in View(run / "views" / name).messages(Coin.kind)]


def test_a_lost_connection_brings_no_second_coin(tmp_path, monkeypatch):
    apply("again", 1, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path, record_views=True))
    found = outcomes["bank"]
    assert isinstance(found, Deviation) and found.member == "clinic", outcomes
    assert Again.transports and all(_coins(tmp_path / n, n) == [-1, -1, 0, 1] for n in ("bank", "clinic"))
    assert len([r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]) == 2


def test_after_a_cheat_the_run_goes_on_in_a_new_session(tmp_path, monkeypatch):
    """What the burnt session opened is counted, and no state, journal or model has it."""
    apply("shifting", 1, monkeypatch.setattr)
    federation = _two(tmp_path, record_views=True, budget_epsilon=16.0)
    assert isinstance(_outcomes(federation)["bank"], Deviation)
    monkeypatch.undo()
    outcomes = _outcomes(federation)
    assert all(isinstance(each, dict) for each in outcomes.values()), outcomes
    totals = [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    journal = (tmp_path / "bank" / "journal" / "bank" / "messages.jsonl").read_text()
    assert len(totals) == 5 and journal.count(f'"{TOTAL}"') == 4 + 1  # the last one is the evaluation's
    view = View(tmp_path / "bank" / "views" / "bank")
    sessions = [seen.fields["session"] for seen in view.messages(ProofSeed.kind)]
    assert len(sessions) == len(set(sessions)) == 3


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


def test_what_a_member_signed_an_iteration_ago_blames_it_for_nothing(tmp_path, monkeypatch):
    """The clinic shifts a residual and shows the bank an old signature of the shop's."""
    apply("blames", 1, monkeypatch.setattr)
    federation = Federation(
        tmp_path, PLAN, parties=("bank", "clinic", "shop"), helpers=("dealer",), patience=8.0
    )
    outcomes = _outcomes(federation)
    found = [outcomes[name] for name in ("bank", "shop") if isinstance(outcomes[name], Deviation)]
    assert found and all(each.member in ("clinic", None) for each in found), outcomes
    for name in ("bank", "shop"):
        lines = (tmp_path / name / "ledger" / f"{name}.jsonl").read_text().splitlines()
        noted = [entry["member"] for entry in map(json.loads, lines) if "how" in entry]
        assert len(noted) <= 1 and not {"bank", "shop"} & set(noted)
        assert len([r for r in read_records(tmp_path / name) if r.kind.startswith("totals")]) == 2


def test_a_label_holder_whose_test_record_counts_twice_is_named_before_a_figure_exists(tmp_path, monkeypatch):
    apply("two-classes", 0, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["clinic"]
    assert isinstance(found, Deviation) and found.member == "bank", outcomes
    assert not [r for r in read_records(tmp_path / "clinic") if r.kind == "evaluation totals"]


@pytest.mark.parametrize("liar", [0, 1])
def test_an_error_in_the_waves_of_a_test_record_is_named_before_a_figure_exists(tmp_path, monkeypatch, liar):
    apply("figures", liar, monkeypatch.setattr)
    outcomes = _outcomes(_two(tmp_path, record_views=True))
    cheater, honest = ("bank", "clinic") if liar == 0 else ("clinic", "bank")
    found = outcomes[honest]
    assert isinstance(found, Deviation) and found.member == cheater, outcomes
    kept = (tmp_path / honest / "journal" / honest / "messages.jsonl").read_text().count(f'"{TOTAL}"')
    assert kept == 4 and not (tmp_path / honest / "result.json").exists()
    said = audit(tmp_path / honest, attacks="none", canaries=-1).content["run"]["deviations"]
    assert said == [f"{honest} has seen that {cheater} does not follow the protocol: {found.how}"]


# -- deviations that harm nobody else ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "phases" else pytest.mark.slow) for each in HARMLESS]
)
def test_a_harmless_deviation_passes_and_the_honest_members_audit_finds_nothing(tmp_path, monkeypatch, kind):
    """What the bank's records pay is right whatever the clinic does, and the bank's own audit says so."""
    Reused.kept.clear()
    apply(kind, 1, monkeypatch.setattr)
    federation = _two(tmp_path, record_views=True, record_words=True, epochs=24)
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
SECONDS = 400
"""That processes may take on a busy machine."""
CHEAT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cheats; cheats.apply"
"""Runs in a process that cheats, before the command does."""


class Company:
    """Processes of organisations over TLS, each with a folder; the last one is the dealer.

    Args:
        base: Where the folders are.
        parties: Who brings data; the first coordinates.
        more: Further lines of the plan.
        epsilon: What the members allow for in all.
    """

    def __init__(self, base: Path, *parties: str, more: str = "", epsilon: float = 8.0) -> None:
        self.base, self.parties, self.names = base, parties, (*parties, "dealer")
        self.running: dict[str, Command] = {}
        given = Federation(base / "unused", PLAN, parties=parties, helpers=("dealer",))
        quiet = {"cwd": base, "check": True, "capture_output": True}
        command = [SECUREVFL, "certificates"]
        subprocess.run([*command, "init", "--name", "Test", "--folder", "ca"], **quiet)
        subprocess.run([*command, "issue", *self.names, "--folder", "ca", "--out", "."], **quiet)
        for name, table in given.tables.items():
            self._write_table(name, table)
        self._write_configs(free_port(), more, epsilon)

    def _write_table(self, name: str, table: OwnTable) -> None:
        titles = ["id", *(f"{name}{c}" for c in range(table.block.shape[1]))]
        columns = [table.ids, *table.block.T]
        if table.labels is not None:
            titles, columns = [*titles, "y"], [*columns, table.labels.astype(int)]
        lines = [",".join(titles), *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
        (self.base / name / "table.csv").write_text("\n".join(lines) + "\n")

    def _write_configs(self, port: int, more: str, epsilon: float) -> None:
        common = 'run = "test"\nfolder = "run"\ncertificates = "."\n'
        plan = '[plan]\nalgorithm = "sealed"\nmodel = "linear"\nepochs = 4\nscaling = "none"\nepsilon = 8.0\n'
        plan += f'{more}[plan.sealed]\ndealer = "dealer"\n'
        data = '[data]\nfile = "table.csv"\nid_column = "id"\n'
        join = f'{common}coordinator = "bank"\naddress = "127.0.0.1:{port}"\n'
        rules = f"[accept]\nmembers = {json.dumps(self.names)}\n"
        rules += (
            'algorithms = ["sealed"]\nprotocols = ["plain"]\ndealer = "dealer"\nadversary = "malicious"\n'
        )
        owners = (
            f"epsilon = {epsilon}\ndelta = 1e-5\ntest_fraction = 0.2\nevaluations = 1\npredictions = 1000\n"
        )
        owners += 'alignment = { kinds = ["none"], ids = 1000, times = 3 }\n'
        serve = (
            f'{common}listen = "127.0.0.1:{port}"\nparties = {json.dumps(self.parties[1:])}\nalign = "none"\n'
        )
        self._config("bank", f'{serve}{data}label_column = "y"\n{plan}')
        self._config("dealer", f"{join}{rules}")
        for name in self.parties[1:]:
            self._config(name, f"{join}{data}{rules}{owners}")

    def _config(self, name: str, text: str) -> None:
        (self.base / name / "config.toml").write_text(text)

    def start(self, *names: str, kind: str = "", cheater: str = "") -> None:
        """Starts processes, one of which may cheat."""
        for name in names or self.names:
            command = ["serve" if name == "bank" else "join", "--config", "config.toml"]
            lie = f"{CHEAT}({kind!r}, {self.names.index(name)})" if name == cheater else ""
            if name in self.running:
                self.running[name].communicate(timeout=SECONDS)
            self.running[name] = Command(command, self.base / name, first=lie)

    def finish(self) -> dict[str, str]:
        """Waits for all; what they said, in one line each."""
        said = {name: process.communicate(timeout=SECONDS)[0] for name, process in self.running.items()}
        return {name: " ".join(text.split()) for name, text in said.items()}

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def totals(self, name: str) -> int:
        """Openings in an organisation's ledger."""
        return len([r for r in read_records(self.base / name / "run") if r.kind.startswith("totals")])

    def kept(self, name: str) -> int:
        """Totals in its journal."""
        journal = self.base / name / "run" / "journal" / name / "messages.jsonl"
        return journal.read_text().count(f'"{TOTAL}"')

    def sessions(self, name: str) -> int:
        """Checked sessions, by their names, that its view holds."""
        view = View(self.base / name / "run" / "views" / name)
        return len({seen.fields["session"] for seen in view.messages(ProofSeed.kind)})


@pytest.fixture
def company(tmp_path):
    """Makes a company; its processes end with the test."""
    made: list[Company] = []

    def make(*parties: str, base: Path = tmp_path, **settings) -> Company:
        made.append(Company(base, *parties, **settings))
        return made[-1]

    yield make
    for each in made:
        each.stop()


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
def test_a_process_that_cheats_is_named_on_the_others_terminals(company, kind, cheater):
    found = company("bank", "clinic")
    found.start(kind=kind, cheater=cheater)
    said = found.finish()
    honest = "clinic" if cheater == "bank" else "bank"
    assert f"{cheater} does not follow the protocol" in said[honest], said
    assert all(process.returncode for process in found.running.values()), said
    assert not (found.base / honest / "run" / "result.json").exists()
    assert found.totals(honest) == {"shifting": 2, "late": 2, "two-classes": 4}.get(kind, 0)


@pytest.mark.slow
def test_of_three_processes_the_one_that_signed_two_things_is_named(company):
    found = company("bank", "clinic", "shop")
    found.start(kind="equivocates", cheater="clinic")
    said = found.finish()
    named = [name for name in ("bank", "shop") if "clinic does not follow the protocol" in said[name]]
    assert named and any("signed both" in said[name] for name in named), said
    assert all(process.returncode for process in found.running.values()), said
    for name in ("bank", "shop"):
        assert not (found.base / name / "run" / "result.json").exists() and found.totals(name) == 2


@pytest.mark.slow
def test_a_process_that_cuts_its_connection_gets_no_second_coin(company):
    found = company("bank", "clinic", more="record_views = true\n")
    found.start(kind="again", cheater="clinic")
    said = found.finish()
    assert all(process.returncode for process in found.running.values()), said
    assert "clinic does not follow the protocol" in said["bank"], said
    assert not (found.base / "bank" / "run" / "result.json").exists()
    assert found.totals("bank") == 2 and found.kept("bank") == 1
    assert _coins(found.base / "bank" / "run", "bank") == [-1, -1, 0, 1]


@pytest.mark.slow
def test_what_a_process_says_and_sends_after_a_cheat_tells_nothing_of_its_rows(company, tmp_path):
    """An error so large that weights would run away if a row is long: nobody tests a total unverified.

    A victim with rows of zeros and one with long rows send the cheater the same, and their terminals, ledgers
    and journals say the same.
    """
    seen = []
    for entry in ("0.0", "1.0"):
        (tmp_path / entry).mkdir()
        found = company(
            "bank", "clinic", more="record_views = true\nrecord_words = true\n", base=tmp_path / entry
        )
        table = found.base / "bank" / "table.csv"
        title, *rows = table.read_text().splitlines()
        cells = [row.split(",") for row in rows]
        rows = [",".join([row[0], *([entry] * (len(row) - 2)), row[-1]]) for row in cells]
        table.write_text("\n".join([title, *rows]) + "\n")
        found.start(kind="shifting", cheater="clinic")
        said = found.finish()
        assert "clinic does not follow the protocol: an opened residual" in said["bank"], said
        assert "diverged" not in said["bank"] and "finite" not in said["bank"]
        view = View(found.base / "bank" / "run" / "views" / "bank")
        sent = sorted((each.receiver, each.kind) for each in view.messages() if each.receiver == "clinic")
        ends = found.running["bank"].returncode, found.totals("bank"), found.kept("bank")
        seen.append((said["bank"].partition("clinic does not")[2], sent, *ends))
    assert seen[0] == seen[1] and len(seen[0][1]) > 8


ROOM = {"more": "record_views = true\nbudget_epsilon = 16.0\n", "epsilon": 16.0}
"""Room for iterations that are counted again."""


@pytest.mark.slow
def test_a_process_that_dies_when_it_knows_the_coin_comes_back_to_a_new_session(company):
    found = company("bank", "clinic", **ROOM)
    found.start(kind="dies", cheater="clinic")
    assert found.running["clinic"].wait(timeout=SECONDS) == 7
    found.start("clinic")
    said = found.finish()
    assert not any(process.returncode for process in found.running.values()), said
    assert found.totals("bank") == 5 and found.kept("bank") == 4 + 1 and found.sessions("bank") == 3


@pytest.mark.slow
def test_a_process_that_comes_back_with_longer_rows_is_named(company):
    """Its rows were proved, it died when it knew a coin, and what it brings to the next session is long."""
    found = company("bank", "clinic", **ROOM)
    found.start(kind="dies", cheater="clinic")
    assert found.running["clinic"].wait(timeout=SECONDS) == 7
    found.start("clinic", kind="too-long", cheater="clinic")
    said = found.finish()
    assert "clinic does not follow the protocol" in said["bank"], said
    assert "longer than declared" in said["bank"] or "out of range" in said["bank"], said
    assert all(process.returncode for process in found.running.values()), said
    assert found.totals("bank") == 2 and found.kept("bank") == 1


@pytest.mark.slow
def test_after_a_cheat_the_same_commands_go_on_with_a_new_session(company):
    """The burnt session's total is counted and enters nothing; the last total that is kept is a test's."""
    found = company("bank", "clinic", **ROOM)
    found.start(kind="shifting", cheater="clinic")
    said = found.finish()
    assert "clinic does not follow the protocol" in said["bank"], said
    assert found.totals("bank") == 2 and found.kept("bank") == 1 and found.sessions("bank") == 1
    found.start()
    said = found.finish()
    assert not any(process.returncode for process in found.running.values()), said
    assert (found.base / "bank" / "run" / "result.json").is_file()
    assert found.totals("bank") == 5 and found.kept("bank") == 4 + 1 and found.sessions("bank") == 3
