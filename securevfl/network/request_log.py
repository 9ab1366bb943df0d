"""The request log of a scoring service at the label holder: who has asked for whom, and what the answer was.

A client's request has a key. Before anything is asked of another organisation its round is in the log, with
the keys that it serves, so that a process that is killed takes it up again under the same name and nobody
scores anybody twice. When an answer is in the log, and the round in the ledger, the client gets it; whoever
asks again with the same key gets the same bytes.

Open rounds and answers are two files, because they need different things. A round only has to survive the
process: a line is appended, in microseconds, by whoever asks. Answers are synced to disk before they are
given away, all that wait in one transaction. Nothing depends on a clock. Only the newest answers are kept.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.algorithms.serving import Round
from securevfl.errors import RunError
from securevfl.files import clear_errors, private_opener, write_bytes
from securevfl.privacy.answers import clear_database, open_database
from securevfl.privacy.rows import Rows

KEPT = 1_000_000
"""How many answers are kept."""
LONGEST = 1 << 20
"""Bytes after which the file of rounds is written anew, without those that have ended."""
_TABLE = """CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE, digest BLOB,
    answer BLOB)"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """One client's request.

    Attributes:
        key: The client's.
        digest: SHA-256 of what it asks for.
        ids: Whom.
        numbers: Their record indices.
    """

    key: str
    digest: bytes
    ids: tuple[str, ...]
    numbers: Rows


class RequestLog:
    """The request log of one model.

    Args:
        path: The file of answers; that of open rounds lies beside it, with ``.rounds`` at its end.

    Raises:
        RunError: One of them cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = open_database(path, _TABLE)
        self._reading = open_database(path)
        with clear_database(path):
            self._database.execute("PRAGMA synchronous=FULL")
        self._rounds = _RoundFile(path.with_name(path.name + ".rounds"))
        self._keys = {each.key: each.digest for _, asked in self._rounds.open.values() for each in asked}

    def find(self, key: str) -> tuple[bytes, bytes | None] | None:
        """The digest that a key stands for, and the answer if there is one; None for a new key."""
        if (digest := self._keys.get(key)) is not None:
            return digest, None
        with clear_database(self.path):
            found = self._reading.execute(
                "SELECT digest, answer FROM answers WHERE key = ?", (key,)
            ).fetchone()
        return None if found is None else (bytes(found[0]), bytes(found[1]))

    def open(self, asked: Round, requests: Sequence[Asked]) -> None:
        """Writes down a round before anything is asked; the end of this process does not undo it."""
        self._rounds.begin(asked, requests)
        self._keys |= {each.key: each.digest for each in requests}

    def answer(self, rounds: Iterable[tuple[Sequence[Asked], Mapping[str, bytes]]]) -> None:
        """Writes down the answers of rounds, key by key; when this returns they have reached the disk."""
        rows = [(each.key, each.digest, answers[each.key]) for asked, answers in rounds for each in asked]
        with clear_database(self.path), self._database:
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT OR REPLACE INTO answers (key, digest, answer) VALUES (?, ?, ?)", rows
            )
            newest = self._database.execute("SELECT max(number) FROM answers").fetchone()[0] or 0
            self._database.execute("DELETE FROM answers WHERE number <= ?", (newest - KEPT,))

    def close_round(self, name: str) -> None:
        """Forgets a round that was answered, and is in the ledger; or was refused, and its keys are free."""
        for each in self._rounds.end(name):
            self._keys.pop(each.key, None)

    def unsettled(self) -> list[tuple[Round, list[Asked], bool]]:
        """Rounds of an earlier process, with their requests, and whether they were answered."""
        return [
            (asked, list(requests), all(self._is_answered(each.key) for each in requests))
            for asked, requests in self._rounds.open.values()
        ]

    def _is_answered(self, key: str) -> bool:
        with clear_database(self.path):
            return self._reading.execute("SELECT 1 FROM answers WHERE key = ?", (key,)).fetchone() is not None

    def close(self) -> None:
        """Closes the files."""
        self._reading.close()
        self._database.close()
        self._rounds.close()


class _RoundFile:
    """Rounds that are under way: a line for each that begins, and one for each that ends.

    Every line begins with a line break: what a full disk has left of one spoils no other.

    Args:
        path: The file.

    Raises:
        RunError: It cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open: dict[str, tuple[Round, Sequence[Asked]]] = {}
        with clear_errors(path):
            for line in path.read_bytes().split(b"\n") if path.exists() else ():
                self._take(line)
            self._rewrite()

    def _take(self, line: bytes) -> None:
        """Reads a line; one that a crash has torn was never asked."""
        with suppress(ValueError):
            content = json.loads(line)
            name, rows = content["name"], np.array(content.get("rows", ()), np.int64)
            self.open.pop(name, None)
            if len(rows):
                self.open[name] = Round(name=name, rows=rows), list(_split(rows, content["requests"]))

    def begin(self, asked: Round, requests: Sequence[Asked]) -> None:
        """Adds a round.

        Raises:
            RunError: It cannot be written.
        """
        with clear_errors(self.path):
            self._append(_line(asked, requests))
        self.open[asked.name] = asked, requests

    def end(self, name: str) -> Sequence[Asked]:
        """Takes a round away; one that a full disk keeps is found answered when it is read again."""
        _, requests = self.open.pop(name)
        with suppress(OSError, RunError):
            if self._size > LONGEST:
                self._file.close()
                self._rewrite()
            else:
                self._append(b"\n" + json.dumps({"name": name}).encode())
        return requests

    def _append(self, line: bytes) -> None:
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def _rewrite(self) -> None:
        content = b"".join(_line(*each) for each in self.open.values())
        try:
            write_bytes(self.path, content)
        finally:
            self._file = open(self.path, "ab", buffering=0, opener=private_opener)  # noqa: SIM115 - kept open
            self._size = self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(asked: Round, requests: Sequence[Asked]) -> bytes:
    content = {
        "name": asked.name,
        "rows": asked.rows.tolist(),
        "requests": [(each.key, each.digest.hex(), each.ids) for each in requests],
    }
    return b"\n" + json.dumps(content).encode()


def _split(rows: Rows, requests: Iterable[Any]) -> Iterator[Asked]:
    """The requests of a round, whose people follow each other in its rows."""
    place = 0
    for key, digest, ids in requests:
        numbers, place = rows[place : place + len(ids)], place + len(ids)
        yield Asked(key=key, digest=bytes.fromhex(digest), ids=tuple(ids), numbers=numbers)
