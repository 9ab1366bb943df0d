"""The dossier of an audit: a dated, numbered folder to file, which nobody changes unnoticed.

``report.html`` and ``report.json`` are for those who hold the data. ``public.html`` and ``public.json`` hold
promises, verdicts, trial counts, power and canary bounds alone: attack scores on real records, exact test
figures and what replay found are functions of private data without noise. ``dossier.json`` names the audit:
who, when, which plan, ledgers and software, and the digest of every file. A signature, where there is one,
signs that file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

import securevfl
from securevfl.auditing.page import render_public
from securevfl.auditing.report import Report
from securevfl.auditing.verdicts import Verdict
from securevfl.auditing.words import headline, plain, sentences
from securevfl.errors import InputError, RunError
from securevfl.files import read_json, write_json, write_text

FOLDER, MANIFEST, SIGNATURE = "audits", "dossier.json", "signature.json"
FORMAT = 2
_PUBLIC = ("public.html", "public.json")
_RUN_FACTS = (
    "folder", "agreement", "adversary", "dealer", "algorithm", "protocol", "mode", "data", "parties",
    "label_holder", "clip", "sigma", "delta", "epochs", "labels", "guarantee", "finished",
)  # fmt: skip
_CELL_FACTS = (
    "claimed", "epsilon_upper", "epsilon_lower", "mu_upper", "mu_lower", "delta", "mode", "releases", "exact",
    "exact_kinds", "verdict", "power", "powers", "covers", "assumptions",
)  # fmt: skip

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def read_key(path: Path) -> Key:
    """An auditor's key: an organisation's P-256 key or an Ed25519 key, as an unencrypted PEM file.

    Raises:
        InputError: It is neither.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise InputError(f"key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is no private key in PEM form without a password") from error
    if not isinstance(key, Key):
        raise InputError(f"{path} is a key of another kind; sign with a P-256 or an Ed25519 key")
    return key


def write_dossier(report: Report, run: Path, *, auditor: str = "", key: Key | None = None) -> Path:
    """Writes the dossier of an audit beside the earlier ones of a run.

    Args:
        report: What the audit found.
        run: The run's folder.
        auditor: Who audited, for the record.
        key: Signs the dossier.

    Returns:
        The new folder, ``audits/<date-number>``.

    Raises:
        RunError: It cannot be written.
    """
    now = datetime.now(UTC)
    folder = _new_folder(run, now)
    with ExitStack() as half:  # a dossier is there wholly or not at all
        half.callback(shutil.rmtree, folder, ignore_errors=True)
        _fill(folder, report, run, now, auditor=auditor, key=key)
        half.pop_all()
    return folder


def _fill(folder: Path, report: Report, run: Path, now: datetime, *, auditor: str, key: Key | None) -> None:
    # Whoever knows all records but one could try values of that one until a digest of the report fits.
    report.save(folder, salt=secrets.token_hex(32))
    open_part = public(report.content)
    write_json(folder / "public.json", open_part)
    write_text(folder / "public.html", render_public(open_part))
    manifest = {
        "format": FORMAT,
        "number": folder.name,
        "time": now.isoformat(timespec="seconds"),
        "auditor": auditor,
        "verdict": open_part["verdict"],
        "seed": report.content["seed"],
        "run": run.resolve().name,
        "plan": _digest(run / "plan.toml"),
        "ledgers": {path.stem: _digest(path) for path in sorted((run / "ledger").glob("*.jsonl"))},
        "software": {**report.content["environment"], "package": package_digest()},
        "files": {path.name: _digest(path) for path in sorted(folder.iterdir())},
    }
    write_json(folder / MANIFEST, {**manifest, "itself": _of_content(manifest)})
    if key is not None:
        write_json(folder / SIGNATURE, _sign(key, (folder / MANIFEST).read_bytes()))
    for name in (*_PUBLIC, MANIFEST, SIGNATURE):
        if (folder / name).exists():
            (folder / name).chmod(0o644)


