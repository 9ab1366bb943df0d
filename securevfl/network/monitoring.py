"""What a networked process tells whoever runs it: a log, and pages for health checks and metrics.

The log is one JSON object per line, without data, keys or IDs. The status server is a few lines of HTTP,
meant for loopback: it answers `GET /health` with JSON and `GET /metrics` in the Prometheus text format, from
a snapshot of plain numbers and words. It knows nothing else: no data, no keys, no way to change anything.
There is no authentication either, so whoever reaches the port can read both pages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from securevfl.errors import RunError
from securevfl.files import private_opener
from securevfl.network.http import JSON, TIMEOUT, HttpServer, Request, Response

Readings = Callable[[], Mapping[str, float | int | str]]

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("securevfl.network")


class StatusServer(HttpServer):
    """Serves the two pages until it is closed: one request, one answer, then the connection ends.

    Args:
        address: ``HOST:PORT``, or ``PORT`` on loopback; port 0 takes a free one.
        snapshot: Called for every request; must be quick.
        timeout: Seconds for a whole exchange; whoever is slower is cut off.

    Raises:
        InputError: The address cannot be used.
    """

    def __init__(self, address: str, snapshot: Readings, *, timeout: float = TIMEOUT) -> None:
        super().__init__(address, what="the status page", timeout=timeout)
        self._snapshot = snapshot

    async def answer(self, request: Request) -> Response:
        """One of the pages."""
        page = PAGES.get(request.path)
        if page is None:
            return Response(HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"})
        kind, render = page
        try:
            body = render(self._snapshot())
        except Exception:
            log.exception("no snapshot for the status page")
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return Response(HTTPStatus.OK, body.encode(), kind)


# -- the pages ----------------------------------------------------------------------------------------------


def health_page(values: Mapping[str, float | int | str]) -> str:
    """The snapshot as one JSON object; infinite and unknown numbers are null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps({"status": "ok", **finite}, allow_nan=False) + "\n"


def metrics_page(values: Mapping[str, float | int | str]) -> str:
    """Each number as a gauge ``securevfl_NAME``; words are labels of ``securevfl_info``."""
    labels, lines = [], []
    for name, value in values.items():
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if isinstance(value, str):
            labels.append(f'{plain}="{_escape(value)}"')
        else:
            lines += [f"# TYPE securevfl_{plain} gauge", f"securevfl_{plain} {_number(value)}"]
    info = ["# TYPE securevfl_info gauge", f"securevfl_info{{{','.join(labels)}}} 1"]
    return "\n".join([*info, *lines]) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))


PAGES: dict[str, tuple[str, Callable[[Mapping[str, float | int | str]], str]]] = {
    "/health": (JSON, health_page),
    "/metrics": (PROMETHEUS, metrics_page),
}


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
    """A log that its owner alone can read, and that whoever connects again and again cannot fill a disk with.

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
