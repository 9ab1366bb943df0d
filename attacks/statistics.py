"""Statistics of attacks and audits: intervals, certified lower bounds, and what a promised mu allows.

Every lower bound here holds with probability 95 % over the trials, provided that the rule which decides was
fixed before it saw them. The module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import expit, logit, ndtr, ndtri

from securevfl.accountants.gdp import gdp_epsilon
from securevfl.errors import AttackError

Floats = NDArray[np.float64]

# Each of the two error rates gets half of the 5 %: both bounds hold jointly with 95 %.
ONE_SIDED = 0.975
_APART = 0.1  # of the level, for errors of each kind apart
_BISECTIONS = 60


class Interval(NamedTuple):
    """An estimate and its two-sided 95 % interval."""

    value: float
    low: float
    high: float


# -- proportions -------------------------------------------------------------------------------------------


def upper_bound(events: int, trials: int, confidence: float = ONE_SIDED) -> float:
    """The one-sided Clopper-Pearson upper bound of a probability; exact at every number of trials."""
    _check_counts(events, trials)
    if events == trials:
        return 1.0
    return float(stats.beta.ppf(confidence, events + 1, trials - events))


def proportion(events: int, trials: int) -> Interval:
    """A proportion with its Clopper-Pearson interval."""
    high = upper_bound(events, trials)
    low = 1.0 - upper_bound(trials - events, trials)
    return Interval(events / trials, min(low, events / trials), max(high, events / trials))


def _check_counts(events: int, trials: int) -> None:
    if trials < 1 or not 0 <= events <= trials:
        raise AttackError(f"{events} events in {trials} trials; expected at least one trial and 0 <= events")


def mean(values: ArrayLike, *, low: float = -math.inf, high: float = math.inf) -> Interval:
    """A mean with its Student interval, cut to the range [low, high] that the values live in."""
    array = np.asarray(values, np.float64).ravel()
    if array.size < 1 or not np.isfinite(array).all():
        raise AttackError(f"a mean needs finite values; found {array.size} values")
    centre = float(array.mean())
    if array.size < 2:
        return Interval(centre, low, high)
    half = float(stats.t.ppf(ONE_SIDED, array.size - 1) * array.std(ddof=1) / math.sqrt(array.size))
    return Interval(centre, min(max(centre - half, low), centre), max(min(centre + half, high), centre))


# -- ranking -----------------------------------------------------------------------------------------------


def auc(positives: ArrayLike, negatives: ArrayLike) -> Interval:
    """Area under the curve with the interval of DeLong, DeLong and Clarke-Pearson (1988) on the logit scale.

    Ties count one half. If the scores separate perfectly, in either direction, the variance is estimated as
    zero; the interval is then that of min(positives, negatives) disjoint pairs, all of which came out alike.
    """
    high_scores, low_scores = _scores(positives), _scores(negatives)
    ranks = stats.rankdata(np.concatenate([high_scores, low_scores]))
    m, n = len(high_scores), len(low_scores)
    wins = (ranks[:m] - stats.rankdata(high_scores)) / n  # share of negatives below each positive
    losses = 1.0 - (ranks[m:] - stats.rankdata(low_scores)) / m  # share of positives above each negative
    area = float(np.clip(wins.mean(), 0.0, 1.0))
    if area in (0.0, 1.0) or min(m, n) < 2:
        return _of_pairs(area, min(m, n))
    deviation = math.sqrt(wins.var(ddof=1) / m + losses.var(ddof=1) / n) / (area * (1 - area))
    half = float(ndtri(ONE_SIDED)) * deviation
    centre = float(logit(area))
    return Interval(area, min(area, float(expit(centre - half))), max(area, float(expit(centre + half))))


def _of_pairs(area: float, pairs: int) -> Interval:
    if area not in (0.0, 1.0):
        return Interval(area, 0.0, 1.0)
    return proportion(pairs if area else 0, pairs)


def _scores(values: ArrayLike) -> Floats:
    array = np.asarray(values, np.float64).ravel()
    if array.size == 0 or np.isnan(array).any():
        raise AttackError(f"ranking needs scores without NaN on both sides; found {array.size} scores")
    return array


def smallest_rate(non_members: int) -> float:
    """The smallest rate of false positives that so many non-members can resolve: ten of them."""
    return 10 / non_members if non_members else math.inf


def tpr_at(fpr: float, positives: ArrayLike, negatives: ArrayLike) -> Interval:
    """The rate of true positives at a rate of false positives, ties counted against the attacker.

    Raises:
        AttackError: There are too few negatives to tell that rate from zero.
    """
    members, others = _scores(positives), np.sort(_scores(negatives))
    if fpr < smallest_rate(len(others)):
        raise AttackError(
            f"a rate of {fpr:g} cannot be resolved by {len(others)} non-members; "
            f"the smallest is {smallest_rate(len(others)):g}"
        )
    allowed = math.floor(fpr * len(others) + 1e-9)
    threshold = others[len(others) - 1 - allowed] if allowed < len(others) else -math.inf
    return proportion(int((members > threshold).sum()), len(members))


# -- certified lower bounds --------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Outcome of a distinguishing game: how often each of two worlds was taken for the other.

    Attributes:
        false_positives: Trials of world 0 taken for world 1.
        false_negatives: Trials of world 1 taken for world 0.
        negatives: Trials of world 0.
        positives: Trials of world 1.
    """

    false_positives: int
    false_negatives: int
    negatives: int
    positives: int

    @classmethod
    def of(cls, guesses: NDArray[np.bool_], worlds: NDArray[np.bool_]) -> Errors:
        """Counts the errors of guesses against the worlds that were drawn."""
        return cls(
            int((guesses & ~worlds).sum()),
            int((~guesses & worlds).sum()),
            int((~worlds).sum()),
            int(worlds.sum()),
        )

    def bounds(self, level: float = 0.05) -> tuple[float, float]:
        """Upper bounds of both error rates, jointly valid with probability 1 - level."""
        return (
            upper_bound(self.false_positives, self.negatives, 1 - level / 2),
            upper_bound(self.false_negatives, self.positives, 1 - level / 2),
        )


