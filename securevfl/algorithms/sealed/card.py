"""Scorecards by sealed training: bins, label histogram, first fit, residual histogram, last fit.

Every opening is an epoch of the schedule, so a run that was killed goes on from the last one. Between two
openings a member is what `state` says: bins, noisy histograms, tables and weights, all of which are functions
of what was opened. Widths of operands are the most that public facts allow, whatever the bins turn out to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.scorecard import TOTALS, ScorecardNoise, most_bins_for
from securevfl.accountants.sealed import SealedShifts, Variances
from securevfl.algorithms.base import SERVER, expect
from securevfl.algorithms.messages import SealedJoins
from securevfl.algorithms.sealed import tables
from securevfl.algorithms.sealed.encoder import ScorecardEncoder
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.algorithms.sealed.rows import clip_to_integers, dense
from securevfl.algorithms.sealed.settings import BIAS, SealedGeometry, integer_stds, real_variances
from securevfl.data import VerticalData
from securevfl.data.binning import (
    CodeBins,
    NumberBins,
    bin_column,
    card_columns,
    is_binned,
    is_flag,
    most_bins,
)
from securevfl.data.columns import Column
from securevfl.errors import PlanError, ProtocolError
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import (
    DEALT,
    ENCRYPTED,
    OPERAND_BITS,
    TAIL,
    SealedProtocol,
    narrow_fraction,
)
from securevfl.settings.plan import Plan

Floats = npt.NDArray[np.float64]
CARD, PROFILE = "scorecard", "profile"
CARDS = (CARD, PROFILE)
"""Models of bins. A profile has bins and label histograms, and no score."""
CARD_FROM = 300.0
"""Least mu N / sqrt(f) at which `model = "auto"` makes a scorecard."""
HAIR = 1 - 1e-9
"""Of mu, for rounding."""
NO_NOISE = 1e5
"""What stands for mu where nothing is protected."""
_ROOM = 1 + 2.0**-40  # sqrt(f) may be rounded down; a one-hot row has norm sqrt(f) exactly
RATE = (10.0, 2.5)  # over the sum of squared clips: the slope is at most 1/4, of a regression 1
LABELS = ("labels", "again")
"""Label histograms; the second one follows that of a profile, where it was noisier than a card's."""
HISTOGRAMS = (*LABELS, "residuals")
"""Openings whose operands are one-hot."""
NARROW_STD = 64
"""Least integer noise in words of 32 bits; what discreteness costs (9 of its square) is counted."""
KINDS = {
    "labels": "label histogram",
    "again": "second label histogram",
    "first": "first fit",
    "residuals": "residual histogram",
    "last": "last fit",
}


