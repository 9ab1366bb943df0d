"""Attacks on a prediction service: features from answers, with the weights known."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from securevfl.attacks.contract import Evidence, Guess, Info, Need
from securevfl.attacks.feature import FeatureAttack, inside, prior_of
from securevfl.attacks.reading import Floats
from securevfl.attacks.rebuild import (
    JointModel,
    cannot_rebuild,
    class_logits,
    generator_from,
    minimise,
    named,
)

_STEPS, _BATCH, _RATE, _HIDDEN = 1000, 128, 5e-3, 64
_CALM = 0.01  # weight of the belief that features are not far from the middle of their range


class PredictionAttack(FeatureAttack):
    """An attack by a party that knows the model, its own features and the answers."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need("predictions"),
        Need("model weights"),
        Need("own features"),
        Need("bounds"),
    )

    def why_not(self, info: Info) -> str:
        """Class probabilities of a model that can be rebuilt."""
        if info.task == "regression":
            return "the service answers with a value, not with probabilities of classes"
        return cannot_rebuild(info)

    @classmethod
    def note(cls, info: Info) -> str:
        """How far the equations go."""
        widths = dict(zip(info.parties, info.widths, strict=True))
        hidden = sum(widths[party] for party in _hidden(info))
        return f"{info.classes - 1} equations for {hidden} unknown columns"


def _hidden(info: Info) -> list[str]:
    """Parties whose features the attacker does not have."""
    return [party for party in info.parties if party not in info.observers]


def _logits(evidence: Evidence) -> Floats:
    """Differences of the classes' log-probabilities from the first class's."""
    answers = np.log(np.maximum(np.asarray(evidence.auxiliary["predictions/values"], np.float64), 1e-45))
    return answers[:, 1:] - answers[:, :1]


class EqualitySolving(PredictionAttack):
    """Each answer gives classes - 1 linear equations in the unknown features."""

    name = "equality-solving"
    summary = "solves the linear equations that a prediction is, given weights and own features"
    source = (
        "Luo et al., Feature Inference Attack on Model Predictions in Vertical Federated Learning, ICDE 2021"
    )

    def why_not(self, info: Info) -> str:
        """The model must be linear from features to logits."""
        kinds = info.plan.models(info.parties)
        if kinds != {"linear"} or info.plan.head not in ("linear", "sum"):
            odd = min(kinds - {"linear"}, default="linear")
            return f"a {odd} encoder with a {info.plan.head} head gives no linear equations"
        if info.plan.mode == "sealed":
            return "rows are clipped before the linear model, which is not linear"
        if info.plan.sigma > 0:
            return "embeddings are clipped on their way out, which is not linear"
        return super().why_not(info)

    def run(self, evidence: Evidence) -> Guess:
        """Least squares of minimal norm for all hidden columns, moved into their bounds."""
        info = evidence.info
        model = JointModel.granted(info, named(evidence.auxiliary, "model_weights/")).double()
        blocks = {
            name: evidence.auxiliary[f"own_features/{name}"]
            for name in info.observers
            if name in info.parties
        }
        known = sum(
            (np.asarray(block, np.float64) @ _slope(model, name) for name, block in blocks.items()),
            start=np.zeros(1),
        )
        targets = _logits(evidence) - _offset(model) - known
        hidden = _hidden(info)
        slopes = np.vstack([_slope(model, name) for name in hidden])
        found = targets @ np.linalg.pinv(slopes)
        widths = [info.widths[info.parties.index(name)] for name in hidden]
        parts = dict(zip(hidden, np.split(found, np.cumsum(widths)[:-1], axis=1), strict=True))
        mine = inside(parts[info.owner], evidence.auxiliary["bounds/values"])
        return {"rows": np.arange(len(found)), "features": mine}


def _outputs(model: JointModel, changed: dict[str, Tensor], count: int) -> NDArray[np.float64]:
    """Logits relative to the first class, where all features but the changed ones are zero."""
    info = model.info
    blocks = [
        changed.get(party, torch.zeros(count, width, dtype=torch.float64))
        for party, width in zip(info.parties, info.widths, strict=True)
    ]
    with torch.no_grad():
        outputs = class_logits(model(blocks), info.task).numpy()
    return np.asarray(outputs[:, 1:] - outputs[:, :1])


def _offset(model: JointModel) -> Floats:
    return np.asarray(_outputs(model, {}, 1)[0])


def _slope(model: JointModel, party: str) -> Floats:
    """How the logits change with each of a party's features: (features, classes - 1)."""
    width = model.info.widths[model.info.parties.index(party)]
    units = torch.eye(width, dtype=torch.float64)
    return _outputs(model, {party: units}, width) - _offset(model)


