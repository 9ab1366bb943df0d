"""Checks every point of a sweep against its data before the first one runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from securevfl.errors import PlanError, SecureVFLError
from securevfl.sweeps.results import varied_fields
from securevfl.sweeps.spec import Point, Sweep

_NAMED = 5  # impossible points that an error names; more would fill the screen


def impossible_points(sweep: Sweep) -> dict[str, str]:
    """Why points cannot run, by id: they contradict themselves, or do not fit their data.

    Points that differ by nothing but their seed fit or fail together, so one of them is tried.
    """
    from securevfl.algorithms.resolve import resolve
    from securevfl.sweeps.work import planned_data

    known: dict[str, str] = {}
    found: dict[str, str] = {}
    for point in sweep.points:
        shared = json.dumps({k: v for k, v in point.fields.items() if k != "seed"}, default=list)
        if point.error:
            found[point.id] = point.error
            continue
        if shared not in known:
            known[shared] = ""
            try:
                plan = point.plan()
                plan.check_protection()
                resolve(plan, planned_data(plan.source, plan.seed))
            except SecureVFLError as error:
                known[shared] = str(error)
        if known[shared]:
            found[point.id] = known[shared]
    return found


def without_impossible(sweep: Sweep, *, skip: bool) -> Sweep:
    """The sweep, every point of which can run.

    Args:
        sweep: The sweep.
        skip: Leave out what cannot run instead of refusing the whole.

    Raises:
        PlanError: Points cannot run and shall not be left out, or none can.
    """
    found = impossible_points(sweep)
    if not found:
        return sweep
    possible = tuple(point for point in sweep.points if point.id not in found)
    if skip and possible:
        return replace(sweep, points=possible, left_out=len(found))
    told = [
        f"point {point.number} ({describe(sweep, point)}): {found[point.id]}"
        for point in sweep.points
        if point.id in found
    ]
    more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    advice = "; take them out, or leave them out with --skip-impossible" if possible else ""
    raise PlanError(
        f"{len(found)} of {len(sweep.points)} points cannot run, and none was started: "
        f"{'; '.join(told[:_NAMED])}{more}{advice}"
    )


def describe(sweep: Sweep, point: Point) -> str:
    """What tells a point from the others, in words."""
    values: Mapping[str, object] = point.values
    varied = [f"{name} {values[name]}" for name in varied_fields(sweep.points)]
    return ", ".join([point.label] * bool(point.label) + varied) or str(values["algorithm"])