class CardGeometry(SealedGeometry):
    """What all roles of a scorecard agree on; `shifts`, `share_stds`, `cost` are those of one fit."""

    fit = "first"
    """Which."""

    @cached_property
    def columns(self) -> tuple[tuple[Column, ...], ...]:
        """Columns of every party, as everybody knows them."""
        return card_columns(self.data)

    @property
    def mu(self) -> float:
        """What all openings may cost together: the plan's sigma is that of a total that spends it all."""
        return self.shifts.diameter / self.plan.sigma if self.plan.sigma else NO_NOISE

    @property
    def whole_mu(self) -> float:
        """See `SealedGeometry`."""
        return self.mu if self.plan.sigma else math.inf

    @cached_property
    def noise(self) -> ScorecardNoise:
        """Every noise scale."""
        widths = tuple(len(mine) for mine in self.columns)
        return ScorecardNoise(
            mu=self.mu,
            records=self.data.n_train,
            columns=widths if self.holds_features else (*widths, 0),
            binned=sum(is_binned(column) for mine in self.columns for column in mine),
            label_holder=self.label_holder,
            colluders=self.plan.collusion,
            residual_bound=self.shifts.residual_bound,
            residual_change=self.shifts.residual_change,
            profile=self.plan.model == PROFILE,
            profiled=self._profiled,
            classes=max(2, self.data.outputs),
            contributors=self.contributors,
            cutting=len(self.members) * 2.0**-self._fraction if self._fraction else 0.0,
        )

    @property
    def _profiled(self) -> float:
        """The mu of the profile that the run starts from, rounded as in its own plan; 0 without one."""
        if not self.plan.profiled:
            return 0.0
        mu = gdp_mu(self.plan.settings.profile_epsilon, self.plan.accounted_delta) * HAIR
        return self.shifts.diameter / (self.shifts.diameter / mu)

    @property
    def _fraction(self) -> int | None:
        """Fraction bits of residuals where histograms may have words of 32 bits, by public facts."""
        return None if self.checked or self.dealing != DEALT else narrow_fraction(self.data.n_train)

    def fraction_of(self, opening: str) -> int | None:
        """Fraction bits of an opening's residuals in words of 32 bits; None where they have 64.

        Noise must fit as well: fine enough to be discrete, with room for its tails.
        """
        if opening not in HISTOGRAMS or self._fraction is None:
            return None
        deviations = [
            [math.sqrt(v) * 2**self._fraction for v in row] for row in self.noise.variances[opening]
        ]
        used = [std for row in deviations for std in row if std] if self.plan.sigma else []
        fits = all(std >= NARROW_STD for std in used) and TAIL * max(map(sum, deviations)) < 2**30
        return self._fraction if fits or not used else None

    def total_bits(self, opening: str) -> int:
        """Fraction bits of an opening's totals."""
        fraction = self.fraction_of(opening)
        return self.unit_bits if fraction is None else fraction

    def added(self, opening: str) -> Variances:
        """The noise of an opening that is really added, as real Gaussians that protect no better."""
        return real_variances(self.stds_of(opening), bits=self.total_bits(opening))

    def fewer(self, opening: str) -> bool:
        """Whether operands of an opening have the columns that the bins need and no more."""
        return opening in HISTOGRAMS and (self.dealing == ENCRYPTED or self.fraction_of(opening) is not None)

    def session_of(self, opening: str) -> str:
        """Openings of one session use the same operands: short or encrypted ones are sent once for both."""
        both = ("labels", "residuals")
        shared = all(name in self.openings and self.fewer(name) for name in both)
        shared = shared and not self.plan.profiled  # a profile's masks have ended with it
        return "histograms" if shared and opening in both else opening

    @property
    def bins(self) -> int:
        """Most bins of a number, by public facts: few where noise is large."""
        return most_bins_for(self.noise)

    @property
    def evaluates(self) -> bool:
        """Whether there is a model to evaluate."""
        return self.plan.model != PROFILE

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """The opening of every epoch."""
        if not self.evaluates:
            return ("labels",)
        residuals = ("residuals",) if self.noise.residuals else ()
        labels = tuple(name for name in LABELS if name in self.noise.shares)
        return (*labels, *("first",) * TOTALS["first"], *residuals, *("last",) * TOTALS["last"])

    def opening_after(self, done: int) -> str:
        """The opening that follows so many; after the last one, that."""
        return self.openings[min(done, len(self.openings) - 1)]

    @property
    def totals(self) -> int:
        """Totals of the fit."""
        return TOTALS[self.fit]

    @property
    def sigma(self) -> float:
        """Noise of one total of the fit."""
        if not self.plan.sigma or self.fit not in self.noise.shares:
            return self.plan.sigma
        return self.shifts.diameter * math.sqrt(self.totals) / self.noise.mu_of(self.fit)

    def stds_of(self, opening: str) -> tuple[tuple[int, ...], ...]:
        """Integer noise [target][member] of an opening."""
        members = len(self.members)
        if not self.plan.sigma:
            return ((0,) * members,) * members
        narrow = self.fraction_of(opening) is not None
        least = {"least": NARROW_STD} if narrow else {}
        return integer_stds(self.noise.variances[opening], bits=self.total_bits(opening), **least)

    def cost_of(self, opening: str, member: int) -> tuple[float, float]:
        """What an opening costs the member's records: sensitivity and sigma, both 0 without a guarantee."""
        if not self.plan.sigma:
            return 0.0, 0.0
        shifts: SealedShifts = self.noise.shifts[opening]
        mu = shifts.mu(self.added(opening), colluders=self.plan.collusion, owner=member)
        sigma = shifts.diameter * math.sqrt(TOTALS.get(opening, 1)) / self.noise.mu_of(opening)
        return mu * sigma * (1 + 1e-12), sigma

    def widths_of(self, opening: str) -> tuple[int, ...]:
        """Width of every member's operand; of histograms the most that it can have."""
        found = []
        for member, name in enumerate(self.members):
            mine = () if name == SERVER else self.columns[member]
            if opening in HISTOGRAMS:
                width = sum(most_bins(column) for column in mine)
                found.append(width or int(opening in LABELS))
            else:
                tables_each = 2 if opening == "last" and self.noise.residuals else 1
                constants = self.data.outputs if member == self.label_holder else 0
                found.append(tables_each * len(mine) + constants)
        return tuple(found)

    def protocol_of(self, opening: str) -> SealedProtocol:
        """The public configuration of an opening's protocol."""
        one_hot = opening in HISTOGRAMS
        return SealedProtocol(
            widths=self.widths_of(opening),
            static=(one_hot or not self.weighted,) * len(self.members),
            clips=tuple(clip * _ROOM for clip in self.noise.shifts[opening].clips),
            label_holder=self.label_holder,
            records=self.data.n_train,
            batch=self.data.n_train,
            outputs=max(2, self.data.outputs) if opening in LABELS else self.data.outputs,
            series=None if opening in LABELS else self.series,
            share_stds=self.stds_of(opening),
            entry=1.0 if one_hot else math.inf,
            checked=self.checked,
            groups=self.groups_of(opening) if self.checked and one_hot else (),
            complement=self.checked and opening in LABELS,
            label_low=0.0 if opening in LABELS else self.label_range[0],
            label_high=1.0 if opening in LABELS else self.label_range[1],
            dealing=self.dealing,
            fraction=self.fraction_of(opening),
        )

    def groups_of(self, opening: str) -> tuple[tuple[int, ...], ...]:
        """Sizes of every member's groups of one-hot columns; a lone constant column is a group of one."""
        return tuple(
            tuple(most_bins(column) for column in (() if name == SERVER else self.columns[member]))
            or (1,) * width
            for member, (name, width) in enumerate(zip(self.members, self.widths_of(opening), strict=True))
        )

    def check(self) -> None:
        """Raises `PlanError` or `EncodingError` unless every opening fits the ring."""
        for opening in dict.fromkeys(self.openings):
            self.protocol_of(opening)


