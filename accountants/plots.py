"""Pictures of a promise: what a test can achieve, and epsilon against delta."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from securevfl.accountants.accountants import compositions
from securevfl.accountants.base import Workload, reduce_events
from securevfl.accountants.events import Event
from securevfl.accountants.gdp import gdp_delta
from securevfl.accountants.pairs import Array
from securevfl.errors import AccountingError

_ERRORS = np.concatenate([[0.0], np.logspace(-4, -2, 60), np.linspace(0.0101, 1.0, 400)])


def plot_curves(events: Event | Iterable[Event], path: Path | str, *, delta: float, epsilon: float) -> None:
    """Draw the trade-off curve and the epsilon-delta curve of the events into a file.

    Args:
        events: What was released.
        path: The picture; its suffix (.png, .svg, .pdf) decides the format.
        delta: The delta to mark.
        epsilon: The epsilon at that delta, to mark.

    Raises:
        AccountingError: There is no curve, since epsilon is infinite, or the format is unknown.
    """
    workload = reduce_events(events)
    if workload.exact or not math.isfinite(epsilon):
        raise AccountingError("there is no curve to draw: epsilon is infinite")
    epsilons = np.linspace(0.0, max(2 * epsilon, 1.0), 121)
    deltas = _deltas(workload, epsilons)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [1, 0], color="0.75", linestyle="--", label="perfect privacy")
    left.plot(_ERRORS, trade_off(workload, epsilons, deltas), color="C0", label="this release")
    left.set(xlabel="false alarms of a test", ylabel="misses, at least", title="Trade-off of any test")
    left.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    left.legend(frameon=False)
    right.semilogy(epsilons, np.maximum(deltas, 1e-18), color="C0")
    right.plot([epsilon], [delta], "o", color="C3")
    right.annotate(
        f"epsilon {epsilon:.4g}\ndelta {delta:g}", (epsilon, delta), (8, 8), textcoords="offset points"
    )
    right.set(xlabel="epsilon", ylabel="delta", title="Epsilon against delta")
    right.set(xlim=(0, epsilons[-1]), ylim=(max(float(deltas.min()) / 3, delta * 1e-8), 1.5))
    right.grid(alpha=0.3)
    # Without names and dates an SVG holds no address of others, and the same curve gives the same file.
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type")) if Path(path).suffix == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "securevfl"}):
            figure.savefig(Path(path), dpi=144, metadata=nobody)
    except ValueError as problem:
        raise AccountingError(f"{path} cannot be drawn: {problem}") from problem


def trade_off(workload: Workload, epsilons: Array, deltas: Array) -> Array:
    """Return the least share of misses for each share of false alarms.

    The exact Gaussian curve where there is one, else the envelope of all (epsilon, delta) guarantees
    (Dong, Roth and Su 2022, Proposition 2.12).
    """
    if not workload.sampled and not workload.responses:
        gaussian: Array = ndtr(ndtri(1 - _ERRORS) - workload.mu)
        return gaussian
    slope = np.exp(np.minimum(epsilons, 700.0))[:, None]
    spare = 1 - deltas[:, None]
    lines = np.maximum(spare - slope * _ERRORS, (spare - _ERRORS) / slope)
    envelope: Array = np.maximum(lines, 0.0).max(axis=0)
    return envelope


def _deltas(workload: Workload, epsilons: Array) -> Array:
    if workload.sampled or workload.responses:
        composed = compositions(workload)
        return np.array([max(c.delta(float(e)) for c in composed) for e in epsilons])
    return np.array([gdp_delta(workload.mu, float(e)) for e in epsilons])
