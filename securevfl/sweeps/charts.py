"""The charts of the sweep's page as inline SVG: every mark carries its plan and leads to its audit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from securevfl.sweeps.looks import Look
from securevfl.sweeps.records import gain
from securevfl.sweeps.results import Row
from securevfl.sweeps.scales import Scale, epsilon_scale, linear_scale
from securevfl.sweeps.spec import Target
from securevfl.sweeps.summary import BASELINES, Group, gain_words, pareto, reference

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 16, 52
SMALL = 480, 300
SOFT = 'class="soft"'
NAMES = {"auc": "test AUC", "accuracy": "test accuracy", "r2": "test R²", "loss": "training loss"}


def svg(
    title: str, parts: Sequence[str], *, width: int = WIDTH, height: int = HEIGHT, attributes: str = ""
) -> str:
    """A picture with its title for those who cannot see it; narrow screens scroll instead of shrinking it."""
    least = f"min-width:{min(width, 520)}px"
    return (
        f'<div class="chart"><svg style="{least}" viewBox="0 0 {width} {height}" role="group" '
        f'aria-label="{escape(title)}" {attributes}>{"".join(parts)}</svg></div>'
    )


def words(text: str, x: float, y: float, *, side: str = "start", more: str = "") -> str:
    """Text that starts, ends or has its middle at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{side}" {more}>{escape(text)}</text>'


def axes(x: Scale, y: Scale, across: str, up: str, *, height: int = HEIGHT) -> str:
    """Both axes with ticks, faint grid lines and names."""
    lines = []
    for place, text in x.ticks():
        lines.append(f'<path class="grid" d="M{place:.1f} {y.end:.1f}V{y.start:.1f}"/>')
        lines.append(words(text, place, y.start + 17, side="middle"))
    for place, text in y.ticks():
        lines.append(f'<path class="grid" d="M{x.start:.1f} {place:.1f}H{x.end:.1f}"/>')
        lines.append(words(text, x.start - 7, place + 4, side="end"))
    lines.append(f'<path class="axis" d="M{x.start} {y.end}V{y.start}H{x.end}"/>')
    for place in x.gaps():
        lines.append(f'<rect x="{place - 4:.1f}" y="{y.start - 3:.1f}" width="8" height="6" fill="#fff"/>')
        slash = f"M{place - 7:.1f} {y.start + 6:.1f}l6-12m2 12l6-12"
        lines.append(f'<path class="axis" d="{slash}"/>')
    middle = (y.start + y.end) / 2
    turned = f'transform="rotate(-90 15 {middle:.1f})"'
    lines.append(words(across, (x.start + x.end) / 2, height - 10, side="middle"))
    lines.append(words(up, 15, middle, side="middle", more=turned))
    return "".join(lines)


def tags(row: Row) -> str:
    """What the filters look at."""
    return (
        f'data-id="{row["id"]}" data-algorithm="{escape(str(row["algorithm"]))}" '
        f'data-protocol="{escape(str(row["protocol"]))}"'
    )


def mark(row: Row, look: Look, x: float, y: float, text: str, *, scale: float = 0.8) -> str:
    """One run: a link to its audit that says what it is."""
    return (
        f'<a class="f run" href="{escape(row["report"])}" {tags(row)} aria-label="{escape(text)}">'
        f"<title>{escape(text)}</title>"
        f'<path class="mark" d="{look.path}" fill="{look.colour}" '
        f'transform="translate({x:.1f} {y:.1f}) scale({scale})"/></a>'
    )


def number(value: float | None, missing: str = "–") -> str:
    """A number as people read it."""
    if value is None:
        return missing
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def says(series: str, row: Row, metric: str) -> str:
    """One run in one line."""
    return (
        f"{series}, seed {row['seed']}: {metric} {number(row[metric])}, sound epsilon "
        f"{number(row['sound_epsilon'])}, claimed {number(row['claimed_epsilon'])}"
    )


def frontier(groups: Sequence[Group], looks: Mapping[str, Look]) -> str:
    """Utility against sound epsilon: runs, means with intervals, one line per way, and the Pareto line."""
    shown = [g for g in groups if g.mean is not None]
    metric = shown[0].metric
    x = epsilon_scale([g.epsilon for g in shown], start=LEFT, end=WIDTH - RIGHT, broken=True)
    values = [v for g in shown for v in (g.mean, *(r[metric] for r in g.rows)) if v is not None]
    y = linear_scale(values, start=HEIGHT - BOTTOM, end=TOP)
    parts = [axes(x, y, "sound epsilon of the features (log scale); less is better", NAMES[metric])]
    parts += _levels(shown, x, y)
    line = pareto(shown)
    parts.append(f'<path class="pareto" d="{_steps([(x(g.epsilon), y(g.mean)) for g in line])}"/>')
    for series in dict.fromkeys(g.series for g in shown):
        parts.append(_series(series, [g for g in shown if g.series == series], looks[series], x, y, metric))
    return svg("Privacy against utility", parts, attributes=f'class="frontier" data-end="{x.end:.1f}"')


