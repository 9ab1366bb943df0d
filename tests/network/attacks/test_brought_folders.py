"""Folders that a member brings for a joint audit, and what it has changed in them before."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import Federation
from rich.console import Console

from securevfl import audit
from securevfl.auditing.dossier import write_dossier
from securevfl.auditing.scoring import _signed_quota
from securevfl.cli.audit import _verify, show_report
from securevfl.errors import AgreementError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.network.authority import create_authority
from securevfl.network.gathering import gather
from securevfl.network.member import EVIDENCE_BYTES, LONGEST_KEPT, Member
from securevfl.privacy.ledger import read_agreement
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=1, batch=16, sigma=4.0, seed=3, record_views=True)
PAIR = ("bank", "clinic")
Lie = Callable[[Path], Any]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a finished run of two."""
    folder = tmp_path_factory.mktemp("honest")
    asyncio.run(Federation(folder, PLAN, parties=PAIR).run())
    return folder


def gathered(honest: Path, folder: Path, lie: Lie) -> Path:
    """Both folders together, after the clinic has changed its own; the clinic's comes first."""
    for name in PAIR:
        shutil.copytree(honest / name, folder / name)
    lie(folder / "clinic")
    gather([folder / name for name in reversed(PAIR)], folder / "joint")
    return folder / "joint"


def found(joint: Path) -> list[tuple[str, str]]:
    """Verdicts and reasons of an audit."""
    report = audit(joint, attacks="none", seconds=0, canaries=-1)
    return [(each["verdict"], " ".join(each["reasons"])) for each in report.content["findings"]]


def changed(name: str, change: Callable[[Any], Any]) -> Lie:
    """A lie in a JSON file."""

    def lie(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(change(content)))

    return lie


def replaced(name: str, old: str, new: str) -> Lie:
    def lie(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return lie


def test_honest_folders_contradict_nobody(honest: Path, tmp_path: Path) -> None:
    assert "violated" not in dict(found(gathered(honest, tmp_path, lambda folder: None)))


@pytest.mark.parametrize("where", ["gathered", "own"])
def test_a_plan_that_names_a_file_has_nobody_read_it(honest: Path, tmp_path: Path, where: str) -> None:
    """The audit read the file on the auditor's machine, and its report named the columns in it."""
    secret = tmp_path / "secret.csv"
    secret.write_text("id,iban\n1,DE44\n")
    lie = replaced("plan.toml", '[data]\ndata = ""', f'[data]\ndata = "{secret},{secret}"')
    joint = gathered(honest, tmp_path, lie)
    if where == "own":
        lie(tmp_path / "bank")
    folder = joint if where == "gathered" else tmp_path / "bank"
    report = audit(folder, attacks="none", seconds=0, canaries=-1)
    assert report.content["run"]["truth"].startswith("the plan names no data set")
    assert "iban" not in json.dumps(report.content)
    assert RunFolder(joint).read_plan().source.data == ""


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (replaced("plan.toml", "sigma = 4.0", "sigma = 40.0"), "plan.toml is not the plan that was signed"),
        (changed("outline.json", lambda c: {**c, "n_train": 40, "n_test": 20}), "not the outline"),
        (changed("outline.json", lambda c: {**c, "label_holder": "clinic"}), "not the outline"),
        (changed("alignment.json", lambda c: c[::-1]), "not hold the common records that were signed"),
        (changed("agreement.json", lambda c: {**c, "text": c["text"] + " "}), "not that of the text"),
        (changed("agreement.json", lambda c: {**c, "homes": ["\x1b[2J"]}), "takes no part"),
        (changed("result.json", lambda c: [c]), "is damaged"),
    ],
    ids=["plan", "outline", "label holder", "records", "text", "homes", "result"],
)
def test_what_was_signed_is_not_a_members_to_change(
    honest: Path, tmp_path: Path, lie: Lie, says: str
) -> None:
    """The first folder's files were taken for everybody's: other records hide noise that is missing."""
    with pytest.raises(RunError, match=says) as refused:
        gathered(honest, tmp_path, lie)
    assert "clinic" in str(refused.value)


