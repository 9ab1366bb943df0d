"""Inference of features from linear products, alone or in totals: exact, or within the column's range.

A linear model's product is o_j(t) = w(t) . x_j with the same weights for all records of one moment. A few
known records of the owner give the rest away: products of enough moments determine every other record. This
refutes the claim that hiding single products in totals prevents exact inference: where the same records are
summed repeatedly, totals do as well (with one mover between two sums, their difference is a column of the
owner's Gram matrix).
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securevfl.attacks.contract import (
    Evidence,
    Guess,
    Info,
    Need,
    Score,
    Truth,
    score_recovered,
)
from securevfl.attacks.feature import FeatureAttack, prior_of
from securevfl.attacks.reading import Floats, Moment, Rows, moments
from securevfl.errors import AttackError
from securevfl.privacy.views import OPENED
from securevfl.settings.protocols import FACTS, HIDING

TOLERANCE = 1e-3  # a value counts as recovered within this much; scaled features have deviations near 1
_EXPLAINED, _LATEST = 1e-6, 3
_CONDITION = 1e4  # equations that amplify rounding of 2^-24 by more than this say nothing sure


class LinearAttack(FeatureAttack):
    """An attack on a party with a linear model."""

    metric = "recovered"
    needs: ClassVar[tuple[Need, ...]] = (Need("known records", 100), Need("public rows"), Need("bounds"))

    def why_not(self, info: Info) -> str:
        """Products of other models are not linear in the features."""
        model = info.plan.encoder(info.owner).model
        if model != "linear":
            return f"it solves linear equations; {info.owner} has a {model} encoder"
        return self.misfit(info)

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Share of values within `TOLERANCE`; the note has the errors."""
        actual = truth["features"][guess["rows"]]
        errors = np.abs(actual - guess["features"])
        # Somebody who names the middle of the range (or 0) for every value is sometimes right by chance, and
        # so is somebody who gives each record what is another's.
        chance = np.abs(actual - guess["middle"]) <= TOLERANCE
        if len(actual) > 1:
            others = np.abs(np.roll(actual, 1, axis=0) - guess["features"]) <= TOLERANCE
            chance = max(chance, others, key=np.mean)
        note = (
            f"within {TOLERANCE:g}; median error {np.median(errors):.2g}, largest {errors.max():.2g};"
            f" {int(guess['equations'][0])} equations per record"
        )
        return score_recovered(errors <= TOLERANCE, baseline=float(chance.mean()), note=note)


def anchors(evidence: Evidence) -> tuple[Rows, Floats]:
    """Records of the owner that the attacker knows: some of the training part, and published ones."""
    given = evidence.auxiliary
    rows = np.concatenate([given["known_records/rows"], given["public_rows/rows"]])
    values = np.concatenate(
        [given["known_records/values"], given[f"public_rows/features/{evidence.info.owner}"]]
    )
    order = np.argsort(rows)
    return rows[order].astype(np.int64), np.asarray(values[order], np.float64)


def answer(evidence: Evidence, rows: Rows, features: Floats, equations: int) -> Guess:
    """The guess for the rows that were not known; where the attack found nothing, the middle."""
    middle = prior_of(np.asarray(evidence.auxiliary["bounds/values"], np.float64))[0]
    if not len(rows):
        rows = np.arange(evidence.info.n_train)
        features = np.tile(middle, (len(rows), 1))
    rest = ~np.isin(rows, anchors(evidence)[0])
    if not rest.any():
        raise AttackError("the attacker knows every record that it could recover")
    return {
        "rows": rows[rest],
        "features": features[rest],
        "middle": middle,
        "equations": np.array([equations]),
    }


class ExactInference(LinearAttack):
    """Single products are in the view: weights from known records, then every record from its products."""

    name = "exact-inference"
    summary = "solves for the weights of each message from known records, then for every record"
    source = "Gu et al., AFSGD-VP, Definition 10 (exact inference), on partial sums"

    def misfit(self, info: Info) -> str:
        """Single products must be seen."""
        if info.plan.protocol in HIDING:
            return f"protocol {info.plan.protocol} hides the products of single parties"
        direct = any(info.received.get(kind) for kind in ("embedding", "plain.value", "tree.subtotal"))
        shared = info.seen.get("snapshot") and info.plan.fusion == "concat"
        return "" if direct or shared else f"{info.observer} sees no product of {info.owner}"

    def run(self, evidence: Evidence) -> Guess:
        """Two rounds of least squares."""
        owner = frozenset({evidence.info.owner})
        products = [moment for moment in moments(evidence) if moment.parties == owner]
        rows, features, equations = from_products(products, *anchors(evidence))
        trained = rows < evidence.info.n_train  # others were multiplied once, after training
        return answer(evidence, rows[trained], features[trained], equations)


