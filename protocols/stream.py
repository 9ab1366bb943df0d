"""The cryptographic stream behind every mask and every noise value.

AES-128 in counter mode turns a secret key into uniform words. Keys come from the operating system or from
HKDF with a purpose label; a (key, nonce) pair is never used for two purposes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securevfl.protocols.parallel import in_parts

KEY_BYTES = 16
NONCE_BYTES = 16
BLOCK_BYTES = 16
CHUNK_BYTES = 256 * 1024  # measured best between 128 KB and 512 KB: zeros and output stay in the cache

_ZEROS = memoryview(bytes(CHUNK_BYTES))
_ROUND_NONCE = struct.Struct(">IHxx8x")  # round, attempt, then the block counter
_Words = TypeVar("_Words", bound=npt.NDArray[Any])


def derive_key(secret: bytes, *, purpose: str, context: bytes = b"", length: int = KEY_BYTES) -> bytes:
    """Derives a key from a secret with HKDF-SHA256 for exactly one purpose.

    Args:
        secret: Keying material of at least 16 bytes, such as an X25519 shared secret.
        purpose: What the key is for; part of the derivation, so keys of two purposes are independent.
        context: Public data the key is bound to, such as both parties' public keys.
        length: Number of bytes.
    """
    if len(secret) < KEY_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes is too short; at least {KEY_BYTES} are needed")
    label = b"securevfl/v1/" + purpose.encode() + b"\0" + context
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=label).derive(secret)


class KeyStream:
    """Uniform words from AES-128-CTR. Not safe to share between threads.

    Args:
        key: 16 secret bytes. Two streams with equal key and nonce are equal.
        nonce: 16 bytes, the initial counter block; its last 8 bytes should be zero to leave room to count.
    """

    def __init__(self, key: bytes, nonce: bytes = bytes(NONCE_BYTES)) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a stream key has {KEY_BYTES} bytes, not {len(key)}")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a stream nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        self._key = key
        self._nonce = nonce
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()

    @classmethod
    def from_os_entropy(cls) -> KeyStream:
        """A stream whose key is drawn from the operating system and kept nowhere else."""
        return cls(os.urandom(KEY_BYTES))

    def fill(self, out: _Words) -> _Words:
        """Overwrites a C-contiguous array with fresh stream bytes and returns it."""
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("a stream fills only writable, C-contiguous arrays")
        if not out.size:
            return out
        target = out.reshape(-1).view(np.uint8).data
        for start in range(0, len(target), CHUNK_BYTES):
            piece = target[start : start + CHUNK_BYTES]
            self._encryptor.update_into(_ZEROS[: len(piece)], piece)
        return out

    def words(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[Any]:
        """Fresh uniform unsigned integers over the whole range of `dtype`."""
        kind = np.dtype(dtype)
        if kind.kind != "u":
            raise ValueError(f"a stream gives unsigned integers, not {kind}")
        return self.fill(np.empty(shape, dtype=kind))

    def mask(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Adds a fresh mask to a C-contiguous array of unsigned integers, in place, and returns the mask."""
        mask = np.empty_like(values)
        flat, words = values.reshape(-1), mask.reshape(-1)
        size = CHUNK_BYTES // values.itemsize
        for start in range(0, flat.size, size):
            piece = flat[start : start + size]
            np.add(piece, self.fill(words[start : start + size]), out=piece)
        return mask

    def _rewind(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._encryptor.reset_nonce(nonce)

    def _from_block(self, block: int) -> KeyStream:
        """The same stream from a later block of 16 bytes on; for block 0 this very object."""
        if block == 0:
            return self
        counter = (int.from_bytes(self._nonce, "big") + block) % (1 << 128)
        return KeyStream(self._key, counter.to_bytes(NONCE_BYTES, "big"))


def apply_masks(
    out: npt.NDArray[Any], plus: Sequence[KeyStream], minus: Sequence[KeyStream]
) -> npt.NDArray[Any]:
    """Adds the words of unused streams to unsigned integers and subtracts those of others, in place."""
    flat = out.reshape(-1)
    size = CHUNK_BYTES // out.itemsize

    def part(first: int, last: int) -> None:
        block = first * out.itemsize // BLOCK_BYTES
        added = [stream._from_block(block) for stream in plus]
        taken = [stream._from_block(block) for stream in minus]
        scratch = np.empty(min(size, last - first), dtype=out.dtype)
        for start in range(first, last, size):
            piece = flat[start : min(start + size, last)]  # all masks go on while it is in the cache
            words = scratch[: piece.size]
            for stream in added:
                np.add(piece, stream.fill(words), out=piece)
            for stream in taken:
                np.subtract(piece, stream.fill(words), out=piece)

    in_parts(flat.size, size, part)
    return out


def round_nonce(round: int, attempt: int) -> bytes:  # noqa: A002
    """The 16-byte nonce of a round and attempt; its last 8 bytes are zero and left to count."""
    return _ROUND_NONCE.pack(round, attempt)


class MaskStream:
    """The masks of one pair of parties, or of one round key: a stream for each (round, attempt).

    The cipher is kept, which is several times faster for small arrays than a fresh one. Round and attempt
    fill the upper half of the counter block, the lower half counts: no two attempts ever share a block.

    Args:
        key: 16 secret bytes, used for nothing else.
    """

    def __init__(self, key: bytes) -> None:
        self._stream = KeyStream(key)

    def at(self, round: int, attempt: int) -> KeyStream:  # noqa: A002
        """The stream of one round and attempt, from its beginning; ends the one given out before."""
        self._stream._rewind(round_nonce(round, attempt))
        return self._stream
