"""Verdicts on promises, how they combine, and the probability of a false one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scipy.special import expit

from securevfl.errors import InputError


class Verdict(Enum):
    """What evidence says about a promise; the first of these that occurs is the verdict on the whole."""

    VIOLATED = "violated"
    NO_GUARANTEE = "no guarantee"
    NOT_TESTED = "not tested"
    HOLDS = "holds"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Verdict).index(self)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one promise along one path by which something was released.

    Attributes:
        promise: Who is promised what against whom, such as ``p1 against p0``.
        path: What was released, such as ``embeddings``.
        verdict: What the evidence says.
        tested: The tests that were made.
        power: Noise below this share of the claimed one would have been noticed; None where no noise is.
        powers: The same for the path and for each part of it that was tested alone, such as the totals that
            one organisation opened.
        reasons: What contradicts the promise, or what is missing and how to supply it.
        private: Whether the data decide that it could be tested: then only a contradiction may be shown to
            others, whose probability the error budget pays for.
    """

    promise: str
    path: str
    verdict: Verdict
    tested: tuple[str, ...] = ()
    power: float | None = None
    reasons: tuple[str, ...] = ()
    powers: Mapping[str, float] = field(default_factory=dict)
    private: bool = False

    def __post_init__(self) -> None:
        if self.verdict is Verdict.HOLDS and not self.tested:
            raise InputError(
                f"{self.promise}, {self.path}: 'holds' needs a test that was made; none is named"
            )
        if self.verdict is not Verdict.HOLDS and not self.reasons:
            raise InputError(
                f"{self.promise}, {self.path}: '{self.verdict.value}' needs a reason; none is given"
            )
        if self.power is not None and not 0 <= self.power <= 1:
            raise InputError(f"{self.promise}, {self.path}: power {self.power} is no share between 0 and 1")

    def to_mapping(self) -> dict[str, Any]:
        """The finding ready for JSON."""
        return {
            "promise": self.promise,
            "path": self.path,
            "verdict": self.verdict.value,
            "tested": list(self.tested),
            "power": self.power,
            "powers": dict(self.powers),
            "reasons": list(self.reasons),
        }


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on all of them: the worst one. Where nothing was looked at, nothing was tested."""
    return min((finding.verdict for finding in findings), key=lambda v: v.rank, default=Verdict.NOT_TESTED)


# -- the probability of a false verdict --------------------------------------------------------------------

VISIBLE, HOLDERS, CANARIES, MASKS = "visible", "data holders", "canaries", "masks"
RELEASED = "released values"
AUDIENCES = (VISIBLE, HOLDERS, CANARIES, MASKS, RELEASED)
_PRIVATE_LEVEL = 1e-3
_MASK_LEVEL = 1e-6
_VISIBLE_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ErrorBudget:
    """How often an audit of a run that keeps its promises may say `violated`, over all its tests together.

    A verdict that others see is a release: tests on replayed noise read private data. If it is wrong with
    probability at most alpha whatever the data are, replacing it by a constant changes probabilities by at
    most alpha on either side, so it adds alpha (1 + e^epsilon) to delta. By default that is a tenth of
    delta. Verdicts seen only by those who hold the data, canaries on synthetic records, tests on masked
    words, which are uniform whatever the data are, and tests on what was released anyway leak nothing.

    Attributes:
        delta: The delta of the promise.
        epsilon: Its epsilon; infinite where nothing is promised, which leaves no visible tests.
        visible: Level of all tests whose verdict others see; None for .1 delta / (1 + e^epsilon).
        holders: Level of all tests whose verdict only data holders see.
        canaries: Level of all canaries on synthetic records.
        masks: Level of all tests on masked words.
        released: Level of all tests on released values alone.
    """

    delta: float
    epsilon: float
    visible: float | None = None
    holders: float = _PRIVATE_LEVEL
    canaries: float = _PRIVATE_LEVEL
    masks: float = _MASK_LEVEL
    released: float = _MASK_LEVEL

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1 or not self.epsilon >= 0:
            raise InputError(
                f"delta {self.delta}, epsilon {self.epsilon}; expected 0 < delta < 1, epsilon >= 0"
            )
        for level in (self.alpha(audience) for audience in AUDIENCES):
            if not 0 <= level < 1:
                raise InputError(f"a level of {level} is no probability below 1")

    def alpha(self, audience: str) -> float:
        """The level of all tests for an audience, one of `AUDIENCES`."""
        # expit(-epsilon) = 1 / (1 + e^epsilon), without overflow.
        default = _VISIBLE_SHARE * self.delta * float(expit(-self.epsilon))
        levels = {
            VISIBLE: default if self.visible is None else self.visible,
            HOLDERS: self.holders,
            CANARIES: self.canaries,
            MASKS: self.masks,
            RELEASED: self.released,
        }
        if audience not in levels:
            raise InputError(f"audience {audience!r} is unknown; expected one of {', '.join(levels)}")
        return levels[audience]

    def split(self, audience: str, tests: Sequence[str]) -> Mapping[str, float]:
        """Shares the level of an audience equally among named tests; name all of them before the first.

        Bonferroni: whatever the tests have to do with each other, one of them errs with at most the sum.
        """
        if not tests or len(set(tests)) != len(tests):
            raise InputError(f"the tests are {list(tests)}; expected different names, at least one")
        # Rounded down, so that the shares never add up to more.
        each = math.nextafter(self.alpha(audience) / len(tests), 0.0)
        return dict.fromkeys(tests, each)

    @property
    def added_delta(self) -> float:
        """What a visible verdict adds to delta."""
        alpha = self.alpha(VISIBLE)
        return alpha / float(expit(-self.epsilon)) if alpha else 0.0

    def sentence(self) -> str:
        """One sentence for the dossier."""
        if self.alpha(VISIBLE) == 0:
            return (
                "The weakest promise is worth so little that no probability of error is left for a verdict "
                "that others see: this one is for data holders, and wrong with probability at most "
                f"{self.holders:.2g}."
            )
        return (
            f"A visible verdict is wrong with probability at most {self.alpha(VISIBLE):.2g} and adds "
            f"{self.added_delta:.2g} to the promised delta of {self.delta:.2g}."
        )
