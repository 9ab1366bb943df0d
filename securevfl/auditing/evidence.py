"""What the noise of a run, recomputed by replay, says about the noise that was claimed.

Replay gives z, released value minus what would have left without noise. Every test here errs against a run
that keeps its promise with at most the level it is given; the levels come from an `ErrorBudget`. Statistics
and p-values are functions of private data without any noise: they never leave these classes. Outcomes name
the verdict, the number of values and the power, which may be shown.

Tests are fed message by message and keep sums and a fixed histogram, and 16 bytes of a file per vector.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import chdtri, ndtr, ndtri

from securevfl.auditing.index import Spool
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.errors import InputError
from securevfl.privacy.noise import snap

Floats = NDArray[np.float64]

# Replay is inexact where training amplifies rounding. Above this share of the noise nothing is concluded.
ERROR_LIMIT = 0.05
# Correlation and shape need more: an error that is the same everywhere adds up over the values.
FINE_ERROR = 0.1
FINE_VALUES = 1_000

VARIANCE, REPETITION, LATTICE, VALUES, ROWS, SHAPE = (
    "variance",
    "repetition",
    "lattice",
    "correlation of values",
    "correlation of rows",
    "shape",
)
MESSAGES = "correlation of messages"
SHARED = "noise of other owners"
COLUMNS = "variance by column"
FLIPS, FLIPPED_TO = "flips", "flipped to"
"""Of randomised labels: as many as claimed, and to all other classes alike."""
# What shares the error budget; membership in the lattice never errs.
NOISE_TESTS = (VARIANCE, REPETITION, VALUES, ROWS, MESSAGES, SHAPE, COLUMNS)


class Outcome(NamedTuple):
    """What one test says: violated, holds, or not tested and why.

    It is about all of a path, or about the part of it that `part` names.
    """

    test: str
    verdict: Verdict
    reason: str = ""
    power: float | None = None
    part: str = ""


def _judged(test: str, violated: bool, reason: str, power: float | None = None) -> Outcome:
    return Outcome(test, Verdict.VIOLATED if violated else Verdict.HOLDS, reason if violated else "", power)


def _not_tested(test: str, reason: str) -> Outcome:
    return Outcome(test, Verdict.NOT_TESTED, reason)


def judge_flips_to(exact: NDArray[Any], released: NDArray[Any], classes: int, level: float) -> Outcome:
    """Whether labels that were flipped are each of the other classes equally often.

    Each flip goes to any other class with the same chance, independently, so that from one class to another,
    and over a distance counted round all classes, there are binomially many.

    Args:
        exact: Class codes.
        released: The codes after flipping.
        classes: Number of classes, at least 2.
        level: Probability of a false `violated`.
    """
    flipped = released != exact
    before, after = np.rint(exact[flipped]).astype(np.int64), np.rint(released[flipped]).astype(np.int64)
    pairs = np.zeros((classes, classes), np.int64)
    np.add.at(pairs, (before, (after - before) % classes), 1)
    jumps, chance = pairs[:, 1:], 1 / (classes - 1)
    counts = np.concatenate([jumps.ravel(), jumps.sum(axis=0)])
    trials = np.concatenate([np.repeat(jumps.sum(axis=1), classes - 1), np.full(classes - 1, len(before))])
    chances = stats.binom.sf(counts - 1, trials, chance)
    biased = classes > 2 and bool(chances.min() < level / len(chances))
    return _judged(FLIPPED_TO, biased, "labels were flipped to some classes more often than to others")


def _check_level(level: float) -> None:
    if not 0 <= level < 1:
        raise InputError(f"the level is {level}; expected a probability below 1")


# -- how much noise ----------------------------------------------------------------------------------------


def power(values: int, level: float, miss: float = 0.1, error: float = ERROR_LIMIT) -> float:
    """The largest share of the claimed noise that would be noticed with probability 1 - miss; 0 if none.

    Noise of f times the claim gives S = (f^2 + error^2) chi2_k at most, S < chi2_k(level) is the verdict.
    Print it at the limit of the replay error: the error itself is a function of the data.
    """
    _check_level(level)
    if values < 1 or level == 0:
        return 0.0
    ratio = float(stats.chi2.ppf(level, values) / stats.chi2.ppf(1 - miss, values))
    return math.sqrt(max(0.0, ratio - error * error))


class VarianceTest:
    """Whether the noise is as large as claimed: S = sum of z^2 / s^2 over all values, each with its own s.

    One-sided: S is chi-squared under the claim, errors of replay only add to it (those of a release are
    fixed before its noise is drawn), and too little noise is what breaks a promise.

    Args:
        error: Error of replay at which the power is stated; 0 only where no training comes before a release.
    """

    def __init__(self, error: float = ERROR_LIMIT) -> None:
        self.values = 0
        self._error = error
        self._sum = 0.0

    def add(self, standard: Floats) -> None:
        """Takes noise divided by its claimed standard deviation."""
        self.values += standard.size
        self._sum += float(np.vdot(standard, standard))

    def judge(self, level: float) -> Outcome:
        """Violated where so little noise has a smaller probability than `level`."""
        noticed = power(self.values, level, error=self._error)
        if noticed == 0:
            return _not_tested(VARIANCE, f"{self.values} values are too few to notice noise that is missing")
        violated = self._sum < stats.chi2.ppf(level, self.values)
        return _judged(VARIANCE, violated, "less noise was added than claimed", noticed)

    def excessive(self, level: float) -> bool:
        """True where there is far more noise than claimed: not the declared mechanism. For data holders only.

        It breaks no promise of privacy, and replay that went wrong looks the same.
        """
        limit = float(chdtri(self.values, level)) if self.values and level > 0 else math.inf
        return math.sqrt(self._sum) > math.sqrt(limit) + ERROR_LIMIT * math.sqrt(self.values)


class SquaresTest:
    """Whether noise is as large as claimed, if its fourth moment is at most a Gaussian's: uniform noise, too.

    Bernstein's bound for sums of values that are not negative: P[S <= (1 - t) k] <= exp(-k t^2 / 6).
    """

    def __init__(self) -> None:
        self._values, self._sum = 0, 0.0

    def add(self, standard: Floats) -> None:
        """Takes noise divided by its claimed standard deviation."""
        self._values += standard.size
        self._sum += float(np.vdot(standard, standard))

    def judge(self, level: float) -> Outcome:
        """Violated where so little noise has a smaller probability than `level`."""
        _check_level(level)
        if not level or self._values <= -6 * math.log(level):
            return _not_tested(VARIANCE, f"{self._values} values are too few to notice noise that is missing")
        least = self._values - math.sqrt(-6 * self._values * math.log(level))
        return _judged(VARIANCE, self._sum < least, "less noise was added than claimed")


# -- noise that repeats ------------------------------------------------------------------------------------

# 64 steps of the gate's lattice: noise used twice is snapped differently for two rows, by one step.
CELL = 2.0**-14
# For whole messages: so many values that wider cells still never agree by chance.
WIDE_CELL = 2.0**-8
# The coarsest grid that noise lies on, in standard deviations: that of secure sums. Float32 adds its own.
GRAIN = 2.0**-14
# Of the level for repetition, what whole messages, single values and directions get beside rows.
WHOLE_SHARE = 0.1
# Radius, in standard deviations, within which the side that a pair lies on says next to nothing of its mean.
_NEAR = 2.0


class RepetitionTest:
    """Whether vectors of noise were used more than once. Only for draws that should be fresh.

    Vectors are equal where all their values, or all with the other sign, lie in the same cells of `cell`
    standard deviations. Whatever came before, a fresh vector of d values falls into one given cell or its
    mirror image with probability at most 2 ((cell + grain) / sqrt(2 pi))^d, so the number of vectors that
    fall where an earlier one lies is at most a sum of independent coins (each is dominated by its coin, one
    after the other), whose upper tail Chernoff's bound gives. Short vectors repeat by chance; they are caught
    where they do so too often.
    Vectors are compared with those of their own message, and with those of all messages.

    Args:
        cell: Width of a cell.
        near: Whether to compare within a message.
        far: Whether to compare with all messages, which takes 16 bytes of a file per vector.
    """

    def __init__(self, cell: float = CELL, *, near: bool = True, far: bool = True) -> None:
        if not 0 < cell < 0.1:
            raise InputError(f"cell {cell}: expected a small share of the standard deviation, below 0.1")
        self._cell, self._near, self._far = cell, near, far
        self.seen: dict[int, Spool] = defaultdict(Spool)
        self._grain = GRAIN
        self._pairs: dict[int, float] = {}
        self._again = self.vectors = 0

    def add(self, standard: Floats, grain: float = GRAIN) -> None:
        """Takes rows of noise divided by its claimed standard deviation, on a grid of at most `grain`."""
        cells = np.rint(np.clip(standard / self._cell, -(2.0**62), 2.0**62)).astype(np.int64)
        first = np.take_along_axis(cells, (cells != 0).argmax(1)[:, None], axis=1)
        cells *= np.where(first < 0, -1, 1)  # a vector and its mirror image are one
        count, width = standard.shape
        self._grain = max(self._grain, grain)
        self._pairs[width] = self._pairs.get(width, 0.0) + count * (count - 1) / 2
        self.vectors += count
        if width == 1 and not self._far:
            self._again += count - len(np.unique(cells))
            return
        digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in cells)
        self._again += _repeats(digests)
        if self._far:
            self.seen[width].add(digests)

    def chance(self, width: int) -> float:
        """At most the probability of a given cell and its mirror image."""
        return min(1.0, 2 * min(1.0, (self._cell + self._grain) / math.sqrt(2 * math.pi)) ** width)

    def judge(self, level: float) -> Outcome:
        """Violated where vectors are equal that are not so often equal by chance."""
        _check_level(level)
        near = math.fsum(self.chance(width) * pairs for width, pairs in self._pairs.items())
        far, repeats = 0.0, 0
        for width, spool in self.seen.items():
            far += self.chance(width) * spool.count * (spool.count - 1) / 2
            repeats += sum(len(found) - len(np.unique(found)) for (found,) in Spool.parts(spool))
        tried = [(near, self._again)] * self._near + [(far, repeats)] * self._far
        share = level / len(tried)
        repeated = any(_tail(mean, found) < share for mean, found in tried)
        # It says something if it would notice a tenth of all vectors, or a single one where there are fewer.
        least = max(1.0, self.vectors / 10)
        blind = not self.vectors or all(_tail(mean, mean + least) >= share for mean, _ in tried)
        if blind and not repeated:
            return _not_tested(REPETITION, "vectors as short as these repeat by chance")
        return _judged(REPETITION, repeated, "the same noise was used for several vectors")


def directions(standard: Floats) -> Floats:
    """Angles of pairs of values: uniform for independent Gaussians, so no denser than these are near zero.

    Values half a message apart are pairs, as Box and Muller make them; a poor generator has few angles.
    Pairs far from zero are left out: what is added to noise would turn all of them to one side, and that is
    no noise that repeats.
    """
    half = standard.size // 2
    flat = standard.ravel()
    one, other = flat[:half], flat[half : 2 * half]
    near = np.hypot(one, other) <= _NEAR
    return np.arctan2(other[near], one[near])[:, None]


def _repeats(digests: bytes) -> int:
    """How many of these were there before."""
    found = np.frombuffer(digests, dtype="V16")
    return len(found) - len(np.unique(found))


def _tail(mean: float, count: float) -> float:
    """At most the probability that independent coins show heads `count` times, `mean` in expectation."""
    if count <= mean or not count:
        return 1.0
    return math.exp(count - mean + count * math.log(mean / count)) if mean > 0 else 0.0


def off_lattice(released: ArrayLike, std: float) -> int:
    """How many released values the gate's lattice does not contain. Honest runs have none."""
    values = np.asarray(released, np.float64)
    return int((snap(values, std) != values).sum())


