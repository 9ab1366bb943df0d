"""The request log of a scoring service at the label holder: who has asked for whom, and what the answer was.

A client's request has a key. Before anything is asked of another organisation its round is in the log, with
the keys that it serves, so that a process that is killed takes it up again under the same name and nobody
scores anybody twice. When an answer is in the log, and the round in the ledger, the client gets it; whoever
asks again with the same key gets the same bytes.

Nothing in it depends on a clock. It survives the end of the process at any moment; answers are synced to disk
before they are given away. Only the newest are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from securevfl.algorithms.serving import Round
from securevfl.privacy.answers import clear_database, open_database
from securevfl.privacy.rows import Rows

KEPT = 1_000_000
"""How many answers are kept."""
_TABLES = (
    """CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, key TEXT UNIQUE, digest BLOB,
    round TEXT, ids TEXT, numbers BLOB, answer BLOB)""",
    "CREATE INDEX IF NOT EXISTS by_round ON requests (round)",
    """CREATE TABLE IF NOT EXISTS rounds (number INTEGER PRIMARY KEY, name TEXT UNIQUE, rows BLOB,
    answered INTEGER)""",
)


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
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = open_database(path, *_TABLES)
        self._reading = open_database(path)

    def find(self, key: str) -> tuple[bytes, bytes | None] | None:
        """The digest that a key stands for, and the answer if there is one; None for a new key."""
        with clear_database(self.path):
            found = self._reading.execute(
                "SELECT digest, answer FROM requests WHERE key = ?", (key,)
            ).fetchone()
        return None if found is None else (bytes(found[0]), found[1])

    def open(self, asked: Round, requests: Sequence[Asked], settled: Iterable[str] = ()) -> None:
        """Writes down a round before anything is asked, and forgets those whose end is in the ledger."""
        with clear_database(self.path), self._database:
            self._database.execute("BEGIN")
            self._database.executemany("DELETE FROM rounds WHERE name = ?", [(name,) for name in settled])
            number = self._database.execute(
                "INSERT INTO rounds (name, rows, answered) VALUES (?, ?, 0)",
                (asked.name, asked.rows.astype("<i8").tobytes()),
            ).lastrowid
            self._database.executemany(
                "INSERT INTO requests (key, digest, round, ids, numbers) VALUES (?, ?, ?, ?, ?)",
                [
                    (each.key, each.digest, asked.name, json.dumps(each.ids), each.numbers.tobytes())
                    for each in requests
                ],
            )
            if number is not None and number % 1024 == 0:
                self._database.execute(
                    "DELETE FROM requests WHERE answer IS NOT NULL AND "
                    "number <= (SELECT max(number) FROM requests) - ?",
                    (KEPT,),
                )

    def answer(self, name: str, answers: Mapping[str, bytes]) -> None:
        """Writes down the answers of a round, key by key; when this returns they have reached the disk."""
        with clear_database(self.path):
            self._database.execute("PRAGMA synchronous=FULL")
            try:
                with self._database:
                    self._database.execute("BEGIN")
                    self._database.executemany(
                        "UPDATE requests SET answer = ? WHERE key = ?",
                        [(answer, key) for key, answer in answers.items()],
                    )
                    self._database.execute("UPDATE rounds SET answered = 1 WHERE name = ?", (name,))
            finally:
                self._database.execute("PRAGMA synchronous=NORMAL")

    def drop(self, name: str) -> None:
        """Forgets a round that was refused: its keys are free again."""
        with clear_database(self.path), self._database:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM requests WHERE round = ?", (name,))
            self._database.execute("DELETE FROM rounds WHERE name = ?", (name,))

    def unsettled(self) -> list[tuple[Round, list[Asked], bool]]:
        """Rounds of an earlier process, with their requests, and whether they were answered."""
        found = []
        with clear_database(self.path):
            rounds = self._database.execute("SELECT name, rows, answered FROM rounds ORDER BY number")
            for name, rows, answered in rounds.fetchall():
                asked = Round(name=name, rows=_numbers(rows))
                requests = self._database.execute(
                    "SELECT key, digest, ids, numbers FROM requests WHERE round = ? ORDER BY number", (name,)
                ).fetchall()
                found.append((asked, [_asked(*each) for each in requests], bool(answered)))
        return found

    def close(self) -> None:
        """Closes the file."""
        self._reading.close()
        self._database.close()


def _numbers(raw: bytes) -> Rows:
    return np.frombuffer(raw, "<i8").astype(np.int64)


def _asked(key: str, digest: bytes, ids: str, numbers: bytes) -> Asked:
    return Asked(key=key, digest=bytes(digest), ids=tuple(json.loads(ids)), numbers=_numbers(numbers))
