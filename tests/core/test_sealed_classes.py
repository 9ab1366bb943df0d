"""Several classes: residuals of a record are bounded together, counted by brute force, and learnt from."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.card import geometry_of
from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.protocols.sealed import class_series
from securevfl.protocols.sealed.series import class_reach


def geometry(
    classes: int = 4, *, parties: int = 2, adversary: str = "auto", **fields: object
) -> SealedGeometry:
    rows = np.random.default_rng(0).uniform(-1, 1, (900, 2 * parties))
    data = VerticalData.from_arrays(
        [rows[:, 2 * i : 2 * i + 2] for i in range(parties)],
        np.arange(900) % classes,
        task="multiclass",
        bounds=[(-1.0, 1.0)] * parties,
    )
    plan = Plan(algorithm="sealed", epsilon=4.0, settings={"adversary": adversary}, **fields)
    return geometry_of(*resolve(plan, data))


@pytest.mark.parametrize("classes", [3, 4, 10, 50])
def test_one_function_is_the_residual_of_own_and_other_records(classes: int) -> None:
    series, reach = class_series(classes), class_reach()
    scores = np.linspace(-reach, reach, 4001)
    logistic = 1 / (1 + np.exp(-scores))
    weight = 1 / math.sqrt(classes - 1)
    # Within .035 at the ends of the reach, and .004 in the mean.
    for found, wanted in (
        (series(scores), weight * logistic),
        (series(scores + series.period / 2), logistic - 1),
    ):
        assert np.abs(found - wanted).max() < 0.035 and np.sqrt(np.mean((found - wanted) ** 2)) < 0.005


@pytest.mark.parametrize("parties, collusion", [(2, 1), (3, 2)])
def test_no_neighbour_moves_totals_further_than_is_counted(parties: int, collusion: int) -> None:
    """Every coalition, every class and every corner of all scores, with rows that turn round."""
    settings, classes = geometry(parties=parties, collusion=collusion), 4
    shifts, series, reach = settings.shifts, settings.series, class_reach()
    variances = shifts.variances(mu=1.0, colluders=collusion)
    corners = np.array(list(itertools.product((-reach, 0.0, reach), repeat=classes)))
    half = series.period / 2
    residuals = np.stack([series(corners + half * np.eye(classes)[y]) for y in range(classes)])
    assert np.linalg.norm(residuals, axis=-1).max() <= shifts.residual_bound
    for coalition in shifts.coalitions(collusion):
        unknown = [sum(v for j, v in enumerate(variances[m]) if j not in coalition) for m in range(parties)]
        worst = 0.0
        for y, z in itertools.product(range(classes), repeat=2):
            if 0 in coalition and y != z:
                continue
            before, after = residuals[y][:, None], residuals[z][None]
            turned = ((np.abs(before) + np.abs(after)) ** 2).sum(-1)  # an upper bound of what rows can do
            turned = np.minimum(
                turned, (np.linalg.norm(before, axis=-1) + np.linalg.norm(after, axis=-1)) ** 2
            )
            stayed = ((before - after) ** 2).sum(-1)
            square = sum(
                (stayed if m in coalition else turned) * settings.clips[m] ** 2 / unknown[m]
                for m in range(parties)
            )
            worst = max(worst, float(square.max()))
        assert worst <= shifts.squared_mu(variances, coalition) * (1 + 1e-9) <= 1 + 1e-6
        if coalition and len(coalition) == collusion and 0 not in coalition:
            # A coalition's own total moves by less than is counted: residuals of classes never turn round.
            assert worst > 0.6 * shifts.squared_mu(variances, coalition)


def test_labels_alone_move_totals_no_further() -> None:
    settings = geometry(parties=2)
    series, reach, half = settings.series, class_reach(), settings.series.period / 2
    scores = np.linspace(-reach, reach, 2001)
    moved = np.abs(series(scores) - series(scores + half)).max() * math.sqrt(2)
    assert 0.95 * settings.shifts.label_change < moved <= settings.shifts.label_change


def test_more_classes_cost_no_more_noise() -> None:
    few, many = (geometry(classes).shifts.diameter for classes in (3, 30))
    assert many < 1.05 * few
    # Members that may cheat would not clamp their scores: there every class counts by itself.
    proved = geometry(30, adversary="malicious", epochs=5)
    assert not proved.weighted and proved.shifts.diameter > 3 * many


def test_scores_are_clamped_before_they_are_masked() -> None:
    """A score that left the reach would turn another class's residual into that of the own one."""
    settings = geometry()
    assert sum(settings.score_bound(m) for m in range(2)) == pytest.approx(class_reach())
    beyond = settings.series(settings.series.period / 2 - 1)
    assert abs(float(beyond)) > 1.2 * settings.series.between(-class_reach(), class_reach())[1]


def test_classes_are_learnt_at_a_small_epsilon() -> None:
    """Digits at epsilon 1: .46 to .54 with a bound for each class, .56 to .63 with one for all."""
    run = train(VerticalData.load("digits"), Plan(algorithm="sealed", epsilon=1.0))
    assert run.test["accuracy"] > 0.45