# -- noise that is not independent -------------------------------------------------------------------------


class CorrelationTest:
    """Whether two streams of noise are independent, such as those of two owners.

    The correlation about zero of k independent pairs of Gaussians has exactly Student's distribution with
    k - 1 degrees of freedom, whatever their scale.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pairs = 0
        self._sums = np.zeros(3)

    def add(self, left: Floats, right: Floats) -> None:
        """Takes pairs of values; no value may be in two pairs."""
        if left.shape != right.shape:
            raise InputError(f"{self.name}: {left.shape} values against {right.shape}; expected pairs")
        self.pairs += left.size
        self._sums += [np.vdot(left, right), np.vdot(left, left), np.vdot(right, right)]

    def judge(self, level: float, error: float) -> Outcome:
        """Violated where a correlation so far from 0 has a smaller probability than `level`."""
        missing = _too_coarse(self.pairs, level, error)
        if missing:
            return _not_tested(self.name, missing)
        product, left, right = self._sums
        scale = math.sqrt(left * right)
        share = float(np.clip(product / scale, -1.0, 1.0)) if scale > 0 else 0.0
        student = abs(share) * math.sqrt((self.pairs - 1) / max(1 - share * share, 1e-300))
        violated = 2 * stats.t.sf(student, self.pairs - 1) < level
        return _judged(self.name, violated, "noise that should be independent is correlated")


def _too_coarse(values: int, level: float, error: float) -> str:
    """Why a fine test cannot be made with so many values at this error of replay; empty if it can."""
    _check_level(level)
    if level == 0:
        return "no probability of error is left for it"
    if values < FINE_VALUES:
        return f"{values} values are too few; {FINE_VALUES} are needed"
    return "" if error < FINE_ERROR / math.sqrt(values) else "replay is not exact enough"


class NeighbourTest:
    """Whether neighbours in one stream are independent: values after values, or rows after rows.

    Pairs that begin at even places share no value with each other, nor do those at odd places, so each
    kind is a `CorrelationTest` with half of the level.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds = (CorrelationTest(name), CorrelationTest(name))
        self._last: Floats | None = None
        self._place = 0

    def add(self, items: Floats) -> None:
        """Takes the next items of the stream, one per row."""
        if self._last is not None and self._last.shape[1] == items.shape[1]:
            items = np.concatenate([self._last, items])
        for place, kind in enumerate(self._kinds):
            start = (place + self._place) % 2
            kind.add(items[:-1][start::2], items[1:][start::2])
        self._place += len(items) - 1
        self._last = items[-1:]

    def judge(self, level: float, error: float) -> Outcome:
        """Violated where either kind is."""
        return min((kind.judge(level / 2, error) for kind in self._kinds), key=lambda o: o.verdict.rank)


