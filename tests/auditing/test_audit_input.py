"""What the audit does with input that is wrong, half there or changed: one clear line, nothing written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from securevfl import Plan, audit, train
from securevfl.auditing import auditor
from securevfl.auditing.auditor import check_folder
from securevfl.auditing.dossier import verify_dossier, write_dossier
from securevfl.cli import main
from securevfl.errors import RunError
from securevfl.privacy import ledger as ledgers
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


def test_a_signing_key_that_returns_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Ed25519PrivateKey.generate()
    monkeypatch.setattr(ledgers.Ed25519PrivateKey, "generate", lambda: key)
    plan = Plan(algorithm="vafl", epochs=1, sigma=3.0, encoder_training="none", source=SOURCE)
    train(load_planned(plan), plan, tmp_path / "run")
    report = audit(tmp_path / "run", "none", canaries=-1)
    assert report.verdict == "violated"
    assert any("signing keys return" in reason for f in report.content["findings"] for reason in f["reasons"])


def test_a_card_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its tables are others than those of this version, which says nothing against the run."""
    plan = Plan(model="profile", epsilon=4.0, source=SOURCE)
    run = train(load_planned(plan), plan, tmp_path / "run")
    check_folder(tmp_path / "run")
    for older in ({"recipe": run.result["recipe"] - 1}, {"recipe": None}, {}):
        rest = {name: value for name, value in run.result.items() if name != "recipe"}
        (tmp_path / "run" / "result.json").write_text(json.dumps(rest | older))
        with pytest.raises(RunError, match="card of another version"):
            check_folder(tmp_path / "run")


def test_evidence_that_others_may_read_is_a_violation(run: Path) -> None:
    """A file counts where the way to it is open too; what everybody may know does not."""
    path = run / "views" / "p0" / "arrays.bin"
    path.chmod(0o644)
    assert audit(run, "none", canaries=-1).verdict == "holds"  # nobody gets to it
    path.parent.chmod(0o755)
    report = audit(run, "none", canaries=-1)
    assert report.verdict == "violated" and "views/p0/arrays.bin" in report.content["words"][0]
    path.chmod(0o600)
    assert audit(run, "none", canaries=-1).verdict == "holds"


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
        (_cut("ledger/p1.jsonl", 700), "ledger/p1.jsonl ends in the middle of an entry"),
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


def test_a_ledger_that_is_missing_or_shortened_is_a_contradiction(run: Path) -> None:
    path = run / "ledger/p1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert audit(run, "none", canaries=-1).verdict == "violated"
    _without("ledger/p1.jsonl")(run)
    assert audit(run, "none", canaries=-1).verdict == "violated"


def test_what_nobody_had_signed_when_a_process_died_accuses_nobody(run: Path) -> None:
    """Entries that leave together are signed together, before anything leaves."""
    path = run / "ledger/p1.jsonl"
    signed, *rest = path.read_text().splitlines(keepends=True)
    unsigned = re.sub(r'"signature":"[0-9a-f]+"', '"signature":""', rest[0])
    path.write_text(signed + unsigned)
    assert unsigned != rest[0] and audit(run, "none", canaries=-1).verdict == "violated"
    (run / "result.json").unlink()
    with pytest.raises(RunError, match="interrupted"):
        audit(run, "none", canaries=-1)


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


def test_an_interrupted_audit_says_so_and_writes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auditor, "reconcile", lambda *_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", ["securevfl", "audit", str(run), "--attacks", "none"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "securevfl: interrupted; no dossier was written\n"
    assert not (run / "audits").exists()


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


def test_a_ledger_above_the_budget_of_the_plan_is_found(run: Path) -> None:
    plan = Plan.from_toml(run / "plan.toml")
    (run / "plan.toml").write_text(plan.with_changes(budget_epsilon=0.01).to_toml())
    report = audit(run, "none", canaries=-1)
    assert report.verdict == "violated"
    reasons = [reason for each in report.content["findings"] for reason in each["reasons"]]
    assert any("adds up to epsilon" in each and "budget is 0.01" in each for each in reasons)
