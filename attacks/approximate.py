"""Approximate inference of a single column from its products, by the range that its values must lie in."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securevfl.attacks.contract import Evidence, Guess, Info, Need, Score, Truth
from securevfl.attacks.exact import ExactInference
from securevfl.attacks.feature import prior_of
from securevfl.attacks.moments import Moment, moments
from securevfl.attacks.reading import Floats, Rows
from securevfl.attacks.scoring import score_recovered
from securevfl.errors import AttackError

EPSILON = 0.05  # in shares of the range


class ApproximateInference(ExactInference):
    """Products o_j = w x_j with all x_j in a known range bound w, and so every x_j."""

    name = "approximate-inference"
    summary = "bounds the one weight by the range of the owner's only column, then divides"
    source = "Gu et al., AFSGD-VP, Definition 11 (epsilon-approximate exact inference)"
    needs: ClassVar[tuple[Need, ...]] = (Need("bounds"), Need("known records", 1))

    def misfit(self, info: Info) -> str:
        """It is about a single column."""
        if not info.widths or info.widths[info.parties.index(info.owner)] != 1:
            return f"it infers a single column; {info.owner} has more"
        return super().misfit(info)

    def run(self, evidence: Evidence) -> Guess:
        """The likeliest weight of each message is the smallest that keeps all values in the range."""
        bounds = np.asarray(evidence.auxiliary["bounds/values"], np.float64)
        middle, spread = prior_of(bounds)
        # A standardised column without public bounds hardly leaves three deviations.
        low, high = bounds[0] if not np.isnan(bounds).any() else middle[0] + spread[0] * np.array([-3.0, 3.0])
        owner = frozenset({evidence.info.owner})
        products = [m for m in moments(evidence) if m.parties == owner and len(m.rows) > 1]
        if not products:
            raise AttackError(f"no message holds products of {evidence.info.owner} for several records")
        rows, values = _combine(products, float(low), float(high))
        known = evidence.auxiliary["known_records/rows"].astype(np.int64)
        if low == -high:  # the range is the same for both signs: one known record decides
            values = values * _sign(rows, values, known, evidence.auxiliary["known_records/values"][:, 0])
        rest = ~np.isin(rows, known)
        return {"rows": rows[rest], "values": values[rest], "range": np.array([low, high])}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Share of values within `EPSILON` of the range, against the middle of the range for all of them."""
        low, high = guess["range"]
        reach, actual = EPSILON * (high - low), truth["features"][guess["rows"], 0]
        hits = np.abs(actual - guess["values"]) <= reach
        chance = np.abs(actual - (low + high) / 2) <= reach
        note = f"within {EPSILON:g} of the range [{low:g}, {high:g}]"
        return score_recovered(hits, baseline=float(chance.mean()), note=note)


def _combine(products: list[Moment], low: float, high: float) -> tuple[Rows, Floats]:
    """Mean guess of each record; a message's sign is the one that agrees with earlier messages."""
    total: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for moment in products:
        rows = moment.rows.tolist()
        before = np.array([total[row] / max(1, count[row]) for row in rows])
        seen = np.array([count[row] > 0 for row in rows])
        guess = min(_divided(moment, low, high), key=lambda each: float(np.abs(each - before)[seen].sum()))
        for row, value in zip(rows, guess.tolist(), strict=True):
            total[row] += value
            count[row] += 1
    return np.array(list(total)), np.array([total[row] / count[row] for row in total])


def _divided(moment: Moment, low: float, high: float) -> list[Floats]:
    """Candidates for the records' values, the likelier (with the smaller weight) first."""
    products = moment.values[:, 0]
    sizes = {sign: _smallest_weight(sign * products, low, high) for sign in (1.0, -1.0)}
    order = sorted((sign for sign in sizes if np.isfinite(sizes[sign])), key=lambda sign: sizes[sign])
    found = [np.clip(sign * products / sizes[sign], low, high) for sign in order]
    return found or [np.full(len(products), (low + high) / 2)]


def _sign(rows: Rows, values: Floats, known: Rows, truth: Floats) -> float:
    place = np.flatnonzero(np.isin(known, rows))
    if not len(place):
        return 1.0
    guess = values[[int(np.flatnonzero(rows == row)[0]) for row in known[place]]]
    return 1.0 if float(guess @ truth[place]) >= 0 else -1.0


def _smallest_weight(products: NDArray[np.float64], low: float, high: float) -> float:
    """The smallest w > 0 with all products / w in [low, high]; infinite if there is none."""
    top, bottom = float(products.max()), float(products.min())
    needed = [top / high if high > 0 else (0.0 if top <= 0 else np.inf)]
    needed.append(bottom / low if low < 0 else (0.0 if bottom >= 0 else np.inf))
    weight = max(needed)
    if weight <= 0 or (low > 0 and bottom < weight * low) or (high < 0 and top > weight * high):
        return float("inf")
    return float(weight)
