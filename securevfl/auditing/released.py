"""What released values say about their own noise, without the data: they spread at least as far as it.

A vector x with Gaussian noise of std s around it has a squared length that is noncentral chi-squared times
s^2, so whatever x is, sums of such squares are no smaller than those of the noise alone. Values that are
too short had less noise; and all of them lie on the gate's lattice. For the same reason a message is about as
far from every earlier one, and from its mirror image: where it is nearer, their noise was the same. The
tests read what observers were given, which is post-processing of a release that was paid for. They notice
noise that is missing, or comes again, where it is large beside the clip, also where nothing can be replayed:
of predictions, of runs that were interrupted, or of an organisation whose data are not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammainc

from securevfl.auditing.evidence import Floats, VarianceTest, off_lattice
from securevfl.auditing.verdicts import RELEASED, ErrorBudget, Finding, Verdict

SPREAD, ON_LATTICE = "values spread as far as their noise", "values lie on the lattice"
APART = "messages are as far apart as their noise"
Path = tuple[str, str, str]
COMPARED, VALUES = 1024, 128
"""Messages that all later ones are compared with, and how many of their first values."""
_NEAR = 1e-6


class ApartTest:
    """Whether messages from one owner to one observer are as far apart as fresh noise takes them.

    Whatever was released before, the next message is its values, a function of all that, plus fresh noise of
    std s. Its squared distance from any earlier message, or from one's mirror image, divided by s^2, is
    noncentral chi-squared then, and no smaller than the noise alone would be. With noise of an earlier
    message it is at most that of two clipped vectors. Messages whose values are the very same tell nothing
    new, and are left out.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Floats] = {}
        self._count: dict[int, int] = defaultdict(int)
        self._pairs = 0
        self._least: dict[str, float] = {}

    def add(self, kind: str, values: Floats, std: float) -> None:
        """Takes a message."""
        mine, count = values.ravel()[:VALUES], self._count[values.size]
        kept = self._kept.get(values.size, np.empty((1, mine.size)))
        if count:
            self._pairs += 2 * count
            # P[chi-squared of k values <= x] = gammainc(k / 2, x / 2)
            chance = float(gammainc(mine.size / 2, _nearest(kept[:count], mine) / std**2 / 2))
            self._least[kind] = min(chance, self._least.get(kind, 1.0))
        if count < COMPARED:
            if count == len(kept):
                kept = np.concatenate([kept, np.empty_like(kept)])
            kept[count] = mine
            self._kept[values.size], self._count[values.size] = kept, count + 1

    def tried(self, kind: str) -> bool:
        """Whether messages of a kind were compared with others."""
        return kind in self._least

    def near(self, kind: str, level: float) -> bool:
        """Whether one is nearer to another than any of all pairs is with a probability of `level`."""
        return self.tried(kind) and self._least[kind] * self._pairs < level


def _nearest(kept: Floats, mine: Floats) -> float:
    """The smallest squared distance from one of these or its mirror image that is not zero."""
    norms = np.einsum("nd,nd->n", kept, kept) + mine @ mine
    squares = norms - 2 * np.abs(kept @ mine)
    # Of what is near, products say too little; distances are computed.
    near = kept[squares <= max(_NEAR * float(norms.max()), float(squares.min()))]
    exact = np.concatenate([((near - mine) ** 2).sum(1), ((near + mine) ** 2).sum(1)])
    return float(exact[exact > 0].min(initial=np.inf))


class ReleasedEvidence:
    """All values that left under entries with Gaussian noise, by owner, observer and kind.

    Args:
        lattice: Whether they passed our gate, which puts them on its lattice.
    """

    def __init__(self, *, lattice: bool = True) -> None:
        self._lattice = lattice
        self._spread: dict[Path, VarianceTest] = defaultdict(VarianceTest)
        self._off: dict[Path, int] = defaultdict(int)
        self._apart: dict[tuple[str, str], ApartTest] = defaultdict(ApartTest)

    def add(self, path: Path, values: ArrayLike, std: float) -> None:
        """Takes released vectors, each of them once, and the noise that their entry claims."""
        array = np.asarray(values, np.float64)
        if array.size and std > 0 and np.isfinite(array).all():
            self._spread[path].add(array / std)
            self._off[path] += off_lattice(array, std) if self._lattice else 0
            self._apart[path[:2]].add(path[2], array, std)

    def findings(self, budget: ErrorBudget) -> Iterator[Finding]:
        """One for each path."""
        if not self._spread:
            return
        levels = budget.split(RELEASED, [str(path) for path in (*self._spread, *self._apart)])
        for path, test in self._spread.items():
            ends, kind = path[:2], path[2]
            short = test.judge(levels[str(path)]).verdict is Verdict.VIOLATED
            reasons = ["released values are shorter than their noise alone would be"] if short else []
            reasons += ["released values are off the lattice"] if self._off[path] else []
            near, tried = self._apart[ends].near(kind, levels[str(ends)]), self._apart[ends].tried(kind)
            reasons += ["two messages are nearer to each other than fresh noise lets them be"] if near else []
            yield Finding(
                promise=f"{path[0]} against {path[1]}",
                path=path[2],
                verdict=Verdict.VIOLATED if reasons else Verdict.HOLDS,
                tested=(SPREAD, *[APART] * tried, *[ON_LATTICE] * self._lattice),
                reasons=tuple(reasons),
            )
