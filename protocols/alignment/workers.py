"""Worker processes for the curve: its operations hold the interpreter lock, so threads would not help."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment import curve
from securevfl.protocols.parallel import threads

LEAST = 4096
"""Operations at once from which on processes are started: they need a tenth of a second to begin."""
SMALL_ORDER = "a point of small order came, which no honest party sends; the alignment ends"


class Workers:
    """Does the operations of one party, in processes of its own where there are many.

    Args:
        count: Processes; 0 for one per processor.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count or threads()
        self._processes: list[_Process] = []
        weakref.finalize(self, _end, self._processes)  # whoever forgets to close leaves no process behind

    def blind(self, secret: bytes, points: bytes) -> bytes:
        """Points times a secret.

        Raises:
            ProtocolError: A point has small order.
        """
        count, size = len(points) // curve.POINT_BYTES, curve.POINT_BYTES
        parts = [points[size * first : size * last] for first, last in self._parts(count)]
        return self._do([curve.pack_points(secret, part) for part in parts])

    def hash_and_blind(self, secret: bytes, salt: bytes, texts: Sequence[bytes]) -> bytes:
        """The points that texts are hashed to, times a secret."""
        parts = [texts[first:last] for first, last in self._parts(len(texts))]
        return self._do([curve.pack_texts(secret, salt, part) for part in parts])

    def close(self) -> None:
        """Ends the processes; new ones are started when they are needed."""
        _end(self._processes)

    def _parts(self, count: int) -> list[tuple[int, int]]:
        several = self._processes or count >= LEAST
        step = max(1, -(-count // (self._count if several else 1)))
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def _do(self, requests: Sequence[bytes]) -> bytes:
        """Every process reads its whole request before it answers, so no pipe waits for another."""
        if len(requests) < 2:
            return b"".join(_answer_here(request) for request in requests)
        self._processes += [_Process() for _ in range(len(requests) - len(self._processes))]
        busy = self._processes[: len(requests)]
        try:
            for process, request in zip(busy, requests, strict=True):
                process.ask(request)
            return b"".join([process.answer() for process in busy])
        except BaseException:  # whatever else they would answer belongs to no request any more
            self.close()
            raise


class _Process:
    """One worker process; the secret it gets lives in its memory alone."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(Path(curve.__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)  # noqa: S603 - our own file

    def ask(self, request: bytes) -> None:
        if self._process.stdin is None:
            raise ProtocolError("a worker process of the alignment has no pipes")
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except OSError as error:
            raise ProtocolError("a worker process of the alignment has ended") from error

    def answer(self) -> bytes:
        if self._process.stdout is None:
            raise ProtocolError("a worker process of the alignment has no pipes")
        head = self._process.stdout.read(curve.ANSWER.size)
        if len(head) < curve.ANSWER.size:
            raise ProtocolError("a worker process of the alignment has ended")
        good, size = curve.ANSWER.unpack(head)
        if not good:
            raise ProtocolError(SMALL_ORDER)
        return self._process.stdout.read(size)

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
                if pipe is not None:
                    pipe.close()
        self._process.wait()


def _answer_here(request: bytes) -> bytes:
    code, secret, salt, count, _ = curve.REQUEST.unpack_from(request)
    try:
        return curve.answer(code, secret, salt, count, request[curve.REQUEST.size :])
    except ValueError as error:
        raise ProtocolError(SMALL_ORDER) from error


def _end(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
