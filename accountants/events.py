"""Release events: what an owner let out, as frozen data that accountants interpret.

An event's `sensitivity` is that of the adjacency it names. For rows clipped to norm C it is 2C under
`replace-one` (the default of ledgers, plans and the command line) and C under `add-remove` and
`replace-by-null`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from securevfl.accountants import checks
from securevfl.errors import AccountingError, AmplificationRefused

Adjacency: TypeAlias = Literal["add-remove", "replace-one", "replace-by-null"]
ADJACENCIES: tuple[Adjacency, ...] = ("add-remove", "replace-one", "replace-by-null")


def _set(event: object, **values: object) -> None:
    """Write normalised values into a frozen event while it is being built."""
    for name, value in values.items():
        object.__setattr__(event, name, value)


@dataclass(frozen=True, kw_only=True)
class GaussianRelease:
    """`count` values, each with Gaussian noise of standard deviation `sigma` in every coordinate.

    Attributes:
        sigma: Standard deviation of the noise, in the unit of `sensitivity`.
        sensitivity: Largest L2 distance of the noiseless value between adjacent inputs.
        count: How many such values; each may depend on the ones before it.
        sampling_rate: Probability with which a record enters each value (Poisson). Below 1 it counts as
            amplification, which is sound only if the observer cannot tell who was sampled.
        ids_visible: Whether the observer knows which records entered. Vertical federated servers do.
        adjacency: Which inputs count as neighbours.

    Raises:
        AmplificationRefused: The sampling rate is below 1 although the IDs are visible.
        AccountingError: Any other field is out of range.
    """

    sigma: float
    sensitivity: float
    count: int = 1
    sampling_rate: float = 1.0
    ids_visible: bool = True
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        checks.choice("adjacency", self.adjacency, ADJACENCIES)
        _set(
            self,
            sigma=checks.positive("sigma", self.sigma, hint="a release without noise is an ExactRelease"),
            sensitivity=checks.positive("sensitivity", self.sensitivity),
            count=checks.count("count", self.count),
            sampling_rate=checks.probability("sampling_rate", self.sampling_rate, zero=False),
        )
        if not isinstance(self.ids_visible, bool):
            raise AccountingError(f"ids_visible is {self.ids_visible!r}; expected True or False")
        if self.sampling_rate < 1 and self.ids_visible:
            raise AmplificationRefused(
                f"sampling_rate is {self.sampling_rate:g} but the observer knows the record IDs, so sampling "
                "hides nothing; use sampling_rate=1 and count the record's releases"
            )

    @property
    def mu(self) -> float:
        """The GDP parameter of one value, without amplification."""
        return self.sensitivity / self.sigma


@dataclass(frozen=True, kw_only=True)
class DPUpdate:
    """`count` local optimiser steps on per-record gradients clipped to `clip`, summed, plus noise `sigma`.

    The steps are not shown to anybody; they make later releases of *other* records post-processing.
    """

    clip: float
    sigma: float
    count: int = 1
    adjacency: Adjacency = "replace-one"

    def __post_init__(self) -> None:
        checks.choice("adjacency", self.adjacency, ADJACENCIES)
        _set(
            self,
            clip=checks.positive("clip", self.clip),
            sigma=checks.positive("sigma", self.sigma, hint="raw local updates need mode strict"),
            count=checks.count("count", self.count),
        )

    @property
    def sensitivity(self) -> float:
        """Largest change of the summed gradient between adjacent inputs."""
        return 2 * self.clip if self.adjacency == "replace-one" else self.clip

    @property
    def mu(self) -> float:
        """The GDP parameter of one step."""
        return self.sensitivity / self.sigma


@dataclass(frozen=True, kw_only=True)
class RandomisedResponse:
    """Labels flipped once: kept with `keep_probability`, else uniform over the other `classes` - 1.

    Give either `epsilon` or `keep_probability`; the other follows from
    keep = e^epsilon / (e^epsilon + classes - 1). `count` above 1 means that the flip is redrawn.
    Adjacency is the replacement of one label.
    """

    epsilon: float | None = None
    keep_probability: float | None = None
    classes: int = 2
    count: int = 1
    adjacency: Adjacency = field(default="replace-one", init=False)

    def __post_init__(self) -> None:
        others = checks.count("classes", self.classes, least=2) - 1
        if (self.epsilon is None) == (self.keep_probability is None):
            raise AccountingError("give exactly one of epsilon and keep_probability")
        if self.epsilon is not None:
            epsilon = checks.non_negative("epsilon", self.epsilon)
            keep = 1 / (1 + others * math.exp(-epsilon))
        else:
            keep = checks.probability("keep_probability", self.keep_probability)
            epsilon = _odds(keep, others)
        _set(self, epsilon=epsilon, keep_probability=keep, count=checks.count("count", self.count))


def _odds(keep: float, others: int) -> float:
    """Return |log(keep / P[one given other class])|: keeping too rarely tells as much as too often."""
    if keep in (0.0, 1.0):
        return math.inf
    return abs(math.log(keep) - math.log1p(-keep) + math.log(others))


@dataclass(frozen=True, kw_only=True)
class ExactRelease:
    """`count` values released without noise: epsilon is infinite."""

    count: int = 1

    def __post_init__(self) -> None:
        _set(self, count=checks.count("count", self.count))


@dataclass(frozen=True, kw_only=True)
class MaskedRelease:
    """`count` values that the observer sees only under a uniform mask: nothing, under `assumption`.

    What the *result* of the protocol shows is a release of its own and needs its own event.
    """

    count: int = 1
    assumption: str = "the masks are fresh, uniform and unknown to the observer and those it colludes with"

    def __post_init__(self) -> None:
        _check_hidden(self, self.assumption, self.count)


@dataclass(frozen=True, kw_only=True)
class EncryptedRelease:
    """`count` ciphertexts whose key the observer does not hold: nothing, under `assumption`."""

    count: int = 1
    assumption: str = "the encryption is secure and the observer does not collude with the key holder"

    def __post_init__(self) -> None:
        _check_hidden(self, self.assumption, self.count)


def _check_hidden(event: object, assumption: object, count: object) -> None:
    if not isinstance(assumption, str) or not assumption.strip():
        raise AccountingError("assumption is empty; expected the sentence under which nothing is learned")
    _set(event, count=checks.count("count", count))


Event: TypeAlias = (
    GaussianRelease | DPUpdate | RandomisedResponse | ExactRelease | MaskedRelease | EncryptedRelease
)
EVENT_TYPES = (GaussianRelease, DPUpdate, RandomisedResponse, ExactRelease, MaskedRelease, EncryptedRelease)
