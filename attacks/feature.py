"""Feature attacks on embeddings: inversion with and without the encoder's weights, and single attributes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securevfl.attacks.contract import (
    Attack,
    Evidence,
    Family,
    Guess,
    Info,
    Need,
    Score,
    Truth,
    auc_of,
    score_auc,
    score_mse,
    spread_of,
)
from securevfl.attacks.reading import Floats, Release, Rows, embeddings_of, last_by_record, mean_by_record
from securevfl.attacks.rebuild import (
    cannot_rebuild,
    fresh_encoder,
    generator_from,
    load_weights,
    minimise,
    named,
    standardised,
)
from securevfl.errors import AttackError
from securevfl.privacy.gate import clip_rows


def no_embeddings(info: Info) -> str:
    """Why the observer has no embedding of the owner by itself; empty if it has."""
    if info.received.get("embedding") and info.plan.protocol == "plain":
        return ""
    if info.seen.get("snapshot") and info.plan.fusion == "concat":
        return ""
    return f"{info.observer} sees no embedding of {info.owner} by itself in this run"


class FeatureAttack(Attack):
    """An attack on the owner's features, scored by the mean squared error against each column's mean."""

    family: ClassVar[Family] = "feature"
    metric: ClassVar[str] = "mse"
    truth = ("features",)

    def misfit(self, info: Info) -> str:
        """A further reason of the attack's own; empty if there is none."""
        return ""

    @classmethod
    def note(cls, info: Info) -> str:
        """What a reader of the score must know besides."""
        return ""

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Mean squared error per feature."""
        features = truth["features"][guess["rows"]]
        return score_mse(features, guess["features"], baseline=spread_of(features), note=cls.note(info))


class EmbeddingAttack(FeatureAttack):
    """An attack on features by an observer that gets the owner's embeddings, noisy or not."""

    def why_not(self, info: Info) -> str:
        """Embeddings must be in the view one by one."""
        return no_embeddings(info) or self.misfit(info)


def seen_embeddings(evidence: Evidence) -> list[Release]:
    """The owner's embeddings in the view.

    Raises:
        AttackError: There are none.
    """
    info = evidence.info
    found = embeddings_of(evidence.view, info.owner, info.parties, info.observer)
    if not found:
        raise AttackError(f"the view of {info.observer} holds no embedding of {info.owner}")
    return found


def profile(released: list[Release]) -> tuple[Rows, Floats]:
    """One vector per record: its mean embedding, which thins out noise, and its last one.

    Records of the evaluation are left out: they were seen by the final encoder alone, and are not comparable.
    """
    found = [one for one in released if one.purpose != "evaluation"]
    rows, last = last_by_record(found)
    together = (
        np.concatenate(parts) for parts in zip(*((one.rows, one.values) for one in found), strict=True)
    )
    return rows, np.hstack([mean_by_record(*together)[1], last])


def split_known(evidence: Evidence, rows: Rows) -> tuple[Rows, Floats, NDArray[np.bool_]]:
    """Places in `rows` of the records that the attacker knows, their features, and which rows are others."""
    known = evidence.auxiliary["known_records/rows"].astype(np.int64)
    have = np.isin(known, rows)
    values = np.asarray(evidence.auxiliary["known_records/values"], np.float64)[have]
    return np.searchsorted(rows, known[have]), values, ~np.isin(rows, known)


def inside(values: Floats, bounds: NDArray[np.float64]) -> Floats:
    """Values moved into their public bounds, where there are some."""
    low, high = bounds.T
    return np.clip(values, np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high))


def prior_of(bounds: Floats) -> tuple[Floats, Floats]:
    """Middle and deviation of features before anything is seen: uniform in the bounds, else standard."""
    known = ~np.isnan(bounds).any(axis=1)
    low, high = np.nan_to_num(bounds).T
    spread = np.where(known & (high > low), (high - low) / np.sqrt(12), 1.0)
    return np.where(known, (low + high) / 2, 0.0), spread


_RIDGES = np.logspace(-6, 3, 19)
_WIDTHS = (1.0, 3.0, 10.0)  # of Gaussian kernels, in units of the median distance
_STEPS, _RATE = 400, 0.05


