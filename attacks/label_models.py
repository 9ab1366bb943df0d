"""Label attacks that fit a model: completion of the party's own encoder, and gradient matching on batch sums.

Model completion: a party puts a head on its own trained encoder, from a few labels that it knows.

Training pushed the encoder towards the labels, so it may do more with few labels than the raw features can.
Whether it does is what counts: the baseline is the same procedure with an untrained encoder.

Batch label inversion: from sums of gradients over batches back to single labels.

Homomorphic encryption or aggregation may hide single gradients and show a party only the gradient of its own
weights, summed over a batch. With its features X the party knows X_b^T r_b for each batch b, r being the
residuals p - y. It looks for labels, and for what the other parties' logits may be, that explain all sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from securevfl.attacks.contract import Evidence, Guess, Info, Need, Score, Truth, score_accuracy
from securevfl.attacks.label import LabelAttack, known_labels
from securevfl.attacks.reading import Answered, Floats, Rows, answers
from securevfl.attacks.rebuild import (
    cannot_rebuild,
    fresh_encoder,
    generator_from,
    load_weights,
    minimise,
    named,
)
from securevfl.models import output_width

_STEPS = 300
_RATE = 5e-3
_POOL = 2000  # unlabelled records that are used, and records that are guessed
_JITTER = 0.1  # augmentation: Gaussian noise, in standard deviations of each column
_SHARPEN, _MIX, _WEIGHT = 0.5, 0.75, 1.0  # MixMatch: temperature, Beta parameter, weight of guessed labels


class _Task(NamedTuple):
    """Few labelled and many unlabelled records."""

    labelled: Tensor
    targets: Tensor
    unlabelled: Tensor
    spread: Tensor


class ModelCompletion(LabelAttack):
    """The passive form: the party trained honestly."""

    name = "model-completion"
    metric = "accuracy"
    summary = "fine-tunes the party's own encoder with a new head on 40 known labels, semi-supervised"
    source = "Fu et al., Label Inference Attacks Against Vertical Federated Learning, USENIX Security 2022"
    tasks = ("binary", "multiclass")
    sees = ()
    needs = (Need("own model"), Need("own features"), Need("known labels", 40))

    def misfit(self, info: Info) -> str:
        """The encoder must be trained, and be one that can be rebuilt."""
        if info.plan.encoder_training == "none":
            return "encoders are not trained, so the party's own knows nothing of the labels"
        return cannot_rebuild(info) or self.not_played(info)

    def not_played(self, info: Info) -> str:
        """Why the party did not do what this form of the attack does; empty if it did."""
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Completes the trained encoder, and for comparison a new one."""
        info, party = evidence.info, evidence.info.observer
        features = torch.from_numpy(np.array(evidence.auxiliary[f"own_features/{party}"], np.float32))
        rows, labels = known_labels(evidence)
        others = np.setdiff1d(np.arange(info.n_train), rows)
        others = np.sort(evidence.rng.permutation(others)[:_POOL])
        task = _Task(
            labelled=features[torch.from_numpy(rows)],
            targets=functional.one_hot(torch.from_numpy(labels), info.classes).float(),
            unlabelled=features[torch.from_numpy(others)],
            spread=features[: info.n_train].std(dim=0),
        )
        generator = generator_from(evidence.rng)
        weights = named(evidence.auxiliary, "own_model/")
        trained = load_weights(fresh_encoder(info, party, generator), weights, party)
        guess = _complete(trained, info, task, generator, lambda done: evidence.progress(done / 2))
        raw = fresh_encoder(info, party, generator)
        plain = _complete(raw, info, task, generator, lambda done: evidence.progress((1 + done) / 2))
        return {"rows": others, "guess": guess, "raw": plain}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """Accuracy against the better of an untrained encoder and always naming the most frequent label."""
        labels = np.rint(truth["labels"][guess["rows"]])
        raw = float((guess["raw"] == labels).mean())
        frequent = float(np.unique(labels, return_counts=True)[1].max() / len(labels))
        note = f"same labels on raw features: {raw:.3f}; most frequent label: {frequent:.3f}"
        return score_accuracy(labels, guess["guess"], baseline=max(raw, frequent), note=note)


class ActiveModelCompletion(ModelCompletion):
    """The active form: the party enlarged its own updates, so that the others lean on its encoder."""

    name = "model-completion-active"
    summary = "model completion by a party that scaled up its own gradients while it trained"

    def not_played(self, info: Info) -> str:
        """An attack on training cannot be added to a run that is over."""
        if info.plan.optimisers.get(info.observer, info.plan.optimiser) != "malicious":
            return (
                f"{info.observer} trained honestly; an active attacker takes part in the run: train with"
                f' optimisers.{info.observer} = "malicious"'
            )
        return ""


