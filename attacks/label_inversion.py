"""Batch label inversion: from sums of gradients over batches back to single labels.

Homomorphic encryption or aggregation may hide single gradients and show a party only the gradient of its own
weights, summed over a batch. With its features X the party knows X_b^T r_b for each batch b, r being the
residuals p - y. It looks for labels, and for what the other parties' logits may be, that explain all sums.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from securevfl.attacks.contract import Evidence, Guess, Info, Need, Score, Truth
from securevfl.attacks.label import LabelAttack
from securevfl.attacks.reading import Answers, Floats, Rows, answers
from securevfl.attacks.scoring import score_accuracy
from securevfl.models import output_width

_STEPS = 400
_VISITS = 20_000
_RATE = 0.1
_CALM = 1e-3  # weight of the belief that the others' logits are moderate


class BatchLabelInversion(LabelAttack):
    """Gradient matching on batch sums alone; the single gradients of the view are added up first."""

    name = "batch-label-inversion"
    metric = "accuracy"
    summary = "finds the labels that explain the batch sums of the party's own weight gradients"
    source = "Zou et al., Defending Batch-Level Label Inference and Replacement Attacks in VFL, 2022"
    tasks = ("binary", "multiclass")
    needs = (Need("own features"),)

    def misfit(self, info: Info) -> str:
        """Only for linear encoders is the weights' gradient a function of features and residuals alone."""
        if info.plan.model != "linear":
            return f"the {info.plan.model} encoder's weights at each step are not in the view"
        if info.plan.head != "sum":
            return f"the label holder's {info.plan.head} model stands between embeddings and logits"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Adam on dummy labels and dummy logits of the others, jointly over all batches."""
        info = evidence.info
        seen = _first_visits(answers(evidence.view, info.observer))
        features = np.asarray(evidence.auxiliary[f"own_features/{info.observer}"], np.float64)
        rows, place = np.unique(seen.rows, return_inverse=True)
        sums = _batch_sums(seen, features)
        problem = _Matching(features[seen.rows], place, seen.batch, sums, len(rows))
        labels = problem.solve(output_width(info.task, info.classes), evidence)
        return {"rows": rows, "guess": labels}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Share of right labels against always naming the most frequent one."""
        return score_accuracy(np.rint(truth["labels"][guess["rows"]]), guess["guess"])


def _first_visits(seen: Answers) -> Answers:
    """Whole batches with about the first `_VISITS` visits: early residuals are the largest and tell most."""
    last = seen.batch[min(_VISITS, len(seen.batch)) - 1]
    keep = seen.batch <= last
    return Answers(seen.rows[keep], seen.batch[keep], seen.gradients[keep])


def _batch_sums(seen: Answers, features: Floats) -> Floats:
    """What an aggregated channel shows: (batches, features, outputs)."""
    sums = np.zeros((int(seen.batch[-1]) + 1, features.shape[1], seen.gradients.shape[1]))
    np.add.at(sums, seen.batch, features[seen.rows][:, :, None] * seen.gradients[:, None, :])
    return sums


class _Matching:
    """The search for labels of `records` whose residuals add up to the batch sums."""

    def __init__(self, features: Floats, place: Rows, batch: Rows, sums: Floats, records: int) -> None:
        sizes = np.bincount(batch)
        slot = np.arange(len(batch)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        padded = np.zeros((len(sizes), features.shape[1], int(sizes.max())))
        padded[batch, :, slot] = features / sizes[batch][:, None]
        self.features = torch.from_numpy(padded)
        self.sums = torch.from_numpy(sums)
        # Empty slots have features 0, so it does not matter that they point to record 0.
        self.place = torch.zeros(padded.shape[::2], dtype=torch.int64)
        self.place[torch.from_numpy(batch), torch.from_numpy(slot)] = torch.from_numpy(place)
        self.records = records

    def solve(self, width: int, evidence: Evidence) -> Rows:
        """The most likely label of each record: labels stay, the others' logits change with each visit."""
        labels = torch.zeros((self.records, width), dtype=torch.float64, requires_grad=True)
        logits = torch.zeros((*self.place.shape, width), dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([labels, logits], lr=_RATE)
        scale = float((self.sums**2).mean()) or 1.0
        for step in range(_STEPS):
            optimiser.zero_grad(set_to_none=True)
            residuals = _probabilities(logits) - _probabilities(labels)[self.place]
            miss = ((self.features @ residuals - self.sums) ** 2).mean()
            (miss / scale + _CALM * (logits**2).mean()).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if step % 50 == 0:
                evidence.progress(step / _STEPS)
        found = labels.detach().numpy()
        return found.argmax(axis=1) if width > 1 else (found[:, 0] > 0).astype(np.int64)


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1) if logits.shape[-1] > 1 else torch.sigmoid(logits)
