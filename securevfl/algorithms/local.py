"""A party at home: its records, its encoder, its optimiser, its gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.optimisers import build_optimiser, load_optimiser_state, optimiser_state
from securevfl.errors import PlanError, TrainingDiverged
from securevfl.models import clipped_gradient_sum, drawn_noise
from securevfl.privacy.gate import Gate, clip_rows
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows

if TYPE_CHECKING:
    from securevfl.algorithms.lockstep import Lockstep


class Records:
    """A party's feature rows, training part first; sparse ones become dense a batch at a time."""

    def __init__(self, train: Any, test: Any, device: torch.device) -> None:
        self.device = device
        self._sparse: sparse.csr_matrix | None = None
        if sparse.issparse(train):
            self._sparse = sparse.vstack([train, test]).tocsr()
            self.count = int(self._sparse.shape[0])
        else:
            joined = np.concatenate([np.asarray(train, np.float32), np.asarray(test, np.float32)])
            self._dense = torch.from_numpy(joined).to(device)
            self.count = len(joined)

    @property
    def sparse(self) -> bool:
        """True where the rows are kept sparse."""
        return self._sparse is not None

    def __getitem__(self, rows: Rows) -> Tensor:
        if self._sparse is not None:
            dense = np.asarray(self._sparse[rows].todense(), dtype=np.float32)
            return torch.from_numpy(dense).to(self.device)
        return self._dense.index_select(0, torch.from_numpy(rows).to(self.device))


class Together(NamedTuple):
    """A party's place among the parties that are computed together."""

    lockstep: Lockstep
    place: int


class LocalModel:
    """Computes embeddings of a party's rows, lets them out through the gate, and learns from gradients.

    Args:
        name: The party.
        records: Its rows.
        encoder: Its model.
        optimiser: Updates the encoder; None where the encoder stays as it is.
        gate: The party's gate.
        private: True where each update is clipped and noised per record (mode ``dp-encoder``).
    """

    def __init__(
        self,
        *,
        name: str,
        records: Records,
        encoder: nn.Module,
        optimiser: torch.optim.Optimizer | None,
        gate: Gate,
        private: bool = False,
    ) -> None:
        self.name = name
        self.records = records
        self.encoder = encoder
        self.optimiser = optimiser
        self.gate = gate
        self.private = private
        self.together: Together | None = None
        self._leaf: Tensor | None = None
        self._hidden_noise: dict[str, Tensor] = {}

    @property
    def trains(self) -> bool:
        """True where the encoder learns."""
        return self.optimiser is not None

    def release(
        self, rows: Rows, *, kind: str, observers: tuple[str, ...], learning: bool
    ) -> Released | Inside:
        """Embeds rows and lets the vectors out; without observers they stay inside.

        Args:
            rows: Record indices, each at most once.
            kind: What the release is for.
            observers: Organisations that will see it.
            learning: True to keep the graph for the gradient that comes back.
        """
        self._set_mode(kind)
        with torch.set_grad_enabled(learning and self.trains):
            if learning and self.together is not None:
                self._leaf = vectors = self.together.lockstep.embed(self.together.place, rows)
            else:
                vectors = self.encoder(self.records[rows])
            if learning and self.private:
                self._hidden_noise = drawn_noise(self.encoder)
            if not observers:
                return Inside.of(vectors)
            return self.gate.release(vectors, rows=rows, kind=kind, observers=observers)

    def _set_mode(self, kind: str) -> None:
        """Hidden noise and dropout are for training; walking over all modules pays only on a change."""
        training = kind not in ("evaluation", "prediction")
        if self.encoder.training != training:
            self.encoder.train(training)

    def embed(self, rows: Rows) -> Tensor:
        """Embeddings for a local step, as a release would compute them, with their graph; nothing leaves."""
        self._set_mode("")
        vectors: Tensor = self.encoder(self.records[rows])
        if self.private:
            self._hidden_noise = drawn_noise(self.encoder)
        mechanism = self.gate.mechanism
        return clip_rows(vectors, mechanism.clip) if mechanism.sigma else vectors

    def contribute(
        self, rows: Rows, *, kind: str, channel: Channel, learning: bool, also: tuple[str, ...] = ()
    ) -> Contribution | Inside:
        """Embeds rows and lets the vectors into a secure sum.

        Args:
            rows: Record indices, each at most once.
            kind: What the release is for.
            channel: The sum.
            learning: True to keep the graph for the gradient that comes back.
            also: Addresses that are handed the total, or something computed from it.
        """
        self._set_mode(kind)
        with torch.set_grad_enabled(learning and self.trains):
            vectors = self.encoder(self.records[rows])
            if learning and self.private:
                self._hidden_noise = drawn_noise(self.encoder)
            return channel.protect(self.gate, vectors, party=self.name, rows=rows, kind=kind, also=also)

    def check_rows(self, rows: Any) -> Rows:
        """Row indices that another role asks for, checked before anything is computed from them."""
        array = np.asarray(rows)
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.size == 0:
            raise PlanError(f"{self.name} was asked for rows that are not a list of indices")
        if array.min() < 0 or array.max() >= self.records.count or np.unique(array).size != array.size:
            raise PlanError(f"{self.name} was asked for rows that do not exist or repeat")
        return array.astype(np.int64)

    def learn(self, released: Released | Contribution | Inside | Tensor, gradient: Any, rows: Rows) -> None:
        """One step on the gradient of the batch's mean loss with respect to the released vectors.

        Args:
            released: What was let out, or for a local step, the embeddings with their graph.
            gradient: One row per record.
            rows: The records.
        """
        if self.optimiser is None:
            return
        source = released if isinstance(released, Tensor) else released.source
        upstream = torch.from_numpy(np.array(gradient, np.float32)).to(source.device)
        if self.together is not None and self._leaf is not None:
            if source is not self._leaf:  # back through the clipping
                (upstream,) = torch.autograd.grad(source, self._leaf, upstream)
            self.together.lockstep.learn(self.together.place, upstream)
            return
        self.optimiser.zero_grad(set_to_none=True)
        if self.private:
            self._private_gradient(upstream, rows)
        else:
            source.backward(upstream)
        self.optimiser.step()

    def _private_gradient(self, upstream: Tensor, rows: Rows) -> None:
        """Sum of per-record clipped gradients plus noise, over the batch size.

        The gradient that arrives belongs to the mean loss; times the batch size it is each record's own.
        """
        if self.gate.update is None:
            raise PlanError(f"{self.name}: a private update needs a mechanism for updates")
        own = upstream * len(rows)
        sums = clipped_gradient_sum(
            self.encoder, self.records[rows], own, self.gate.update.clip, noise=self._hidden_noise
        )
        noisy = self.gate.noisy_update(sums, rows=rows)
        parameters = [p for p in self.encoder.parameters() if p.requires_grad]
        for parameter, gradient in zip(parameters, noisy, strict=True):
            parameter.grad = gradient / len(rows)

    def check_finite(self) -> None:
        """Raises `TrainingDiverged` if a parameter is no longer a number."""
        check_finite(self.name, self.encoder)

    def state(self) -> dict[str, Any]:
        """Encoder and optimiser, as explicit data."""
        return module_state(self.encoder, self.optimiser)

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        load_module_state(self.encoder, self.optimiser, state)


