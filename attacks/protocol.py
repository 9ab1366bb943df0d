"""Attacks on the protocols themselves: secret keys in messages, masks that do not mask, trees that leak.

Keys: forms that tell themselves are looked for as such (PEM blocks, TenSEAL contexts with a secret key). Raw
32-byte keys do not, so each candidate is tried: if the public key that belongs to it is in sight too, it is a
secret key. A homomorphic key that is not a public one counts as well. Masks: one that is not uniform, used
twice, or drawn from a small seed hides nothing. Trees: members of a coalition put their messages together and
solve them.
"""

from __future__ import annotations

import functools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from scipy import stats

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth, score_count
from securevfl.attacks.reading import sum_of, tree_sums
from securevfl.errors import ProtocolError
from securevfl.privacy.views import Seen, View
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.encryption import Encryption
from securevfl.protocols.sums.homomorphic import HomomorphicSum
from securevfl.settings.protocols import FACTS, TREE_SUMS

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
    protocol = sum_of(info, str(seen.fields["channel"]))
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


Words = NDArray[Any]  # of uint64, or of uint32 for phases
ALARM = 1e-9  # probability that sound masks raise one of the alarms
_SEEDS = 4096
# What counts as close, as a share of the ring: in 64 bits values below 2^8 at 32 fraction bits, in 32 bits
# scores that moved by less than a fifth.
_CLOSE = {8: 2.0**-24, 4: 2.0**-8}
_MOST = 1 << 22  # words of one stream that are looked at
KINDS: dict[str, tuple[str, ...]] = {
    "tree.subtotal": ("total",),
    "pairwise.masked-input": ("values",),
    "sealed-operand": ("words",),
    "sealed-phase": ("words",),
    "sealed-share": ("blinded", "product"),
    "sealed-checked-share": ("product",),
    "sealed-score": ("words",),
    "sealed-peer-deal": ("product", "waves"),
}
"""Messages that carry masked words, and their fields."""
BROADCAST = (("sealed-operand", "words"), ("sealed-phase", "words"), ("sealed-share", "blinded"))
"""Fields that all receivers get alike, so that one observer's copy is enough."""


class Stream(NamedTuple):
    """Masked values, or masks, of one sender on one channel and tree to one receiver, one array per round."""

    raw: bool
    rounds: list[Words]


