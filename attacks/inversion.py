"""Embedding inversion: from embeddings back to features, with and without the encoder's weights."""

from __future__ import annotations

import numpy as np
import torch

from securevfl.attacks.contract import Evidence, Guess, Info, Need, Score, Truth
from securevfl.attacks.feature import (
    EmbeddingAttack,
    inside,
    prior_of,
    profile,
    score_features,
    seen_embeddings,
)
from securevfl.attacks.reading import Floats, Release, Rows
from securevfl.attacks.rebuild import (
    cannot_rebuild,
    fresh_encoder,
    generator_from,
    load_weights,
    named,
    standardised,
)
from securevfl.privacy.gate import clip_rows

_RIDGES = np.logspace(-6, 3, 19)
_WIDTHS = (1.0, 3.0, 10.0)  # of Gaussian kernels, in units of the median distance
_STEPS, _RATE = 400, 0.05


class BlackBoxInversion(EmbeddingAttack):
    """The attacker knows some records of the owner and learns a decoder from them."""

    name = "embedding-inversion"
    metric = "mse"
    summary = "learns a decoder from embeddings to features on 100 known records"
    source = "He, Zhang, Lee: Model Inversion Attacks Against Collaborative Inference, ACSAC 2019"
    needs = (Need("known records", 100),)

    def run(self, evidence: Evidence) -> Guess:
        """Kernel ridge regression; kernel and penalty are chosen by leave-one-out on the known records."""
        rows, inputs = profile(seen_embeddings(evidence))
        known = evidence.auxiliary["known_records/rows"].astype(np.int64)
        have = np.isin(known, rows)
        targets = np.asarray(evidence.auxiliary["known_records/values"], np.float64)[have]
        place = np.searchsorted(rows, known[have])
        inputs = standardised(inputs)
        rest = ~np.isin(rows, known)
        return {"rows": rows[rest], "features": decode(inputs[place], targets, inputs[rest])}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Mean squared error per feature."""
        return score_features(guess, truth)


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
    metric = "mse"
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
        optimiser = torch.optim.Adam([found], lr=_RATE)
        for step in range(_STEPS):
            optimiser.zero_grad(set_to_none=True)
            vectors = clip_rows(encoder(found), info.plan.clip) if info.plan.sigma else encoder(found)
            miss = ((vectors - target) ** 2).sum() / noise
            (miss + (((found - middle) / spread) ** 2).sum()).backward()
            optimiser.step()
            if step % 50 == 0:
                evidence.progress(step / _STEPS)
        return {"rows": rows, "features": inside(found.detach().numpy().astype(np.float64), bounds)}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Mean squared error per feature."""
        return score_features(guess, truth)


def _final(found: list[Release]) -> tuple[Rows, Floats]:
    """Embeddings of the last evaluation, made by the encoder that was saved; else the last upload."""
    evaluated = [one for one in found if one.purpose == "evaluation"]
    if not evaluated:
        return found[-1].rows, found[-1].values
    rows = np.concatenate([one.rows for one in evaluated])[::-1]
    values = np.concatenate([one.values for one in evaluated])[::-1]
    unique, first = np.unique(rows, return_index=True)
    return unique, values[first]