def mu_lower(errors: Errors, level: float = 0.05) -> float:
    """The mu that these errors rule out from below: Phi^-1(1 - alpha) - Phi^-1(beta), at least 0.

    Valid against claims of Gaussian differential privacy (Nasr et al. 2023, section 3; Dong, Roth and Su
    2022, equation 6).
    """
    alpha, beta = errors.bounds(level)
    if alpha >= 1 or beta >= 1:
        return 0.0
    return max(0.0, float(-ndtri(alpha) - ndtri(beta)))


def mu_certified(errors: Errors, level: float = 0.05) -> float:
    """The mu that these errors rule out from below, by all of them together or by each kind apart.

    Of n0 and n1 trials of the two worlds a test of a mu-GDP mechanism gets at most

        max over t of n0 Phi(t) + n1 Phi(mu - t)

    right on average, and independent trials are above their mean at most as often as equal coins of the same
    mean (Hoeffding 1956; from one above the mean on). One bound on one number wastes less than
    `mu_lower`, which bounds two numbers and adds both margins: to refute a promise by as much takes about
    half of the trials. It gets most of the level; a tenth is for `mu_lower`, which sees more where one kind
    of error is rare. Valid, like it, against claims of Gaussian differential privacy only.
    """
    _check_share(level)
    trials = errors.negatives + errors.positives
    wrong = errors.false_positives + errors.false_negatives
    few = 1 - upper_bound(wrong, trials, 1 - (1 - _APART) * level)
    share = min(few, (trials - wrong - 1) / trials)
    return max(_mu_of_share(share, errors.negatives / trials), mu_lower(errors, _APART * level))


