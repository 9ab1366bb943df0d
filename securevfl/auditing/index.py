"""What an audit remembers of messages and entries: a few numbers each, never what they hold.

Views and ledgers are read line by line. Where a later line may refer to an earlier one, or be its like, the
earlier one leaves a fixed number of bytes here: its place in a file, or 64 bits of a hash.
"""

from __future__ import annotations

import bisect
import json
import tempfile
import weakref
from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from securevfl.privacy.chain import Entry, LedgerReader

_BITS = 64
_WORD = (1 << _BITS) - 1


def word(key: object) -> int:
    """64 bits that stand for a key, the same in this process alone."""
    return hash(key) & _WORD


class Entries(Sequence[Entry]):
    """A ledger, verified once; entries are read from the file when they are asked for. 8 bytes each.

    Args:
        path: ``ledger/<owner>.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self._reader = LedgerReader(path)
        self._starts = array("Q", [0])
        self._reader.end()
        with path.open("rb") as lines:
            for line in lines:
                self._starts.append(self._starts[-1] + len(line))
        self._get = lru_cache(maxsize=8)(self._read)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[Entry]:
        return self._reader.entries()

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._get(each) for each in range(*index.indices(len(self)))]
        return self._get(range(len(self))[index])

    def _read(self, index: int) -> Entry:
        with self._reader.path.open("rb") as file:
            file.seek(self._starts[index])
            content = json.loads(file.readline())
        content.pop("signature")
        return Entry(index=index, digest=content.pop("hash"), content=content)


class AskedRecords(NamedTuple):
    """What later messages refer to: the records of a call or of an announced round, and what it is for."""

    rows: tuple[int, str, tuple[int, ...]]
    purpose: str
    by: str


class Calls:
    """Lists of records in a view, by whom they are named and under which number. 27 bytes each."""

    def __init__(self) -> None:
        self._forms: dict[tuple[str, str, str], int] = {}
        self._named: list[tuple[str, str, str]] = []
        self._of: dict[str, tuple[array[int], array[int], array[int], array[int], bytearray]] = {}

    def put(self, name: str, number: int, asked: AskedRecords) -> None:
        """Keeps one; the last under its number counts."""
        offset, dtype, (count,) = asked.rows
        form = self._forms.setdefault((dtype, asked.purpose, asked.by), len(self._forms))
        if form == len(self._named):
            self._named.append((dtype, asked.purpose, asked.by))
        if name not in self._of:
            self._of[name] = array("q"), array("Q"), array("Q"), array("H"), bytearray()
        lists = self._of[name]
        place = bisect.bisect_left(lists[0], number)
        if place < len(lists[0]) and lists[0][place] == number:
            for each, value in zip(lists, (number, offset, count, form, 0), strict=True):
                each[place] = value
        else:
            for each, value in zip(lists, (number, offset, count, form, 0), strict=True):
                each.insert(place, value)

    def get(self, name: str, number: int | None) -> AskedRecords | None:
        """The one under a number; None where there is none."""
        place = self._place(name, number)
        if place is None:
            return None
        _, offsets, counts, forms, _ = self._of[name]
        dtype, purpose, by = self._named[forms[place]]
        return AskedRecords((offsets[place], dtype, (counts[place],)), purpose, by)

    def mark(self, name: str, number: int | None) -> bool:
        """Marks one; True where it was marked before."""
        place = self._place(name, number)
        if place is None:
            return False
        marks = self._of[name][4]
        before, marks[place] = bool(marks[place]), 1
        return before

    def _place(self, name: str, number: int | None) -> int | None:
        if number is None or name not in self._of:
            return None
        numbers = self._of[name][0]
        place = bisect.bisect_left(numbers, number)
        return place if place < len(numbers) and numbers[place] == number else None


class Log:
    """Values by key, in order; whether keys return is asked once, at the end. 20 bytes each.

    Keys and values are 64 bits of hashes: n of them agree by chance with probability at most n^2 / 2^65.
    """

    def __init__(self) -> None:
        self._keys, self._values, self._about = array("Q"), array("Q"), array("I")

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, value: int, about: int) -> None:
        """Takes a value under a key, and a number that says what it is about."""
        self._keys.append(key)
        self._values.append(value)
        self._about.append(about)

    @property
    def odds(self) -> float:
        """At most the probability that two different keys are taken for one."""
        return len(self) ** 2 / 2.0 ** (_BITS + 1)

    def others(self) -> list[tuple[int, int]]:
        """(about, value) of what is under a key that had another value at first, in order."""
        order, first = self._groups()
        values = np.frombuffer(self._values, np.uint64)[order]
        return self._at(order[values != values[first]])

    def beyond(self, allowed: int) -> list[tuple[int, int]]:
        """(about, value) of what is under a key that so many are under already, in order."""
        order, first = self._groups()
        return self._at(order[np.arange(len(order)) - first >= allowed])

    def _at(self, places: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        return [(self._about[place], self._values[place]) for place in np.sort(places).tolist()]

    def _groups(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Places in order of their keys, and where among these the first of each key is."""
        keys = np.frombuffer(self._keys, np.uint64)
        order = np.argsort(keys, kind="stable")
        new = np.ones(len(order), bool)
        new[1:] = keys[order[1:]] != keys[order[:-1]]
        return order, np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))


