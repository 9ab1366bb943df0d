"""Models that an attacker rebuilds from the public plan and the weights it was granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from securevfl.attacks.contract import Arrays, Info
from securevfl.errors import AttackError
from securevfl.models import Fusion, build_encoder, build_head, output_width
from securevfl.privacy.gate import clip_rows
from securevfl.settings.plan import Plan

_REBUILT = ("linear", "mlp", "lstm")


def cannot_rebuild(info: Info) -> str:
    """Why models cannot be rebuilt from the plan; empty if they can."""
    if info.plan.model not in _REBUILT:
        return f"the shape of the parties' images, which {info.plan.model} encoders need, is not public"
    if not info.widths:
        return "the number of the parties' columns is not known"
    return ""


def clips_embeddings(plan: Plan) -> bool:
    """Whether embeddings that leave are clipped; in sealed training none leaves, and rows are."""
    return plan.sigma > 0 and plan.mode != "sealed"


def generator_from(rng: np.random.Generator) -> torch.Generator:
    """A torch generator that depends on the attack's own one alone."""
    return torch.Generator().manual_seed(int(rng.integers(0, 2**63 - 1)))


def fresh_encoder(info: Info, party: str, generator: torch.Generator) -> nn.Module:
    """An encoder of the plan's architecture with new weights."""
    width = info.widths[info.parties.index(party)]
    return build_encoder(
        info.plan.model,
        width,
        info.plan.embedding,
        generator=generator,
        hidden=info.plan.hidden,
        prepared=info.plan.mode == "sealed",
    )


def fresh_head(info: Info, generator: torch.Generator) -> nn.Module:
    """A head of the plan's architecture with new weights."""
    fusion = Fusion(info.plan.fusion, (info.plan.embedding,) * len(info.parties))
    outputs = output_width(info.task, info.classes)
    return build_head(info.plan.head, fusion.width, outputs, generator=generator, hidden=info.plan.hidden)


def load_weights(module: nn.Module, weights: Arrays, name: str) -> nn.Module:
    """Fills a module with the arrays called ``<name>/<parameter>``.

    Raises:
        AttackError: The weights are of another model than the plan describes.
    """
    prefix = f"{name}/"
    state = {
        key.removeprefix(prefix): torch.from_numpy(np.array(value))
        for key, value in weights.items()
        if key.startswith(prefix)
    }
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise AttackError(f"the weights of {name} belong to another model than the plan's") from error
    return module


class JointModel(nn.Module):
    """The deployed model as one function of all parties' features, without noise."""

    def __init__(self, info: Info, weights: Arrays) -> None:
        super().__init__()
        spare = torch.Generator().manual_seed(0)
        self.info = info
        self.encoders = nn.ModuleList(
            load_weights(fresh_encoder(info, party, spare), weights, party) for party in info.parties
        )
        self.head = load_weights(fresh_head(info, spare), weights, "server")
        self.fusion = Fusion(info.plan.fusion, (info.plan.embedding,) * len(info.parties))
        self.requires_grad_(False)
        self.eval()

    def forward(self, blocks: Sequence[Tensor]) -> Tensor:
        """Logits of each class, or values; one column more than the head for binary tasks."""
        vectors = [
            self._embed(party, encoder(block))
            for party, encoder, block in zip(self.info.parties, self.encoders, blocks, strict=True)
        ]
        outputs: Tensor = self.head(self.fusion(vectors))
        outputs = outputs.reshape(len(blocks[0]), -1)
        if self.info.task != "binary":
            return outputs
        return torch.cat([torch.zeros_like(outputs), outputs], dim=1)

    def _embed(self, party: str, vectors: Tensor) -> Tensor:
        clipped = clips_embeddings(self.info.plan) and party != self.info.label_holder
        return clip_rows(vectors, self.info.plan.clip) if clipped else vectors


def named(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def standardised(values: NDArray[Any], like: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Columns scaled to mean 0 and deviation 1 (those of `like`, if given); constant ones become 0."""
    reference = np.asarray(values if like is None else like, np.float64)
    spread = reference.std(axis=0)
    return np.asarray((values - reference.mean(axis=0)) / np.where(spread > 0, spread, 1.0))