def _mu_of_share(right: float, first: float) -> float:
    """The mu at which so large a share of all trials is right on average, of which `first` are of world 0."""

    def most(mu: float) -> float:
        if not 0 < first < 1:
            return 1.0
        place = mu / 2 + math.log(first / (1 - first)) / mu
        return float(first * ndtr(place) + (1 - first) * ndtr(mu - place))

    return _largest(lambda mu: (most(mu) if mu else max(first, 1 - first)) < right) if right < 1 else math.inf


def _check_share(level: float) -> None:
    if not 0 < level < 1:
        raise AttackError(f"the level is {level}; expected a probability between 0 and 1, such as 0.05")


def noticed_mu(negatives: int, positives: int, claim: float, level: float = 0.05) -> float:
    """The smallest mu at which so many trials with the best score usually certify more than a claim.

    Usually: with as many errors as at mu on average. Infinite where even trials without any error certify no
    more than the claim.
    """

    def certifies(mu: float) -> bool:
        wrong = float(ndtr(-mu / 2))
        errors = Errors(round(negatives * wrong), round(positives * wrong), negatives, positives)
        return mu_lower(errors, level) > claim

    if not math.isfinite(claim) or mu_lower(Errors(0, 0, negatives, positives), level) <= claim:
        return math.inf
    low, high = claim, claim + 40.0  # errors below 1e-80: none is expected
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if certifies(middle) else (middle, high)
    return high


def usual_mu(negatives: int, positives: int, mu: float, level: float = 0.05) -> float:
    """What so many trials with the best score usually certify where mu leaks: with its errors on average."""
    wrong = float(ndtr(-mu / 2))
    errors = Errors(math.ceil(negatives * wrong), math.ceil(positives * wrong), negatives, positives)
    return mu_lower(errors, level)


def epsilon_lower(errors: Errors, delta: float) -> float:
    """The epsilon at `delta` that these errors rule out from below, whatever the mechanism.

    From alpha + e^epsilon beta >= 1 - delta and its mirror image (Kairouz, Oh and Viswanath 2015, Thm 2.1).
    """
    alpha, beta = errors.bounds()
    ratios = [(1 - delta - alpha) / beta, (1 - delta - beta) / alpha]
    return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])


def epsilon_of(mu: float, delta: float) -> float:
    """The epsilon at `delta` that a certified lower bound of mu implies, rounded down.

    Valid only against claims of Gaussian differential privacy.
    """
    # `gdp_epsilon` rounds up by some units of 2^-53; a billionth is far more, and no trials resolve it.
    return gdp_epsilon(mu, delta) * (1 - 1e-9)


def one_run_epsilon(*, canaries: int, guesses: int, correct: int, delta: float, level: float = 0.05) -> float:
    """The epsilon at `delta` that one run with many canaries rules out from below.

    Steinke, Nasr and Jagielski 2023, Theorem 5.2, with its delta term. The canaries' coins are independent;
    the number of guesses (the others are abstentions) was fixed beforehand.

    Args:
        canaries: Coins that were thrown.
        guesses: Coins that were guessed.
        correct: Guesses that were right.
        delta: The delta of the claim.
        level: One minus the confidence.
    """
    if not 0 < guesses <= canaries or not 0 <= correct <= guesses:
        raise AttackError(f"{correct} right of {guesses} guesses of {canaries} canaries is impossible")

    def refuted(epsilon: float) -> bool:
        return _one_run_p(epsilon, canaries, guesses, correct, delta) < level

    return _largest(refuted)


def _one_run_p(epsilon: float, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The probability that an (epsilon, delta) mechanism lets a guesser do so well."""
    right = float(expit(epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return tail
    # P[v > Bin >= v - i] for i = 1..v, from the probabilities of v-1, v-2, ..., 0.
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    return tail + 2 * canaries * delta * float(np.max(below / np.arange(1, correct + 1)))


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest value for which a monotone condition holds, rounded down; 0 if it never does."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# -- what a promise allows ---------------------------------------------------------------------------------


def balanced_accuracy_ceiling(mu: float) -> float:
    """The most that guessing one of two worlds can be right under a mu-GDP promise."""
    return float(ndtr(mu / 2))
