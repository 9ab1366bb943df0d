"""The command line: one JSON object or one table, one line per error, an exit code that tells."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm import Command

from securevfl.cli import COMMANDS, main
from securevfl.federation.folder import RunFolder

TINY = "synthetic:rows=200,features=9,informative=6"
EXACT = ("--algorithm", "vafl", "--unprotected")


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["securevfl", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


def test_train_prints_one_json_object(cli, tmp_path: Path) -> None:
    result = cli(
        "train",
        "--data",
        TINY,
        "--parties",
        3,
        "--algorithm",
        "vafl",
        "--epochs",
        2,
        "--sigma",
        1,
        "--out",
        tmp_path / "r",
        "--json",
    )
    assert result.code == 0 and result.err == ""
    content = json.loads(result.out)
    promised = {"algorithm", "model", "test", "alone", "privacy", "time", "messages", "bytes", "labels"}
    assert promised <= set(content) and content["model"] == "linear"
    assert set(content["test"]) >= {"auc", "accuracy", "loss"} and {"linear", "trees"} <= set(
        content["alone"]
    )
    assert set(content["privacy"]["p1"]) >= {"mode", "mu", "epsilon", "delta", "releases"}
    assert content["privacy"]["p1"]["mode"] == "strict"
    assert json.loads((tmp_path / "r" / "result.json").read_text()) == content


def test_train_prints_what_is_promised(cli, tmp_path: Path) -> None:
    result = cli("train", *EXACT, "--data", TINY, "--parties", 3, "--epochs", 1, "--out", tmp_path / "r")
    assert result.code == 0
    assert "no guarantee" in result.out and "labels exposed" in result.out and str(tmp_path) in result.out


def test_plan_file_options_and_set(cli, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        'epochs = 1\nbatch = 8\nmodel = "mlp"\n[simulation.speeds]\np1 = 2.0\n'
    )
    result = cli(
        "train", "--data", TINY, *EXACT, "--parties", 3, "--plan", tmp_path / "plan.toml", "--batch", 16,
        "--set", "hidden=[4, 4]", "--set", "delays=poisson", "--out", tmp_path / "r", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    plan = (tmp_path / "r" / "plan.toml").read_text()
    for line in (
        "batch = 16",
        "epochs = 1",
        "hidden = [4, 4]",
        'delays = "poisson"',
        "p1 = 2.0",
        'model = "mlp"',
    ):
        assert line in plan


def test_protection_of_labels_from_the_line(cli, tmp_path: Path) -> None:
    result = cli(
        "train", "--data", TINY, *EXACT, "--parties", 3, "--epochs", 1, "--label-epsilon", 2,
        "--defence", "discrete", "--defence-level", 4, "--out", tmp_path / "r", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    plan = (tmp_path / "r" / "plan.toml").read_text()
    for line in ("label_epsilon = 2.0", 'defence = "discrete"', "defence_level = 4.0"):
        assert line in plan
    bad = cli("train", "--data", TINY, "--parties", 3, "--defence", "nose", "--out", tmp_path / "s")
    assert bad.code != 0 and "noise" in bad.err


def write_csv(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def banks(tmp_path: Path) -> tuple[Path, Path]:
    ids = list(range(60))
    first = write_csv(tmp_path / "a.csv", "id,x1,x2,label", [f"{i},{i % 7},{i % 3},{i % 2}" for i in ids])
    second = write_csv(tmp_path / "b.csv", "id,z1,z2", [f"{i},{i % 2},{i % 5}" for i in reversed(ids[10:])])
    return first, second


def test_train_on_files_with_partial_overlap(cli, banks: tuple[Path, Path], tmp_path: Path) -> None:
    result = cli(
        "train", *EXACT, "--data", banks[0], "--data", banks[1], "--epochs", 2, "--out", tmp_path / "r"
    )
    assert result.code == 0, result.err
    assert "10" in result.out and "note:" in result.out  # rows lost by the join


def bad(name: str, *arguments: object, says: str, code: int = 2):
    return pytest.param(arguments, says, code, id=name)


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        bad("algorithm", "--algorithm", "vafle", says="unknown algorithm 'vafle'; did you mean 'vafl'"),
        bad("data", "--data", "brest-cancer", says="breast-cancer"),
        bad("no data", says="name the data"),
        bad("folder needed", "--data", "a9a", says="a9a"),
        bad("zero parties", "--parties", 0, "--data", TINY, says="--parties"),
        bad("too many parties", "--parties", 99, "--data", TINY, says="99"),
        bad("sigma", "--sigma", -1, says="sigma is -1.0"),
        bad("clip", "--clip", 0, says="clip is 0.0"),
        bad("delta", "--delta", 2, says="delta is 2.0"),
        bad("field", "--set", "sigm=1", says="did you mean 'sigma'"),
        bad("family", "--algorithm", "vafl", "--set", "protect=label", says="not of vafl"),
        bad("assignment", "--set", "sigma", says="name=value"),
        bad("value", "--set", "epochs=many", says="not a TOML value"),
        bad("plan file", "--plan", "nowhere.toml", says="nowhere.toml"),
        bad("protocol", "--protocol", "tree", says="unknown protocol 'tree'"),
        bad("file", "--data", "nowhere.csv", says="nowhere.csv"),
        bad("cuda", "--data", TINY, "--parties", 2, "--device", "cuda", *EXACT, says="cuda"),
    ],
)
def test_bad_input_is_one_line(cli, tmp_path: Path, arguments: tuple, says: str, code: int) -> None:
    given = list(arguments)
    if "--data" not in given and says != "name the data":
        given += ["--data", TINY]
    result = cli("train", *given, "--out", tmp_path / "r")
    assert result.code == code, result.err
    assert says in result.err and result.err.startswith("securevfl: ") and result.err.count("\n") == 1
    said = [
        line for line in result.out.splitlines() if not line.endswith("on a free core")
    ]  # what was planned
    assert not said and "Traceback" not in result.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("id,x,label\n1,2,0\n2,3,1\n", "id,z,label\n1,1,0\n2,2,1\n", "label"),
        ("id,x\n1,2\n2,3\n", "id,z\n1,1\n2,2\n", "label"),
        ("id,x,label\n1,2,0\n1,3,1\n", "id,z\n1,1\n2,2\n", "data row 2 occurs more than once"),
        ("id,x,label\n1,2,0\n2,3,1\n", "id,z\n8,1\n9,2\n", "common"),
        ("id,x,label\n1,nan,0\n2,3,1\n3,1,0\n", "id,z\n1,1\n2,2\n3,1\n", "x"),
        ("id,x,label\n1,red,0\n2,3,1\n", "id,z\n1,1\n2,2\n", "x"),
        ("", "id,z\n1,1\n", "empty"),
        (
            "id,x,label\n" + "".join(f"{i},{i % 4},{i % 3}\n" for i in range(30)),
            "id,z\n" + "".join(f"{i},{i % 5}\n" for i in range(30)),
            "classes or a quantity",
        ),
    ],
)
def test_bad_files_are_one_line(cli, tmp_path: Path, first: str, second: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(first)
    (tmp_path / "b.csv").write_text(second)
    result = cli(
        "train", *EXACT, "--data", tmp_path / "a.csv", "--data", tmp_path / "b.csv", "--out", tmp_path / "r"
    )
    assert result.code == 2 and says in result.err and result.err.count("\n") == 1, result.err
    assert not (tmp_path / "r").exists()


def test_existing_and_unwritable_folders(cli, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "precious.txt").write_text("keep")
    (tmp_path / "file").write_text("")
    for out, says in ((tmp_path / "r", "exists already"), (tmp_path / "file" / "r", "cannot be made")):
        result = cli("train", *EXACT, "--data", TINY, "--parties", 2, "--epochs", 1, "--out", out)
        assert result.code == 2 and says in result.err and result.err.count("\n") == 1


def test_resume_takes_no_other_options(cli, tmp_path: Path) -> None:
    assert "give no other options" in cli("train", "--resume", tmp_path, "--epochs", 3).err
    assert "holds no run" in cli("train", "--resume", tmp_path).err


def test_budget_that_allows_nothing(cli, tmp_path: Path) -> None:
    result = cli(
        "train",
        "--data",
        TINY,
        "--parties",
        2,
        "--algorithm",
        "vafl",
        "--sigma",
        1,
        "--budget-epsilon",
        0.1,
        "--out",
        tmp_path / "r",
    )
    assert result.code == 4 and "has spent mu" in result.err


def test_ctrl_c_before_there_is_anything_to_resume(cli, tmp_path: Path, monkeypatch) -> None:
    def interrupted(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("securevfl.settings.source.load_planned", interrupted)
    result = cli("train", *EXACT, "--data", TINY, "--out", tmp_path / "r")
    assert result.code == 130 and result.err.split() == ["securevfl:", "interrupted"]
    assert not (tmp_path / "r").exists()


def test_ctrl_c_leaves_a_run_that_resumes(cli, tmp_path: Path) -> None:
    plan = [
        *EXACT,
        "--data",
        TINY,
        "--parties",
        "3",
        "--epochs",
        "200",
        "--batch",
        "8",
        "--set",
        "patience=3",
    ]
    process = Command(["train", *plan, "--out", str(tmp_path / "r")], apart=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "r" / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    if process.returncode == 0:
        pytest.skip("the run finished before the interrupt arrived")
    assert (
        process.returncode == 130 and "go on with: securevfl train --resume" in err and "Traceback" not in err
    )
    done = cli("train", "--resume", tmp_path / "r", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["test"]["auc"] is not None


def test_a_full_disk_leaves_a_run_that_resumes(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, seen = RunFolder.append_metrics, []

    def filling(self: RunFolder, line: dict[str, object]) -> None:
        seen.append(line)
        if len(seen) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, line)

    monkeypatch.setattr(RunFolder, "append_metrics", filling)
    folder = tmp_path / "r"
    result = cli("train", *EXACT, "--data", TINY, "--parties", 3, "--epochs", 3, "--out", folder)
    said = f"{folder}: No space left on device; free some space and go on with: securevfl train --resume"
    assert result.code == 2 and result.err.splitlines()[-1] == f"securevfl: {said} {folder}"
    assert cli("train", "--resume", folder).code == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]


def test_a_full_disk_before_anything_is_released_leaves_nothing(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "r"
    monkeypatch.setattr("os.fsync", full)
    result = cli("train", *EXACT, "--data", TINY, "--parties", 3, "--epochs", 1, "--out", folder)
    assert result.code == 2 and not folder.exists()
    assert result.err.splitlines()[-1].endswith("free some space and run the same command again")


@pytest.mark.parametrize("command", ["suggest", "profile"])
def test_no_command_takes_zero_parties(cli, tmp_path: Path, command: str) -> None:
    given = ("--data", TINY, "--parties", 0, "--epsilon", 1)
    result = cli(command, *given, *(("--out", tmp_path / "r") if command == "profile" else ()))
    assert result.code == 2 and result.err == "securevfl: --parties is 0; at least 1 is needed\n"


def test_every_command_has_help_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from securevfl.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    sys.argv = ['securevfl', *name.split(), '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        print(name, stop.code or 0, file=sys.stderr)\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"{name} 0" for name in COMMANDS]
    assert all(f"Usage: securevfl {name} " in done.stdout for name in COMMANDS)


def test_version_and_usage(cli) -> None:
    from securevfl import __version__

    assert cli("--version").out.strip() == __version__
    assert cli("no-such-command").code == 2
