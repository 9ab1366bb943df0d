"""One-run and anytime bounds against 30 digits, against every possible mechanism, and against simulations."""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from securevfl.accountants.gdp import gdp_delta
from securevfl.attacks.one_run import (
    Guesses,
    choose_guesses,
    count_correct,
    one_run_mu,
    several_runs_mu,
)
from securevfl.attacks.statistics import epsilon_of
from securevfl.errors import AttackError

VECTORS = json.loads(Path(__file__).with_name("one_run_vectors.json").read_text())
DELTA = 1e-5
# The bisection ends at 1e-9; the margin of 1e-9 on the total moves the bound by about as much.
CLOSE = 1e-8


@pytest.mark.parametrize("vector", VECTORS["one_run"])
def test_one_run_equals_thirty_digits_and_is_never_above(vector: dict[str, Any]) -> None:
    counts = {name: vector[name] for name in ("canaries", "guesses", "correct", "level")}
    found = one_run_mu(**counts)
    assert found == pytest.approx(vector["mu_lower"], abs=CLOSE)
    assert found <= vector["mu_lower"] + 1e-12
    if "epsilon_lower" in vector:
        # The other implementation solves for epsilon to 1e-6, by way of a sigma of its own precision.
        assert epsilon_of(found, DELTA) == pytest.approx(vector["epsilon_lower"], abs=2e-6)


def largest_probability(mu: float, run: Guesses) -> float:
    """The largest P[at least `correct` right] over all mu-GDP mechanisms and guessers: a linear program.

    Any mechanism can be made symmetric in the canaries and coins, so the probabilities p_w of w right guesses
    describe it. One canary is right or wrong among w right ones; turning its coin maps (right, w) to
    (wrong, w - 1) and back. mu-GDP is the hockey-stick divergence at every epsilon; finitely many of them
    leave more mechanisms, so the program errs upwards.
    """
    m, g, v = run
    pairs = [((w, w / m), (w - 1, (g - w + 1) / m)) for w in range(1, g + 1)]
    pairs += [((w, (g - w) / m), (w + 1, (w + 1) / m)) for w in range(g)]
    grid = np.linspace(0.0, 8 * mu + mu * mu, 250)
    n, width = g + 1, len(pairs)
    rows = len(grid) * (width + 1)
    matrix, limit = lil_matrix((rows, n + len(grid) * width)), np.zeros(rows)
    for block, epsilon in enumerate(grid):
        first = n + block * width
        for j, ((here, weight), (there, other)) in enumerate(pairs):
            row = block * (width + 1) + j
            matrix[row, here] += weight
            matrix[row, there] -= math.exp(epsilon) * other
            matrix[row, first + j] = -1.0
        last = block * (width + 1) + width
        matrix[last, first : first + width] = 1.0
        limit[last] = gdp_delta(mu, epsilon)
    goal = np.zeros(matrix.shape[1])
    goal[v:n] = -1.0
    total = lil_matrix((1, matrix.shape[1]))
    total[0, :n] = 1.0
    solved = linprog(goal, A_ub=matrix.tocsr(), b_ub=limit, A_eq=total.tocsr(), b_eq=[1.0], method="highs")
    assert solved.success
    return float(-solved.fun)


@pytest.mark.parametrize("run", [Guesses(6, 6, 6), Guesses(12, 6, 6), Guesses(12, 12, 11), Guesses(9, 7, 6)])
def test_no_mechanism_exceeds_the_level_and_one_comes_near(run: Guesses) -> None:
    level = 0.05 if run.correct == run.guesses else 0.1
    mu = one_run_mu(**run._asdict(), level=level)
    assert mu > 0.05
    largest = largest_probability(mu, run)
    # 250 values of epsilon instead of all let the program err upwards by about 1e-4 relative.
    assert largest <= level * (1 + 1e-3)
    assert largest > (0.999 if run.correct == run.guesses else 0.9) * level


def play(rng: np.random.Generator, mu: float, canaries: int) -> tuple[NDArray[Any], NDArray[Any]]:
    coins = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + np.where(coins, mu / 2, -mu / 2), coins


# Means over 200 games with another seed, standard errors below 0.1. The truth is 4.38, 10.0 and 24.4; one
# run reaches 62 %, 62 % and 48 % of it, five runs with the same 2,000 canaries 69 %, 74 % and 66 %. The
# one-sided bound over all thresholds of jax_privacy 2.0 reaches 1.90, 4.31 and 7.58 in one run.
@pytest.mark.parametrize(
    ("mu", "runs", "mean"),
    [(1, 1, 2.73), (2, 1, 6.15), (4, 1, 11.61), (1, 5, 3.01), (2, 5, 7.35), (4, 5, 16.08)],
)
def test_two_thousand_canaries_reach(mu: int, runs: int, mean: float) -> None:
    rng = np.random.default_rng(mu * 10 + runs)
    each, games = 2000 // runs, 60
    guesses = choose_guesses(canaries=each, mu=mu, runs=runs)
    found = []
    for _ in range(games):
        outcomes = [count_correct(*play(rng, mu, each), guesses) for _ in range(runs)]
        found.append(epsilon_of(several_runs_mu(outcomes), DELTA))
    slack = 4 * float(np.hypot(np.std(found) / math.sqrt(games), 0.1))
    assert np.mean(found) == pytest.approx(mean, abs=slack)
    assert np.mean(found) > {1: 1.90, 2: 4.31, 4: 7.58}[mu]


