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
from securevfl.sweeps.scales import label, log_ticks
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

FACTOR = 2.5  # how far beyond the largest finite epsilon infinity is drawn, and zero below the smallest


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


class _Epsilons:
    """A logarithmic epsilon axis on which zero, infinity and no value have a place too."""

    def __init__(self, values: Sequence[float | None], *, none: str = "0") -> None:
        finite = [v for v in values if v is not None and 0 < v < math.inf]
        self.low, self.high = (min(finite), max(finite)) if finite else (1.0, 10.0)
        self.none = none if any(v is None or v == 0 for v in values) else ""
        self.infinite = any(v is not None and math.isinf(v) for v in values)

    def __call__(self, value: float | None) -> float:
        if not value:
            return self.low / FACTOR
        return self.high * FACTOR if math.isinf(value) else value

    def dress(self, axis: Any) -> None:
        """Scale, limits, ticks."""
        low = self.low / (FACTOR**1.4 if self.none else 1.5)
        high = self.high * (FACTOR**1.4 if self.infinite else 1.5)
        name = axis.axis_name
        axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
        ticks = [(v, label(v)) for v in log_ticks(self.low / 1.3, self.high * 1.3)]
        if self.none:
            ticks.insert(0, (self.low / FACTOR, self.none))
        if self.infinite:
            ticks.append((self.high * FACTOR, "∞"))
        axis.set_ticks([v for v, _ in ticks], [text for _, text in ticks])
        axis.set_ticks([], minor=True)


def _dashes(look: Look) -> Any:
    return (0, tuple(float(part) / 2 for part in look.dashes.split())) if look.dashes else "-"


def _legend(ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, names, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _frontier(title: str, groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    figure, grid = _figure(width=8.5)
    ax = grid[0][0]
    shown = [g for g in groups if g.mean is not None]
    x = _Epsilons([g.epsilon for g in shown])
    line = pareto(shown)
    ax.step(
        [x(g.epsilon) for g in line],
        [g.mean for g in line],
        where="post",
        color="#bbbbbb",
        lw=4,
        label="Pareto line",
    )
    levels = [(g.mean, text) for name, text in BASELINES.items() if (g := reference(shown, name)) and g.mean]
    for order, (mean, text) in enumerate(sorted(levels)):
        side = "top" if order == 0 and len(levels) > 1 else "bottom"
        ax.axhline(mean, color="#777777", lw=0.8, ls=":")
        ax.annotate(text, (0.01, mean), xycoords=("axes fraction", "data"), fontsize=7, va=side)
    for series in dict.fromkeys(g.series for g in shown):
        mine, look = sorted((g for g in shown if g.series == series), key=lambda g: g.epsilon), looks[series]
        means = [g.mean or 0.0 for g in mine]
        spread = [
            [m - (g.low or m) for m, g in zip(means, mine, strict=True)],
            [(g.high or m) - m for m, g in zip(means, mine, strict=True)],
        ]
        joined = len({g.epsilon for g in mine}) == len(mine)
        ax.errorbar(
            [x(g.epsilon) for g in mine], means, yerr=spread, color=look.colour, marker=look.marker, ms=7,
            ls=_dashes(look) if joined else "", lw=1.5, capsize=3, mec="white", mew=0.5, label=series,
        )  # fmt: skip
    x.dress(ax.xaxis)
    values = [v for g in shown for v in (g.mean, *(row[g.metric] for row in g.rows)) if v is not None]
    room = 0.08 * (max(values) - min(values)) or 0.05
    ax.set_ylim(min(values) - room, max(values) + room)
    ax.set(xlabel="sound epsilon of the features", ylabel=NAMES[shown[0].metric], title=title)
    ax.grid(color="#eeeeee")
    _legend(ax)
    return figure


def _claimed(groups: Sequence[Group], looks: Mapping[str, Look]) -> Figure:
    figure, grid = _figure(width=8.5)
    ax = grid[0][0]
    x, y = _Epsilons([g.claimed for g in groups], none="no claim"), _Epsilons([g.epsilon for g in groups])
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high:
        ax.plot([low, high], [low, high], color="#777777", ls=":", lw=1)
    for series in dict.fromkeys(g.series for g in groups):
        mine, look = [g for g in groups if g.series == series], looks[series]
        places = [x(g.claimed) for g in mine], [y(g.epsilon) for g in mine]
        ax.plot(
            *places, ls="", marker=look.marker, color=look.colour, mec="white", mew=0.5, ms=7, label=series
        )
    x.dress(ax.xaxis)
    y.dress(ax.yaxis)
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
        x = _Epsilons([row["sound_epsilon"] for row, _ in mine])
        for row, attack in mine:
            look = looks[series[row["id"]]]
            place = x(row["sound_epsilon"]), gain(attack)
            ax.plot(*place, marker=look.marker, color=look.colour, mec="white", mew=0.5, alpha=0.8)
        ax.axhline(0.0, color="#777777", ls=":", lw=1)
        x.dress(ax.xaxis)
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
