"""Membership inference with shadow runs: was a record used in training?

The likelihood-ratio attack trains many models on random halves of records like the run's own, the candidates
among them. For each candidate it thus knows how the model treats it with and without training on it, and asks
which of the two the real model's answer looks like.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap

from securevfl.attacks import statistics
from securevfl.attacks.contract import (
    Arrays,
    Attack,
    Evidence,
    Family,
    Guess,
    Info,
    Need,
    Score,
    Truth,
    score_interval,
)
from securevfl.attacks.feature import no_embeddings
from securevfl.attacks.reading import Floats
from securevfl.attacks.rebuild import (
    JointModel,
    cannot_rebuild,
    class_logits,
    clips_embeddings,
    fresh_encoder,
    fresh_head,
    generator_from,
)
from securevfl.models import PreparedLinear, task_loss
from securevfl.models.seeds import torch_generator

SHADOWS = 16
_POOL = 4000  # records that shadow models are drawn from, candidates first
_LOWEST = 1e-3  # the customary rate of false positives, where there are enough non-members for it


class MembershipAttack(Attack):
    """Likelihood ratios from shadow models."""

    family: ClassVar[Family] = "membership"
    metric = "tpr"
    source = "Carlini et al., Membership Inference Attacks From First Principles, S&P 2022"
    needs = (Need("candidates"), Need("shadow records"))
    truth = ("members",)

    def why_not(self, info: Info) -> str:
        """Models must be rebuilt and learn classes."""
        if info.task == "regression":
            return "it compares confidences in a class; the task is regression"
        if "lstm" in info.plan.models(info.parties):
            return "shadow models of lstm encoders cannot be trained side by side"
        return cannot_rebuild(info) or self.misfit(info)

    def misfit(self, info: Info) -> str:
        """A further reason of the attack's own; empty if there is none."""
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Log-likelihood ratio of each candidate."""
        shadows = Shadows(evidence)
        shadows.train(evidence)
        return {"scores": likelihood_ratio(self.observed(evidence), self.answers(shadows), shadows.inside)}

    @abstractmethod
    def observed(self, evidence: Evidence) -> Floats:
        """The real model's statistic of each candidate: (candidates, values)."""

    @abstractmethod
    def answers(self, shadows: Shadows) -> Floats:
        """The same of every shadow model: (shadows, candidates, values)."""

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Members found at the smallest rate of false positives that the non-members resolve."""
        members = truth["members"].astype(bool)
        scores = guess["scores"]
        rate = max(_LOWEST, statistics.smallest_rate(int((~members).sum())))
        found = statistics.tpr_at(rate, scores[members], scores[~members])
        area = statistics.auc(scores[members], scores[~members]).value
        note = f"at a false positive rate of {rate:.3g}; AUC {area:.3f}; {SHADOWS} shadow models"
        return score_interval("tpr", found, min(1.0, rate), note)


def likelihood_ratio(observed: Floats, answers: Floats, inside: NDArray[np.bool_]) -> Floats:
    """Gaussians with a mean per candidate and world, and a variance common to all candidates.

    Args:
        observed: (candidates, values).
        answers: (shadows, candidates, values).
        inside: (shadows, candidates), whether the shadow model was trained on the candidate.
    """
    ratio = np.zeros(len(observed))
    for sign, world in ((1, inside), (-1, ~inside)):
        weight = world[:, :, None]
        count = np.maximum(weight.sum(axis=0), 1)
        mean = (answers * weight).sum(axis=0) / count
        spread = (((answers - mean) ** 2) * weight).sum(axis=(0, 1)) / max(
            1, int(world.sum()) - len(observed)
        )
        variance = np.maximum(spread, 1e-12) * (1 + 1 / count)
        ratio -= sign * (((observed - mean) ** 2) / variance + np.log(variance)).sum(axis=1) / 2
    return ratio


def shadow_model(info: Info) -> JointModel:
    """A model of the plan's architecture, its first weights those that the run's seed gives."""
    model = JointModel(
        info,
        (
            fresh_encoder(info, party, torch_generator(info.plan.seed, "encoder", index))
            for index, party in enumerate(info.parties)
        ),
        fresh_head(info, torch_generator(info.plan.seed, "head")),
    )
    for encoder in model.encoders:
        if isinstance(encoder, PreparedLinear):  # what a party made of its rows is not public; the clip is
            encoder.prepare(centre=encoder.centre, scale=torch.ones_like(encoder.scale), clip=info.plan.clip)
    return model


def _trained(info: Info) -> tuple[str, ...]:
    """How the names of parameters begin that the plan trains."""
    if info.plan.encoder_training != "none":
        return ("head.", "encoders.")
    own = info.label_holder in info.parties
    return ("head.", *([f"encoders.{info.parties.index(info.label_holder)}."] if own else []))


class Shadows:
    """Shadow models, all trained at once, each on a random half of the records that the attacker has.

    Attributes:
        count: Number of candidates.
        inside: (shadows, candidates), whether a model was trained on a candidate.
    """

    def __init__(self, evidence: Evidence) -> None:
        given, self.info = evidence.auxiliary, evidence.info
        self.codes = np.rint(given["candidates/labels"]).astype(np.int64)
        self.count = len(self.codes)
        labels = np.concatenate([given["candidates/labels"], given["shadow_records/labels"]])[:_POOL]
        self._labels = torch.from_numpy(np.array(labels))
        self._blocks = [_joined(given, f"features/{party}")[:_POOL] for party in self.info.parties]
        self._model = shadow_model(self.info)
        state = dict(self._model.named_parameters())
        self._weights = {
            name: value.detach()
            .repeat(SHADOWS, *([1] * value.ndim))
            .requires_grad_(name.startswith(_trained(self.info)))
            for name, value in state.items()
        }
        size = len(labels)
        self._halves = np.stack([evidence.rng.permutation(size)[: size // 2] for _ in range(SHADOWS)])
        self.inside = np.stack([np.isin(np.arange(self.count), half) for half in self._halves])
        self._generator = generator_from(evidence.rng)

    def train(self, evidence: Evidence) -> None:
        """The plan's optimiser, epochs and batches, on pooled features."""
        plan, trained = self.info.plan, [w for w in self._weights.values() if w.requires_grad]
        rate = plan.learning_rate
        if plan.mode == "sealed":  # its unit is half the inverse smoothness of the logistic loss
            rate *= 2 / (len(self.info.parties) * plan.clip**2)
        optimiser: torch.optim.Optimizer = torch.optim.SGD(
            trained,
            lr=rate,
            weight_decay=plan.l2,
            momentum=0.9 if plan.optimiser == "momentum" else 0.0,
        )
        if plan.optimiser == "adam":
            optimiser = torch.optim.Adam(trained, lr=rate, weight_decay=plan.l2)
        for epoch in range(plan.epochs):
            order = torch.from_numpy(evidence.rng.permuted(self._halves, axis=1))
            for rows in torch.split(order, plan.batch, dim=1):
                optimiser.zero_grad(set_to_none=True)
                self._loss(rows).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            evidence.progress((epoch + 1) / plan.epochs)

    def _loss(self, rows: Tensor) -> Tensor:
        """The sum of all models' mean losses, each on its own rows: (shadows, batch)."""
        blocks = [block[rows] for block in self._blocks]
        noise = [self._noise(party, rows.shape) for party in self.info.parties]

        def one(weights: dict[str, Tensor], blocks: list[Tensor], noise: list[Tensor]) -> Tensor:
            outputs: Tensor = functional_call(self._model, weights, (blocks, noise))
            return outputs

        outputs = vmap(one)(self._weights, blocks, noise)
        labels = self._labels[rows]
        mean = task_loss(
            self.info.task, outputs.flatten(0, 1), labels.flatten(0, 1), loss=self.info.plan.loss
        )
        return mean * SHADOWS

    def _noise(self, party: str, shape: torch.Size) -> Tensor:
        leaves = party != self.info.label_holder and clips_embeddings(self.info.plan)
        sigma = self.info.plan.sigma if leaves else 0.0
        size = (*shape, *self.info.plan.widths([party]))
        return sigma * torch.randn(size, generator=self._generator) if sigma else torch.zeros(size)

    def outputs(self) -> Tensor:
        """Raw outputs for the candidates: (shadows, candidates, outputs)."""
        return self._apply(lambda blocks: self._model(blocks))

    def embeddings(self, party: str) -> Tensor:
        """A party's embeddings of the candidates: (shadows, candidates, width)."""
        index = self.info.parties.index(party)
        return self._apply(lambda blocks: self._model.embed(blocks)[index])

    def _apply(self, function: Callable[[list[Tensor]], Tensor]) -> Tensor:
        blocks = [block[: self.count] for block in self._blocks]
        found = []
        with torch.no_grad():
            for number in range(SHADOWS):
                weights = {name: w[number] for name, w in self._weights.items()}
                self._model.load_state_dict(dict(self._model.named_buffers()) | weights)
                found.append(function(blocks))
        return torch.stack(found)


