"""The folders of all organisations of a networked run, brought together for an audit of the whole.

Each folder comes from somebody who may lie. What all have signed decides which plan, outline and common
records the run had; files that say otherwise are refused, and whose folder they are in is said. What only its
owner can say (ledger, view, journal, models) stays its owner's word.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from securevfl.data import VerticalData
from securevfl.data.share import OUTLINE_FILE, OwnTable, read_outline, rows_of, share, whole
from securevfl.errors import (
    AgreementError,
    CertificateError,
    LedgerError,
    PlanError,
    RunError,
    SecureVFLError,
)
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import written_records
from securevfl.federation.run import label_exposure, spending
from securevfl.federation.site import SERVING
from securevfl.files import read_json, write_bytes, write_json, write_text
from securevfl.network.agreement import Signed
from securevfl.network.folders import (
    AGREEMENTS,
    ALIGNMENT_FILE,
    EVIDENCE_FILE,
    PROFILE_FILE,
    commitment,
    load_alignment,
)
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.settings.families import LocalSettings
from securevfl.settings.plan import Plan

OWNED = ("ledger", "views", "journal", "receipts")
"""What is named after the organisation whose it is."""
PARTS = (*OWNED, "models", f"{SERVING}/{AGREEMENTS}")


@dataclass(frozen=True, kw_only=True)
class _Brought:
    """One organisation's folder, as far as it was looked through."""

    folder: Path
    homes: tuple[str, ...]
    signed: Signed