def test_more_canaries_reach_more_in_one_run() -> None:
    """As many as an audit guesses by default reach 60 % where 2,000, all of them right, stay below 56 %."""
    rng, truth, canaries = np.random.default_rng(50), epsilon_of(4.0, DELTA), 50_000
    guesses = choose_guesses(canaries=canaries, mu=4.0)
    runs = [count_correct(*play(rng, 4.0, canaries), guesses) for _ in range(12)]
    found = [epsilon_of(one_run_mu(**run._asdict()), DELTA) for run in runs]
    assert np.mean(found) > 0.58 * truth
    assert epsilon_of(one_run_mu(canaries=2000, guesses=2000, correct=2000), DELTA) < 0.56 * truth


def test_one_run_cannot_certify_what_a_mechanism_may_tell_once_in_twenty_runs() -> None:
    every = one_run_mu(canaries=2000, guesses=2000, correct=2000)
    assert epsilon_of(every, DELTA) < 0.6 * epsilon_of(4.0, DELTA)
    assert several_runs_mu([Guesses(400, 400, 400)] * 5) > every


@pytest.mark.parametrize("level", [0.05, 0.3])
def test_the_truth_is_exceeded_no_more_often_than_the_level_says(level: float) -> None:
    rng = np.random.default_rng(7)
    trials, truth = 1000, 1.0
    counts = [count_correct(*play(rng, truth, 30), 30) for _ in range(trials)]
    above = sum(certified(run, level) > truth for run in counts)
    # Four standard errors: one in 30,000 seeds would fail.
    assert above / trials <= level + 4 * math.sqrt(level * (1 - level) / trials)


@functools.cache
def certified(run: Guesses, level: float) -> float:
    return one_run_mu(**run._asdict(), level=level)


@pytest.mark.parametrize("level", [0.05, 0.3])
@pytest.mark.parametrize("m", [6, 30])
def test_the_worst_mechanism_exceeds_its_truth_just_as_often_as_the_level_says(m: int, level: float) -> None:
    """A mechanism that is all right with probability 0.98 level and keeps its mu, by every epsilon."""
    right = np.arange(m + 1)
    mu = one_run_mu(canaries=m, guesses=m, correct=m, level=0.98 * level) + 1e-6
    masses = np.where(right == m, 0.98 * level, 0.0)
    for w in range(m - 1, -1, -1):
        good, bad = right @ masses / m, (m - right) @ masses / m
        masses[w] = max(0.0, stats.norm.cdf(stats.norm.ppf(good) - mu) - bad) * m / (m - w)
    masses += (1 - masses.sum()) * stats.binom.pmf(right, m, 0.5)  # what is left is guessed by coin
    assert (masses >= 0).all()
    here = np.concatenate([right * masses, (m - right) * masses]) / m
    turned = np.concatenate([[0.0], ((m - right) * masses)[:-1], (right * masses)[1:], [0.0]]) / m
    for epsilon in np.linspace(0.0, 8 * mu, 200):
        assert np.maximum(0.0, here - math.exp(epsilon) * turned).sum() <= gdp_delta(mu, epsilon) + 1e-15
    above = sum(p for w, p in enumerate(masses) if certified(Guesses(m, m, w), level) > mu)
    assert 0.98 * level <= above <= level


def test_the_minimum_over_runs_keeps_the_level() -> None:
    rng = np.random.default_rng(11)
    trials, level = 500, 0.2
    several = 0
    for _ in range(trials):
        games = [play(rng, 1.0, 40) for _ in range(3)]
        several += several_runs_mu([count_correct(*game, 20) for game in games], level) > 1.0
    limit = level + 4 * math.sqrt(level * (1 - level) / trials)
    assert several / trials <= limit


@given(st.integers(2, 300), st.floats(0, 1), st.floats(0, 1), st.floats(1e-6, 0.5))
@settings(max_examples=60, deadline=None)
def test_more_right_guesses_or_a_looser_level_certify_more(m: int, a: float, b: float, level: float) -> None:
    guesses = 1 + int(a * (m - 1))
    correct = int(b * guesses)
    found = one_run_mu(canaries=m, guesses=guesses, correct=correct, level=level)
    assert one_run_mu(canaries=m, guesses=guesses, correct=correct, level=1.5 * level) >= found
    if correct < guesses:
        assert one_run_mu(canaries=m, guesses=guesses, correct=correct + 1, level=level) >= found


def test_twenty_thousand_canaries_are_quick() -> None:
    """Some 6 ms of processor time each, and 7.5 ms for ten times as many: a hundred times too slow fails."""
    started = time.process_time()
    cases = list(itertools.product((0.505, 0.53, 0.6, 0.9, 0.999, 1.0), (0.05, 1e-9)))
    for share, level in cases:
        one_run_mu(canaries=20_000, guesses=20_000, correct=int(20_000 * share), level=level)
    assert (time.process_time() - started) / len(cases) < 0.5


def test_ties_are_decided_without_the_coins() -> None:
    coins = np.array([True, False, True, False])
    assert count_correct([1.0, 1.0, 1.0, 1.0], coins, 2) == Guesses(4, 2, 1)
    assert count_correct([-5.0, -9.0, 1.0, 2.0], coins, 2) == Guesses(4, 2, 1)


def test_impossible_input_is_refused() -> None:
    for counts in [(10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)]:
        with pytest.raises(AttackError, match="is impossible"):
            one_run_mu(canaries=counts[0], guesses=counts[1], correct=counts[2])
    with pytest.raises(AttackError, match="level"):
        one_run_mu(canaries=10, guesses=5, correct=5, level=0.0)
    with pytest.raises(AttackError, match="no NaN"):
        count_correct([math.nan], [True], 1)
    with pytest.raises(AttackError, match="no run"):
        several_runs_mu([])
    with pytest.raises(AttackError, match="positive finite"):
        choose_guesses(canaries=10, mu=math.inf)
