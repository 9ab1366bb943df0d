"""The findings in tables and words: what each way keeps at an epsilon, what settings really promise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from securevfl.sweeps.charts import number
from securevfl.sweeps.summary import BASELINES, Group, kept, reference

Table = tuple[str, list[str], list[list[str]]]


def kept_table(groups: Sequence[Group]) -> Table | None:
    """Utility by way of training and promised epsilon, between the two baselines; None without targets."""
    targets, ways = kept(groups)
    if not targets:
        return None
    metric = next(iter(next(iter(ways.values())).values())).metric
    head = ["way of training", *(f"ε = {target:g}" for target in targets)]
    rows = [[name, *(_mean(way.get(target), groups) for target in targets)] for name, way in ways.items()]
    for algorithm, text in BASELINES.items():
        found = reference(groups, algorithm)
        if found is not None:
            rows.append([text, *[_plain(found)] * len(targets)])
    caption = f"Test {metric}: mean ± half of the 95 % interval over seeds"
    if _gap(groups):
        caption += "; in brackets how much of the way from the label holder alone to all features is kept"
    return caption, head, rows


def _plain(group: Group | None) -> str:
    if group is None or group.mean is None or group.high is None:
        return "–"
    half = max(group.high - group.mean, group.mean - (group.low or 0.0))
    return f"{group.mean:.3f}" + (f" ± {half:.3f}" if half else "")


def _mean(group: Group | None, groups: Sequence[Group]) -> str:
    text = _plain(group)
    ends = _gap(groups)
    if group is None or group.mean is None or not ends:
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
    found = []
    targets, ways = kept(groups)
    for target in targets:
        at = [
            (name, way[target])
            for name, way in ways.items()
            if target in way and way[target].mean is not None
        ]
        if at:
            name, best = max(at, key=lambda pair: pair[1].mean or 0.0)
            found.append(f"At epsilon {target:g}, {name} keeps most: {best.metric} {_mean(best, groups)}.")
    alone = reference(groups, "local")
    if alone is not None and alone.mean is not None and targets:
        # Only a whole interval above the baseline counts as better.
        better = {g.series for way in ways.values() for g in way.values() if (g.low or 0.0) > alone.mean}
        if not better:
            found.append("No way of training beats the label holder alone at these epsilons.")
        else:
            found.append(f"Better than the label holder alone at some epsilon: {', '.join(sorted(better))}.")
    broken = [
        g for g in groups if g.claimed is not None and math.isfinite(g.epsilon) and g.claimed < g.epsilon
    ]
    for g in broken:
        found.append(
            f"{g.series} with sigma {g.first['sigma']:g} would claim epsilon {number(g.claimed)}; "
            f"what holds is {number(g.epsilon)}."
        )
    return found
