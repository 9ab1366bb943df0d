"""The journal of a sweep: one line per finished point, on disk before the next one counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from securevfl.files import append_line, write_text


class Journal:
    """Append-only results. Lines that a crash tore are dropped when it is opened; their points run again.

    Attributes:
        records: Point id -> its newest record.
        repaired: How many unreadable lines were dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        self.repaired = 0
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        good = []
        for line in text.splitlines(keepends=True):
            record = _parsed(line)
            if record is not None:
                good.append(line)
                self.records[record["id"]] = record
            elif line.strip():
                self.repaired += 1
        if "".join(good) != text:
            write_text(self.path, "".join(good))

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record; when this returns, it has reached the disk.

        Raises:
            RunError: The file cannot be written.
        """
        append_line(self.path, json.dumps(record, allow_nan=False))
        self.records[record["id"]] = record


def _parsed(line: str) -> dict[str, Any] | None:
    """A complete record, or None for anything else."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("id"), str) and "status" in record
    return record if whole else None
