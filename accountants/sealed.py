"""Mode `sealed`: what the noisy totals of one iteration tell, and how much noise each member must add.

A record's features, its label, or both are replaced. Given all past totals every weight is fixed, so one
iteration is a Gaussian release of L2 sensitivity D, iterations compose adaptively, and T of them have
mu = (D / sigma) sqrt(T). All totals count for every observer: later weights depend on earlier totals.

`SealedShifts` does it coalition by coalition. Member j's noise on member m's total has variance v[m][j], and
a coalition S subtracts its own: what protects total m is the sum over j not in S. What S knows anyway needs
no protection, so against S only what lies outside S is replaced:

- the label is outside: the residual may move from -R to R, and every total m by 2 R C_m;
- the label is inside: residuals r, r' of one label lie on one side of zero. Total m moves by at most
  (|r| + |r'|) C_m where the features are outside S and by |r - r'| C_m where they are inside. The squared
  shift is convex in (|r|, |r'|), so it is largest at a corner: both full (2 R C_m outside, 0 inside) or one
  full and one zero (rho C_m everywhere).

With K outputs each of the K residuals may do so, which multiplies squared shifts by K.

Histograms (one-hot operands) move less while the label stays: replaced features take a record out of one cell
and into another, never back onto the same, so the two shifts are orthogonal and their squares r^2 + r'^2 add
up to at most 2 R^2 per squared clip instead of 4 R^2 (`known_label`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from securevfl.accountants import checks
from securevfl.accountants.records import SESSIONS
from securevfl.errors import AccountingError

Protects: TypeAlias = Literal["features", "label", "person"]
PROTECTS: tuple[Protects, ...] = ("features", "label", "person")

# Range of the sine-series residual s(u) - y, and of its change between two scores, rounding included.
RESIDUAL_BOUND = 1.00322
RESIDUAL_CHANGE = 1.00644


def sealed_sensitivity(
    clips: Sequence[float],
    *,
    protects: Protects = "features",
    party: int | None = None,
    residual_bound: float = RESIDUAL_BOUND,
    residual_change: float = RESIDUAL_CHANGE,
) -> float:
    """Return D, the L2 sensitivity of one iteration's totals of all parties.

    Args:
        clips: The row norm bound of every party.
        protects: What of one record is replaced: one party's `features`, the `label`, or the whole
            `person` (equally: features and label).
        party: Index of the party whose features are replaced; None takes the worst party.
        residual_bound: Bound R of the absolute residual.
        residual_change: Bound of the residual's change when the score changes.
    """
    bounds = [checks.positive("clip", clip) for clip in clips]
    if not bounds:
        raise AccountingError("clips is empty; expected the row norm bound of every party")
    checks.choice("protects", protects, PROTECTS)
    everything = math.fsum(clip * clip for clip in bounds)
    if protects == "label":
        return math.sqrt(everything)
    if protects == "person":
        return 2 * residual_bound * math.sqrt(everything)
    if party is not None and checks.count("party", party) >= len(bounds):
        raise AccountingError(f"party is {party}; expected an index below {len(bounds)}")
    own = max(bounds) if party is None else bounds[party]
    return max(2 * residual_bound * own, residual_change * math.sqrt(everything))


def sealed_mu(*, sensitivity: float, sigma: float, iterations: int) -> float:
    """Return mu for a record that `iterations` openings contain."""
    ratio = checks.positive("sensitivity", sensitivity) / checks.positive("sigma", sigma)
    return ratio * math.sqrt(checks.count("iterations", iterations))


def sealed_sigma(*, sensitivity: float, mu: float, iterations: int) -> float:
    """Return the noise of a total's honest part that gives `mu` after `iterations` openings."""
    spread = checks.positive("sensitivity", sensitivity) * math.sqrt(checks.count("iterations", iterations))
    return spread / checks.positive("mu", mu)


def checked_slack(
    *,
    epsilon: float,
    iterations: int,
    outputs: int,
    residual_bound: float,
    blind_bits: int,
    bounds: Sequence[int],
    columns: Sequence[int],
    sessions: int = SESSIONS,
) -> float:
    """Return delta', what a protocol that is checked adds to delta.

    Residuals are hidden by masks of `blind_bits` bits at 28 fraction bits, rows by masks of 60 bits: one
    replaced record moves their distribution by the first two terms. A false proof is accepted, or a tampered
    opening passes, with the probability of the third, in which case everything may be lost; (1 + e^epsilon)
    carries that from one data set to its neighbour. The cipher and the hash are taken to be perfect.

    Args:
        epsilon: The promised epsilon.
        iterations: Openings that contain a record.
        outputs: Residuals per record.
        residual_bound: R.
        blind_bits: Bits of each member's mask on its residual share.
        bounds: Norm bound of every member's rows, in integers.
        columns: Columns of every member's masked rows, slack included.
        sessions: How often rows are proved anew; a ledger refuses more than `SESSIONS`.
    """
    members, prime = len(bounds), 2.0**61 - 1
    shares = iterations * outputs * residual_bound * 2.0 ** (29 - blind_bits)
    rows = sessions * sum(2 * b * math.sqrt(w) for b, w in zip(bounds, columns, strict=True)) * 2.0**-60
    proofs = sessions * (members * (members - 1) * 80 / (prime - 27) + members * 2.0**-64)
    tags = 2 * iterations * sessions / prime
    return shares + rows + (1 + math.exp(min(epsilon, 700.0))) * (proofs + tags)


