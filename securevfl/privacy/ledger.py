"""The ledger: what one owner let out, in order, chained by hash and signed.

One JSON line per entry. Each entry names the hash of the one before it, and an Ed25519 signature of an
entry's hash therefore covers all entries before it: an edit, a removal or a new order breaks the chain.
Entries that are written together carry one signature, on the last of them; nothing is read or left on disk
whose end is not signed. The hash of the newest entry (the head) travels with every message: a ledger whose
tail was cut or rewritten, even with fresh keys, contradicts the heads that the observers keep.

A process that writes to a ledger first writes a ``session`` entry with a fresh public key. The private key
lives in memory alone and ends with the process; nothing in a run folder can sign.

Entries are flushed and synced to disk before the message leaves, so that a crash can only over-count.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from securevfl.accountants.records import ReleaseRecord
from securevfl.errors import LedgerError, RunError
from securevfl.files import appending, read_json, sync
from securevfl.privacy.chain import (
    ALIGNMENT,
    DEVIATION,
    GENESIS,
    NOTES,
    PHASE,
    SCORING,
    SESSION,
    Entry,
    LedgerReader,
    canonical,
    digest_of,
    line_of,
    signed_end,
)
from securevfl.privacy.messages import Head
from securevfl.privacy.rows import Rows

FORMAT = 2
"""Of sessions that are written. Format 1, in older ledgers, has a signature on every entry."""
_MOST_DIGITS = 15  # of a row index in a list


def _parts(content: Mapping[str, Any]) -> tuple[str, str, str]:
    """An entry in its one form, in three parts: index and last hash of an entry stand between them."""
    before, between, after = (
        canonical({key: value for key, value in content.items() if low < key < high})[1:-1]
        for low, high in (("", "index"), ("index", "previous"), ("previous", "~"))
    )
    return before and before + ",", between and between + ",", after and "," + after


@lru_cache(maxsize=256, typed=True)
def _form(
    owner: str,
    kind: str,
    observers: tuple[str, ...],
    mechanism: str,
    clip: float | None,
    sigma: float | None,
    sensitivity: float | None,
    vectors: int,
    ids_visible: bool,
    mode: str,
    epsilon: float | None,
    assumption: str,
) -> tuple[str, str, str]:
    """The parts of a release's entry, its rows left out: a run releases the like again and again."""
    content = {
        "owner": owner,
        "kind": kind,
        "observers": observers,
        "mechanism": mechanism,
        "clip": clip,
        "sigma": sigma,
        "sensitivity": sensitivity,
        "vectors": vectors,
        "ids_visible": ids_visible,
        "mode": mode,
    }
    content |= {"epsilon": epsilon} if epsilon is not None else {}
    return _parts(content | ({"assumption": assumption} if assumption else {}))


def rows_to_text(rows: Rows) -> str:
    """Writes distinct row indices as sorted ranges."""
    if rows.size == 0:
        return ""
    known, text = _written[0]
    if rows is known:
        return text
    text = _ranges(rows)
    if rows.size <= _MOST_KEPT and not rows.flags.writeable and type(rows.base) in (bytes, type(None)):
        _written[0] = rows, text  # what cannot change need not be written anew
    return text


_MOST_KEPT = 1 << 16
_written: list[tuple[Rows | None, str]] = [(None, "")]  # the rows of the last entry, and their text


def _ranges(rows: Rows) -> str:
    ordered = np.sort(rows, kind="stable")  # which takes no time where they are in order
    gaps = ordered[1:] - ordered[:-1]
    if ordered[0] < 0 or not gaps.all():
        raise LedgerError("row indices must be distinct and not negative")
    breaks = gaps != 1
    if breaks.all():
        return repr(ordered.tolist())[1:-1].replace(" ", "")
    firsts = ordered[np.concatenate(([True], breaks))].tolist()
    lasts = ordered[np.concatenate((breaks, [True]))].tolist()
    pieces = [
        str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    ]
    return ",".join(pieces)


