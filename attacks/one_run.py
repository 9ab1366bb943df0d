"""Certified lower bounds of mu from one training run, and from a few runs.

The game. Independent fair coins decide for each of m canaries which of two records is used. A guesser sees
what the mechanism shows, names the coins of exactly g canaries and abstains on the others; v guesses are
right. Against every mechanism that is mu-GDP for each single canary, and every guesser, whatever the noise
of the canaries has to do with each other, v is rarely large. If it is, that mu is refuted.

What must be fixed before the outcome is seen: the rule that turns the output into guesses, the number of
guesses, the number of runs. Guesses may take either
side: the canaries with the largest |score| are guessed by the sign of the score.

The module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from securevfl.errors import AttackError

_MU_BISECTIONS = 34  # 16 * 2^-34 = 1e-9, far below what any number of canaries resolves
# Larger ones cannot be refuted: 10^12 canaries, all guessed, at a level of one half stay below 8.
_LARGEST_MU = 16.0
# The recursion ends where it does not grow any more; ending it earlier only means to refute less.
_STEPS = 2_000
# Rounding errors of `_STEPS` additions stay below 2,000 * 2^-52 = 5e-13.
_MARGIN = 1e-9


class Guesses(NamedTuple):
    """The outcome of one run: coins thrown, coins guessed, guesses that were right."""

    canaries: int
    guesses: int
    correct: int


# -- one run -----------------------------------------------------------------------------------------------


def one_run_mu(*, canaries: int, guesses: int, correct: int, level: float = 0.05) -> float:
    """The mu that one run with many canaries rules out from below; 0 if it rules out none.

    Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run" (arXiv 2410.22235),
    for the trade-off function of Gaussian differential privacy. Why it is sound: let p_w be the probability
    of w right guesses and

        R_c = sum over w >= c of w p_w / m,        H_c = sum over w >= c of (g - w) p_w / m,

    the probabilities that a random canary is guessed rightly, or wrongly, and at least c are right. Turning
    one canary's coin makes a right guess wrong and lowers w by one, so mu-GDP and the concavity of its
    trade-off function give Phi^-1(R_c) <= Phi^-1(H_{c-1}) + mu. From P[w >= v] = level follow lower bounds
    of R and H for c = v, v - 1, ..., 0. R_0 + H_0 is g / m; where the bounds exceed it, mu is refuted.

    The number of guesses must be fixed beforehand. For epsilon use `epsilon_of`; like it, the bound is valid
    against claims of Gaussian differential privacy only. Where all guesses are right a mechanism attains the
    bound, so no method certifies more: all of 2,000 right at 5 % certify 2.543 (epsilon 13.5 at delta 1e-5),
    because a mechanism may tell nearly everything once in twenty runs. For larger values make several
    independent runs (`several_runs_mu`).

    Args:
        canaries: Coins that were thrown.
        guesses: Coins that were guessed.
        correct: Guesses that were right.
        level: One minus the confidence.
    """
    _check_level(level)
    if not 0 < guesses <= canaries or not 0 <= correct <= guesses:
        raise AttackError(f"{correct} right of {guesses} guesses of {canaries} canaries is impossible")
    run = Guesses(canaries, guesses, correct)
    if not _refuted(0.0, run, level):
        return 0.0
    low, high = 0.0, _LARGEST_MU
    for _ in range(_MU_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _refuted(middle, run, level) else (low, middle)
    return low


def _refuted(mu: float, run: Guesses, level: float) -> bool:
    """True where a mu-GDP mechanism has so many right guesses with a smaller probability than `level`."""
    canaries, guesses, correct = run
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    end = guesses / canaries * (1 + _MARGIN)
    for w in range(correct - 1, max(-1, correct - 1 - _STEPS), -1):
        needed = float(ndtr(ndtri(right) - mu))
        if needed <= wrong:
            return False  # neither bound can grow again
        right += w / (guesses - w) * (needed - wrong)
        wrong = needed
        if right + wrong > end:
            return True
    return False


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise AttackError(f"the level is {level}; expected a probability between 0 and 1, such as 0.05")


def count_correct(scores: ArrayLike, coins: ArrayLike, guesses: int) -> Guesses:
    """Guesses the coins of the largest |scores| by their sign and counts those that are right.

    Args:
        scores: One per canary, positive where the guesser leans to a coin of 1; made without the coins.
        coins: What was thrown.
        guesses: How many canaries are guessed, fixed beforehand.
    """
    values, thrown = np.asarray(scores, np.float64).ravel(), np.asarray(coins, bool).ravel()
    if values.shape != thrown.shape or not 0 < guesses <= values.size or np.isnan(values).any():
        raise AttackError(
            f"{values.size} scores, {thrown.size} coins, {guesses} guesses; expected as many coins as "
            "scores, no NaN, and at least one guess but no more than canaries"
        )
    # A stable sort: ties are decided by position, never by the coins.
    surest = np.argsort(-np.abs(values), kind="stable")[:guesses]
    return Guesses(values.size, guesses, int(((values[surest] > 0) == thrown[surest]).sum()))


@lru_cache(maxsize=64)
def choose_guesses(*, canaries: int, mu: float, level: float = 0.05, runs: int = 1) -> int:
    """How many guesses promise the best bound if the mechanism has exactly its claimed `mu`.

    Uses the claim alone, so it can be fixed before the run. A wrong claim costs power, not soundness.
    """
    if canaries < 1 or runs < 1 or not 0 < mu < math.inf:
        raise AttackError(f"{canaries} canaries, {runs} runs, mu {mu}; expected positive finite numbers")
    _check_level(level)
    grid = {max(1, round(canaries * 1.6**-step)) for step in range(9)}
    return max(sorted(grid), key=lambda guesses: _expected(canaries, guesses, mu, level, runs))


def _expected(canaries: int, guesses: int, mu: float, level: float, runs: int) -> float:
    """The mean over three quantiles of the fewest right guesses in `runs` runs with independent noise."""
    share = guesses / canaries

    def surplus(threshold: float) -> float:
        return float(ndtr(mu / 2 - threshold) + ndtr(-mu / 2 - threshold)) - share

    # P[|score| > 0] = 1 >= share; at mu / 2 + 40 nothing is left.
    threshold = brentq(surplus, 0.0, mu / 2 + 40.0) if guesses < canaries else 0.0
    accuracy = min(1.0, float(ndtr(mu / 2 - threshold)) / share)
    fewest = 1 - (1 - np.array([0.2, 0.5, 0.8])) ** (1 / runs)
    counts = stats.binom.ppf(fewest, guesses, accuracy)
    each = level ** (1 / runs)
    return float(
        np.mean([one_run_mu(canaries=canaries, guesses=guesses, correct=int(v), level=each) for v in counts])
    )


# -- several runs ------------------------------------------------------------------------------------------


def several_runs_mu(outcomes: Sequence[Guesses], level: float = 0.05) -> float:
    """The mu that independent runs together rule out from below: the smallest of their bounds.

    Each of B runs has its own coins, its own noise and its own bound at level^(1/B). If the mechanism is
    mu-GDP, every bound exceeds mu with probability at most level^(1/B), and all of them do with probability
    at most `level`. A mechanism that tells everything once in twenty runs cannot do so in all of them, so
    2,000 canaries in five runs certify more than in one. The number of runs must be fixed beforehand.
    """
    _check_level(level)
    if not outcomes:
        raise AttackError("there is no run; expected at least one")
    each = level ** (1 / len(outcomes))
    return min(one_run_mu(**run._asdict(), level=each) for run in outcomes)
