"""Canaries through the real training: `train` itself, on made-up records of the run's shape.

Nothing is simulated here: roles, gates, sums, masks and ledgers are those that made the run, and the observer
reads its own view and journal. One record of a victim is the canary; a coin decides its features (and, where
the victim holds the labels, its label). Two more runs, hardly any noise in them, show how the canary moves
what is seen; along that direction every trial guesses, which is the likelihood ratio where all releases have
the same noise. Where the plan allows no such runs, half of the trials fit the rule. What the trials are
promised is read from the ledger that they wrote. Owners' rows are never used.

Trials are as many as a budget of processor time allows, so every run has to tell much:

- where every vector counts for every record (mode strict), it has two records, one of them a canary, in each
  of many parties, so that the canary's own releases are most of what its owner is promised;
- where a record's own releases count (frozen, dp-encoder), all records of a run are canaries;
- a run of many coins is as long as lets the whole budget certify the largest share of its promise.

In these runs of many coins models learn at a rate of nearly zero: what leaves of one canary then depends on
no other's coin, and trials are independent. That a record may move the weights is what the canaries beside
these try (`securevfl.attacks.canary.trained`).
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.accountants import privacy_matrix
from securevfl.attacks.canary.results import CanaryGuesses, CanaryResult, Coins, LinearRule, conclude
from securevfl.attacks.contract import Evidence
from securevfl.attacks.reading import Release, mean_by_record, moments, releases
from securevfl.attacks.source import Source
from securevfl.attacks.statistics import usual_mu
from securevfl.data import VerticalData
from securevfl.errors import AttackError, SecureVFLError
from securevfl.federation.run import train
from securevfl.privacy.journal import TOTAL
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.settings.plan import Plan

Floats = NDArray[np.float64]

RECORDS, TESTED = 24, 4
CROWD = 240
"""Records of a run in which all of them are canaries."""
FEW, VICTIMS = 2, 8
"""Records, and parties with a canary, of a run in which every vector counts for every record."""
STILL = 1e-12
"""A learning rate at which weights stay what they are."""
FAR = 1_000.0
"""Size of a canary's features: far enough for its embedding to be clipped."""
TARGET, LONGEST = 2.0, 192
"""The promised mu, and at most how many epochs, that a run of many coins is made for."""
OWN = 0.65
"""Of the promise, about what a canary's own releases show where every vector counts for every record."""
QUIET = 1e-3
"""Share of the noise that is left where the direction is looked for."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it are made with names of their own, for their owner alone
COLUMNS = 4  # features of each party, and values of what is seen, that are looked at at most
EPOCHS = 2
FEWEST, MOST = 40, 2_000
"""Training runs of one audit: fewer decide nothing, more take longer than anybody waits."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What made-up records look like.

    Attributes:
        parties: Names of the parties with features.
        widths: Features of each.
        label_holder: Who has the labels.
        classes: Number of classes; 0 for regression.
    """

    parties: tuple[str, ...]
    widths: tuple[int, ...]
    label_holder: str
    classes: int = 2

    def data(self, victims: Sequence[str], coins: Coins, records: int, size: float) -> VerticalData:
        """Records of which these victims' first ones are canaries, one for each coin.

        Args:
            victims: Whose records are canaries; they have as many each.
            coins: The coins of all of them, victim by victim.
            records: Training records.
            size: Of features: public bounds, and every feature of a canary.
        """
        rng = np.random.default_rng(0)  # the same records in every trial
        count = records + TESTED
        blocks = {
            name: size * rng.uniform(-1, 1, (count, width))
            for name, width in zip(self.parties, self.widths, strict=True)
        }
        labels = rng.uniform(0, 1, count) if not self.classes else np.arange(count) % self.classes
        for victim, thrown in zip(victims, coins.reshape(len(victims), -1), strict=True):
            if victim in blocks:
                blocks[victim][: len(thrown)] = np.where(thrown, size, -size)[:, None]
            if victim == self.label_holder and self.classes:
                labels[: len(thrown)] = thrown
        test = ({name: block[records:] for name, block in blocks.items()}, labels[records:])
        return VerticalData.from_arrays(
            {name: block[:records] for name, block in blocks.items()},
            labels[:records],
            test=test,
            bounds=(-size, size),
            label_holder=self.label_holder if self.label_holder in self.parties else "server",
            task=None if self.classes else "regression",
        )

    def crowded(self) -> RunShape:
        """The label holder's party, and as many others as one run has canaries in."""
        width, own = max(self.widths), [name for name in self.parties if name == self.label_holder]
        parties = (*own, *(f"canary{number}" for number in range(VICTIMS)))
        return replace(self, parties=parties, widths=(width,) * len(parties))


