"""Noise of sealed scorecards: how mu^2 is shared among five openings, and every scale that follows.

| opening | share of mu^2 | totals | one record moves it by |
|---|---|---|---|
| counts on public grids, three levels, each party alone | .10 | 3 | 2 cells by 1 per column and level |
| label histogram X'y, X'(1 - y), X one-hot | .35 | 1 | per column sqrt 2 |
| first fit | .15 | 20 | `SealedShifts` with rows clipped to 1 |
| residual histogram X'(y - p) | .20 | 1 | per column 2 R |
| last fit | .20 | 40 | as the first |

Person level, replace-one: all columns of all parties and the label of one record change together, as far as a
coalition does not hold them itself. Each opening is calibrated against its worst coalition and their mu^2 add
up, so the sum bounds what any one coalition learns. Below a public size (`RESIDUAL_FROM`) the residual
histogram is not worth its noise and its share goes to the last fit; with nothing to bin, so does theirs.

A card may start from a profile, which has opened bins and label histogram with .10 and .90 of its own mu^2.
Where that histogram has cost less than .35 of the card's mu^2, a second one adds the rest, and both are
averaged; fits and residual histogram divide what is left as above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from securevfl.accountants import checks
from securevfl.accountants.sealed import SealedShifts, Variances
from securevfl.errors import AccountingError

SHARES: Mapping[str, float] = {"bins": 0.10, "labels": 0.35, "first": 0.15, "residuals": 0.20, "last": 0.20}
PROFILE_SHARES: Mapping[str, float] = {"bins": 0.10, "labels": 0.90}
"""A profile has the first two openings alone."""
LEAST_AGAIN = 0.01
"""Share of mu^2 from which on a card opens the label histogram once more, after that of a profile."""
LEVELS = (0.4, 0.3, 0.3)
"""How the bins' share is divided among the three levels of counts."""
TOTALS: Mapping[str, int] = {"first": 20, "last": 40}
RESIDUAL_FROM = 1250.0
"""Least mu N / sqrt(f) for a residual histogram of its own."""
CARD_BINS = ((32, 2500.0), (16, 0.0))
"""Bins of a number, and the least mu N / sqrt(f) for them; chosen on uci-credit and adult."""
PROFILE_BINS = ((32, 5000.0), (16, 1250.0), (8, 0.0))
"""In a profile, whose ranking needs fewer; chosen on uci-credit."""
BIAS = 0.25
"""The label holder's constant column."""


