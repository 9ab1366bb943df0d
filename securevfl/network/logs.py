"""Logs as JSON lines: when, how serious, what happened, to whom. Never keys, never data.

Code logs an event as fixed words and a few named facts (`log.info("joined", extra={"peer": name})`). Only
numbers, truth values and short text get out; whatever else somebody passes, such as an array or bytes, is
replaced by the name of its type.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import IO, Any

MAX_TEXT = 500
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per event, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of an event."""
        facts = {name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD}
        line: dict[str, Any] = {
            **facts,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": _plain(record.getMessage()),
        }
        if record.exc_info:
            line["error"] = _plain(logging.Formatter().formatException(record.exc_info), limit=10 * MAX_TEXT)
        order = ("time", "level", "event")
        return json.dumps({**{name: line[name] for name in order}, **line}, allow_nan=False)


def _plain(value: object, limit: int = MAX_TEXT) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else value[:limit] + "..."
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return f"<{type(value).__name__}>"


def start_logging(stream: IO[str] | None = None, *, level: int = logging.INFO) -> logging.Handler:
    """Sends this package's events as JSON lines to a stream, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("securevfl")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler
