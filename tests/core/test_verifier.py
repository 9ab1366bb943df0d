"""The verifier in `examples/`, which imports nothing of ours, agrees with ours, also on forged ledgers."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from securevfl import Plan, VerticalData, train
from securevfl.errors import LedgerError
from securevfl.federation.folder import RunFolder
from securevfl.privacy.ledger import read_ledger, to_record
from securevfl.privacy.views import read_heads

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "verify_ledger.py"
PLANS: dict[str, dict[str, object]] = {
    "vafl": {"algorithm": "vafl", "sigma": 2.0, "record_views": True},
    "fdml": {"algorithm": "fdml", "protocol": "pairwise", "sigma": 1.0},
    "afsgd": {"algorithm": "afsgd", "protocol": "two-tree", "unprotected": True},
    "flex": {"algorithm": "flex", "sigma": 1.0},
    "sealed": {"algorithm": "sealed", "epsilon": 1.0, "record_views": True},
}


class Full(Exception):
    """Ends a run in its middle."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of each plan, one that was resumed, and one whose model has predicted."""
    folder = tmp_path_factory.mktemp("runs")
    data = VerticalData.load("synthetic:rows=60,features=6", parties=3)
    for name, plan in PLANS.items():
        train(data, Plan(epochs=2, **plan), folder / name)
    append = RunFolder.append_metrics

    def fail(self: RunFolder, line: dict[str, object]) -> None:
        if line["epoch"] == 2:
            raise Full
        append(self, line)

    plan = Plan(epochs=3, algorithm="vafl", sigma=2.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Full):
        patch.setattr(RunFolder, "append_metrics", fail)
        train(data, plan, folder / "resumed")
    run = train(data, plan, folder / "resumed", resume=True)
    run.predict([block[:3] for block in data.test], ids=[1000, 1001, 1002])
    return folder


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_ledger", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs_says(theirs: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the verifier calls a ledger sound."""
    monkeypatch.setattr(sys, "argv", ["verify_ledger.py", str(path)])
    code = theirs.main()
    assert code in (0, 1)
    return bool(code == 0)


def ours_says(path: Path) -> bool:
    try:
        read_ledger(path, heads=read_heads(path.parent.parent))
    except LedgerError:
        return False
    return True


