"""From guesses to scores: the metrics of attacks with their 95 % intervals.

Intervals treat records as independent draws: they say how sure the figure is for records like these, not how
it would vary from run to run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from securevfl.attacks import statistics
from securevfl.attacks.contract import Score
from securevfl.attacks.statistics import Interval


def _score(metric: str, found: Interval, baseline: float, note: str) -> Score:
    return Score(
        metric=metric, score=found.value, low=found.low, high=found.high, baseline=baseline, note=note
    )


def auc_of(labels: ArrayLike, scores: ArrayLike) -> Interval:
    """Area under the ROC curve of scores for 0/1 labels."""
    positive, values = np.asarray(labels) > 0.5, np.asarray(scores, np.float64)
    return statistics.auc(values[positive], values[~positive])


def score_auc(labels: ArrayLike, scores: ArrayLike, *, baseline: float = 0.5, note: str = "") -> Score:
    """AUC of scores for 0/1 labels."""
    return _score("auc", auc_of(labels, scores), baseline, note)


def score_accuracy(
    truth: ArrayLike, guess: ArrayLike, *, baseline: float | None = None, note: str = ""
) -> Score:
    """Share of right guesses. The default baseline always names the most frequent label."""
    labels = np.asarray(truth)
    found = statistics.proportion(int((labels == np.asarray(guess)).sum()), len(labels))
    if baseline is None:
        baseline = float(np.unique(labels, return_counts=True)[1].max() / len(labels))
    return _score("accuracy", found, baseline, note)


def score_recovered(hits: ArrayLike, *, baseline: float = 0.0, note: str = "") -> Score:
    """Share of values that were recovered."""
    found = np.asarray(hits, bool).ravel()
    return _score("recovered", statistics.proportion(int(found.sum()), len(found)), baseline, note)


def score_mse(truth: ArrayLike, guess: ArrayLike, *, baseline: float, note: str = "") -> Score:
    """Mean squared error per feature; the interval is that of a mean over records."""
    squares = (np.asarray(truth, np.float64) - np.asarray(guess, np.float64)) ** 2
    return _score("mse", statistics.mean(squares.mean(axis=1), low=0.0), baseline, note)


def score_count(found: int, *, note: str = "") -> Score:
    """A number of findings, which is exact."""
    return _score("count", Interval(float(found), float(found), float(found)), 0.0, note)


def spread_of(truth: ArrayLike) -> float:
    """Mean squared error of somebody who knows nothing but each column's mean."""
    return float(np.asarray(truth, np.float64).var(axis=0).mean())
