"""Views: what one observer could read, in order, exactly as it arrived.

A view is a folder with ``messages.jsonl`` (one line per message) and ``arrays.bin`` (their arrays, and byte
strings such as ciphertexts). It holds private material, so it is written only on request and readable by its
owner alone. It also holds what the observer itself sent, because it knows that too, and the totals that it
opened with secrets of its own.

Of masked words a view keeps a sketch: a digest, a few of the words and the one nearest to zero, enough to see
that masks are uniform and fresh; of ciphertexts a digest. Words and ciphertexts themselves are kept only on
request; among members that may cheat that takes in their seeds, under a key that only the dealer has. Seeds
themselves are never written: with them, views of two members would give away each other's rows.

Every observer keeps, in any case, the newest ledger head it received from each owner (``receipts/``):
a few bytes that hold no data and expose a ledger that was cut or rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from securevfl.errors import RunError
from securevfl.files import appending, clear_errors, read_json, write_text
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.payloads import keep_newest
from securevfl.privacy.schemas import MESSAGES as DECLARED
from securevfl.protocols.wire import Value

Places: TypeAlias = "array[int]"
MESSAGES = "messages.jsonl"
ARRAYS = "arrays.bin"
BYTES = "bytes"  # marks a byte string among the arrays
_PIECE = 1 << 16  # stretches that are compared at a time
SAMPLE = 64
"""Words of a masked array that a sketch keeps."""
HELD, MOST_HELD = 1 << 16, 1 << 26
"""Bytes that wait before they are written; and at most, while a full disk does not take them."""
_STEP = 2654435761  # odd, far from any power of two: the places of a sample follow no pattern of the array
OPENED = "opened-total"
"""Kind of the line that holds a total over all other parties, which the observer decrypted or unmasked."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One message of a view.

    Attributes:
        time: When it arrived or left, in the run's time units.
        sent: True where the observer itself sent it.
        fields: Its content; arrays are read-only and loaded on first use of the file. Words that the view
            did not keep are left out.
    """

    index: int
    time: float
    sender: str
    receiver: str
    kind: str
    number: int
    reply_to: int | None
    sent: bool
    head: Head | None
    fields: dict[str, Any]
    size: int

    @property
    def at_home(self) -> bool:
        """True for what the observer worked out itself: nobody sent it."""
        return self.sender == self.receiver


class Sketch(NamedTuple):
    """What is kept of masked words, or of a seed.

    Attributes:
        digest: SHA-256 of the bytes.
        least: Distance from zero, on the ring, of the word that is nearest to it.
        sample: The first words and some others; none of a seed.
    """

    digest: str
    least: int
    sample: npt.NDArray[Any]


def sketch_of(words: npt.NDArray[Any]) -> Sketch:
    """The sketch of an array of ring words."""
    flat = np.ascontiguousarray(words).reshape(-1)
    digest = hashlib.sha256(flat.tobytes()).hexdigest()
    if not flat.size:
        return Sketch(digest, 0, flat)
    ring = flat.view(f"u{flat.itemsize}")
    least = int(min(ring.min(), (-ring).min()))  # both wrap around: the distance from zero on either side
    return Sketch(digest, least, flat[sampled(digest, flat.size)])


def sampled(digest: str, size: int) -> npt.NDArray[np.int64]:
    """The places of the words that a sketch keeps of so many."""
    if size <= SAMPLE:
        return np.arange(size)
    places = (np.arange(SAMPLE // 2, dtype=np.uint64) * _STEP + int(digest[:8], 16)) % size
    return np.concatenate([np.arange(SAMPLE // 2), places.astype(np.int64)])


class _Tail:
    """What is to be written at the end of a file: all that a disk has not taken yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, bytearray()
        self._file = appending(path, binary=True)

    def write(self) -> None:
        """Hands it to the operating system.

        Raises:
            RunError: Some of it was not taken; it goes on waiting.
        """
        with clear_errors(self.path):
            while self.waiting:
                del self.waiting[: os.write(self._file.fileno(), self.waiting)]

    def close(self) -> None:
        self._file.close()


