"""The contract of attacks: what an attacker gets, what it hands back, and how that is scored.

An attack sees the views of its observers and the auxiliary data that it declares (`Evidence`), and nothing
else. It returns arrays (`Guess`). A scorer, which alone sees the truth, turns them into a `Score`. Where an
attack cannot work on a run it says why (`Applicability`); it never scores 0 instead.

Intervals of scores treat records as independent draws: they say how sure the figure is for records like
these, not how it would vary from run to run.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from securevfl.attacks import statistics
from securevfl.attacks.statistics import Interval
from securevfl.errors import AttackError
from securevfl.privacy.views import View
from securevfl.settings.plan import Plan

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Guess: TypeAlias = Arrays
Truth: TypeAlias = Arrays
Family: TypeAlias = Literal["label", "feature", "membership", "protocol", "canary"]
FAMILIES: tuple[Family, ...] = ("label", "feature", "membership", "protocol", "canary")


class Metric(NamedTuple):
    """What a score measures.

    Attributes:
        low: Smallest possible value.
        high: Largest possible value.
        more_is_worse: True where a higher score means that more is leaked.
        text: What it says, for a reader of the report.
    """

    low: float
    high: float
    more_is_worse: bool
    text: str


METRICS: dict[str, Metric] = {
    "auc": Metric(0.0, 1.0, True, "probability that a positive is ranked above a negative"),
    "accuracy": Metric(0.0, 1.0, True, "share of records that are guessed right"),
    "recovered": Metric(0.0, 1.0, True, "share of values that are recovered within the stated tolerance"),
    "tpr": Metric(0.0, 1.0, True, "members found at the stated rate of false accusations"),
    "mse": Metric(0.0, math.inf, False, "mean squared error per feature"),
    "error": Metric(0.0, math.inf, False, "largest absolute error"),
    "count": Metric(0.0, math.inf, True, "secrets found"),
    "mu": Metric(0.0, math.inf, True, "certified lower bound of mu"),
    "epsilon": Metric(0.0, math.inf, True, "certified lower bound of epsilon"),
}


class Need(NamedTuple):
    """Auxiliary data that an attacker must have: a name of `securevfl.attacks.source.AUXILIARY`, how much."""

    name: str
    records: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.records} records" if self.records else self.name


@dataclass(frozen=True, kw_only=True)
class Applicability:
    """Whether an attack can work on a run; if not, the reason in one line."""

    applicable: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.applicable and not self.reason:
            raise AttackError("an attack that does not apply must say why")


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well an attack did.

    Attributes:
        metric: A name of `METRICS`.
        score: The figure.
        low: Lower end of its 95 % interval.
        high: Upper end.
        baseline: What somebody without the view achieves.
        note: What a reader must know besides, such as the tolerance or the rate of false positives.
    """

    metric: str
    score: float
    low: float
    high: float
    baseline: float
    note: str = ""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise AttackError(f"unknown metric {self.metric!r}; known are {', '.join(METRICS)}")
        bounds = METRICS[self.metric]
        for name in ("score", "low", "high", "baseline"):
            value = getattr(self, name)
            if not bounds.low <= value <= bounds.high:
                raise AttackError(
                    f"{name} of {self.metric} is {value}; it lies in [{bounds.low}, {bounds.high}]"
                )
        if not self.low <= self.score <= self.high:
            raise AttackError(f"score {self.score} lies outside of its interval [{self.low}, {self.high}]")


@dataclass(frozen=True, kw_only=True)
class Info:
    """What is public about a run, and whom an attack is about. It holds no private value.

    Attributes:
        plan: The run's plan, with every choice filled in.
        parties: Names of the parties that hold features.
        widths: Number of features of each; empty where unknown.
        label_holder: The organisation that holds the labels and hosts the server role.
        task: ``binary``, ``multiclass``, ``regression``, or empty where unknown.
        classes: Number of classes; 0 for regression or where unknown.
        n_train: Training records; their indices are 0 to n_train - 1.
        n_test: Test records; their indices follow.
        owner: Whose data the attack is after.
        observers: The organisations whose views the attacker has; more than one is a coalition.
        received: Messages that the observers received from roles of the owner, by kind.
        seen: All messages of the observers' views, by kind.
        auxiliary: Names of auxiliary data that can be supplied.
        truths: Names of truths that the scorer has.
        missing: Why a name is not in `auxiliary` or `truths`, where there is something to say.
        mu: What the owner promised the observers for a record's features; infinite without a promise.
    """

    plan: Plan
    parties: tuple[str, ...]
    widths: tuple[int, ...] = ()
    label_holder: str
    task: str = ""
    classes: int = 0
    n_train: int = 0
    n_test: int = 0
    owner: str
    observers: tuple[str, ...]
    received: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    auxiliary: frozenset[str] = frozenset()
    truths: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)
    mu: float = math.inf

    @property
    def observer(self) -> str:
        """The only observer, or the members of the coalition joined by a plus sign."""
        return "+".join(self.observers)

    @property
    def hosts(self) -> dict[str, str]:
        """Address of a role -> the organisation that runs it."""
        return {**{party: party for party in self.parties}, "server": self.label_holder}

    @property
    def has_labels(self) -> bool:
        """True where the attacker holds the labels anyway."""
        return self.label_holder in self.observers

    def to_json(self) -> str:
        """The facts as text; infinite is null."""
        content: dict[str, Any] = {**vars(self), "plan": self.plan.to_mapping()}
        content |= {name: sorted(content[name]) for name in ("auxiliary", "truths")}
        content["mu"] = self.mu if math.isfinite(self.mu) else None
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Info:
        """Reverses `to_json`."""
        content = json.loads(text)
        content["plan"] = Plan.from_mapping(content["plan"])
        content |= {name: frozenset(content[name]) for name in ("auxiliary", "truths")}
        content |= {name: tuple(content[name]) for name in ("parties", "widths", "observers")}
        content["mu"] = math.inf if content["mu"] is None else content["mu"]
        return cls(**content)