@dataclass(frozen=True, kw_only=True)
class ScorecardNoise:
    """Every noise scale of one scorecard.

    Args:
        mu: What all openings together may cost.
        records: N, public.
        columns: f_m, columns of every member; 0 for a label holder without features, which takes part with
            a constant column.
        binned: Columns of all members together that are binned by noisy counts.
        label_holder: Index of the member with the labels.
        colluders: t.
        residual_bound: R of the series, rounding included.
        residual_change: rho of the series.
        profile: Only bins and label histogram, without a model.
        profiled: The mu that a profile has spent on bins and label histogram, which a card takes over; 0 if
            it opens its own.
        classes: Labels that there are. A record is in one (bin, label) cell per column, however many; of more
            than two, residual_bound is that of all residuals together, and they have no histogram.
        cutting: How far apart a residual histogram's shorter words can take residuals that were equal.
    """

    mu: float
    records: int
    columns: tuple[int, ...]
    binned: int
    label_holder: int = 0
    colluders: int = 1
    residual_bound: float
    residual_change: float
    profile: bool = False
    profiled: float = 0.0
    contributors: tuple[frozenset[int], ...] | None = None
    cutting: float = 0.0
    classes: int = 2

    def __post_init__(self) -> None:
        checks.positive("mu", self.mu)
        checks.positive("records", self.records)
        checks.count("binned", self.binned)
        if not 0 <= self.profiled < self.mu or (self.profile and self.profiled):
            raise AccountingError(
                f"a profile has spent mu {self.profiled:.6g} of {self.mu:.6g}; a card needs more"
            )
        empty = [m for m, width in enumerate(self.columns) if not width and m != self.label_holder]
        if empty or sum(self.columns) < max(1, self.binned):
            raise AccountingError(
                f"columns {self.columns} with {self.binned} to bin and label holder {self.label_holder}; "
                "every other member needs a column, and no more can be binned than there are"
            )

    @property
    def size(self) -> float:
        """How large the data is against the noise of a histogram: mu N / sqrt(f). Public."""
        return self.mu * self.records / math.sqrt(sum(self.columns))

    @property
    def residuals(self) -> bool:
        """Whether there is a residual histogram."""
        return self.size >= RESIDUAL_FROM and not self.profile and self.classes == 2

    @property
    def shares(self) -> dict[str, float]:
        """Shares of mu^2 by opening; they sum to 1. What follows a profile divides what that has left."""
        shares = dict(PROFILE_SHARES if self.profile else SHARES)
        if self.profiled:
            before = (self.profiled / self.mu) ** 2
            known = {name: before * share for name, share in self.before.shares.items()}
            again = max(0.0, SHARES["labels"] - known["labels"])
            fits = {name: share for name, share in SHARES.items() if name not in PROFILE_SHARES}
            known |= {"again": again} if again >= LEAST_AGAIN else {}
            left = 1 - math.fsum(known.values())
            whole = math.fsum(fits.values())
            shares = known | {name: left * share / whole for name, share in fits.items()}
        elif not self.binned:
            shares["labels" if self.profile else "last"] += shares.pop("bins")
        if not self.residuals and not self.profile:
            shares["last"] += shares.pop("residuals")
        return shares

    @property
    def before(self) -> ScorecardNoise:
        """The noise of the profile that a card starts from."""
        return replace(self, mu=self.profiled, profiled=0.0, profile=True)

    def mu_of(self, opening: str) -> float:
        """What one opening (all its totals) costs; of a profile's, to the last digit what that says."""
        if self.profiled and opening in PROFILE_SHARES:
            return self.before.mu_of(opening)
        return self.mu * math.sqrt(self.shares[opening])

    @property
    def bin_stds(self) -> tuple[float, ...]:
        """Noise of the counts of a binned number, level by level."""
        return tuple(self.list_std / math.sqrt(share) for share in LEVELS) if self.binned else ()

    @property
    def list_std(self) -> float:
        """Noise of the counts of a category list, which takes one level; a column costs the same as a number.

        2 n_cols cells move by 1 between two records, over all columns.
        """
        return math.sqrt(2 * self.binned) / self.mu_of("bins") if self.binned else 0.0

    @cached_property
    def shifts(self) -> dict[str, SealedShifts]:
        """How far one record moves one total of each sealed opening."""
        roots = tuple(math.sqrt(width) for width in self.columns)
        holder, change = self.label_holder, self.residual_change
        counted = tuple(root or 1.0 for root in roots)
        rows = tuple(1.0 if width else BIAS for width in self.columns)
        bound, cut = self.residual_bound, self.residual_bound + self.cutting / 2
        fit = SealedShifts(
            clips=rows,
            label_holder=holder,
            residual_bound=bound,
            residual_change=change,
            contributors=self.contributors,
        )
        # A record is in one (bin, label) cell per column: of two records' cells none, or both, differ.
        labels = SealedShifts(
            clips=counted,
            label_holder=holder,
            residual_bound=math.sqrt(0.5),
            residual_change=0.0,
            known_label=2.0,
            contributors=self.contributors,
        )
        found = {
            "labels": labels,
            "again": labels,
            "first": fit,
            "residuals": SealedShifts(
                clips=roots,
                label_holder=holder,
                residual_bound=cut,
                residual_change=change + self.cutting,
                known_label=2 * cut**2,
                contributors=self.contributors,
            ),
            "last": fit,
        }
        return {name: shifts for name, shifts in found.items() if name in self.shares}

    @cached_property
    def variances(self) -> dict[str, Variances]:
        """Noise [target][member] of one total of each sealed opening."""
        return {
            name: shifts.variances(
                mu=self.mu_of(name) / math.sqrt(TOTALS.get(name, 1)), colluders=self.colluders
            )
            for name, shifts in self.shifts.items()
        }

    def std(self, opening: str, member: int) -> float:
        """Noise of all members together on one total of a member: what utility pays."""
        return math.sqrt(math.fsum(self.variances[opening][member]))

    def label_std(self, member: int) -> float:
        """Noise of a cell of the label histogram: of both openings, weighted by what each is worth."""
        both = [self.std(name, member) for name in ("labels", "again") if name in self.variances]
        return 1 / math.sqrt(math.fsum(std**-2 for std in both))

    def spent(self, coalition: frozenset[int] | None = None) -> float:
        """Mu recomputed from every scale.

        Args:
            coalition: Against this one; None sums the worst case of each opening, which the ledger counts.
        """
        squares = [2 * self.binned / std**2 for std in self.bin_stds]
        for name, shifts in self.shifts.items():
            noise = self.variances[name]
            each = (
                shifts.mu(noise, colluders=self.colluders) ** 2
                if coalition is None
                else shifts.squared_mu(noise, coalition)
            )
            squares.append(TOTALS.get(name, 1) * each)
        return math.sqrt(math.fsum(squares))


def most_bins_for(noise: ScorecardNoise) -> int:
    """The most bins that a number gets, by public facts alone; after a profile those that it has."""
    noise = noise.before if noise.profiled else noise
    table = PROFILE_BINS if noise.profile else CARD_BINS
    return next(bins for bins, least in table if noise.size >= least)
