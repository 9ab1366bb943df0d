"""Key scan: secret keys that must not be in any message, nor in any file of a run.

Forms that tell themselves are looked for as such: PEM blocks and TenSEAL contexts with a secret key. Raw
32-byte keys do not, so each candidate is tried: if the public key that belongs to it is in sight too, it is a
secret key. A homomorphic key that is not a public one counts as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from securevfl.algorithms.channels import build_sum
from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth
from securevfl.attacks.scoring import score_count
from securevfl.errors import ProtocolError
from securevfl.privacy.views import Seen, View
from securevfl.protocols.sums.homomorphic import Encryption
from securevfl.protocols.sums.homomorphic_sum import HomomorphicSum

_PEM = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_HEX = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_RAW = 32
_SEAL = b"\x5e\xa1"  # how SEAL begins what it writes
_TEXTS = (".json", ".jsonl", ".toml", ".txt", ".pem", ".key", ".html")


class KeyScan(Attack):
    """Looks through everything that the observers got from the owner."""

    name = "key-scan"
    family: ClassVar[Family] = "protocol"
    metric = "count"
    summary = "searches the owner's messages for secret keys"
    source = "known failures of deployed systems: one secret key for all clients, keys in messages"

    def run(self, evidence: Evidence) -> Guess:
        """Counts the secrets."""
        info = evidence.info
        pieces = [
            piece
            for view in evidence.views.values()
            for seen in view.messages(sent=False)
            if info.hosts.get(seen.sender, seen.sender) == info.owner
            for piece in _pieces(seen)
        ]
        found = secrets_in(pieces) + _wrong_keys(evidence)
        return {"found": np.array([found]), "pieces": np.array([len(pieces)])}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """How many secrets were found."""
        return score_count(
            int(guess["found"][0]), note=f"{int(guess['pieces'][0])} pieces of messages searched"
        )


def _pieces(seen: Seen) -> Iterator[bytes]:
    """Everything in a message that can hold a key: byte strings, texts and arrays of bytes."""
    for value in seen.fields.values():
        if isinstance(value, bytes):
            yield value
        elif isinstance(value, str):
            yield _from_hex(value) or value.encode()
        elif isinstance(value, np.ndarray) and value.dtype == np.uint8:
            yield value.tobytes()
            if value.ndim > 1:
                yield from (row.tobytes() for row in value)


def _from_hex(text: str) -> bytes | None:
    """What somebody may have written as text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def secrets_in(pieces: Iterable[bytes], texts: Iterable[bytes] = ()) -> int:
    """The number of secret keys among byte strings, and among hexadecimal words in texts."""
    strings, files = list(pieces), list(texts)
    count = sum(len(_PEM.findall(piece)) for piece in (*strings, *files))
    count += sum(_is_private_context(piece) for piece in strings)
    raw = {
        piece[i : i + _RAW] for piece in strings if len(piece) <= 4 * _RAW for i in range(0, len(piece), _RAW)
    }
    raw |= {bytes.fromhex(match.decode()) for text in files for match in _HEX.findall(text)}
    candidates = {one for one in raw if len(one) == _RAW}
    return count + sum(bool(set(_publics(one)) & candidates) for one in candidates)


def _publics(secret: bytes) -> tuple[bytes, bytes]:
    return (
        X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw(),
        Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw(),
    )


def _is_private_context(piece: bytes) -> bool:
    if len(piece) < 1024 or piece.startswith(_SEAL):  # a context frames SEAL objects, it is none itself
        return False
    import tenseal

    try:
        return bool(tenseal.context_from(piece).is_private())
    except Exception:  # TenSEAL raises whatever its parser meets; anything but a context is no finding
        return False


def _wrong_keys(evidence: Evidence) -> int:
    """Homomorphic keys in the view that are not public keys."""
    info, count = evidence.info, 0
    for view in evidence.views.values():
        for seen in view.messages("he-key", sent=False):
            if info.hosts.get(seen.sender) == info.owner:
                count += not _is_public(seen, info)
    return count


def _is_public(seen: Seen, info: Info) -> bool:
    host = info.hosts[str(seen.fields["channel"])]
    receiver = info.parties.index(host) if host in info.parties else None
    protocol = build_sum(
        info.plan.protocol, workers=len(info.parties), receiver=receiver, collusion=info.plan.collusion
    )
    if not isinstance(protocol, HomomorphicSum):
        return False
    try:
        Encryption.from_public_key(protocol.parameters, seen.fields["key"])
    except ProtocolError:
        return False
    return True


def scan_files(folder: Path) -> int:
    """The number of secret keys in the files of a run folder, views and checkpoints included.

    The audit calls it on the whole folder; an attack sees its own views alone.
    """
    texts: list[bytes] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            whole = path.suffix in _TEXTS and "views" not in path.relative_to(folder).parts
            texts += [content] if whole else _PEM.findall(content)
    views = [View(path) for path in sorted((folder / "views").glob("*"))]
    return secrets_in((piece for view in views for seen in view for piece in _pieces(seen)), texts)
