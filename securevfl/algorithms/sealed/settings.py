"""From a plan to the numbers of sealed training: members, clips, noise, and what one iteration costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from securevfl.accountants.sealed import SealedShifts, Variances
from securevfl.algorithms.base import SERVER
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.protocols.sealed.kernel import ADDED_BITS, Kernel
from securevfl.protocols.sealed.parts import Parts
from securevfl.protocols.sealed.protocol import (
    DEALT,
    ENCRYPTED,
    PACKED_BITS,
    THIRD,
    TOTAL_BITS,
    SealedProtocol,
)
from securevfl.protocols.sealed.series import (
    SineSeries,
    class_reach,
    class_series,
    identity_series,
    logistic_series,
)
from securevfl.settings.plan import Plan

DEALER = "dealer"
NOBODY = "none"
"""In the place of a dealer's name, where members do without one."""
BIAS = 0.25
"""The constant column of the label holder, as a share of the clip."""
MEANS = 0.75
"""Share of the centring budget for the means; the rest is for the scale."""
SCALE_NOISE = 0.02
"""Most noise in a column's mean square (of values between -1 and 1) with which it is worth a scale."""
RIDGE = {"classes": 1.0, "regression": 6.0}
"""Pull to zero in units of the fit's noise, chosen on uci-credit and a9a, and on the diabetes set."""
_MIN_STD = 1 << 14  # as for the noise of secure sums: discreteness is below any float's resolution
_ROUNDING_VARIANCE = 9  # a discrete Gaussian protects like a real one of variance less by 9


