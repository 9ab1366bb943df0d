"""Private bins: every value has exactly one, and nothing but noisy counts decides where they end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.data.binning import (
    BINS,
    bin_categories,
    bin_numbers,
    grouped_values,
    half_binades,
    noisy_counter,
    number_bins,
)
from securevfl.data.edges import ABOVE_ZERO, REACH, roundest
from securevfl.errors import DataError

STDS = (8.0, 9.0, 9.0)
BOUNDS = st.sampled_from([None, (-10.0, 10.0), (0.0, 1e6)])
values = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-50, 50).map(float),
    st.sampled_from([0.0, -0.0, math.nan]),
)
columns = st.lists(values, min_size=1, max_size=100)


def gaussian(seed):
    generator = np.random.default_rng(seed)
    return lambda counts, std: counts + generator.standard_normal(counts.shape) * std


def none(counts, std):
    return counts


@given(columns, st.integers(0, 2**32), BOUNDS)
@settings(max_examples=60, deadline=None)
def test_every_value_falls_in_exactly_one_bin(column, seed, bounds):
    bins = bin_numbers(np.array(column * 20), gaussian(seed), stds=(2.0, 2.0, 2.0), bounds=bounds)
    assert len(bins.labels) == bins.size == len(bins.edges) + 1 + bins.own_missing
    assert bins.size <= BINS + bins.own_missing
    assert list(bins.edges) == sorted(set(bins.edges))
    ends = [-math.inf, *bins.edges, math.inf]
    for value, place in zip(column, bins.assign(column), strict=True):
        if math.isnan(value):
            assert place == bins.missing
        else:
            inside = [i for i in range(len(ends) - 1) if ends[i] <= value < ends[i + 1]]
            assert [place] == (inside or [len(ends) - 2])  # infinity belongs to the last


@given(columns, st.integers(0, 2**32), BOUNDS)
@settings(max_examples=40, deadline=None)
def test_bins_depend_on_noisy_counts_only(column, seed, bounds):
    """What the counter said, replayed without any data, gives the same bins."""
    asked: list[object] = []
    heard: list[object] = []
    counter = noisy_counter(np.array(column * 20), gaussian(seed), stds=STDS, bounds=bounds)

    def listening(*question):
        asked.append(question)
        heard.append(counter(*question))
        return heard[-1]

    bins = number_bins(listening, records=20 * len(column), stds=STDS, bounds=bounds)
    replay = zip(list(asked), list(heard), strict=True)

    def replaying(*question):
        before, answer = next(replay)
        assert question[0] == before[0] and all(map(np.array_equal, question[1], before[1]))
        return answer

    assert number_bins(replaying, records=20 * len(column), stds=STDS, bounds=bounds) == bins


@given(columns, BOUNDS)
@settings(max_examples=40, deadline=None)
def test_a_record_is_in_one_cell_per_level_at_most(column, bounds):
    """The sensitivity that is accounted: replacing a value moves two cells of each level by one."""
    column = np.array(column * 8)
    counts: list[np.ndarray] = []

    inner = noisy_counter(column, none, stds=STDS, bounds=bounds)
    asked: list[tuple] = []

    def counter(*question):
        asked.append(question)
        counts.append(np.concatenate(inner(*question)))
        return inner(*question)

    number_bins(counter, records=len(column), stds=(0.1, 0.1, 0.1), bounds=bounds)
    for question in asked:
        for value in set(column.tolist()) | {math.nan}:
            alone = noisy_counter([value], none, stds=STDS, bounds=bounds)(*question)
            total = np.concatenate(alone)
            assert set(total.tolist()) <= {0.0, 1.0} and total.sum() <= 1
    assert counts[0].sum() == len(column), "the first level counts everybody, gaps included"


def test_every_level_has_noise_of_its_own_std():
    drawn: list[float] = []

    def noise(counts, std):
        drawn.append(std)
        return counts

    bin_numbers(np.linspace(1000, 1100, 20_000), noise, stds=(1.0, 2.0, 3.0))
    assert drawn == [1.0, 2.0, 3.0]


def test_the_grid_is_public_and_keeps_zero_apart():
    edges = half_binades()
    assert len(edges) == 2 * 124 + 2 and np.all(np.diff(edges) > 0)
    assert {2.0**-14, 1.5, -3.0, 1.5 * 2.0**47} <= set(edges.tolist())
    bins = bin_numbers(np.repeat([0.0, -0.0, 1e-9, -1e-9, np.nan], 1000), none, stds=(1.0, 1.0, 1.0))
    zero, negative_zero, above, below, gap = bins.assign([0.0, -0.0, 1e-9, -1e-9, np.nan])
    assert zero == negative_zero and len({zero, above, below, gap}) == 4


def test_offset_columns_are_resolved_by_three_levels():
    """Years of birth lie within one half binade; without noise every decade has bins of its own."""
    years = np.random.default_rng(0).integers(1930, 2000, 40_000)
    bins = bin_numbers(years, none, stds=(0.01, 0.01, 0.01))
    assert bins.size > 15 and len({*bins.assign(np.arange(1930, 2000, 10))}) == 7


def test_levels_are_reconciled_by_least_squares():
    """Against the normal equations: cells x with counts of their parts and of their sum."""
    generator = np.random.default_rng(3)
    answers = []

    def counter(level, edges, missing):
        made = [generator.uniform(900, 1100, len(e) - 1) if level else np.zeros(len(e) - 1) for e in edges]
        if level == 0:
            made[0][edges[0].searchsorted(1024.0, side="right") - 1] = 20_000.0
            made[0] = np.append(made[0], 0.0)
        answers.append(made)
        return made

    bins = number_bins(counter, records=20_000, stds=(30.0, 20.0, 20.0))
    parts = answers[1][0]
    design, variance = np.vstack([np.ones(16), np.eye(16)]), np.array([30.0**2] + [20.0**2] * 16)
    measured = np.concatenate([[20_000.0], parts])
    solved = np.linalg.solve(design.T / variance @ design, design.T / variance @ measured)
    assert bins.counts == pytest.approx(solved.tolist())


def test_edges_of_whole_numbers_are_whole_and_part_the_same_people():
    counts = np.random.default_rng(1).poisson(1.2, 24_000).astype(float)
    stds = (40.0, 45.0, 45.0)
    bins = bin_numbers(counts, gaussian(2), stds=stds)
    rough = bin_numbers(counts, gaussian(2), stds=stds, readable=False)
    assert all(edge == int(edge) for edge in bins.edges) and not all(e == int(e) for e in rough.edges)
    assert {1.0, 2.0, 3.0} <= set(bins.edges)
    placed = [each.assign(np.arange(6.0)).tolist() for each in (bins, rough)]
    assert [np.diff(places).astype(bool).tolist() for places in placed] == [[True] * 5] * 2
    assert sum(bins.counts) == pytest.approx(sum(rough.counts))


def test_other_edges_are_round_and_hardly_move():
    shares = np.random.default_rng(1).beta(2, 5, 24_000)
    bins, rough = (
        bin_numbers(shares, gaussian(2), stds=(40.0, 45.0, 45.0), readable=readable)
        for readable in (True, False)
    )
    assert len(bins.edges) == len(rough.edges) and bins.counts == rough.counts
    widths = np.diff([-math.inf, *rough.edges, math.inf])
    for i, (edge, before) in enumerate(zip(bins.edges, rough.edges, strict=True)):
        reach = REACH * min(widths[i], widths[i + 1], abs(before))
        assert abs(edge - before) <= reach * (1 + 1e-6)
        round_ = float(f"{edge:.6g}")  # what a file says; rows are held in 32 bits
        assert edge <= round_ and edge <= float(np.float32(round_)), "a cell at the edge lies above it"
    digits = [len(f"{edge:.6g}".lstrip("0.-").replace(".", "")) for edge in bins.edges]
    assert np.mean(digits) <= 3 < np.mean([len(f"{e:.6g}".lstrip("0.-")) for e in rough.edges])


def test_zero_stays_apart_from_small_numbers():
    column = np.concatenate([np.zeros(5000), np.random.default_rng(0).gamma(1, 0.4, 15_000)])
    edges = bin_numbers(column, gaussian(1), stds=(40.0, 45.0, 45.0)).edges
    assert {0.0, ABOVE_ZERO} & set(edges) and 0.0 not in edges[edges.index(ABOVE_ZERO) + 1 :]


@pytest.mark.parametrize(
    ("low", "high", "near", "found"),
    [
        (26.5, 27.4, 26.97, 27.0),
        (786, 846, 816, 800.0),
        (0.105, 0.125, 0.116, 0.12),
        (-3.1, -2.9, -3.0, -3.0),
    ],
)
def test_the_roundest_number_is_the_one_of_fewest_digits(low, high, near, found):
    assert roundest(low, high, near) == found


def test_heavy_values_are_alone_and_small_bins_are_merged():
    column = np.concatenate([np.zeros(5000), np.full(3000, 7.0), np.linspace(10, 20, 2000)])
    bins = bin_numbers(column, none, stds=(0.01, 0.01, 0.01))
    zero, seven = bins.assign([0.0, 7.0])
    assert bins.counts[zero] == pytest.approx(5000) and bins.counts[seven] == pytest.approx(3000)
    assert min(bins.counts) >= 0.002 * len(column) and sum(bins.counts) == pytest.approx(len(column))


@pytest.mark.parametrize(("gaps", "own"), [(20, False), (30, True)])
def test_missing_values_have_a_bin_only_if_there_are_enough(gaps, own):
    """More than N/400 = 25."""
    column = np.concatenate([np.full(gaps, np.nan), np.linspace(1, 2, 10_000 - gaps)])
    bins = bin_numbers(column, none, stds=(1.0, 1.0, 1.0))
    assert bins.own_missing is own
    assert bins.assign([np.nan])[0] == (bins.size - 1 if own else np.argmax(bins.counts))


def test_category_lists_come_from_the_description():
    def refuse(counts, std):
        raise AssertionError("short lists are not counted")

    bins = bin_categories([], ["clerk", "manager", "other"], refuse, std=1.0)
    assert bins.labels == ["clerk", "manager", "other"]
    assert bins.assign(["manager", " clerk", "king", "", "other"]).tolist() == [1, 0, 2, 2, 2]
    hashed = bin_categories([], None, refuse, std=1.0)
    places = hashed.assign([f"city {i}" for i in range(1000)] + [""])
    assert hashed.size == 65 and len(set(places[:-1].tolist())) == 64 and places[-1] == 64


def test_long_lists_are_counted_once_and_rare_values_go_with_other():
    named = [f"v{i}" for i in range(100)]
    column = ["v3"] * 500 + ["v70"] * 400 + named
    drawn = []

    def noise(counts, std):
        drawn.append((counts.shape, std))
        return counts

    bins = bin_categories(column, named, noise, std=5.0)
    assert drawn == [((101,), 5.0)]
    assert bins.labels == ["v3", "v70", "other"]
    assert bins.assign(["v70", "v3", "v4", "unknown"]).tolist() == [1, 0, 2, 2]


@given(st.lists(st.floats(-50, 500), min_size=65, max_size=120), st.floats(0.1, 30))
def test_grouped_values_are_significant(counts, std):
    groups = grouped_values(np.array(counts), records=1000, std=std)
    assert len(groups) == len(counts) + 1 and groups[-1] == max(groups) <= 64
    assert all(c >= 3 * std for c, g in zip(counts, groups, strict=False) if g < groups[-1])


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf)])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(DataError, match="bounds"):
        bin_numbers([1.0, 2.0], none, stds=STDS, bounds=bounds)


@pytest.mark.parametrize("named", [["a", "a"], [], ["other"]])
def test_lists_that_make_no_sense_are_refused(named):
    with pytest.raises(DataError, match="list"):
        bin_categories(["a"], named, none, std=1.0)