@pytest.mark.parametrize("name", [*PLANS, "resumed"])
def test_both_find_good_ledgers_sound(
    name: str, runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted((runs / name / "ledger").glob("*.jsonl"))
    assert len(paths) >= 3
    for path in paths:
        assert ours_says(path) and theirs_says(theirs, path, monkeypatch)
    if name == "resumed":
        assert sum('"kind":"session"' in line for line in paths[1].read_text().splitlines()) >= 2


def resign(lines: list[str], *, keep_session: bool, form: int = 2, each: bool = True) -> list[str]:
    """The same entries, chained anew and signed with a fresh key, which a new session entry may announce.

    Not on `each` entry, but on every third and the last, where several left together.
    """
    key, previous, made = Ed25519PrivateKey.generate(), "0" * 64, []
    for index, line in enumerate(lines):
        content = json.loads(line)
        del content["hash"], content["signature"]
        content |= {"previous": previous, "index": index}
        if content["kind"] == "session" and not keep_session:
            content |= {"public_key": key.public_key().public_bytes_raw().hex(), "format": form}
        body = json.dumps(content, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256(body.encode()).hexdigest()
        signs = each or index % 3 == 2 or index == len(lines) - 1
        signature = key.sign(bytes.fromhex(previous)).hex() if signs else ""
        made.append(f'{body[:-1]},"hash":"{previous}","signature":"{signature}"}}')
    return made


def _unsigned(lines: list[str]) -> list[str]:
    content = json.loads(lines[-1])
    content |= {"index": len(lines), "previous": content["hash"]}
    del content["hash"], content["signature"]
    return [*lines, json.dumps(content, sort_keys=True, separators=(",", ":"))]


def _at(index: int, change: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    return lambda lines: [change(line) if i == index else line for i, line in enumerate(lines)]


FORGERIES: dict[str, Callable[[list[str]], list[str]]] = {
    "a changed field": _at(2, lambda line: line.replace('"sigma":2.0', '"sigma":20.0')),
    "another owner": _at(1, lambda line: line.replace('"owner":"p1"', '"owner":"p2"')),
    "a dropped line": lambda lines: lines[:1] + lines[2:],
    "a dropped first line": lambda lines: lines[1:],
    "other order": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a line twice": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "a cut end": lambda lines: lines[:-1],
    "an empty file": lambda lines: [],
    "half a line": lambda lines: [*lines[:-1], lines[-1][:-40]],
    "another key": lambda lines: resign(lines, keep_session=True),
    "another key, announced": lambda lines: resign(lines, keep_session=False),
    "no signature": _unsigned,
    "an edited hash": _at(1, lambda line: line.replace('"hash":"', '"hash":"0').replace('0"', '"', 1)),
    "a signature of zeros": _at(1, lambda line: line[:-130] + "0" * 128 + '"}'),
    "a signature in capitals": _at(1, lambda line: line[:-130] + line[-130:].upper()),
    "a field twice": _at(1, lambda line: '{"sigma":9.0,' + line[1:]),
    "spaces": _at(1, lambda line: line.replace(",", ", ")),
    "a number in another form": _at(1, lambda line: line.replace('"sigma":2.0', '"sigma":2.00')),
    "not a number": _at(1, lambda line: line.replace('"sigma":2.0', '"sigma":NaN')),
    "an empty line": lambda lines: [lines[0], "", *lines[1:]],
    "lines of another system": lambda lines: [line + "\r" for line in lines],
    "no object": lambda lines: [lines[0], "[]", *lines[1:]],
    "no key": _at(0, lambda line: line.replace('"public_key"', '"another"')),
}


def _stripped(line: str) -> str:
    """A line without its signature."""
    return f'{line[: line.rindex(":") + 1]}""}}'


GROUPED: dict[str, Callable[[list[str]], list[str]]] = {
    "an end without a signature": lambda lines: [*lines[:-1], _stripped(lines[-1])],
    "no signature at all": lambda lines: [_stripped(line) for line in lines],
    "a session before the last has signed": lambda lines: [*lines[:4], *_chained(lines[3], lines[0])],
    "a changed entry that has no signature": _at(1, lambda line: line.replace('"sigma":2.0', '"sigma":9.0')),
    "entries cut out between signatures": lambda lines: lines[:3] + lines[6:],
    "cut before a signature": lambda lines: lines[:4],
}


def _chained(before: str, session: str) -> list[str]:
    """A session of somebody else's that follows a line."""
    content = json.loads(session) | {"index": 4}
    key, digest = Ed25519PrivateKey.generate(), json.loads(before)["hash"]
    content |= {"previous": digest, "public_key": key.public_key().public_bytes_raw().hex()}
    del content["hash"], content["signature"]
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    signature = key.sign(bytes.fromhex(digest)).hex()
    return [f'{body[:-1]},"hash":"{digest}","signature":"{signature}"}}']


@pytest.mark.parametrize("name", GROUPED)
def test_both_see_what_entries_that_left_together_do_not_cover(
    name: str, runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the observers' heads, which would expose most of it by themselves."""
    path = tmp_path / "ledger" / "p1.jsonl"
    path.parent.mkdir()
    lines = (runs / "vafl" / "ledger" / "p1.jsonl").read_text().splitlines()
    good = resign(lines + lines[1:], keep_session=False, each=False)
    assert len(good) > 7 and sum(line.endswith('"signature":""}') for line in good) > len(good) // 2

    def both(lines: list[str]) -> tuple[bool, bool]:
        path.write_text("".join(line + "\n" for line in lines))
        return ours_says(path), theirs_says(theirs, path, monkeypatch)

    assert both(good) == (True, True)
    assert both(GROUPED[name](good)) == (False, False)


@pytest.mark.parametrize("each", [True, False])
def test_an_older_session_signs_every_entry(
    each: bool, runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ledger" / "p1.jsonl"
    path.parent.mkdir()
    lines = (runs / "vafl" / "ledger" / "p1.jsonl").read_text().splitlines()
    old = resign(lines, keep_session=False, form=1, each=each)
    path.write_text("".join(line + "\n" for line in old))
    assert (ours_says(path), theirs_says(theirs, path, monkeypatch)) == (each, each)


@pytest.mark.parametrize("name", FORGERIES)
def test_both_find_the_forgery(
    name: str, runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "vafl", tmp_path / "run")
    path = run / "ledger" / "p1.jsonl"
    lines = path.read_text().splitlines()
    forged = FORGERIES[name](list(lines))
    assert forged != lines
    path.write_bytes("".join(line + "\n" for line in forged).encode())
    assert not ours_says(path) and not theirs_says(theirs, path, monkeypatch)


def test_both_accept_the_ledger_that_the_page_prints(
    theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (SCRIPT.parents[1] / "docs" / "files.md").read_text()
    (printed,) = re.findall(r'```text\n(\{"format".*?)```', text, re.DOTALL)
    path = tmp_path / "ledger" / "p1.jsonl"
    path.parent.mkdir()
    path.write_text(printed)
    assert ours_says(path) and theirs_says(theirs, path, monkeypatch)
    entries = read_ledger(path)
    assert len(entries) == 2 and to_record("p1", entries[1].content).vectors == 4


def test_the_page_names_every_field_of_an_entry(runs: Path) -> None:
    text = (SCRIPT.parents[1] / "docs" / "files.md").read_text()
    described = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for path in runs.glob("*/ledger/*.jsonl"):
        for line in path.read_text().splitlines():
            assert set(json.loads(line)) <= described


def test_both_accept_an_end_without_a_line_break(
    runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = shutil.copytree(runs / "vafl", tmp_path / "run") / "ledger" / "p1.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert ours_says(path) and theirs_says(theirs, path, monkeypatch)


def test_only_observers_expose_a_ledger_that_was_written_anew(
    runs: Path, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "alone" / "ledger" / "p1.jsonl"
    path.parent.mkdir(parents=True)
    lines = (runs / "vafl" / "ledger" / "p1.jsonl").read_text().splitlines()
    path.write_text("".join(line + "\n" for line in resign(lines, keep_session=False)))
    assert ours_says(path) and theirs_says(theirs, path, monkeypatch)
    for told in ("receipts", "views"):
        shutil.copytree(runs / "vafl" / told, path.parent.parent / told)
        assert not ours_says(path) and not theirs_says(theirs, path, monkeypatch)
        shutil.rmtree(path.parent.parent / told)


def test_the_verifier_stands_alone(runs: Path) -> None:
    tree = ast.parse(SCRIPT.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in imported}
    assert roots <= {*sys.stdlib_module_names, "cryptography"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = run(str(runs / "vafl" / "ledger" / "p1.jsonl"))
    assert good.returncode == 0 and "sound" in good.stdout and good.stderr == ""
    missing = run(str(runs / "nowhere.jsonl"))
    assert (
        missing.returncode == 2 and "cannot be read" in missing.stderr and "Traceback" not in missing.stderr
    )
    assert run().returncode == 2
