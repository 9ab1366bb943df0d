"""The same pictures for papers and slides: PNG and SVG files in ``plots/``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securevfl.sweeps.charts import NAMES, number, target_words
from securevfl.sweeps.looks import Look, looks_of
from securevfl.sweeps.records import gain
from securevfl.sweeps.results import Results
from securevfl.sweeps.scales import Scale, epsilon_scale
from securevfl.sweeps.spec import Target
from securevfl.sweeps.summary import (
    BASELINES,
    Group,
    attack_names,
    data_sets,
    gain_words,
    groups_of,
    pareto,
    reference,
    scored_attacks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTH = 640.0  # of an epsilon axis, in the unit of `securevfl.sweeps.scales`


def write_plots(results: Results) -> list[Path]:
    """Writes every picture that the results allow; returns the files."""
    groups = groups_of(results)
    if not groups:
        return []
    looks = looks_of([group.series for group in groups])
    found: dict[str, Figure] = {}
    for order, (name, mine) in enumerate(data_sets(groups).items()):
        ending = f"-{order + 1}" if order else ""
        if any(group.mean is not None for group in mine):
            found[f"frontier{ending}"] = _frontier(name, mine, looks)
        there = [g for g in mine if g.first["virtual_time"] and _reached(g)]
        if there:
            found[f"time-to-target{ending}"] = _times(results.targets[name], there, looks)
    found["claimed-sound"] = _claimed(groups, looks)
    if attack_names(results):
        found["attacks"] = _attacks(results, groups, looks)
    return [path for name, figure in found.items() for path in _save(figure, results.folder / "plots", name)]


def _figure(
    rows: int = 1, columns: int = 1, *, width: float = 7.0, height: float = 4.4
) -> tuple[Figure, Any]:
    """A figure that needs no display and belongs to nobody else's pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    from matplotlib import rc_context

    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": "securevfl", "svg.fonttype": "none"}):
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata=nobody)
    return paths


def _epsilons(axis: Any, values: Sequence[float | None], *, none: str = "0", broken: bool = True) -> Scale:
    """Makes an axis one of epsilons, on which zero, infinity and no value have a place too."""
    name = axis.axis_name
    length = LENGTH if name == "x" else LENGTH * 0.7
    scale = epsilon_scale(values, start=0.0, end=length, none=none, broken=broken)
    axis.axes.set(**{f"{name}lim": (0.0, length)})
    axis.set_ticks([place for place, _ in scale.ticks()], [text for _, text in scale.ticks()])
    for place in scale.gaps():
        place_at = (place, 0.0) if name == "x" else (0.0, place)
        system = "data", "axes fraction"
        axis.axes.annotate(
            "//", place_at, xycoords=system if name == "x" else system[::-1], ha="center", va="center",
            fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, annotation_clip=False,
        )  # fmt: skip
    return scale


def _dashes(look: Look) -> Any:
    return (0, tuple(float(part) / 2 for part in look.dashes.split())) if look.dashes else "-"


