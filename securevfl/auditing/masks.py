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
  coins, nonces and whatever else is declared fresh. Some masks cancel between senders: where those that are
  left must be fresh as well, the words of all senders of a round are added up.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from securevfl.auditing.index import Log, word
from securevfl.auditing.verdicts import MASKS, ErrorBudget, Finding, Verdict
from securevfl.privacy.schemas import Schema
from securevfl.privacy.views import SAMPLE, Sketch, View

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
    """Whether leading bits, arrays, seeds or coins return, over all streams of a run."""

    def __init__(self) -> None:
        self._digests, self._heads = Log(), Log()
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self._paths: dict[tuple[Any, ...], int] = {}

    def add(self, sketch: Sketch, place: tuple[Any, ...], bits: int, path: tuple[Any, ...]) -> None:
        """Takes an array or seed.

        Args:
            sketch: Of the array or seed.
            place: Kind, field, tree, and what sets its round apart from others.
            bits: In which its words are uniform.
            path: By whom it came to whom, and as what.
        """
        digest = self.add_digest(sketch.digest, place, path)
        for number, head in enumerate(_heads(sketch.sample, bits)):
            self._counts[(*place[:3], number)] += 1
            self._heads.add(word((*place[:3], number, head)), digest, self._number(path))

    def add_digest(self, digest: str, place: tuple[Any, ...], path: tuple[Any, ...]) -> int:
        """Takes what may come in this place only; returns 64 bits of its digest."""
        short = int(digest[:16], 16)
        self._digests.add(short, word(place), self._number(path))
        return short

    def _number(self, path: tuple[Any, ...]) -> int:
        return self._paths.setdefault(path, len(self._paths))

    def reused(self) -> set[tuple[Any, ...]]:
        """Paths of what came before in another place, or with the leading bits of something else."""
        paths = list(self._paths)
        return {paths[about] for log in (self._digests, self._heads) for about, _ in log.others()}

    def odds(self) -> float:
        """At most the probability that fresh masks look used before."""
        heads = sum(count * count / 2 for count in self._counts.values()) * 2.0**-64
        return heads + self._digests.odds + self._heads.odds


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
        self._undeclared: set[tuple[str, str, str, str]] = set()
        self._kept: set[tuple[str, str, str, str]] = set()
        self._sums: dict[tuple[Any, ...], tuple[Words, list[str]]] = {}  # of rounds that are not complete

    def add(self, view: View, header: Mapping[str, Any], schema: Schema, ends: tuple[str, str]) -> None:
        """Takes a message of a protocol machine, as one of the organisations at its ends tells of it."""
        path, fields = (*ends, header["kind"]), header["fields"]
        for name in schema.fresh:
            self._add_fresh(view, header, name, path)
        for name, (offset, dtype, shape, *_) in header["arrays"].items():
            words = int(np.prod(shape))
            if name in schema.secret and offset is not None and words:
                self._kept.add((*path, name))
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
            secret = name in (*schema.secret, *schema.opaque)
            place = (header["kind"], name, tree, *where, header["head"] and header["head"][1])
            alone = secret and name not in schema.common
            place += (header["receiver"], header["number"]) if alone else ()
            self._reuse.add(sketch, place, bits, path)
            if secret:
                continue
            stream = self._streams[path].setdefault((name, tree), WordTest(bits))
            stream.add(sketch, words)

    def add_received(
        self, view: View, header: Mapping[str, Any], schema: Schema, ends: tuple[str, str], senders: int
    ) -> None:
        """Takes a message as its receiver has it, whose words add up to fresh ones over all its senders."""
        fields, kind = header["fields"], header["kind"]
        for name in schema.summed:
            place = (fields.get("round"), fields.get("attempt"), tuple(header["arrays"][name][2]))
            total, found = self._sums.pop((ends[1], kind, name, place), (np.uint64(0), []))
            total = total + view.sketch(header, name).sample.reshape(-1)[: SAMPLE // 2]
            found.append(ends[0])
            if len(found) < senders:
                self._sums[ends[1], kind, name, place] = total, found
                continue
            digest = hashlib.sha256(total.tobytes()).hexdigest()
            for sender in found:
                where = (kind, f"sum of {name}", 0, ends[1], header["number"], *place)
                self._reuse.add(Sketch(digest, 0, total), where, 64, (sender, ends[1], kind))

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
            if row.size:
                self._reuse.add_digest(digest, place, path)

    def findings(self, budget: ErrorBudget) -> Iterator[Finding]:
        """One for each sender, receiver and kind."""
        names = [f"{path}: {key}" for path, streams in self._streams.items() for key in streams]
        levels = budget.split(MASKS, [*names, FRESH])
        fresh, reused = self._reuse.odds() < levels[FRESH], self._reuse.reused()
        for path in {**self._streams, **dict.fromkeys(reused)}:
            streams = self._streams.get(path, {})
            uneven = any(test.p_value() < levels[f"{path}: {key}"] for key, test in streams.items())
            reasons = ["masked words are not uniform"] if uneven else []
            reasons += ["a mask, seed or coin was used twice"] if path in reused and fresh else []
            said: dict[str, Any] = {"promise": f"{path[0]} against {path[1]}", "path": path[2]}
            if reasons:
                yield Finding(
                    **said, verdict=Verdict.VIOLATED, tested=(UNIFORM, FRESH), reasons=tuple(reasons)
                )
            else:
                yield Finding(**said, verdict=Verdict.HOLDS, tested=(UNIFORM, FRESH) if fresh else (UNIFORM,))
        for owner, observer, kind, name in sorted(self._kept):
            reason = f"a view holds {name!r} itself, of which all masks are made; views keep no seeds"
            promise = f"{owner} against {observer}"
            yield Finding(promise=promise, path=kind, verdict=Verdict.VIOLATED, reasons=(reason,))
        for owner, observer, kind, name in sorted(self._undeclared):
            reason = f"field {name!r} is not declared uniform, so nothing is known about its words"
            yield Finding(
                promise=f"{owner} against {observer}",
                path=kind,
                verdict=Verdict.NOT_TESTED,
                reasons=(reason,),
            )
