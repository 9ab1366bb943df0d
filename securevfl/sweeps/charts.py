"""The charts of a sweep, for its page and as files in ``plots/``: every mark says what it is.

On the page a run's mark leads to its audit, and scripts find all parts by the ids of their runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from securevfl.pages import number
from securevfl.pages.charts import SOFT, Chart, Style, styles_for
from securevfl.sweeps.axis import EpsilonAxis
from securevfl.sweeps.records import gain
from securevfl.sweeps.results import LOWER, Results, Row
from securevfl.sweeps.spec import Target
from securevfl.sweeps.summary import (
    BASELINES,
    Group,
    data_sets,
    groups_of,
    pareto,
    reference,
    scored_attacks,
)

METRIC_NAMES = {
    "auc": "test AUC", "accuracy": "test accuracy", "top5": "test top-5 accuracy",
    "r2": "test R²", "mae": "test mean absolute error", "loss": "training loss",
}  # fmt: skip
EDGES: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5}
Styles = Mapping[str, Style]
Scored = Sequence[tuple[Row, Mapping[str, Any]]]


class SweepCharts:
    """Every chart that the results allow.

    Args:
        results: The results.

    Attributes:
        groups: Their groups, one per plan without seed.
        series: Point id -> name of its series.
        styles: Name of a series -> how it looks in all charts.
    """

    def __init__(self, results: Results) -> None:
        self.results, self.groups = results, groups_of(results)
        self.series = {row["id"]: group.series for group in self.groups for row in group.rows}
        self.styles = styles_for(group.series for group in self.groups)

    def frontiers(self) -> dict[str, Chart]:
        """Data set -> utility against sound epsilon."""
        return {
            name: frontier(name, shown, self.styles)
            for name, groups in data_sets(self.groups).items()
            if (shown := [group for group in groups if group.mean is not None])
        }

    def claimed(self) -> Chart | None:
        """What papers would claim against what holds; None where no paper claims anything."""
        known = any(row["claimed_epsilon"] for group in self.groups for row in group.rows)
        return claimed_against_sound(self.groups, self.styles) if known else None

    def scored(self) -> dict[tuple[str, str], list[Any]]:
        """(attack, data set) -> rows with their scores."""
        found: dict[tuple[str, str], list[Any]] = {}
        for row, attack in scored_attacks(self.results):
            found.setdefault((attack["name"], str(row["data"])), []).append((row, attack))
        return dict(sorted(found.items()))

    def attacks(self, panels: Mapping[str, Scored]) -> Chart:
        """One panel for each attack, with its heading if there are several."""
        columns = min(2, len(panels))
        rows = math.ceil(len(panels) / columns)
        title = f"Attacks against epsilon: {', '.join(panels)}"
        chart = Chart(title, 5.0 * columns, 3.1 * rows, rows, columns)
        for axes in chart.axes[len(panels) :]:
            axes.set_axis_off()
        for axes, (name, scored) in zip(chart.axes, panels.items(), strict=False):
            _draw_attack(chart, axes, scored, self.series, self.styles)
            if len(panels) > 1:
                axes.set_title(name)
        return chart

    def times(self) -> dict[str, tuple[str, Chart, int]]:
        """Data set -> heading, time to the target, and how many plans never got there."""
        found = {}
        for name, groups in data_sets(self.groups).items():
            racing = [group for group in groups if group.first["virtual_time"]]
            there = [g for g in racing if any(row["time_to_target"] is not None for row in g.rows)]
            if there:
                target = self.results.targets[groups[0].first["data"]]
                heading = f"Time until {_goal(target)}: {name}"
                found[name] = heading, times(heading, there, self.styles), len(racing) - len(there)
        return found


def write_plots(results: Results) -> list[Path]:
    """Writes every chart as PNG and SVG for papers and slides; returns the files."""
    charts = SweepCharts(results)
    if not charts.groups:
        return []
    found: dict[str, Chart] = {}
    endings = {name: f"-{n + 1}" if n else "" for n, name in enumerate(data_sets(charts.groups))}
    found |= {f"frontier{endings[name]}": chart for name, chart in charts.frontiers().items()}
    found |= {f"time-to-target{endings[name]}": chart for name, (_, chart, _) in charts.times().items()}
    if claimed := charts.claimed():
        found["claimed-sound"] = claimed
    if scored := charts.scored():
        several = len(endings) > 1
        panels = {f"{name}: {data}" if several else name: rows for (name, data), rows in scored.items()}
        found["attacks"] = charts.attacks(panels)
    folder = results.folder / "plots"
    folder.mkdir(exist_ok=True)
    return [path for name, chart in found.items() for path in chart.save(folder / name)]


def _ids(*groups: Group) -> str:
    return " ".join(row["id"] for group in groups for row in group.rows)


def _describe(series: str, row: Row, metric: str) -> str:
    """One run in one line."""
    return (
        f"{series}, seed {row['seed']}: {metric} {number(row[metric])}, sound epsilon "
        f"{number(row['sound_epsilon'])}, claimed {number(row['claimed_epsilon'])}"
    )


def _mark(
    chart: Chart, axes: Any, row: Row, style: Style, place: tuple[float, float], text: str, size: float = 6
) -> None:
    """One run: a link to its audit that says what it is."""
    (mark,) = axes.plot(*place, marker=style.marker, color=style.colour, markersize=size, alpha=0.8, **EDGES)
    chart.link(mark, row["report"], text, class_="f run", data_ids=row["id"])


def _legend(chart: Chart, styles: Styles, names: Sequence[str], *, lines: bool = False) -> None:
    for name in dict.fromkeys(names):
        style = styles[name]
        line = style.line if lines else ""
        label = f" {name}" if name.startswith("_") else name  # matplotlib leaves out what begins so
        chart.axes[0].plot([], [], marker=style.marker, color=style.colour, linestyle=line, label=label)
    columns = 1 if max(map(len, names)) > 60 else 2 if max(map(len, names)) > 30 else 3
    chart.figure.legend(loc="outside lower left", ncols=columns, frameon=False)


def frontier(title: str, groups: Sequence[Group], styles: Styles) -> Chart:
    """Utility against sound epsilon: runs, means with intervals, one line per series, and the Pareto line.

    Where the baselines lie close together, a second panel shows the space between them enlarged.
    """
    drawn = [(g.mean, g.low, g.high, *(row[g.metric] for row in g.rows)) for g in groups]
    values = [value for each in drawn for value in each if value is not None]
    low, high = min(values), max(values)
    window = _window(groups, low, high)
    names = [group.series for group in groups]
    height = (4.2 if window is None else 7.8) + 0.1 * len(set(names))
    chart = Chart(f"Privacy against utility: {title}", 8.6, height, 1 if window is None else 2)
    _draw_frontier(chart, chart.axes[0], groups, styles)
    room = 0.08 * (high - low) or 0.05
    chart.axes[0].set(ylim=(low - room, high + room), title=title)
    if window is not None:
        inside = [g for g in groups if window[0] <= (g.mean or 0.0) <= window[1]]
        _draw_frontier(chart, chart.axes[1], inside, styles)
        chart.axes[1].set(ylim=window, title="the same between the baselines, enlarged")
    _legend(chart, styles, names, lines=True)
    return chart


def _window(groups: Sequence[Group], low: float, high: float) -> tuple[float, float] | None:
    """A little more than the space between the baselines, if it is a small part of the picture."""
    ends = sorted(g.mean for name in BASELINES if (g := reference(groups, name)) and g.mean is not None)
    if len(ends) < 2 or not 0 < ends[1] - ends[0] < (high - low) / 4:
        return None
    gap = ends[1] - ends[0]
    return ends[0] - 0.6 * gap, ends[1] + 0.2 * gap


def _draw_frontier(chart: Chart, axes: Any, groups: Sequence[Group], styles: Styles) -> None:
    x = EpsilonAxis.around([g.epsilon for g in groups], broken=True)
    x.show_on(axes.xaxis)
    chart.tag(axes, class_="panel")
    best = pareto(groups)
    label = "Pareto line" if axes is chart.axes[0] else None
    (line,) = axes.step(
        [x(g.epsilon) for g in best], [g.mean for g in best], where="post", color="#c4c4c4", linewidth=4,
        label=label,
    )  # fmt: skip
    chart.tag(line, class_="pareto")
    levels = [(g.mean, text) for name, text in BASELINES.items() if (g := reference(groups, name)) and g.mean]
    for order, (level, text) in enumerate(sorted(levels)):
        side = "top" if order == 0 and len(levels) > 1 else "bottom"
        _level(axes, level, text, x=1.01, ha="left", va=side)
    for series in dict.fromkeys(g.series for g in groups):
        mine = sorted((g for g in groups if g.series == series), key=lambda g: g.epsilon)
        _draw_series(chart, axes, mine, styles[series], x)
    axes.set(
        xlabel="sound epsilon of the features (log scale); less is better",
        ylabel=METRIC_NAMES[groups[0].metric],
    )


def _level(axes: Any, height: float, text: str, *, x: float, **align: Any) -> None:
    """A dotted line across, with its name."""
    axes.axhline(height, color=SOFT, linewidth=1, linestyle=":")
    axes.text(x, height, text, transform=axes.get_yaxis_transform(), color=SOFT, fontsize=8, **align)


def _draw_series(chart: Chart, axes: Any, groups: Sequence[Group], style: Style, x: EpsilonAxis) -> None:
    # Several groups at the same epsilon have no order that a line could show.
    if len({g.epsilon for g in groups}) == len(groups) > 1:
        (line,) = axes.plot(
            [x(g.epsilon) for g in groups], [g.mean for g in groups], color=style.colour, linestyle=style.line
        )
        chart.tag(line, class_="f", data_ids=_ids(*groups))
    for group in groups:
        place, ids = x(group.epsilon), _ids(group)
        ends = [group.mean if end is None else end for end in (group.low, group.high)]
        (whisker,) = axes.plot([place] * 2, ends, "_-", color=style.colour, linewidth=1)
        chart.tag(whisker, class_="f", data_ids=ids)
        (mean,) = axes.plot(place, group.mean, marker=style.marker, color=style.colour, markersize=9, **EDGES)
        text = (
            f"{group.series}: mean {group.metric} {number(group.mean)} of {len(group.rows)} seeds, "
            f"sound epsilon {number(group.epsilon)}"
        )
        chart.tag(mean, text, class_="f mean", data_ids=ids)
        for order, row in enumerate(group.rows):
            if row[group.metric] is not None:
                # Beside the mean, so that neither hides the other.
                aside, size = (0.0, 9) if len(group.rows) == 1 else (0.015 + 0.006 * (order % 3), 4.5)
                at = place + aside, row[group.metric]
                _mark(chart, axes, row, style, at, _describe(group.series, row, group.metric), size)


def claimed_against_sound(groups: Sequence[Group], styles: Styles) -> Chart:
    """What the paper would claim against the sound figure; above the diagonal the claim is too small."""
    rows = [(g, row) for g in groups for row in g.rows if row["sound_epsilon"] is not None]
    names = [group.series for group, _ in rows]
    chart = Chart("Claimed against sound epsilon", 8.6, 4.2 + 0.1 * len(set(names)))
    axes = chart.axes[0]
    x = EpsilonAxis.around([r["claimed_epsilon"] for _, r in rows], none="no claim", always=True)
    y = EpsilonAxis.around([r["sound_epsilon"] for _, r in rows])
    x.show_on(axes.xaxis)
    y.show_on(axes.yaxis)
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high and any(r["claimed_epsilon"] for _, r in rows):
        axes.plot([x(low), x(high)], [y(low), y(high)], color=SOFT, linestyle=":", linewidth=1)
        axes.annotate(
            "claim = truth", (x(high), y(high)), (-4, -14), textcoords="offset points", ha="right",
            color=SOFT, fontsize=8,
        )  # fmt: skip
    for order, (group, row) in enumerate(rows):
        # Points without a claim share one slot: spread them a little.
        aside = 0.0 if row["claimed_epsilon"] else (((order * 7) % 29) - 14) / 640
        place = x(row["claimed_epsilon"]) + aside, y(row["sound_epsilon"])
        text = _describe(group.series, row, group.metric)
        _mark(chart, axes, row, styles[group.series], place, text)
        if row["measured_epsilon"] and row["claimed_epsilon"] and row["measured_epsilon"] >= y.low:
            (bar,) = axes.plot(
                place[0], y(row["measured_epsilon"]), "_", color="black", markersize=9, markeredgewidth=2.5
            )
            chart.tag(bar, class_="f", data_ids=row["id"])
    axes.set(xlabel="epsilon that the paper would claim (log scale)", ylabel="sound epsilon (log scale)")
    _legend(chart, styles, names)
    return chart


def _draw_attack(chart: Chart, axes: Any, scored: Scored, series: Mapping[str, str], styles: Styles) -> None:
    """How much better than guessing one attack does, with intervals, against sound epsilon."""
    x = EpsilonAxis.around([row["sound_epsilon"] for row, _ in scored], broken=True)
    x.show_on(axes.xaxis)
    _level(axes, 0.0, "guessing", x=0.995, ha="right", va="bottom")
    for order, (row, attack) in enumerate(scored):
        name = series[row["id"]]
        place = x(row["sound_epsilon"]) + (((order * 5) % 13) - 6) / 480
        if attack["low"] is not None and attack["high"] is not None:
            ends = [gain(attack, end) for end in ("low", "high")]
            (whisker,) = axes.plot([place] * 2, ends, color=styles[name].colour, linewidth=1)
            chart.tag(whisker, class_="f", data_ids=row["id"])
        text = (
            f"{name}, seed {row['seed']}: {attack['metric']} {number(attack['score'])} on {attack['owner']} "
            f"by {attack['observer']}, guessing {number(attack['baseline'])}, sound epsilon "
            f"{number(row['sound_epsilon'])}"
        )
        _mark(chart, axes, row, styles[name], (place, gain(attack)), text)
    gains = [0.0, *(gain(attack) for _, attack in scored)]
    room = 0.08 * (max(gains) - min(gains)) or 0.05
    axes.set(
        xlabel="sound epsilon of the features (log scale)",
        ylabel=_gain_name(str(scored[0][1]["metric"])),
        ylim=(min(gains) - room, max(gains) + room),
    )


def _gain_name(metric: str) -> str:
    """What `gain` is for a metric."""
    from securevfl.attacks.contract import METRICS

    return f"{metric} above guessing" if METRICS[metric].more_is_worse else f"share of the {metric} removed"


def times(title: str, groups: Sequence[Group], styles: Styles) -> Chart:
    """Virtual time to the target, one line per plan, with how many of its seeds got there."""
    chart = Chart(title, 8.6, 0.9 + 0.28 * len(groups))
    axes = chart.axes[0]
    for place, group in enumerate(groups):
        there = [row for row in group.rows if row["time_to_target"] is not None]
        count = "" if len(there) == len(group.rows) else f", {len(there)} of {len(group.rows)} seeds"
        name = f"{group.series}, epsilon {number(group.epsilon)}{count}"
        short = name if len(name) <= 58 else f"{name[:57]}…"
        text = axes.text(-0.01, place, short, ha="right", va="center", transform=axes.get_yaxis_transform())
        chart.tag(text, class_="f", data_ids=_ids(group))
        for row in there:
            said = f"{group.series}, seed {row['seed']}: target reached at {number(row['time_to_target'])}"
            _mark(chart, axes, row, styles[group.series], (row["time_to_target"], place), said)
    axes.set(xlabel="virtual time to the target", yticks=[], ylim=(len(groups) - 0.5, -0.5))
    axes.set_xlim(left=0)
    return chart


def _goal(target: Target) -> str:
    """What has to be reached."""
    side = "at most" if target.metric in LOWER else "at least"
    return f"{METRIC_NAMES[target.metric]} is {side} {number(target.value)}"