def flooding_slack(
    *, epsilon: float, rounds: int, records: int, widths: Sequence[int], outputs: int, products: int
) -> float:
    """Return what answers under encryption add to delta, where two members do without a dealer.

    An answer's own noise, of std e, is hidden by noise uniform on 2^128 values: one coefficient tells them
    apart with probability |e| / 2^128, on average 0.8 e. Every coefficient of every answer counts, whoever
    gets it. What an answer multiplies is uniform modulo t = 2^50: its std is t / sqrt(12) times that of
    encryption, 3.24, times the root of how many coefficients are added up.

    Args:
        epsilon: The promised epsilon.
        rounds: How many.
        records: Of one round.
        widths: Columns of both members.
        outputs: Residuals per record.
        products: Products of masks per residual; 0 where there are none.
    """
    degree, columns = 8192, 16
    unit = 0.8 * 3.24 * 2.0**50 / math.sqrt(12) * 2.0**-128
    masks = -(-records // degree) * math.sqrt(products * degree)
    rows = sum(-(-width // columns) for width in widths) * math.sqrt(records)
    return (1 + math.exp(min(epsilon, 700.0))) * rounds * outputs * degree * unit * (masks + rows)


Variances: TypeAlias = tuple[tuple[float, ...], ...]
"""[m][j]: variance of member j's noise on member m's total."""

MAX_MEMBERS = 16  # all coalitions are examined


@dataclass(frozen=True, kw_only=True)
class SealedShifts:
    """How far one record can move the totals of one iteration.

    Args:
        clips: Row norm bound C_m of every member; 0 for a label holder without features.
        label_holder: Index of the member with the labels.
        protects: What of one record is replaced: all of the `person` that a coalition does not hold itself,
            one party's `features`, or the `label`.
        residual_bound: R, bound of a residual's magnitude.
        residual_change: rho, bound of a residual's change while the label stays.
        label_change: Largest difference of two labels.
        outputs: K, residuals per record.
        known_label: Largest squared shift per squared clip while the label stays and the features change;
            None takes (2 R)^2, which any operand keeps. One-hot operands need less. Person level only.
        contributors: Who can add noise to each member's total, the member itself and the label holder among
            them; None for everybody.
    """

    clips: tuple[float, ...]
    label_holder: int
    protects: Protects = "person"
    residual_bound: float
    residual_change: float
    label_change: float = 1.0
    outputs: int = 1
    known_label: float | None = None
    contributors: tuple[frozenset[int], ...] | None = None

    def __post_init__(self) -> None:
        for clip in self.clips:
            checks.non_negative("clip", clip)
        checks.choice("protects", self.protects, PROTECTS)
        if not 2 <= len(self.clips) <= MAX_MEMBERS or not 0 <= self.label_holder < len(self.clips):
            raise AccountingError(
                f"{len(self.clips)} members with label holder {self.label_holder}; 2 to {MAX_MEMBERS} work"
            )
        if not any(self.clips):
            raise AccountingError("every clip is 0; at least one member needs features")
        if self.known_label is not None and self.protects != "person":
            raise AccountingError(f"one-hot openings protect the whole person, found {self.protects!r}")
        given = self.contributors
        if given is not None and (
            len(given) != len(self.clips) or any(not {m, self.label_holder} <= c for m, c in enumerate(given))
        ):
            raise AccountingError("every total needs the noise of its own member and of the label holder")

    @property
    def _known(self) -> float:
        return (2 * self.residual_bound) ** 2 if self.known_label is None else self.known_label

    @property
    def diameter(self) -> float:
        """D, the L2 distance that one record can move all totals together, whoever looks."""
        full, everything = 2 * self.residual_bound, math.fsum(clip * clip for clip in self.clips)
        if self.protects == "label":
            return math.sqrt(min(self.outputs, 2) * everything) * self.label_change
        if self.protects == "features":
            change = self.residual_change * math.sqrt(everything)
            return math.sqrt(self.outputs) * max(full * max(self.clips), change)
        return math.sqrt(self.outputs * everything) * full

    def squared_mu(self, variances: Variances, coalition: frozenset[int]) -> float:
        """The squared mu of one iteration against a coalition; infinite where it knows all the noise."""
        rates = [
            _ratio(clip * clip, sum(v for j, v in enumerate(variances[m]) if j not in coalition))
            for m, clip in enumerate(self.clips)
        ]
        outside = [m for m in range(len(self.clips)) if m not in coalition]
        full, change = (2 * self.residual_bound) ** 2, self.residual_change**2
        total = math.fsum(rates)
        if self.protects == "label":
            changed = min(self.outputs, 2)  # a one-hot label differs in two places
            return changed * self.label_change**2 * total if self.label_holder in outside else 0.0
        if self.protects == "features":
            own = max((rates[m] for m in outside), default=0.0)
            return self.outputs * max(full * own, change * total)
        if self.label_holder in outside:
            return self.outputs * full * total
        moved = self._known * math.fsum(rates[m] for m in outside)
        return self.outputs * (max(moved, change * total) if change else moved)

    def coalitions(self, colluders: int, *, without: int | None = None) -> Iterator[frozenset[int]]:
        """All coalitions of at most `colluders` members, optionally without one member."""
        members = [m for m in range(len(self.clips)) if m != without]
        sizes = range(min(colluders, len(members)) + 1)
        return (frozenset(group) for size in sizes for group in itertools.combinations(members, size))

    def mu(self, variances: Variances, *, colluders: int, owner: int | None = None) -> float:
        """The mu of one iteration against the worst coalition of at most `colluders` members.

        Args:
            variances: Everybody's noise.
            colluders: t.
            owner: Only coalitions without this member, which are those it protects its records against.
        """
        squares = (self.squared_mu(variances, s) for s in self.coalitions(colluders, without=owner))
        return math.sqrt(max(squares))

    def variances(self, *, mu: float, colluders: int) -> Variances:
        """Noise that keeps one iteration within `mu` against every coalition of at most `colluders`.

        The label holder's shares answer for the coalitions without it, the others' for those with it; noise
        on the label holder's own total has to hide less from a coalition that holds the labels. The result is
        checked against every coalition and scaled up if a bound should not be met.
        """
        members = len(self.clips)
        if not 1 <= checks.count("colluders", colluders) < members:
            raise AccountingError(
                f"{colluders} colluders among {members} members; 1 to {members - 1} are possible"
            )
        given = self.contributors or (frozenset(range(members)),) * members
        if min(map(len, given)) <= colluders:
            raise AccountingError(f"{colluders} colluders know all the noise of a total; {given} contribute")
        shape = self._shape(colluders, [len(each) for each in given])
        found = tuple(
            tuple(v if j in given[m] else 0.0 for j, v in enumerate(row)) for m, row in enumerate(shape)
        )
        scale = (self.mu(found, colluders=colluders) / checks.positive("mu", mu)) ** 2 * (1 + 1e-12)
        return tuple(tuple(v * scale for v in row) for row in found)

    def _shape(self, t: int, adding: Sequence[int]) -> Variances:
        """The proportions of the noise, for mu = 1, where so many add theirs to each total."""
        members, holder = len(self.clips), self.label_holder
        squares = [clip * clip for clip in self.clips]
        full, change, everything = (2 * self.residual_bound) ** 2, self.residual_change**2, sum(squares)
        if self.protects == "features":
            each = max(full * max(squares), change * everything)
            return tuple((each / (count - t),) * members for count in adding)
        if self.protects == "label":
            return tuple(tuple(everything * (j == holder) for j in range(members)) for _ in squares)
        features = sorted(squares[:holder] + squares[holder + 1 :], reverse=True)
        # Against coalitions with the label holder: `others` for each party on its peers' totals, `own` on the
        # label holder's, so that both corners hold (module docstring). 4/3 leaves a quarter of the second.
        peers = max(self._known * sum(features[: members - t]), 4 / 3 * change * sum(features))
        left = 1 - change * sum(features) / peers
        own = min(change * squares[holder] / left, peers) if squares[holder] else 0.0
        by_others = [(own if m == holder else peers) / (count - t) for m, count in enumerate(adding)]
        # Against coalitions without it: its own share fills up what is missing.
        wanted = full * everything
        by_holder = [
            max(0.0, wanted - (count - 1 - t) * v) for count, v in zip(adding, by_others, strict=True)
        ]
        return tuple(
            tuple(by_holder[m] if j == holder else by_others[m] for j in range(members))
            for m in range(members)
        )


def _ratio(square: float, variance: float) -> float:
    if square == 0:
        return 0.0
    return square / variance if variance > 0 else math.inf
