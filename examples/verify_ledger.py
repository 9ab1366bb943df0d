"""Verifies a ledger without securevfl, as docs/files.md describes it.

    python examples/verify_ledger.py RUN/ledger/p1.jsonl

Needs Python and the package `cryptography`. Ends with 0 and one line if the ledger is sound; with 1 and what
is wrong if it is not; with 2 if there is nothing to verify.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FIRST = "0" * 64


class Forged(Exception):
    """What is wrong with the ledger."""


def canonical(content: dict[str, Any]) -> str:
    """The one text of an entry without hash and signature."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse(line: str) -> tuple[dict[str, Any], str, str]:
    """Content, hash and signature of a line, which must be in the one form that an entry has."""
    try:
        content = json.loads(line)
        digest, signature = content.pop("hash"), content.pop("signature")
        body = canonical(content)
        lower = bytes.fromhex(signature).hex()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Forged("not an entry") from error
    if hashlib.sha256(body.encode("ascii")).hexdigest() != digest:
        raise Forged("the content does not have this hash")
    if line != f'{body[:-1]},"hash":"{digest}","signature":"{lower}"}}':
        raise Forged("not in the one form that an entry has")
    return content, digest, signature


def verify(owner: str, lines: list[str]) -> list[str]:
    """Verifies the chain and all signatures; returns the hashes of the entries."""
    hashes: list[str] = []
    key: Ed25519PublicKey | None = None
    every, signed = True, 0  # whether each entry has a signature; how many entries the last one covers
    for index, line in enumerate(lines):
        try:
            content, digest, signature = parse(line)
            if content.get("owner") != owner or content.get("index") != index:
                raise Forged("belongs elsewhere")
            if content.get("previous") != (hashes[-1] if hashes else FIRST):
                raise Forged("does not follow the entry before it")
            if content.get("kind") == "session":
                if signed < index:
                    raise Forged("a session before the last one has signed")
                key, every = session_key(content), content.get("format") == 1
            if key is None:
                raise Forged("no session has announced a key")
            if signature or every:
                key.verify(bytes.fromhex(signature), bytes.fromhex(digest))
                signed = index + 1
        except InvalidSignature:
            raise Forged(f"entry {index}: not signed with the session's key") from None
        except Forged as error:
            raise Forged(f"entry {index}: {error}") from None
        hashes.append(digest)
    if signed < len(hashes):
        raise Forged(f"entry {signed}: no signature covers it")
    return hashes


def session_key(content: dict[str, Any]) -> Ed25519PublicKey:
    """The key that a session entry announces; it signs the entry itself, too, or one that follows."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(content["public_key"]))
    except (KeyError, ValueError, TypeError) as error:
        raise Forged("a session without a readable key") from error


def heads(run: Path) -> Iterator[tuple[str, int, str]]:
    """Owner, position and hash of every entry that an observer of the run has been told."""
    for path in sorted(run.glob("receipts/*.json")):
        for owner, position, digest in json.loads(path.read_text()).values():
            yield owner, position, digest
    for path in sorted(run.glob("views/*/messages.jsonl")):
        for line in path.read_text().splitlines():
            message = json.loads(line)
            if message["head"] is not None and not message["sent"]:
                owner, position, digest = message["head"]
                yield owner, position, digest


def main() -> int:
    """Verifies the file that the command line names."""
    if len(sys.argv) != 2:
        print("usage: python verify_ledger.py RUN/ledger/OWNER.jsonl", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    owner, run = path.stem, path.resolve().parent.parent
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
        told = {head for head in heads(run) if head[0] == owner}
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path}: cannot be read: {error}", file=sys.stderr)
        return 2
    try:
        hashes = verify(owner, lines[:-1] if lines[-1] == "" else lines)
        for _, position, digest in sorted(told):
            if not 0 <= position < len(hashes):
                raise Forged(f"cut: an observer was told of entry {position}")
            if hashes[position] != digest:
                raise Forged(f"rewritten: an observer was told of another entry {position}")
    except Forged as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    print(f"{path}: sound, {len(hashes)} entries, {len(told)} of them known to observers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
