"""Tables of scorecards: exact without noise, silent without information, points that add up."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import multivariate_normal

from securevfl.algorithms.sealed import tables
from securevfl.algorithms.sealed.tables import Counts, PartyFit


def counted(p, n, *, std=0.0, seed=0, ordered=True, own_missing=False):
    generator = np.random.default_rng(seed)
    p, n = np.asarray(p, float), np.asarray(n, float)
    return Counts(
        positive=p * n + generator.normal(0, std, len(p)) if std else p * n,
        negative=(1 - p) * n + generator.normal(0, std, len(p)) if std else (1 - p) * n,
        ordered=ordered,
        own_missing=own_missing,
    )


P = np.array([0.05, 0.1, 0.2, 0.4, 0.5])
N = np.array([20_000.0, 20_000, 20_000, 20_000, 20_000])
Q = float(P @ N / N.sum())


def test_without_noise_the_table_is_the_logit_difference():
    """Up to the sampling noise 1 / sqrt(n q (1-q)) = .016 that the shrinkage allows for, and the centre."""
    table = tables.evidence(counted(P, N), q=Q, records=int(N.sum()), std=0.0)
    wanted = logit(P) - logit(Q)
    assert table.evidence == pytest.approx(wanted, abs=0.05)  # as it is read from the counts beside it
    wanted -= float(N @ wanted) / N.sum()
    # the posterior works on p; at p = .05 a shift of one hundredth of a deviation is .05 of a logit
    assert table.values == pytest.approx(wanted, abs=0.05)
    information = float((P * N / (P @ N) - (1 - P) * N / ((1 - P) @ N)) @ (logit(P) - logit(Q)))
    assert table.information == pytest.approx(information, rel=0.02)
    assert float(N @ table.values) == pytest.approx(0, abs=1e-6)


def test_the_share_of_positives_uses_every_feature():
    few, many = counted(P, N), counted(np.full(40, Q), np.full(40, N.sum() / 40))
    assert tables.rate([few, many], int(N.sum()), 0.0) == pytest.approx(Q)
    generator, std, records = np.random.default_rng(0), 50.0, int(N.sum())
    drawn = []
    for _ in range(2000):
        noisy = [
            Counts(
                positive=c.positive + generator.normal(0, std, len(c.positive)),
                negative=c.negative + generator.normal(0, std, len(c.positive)),
                ordered=True,
            )
            for c in (few, many)
        ]
        drawn.append(tables.rate(noisy, records, std))
    wanted = std / math.sqrt(2 * (1 / 5 + 1 / 40)) / records
    assert np.std(drawn) == pytest.approx(wanted, rel=4 / math.sqrt(4000))  # four standard errors


def test_what_is_joined_from_many_cells_has_the_noise_of_all_of_them():
    """Two values hashed into 64 buckets: the 62 that nobody is in have 62 cells' noise and no evidence."""
    n, p, std = np.zeros(64), np.zeros(64), 13.0
    n[[4, 22]], p[[4, 22]] = [4800, 1600], [0.24, 0.40]
    q, records = float(n @ p / n.sum()), int(n.sum())
    exact = tables.evidence(counted(p[[4, 22]], n[[4, 22]], ordered=False), q=q, records=records, std=0.0)
    information, rest = [], []
    for seed in range(50):
        opened = counted(p, n, std=std, seed=seed, ordered=False)
        counts = tables.joined(opened, tables.join_weak_bins(opened, std))
        assert counts.spreads.sum() == 64 and counts.spreads[-1] > 55
        table = tables.evidence(counts, q=q, records=records, std=std)
        information.append(table.information)
        rest.append(abs(table.values[-1]))
    assert np.mean(information) == pytest.approx(exact.information, rel=0.1)
    assert max(rest) < 0.2  # with one cell's noise .9 in the mean, up to 3


def test_the_share_of_positives_counts_cells_and_not_what_they_were_joined_to():
    """A column of two bins from 64 cells says less of the share than one of five."""
    few, many = counted(P, N), counted(np.full(64, 0.5), np.full(64, N.sum() / 64))
    pair = tables.joined(many, np.repeat([0, 1], 32))
    assert tables.rate([few, pair], int(N.sum()), 1.0) == tables.rate([few, many], int(N.sum()), 1.0)


def test_the_share_stays_away_from_the_ends():
    nobody = counted(np.zeros(4), np.full(4, 250.0))
    assert tables.rate([nobody], 1000, 0.0) == 1 / 1000
    assert tables.rate([nobody], 1000, 10.0) == pytest.approx(3 * 10 / math.sqrt(2 / 4) / 1000)


