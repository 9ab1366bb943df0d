"""Canaries for sealed training: whole runs side by side, with an observer that replays the victim's weights.

No value of a single record is ever opened, so the canary is one record of a victim and the observer is a
coalition that follows the protocol. What it has: its own noisy totals, and the noise that it put on the
victim's totals. A column of the observer that is the same for all ordinary records turns its totals into a
measurement of the victim's weights; their movement, less the noise that the observer knows, is the victim's
total. Data, initial weights and rates are chosen for the attack: the promise holds for all of them.

All worlds run in lockstep, as columns of one protocol. Noise is what `SealedParty` adds, with the shares that
the plan's settings ask for; what the trials are promised is read from the ledger of a gate that wrote every
opening down. The exact totals are computed in floating point (a test compares them with the ring).

The scenario of the sealed canary audit: who attacks whom, with which canary, and what the totals then are.

Scores of ordinary records are the victim's weight times a row that is the same for all of them, with labels
that balance at weight zero. The observer's first column belongs to the canary alone, its second to all
ordinary records. The victim's rate is such that its noise moves its weight by about `SPREAD`; the number of
ordinary records is such that this stands out in the observer's totals, and their pull takes the weight back
to zero within one iteration, so that each iteration shows the last one's total.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securevfl.accountants.scorecard import RESIDUAL_FROM
from securevfl.algorithms.base import SERVER
from securevfl.algorithms.sealed.card import HISTOGRAMS, KINDS, CardGeometry, geometry_of
from securevfl.algorithms.sealed.evaluation import KIND, Evaluation
from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.attacks.canary.gate import OBSERVER, ROWS, Door, gate_canaries
from securevfl.attacks.canary.results import CanaryResult, Coins, claims_of, conclude, gate_of, guess_worlds
from securevfl.data import VerticalData
from securevfl.privacy.gate import Gate
from securevfl.privacy.rows import Rows
from securevfl.protocols.discrete_gaussian import DiscreteGaussian
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import DEALT
from securevfl.protocols.sealed.series import class_reach
from securevfl.settings.plan import Plan

Floats = NDArray[np.float64]

SPREAD = 1.0 / 48  # std of the victim's weight, in periods of the series
VISIBLE = 5.0  # how far the victim's secret noise stands out in the observer's totals
PULL = 2.0**-7  # share of the canary's row that sets its score, through a large public weight


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One record in two worlds: sign of its row, score at weight zero, and label; of classes all of them.

    Attributes:
        signs: Of the victim's row.
        scores: What public initial weights make of the record.
        labels: Its label.
    """

    signs: tuple[float, float]
    scores: tuple[float | Floats, float | Floats]
    labels: tuple[float | Floats, float | Floats]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One victim, the coalition that faces the least noise, and the canary that shifts the totals most.

    Attributes:
        settings: The settings of the run.
        victim: Index of the member whose record is the canary.
    """

    NAIVE: ClassVar[str] = "own totals"
    """The accounting that counts only the totals that the observer obtains itself."""

    settings: SealedGeometry
    victim: int

    @cached_property
    def coalition(self) -> frozenset[int]:
        """The worst of those that the victim is protected against."""
        shifts, variances = self.settings.shifts, self.settings.variances
        candidates = shifts.coalitions(self.settings.plan.collusion, without=self.victim)
        return max(filter(None, candidates), key=lambda s: shifts.squared_mu(variances, s))

    @cached_property
    def observer(self) -> int:
        """The member of the coalition whose totals carry least unknown noise, measured by its clip."""
        return min(self.coalition, key=self._unknown)

    def _noise(self, member: int, *, known: bool) -> float:
        """Noise on a member's total that the coalition knows, or does not know, in units of its clip."""
        row = self.settings.variances[member]
        variance = sum(v for j, v in enumerate(row) if (j in self.coalition) == known)
        return math.sqrt(variance) / self.settings.clips[member]

    def _unknown(self, member: int) -> float:
        return self._noise(member, known=False)

    # -- the canary -----------------------------------------------------------------------------------------

    @cached_property
    def canary(self) -> Canary:
        """Of the changes that the promise covers, the one that shifts the two totals most."""
        return max(self._candidates(), key=lambda canary: math.hypot(*self._distances(canary)))

    def _candidates(self) -> list[Canary]:
        if self.settings.weighted:
            return self._class_candidates()
        series, (least, most) = self.settings.series, self.settings.label_range
        grid = np.linspace(-series.period / 4, series.period / 4, 4097)
        low, high = float(grid[series(grid).argmin()]), float(grid[series(grid).argmax()])
        if self.settings.plan.settings.protect == "label":
            inside = least == most  # a regression's label is part of the score
            scores = (low, high) if inside else (0.0, 0.0)
            return [Canary(signs=(1, 1), scores=scores, labels=(most, least))]
        known = (
            self.settings.plan.settings.protect == "features" or self.settings.label_holder in self.coalition
        )
        return [
            Canary(signs=(-1, 1), scores=(low, low), labels=(most, most)),
            Canary(signs=(1, 1), scores=(low, high), labels=(most, most if known else least)),
        ]

    def _class_candidates(self) -> list[Canary]:
        """A record of the first class, or of the second, with every score as wrong as it may be."""
        wrong = np.full(self.settings.data.outputs, class_reach())
        first, second = np.eye(len(wrong))[:2]
        own, other = wrong * (1 - 2 * first), wrong * (1 - 2 * second)
        if self.settings.plan.settings.protect == "label":
            return [Canary(signs=(1, 1), scores=(own, own), labels=(first, second))]
        label_known = (
            self.settings.plan.settings.protect == "features" or self.settings.label_holder in self.coalition
        )
        right = -own if label_known else other
        return [
            Canary(signs=(-1, 1), scores=(own, own), labels=(first, first)),
            Canary(signs=(1, 1), scores=(own, right), labels=(first, first if label_known else second)),
        ]

    def _distances(self, canary: Canary) -> tuple[float, float]:
        """How far apart the worlds are in the victim's and the observer's total, in deviations of noise."""
        coins = np.array([False, True])
        residuals = self._residual(canary, np.zeros((2, 1)), coins[:, None])
        theirs = np.asarray(canary.signs)[:, None] * residuals
        apart = [float(np.linalg.norm(np.diff(each, axis=0))) for each in (theirs, residuals)]
        return apart[0] / self._unknown(self.victim), apart[1] / self._unknown(self.observer)

    def _residual(self, canary: Canary, weight: Floats, coins: Coins) -> Floats:
        pairs = (canary.signs, canary.scores, canary.labels)
        sign, score, label = (np.where(coins, there, here) for here, there in pairs)
        series = self.settings.series
        if self.settings.weighted:
            reach = class_reach()
            inside = np.clip(score + sign * weight, -reach, reach)
            return np.asarray(series(inside + label * series.period / 2))
        return np.asarray(series(score + sign * weight) - label)

    def _pull(self, weight: Floats) -> Floats:
        """Mean residual of ordinary records, in each output; it is zero at weight zero.

        Of classes a share of records is of its own class, the rest of others, so that both sides balance.
        """
        series = self.settings.series
        if not self.settings.weighted:
            return np.asarray(series(weight) - series.offset)
        half = series.period / 2
        own = float(series(0.0)) / float(series(0.0) - series(half))
        return np.asarray(own * series(weight + half) + (1 - own) * series(weight))

    @cached_property
    def directions(self) -> tuple[Floats, Floats]:
        """Along which of its outputs the canary moves the observer's total, and the victim's."""
        canary, coins = self.canary, np.array([[False], [True]])
        residuals = self._residual(canary, np.zeros((2, self.settings.data.outputs)), coins)
        moves = [np.diff(r, axis=0)[0] for r in (residuals, np.asarray(canary.signs)[:, None] * residuals)]
        shown, moved = (m if m.any() else np.ones_like(m) for m in moves)
        return shown, moved

    # -- one iteration --------------------------------------------------------------------------------------

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the victim's weight."""
        return SPREAD * self.settings.series.period

    @cached_property
    def slope(self) -> float:
        """Of an ordinary record's residual at zero."""
        step = self.settings.series.period * 1e-3  # tables have steps of their own
        return float(self._pull(np.array(step)) - self._pull(np.array(-step))) / (2 * step)

    @cached_property
    def row(self) -> float:
        """The victim's row of an ordinary record, in units of its clip."""
        return min(1.0, self._unknown(self.victim) / (VISIBLE * self._unknown(self.observer)))

    @cached_property
    def rate(self) -> float:
        """What a total, in units of the clip, moves the weight by."""
        return self.spread / math.hypot(self._unknown(self.victim), self._noise(self.victim, known=True))

    @cached_property
    def ordinary(self) -> int:
        """How many ordinary records there are, an even number."""
        secret = self.rate * self._unknown(self.victim)
        return 2 * math.ceil(VISIBLE * self._unknown(self.observer) / (2 * self.slope * self.row * secret))

    def totals(self, weight: Floats, coins: Coins) -> tuple[Floats, Floats]:
        """Exact totals: the observer's two columns, (2, ...) like `weight`, and the victim's column."""
        clips = self.settings.clips
        residual = self._residual(self.canary, weight, coins)
        pull = self.ordinary * self._pull(self.row * weight)
        mine = np.stack([residual, pull]) * clips[self.observer]
        here, there = self.canary.signs
        signs = np.where(coins, there, here) * math.sqrt(1 - PULL * PULL)
        return mine, np.asarray((self.row * pull + signs * residual) * clips[self.victim])

    def step(self, weight: Floats, total: Floats) -> Floats:
        """The victim's next weight, from its noisy total alone."""
        limit = 8 * self.spread
        moved = weight - self.rate * total / self.settings.clips[self.victim]
        return np.clip(moved, -limit, limit)

    def naive_mu(self, iterations: int) -> float:
        """What the observer's own totals alone would promise after so many iterations."""
        shifts = self.settings.shifts
        known = shifts.protects == "features" or shifts.label_holder in self.coalition
        change = shifts.residual_change if known else 2 * shifts.residual_bound
        change = shifts.label_change if shifts.protects == "label" else change
        return change * math.sqrt(shifts.outputs * iterations) / self._unknown(self.observer)


