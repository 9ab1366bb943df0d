"""Alignment with a neutral helper: keyed hashes, compared by somebody without data who has no key.

Kamara, Mohassel, Raykova, Sadeghian 2014. The helper must not collude with a party: with the key it could
try out IDs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment.keyed import (
    COPIES,
    DUMMIES,
    VALUE_BYTES,
    Bools,
    KeyedList,
    Values,
    as_values,
    increases,
)
from securevfl.protocols.alignment.many import read_marks
from securevfl.protocols.alignment.messages import (
    AlignHello,
    AlignKey,
    AlignMarks,
    AlignMore,
    AlignPiece,
)
from securevfl.protocols.alignment.script import NONCE_BYTES, AlignmentMachine, Rows, Script
from securevfl.protocols.contract import HELPER, Address
from securevfl.protocols.keys import SIGNATURE_BYTES, Authenticator, PairKeys, PartyKeys, key_statement
from securevfl.protocols.stream import derive_key
from securevfl.protocols.wire import pack

PART_BYTES = 32
PIECE = 1 << 16  # values, 1 MiB
WINDOW = 4


class HelpedMachine(AlignmentMachine):
    """A party with data. It learns the positions of its own list that are common to all, and all sizes.

    Args:
        address: Who.
        ids: Its IDs, read once and not kept.
        count: How many.
        normalisation: How they are made comparable.
        authenticator: Signs for it, and checks what others signed; None where the transport vouches for all.
    """

    def __init__(
        self,
        address: Address,
        *,
        ids: Iterable[str],
        count: int,
        normalisation: str,
        authenticator: Authenticator | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(address, **rest)
        self._ids, self._id_count, self._normalisation = ids, count, normalisation
        self._authenticator = authenticator

    def _play(self) -> Script[Rows]:
        key, counts = yield from self._agree_on_key()
        listed = KeyedList(key, self.address, self._ids, self._normalisation)
        if listed.count != COPIES * self._id_count + 2 * DUMMIES:
            raise ProtocolError(f"{self._id_count} IDs were announced, but there are others")
        hello = AlignHello(
            round=self.round,
            nonce=bytes(NONCE_BYTES),
            count=listed.count,
            about=_with_sizes(self._about, counts),
            public=b"",
            signature=b"",
        )
        self._send(HELPER, hello)
        yield from self._stream(listed.sorted_parts())
        bits = (yield from self._get(HELPER, AlignMarks)).bits
        rows = listed.common(read_marks(bits, listed.count))
        yield from self._agree(listed.digest(rows), "other common records")
        return rows

    def _agree_on_key(self) -> Script[tuple[bytes, dict[Address, int]]]:
        """A key of which every party has contributed a part, and which no helper or relay sees; and sizes."""
        keys = PartyKeys(hybrid=False)
        own = b""
        if self._authenticator is not None:
            own = self._authenticator.sign(key_statement(self.address, keys.public))
        greeted = yield from self._hello(self._id_count, keys.public, own)
        parts = {self.address: os.urandom(PART_BYTES)}
        pairs = {}
        for other in self._parties:
            hello = greeted.hellos[other]
            self._check_signature(other, hello)
            pairs[other] = PairKeys(keys.exchange(hello.public), greeted.salt, own=self.address, peer=other)
            sealed = pairs[other].seal(parts[self.address], round=0, attempt=0)
            self._send(other, AlignKey(round=self.round, sealed=sealed))
        for other in self._parties:
            sealed = (yield from self._get(other, AlignKey)).sealed
            parts[other] = pairs[other].open(sealed, round=0, attempt=0)
            if len(parts[other]) != PART_BYTES:
                raise ProtocolError(f"{self._name(other)} contributes {len(parts[other])} bytes to the key")
        secret = b"".join(parts[address] for address in sorted(parts))
        key = derive_key(secret, purpose="alignment/key", context=greeted.salt, length=32)
        return key, greeted.counts

    def _check_signature(self, other: Address, hello: AlignHello) -> None:
        if self._authenticator is None:
            return
        if len(hello.signature) != SIGNATURE_BYTES:
            raise ProtocolError(f"the key of {self._name(other)} is not signed")
        self._authenticator.verify(other, key_statement(other, hello.public), hello.signature)

    def _stream(self, parts: Iterator[Values]) -> Script[None]:
        """Sends sorted values to the helper, as it asks for them."""
        under_way = 0
        for piece in _pieces(parts):
            if under_way == WINDOW:
                yield from self._get(HELPER, AlignMore)
                under_way -= 1
            self._send(HELPER, AlignPiece(round=self.round, values=piece))
            under_way += 1
        for _ in range(under_way):
            yield from self._get(HELPER, AlignMore)


def _with_sizes(about: bytes, counts: dict[Address, int]) -> bytes:
    """What parties tell the helper, so that nobody brings it more than it announced to the others."""
    sizes = [counts[address] for address in sorted(counts)]
    return hashlib.sha256(pack("securevfl alignment sizes 1", {"about": about, "sizes": sizes})).digest()


def _pieces(parts: Iterator[Values]) -> Iterator[bytes]:
    """Values in pieces of one size, but the last."""
    rest: list[Values] = []
    for part in parts:
        for start in range(0, len(part), PIECE):
            rest.append(part[start : start + PIECE])
            if sum(map(len, rest)) >= PIECE:
                joined = np.concatenate(rest)
                yield joined[:PIECE].tobytes()
                rest = [joined[PIECE:]]
    if last := sum(map(len, rest)):
        yield np.concatenate(rest)[:last].tobytes()


class HelperMachine(AlignmentMachine):
    """The helper. It learns how many IDs each party has and how many any of them have in common; no ID.

    Lists arrive sorted, so that it compares them as they come and holds a few pieces of each.
    """

    def _play(self) -> Script[None]:
        lists, hellos = {}, {}
        for party in self._parties:
            hellos[party] = hello = yield from self._get(party, AlignHello)
            if not 2 * DUMMIES <= hello.count <= COPIES * self._most + 2 * DUMMIES:
                raise ProtocolError(f"{self._name(party)} brings {hello.count} values, too few or too many")
            lists[party] = _Arriving(hello.count)
        counts = {party: (hello.count - 2 * DUMMIES) // COPIES for party, hello in hellos.items()}
        if any(hello.about != _with_sizes(self._about, counts) for hello in hellos.values()):
            raise ProtocolError(
                "the parties align in different ways, or bring other numbers than they announced"
            )
        while any(not each.over for each in lists.values()):
            waiting = [party for party, each in lists.items() if not each.done]
            if waiting:
                party = min(waiting, key=lambda each: lists[each].last)
                piece = yield from self._get(party, AlignPiece)
                lists[party].take(piece.values)
                self._send(party, AlignMore(round=self.round))
            _compare(list(lists.values()))
        for party, each in lists.items():
            self._send(party, AlignMarks(round=self.round, bits=each.bits()))
        return None


class _Arriving:
    """One party's list at the helper: what is not compared yet, and the marks of what is."""

    def __init__(self, count: int) -> None:
        self._left, self.last = count, -1
        self.waiting: Values = np.empty((0, 2), np.uint64)
        self._marks: list[Bools] = []

    def take(self, raw: bytes) -> None:
        if len(raw) != VALUE_BYTES * min(PIECE, self._left):
            raise ProtocolError(f"a piece of {len(raw)} bytes, which is not what is due")
        values = np.concatenate([self.waiting, as_values(raw)])
        if not increases(values[max(0, len(self.waiting) - 1) :]) or int(values[-1, 0]) < self.last:
            raise ProtocolError("a list of values is not in order, or holds one twice")
        self._left -= len(raw) // VALUE_BYTES
        self.waiting, self.last = values, int(values[-1, 0])

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return self._left == 0

    @property
    def over(self) -> bool:
        """Whether everything has been compared."""
        return self.done and not len(self.waiting)

    def upto(self, limit: int) -> Values:
        """Takes out what is below a limit."""
        split = len(self.waiting)
        if limit < 1 << 64:
            split = int(np.searchsorted(self.waiting[:, 0], np.uint64(max(0, limit))))
        taken, self.waiting = self.waiting[:split], self.waiting[split:]
        return taken

    def mark(self, marks: Bools) -> None:
        self._marks.append(marks)

    def bits(self) -> bytes:
        return np.packbits(np.concatenate(self._marks)).tobytes()


def _compare(lists: list[_Arriving]) -> None:
    """Compares what is below every list's last value so far: nothing of that can still come."""
    limit = min((each.last for each in lists if not each.done), default=1 << 64)
    taken = [each.upto(limit) for each in lists]
    for each, marks in zip(lists, in_all(taken), strict=True):
        each.mark(marks)


def in_all(lists: list[Values]) -> list[Bools]:
    """For each of several ordered lists, which of its values are in all the others."""
    shared = lists[0]
    for each in lists[1:]:
        shared = shared[_found(shared, each)]
    return [_found(each, shared) for each in lists]


def _found(values: Values, among: Values) -> Bools:
    """Which values are among ordered others."""
    if not len(among):
        return np.zeros(len(values), bool)
    first = among[:, 0]
    if (first[1:] == first[:-1]).any():  # has a chance of 1e-4 for ten million IDs; then whole values decide
        whole = np.dtype("V16")
        return np.isin(_void(values, whole), _void(among, whole))
    place = np.searchsorted(first, values[:, 0])
    place[place == len(among)] = 0
    return np.asarray((among[place] == values).all(axis=1))


def _void(values: Values, whole: np.dtype[Any]) -> Any:
    return np.ascontiguousarray(values).view(whole).ravel()