# -- noise of another shape --------------------------------------------------------------------------------


_ROUNDED = 1e-3
"""More standard deviations than the lattice, or float32, rounds a value by."""


class ShapeTest:
    """Whether |z| is nearer to zero than claimed anywhere: Kolmogorov-Smirnov, one-sided, on a fixed grid.

    Noise that is mostly absent and sometimes huge has enough variance and is caught here; more noise than
    claimed is not. Massart 1990: the distribution of k values exceeds the true one by D anywhere with
    probability at most exp(-2 k D^2). The grid only sees less.

    And whether the largest |z| is as large as it must be: k values all stay below m with probability
    (2 Phi(m) - 1)^k, and errors of replay, which noise does not depend on, only make that rarer. Noise
    that ends somewhere tells for certain what is further away. This takes few values and no exactness.
    """

    _GRID = ndtri(0.5 + 0.5 * np.arange(1, 1024) / 1024)
    _EXPECTED = 2 * ndtr(_GRID) - 1

    def __init__(self) -> None:
        self.values = 0
        self._largest = 0.0
        self._below = np.zeros(len(self._GRID) + 1, np.int64)

    def add(self, standard: Floats) -> None:
        """Takes noise divided by its claimed standard deviation."""
        places = np.searchsorted(self._GRID, np.abs(standard).ravel(), side="left")
        self.values += standard.size
        self._largest = max(self._largest, float(np.abs(standard).max(initial=0.0)))
        self._below += np.bincount(places, minlength=len(self._below))

    def judge(self, level: float, error: float) -> Outcome:
        """Violated where so much noise near zero, or so little far away, is less probable than `level`."""
        _check_level(level)
        level /= 2
        inside = 2 * float(ndtr(self._largest + _ROUNDED)) - 1
        if level and self.values * math.log(inside) < math.log(level):
            return _judged(SHAPE, True, "the noise ends where it should go on")
        missing = _too_coarse(self.values, level, error)
        if missing:
            return _not_tested(SHAPE, missing)
        excess = float((np.cumsum(self._below)[:-1] / self.values - self._EXPECTED).max())
        # The density of |z| is below 0.8: replay error moves the distribution by less than itself, the
        # lattice by less than its step.
        limit = math.sqrt(-math.log(level) / (2 * self.values)) + error + 2.0**-20
        return _judged(SHAPE, excess > limit, "the noise is not distributed as claimed")


