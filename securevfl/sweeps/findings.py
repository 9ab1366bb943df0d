"""The findings in tables and words: what each way keeps at an epsilon, what settings really promise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from securevfl.sweeps.charts import number
from securevfl.sweeps.summary import BASELINES, Group, kept, reference

Table = tuple[str, list[str], list[list[str]]]


def kept_table(groups: Sequence[Group], *, shares: bool = True) -> Table | None:
    """Utility by way of training and promised epsilon, and of the two baselines; None without targets.

    Args:
        groups: The groups of one data set.
        shares: Add how much of the way between the baselines is kept.
    """
    targets, ways = kept(groups)
    if not targets:
        return None
    metric = next(iter(next(iter(ways.values())).values())).metric
    ends = _gap(groups) if shares else None
    rows = [[name, *(_mean(way.get(target), ends) for target in targets)] for name, way in ways.items()]
    for algorithm, text in BASELINES.items():
        found = reference(groups, algorithm)
        if found is not None:
            rows.append([text, *[_plain(found)] * len(targets)])
    caption = f"Test {metric}: mean ± half of the 95 % interval over seeds"
    if ends:
        caption += "; in brackets how much of the way from the label holder alone to all features is kept"
    return caption, ["way of training", *(f"ε = {target:g}" for target in targets)], rows


def _plain(group: Group | None) -> str:
    if group is None or group.mean is None or group.high is None:
        return "–"
    half = max(group.high - group.mean, group.mean - (group.low or 0.0))
    return f"{group.mean:.3f}" + (f" ± {half:.3f}" if half else "")


def _mean(group: Group | None, ends: tuple[float, float] | None) -> str:
    text = _plain(group)
    if group is None or group.mean is None or ends is None:
        return text
    return f"{text} ({max(0.0, (group.mean - ends[0]) / (ends[1] - ends[0])):.0%})"


def _gap(groups: Sequence[Group]) -> tuple[float, float] | None:
    """Utility of the label holder alone and of all features, where the latter is clearly better."""
    alone, everything = reference(groups, "local"), reference(groups, "central")
    if alone is None or everything is None or alone.mean is None or everything.mean is None:
        return None
    return (alone.mean, everything.mean) if everything.mean - alone.mean > 1e-3 else None


def promise_table(groups: Sequence[Group]) -> Table | None:
    """What settings with a given noise claim, promise and were measured at; None if there are none."""
    published = [g for g in groups if not g.target and g.first["algorithm"] not in BASELINES]
    if not published:
        return None
    head = ["setting", "sigma", "utility", "claimed ε", "sound ε", "measured ε ≥", "labels ε"]
    rows = [
        [
            g.series,
            f"{g.first['sigma']:g}",
            _plain(g),
            number(g.claimed),
            number(g.epsilon),
            number(g.measured),
            number(g.first["label_epsilon"]),
        ]
        for g in published
    ]
    return "Settings with a given noise: what they really promise", head, rows


def sentences(groups: Sequence[Group]) -> list[str]:
    """The findings in words."""
    targets, ways = kept(groups)
    alone = reference(groups, "local")
    found = []
    for target in targets:
        at = [way[target] for way in ways.values() if target in way and way[target].mean is not None]
        if at:
            found.append(_best_at(target, max(at, key=lambda group: group.mean or 0.0), alone, groups))
    for group in groups:
        published = not group.target and group.claimed is not None and math.isfinite(group.epsilon)
        if published and (group.claimed or 0.0) < group.epsilon:
            found.append(
                f"{group.series}, sigma {group.first['sigma']:g}: the paper would claim epsilon "
                f"{number(group.claimed)}; what holds is {number(group.epsilon)}."
            )
    return found


def _best_at(target: float, best: Group, alone: Group | None, groups: Sequence[Group]) -> str:
    """Who keeps most at an epsilon, and whether that is clearly better than the label holder alone."""
    start, most = (
        f"At epsilon {target:g}",
        f"{best.series} keeps most: {best.metric} {_mean(best, _gap(groups))}",
    )
    text = f"{start}, {most}"
    if alone is None or alone.mean is None:
        return f"{text}."
    # Only a whole interval above the baseline counts as better.
    if (best.low or 0.0) > alone.mean:
        return f"{text}; better than the label holder alone ({alone.mean:.3f})."
    if (best.mean or 0.0) > alone.mean:
        return f"{text}; not clearly better than the label holder alone ({alone.mean:.3f})."
    return f"{start} nothing beats the label holder alone ({alone.mean:.3f}); {most}."
