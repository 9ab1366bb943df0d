"""Configurations: what is wrong with one is said in one line, before anything connects."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from securevfl.cli import app
from securevfl.errors import InputError
from securevfl.network.certificates import create_authority, issue
from securevfl.network.config import Acceptance, read_party_config, read_server_config
from securevfl.plan import Plan

SERVER = """
run = "credit"
folder = "run"
certificates = "bank"
listen = "127.0.0.1:0"
parties = ["clinic"]
[data]
file = "bank.csv"
label_column = "y"
[plan]
algorithm = "vafl"
epochs = 3
"""
PARTY = """
run = "credit"
folder = "run"
certificates = "clinic"
coordinator = "bank"
address = "127.0.0.1:8750"
[data]
file = "clinic.csv"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("consortium")
    issue(create_authority(folder / "ca", name="test"), ["bank", "clinic"], out=folder)
    (folder / "bank.csv").write_text("id,a,y\n1,2,0\n2,3,1\n")
    (folder / "clinic.csv").write_text("id,b\n1,2\n2,3\n")
    return folder


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_both_files_are_read(folder):
    server = read_server_config(written(folder, SERVER))
    assert (server.identity.name, server.parties, server.plan.epochs) == ("bank", ("clinic",), 3)
    assert server.data.read(folder).columns == ("a",)
    party = read_party_config(written(folder, PARTY))
    assert (party.coordinator, party.accept, party.network.patience) == ("bank", None, 600.0)


def test_algorithms_bring_their_defaults(folder):
    text = SERVER.replace('"vafl"', '"sealed"')
    server = read_server_config(written(folder, text))
    assert server.others == ("clinic", "dealer")
    assert server.plan.mode == "sealed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('listen = "127.0.0.1:0"', ""), "listen is missing"),
        (('run = "credit"', ""), "run is missing"),
        (('folder = "run"', "folder = 3"), "folder is 3; expected a str"),
        (('parties = ["clinic"]', "parties = []"), "parties must name"),
        (('parties = ["clinic"]', 'parties = ["bank"]'), "parties must name"),
        (('parties = ["clinic"]', 'parties = ["Clinic!"]'), "cannot be an organisation's name"),
        (('label_column = "y"', ""), "label_column"),
        (('label_column = "y"', 'labelcolumn = "y"'), "did you mean 'label_column'"),
        (("epochs = 3", "epoch = 3"), "did you mean 'epochs'"),
        (("epochs = 3", "epochs = 0"), "epochs"),
        (('"vafl"', '"vaffle"'), "vaffle"),
        (('certificates = "bank"', 'certificates = "nowhere"'), "must hold one organisation's key"),
        (("[data]", "[network]\npatience = true\n[data]"), "patience is True; expected float"),
        (("[data]", 'align = "maybe"\n[data]'), "align is 'maybe'"),
        (("[data]", "[data"), "is no TOML"),
    ],
)
def test_bad_server_files(folder, change, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        read_server_config(written(folder, SERVER.replace(*change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('coordinator = "bank"', ""), "coordinator is missing"),
        (('address = "127.0.0.1:8750"', 'adress = "x:1"'), "address is missing"),
        (('file = "clinic.csv"', 'file = "clinic.csv"\nlabel_column = "b"'), "only the coordinator"),
        (("[data]", "[accept]\nepsilom = 1.0\n[data]"), "did you mean 'epsilon'"),
    ],
)
def test_bad_party_files(folder, change, message):
    with pytest.raises(InputError, match=message):
        read_party_config(written(folder, PARTY.replace(*change)))


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("serve", SERVER.replace("bank.csv", "none.csv"), "none.csv"),
        ("serve", SERVER.replace('"y"', '"z"'), "no column 'z'"),
        ("join", PARTY.replace("127.0.0.1:8750", "nowhere"), "write host:port"),
    ],
)
def test_commands_say_it_in_one_line(folder, command, text, message):
    result = CliRunner().invoke(app, [command, "--config", str(written(folder, text))])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_acceptance_objects():
    plan = Plan(algorithm="vafl", sigma=2.0, budget_epsilon=4.0, delta=1e-5)
    assert Acceptance().objection(plan, "d") == ""
    assert Acceptance(epsilon=4.0, algorithms=["vafl"]).objection(plan, "d") == ""
    assert "at most epsilon 3" in Acceptance(epsilon=3.0).objection(plan, "d")
    assert "at most epsilon 4" in Acceptance(epsilon=4.0, delta=1e-6).objection(plan, "d")
    assert "no budget" in Acceptance(epsilon=4.0).objection(Plan(), "d")
    assert "algorithm 'vafl'" in Acceptance(algorithms=["sealed"]).objection(plan, "d")
    assert "protocol 'plain'" in Acceptance(protocols=["bfv"]).objection(plan, "d")
    assert "not e" in Acceptance(digest="e").objection(plan, "d")