def geometry_of(plan: Plan, data: VerticalData) -> SealedGeometry:
    """The settings of a sealed run, by its model."""
    return (CardGeometry if plan.model in CARDS else SealedGeometry)(plan=plan, data=data)


# -- which model --------------------------------------------------------------------------------------------


def card_plan(plan: Plan, data: VerticalData) -> Plan:
    """A scorecard's plan, with what the recipe decides.

    Raises:
        PlanError: A scorecard cannot be made of this.
    """
    reason = obstacle(plan, data)
    if reason:
        raise PlanError(f"a {plan.model} cannot be made: {reason}")
    fixed = plan.with_changes(
        batch=data.n_train, embedding=data.outputs, fusion="sum", head="sum", scaling="none", epochs=1
    )
    openings = CardGeometry(plan=calibrated(fixed, data), data=data).openings
    usual = Plan(algorithm=plan.algorithm).epochs
    if plan.epochs not in (usual, len(openings)):
        raise PlanError(
            f"a {plan.model} of this data has {len(openings)} openings, not {plan.epochs}: leave epochs open"
        )
    return fixed.with_changes(epochs=len(openings), settings={"centring": 0.0})


def calibrated(plan: Plan, data: VerticalData) -> Plan:
    """The plan with the noise for its target epsilon."""
    if not plan.epsilon:
        return plan
    mu = gdp_mu(plan.epsilon, plan.accounted_delta) * HAIR
    sigma = CardGeometry(plan=plan, data=data).shifts.diameter / mu
    return plan.with_changes(sigma=sigma, epsilon=0.0, budget_epsilon=plan.budget_epsilon or plan.epsilon)


