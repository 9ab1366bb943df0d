"""Sine series: accuracy, range over the whole period, refusal of what overshoots, and the integer table."""

import mpmath
import numpy as np
import pytest

from securevfl.errors import InputError
from securevfl.protocols.sealed import SineSeries, identity_series, logistic_series
from securevfl.protocols.sealed.series import sine_table


def test_the_logistic_series_follows_the_logistic_function_up_to_a_score_of_18():
    scores = np.linspace(-18, 18, 20001)
    assert np.abs(logistic_series()(scores) - 1 / (1 + np.exp(-scores))).max() < 0.0045
    low, high = logistic_series().range
    assert low > -0.002 and high < 1.002


def test_the_identity_series_follows_the_identity_and_turns_back():
    series = identity_series(period=6.0)
    scores = np.linspace(-1.2, 1.2, 4001)
    assert np.abs(series(scores) - scores).max() < 0.02
    assert series.range[1] < 1.5


@pytest.mark.parametrize("series", [logistic_series(), identity_series(), identity_series(period=6.0)])
def test_the_range_holds_for_every_score(series):
    low, high = series.range
    values = series(np.random.default_rng(0).uniform(-1000, 1000, 200_000))
    assert low <= values.min() and values.max() <= high
    assert high - values.max() < 1e-3  # and is not generous


def test_a_series_that_overshoots_is_refused():
    # All harmonics fitted on a part of the period run wild in the rest; so do these coefficients.
    with pytest.raises(InputError, match="ranges over"):
        SineSeries(40.0, (0.9, 0.4, 0.2), 0.5, 0.0, 1.0)
    with pytest.raises(InputError, match="harmonics"):
        logistic_series(period=400.0, harmonics=0)


def test_the_table_is_the_rounded_sine_exactly():
    table = sine_table().view(np.int64)
    with mpmath.workdps(40):
        for index in [0, 1, 2, 9999, 2**14 - 1, 2**14, 2**14 + 1, 2**15, 2**15 + 77, 2**16 - 1]:
            assert table[index] == int(mpmath.nint(mpmath.sin(2 * mpmath.pi * index / 2**16) * 2**14))
    assert np.abs(table - 2**14 * np.sin(np.arange(2**16) * (2 * np.pi / 2**16))).max() <= 0.5 + 1e-9
    assert np.array_equal(table[2**15 :], -table[: 2**15])
