"""Settings of one family of algorithms, of the simulation, of the data, of one machine: each a class.

A field of a family lives here and nowhere else. Which algorithms belong to a family, and which common fields
of a plan they set otherwise where the user says nothing, stands in `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from securevfl.errors import PlanError, nearest
from securevfl.settings.codec import check_fields, choice, number, share, whole

__all__ = [
    "FAMILIES",
    "AfsgdSettings",
    "DataSource",
    "EncoderSettings",
    "FdmlSettings",
    "FlexSettings",
    "LocalSettings",
    "SealedSettings",
    "SimulationSettings",
    "VaflSettings",
]

DELAYS = ("constant", "poisson", "exponential", "trace")
PROTECTS = ("person", "features", "label")
ADVERSARIES = ("auto", "malicious", "semi-honest")
DEVICES = ("cpu", "cuda", "auto")
ENCODER_MODELS = ("linear", "mlp", "cnn", "lstm", "fm")
MODELS = ("auto", *ENCODER_MODELS, "scorecard", "profile", "trees")
FULL_BATCH = 2**31 - 1  # as many records as there are


class Settings:
    """Frozen settings, checked when they are made."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class NoSettings(Settings):
    """For algorithms without settings of their own."""


@dataclass(frozen=True, kw_only=True)
class VaflSettings(Settings):
    """Settings of `vafl`, `vafl-tsync` and `vafl-sync`.

    Attributes:
        wait_for: t of the t-synchronous algorithm; 0 is half of the parties, two at least.
        delay_bound: D: no embedding older than D iterations is used; 0 sets no bound.
        also: How many further records a party sends fresh embeddings of with every upload, in turn (``vafl``,
            the footnote of Algorithm 1). Each is a release like any other.
        query_first: A party asks for the gradient of its last batch, steps, and only then uploads the next
            (``vafl``, the other order of that footnote), so that the server has embeddings of the newest
            model. Of the last batch of an epoch nobody learns.
    """

    wait_for: int = whole(0)
    delay_bound: int = whole(0)
    also: int = whole(0)
    query_first: bool = False


@dataclass(frozen=True, kw_only=True)
class FdmlSettings(Settings):
    """Settings of `fdml`.

    Attributes:
        staleness: tau: how many iterations a worker may be ahead of the slowest; 0 is synchronous.
        decentralised: Workers push their predictions to each other, and no server adds them up. Every worker
            then sees every other's prediction of a record, not their sum alone.
    """

    staleness: int = whole(0)
    decentralised: bool = False


@dataclass(frozen=True, kw_only=True)
class AfsgdSettings(Settings):
    """Settings of `afsgd`, `afsvrg`, `afsaga`, `fsgd`, `fsvrg` and `fsaga`.

    Attributes:
        active: Workers that have the labels; none named means all of them.
        snapshot_every: SVRG computes a full gradient after so many epochs.
    """

    active: tuple[str, ...] = ()
    snapshot_every: int = whole(2, low=1)


@dataclass(frozen=True, kw_only=True)
class FlexSettings(Settings):
    """Settings of `flex`, `flex-adaptive`, `sync-min`, `sync-max` and `p-bcd`.

    Attributes:
        timeout: Time units of local training per round; at least one local step must fit.
        proximal: Coefficient of the pull towards the round's first model, for optimiser ``proximal``.
        private_labels: The server keeps the labels and answers with gradients.
    """

    timeout: float = number(10.0, above=0)
    proximal: float = number(0.1)
    private_labels: bool = False


@dataclass(frozen=True, kw_only=True)
class SealedSettings(Settings):
    """Settings of `sealed`.

    Attributes:
        protect: What of a record epsilon covers: all of the ``person`` that an observer does not hold itself,
            one party's ``features``, or the ``label``.
        weight_bound: L2 bound of each party's weights, which keeps scores in range.
        average_last: The model is the mean of the iterates of this last share of the run.
        centring: Linear models: share of the squared privacy budget that pays for noisy means, by which each
            party centres and scales its columns; 0 takes the rows as they are.
        stack: Keep the last tenth of the training records out of training, open their scores to the label
            holder (**no guarantee for them**), and let it choose between the model, its own trees and a stack
            of both. The choice and its figures stay with it.
        profile_epsilon: Epsilon of the profile whose bins and label histogram a scorecard starts from, see
            `train(profile=...)`, which sets it; 0 opens its own.
        label_low: Regression: public lower bound of the labels.
        label_high: Regression: public upper bound of the labels.
        adversary: What members may do: ``semi-honest`` ones follow the protocol, ``malicious`` ones do
            anything, so that rows and labels are proved and every opening is authenticated. ``auto`` is
            malicious between organisations with a dealer, where the model allows it, else semi-honest.
        dealer: Who deals correlated randomness: the name of an organisation without data, or ``none`` where
            members do without one (two by encryption, three and more with `collusion` 1 by dealing for each
            other). ``auto`` is none between organisations, and a simulated dealer in one process.
    """

    protect: str = choice("person", PROTECTS)
    adversary: str = choice("auto", ADVERSARIES)
    dealer: str = "auto"
    weight_bound: float = number(16.0, above=0)
    average_last: float = share(0.66)
    centring: float = share(0.04)
    stack: bool = False
    profile_epsilon: float = number(0.0)
    label_low: float = 0.0
    label_high: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.dealer:
            raise PlanError("dealer is empty; use auto, none, or the name of an organisation without data")
        if not (math.isfinite(self.label_low) and self.label_low <= self.label_high < math.inf):
            raise PlanError(f"labels between {self.label_low} and {self.label_high} make no range")


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Settings):
    """The encoder of one party; each field as the plan's field of the same name says it for all."""

    model: str = choice("linear", MODELS)
    embedding: int = whole(0)
    hidden: tuple[int, ...] = whole((32,), low=1)
    hidden_noise: tuple[float, ...] = number(())
    channels: tuple[int, ...] = whole((8, 16), low=1)
    units: int = whole(16, low=1)
    steps: int = whole(0)


