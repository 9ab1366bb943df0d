"""Logs of a networked process: one JSON object per line, without data, keys or IDs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from securevfl.errors import RunError
from securevfl.files import private_opener

_FIELDS = ("address", "peer", "restarted", "reason", "part", "epoch", "count", "organisation", "run")
MAX_TEXT = 500
MAX_BYTES = 64 << 20
"""Length at which a log gives way to a new one; of the old ones the last is kept."""


class JsonLines(logging.Formatter):
    """Time, level, event and the few fields that may be logged; anything else that a caller adds is left out.

    Args:
        constant: Fields of every line.
    """

    def __init__(self, **constant: str) -> None:
        super().__init__()
        self.constant = constant

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self.constant,
        }
        line |= {name: _plain(getattr(record, name)) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = _plain(f"{type(error).__name__}: {error}")
        return json.dumps(line, allow_nan=False)


def _plain(value: object) -> str | int | None:
    """Numbers and short text as they are; of anything else only the name of its type."""
    if isinstance(value, int | None):
        return value
    return str(value)[:MAX_TEXT] if isinstance(value, str | float) else f"<{type(value).__name__}>"


class LogFile(RotatingFileHandler):
    """A log that its owner alone can read, and that whoever knocks again and again cannot fill a disk with.

    One that can no longer be written, on a full disk, says so once and ends nothing.
    """

    _told = False

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=private_opener)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        """One line in place of a traceback for each event."""
        if not self._told:
            self._told = True
            sys.stderr.write(f"securevfl: the log {self.baseFilename} can no longer be written\n")

    def close(self) -> None:
        """Closes the file; what could not be written is lost."""
        with contextlib.suppress(OSError):
            super().close()


def log_to(path: Path, *, organisation: str, run: str) -> logging.Handler:
    """Sends the network's log to a file that only its owner can read; returns the handler to remove.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = LogFile(path, encoding="utf-8", maxBytes=MAX_BYTES, backupCount=1)
    except OSError as error:
        raise RunError(
            f"the log {path} cannot be written: {error.strerror}; choose another folder"
        ) from error
    handler.setFormatter(JsonLines(organisation=organisation, run=run))
    log = logging.getLogger("securevfl.network")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    return handler
