"""Operands larger than memory: masks that are made anew from their seed, words that lie in a file.

A mask is secret, so it never goes to disk: its stream is run through again for every product. Masked operands
are uniform words that others hold anyway; large ones lie in a file without a name, which ends with the
process, and what was read of it is given back at once.
"""

from __future__ import annotations

import copy
import itertools
import math
import mmap
import tempfile
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from securevfl.errors import RunError, WireError
from securevfl.files import give_back
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import BLOCK_BYTES, KEY_BYTES, NONCE_BYTES, KeyStream, derive_key

Rows = npt.NDArray[np.int64]
Left: TypeAlias = Any
"""What a ring product takes on the left: an array, a `SeedMask`, or what was `Chosen` of one of them."""
HELD_BYTES = 1 << 28
"""Arrays up to this size stay in memory."""
PIECE = 1 << 14
"""Words of a mask that are made at a time: they stay in the cache."""
RUN = 256
"""Neighbouring records from which on finding their place in a stream pays."""


def large_words(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint64) -> Ring:
    """An array to be filled; a large one lies in a file.

    Raises:
        RunError: There is no room for the file.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size <= HELD_BYTES:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as fault:
        raise RunError(
            f"no room for {size >> 20} MB of masked words in {tempfile.gettempdir()} ({fault.strerror}); "
            "make room, or name another folder in TMPDIR"
        ) from None
    return np.frombuffer(mapped, dtype).reshape(shape)


def held_pieces(array: npt.NDArray[Any]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Parts of an array along its first axis, of which only one at a time is held in memory."""
    height = max(1, HELD_BYTES // max(1, array.nbytes // max(1, len(array))))
    for start in range(0, len(array), height):
        yield slice(start, start + height), array[start : start + height]
        give_back(array)


class Chosen:
    """Some records of an operand, in long runs of neighbours: they are used where they are, without a copy.

    Args:
        whole: The operand, or its mask.
        rows: The records.
        starts: Where in `rows` each run begins.
    """

    ndim = 2

    def __init__(self, whole: npt.NDArray[Any] | SeedMask, rows: Rows, starts: Rows) -> None:
        self._whole, self._firsts = whole, rows[starts]
        self._runs = [slice(*ends) for ends in itertools.pairwise([*starts.tolist(), len(rows)])]
        self.shape, self.dtype = (whole.shape[0], len(rows)), whole.dtype

    def pieces(self) -> Iterator[tuple[slice, Ring]]:
        """Places in the choice, and the columns there."""
        for run, first in zip(self._runs, self._firsts.tolist(), strict=True):
            here = slice(first, first + run.stop - run.start)
            yield run, self._whole.run(here) if isinstance(self._whole, SeedMask) else self._whole[:, here]
        if isinstance(self._whole, np.ndarray):
            give_back(self._whole)


def choose(whole: Left, rows: Rows | None) -> Left:
    """Some records of an operand or of its mask; all by default."""
    if rows is None:
        return whole
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    if len(rows) >= RUN * len(starts):
        return Chosen(whole, rows, starts)
    return whole.take(rows) if isinstance(whole, SeedMask) else np.ascontiguousarray(whole[:, rows])


def operand_mask(seed: bytes, shape: tuple[int, int], dtype: npt.DTypeLike = np.uint64) -> Ring | SeedMask:
    """The mask of a static operand as `expand` makes it; a large one is made anew for every product."""
    mask = SeedMask(seed, "operand", shape, dtype)
    return mask if math.prod(shape) * mask.dtype.itemsize > HELD_BYTES else mask.whole()


def masked_operand(seed: bytes, operand: npt.NDArray[Any], dtype: npt.DTypeLike = np.uint64) -> Ring:
    """The operand less the words that `expand` makes of the seed, column by column."""
    words = large_words(operand.shape, dtype)
    signed = np.dtype(f"i{words.itemsize}")
    stream = stream_of(seed, "operand")
    for place, piece in held_pieces(words):
        for column, values in zip(piece, operand[place], strict=True):
            np.subtract(values.astype(signed).view(words.dtype), stream.fill(column), out=column)
    return words


def blocks(count: int) -> Iterator[slice]:
    """Records in pieces that stay in the cache."""
    return (slice(start, start + PIECE) for start in range(0, count, PIECE))


def stream_of(seed: bytes, purpose: str) -> KeyStream:
    """The stream that `expand` takes words of."""
    return KeyStream(_key_of(seed, purpose))


def _key_of(seed: bytes, purpose: str) -> bytes:
    if len(seed) != KEY_BYTES:
        raise WireError(f"a seed has {KEY_BYTES} bytes, not {len(seed)}")
    return derive_key(seed, purpose=f"sealed/{purpose}")


class SeedMask:
    """The words that `expand` makes of a seed, (width, records), made again whenever they are needed.

    Args:
        seed: The seed.
        purpose: As `expand` takes it.
        shape: Width and records.
        dtype: Of the words.
    """

    ndim = 2

    def __init__(
        self, seed: bytes, purpose: str, shape: tuple[int, int], dtype: npt.DTypeLike = np.uint64
    ) -> None:
        self._key = _key_of(seed, purpose)
        self._stream = KeyStream(self._key)
        self.shape, self.dtype = shape, np.dtype(dtype)

    def _fill(self, start: int, out: Ring) -> Ring:
        """Words from a place of the stream on."""
        each = BLOCK_BYTES // self.dtype.itemsize
        # A cipher that goes on elsewhere costs a tenth of a new one.
        self._stream._rewind((start // each).to_bytes(NONCE_BYTES, "big"))
        self._stream.words(start % each, self.dtype)
        return self._stream.fill(out)

    def __getitem__(self, first: slice) -> SeedMask:
        """The first columns."""
        other = copy.copy(self)
        other.shape = (min(self.shape[0], first.stop), self.shape[1])
        return other

    def whole(self) -> Ring:
        """All of it."""
        return KeyStream(self._key).words(self.shape, self.dtype)

    def take(self, rows: Rows) -> Ring:
        """The columns of some records, wherever they are: the whole stream is run through."""
        width, records = self.shape
        out, whole = np.empty((width, len(rows)), self.dtype), np.empty(records, self.dtype)
        for column in range(width):
            out[column] = self._fill(column * records, whole)[rows]
        return out

    def run(self, here: slice) -> Ring:
        """The columns of neighbouring records."""
        width, records = self.shape
        out = np.empty((width, here.stop - here.start), self.dtype)
        for column, words in enumerate(out):
            self._fill(column * records + here.start, words)
        return out

    def product(self, right: Ring) -> Ring:
        """This matrix times (records, columns), a piece of the stream at a time."""
        width, records = self.shape
        out = np.zeros((width, right.shape[1]), self.dtype)
        turned = np.ascontiguousarray(right.T)
        stream, words = KeyStream(self._key), np.empty(min(PIECE, records), self.dtype)
        for column in range(width):
            for start in range(0, records, PIECE):
                piece = stream.fill(words[: min(PIECE, records - start)])
                out[column] += np.einsum("n,kn->k", piece, turned[:, start : start + len(piece)])
        return out