class BlackBoxInversion(EmbeddingAttack):
    """The attacker knows some records of the owner and learns a decoder from them."""

    name = "embedding-inversion"
    summary = "learns a decoder from embeddings to features on 100 known records"
    source = "He, Zhang, Lee: Model Inversion Attacks Against Collaborative Inference, ACSAC 2019"
    needs = (Need("known records", 100),)

    def run(self, evidence: Evidence) -> Guess:
        """Kernel ridge regression; kernel and penalty are chosen by leave-one-out on the known records."""
        rows, inputs = profile(seen_embeddings(evidence))
        place, targets, rest = split_known(evidence, rows)
        inputs = standardised(inputs)
        return {"rows": rows[rest], "features": decode(inputs[place], targets, inputs[rest])}


def decode(inputs: Floats, targets: Floats, queries: Floats) -> Floats:
    """Predicts targets of the queries by the kernel and ridge with the least leave-one-out error."""
    centre = targets.mean(axis=0)
    scale = float(np.median(_distances(inputs, inputs))) or 1.0
    best, answer = np.inf, np.zeros((len(queries), targets.shape[1]))
    for width in (None, *_WIDTHS):
        kernel, across = _kernel(inputs, inputs, width, scale), _kernel(queries, inputs, width, scale)
        values, vectors = np.linalg.eigh(kernel)
        inner = vectors.T @ (targets - centre)
        for ridge in _RIDGES * max(float(values[-1]), 1e-12) / len(inputs):
            inverse = 1 / (np.maximum(values, 0) + ridge)
            weights = vectors @ (inverse[:, None] * inner)
            left_out = weights / ((vectors**2) @ inverse)[:, None]  # e_i / (K + r)^-1_ii
            error = float((left_out**2).mean())
            if error < best:
                best, answer = error, across @ weights
    return np.asarray(answer + centre)


def _distances(left: Floats, right: Floats) -> Floats:
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0)))


def _kernel(left: Floats, right: Floats, width: float | None, scale: float) -> Floats:
    if width is None:
        return np.asarray(left @ right.T + 1.0)
    return np.asarray(np.exp(-((_distances(left, right) / (width * scale)) ** 2)))


class WhiteBoxInversion(EmbeddingAttack):
    """The attacker has the final encoder and looks for features that it maps to the embeddings."""

    name = "embedding-inversion-white-box"
    summary = "searches the features that the known encoder maps to the embeddings it saw"
    source = "He, Zhang, Lee: Model Inversion Attacks Against Collaborative Inference, ACSAC 2019"
    needs = (Need("model weights"), Need("bounds"))

    def misfit(self, info: Info) -> str:
        """The encoder must be rebuilt, and its embeddings must have been seen when it was final."""
        return cannot_rebuild(info)

    def run(self, evidence: Evidence) -> Guess:
        """Adam on the features of the records evaluated last, for the most likely ones given the noise."""
        info = evidence.info
        rows, values = _final(seen_embeddings(evidence))
        weights = named(evidence.auxiliary, "model_weights/")
        encoder = load_weights(
            fresh_encoder(info, info.owner, generator_from(evidence.rng)), weights, info.owner
        )
        encoder.requires_grad_(False).eval()
        bounds = np.asarray(evidence.auxiliary["bounds/values"], np.float64)
        middle, spread = (torch.from_numpy(part.astype(np.float32)) for part in prior_of(bounds))
        target = torch.from_numpy(values.astype(np.float32))
        # Noise-free embeddings are trusted to a thousandth of their variance.
        noise = info.plan.sigma**2 or 1e-3 * float(target.var()) or 1.0
        found = middle.repeat(len(rows), 1).requires_grad_()

        def unlikeliness(step: int) -> Tensor:
            vectors = clip_rows(encoder(found), info.plan.clip) if info.plan.sigma else encoder(found)
            miss: Tensor = ((vectors - target) ** 2).sum() / noise
            return miss + (((found - middle) / spread) ** 2).sum()

        minimise(unlikeliness, [found], rate=_RATE, steps=_STEPS, progress=evidence.progress)
        return {"rows": rows, "features": inside(found.detach().numpy().astype(np.float64), bounds)}


def _final(found: list[Release]) -> tuple[Rows, Floats]:
    """Embeddings of the last evaluation, made by the encoder that was saved; else the last upload."""
    evaluated = [one for one in found if one.purpose == "evaluation"]
    return last_by_record(evaluated) if evaluated else (found[-1].rows, found[-1].values)


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
        place, values, rest = split_known(evidence, rows)
        sides = _upper(values).astype(np.float64)
        column = _most_readable(full[place], without[place], sides)
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
