"""Events to and from dp-accounting's `DpEvent`, and import of Opacus-style histories.

dp-accounting speaks of a noise multiplier, that is sigma over the clip norm. Under replace-one the
sensitivity is twice the clip norm, so the multiplier is 2 sigma / sensitivity there and sigma /
sensitivity otherwise; which relation is meant is not part of a `DpEvent` and must go along.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from securevfl.accountants import checks
from securevfl.accountants.base import reduce_events
from securevfl.accountants.events import (
    ADJACENCIES,
    Adjacency,
    DPUpdate,
    Event,
    ExactRelease,
    GaussianRelease,
    RandomisedResponse,
)
from securevfl.errors import AccountingError, needed


def to_dp_event(events: Event | Iterable[Event]) -> Any:
    """Return the events as one `dp_accounting.DpEvent`.

    Use it with the neighbouring relation that matches the events' adjacency: ADD_OR_REMOVE_ONE,
    REPLACE_ONE or REPLACE_SPECIAL (replace-by-null). Hidden values become `NoOpDpEvent`.
    """
    dp_event = needed("dp_accounting.dp_event")

    items = [events] if not isinstance(events, Iterable) else list(events)
    reduce_events(items)  # refuses mixed adjacencies
    return dp_event.ComposedDpEvent([_to_dp_event(item) for item in items])


def from_dp_event(
    event: Any, *, adjacency: Adjacency = "add-remove", clip: float = 1.0, ids_visible: bool = True
) -> list[Event]:
    """Return a `dp_accounting.DpEvent` as events.

    Args:
        event: Gaussian, Poisson-sampled Gaussian, randomised response, no-op, non-private, and compositions.
        adjacency: The relation under which the event was meant.
        clip: Clip norm that the noise multiplier refers to.
        ids_visible: Whether the observer knows the record IDs; Poisson sampling is then refused.

    Raises:
        AmplificationRefused: The event is sampled although the IDs are visible.
        AccountingError: The event is of a kind that has no counterpart here.
    """
    dp_event = needed("dp_accounting.dp_event")

    checks.choice("adjacency", adjacency, ADJACENCIES)
    return _from_dp_event(dp_event, event, 1, adjacency, checks.positive("clip", clip), ids_visible)


def from_opacus_history(
    history: Sequence[tuple[float, float, int]],
    *,
    clip: float = 1.0,
    ids_visible: bool = True,
    adjacency: Adjacency = "add-remove",
) -> list[GaussianRelease]:
    """Return the history of an Opacus accountant, (noise multiplier, sample rate, steps), as events.

    Raises:
        AmplificationRefused: A sample rate is below 1 and the caller has not stated `ids_visible=False`.
    """
    scale = 2.0 if adjacency == "replace-one" else 1.0
    events = []
    for entry in history:
        try:
            multiplier, rate, steps = entry
        except (TypeError, ValueError):
            raise AccountingError(f"{entry!r} is no (noise multiplier, sample rate, steps)") from None
        events.append(
            GaussianRelease(
                sigma=checks.positive("noise multiplier", multiplier) * checks.positive("clip", clip),
                sensitivity=scale * clip,
                count=steps,
                sampling_rate=rate,
                ids_visible=ids_visible,
                adjacency=adjacency,
            )
        )
    return events


def _to_dp_event(item: Event) -> Any:
    dp_event = needed("dp_accounting.dp_event")

    single: Any
    if isinstance(item, GaussianRelease | DPUpdate):
        scale = 2.0 if item.adjacency == "replace-one" else 1.0
        single = dp_event.GaussianDpEvent(scale * item.sigma / item.sensitivity)
        if isinstance(item, GaussianRelease) and item.sampling_rate < 1:
            single = dp_event.PoissonSampledDpEvent(item.sampling_rate, single)
    elif isinstance(item, RandomisedResponse):
        # There a label is replaced, with this probability, by a uniform one that may be the same.
        replaced = (1 - float(item.keep_probability or 0.0)) * item.classes / (item.classes - 1)
        if replaced > 1:
            raise AccountingError("keep_probability is below 1/classes, for which DpEvent has no form")
        # Listed one by one: PLDAccountant of dp-accounting 0.6 ignores the count of a repeated response.
        return dp_event.ComposedDpEvent(
            [dp_event.RandomizedResponseDpEvent(replaced, item.classes)] * item.count
        )
    elif isinstance(item, ExactRelease):
        single = dp_event.NonPrivateDpEvent()
    else:
        return dp_event.NoOpDpEvent()
    return dp_event.SelfComposedDpEvent(single, item.count) if item.count else dp_event.NoOpDpEvent()


def _from_dp_event(
    kinds: Any, event: Any, count: int, adjacency: Adjacency, clip: float, visible: bool
) -> list[Event]:
    if isinstance(event, kinds.SelfComposedDpEvent):
        return _from_dp_event(kinds, event.event, count * event.count, adjacency, clip, visible)
    if isinstance(event, kinds.ComposedDpEvent):
        parts = [_from_dp_event(kinds, part, count, adjacency, clip, visible) for part in event.events]
        return [item for part in parts for item in part]
    if isinstance(event, kinds.NoOpDpEvent):
        return []
    if isinstance(event, kinds.NonPrivateDpEvent):
        return [ExactRelease(count=count)]
    if isinstance(event, kinds.RandomizedResponseDpEvent):
        keep = 1 - event.noise_parameter * (event.num_buckets - 1) / event.num_buckets
        return [RandomisedResponse(keep_probability=keep, classes=event.num_buckets, count=count)]
    rate, inner = 1.0, event
    if isinstance(event, kinds.PoissonSampledDpEvent):
        rate, inner = event.sampling_probability, event.event
    if not isinstance(inner, kinds.GaussianDpEvent):
        raise AccountingError(f"{event!r} has no counterpart; expected Gaussian or randomised response")
    if inner.noise_multiplier == 0:
        return [ExactRelease(count=count)]
    return [
        GaussianRelease(
            sigma=inner.noise_multiplier * clip,
            sensitivity=clip * (2 if adjacency == "replace-one" else 1),
            count=count,
            sampling_rate=rate,
            ids_visible=visible,
            adjacency=adjacency,
        )
    ]
