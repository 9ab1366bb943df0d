"""What was agreed on over a network against what the folder says happened: signatures, phases, evidence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature

from securevfl.auditing.matrix import EVERYBODY
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.errors import AgreementError, CertificateError, RunError, readable
from securevfl.federation.agreed import Enforcer, Timetable
from securevfl.files import read_json
from securevfl.network.agreement import Signed, constants_of
from securevfl.network.folders import EVIDENCE_FILE, PROFILE_FILE
from securevfl.network.frames import STAY
from securevfl.network.gathering import check_beside
from securevfl.network.signing import phase_statement, read_phase, verify
from securevfl.privacy.chain import ALIGNMENT, DEVIATION, PHASE, Entry, LedgerReader, with_agreement
from securevfl.privacy.ledger import AGREEMENT_FILE, read_ledger
from securevfl.settings.plan import Plan

PATH = "agreement"


def check_agreement(folder: Path) -> list[Finding]:
    """Findings on what the organisations of a run over a network agreed on; none for any other run."""
    if not (folder / AGREEMENT_FILE).is_file():
        return []
    try:
        signed = Signed.of(read_json(folder / AGREEMENT_FILE))
        table, by = signed_timetable(signed), signed.authority_in_words
        check_beside(folder, signed)
        restarts = [_phases(path, table, signed.digest) for path in _ledgers(folder)]
        profile = _profiled(folder, signed.content)
        for path in _ledgers(folder):
            _aligned(path, signed.content, signed.digest)
    except (AgreementError, CertificateError, RunError) as error:
        return [Finding(promise=EVERYBODY, path=PATH, verdict=Verdict.VIOLATED, reasons=(str(error),))]
    tested = (
        f"{len(signed.signatures)} signatures of agreement {signed.digest[:16]}, by certificates of {by}",
        f"no phase but those agreed on, {max(restarts, default=0)} restarts of {table.restarts}",
        "plan, outline, records and alignment are those agreed on",
        *profile,
    )
    sound = Finding(promise=EVERYBODY, path=PATH, verdict=Verdict.HOLDS, tested=tested)
    return [sound, *_constants(folder, signed.content), *_evidence(folder, signed, table)]


def deviations(folder: Path) -> list[str]:
    """What members have noted of each other in their ledgers, where a sealed session ended by it."""
    return [
        f"{path.stem} has seen that {readable(entry.content['member']) or 'somebody'} does not follow the "
        f"protocol: {readable(entry.content['how'])}"
        for path in _ledgers(folder)
        for entry in LedgerReader(path).entries(DEVIATION)
    ]


def _ledgers(folder: Path) -> list[Path]:
    return sorted((folder / "ledger").glob("*.jsonl"))


def signed_timetable(signed: Signed) -> Timetable:
    """The timetable, once certificates and everybody's signature fit together."""
    try:
        schedule = signed.content["schedule"]
        table = Timetable(**{**schedule, "parts": tuple(schedule["parts"])})
    except (KeyError, TypeError) as error:
        raise AgreementError("agreement.json does not hold what was agreed on and who signed it") from error
    signed.verify()
    return table


def _phases(path: Path, table: Timetable, digest: str) -> int:
    """How often a ledger's run went back; raises `AgreementError` for a phase that was not agreed on."""
    enforcer, begun = Enforcer(table), False
    for agreement, entry in with_agreement(read_ledger(path)):
        if agreement == digest and entry.is_release and not begun:
            raise AgreementError(
                f"entry {entry.index} of {path.stem}'s ledger is a release outside of any phase that began"
            )
        if agreement == digest and entry.content["kind"] == PHASE:
            begun = True
            about = entry.content
            try:
                enforcer.begin(about["part"], about["epoch"], about["back"])
            except AgreementError as error:
                raise AgreementError(f"the ledger of {path.stem} says: {error}") from error
    return enforcer.restarts


def _profiled(folder: Path, agreed: Mapping[str, Any]) -> tuple[str, ...]:
    """What was signed for the profile that a run goes on from, in words; nothing for other runs.

    Raises:
        AgreementError: It lacks, is another one than was agreed on, of others, or was not kept to.
    """
    digest = agreed.get("profile", "")
    before = {d for path in _ledgers(folder) for d, e in with_agreement(read_ledger(path)) if e.is_release}
    if not digest:
        return ()
    path = folder / PROFILE_FILE
    if not path.is_file():
        raise AgreementError(f"the run goes on from the profile {digest}, whose agreement is missing")
    signed = Signed.of(read_json(path))
    table = signed_timetable(signed)
    if signed.digest != digest or signed.members != dict(agreed["members"]):
        raise AgreementError(f"{PROFILE_FILE} is not what these members signed for the profile {digest}")
    if digest not in before:
        raise AgreementError(f"no ledger goes on from the profile {digest}")
    restarts = max((_phases(each, table, digest) for each in _ledgers(folder)), default=0)
    return (f"{len(signed.signatures)} signatures of profile {digest[:16]}, {restarts} restarts in it",)


