"""Tests on replayed noise: exact under the claim, and each fault is noticed by the test made for it."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from mpmath import gammainc, mp, mpf
from numpy.typing import NDArray
from scipy import stats

from securevfl.auditing.evidence import (
    CELL,
    COLUMNS,
    LATTICE,
    NOISE_TESTS,
    REPETITION,
    ROWS,
    SHAPE,
    VALUES,
    VARIANCE,
    CorrelationTest,
    NoiseEvidence,
    RepetitionTest,
    ShapeTest,
    SharedTest,
    SquaresTest,
    VarianceTest,
    _tail,
    directions,
    judge_flips_to,
    off_lattice,
    power,
)
from securevfl.auditing.verdicts import HOLDERS, ErrorBudget, Verdict
from securevfl.errors import InputError
from securevfl.privacy.defences import randomise_labels
from securevfl.privacy.noise import Noise, snap

Floats = NDArray[np.float64]
ALPHA = 2.7e-7
LEVELS = ErrorBudget(delta=1e-5, epsilon=2.0).split(HOLDERS, NOISE_TESTS)


def verdicts(evidence: NoiseEvidence) -> dict[str, Verdict]:
    return {outcome.test: outcome.verdict for outcome in evidence.judge(LEVELS)}


def fed(noise: Floats, std: float = 1.5) -> NoiseEvidence:
    evidence = NoiseEvidence()
    evidence.add(noise, std)
    return evidence


def honest(rows: int = 3000, width: int = 8, std: float = 1.5, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).normal(size=(rows, width)) * std


def test_angles_of_noise_are_not_a_few() -> None:
    rng = np.random.default_rng(6)
    assert verdicts(fed(honest()))[REPETITION] is Verdict.HOLDS
    radius, angle = (
        np.sqrt(-2 * np.log(rng.random(2000))) * 1.5,
        rng.integers(0, 256, 2000) * (np.pi / 128) + 0.01,
    )
    few = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).reshape(-1, 8)
    assert verdicts(fed(few))[REPETITION] is Verdict.VIOLATED


def test_directions_keep_their_level() -> None:
    """Many cells, so that equal ones occur by chance, as often as the bound says and no more."""
    rng, alarms = np.random.default_rng(7), 0
    for _ in range(1000):
        test = RepetitionTest(0.02, far=False)
        test.add(directions(rng.normal(size=(10, 4))))
        alarms += test.judge(0.2).verdict is Verdict.VIOLATED
    assert alarms <= 200


@pytest.mark.parametrize("more", [0.5, 3, 8, 1e9])
def test_what_is_added_to_noise_is_not_taken_for_noise_that_repeats(more: float) -> None:
    rng = np.random.default_rng(8)
    test = RepetitionTest(far=False)
    for _ in range(50):
        test.add(directions(rng.normal(size=(10, 100)) + more))
    assert test.judge(1e-6).verdict is not Verdict.VIOLATED


# -- variance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "share"), [(114, 0.63), (1_000, 0.87), (10_000, 0.96)])
def test_power_has_the_printed_figures(values: int, share: float) -> None:
    """The figures are rounded and for exact replay; at the limit of the error they are 0.63, 0.86, 0.95."""
    assert round(power(values, ALPHA, error=0.0), 2) == share
    assert 0 < power(values, ALPHA, error=0.0) - power(values, ALPHA) < 0.01


@pytest.mark.parametrize(
    "draw", [np.random.Generator.standard_normal, lambda rng, size: rng.uniform(-1, 1, size) * 3**0.5]
)
def test_squares_of_uniform_and_gaussian_noise_keep_their_level(draw: Callable[..., Floats]) -> None:
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(2000):
        test = SquaresTest()
        test.add(draw(rng, 60))
        alarms += test.judge(0.05).verdict is Verdict.VIOLATED
    assert alarms <= 100  # a bound, not an equation: five per cent are allowed
    weak, few = SquaresTest(), SquaresTest()
    weak.add(0.7 * draw(rng, 1000))
    few.add(draw(rng, 50))
    assert weak.judge(1e-9).verdict is Verdict.VIOLATED
    assert few.judge(1e-9).verdict is Verdict.NOT_TESTED


@pytest.mark.parametrize("level", [ALPHA, 1e-3, 1e-12, 1e-60])
@pytest.mark.parametrize("values", [114, 1_000])
def test_power_solves_its_equation_in_forty_digits(values: int, level: float) -> None:
    mp.dps = 40
    ratio = power(values, level, error=0.0) ** 2
    top = stats.chi2.ppf(0.9, values)
    above = gammainc(mpf(values) / 2, mpf(top) / 2, regularized=True)
    assert float(above) == pytest.approx(0.1, rel=1e-10)
    below = gammainc(mpf(values) / 2, 0, mpf(ratio) * mpf(top) / 2, regularized=True)
    # A relative error of 1e-14 in the quantile is one of k / 2 times as much in its tail.
    assert float(below / mpf(level)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_noise_of_the_printed_share_is_noticed_as_often_as_said(error: float) -> None:
    rng = np.random.default_rng(3)
    values, level, trials = 200, 1e-4, 1000
    share = power(values, level, error=error)
    noticed = 0
    for _ in range(trials):
        test = VarianceTest()
        wrong = rng.choice([-error, error], size=values)
        test.add(share * rng.normal(size=values) + wrong)
        noticed += test.judge(level).verdict is Verdict.VIOLATED
    # Exactly 90 % at error 0; an error of constant size varies less than noise, so a little more then.
    slack = 4 * math.sqrt(0.09 / trials)
    assert noticed / trials > 0.9 - slack
    if error == 0:
        assert noticed / trials < 0.9 + slack


def test_the_variance_test_errs_as_often_as_its_level_says() -> None:
    rng = np.random.default_rng(4)
    trials, level, false = 1000, 0.05, 0
    for _ in range(trials):
        evidence = NoiseEvidence()
        for std in (0.1, 7.0):  # releases with different noise count each by its own
            evidence.add(rng.normal(size=(3, 10)) * std, std)
        false += evidence.variance.judge(level).verdict is Verdict.VIOLATED
    assert abs(false / trials - level) < 4 * math.sqrt(level * (1 - level) / trials)


def test_too_few_values_are_not_tested() -> None:
    assert power(0, ALPHA) == power(1000, 0.0) == power(1, 1e-12) == 0.0
    test = VarianceTest()
    test.add(np.zeros(1))
    assert test.judge(1e-12).verdict is Verdict.NOT_TESTED


def test_too_much_noise_is_a_private_warning() -> None:
    test = VarianceTest()
    assert not test.excessive(1e-3)
    test.add(honest(std=1.0))
    assert not test.excessive(1e-3)
    test.add(honest(std=1.5))
    assert test.excessive(1e-3)
    assert test.judge(1e-3).verdict is Verdict.HOLDS


# -- repetition and lattice --------------------------------------------------------------------------------


def test_cells_coincide_as_often_as_said() -> None:
    rng = np.random.default_rng(5)
    pairs, cell = 400_000, 2.0**-5
    left, right = (np.rint(rng.normal(size=pairs) / cell) for _ in range(2))
    expected = cell / (2 * math.sqrt(math.pi))
    slack = 4 * math.sqrt(expected / pairs)
    assert abs((left == right).mean() - expected) < slack


def test_scalars_repeat_honestly_and_are_called_so_only_where_they_repeat_more() -> None:
    values = snap(honest(30_000, 1, 1.0), 1.0)
    assert len(np.unique(values)) < len(values)
    for repeated in (False, True):
        test = RepetitionTest()
        for message in np.split(values, 750):
            rows = message.copy()
            if repeated:
                rows[7::7] = rows[0]
            test.add(rows)
        wanted = Verdict.VIOLATED if repeated else Verdict.HOLDS
        assert test.judge(1e-9).verdict is wanted
    few = RepetitionTest(cell=2.0**-5)
    few.add(values[:40])
    assert few.judge(1e-9).verdict is Verdict.NOT_TESTED


def test_repeated_scalars_keep_their_level_and_the_bound_is_above_an_exact_tail() -> None:
    rng, alarms, runs = np.random.default_rng(11), 0, 400
    for _ in range(runs):
        test = RepetitionTest(cell=2.0**-6)
        for _ in range(4):
            test.add(snap(rng.normal(size=(40, 1)), 1.0))
        alarms += test.judge(0.05).verdict is Verdict.VIOLATED
    assert alarms <= 0.05 * runs
    for mean, count in ((0.01, 1), (0.5, 4), (3.0, 12), (200.0, 260)):
        coins = stats.binom.sf(count - 1, 10**6, mean / 10**6)
        assert coins <= _tail(mean, count) <= 60 * coins


def test_owners_are_blamed_for_each_others_noise_and_not_for_their_own() -> None:
    rng = np.random.default_rng(12)
    for shared in (False, True):
        test = SharedTest(["p1", "p2"])
        mine = rng.normal(size=(400, 1))
        mine[7::7] = mine[0]
        test.add("p1", mine)
        test.add("p2", mine[::-1] if shared else rng.normal(size=(400, 1)))
        found = test.judge(1e-6, 0.0).verdict
        assert found is (Verdict.VIOLATED if shared else Verdict.HOLDS)


def test_noise_used_twice_is_noticed_although_it_is_snapped_differently() -> None:
    rng = np.random.default_rng(6)
    noise, clean = rng.normal(size=(500, 8)), rng.normal(size=(1000, 8))
    released = snap(clean + np.concatenate([noise, noise]), 1.0)
    evidence = NoiseEvidence()
    for start in range(0, 1000, 50):
        part = slice(start, start + 50)
        evidence.add(released[part] - clean[part], 1.0, released=released[part])
    found = verdicts(evidence)
    assert found[REPETITION] is Verdict.VIOLATED
    assert found[LATTICE] is Verdict.HOLDS
    again = NoiseEvidence(fresh=False)
    again.add(released - clean, 1.0)
    assert REPETITION not in verdicts(again)


def test_vectors_of_different_lengths_are_compared_with_their_like() -> None:
    test = RepetitionTest()
    test.add(np.zeros((1, 8)))
    test.add(np.zeros((1, 9)))
    assert test.judge(1e-3).verdict is Verdict.HOLDS
    test.add(np.zeros((1, 9)))
    assert test.judge(1e-3).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("std", [1e-3, 0.75, 1.0, 20.0])
def test_the_gates_lattice_contains_what_was_snapped_to_it(std: float) -> None:
    values = snap(honest(std=std), std)
    assert off_lattice(values, std) == 0
    assert off_lattice(values.astype(np.float32), std) == 0
    assert off_lattice(values + std * 2.0**-23, std) == values.size


# -- every test keeps its level ----------------------------------------------------------------------------


def test_many_honest_paths_raise_no_more_alarms_than_the_budget_says() -> None:
    rng = np.random.default_rng(8)
    level, paths = 0.05, 600
    alarms = dict.fromkeys(NOISE_TESTS, 0)
    for _ in range(paths):
        evidence = NoiseEvidence()
        for rows in (200, 200, 200, 1):
            evidence.add(rng.normal(size=(rows, 6)) * 2, 2.0, error=1e-4)
        for outcome in evidence.judge(dict.fromkeys(NOISE_TESTS, level)):
            assert outcome.verdict is not Verdict.NOT_TESTED
            alarms[outcome.test] += outcome.verdict is Verdict.VIOLATED
    limit = level + 4 * math.sqrt(level * (1 - level) / paths)
    assert all(count / paths <= limit for count in alarms.values()), alarms
    # The variance is exact and the correlations nearly so: they use their level.
    assert all(alarms[test] / paths > 2 * level - limit for test in (VARIANCE, VALUES, ROWS)), alarms


def test_two_owners_that_share_a_stream_are_noticed() -> None:
    test, apart = CorrelationTest("owners"), CorrelationTest("owners")
    shared = honest(std=1.0)
    test.add(0.8 * shared + 0.6 * honest(std=1.0, seed=2), shared)
    apart.add(honest(std=1.0, seed=2), shared)
    assert test.judge(ALPHA, 0.0).verdict is Verdict.VIOLATED
    assert apart.judge(ALPHA, 0.0).verdict is Verdict.HOLDS
    with pytest.raises(InputError, match="expected pairs"):
        test.add(shared[:5], shared[:4])


def test_correlation_has_students_distribution() -> None:
    rng = np.random.default_rng(9)
    level, trials, alarms = 0.1, 1000, 0
    for _ in range(trials):
        test = CorrelationTest("owners")
        test.add(rng.normal(size=1000), rng.normal(size=1000) * 3)
        alarms += test.judge(level, 0.0).verdict is Verdict.VIOLATED
    assert abs(alarms / trials - level) < 4 * math.sqrt(level * (1 - level) / trials)


# -- faults ------------------------------------------------------------------------------------------------


def same_in_pairs(noise: Floats) -> Floats:
    noise[2::2] = noise[1:-1:2]
    return noise


def moving(noise: Floats) -> Floats:
    flat = noise.ravel()
    flat[1:] = (flat[1:] + flat[:-1]) / math.sqrt(2)
    return flat.reshape(noise.shape)


def mostly_absent(noise: Floats) -> Floats:
    return noise * np.where(np.random.default_rng(1).random(noise.shape) < 0.1, math.sqrt(20.0), 1e-6)


def uniform(noise: Floats) -> Floats:
    return np.random.default_rng(1).uniform(-1, 1, noise.shape) * 1.5 * math.sqrt(3)


FAULTS: list[tuple[Callable[[Floats], Floats], str]] = [
    (lambda noise: noise * 0.0, VARIANCE),
    (lambda noise: noise * 0.95, VARIANCE),
    (lambda noise: np.tile(noise[:1], (len(noise), 1)), REPETITION),
    (same_in_pairs, ROWS),
    (moving, VALUES),
    (mostly_absent, SHAPE),
    (uniform, SHAPE),
]


@pytest.mark.parametrize(("fault", "test"), FAULTS)
def test_each_fault_is_noticed(fault: Callable[[Floats], Floats], test: str) -> None:
    evidence = NoiseEvidence()
    for part in np.array_split(fault(honest()), 7):
        evidence.add(part, 1.5)
    assert verdicts(evidence)[test] is Verdict.VIOLATED
    finding = evidence.finding("p1 against p0", "embeddings", LEVELS)
    assert finding.verdict is Verdict.VIOLATED
    assert any(reason.startswith(test) for reason in finding.reasons)


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_noise_that_ends_somewhere_takes_few_values(error: float) -> None:
    """By chance as rarely as the level says, which exact values meet and errors of replay stay below."""
    level, wrong, rng = 0.1, 0, np.random.default_rng(3)
    for _ in range(2_000):
        test = ShapeTest()
        test.add(rng.normal(size=(1, 60)) + error)
        wrong += test.judge(level, error).verdict is Verdict.VIOLATED
    assert wrong <= 2_000 * level / 2 + 4 * math.sqrt(2_000 * level / 2)  # the other half is for the middle
    assert error or wrong >= 2_000 * level / 2 - 4 * math.sqrt(2_000 * level / 2)
    ending = ShapeTest()
    ending.add(rng.uniform(-1, 1, (10, 30)) * math.sqrt(3))
    assert ending.judge(ALPHA, error).reason == "the noise ends where it should go on"


def test_values_off_the_lattice_are_noticed_even_where_replay_is_not_exact() -> None:
    evidence = NoiseEvidence()
    noise = honest()
    evidence.add(noise, 1.5, error=0.2, released=noise)
    finding = evidence.finding("p1 against p0", "embeddings", LEVELS)
    assert finding.verdict is Verdict.VIOLATED
    assert finding.tested == (LATTICE,)


# -- findings ----------------------------------------------------------------------------------------------


def test_the_gates_own_noise_holds_with_its_power() -> None:
    evidence = NoiseEvidence()
    clean, source = honest(2000, 8, 1.0), Noise.insecure(1, "evidence")
    for part in np.array_split(clean, 10):
        released = snap(part + source.gaussian(part.shape, 3.0), 3.0)
        evidence.add(released - part, 3.0, released=released)
    finding = evidence.finding("p1 against p0", "embeddings", LEVELS)
    assert finding.verdict is Verdict.HOLDS
    assert finding.power == power(16_000, LEVELS[VARIANCE])
    assert set(finding.tested) == {*NOISE_TESTS, LATTICE}
    assert finding.reasons == ()


def test_one_message_that_cannot_be_replayed_leaves_the_path_untested() -> None:
    evidence = NoiseEvidence()
    evidence.add(honest(), 1.5)
    evidence.add(honest(10), 1.5, error=0.051)
    finding = evidence.finding("p1 against p0", "embeddings", LEVELS)
    assert finding.verdict is Verdict.NOT_TESTED
    assert "1 messages could not be replayed exactly enough" in finding.reasons


def test_coarse_replay_leaves_out_the_fine_tests_only() -> None:
    evidence = NoiseEvidence()
    evidence.add(honest(), 1.5, error=0.02)
    finding = evidence.finding("p1 against p0", "embeddings", LEVELS)
    assert finding.verdict is Verdict.HOLDS
    assert set(finding.tested) == {VARIANCE, COLUMNS, REPETITION}
    assert all("not tested" in reason for reason in finding.reasons)


def test_no_message_and_no_level_are_not_tested() -> None:
    assert NoiseEvidence().finding("p1", "embeddings", LEVELS).verdict is Verdict.NOT_TESTED
    evidence = NoiseEvidence()
    evidence.add(honest(), 1.5)
    nothing = evidence.finding("p1", "embeddings", dict.fromkeys(NOISE_TESTS, 0.0))
    assert nothing.verdict is Verdict.NOT_TESTED
    assert nothing.tested == ()


def test_outcomes_carry_no_statistic() -> None:
    """Two honest runs of the same size say exactly the same."""
    said = []
    for seed in (1, 2):
        evidence = NoiseEvidence()
        evidence.add(honest(seed=seed), 1.5)
        said.append(evidence.finding("p1", "embeddings", LEVELS))
    assert said[0] == said[1]


def test_memory_is_bounded_by_the_largest_message() -> None:
    evidence, rng = NoiseEvidence(), np.random.default_rng(1)
    evidence.add(rng.normal(size=(500, 64)), 1.0)
    tracemalloc.start()
    for _ in range(100):
        evidence.add(rng.normal(size=(500, 64)), 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 100 messages of 256 kB; several copies of one of them and 16 bytes per vector stay.
    assert peak < 13 * 500 * 64 * 8  # the last message is kept and joined to the next


def test_unusable_noise_is_refused() -> None:
    evidence = NoiseEvidence()
    for noise, std, error in [
        ([[math.nan]], 1.0, 0.0),
        ([[1.0]], 0.0, 0.0),
        ([[1.0]], 1.0, -1.0),
        ([], 1.0, 0.0),
    ]:
        with pytest.raises(InputError, match="expected finite values"):
            evidence.add(noise, std, error=error)
    with pytest.raises(InputError, match="cell"):
        RepetitionTest(cell=1.0)
    with pytest.raises(InputError, match="level"):
        power(10, 1.5)
    assert CELL == 64 * 2.0**-20


def test_one_column_without_noise_is_found() -> None:
    """The variance of all values together hides it: 1 of 24 columns is 4 % of the noise."""
    evidence = NoiseEvidence()
    noise = np.random.default_rng(3).normal(0, 1.5, (40, 24))
    noise[:, 7] = 0
    evidence.add(noise, 1.5)
    reasons = evidence.finding("p1 against p0", "noisy totals", LEVELS).reasons
    assert any(reason.startswith(COLUMNS) for reason in reasons)
    assert not any(reason.startswith(f"{VARIANCE}:") for reason in reasons)


@pytest.mark.parametrize("width", [1, 6])
def test_noise_that_two_owners_share_is_found(width: int) -> None:
    rng = np.random.default_rng(4)
    for shared in (False, True):
        test = SharedTest(["p0", "p1"])
        for _ in range(40):
            noise = rng.normal(0, 1, (40, width))
            test.add("p0", noise)
            test.add("p1", noise if shared else rng.normal(0, 1, (40, width)))
        expected = Verdict.VIOLATED if shared else Verdict.HOLDS
        assert test.judge(1e-6, 0.0).verdict is expected


def test_owners_that_drift_apart_are_compared_by_vectors_alone() -> None:
    rng = np.random.default_rng(5)
    test = SharedTest(["p0", "p1"])
    drawn = [rng.normal(0, 1, (2, 8)) for _ in range(600)]
    for noise in drawn:
        test.add("p0", noise)
    assert test.judge(1e-6, 0.0).verdict is Verdict.HOLDS
    test.add("p1", drawn[17])
    assert test.judge(1e-6, 0.0).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_noise_of_a_message_that_returns_in_another_is_found(sign: float) -> None:
    """Single values repeat by chance, and neighbours are independent: only whole messages tell."""
    rng = np.random.default_rng(6)
    evidence = NoiseEvidence()
    for _ in range(40):
        noise = rng.normal(0, 1.5, (40, 1))
        evidence.add(noise, 1.5)
        evidence.add(sign * noise, 1.5)
    reasons = " ".join(evidence.finding("p1 against p0", "noisy totals", LEVELS).reasons)
    assert "correlation of messages: noise" in reasons
    assert "repetition: the same noise" in reasons


def test_mirrored_vectors_keep_their_level_and_are_found() -> None:
    """A fresh vector may fall where an earlier one lies, or its mirror image: the bound counts both."""
    rng, alarms, runs = np.random.default_rng(12), 0, 300
    for _ in range(runs):
        test = RepetitionTest(cell=2.0**-4)
        for _ in range(4):
            test.add(rng.normal(size=(30, 2)))
        alarms += test.judge(0.05).verdict is Verdict.VIOLATED
    assert alarms <= 0.05 * runs
    rows = rng.normal(size=(40, 4))
    test = RepetitionTest()
    test.add(np.concatenate([rows, -rows[:1]]))
    assert test.judge(1e-6).verdict is Verdict.VIOLATED


# -- randomised labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_fair_flips_are_judged_wrong_as_rarely_as_their_level_says(classes: int) -> None:
    rng, noise, wrong = np.random.default_rng(classes), Noise.insecure(classes, "flips"), 0
    for _ in range(400):
        labels = rng.integers(0, classes, 60)
        flipped = randomise_labels(labels, classes, 1.0, noise)
        wrong += judge_flips_to(labels, flipped, classes, 0.05).verdict is Verdict.VIOLATED
    assert wrong <= 36  # 400 trials of 0.05: 20 and 3.7 standard deviations
    assert (classes == 2) == (wrong == 0)


@pytest.mark.parametrize("flip", [lambda labels: (labels + 1) % 3, lambda labels: (labels == 0) * 1])
def test_flips_that_lean_to_a_class_are_noticed(
    flip: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> None:
    labels = np.random.default_rng(0).integers(0, 3, 160)
    flipped = randomise_labels(labels, 3, 1.0, Noise.insecure(1, "flips"))
    leaning = np.where(flipped == labels, labels, flip(labels))
    assert judge_flips_to(labels, flipped, 3, ALPHA).verdict is Verdict.HOLDS
    assert judge_flips_to(labels, leaning, 3, ALPHA).verdict is Verdict.VIOLATED
