"""What attacks on features share: which embeddings of the owner they see, and how they are scored."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth
from securevfl.attacks.reading import Floats, Release, Rows, embeddings_of, last_by_record
from securevfl.attacks.scoring import score_mse, spread_of
from securevfl.errors import AttackError


def no_embeddings(info: Info) -> str:
    """Why the observer has no embedding of the owner by itself; empty if it has."""
    if info.received.get("embedding") and info.plan.protocol == "plain":
        return ""
    if info.seen.get("snapshot") and info.plan.fusion == "concat":
        return ""
    return f"{info.observer} sees no embedding of {info.owner} by itself in this run"


class EmbeddingAttack(Attack):
    """An attack on features by an observer that gets the owner's embeddings, noisy or not."""

    family: ClassVar[Family] = "feature"
    truth = ("features",)

    def why_not(self, info: Info) -> str:
        """Embeddings must be in the view one by one."""
        return no_embeddings(info) or self.misfit(info)

    def misfit(self, info: Info) -> str:
        """A further reason of the attack's own; empty if there is none."""
        return ""


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
    place = {int(row): i for i, row in enumerate(rows)}
    total, count = np.zeros_like(last), np.zeros(len(rows))
    for one in found:
        index = np.array([place[int(row)] for row in one.rows])
        np.add.at(total, index, one.values)
        np.add.at(count, index, 1)
    return rows, np.hstack([total / count[:, None], last])


def score_features(guess: Guess, truth: Truth, note: str = "") -> Score:
    """Mean squared error of guessed rows against the guess of each column's mean."""
    features = truth["features"][guess["rows"]]
    return score_mse(features, guess["features"], baseline=spread_of(features), note=note)


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