def _joined(given: Arrays, name: str) -> Tensor:
    parts = [given[f"candidates/{name}"], given[f"shadow_records/{name}"]]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _confidence(probabilities: Floats, labels: NDArray[np.int64]) -> Floats:
    """log(p / (1 - p)) of the true class: (..., records, 1)."""
    of_class = probabilities[..., np.arange(len(labels)), labels]
    bounded = np.clip(of_class, 1e-7, 1 - 1e-7)
    return np.asarray(np.log(bounded) - np.log1p(-bounded))[..., None]


class PredictionMembership(MembershipAttack):
    """From the prediction service's confidence in the true class."""

    name = "membership-predictions"
    summary = "compares the model's confidence in a record with that of shadow models with and without it"

    def misfit(self, info: Info) -> str:
        """All parties' records are predicted together, so one owner stands for all."""
        stands_for_all = info.label_holder if info.label_holder in info.parties else info.parties[0]
        if info.owner != stands_for_all:
            return f"predictions are the same for every owner; see {stands_for_all}"
        return ""

    def observed(self, evidence: Evidence) -> Floats:
        """Confidence of the real model."""
        codes = np.rint(evidence.auxiliary["candidates/labels"]).astype(np.int64)
        return _confidence(evidence.auxiliary["candidates/predictions"].astype(np.float64), codes)

    def answers(self, shadows: Shadows) -> Floats:
        """Confidence of the shadow models."""
        outputs = class_logits(shadows.outputs().double(), shadows.info.task)
        return _confidence(torch.softmax(outputs, dim=-1).numpy(), shadows.codes)


class EmbeddingMembership(MembershipAttack):
    """From the embeddings that the owner's encoder gives."""

    name = "membership-embeddings"
    summary = "compares a record's embedding with those of shadow encoders trained with and without it"

    def misfit(self, info: Info) -> str:
        """The observer must be one that gets embeddings, of an encoder that learned."""
        if info.plan.encoder_training == "none":
            return "encoders are not trained, so embeddings do not depend on who was in training"
        return no_embeddings(info)

    def observed(self, evidence: Evidence) -> Floats:
        """Embeddings of the real encoder."""
        return np.asarray(evidence.auxiliary["candidates/embeddings"], np.float64)

    def answers(self, shadows: Shadows) -> Floats:
        """Embeddings of the shadow encoders."""
        return np.asarray(shadows.embeddings(shadows.info.owner).double().numpy())
