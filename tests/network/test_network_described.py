"""Two organisations, two CSV files, two descriptions: a sealed scorecard with a noisy test figure."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from federation import Federation, free_port
from in_process import run_program, run_shell
from test_network_page import PAGE
from warm import Command

from securevfl import audit
from securevfl.data.columns import Column
from securevfl.data.share import Outline, OwnTable, share
from securevfl.errors import DataError
from securevfl.network.agreement import Facts
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.settings.plan import Plan

BANK = """
id = "customer"
label = "defaulted"
label_holder = "bank"
task = "binary"
[parties.bank]
file = "bank.csv"
[parties.bank.columns]
age = { bounds = [18, 100] }
job = { values = ["clerk", "managing"] }
important = { kind = "flag" }
"""
SHOP = """
id = "customer"
[parties.shop]
file = "shop.csv"
[parties.shop.columns]
hometown = { kind = "category" }
"""


def write_tables(folder: Path, rows: int = 700) -> dict[str, OwnTable]:
    """Own tables of a bank and a shop, gaps and text included; each knows its own description alone."""
    generator = np.random.default_rng(0)
    age, spent = generator.uniform(18, 90, rows), generator.lognormal(3, 1, rows)
    job = generator.choice(["clerk", "managing", "farmer"], rows)
    city = generator.choice(["Rome", "Reykjavik", "Lima"], rows)
    odds = 1.5 * (job == "managing") - 0.04 * (age - 50) + (city == "Reykjavik") - 0.02 * spent
    label = (generator.random(rows) < 1 / (1 + np.exp(-odds))).astype(int)
    gaps = generator.random(rows) < 0.1
    with (folder / "bank.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["customer", "age", "job", "important", "defaulted"])
        for i in range(rows):
            table.writerow(
                [f"c{i:04d}", "" if gaps[i] else age[i], job[i], "yes" if i % 3 else "no", label[i]]
            )
    with (folder / "shop.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["customer", "spendings", "hometown"])
        for i in range(rows):
            table.writerow([f"c{i:04d}", spent[i], "" if gaps[-i] else city[i]])
    (folder / "bank.toml").write_text(BANK)
    (folder / "shop.toml").write_text(SHOP)
    return {name: OwnTable.from_description(folder / f"{name}.toml", name) for name in ("bank", "shop")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    plan = Plan(
        algorithm="sealed",
        model="scorecard",
        epsilon=8.0,
        record_views=True,
    )
    federation = Federation(folder, plan, parties=("bank", "shop"), helpers=("dealer",), test_fraction=0.3)
    federation.tables = write_tables(folder)
    return federation, asyncio.run(federation.run())


def test_a_scorecard_of_described_columns_trains_over_a_network(trained):
    federation, results = trained
    test = results["bank"]["test"]
    assert test["accuracy"] is None and 0 < test["se"] < 0.2 and test["auc"] > 0.5
    assert results["bank"]["test_is"].startswith("from noisy totals")
    assert results["shop"]["test"] == {} and results["shop"]["prediction"] == {}
    for name in ("bank", "shop"):
        records = read_records(federation.folder / name)
        assert results[name]["privacy"][name]["epsilon"] <= 8.0
        assert {r.mechanism for r in records} == {"gaussian", "masked"}
        (paid,) = [r for r in records if r.kind == "evaluation totals"]
        assert paid.rows.size == 210 and paid.rows.min() == 490


def test_no_name_or_value_of_a_column_reaches_the_other(trained):
    federation, _ = trained
    words = {
        "bank": (b"Reykjavik", b"hometown", b"spendings"),
        "shop": (b"managing", b"important", b"defaulted"),
    }
    for name, secrets in words.items():
        for path in (federation.folder / name).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not [word for word in secrets if word in content], path


def test_the_joint_audit_of_described_columns_finds_nothing(trained, tmp_path):
    """The label holder's promise holds; four columns open too little to miss the shop's part of the noise."""
    federation, _ = trained
    gather([federation.folder / name for name in federation.names], tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    report = audit(tmp_path / "joint", attacks="none", data=data, canaries=-1)
    owners = report.content["owners"]
    assert owners["bank"]["observers"]["shop"]["verdict"] == "holds", report.content["words"]
    found = owners["shop"]["observers"]["bank"]
    assert found["verdict"] == "not tested" and "so few totals" in found["reasons"][0], found
    assert len(found["reasons"]) == 1 and {f["verdict"] for f in report.content["findings"]} == {
        "holds",
        "not tested",
    }
    opened = list(View(tmp_path / "joint" / "journal" / "bank").messages("total"))
    assert opened[-1].fields["values"].shape == (2, 48)  # the evaluation was replayed, too


def outline(**changes):
    facts = [Column(name="a", values=("x", "other"), kind="category").facts, Column(name="b").facts]
    content = {
        "parties": ("bank", "shop"),
        "widths": (5, 1),
        "bounds": (None, None),
        "described": (facts, None),
        "label_holder": "bank",
        "task": "binary",
        "classes": 2,
        "n_train": 8,
        "n_test": 2,
        "test_fraction": 0.2,
        "split_seed": 0,
    }
    return Outline(**{**content, **changes})


def test_an_outline_tells_how_columns_are_coded_and_no_more():
    read = Outline.from_json(outline().to_json())
    bank, shop = read.columns()
    assert [c.kind for c in bank] == ["category", "number"] and bank[0].codes == 2
    assert [c.missing for c in shop] == ["error"]  # plain numbers of an organisation that describes none
    assert outline(described=(None, None)).columns() == ()


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "ignore"},
        {"kind": "number", "values": 2},
        {"values": -1},
        {"values": 1 << 20},
        {"missing": "guess"},
        {"scale": "cubic"},
        {"bounds": [1.0, 0.0], "kind": "number", "values": 0},
        {"kind": "number", "values": 0, "bounds": [0.0, float("nan")]},
        {"more": 1},
        {"values": 3},  # then there are more features than announced
    ],
)
def test_senseless_facts_are_refused(facts):
    good = outline().described[0]
    bad = [{**good[0], **facts}, good[1]]
    with pytest.raises(DataError):
        Outline.from_json(outline(described=(bad, None)).to_json())
    with pytest.raises(DataError, match="facts cannot be read"):
        Facts.from_json(Facts(columns=5, bounds=None, described=bad).to_json())


def test_an_outline_that_changes_somebodys_columns_is_refused(tmp_path):
    own = write_tables(tmp_path, rows=10)["shop"]
    facts = [column.facts for column in own.described]
    changes = {"parties": ("shop",), "widths": (len(own.columns),), "bounds": (None,), "n_train": 8}
    share(outline(**changes, described=(facts,)), "shop", own, range(10))
    with pytest.raises(DataError, match="not those of the outline"):
        share(outline(**changes, described=(None,)), "shop", own, range(10))


class CardPage:
    """The page's commands in a folder, run word by word: first two organisations, then with a dealer."""

    FILES = ("bank/data.toml", "bank/server.toml", "shop/data.toml", "shop/party.toml")

    def __init__(self, folder: Path, *, dealt: bool) -> None:
        text = PAGE.with_name("network-scorecard.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```(\w+)\n(.*?)```", text.replace(":8750", f":{free_port()}"), re.DOTALL)
        by_kind = {kind: [code for each, code in blocks if each == kind] for kind, _ in blocks}
        certificates, serve, join, audited, admitted, deal, checked = by_kind["sh"]
        *tomls, named, dealer = by_kind["toml"]
        self.folder, self.audited = folder, checked if dealt else audited
        self.commands = {"bank": serve, "shop": join} | ({"dealer": deal} if dealt else {})
        (folder / "tables.py").write_text(*by_kind["python"])
        with contextlib.chdir(folder):
            run_program(folder / "tables.py")
            run_shell(certificates + (admitted if dealt else ""))
        for name, code in zip(self.FILES, tomls, strict=True):
            (folder / name).write_text(code)
        if dealt:
            self._edit("bank/server.toml", re.findall(r"`(run = .*?|folder = .*?)`", text), named)
            self._edit(
                "shop/party.toml", re.findall(r"`((?:run|folder|members|dealer|adversary) = .*?)`", text)
            )
            (folder / "dealer" / "party.toml").write_text(dealer)

    def _edit(self, name: str, lines: list[str], added: str = "") -> None:
        """Changes a file as the text says."""
        content = (self.folder / name).read_text()
        for line in lines:
            content, changes = re.subn(f"^{line.split()[0]} = .*$", line, content, flags=re.MULTILINE)
            assert changes == 1, line
        (self.folder / name).write_text(f"{content}\n{added}")

    def run(self) -> None:
        running = {
            name: Command.line(code, self.folder, self.folder / f"{name}.out")
            for name, code in self.commands.items()
        }
        try:
            for name, process in running.items():
                assert process.wait(timeout=240) == 0, (self.folder / f"{name}.out").read_text()
        finally:
            for process in running.values():
                process.kill()


@pytest.mark.parametrize("dealt", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_on_described_files_works(tmp_path: Path, capfd, dealt: bool) -> None:
    """Its blocks, word by word: separate processes from two CSV files to a joint audit that holds."""
    page = CardPage(tmp_path, dealt=dealt)
    page.run()
    run = tmp_path / "bank" / ("checked" if dealt else "run")
    test = json.loads((run / "result.json").read_text())["test"]
    assert test["se"] > 0 and test["accuracy"] is None
    with contextlib.chdir(tmp_path):
        run_shell(page.audited.replace("--attacks none", "--attacks none --canaries -1"))
    (found,) = tmp_path.glob("joint*/audits/*/report.json")
    report = json.loads(found.read_text())
    assert report["verdict"] == "holds"
    assert {each["verdict"] for each in report["findings"]} == {"holds"}  # every path was tested
    cells = [cell for row in report["owners"].values() for cell in row["observers"].values()]
    assert set(report["owners"]) == {"bank", "shop"} and all(cell["epsilon_upper"] <= 1.0 for cell in cells)
    said = (tmp_path / "shop.out").read_text()
    assert f"members are   {'malicious' if dealt else 'semi-honest'}" in said