def from_products(products: list[Moment], known: Rows, values: Floats) -> tuple[Rows, Floats, int]:
    """Records from products with unknown weights, given some records; also the equations per record.

    Records that are determined well serve as known ones for further messages, until there are no more.
    """
    while True:
        rows, features, sure, equations = _solve_products(products, known, values)
        fresh = sure & ~np.isin(rows, known)
        if not fresh.any():
            return rows, features, equations
        order = np.argsort(np.concatenate([known, rows[fresh]]))
        known = np.concatenate([known, rows[fresh]])[order]
        values = np.concatenate([values, features[fresh]])[order]


def _solve_products(
    products: list[Moment], known: Rows, values: Floats
) -> tuple[Rows, Floats, NDArray[np.bool_], int]:
    """One round: weights of each message from known records, then all records; which of them are sure."""
    left: dict[int, list[Floats]] = defaultdict(list)
    right: dict[int, list[Floats]] = defaultdict(list)
    width = values.shape[1]
    for moment in products:
        have = np.isin(moment.rows, known)
        if have.sum() < width:
            continue
        inputs = values[np.searchsorted(known, moment.rows[have])]
        weights, _, rank, _ = np.linalg.lstsq(inputs, moment.values[have], rcond=None)
        if rank == width:
            for row, value in zip(moment.rows, moment.values, strict=True):
                left[int(row)].append(np.asarray(weights.T, np.float64))
                right[int(row)].append(value)
    rows = np.array(sorted(left), np.int64)
    features, sure = np.zeros((len(rows), width)), np.zeros(len(rows), bool)
    for i, row in enumerate(rows):
        equations, targets = np.concatenate(left[int(row)]), np.concatenate(right[int(row)])
        features[i], _, _, sizes = np.linalg.lstsq(equations, targets, rcond=None)
        sure[i] = len(equations) >= width and sizes[-1] * _CONDITION > sizes[0]
    return rows, features, sure, max((len(np.concatenate(part)) for part in left.values()), default=0)


class TotalsInference(LinearAttack):
    """Only totals are in the view: the owner's columns lie in the space that repeated totals span."""

    name = "exact-inference-totals"
    summary = "regresses known records on repeated totals over the same records, and reads off all others"
    source = "Gram-matrix attack on AFSGD-VP Algorithm 2: repeated totals over the same records"
    needs = (*LinearAttack.needs, Need("own features"))

    def misfit(self, info: Info) -> str:
        """Totals must be in the view."""
        kinds = ("tree.subtotal", OPENED, "scores", "update", "sum")
        summed = info.plan.fusion == "sum" and info.seen.get("snapshot")
        if summed or any(info.seen.get(kind) for kind in kinds):
            return ""
        return f"{info.observer} sees no total that {info.owner} takes part in"

    def run(self, evidence: Evidence) -> Guess:
        """The largest set of records that was summed repeatedly decides."""
        info = evidence.info
        groups: dict[bytes, list[Moment]] = defaultdict(list)
        for moment in moments(evidence):
            if info.owner in moment.parties:
                order = np.argsort(moment.rows)
                rows, values = moment.rows[order], moment.values[order]
                groups[rows.tobytes()].append(Moment(moment.parties, rows, values))
        known, values = anchors(evidence)
        best = max(groups.values(), key=lambda group: _worth(group, known), default=[])
        if not best or _worth(best, known) < 0:
            return answer(evidence, np.zeros(0, np.int64), np.zeros((0, values.shape[1])), 0)
        rows, design = best[0].rows, _design(best, evidence)
        have = np.isin(rows, known)
        targets = values[np.searchsorted(known, rows[have])]
        weights = np.linalg.lstsq(design[have], targets, rcond=None)[0]
        return answer(evidence, rows, design @ weights, sum(m.values.shape[1] for m in best))


def _worth(group: list[Moment], known: Rows) -> int:
    """Equations per record that a group of moments gives; negative where too few of its records are known."""
    equations = sum(moment.values.shape[1] for moment in group)
    return equations if int(np.isin(group[0].rows, known).sum()) >= 2 else -1


def _design(group: list[Moment], evidence: Evidence) -> Floats:
    """Totals of all moments side by side in an orthogonal basis, with the observers' own columns."""
    info, rows = evidence.info, group[0].rows
    totals = np.hstack([moment.values for moment in group])
    basis, sizes, _ = np.linalg.svd(totals, full_matrices=False)
    # Smaller directions are rounding, of the totals or of the decomposition itself.
    floor = max(_rounding(totals, info.plan.protocol) * np.sqrt(totals.size), 2.0**-50 * float(sizes[0]))
    parts = [basis[:, sizes > floor] * np.sqrt(len(rows))]
    if any(set(info.observers) & moment.parties for moment in group):
        own = [evidence.auxiliary[f"own_features/{name}"] for name in info.observers if name in info.parties]
        parts += [np.asarray(block, np.float64)[rows] for block in own] + [np.ones((len(rows), 1))]
    return np.hstack(parts)