def _legend(ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, names, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _frontier(title: str, groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    """All points, and where the baselines lie close together the space between them once more, enlarged."""
    shown = [g for g in groups if g.mean is not None]
    values = [v for g in shown for v in (g.mean, *(row[g.metric] for row in g.rows)) if v is not None]
    low, high = min(values), max(values)
    window = _window(shown, low, high)
    figure, grid = _figure(1, 2 if window else 1, width=12.0 if window else 8.5, height=5.0)
    _draw_frontier(grid[0][0], shown, looks)
    room = 0.08 * (high - low) or 0.05
    grid[0][0].set(ylim=(low - room, high + room), title=title)
    if window:
        inside = [g for g in shown if window[0] <= (g.mean or 0.0) <= window[1]]
        _draw_frontier(grid[0][1], inside, looks)
        grid[0][1].set(ylim=window, title="the same between the baselines, enlarged")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _window(groups: Sequence[Group], low: float, high: float) -> tuple[float, float] | None:
    """A little more than the space between the baselines, if it is a small part of the picture."""
    ends = sorted(g.mean for name in BASELINES if (g := reference(groups, name)) and g.mean is not None)
    if len(ends) < 2 or not 0 < ends[1] - ends[0] < (high - low) / 4:
        return None
    gap = ends[1] - ends[0]
    return ends[0] - 0.6 * gap, ends[1] + 0.2 * gap


def _draw_frontier(ax: Axes, groups: Sequence[Group], looks: Mapping[str, Look]) -> None:
    x = _epsilons(ax.xaxis, [g.epsilon for g in groups])
    line = pareto(groups)
    best = [g.mean or 0.0 for g in line]
    ax.step([x(g.epsilon) for g in line], best, where="post", color="#bbbbbb", lw=4, label="Pareto line")
    for series in dict.fromkeys(g.series for g in groups):
        mine, look = sorted((g for g in groups if g.series == series), key=lambda g: g.epsilon), looks[series]
        means = [g.mean or 0.0 for g in mine]
        if mine[0].first["algorithm"] in BASELINES:
            ax.axhline(means[0], color=look.colour, lw=1, ls=":")
        spread = [
            [m - (g.low or m) for m, g in zip(means, mine, strict=True)],
            [(g.high or m) - m for m, g in zip(means, mine, strict=True)],
        ]
        joined = len({g.epsilon for g in mine}) == len(mine)
        ax.errorbar(
            [x(g.epsilon) for g in mine], means, yerr=spread, color=look.colour, marker=look.marker, ms=7,
            ls=_dashes(look) if joined else "", lw=1.5, elinewidth=0.8, capsize=3, mec="white", mew=0.5,
            label=series,
        )  # fmt: skip
    ax.set(xlabel="sound epsilon of the features (log scale)", ylabel=NAMES[groups[0].metric])
    ax.grid(color="#eeeeee")


def _claimed(groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    figure, grid = _figure(width=8.5)
    ax = grid[0][0]
    x = _epsilons(ax.xaxis, [g.claimed for g in groups], none="no claim", broken=False)
    y = _epsilons(ax.yaxis, [g.epsilon for g in groups], broken=False)
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high:
        ax.plot([x(low), x(high)], [y(low), y(high)], color="#777777", ls=":", lw=1)
    for series in dict.fromkeys(g.series for g in groups):
        mine, look = [g for g in groups if g.series == series], looks[series]
        places = [x(g.claimed) for g in mine], [y(g.epsilon) for g in mine]
        ax.plot(
            *places, ls="", marker=look.marker, color=look.colour, mec="white", mew=0.5, ms=7, label=series
        )
    ax.set(xlabel="epsilon that the paper would claim", ylabel="sound epsilon")
    ax.grid(color="#eeeeee")
    _legend(ax)
    return figure


def _attacks(results: Results, groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    names, scored = attack_names(results), scored_attacks(results)
    series = {row["id"]: group.series for group in groups for row in group.rows}
    columns = min(2, len(names))
    lines = math.ceil(len(names) / columns)
    figure, grid = _figure(lines, columns, width=4.6 * columns, height=3.0 * lines)
    cells = [ax for line in grid for ax in line]
    for ax in cells[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(cells, names, strict=False):
        mine = [(row, attack) for row, attack in scored if attack["name"] == name]
        x = _epsilons(ax.xaxis, [row["sound_epsilon"] for row, _ in mine])
        for row, attack in mine:
            look = looks[series[row["id"]]]
            place = x(row["sound_epsilon"]), gain(attack)
            ax.plot(*place, marker=look.marker, color=look.colour, mec="white", mew=0.5, alpha=0.8)
        ax.axhline(0.0, color="#777777", ls=":", lw=1)
        ax.set_title(name, fontsize=9)
        ax.set_ylabel(gain_words(str(mine[0][1]["metric"])), fontsize=8)
        ax.set_xlabel("sound epsilon", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(color="#eeeeee")
    return figure


def _reached(group: Group) -> list[float]:
    return [row["time_to_target"] for row in group.rows if row["time_to_target"] is not None]


def _times(target: Target, groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    figure, grid = _figure(width=8.5, height=1.2 + 0.28 * len(groups))
    ax = grid[0][0]
    for place, group in enumerate(groups):
        look, values = looks[group.series], _reached(group)
        places = [place] * len(values)
        ax.plot(values, places, ls="", marker=look.marker, color=look.colour, mec="white", mew=0.5)
    words = [f"{g.series}, epsilon {number(g.epsilon)}" for g in groups]
    ax.set_yticks(range(len(groups)), words, fontsize=7)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel(f"virtual time until {target_words(target)}")
    ax.grid(color="#eeeeee")
    return figure
