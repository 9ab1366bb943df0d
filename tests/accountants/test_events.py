"""Events check themselves on construction and stay as they are."""

import dataclasses
import math

import numpy as np
import pytest

from securevfl.accountants import (
    DPUpdate,
    EncryptedRelease,
    ExactRelease,
    GaussianRelease,
    MaskedRelease,
    RandomisedResponse,
)
from securevfl.errors import AccountingError, AmplificationRefused


def test_defaults_are_the_published_ones():
    event = GaussianRelease(sigma=2, sensitivity=1)
    assert (event.count, event.sampling_rate, event.ids_visible, event.adjacency) == (
        1,
        1.0,
        True,
        "add-remove",
    )
    assert event.mu == 0.5


def test_events_are_frozen_and_keyword_only():
    event = GaussianRelease(sigma=2, sensitivity=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.sigma = 0.1
    with pytest.raises(TypeError):
        GaussianRelease(2, 1)


def test_sampling_with_visible_ids_is_refused():
    with pytest.raises(AmplificationRefused, match="record IDs"):
        GaussianRelease(sigma=1, sensitivity=1, sampling_rate=0.01)
    hidden = GaussianRelease(sigma=1, sensitivity=1, sampling_rate=0.01, ids_visible=False)
    assert hidden.sampling_rate == 0.01


@pytest.mark.parametrize(
    "fields",
    [
        {"sigma": 0},
        {"sigma": -1},
        {"sigma": math.inf},
        {"sigma": math.nan},
        {"sigma": "1"},
        {"sigma": True},
        {"sensitivity": 0},
        {"sensitivity": math.inf},
        {"count": -1},
        {"count": 1.5},
        {"count": True},
        {"count": "3"},
        {"sampling_rate": 0},
        {"sampling_rate": 1.5},
        {"ids_visible": 1},
        {"adjacency": "replace"},
        {"adjacency": None},
    ],
)
def test_bad_fields_are_refused(fields):
    with pytest.raises(AccountingError, match=next(iter(fields))):
        GaussianRelease(**{"sigma": 1.0, "sensitivity": 1.0, **fields})


def test_numpy_numbers_are_numbers():
    event = GaussianRelease(sigma=np.float32(2), sensitivity=np.float64(1), count=np.int64(3))
    assert event.count == 3
    assert isinstance(event.sigma, float)


@pytest.mark.parametrize(
    ("adjacency", "reach"), [("replace-one", 2), ("add-remove", 1), ("replace-by-null", 1)]
)
def test_update_sensitivity_follows_adjacency(adjacency, reach):
    assert DPUpdate(clip=1, sigma=4, adjacency=adjacency).sensitivity == reach


def test_update_refuses_raw_gradients():
    with pytest.raises(AccountingError, match="strict"):
        DPUpdate(clip=1, sigma=0)


def test_randomised_response_converts_both_ways():
    by_epsilon = RandomisedResponse(epsilon=2.0, classes=5)
    assert by_epsilon.keep_probability == pytest.approx(math.exp(2) / (math.exp(2) + 4))
    back = RandomisedResponse(keep_probability=by_epsilon.keep_probability, classes=5)
    assert back.epsilon == pytest.approx(2.0)


def test_keeping_too_rarely_tells_as_much():
    assert RandomisedResponse(keep_probability=0.1).epsilon == pytest.approx(
        RandomisedResponse(keep_probability=0.9).epsilon
    )
    assert RandomisedResponse(keep_probability=1.0).epsilon == math.inf
    assert RandomisedResponse(keep_probability=0.25, classes=4).epsilon == pytest.approx(0.0)


@pytest.mark.parametrize(
    "fields", [{}, {"epsilon": 1, "keep_probability": 0.9}, {"epsilon": -1}, {"epsilon": 1, "classes": 1}]
)
def test_randomised_response_refuses(fields):
    with pytest.raises(AccountingError):
        RandomisedResponse(**fields)


def test_hidden_values_need_an_assumption():
    for kind in (MaskedRelease, EncryptedRelease):
        assert kind().assumption
        with pytest.raises(AccountingError, match="assumption"):
            kind(assumption=" ")


def test_counts_of_exact_and_hidden_events():
    for kind in (ExactRelease, MaskedRelease, EncryptedRelease):
        with pytest.raises(AccountingError, match="count"):
            kind(count=-1)