class GenerativeRegression(PredictionAttack):
    """A generator learns features that make the model answer as it did."""

    name = "generative-regression"
    summary = "trains a generator of the unknown features to reproduce many predictions"
    source = (
        "Luo et al., Feature Inference Attack on Model Predictions in Vertical Federated Learning, ICDE 2021"
    )

    def why_not(self, info: Info) -> str:
        """Recurrent encoders are too slow to be searched."""
        if "lstm" in info.plan.models(info.parties):
            return "a search through lstm encoders takes longer than an audit may"
        return super().why_not(info)

    def run(self, evidence: Evidence) -> Guess:
        """Adam on G(own features, z) -> unknown features, scored by the known model."""
        info = evidence.info
        model = JointModel.granted(info, named(evidence.auxiliary, "model_weights/"))
        own = {
            name: torch.from_numpy(np.array(evidence.auxiliary[f"own_features/{name}"], np.float32))
            for name in info.observers
            if name in info.parties
        }
        targets = torch.from_numpy(np.array(evidence.auxiliary["predictions/values"], np.float32))
        bounds = np.asarray(evidence.auxiliary["bounds/values"], np.float64)
        game = _Game(model, own, targets, bounds, generator_from(evidence.rng))
        game.train(evidence)
        found = game.features(info.owner)
        return {"rows": np.arange(len(found)), "features": inside(found, bounds)}


class _Game:
    """The generator, and how well the model answers on what it makes."""

    def __init__(
        self,
        model: JointModel,
        own: dict[str, Tensor],
        targets: Tensor,
        bounds: Floats,
        generator: torch.Generator,
    ) -> None:
        info = model.info
        self.model, self.own, self.targets, self.draw = model, own, targets, generator
        self.hidden = _hidden(info)
        self.widths = [info.widths[info.parties.index(party)] for party in self.hidden]
        total = sum(self.widths)
        logs = torch.log(targets.clamp_min(1e-12))
        self.inputs = torch.cat([*own.values(), logs - logs.mean(dim=1, keepdim=True)], dim=1)
        self.latent = torch.randn((len(targets), total), generator=generator)
        self.middle, self.spread = self._prior(bounds)
        width = self.inputs.shape[1] + total
        self.network = nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, total))
        for parameter in self.network.parameters():
            with torch.no_grad():
                parameter.normal_(
                    0, 1 / parameter.shape[1] ** 0.5 if parameter.ndim > 1 else 0.01, generator=generator
                )

    def _prior(self, bounds: Floats) -> tuple[Tensor, Tensor]:
        """Middle and deviation of every hidden column; bounds are known of the owner alone."""
        parts = [
            prior_of(bounds if party == self.model.info.owner else np.full((width, 2), np.nan))
            for party, width in zip(self.hidden, self.widths, strict=True)
        ]
        middle, spread = (np.concatenate(part) for part in zip(*parts, strict=True))
        return torch.from_numpy(middle.astype(np.float32)), torch.from_numpy(spread.astype(np.float32))

    def _made(self, rows: Tensor) -> Tensor:
        made: Tensor = self.network(torch.cat([self.inputs[rows], self.latent[rows]], dim=1))
        return self.middle + self.spread * made

    def _loss(self, rows: Tensor) -> Tensor:
        """How far the model's answers are from those it gave, and how unlikely the features are."""
        made = self._made(rows)
        parts = dict(zip(self.hidden, torch.split(made, self.widths, dim=1), strict=True))
        blocks = [
            parts[party] if party in parts else self.own[party][rows] for party in self.model.info.parties
        ]
        miss = functional.kl_div(
            torch.log_softmax(class_logits(self.model(blocks), self.model.info.task), dim=1),
            self.targets[rows],
            reduction="batchmean",
        )
        return miss + _CALM * (((made - self.middle) / self.spread) ** 2).mean()

    def train(self, evidence: Evidence) -> None:
        def loss(step: int) -> Tensor:
            return self._loss(torch.randint(len(self.targets), (_BATCH,), generator=self.draw))

        minimise(loss, self.network.parameters(), rate=_RATE, steps=_STEPS, progress=evidence.progress)

    def features(self, party: str) -> Floats:
        with torch.no_grad():
            made = self._made(torch.arange(len(self.targets)))
        parts = torch.split(made, self.widths, dim=1)
        return np.asarray(parts[self.hidden.index(party)].numpy(), np.float64)