WORLDS = 20_000
LAST_WORLDS = 5_000
"""Of a scorecard's last fit, which is the first one with other noise and twice as many totals."""
DRAWS = 20_000_000  # samples of noise that one audit may take: a few seconds
MAX_ITERATIONS = 80  # longer runs are audited by their first iterations: fewer openings only weaken the bound


class LastFit(CardGeometry):
    """The settings of a scorecard's last fit."""

    fit = "last"


def sealed_settings(plan: Plan, parties: Sequence[str], label_holder: str) -> SealedGeometry:
    """The settings of a sealed run, from its resolved plan and the names alone."""
    found = _settings_of(plan, parties, label_holder, records=0)
    if not isinstance(found, CardGeometry) or len(found.openings) >= plan.epochs:
        return found
    # So large a run has a residual histogram, too.
    needed = math.ceil(RESIDUAL_FROM * math.sqrt(len(parties)) / found.mu) + 1
    return _settings_of(plan, parties, label_holder, records=needed)


def _settings_of(plan: Plan, parties: Sequence[str], label_holder: str, *, records: int) -> SealedGeometry:
    """The settings for made-up data of so many records, or as few as there can be."""
    outputs = plan.embedding
    regression = plan.settings.label_high > plan.settings.label_low
    labels = np.arange(max(records, 2 * max(outputs, 2))) % max(outputs, 2)
    task = "regression" if regression else ("binary" if outputs == 1 else "multiclass")
    nothing = np.zeros((len(labels), 1), np.float32)
    data = VerticalData.from_arrays(
        dict.fromkeys(parties, nothing),
        labels,
        test=(dict.fromkeys(parties, nothing[:2]), labels[:2]),
        label_holder=label_holder if label_holder in parties else None,
        task=task,
    )
    return geometry_of(plan, data)