def _levels(groups: Sequence[Group], x: Scale, y: Scale) -> list[str]:
    """What the baselines reach, as lines across; the lower one has its name below."""
    found = [(text, g.mean) for name, text in BASELINES.items() if (g := reference(groups, name)) and g.mean]
    parts = []
    for order, (text, mean) in enumerate(sorted(found, key=lambda pair: pair[1])):
        place = y(mean)
        side = 14 if order == 0 and len(found) > 1 else -5
        parts.append(f'<path class="level" d="M{x.start} {place:.1f}H{x.end}"/>')
        parts.append(words(text, x.end - 6, place + side, side="end", more=SOFT))
    return parts


def _steps(places: Sequence[tuple[float, float]]) -> str:
    """A staircase: what the best point so far keeps until a better one comes."""
    if not places:
        return ""
    first, *rest = places
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in rest)


def _series(name: str, groups: Sequence[Group], look: Look, x: Scale, y: Scale, metric: str) -> str:
    ordered = sorted(groups, key=lambda g: g.epsilon)
    places = " ".join(f"{x(g.epsilon):.1f},{y(g.mean):.1f}" for g in ordered)
    # Several groups at the same epsilon have no order that a line could show.
    joined = len({g.epsilon for g in ordered}) == len(ordered) > 1
    line = f'<polyline points="{places}" stroke="{look.colour}" stroke-dasharray="{look.dashes}"/>'
    parts = [f'<g class="f line" {tags(groups[0].first)}>{line if joined else ""}</g>']
    for group in ordered:
        # Two seeds have an interval wider than the picture: it ends at its edge.
        place = x(group.epsilon)
        low, high = (min(max(y(end), y.end), y.start) for end in (group.low, group.high))
        summary = (
            f"{name}: mean {group.metric} {number(group.mean)} of {len(group.rows)} seeds, "
            f"sound epsilon {number(group.epsilon)}"
        )
        parts.append(
            f'<g class="f mean" {tags(group.first)} data-x="{place:.1f}" data-y="{y(group.mean):.1f}">'
            f"<title>{escape(summary)}</title>"
            f'<path class="whisker" d="M{place - 5:.1f} {low:.1f}h10M{place:.1f} {low:.1f}V{high:.1f}'
            f'M{place - 5:.1f} {high:.1f}h10" stroke="{look.colour}"/>'
            f'<path d="{look.path}" fill="{look.colour}" stroke="#fff" '
            f'transform="translate({place:.1f} {y(group.mean):.1f}) scale(1.35)"/></g>'
        )
        single = len(group.rows) == 1
        for order, row in enumerate(group.rows):
            if row[metric] is not None:
                # Beside the mean, so that neither hides the other.
                aside = 0.0 if single else 9 + 4 * (order % 3)
                size = 1.35 if single else 0.65
                parts.append(
                    mark(row, look, place + aside, y(row[metric]), says(name, row, metric), scale=size)
                )
    return "".join(parts)


def claimed_against_sound(groups: Sequence[Group], looks: Mapping[str, Look]) -> str:
    """What the paper would claim against the sound figure; below the diagonal a claim would be generous."""
    rows = [(g, row) for g in groups for row in g.rows if row["sound_epsilon"] is not None]
    x = epsilon_scale(
        [r["claimed_epsilon"] for _, r in rows], start=LEFT, end=WIDTH - RIGHT, none="no claim", always=True
    )
    y = epsilon_scale([r["sound_epsilon"] for _, r in rows], start=HEIGHT - BOTTOM, end=TOP)
    parts = [axes(x, y, "epsilon that the paper would claim (log scale)", "sound epsilon (log scale)")]
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high and any(r["claimed_epsilon"] for _, r in rows):
        ends = f"M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"
        parts.append(f'<path class="level" d="{ends}"/>')
        parts.append(words("claim = truth", x(high) - 6, y(high) + 22, side="end", more=SOFT))
    for order, (group, row) in enumerate(rows):
        # Points without a claim share one slot: spread them a little.
        aside = 0.0 if row["claimed_epsilon"] else ((order * 7) % 29) - 14
        place = x(row["claimed_epsilon"]) + aside, y(row["sound_epsilon"])
        parts.append(mark(row, looks[group.series], *place, says(group.series, row, group.metric)))
        if row["measured_epsilon"] and row["claimed_epsilon"]:
            parts.append(_measured(row, place[0], y))
    return svg("Claimed against sound epsilon", parts)


