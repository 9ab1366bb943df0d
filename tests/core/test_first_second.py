"""The first second: help, typing errors and the Tab key are answered before anything heavy is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from securevfl import Plan, VerticalData
from securevfl.cli import COMMANDS, main
from securevfl.settings.duration import announcement, expected_seconds, in_words
from securevfl.settings.families import ALGORITHM_FAMILIES, FAMILIES
from securevfl.settings.plan import MODELS
from securevfl.settings.protocols import PROTOCOLS

HEAVY = ("torch", "scipy", "sklearn", "networkx", "matplotlib", "cryptography", "grpc", "pydantic")
DRAWN = ("numpy", "rich")  # loaded for figures and tables, which a help page has not
MANY = (  # every line in one process: what none of them loads, no single one does
    "import sys, json\nfrom securevfl.cli import main\ncodes = []\n"
    "for line in json.loads(sys.argv[1]):\n"
    "    sys.argv = ['securevfl', *line.split()]\n"
    "    try: main()\n"
    "    except SystemExit as stop: codes.append(stop.code or 0)\n"
    f"print(json.dumps([codes, [name for name in {HEAVY + DRAWN!r} if name in sys.modules]]))\n"
)
TYPOS = {
    "train --nosuch 1": "train --help lists",
    "train --epsilom 1": "did you mean '--epsilon'",
    "train --epsilon one": "'one' is not a number",
    "train --epochs 2.5": "'2.5' is not a whole number",
    "train --epsilon": "requires an argument",
    "train credit": "unexpected extra argument",
    "trian --data credit": "did you mean 'train'",
    "certificates isue": "did you mean 'issue'",
    "certificates issue": "missing argument",
    "train --data credit --out r --set epoch=1": "did you mean 'epochs'",
    "train --data credit --out r --set epochs=many": "epochs",
    "train --data credits --out r": "did you mean 'credit'",
    "train --data credit --algorithm valf --out r": "did you mean 'vafl'",
    "train --data credit --protocol two-tre --out r": "did you mean 'two-tree'",
    "train --data credit --model lineal --out r": "did you mean 'linear'",
    "train --data credit --algorithm vafl --set head=lineal --out r": "did you mean 'linear'",
    "train --data nosuch.csv --out r": "nosuch.csv",
    "train --data nosuch.toml --out r": "nosuch.toml",
    "train --data credit": "--out",
    "train --data credit --out tests": "tests exists already",
    "train --data credit --algorithm vafl --out r": "--unprotected",
    "profile --data credit --epsilon 1 --out tests": "tests exists already",
    "train --data tests --out r": "tests is a folder",
    "train --resume nosuch": "it is not there",
    "audit nosuch": "it is not there",
    "audit --verify nosuch": "it is no folder",
    "audit --forget nosuch": "it is not there",
    "scorecard nosuch": "it is not there",
    "profile --data nosuch.toml --out r": "nosuch.toml",
    "suggest --data nosuch.toml": "nosuch.toml",
    "suggest --data credit --epsilon -1": "epsilon is -1.0",
    "sweep nosuch.toml --out r": "nosuch.toml",
    "account nosuch": "it is no folder",
    "serve --config nosuch.toml": "nosuch.toml",
    "join --config nosuch.toml": "nosuch.toml",
    "score-server --config nosuch.toml": "nosuch.toml",
    "gather nosuch --out r": "it is no folder",
}


def run_lines(lines: list[str]) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, the heavy modules that were loaded, the lines on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(lines)], capture_output=True, text=True, check=True
    )
    codes, heavy = json.loads(done.stdout.splitlines()[-1])
    return codes, heavy, done.stderr.splitlines()


def interrupted_at(
    folder: Path, module: str, before: str = "", line: str = "train --data credit --out r --json"
) -> subprocess.CompletedProcess[str]:
    """The command, run in a folder and interrupted as soon as it looks for a module."""
    code = (
        f"import os, signal, sys\n{before}\nfrom securevfl.__main__ import main\n"
        "class Now:\n    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Now())\n"
        f"sys.argv = ['securevfl', *{line.split()!r}]\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.parametrize("module", ["securevfl.cli", "typer", "securevfl.errors", "securevfl.cli.train"])
def test_an_interrupt_while_it_is_loaded_is_one_line(tmp_path: Path, module: str) -> None:
    done = interrupted_at(tmp_path, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "securevfl: interrupted\n")


def test_what_is_begun_is_left_in_order(tmp_path: Path) -> None:
    done = interrupted_at(tmp_path, "torch")
    assert (done.returncode, done.stderr) == (130, "securevfl: interrupted\n")
    code = (
        "import os, signal\nfrom securevfl.interrupts import end_at_once, end_in_order\n"
        "end_at_once(); end_in_order()\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('in order')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "in order\n"


def test_who_ignores_interrupts_goes_on(tmp_path: Path) -> None:
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    done = interrupted_at(tmp_path, "typer", before=ignored, line="--help")
    assert done.returncode == 0 and "Usage" in done.stdout


def test_help_loads_nothing_heavy() -> None:
    lines = ["--help", *(f"{name} --help" for name in COMMANDS)]
    assert run_lines(lines) == ([0] * len(lines), [], [])


def test_a_command_is_built_when_it_is_asked_for() -> None:
    code = (
        "import sys\nfrom securevfl.cli import main\nsys.argv = ['securevfl', 'trees', '--help']\n"
        "try: main()\nexcept SystemExit: print([n for n in sys.modules if n.startswith('securevfl.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['securevfl.cli.values', 'securevfl.cli.trees']"


def test_a_typing_error_is_told_before_anything_heavy_is_loaded() -> None:
    codes, heavy, told = run_lines(list(TYPOS))
    assert codes == [2] * len(TYPOS) and not set(heavy) & set(HEAVY)
    for hint, line in zip(TYPOS.values(), told, strict=True):  # one line each, and nothing else
        assert line.startswith("securevfl: ") and hint in line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("securevfl swe", "sweep"),
        ("securevfl certificates ini", "init"),
        ("securevfl train --alg", "--algorithm"),
        ("securevfl train --algorithm vafl-t", "vafl-tsync"),
        ("securevfl train --protocol two", "two-tree"),
        ("securevfl train --model score", "scorecard"),
        ("securevfl train --set staleness", "staleness="),
        ("securevfl train --data breast", "breast-cancer"),
        ("securevfl train --data min", "mine.toml"),
        ("securevfl suggest --data min", "mine.toml"),
        ("securevfl profile --data min", "mine.toml"),
        ("securevfl audit runs/card --data min", "mine.toml"),
        ("securevfl data min", "mine.toml"),
        ("securevfl data dr", "draft"),
        ("securevfl data draft min", "mine.toml"),
        ("securevfl sweep --preset qui", "quick"),
    ],
)
def test_completion(
    shell: str,
    line: str,
    offered: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What the Tab key offers at the end of a line, asked for as the shell's own script does."""
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["securevfl"])
    for name, value in {
        "_SECUREVFL_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main()
    assert offered in capfd.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["securevfl"])
    monkeypatch.setenv("_SECUREVFL_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        main()
    assert f"complete_{shell}" in capfd.readouterr().out


def test_bash_completes_for_real(tmp_path: Path) -> None:
    """The script that bash is given, sourced in bash, fills bash's own array of answers."""
    script = (
        f'PATH={Path(sys.executable).parent}:$PATH; eval "$(_SECUREVFL_COMPLETE=source_bash securevfl)"\n'
        "COMP_WORDS=(securevfl train --algorithm flex); COMP_CWORD=3; _securevfl_completion securevfl\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert sorted(done.stdout.split()) == sorted(n for n in ALGORITHM_FAMILIES if n.startswith("flex"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "epsilon 1 at delta 1e-05"),
        ({"algorithm": "vafl", "sigma": 2.0, "protocol": "pairwise"}, "noise 2 on every value"),
        ({"algorithm": "vafl", "unprotected": True}, "UNPROTECTED: exact values leave"),
        ({"algorithm": "vafl", "unprotected": True}, "100 epochs of batches of 64, which fit 80 rows; "),
        ({"algorithm": "flex", "sigma": 2.0, "epochs": 1}, "; 1 epoch of batches of 64; "),
        ({"algorithm": "central"}, "no organisation sends anything"),
        (
            {"algorithm": "vafl", "encoders": {"p1": {"model": "fm"}}, "sigma": 2.0},
            "vafl, models linear, fm: ",
        ),
    ],
)
def test_train_says_what_it_is_going_to_do(fields: dict[str, Any], words: str) -> None:
    data = VerticalData.load("synthetic:rows=100,features=8", parties=2)
    said = announcement(Plan(**fields), data)
    assert "80 + 20 rows, 8 inputs of p0, p1" in said and words in said
    assert re.search(r"about \d+ s to \d+ s on a free core$", said)


def test_estimates_grow_with_the_work() -> None:
    small = VerticalData.load("synthetic:rows=200,features=8", parties=2)
    large = VerticalData.load("synthetic:rows=2000,features=8", parties=2)
    for family in FAMILIES.values():
        for algorithm in family.algorithms:
            plan = Plan(algorithm=algorithm, sigma=1.0)
            assert expected_seconds(plan, large) >= expected_seconds(plan, small) > 0
    costs = [expected_seconds(Plan(algorithm="vafl", sigma=1.0, protocol=p), small) for p in PROTOCOLS]
    assert min(costs) == costs[0] and len(set(costs)) > 3
    for model in set(MODELS) - {"trees"}:
        assert expected_seconds(Plan(model=model), small) > 0
    assert [in_words(s) for s in (3.4, 200, 9000)] == ["3 s", "3 min", "2.5 h"]