class ViewWriter:
    """Appends messages to one observer's view. While a disk is full they wait in memory.

    Args:
        folder: Where.
        observer: Whose.
        words: False keeps only sketches of masked words and ciphertexts. Seeds are not kept in any case.
    """

    def __init__(self, folder: Path, observer: str, *, words: bool = True) -> None:
        self.observer, self.words = observer, words
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        self._count = _repair(folder)
        self._lines, self._arrays = _Tail(folder / MESSAGES), _Tail(folder / ARRAYS)
        self._offset = (folder / ARRAYS).stat().st_size
        self._most = HELD

    def record(self, message: Packet, *, time: float, sent: bool) -> None:
        """Writes one message.

        Raises:
            RunError: More wait already than memory is meant for.
        """
        scalars: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        sketches: dict[str, Any] = {}
        declared = DECLARED.get(message.kind)
        for name, value in message.fields.items():
            if not isinstance(value, np.ndarray | bytes):
                scalars[name] = value
                continue
            array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
            secret = declared is not None and name in declared.secret
            opaque = declared is not None and name in declared.opaque
            masked = declared is not None and name in declared.uniform
            if secret or opaque:
                sketches[name] = [hashlib.sha256(array.tobytes()).hexdigest(), 0, self._store(array[:0])]
            elif masked:
                digest, least, sample = sketch_of(array)
                sketches[name] = [digest, least, self._store(sample)]
            dropped = secret or ((masked or opaque) and not self.words)
            place = [None, array.dtype.str, list(array.shape)] if dropped else self._store(array)
            arrays[name] = [*place, BYTES] if isinstance(value, bytes) else place
        line = {
            "index": self._count,
            "time": time,
            "sender": message.sender,
            "receiver": message.receiver,
            "kind": message.kind,
            "number": message.number,
            "reply_to": message.reply_to,
            "sent": sent,
            "head": message.head,
            "size": message.size(),
            "fields": scalars,
            "arrays": arrays,
            "sketches": sketches,
        }
        self._lines.waiting += json.dumps(line).encode() + b"\n"
        self._count += 1
        self._write_some()

    def _write_some(self) -> None:
        """Writes what waits, once that is worth it."""
        waiting = len(self._lines.waiting) + len(self._arrays.waiting)
        if waiting < self._most:
            return
        try:
            self.flush()
            self._most = HELD
        except RunError:
            if waiting > MOST_HELD:
                raise
            self._most = 2 * waiting

    def note(self, kind: str, fields: Mapping[str, Value], *, address: str, time: float) -> None:
        """Writes down what the observer's role at `address` worked out with secrets that no view holds."""
        message = Packet(kind=kind, sender=address, receiver=address, fields=fields)
        self.record(message, time=time, sent=False)

    def _store(self, array: npt.NDArray[Any]) -> list[Any]:
        place = [self._offset, array.dtype.str, list(array.shape)]
        self._arrays.waiting += np.ascontiguousarray(array).tobytes()
        self._offset += array.nbytes
        return place

    def flush(self) -> None:
        """Hands everything to the operating system, arrays first, so that no line points to nothing.

        Raises:
            RunError: Not everything could be written; a later call goes on with the rest.
        """
        self._arrays.write()
        self._lines.write()

    def close(self) -> None:
        """Flushes and closes the files."""
        try:
            self.flush()
        finally:
            self._arrays.close()
            self._lines.close()


def _repair(folder: Path) -> int:
    """Drops a last line that a crash tore and returns the number of whole ones."""
    path = folder / MESSAGES
    if not path.exists():
        return 0
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole != len(raw):
        os.truncate(path, whole)
    return raw.count(b"\n")


