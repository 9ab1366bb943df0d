"""Keyed values of IDs for a helper that must not know them: hashes, two copies of each, and dummies.

All of it is symmetric cryptography under a key that only the parties with data share. A value has 16 bytes
and is held as two words; lists are sorted by them, an order that means nothing without the key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment.ids import encode_ids, same_id
from securevfl.protocols.contract import Address
from securevfl.protocols.stream import derive_key

VALUE_BYTES = 16
COPIES = 3
DUMMIES = 256
"""Of each kind. A helper that withholds one of m common records must hit its three values and no dummy: m
cases in C(3 m + 256, 3), at most 4.6e-6 whatever m is."""
BUCKETS = 64  # parts that are sorted one at a time, so that little memory is needed
_CHUNK = 1 << 16

Values = npt.NDArray[np.uint64]
"""Shape (n, 2)."""
Bools = npt.NDArray[np.bool_]


def ordered(values: Values) -> npt.NDArray[np.int64]:
    """The order of values by their first word, then by their second."""
    order = np.argsort(values[:, 0], kind="quicksort")
    first = values[order, 0]
    if (first[1:] == first[:-1]).any():
        return np.lexsort((values[:, 1], values[:, 0]))
    return order


def increases(values: Values) -> bool:
    """Whether each value is above the one before."""
    first, second = values[:, 0], values[:, 1]
    above = first[1:] > first[:-1]
    return bool((above | ((first[1:] == first[:-1]) & (second[1:] > second[:-1]))).all())


def as_values(raw: bytes | bytearray | memoryview) -> Values:
    """Values from their bytes."""
    return np.frombuffer(raw, "<u8").reshape(-1, 2)


class KeyedList:
    """One party's values.

    Args:
        key: Known to all parties with data and to nobody else.
        address: The party.
        ids: Its IDs, read once and not kept.
        normalisation: How they are made comparable.

    Raises:
        DataError: An ID cannot be used, or occurs twice.
    """

    def __init__(self, key: bytes, address: Address, ids: Iterable[str], normalisation: str) -> None:
        self._key = key
        hashes = self._hash(encode_ids(ids, normalisation))
        order = ordered(hashes)
        same = np.flatnonzero((hashes[order[1:]] == hashes[order[:-1]]).all(axis=1))
        if same.size:
            first, second = sorted((int(order[same[0]]), int(order[same[0] + 1])))
            raise same_id(first, second, normalisation)
        self._hashes = hashes
        self._dummies = np.concatenate(
            [self._dummy_values("dummies of all"), self._dummy_values(f"dummies of {address}")]
        )
        self._places: list[npt.NDArray[np.uint32]] = []

    def _hash(self, texts: Iterator[bytes]) -> Values:
        blake2b, key = hashlib.blake2b, self._derive("hash", 32)
        raw = bytearray()
        while chunk := list(islice(texts, _CHUNK)):
            raw += b"".join([blake2b(text, key=key, digest_size=VALUE_BYTES).digest() for text in chunk])
        return as_values(raw)

    def _derive(self, purpose: str, length: int = 16) -> bytes:
        return derive_key(self._key, purpose=f"alignment/{purpose}", length=length)

    def _dummy_values(self, purpose: str) -> Values:
        return self._encrypted(purpose, np.arange(2 * DUMMIES, dtype=np.uint64).reshape(-1, 2))

    def _encrypted(self, purpose: str, values: Values) -> Values:
        """Blocks under a key of their own; blocks that differ stay different, and nothing else is needed."""
        cipher = Cipher(algorithms.AES(self._derive(purpose)), modes.ECB()).encryptor()  # noqa: S305
        return as_values(cipher.update(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data))

    def _copies(self) -> Iterator[Values]:
        yield self._hashes
        for number in range(1, COPIES):
            yield self._encrypted(f"copy {number}", self._hashes)
        yield self._dummies

    @property
    def count(self) -> int:
        """How many values there are."""
        return COPIES * len(self._hashes) + len(self._dummies)

    def sorted_parts(self) -> Iterator[Values]:
        """The values in order, part by part; where each came from is remembered."""
        self._places = []
        step, copies = (1 << 64) // BUCKETS, list(self._copies())
        starts = np.cumsum([0, *map(len, copies)])
        buckets = [(copy[:, 0] // np.uint64(step)).astype(np.uint8) for copy in copies]
        for bucket in range(BUCKETS):
            found = [np.flatnonzero(each == bucket) for each in buckets]
            values = np.concatenate([copy[at] for copy, at in zip(copies, found, strict=True)])
            places = np.concatenate([at + start for at, start in zip(found, starts, strict=False)])
            order = ordered(values)
            self._places.append(places[order].astype(np.uint32))
            yield values[order]

    def common(self, marks: Bools) -> npt.NDArray[np.int64]:
        """The common positions, in an order that is the same at all parties.

        Args:
            marks: The helper's, one per value, in the order in which they were sent.

        Raises:
            ProtocolError: The helper lies.
        """
        placed = np.empty(self.count, bool)
        placed[np.concatenate(self._places)] = marks
        n = len(self._hashes)
        copies, dummies = placed[: COPIES * n].reshape(COPIES, n), placed[COPIES * n :]
        if (copies != copies[0]).any() or not dummies[:DUMMIES].all() or dummies[DUMMIES:].any():
            raise ProtocolError("the helper withholds common records or makes some up; nothing is used")
        rows = np.flatnonzero(copies[0])
        return rows[ordered(self._encrypted("order", self._hashes[rows]))]

    def digest(self, rows: npt.NDArray[np.int64]) -> bytes:
        """What all parties must agree on: the common records in their common order."""
        key = self._derive("digest", 32)
        return hmac.digest(key, np.ascontiguousarray(self._hashes[rows]).tobytes(), "sha256")
