"""The calculator and the reading of ledgers, through the command line."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from securevfl.accountants import ReleaseRecord
from securevfl.cli.account import account
from securevfl.errors import AccountingError, AmplificationRefused

app = typer.Typer()
app.command()(account)
BASE = ["--clip", "1", "--sigma", "4", "--releases", "50"]


def call(*words):
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def facts(*words):
    return json.loads(call(*words, "--json"))


def test_forward():
    found = facts(*BASE)
    assert found["epsilon"] == pytest.approx(20.675508047, abs=1e-7)
    assert found["mu"] == pytest.approx(3.53553390593, abs=1e-10)
    assert (found["accountant"], found["adjacency"], found["sensitivity"]) == (
        "GDPAccountant",
        "replace-one",
        2.0,
    )
    assert set(found["accountants"]) == {"gdp", "moments", "prv", "pld", "clt"}
    assert not found["accountants"]["clt"]["bound"]


def test_table_for_people():
    text = call(*BASE)
    assert "epsilon 20.6755 at delta 1e-05" in text
    assert "every vector that the party releases" in text
    for word in ("GDPAccountant", "upper bound", "approximation"):
        assert word in text


def test_calibrates_the_noise():
    found = facts("--clip", "1", "--releases", "20", "--epsilon", "8", "--mode", "frozen")
    assert found["sigma"] == pytest.approx(5.3686, abs=1e-3)
    assert 7.999 < found["epsilon"] <= 8


def test_finds_the_number_of_releases():
    found = facts("--clip", "1", "--sigma", "3", "--epsilon", "8")
    assert found["releases"] == 6
    assert found["epsilon"] <= 8


def test_hidden_sample():
    found = facts(
        "--clip", "1", "--sigma", "2", "--releases", "100", "--sampling-rate", "0.01", "--ids-hidden"
    )
    assert found["accountant"] == "PLDAccountant"
    assert found["epsilon"] < 1
    with pytest.raises(AmplificationRefused):
        call("--clip", "1", "--sigma", "2", "--releases", "100", "--sampling-rate", "0.01")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "--clip"),
        (["--clip", "1"], "two of"),
        ([*BASE, "--epsilon", "3"], "two of"),
        ([*BASE, "--mode", "none"], "mode"),
        ([*BASE, "--delta", "2"], "delta"),
        ([*BASE, "--sensitivity", "1"], "exactly one"),
        (["--clip", "-1", "--sigma", "1", "--releases", "1"], "sensitivity"),
        (["--clip", "1", "--epsilon", "0", "--releases", "1"], "epsilon"),
        (["somewhere", *BASE], "not both"),
    ],
)
def test_bad_input_is_one_clear_line(words, hint):
    with pytest.raises(AccountingError, match=hint) as caught:
        call(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [BASE, ["--clip", "1", "--sigma", "9", "--releases", "9"]])
def test_plot(tmp_path, words):
    file = tmp_path / "curve.png"
    call(*words, "--plot", str(file))
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_of_a_sampled_release_and_of_an_unknown_format(tmp_path):
    sampled = ["--clip", "1", "--sigma", "2", "--releases", "50", "--sampling-rate", "0.1", "--ids-hidden"]
    call(*sampled, "--plot", str(tmp_path / "sampled.svg"))
    assert "<svg" in (tmp_path / "sampled.svg").read_text()
    call(*BASE, "--plot", str(tmp_path / "curve.svg"))
    call(*BASE, "--plot", str(tmp_path / "again.svg"))
    assert "matplotlib.org" not in (tmp_path / "curve.svg").read_text()
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "curve.svg").read_bytes()
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(AccountingError, match="cannot be drawn"):
        call(*BASE, "--plot", str(tmp_path / "curve.nonsense"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder whose ledger reader is replaced: the arithmetic is under test, not the file format."""

    def release(owner, observers, mechanism="gaussian", **fields):
        rows = np.arange(100)
        values = {"clip": 1.0, "sigma": 4.0, "rows": rows, "vectors": 100, "mode": "strict", **fields}
        return ReleaseRecord(owner=owner, observers=observers, mechanism=mechanism, **values)

    records = [
        release("p1", ("p0",)),
        release("p1", ("p0", "p2")),
        release("p2", ("p0",), "masked", assumption="no two tree neighbours collude"),
        release("p3", ("p0",), "exact"),
    ]
    monkeypatch.setattr("securevfl.privacy.ledger.read_records", lambda folder: records)
    (tmp_path / "plan.toml").write_text('algorithm = "vafl"\nsigma = 4.0\nbatch = 10\n', encoding="utf-8")
    return tmp_path


def test_run_ledgers(run):
    owners = facts(str(run))["owners"]
    assert owners["p1"]["observers"]["p0"]["mu"] == pytest.approx(0.5 * np.sqrt(200))
    assert owners["p1"]["observers"]["p2"]["releases"] == 100
    assert owners["p1"]["coalition"]["releases"] == 200
    assert owners["p2"]["observers"]["p0"]["epsilon"] == 0
    assert owners["p2"]["observers"]["p0"]["assumptions"] == ["no two tree neighbours collude"]
    assert owners["p3"]["observers"]["p0"]["epsilon"] is None
    assert owners["p3"]["observers"]["p0"]["exact"] == 100


def test_run_shows_the_papers_claim_beside_it(run):
    claimed = facts(str(run))["owners"]["p1"]["claimed"]
    assert claimed["label"] == "claimed, not sound"
    assert claimed["mu"] == pytest.approx(0.1 * 0.5 * np.sqrt(200))
    text = " ".join(call(str(run)).split())
    for words in ("p1", "all observers", "infinite", "claimed, not sound", "Assumed: no two tree neighbours"):
        assert words in text
