"""Statistics of masks: one that is not uniform, used twice, or drawn from a small seed hides nothing."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth
from securevfl.attacks.scoring import score_count
from securevfl.protocols.stream import KeyStream

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
    "sealed-score": ("words",),
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
        if info.plan.protocol not in ("two-tree", "pairwise") and info.plan.mode != "sealed":
            return f"protocol {info.plan.protocol} uses no masks"
        if not any(info.received.get(kind) for kind in KINDS):
            return f"{info.observer} received no masked value from {info.owner}"
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
