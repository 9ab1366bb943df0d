"""Lists of points and how they travel: in pieces, of which a few are under way at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment.curve import POINT_BYTES

WINDOW = 4
"""Pieces that may be under way."""
PIECE = 1 << 13
"""Points in a piece: 256 KiB, and a third of a second of one processor."""

Points = npt.NDArray[np.bytes_]
_TOP = np.uint64((1 << 63) - 1)
_ALL = np.uint64((1 << 64) - 1)
_LOW = np.uint64((1 << 64) - 19)


def as_points(raw: bytes) -> Points:
    """A string of points as an array, ordered like their bytes."""
    return np.frombuffer(raw, f"S{POINT_BYTES}")


def check_points(raw: bytes) -> None:
    """Raises `ProtocolError` unless all are canonical: numbers from 1 to below 2^255 - 19."""
    words = np.frombuffer(raw, "<u8").reshape(-1, 4)
    top, low = words[:, 3], words[:, 0]
    past = (top == _TOP) & (words[:, 2] == _ALL) & (words[:, 1] == _ALL) & (low >= _LOW)
    if (top > _TOP).any() or past.any() or not words.any(axis=1).all():
        raise ProtocolError("a blinded value is not in its one canonical form")


def check_increasing(points: Points) -> None:
    """Raises `ProtocolError` unless every point is larger than the one before: sorted, and none twice."""
    if not (points[:-1] < points[1:]).all():
        raise ProtocolError("a list of blinded values is not in order, or holds one twice")


def check_distinct(points: Points) -> None:
    """Raises `ProtocolError` if a value occurs twice.

    Different points can blind to the same: those that differ by one of small order, such as u and 1/u.
    """
    ordered = np.sort(points)
    if (ordered[:-1] == ordered[1:]).any():
        raise ProtocolError("two blinded values of one list are the same after blinding; somebody cheats")


def list_digest(salt: bytes, purpose: str, raw: bytes) -> bytes:
    """What commits to a list; the values hide themselves, as a fresh secret is in each of them."""
    return hashlib.sha256(purpose.encode() + b"\0" + salt + raw).digest()


class Outgoing:
    """A list on its way.

    Args:
        raw: Its values, one after the other.
        size: Bytes of a piece.
    """

    def __init__(self, raw: bytes, size: int = PIECE * POINT_BYTES) -> None:
        self._raw, self._size = memoryview(raw), size
        self._sent = self._taken = 0

    def first(self) -> list[bytes]:
        """The pieces that may be under way at once."""
        return [piece for _ in range(WINDOW) if (piece := self._next()) is not None]

    def next(self) -> bytes | None:
        """The other side has taken a piece; the one that may follow, if there is one."""
        self._taken = min(self._taken + self._size, len(self._raw))
        return self._next()

    def _next(self) -> bytes | None:
        if self._sent == len(self._raw):
            return None
        piece = self._raw[self._sent : self._sent + self._size]
        self._sent += len(piece)
        return bytes(piece)

    @property
    def done(self) -> bool:
        """Whether the other side has taken everything."""
        return self._taken == len(self._raw)


class Incoming:
    """A list that arrives.

    Args:
        count: How many points were announced.
        work: What is done with each piece; its results are kept in order.
    """

    def __init__(self, count: int, work: Callable[[bytes], bytes] | None = None) -> None:
        self._count, self._work = count, work
        self._raw, self._results = bytearray(), bytearray()

    def take(self, values: bytes) -> None:
        """Takes the next piece.

        Raises:
            ProtocolError: It has another size than is due, or a value that is not canonical.
        """
        due = min(PIECE, self._count - len(self._raw) // POINT_BYTES) * POINT_BYTES
        if len(values) != due:
            raise ProtocolError(f"a piece of {len(values)} bytes; {due} are due")
        check_points(values)
        if self._work is not None:
            self._results += self._work(values)
        self._raw += values

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return len(self._raw) == self._count * POINT_BYTES

    @property
    def raw(self) -> bytes:
        """What arrived."""
        return bytes(self._raw)

    @property
    def results(self) -> bytes:
        """What was made of it."""
        return bytes(self._results)