def rows_from_text(text: str) -> Rows:
    """Reads what `rows_to_text` wrote."""
    if not text:
        return np.empty(0, np.int64)
    raw = np.frombuffer(text.encode(), np.uint8)
    places = np.flatnonzero((raw == ord(",")) | (raw == ord("-")))
    marks, lengths = raw[places], np.diff(places, prepend=-1, append=len(raw)) - 1
    digits = np.count_nonzero((raw >= ord("0")) & (raw <= ord("9")))
    ranges = marks == ord("-")
    if digits + len(places) != len(raw) or lengths.min() < 1 or lengths.max() > _MOST_DIGITS:
        raise LedgerError(f"row list {text[:40]!r} cannot be read")
    if (ranges[1:] & ranges[:-1]).any():
        raise LedgerError(f"row list {text[:40]!r} cannot be read")
    numbers = np.fromstring(text.replace("-", ","), np.int64, sep=",")
    is_first = np.append(marks == ord("-"), False)
    firsts = np.append(True, ~is_first[:-1])  # a number after a dash ends its range
    starts = numbers[firsts]
    ends = np.where(is_first[firsts], np.append(numbers[1:], 0)[firsts], starts)
    sizes = ends - starts + 1
    if (sizes < 1).any():
        raise LedgerError(f"row list {text[:40]!r} cannot be read")
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.asarray(np.repeat(starts, sizes) + np.arange(int(sizes.sum()), dtype=np.int64) - before)