def test_an_own_folder_is_compared_with_what_was_signed(honest: Path, tmp_path: Path) -> None:
    gathered(honest, tmp_path, lambda folder: None)
    changed("alignment.json", lambda c: c[::-1])(tmp_path / "bank")
    assert any("common records that were signed" in why for _, why in found(tmp_path / "bank"))


def test_names_of_who_is_missing_are_those_that_signed(honest: Path, tmp_path: Path) -> None:
    shutil.copytree(honest / "clinic", tmp_path / "clinic")
    changed("agreement.json", lambda c: {**c, "organisations": ["clinic", "\x1b[2Jghost"]})(
        tmp_path / "clinic"
    )
    assert gather([tmp_path / "clinic"], tmp_path / "joint")["missing"] == ["bank"]
    assert read_agreement(tmp_path / "joint")["organisations"] == PAIR


def test_signatures_that_one_copy_lacks_accuse_nobody(honest: Path, tmp_path: Path) -> None:
    """The audit said that the bank had not signed."""
    lie = changed("agreement.json", lambda c: {**c, "signatures": dict.fromkeys(c["signatures"], "00")})
    assert "violated" not in dict(found(gathered(honest, tmp_path, lie)))


def test_an_authority_of_ones_own_is_named(honest: Path, tmp_path: Path) -> None:
    """Whoever makes all certificates makes all signatures: a reader compares the authority with its own."""
    joint = gathered(honest, tmp_path, lambda folder: None)
    report = audit(joint, attacks="none", seconds=0, canaries=-1)
    said = [word for each in report.content["findings"] for word in each["tested"]]
    assert any("by certificates of CN=test, key " in word for word in said)
    other = create_authority(tmp_path / "ca", name="test")
    pem = (tmp_path / "ca" / "ca.pem").read_text()
    assert other is not None
    changed("agreement.json", lambda c: {**c, "authority": pem})(tmp_path / "clinic")
    with pytest.raises(RunError, match="different authorities"):
        gather([tmp_path / name for name in PAIR], tmp_path / "again")


@pytest.mark.parametrize(
    "line", [b"garbage", b"[]", b'{"by": 1}', b"[" * 100_000, b"\xff\xfe", b'{"by": "bank", "reason": []}']
)
def test_evidence_that_says_nothing_stops_no_audit(honest: Path, tmp_path: Path, line: bytes) -> None:
    """One line ended everybody's audit in a traceback."""
    joint = gathered(honest, tmp_path, lambda folder: (folder / "evidence.jsonl").write_bytes(line + b"\n"))
    reasons = [why for verdict, why in found(joint) if "cannot be read" in why or "asked for" in why]
    assert len(reasons) == 1


@pytest.mark.parametrize(
    "name",
    [
        "agreement.json",
        "outline.json",
        "alignment.json",
        "result.json",
        "receipts/clinic.json",
        "ledger/clinic.jsonl",
        "views/clinic/messages.jsonl",
    ],
)
def test_files_that_nest_without_an_end_end_in_one_line(honest: Path, tmp_path: Path, name: str) -> None:
    """What reads JSON gives up at a depth, by an error of its own."""
    try:
        joint = gathered(honest, tmp_path, lambda folder: (folder / name).write_text("[" * 100_000 + "\n"))
    except RunError as error:
        assert "clinic" in str(error)
        return
    try:
        assert ("violated", "ledger of clinic, entry 0: not a ledger entry") in found(joint)
    except RunError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize(
    ("position", "says"), [(5, "cut; an observer holds entry"), (0, "is not what an observer received")]
)
def test_receipts_are_the_word_of_who_keeps_them(
    honest: Path, tmp_path: Path, position: int, says: str
) -> None:
    """Nobody signs them: an audit that sees a ledger contradict them says whose they are."""

    def lie(content: dict[str, Any]) -> dict[str, Any]:
        owner, place, digest = content["bank"]
        return {**content, "bank": [owner, place + position, digest if position else "0" * 64]}

    (verdict, why), *_ = found(gathered(honest, tmp_path, changed("receipts/clinic.json", lie)))
    assert verdict == "violated" and says in why
    assert "so says what clinic keeps, which nobody has signed: one of the two is not true" in why


