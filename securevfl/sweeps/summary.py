"""From rows to findings: means over seeds with intervals, the Pareto line, what each way keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from securevfl.pages import number
from securevfl.settings.source import shown_data
from securevfl.sweeps.records import OK
from securevfl.sweeps.results import Results, Row

MAIN_METRICS = ("auc", "r2", "accuracy")
TextTable = tuple[str, list[str], list[list[str]]]
"""Caption, head and rows."""
LEAST_SEEDS = 3
BASELINES = {"local": "label holder alone", "central": "all features in one place"}
# What is not a difference between ways of training, only between points of one way.
_SAME_WAY = ("seed", "epsilon", "sigma", "gradient_sigma", "data_folder", "record_views")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Points that differ in nothing but the seed.

    Attributes:
        series: The way of training it belongs to.
        rows: Its rows.
        metric: The test metric that counts for the task.
        mean: Its mean over seeds; None where no run was evaluated.
        low: Lower end of the 95 % interval of the mean (Student); None with fewer than three seeds.
        high: Upper end, likewise.
        epsilon: Sound epsilon, the largest of all seeds.
        claimed: What the paper would claim, likewise.
        measured: Certified lower bound, likewise.
        target: The epsilon that the plan asked for, if it did.
    """

    series: str
    rows: tuple[Row, ...]
    metric: str
    mean: float | None
    low: float | None
    high: float | None
    epsilon: float
    claimed: float | None
    measured: float | None
    target: float | None

    @property
    def first(self) -> Row:
        """The first row, for what all rows share."""
        return self.rows[0]


def groups_of(results: Results) -> list[Group]:
    """The finished points by plan without seed, in the order of the sweep."""
    fields = {point.id: point.fields for point in results.sweep.points}
    found: dict[str, list[Row]] = {}
    for row in results.finished:
        shared = {
            k: v for k, v in fields[row["id"]].items() if k not in ("seed", "data_folder", "record_views")
        }
        found.setdefault(json.dumps([row["label"], shared], sort_keys=True, default=list), []).append(row)
    names = _series_names(results)
    return [_group(names[rows[0]["id"]], rows) for rows in found.values()]


def _group(series: str, rows: list[Row]) -> Group:
    metric = main_metric(rows)
    mean, low, high = interval([row[metric] for row in rows if row[metric] is not None])
    return Group(
        series=series,
        rows=tuple(rows),
        metric=metric,
        mean=mean,
        low=low,
        high=high,
        epsilon=max(
            (row["sound_epsilon"] for row in rows if row["sound_epsilon"] is not None), default=math.inf
        ),
        claimed=_most(rows, "claimed_epsilon"),
        measured=_most(rows, "measured_epsilon"),
        target=rows[0]["target_epsilon"],
    )


