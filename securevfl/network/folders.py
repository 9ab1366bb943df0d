"""What runs over a network leave in folders: the common records, and the folders of all together."""

from __future__ import annotations

import filecmp
import hashlib
import hmac
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from securevfl.data import VerticalData
from securevfl.data.share import OUTLINE_FILE, OwnTable, read_outline, rows_of, share, whole
from securevfl.errors import LedgerError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import written_records
from securevfl.federation.run import label_exposure, spending
from securevfl.federation.site import SERVING
from securevfl.files import read_json, write_json, write_text
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.protocols.wire import pack_strings

ALIGNMENT_FILE = "alignment.json"
PROFILE_FILE = "profile.json"
"""What was signed for the profile that a run goes on from."""
EVIDENCE_FILE = "evidence.jsonl"
"""One line for each time that somebody asked for what was not agreed on."""


def commitment(run: str, ids: Sequence[str]) -> str:
    """Binds a run to its common IDs; only those who know the IDs can compute it."""
    return hmac.new(run.encode(), pack_strings(list(ids)), hashlib.sha256).hexdigest()


def save_alignment(folder: Path, ids: Sequence[str]) -> None:
    """Keeps the common IDs, so that a restarted process need not align again; only the owner can read it.

    Raises:
        RunError: They cannot be written.
    """
    write_text(folder / ALIGNMENT_FILE, json.dumps(list(ids)))


def load_alignment(folder: Path) -> list[str] | None:
    """The common IDs of an earlier process; None if there are none yet."""
    path = folder / ALIGNMENT_FILE
    if not path.exists():
        return None
    try:
        return [str(each) for each in read_json(path)]
    except TypeError as error:
        raise RunError(f"{path} is damaged: {error}") from error


AGREEMENTS = "agreements"
"""In the folder of a scoring service: what was signed for it, by digest."""
OWNED = ("ledger", "views", "journal", "receipts")
"""What is named after the organisation whose it is."""
PARTS = (*OWNED, "models", f"{SERVING}/{AGREEMENTS}")


def gather(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Copies what organisations bring into one folder that `audit` reads like that of a local run.

    Args:
        folders: One folder per organisation, in any order; not all need to be there.
        out: The new folder.

    Returns:
        What was gathered: organisations, and those that are missing.

    Raises:
        RunError: A folder holds no networked run, a link, or what is another organisation's; they are not of
            one agreement; or `out` exists.
    """
    if out.exists():
        raise RunError(f"{out} exists already; choose another folder")
    for folder in folders:
        _check_plain(folder)
    found = [(folder, read_agreement(folder)) for folder in folders]
    digests = {content["digest"] for _, content in found}
    if len(digests) != 1:
        raise RunError(f"the folders are of {len(digests)} different agreements; bring those of one run")
    homes = [name for _, content in found for name in content["homes"]]
    if len(set(homes)) != len(homes):
        raise RunError("two folders are of the same organisation")
    for folder, content in found:
        _check_own(folder, content["homes"])
    out.mkdir(parents=True, mode=0o700)
    for folder, _ in found:
        for part in PARTS:
            if (folder / part).is_dir():
                shutil.copytree(folder / part, out / part, dirs_exist_ok=True, copy_function=_copy_once)
    for name in ("plan.toml", OUTLINE_FILE, ALIGNMENT_FILE, PROFILE_FILE):
        source = next((folder / name for folder, _ in found if (folder / name).is_file()), None)
        if source is not None:  # a helper knows no IDs
            shutil.copy(source, out / name)
    content = {**read_json(found[0][0] / AGREEMENT_FILE), "homes": sorted(homes)}
    write_json(out / AGREEMENT_FILE, content)
    evidence = [folder / EVIDENCE_FILE for folder, _ in found if (folder / EVIDENCE_FILE).is_file()]
    if evidence:
        write_text(out / EVIDENCE_FILE, "".join(path.read_text(encoding="utf-8") for path in evidence))
    _write_result(out, [folder for folder, _ in found])
    missing = sorted(set(content["organisations"]) - set(homes))
    return {"organisations": sorted(homes), "missing": missing, "out": str(out)}


def _check_plain(folder: Path) -> None:
    """Others' folders may hold links to files of whoever gathers them, or what never ends when it is read."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RunError(f"{path} is a link, or no file; bring folders of files alone")


def _check_own(folder: Path, homes: Collection[str]) -> None:
    """Nobody brings a ledger, view or journal in another's name."""
    for part in OWNED:
        for path in (folder / part).glob("*"):
            if path.stem not in homes:
                raise RunError(f"{path} is not of {', '.join(homes)}, whose folder this is")


def _copy_once(source: str, target: str) -> None:
    if Path(target).exists() and not filecmp.cmp(source, target, shallow=False):
        raise RunError(f"{source} is another one than an earlier folder brings")
    shutil.copy2(source, target)


def _write_result(out: Path, folders: Sequence[Path]) -> None:
    """The label holder's result with everybody's spending; none where a result or a sound ledger lacks."""
    results = [RunFolder(folder).read_result() for folder in folders if (folder / "result.json").is_file()]
    if not results:
        return
    files, outline = RunFolder(out), read_outline(out)
    result = max(results, key=lambda each: len(each["test"]))
    try:
        records = written_records(out)
    except LedgerError:  # there is nothing to add up; the audit says what is wrong with it
        return
    result |= {
        "privacy": spending(records, files.read_plan()),
        "labels": label_exposure(records, "" if outline is None else outline.label_holder),
        "messages": sum(each["messages"] for each in results),
        "bytes": sum(each["bytes"] for each in results),
    }
    result.pop("organisation", None)
    files.write_result(result)


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