# -- noise that is missing in one place, or that two owners share -----------------------------------------


class ColumnTest:
    """Whether every column has as much noise as claimed: a sum of squares for each, of vectors of one width.

    One-sided like `VarianceTest`; the level is shared by all columns.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Floats] = {}
        self._rows: dict[int, int] = {}

    def add(self, standard: Floats) -> None:
        """Takes rows of noise divided by its claimed standard deviation."""
        width = standard.shape[1]
        self._sums[width] = self._sums.get(width, np.zeros(width)) + (standard**2).sum(0)
        self._rows[width] = self._rows.get(width, 0) + len(standard)

    def judge(self, level: float) -> Outcome:
        """Violated where one column has so little noise that it has a smaller probability than its share."""
        columns = sum(self._sums)
        if not columns or level == 0:
            return _not_tested(COLUMNS, "there are no columns, or no probability of error is left")
        least = min(float(stats.chi2.cdf(self._sums[w], self._rows[w]).min()) for w in self._sums)
        return _judged(COLUMNS, least * columns < level, "one column has less noise than claimed")


MOST_WAITING = 256
"""Messages of one owner that wait for the others' before correlation between owners is given up."""


class SharedTest:
    """Whether two owners used the same noise: equal vectors anywhere, or correlation message by message."""

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = {owner: RepetitionTest(near=False) for owner in owners}
        self._waiting: dict[str, deque[Floats]] = {owner: deque() for owner in owners}
        self._pairs = {pair: CorrelationTest(SHARED) for pair in itertools.combinations(owners, 2)}
        self._apart = False

    def add(self, owner: str, standard: Floats) -> None:
        """Takes rows of one owner's noise divided by its claimed standard deviation."""
        self._owners[owner].add(standard)
        if self._apart:
            return
        self._waiting[owner].append(standard.ravel())
        if all(self._waiting.values()):
            noise = {name: waiting.popleft() for name, waiting in self._waiting.items()}
            for (left, right), test in self._pairs.items():
                size = min(noise[left].size, noise[right].size)
                test.add(noise[left][:size], noise[right][:size])
        elif len(self._waiting[owner]) > MOST_WAITING:
            self._apart = True
            self._waiting = {}

    def judge(self, level: float, error: float) -> Outcome:
        """Violated where noise is shared; half of the level for each way of looking at it."""
        found = [self._equal(level / 2)]
        found += [test.judge(level / 2 / len(self._pairs), error) for test in self._pairs.values()]
        made = [outcome for outcome in found if outcome.verdict is not Verdict.NOT_TESTED]
        if not made:
            return _not_tested(SHARED, "too few values to compare owners")
        violated = any(outcome.verdict is Verdict.VIOLATED for outcome in made)
        return _judged(SHARED, violated, "two owners used the same noise")

    def _equal(self, level: float) -> Outcome:
        """Whether vectors of different owners are equal more often than by chance, see `RepetitionTest`."""
        mean, repeats, tests = 0.0, 0, list(self._owners.values())
        for width in {width for test in tests for width in test.seen}:
            count = 0
            for part in Spool.parts(*(test.seen[width] for test in tests)):
                together = np.concatenate([np.unique(found) for found in part])
                count += len(together)
                repeats += len(together) - len(np.unique(together))
            mean += max(test.chance(width) for test in tests) * count**2 / 2
        least = max(1.0, max(test.vectors for test in tests) / 10)
        shared = _tail(mean, repeats) < level
        if _tail(mean, mean + least) >= level and not shared:
            return _not_tested(SHARED, "vectors as short as these agree by chance")
        return _judged(SHARED, shared, "two owners used the same noise")