def _constants(folder: Path, agreed: Mapping[str, Any]) -> Iterator[Finding]:
    """Where members signed for other constants than those that this version computes its bounds from."""
    outline, said = agreed["outline"], agreed.get("constants", {})
    plan = Plan.from_toml(folder / "plan.toml")
    known = constants_of(plan, outline["parties"], outline["label_holder"])
    for name in sorted({*known, *said}):
        if known.get(name) != said.get(name):
            words = (
                f"members signed for {readable(name, 40)} {readable(str(said.get(name)), 80)}, this version "
                f"has {known.get(name)} and judges by that: audit with the version that trained"
            )
            yield Finding(promise=EVERYBODY, path=PATH, verdict=Verdict.NOT_TESTED, reasons=(words,))


def _aligned(path: Path, agreed: Mapping[str, Any], digest: str) -> None:
    """Raises `AgreementError` where a ledger does not say how its owner's records were aligned.

    Before anything was agreed on, the owner wrote down that it takes part, with whom and with how many IDs.
    """
    outline, kind = agreed["outline"], agreed["alignment"]["kind"]
    if path.stem not in outline["parties"]:
        return
    before = itertools.takewhile(lambda each: each[0] != digest, with_agreement(read_ledger(path)))
    said = [e.content for _, e in before if e.content["kind"] == ALIGNMENT and e.content["way"] == kind]
    if not said:
        raise AgreementError(f"the ledger of {path.stem} does not say that its records were aligned ({kind})")
    common, others = outline["n_train"] + outline["n_test"], set(outline["parties"]) - {path.stem}
    if not any(each["ids"] >= common and others <= set(each["observers"]) for each in said):
        raise AgreementError(
            f"the ledger of {path.stem} says that fewer IDs were aligned than the {common} that all have, or "
            "with fewer organisations"
        )


def _evidence(folder: Path, signed: Signed, table: Timetable) -> Iterator[Finding]:
    """What somebody is said to have asked for that was not agreed on, and whether it has signed that.

    Every phase is signed, those that were agreed on, too: the words beside a signature are those of whoever
    kept it, and prove nothing. A line that says nothing proves nothing either, and stops no audit.
    """
    path, unread = folder / EVIDENCE_FILE, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        said = _line_of_evidence(line)
        if said is None:
            unread += 1
            continue
        by = readable(str(said["by"]), 63)
        words = f"{by} asked for what was not agreed on and was refused: {readable(str(said['reason']), 300)}"
        proved = said.get("asked") == "begin" and _out_of_turn(said, folder, signed, table)
        words += f"; signed by {by}" if proved else f"; nothing that {by} has signed says so"
        verdict = Verdict.VIOLATED if proved else Verdict.NOT_TESTED
        yield Finding(promise=EVERYBODY, path=PATH, verdict=verdict, reasons=(words,))
    if unread:
        words = f"{unread} lines of {EVIDENCE_FILE} cannot be read"
        yield Finding(promise=EVERYBODY, path=PATH, verdict=Verdict.NOT_TESTED, reasons=(words,))


def _line_of_evidence(line: str) -> dict[str, Any] | None:
    """What a line says; None where that is nothing."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and {"by", "reason"} <= said.keys() else None


def _out_of_turn(said: Mapping[str, Any], folder: Path, signed: Signed, table: Timetable) -> bool:
    """Whether a phase that somebody has signed was not agreed on, by itself or after those before it.

    Those before it are of the same process, all of them, and signed as well: without one of them, a crash may
    have come between.
    """
    by = str(said.get("by"))
    if said.get("agreement") != signed.digest or not _signed(said, by, signed):
        return False
    series, number = read_phase(bytes.fromhex(said["phase"]))
    before: list[list[Entry]] = [[]]
    for path in _ledgers(folder) if number else ():
        entries = [each for agreed, each in with_agreement(read_ledger(path)) if agreed == said["agreement"]]
        begun = [e for e in entries if e.content["kind"] == PHASE and _signed(e.content, by, signed)]
        found = {n: e for e in begun if (n := _number(e, series)) is not None and n < number}
        if len(found) == number:
            before.append([found[n] for n in range(number)])
    return any(_refused(table, history, said) for history in before)


def _number(entry: Entry, series: bytes) -> int | None:
    """Which phase of a series an entry notes."""
    found, number = read_phase(bytes.fromhex(entry.content["phase"]))
    return number if found == series else None


def _refused(table: Timetable, history: Iterable[Entry], said: Mapping[str, Any]) -> bool:
    try:
        Enforcer(table, history).begin(
            said["part"], said["epoch"], None if said["restore"] == STAY else said["restore"]
        )
    except AgreementError:
        return True
    return False


def _signed(said: Mapping[str, Any], by: str, agreed: Signed) -> bool:
    """Whether the coordinator has signed that a phase begins, by evidence or an entry of a ledger."""
    back, signature = said.get("back"), said.get("signed", said.get("signature"))
    try:
        statement = phase_statement(
            agreed.digest,
            bytes.fromhex(said["phase"]),
            said["part"],
            said["epoch"],
            said.get("restore", STAY if back is None else back),
        )
        verify(agreed.certificates[by], by, statement, bytes.fromhex(signature))
    except (KeyError, ValueError, TypeError, AttributeError, InvalidSignature, CertificateError):
        return False
    return True
