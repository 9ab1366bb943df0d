"""Label inference from the gradients that a party gets back, and from its own embeddings.

The observer is a party without labels. It sees, for each record that it uploaded, the gradient of the loss
with respect to its embedding: whatever the label does to the loss is in there.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

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
    score_accuracy,
    score_auc,
)
from securevfl.attacks.reading import (
    Answered,
    Floats,
    Rows,
    answers,
    last_by_record,
    mean_by_record,
    releases,
)
from securevfl.errors import AttackError

_WINDOW = 32  # visits that are compared with each other: a whole batch, or several small ones


def labels_known(info: Info) -> str:
    """Why label inference is vacuous: the observer has the labels anyway. Empty if it has not."""
    if info.has_labels:
        return f"vacuous: {info.observer} holds the labels itself"
    if info.received.get("labels"):
        return f"vacuous: {info.plan.algorithm} gives the labels to every party, {info.observer} included"
    return ""


class LabelAttack(Attack):
    """A label attack by one party.

    Attributes:
        tasks: Tasks it can work on.
        sees: Message kinds of which one must have come from the label holder; none if it needs none.
    """

    family: ClassVar[Family] = "label"
    truth = ("labels",)
    tasks: ClassVar[tuple[str, ...]] = ("binary",)
    sees: ClassVar[tuple[str, ...]] = ("gradient", "derivative", "scores", "update")

    def why_not(self, info: Info) -> str:
        """Vacuous, nothing to see, or another task."""
        vacuous = labels_known(info)
        if vacuous:
            return vacuous
        if self.sees and not any(info.received.get(kind) for kind in self.sees):
            return f"{info.observer} received no gradient of the loss in this run"
        if info.task not in self.tasks:
            return f"it infers the labels of {' and '.join(self.tasks)} tasks; this one is {info.task}"
        return self.misfit(info)

    def misfit(self, info: Info) -> str:
        """A further reason of the attack's own; empty if there is none."""
        return ""

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """AUC over records, or the share of right labels against always naming the most frequent one."""
        labels = truth["labels"][guess["rows"]]
        if cls.metric == "auc":
            return score_auc(labels, guess["scores"])
        return score_accuracy(np.rint(labels), guess["guess"])


def known_labels(evidence: Evidence) -> tuple[Rows, NDArray[np.int64]]:
    """The records whose labels the attacker knows, and those labels."""
    values = np.rint(evidence.auxiliary["known_labels/values"]).astype(np.int64)
    return evidence.auxiliary["known_labels/rows"].astype(np.int64), values


def unknown(rows: Rows, evidence: Evidence) -> NDArray[np.bool_]:
    """Which of the rows the attacker does not know already; only those are scored."""
    return ~np.isin(rows, known_labels(evidence)[0])


def oriented(rows: Rows, scores: Floats, evidence: Evidence) -> Floats:
    """Scores turned so that known positives rank above known negatives on average."""
    known, labels = known_labels(evidence)
    place = {int(row): i for i, row in enumerate(rows)}
    found = [
        (scores[place[int(r)]], label) for r, label in zip(known, labels, strict=True) if int(r) in place
    ]
    ups = [value for value, label in found if label == 1]
    downs = [value for value, label in found if label == 0]
    if not ups or not downs:
        return scores
    return scores if np.mean(ups) >= np.mean(downs) else -scores


class GradientNorm(LabelAttack):
    """The rarer class is predicted worse, so its gradients are longer."""

    name = "gradient-norm"
    metric = "auc"
    summary = "ranks records by the length of the gradient that came back"
    source = "Li et al., Label Leakage and Protection in Two-party Split Learning, ICLR 2022"
    needs = (Need("known labels", 10),)

    def run(self, evidence: Evidence) -> Guess:
        """Ranks within batches, then averages each record's ranks over its visits."""
        seen = answers(evidence.view, evidence.info.observer)
        lengths = np.linalg.norm(seen.gradients, axis=1)
        ranks = _ranks(lengths, seen.batch)
        rows, mean = mean_by_record(seen.rows, ranks)
        scores = oriented(rows, mean, evidence)
        turned = 1.0 if np.array_equal(scores, mean) else -1.0
        keep = unknown(rows, evidence)
        return {
            "rows": rows[keep],
            "scores": scores[keep],
            "visit_rows": seen.rows,
            "visit_batch": seen.batch,
            "visit_scores": lengths * turned,
        }

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """AUC over records; the note gives the leak AUC of single batches."""
        per_batch = _batch_aucs(guess, truth["labels"])
        note = "one score per record, averaged over its visits"
        if per_batch:
            middle, high = np.median(per_batch), np.quantile(per_batch, 0.95)
            note += f"; single batches: median {middle:.3f}, 95 % quantile {high:.3f}"
        return score_auc(truth["labels"][guess["rows"]], guess["scores"], note=note)


