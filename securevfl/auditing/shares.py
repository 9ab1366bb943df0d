"""Whose noise is in the totals of members that may do anything, and whose promise rests on it.

Among such members an owner's promise counts on the noise of those outside every coalition of its observer,
with two members on its own alone. What others do beyond that can harm nobody's records but their own, so it
contradicts no promise: wrong products, lies about scores, noise of their own that they leave out or repeat.
Totals hold everybody's noise in one sum. The plan says how much each member adds to each total, so what is
missing tells who left it out, unless two members add alike, or one left out just what another adds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import stats

from securevfl.accountants.scorecard import TOTALS
from securevfl.accountants.sealed import SealedShifts, Variances
from securevfl.algorithms.base import SERVER
from securevfl.algorithms.sealed.card import CardGeometry, geometry_of
from securevfl.algorithms.sealed.evaluation import Evaluation
from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.auditing.evidence import COLUMNS, REPETITION, SHAPE, VARIANCE, Outcome
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.data import VerticalData
from securevfl.privacy.noise import Floats
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.settings.plan import Plan

ALL = ""
"""In the place of a member's name: all totals together."""
FRESH = "fresh noise"
"""Test of the noise that changes from opening to opening."""
_LESS = (VARIANCE, FRESH, COLUMNS, SHAPE, REPETITION, "variance by part")
"""Tests that find too little noise; all others find something besides it."""
_APART = 4.0
"""Standard deviations by which amounts may be off where it is told whose noise is missing."""
_MISSED = 1.2816
"""Standard deviations that leave a tenth: power is stated for nine of ten cases, as that of other tests."""


@dataclass
class _Openings:
    """The noise of one member's totals that have one form, in standard deviations."""

    shares: Floats
    count: int = 0
    squares: float = 0.0
    total: Floats | float = 0.0

    def add(self, standard: Floats) -> None:
        self.count += 1
        self.squares += float(np.vdot(standard, standard))
        self.total = self.total + standard

    @property
    def values(self) -> int:
        """Degrees of freedom of `fresh`."""
        return np.size(self.total) * max(1, self.count - 1)

    @property
    def fresh(self) -> float:
        """Squares around the mean of all openings, which noise that is repeated does not enter."""
        if self.count == 1:
            return self.squares
        return self.squares - float(np.vdot(self.total, self.total)) / self.count


@dataclass(frozen=True, kw_only=True)
class Openings:
    """One kind of opening: how far a record moves it, who adds how much noise, and how often it comes."""

    shifts: SealedShifts
    variances: Variances
    count: int = 1