def obstacle(plan: Plan, data: VerticalData) -> str:
    """Why there can be no scorecard of this data; empty where there can."""
    profiled = plan.settings.profile_epsilon
    found = {
        "a profile is made by itself, not from another one": plan.model == PROFILE and profiled > 0,
        f"the profile has spent epsilon {profiled:g} of {plan.epsilon:g}; raise epsilon": 0
        < plan.epsilon
        <= profiled,
        f"the task is {data.task}, and a profile is for two classes": plan.model == PROFILE
        and data.task != "binary",
        f"protect is {plan.settings.protect!r}, and cards cover the whole person": plan.settings.protect
        != "person",
        "columns that were scaled have no readable bins; give them as they are": data.scaling != "none",
        "blocks of images or sequences have no columns": any(block.ndim != 2 for block in data.train),
        f"clip is {plan.clip}; the recipe's rows have norm 1": plan.clip != 1.0,
    }
    return next((reason for reason, applies in found.items() if applies), "")


def choose(plan: Plan, data: VerticalData) -> tuple[str, str]:
    """The model for `model = "auto"` and why, from public facts alone."""
    reason = obstacle(plan, data)
    usual = Plan(algorithm=plan.algorithm)
    changed = [
        name
        for name in ("epochs", "batch", "learning_rate", "learning_rates", "optimiser", "optimisers", "l2")
        if getattr(plan, name) != getattr(usual, name)
    ]
    if reason:
        return "linear", reason
    public = data.scaling == "none" and plan.scaling in ("auto", "public")
    bare = public and bool(data.unbounded) and not changed and not plan.sigma and plan.epsilon > 0
    if data.task != "binary":
        what = "numbers" if data.task == "regression" else "several classes"
        if bare:
            return CARD, "columns have no public bounds, which a linear model needs"
        return "linear", f"a scorecard of {what} is made where it is asked for"
    if plan.settings.profile_epsilon:
        return CARD, "it goes on from a profile"
    if changed:
        return "linear", f"the plan sets {', '.join(changed)}, which scorecards decide themselves"
    columns = [column for mine in card_columns(data) for column in mine]
    if all(map(is_flag, columns)):
        return "linear", "all columns have two values"
    if not (plan.epsilon or plan.sigma):
        return "linear", "nothing is protected"
    if plan.sigma:
        return "linear", "sigma is given; scorecards divide an epsilon among openings of their own"
    size = gdp_mu(plan.epsilon, plan.delta) * data.n_train / math.sqrt(len(columns))
    figures = f"mu N / sqrt(f) = {size:.0f} for {data.n_train:,} records and {len(columns)} columns"
    if size < CARD_FROM and bare:
        return CARD, f"{figures}, but columns have no public bounds, which a linear model needs"
    if size < CARD_FROM:
        return "linear", f"{figures}, below {CARD_FROM:.0f}"
    return CARD, f"{figures}, at least {CARD_FROM:.0f}"


# -- a member -----------------------------------------------------------------------------------------------


