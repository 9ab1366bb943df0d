"""Metrics of a sealed model from noisy totals over the test part: no score of a single record is opened.

The waves of every test record's score stay secret-shared as residuals do in training; the label holder's
operand (y, 1 - y) turns them into four totals per harmonic, with everybody's noise on them. One evaluation is
one opening, written down by every member and paid by the test records alone: they are other people than those
who train. The number of positives gets noise of the label holder's own, so that the figures may be told to
anybody. Every member clamps what it brings, so a score of any size moves the totals no farther.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.metric_totals import Estimate, MetricTotals
from securevfl.algorithms.base import Setup
from securevfl.algorithms.messages import SealedSpread
from securevfl.algorithms.sealed.exchange import SealedExchange, ahead, hidden
from securevfl.algorithms.sealed.settings import SealedGeometry, integer_stds
from securevfl.algorithms.sealed.stack import records_held
from securevfl.errors import AccountingError, ProtocolError
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import STATISTIC, TOTAL
from securevfl.protocols.sealed import party_of
from securevfl.protocols.sealed.kernel import FACTOR_BITS
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import ENCRYPTED, OPERAND_BITS, SealedProtocol
from securevfl.protocols.sealed.series import WAVE_BITS, Waves

Floats = npt.NDArray[np.float64]
KIND = "evaluation totals"
"""What the ledger calls one evaluation."""
FIGURES = ("auc", "loss", "brier", "se", "loss_se", "brier_se", "scale")
"""What an evaluation gives: `se` is the standard error of the AUC, `scale` what scores were multiplied by."""
SIMULATED = "exact, by the simulator, outside the federation (evaluation: what the federation opened)"
FEDERATED = "from noisy totals over the test part, paid by its records; se is the standard error of the AUC"
UNOPENED = "not known: there are no totals for this task, so nothing was opened of the test part"
UNKNOWN = -1.0
"""In place of a spread that a member cannot tell from its noisy totals."""
SCALES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
WIDE = 2.0
"""Standard deviation of all scores that a scale may lead to: six of them are left unclamped."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What all members agree on about evaluations.

    Attributes:
        settings: The settings of the run.
    """

    settings: SealedGeometry

    @property
    def offered(self) -> bool:
        """Whether there are totals for the task, and records to take them over."""
        return self.settings.evaluates and self.settings.data.task == "binary" and self.records > 0

    @property
    def held(self) -> int:
        """Records at the front of the test part on which the label holder decides about a stack."""
        return records_held(self.settings.data.n_train) if self.settings.plan.settings.stack else 0

    @property
    def records(self) -> int:
        """Records of one evaluation."""
        return self.settings.data.n_test - self.held

    @cached_property
    def totals(self) -> MetricTotals:
        """The totals, with the rounding of the ring."""
        bare = MetricTotals()
        waves = self._waves(bare)
        return MetricTotals(period=bare.period, harmonics=bare.harmonics, rounding=waves.rounding)

    def _waves(self, totals: MetricTotals) -> Waves:
        bits = FACTOR_BITS if self.settings.dealing == ENCRYPTED else WAVE_BITS
        return Waves(totals.period, tuple(totals.amplitudes.tolist()), bits)

    @property
    def clamp(self) -> float:
        """Bound of what each party brings; a label holder without features brings nothing."""
        return self.totals.clamp(len(self.settings.data.parties))

    @cached_property
    def mu(self) -> float:
        """What all evaluations of a run may cost a test record: no more than training costs one of its."""
        plan = self.settings.plan
        limit = gdp_mu(plan.budget_epsilon, plan.accounted_delta) if plan.budget_epsilon else math.inf
        return min(self.settings.whole_mu, limit * (1 - 1e-9))

    @cached_property
    def sigma(self) -> float:
        """Noise of one evaluation that an observer does not know; 0 for none."""
        plan = self.settings.plan
        return self.totals.sigma(mu=self.mu, evaluations=plan.evaluations) if plan.sigma else 0.0

    @property
    def positives_sigma(self) -> float:
        """Noise on the number of positives."""
        return self.sigma / math.sqrt(2)

    @property
    def sensitivity(self) -> float:
        """How far a replaced record moves totals and positives together, in the unit of `sigma`."""
        return 2 * (1 + self.totals.rounding)

    @cached_property
    def protocol(self) -> SealedProtocol:
        """The public configuration of one evaluation."""
        settings, totals = self.settings, self.totals
        members, holder = len(settings.members), settings.label_holder
        adding = range(members) if settings.contributors is None else settings.contributors[holder]
        each = 0.0
        if self.sigma:
            each, _ = totals.share(sigma=self.sigma, members=len(adding), colluders=settings.plan.collusion)
        shares = [
            [each * each * (m == holder and j in adding) for j in range(members)] for m in range(members)
        ]
        return SealedProtocol(
            widths=tuple(2 * (m == holder) for m in range(members)),
            static=(True,) * members,
            clips=tuple(float(m == holder) for m in range(members)),
            label_holder=holder,
            records=self.records,
            batch=self.records,
            outputs=2 * totals.harmonics,
            series=self._waves(totals),
            share_stds=integer_stds(tuple(map(tuple, shares)), bits=settings.unit_bits)
            if each
            else ((0,) * members,) * members,
            entry=1.0,
            checked=settings.checked,
            groups=tuple((2,) if m == holder else () for m in range(members)) if settings.checked else (),
            dealing=settings.dealing,
        )

    def scale(self, spreads: Sequence[float]) -> float:
        """The public factor for scores that spread so far, by what every member has told."""
        total = math.sqrt(math.fsum(spread * spread for spread in spreads))
        if min(spreads) < 0 or not total:
            return 1.0
        return next((scale for scale in SCALES if scale * total <= WIDE), SCALES[-1])

    def figures(self, opened: Floats, *, positives: float, scale: float, shift: float) -> Floats:
        """`FIGURES` from opened totals, NaN for what cannot be known."""
        shaped = opened.reshape(2, 2, -1).reshape(4, -1)
        known: dict[str, Any] = {
            "positives": positives,
            "records": self.records,
            "noise": self.protocol.total_std(self.settings.label_holder),
            "positives_noise": self.positives_sigma,
        }
        nothing = Estimate(value=math.nan, noise_error=math.nan, standard_error=math.nan)
        try:
            auc = self.totals.auc(shaped, **known)
            losses = [
                metric(shaped, **known, scale=scale, shift=shift)
                for metric in (self.totals.log_loss, self.totals.brier)
            ]
        except AccountingError:  # noise has left no record of one class
            auc, losses = nothing, [nothing, nothing]
        estimates = (auc, *losses)
        return np.array([e.value for e in estimates] + [e.standard_error for e in estimates] + [scale])


class Evaluator:
    """One member's part in evaluations.

    Args:
        setup: What the run is built from.
        settings: What all roles agree on.
        exchange: The member's talk.
        gate: Its gate.
        observers: All other organisations.
    """

    def __init__(
        self,
        setup: Setup,
        settings: SealedGeometry,
        exchange: SealedExchange,
        gate: Gate,
        observers: tuple[str, ...],
    ) -> None:
        self.setup, self.exchange, self.gate, self.observers = setup, exchange, gate, observers
        self.evaluation = Evaluation(settings=settings)
        self.others = tuple(name for name in settings.members if name != exchange.link.address)
        self.holds_labels = exchange.index == settings.label_holder
        self.done = 0

    async def open(self, scores: Floats, *, spread: float, shift: float) -> Floats | None:
        """One evaluation; the label holder gets `FIGURES`.

        Args:
            scores: This member's scores of the test part.
            spread: How far they spread, by noisy totals alone; `UNKNOWN` where these do not tell.
            shift: Of the label holder: the constant in its scores, a function of noisy totals.

        Raises:
            ProtocolError: The plan does not contain another evaluation.
        """
        planned = self.setup.plan.evaluations
        if self.done >= planned:
            raise ProtocolError(
                f"{self.exchange.link.address} has taken part in {self.done} evaluations, all that the plan "
                f"contains ({planned}); another one is refused"
            )
        scale = await self._agree(spread)
        await self.exchange.begin(session=False)
        party = await self._session()
        number = self.exchange.next_round()
        await self.exchange.follow(*ahead(self.exchange, self.gate, party, [(number, None)], self.setup.plan))
        data, clamp, held = self.setup.data, self.evaluation.clamp, self.evaluation.held
        brought = np.clip(scale * (scores[held:] - shift), -clamp, clamp)
        machine = party.round(round=number, scores=brought)
        opening = self.gate.open_totals(
            machine,
            rows=np.arange(data.n_train + held, data.n_train + data.n_test, dtype=np.int64),
            sensitivity=self.evaluation.sensitivity,
            sigma=self.evaluation.sigma,
            kind=KIND,
            observers=self.observers,
        )
        self.done += 1
        await self.exchange.follow(opening)
        if not self.holds_labels:
            return None
        opened = self.gate.keep(TOTAL, machine.result(), std=party.protocol.total_std(self.exchange.index))
        return self.evaluation.figures(opened, positives=self._positives(), scale=scale, shift=shift)

    @property
    def _positive(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.setup.data.y_test[self.evaluation.held :]) > 0

    async def _agree(self, spread: float) -> float:
        """Everybody tells everybody how far its scores spread, before any of them meets the dealer."""
        for other in self.others:
            await self.exchange.link.send(other, SealedSpread(spread=spread))
        told: dict[str, float] = {self.exchange.link.address: spread}
        while len(told) <= len(self.others):
            message = await self.exchange.hear(SealedSpread.kind)
            if message.sender not in self.others or message.sender in told:
                raise ProtocolError(f"{message.sender} tells its spread out of turn")
            told[message.sender] = float(message["spread"])
        return self.evaluation.scale([told[name] for name in sorted(told)])

    async def _session(self) -> SealedParty:
        """Masks of the label holder's operand (y, 1 - y), for this evaluation alone."""
        operand = np.zeros((0, self.evaluation.records), np.int32)
        if self.holds_labels:
            positive = self._positive
            operand = np.stack([positive, ~positive]).astype(np.int32) << OPERAND_BITS
        protocol = self.evaluation.protocol
        party = party_of(protocol, self.exchange.index, operand=operand, noise=self.gate.noise.stream)
        await self.exchange.follow(hidden(self.exchange, self.gate, party.setup(), protocol, self.setup.plan))
        return party

    def _positives(self) -> float:
        """How many positives there are, with noise; part of the opening that was just written down."""
        exact = np.array([float(self._positive.sum())])
        sigma = self.evaluation.positives_sigma
        if not sigma:
            return float(exact[0])
        return float(self.gate.keep(STATISTIC, self.gate.noise.perturb(exact, sigma), std=sigma)[0])