class MaskStatistics(Attack):
    """Looks at masked values as an observer gets them."""

    name = "mask-statistics"
    family: ClassVar[Family] = "protocol"
    metric = "count"
    summary = "tests masked values for uniformity, masks for reuse and for generators with small seeds"
    source = "known failures of deployed mask generators"

    def why_not(self, info: Info) -> str:
        """Only where there are masks."""
        if FACTS[info.plan.protocol].hides != "masked" and info.plan.mode != "sealed":
            return f"protocol {info.plan.protocol} uses no masks"
        if not any(info.received.get(kind) for kind in KINDS):
            return f"{info.observer} received no masked value from {info.owner}"
        if not info.plan.record_words:
            return "views keep digests and samples of masked words; train with --set record_words=true"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Three tests over everything that the owner sent."""
        streams = _streams(evidence)
        sizes = {size: _together(streams, size) for size in (8, 4)}
        raw = [part for stream in streams if stream.raw for part in stream.rounds]
        uneven = any(_not_uniform(words) for words in sizes.values())
        found = [uneven, any(map(_reused, streams)), _small_seed(raw)]
        return {"alarms": np.array(found), "words": np.array([sum(map(len, sizes.values()))])}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """How many of the three tests failed."""
        names = ("not uniform", "used twice", "from a small seed")
        failed = [name for name, alarm in zip(names, guess["alarms"], strict=True) if alarm]
        note = f"{int(guess['words'][0])} words: " + (
            ", ".join(failed) or "uniform, fresh, no small seed found"
        )
        return score_count(len(failed), note=note)


def _streams(evidence: Evidence) -> list[Stream]:
    info = evidence.info
    found: defaultdict[tuple[Any, ...], list[Words]] = defaultdict(list)
    for number, view in enumerate(evidence.views.values()):
        for seen in view.messages(*KINDS, sent=False):
            if info.hosts.get(seen.sender) != info.owner:
                continue
            channel, tree = str(seen.fields.get("channel", "")), seen.fields.get("tree", 0)
            who = seen.fields.get("from", seen.sender), seen.receiver
            for field in KINDS[seen.kind]:
                group = found[tree, seen.kind, field, channel, who]
                known = number and (seen.kind, field) in BROADCAST
                if not known and sum(map(len, group)) < _MOST:
                    group.append(_words(seen.fields[field]))
    return [Stream(key[0] == 2, group) for key, group in found.items() if group]


def _words(values: Any) -> Words:
    """Words of 32 bits stay so, all others become 64 bits."""
    flat = np.asarray(values).ravel()
    return flat if flat.dtype == np.uint32 else flat.astype(np.uint64)


def _together(streams: list[Stream], size: int) -> Words:
    parts = [part for stream in streams for part in stream.rounds if part.itemsize == size]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _not_uniform(words: Words) -> bool:
    """Chi-square tests on each byte of the words."""
    if len(words) < 1024:  # fewer than four of each byte value: the test is not valid
        return False
    size = words.itemsize
    counts = [np.bincount(words.view(np.uint8)[i::size], minlength=256) for i in range(size)]
    return bool(min(stats.chisquare(count).pvalue for count in counts) < ALARM / 12)


def _reused(stream: Stream) -> bool:
    """Words that come twice, or many rounds whose difference is as small as the values themselves."""
    words = np.concatenate(stream.rounds)
    ring, share = 2.0 ** (8 * words.itemsize), _CLOSE[words.itemsize]
    repeats = len(words) - len(np.unique(words))
    if repeats and stats.poisson.sf(repeats - 1, len(words) * (len(words) - 1) / 2 / ring) < ALARM:
        return True
    close = tried = 0
    for before, after in zip(stream.rounds, stream.rounds[1:], strict=False):
        size = min(len(before), len(after))
        gap = after[:size] - before[:size]
        close += int((np.minimum(gap, -gap) < words.dtype.type(share * ring)).sum())
        tried += size
    return bool(close and stats.poisson.sf(close - 1, tried * 2 * share) < ALARM)


def _small_seed(raw: list[Words]) -> bool:
    """Whether a mask is the first word of a common generator with a seed below `_SEEDS`."""
    if not raw:
        return False
    seen = np.unique(np.concatenate(raw))
    return bool(np.isin(_first_words(), seen).any())


@functools.cache
def _first_words() -> Words:
    """The first words of common generators with small seeds."""
    found = []
    for seed in range(_SEEDS):
        found += [
            int(np.random.default_rng(seed).integers(0, 2**64, dtype=np.uint64)),
            int(np.random.RandomState(seed).randint(0, 2**64, dtype=np.uint64)),
            random.Random(seed).getrandbits(64),  # noqa: S311 - it imitates a weak generator
            int(KeyStream(seed.to_bytes(16, "little")).words(1, np.uint64)[0]),
            int(KeyStream(seed.to_bytes(16, "big")).words(1, np.uint64)[0]),
        ]
    return np.array(found, np.uint64)


class TreeLeak(Attack):
    """What one participant's tree messages give away beyond the total over all others."""

    name = "tree-leak"
    family: ClassVar[Family] = "protocol"
    metric = "count"
    summary = "solves the tree messages of one participant for sums that are smaller than the total"
    source = "Gu et al., AFSGD-VP, Algorithms 1 and 2; components of the union of both trees"

    def why_not(self, info: Info) -> str:
        """Only where trees carry the sums, and where the total itself does not give the owner away."""
        if info.plan.protocol not in TREE_SUMS:
            return f"protocol {info.plan.protocol} uses no trees"
        if not info.seen.get("tree.subtotal"):
            return f"{info.observer} saw no tree message"
        others = set(info.parties) - set(info.observers)
        if len(others) < 2:
            return f"the total alone gives {info.owner} away: everybody else is in the coalition"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Every sum over some, not all, other parties with the owner among them."""
        info = evidence.info
        others = frozenset(info.parties) - set(info.observers)
        found = [m for m in tree_sums(evidence) if info.owner in m.parties and m.parties != others]
        sizes = np.array([len(m.parties) for m in found], np.int64)
        values = [m.values.ravel() for m in found]
        return {"sizes": sizes, "values": np.concatenate(values) if values else np.zeros(0)}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """How many sums were recovered; those over a single party are its very values."""
        sizes = guess["sizes"]
        note = f"{int((sizes == 1).sum())} of them are values of {info.owner} alone"
        return score_count(len(sizes), note=note)


class TreeCollusion(TreeLeak):
    """The same for two participants that pool their views."""

    name = "tree-collusion"
    summary = "solves the pooled tree messages of two participants for sums that are smaller than the total"
    coalition = 2
