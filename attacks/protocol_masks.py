"""Statistics of masks: one that is not uniform, used twice, or drawn from a small seed hides nothing."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth
from securevfl.attacks.scoring import score_count
from securevfl.protocols.stream import KeyStream
from securevfl.views import Seen

Words = NDArray[np.uint64]
ALARM = 1e-9  # probability that sound masks raise one of the alarms
_SEEDS = 4096
_CLOSE = (
    1 << 40
)  # ring elements: values below 2^8 at 32 fraction bits; uniform words are so close once in 2^23


class Stream(NamedTuple):
    """Masked values, or masks, of one sender on one channel and tree, one array per round."""

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
        if info.plan.protocol not in ("two-tree", "pairwise"):
            return f"protocol {info.plan.protocol} uses no masks"
        if not (info.received.get("tree.subtotal") or info.received.get("pairwise.masked-input")):
            return f"{info.observer} received no masked value from {info.owner}"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Three tests over everything that the owner sent."""
        streams = _streams(evidence)
        words = np.concatenate([part for stream in streams for part in stream.rounds])
        raw = [part for stream in streams if stream.raw for part in stream.rounds]
        found = [_not_uniform(words), _reused(streams), _small_seed(raw)]
        return {"alarms": np.array(found), "words": np.array([len(words)])}

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
    info, found = evidence.info, defaultdict(list)
    for view in evidence.views.values():
        for seen in view.messages("tree.subtotal", "pairwise.masked-input", sent=False):
            if info.hosts.get(seen.sender) == info.owner:
                found[str(seen.fields["channel"]), seen.fields.get("tree", 0), seen.fields["from"]].append(
                    seen
                )
    return [Stream(key[1] == 2, [_words(seen) for seen in group]) for key, group in found.items()]


def _words(seen: Seen) -> Words:
    values = seen.fields["total"] if "total" in seen.fields else seen.fields["values"]
    return np.asarray(values, np.uint64).ravel()


def _not_uniform(words: Words) -> bool:
    """Chi-square tests on each of the eight bytes of the words."""
    if len(words) < 1024:  # fewer than four of each byte value: the test is not valid
        return False
    counts = [np.bincount(words.view(np.uint8)[i::8], minlength=256) for i in range(8)]
    return bool(min(stats.chisquare(count).pvalue for count in counts) < ALARM / 8)


def _reused(streams: list[Stream]) -> bool:
    """A word that comes twice, or many rounds whose difference is as small as the values themselves."""
    for stream in streams:
        words = np.concatenate(stream.rounds)
        pairs = len(words) * (len(words) - 1) / 2
        repeats = len(words) - len(np.unique(words))
        if repeats and stats.poisson.sf(repeats - 1, pairs / 2.0**64) < ALARM:
            return True
        close = tried = 0
        for before, after in zip(stream.rounds, stream.rounds[1:], strict=False):
            size = min(len(before), len(after))
            gap = after[:size] - before[:size]
            close += int((np.minimum(gap, -gap) < np.uint64(_CLOSE)).sum())
            tried += size
        if close and stats.poisson.sf(close - 1, tried * 2 * _CLOSE / 2.0**64) < ALARM:
            return True
    return False


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
