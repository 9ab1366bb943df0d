"""Alignment by commutative blinding on Curve25519: what the machines for two and for more parties share."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

import numpy as np

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment.curve import POINT_BYTES, hash_to_curve
from securevfl.protocols.alignment.lists import Points, as_points, check_points, list_digest
from securevfl.protocols.alignment.messages import AlignCommit, AlignDigest, AlignElement
from securevfl.protocols.alignment.script import AlignmentMachine, Rows, Script
from securevfl.protocols.alignment.workers import Workers
from securevfl.protocols.contract import Address
from securevfl.protocols.wire import Value, pack

SECRET_BYTES = 32


class NotTheSame(ProtocolError):
    """The parties do not mean the same records."""


class BlindingMachine(AlignmentMachine):
    """A party with a list of distinct encoded IDs and a secret that is drawn for this session alone.

    Lists travel sorted by their blinded values: an order that says nothing which the values do not say, and
    whose way back to the IDs only the secret knows.
    """

    def __init__(self, address: Address, *, texts: list[bytes], processes: int = 0, **rest: Any) -> None:
        super().__init__(address, **rest)
        self._texts = texts
        self._secret = os.urandom(SECRET_BYTES)
        self._workers = Workers(processes)

    def _end(self) -> None:
        self._secret = b""
        self._workers.close()

    def _blind(self, points: bytes) -> bytes:
        return self._workers.blind(self._secret, points)

    def _own_list(self, salt: bytes) -> tuple[Points, Rows]:
        """The own IDs, hashed, blinded and sorted; and the position of each."""
        points = as_points(self._workers.hash_and_blind(self._secret, salt, self._texts))
        order = np.argsort(points, kind="stable")
        return points[order], order

    def _commit(self, digest: bytes) -> Script[dict[Address, bytes]]:
        """Everybody commits to a list before anybody sees one."""
        for other in self._parties:
            self._send(other, AlignCommit(round=self.round, digest=digest))
        found = {}
        for other in self._parties:
            commit = yield from self._get(other, AlignCommit)
            found[other] = commit.digest
        return found

    def _check_list(self, owner: Address, salt: bytes, purpose: str, raw: bytes, promised: bytes) -> None:
        if not hmac.compare_digest(list_digest(salt, purpose, raw), promised):
            raise ProtocolError(f"{self._name(owner)} sends another list than it committed to")

    def _sorted_by_text(self, rows: Rows) -> Rows:
        """Positions in the order of the IDs, which is the same for all who have the same IDs."""
        texts = self._texts
        return np.array(sorted(rows.tolist(), key=lambda row: texts[row]), np.int64)

    def _confirm(self, salt: bytes, rows: Rows) -> Script[None]:
        """All parties make sure that they mean the same records, and tell each other nothing else.

        The records' IDs make a point, every party sends its multiple by a fresh secret, and two that began
        with the same point come to the same key. Whoever began with another learns only that: from one run it
        can try one list of records, and nothing can be tried later.
        """
        count = len(rows).to_bytes(8, "little")
        records = hashlib.sha512(count + b"".join(_with_length(self._texts[row]) for row in rows.tolist()))
        point, secret = hash_to_curve(salt, records.digest()), os.urandom(SECRET_BYTES)
        own = self._workers.blind(secret, point)
        for other in self._parties:
            self._send(other, AlignElement(round=self.round, element=own))
        keys: dict[Address, bytes] = {}
        for other in self._parties:
            element = (yield from self._get(other, AlignElement)).element
            if len(element) != POINT_BYTES or element == own:
                raise ProtocolError(f"{self._name(other)} sends no element of its own")
            check_points(element)
            keys[other] = self._workers.blind(secret, element)
            tag = _tag(keys[other], salt, self.address, other, own, element)
            self._send(other, AlignDigest(round=self.round, digest=tag))
            keys[other] += _tag(keys[other], salt, other, self.address, element, own)
        for other in self._parties:
            found = yield from self._get(other, AlignDigest)
            if not hmac.compare_digest(found.digest, keys[other][SECRET_BYTES:]):
                raise NotTheSame(f"{self._name(other)} does not have the same records; nothing is used")


def _with_length(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def _tag(key: bytes, salt: bytes, sender: Address, receiver: Address, sent: bytes, got: bytes) -> bytes:
    fields: dict[str, Value] = {"salt": salt, "from": sender, "to": receiver, "sent": sent, "got": got}
    return hmac.digest(key, pack("securevfl alignment check 1", fields), "sha256")