def _ignore(done: float) -> None:
    """Progress that nobody looks at."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that an attacker has.

    Attributes:
        info: What is public about the run.
        views: The view of each observer.
        auxiliary: The arrays of the declared auxiliary data; `securevfl.attacks.source` lists their names.
        rng: The only source of randomness that an attack may use.
        progress: To be called with the share done, 0 to 1, in attacks that take long.
    """

    info: Info
    views: Mapping[str, View]
    auxiliary: Arrays
    rng: np.random.Generator
    progress: Callable[[float], None] = _ignore

    @property
    def view(self) -> View:
        """The view of the only observer."""
        if len(self.views) != 1:
            raise AttackError(f"a single view was asked for, but there are {len(self.views)}")
        return next(iter(self.views.values()))


class Attack(ABC):
    """One way to infer something from a view. Attacks hold no state and take no arguments.

    Attributes:
        name: Its name in the registry, on the command line and in reports.
        family: What it is after.
        metric: The metric of its score, a name of `METRICS`.
        summary: One line for the report: what the attacker does.
        source: Where the attack comes from.
        kinds: Message kinds of which the observers must have received at least one from the owner; empty
            where the attack looks for itself.
        needs: Auxiliary data that it uses.
        truth: What its scorer needs, names of `securevfl.attacks.source.TRUTHS`.
        coalition: How many observers pool their views.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    metric: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()
    truth: ClassVar[tuple[str, ...]] = ()
    coalition: ClassVar[int] = 1

    def applies(self, info: Info) -> Applicability:
        """Whether the attack can work on this run, with the reason if not."""
        reason = self._lacks(info) or self.why_not(info)
        return Applicability(applicable=not reason, reason=reason)

    def _lacks(self, info: Info) -> str:
        """What is missing of the things declared on the class."""
        if not info.seen:
            return f"no view of {info.observer} was recorded; record views with --record-views"
        if self.kinds and not any(info.received.get(kind) for kind in self.kinds):
            return f"{info.observer} received no {' or '.join(self.kinds)} message from {info.owner}"
        for name in (*(need.name for need in self.needs), *self.truth):
            if name not in info.auxiliary | info.truths:
                return info.missing.get(name, f"{name} not available")
        return ""

    def why_not(self, info: Info) -> str:
        """The reason why the attack does not fit this run beyond what the class declares; empty if it fits.

        Attacks whose answer the observer knows anyway (labels that everybody holds) are vacuous: say so here.
        """
        return ""

    @abstractmethod
    def run(self, evidence: Evidence) -> Guess:
        """Attacks. The result is a mapping of names to arrays; the same evidence gives the same result.

        Raises:
            AttackError: The view cannot be read as the attack needs it.
        """

    @classmethod
    @abstractmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Compares a guess with the truth. It runs apart from the attack and alone sees the truth."""


def score_interval(metric: str, found: Interval, baseline: float, note: str) -> Score:
    """A score from an estimate and its interval."""
    return Score(
        metric=metric, score=found.value, low=found.low, high=found.high, baseline=baseline, note=note
    )


def auc_of(labels: ArrayLike, scores: ArrayLike) -> Interval:
    """Area under the ROC curve of scores for 0/1 labels."""
    positive, values = np.asarray(labels) > 0.5, np.asarray(scores, np.float64)
    return statistics.auc(values[positive], values[~positive])


def score_auc(labels: ArrayLike, scores: ArrayLike, *, baseline: float = 0.5, note: str = "") -> Score:
    """AUC of scores for 0/1 labels."""
    return score_interval("auc", auc_of(labels, scores), baseline, note)


def score_accuracy(
    truth: ArrayLike, guess: ArrayLike, *, baseline: float | None = None, note: str = ""
) -> Score:
    """Share of right guesses. The default baseline always names the most frequent label."""
    labels = np.asarray(truth)
    found = statistics.proportion(int((labels == np.asarray(guess)).sum()), len(labels))
    if baseline is None:
        baseline = float(np.unique(labels, return_counts=True)[1].max() / len(labels))
    return score_interval("accuracy", found, baseline, note)


def score_recovered(hits: ArrayLike, *, baseline: float = 0.0, note: str = "") -> Score:
    """Share of values that were recovered."""
    found = np.asarray(hits, bool).ravel()
    return score_interval("recovered", statistics.proportion(int(found.sum()), len(found)), baseline, note)


def score_mse(truth: ArrayLike, guess: ArrayLike, *, baseline: float, note: str = "") -> Score:
    """Mean squared error per feature; the interval is that of a mean over records."""
    squares = (np.asarray(truth, np.float64) - np.asarray(guess, np.float64)) ** 2
    return score_interval("mse", statistics.mean(squares.mean(axis=1), low=0.0), baseline, note)


def score_count(found: int, *, note: str = "") -> Score:
    """A number of findings, which is exact."""
    return score_interval("count", Interval(float(found), float(found), float(found)), 0.0, note)


def spread_of(truth: ArrayLike) -> float:
    """Mean squared error of somebody who knows nothing but each column's mean."""
    return float(np.asarray(truth, np.float64).var(axis=0).mean())