def _rounding(totals: Floats, protocol: str) -> float:
    """How far rounding may have moved a total: on the protocol's ring, or as a short float on its way."""
    short = np.array_equal(totals, totals.astype(np.float32))
    return max(FACTS[protocol].rounding, 2.0**-25 * float(np.abs(totals).max()) if short else 0.0)


class ReverseMultiplication(LinearAttack):
    """Steps on known records: o_j(t+1) - o_j(t) = -c x_i . x_j turns each step into an equation for x_j."""

    name = "reverse-multiplication"
    summary = "reads x_i . x_j off the change of products after the owner's step on a known record i"
    source = "Weng et al., Privacy Leakage of Real-World Vertical Federated Learning, 2020"

    def misfit(self, info: Info) -> str:
        """The owner's steps and its single products must be seen, one record per step."""
        if info.plan.batch != 1:
            return f"steps on {info.plan.batch} records at once mix their gradients; it needs batches of one"
        if not info.seen.get("sum-request"):
            return f"the records of {info.owner}'s steps are not announced in this run"
        if info.plan.l2 > 0:
            return "weight decay moves the products besides the known step; it needs l2 = 0"
        if info.plan.protocol in HIDING:
            return f"protocol {info.plan.protocol} hides the products of single parties"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """One equation per step of the owner on a known record between two products of the same records."""
        known, values = anchors(evidence)
        lookup = dict(zip(known.tolist(), values, strict=True))
        left: list[Floats] = []
        right: list[dict[int, float]] = []
        for recent, change in _changes(evidence):
            step, scale = _explain(change, [row for row in recent if row in lookup], lookup)
            if scale:
                left.append(lookup[step])
                right.append({row: value / scale for row, value in change.items()})
        rows, features = _solve_steps(left, right, values.shape[1])
        return answer(evidence, rows, features, len(left))


def _explain(change: dict[int, float], steps: list[int], lookup: dict[int, Floats]) -> tuple[int, float]:
    """Which step moved the products, and c in change = c x_i . x_j; c is 0 where none explains the change."""
    shared = [row for row in change if row in lookup]
    moved = np.array([change[row] for row in shared])
    for step in steps:
        inner = np.array([lookup[step] @ lookup[row] for row in shared])
        square = float(inner @ inner)
        scale = float(inner @ moved) / square if square else 0.0
        if scale and np.linalg.norm(moved - scale * inner) < _EXPLAINED * np.linalg.norm(moved):
            return step, scale
    return -1, 0.0


def _changes(evidence: Evidence) -> list[tuple[list[int], dict[int, float]]]:
    """Changes of products between two sums: the owner's latest steps, and how far each record's moved."""
    info = evidence.info
    found: list[tuple[list[int], dict[int, float]]] = []
    products = iter([m for m in moments(evidence) if m.parties == frozenset({info.owner})])
    before: dict[int, float] = {}
    steps: list[int] = []
    announced: set[tuple[str, int]] = set()
    for seen in evidence.view.messages("sum-request"):
        key = (str(seen.fields["channel"]), int(seen.fields["round"]))
        if key in announced:
            continue
        announced.add(key)
        if str(seen.fields["for"]) == info.owner:
            steps.insert(0, int(seen.fields["rows"][0]))
        if info.hosts[key[0]] not in info.observers:
            continue
        moment = next(products, None)
        if moment is None:
            break
        after = dict(zip(moment.rows.tolist(), moment.values[:, 0].tolist(), strict=True))
        # A step follows its announcement by the time it takes to compute, so the latest few may be meant.
        if before.keys() & after.keys():
            shared = before.keys() & after.keys()
            found.append((steps[:_LATEST], {row: after[row] - before[row] for row in sorted(shared)}))
        before = after
    return found


def _solve_steps(left: list[Floats], right: list[dict[int, float]], width: int) -> tuple[Rows, Floats]:
    rows = sorted({row for part in right for row in part})
    features: NDArray[np.float64] = np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        have = [number for number, part in enumerate(right) if row in part]
        equations = np.array([left[number] for number in have])
        features[i] = np.linalg.lstsq(equations, np.array([right[n][row] for n in have]), rcond=None)[0]
    return np.array(rows, np.int64), features


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
