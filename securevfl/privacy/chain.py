"""The chain of a ledger: the one form of its entries, and their verification, one entry after the other.

A ledger may be of any length: whoever verifies it holds one entry, and the end of the chain. What this
process has verified before, byte for byte, is not verified again; a digest of it is kept, not what it says.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from securevfl.errors import LedgerError, RunError

GENESIS = "0" * 64
SESSION = "session"
"""Kind of the entry with which a process announces its signing key."""
PHASE = "phase"
"""Kind of the entry with which a site notes that a part of an agreed run begins; it releases nothing."""
ALIGNMENT = "alignment"
"""Kind of the entry that stands for an alignment which begins; accountants do not count it."""
SCORING = "scoring"
"""Kind of the entry with which a label holder notes scores that it has obtained and others have released."""
DEVIATION = "deviation"
"""Kind of the entry with which a member notes that it has seen another one not follow the protocol."""
NOTES = (SESSION, PHASE, ALIGNMENT, SCORING, DEVIATION)
"""Kinds of entries that accountants do not count."""
_UNSIGNED = b'","signature":""}\n'
_MOST_FILES = 64
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a ledger: its place in the chain and what it says."""

    index: int
    digest: str
    content: Mapping[str, Any]

    @property
    def is_session(self) -> bool:
        """True for the entry that announces a new signing key."""
        return bool(self.content.get("kind") == SESSION)

    @property
    def is_release(self) -> bool:
        """True for what accountants count: no signing key, no alignment, no beginning of a part."""
        return self.content.get("kind") not in NOTES


def with_agreement(entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """Every entry with the digest of what its owner had agreed on then; empty before anything was."""
    agreement = ""
    for entry in entries:
        if entry.is_session:
            agreement = str(entry.content.get("agreement", ""))
        yield agreement, entry


canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def line_of(body: str, digest: str, signature: bytes = b"") -> str:
    """The one form of a line."""
    return f'{body[:-1]},"hash":"{digest}","signature":"{signature.hex()}"}}'


def digest_of(body: str) -> str:
    """The hash of an entry."""
    return hashlib.sha256(body.encode()).hexdigest()


class Chain:
    """Verifies the entries of one owner in their order.

    A signature covers everything before it, so that the last one of each session proves what the ledger says.
    That nobody has touched a signature before it is of interest to an audit alone.

    Args:
        owner: Whose they are.
        thorough: Verify every signature, not only the last one of each session.

    Attributes:
        count: Entries so far.
        releases: How many of them are releases.
        digest: The hash of the newest.
    """

    def __init__(self, owner: str, *, thorough: bool = True) -> None:
        self.owner, self.thorough = owner, thorough
        self.count = self.releases = 0
        self.digest = GENESIS
        self._key: Ed25519PublicKey | None = None
        self._each = True  # whether the session signs every entry (format 1)
        self._covered = 0  # entries up to the last signature
        self._signature: tuple[int, str, bytes] | None = None  # the last one, if it is not verified yet

    def take(self, line: str) -> Entry:
        """Verifies the next line.

        Raises:
            LedgerError: It does not fit, and why.
        """
        index, where = self.count, f"ledger of {self.owner}, entry {self.count}"
        try:
            content, digest, signature = _parsed(line)
            body = canonical(content)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise LedgerError(f"{where}: not a ledger entry") from error
        self._check_place(where, content)
        if digest_of(body) != digest:
            raise LedgerError(f"{where}: content does not match its hash (edited)")
        if line != line_of(body, digest, signature):
            raise LedgerError(f"{where}: not in the one form that an entry has (edited)")
        if content.get("kind") == SESSION:
            if self._covered < index:
                raise LedgerError(f"{where}: a session begins before the last one has signed (forged)")
            self._check_signature()
            self._key, self._each = _public_key(where, content), content.get("format") == 1
        if self._key is None:
            raise LedgerError(f"{where}: no session entry announces a signing key")
        if signature or self._each:
            self._signature, self._covered = (index, digest, signature), index + 1
            if self.thorough or not signature:
                self._check_signature()
        entry = Entry(index=index, digest=digest, content=content)
        self.count, self.digest, self.releases = index + 1, digest, self.releases + entry.is_release
        return entry

    def _check_place(self, where: str, content: Mapping[str, Any]) -> None:
        if content.get("owner") != self.owner or content.get("index") != self.count:
            raise LedgerError(f"{where}: belongs elsewhere (an entry was removed, moved or copied)")
        if content.get("previous") != self.digest:
            raise LedgerError(f"{where}: does not follow the entry before it (chain broken)")

    def _check_signature(self) -> None:
        if self._signature is None or self._key is None:
            return
        index, digest, signature = self._signature
        try:
            self._key.verify(signature, bytes.fromhex(digest))
        except InvalidSignature as error:
            raise LedgerError(
                f"ledger of {self.owner}, entry {index}: signature is not the owner's (forged)"
            ) from error
        self._signature = None

    def end(self) -> None:
        """Raises `LedgerError` unless a signature covers the last entry."""
        self._check_signature()
        if self._covered < self.count:
            raise LedgerError(
                f"ledger of {self.owner}, entry {self._covered}: no signature covers it (forged)"
            )


def _parsed(line: str | bytes) -> tuple[dict[str, Any], str, bytes]:
    """What a line says, its hash and its signature."""
    content: dict[str, Any] = json.loads(line)
    return content, content.pop("hash"), bytes.fromhex(content.pop("signature"))


def _public_key(where: str, content: Mapping[str, Any]) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(content["public_key"]))
    except (KeyError, ValueError, TypeError) as error:
        raise LedgerError(f"{where}: session entry without a readable public key") from error


