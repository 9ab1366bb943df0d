"""What the audit does with input that is wrong, half there or changed: one clear line, nothing written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securevfl import Plan, audit, train
from securevfl.auditing.auditor import check_folder
from securevfl.auditing.dossier import verify_dossier, write_dossier
from securevfl.errors import RunError
from securevfl.settings.source import load_planned

SOURCE = {"data": "synthetic:rows=60,features=6,informative=4", "parties": 2}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input") / "run"
    plan = Plan(
        algorithm="vafl", epochs=1, sigma=3.0, encoder_training="none", record_views=True, source=SOURCE
    )
    train(load_planned(plan), plan, folder)
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / name, size)


def _without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def _with(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def _renamed(run: Path) -> None:
    plan = run / "plan.toml"
    plan.write_text(plan.read_text().replace("sigma =", "deviation ="))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_cut("plan.toml", 0), "plan.toml does not say algorithm"),
        (_cut("plan.toml", 200), "plan.toml"),
        (_renamed, "cannot be audited by this version"),
        (_without("models/p1.safetensors"), "models/p1.safetensors is missing"),
        (_without("views/p1/messages.jsonl"), "views/p1/messages.jsonl is missing"),
        (_cut("views/p0/arrays.bin", 60), "arrays.bin is cut"),
        (_cut("views/p0/messages.jsonl", 60), "messages.jsonl is damaged"),
        (_cut("journal/p1/arrays.bin", 30), "arrays.bin is cut"),
        (_with("receipts/p1.json", "[]"), "receipts/p1.json is damaged"),
        (_with("receipts/p1.json", '{"p0": ["p0", "x", 3]}'), "receipts/p1.json is damaged"),
        (_with("result.json", "{"), "result.json is damaged"),
    ],
)
def test_a_half_copied_or_older_run_is_refused_in_one_line(
    run: Path, harm: Callable[[Path], object], says: str
) -> None:
    harm(run)
    with pytest.raises(RunError) as refused:
        audit(run, "none", canaries=-1)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert not (run / "audits").exists()


def test_a_ledger_that_is_missing_or_cut_is_a_contradiction(run: Path) -> None:
    _cut("ledger/p1.jsonl", 700)(run)
    assert audit(run, "none", canaries=-1).verdict == "violated"
    _without("ledger/p1.jsonl")(run)
    assert audit(run, "none", canaries=-1).verdict == "violated"


def test_a_whole_run_passes(run: Path) -> None:
    check_folder(run)


def test_every_byte_of_a_dossier_counts(run: Path) -> None:
    folder = write_dossier(audit(run, "none", canaries=-1), run)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(RunError):
                verify_dossier(folder)
        path.write_bytes(whole)
    assert verify_dossier(folder)["verdict"] == "holds"
    manifest = json.loads((folder / "dossier.json").read_text())
    (folder / "dossier.json").write_text(json.dumps({**manifest, "verdict": "violated"}))
    with pytest.raises(RunError, match=r"dossier\.json was changed"):
        verify_dossier(folder)


def test_a_full_disk_leaves_no_half_dossier(run: Path) -> None:
    report = audit(run, "none", canaries=-1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(RunError, match="cannot be written"):
            write_dossier(report, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((run / "audits").iterdir()) == []
    assert write_dossier(report, run).name.endswith("-1")


def test_an_interrupted_audit_says_so_and_writes_nothing(run: Path) -> None:
    line = [sys.executable, "-m", "securevfl.cli", "audit", str(run), "--canaries", "100000000"]
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*line, "--attacks", "none"], **options) as process:
        time.sleep(0.5)
        while process.poll() is None and not _works(process.pid):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    # If the signal comes while Python executes text, as it does to make a dataclass, it ends itself by that
    # signal after our line; a shell shows 130 for both.
    assert process.returncode in (130, -signal.SIGINT), said
    assert said == "securevfl: interrupted; no dossier was written\n"
    assert not (run / "audits").exists()


def _works(pid: int) -> bool:
    """Whether a process has computed for a while: it has read its command line."""
    spent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11]
    return int(spent) > 3 * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda said: said["privacy"]["p1"].update(epsilon=0.1), "the result states epsilon 0.1 of p1"),
        (lambda said: said["privacy"].clear(), "the result states epsilon 0 of p1"),
        (lambda said: said.update(labels="not exposed at all"), "who has seen labels"),
    ],
)
def test_a_result_that_states_less_than_the_ledgers_is_found(
    run: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    assert audit(run, "none", canaries=-1).verdict == "holds"
    content = json.loads((run / "result.json").read_text())
    change(content)
    (run / "result.json").write_text(json.dumps(content))
    report = audit(run, "none", canaries=-1)
    assert report.verdict == "violated"
    assert any(says in reason for each in report.content["findings"] for reason in each["reasons"])