class View:
    """Reads one observer's view.

    Raises:
        RunError: The folder holds no view, or its files do not fit each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.observer = self.folder.name
        path = self.folder / MESSAGES
        if not path.is_file():
            raise RunError(f"{folder} holds no view; record views with --record-views")
        self._path = path
        arrays = self.folder / ARRAYS
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if arrays.is_file() and arrays.stat().st_size:
            self._buffer = np.memmap(arrays, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return sum(1 for _ in self.headers())

    def headers(self) -> Iterator[dict[str, Any]]:
        """The lines of the view as they were written, one at a time; arrays are named, not loaded.

        Raises:
            RunError: A line is damaged, or the file of arrays ends before one of its arrays.
        """
        with self._path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    header = json.loads(line)
                    samples = [place for _, _, place in header["sketches"].values()]
                    ends = [
                        place[0] + _size(place)
                        for place in (*header["arrays"].values(), *samples)
                        if place[0] is not None
                    ]
                except (
                    ValueError,
                    KeyError,
                    TypeError,
                    AttributeError,
                    IndexError,
                    RecursionError,
                ) as error:
                    raise RunError(f"{self._path} is damaged, or of another version: {error!r}") from error
                if max(ends, default=0) > self._buffer.size:
                    raise RunError(
                        f"{self.folder / ARRAYS} is cut: message {header['index']} needs {max(ends)} bytes; "
                        "copy the run again"
                    )
                yield header

    def array(self, header: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
        """One array of a line.

        Raises:
            RunError: The view kept a sketch of it only.
        """
        place = header["arrays"][name]
        if place[0] is None:
            raise RunError(
                f"{self.folder} holds only digests of {name!r}; train with --set record_words=true"
            )
        return self.at(place)

    def sketch(self, header: Mapping[str, Any], name: str) -> Sketch:
        """What a line keeps of masked words or of a seed."""
        digest, least, place = header["sketches"][name]
        return Sketch(digest, least, self.at(place))

    def at(self, place: Sequence[Any]) -> npt.NDArray[Any]:
        """The array at a place that a line names: offset, type, shape."""
        offset, dtype, shape = place[:3]
        end = offset + _size(place)
        return np.frombuffer(self._buffer[offset:end].tobytes(), np.dtype(dtype)).reshape(shape)

    def same_bytes(self, first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], width: int) -> bool:
        """Whether the stretches of `width` bytes at these places of the arrays are the same, pair by pair."""
        reach = np.arange(width)
        for start in range(0, len(first), _PIECE):
            pairs = [places[start : start + _PIECE, None] + reach for places in (first, second)]
            if not np.array_equal(self._buffer[pairs[0]], self._buffer[pairs[1]]):
                return False
        return True

    def __getitem__(self, index: int) -> Seen:
        with self._path.open("rb") as lines:
            lines.seek(self._starts[index])
            return self._read(json.loads(lines.readline()))

    @cached_property
    def _starts(self) -> Places:
        """Where each line begins."""
        starts = array("Q", [0])
        with self._path.open("rb") as lines:
            for line in lines:
                starts.append(starts[-1] + len(line))
        return starts

    def index(self, *names: str, sent: bool | None = None) -> dict[tuple[Any, ...], Places]:
        """Places of the messages by some of their properties, in order, 8 bytes each; nothing is loaded."""
        found: dict[tuple[Any, ...], Places] = {}
        for place, line in enumerate(self.headers()):
            if sent in (None, line["sent"]):
                key = tuple(line[name] for name in names)
                found.setdefault(key, array("Q")).append(place)
        return found

    def __iter__(self) -> Iterator[Seen]:
        return self.messages()

    def messages(self, *kinds: str, sender: str | None = None, sent: bool | None = None) -> Iterator[Seen]:
        """The messages in order, optionally only some kinds, one sender, or one direction."""
        for line in self.headers():
            if kinds and line["kind"] not in kinds:
                continue
            if sender not in (None, line["sender"]) or sent not in (None, line["sent"]):
                continue
            yield self._read(line)

    def _read(self, line: dict[str, Any]) -> Seen:
        fields = dict(line["fields"])
        for name, place in line["arrays"].items():
            if place[0] is not None:  # of masked words there may be a sketch only
                values = self.at(place)
                fields[name] = values.tobytes() if BYTES in place[3:] else values
        rest = {name: line[name] for name in ("index", "time", "sender", "receiver", "kind", "number")}
        head = None if line["head"] is None else Head(*line["head"])
        return Seen(
            **rest, reply_to=line["reply_to"], sent=line["sent"], head=head, fields=fields, size=line["size"]
        )


def _size(place: Sequence[Any]) -> int:
    """Bytes of an array, by its place in the file: offset, type, shape."""
    return int(math.prod(place[2]) * np.dtype(place[1]).itemsize)


class Receipts:
    """The newest ledger head that an observer received from each owner."""

    def __init__(self, observer: str) -> None:
        self.observer = observer
        self.heads: dict[str, Head] = {}

    def note(self, head: Head) -> None:
        """Keeps the head if it is newer than the one kept."""
        keep_newest(self.heads, head)

    def save(self, run_folder: Path) -> None:
        """Writes the heads, replacing the file in one step."""
        write_text(run_folder / "receipts" / f"{self.observer}.json", json.dumps(self.heads, indent=1))

    def load(self, run_folder: Path) -> None:
        """Takes up the heads of an earlier process."""
        path = run_folder / "receipts" / f"{self.observer}.json"
        if path.exists():
            self.heads = _heads(path)


def _heads(path: Path) -> dict[str, Head]:
    """The heads in a file of receipts.

    Raises:
        RunError: It holds something else.
    """
    try:
        return {str(owner): _head(head) for owner, head in read_json(path).items()}
    except (AttributeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}; copy the run again") from error


def _head(content: Sequence[Any]) -> Head:
    found = Head(*content)
    if type(found.owner) is not str or type(found.position) is not int or type(found.digest) is not str:
        raise TypeError("a head is no position with a digest")
    return found


def read_heads(run_folder: Path) -> list[Head]:
    """All heads that the observers of a run hold: their receipts, and their views where recorded."""
    return sorted({head for _, heads in _kept_heads(run_folder) for head in heads})


def holders_of(run_folder: Path, head: Head) -> list[str]:
    """The observers who keep this head; what they keep is their word."""
    return sorted({observer for observer, heads in _kept_heads(run_folder) if head in heads})


def _kept_heads(run_folder: Path) -> Iterator[tuple[str, set[Head]]]:
    for path in sorted((run_folder / "receipts").glob("*.json")):
        yield path.stem, set(_heads(path).values())
    for folder in sorted((run_folder / "views").glob("*")):
        yield folder.name, {head for head in _view_heads(folder) if head is not None}


def _view_heads(folder: Path) -> Iterator[Head | None]:
    path = folder / MESSAGES
    try:
        for seen in View(folder).headers() if path.is_file() else ():
            if seen["head"] is not None and not seen["sent"]:
                yield _head(seen["head"])
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error!r}; copy the run again") from error