def check_finite(name: str, module: nn.Module) -> None:
    """Raises `TrainingDiverged` if a parameter is no longer a number."""
    if not all(bool(torch.isfinite(p).all()) for p in module.parameters()):
        raise TrainingDiverged(f"{name}: the model is no longer finite; lower the learning rate")


def module_state(module: nn.Module, optimiser: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Parameters, buffers and optimiser state of a module."""
    state: dict[str, Any] = {"module": dict(module.state_dict())}
    if optimiser is not None:
        state["optimiser"] = optimiser_state(optimiser)
    return state


def load_module_state(
    module: nn.Module, optimiser: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    """Reverses `module_state`."""
    module.load_state_dict(state["module"])
    if optimiser is not None:
        load_optimiser_state(optimiser, state["optimiser"])


def build_local_model(
    setup: Setup, party: str, *, observers: tuple[str, ...] | None = None, encoder: nn.Module | None = None
) -> LocalModel:
    """A party's model. Encoders whose embeddings never leave are trained raw in every mode.

    Args:
        setup: What the run is built from.
        party: Whose model.
        observers: Who sees its embeddings in training; those who see the server's mail by default.
        encoder: Computes what is released, where that is not the party's encoder alone.
    """
    plan, data = setup.plan, setup.data
    index = data.parties.index(party)
    encoder = setup.encoders[party] if encoder is None else encoder
    leaves = bool(setup.observers(SERVER, party) if observers is None else observers)
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    frozen = (leaves and plan.encoder_training == "none") or not parameters
    return LocalModel(
        name=party,
        records=Records(data.train[index], data.test[index], setup.device),
        encoder=encoder,
        optimiser=None if frozen else build_optimiser(parameters, plan, setup.rate(party), party),
        gate=setup.gates[setup.hosts[party]],
        private=leaves and plan.encoder_training == "dp",
    )