def _measured(row: Row, place: float, y: Scale) -> str:
    """The certified lower bound as a bar below its point, where the axis reaches that far."""
    if row["measured_epsilon"] < y.low:
        return ""
    at = y(row["measured_epsilon"])
    return f'<path class="f measured" {tags(row)} d="M{place - 6:.1f} {at:.1f}h12"/>'


def attack_chart(
    name: str,
    scored: Sequence[tuple[Row, Mapping[str, Any]]],
    series: Mapping[str, str],
    looks: Mapping[str, Look],
) -> str:
    """One attack: how much better than guessing it does, with interval, against sound epsilon."""
    width, height = SMALL
    x = epsilon_scale([row["sound_epsilon"] for row, _ in scored], start=LEFT, end=width - RIGHT, broken=True)
    y = linear_scale([0.0, *(gain(attack) for _, attack in scored)], start=height - BOTTOM, end=TOP)
    words_up = gain_words(str(scored[0][1]["metric"]))
    parts = [axes(x, y, "sound epsilon of the features (log scale)", words_up, height=height)]
    parts.append(f'<path class="level" d="M{x.start} {y(0.0):.1f}H{x.end}"/>')
    parts.append(words("guessing", x.end - 6, y(0.0) - 5, side="end", more=SOFT))
    for order, (row, attack) in enumerate(scored):
        place = x(row["sound_epsilon"]) + ((order * 5) % 13) - 6
        parts.append(_attack_mark(row, attack, series[row["id"]], looks[series[row["id"]]], place, y))
    return svg(f"Attack {name} against epsilon", parts, width=width, height=height)


def _attack_mark(row: Row, attack: Mapping[str, Any], series: str, look: Look, place: float, y: Scale) -> str:
    text = (
        f"{series}, seed {row['seed']}: {attack['metric']} {number(attack['score'])} on {attack['owner']} by "
        f"{attack['observer']}, guessing {number(attack['baseline'])}, sound epsilon "
        f"{number(row['sound_epsilon'])}"
    )
    whisker = ""
    if attack["low"] is not None and attack["high"] is not None:
        low, high = (min(max(y(gain(attack, end)), y.end), y.start) for end in ("low", "high"))
        path = f"M{place:.1f} {low:.1f}V{high:.1f}"
        whisker = f'<path class="f whisker" {tags(row)} d="{path}" stroke="{look.colour}"/>'
    return whisker + mark(row, look, place, y(gain(attack)), text)


def times(groups: Sequence[Group], looks: Mapping[str, Look]) -> str:
    """Virtual time to the target, one line per plan; those that never got there say so."""
    height, left = 40 + 24 * len(groups) + BOTTOM, 370
    values = [r["time_to_target"] for g in groups for r in g.rows if r["time_to_target"] is not None]
    x = Scale(start=left, end=WIDTH - RIGHT, low=0.0, high=1.1 * max(values))
    foot = height - BOTTOM
    parts = [f'<path class="axis" d="M{left} {TOP}V{foot}H{x.end}"/>']
    for place, text in x.ticks():
        parts.append(f'<path class="grid" d="M{place:.1f} {TOP}V{foot}"/>')
        parts.append(words(text, place, foot + 17, side="middle"))
    parts.append(words("virtual time to the target", (left + x.end) / 2, height - 10, side="middle"))
    for order, group in enumerate(groups):
        parts.append(_time_line(group, looks[group.series], x, TOP + 20 + 24 * order))
    return svg("Time to target", parts, height=height)


def _time_line(group: Group, look: Look, x: Scale, place: float) -> str:
    """One plan: its name, how many seeds got there, and a mark for each of them."""
    there = sum(row["time_to_target"] is not None for row in group.rows)
    count = "" if there == len(group.rows) else f", {there} of {len(group.rows)} seeds"
    name = _short(f"{group.series}, epsilon {number(group.epsilon)}{count}")
    parts = [words(name, x.start - 8, place + 4, side="end", more=f'class="f" {tags(group.first)}')]
    for row in group.rows:
        if row["time_to_target"] is not None:
            text = f"{group.series}, seed {row['seed']}: target reached at {number(row['time_to_target'])}"
            parts.append(mark(row, look, x(row["time_to_target"]), place, text))
    return "".join(parts)


def _short(text: str, most: int = 58) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def target_words(target: Target) -> str:
    """What has to be reached."""
    side = "at most" if target.metric == "loss" else "at least"
    return f"{NAMES[target.metric]} is {side} {number(target.value)}"


def legend(looks: Mapping[str, Look]) -> str:
    """Marker and name of every way of training."""
    items = [
        f'<li><svg viewBox="-14 -8 28 16" width="28" height="16" aria-hidden="true"><path d="M-14 0H14" '
        f'stroke="{look.colour}" stroke-width="2" stroke-dasharray="{look.dashes}"/>'
        f'<path d="{look.path}" fill="{look.colour}"/></svg>{escape(name)}</li>'
        for name, look in looks.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