def bins_state(bins: NumberBins | CodeBins) -> dict[str, Any]:
    """Bins as explicit data."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(bins).items()}


def bins_of(column: Column, state: Mapping[str, Any]) -> NumberBins | CodeBins:
    """Reads what `bins_state` gave."""
    saved: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in state.items()
    }
    return NumberBins(**saved) if column.kind == "number" else CodeBins(**saved)


@dataclass
class Feature:
    """A party's column on its way through the recipe.

    Attributes:
        bins: Its bins.
        counts: Noisy label histogram; None before it was opened.
        tables: Weights of evidence, then the residual table.
        weights: Of each table.
    """

    bins: NumberBins | CodeBins
    counts: tables.Counts | None = None
    tables: list[tables.BinTable] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """As explicit data."""
        counts = None if self.counts is None else dict(vars(self.counts))
        return {
            "bins": bins_state(self.bins),
            "counts": counts,
            "tables": {str(i): dict(vars(table)) for i, table in enumerate(self.tables)},
            "weights": list(self.weights),
        }

    @classmethod
    def of(cls, column: Column, state: Mapping[str, Any]) -> Feature:
        """Reads what `state` gave."""
        found = state["tables"]
        return cls(
            bins=bins_of(column, state["bins"]),
            counts=None if state["counts"] is None else tables.Counts(**state["counts"]),
            tables=[tables.BinTable(**found[str(i)]) for i in range(len(found))],
            weights=[float(weight) for weight in state["weights"]],
        )


class CardMember(SealedMember):
    """One member of a scorecard; roles say when."""

    settings: CardGeometry

    def _build(self) -> None:
        self.columns = () if self.address == SERVER else self.settings.columns[self.index]
        self.features: list[Feature] = []
        self.bias = 0.0
        self.rate = 0.5
        self.fit: tables.PartyFit | None = None
        self._opened = ""
        self._kept: SealedParty | None = None
        self._joins: npt.NDArray[np.intp] | None = None
        self._prices: dict[str, tuple[float, float]] = {}

    @property
    def opening(self) -> str:
        """The next opening; after the last one, that."""
        return self.settings.opening_after(self.steps)

    @property
    def _holds_labels(self) -> bool:
        return self.index == self.settings.label_holder

    # -- bins -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Finds the bins of the own columns, from counts that pass the gate level by level."""
        self._build()
        noise = self.settings.noise
        # A long list takes one level and costs what three levels of a number cost, so these entries cover it.
        noisy = self.gate.noisy_counts(
            rows=np.arange(self.setup.data.n_train, dtype=np.int64),
            sensitivity=math.sqrt(2 * noise.binned),
            sigmas=[std if self.setup.plan.sigma else 0.0 for std in noise.bin_stds],
            observers=self.observers,
        )
        self.features = [
            self._feature(
                bin_column(
                    column,
                    values,
                    noisy,
                    stds=noise.bin_stds,
                    list_std=noise.list_std,
                    bins=self.settings.bins,
                )
            )
            for column, values in zip(self.columns, self._values(test=False), strict=True)
        ]

    def _feature(self, bins: NumberBins | CodeBins) -> Any:
        return Feature(bins=bins)

    def _load_feature(self, column: Column, state: Mapping[str, Any]) -> Any:
        return Feature.of(column, state)

    def _encoder(self) -> ScorecardEncoder:
        found = self.setup.encoders[self.address]
        if not isinstance(found, ScorecardEncoder):
            raise PlanError(f"{self.address} brings a model of its own; a scorecard makes its own")
        return found

    def _values(self, *, test: bool) -> list[Floats]:
        """Raw values of the own columns."""
        if self.address == SERVER:
            return []
        blocks = self.setup.data.test if test else self.setup.data.train
        return self._encoder().split(dense(blocks[self.index]))

    @cached_property
    def _raw(self) -> list[Floats]:
        return self._values(test=False)

    def _indices(self) -> list[npt.NDArray[np.intp]]:
        """Bin of every training record, by column."""
        return [f.bins.assign(values) for f, values in zip(self.features, self._raw, strict=True)]

    # -- the protocol ---------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Starts a phase; each kind of opening has masks and operands of its own, or histograms one."""
        going_on = self._opened == self.opening
        if not going_on:
            shared = self.settings.session_of(self.opening) == self.settings.session_of("labels")
            self._party, self._opened = self._kept if shared else None, self.opening
        await super().begin()
        if self.settings.session_of(self.opening) != "histograms":
            return
        if not going_on and self._party is not None and self._party is self._kept:
            await self._take_up(self._party)
        self._kept = self._party if self.opening == "labels" else None

    async def _take_up(self, kept: SealedParty) -> None:
        """The residuals' round over the label histogram's operands: all say which bins they have joined.

        Which these are follows from noisy totals, so that it may be told.
        """
        party = kept.continued(self._protocol())
        mine = self._joins if self._joins is not None and party.protocol.widths[self.index] else np.arange(0)
        others = [name for name in self.settings.members if name != self.address]
        for name in others:
            await self.link.send(name, SealedJoins(places=mine.tolist()))
        party.join(self.index, np.asarray(mine, np.intp))
        told: set[str] = set()
        while len(told) < len(others):
            message = expect(await self.link.receive(), SealedJoins.kind)
            if message.sender not in others or message.sender in told:
                raise ProtocolError(f"{message.sender} tells its joined bins out of turn")
            told.add(message.sender)
            party.join(self.settings.members.index(message.sender), np.array(message["places"], np.intp))
        self._party = party

    def _remaining(self) -> int:
        opening, done = self.opening, self.steps
        later = [each for each in self.settings.openings[done:] if each == opening]
        return max(1, len(later))

    def _protocol(self) -> SealedProtocol:
        return self.settings.protocol_of(self.opening)

    def _operand(self) -> npt.NDArray[np.int32]:
        if self.opening in HISTOGRAMS:
            return self._one_hot()
        if self.fit is None:
            self.fit = self._new_fit()
        return self._table_columns()

    def _one_hot(self) -> npt.NDArray[np.int32]:
        protocol, count = self._protocol(), self.setup.data.n_train
        width, one = protocol.widths[self.index], protocol.operand_one
        if protocol.fewer and self.columns:
            width = sum(feature.bins.size for feature in self.features)
        operand = np.zeros((width, count), np.int32)
        if width and not self.columns:
            operand[0] = one
        everybody = np.arange(count)
        for start, index in zip(self._starts(), self._indices(), strict=True):
            operand[start + index, everybody] = one
        return operand

    def _starts(self) -> list[int]:
        """Where each column's cells begin."""
        fewer = self.settings.fewer(self.opening)
        sizes = [
            f.bins.size if fewer else most_bins(c) for f, c in zip(self.features, self.columns, strict=True)
        ]
        return [int(start) for start in np.cumsum([0, *sizes])[:-1]]

    def _session_labels(self) -> Floats | None:
        labels = self.labels
        if labels is None or self.opening not in LABELS:
            return labels
        positive = (labels + 1) / 2 if self._regression else labels
        return np.column_stack([positive, 1 - positive])

    @property
    def _regression(self) -> bool:
        return self.setup.data.task == "regression"

    def _round(self, party: SealedParty, rows: Any, chosen: Any) -> Machine:
        number, labels = self.exchange.next_round(), self._session_labels()
        scores = None if self.opening in LABELS else self._train_scores()
        if scores is not None and self._regression:
            bound = self.settings.score_bound(self.index)
            scores = np.clip(scores, -bound, bound)
            if labels is not None:  # inside the score
                scores, labels = scores - labels, np.zeros_like(labels)
        if isinstance(party, CheckedParty):
            return party.round(round=number, scores=scores)
        return party.round(round=number, scores=scores, labels=labels)

    def _price(self) -> tuple[float, float]:
        if self.opening not in self._prices:
            self._prices[self.opening] = self.settings.cost_of(self.opening, self.index)
        return self._prices[self.opening]

    def _kind(self) -> str:
        return KINDS[self.opening]

    def _train_scores(self) -> Floats:
        if self.fit is not None:
            return (self._rows.T @ self.fit.weights * 2.0**-OPERAND_BITS)[:, None]
        total = np.full(self.setup.data.n_train, self.bias)
        for feature, index in zip(self.features, self._indices(), strict=True):
            total += tables.shape(feature.tables, feature.weights).values[index]
        return total[:, None]

    # -- learning -------------------------------------------------------------------------------------------

    def _learn(self, total: Floats, count: int) -> None:
        """What an opening gives: post-processing of noisy totals alone."""
        opening = self.opening
        if opening == "labels":
            self._take_histogram(total)
        elif opening == "again":
            self._take_second(total)
        elif opening == "residuals":
            self._take_residuals(-total[:, 0])
        else:
            self._take_total(total[:, 0])
        self.steps += 1
        if opening != self.opening or self.steps >= len(self.settings.openings):
            self._end_fit()

    def _take_histogram(self, total: Floats) -> None:
        std = self.settings.noise.std("labels", self.index)
        joins: list[npt.NDArray[np.intp]] = []
        for start, feature in zip(self._starts(), self.features, strict=True):
            cells = total[start : start + feature.bins.size]
            counts = tables.Counts(
                positive=cells[:, 0],
                negative=cells[:, 1],
                ordered=feature.bins.ordered,
                own_missing=feature.bins.own_missing,
            )
            place = tables.join_weak_bins(counts, std)
            joins.append(place + (joins[-1].max() + 1 if joins else 0))
            feature.bins, feature.counts = feature.bins.joined(place), tables.joined(counts, place)
        self._joins = np.concatenate(joins) if joins else None
        self._make_tables(total, std)

    def _take_second(self, total: Floats) -> None:
        """Averages both label histograms by what each is worth, in the bins of the first."""
        noise = self.settings.noise
        std, again = noise.label_std(self.index), noise.std("again", self.index) ** 2
        for start, feature in zip(self._starts(), self.features, strict=True):
            if feature.counts is None:
                raise ProtocolError(f"{self.address} has a second label histogram before the first")
            cells, first = total[start : start + feature.bins.size], feature.counts
            before = first.spreads * noise.std("labels", self.index) ** 2
            share = before / (before + again)
            feature.counts = replace(
                first,
                positive=(1 - share) * first.positive + share * cells[:, 0],
                negative=(1 - share) * first.negative + share * cells[:, 1],
                spread=share * again / std**2,
            )
        self._make_tables(total, std if self.features else noise.std("again", self.index))

    def _make_tables(self, total: Floats, std: float) -> None:
        """Weights of evidence, by noisy counts; without columns the total is that of the constant one."""
        records = self.setup.data.n_train
        alone = tables.Counts(positive=total[:1, 0], negative=total[:1, 1], ordered=False)
        found = [f.counts for f in self.features if f.counts is not None] or [alone]
        self.rate = tables.rate(found, records, std)
        first = 2 * self.rate - 1 if self._regression else math.log(self.rate / (1 - self.rate))
        self.bias = first if self._holds_labels else 0.0
        made = tables.means if self._regression else tables.evidence
        for feature, counts in zip(self.features, found, strict=False):
            table = made(counts, q=self.rate, records=records, std=std)
            feature.tables, feature.weights = [table], [tables.FIRST_START if table.used else 0.0]

    def _take_residuals(self, total: Floats) -> None:
        std, records = self.settings.noise.std("residuals", self.index), self.setup.data.n_train
        for start, feature in zip(self._starts(), self.features, strict=True):
            if feature.counts is None:
                raise ProtocolError(f"{self.address} has residuals before its histogram")
            cells = total[start : start + feature.bins.size]
            table = tables.residual_table(
                cells, feature.counts, q=self.rate, records=records, std=std, mean=self._regression
            )
            feature.tables.append(table)
            feature.weights.append(tables.SECOND_START if table.used else 0.0)

    # -- fits -----------------------------------------------------------------------------------------------

    def _used(self) -> list[tuple[Feature, int]]:
        return [(f, i) for f in self.features for i, table in enumerate(f.tables) if table.used]

    def _scales(self) -> Floats:
        clip = math.sqrt(1 - BIAS**2) if self._holds_labels else 1.0
        scales = tables.column_scales(np.array([f.tables[i].information for f, i in self._used()]), clip)
        return np.append(scales, BIAS) if self._holds_labels else scales

    def _new_fit(self) -> tables.PartyFit:
        scales, noise, totals = self._scales(), self.settings.noise, TOTALS[self.opening]
        start = [f.weights[i] for f, i in self._used()] + [self.bias] * self._holds_labels
        alone = noise.std(self.opening, self.index) / math.sqrt(totals)
        return tables.PartyFit(
            start=np.array(start) / scales,
            pull=tables.ridge(scales, noise=alone, records=self.setup.data.n_train),
            records=self.setup.data.n_train,
            totals=totals,
            rate=RATE[self._regression] / sum(clip * clip for clip in noise.shifts[self.opening].clips),
        )

    def _table_columns(self) -> npt.NDArray[np.int32]:
        """The tables' values as rows of norm at most 1; places that are not used stay zero."""
        count, indices = self.setup.data.n_train, self._indices()
        places = {id(f): index for f, index in zip(self.features, indices, strict=True)}
        columns = [f.tables[i].values[places[id(f)]] for f, i in self._used()]
        if self._holds_labels:
            columns.append(np.ones(count))
        rows = np.stack(columns, 1) * self._scales() if columns else np.zeros((count, 0))
        self._rows = clip_to_integers(rows, 1.0).T
        operand = np.zeros((self._protocol().widths[self.index], count), np.int32)
        operand[: len(self._rows)] = self._rows
        return operand

    def _take_total(self, total: Floats) -> None:
        if self.fit is None:
            raise ProtocolError(f"{self.address} has a total without a fit")
        self.fit.step(total[: len(self.fit.weights)])

    def _fitted(self) -> tuple[list[list[float]], float]:
        """Weights of every feature's tables, and the constant, with what a fit has found so far."""
        weights, bias = [list(feature.weights) for feature in self.features], self.bias
        if self.fit is not None:
            found = self.fit.result * self._scales()
            numbers = {id(feature): number for number, feature in enumerate(self.features)}
            for (feature, i), weight in zip(self._used(), found, strict=False):  # the constant comes last
                weights[numbers[id(feature)]][i] = float(weight)
            bias = float(found[-1]) if self._holds_labels else 0.0
        return weights, bias

    def _end_fit(self) -> None:
        weights, self.bias = self._fitted()
        for feature, mine in zip(self.features, weights, strict=True):
            feature.weights = mine
        self.fit = None

    # -- the card -------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Leaves the card in the module."""
        self._write_card()

    def _test_scores(self) -> tuple[Floats, float]:
        """By the card as it is now, which is also written into the module."""
        self._write_card()
        if self.address == SERVER:
            bias = float(self.setup.head.bias.detach())  # type: ignore[operator]
            return np.full((self.setup.data.n_test, 1), bias), bias
        encoder = self._encoder()
        return encoder.score(dense(self.setup.data.test[self.index])), float(encoder.constant)

    def _spread(self) -> float:
        """Of the card's noisy counts: each column's variance, as if columns knew nothing of each other."""
        if self.address == SERVER:
            return 0.0
        encoder = self._encoder()
        variances = []
        for place in range(len(self.columns)):
            counts = np.maximum(encoder.part("positive", place) + encoder.part("negative", place), 0.0)
            values = encoder.part("values", place)
            share = counts / max(float(counts.sum()), 1.0)
            variances.append(max(float(share @ values**2 - (share @ values) ** 2), 0.0))
        return math.sqrt(math.fsum(variances))

    def _write_card(self) -> None:
        weights, bias = self._fitted()
        if self.address == SERVER:
            self.setup.head.bias.data.fill_(bias)  # type: ignore[operator]
            return
        encoder = self._encoder()
        encoder.constant.fill_(bias)
        for place, (feature, mine) in enumerate(zip(self.features, weights, strict=True)):
            counts = feature.counts
            if counts is None:
                raise ProtocolError(f"{self.address} has no card before the first opening")
            shape = tables.shape(feature.tables, mine)
            encoder.fill(
                place,
                feature.bins,
                information=shape.information if self.settings.evaluates else self._information(counts),
                values=shape.values,
                errors=shape.errors,
                evidence=feature.tables[0].evidence,
                positive=counts.positive,
                negative=counts.negative,
            )

    def _information(self, counts: tables.Counts) -> float:
        """For a ranking: without a model nothing else depends on it, so no feature is cut off at zero."""
        std = self.settings.noise.std("labels", self.index)
        return tables.expected_information(counts, q=self.rate, records=self.setup.data.n_train, std=std)

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but secrets."""
        return {
            "features": {str(i): feature.state() for i, feature in enumerate(self.features)},
            "bias": self.bias,
            "rate": self.rate,
            "fit": None if self.fit is None else self.fit.state(),
            "delay": None if self.delay is None else self.delay.state(),
            "steps": self.steps,
            "evaluations": self.evaluator.done,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        self._build()
        found = state["features"]
        self.features = [self._load_feature(column, found[str(i)]) for i, column in enumerate(self.columns)]
        self.bias, self.rate, self.steps = float(state["bias"]), float(state["rate"]), int(state["steps"])
        self.evaluator.done = int(state["evaluations"])
        self.fit = None if state["fit"] is None else tables.PartyFit.of(state["fit"])
        if self.delay is not None:
            self.delay.load(state["delay"])