class Balance:
    """Whether everything that was received was sent, by sums of hashes in a few parts.

    Hashes are keyed afresh in every process, so that nobody can choose messages whose sums agree.
    """

    PARTS = 64

    def __init__(self) -> None:
        self._sums = [0] * self.PARTS

    def add(self, key: int, *, sent: bool) -> None:
        """Takes a message as its sender or its receiver has it."""
        self._sums[key % self.PARTS] += key if sent else -key

    def open(self) -> frozenset[int]:
        """The parts in which the two do not have the same."""
        return frozenset(part for part, total in enumerate(self._sums) if total & _WORD)


_IN_MEMORY = 1 << 13


def _nameless(owner: object) -> tempfile.SpooledTemporaryFile[bytes]:
    """A file without a name, in memory while it is small, that goes with its owner."""
    file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - it goes with its owner
    weakref.finalize(owner, file.close)
    return file


class Lines(MutableSequence[str]):
    """Lines of text in a file without a name; only the last can be changed. 8 bytes each."""

    def __init__(self) -> None:
        self._file = _nameless(self)
        self._starts = array("Q", [0])
        self._last: str | None = None

    def __len__(self) -> int:
        return len(self._starts) - 1 + (self._last is not None)

    def append(self, value: str) -> None:
        """Takes a line; the one before it goes to the file."""
        if self._last is not None:
            raw = self._last.encode()
            self._file.seek(0, 2)
            self._file.write(raw)
            self._starts.append(self._starts[-1] + len(raw))
        self._last = value

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        if place == len(self) - 1:
            return self._last
        self._file.seek(self._starts[place])
        return self._file.read(self._starts[place + 1] - self._starts[place]).decode()

    def __setitem__(self, index: Any, value: Any) -> None:
        if range(len(self))[index] != len(self) - 1:
            raise IndexError(f"line {index} is written; only the last of {len(self)} can be changed")
        self._last = value

    def __delitem__(self, index: Any) -> None:
        raise IndexError("lines that are written stay")

    def insert(self, index: int, value: str) -> None:
        """Only at the end."""
        if index < len(self):
            raise IndexError(f"line {index} is written; the next is {len(self)}")
        self.append(value)


Digests = npt.NDArray[np.void]


class Spool:
    """Digests of 16 bytes in a file without a name, read in parts that fit into little memory."""

    WIDTH = 16
    _PART, _MOST_PARTS, _PIECE = 1 << 17, 64, 1 << 12

    def __init__(self) -> None:
        self._file = _nameless(self)
        self.count = 0

    def add(self, digests: bytes) -> None:
        """Takes some, one after the other."""
        self._file.write(digests)
        self.count += len(digests) // self.WIDTH

    def part(self, number: int, of: int) -> Digests:
        """Those whose first byte says that they are in this part, of so many."""
        self._file.seek(0)
        found = []
        while raw := self._file.read(self._PIECE * self.WIDTH):
            piece = np.frombuffer(raw, f"V{self.WIDTH}")
            first = np.frombuffer(raw, np.uint8)[:: self.WIDTH].astype(np.int64)
            found.append(piece if of == 1 else piece[first * of // 256 == number])
        return np.concatenate(found) if found else np.empty(0, f"V{self.WIDTH}")

    @classmethod
    def parts(cls, *spools: Spool) -> Iterator[list[Digests]]:
        """All digests of several spools, part by part, each spool's apart."""
        size = sum(spool.count for spool in spools) * cls.WIDTH
        of = min(cls._MOST_PARTS, 1 + size // cls._PART)
        for number in range(of):
            yield [spool.part(number, of) for spool in spools]
