"""Charts of the report as inline SVG: legible in print, without colour, and without any network."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

WIDTH, HEIGHT, MARGIN = 460, 340, 52
NAIVE = ("per-record", "own totals")
"""Accountings that count less than a record spreads to; shown beside the promise."""


def trade_off(canary: dict[str, Any]) -> str:
    """Errors of the best attacker: the promised curve below which nobody may get, and the measured point."""
    fp = canary["false_positives"] / max(canary["negatives"], 1)
    fn = canary["false_negatives"] / max(canary["positives"], 1)
    claims = {name: mu for name, mu in canary["claims"].items() if mu is not None}
    parts = [_frame("false alarms of the attacker", "misses of the attacker")]
    for name, mu in claims.items():
        promised = name == canary["accounting"]
        if not promised and (name not in NAIVE or mu == claims.get(canary["accounting"])):
            continue
        parts.append(_curve(mu, "promised" if promised else "other"))
    x, y = _place(fp, fn)
    parts.append(f'<path class="point" d="M{x - 6:.1f} {y:.1f}h12M{x:.1f} {y - 6:.1f}v12"/>')
    side, shift = ("end", -10) if fp > 0.5 else ("start", 10)
    label = f"measured: {fp:.3f}, {fn:.3f}"
    parts.append(f'<text x="{x + shift:.1f}" y="{y - 8:.1f}" text-anchor="{side}">{label}</text>')
    title = f"Trade-off of the canary audit: measured errors {fp:.3f} and {fn:.3f}"
    return _svg(title, parts, WIDTH, HEIGHT)


def _place(x: float, y: float) -> tuple[float, float]:
    return MARGIN + x * (WIDTH - MARGIN - 14), HEIGHT - MARGIN - y * (HEIGHT - MARGIN - 14)


def _curve(mu: float, kind: str) -> str:
    """G_mu: the smallest rate of misses for each rate of false alarms under mu-GDP."""
    alpha = np.concatenate(
        [np.geomspace(1e-6, 0.02, 40), np.linspace(0.02, 0.98, 120), 1 - np.geomspace(0.02, 1e-6, 40)]
    )
    beta = ndtr(ndtri(1 - alpha) - mu)
    points = " ".join("{:.1f},{:.1f}".format(*_place(a, b)) for a, b in zip(alpha, beta, strict=True))
    return f'<polyline class="{kind}" points="{points}"/>'


def _frame(horizontal: str, vertical: str) -> str:
    left, bottom = _place(0, 0)
    right, top = _place(1, 1)
    lines = [f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>']
    lines.append(f'<path class="grid" d="M{left} {top}L{right} {bottom}"/>')
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = _place(tick, tick)
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{tick:g}</text>')
        lines.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    lines.append(
        f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{horizontal}</text>'
    )
    middle = (top + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    lines.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{vertical}</text>')
    return "".join(lines)


def bars(attacks: list[dict[str, Any]]) -> str:
    """Scores between 0 and 1 with their intervals, the baseline (|) and what the promise allows (dashed)."""
    row, label, wide = 26, 250, 380
    parts = []
    for number, attack in enumerate(attacks):
        y = 14 + number * row
        name = f"{attack['name']}: {attack['owner']} by {attack['observer']}"
        start = label + 8
        at, low, high = (start + wide * attack[key] for key in ("score", "low", "high"))
        parts.append(f'<text x="{label}" y="{y + 4}" text-anchor="end">{escape(_short(name))}</text>')
        parts.append(f'<rect class="bar" x="{start}" y="{y - 7}" width="{at - start:.1f}" height="14"/>')
        ends = f"M{low:.1f} {y - 4}v8M{high:.1f} {y - 4}v8"
        parts.append(f'<path class="whisker" d="M{low:.1f} {y}H{high:.1f}{ends}"/>')
        if attack["baseline"] is not None:
            parts.append(_mark(label + 8 + wide * attack["baseline"], y, "baseline"))
        if attack["ceiling"] is not None:
            parts.append(_mark(label + 8 + wide * min(attack["ceiling"], 1.0), y, "ceiling"))
        parts.append(f'<text x="{label + wide + 16}" y="{y + 4}">{attack["score"]:.3f}</text>')
    height = 14 + len(attacks) * row
    return _svg("Attack scores with intervals, baselines and ceilings", parts, label + wide + 70, height)


def _mark(x: float, y: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} {y - 11}v22"/>'


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _svg(title: str, parts: list[str], width: int, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:{width}px"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