def gather(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Copies what organisations bring into one folder that `audit` reads like that of a local run.

    Args:
        folders: One folder per organisation, in any order; not all need to be there.
        out: The new folder.

    Returns:
        What was gathered: organisations, and those that are missing.

    Raises:
        RunError: A folder holds no networked run, a link, what is another organisation's, or another plan,
            outline or common records than were signed; they are not of one agreement; or `out` exists.
    """
    if out.exists():
        raise RunError(f"{out} exists already; choose another folder")
    for folder in folders:
        _check_plain(folder)
    digests = {read_agreement(folder)["digest"] for folder in folders}
    if len(digests) != 1:
        raise RunError(f"the folders are of {len(digests)} different agreements; bring those of one run")
    found = [_look_through(folder) for folder in folders]
    if len({each.signed.authority for each in found}) != 1:
        raise RunError("the folders name different authorities; bring those of one run")
    homes = [name for each in found for name in each.homes]
    if len(set(homes)) != len(homes):
        raise RunError("two folders are of the same organisation")
    _check_room(found, out)
    out.mkdir(parents=True, mode=0o700)
    _copy_parts(found, out)
    _write_agreed(found, out)
    evidence = [each.folder / EVIDENCE_FILE for each in found if (each.folder / EVIDENCE_FILE).is_file()]
    if evidence:
        write_bytes(out / EVIDENCE_FILE, b"".join(path.read_bytes() for path in evidence))
    _write_result(out, found)
    missing = sorted(set(found[0].signed.members) - set(homes))
    return {"organisations": sorted(homes), "missing": missing, "out": str(out)}


def _look_through(folder: Path) -> _Brought:
    """Refuses a folder that does not fit what everybody has signed, or holds what is another's."""
    try:
        signed = Signed.of(read_json(folder / AGREEMENT_FILE))
        check_beside(folder, signed)
    except AgreementError as error:
        raise RunError(f"{folder}: {error}") from error
    homes = read_agreement(folder)["homes"]
    if strangers := sorted(set(homes) - set(signed.members)):
        raise RunError(f"{folder} belongs to {', '.join(strangers)}, who takes no part in the run")
    _check_own(folder, homes, signed.members)
    return _Brought(folder=folder, homes=homes, signed=signed)


def check_beside(folder: Path, signed: Signed) -> None:
    """Compares plan, outline and common records in a folder with what was signed.

    Raises:
        AgreementError: One of them is another, or cannot be read.
    """
    agreed, path = signed.content, folder / "plan.toml"
    if path.is_file() and _agreed_plan(path) != agreed["plan"]:
        raise AgreementError("plan.toml is not the plan that was signed")
    try:
        outline, ids = read_outline(folder), load_alignment(folder)
    except SecureVFLError as error:
        raise AgreementError(str(error)) from error
    if outline is not None and _one_form(asdict(outline)) != _one_form(agreed["outline"]):
        raise AgreementError(f"{OUTLINE_FILE} is not the outline that was signed")
    if ids is not None and commitment(agreed["run"], ids) != agreed["alignment"]["ids"]:
        raise AgreementError(f"{ALIGNMENT_FILE} does not hold the common records that were signed")


def _agreed_plan(path: Path) -> str:
    try:
        return Plan.from_toml(path).to_agreement()
    except PlanError as error:
        raise AgreementError(str(error)) from error


def _one_form(content: Any) -> str:
    """Text that is the same for what means the same; unknown bounds are not numbers, and equal nothing."""
    return json.dumps(content, sort_keys=True)


def _check_plain(folder: Path) -> None:
    """Others' folders may hold links to files of whoever gathers them, or what never ends when it is read."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RunError(f"{path} is a link, or no file; bring folders of files alone")


def _check_room(found: Sequence[_Brought], out: Path) -> None:
    """A file that says that it is huge, and holds nothing, would be as huge as it says once it is copied."""
    place = next(each for each in (out.resolve().parent, *out.resolve().parents) if each.exists())
    needed = sum(
        path.stat().st_size
        for each in found
        for part in PARTS
        for path in (each.folder / part).rglob("*")
        if path.is_file()
    )
    if needed > (free := shutil.disk_usage(place).free):
        raise RunError(f"the folders have {needed:,} bytes; {free:,} are free for {out}")


def _check_own(folder: Path, homes: Collection[str], members: Collection[str]) -> None:
    """Nobody brings a ledger, view, journal or model in another's name."""
    for part in (*OWNED, "models"):
        for path in (folder / part).glob("*"):
            if path.stem not in homes and (part in OWNED or path.stem in members):
                raise RunError(f"{path} is not of {', '.join(homes)}, whose folder this is")


def _copy_parts(found: Sequence[_Brought], out: Path) -> None:
    for each in found:
        for part in PARTS:
            if (each.folder / part).is_dir():
                shutil.copytree(each.folder / part, out / part, dirs_exist_ok=True, copy_function=_copy_once)


def _copy_once(source: str, target: str) -> None:
    if Path(target).exists() and not filecmp.cmp(source, target, shallow=False):
        raise RunError(f"{source} is another one than an earlier folder brings")
    shutil.copy2(source, target)


def _write_agreed(found: Sequence[_Brought], out: Path) -> None:
    """What all have signed: of several copies one whose signatures fit, where there is one."""
    best = next((each for each in found if _is_verified(each.signed)), found[0])
    homes = sorted(name for each in found for name in each.homes)
    content = {**read_json(best.folder / AGREEMENT_FILE), "homes": homes}
    write_json(out / AGREEMENT_FILE, {**content, "organisations": list(best.signed.members)})
    for name in ("plan.toml", OUTLINE_FILE, ALIGNMENT_FILE, PROFILE_FILE):
        source = next((each.folder / name for each in found if (each.folder / name).is_file()), None)
        if source is not None and name == "plan.toml":  # a file may name others, which an audit would read
            kept = Plan.from_toml(source)
            local = LocalSettings(record_views=kept.record_views, record_words=kept.record_words)
            write_text(out / name, Plan.from_agreement(best.signed.content["plan"], local).to_toml())
        elif source is not None:  # a helper knows no IDs
            shutil.copy(source, out / name)


def _is_verified(signed: Signed) -> bool:
    try:
        signed.verify()
    except (AgreementError, CertificateError):
        return False
    return True


def _write_result(out: Path, found: Sequence[_Brought]) -> None:
    """The label holder's result with everybody's spending; none where a result or a sound ledger lacks."""
    holder = found[0].signed.content["outline"]["label_holder"]
    first = sorted(found, key=lambda each: holder not in each.homes)
    results = [_result_of(each.folder) for each in first if (each.folder / "result.json").is_file()]
    if not results:
        return
    files, result = RunFolder(out), results[0]
    try:
        records = written_records(out)
    except LedgerError:  # there is nothing to add up; the audit says what is wrong with it
        return
    result |= {
        "privacy": spending(records, files.read_plan()),
        "labels": label_exposure(records, holder),
        "messages": sum(each["messages"] for each in results),
        "bytes": sum(each["bytes"] for each in results),
    }
    result.pop("organisation", None)
    files.write_result(result)


def _result_of(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "result.json")
    counts = [found.get(name) for name in ("messages", "bytes")] if isinstance(found, dict) else [None]
    if not all(type(each) is int for each in counts) or not isinstance(found.get("test"), dict):
        raise RunError(f"{folder / 'result.json'} is damaged: it is not the result of a run")
    return dict(found)


def load_truth(folder: Path, tables: Mapping[str, OwnTable]) -> VerticalData:
    """The data behind a gathered run, from the organisations' own tables; behind one's own folder, its share.

    Raises:
        RunError: The folder is not that of a networked run.
        DataError: A table is missing or does not fit.
    """
    outline, ids = read_outline(folder), load_alignment(folder)
    if outline is None or ids is None:
        raise RunError(f"{folder} does not say which records a networked run had in common")
    homes = read_agreement(folder)["homes"]
    if len(homes) == 1 and set(tables) == set(homes):
        own = tables[homes[0]]
        return share(outline, homes[0], own, rows_of(own, ids))
    return whole(outline, tables, ids)