def _of_content(manifest: Mapping[str, Any]) -> str:
    """Shows a slip of the hand; only a signature keeps others from writing it anew."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _new_folder(run: Path, now: datetime) -> Path:
    """A folder that did not exist: the date and the first number that is free."""
    parent = run / FOLDER
    try:
        parent.mkdir(exist_ok=True)
        for number in range(1, 100_000):
            folder = parent / f"{now:%Y-%m-%d}-{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise RunError(f"no dossier can be written in {parent}: {error.strerror}") from error
    raise RunError(f"{parent} holds too many dossiers of one day")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package_digest() -> str:
    """SHA-256 over the names and contents of all files of the installed package that Python reads."""
    found: dict[str, Path] = {}
    for base in securevfl.__path__:
        root = Path(base)
        found |= {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    for room in ("protocols", "accountants", "attacks"):
        root = Path(str(import_module(f"securevfl.{room}").__file__)).parent
        found |= {f"{room}/{path.relative_to(root)}": path for path in root.rglob("*.py")}
    lines = "".join(f"{name} {_digest(path)}\n" for name, path in sorted(found.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


# -- signatures ---------------------------------------------------------------------------------------------


def _sign(key: Key, content: bytes) -> dict[str, str]:
    public_key = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(content).digest()
    if isinstance(key, ec.EllipticCurvePrivateKey):
        kind, signature = "ecdsa-sha256", key.sign(digest, ec.ECDSA(hashes.SHA256()))
    else:
        kind, signature = "ed25519", key.sign(digest)
    return {
        "algorithm": kind,
        "signs": f"sha256 of {MANIFEST}",
        "signature": signature.hex(),
        "public_key": public_key.decode(),
        "fingerprint": _fingerprint(public_key),
    }


def _fingerprint(public_pem: bytes) -> str:
    key = load_pem_public_key(public_pem)
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def verify_dossier(folder: Path) -> dict[str, Any]:
    """Checks that no file of a dossier was changed, added or removed, and its signature if it has one.

    Returns:
        What the dossier says it is, with ``signed_by``: the SHA-256 of the signer's public key, or None.

    Raises:
        RunError: It is no dossier, or was changed; says how.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise RunError(f"{folder} is no dossier: there is no {MANIFEST} in it")
    manifest = dict(read_json(path))
    if manifest.pop("itself", "") != _of_content(manifest) and manifest.get("format") != 1:
        if (folder / SIGNATURE).exists():
            _check_signature(folder)
        raise RunError(f"{path} was changed after the audit")
    files = manifest.get("files")
    if not isinstance(files, Mapping):
        raise RunError(f"{path} is damaged: it does not name the dossier's files")
    there = {each.name for each in folder.iterdir()} - {MANIFEST, SIGNATURE}
    for name in sorted(there ^ files.keys()):
        raise RunError(f"{folder / name} {'was removed' if name in files else 'was added to the dossier'}")
    for name, digest in files.items():
        if _digest(folder / name) != digest:
            raise RunError(f"{folder / name} was changed after the audit")
    return {**manifest, "signed_by": _check_signature(folder)}


def _check_signature(folder: Path) -> str | None:
    path = folder / SIGNATURE
    if not path.exists():
        return None
    try:
        said = read_json(path)
        pem, signature = said["public_key"].encode(), bytes.fromhex(said["signature"])
        key = load_pem_public_key(pem)
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).digest()
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, digest, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, digest)
        else:
            raise RunError(f"{path} is by a key of another kind than P-256 or Ed25519")
        return _fingerprint(pem)
    except InvalidSignature as error:
        raise RunError(
            f"{path} does not sign this dossier: {MANIFEST} was changed, or signed anew"
        ) from error
    except (KeyError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise RunError(f"{path} is damaged: {error!r}") from error


# -- the public part ----------------------------------------------------------------------------------------


def public(content: Mapping[str, Any]) -> dict[str, Any]:
    """What of a report may be shown to anybody: names are listed here, whatever is not listed stays."""
    owners = {
        owner: {"observers": {name: _public_cell(cell) for name, cell in row["observers"].items()}}
        for owner, row in content["owners"].items()
    }
    cells = [Verdict(cell["verdict"]) for row in owners.values() for cell in row["observers"].values()]
    shown: dict[str, Any] = {
        "verdict": min([Verdict(content["verdict"]), *cells], key=lambda verdict: verdict.rank).value,
        "run": {name: content["run"][name] for name in _RUN_FACTS},
        "owners": owners,
        "canaries": content["canaries"],
        "training_again": content["training_again"],
        "seed": content["seed"],
        "budget": content["budget"],
        "environment": content["environment"],
    }
    spoken = {
        **shown,
        "run": {**shown["run"], "prediction": {}, "scoring": {}, "truth": "at hand"},
        "attacks": [],
        "findings": [],
    }
    shown["words"] = [headline(spoken), *sentences(spoken)[: -1 if content["owners"] else None]]
    shown["plain"] = plain(spoken)
    return shown


def _public_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell without what replay and attacks found: which test failed or could not be made is private.

    Where models with hidden layers were recomputed on another machine, the data decide whether that was exact
    enough; then those who hold the data are told, and others that it is not known.
    """
    shown = {name: cell[name] for name in _CELL_FACTS}
    if cell["private"] and cell["verdict"] in (Verdict.HOLDS.value, Verdict.NOT_TESTED.value):
        shown |= {"verdict": Verdict.NOT_TESTED.value, "power": None, "powers": {}}
        return {**shown, "tested": [], "reasons": ["what was tested is told to those who hold the data"]}
    reasons = {
        Verdict.VIOLATED.value: ["evidence of the run contradicts the promise"],
        Verdict.NO_GUARANTEE.value: list(cell["reasons"]),
        Verdict.NOT_TESTED.value: ["not every path was tested on the run"],
        Verdict.HOLDS.value: [],
    }[cell["verdict"]]
    return {**shown, "tested": [], "reasons": reasons}
