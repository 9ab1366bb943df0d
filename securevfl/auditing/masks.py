"""Do masks mask? Words that hide something are uniform on their ring, and no mask is used twice.

Under a sound run masked words do not depend on private data at all, so these tests read no secret and their
verdicts add nothing to delta. They read the sketches that views keep: a sample of each array, the word that
is nearest to zero, and digests. Every test is exact or errs less often than its level says:

- bits: each bit, and whether neighbouring bits are equal, is a fair coin (binomial);
- lead: how many leading bits are equal follows a geometric distribution (negative binomial sum); values that
  were not masked are small, so that nearly all of their leading bits are equal;
- least: of n words the nearest to zero is at most x away with probability at most n (2x + 1) / 2^bits;
- reuse: the leading bits of four words together are never those of another message at the same place; a mask
  used twice shows there, because values move low bits only. Digests of seeds and arrays never return, nor do
  coins, nonces and whatever else is declared fresh.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from securevfl.auditing.verdicts import MASKS, ErrorBudget, Finding, Verdict
from securevfl.privacy.schemas import Schema
from securevfl.privacy.views import Sketch, View

UNIFORM, FRESH = "masked words are uniform", "no mask was used twice"
_TESTS = 3
_TOGETHER = 4
_GROUPS = 2  # groups of each message that are compared: one value may cross the border of its leading bits
_TOP = np.uint64(48)  # of words of 64 bits the leading 16 are compared
_EXACT = ~np.uint64(0x7FF)  # what a float64 holds of a word of 64 bits

Words = npt.NDArray[Any]


class WordTest:
    """Whether the words of one stream are uniform, fed message by message.

    Args:
        bits: In which a word is uniform; those above them are not looked at.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self.sampled, self.words = bits, 0, 0
        self._ones = np.zeros((2, self._bits), np.int64)
        self._lead = 0
        self._least = 2**self._bits

    def add(self, sketch: Sketch, words: int) -> None:
        """Takes the sketch of an array of so many words."""
        raw = sketch.sample.reshape(-1)
        sample = raw.view(f"u{raw.itemsize}").astype(np.uint64)
        apart = (sample ^ (sample << np.uint64(1))) & np.uint64(2**self._bits - 1)
        for row, each in enumerate((sample, apart)):
            shown = np.unpackbits(each.astype("<u8").view(np.uint8), bitorder="little").reshape(-1, 64)
            self._ones[row] += shown[:, : self._bits].sum(0, dtype=np.int64)
        self._lead += int((self._bits - np.frexp((apart & _EXACT).astype(np.float64))[1]).sum())
        self.sampled += len(sample)
        self.words += words
        self._least = min(self._least, sketch.least)

    def p_value(self) -> float:
        """At most the probability that uniform words look so little so, all tests together."""
        odd = np.maximum(self._ones, self.sampled - self._ones)
        bits = 2 * self._ones.size * float(stats.binom.sf(odd - 1, self.sampled, 0.5).min())
        lead = float(stats.nbinom.sf(self._lead - 1, self.sampled, 0.5))
        least = float(self.words * (2 * self._least + 1) / 2.0**self._bits)
        return _TESTS * min(bits, lead, least)


