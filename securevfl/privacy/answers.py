"""Answers: what an owner let out for the requests of a scoring service, so that a repetition costs nothing.

A request has a name. What is released for it is kept here first, then entered in the ledger, and only then
sent; whoever asks again under the same name for the same records gets the same values and no second entry.
A process that is killed in between leaves at most one answer without an entry, which has not left and is
forgotten at the next start. Answers are private, and only the newest are kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import AgreementError, RunError
from securevfl.files import appending
from securevfl.privacy.rows import Rows

KEPT = 8192
"""How many answers are kept; those who ask repeat the few that they have not received."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, name TEXT UNIQUE, position INTEGER, "
    "rows BLOB, type TEXT, width INTEGER, content BLOB)"
)


@contextmanager
def clear_database(path: Path | str) -> Iterator[None]:
    """One line in place of an error of the database."""
    try:
        yield
    except sqlite3.Error as error:
        raise RunError(f"{path} cannot be used: {error}") from error


def open_database(path: Path, *tables: str) -> sqlite3.Connection:
    """A private database whose transactions survive the end of this process at any moment.

    Raises:
        RunError: It cannot be opened.
    """
    with clear_database(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            appending(path, binary=True).close()  # readable by its owner alone from the first moment on
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        for table in tables:
            connection.execute(table)
    return connection


class Answers:
    """The answers of one owner.

    Args:
        path: The file.
        is_entered: Whether the ledger has an entry of a prediction at a position.
    """

    def __init__(self, path: Path, is_entered: Callable[[int], bool]) -> None:
        self.path = path
        self._database = open_database(path, _TABLE)
        self._unsent: list[str] = []
        with clear_database(path):
            self._forget_unsent(is_entered)

    def _forget_unsent(self, is_entered: Callable[[int], bool]) -> None:
        newest = self._database.execute(
            "SELECT name, position FROM answers ORDER BY number DESC LIMIT 1"
        ).fetchone()
        if newest is not None and not is_entered(newest[1]):
            self._database.execute("DELETE FROM answers WHERE name = ?", newest[:1])

    def find(self, name: str, rows: Rows) -> npt.NDArray[Any] | None:
        """What was released under a name; None where nothing was.

        Raises:
            AgreementError: It was for other records.
        """
        with clear_database(self.path):
            self._forget()
            found = self._database.execute(
                "SELECT rows, type, width, content FROM answers WHERE name = ?", (name,)
            ).fetchone()
        if found is None:
            return None
        if found[0] != rows.astype("<i8").tobytes():
            raise AgreementError("a request comes again under its name, but for other records")
        return np.frombuffer(found[3], np.dtype(found[1])).reshape(-1, found[2]).copy()

    @contextmanager
    def keeping(self, name: str, rows: Rows, values: npt.NDArray[Any], *, position: int) -> Iterator[None]:
        """Keeps an answer, whose ledger entry is written within the block; if that fails it is forgotten.

        Args:
            name: The request's.
            rows: Its records.
            values: What is released, one row per record.
            position: Where the entry will be.
        """
        row = (name, position, rows.astype("<i8").tobytes(), values.dtype.str, values.shape[1])
        with clear_database(self.path):
            self._forget()
            if position % 256 == 0:
                self._database.execute(
                    "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ?", (KEPT,)
                )
            self._database.execute(
                "INSERT OR REPLACE INTO answers (name, position, rows, type, width, content) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, values.tobytes()),
            )
        try:
            yield
        except BaseException:
            self._unsent.append(name)
            with suppress(sqlite3.Error):
                self._forget()
            raise

    def _forget(self) -> None:
        """Forgets what was not released after all; while the disk is too full for that, nothing is kept."""
        while self._unsent:
            self._database.execute("DELETE FROM answers WHERE name = ?", self._unsent[-1:])
            self._unsent.pop()

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