def training_again(
    plan: Plan,
    shape: RunShape,
    *,
    seconds: float,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, CanaryResult]:
    """Trains again and again, a coin each time, and certifies what an observer makes of it.

    Args:
        plan: The resolved plan of the run.
        shape: Of its records.
        seconds: Budget of processor time, for all victims together; each has 40 runs at least.
        seed: Seed of the coins, never of noise.
        progress: Called with the audit's name and the share done.

    Returns:
        A result for each victim that is promised something.

    Raises:
        AttackError: The plan cannot be trained on made-up records.
    """
    if plan.model == "scorecard":
        raise AttackError("a scorecard's openings follow from its columns; each has canaries of its own")
    small = _small(plan, shape)
    holder = shape.label_holder
    others = [name for name in shape.parties if name != holder]
    victims = [(others[0], holder, tuple(others))] if others else []
    if plan.mode == "sealed" and others and shape.classes:
        victims.append((holder, others[0], (holder,)))
    found = {}
    for victim, observer, owners in victims:
        name = f"training again ({'label holder' if victim == holder else 'party'})"
        trials = trials_of(small, shape, victim, observer)
        report = functools.partial(progress, name)
        result = trials.audit(seconds / len(victims), seed=seed, progress=report)
        if result is not None:
            found[name] = _owned(result, owners)
    return found


def _owned(result: CanaryResult, owners: tuple[str, ...]) -> CanaryResult:
    return CanaryResult(**{**vars(result), "owners": owners})


def _small(plan: Plan, shape: RunShape) -> Plan:
    """The plan as the trials train it: the same mechanism, fewer epochs."""
    return plan.with_changes(
        epochs=min(plan.epochs or EPOCHS, EPOCHS),
        batch=min(plan.batch, RECORDS),
        epsilon=0.0,  # sigma stands for it
        budget_epsilon=0.0,
        evaluate_every=0,
        patience=0,
        device="cpu",
        record_views=True,
        record_words=False,
        source={"data": "", "data_folder": "", "parties": len(shape.parties)},
        simulation={"delay_trace": ""},
    )


