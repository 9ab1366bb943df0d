"""Points of Curve25519: hashing IDs to them, blinding them, and the process that does it in bulk.

Nothing of the package is imported here: worker processes run this very file and start in a moment.
"""

from __future__ import annotations

import hashlib
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

PRIME = (1 << 255) - 19
A = 486662
POINT_BYTES = 32
_LAST_TRY = 1 << 12  # each try fails with chance 1/2


def _legendre_by_power(number: int) -> int:
    power = pow(number, (PRIME - 1) // 2, PRIME)
    return -1 if power == PRIME - 1 else power


def _find_legendre() -> Callable[[int], int]:
    """gmpy2 takes 1.5 us for what `pow` takes 100 us for; both give the same."""
    try:
        from gmpy2 import legendre, mpz
    except ImportError:
        return _legendre_by_power
    prime = mpz(PRIME)
    return lambda number: int(legendre(number, prime))


legendre = _find_legendre()
"""1 for squares modulo the prime, -1 for others, 0 for multiples of it."""


def on_curve(u: int) -> bool:
    """Whether a u-coordinate belongs to the curve; all others belong to its twist."""
    return legendre(u * (u * (u + A) + 1) % PRIME) == 1


def hash_to_curve(salt: bytes, text: bytes) -> bytes:
    """A point of the curve itself whose discrete logarithm nobody knows.

    Blinding keeps a point on its side, curve or twist, so that points on both would tell one bit of every ID.
    A hash of 512 bits modulo the prime is uniform to within 2^-257.
    """
    for counter in range(_LAST_TRY):
        wide = hashlib.sha512(salt + counter.to_bytes(2, "little") + text).digest()
        u = int.from_bytes(wide, "little") % PRIME
        if on_curve(u):
            return u.to_bytes(POINT_BYTES, "little")
    raise ValueError("no point was found")  # has a chance of 2^-4096


def hash_texts(salt: bytes, texts: Iterable[bytes]) -> list[bytes]:
    """Points for many texts."""
    return [hash_to_curve(salt, text) for text in texts]


def blind(secret: bytes, points: Iterable[bytes]) -> bytes:
    """Points times a secret, one after the other.

    Raises:
        ValueError: A point has small order; its multiple would be the same whatever the secret.
    """
    key = X25519PrivateKey.from_private_bytes(secret)
    exchange, read = key.exchange, X25519PublicKey.from_public_bytes
    return b"".join([exchange(read(point)) for point in points])


def pieces_of(raw: bytes) -> list[bytes]:
    """The points in a string of them."""
    return [raw[i : i + POINT_BYTES] for i in range(0, len(raw), POINT_BYTES)]


# -- a worker process ---------------------------------------------------------------------------------------

REQUEST = struct.Struct("<B32s32sQQ")  # what to do, secret, salt, number of texts, bytes that follow
ANSWER = struct.Struct("<?Q")  # whether it went well, bytes that follow
BLIND, HASH = 0, 1


def pack_points(secret: bytes, points: bytes) -> bytes:
    """Asks for points to be blinded."""
    return REQUEST.pack(BLIND, secret, b"", 0, len(points)) + points


def pack_texts(secret: bytes, salt: bytes, texts: Sequence[bytes]) -> bytes:
    """Asks for texts to be hashed and blinded."""
    body = struct.pack(f"<{len(texts)}I", *map(len, texts)) + b"".join(texts)
    return REQUEST.pack(HASH, secret, salt, len(texts), len(body)) + body


def answer(code: int, secret: bytes, salt: bytes, count: int, body: bytes) -> bytes:
    """Does what a request asks for."""
    if code == BLIND:
        return blind(secret, pieces_of(body))
    start, texts = 4 * count, []
    for length in struct.unpack_from(f"<{count}I", body):
        texts.append(body[start : start + length])
        start += length
    return blind(secret, hash_texts(salt, texts))


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answers requests until there are no more."""
    while len(head := source.read(REQUEST.size)) == REQUEST.size:
        code, secret, salt, count, size = REQUEST.unpack(head)
        try:
            good, body = True, answer(code, secret, salt, count, source.read(size))
        except ValueError:
            good, body = False, b""
        target.write(ANSWER.pack(good, len(body)) + body)
        target.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts the parent ends this by closing the pipe
    serve(sys.stdin.buffer, sys.stdout.buffer)