class _Worlds:
    """The noise of many worlds: each is `outputs` columns of one protocol without operands."""

    def __init__(self, replay: Replay, gate: Gate, count: int) -> None:
        settings = replay.settings
        self.replay, self.gate, self.count = replay, gate, count
        width = count * settings.data.outputs
        widths = [0] * len(settings.members)
        widths[replay.observer], widths[replay.victim] = 2 * width, width
        # Worlds have no operands: nothing to prove or deal; what is opened and its noise are the same.
        protocol = settings.protocol(tuple(widths), (False,) * len(widths), checked=False, dealing=DEALT)
        self.parties = [SealedParty(protocol, m, noise=gate.noise.stream) for m in range(len(widths))]

    def noise(self, target: int, members: Sequence[int]) -> Floats:
        """The noise of some members on a total, (columns, worlds, outputs)."""
        width = self.parties[0].protocol.widths[target]
        total = np.zeros((width, 1), np.uint64)
        for member in members:
            total += self.parties[member].noise_for(target)
        values = total.view(np.int64).astype(np.float64) * 2.0**-self.replay.settings.unit_bits
        return values.reshape(-1, self.count, self.replay.settings.data.outputs)

    def watch(self, coins: Coins, iterations: int) -> Floats:
        """What the coalition has after a run: (worlds, features)."""
        replay = self.replay
        everybody = range(len(self.parties))
        inside = [m for m in everybody if m in replay.coalition]
        outside = [m for m in everybody if m not in replay.coalition]
        weight = np.zeros((self.count, replay.settings.data.outputs))
        seen = []
        shown, moved = replay.directions
        for _ in range(iterations):
            self._write_down()
            mine, theirs = replay.totals(weight, coins[:, None])
            mine = mine + self.noise(replay.observer, outside)
            known = self.noise(replay.victim, inside)[0]
            weight = replay.step(weight, theirs + known + self.noise(replay.victim, outside)[0])
            seen.append(np.stack([mine[0] @ shown, mine[1] @ moved, known @ moved]))
        return summarise(np.stack(seen))

    def _write_down(self) -> None:
        settings = self.replay.settings
        sensitivity, sigma = settings.cost(self.replay.victim)
        self.gate.open_totals(
            None,
            rows=np.zeros(1, np.int64),
            sensitivity=sensitivity,
            sigma=sigma,
            kind=f"totals ({settings.plan.settings.protect})",
            observers=(OBSERVER,),
        )


