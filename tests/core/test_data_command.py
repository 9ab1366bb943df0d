"""The data command, for people and for machines."""

import json

import pytest
import typer
from typer.testing import CliRunner

from securevfl.cli.data import data
from securevfl.data import DATASETS
from securevfl.errors import DataError

app = typer.Typer()
app.command()(data)


def run(*arguments, columns="120"):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": columns})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_listing_shows_every_name_whole(columns):
    lines = run(columns=columns).splitlines()
    if columns != "60":
        for name in DATASETS:
            assert any(line.split()[:1] == [name] for line in lines)
    assert max(len(line) for line in lines) <= int(columns)


def test_the_listing_as_json():
    entries = json.loads(run("--json"))["datasets"]
    assert [entry["name"] for entry in entries] == list(DATASETS)
    a9a = next(entry for entry in entries if entry["name"] == "a9a")
    assert (a9a["rows"], a9a["test_rows"], a9a["needs_folder"]) == (32561, 16281, True)
    assert a9a["files"] == ["a9a", "a9a.t"]


def test_one_set_for_people():
    text = run("breast-cancer", "--parties", "2")
    assert "455 training + 114 test rows, 30 features" in text
    assert "malignant" in text
    assert "15 of 15" in text
    assert "deviation" in run("diabetes")


def test_one_set_as_json():
    facts = json.loads(run("wine", "--parties", "4", "--json"))
    assert facts["loaded"]["rows"] == {"train": 142, "test": 36}
    assert [party["features"] for party in facts["loaded"]["parties"]] == [4, 3, 3, 3]
    assert facts["loaded"]["labels"]["classes"] == ["class_0", "class_1", "class_2"]


def test_a_set_that_needs_a_folder(tmp_path):
    assert "--data-folder with a9a, a9a.t" in run("a9a")
    assert json.loads(run("a9a", "--json"))["loaded"] is None
    (tmp_path / "a9a").write_text("-1 3:1\n+1 1:1\n")
    (tmp_path / "a9a.t").write_text("-1 3:1\n+1 1:1\n")
    assert json.loads(run("a9a", "--data-folder", str(tmp_path), "--json"))["loaded"]["features"] == 123
    with pytest.raises(DataError, match=r"give the folder with a9a, a9a\.t"):
        run("a9a", "--parties", "3")


def test_bad_requests():
    with pytest.raises(DataError, match="did you mean 'wine'"):
        run("wein")
    with pytest.raises(DataError, match="14 parties cannot share 13"):
        run("wine", "--parties", "14")
