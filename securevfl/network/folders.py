"""What runs over a network leave in folders: the common records, and names of files."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from pathlib import Path

from securevfl.errors import RunError
from securevfl.files import read_json, write_text
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