class Ledger:
    """Writes one owner's ledger.

    Args:
        owner: The party whose releases are written.
        path: The file, or None to keep the ledger in memory (for tests and throw-away runs).
        reproducible: True where noise is reproducible; the session entry then says that nothing is promised.
        agreement: Digest of what the organisations of a run over a network agreed on and signed.

    Attributes:
        head: The newest entry.
        released: The newest entry that messages may name: a release, or the session that comes before any.
        releases: How many releases it holds.
    """

    def __init__(
        self, owner: str, path: Path | None = None, *, reproducible: bool = False, agreement: str = ""
    ) -> None:
        self.owner = owner
        self.agreement = agreement
        self.path = path
        self.releases = 0
        self._lines: MutableSequence[str] = []  # of a ledger on disk: what is not written yet
        self._together = False
        self._file: IO[bytes] | None = None
        self._lock, self._size = threading.RLock(), 0
        index, digest = -1, GENESIS
        if path is not None:
            index, digest = self._open(path)
        self.head = self.released = self._signed = Head(owner, index, digest)
        self._guarantee = "void: reproducible noise" if reproducible else "as accounted"
        try:
            self._begin_session()
        except BaseException:
            self.close()
            raise

    def _begin_session(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        public = self._key.public_key().public_bytes_raw().hex()
        content = {"kind": SESSION, "format": FORMAT, "public_key": public, "guarantee": self._guarantee}
        self.released = self._write(content | ({"agreement": self.agreement} if self.agreement else {}))

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a ledger in memory signs with a key of its own; from there on the two count apart."""
        if self.path is not None:
            raise LedgerError(f"the ledger {self.path} cannot be copied: one file, one writer")
        return {"owner": self.owner, "lines": self.lines, "guarantee": self._guarantee}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner, self._lines, self._guarantee = state["owner"], list(state["lines"]), state["guarantee"]
        self.path = self._file = None
        self._lock, self._size = threading.RLock(), 0
        self.agreement, self._together = "", False
        last = json.loads(self._lines[-1])
        self.head = self.released = self._signed = Head(self.owner, last["index"], last["hash"])
        self.releases = len(kept_records(self))
        self._begin_session()

    def _open(self, path: Path) -> tuple[int, str]:
        """Opens the file for appending; what a crash left torn at its end was not synced, and is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        index, digest = -1, GENESIS
        if path.exists():
            if (end := signed_end(path)) < path.stat().st_size:
                os.truncate(path, end)
            chain = LedgerReader(path, owner=self.owner, thorough=False).end()
            self.releases, index, digest = chain.releases, chain.count - 1, chain.digest
        self._file = appending(path, binary=True)
        self._size = path.stat().st_size
        return index, digest

    def append(self, record: ReleaseRecord) -> Head:
        """Writes a release and syncs it to disk, at the end of `together` at the latest; then it may leave.

        Raises:
            LedgerError: It would pass for the entry that announces a signing key, which counts nothing.
        """
        if record.kind in NOTES:
            raise LedgerError(
                f"a release of {self.owner} cannot be of kind {record.kind!r}; name what it is for"
            )
        before, between, after = _form(
            self.owner,
            record.kind,
            record.observers,
            record.mechanism,
            record.clip,
            record.sigma,
            record.sensitivity,
            record.vectors,
            record.ids_visible,
            record.mode,
            record.epsilon,
            record.assumption,
        )
        if record.rows is not None:
            after = f',"rows":"{rows_to_text(record.rows)}"{after}'
        with self._lock:
            self.released = self._append(before, between, after)
        self.releases += 1
        return self.released

    def begin(
        self, part: str, epoch: int, back: int | None, announced: Mapping[str, str] | None = None
    ) -> None:
        """Notes that a part of a run begins, and whether everybody has gone back for it.

        Args:
            part: Which.
            epoch: Of which epoch.
            back: The epoch whose end everybody goes back to first, if any.
            announced: What the coordinator calls it (`phase`), and its signature (`signed`).
        """
        self._write({"kind": PHASE, "part": part, "epoch": epoch, "back": back, **(announced or {})})

    def note_alignment(self, *, way: str, observers: Iterable[str], ids: int, most: int) -> Head:
        """Notes that an alignment begins, and syncs it to disk; only then may anything of it leave.

        Args:
            way: Which kind of alignment.
            observers: Who takes part.
            ids: How many IDs the owner brings.
            most: How many it lets any other bring.
        """
        return self._write(
            {"kind": ALIGNMENT, "way": way, "observers": list(observers), "ids": ids, "most": most}
        )

    def note_scores(self, *, name: str, rows: Rows, of: Iterable[str]) -> Head:
        """Notes that scores were obtained, and syncs it to disk; only then are they given to a client.

        Args:
            name: Of the request between the organisations.
            rows: The records.
            of: Whose scores were put together.
        """
        content = {"kind": SCORING, "name": name, "owners": list(of), "vectors": len(rows)}
        return self._write(content | {"rows": rows_to_text(rows)})

    def note_deviation(self, *, member: str, how: str) -> Head:
        """Notes that somebody was seen not to follow the protocol, and syncs it to disk.

        Args:
            member: Who it was; empty where nobody can be named.
            how: How it was seen.
        """
        return self._write({"kind": DEVIATION, "member": member, "how": how})

    @contextmanager
    def together(self) -> Iterator[None]:
        """Entries of this block leave together: one signature, and on disk one sync, at its end.

        Nothing that they account for may leave before.

        Raises:
            RunError: They cannot be written; none of what they account for may leave.
        """
        with self._lock:
            outermost, self._together = not self._together, True
            try:
                yield
            finally:
                if outermost:
                    self._together = False
                    self._commit()

    @property
    def lines(self) -> list[str]:
        """The lines of a ledger in memory, signed up to here."""
        return list(self.each_line())

    def each_line(self) -> Iterator[str]:
        """The same, one at a time."""
        self._sign()
        return iter(self._lines)

    def keep_in(self, lines: MutableSequence[str]) -> None:
        """Has a ledger in memory keep its lines there, where that holds more than memory does."""
        lines.extend(self._lines)
        self._lines = lines

    def says(self, position: int, words: str) -> bool:
        """Whether an entry of a ledger in memory holds these words of its text form."""
        return words in self._lines[position]

    def _write(self, content: Mapping[str, Any]) -> Head:
        with self._lock:
            return self._append(*_parts({**content, "owner": self.owner}))

    def _append(self, before: str, between: str, after: str) -> Head:
        head, index = self.head, self.head.position + 1
        body = f'{{{before}"index":{index},{between}"previous":"{head.digest}"{after}}}'
        digest = digest_of(body)
        self._lines.append(line_of(body, digest))
        self.head = Head(self.owner, index, digest)
        if self.path is not None and not self._together:
            self._commit()
        return self.head

    def _sign(self) -> None:
        """Signs the newest entry, and with it all before it."""
        if self._signed != self.head:
            signature = self._key.sign(bytes.fromhex(self.head.digest)).hex()
            self._lines[-1] = f'{self._lines[-1][:-2]}{signature}"}}'
            self._signed = self.head

    def _commit(self) -> None:
        """Writes what is not on disk yet, and syncs it; in memory, entries are signed when they are read."""
        if self.path is None or not self._lines:
            return
        before = self._signed
        self._sign()
        lines, self._lines = self._lines, []
        try:
            if self._file is None or self._file.closed:
                raise OSError(errno.EBADF, "it is closed")
            raw = ("\n".join(lines) + "\n").encode()
            self._file.write(raw)
            sync(self._file)
            self._size += len(raw)
        except OSError as error:
            self._mend()
            self.head = self._signed = before
            self.released = min(self.released, before, key=lambda head: head.position)
            raise RunError(
                f"the ledger of {self.owner} cannot be written ({error.strerror}); nothing was released"
            ) from error

    def _mend(self) -> None:
        """Takes back what a full disk has left of a line, so that the next one follows the last whole one."""
        if self.path is None or self.closed:
            return
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        try:
            os.truncate(self.path, self._size)
            self._file = appending(self.path, binary=True)
        except OSError:
            self._file = None  # closed: what cannot be mended is not written to

    @property
    def closed(self) -> bool:
        """Whether a ledger on disk takes no more entries."""
        return self.path is not None and (self._file is None or self._file.closed)

    def close(self) -> None:
        """Closes the file. Further releases are refused."""
        with self._lock:
            if self._file is not None:
                self._file.close()


class HeadError(LedgerError):
    """A ledger and what an observer keeps of it contradict each other. One of the two is not true.

    Attributes:
        head: What the observer keeps.
    """

    def __init__(self, head: Head, what: str) -> None:
        self.head = head
        super().__init__(f"ledger of {head.owner}: {what}")


def read_ledger(path: Path, *, heads: Iterable[Head] = ()) -> list[Entry]:
    """Reads and verifies a ledger file.

    Args:
        path: ``ledger/<owner>.jsonl``.
        heads: Heads that observers received; each must be an entry of this ledger.

    Raises:
        LedgerError: The ledger was edited, cut, reordered or rewritten.
        RunError: The file cannot be read.
    """
    entries = list(LedgerReader(path).entries())
    for head in heads:
        if head.owner != path.stem:
            continue
        if not 0 <= head.position < len(entries):
            raise HeadError(head, f"cut; an observer holds entry {head.position}, the file ends before")
        if entries[head.position].digest != head.digest:
            raise HeadError(head, f"rewritten; entry {head.position} is not what an observer received")
    return entries


def to_record(owner: str, content: Mapping[str, Any]) -> ReleaseRecord:
    """Turns an entry's content into the record that accountants read."""
    rows = content.get("rows")
    return ReleaseRecord(
        owner=owner,
        observers=tuple(content["observers"]),
        kind=content["kind"],
        mechanism=content["mechanism"],
        clip=content["clip"],
        sigma=content["sigma"],
        sensitivity=content["sensitivity"],
        rows=None if rows is None else rows_from_text(rows),
        vectors=content["vectors"],
        ids_visible=content["ids_visible"],
        mode=content["mode"],
        epsilon=content.get("epsilon"),
        assumption=content.get("assumption", ""),
    )


def kept_records(ledger: Ledger) -> list[ReleaseRecord]:
    """The releases in a ledger that is kept in memory."""
    return list(each_kept(ledger))


def each_kept(ledger: Ledger) -> Iterator[ReleaseRecord]:
    """The same, one at a time."""
    contents = (json.loads(line) for line in ledger.each_line())
    return (to_record(ledger.owner, content) for content in contents if content["kind"] not in NOTES)


AGREEMENT_FILE = "agreement.json"
"""In an organisation's folder of a run over a network: what was agreed on, and whose folder it is."""


def read_homes(run_folder: Path) -> tuple[str, ...] | None:
    """The organisations whose files a folder holds; None where it holds everybody's.

    Raises:
        RunError: The file that says so is damaged.
    """
    return read_agreement(run_folder)["homes"] if (run_folder / AGREEMENT_FILE).exists() else None


def read_agreement(run_folder: Path) -> dict[str, Any]:
    """What the organisations of a run over a network agreed on: `run`, `digest`, `homes`, `organisations`.

    Raises:
        RunError: The file is missing or damaged.
    """
    path = run_folder / AGREEMENT_FILE
    if not path.is_file():
        raise RunError(f"{run_folder} holds no run over a network: there is no {AGREEMENT_FILE} in it")
    try:
        content = read_json(path)
        names = {key: tuple(str(name) for name in content[key]) for key in ("homes", "organisations")}
        return {**{key: str(content[key]) for key in ("run", "digest")}, **names}
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error!r}") from error


def read_records(run_folder: Path) -> list[ReleaseRecord]:
    """All releases of a run, verified against the heads that its observers keep.

    The folder of one organisation of a run over a network holds that organisation's ledger alone.

    Raises:
        LedgerError: A ledger was tampered with.
        RunError: There is no ledger.
    """
    from securevfl.privacy.views import read_heads

    paths = sorted((run_folder / "ledger").glob("*.jsonl"))
    if not paths:
        raise RunError(f"{run_folder} has no ledger; expected {run_folder}/ledger/<owner>.jsonl")
    heads = read_heads(run_folder)
    known, homes = {path.stem for path in paths}, read_homes(run_folder)
    for head in heads:
        if head.owner not in known and (homes is None or head.owner in homes):
            raise LedgerError(
                f"ledger of {head.owner} is missing, but observers received its entry {head.position}"
            )
    return [
        to_record(path.stem, entry.content)
        for path in paths
        for entry in read_ledger(path, heads=heads)
        if entry.is_release
    ]
