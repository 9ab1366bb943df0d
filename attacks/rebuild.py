"""Models of a run: rebuilt by attackers from the plan and granted weights, by the audit from the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from securevfl.algorithms import SERVER
from securevfl.algorithms.local import Records, party_encoder
from securevfl.algorithms.sealed.card import CARDS
from securevfl.attacks.contract import Arrays, Info
from securevfl.data import VerticalData
from securevfl.errors import AttackError
from securevfl.federation.folder import RunFolder
from securevfl.models import Fusion, build_head, load_module, output_width
from securevfl.privacy.gate import clip_rows
from securevfl.settings.plan import Plan

_REBUILT = ("linear", "mlp", "lstm", "fm")


def cannot_rebuild(info: Info) -> str:
    """Why models cannot be rebuilt from the plan; empty if they can."""
    if info.plan.model in CARDS:
        return f"a {info.plan.model} has bins and weights, no encoder that another one could stand for"
    if odd := info.plan.models(info.parties) - {*_REBUILT}:
        return f"the shape of the parties' images, which {min(odd)} encoders need, is not public"
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
    return party_encoder(info.plan, party, width, generator=generator)


def fresh_head(info: Info, generator: torch.Generator) -> nn.Module:
    """A head of the plan's architecture with new weights."""
    fusion = Fusion(info.plan.fusion, info.plan.widths(info.parties))
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
    """The model of a run as one function of all parties' features.

    Args:
        info: What is public about the run.
        encoders: One per party.
        head: The label holder's model.
    """

    def __init__(self, info: Info, encoders: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.info = info
        self.encoders, self.head = nn.ModuleList(encoders), head
        self.fusion = Fusion(info.plan.fusion, info.plan.widths(info.parties))

    @classmethod
    def granted(cls, info: Info, weights: Arrays) -> JointModel:
        """The deployed model from granted weights, not to be trained."""
        spare = torch.Generator().manual_seed(0)
        encoders = (load_weights(fresh_encoder(info, party, spare), weights, party) for party in info.parties)
        model = cls(info, encoders, load_weights(fresh_head(info, spare), weights, SERVER))
        return model.requires_grad_(False).eval()

    def embed(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Each party's embeddings, clipped where they leave, without noise."""
        info = self.info
        vectors = [encoder(block) for encoder, block in zip(self.encoders, blocks, strict=True)]
        if not clips_embeddings(info.plan):
            return vectors
        return [
            vector if party == info.label_holder else clip_rows(vector, info.plan.clip)
            for party, vector in zip(info.parties, vectors, strict=True)
        ]

    def forward(self, blocks: Sequence[Tensor], noise: Sequence[Tensor] | None = None) -> Tensor:
        """Raw outputs of the head, with noise on the embeddings if given."""
        vectors = self.embed(blocks)
        if noise is not None:
            vectors = [vector + one for vector, one in zip(vectors, noise, strict=True)]
        outputs: Tensor = self.head(self.fusion(vectors))
        return outputs.reshape(len(blocks[0]), -1)


def class_logits(outputs: Tensor, task: str) -> Tensor:
    """One logit per class: a binary head has a single output, that of class 1 against a logit of 0."""
    return torch.cat([torch.zeros_like(outputs), outputs], dim=-1) if task == "binary" else outputs


def minimise(
    loss: Callable[[int], Tensor],
    parameters: Iterable[Tensor],
    *,
    rate: float,
    steps: int,
    progress: Callable[[float], None],
    decay: float = 0.0,
) -> None:
    """Adam on the loss of each step, a function of the step's number."""
    optimiser = torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=True)
    for step in range(steps):
        optimiser.zero_grad(set_to_none=True)
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % 50 == 0:
            progress(step / steps)


def named(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def standardised(values: NDArray[Any], like: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Columns scaled to mean 0 and deviation 1 (those of `like`, if given); constant ones become 0."""
    reference = np.asarray(values if like is None else like, np.float64)
    spread = reference.std(axis=0)
    return np.asarray((values - reference.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


_CHUNK = 4096


class Deployed:
    """Encoders and head after training, without noise.

    Raises:
        RunError: The model files are missing, or belong to models that the plan does not describe.
    """

    def __init__(self, files: RunFolder, plan: Plan, data: VerticalData) -> None:
        from securevfl.federation.virtual import VirtualCarrier  # no attack process gets here or needs it

        carrier = VirtualCarrier(plan.with_changes(record_views=False, device="cpu"), data)
        carrier.close()
        setup = carrier.home.setup
        self.plan, self.parties = plan, data.parties
        self.modules: dict[str, nn.Module] = {**carrier.encoders, SERVER: carrier.head}
        for name, module in self.modules.items():
            load_module(files.model(name), module)
            module.eval()
        self._leaves = {party: bool(setup.observers(SERVER, party)) for party in data.parties}
        cpu = torch.device("cpu")
        self._records = {
            party: Records(data.train[i], data.test[i], cpu) for i, party in enumerate(data.parties)
        }
        self._task = data.task

    def weights(self) -> dict[str, NDArray[Any]]:
        """``<party or server>/<parameter>`` -> values."""
        return {
            f"{name}/{parameter}": value.detach().numpy().copy()
            for name, module in self.modules.items()
            for parameter, value in module.state_dict().items()
        }

    def embed(self, party: str, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """A party's embeddings, clipped where they are clipped on their way out, without noise."""
        with torch.no_grad():
            pieces = [self._embed(party, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)]
        return torch.cat(pieces).numpy()

    def _embed(self, party: str, rows: NDArray[np.int64]) -> Tensor:
        vectors: Tensor = self.modules[party](self._records[party][rows])
        clipped = self._leaves[party] and clips_embeddings(self.plan)
        return clip_rows(vectors, self.plan.clip) if clipped else vectors

    def predict(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Probabilities of each class (two columns for binary tasks), or the predicted value."""
        vectors = [torch.from_numpy(self.embed(party, rows)) for party in self.parties]
        fusion = Fusion(self.plan.fusion, self.plan.widths(self.parties))
        with torch.no_grad():
            outputs = self.modules[SERVER](fusion(vectors)).reshape(len(rows), -1)
        if self._task == "regression":
            return np.asarray(outputs.numpy())
        return np.asarray(torch.softmax(class_logits(outputs, self._task), dim=1).numpy())
