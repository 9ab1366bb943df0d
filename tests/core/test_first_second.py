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
from securevfl.__main__ import main as start
from securevfl.cli import main
from securevfl.settings.duration import announcement, expected_seconds, in_words
from securevfl.settings.families import ALGORITHM_FAMILIES, FAMILIES
from securevfl.settings.plan import MODELS
from securevfl.settings.protocols import PROTOCOLS

HEAVY = ("torch", "scipy", "sklearn", "networkx", "matplotlib", "cryptography", "grpc")
MANY = (  # every line in one process: what none of them loads, no single one does
    "import sys, json\nfrom securevfl.cli import main\ncodes = []\n"
    "for line in json.loads(sys.argv[1]):\n"
    "    sys.argv = ['securevfl', *line.split()]\n"
    "    try: main()\n"
    "    except SystemExit as stop: codes.append(stop.code)\n"
    f"print(json.dumps([codes, [name for name in {HEAVY!r} if name in sys.modules]]))\n"
)
TYPOS = {
    "train --nosuch 1": "--nosuch",
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


def test_an_interrupt_before_anything_is_loaded_is_one_line(monkeypatch, capsys) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "securevfl.cli", Interrupted())
    with pytest.raises(SystemExit) as stop:
        start()
    assert stop.value.code == 130 and capsys.readouterr().err == "securevfl: interrupted\n"


def test_help_loads_nothing_heavy() -> None:
    lines = ["--help", "train --help", "data --help", "serve --help", "audit --help"]
    assert run_lines(lines) == ([0] * len(lines), [], [])


def test_a_typing_error_is_told_before_anything_heavy_is_loaded() -> None:
    codes, heavy, told = run_lines(list(TYPOS))
    assert (codes, heavy) == ([2] * len(TYPOS), [])
    errors = [line for line in told if line.startswith(("securevfl:", "Error:"))]
    assert len(errors) == len(TYPOS)
    for hint, line in zip(TYPOS.values(), errors, strict=True):
        assert hint in line


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