SIZES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "mlp": ("hidden",),
    "cnn": ("channels",),
    "lstm": ("units", "steps"),
    "fm": ("units",),
}
"""The sizes that each kind of encoder has."""


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(Settings):
    """How time passes where parties are simulated.

    Attributes:
        delays: Duration of a party's step: ``constant``, ``poisson``, ``exponential`` or ``trace``.
        speeds: How many times faster than 1 a party is, by name.
        latency: Time units that a message takes.
        delay_trace: File of step durations for ``delays = "trace"``; each organisation has its own.
        wire: Send every message of the virtual network through its wire form.
    """

    delays: str = choice("constant", DELAYS)
    speeds: Mapping[str, float] = number({}, above=0)
    latency: float = number(0.0)
    delay_trace: str = ""
    wire: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSource(Settings):
    """Which data a run in one process is about. Over a network every organisation has its own.

    Attributes:
        data: Name of the data set, its description (``data.toml``), or its CSV files, commas between them.
        data_folder: Where its files are.
        parties: Number of parties for a named data set; 0 takes the data as it is.
        id_column: ID column of CSV files.
        label_column: Label column of CSV files.
    """

    data: str = ""
    data_folder: str = ""
    parties: int = whole(0)
    id_column: str = "id"
    label_column: str = "label"


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """What each organisation decides for its own machine; it never travels and is never taken from others.

    Attributes:
        device: ``cpu``, ``cuda`` or ``auto``.
        record_views: Write what this organisation saw.
        record_words: Keep masked words and ciphertexts in the view, instead of a digest and a sample of each;
            a dealer keeps what locks the seeds among them.
        data_folder: Where the files of a named data set are.
        delay_trace: File of step durations.
    """

    device: str = choice("cpu", DEVICES)
    record_views: bool = False
    record_words: bool = False
    data_folder: str = ""
    delay_trace: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Algorithms that share their settings.

    Attributes:
        name: Also the name of the table in ``plan.toml``.
        algorithms: Their names.
        settings: The class of their settings.
        defaults: Common fields of a plan that they set otherwise where the user leaves them open.
        own: The same for single algorithms, by name.
        federated: False for baselines, which send nothing.
    """

    name: str
    algorithms: tuple[str, ...]
    settings: type[Any] = NoSettings
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    federated: bool = True

    def defaults_of(self, algorithm: str) -> dict[str, Any]:
        """What one of its algorithms sets otherwise."""
        return {**self.defaults, **self.own.get(algorithm, {})}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its settings."""
        return tuple(each.name for each in fields(self.settings))


FAMILIES: dict[str, Family] = {
    each.name: each
    for each in (
        # Rates of this and the next families: docs/results/defaults.md says how they were chosen.
        Family(
            name="vafl",
            algorithms=("vafl", "vafl-tsync", "vafl-sync"),
            settings=VaflSettings,
            defaults={"learning_rate": 0.3, "decay": "inverse"},  # as Theorems 2 and 4 have it
        ),
        Family(
            name="fdml",
            algorithms=("fdml",),
            settings=FdmlSettings,
            defaults={"learning_rate": 1.0, "decay": "sqrt"},  # as Proposition 1 has it
        ),
        Family(
            name="afsgd",
            algorithms=("afsgd", "afsvrg", "afsaga", "fsgd", "fsvrg", "fsaga"),
            settings=AfsgdSettings,
            defaults={"sampling": "draws", "learning_rate": 1.0, "decay": "sqrt"},
        ),
        Family(
            name="flex",
            algorithms=("flex", "flex-adaptive", "sync-min", "sync-max", "p-bcd"),
            settings=FlexSettings,
            # A round of several local steps is one step of the decay; p-bcd has one, as `vafl-sync`.
            defaults={"learning_rate": 0.1, "decay": "inverse", "decay_steps": 100},
            # The adaptive one divides its rate by the steps of a round, ten where nobody says otherwise.
            own={
                "flex-adaptive": {"learning_rate": 1.0},
                "p-bcd": {"learning_rate": 0.3, "decay_steps": 1000},
            },
        ),
        Family(
            name="sealed",
            algorithms=("sealed",),
            settings=SealedSettings,
            defaults={
                "model": "auto",
                "epsilon": 1.0,
                "epochs": 80,
                "batch": FULL_BATCH,
                "learning_rate": 3.0,
                "optimiser": "momentum",
                "l2": 0.0,
            },
        ),
        Family(name="central", algorithms=("central",), federated=False),
        Family(name="local", algorithms=("local",), federated=False),
    )
}
ALGORITHM_FAMILIES: dict[str, Family] = {
    algorithm: family for family in FAMILIES.values() for algorithm in family.algorithms
}
OWNERS: dict[str, str] = {name: family.name for family in FAMILIES.values() for name in family.names}
"""Setting -> the family that it belongs to."""


def family_of(algorithm: str) -> Family:
    """The family of an algorithm.

    Raises:
        PlanError: There is no algorithm of that name; the nearest is suggested.
    """
    if not isinstance(algorithm, str):
        raise PlanError(f"algorithm is {algorithm!r}; expected str")
    if algorithm not in ALGORITHM_FAMILIES:
        raise PlanError(f"unknown algorithm {algorithm!r}; {nearest(algorithm, ALGORITHM_FAMILIES)}")
    return ALGORITHM_FAMILIES[algorithm]