def test_features_without_information_become_exactly_zero_and_leave():
    kept = 0
    for seed in range(200):
        table = tables.evidence(
            counted(np.full(20, 0.2), np.full(20, 1000.0), std=40.0, seed=seed),
            q=0.2,
            records=20_000,
            std=40.0,
        )
        kept += table.used
        assert table.used or not table.values.any()
    # t = 0 is the true prior; another of 14 wins by likelihood now and then, and is then small.
    assert kept < 100


@pytest.mark.parametrize(("ordered", "own_missing"), [(True, False), (True, True), (False, False)])
def test_shrinkage_is_the_posterior_of_the_likeliest_prior(ordered, own_missing):
    generator = np.random.default_rng(5)
    found, variance = generator.normal(0, 0.6, 6), generator.uniform(0.01, 0.4, 6)
    best, every = (-math.inf, None), []
    shapes = tables.SMOOTHNESS if ordered else (0.0,)
    for r, t in itertools.product(shapes, tables.SIZES):
        prior = t * np.array([[float(r) ** abs(i - j) for j in range(6)] for i in range(6)])
        if own_missing:
            prior[-1, :-1] = prior[:-1, -1] = 0
        here = multivariate_normal(cov=prior + np.diag(variance)).logpdf(found)
        gain = prior @ np.linalg.inv(prior + np.diag(variance))
        if t or r == shapes[0]:  # t = 0 is one prior, whatever r
            every.append((math.exp(here), gain @ found, np.diag(prior - gain @ prior)))
        if here > best[0]:
            best = (here, gain @ found)
    mean, errors = tables.shrink(found, variance, ordered=ordered, own_missing=own_missing)
    assert mean == pytest.approx(best[1])
    weight = sum(w for w, _, _ in every)
    squares = sum(w * (spread + (m - best[1]) ** 2) for w, m, spread in every) / weight
    assert errors == pytest.approx(np.sqrt(squares))


def test_error_bars_are_as_wide_as_the_errors():
    """With priors drawn from the grid, squared bars have the mean of squared errors: total variance.

    For one fixed prior (t = .3, r = .8, noise .1) two deviations held the truth in 90 % of bins, not 95 %:
    sixteen bins do not tell t well, and bars are narrow where it is taken too small.
    """
    generator, surplus, bars = np.random.default_rng(6), [], []
    variance = generator.uniform(0.02, 0.3, 12)
    distance = np.abs(np.subtract.outer(np.arange(12), np.arange(12)))
    priors = [np.zeros((12, 12))] + [t * r**distance for r in tables.SMOOTHNESS for t in tables.SIZES[1:]]
    for _ in range(1500):
        truth = generator.multivariate_normal(np.zeros(12), priors[generator.integers(len(priors))])
        found = truth + generator.normal(0, np.sqrt(variance))
        mean, errors = tables.shrink(found, variance, ordered=True, own_missing=False)
        surplus.append(float(np.mean((mean - truth) ** 2 - errors**2)))
        bars.append(float(np.mean(errors**2)))
    assert abs(np.mean(surplus)) < 4 * np.std(surplus) / math.sqrt(len(surplus))  # four standard errors
    assert np.std(surplus) / math.sqrt(len(surplus)) < 0.1 * np.mean(bars)


def test_error_bars_of_evidence_hold_the_truth_in_rare_and_in_frequent_bins():
    """One percent positive in the first bin, a quarter in the last; without the slope .42 in the worst."""
    n, p, std = np.full(20, 5000.0), np.linspace(0.012, 0.25, 20), 28.0
    q, records = float(p.mean()), 100_000
    truth = logit(p) - logit(q)
    inside = []
    for seed in range(100):
        drawn = counted(np.random.default_rng(seed).binomial(5000, p) / 5000, n, std=std, seed=seed)
        table = tables.evidence(drawn, q=q, records=records, std=std)
        inside.append(np.abs(table.evidence - truth) < 1.96 * table.errors)
    # .94 in all, .87 to .99 by bin in 300 draws; four standard errors of 100 are .13
    assert np.mean(inside) > 0.9 and np.mean(inside, axis=0).min() > 0.74


