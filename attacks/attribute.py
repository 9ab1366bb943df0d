"""Attribute inference: one sensitive column of the owner, from its embeddings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from securevfl.attacks.contract import Evidence, Guess, Info, Need, Score, Truth
from securevfl.attacks.feature import EmbeddingAttack, profile, seen_embeddings
from securevfl.attacks.inversion import decode
from securevfl.attacks.reading import Floats
from securevfl.attacks.rebuild import standardised
from securevfl.attacks.scoring import auc_of, score_auc

_FOLDS = 5


class AttributeInference(EmbeddingAttack):
    """Picks the column that embeddings tell most about, and guesses its side of the median."""

    name = "attribute-inference"
    metric = "auc"
    summary = "predicts the owner's best readable column from its embeddings, learned on 100 known records"
    source = "Song, Raghunathan: Information Leakage in Embedding Models, CCS 2020"
    needs = (Need("known records", 100), Need("own features"))

    def run(self, evidence: Evidence) -> Guess:
        """Two predictors, with and without the embeddings; the column is chosen on known records alone."""
        info = evidence.info
        rows, embeddings = profile(seen_embeddings(evidence))
        own = np.hstack([evidence.auxiliary[f"own_features/{name}"] for name in info.observers])[rows]
        without, full = standardised(own), standardised(np.hstack([own, embeddings]))
        known = evidence.auxiliary["known_records/rows"].astype(np.int64)
        have = np.isin(known, rows)
        values = np.asarray(evidence.auxiliary["known_records/values"], np.float64)[have]
        place, sides = np.searchsorted(rows, known[have]), _upper(values).astype(np.float64)
        column = _most_readable(full[place], without[place], sides)
        rest = ~np.isin(rows, known)
        side = sides[:, [column]]
        return {
            "rows": rows[rest],
            "column": np.array([column]),
            "scores": decode(full[place], side, full[rest])[:, 0],
            "without": decode(without[place], side, without[rest])[:, 0],
        }

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """AUC against that of the same predictor without embeddings."""
        column = int(guess["column"][0])
        sides = _upper(truth["features"][guess["rows"]][:, [column]])[:, 0]
        baseline = auc_of(sides, guess["without"]).value
        note = f"column {column} of {info.owner}, above its median or not; the baseline is without embeddings"
        return score_auc(sides, guess["scores"], baseline=baseline, note=note)


def _upper(values: Floats) -> NDArray[np.bool_]:
    """Which values lie above their column's median, or on it where none lies above."""
    cuts = np.median(values, axis=0)
    above = values > cuts
    return np.where(above.any(axis=0), above, values >= cuts)


def _most_readable(full: Floats, without: Floats, sides: Floats) -> int:
    """The column whose side embeddings help most to predict, by cross-validation."""
    gains = np.zeros(sides.shape[1])
    for fold in range(_FOLDS):
        test = np.arange(len(sides)) % _FOLDS == fold
        for sign, inputs in ((1, full), (-1, without)):
            predicted = decode(inputs[~test], sides[~test], inputs[test])
            gains -= sign * ((predicted - sides[test]) ** 2).sum(axis=0)
    balanced = np.minimum(sides.mean(axis=0), 1 - sides.mean(axis=0)) > 0.05
    return int(np.where(balanced, gains, -np.inf).argmax())