class _Trials:
    """Training runs with one canary of one victim, and one observer."""

    size, records, each, longest = 1.0, RECORDS, 1, EPOCHS

    def __init__(self, plan: Plan, shape: RunShape, victims: Sequence[str], observer: str) -> None:
        self.plan, self.shape, self.victims, self.observer = plan, shape, tuple(victims), observer
        self.mu = math.inf

    @property
    def canaries(self) -> int:
        """How many coins a run has."""
        return len(self.victims) * self.each

    def audit(self, seconds: float, *, seed: int, progress: Callable[[float], None]) -> CanaryResult | None:
        """None where nothing is promised to the observer."""
        # Both worlds equally often, in an order that nobody knows: each half then has trials of both.
        flips = np.random.default_rng(seed).permuted([[False, True]] * (MOST // 2 * self.canaries), axis=1)
        coins = flips.ravel().reshape(-1, self.canaries)
        self.watch(coins[0])  # what it is promised; and it loads what others find loaded
        if not math.isfinite(self.mu):
            return None
        self._lengthen(seconds)
        rule = self._direction()
        start = time.process_time()
        features = [self.watch(coins[0])]
        count = int(np.clip(seconds / max(time.process_time() - start, 1e-3), self._fewest, MOST)) // 4 * 4
        for number in range(1, count):
            features.append(self.watch(coins[number]))
            progress(number / count)
        return self._conclude(np.concatenate(features), coins[:count].ravel(), rule)

    @property
    def _fewest(self) -> int:
        return max(4, FEWEST // self.canaries)

    def _lengthen(self, seconds: float) -> None:
        """As many epochs as certify most of the promise within the budget; mu grows with their root."""
        first, mu = self.plan.epochs, self.mu
        lengths = [first * 2**k for k in range(9) if first * 2**k <= self.longest]
        enough = [each for each in lengths if mu * math.sqrt(each / first) <= TARGET]
        if len(enough) < 2 or not seconds:
            return
        fixed, slope = self._costs(first)

        def tells(epochs: int) -> tuple[float, float]:
            runs, claim = seconds / (fixed + slope * epochs), mu * math.sqrt(epochs / first)
            half = int(min(runs, MOST)) * self.canaries // 2
            fits = runs >= self._fewest or epochs == first
            return (
                (usual_mu(half, half, OWN * claim) / claim, half * claim**2) if fits and half else (0.0, 0.0)
            )

        self.plan = self.plan.with_changes(epochs=max(enough, key=tells))

    def _costs(self, first: int) -> tuple[float, float]:
        """Processor time of a run, and of each of its epochs."""
        plan, mu, taken = self.plan, self.mu, []
        for epochs in (first, 4 * first):
            self.plan = plan.with_changes(epochs=epochs)
            start = time.process_time()
            self.watch(np.zeros(self.canaries, bool))
            taken.append(time.process_time() - start)
        self.plan, self.mu = plan, mu
        slope = max((taken[1] - taken[0]) / (3 * first), 1e-4)
        return max(taken[0] - slope * first, 1e-3), slope

    def _direction(self) -> LinearRule | None:
        """How a canary moves what is seen, by two runs that are nearly quiet; None where there are none."""
        plan, mu = self.plan, self.mu
        quiet = {"sigma": plan.sigma * QUIET, "gradient_sigma": plan.gradient_sigma * QUIET}
        try:
            self.plan = plan.with_changes(**quiet)
            zero, one = (self.watch(np.full(self.canaries, coin)).mean(0) for coin in (False, True))
        except SecureVFLError:  # there is noise that cannot be made so small
            return None
        finally:
            self.plan, self.mu = plan, mu
        moved = one - zero
        if not moved.any() or not np.isfinite(moved).all():
            return None
        rule = LinearRule.fixed(moved, float(moved @ (zero + one) / 2))
        return LinearRule(**{**vars(rule), "origin": "from two runs with hardly any noise"})

    def _conclude(self, features: Floats, coins: Coins, rule: LinearRule | None) -> CanaryResult:
        spent = 0 if rule else len(coins) // 2
        rule = rule or LinearRule.fitted(features[:spent], coins[:spent])
        guesses = CanaryGuesses(rule(features[spent:]), coins[spent:], rule.origin)
        mode = self.plan.mode
        return conclude(guesses, mode=mode, accounting=mode, claims={mode: self.mu}, delta=self.plan.delta)

    def watch(self, coins: Coins) -> Floats:
        """What the observer has of one run: a line for each canary."""
        with tempfile.TemporaryDirectory(prefix="canary-", dir=_scratch()) as top:
            folder = Path(top) / "run"
            train(self.shape.data(self.victims, coins, self.records, self.size), self.plan, folder)
            spent = privacy_matrix(read_records(folder), self.plan.delta)
            found = [spent.get(victim, {}).get(self.observer) for victim in self.victims]
            self.mu = max(math.inf if each is None else each.mu for each in found)
            return self._lines(folder)

    def _lines(self, folder: Path) -> Floats:
        return self._features(folder, self.victims[0])[None]

    def _features(self, folder: Path, victim: str) -> Floats:
        """The canary's own values, and those of all others, as means over the run; else sums of totals."""
        source = Source(folder)
        info = source.info(victim, (self.observer,))
        views = {self.observer: View(source.view_folder(self.observer))}
        evidence = Evidence(info=info, views=views, auxiliary={}, rng=np.random.default_rng(0))
        found: list[Floats] = []
        for moment in moments(evidence):
            mine, flat = moment.rows == 0, moment.values.reshape(len(moment.rows), -1)[:, :COLUMNS]
            if victim in moment.parties and mine.any() and not mine.all():
                found.append(np.concatenate([flat[mine].mean(0), flat[~mine].mean(0)]))
        return np.mean(found, axis=0) if found else self._totals(View(folder / "journal" / self.observer))

    def _totals(self, journal: View) -> Floats:
        totals = [_first(seen.fields["values"]) for seen in journal.messages(TOTAL)]
        if not totals:
            raise AttackError(f"{self.observer} obtains nothing that depends on its victim's records")
        width = min(map(len, totals))
        return np.asarray(np.sum([total[:width] for total in totals], axis=0))


class _StillTrials(_Trials):
    """Runs of many coins in which nobody learns: every canary's own releases, whatever the others are."""

    size, longest = FAR, LONGEST

    def __init__(self, plan: Plan, shape: RunShape, victims: Sequence[str], observer: str) -> None:
        super().__init__(still(plan), shape, victims, observer)
        strict = plan.mode == "strict"
        self.records, self.each = (FEW, 1) if strict else (CROWD, CROWD)
        self._along: tuple[Floats, Floats] | None = None

    def _direction(self) -> LinearRule | None:
        """Parties have encoders of their own: each canary's values are looked at along its own direction."""
        plan, mu = self.plan, self.mu
        try:
            self.plan = plan.with_changes(
                sigma=plan.sigma * QUIET, gradient_sigma=plan.gradient_sigma * QUIET
            )
            zero, one = (self.watch(np.full(self.canaries, coin)) for coin in (False, True))
        except SecureVFLError:  # there is noise that cannot be made so small
            return None
        finally:
            self.plan, self.mu = plan, mu
        moved = one - zero
        size = np.linalg.norm(moved, axis=1, keepdims=True)
        if not (np.isfinite(moved).all() and (size > 0).all()):
            return None
        self._along = moved / size, (zero + one) / 2
        rule = LinearRule.fixed(np.ones(1), 0.0)
        return LinearRule(**{**vars(rule), "origin": "from two runs with hardly any noise"})

    def _lines(self, folder: Path) -> Floats:
        values = self._values(folder)
        if self._along is None:
            return values
        direction, middle = self._along
        return np.asarray(((values - middle) * direction).sum(1, keepdims=True))

    def _values(self, folder: Path) -> Floats:
        """Every canary's own values, as means over the run."""
        view = View(Source(folder).view_folder(self.observer))
        found = []
        for victim in self.victims:
            _, values = mean_by_record(*_joined(releases(view, victim)))
            found.append(values.reshape(len(values), -1)[: self.each, :COLUMNS])
        return np.concatenate(found)


def still(plan: Plan) -> Plan:
    """The plan with models that do not learn, on features as they are."""
    own: dict[str, Any] = {name: {} for name in ("learning_rates", "optimisers", "losses", "encoders")}
    return plan.with_changes(learning_rate=STILL, server_learning_rate=STILL, scaling="none", **own)


def trials_of(plan: Plan, shape: RunShape, victim: str, observer: str) -> _Trials:
    """The trials that tell most of a plan's promise."""
    if plan.mode == "sealed" or plan.protocol != "plain":
        return _Trials(plan, shape, [victim], observer)
    if plan.mode == "strict":
        crowd = shape.crowded()
        return _StillTrials(plan, crowd, crowd.parties[-VICTIMS:], observer)
    return _StillTrials(plan, shape, [victim], observer)


def _scratch() -> str | None:
    """A folder in memory, where there is one: syncing files is most of what such a small run takes."""
    return str(_MEMORY) if os.access(_MEMORY, os.W_OK | os.X_OK) else None


def _joined(found: list[Release]) -> tuple[NDArray[np.int64], Floats]:
    return np.concatenate([one.rows for one in found]), np.concatenate([one.values for one in found])


def _first(values: Any) -> Floats:
    return np.asarray(values, np.float64).ravel()[:COLUMNS]


def shape_of(
    parties: Sequence[str], label_holder: str, *, widths: Sequence[int] = (), classes: int = 2
) -> RunShape:
    """The shape of a run's records; unknown widths are taken for a few columns."""
    known: Iterator[int] = iter(widths) if widths else iter([COLUMNS] * len(parties))
    return RunShape(
        parties=tuple(parties),
        widths=tuple(max(1, min(width, COLUMNS)) for width in known),
        label_holder=label_holder,
        classes=classes,
    )