@given(st.lists(st.floats(-50, 500), min_size=1, max_size=40), st.floats(0, 30), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_weak_bins_join_a_neighbour(mass, std, ordered, own_missing):
    own_missing = own_missing and ordered and len(mass) > 1
    half = np.array(mass) / 2
    counts = Counts(positive=half, negative=half, ordered=ordered, own_missing=own_missing)
    place = tables.join_weak_bins(counts, std)
    assert sorted(set(place.tolist())) == list(range(place.max() + 1)) and len(place) == len(mass)
    joined = tables.joined(counts, place)
    assert joined.total.sum() == pytest.approx(sum(mass), abs=1e-6)
    values = place[: len(mass) - own_missing]
    if ordered:
        assert np.all(np.diff(values) >= 0)
        sums = joined.total[: values.max() + 1]
        assert len(sums) == 1 or sums.min() >= 3 * math.sqrt(2) * std - 1e-9
    if own_missing:
        assert place[-1] == place.max() and np.sum(place == place[-1]) == 1


def test_residual_tables_correct_a_wrong_table():
    """Totals of y - p at scores that are off by some delta are about n p (1 - p) delta."""
    delta = np.array([0.3, 0.1, 0.0, -0.1, -0.3])
    n = np.full(5, 20_000.0)
    p = expit(logit(0.22) + delta)
    table = tables.residual_table(n * (p - 0.22), counted(p, n), q=0.22, records=100_000, std=0.0)
    assert np.corrcoef(table.values, delta)[0, 1] > 0.99
    silent = tables.residual_table(np.zeros(5), counted(p, n), q=0.22, records=100_000, std=30.0)
    assert not silent.used and not silent.values.any()


def test_scaled_columns_leave_room_below_the_clip():
    information = np.array([0.5, 0.1, 0.01])
    scales = tables.column_scales(information, 1.0)
    assert float(information @ scales**2) == pytest.approx(1 / tables.SLACK)
    assert scales[2] / scales[0] == pytest.approx(50**0.25)


@given(st.floats(0.1, 3), st.integers(0, 1000))
def test_no_row_exceeds_the_clip(clip, seed):
    rows = np.random.default_rng(seed).normal(0, 2, (20, 3))
    found = tables.clipped_rows(rows, clip)
    assert np.linalg.norm(found, axis=1).max() <= clip * (1 + 1e-12)
    short = np.linalg.norm(rows, axis=1) <= clip
    assert np.allclose(found[short], rows[short]) and not tables.clipped_rows(np.zeros((2, 3)), clip).any()


def test_a_fit_finds_the_ridge_optimum():
    generator = np.random.default_rng(7)
    rows = tables.clipped_rows(generator.normal(0, 0.4, (5000, 3)), 1.0)
    labels = (generator.random(5000) < expit(rows @ [1.0, -2.0, 0.0])).astype(float)
    start, pull = np.array([0.5, 0.5, 0.5]), np.array([0.0, 0.01, 0.2])
    fit = PartyFit(start=start, pull=pull, records=5000, totals=600)
    for _ in range(600):
        fit.step(rows.T @ (expit(rows @ fit.weights) - labels))
    gradient = rows.T @ (expit(rows @ fit.result) - labels) / 5000 + pull * (fit.result - start)
    assert np.abs(gradient).max() < 1e-6
    assert fit.result[0] == pytest.approx(1.0, abs=0.3) and fit.result[2] == pytest.approx(0.5, abs=0.15)
    strong = PartyFit(start=start, pull=np.full(3, 100.0), records=5000, totals=40)
    for _ in range(40):
        strong.step(rows.T @ (expit(rows @ strong.weights) - labels))
    assert np.abs(strong.result - start).max() < 1, "a strong pull does not make the steps diverge"


def test_a_fit_stays_within_its_bound_and_averages_the_last_part():
    fit = PartyFit(start=np.zeros(2), pull=np.zeros(2), records=1, totals=3, rate=1.0, momentum=0.0)
    seen = []
    for total in ([1.0, 0.0], [0.0, 1.0], [-1e9, 0.0]):
        fit.step(np.array(total))
        seen.append(fit.weights.copy())
    assert np.linalg.norm(fit.weights) == pytest.approx(16)
    assert fit.result == pytest.approx(np.mean(seen[1:], axis=0))


def test_points_add_up_to_the_score():
    first = tables.BinTable(values=np.array([-1.0, 0.5]), errors=np.array([0.1, 0.2]), information=0.3)
    second = tables.BinTable(values=np.array([0.2, -0.2]), errors=np.array([0.3, 0.1]), information=0.01)
    made = tables.shape([first, second], [0.8, 0.5])
    assert made.values == pytest.approx([-0.7, 0.3]) and made.information == 0.3
    assert made.errors == pytest.approx([math.hypot(0.08, 0.15), math.hypot(0.16, 0.05)])
    constant = -1.2
    total = tables.base_points(constant, pdo=20, base=600, odds=50) + tables.points(made.values, pdo=20)
    odds = np.exp(-(constant + made.values))  # of a negative label
    assert total == pytest.approx(600 + 20 * np.log2(odds / 50))
    assert tables.probability(constant + made.values) == pytest.approx(1 / (1 + odds))
