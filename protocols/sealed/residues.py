"""Arithmetic modulo t = 2^50 - 16383, exact and vectorised: words that ciphertexts of `cipher` hold.

A product of two residues is put together from its low 64 bits and a quotient in floating point, which is off
by one at most: t is below 2^50, and float64 has 53 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError
from securevfl.protocols.stream import KeyStream

T = 2**50 - 16383
"""The plaintext modulus: a prime that is 1 modulo 16384, so that polynomials of degree 8192 have slots."""
BITS = 50
Words = npt.NDArray[np.uint64]
_HALF = 25
_PIECE = 1 << 15


def residues(integers: npt.NDArray[Any]) -> Words:
    """Signed integers modulo t."""
    return np.asarray(np.remainder(integers.astype(np.int64, copy=False), T)).astype(np.uint64)


def centred(words: Words) -> npt.NDArray[np.int64]:
    """The integers of least magnitude."""
    signed = words.astype(np.int64)
    return np.asarray(np.where(signed > T // 2, signed - T, signed))


def add(*terms: Words) -> Words:
    """The sum of up to 2^13 residues."""
    return np.asarray(np.remainder(sum(terms[1:], terms[0]), np.uint64(T)))


def gathered(rows: Words, places: npt.NDArray[np.intp] | None) -> Words:
    """Rows added up, row i at place[i]; as they are where no places are given."""
    if places is None:
        return rows
    out = np.zeros((int(places.max(initial=-1)) + 1, rows.shape[1]), np.uint64)
    np.add.at(out, places, rows)
    return np.asarray(out % np.uint64(T))


def subtract(one: Words, two: Words) -> Words:
    """The difference."""
    found = one - two
    found += (found >> np.uint64(63)) * np.uint64(T)  # what fell below 0 has wrapped around 2^64
    return found


def negative(words: Words) -> Words:
    """The negative."""
    return subtract(np.zeros_like(words), words)


def multiply(one: Words, two: Words) -> Words:
    """The product, element by element."""
    quotient = (one.astype(np.float64) * two.astype(np.float64) * (1.0 / T)).astype(np.uint64)
    found = (one * two - quotient * np.uint64(T)).view(np.int64)
    found += (found >> 63) & T
    found -= np.where(found >= T, T, 0)
    return found.view(np.uint64)


def draw(stream: KeyStream, shape: int | tuple[int, ...]) -> Words:
    """Uniform residues; words that are none are drawn again."""
    out = stream.words(shape)
    out >>= np.uint64(64 - BITS)
    while out.max(initial=0) >= T:
        again = out >= T
        out[again] = stream.words(int(again.sum())) >> np.uint64(64 - BITS)
    return out


def check(words: object, shape: tuple[int, ...]) -> Words:
    """Returns `words` if they are residues of that shape.

    Raises:
        ProtocolError: They are not.
    """
    if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.shape != shape:
        raise ProtocolError(f"message carries no residues of shape {list(shape)}")
    if words.size and int(words.max()) >= T:
        raise ProtocolError("message carries a word that is no residue modulo t")
    return words


def product(left: npt.NDArray[np.int32], right: Words) -> Words:
    """The product left @ right of small integers (width, rows) and residues (rows, columns).

    In halves of 25 bits and pieces of rows, so that every sum in floating point is below 2^53: entries have
    17 bits with their sign at most, pieces 2^11 rows.
    """
    low, high = right & np.uint64((1 << _HALF) - 1), right >> np.uint64(_HALF)
    halves = np.concatenate([low, high], axis=1).astype(np.float64)
    total = np.zeros((left.shape[0], halves.shape[1]), np.int64)
    step = min(1 << 11, max(64, _PIECE // max(1, left.shape[0])))
    for start in range(0, left.shape[1], step):
        piece = left[:, start : start + step].astype(np.float64)
        total += (piece @ halves[start : start + step]).astype(np.int64)
    columns = right.shape[1]
    shifted = multiply(residues(total[:, columns:]), np.full((1, 1), 1 << _HALF, np.uint64))
    return add(residues(total[:, :columns]), shifted)
