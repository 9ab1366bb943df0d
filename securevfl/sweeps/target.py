"""The time to target: when a run first reached a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.sweeps.spec import Target


def settled(target: Target, records: Sequence[Mapping[str, Any]]) -> Target:
    """The target with its value; if the sweep names none, one tenth above the lowest loss of the records.

    Only records with a virtual time count: the baselines are not in the race.
    """
    if target.value is not None:
        return target
    losses = [
        line["loss"]
        for record in records
        if record.get("virtual_time")
        for line in record["curve"]
        if line["loss"] is not None
    ]
    return Target(metric="loss", value=1.1 * min(losses)) if losses else target


def time_to_target(record: Mapping[str, Any], target: Target) -> float | None:
    """Virtual time at the end of the first epoch that reached the target; None if none did."""
    if target.value is None:
        return None
    for line in record.get("curve", ()):
        value = line["loss"] if target.metric == "loss" else line["test"].get(target.metric)
        if value is not None and (
            value <= target.value if target.metric == "loss" else value >= target.value
        ):
            return float(line["time"])
    return None
