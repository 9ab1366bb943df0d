"""Events survive dp-accounting and back, and mean the same there."""

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant as LibraryPLD
from dp_accounting.rdp import RdpAccountant

from securevfl.accountants import (
    DPUpdate,
    ExactRelease,
    GaussianRelease,
    MaskedRelease,
    MomentsAccountant,
    PLDAccountant,
    RandomisedResponse,
    best_upper_bound,
    from_dp_event,
    from_opacus_history,
    to_dp_event,
)
from securevfl.errors import AccountingError, AmplificationRefused

RELATIONS = {
    "add-remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "replace-by-null": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}


def release(adjacency, rate=1.0, count=30):
    return GaussianRelease(
        sigma=12.0,
        sensitivity=2.0,
        count=count,
        sampling_rate=rate,
        ids_visible=rate == 1,
        adjacency=adjacency,
    )


@pytest.mark.parametrize("rate", [1.0, 0.05])
@pytest.mark.parametrize("adjacency", sorted(RELATIONS))
def test_the_library_gets_the_same_figure(adjacency, rate):
    event = release(adjacency, rate)
    library = LibraryPLD(RELATIONS[adjacency])
    library.compose(to_dp_event([event]))
    # Both discretise pessimistically at 1e-4.
    assert library.get_epsilon(1e-5) == pytest.approx(PLDAccountant().epsilon(event, 1e-5), abs=2e-4)


def test_the_library_gets_the_same_moments():
    event = release("add-remove", 0.05)
    orders = list(range(2, 64))
    library = RdpAccountant(orders)
    library.compose(to_dp_event(event))
    assert library.get_epsilon(1e-5) == pytest.approx(
        MomentsAccountant(orders).epsilon(event, 1e-5), rel=1e-9
    )


def test_responses_mean_the_same():
    event = RandomisedResponse(epsilon=0.7, classes=5, count=15)
    library = LibraryPLD(RELATIONS["replace-one"])
    library.compose(to_dp_event(event))
    assert library.get_epsilon(1e-5) == pytest.approx(PLDAccountant().epsilon(event, 1e-5), abs=2e-3)
    moments = RdpAccountant([3.0, 9.0], RELATIONS["replace-one"])
    moments.compose(to_dp_event(event))
    assert moments.get_epsilon(1e-5) == pytest.approx(
        MomentsAccountant([3.0, 9.0]).epsilon(event, 1e-5), rel=1e-9
    )


@pytest.mark.parametrize("adjacency", sorted(RELATIONS))
def test_round_trip_keeps_the_figure(adjacency):
    events = [release(adjacency), release(adjacency, 0.05, 7), MaskedRelease()]
    back = from_dp_event(to_dp_event(events), adjacency=adjacency, ids_visible=False)
    assert best_upper_bound(back, 1e-5).epsilon == pytest.approx(
        best_upper_bound(events, 1e-5).epsilon, rel=1e-12
    )
    assert [event.count for event in back] == [30, 7]


def test_round_trip_of_everything_else():
    events = [
        DPUpdate(clip=1, sigma=2, count=4),
        RandomisedResponse(epsilon=1.0, classes=3),
        ExactRelease(count=2),
    ]
    back = from_dp_event(to_dp_event(events), adjacency="replace-one")
    assert back[0] == GaussianRelease(sigma=2, sensitivity=2, count=4, adjacency="replace-one")
    assert back[1].epsilon == pytest.approx(1.0)
    assert back[2] == ExactRelease(count=2)
    assert from_dp_event(dp_accounting.GaussianDpEvent(0.0)) == [ExactRelease()]


def test_import_refuses_amplification_unless_ids_are_hidden():
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(AmplificationRefused):
        from_dp_event(event)
    history = [(1.1, 0.004, 14_000)]
    with pytest.raises(AmplificationRefused):
        from_opacus_history(history)
    events = from_opacus_history(history, ids_visible=False)
    assert best_upper_bound(events, 1e-5).epsilon == pytest.approx(2.2104, abs=1e-3)


def test_opacus_history_scales_with_the_adjacency():
    (event,) = from_opacus_history([(2.0, 1.0, 3)], clip=0.5, adjacency="replace-one")
    assert (event.sigma, event.sensitivity, event.count) == (1.0, 1.0, 3)


@pytest.mark.parametrize("history", [[(1.0, 0.5)], [3], [(0.0, 1.0, 1)], [(1.0, 1.0, 1.5)]])
def test_bad_history_is_refused(history):
    with pytest.raises(AccountingError):
        from_opacus_history(history, ids_visible=False)


def test_events_without_counterpart_are_refused():
    with pytest.raises(AccountingError, match="Laplace"):
        from_dp_event(dp_accounting.LaplaceDpEvent(1.0))
    with pytest.raises(AccountingError, match="1/classes"):
        to_dp_event(RandomisedResponse(keep_probability=0.1, classes=4))
    with pytest.raises(AccountingError, match="adjacencies"):
        to_dp_event([release("add-remove"), release("replace-one")])