def _ranks(values: Floats, batch: NDArray[np.int64]) -> Floats:
    """Ranks in (0, 1] within a batch; batches below `_WINDOW` visits are taken together."""
    ranks = np.empty(len(values))
    start = 0
    edges = [*(np.flatnonzero(np.diff(batch)) + 1), len(values)]
    for end in edges:
        last = end == len(values)
        if end - start < _WINDOW and not last:
            continue
        ranks[start:end] = rankdata(values[start:end]) / (end - start)
        start = end
    return ranks


def _batch_aucs(guess: Guess, labels: NDArray[np.float64]) -> list[float]:
    found = []
    for number in np.unique(guess["visit_batch"]):
        inside = guess["visit_batch"] == number
        truth = labels[guess["visit_rows"][inside]]
        if 0 < truth.mean() < 1:
            found.append(auc_of(truth, guess["visit_scores"][inside]).value)
    return found


class GradientDirection(LabelAttack):
    """Gradients of one class point the same way, away from those of the other."""

    name = "gradient-direction"
    metric = "auc"
    summary = "compares the direction of each gradient with that of one known positive record"
    source = "Li et al., Label Leakage and Protection in Two-party Split Learning, ICLR 2022"
    needs = (Need("known labels", 2),)

    def run(self, evidence: Evidence) -> Guess:
        """Cosine with the known positive's gradient that is nearest in time, averaged over visits."""
        seen = answers(evidence.view, evidence.info.observer)
        units = seen.gradients / np.maximum(np.linalg.norm(seen.gradients, axis=1, keepdims=True), 1e-300)
        known, labels = known_labels(evidence)
        at = np.flatnonzero(np.isin(seen.rows, known[labels == 1]))
        if not len(at):
            raise AttackError("no gradient of a known positive record is in the view")
        nearest = at[np.abs(seen.batch[:, None] - seen.batch[at][None, :]).argmin(axis=1)]
        rows, scores = mean_by_record(seen.rows, (units * units[nearest]).sum(axis=1))
        keep = unknown(rows, evidence)
        return {"rows": rows[keep], "scores": scores[keep]}


class DirectLabels(LabelAttack):
    """Without a top model the gradient of a logit is p - 1[y]: negative for the label and nothing else."""

    name = "direct-labels"
    metric = "accuracy"
    summary = "reads the label off the sign of the logit's gradient"
    source = "Fu et al., Label Inference Attacks Against Vertical Federated Learning, USENIX Security 2022"
    tasks = ("binary", "multiclass")

    def misfit(self, info: Info) -> str:
        """A trained model between embedding and loss mixes the classes."""
        if info.plan.head != "sum":
            return f"the label holder's {info.plan.head} model stands between embeddings and logits"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """The class with the smallest gradient, by majority of the visits."""
        seen = answers(evidence.view, evidence.info.observer)
        gradients = _as_classes(seen)
        width = gradients.shape[1]
        votes = np.eye(width)[gradients.argmin(axis=1)]
        rows, shares = mean_by_record(seen.rows, votes)
        return {"rows": rows, "guess": shares.argmax(axis=1)}


def _as_classes(seen: Answered) -> Floats:
    """One column per class; a single logit's gradient is that of class 1 and minus that of class 0."""
    return np.hstack([-seen.gradients, seen.gradients]) if seen.gradients.shape[1] == 1 else seen.gradients


class Spectral(LabelAttack):
    """Training pulls the classes' embeddings apart, along their main direction of variation."""

    name = "spectral"
    metric = "auc"
    summary = "projects the party's own last embeddings on their first singular vector"
    source = "Sun et al., Label Leakage and Protection from Forward Embedding, 2022"
    sees = ()
    needs = (Need("known labels", 10),)

    def misfit(self, info: Info) -> str:
        """It is about embeddings of an encoder that learned."""
        if not info.seen.get("embedding") or info.plan.protocol != "plain":
            return f"no embedding of {info.observer} is in its view"
        if info.plan.encoder_training == "none":
            return "encoders are not trained, so embeddings know nothing of the labels"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Centres, projects, and turns the sign by the known labels."""
        found = releases(evidence.view, evidence.info.observer)
        trained = [one for one in found if one.purpose != "evaluation"]
        rows, values = last_by_record(trained)
        centred = values - values.mean(axis=0)
        direction = np.linalg.svd(centred, full_matrices=False)[2][0]
        scores = oriented(rows, centred @ direction, evidence)
        keep = unknown(rows, evidence)
        return {"rows": rows[keep], "scores": scores[keep]}
