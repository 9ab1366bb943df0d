"""`securevfl align` on local files."""

import json

import pytest
import typer
from typer.testing import CliRunner

from securevfl.cli.align import align
from securevfl.errors import DataError, InputError, ProtocolError


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(align)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def files(tmp_path):
    texts = {
        "bank/data.csv": "\ufeffid,age\nu3,30\nu1,10\nu2,20\n",
        "shop/data.csv": "spent,id\n5,u2\n7,u9\n6,u3\n",
        "clinic.csv": 'id,note\nu3,"a, b"\nu2,"line\nbreak"\nu4,x\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in texts]


def test_each_party_keeps_its_rows_in_common_order(run, files, tmp_path):
    result = run(*files, "--out", tmp_path / "out", "--json")
    facts = json.loads(result.stdout)
    assert facts["common"] == 2
    assert [party["rows"] for party in facts["parties"]] == [3, 3, 3]
    assert "which of its own IDs all have" in facts["revealed"]
    assert (tmp_path / "out/p0-data.csv").read_text() == "id,age\nu2,20\nu3,30\n"
    assert (tmp_path / "out/p1-data.csv").read_text() == "spent,id\n5,u2\n6,u3\n"
    assert (tmp_path / "out/p2-clinic.csv").read_text() == 'id,note\nu2,"line\nbreak"\nu3,"a, b"\n'


def test_text_says_what_was_revealed(run, files, tmp_path):
    output = run(*files[:2], "--out", tmp_path / "out").stdout
    assert "2 of 3 rows" in output
    assert "Revealed: every party learns which of its own IDs all have" in output


def test_normalisation(run, tmp_path):
    for name, text in (("a.csv", "id\n X1\n"), ("b.csv", "id\nx1\n")):
        (tmp_path / name).write_text(text)
    sets = (tmp_path / "a.csv", tmp_path / "b.csv")
    for option, common in (("exact", 0), ("trim-casefold", 1)):
        result = run(*sets, "--out", tmp_path / "o", "--normalise", option, "--json")
        assert json.loads(result.stdout)["common"] == common
    with pytest.raises(InputError, match="unknown"):
        run(*sets, "--normalise", "guess")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 columns 'id'"),
        ("key\n1\n", "its columns are"),
        ("id,id\n1,2\n", "2 columns"),
        ("id,a\n1\n", "row 1 has 1 fields"),
        ("id\nx\nx\n", "remove duplicates"),
        ("id,a\n,2\n", "is empty"),
        ('id\n"x', "no CSV file"),
    ],
)
def test_bad_files(run, files, tmp_path, text, message):
    bad = tmp_path / "bad.csv"
    bad.write_text(text)
    with pytest.raises(DataError, match=message):
        run(files[0], bad, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text(run, files, tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_bytes(b"id\n\xff\xfe\n")
    with pytest.raises(DataError, match="UTF-8"):
        run(files[0], bad)


def test_one_file_or_none_there(run, files, tmp_path):
    with pytest.raises(InputError, match="at least 2"):
        run(files[0])
    with pytest.raises(DataError, match="file not found"):
        run(files[0], tmp_path / "missing.csv")
    with pytest.raises(DataError, match="cannot be made: File exists"):
        run(*files, "--out", files[0])


def test_kinds(run, files, tmp_path):
    for kind, said in (("helper", "the helper"), ("private", "the first also")):
        facts = json.loads(run(*files, "--out", tmp_path / kind, "--kind", kind, "--json").stdout)
        assert facts["common"] == 2 and said in facts["revealed"]
    with pytest.raises(ProtocolError, match="does not have the same records"):
        run(*files, "--out", tmp_path / "none", "--kind", "none")
    with pytest.raises(InputError, match="'psi' is unknown; use one of private, helper, none"):
        run(*files, "--kind", "psi")