def _most(rows: Iterable[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return max(known) if known else None


def main_metric(rows: Sequence[Row]) -> str:
    """The metric that counts: AUC where there is one, R2 for regression, else accuracy."""
    return next((name for name in MAIN_METRICS if any(row[name] is not None for row in rows)), "accuracy")


def interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean and 95 % Student interval of the mean.

    Two values have an interval six times as wide as they lie apart, which tells nobody anything: fewer than
    `LEAST_SEEDS` have none.
    """
    if not values:
        return None, None, None
    mean = math.fsum(values) / len(values)
    if len(values) < LEAST_SEEDS:
        return mean, None, None
    from scipy.special import stdtrit  # a sweep file with a wrong name is told without it

    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = float(stdtrit(len(values) - 1, 0.975)) * spread / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _series_names(results: Results) -> dict[str, str]:
    """Point id -> name of its way of training: its label, or what tells it from the others."""
    fields = {point.id: point.fields for point in results.sweep.points}
    rows = results.finished
    others = sorted({k for f in fields.values() for k in f} - {*_SAME_WAY, "algorithm", "protocol", "data"})
    others = [k for k in others if len({json.dumps(f.get(k), default=list) for f in fields.values()}) > 1]
    names = {}
    for row in rows:
        plan: Mapping[str, Any] = fields[row["id"]]
        parts = [
            row["algorithm"],
            *([] if row["protocol"] == "plain" else [row["protocol"]]),
            *([] if row["mode"] == row["algorithm"] else [str(row["mode"])]),
        ]
        parts += [f"{k} {plan[k]}" for k in others if k in plan and k != "encoder_training"]
        names[row["id"]] = row["label"] or BASELINES.get(row["algorithm"]) or ", ".join(parts)
    # A label that stands for several algorithms or protocols needs their names too.
    for place in ("algorithm", "protocol"):
        for label in {row["label"] for row in rows if row["label"]}:
            mine = [row for row in rows if row["label"] == label]
            if len({row[place] for row in mine}) > 1:
                names |= {row["id"]: f"{names[row['id']]}, {row[place]}" for row in mine}
    return names


def pareto(groups: Sequence[Group]) -> list[Group]:
    """The groups that no other group beats both in epsilon and in utility, from strong to weak protection."""
    line: list[Group] = []
    for group in sorted(
        (g for g in groups if g.mean is not None), key=lambda g: (g.epsilon, -(g.mean or 0.0))
    ):
        if not line or (group.mean or 0.0) > (line[-1].mean or 0.0):
            line.append(group)
    return line


def data_sets(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by data set; files go without their folders where that leaves no doubt."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(str(group.first["data"]), []).append(group)
    shown = {shown_data(name): mine for name, mine in found.items()}
    return shown if len(shown) == len(found) else found


def kept(groups: Sequence[Group]) -> tuple[list[float], dict[str, dict[float, Group]]]:
    """Target epsilons in order, and for each way of training that was given some, the group at each."""
    ways: dict[str, dict[float, Group]] = {}
    for group in groups:
        if group.target:
            ways.setdefault(group.series, {})[float(group.target)] = group
    return sorted({target for way in ways.values() for target in way}), ways


def reference(groups: Sequence[Group], algorithm: str) -> Group | None:
    """The best baseline of that name, of whatever model, if the sweep has one."""
    found = [g for g in groups if g.first["algorithm"] == algorithm and g.mean is not None]
    return max(found, key=lambda group: group.mean or 0.0, default=None)


def attack_names(results: Results) -> list[str]:
    """Attacks with a score on at least one point."""
    return sorted({attack["name"] for _, attack in scored_attacks(results)})


def scored_attacks(results: Results) -> list[tuple[Row, dict[str, Any]]]:
    """(row, attack) for every attack that has a score to compare with guessing."""
    rows = {row["id"]: row for row in results.finished}
    return [
        (rows[point.id], attack)
        for point in results.sweep.points
        if (record := results.records.get(point.id)) is not None and record["status"] == OK
        for attack in record["attacks"]
        if attack["score"] is not None and attack["baseline"] is not None
    ]


# -- the findings in tables and sentences --------------------------------------------------------------------


def kept_table(groups: Sequence[Group], *, shares: bool = True) -> TextTable | None:
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
    fewest = min(len(group.rows) for way in ways.values() for group in way.values())
    caption = f"Test {metric}: mean ± half of its 95 % interval over seeds (Student)"
    if fewest < LEAST_SEEDS:
        caption = f"Test {metric}: mean over seeds; an interval needs {LEAST_SEEDS} of them"
    if ends:
        caption += "; in brackets how much of the way from the label holder alone to all features is kept"
    return caption, ["way of training", *(f"ε = {target:g}" for target in targets)], rows


def _plain(group: Group | None) -> str:
    if group is None or group.mean is None:
        return "–"
    return f"{group.mean:.3f}" + ("" if group.high is None else f" ± {group.high - group.mean:.3f}")


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


def promise_table(groups: Sequence[Group]) -> TextTable | None:
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
    alone = reference(groups, "local") or _reported_alone(groups)
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


def _reported_alone(groups: Sequence[Group]) -> Group | None:
    """What the runs themselves report of the label holder alone, once for each seed's split."""
    known = {
        row["seed"]: row["alone"] for group in groups for row in group.rows if row.get("alone") is not None
    }
    if not known:
        return None
    mean, low, high = interval(list(known.values()))
    return replace(groups[0], series=BASELINES["local"], mean=mean, low=low, high=high)


def _best_at(target: float, best: Group, alone: Group | None, groups: Sequence[Group]) -> str:
    """Who keeps most at an epsilon, and whether that is clearly better than the label holder alone."""
    start = f"At epsilon {target:g}"
    verb = "keeps most:" if len({group.series for group in groups}) > 1 else "reaches"
    most = f"{best.series} {verb} {best.metric} {_mean(best, _gap(groups))}"
    text = f"{start}, {most}"
    if alone is None or alone.mean is None:
        return f"{text}."
    # Only an interval that lies wholly above the baseline's counts as better.
    if best.low is not None and best.low > (alone.mean if alone.high is None else alone.high):
        return f"{text}; better than the label holder alone ({alone.mean:.3f})."
    if (best.mean or 0.0) > alone.mean and best.low is None:
        return f"{text}; above the label holder alone ({alone.mean:.3f}), on too few seeds to be sure."
    if (best.mean or 0.0) > alone.mean:
        return f"{text}; not clearly better than the label holder alone ({alone.mean:.3f})."
    return f"{start} nothing beats the label holder alone ({alone.mean:.3f}); {most}."
