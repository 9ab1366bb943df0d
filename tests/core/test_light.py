"""The light library: sums, accountants, the ledger verifier and every --help, with 18 packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from light_environment import ROOT, light_packages, link_packages, link_securevfl

from securevfl.accountants import GaussianRelease, best_upper_bound
from securevfl.cli import COMMANDS
from securevfl.privacy.ledger import Ledger

SAMPLED = {"sigma": 1.3, "sensitivity": 1.0, "count": 250, "sampling_rate": 0.02, "ids_visible": False}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    link_packages(folder)
    link_securevfl(folder)
    return folder


def run(light: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with nothing but its own library and the light folder, from nowhere near the sources."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(light), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys._base_executable, "-S", "-P", *arguments],  # type: ignore[attr-defined]
        capture_output=True, text=True, check=False, env=environment, cwd=light,
    )  # fmt: skip


def python(light: Path, code: str) -> str:
    done = run(light, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_at_most_thirty_packages() -> None:
    packages = light_packages()
    assert len(packages) <= 30 and not {"torch", "scikit-learn", "tenseal", "matplotlib"} & packages


def test_the_environment_is_empty(light: Path) -> None:
    modules = ("torch", "sklearn", "dp_accounting", "prv_accountant", "tenseal", "jinja2", "grpc", "pytest")
    code = f"from importlib.util import find_spec; print([find_spec(name) for name in {modules}])"
    assert python(light, code).strip() == str([None] * len(modules))


def test_every_help(light: Path) -> None:
    code = (
        "import sys\nfrom securevfl.cli import COMMANDS, app\n"
        "for name in ['', *COMMANDS]:\n"
        "    try: app([*name.split(), '--help'])\n"
        "    except SystemExit as stop: assert not stop.code, name\n"
    )
    shown = python(light, code)
    assert shown.count("Usage:") == len(COMMANDS) + 1


@pytest.mark.parametrize(
    "made", ["PlainTreeSum(workers=4)", "TwoTreeSum(workers=4)", "PairwiseMaskSum(workers=4)"]
)
def test_sums(light: Path, made: str) -> None:
    code = f"from securevfl.protocols import *; print(float({made}.sum([1.5, 2, 3, 4])))"
    assert float(python(light, code)) == 10.5


def test_sums_over_tcp(light: Path) -> None:
    """Three processes with nothing else installed; only the receivers print a total."""
    done = run(light, str(ROOT / "examples" / "sums_over_tcp.py"))
    assert done.returncode == 0 and done.stderr == ""
    totals = [f"round {turn} process 0 [111. {3 * turn:3d}.]" for turn in range(3)]  # 1 + 10 + 100, 3 * turn
    assert done.stdout.splitlines() == [
        f"{name} {t}" for name in ("PairwiseMaskSum", "TwoTreeSum") for t in totals
    ]


def test_the_same_figure_as_with_everything_installed(light: Path) -> None:
    code = (
        "from securevfl.accountants import *; import sys\n"
        f"events = GaussianRelease(**{SAMPLED!r})\n"
        "found = best_upper_bound(events, 1e-6)\n"
        "print(repr(found.epsilon), found.accountant, compare(events, 1e-6)['prv'].explanation)"
    )
    epsilon, accountant, remark = python(light, code).split(maxsplit=2)
    here = best_upper_bound(GaussianRelease(**SAMPLED), 1e-6)  # type: ignore[arg-type]
    assert (float(epsilon), accountant) == (here.epsilon, here.accountant)
    assert "prv-accountant is not installed" in remark


def test_account_reads_and_verifies_ledgers(light: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "bank.jsonl"
    path.parent.mkdir()
    Ledger("bank", path).close()
    sound = run(light, "-m", "securevfl.cli", "account", str(tmp_path), "--json")
    assert sound.returncode == 0 and json.loads(sound.stdout) == {"owners": {}}
    assert run(light, str(ROOT / "examples" / "verify_ledger.py"), str(path)).returncode == 0
    path.write_text(path.read_text().replace('"bank"', '"bonk"'))
    forged = run(light, "-m", "securevfl.cli", "account", str(tmp_path), "--json")
    assert forged.returncode == 5 and forged.stderr.count("\n") == 1
    assert run(light, str(ROOT / "examples" / "verify_ledger.py"), str(path)).returncode == 1


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("train --data credit --out r", "torch"),
        ("train --data wine --out r", "scikit-learn"),
        ("audit run", "torch"),
        ("account --clip 1 --sigma 1 --releases 1 --plot p.png", "matplotlib"),
    ],
)
def test_a_command_names_the_package_it_needs(light: Path, line: str, package: str) -> None:
    (light / "run").mkdir(exist_ok=True)
    (light / "run" / "plan.toml").touch()
    done = run(light, "-m", "securevfl.cli", *line.split())
    assert done.returncode == 2 and f"pip install {package}," in done.stderr.splitlines()[-1]
    if "credit" in line:  # what is going to happen is told before torch is looked for
        assert done.stdout.startswith("sealed, model auto: 16,000 + 4,000 rows, ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import securevfl; securevfl.train", "torch"),
        ("from securevfl.protocols import BFVSum; BFVSum(workers=2).sum([1, 2])", "tenseal"),
        ("from securevfl.accountants import *; to_dp_event(ExactRelease(count=1))", "dp-accounting"),
    ],
)
def test_a_call_names_the_package_it_needs(light: Path, code: str, package: str) -> None:
    error = run(light, "-c", code).stderr.splitlines()[-1]
    assert error.startswith("securevfl.errors.MissingExtra") and f"pip install {package}," in error


def test_constraints_agree() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.partition("==")[::2] for line in lines if "==" in line)
    small = (ROOT / "constraints-cpu.txt").read_text()
    assert f"torch=={pinned['torch']}+cpu" in small and "-c constraints.txt" in small
    wanted = re.findall(r'"([a-z-]+>=[0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    light = [line for line in (ROOT / "requirements-light.txt").read_text().splitlines() if ">=" in line]
    assert light and set(light) <= set(wanted)


@pytest.mark.slow
def test_a_real_environment(tmp_path: Path) -> None:
    """`pip install --no-deps` into a new virtual environment; the light packages are linked, not fetched."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    link_packages(site)
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([*pip, *build], check=True)
    wheel = next(tmp_path.glob("securevfl-*.whl"))
    subprocess.run([*pip, "--python", str(home), "install", "--no-deps", str(wheel)], check=True)
    for line in ("--help", "train --help", "trees 5", "account --clip 1 --sigma 40 --releases 10 --json"):
        done = subprocess.run([home / "bin" / "securevfl", *line.split()], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [home / "bin" / "securevfl", "train", "--data", "credit", "--out", tmp_path / "r"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "pip install torch" in done.stderr