# -- all of it ---------------------------------------------------------------------------------------------


class NoiseEvidence:
    """All tests on the replayed noise of one path, fed message by message.

    Args:
        fresh: False where the same noise is meant to return (a value that is released again).
        cell: Width within which noise counts as repeated, in standard deviations.
        limit: Error of replay at which the power is stated, see `VarianceTest`.
    """

    def __init__(self, *, fresh: bool = True, cell: float = CELL, limit: float = ERROR_LIMIT) -> None:
        self.variance = VarianceTest(limit)
        self._repetition = RepetitionTest(cell) if fresh else None
        self._whole = RepetitionTest(WIDE_CELL, near=False)
        self._single = RepetitionTest(cell, far=False)
        self._directions = RepetitionTest(cell, far=False)
        self._values, self._rows, self._messages = map(NeighbourTest, (VALUES, ROWS, MESSAGES))
        self._shape, self._columns = ShapeTest(), ColumnTest()
        self._squared_error = 0.0
        self._off_lattice: int | None = None
        self.unreplayed = 0

    def add(
        self,
        noise: ArrayLike,
        std: float,
        *,
        error: float = 0.0,
        released: ArrayLike | None = None,
        largest: float = 0.0,
    ) -> None:
        """Takes one message.

        Args:
            noise: Released values minus the recomputed ones, a vector per row.
            std: The claimed standard deviation of this message's noise.
            error: Root mean square of the replay's own error divided by `std`. Above `ERROR_LIMIT` the
                message counts as not replayed.
            released: The released values, where they must lie on the gate's lattice.
            largest: Magnitude of what was released: float32 rounds by its last digits.
        """
        rows = np.asarray(noise, np.float64)
        rows = rows.reshape(len(rows), -1) if rows.ndim > 1 else rows.reshape(1, -1)
        if not 0 < std < math.inf or not error >= 0 or not rows.size or not np.isfinite(rows).all():
            raise InputError(
                f"noise of shape {rows.shape}, std {std}, error {error}; expected finite values, a "
                "positive std and an error of at least 0"
            )
        if released is not None:
            self._off_lattice = (self._off_lattice or 0) + off_lattice(released, std)
        if error > ERROR_LIMIT:
            self.unreplayed += 1
            return
        standard = rows / std
        self._squared_error += error * error * rows.size
        self.variance.add(standard)
        if self._repetition is not None:
            grain = GRAIN + 2.0**-23 * largest / std
            self._repetition.add(standard, grain)
            self._whole.add(standard.reshape(1, -1), grain)
            self._single.add(standard.reshape(-1, 1), grain)
            self._directions.add(directions(standard), grain)
            self._values.add(standard.reshape(-1, 1))
            self._rows.add(standard)
            self._messages.add(standard.reshape(1, -1))
        self._shape.add(standard)
        self._columns.add(standard)

    @property
    def error(self) -> float:
        """Root mean square of the replay's error over all values, in standard deviations of the noise."""
        return math.sqrt(self._squared_error / max(1, self.variance.values))

    def judge(self, levels: Mapping[str, float]) -> list[Outcome]:
        """The outcome of every test; `levels` names one for each of `NOISE_TESTS`."""
        error = self.error
        outcomes = [self.variance.judge(levels[VARIANCE]), self._shape.judge(levels[SHAPE], error)]
        outcomes.append(self._columns.judge(levels[COLUMNS]))
        if self._repetition is not None:
            outcomes.append(self._repeats(levels[REPETITION]))
            outcomes.append(self._values.judge(levels[VALUES], error))
            outcomes.append(self._rows.judge(levels[ROWS], error))
            outcomes.append(self._messages.judge(levels[MESSAGES], error))
        if self._off_lattice is not None:
            outcomes.append(_judged(LATTICE, self._off_lattice > 0, "released values are off the lattice"))
        return outcomes

    def _repeats(self, level: float) -> Outcome:
        """Of rows, whole messages and single values."""
        if self._repetition is None:
            return self._whole.judge(level)
        # Short rows need all of the level that there is; whole messages hardly ever repeat by chance.
        parts = (self._whole, self._single, self._directions)
        found = [self._repetition.judge(level * (1 - len(parts) * WHOLE_SHARE))]
        found += [test.judge(level * WHOLE_SHARE) for test in parts]
        made = [outcome for outcome in found if outcome.verdict is not Verdict.NOT_TESTED]
        return min(made, key=lambda outcome: outcome.verdict.rank) if made else found[0]

    def finding(self, promise: str, path: str, levels: Mapping[str, float]) -> Finding:
        """The verdict on the path: it holds if its variance was tested and every message was replayed."""
        return conclude(promise, path, self.judge(levels), self.unreplayed)


