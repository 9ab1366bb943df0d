"""What released values say about their own noise, without the data: they spread at least as far as it.

A vector x with Gaussian noise of std s around it has a squared length that is noncentral chi-squared times
s^2, so whatever x is, sums of such squares are no smaller than those of the noise alone. Values that are
too short had less noise; and all of them lie on the gate's lattice. The tests read what observers were given,
which is post-processing of a release that was paid for. They notice missing noise where it is large beside
the clip, also where nothing can be replayed: of predictions, or of an organisation whose data are not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from securevfl.auditing.evidence import VarianceTest, off_lattice
from securevfl.auditing.verdicts import RELEASED, ErrorBudget, Finding, Verdict

SPREAD, ON_LATTICE = "values spread as far as their noise", "values lie on the lattice"
Path = tuple[str, str, str]


class ReleasedEvidence:
    """All values that left under entries with Gaussian noise, by owner, observer and kind.

    Args:
        lattice: Whether they passed our gate, which puts them on its lattice.
    """

    def __init__(self, *, lattice: bool = True) -> None:
        self._lattice = lattice
        self._spread: dict[Path, VarianceTest] = defaultdict(VarianceTest)
        self._off: dict[Path, int] = defaultdict(int)

    def add(self, path: Path, values: ArrayLike, std: float) -> None:
        """Takes released vectors, each of them once, and the noise that their entry claims."""
        array = np.asarray(values, np.float64)
        if array.size and std > 0 and np.isfinite(array).all():
            self._spread[path].add(array / std)
            self._off[path] += off_lattice(array, std) if self._lattice else 0

    def findings(self, budget: ErrorBudget) -> Iterator[Finding]:
        """One for each path."""
        if not self._spread:
            return
        levels = budget.split(RELEASED, [str(path) for path in self._spread])
        for path, test in self._spread.items():
            short = test.judge(levels[str(path)]).verdict is Verdict.VIOLATED
            reasons = ["released values are shorter than their noise alone would be"] if short else []
            reasons += ["released values are off the lattice"] if self._off[path] else []
            yield Finding(
                promise=f"{path[0]} against {path[1]}",
                path=path[2],
                verdict=Verdict.VIOLATED if reasons else Verdict.HOLDS,
                tested=(SPREAD, ON_LATTICE) if self._lattice else (SPREAD,),
                reasons=tuple(reasons),
            )