@dataclass(frozen=True, kw_only=True)
class SealedGeometry:
    """What all roles of a sealed run agree on.

    Attributes:
        plan: The resolved plan.
        data: The data; only public facts of it are read here: names, widths, counts, bounds, task.
    """

    plan: Plan
    data: VerticalData

    @property
    def members(self) -> tuple[str, ...]:
        """Addresses of those who hold shares: the parties, and the server where it has no features."""
        return self.data.parties if self.holds_features else (*self.data.parties, SERVER)

    @property
    def evaluates(self) -> bool:
        """Whether there is a model to evaluate."""
        return True

    @property
    def holds_features(self) -> bool:
        """Whether the label holder is one of the parties."""
        return self.plan.label_holder == "party" and self.data.label_holder in self.data.parties

    @property
    def label_holder(self) -> int:
        """Index of the member with the labels."""
        return self.members.index(self.data.label_holder if self.holds_features else SERVER)

    @property
    def clips(self) -> tuple[float, ...]:
        """Bound of each member's rows; a label holder without features has the constant column alone."""
        return tuple(self.plan.clip * (BIAS if name == SERVER else 1.0) for name in self.members)

    @property
    def series(self) -> SineSeries | Kernel:
        """The function of the summed score; of a regression, of the score less the label.

        The label holder knows its label, so it subtracts it from its own score before the masked phase: the
        residual is then bounded by the series alone, 1 instead of 1 and the largest score. With labels and
        scores in [-1, 1] the distance is at most 2, half a period: beyond 1 the series turns back (large
        errors count less, as in robust regression) but never has the wrong sign.
        """
        if self.dealing == ENCRYPTED:
            return Kernel()
        if self.weighted:
            return class_series(self.data.outputs)
        return identity_series(period=4.0) if self.data.task == "regression" else logistic_series()

    @property
    def weighted(self) -> bool:
        """Of several classes: whether a record's residuals are bounded together, whatever their number.

        It rests on clamped scores and on labels inside the scores, which nobody proves.
        """
        return self.data.task == "multiclass" and not self.checked

    @property
    def label_range(self) -> tuple[float, float]:
        """Labels as the protocol subtracts them; those of regression and of classes are inside the score."""
        return (0.0, 0.0) if self.data.task == "regression" or self.weighted else (0.0, 1.0)

    def score_bound(self, member: int) -> float:
        """What a member's own scores are clamped to, a rule for each record by itself."""
        if self.weighted:
            return class_reach() / len(self.members)
        if self.data.task != "regression":
            return math.inf
        return 1.0 if member == self.label_holder else 1.0 / (len(self.members) - 1)

    @property
    def unit_rate(self) -> float:
        """Half the inverse smoothness of the loss in all weights together: f' is at most 1/4 or 1."""
        slope = 1.0 if self.data.task == "regression" else 0.25
        return 0.5 / (slope * sum(clip * clip for clip in self.clips))

    @property
    def checked(self) -> bool:
        """Whether members may do anything, so that everything is proved and authenticated."""
        return bool(self.plan.settings.adversary == "malicious")

    @property
    def dealing(self) -> str:
        """Where masks come from: a dealer, the member whom a product does not concern, ciphertexts of two."""
        if self.plan.settings.dealer != NOBODY:
            return DEALT
        return THIRD if len(self.members) > 2 else ENCRYPTED

    @property
    def unit_bits(self) -> int:
        """Fraction bits of totals and of the noise on them, where words are long."""
        return ADDED_BITS + PACKED_BITS if self.dealing == ENCRYPTED else TOTAL_BITS

    @property
    def contributors(self) -> tuple[frozenset[int], ...] | None:
        """Whose noise can reach each member's total; None for everybody's."""
        if self.dealing != THIRD:
            return None
        parts = Parts(len(self.members), self.label_holder)
        return tuple(map(parts.contributors, range(parts.members)))

    @property
    def batch(self) -> int:
        """Records of one iteration."""
        return min(self.plan.batch, self.data.n_train)

    @property
    def iterations(self) -> int:
        """Iterations of one epoch, each record being in exactly one of them."""
        return -(-self.data.n_train // self.batch)

    @property
    def totals(self) -> int:
        """Openings of a record that carry the noise of `sigma`."""
        return self.plan.epochs

    @property
    def sigma(self) -> float:
        """Noise of one total that an observer cannot subtract, as the ledger counts it."""
        return self.plan.sigma

    @property
    def whole_mu(self) -> float:
        """What a run costs a record that it trains on; infinite without noise."""
        if not self.plan.sigma:
            return math.inf
        openings = self.plan.epochs / (1 - self.plan.settings.centring)
        return self.shifts.diameter / self.plan.sigma * math.sqrt(openings)

    @cached_property
    def shifts(self) -> SealedShifts:
        """How far one record moves the totals of one iteration."""
        if self.weighted:
            return self._class_shifts()
        low, high = self.series.range
        rounding = self.series.rounding
        label_low, label_high = self.label_range
        return SealedShifts(
            clips=self.clips,
            label_holder=self.label_holder,
            protects=self.plan.settings.protect,
            residual_bound=max(high - label_low, label_high - low) + rounding,
            residual_change=high - low + 2 * rounding,
            # Inside the score a label moves the residual like anything else that moves the score.
            label_change=label_high - label_low or high - low + 2 * rounding,
            outputs=self.data.outputs,
            contributors=self.contributors,
        )

    def _class_shifts(self) -> SealedShifts:
        """Of residuals of all classes together: one of the record's own class, the others smaller."""
        series, reach = class_series(self.data.outputs), class_reach()
        half = series.period / 2
        own, other = series.between(half - reach, half + reach), series.between(-reach, reach)
        off, count = series.rounding, self.data.outputs - 1

        def together(one: float, rest: float) -> float:
            return math.hypot(one + off, math.sqrt(count) * (rest + off))

        # The label comes or goes at one score: harmonics that half a period turns round count twice.
        moved = tuple(2 * c * (k % 2) for c, k in zip(series.coefficients, series.harmonics, strict=True))
        turned = replace(series, coefficients=moved, offset=0.0, low=-2.0, high=2.0)
        apart = max(map(abs, turned.between(-reach, reach))) + 2 * off
        return SealedShifts(
            clips=self.clips,
            label_holder=self.label_holder,
            protects=self.plan.settings.protect,
            residual_bound=together(max(map(abs, own)), max(map(abs, other))),
            residual_change=together(own[1] - own[0] + off, other[1] - other[0] + off),
            label_change=math.sqrt(2) * apart,
        )

    @cached_property
    def share_stds(self) -> tuple[tuple[int, ...], ...]:
        """Integer noise [target][member] such that every coalition faces what `sigma` promises."""
        members = len(self.members)
        if not self.sigma:
            return ((0,) * members,) * members
        return integer_stds(
            self.shifts.variances(mu=self.shifts.diameter / self.sigma, colluders=self.plan.collusion),
            bits=self.unit_bits,
        )

    @cached_property
    def variances(self) -> Variances:
        """The noise that is really added, as real Gaussians that protect no better."""
        return real_variances(self.share_stds, bits=self.unit_bits)

    def cost(self, member: int) -> tuple[float, float]:
        """What an iteration costs the member's records: sensitivity and sigma, both 0 without a guarantee.

        Where only labels are protected, the others' features are not: their ledgers say so.
        """
        shifts = self.shifts
        if self.plan.settings.protect == "label" and member != self.label_holder:
            shifts = replace(shifts, protects="features")
        mu = shifts.mu(self.variances, colluders=self.plan.collusion, owner=member)
        if not self.sigma or math.isinf(mu):
            return 0.0, 0.0
        return mu * self.sigma * (1 + 1e-12), self.sigma

    def centring_sigmas(self, diameter: float, squares: float) -> tuple[float, float, float]:
        """Noise for a party's sums of columns and of squared distances, and the factor of their sensitivity.

        All parties' statistics concern the same person, so each pays for all of them.

        Args:
            diameter: How far two rows of the party can be apart.
            squares: How far one row can move the sums of squares.
        """
        factor = math.sqrt(len(self.data.parties)) if self.plan.settings.protect == "person" else 1.0
        if not self.plan.sigma:
            return 0.0, 0.0, factor
        share = self.plan.settings.centring / (1 - self.plan.settings.centring)
        squared = share * self.plan.epochs * (self.shifts.diameter / self.plan.sigma) ** 2
        means, scale = math.sqrt(squared * MEANS), math.sqrt(squared * (1 - MEANS))
        return diameter * factor / means, squares * factor / scale, factor

    def scales_columns(self, width: int) -> bool:
        """Whether each column gets a scale of its own: where noise leaves something of it. Public.

        A column inside loose bounds varies little; with one scale for all it would hardly count.
        """
        squares = math.sqrt(width)
        return self.centring_sigmas(1.0, squares)[1] <= SCALE_NOISE * self.data.n_train

    @cached_property
    def ridge(self) -> float:
        """Pull of the weights to zero, per record, in proportion to the noise of the whole fit.

        What the noise of all iterations together can move a weight by is the least that the data must say.
        """
        if not self.sigma or self.plan.model != "linear" or self.plan.l2:
            return 0.0
        each = math.fsum(math.fsum(row) for row in self.variances) / len(self.members)
        strength = RIDGE["regression" if self.data.task == "regression" else "classes"]
        return strength * math.sqrt(each / self.plan.epochs) / self.data.n_train

    def protocol(
        self,
        widths: tuple[int, ...],
        static: tuple[bool, ...],
        *,
        checked: bool | None = None,
        dealing: str = "",
    ) -> SealedProtocol:
        """The public configuration of the protocol; checked and dealt as the plan says, unless it is told."""
        low, high = self.label_range
        return SealedProtocol(
            widths=widths,
            static=static,
            clips=self.clips,
            label_holder=self.label_holder,
            records=self.data.n_train,
            batch=self.batch,
            outputs=self.data.outputs,
            series=self.series,
            label_low=low,
            label_high=high,
            share_stds=self.share_stds,
            checked=self.checked if checked is None else checked,
            dealing=dealing or self.dealing,
        )


def dealing_organisation(plan: Plan) -> dict[str, str]:
    """Address of the dealer -> the organisation that deals; empty where members do without one."""
    name = plan.settings.dealer
    return {} if name == NOBODY else {DEALER: DEALER if name == "auto" else name}


def integer_stds(
    variances: Variances, *, bits: int = TOTAL_BITS, least: int = _MIN_STD
) -> tuple[tuple[int, ...], ...]:
    """Integer noise [target][member] that protects like real noise of these variances.

    Args:
        variances: Of real noise.
        bits: Fraction bits of the totals.
        least: The smallest integer standard deviation.

    Raises:
        PlanError: It would be too small for the ring.
    """
    stds = tuple(tuple(_integer_std(v, bits) for v in row) for row in variances)
    found = min(std for row in stds for std in row if std)
    if found < least:
        raise PlanError(
            f"noise of std {found * 2.0**-bits:.3g} is below the resolution of the ring; raise sigma"
        )
    return stds


def real_variances(stds: tuple[tuple[int, ...], ...], *, bits: int = TOTAL_BITS) -> Variances:
    """Integer noise as real Gaussians that protect no better."""
    unit = 4.0**-bits
    return tuple(tuple(max(0, std * std - _ROUNDING_VARIANCE) * unit for std in row) for row in stds)


def _integer_std(variance: float, bits: int) -> int:
    """The least integer whose discrete Gaussian protects like a real one of this variance."""
    if not variance:
        return 0
    return math.isqrt(math.ceil(variance * 4.0**bits) + _ROUNDING_VARIANCE) + 1