def conclude(promise: str, path: str, outcomes: Sequence[Outcome], unreplayed: int = 0) -> Finding:
    """Combines outcomes. Tests other than the variance's that could not be made are named, no more.

    Which fine tests could be made depends on the error of replay, a function of the data: the names of tests
    and the reasons are for data holders, a public dossier shows the verdict, the values and the power.
    """
    made = [outcome for outcome in outcomes if outcome.verdict is not Verdict.NOT_TESTED]
    violations = [f"{o.test}: {o.reason}" for o in made if o.verdict is Verdict.VIOLATED]
    notes = [f"{o.test} not tested: {o.reason}" for o in outcomes if o.verdict is Verdict.NOT_TESTED]
    if unreplayed:
        notes.append(f"{unreplayed} messages could not be replayed exactly enough")
    complete = not unreplayed and any(outcome.test in (VARIANCE, FLIPS) for outcome in made)
    verdict = Verdict.VIOLATED if violations else Verdict.HOLDS if complete else Verdict.NOT_TESTED
    powers = {o.part: o.power for o in made if o.test == VARIANCE and o.power is not None}
    return Finding(
        promise=promise,
        path=path,
        verdict=verdict,
        tested=tuple(dict.fromkeys(outcome.test for outcome in made)),
        power=powers.get("", min(powers.values(), default=None)),
        powers={f"{path}, {part}" if part else path: value for part, value in powers.items()},
        reasons=tuple(violations + notes) or (() if complete else ("nothing was replayed",)),
    )