class ReuseTest:
    """Whether leading bits, arrays or seeds return, over all streams of a run."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, ...]] = {}
        self._heads: dict[tuple[Any, ...], str] = {}
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)

    def seen_before(self, sketch: Sketch, place: tuple[Any, ...], bits: int) -> bool:
        """Takes an array or seed; True where it came before, in another place than this one.

        Args:
            sketch: Of the array or seed.
            place: Kind, field, tree, and what sets its round apart from others.
            bits: In which its words are uniform.
        """
        if self._places.setdefault(sketch.digest, place) != place:
            return True
        again = False
        for number, head in enumerate(_heads(sketch.sample, bits)):
            self._counts[(*place[:3], number)] += 1
            again |= self._heads.setdefault((*place[:3], number, head), sketch.digest) != sketch.digest
        return again

    def odds(self) -> float:
        """At most the probability that fresh masks look used before."""
        return sum(count * count / 2 for count in self._counts.values()) * 2.0**-64


def _heads(sample: Words, bits: int) -> Iterator[int]:
    """Sixty-four leading bits of each group of words whose places every array of this kind has."""
    together = _TOGETHER if sample.itemsize == 8 else 2
    words = sample.reshape(-1)[: _GROUPS * together]  # the first words are in every sample
    for start in range(0, len(words) - together + 1, together):
        group = words[start : start + together]
        if words.itemsize == 8:
            group = (group.view(np.uint64) << np.uint64(64 - bits) >> _TOP).astype("<u2")
        yield int.from_bytes(group.tobytes(), "little")


class MaskEvidence:
    """All masked words of a run, by sender, receiver and kind."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str, str], dict[tuple[Any, ...], WordTest]] = defaultdict(dict)
        self._reuse = ReuseTest()
        self._reused: set[tuple[str, str, str]] = set()
        self._undeclared: set[tuple[str, str, str, str]] = set()
        self._known: set[tuple[str, str, str]] = set()
        self._fresh: dict[str, tuple[Any, ...]] = {}

    def add(self, view: View, header: Mapping[str, Any], schema: Schema, ends: tuple[str, str]) -> None:
        """Takes a message of a protocol machine, with the organisations at both ends."""
        path, fields = (*ends, header["kind"]), header["fields"]
        for name in schema.fresh:
            self._add_fresh(view, header, name, path)
        for name, (_, dtype, shape, *_) in header["arrays"].items():
            words = int(np.prod(shape))
            if name not in header["sketches"]:
                if np.dtype(dtype).itemsize >= 4 and words and name not in schema.unmasked:
                    self._undeclared.add((*path, name))
                continue
            bits = schema.widths.get(name, 8 * np.dtype(dtype).itemsize)
            sketch = view.sketch(header, name)
            if not words:
                continue
            tree = fields.get("tree", 0)
            where = (fields.get("channel"), fields.get("round"), fields.get("attempt"), header["sender"])
            secret = name in schema.secret
            place = (header["kind"], name, tree, *where, header["head"] and header["head"][1])
            alone = secret and name not in schema.common
            place += (header["receiver"], header["number"]) if alone else ()
            if self._reuse.seen_before(sketch, place, bits):
                self._reused.add(path)
            if secret or (*ends, sketch.digest) in self._known:
                continue
            self._known.add((*ends, sketch.digest))  # both ends tell of the same words
            stream = self._streams[path].setdefault((name, tree), WordTest(bits))
            stream.add(sketch, words)

    def _add_fresh(
        self, view: View, header: Mapping[str, Any], name: str, path: tuple[str, str, str]
    ) -> None:
        """Of a field that is declared fresh no row comes again, but to other receivers in its own round."""
        fields = header["fields"]
        values = view.array(header, name)
        rows = values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(1, -1)
        where = [fields.get(key) for key in ("channel", "round", "attempt", "stage")]
        for number, row in enumerate(rows):
            digest = hashlib.sha256(row.tobytes()).hexdigest()
            place = (header["kind"], name, number, *where, header["sender"])
            if row.size and self._fresh.setdefault(digest, place) != place:
                self._reused.add(path)

    def findings(self, budget: ErrorBudget) -> Iterator[Finding]:
        """One for each sender, receiver and kind."""
        names = [f"{path}: {key}" for path, streams in self._streams.items() for key in streams]
        levels = budget.split(MASKS, [*names, FRESH])
        fresh = self._reuse.odds() < levels[FRESH]
        for path in {**self._streams, **dict.fromkeys(self._reused)}:
            streams = self._streams.get(path, {})
            uneven = any(test.p_value() < levels[f"{path}: {key}"] for key, test in streams.items())
            reasons = ["masked words are not uniform"] if uneven else []
            reasons += ["a mask, seed or coin was used twice"] if path in self._reused and fresh else []
            said: dict[str, Any] = {"promise": f"{path[0]} against {path[1]}", "path": path[2]}
            if reasons:
                yield Finding(
                    **said, verdict=Verdict.VIOLATED, tested=(UNIFORM, FRESH), reasons=tuple(reasons)
                )
            else:
                yield Finding(**said, verdict=Verdict.HOLDS, tested=(UNIFORM, FRESH) if fresh else (UNIFORM,))
        for owner, observer, kind, name in sorted(self._undeclared):
            reason = f"field {name!r} is not declared uniform, so nothing is known about its words"
            yield Finding(
                promise=f"{owner} against {observer}",
                path=kind,
                verdict=Verdict.NOT_TESTED,
                reasons=(reason,),
            )