class MemberNoise:
    """The noise of every member, as far as totals show it.

    Args:
        members: Organisations, in the order of the protocol.
        addresses: Their addresses.
        openings: What the promise counts.
        protocols: Everything that opens totals; evaluations too.
        colluders: Most members that pool what they see.
    """

    def __init__(
        self,
        members: Sequence[str],
        addresses: Sequence[str],
        openings: Sequence[Openings],
        protocols: Sequence[SealedProtocol],
        colluders: int,
    ) -> None:
        self.members, self.addresses = tuple(members), tuple(addresses)
        self._list, self._colluders = openings, colluders
        self._shares: dict[tuple[str, float], Floats] = {}
        for protocol in protocols:
            for place, name in enumerate(self.members):
                squares = np.square(np.array(protocol.share_stds[place], np.float64))
                if squares.any():
                    self._shares[name, protocol.total_std(place)] = squares / squares.sum()
        self._seen: dict[tuple[str, float, int], _Openings] = {}
        self._levels: Mapping[str, float] = {}

    @classmethod
    def of(cls, plan: Plan, data: VerticalData | None) -> MemberNoise | None:
        """Those of a sealed run whose members may do anything; None for any other."""
        if data is None or plan.mode != "sealed" or plan.settings.adversary != "malicious" or not plan.sigma:
            return None
        settings = geometry_of(plan, data)
        members = [data.label_holder if name == SERVER else name for name in settings.members]
        evaluation = Evaluation(settings=settings)
        protocols = [*_protocols(settings), *([evaluation.protocol] if evaluation.offered else [])]
        return cls(members, settings.members, _openings(settings), protocols, plan.collusion)

    def add(self, name: str, standard: Floats, std: float) -> None:
        """Takes the noise of one opening of a member's total, divided by its standard deviation."""
        shares = self._shares.get((name, std))
        if shares is not None:
            key = (name, std, standard.size)
            self._seen.setdefault(key, _Openings(shares)).add(standard.reshape(-1))

    @property
    def tests(self) -> tuple[str, ...]:
        """Whose totals are tested: each member's alone, and all together."""
        return (*self.members, ALL)

    def judge(self, levels: Mapping[str, float]) -> list[Outcome]:
        """Whether less fresh noise is in totals than all add to them, for each of `tests`."""
        self._levels = levels
        return [
            Outcome(FRESH, Verdict.VIOLATED, f"less of it than claimed (opened by {name or 'all'})")
            if self._is_short(name)
            else Outcome(FRESH, Verdict.HOLDS, "")
            for name in self.tests
            if self._of(name)
        ]

    def _of(self, name: str) -> list[_Openings]:
        return [each for key, each in self._seen.items() if name in (key[0], ALL)]

    def _is_short(self, name: str) -> bool:
        found = self._of(name)
        squares, values = sum(each.fresh for each in found), sum(each.values for each in found)
        return bool(stats.chi2.cdf(squares, values) < self._levels[name])

    def _without(self, found: Sequence[_Openings], place: int) -> tuple[float, float]:
        """Squares to expect without a member's noise, and their standard deviation."""
        left = [(each.values, 1 - each.shares[place]) for each in found]
        mean = math.fsum(values * share for values, share in left)
        return mean, math.sqrt(2 * math.fsum(values * share * share for values, share in left))

    def would_show(self, owner: str) -> bool:
        """Whether it would have been noticed, had this owner's noise been missing. By public facts alone."""
        place = self.members.index(owner)
        for name in self.tests:
            found = self._of(name)
            values = sum(each.values for each in found)
            mean, deviation = self._without(found, place)
            if values and mean + _MISSED * deviation < stats.chi2.ppf(self._levels[name], values):
                return True
        return False

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Those whose noise alone is missing, by the amounts that the totals lack: one if it is certain."""
        found = []
        for place, name in enumerate(self.members):
            if all(self._fits(total, place) for total in self.members):
                found.append(name)
        return tuple(found)

    def _fits(self, name: str, place: int) -> bool:
        """Whether a member's totals lack just what another adds; what was opened once cannot repeat."""
        found = [each for each in self._of(name) if each.count > 1] or self._of(name)
        mean, deviation = self._without(found, place)
        return abs(sum(each.fresh for each in found) - mean) <= _APART * deviation

    def remaining(self, owner: str, observer: str, absent: Collection[str]) -> float:
        """By what factor mu grows where some members' noise is absent; 1 where it was never counted on.

        Whoever leaves out its noise is one of the colluders, if the promise has room for it beside the
        observer; if not, its noise was counted on.
        """
        mine, watching = map(self.members.index, (owner, observer))
        gone = frozenset(map(self.members.index, absent))
        promised = left = 0.0
        for each in self._list:
            rest = tuple(tuple(v * (j not in gone) for j, v in enumerate(row)) for row in each.variances)
            coalitions = list(each.shifts.coalitions(self._colluders, without=mine))
            worst = [
                each.shifts.squared_mu(rest, s)
                for s in coalitions
                if watching in s and (gone - {mine} <= set(s) or len(s) == self._colluders)
            ]
            promised += each.count * max(each.shifts.squared_mu(each.variances, s) for s in coalitions)
            left += each.count * max(worst)
        return math.sqrt(max(1.0, left / promised)) if promised else math.inf

    def conclude(self, finding: Finding, outcomes: Sequence[Outcome]) -> Finding:
        """The verdict on one owner's promise against one observer, from the tests on all totals together."""
        owner, _, observer = finding.promise.partition(" against ")
        if owner not in self.members or observer not in self.members:
            return finding
        found = [outcome for outcome in outcomes if outcome.verdict is Verdict.VIOLATED]
        if not found:
            hidden = finding.verdict is Verdict.HOLDS and not self.would_show(owner)
            words = f"so few totals would not show it if {owner}'s noise, on which it rests, were missing"
            return _changed(finding, Verdict.NOT_TESTED, words) if hidden else finding
        if any(outcome.test in _LESS for outcome in found):
            return self._with_less(finding, owner, observer)
        return _changed(
            finding,
            Verdict.NOT_TESTED,
            "totals hold more than noise: a member's scores or products are not those of its model. That "
            "contradicts nobody's promise, but whether all noise is there cannot be recomputed",
        )

    def _with_less(self, finding: Finding, owner: str, observer: str) -> Finding:
        """Where noise is missing: what is true whoever of those that it may be left it out."""
        if not self.missing:
            verdict = Verdict.VIOLATED if self._lacks(owner) else Verdict.NOT_TESTED
            return _changed(finding, verdict, self._unnamed)
        who = " or ".join(self.missing)
        factors = [self.remaining(owner, observer, (absent,)) for absent in self.missing]
        if max(factors) <= 1 + 1e-9:
            words = f"{who} left out or repeated its own noise, on which it does not rest"
            return replace(finding, verdict=Verdict.HOLDS, tested=(*finding.tested, words), reasons=())
        if min(factors) <= 1 + 1e-9:
            return _changed(finding, Verdict.NOT_TESTED, self._unnamed)
        larger = f"mu is {min(factors):.3g} times larger" if min(factors) < math.inf else "nothing is left"
        return _changed(
            finding, Verdict.VIOLATED, f"{who} left out or repeated its noise; without it {larger}"
        )

    def somebody(self, outcomes: Sequence[Outcome]) -> list[Finding]:
        """That one of several promises is broken, where it cannot be told which."""
        less = any(each.verdict is Verdict.VIOLATED and each.test in _LESS for each in outcomes)
        if not less or len(self.missing) == 1:
            return []
        promise = f"one of {', '.join(self.missing or self.members)}"
        reasons = (self._unnamed,)
        return [Finding(promise=promise, path="noisy totals", verdict=Verdict.VIOLATED, reasons=reasons)]

    @property
    def _unnamed(self) -> str:
        names = ", ".join(self.missing or self.members)
        return f"noise is missing, and it cannot be told whose ({names}): one of these promises is broken"

    def _lacks(self, owner: str) -> bool:
        """Whether some total has less noise than this owner alone adds to it, whatever the others did."""
        place = self.members.index(owner)
        for name in self.members:
            found = self._of(name)
            least = math.fsum(each.values * each.shares[place] for each in found)
            spread = math.sqrt(2 * math.fsum(each.values * each.shares[place] ** 2 for each in found))
            if sum(each.fresh for each in found) < least - 6 * spread:
                return True
        return False


def _changed(finding: Finding, verdict: Verdict, words: str) -> Finding:
    return replace(finding, verdict=verdict, reasons=(words,))


def _protocols(settings: SealedGeometry) -> list[SealedProtocol]:
    if isinstance(settings, CardGeometry):
        return [settings.protocol_of(name) for name in dict.fromkeys(settings.openings)]
    members = len(settings.members)
    return [settings.protocol((1,) * members, (True,) * members)]


def _openings(settings: SealedGeometry) -> list[Openings]:
    if not isinstance(settings, CardGeometry):
        return [Openings(shifts=settings.shifts, variances=settings.variances, count=settings.plan.epochs)]
    return [
        Openings(
            shifts=settings.noise.shifts[name], variances=settings.added(name), count=TOTALS.get(name, 1)
        )
        for name in dict.fromkeys(settings.openings)
    ]