def _drawing(folder: Path) -> None:
    """A kind of message of the clinic's own making, in its own view."""
    path = folder / "views" / "clinic" / "messages.jsonl"
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    drawn = {**first, "kind": "\x1b[2J[blink]" + first["kind"]}
    path.write_text("".join(json.dumps(each) + "\n" for each in (drawn, *lines)))


def test_what_a_folder_says_cannot_draw_on_the_screen(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the audit of it, nor a dossier that somebody else has made."""
    joint = gathered(honest, tmp_path, _drawing)
    report = audit(joint, attacks="none", seconds=0, canaries=-1)
    assert "\x1b[2J" in "".join(report.content["words"])  # the report is text; whoever shows it is careful
    show_report(Console(), report, tmp_path / "page")
    dossier = write_dossier(report, joint, auditor="\x1b[2Jnobody")
    _verify(dossier, json=False)
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2J[blink]" in said and "\\x1b[2Jnobody" in said


def test_a_file_that_says_that_it_is_huge_is_not_copied(honest: Path, tmp_path: Path) -> None:
    def lie(folder: Path) -> None:
        with (folder / "views" / "clinic" / "arrays.bin").open("ab") as file:
            file.truncate(1 << 42)

    try:
        with pytest.raises(RunError, match=r"the folders have [0-9,]+ bytes; [0-9,]+ are free"):
            gathered(honest, tmp_path, lie)
    except OSError:
        pytest.skip("this file system holds no such files")
    assert not (tmp_path / "joint").exists()


def test_a_quota_of_another_authority_is_none(honest: Path, tmp_path: Path) -> None:
    """Whoever makes an authority makes everybody's signatures: the run's own authority counts."""
    content = json.loads((honest / "bank" / "agreement.json").read_text())
    path = tmp_path / "quota.json"
    quota = json.loads(content["text"])
    quota["schedule"]["quota"] = {"people": 9, "requests": 9}
    path.write_text(json.dumps({"signed": content, "digest": content["digest"]}))
    with pytest.raises(AgreementError, match="does not hold a quota"):
        _signed_quota(path, honest / "bank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("securevfl.auditing.scoring.signed_timetable", lambda signed: None)
        text = json.dumps(quota)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"signed": {**content, "text": text}, "digest": digest}))
        with pytest.raises(AgreementError, match="is not of this run's model, members and authority"):
            _signed_quota(path, honest / "bank")
        trained = json.dumps({**quota, "trained": content["digest"]})
        digest = hashlib.sha256(trained.encode()).hexdigest()
        path.write_text(json.dumps({"signed": {**content, "text": trained}, "digest": digest}))
        assert _signed_quota(path, honest / "bank")[1].people == 9


# -- what a victim keeps ------------------------------------------------------------------------------------


def test_what_was_refused_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal may have 64 MB; a process that a supervisor starts again kept each of them whole."""
    federation = Federation(tmp_path, PLAN, parties=PAIR)
    clinic: Member = federation.member("clinic")
    clinic.make_folder()
    path, long = tmp_path / "clinic" / "evidence.jsonl", "x" * (10 * LONGEST_KEPT)
    clinic._heard = "propose", {"proposal": long, "digest": "d", "numbers": [1] * 5000}
    clinic._witness(RunError("no"))
    line = json.loads(path.read_text())
    assert line["proposal"].startswith(f"{len(long):,} letters, SHA-256 ") and line["digest"] == "d"
    assert line["numbers"] == "5,000 values" and path.stat().st_size < 2000
    monkeypatch.setattr("securevfl.network.member.EVIDENCE_BYTES", 100)
    clinic._witness(RunError("no"))
    assert len(path.read_text().splitlines()) == 1 and EVIDENCE_BYTES < 1 << 26
    clinic._heard = "begin", {"phase": bytes(16), "part": "epoch", "epoch": 9}
    clinic._witness(RunError("no"))
    assert json.loads(path.read_text().splitlines()[1])["phase"] == "00" * 16
