"""Correlations of two members without their encryption, so that many runs can be compared in little time.

The arithmetic of the ciphertexts is exact modulo t. Here it is done on the plaintexts themselves, word for
word the same and drawing the same random words: a test compares whole pools. Rounds, noise, roles, training
are those of the product. Nothing is hidden from anybody: for simulations alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from securevfl.protocols.sealed import correlations, encrypted, residues
from securevfl.protocols.sealed.cipher import COLUMNS, DEGREE, ROWS

PLACES = range(ROWS - 1, DEGREE, ROWS)


class ClearCipher:
    """What `Cipher` does, on plaintexts: (whether they are slots, words)."""

    def plain(self, words: Any) -> Any:
        return False, np.concatenate([words, np.zeros(DEGREE - len(words), np.uint64)])

    def slots(self, words: Any) -> Any:
        return True, self.plain(words)[1]

    def factor(self, plain: Any) -> Any:
        return plain

    def read(self, data: bytes) -> Any:
        in_slots, words = bool(data[0]), np.frombuffer(data[1:], np.uint64)
        if in_slots:
            return True, words
        rows = words.reshape(COLUMNS, ROWS)[:, ::-1]
        return False, residues.centred(rows).astype(np.int32)

    def combine(self, terms: Sequence[Any]) -> Any:
        if terms[0][0][0]:
            return True, residues.add(*(residues.multiply(one, two) for (_, one), (_, two) in terms))
        rows = np.hstack([one for (_, one), _ in terms])
        right = np.concatenate([two[:ROWS] for _, (_, two) in terms])
        found = np.zeros(DEGREE, np.uint64)  # other places only carry a mask that nobody reads
        found[PLACES] = residues.product(rows, right[:, None])[:, 0]
        return False, found

    def close(self, answer: Any, mask: Any, receiver: Any, stream: Any) -> bytes:
        stream.words((3, DEGREE))  # where the flooding is drawn
        return encoded((answer[0], residues.add(answer[1], mask[1])))


def encoded(plain: Any) -> bytes:
    """As `ClearCipher.read` takes it."""
    return bytes([plain[0]]) + plain[1].tobytes()


class ClearKeys:
    """What `Keys` does."""

    def __init__(self, cipher: ClearCipher) -> None:
        self.public = b"none"

    def encrypt(self, plain: Any) -> bytes:
        return encoded(plain)

    def slots(self, data: bytes) -> Any:
        return np.frombuffer(data[1:], np.uint64)

    def coefficients(self, data: bytes, places: Sequence[int]) -> Any:
        return np.frombuffer(data[1:], np.uint64)[places]


@contextmanager
def in_the_clear() -> Iterator[None]:
    """Two members without a dealer hide nothing from each other inside."""
    cipher = ClearCipher()
    with (
        patch.object(encrypted, "shared_cipher", lambda: cipher),
        patch.object(correlations, "shared_cipher", lambda: cipher),
        patch.object(encrypted, "Keys", ClearKeys),
        patch.object(encrypted, "Receiver", lambda cipher, data: data),
    ):
        yield