def verify_lines(owner: str, lines: Iterable[str]) -> list[Entry]:
    """Checks chain, order and signatures and returns the entries.

    Raises:
        LedgerError: The first entry that does not fit, and why.
    """
    chain = Chain(owner)
    entries = [chain.take(line) for line in lines]
    chain.end()
    return entries


class _Known(NamedTuple):
    """The part of a ledger file that this process has verified: its bytes, their SHA-256, the chain there."""

    size: int
    digest: bytes
    chain: Chain


_KNOWN: OrderedDict[tuple[Path, bool], _Known] = OrderedDict()


class LedgerReader:
    """Reads a ledger file of any length entry by entry, and verifies it.

    Args:
        path: ``ledger/<owner>.jsonl``.
        owner: Whose it is, where the file's name does not say it.
        thorough: See `Chain`.
    """

    def __init__(self, path: Path, *, owner: str = "", thorough: bool = True) -> None:
        self.path = path
        self._chain = Chain(owner or path.stem, thorough=thorough)

    def entries(self, *kinds: str) -> Iterator[Entry]:
        """The entries of these kinds, or all; what they say holds once the iteration has come to its end.

        Raises:
            LedgerError: The ledger was edited, cut, reordered or rewritten.
            RunError: The file cannot be read.
        """
        return self._read(kinds or None)

    def end(self) -> Chain:
        """The chain at the end of the file.

        Raises:
            LedgerError, RunError: See `entries`.
        """
        for _ in self._read(()):
            pass
        return self._chain

    def _read(self, kinds: Collection[str] | None) -> Iterator[Entry]:
        place = self.path.resolve(), self._chain.thorough
        size, line = 0, b"\n"
        try:
            with self.path.open("rb") as file:
                known, hasher = self._known(file)
                chain = self._chain = copy.copy(known.chain)
                for line in file:
                    size += len(line)
                    if size <= known.size:
                        yield from _said(line, kinds)
                        continue
                    entry = chain.take(line.removesuffix(b"\n").decode())
                    hasher.update(line)
                    if kinds is None or entry.content.get("kind") in kinds:
                        yield entry
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"ledger {self.path} cannot be read: {error}") from error
        chain.end()
        if line.endswith(b"\n"):  # a line without its end may still grow
            _KNOWN[place] = _Known(size, hasher.digest(), copy.copy(chain))
            _KNOWN.move_to_end(place)
            while len(_KNOWN) > _MOST_FILES:
                _KNOWN.popitem(last=False)

    def _known(self, file: IO[bytes]) -> tuple[_Known, Any]:
        """What was verified of this file, if it is still there, and a hasher that has seen it."""
        owner, thorough = self._chain.owner, self._chain.thorough
        known = _KNOWN.get((self.path.resolve(), thorough))
        if known is not None and known.chain.owner == owner:
            hasher, left = hashlib.sha256(), known.size
            while left and (piece := file.read(min(left, _PIECE))):
                hasher.update(piece)
                left -= len(piece)
            file.seek(0)
            if hasher.digest() == known.digest:
                return known, hasher
        return _Known(0, b"", Chain(owner, thorough=thorough)), hashlib.sha256()


def _said(line: bytes, kinds: Collection[str] | None) -> Iterator[Entry]:
    """The entry of a line that was verified, if it is of one of these kinds.

    Entries are flat and have one form, so that a kind stands in the text of its line as it is.
    """
    if kinds is None or any(b'"kind":"%s"' % kind.encode() in line for kind in kinds):
        content, digest, _ = _parsed(line)
        yield Entry(index=content["index"], digest=digest, content=content)


def signed_end(path: Path) -> int:
    """Bytes up to the last signature of a file: what comes after was not synced, so none of it has left."""
    end = place = 0
    with path.open("rb") as file:
        for line in file:
            place += len(line)
            if line.endswith(b"\n") and not line.endswith(_UNSIGNED):
                end = place
    return end