def summarise(seen: Floats) -> Floats:
    """From (iterations, 3, worlds) to (worlds, 3): iterations are alike, so one weight for each kind is best.

    The first total of ordinary records comes before the canary has moved anything, and the last known noise
    moves a weight that nobody measures.
    """
    return np.stack([seen[:, 0].sum(0), seen[1:, 1].sum(0), seen[:-1, 2].sum(0)], axis=1)


def replayed_canaries(
    replay: Replay,
    *,
    trials: int = 0,
    seed: int = 0,
    owners: tuple[str, ...] = (),
    progress: Callable[[float], None] = lambda share: None,
) -> CanaryResult:
    """Trains every world with a coin, fits the rule on the first half, and guesses the second.

    Args:
        replay: The scenario.
        trials: Training runs in all; 0 takes 20,000, fewer where much noise has to be drawn.
        seed: Seed of the coins, never of noise.
        owners: Whose promise the result concerns.
        progress: Called with the share done.
    """
    plan = replay.settings.plan
    iterations = min(replay.settings.totals, MAX_ITERATIONS)
    each = iterations * 3 * len(replay.settings.members) * replay.settings.data.outputs
    most = max(400, min(WORLDS, DRAWS // each))
    worlds = min(trials or most, most)

    def watch(coins: Coins) -> tuple[Floats, Gate]:
        gate = gate_of(plan)(1)
        return _Worlds(replay, gate, len(coins)).watch(coins, iterations), gate

    guesses, gate = guess_worlds(watch, worlds, seed=seed, progress=progress)
    claims = {replay.NAIVE: replay.naive_mu(iterations), plan.mode: claims_of(gate)[plan.mode]}
    mode = plan.mode
    return conclude(guesses, mode=mode, accounting=mode, claims=claims, delta=plan.delta, owners=owners)


def statistic_door(gate: Gate, settings: SealedGeometry) -> Door:
    """Noisy sums of a party's columns, which centre its rows; every canary is a column of its own."""
    diameter = 2.0
    sigma, _, factor = settings.centring_sigmas(diameter, diameter**2)

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        return gate.noisy_statistic(
            vectors,
            rows=rows,
            change=diameter,
            counted=diameter * factor,
            sigma=sigma,
            kind="means",
            observers=(OBSERVER,),
        )

    return Door(gate=gate, reach=diameter / 2, let_out=let_out)


def counts_door(gate: Gate, settings: CardGeometry) -> Door:
    """Noisy counts that bins are made of, all three levels averaged by what each is worth."""
    noise = settings.noise
    reach = math.sqrt(2 * noise.binned) / 2
    worth = np.array([std**-2 for std in noise.bin_stds])

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        noisy = gate.noisy_counts(
            rows=rows, sensitivity=2 * reach, sigmas=noise.bin_stds, observers=(OBSERVER,)
        )
        seen = [noisy(vectors, std) for std in noise.bin_stds]
        return np.asarray(np.tensordot(worth / worth.sum(), np.stack(seen), 1))

    return Door(gate=gate, reach=reach, let_out=let_out)


def histogram_door(gate: Gate, settings: CardGeometry, opening: str, victim: int) -> Door:
    """An opening of histograms to the worst coalition, which combines all totals by what each is worth.

    A canary is one value here: along the direction in which the record moves all totals together.
    """
    shifts, stds = settings.noise.shifts[opening], settings.stds_of(opening)
    added, clips = settings.added(opening), shifts.clips
    candidates = shifts.coalitions(settings.plan.collusion, without=victim)
    coalition = max(filter(None, candidates), key=lambda s: shifts.squared_mu(added, s))
    outside = [m for m in range(len(stds)) if m not in coalition]
    known = settings.label_holder in coalition  # then only features that the coalition does not hold move
    moved = [m for m, clip in enumerate(clips) if clip and (not known or m in outside)]
    full = (2 * shifts.residual_bound) ** 2
    reach = math.sqrt(shifts.known_label if known and shifts.known_label else full) / 2
    worth = np.array([clips[m] ** 2 / sum(added[m][j] for j in outside) for m in moved])
    sensitivity, sigma = settings.cost_of(opening, victim)

    def noise(target: int, shape: tuple[int, ...]) -> Floats:
        count = math.prod(shape)
        drawn = [
            DiscreteGaussian(stds[target][j]).sample(count, gate.noise.stream)
            for j in outside
            if stds[target][j]
        ]
        unit = 2.0 ** -settings.total_bits(opening) / clips[target]
        return np.asarray(np.sum(drawn, axis=0).reshape(shape) * unit)

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        gate.open_totals(
            None, rows=rows, sensitivity=sensitivity, sigma=sigma, kind=KINDS[opening], observers=(OBSERVER,)
        )
        seen = [vectors + noise(m, vectors.shape) for m in moved]
        return np.asarray(np.tensordot(worth / worth.sum(), np.stack(seen), 1))

    return Door(gate=gate, reach=reach, let_out=let_out)


def evaluation_door(gate: Gate, settings: SealedGeometry) -> Door:
    """Totals over the test part, to a coalition that knows the noise of as many members as may collude.

    A canary is one value: along the direction in which a test record moves all totals together.
    """
    evaluation, holder = Evaluation(settings=settings), settings.label_holder
    shares = sorted(std for std in evaluation.protocol.share_stds[holder] if std)
    stds = shares[: len(shares) - settings.plan.collusion]

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        gate.open_totals(
            None,
            rows=rows,
            sensitivity=evaluation.sensitivity,
            sigma=evaluation.sigma,
            kind=KIND,
            observers=(OBSERVER,),
        )
        drawn = [DiscreteGaussian(std).sample(vectors.size, gate.noise.stream) for std in stds]
        return np.asarray(vectors + np.sum(drawn, axis=0).reshape(vectors.shape) * 2.0**-settings.unit_bits)

    return Door(gate=gate, reach=evaluation.sensitivity / 2, let_out=let_out)


def _fits(settings: SealedGeometry) -> dict[str, SealedGeometry]:
    """Trainings by iterations: those of a linear model, both fits of a scorecard, none of a profile."""
    if not isinstance(settings, CardGeometry):
        return {"": settings}
    if not settings.evaluates:
        return {}
    return {"": settings, f", {KINDS['last']}": LastFit(plan=settings.plan, data=settings.data)}


def sealed_canaries(
    plan: Plan,
    *,
    parties: Sequence[str],
    label_holder: str,
    trials: int = 0,
    canaries: int = 0,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, CanaryResult]:
    """Audits a sealed plan: against a party without labels, against the label holder, and its statistics.

    Args:
        plan: The resolved plan.
        parties: Names of the parties.
        label_holder: Who has the labels; a name that is no party's holds no features.
        trials: Training runs of each audit; 0 for the default.
        canaries: Canaries of the statistics' noise.
        seed: Seed of coins, never of noise.
        progress: Called with the audit's name and the share done.
    """
    settings = sealed_settings(plan, parties, label_holder)
    names = tuple(label_holder if name == SERVER else name for name in settings.members)
    holder = settings.label_holder
    others = tuple(name for m, name in enumerate(names) if m != holder)
    found: dict[str, CanaryResult] = {}
    for (what, fit), (whose, victim, owners) in itertools.product(
        _fits(settings).items(),
        (("party", 1 if holder == 0 else 0, others), ("label-holder", holder, (names[holder],))),
    ):
        name = f"{whose}{what}"
        if fit.cost(victim)[1]:  # else nothing is promised
            found[name] = replayed_canaries(
                Replay(settings=fit, victim=victim),
                trials=min(trials or WORLDS, LAST_WORLDS) if what else trials,
                seed=seed,
                owners=owners,
                progress=lambda share, name=name: progress(name, share),  # type: ignore[misc]
            )
    if plan.settings.centring and plan.sigma:
        door = statistic_door(gate_of(plan)(ROWS * canaries), settings)
        found["statistics"] = gate_canaries(door, trials=canaries, delta=plan.delta, seed=seed)
    if isinstance(settings, CardGeometry) and plan.sigma:
        make = gate_of(plan)
        doors = {"bins": counts_door(make(ROWS * canaries), settings)}
        for opening in HISTOGRAMS:
            if opening in settings.noise.shifts:
                gate = make(ROWS * canaries)
                doors[KINDS[opening]] = histogram_door(gate, settings, opening, 1 if holder == 0 else 0)
        for name, door in doors.items():
            found[name] = gate_canaries(door, trials=canaries, delta=plan.delta, seed=seed)
    if plan.sigma and Evaluation(settings=settings).offered:
        door = evaluation_door(gate_of(plan)(ROWS * canaries), settings)
        found[KIND] = gate_canaries(door, trials=canaries, delta=plan.delta, seed=seed)
    return found