def _complete(
    encoder: nn.Module,
    info: Info,
    task: _Task,
    generator: torch.Generator,
    progress: Callable[[float], None],
) -> NDArray[np.int64]:
    """MixMatch (Berthelot et al. 2019) on encoder and new head; returns labels of the unlabelled records."""
    own = info.plan.encoder(info.observer)
    head = nn.Linear(own.embedding, info.classes)
    with torch.no_grad():
        head.weight.normal_(0, 0.1, generator=generator)
        head.bias.zero_()
    model = nn.Sequential(encoder.requires_grad_(), nn.ReLU() if own.model == "mlp" else nn.Identity(), head)

    def loss(step: int) -> Tensor:
        return _mixmatch_loss(model, task, generator, min(1.0, step / (_STEPS / 2)))

    minimise(loss, model.parameters(), rate=_RATE, steps=_STEPS, progress=progress, decay=1e-4)
    with torch.no_grad():
        found: NDArray[np.int64] = model(task.unlabelled).argmax(dim=1).numpy()
    return found


def _mixmatch_loss(model: nn.Module, task: _Task, generator: torch.Generator, ramp: float) -> Tensor:
    count = len(task.labelled)
    picked = torch.randint(len(task.unlabelled), (count,), generator=generator)
    views = [_jitter(task.unlabelled[picked], task.spread, generator) for _ in range(2)]
    with torch.no_grad():
        mean = sum(torch.softmax(model(view), dim=1) for view in views) / 2
        sharp = mean ** (1 / _SHARPEN)
        guessed = sharp / sharp.sum(dim=1, keepdim=True)
    inputs = torch.cat([_jitter(task.labelled, task.spread, generator), *views])
    targets = torch.cat([task.targets, guessed, guessed])
    order = torch.randperm(len(inputs), generator=generator)
    share = _mix_share(generator)
    outputs = model(share * inputs + (1 - share) * inputs[order])
    mixed = share * targets + (1 - share) * targets[order]
    supervised = -(mixed[:count] * torch.log_softmax(outputs[:count], dim=1)).sum(dim=1).mean()
    consistent = ((torch.softmax(outputs[count:], dim=1) - mixed[count:]) ** 2).mean()
    return supervised + ramp * _WEIGHT * consistent


def _mix_share(generator: torch.Generator) -> float:
    """The larger share of a Beta(a, a) mixture, from two Gamma variables of shape a by powers of uniforms."""
    while True:  # Joehnk's method; accepts with probability above 0.6 for a = 0.75
        left, right = (torch.rand(2, generator=generator) ** (1 / _MIX)).tolist()
        if 0 < left + right <= 1:
            share = left / (left + right)
            return float(max(share, 1 - share))


def _jitter(values: Tensor, spread: Tensor, generator: torch.Generator) -> Tensor:
    return values + _JITTER * spread * torch.randn(values.shape, generator=generator)


_MATCH_STEPS = 400
_VISITS = 20_000
_MATCH_RATE = 0.1
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
        model = info.plan.encoder(info.observer).model
        if model != "linear":
            return f"the {model} encoder's weights at each step are not in the view"
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


def _first_visits(seen: Answered) -> Answered:
    """Whole batches with about the first `_VISITS` visits: early residuals are the largest and tell most."""
    last = seen.batch[min(_VISITS, len(seen.batch)) - 1]
    keep = seen.batch <= last
    return Answered(seen.rows[keep], seen.batch[keep], seen.gradients[keep])


def _batch_sums(seen: Answered, features: Floats) -> Floats:
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
        scale = float((self.sums**2).mean()) or 1.0

        def loss(step: int) -> Tensor:
            residuals = _probabilities(logits) - _probabilities(labels)[self.place]
            miss = ((self.features @ residuals - self.sums) ** 2).mean()
            return miss / scale + _CALM * (logits**2).mean()

        minimise(loss, [labels, logits], rate=_MATCH_RATE, steps=_MATCH_STEPS, progress=evidence.progress)
        found = labels.detach().numpy()
        return found.argmax(axis=1) if width > 1 else (found[:, 0] > 0).astype(np.int64)


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1) if logits.shape[-1] > 1 else torch.sigmoid(logits)
