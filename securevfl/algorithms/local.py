"""A party at home: its records, its encoder, its optimiser, its gate.

All parties of synchronous training embed the same rows at the same time. Where they run in one process and
their encoders have the same shape, one batched product does the work of many small ones (`StackedModels`).
This only changes who computes: each party's embeddings still depend on its own rows and weights, and leave
through its own gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.sealed.encoder import ClassCardEncoder, ScorecardEncoder
from securevfl.algorithms.steps import build_optimiser, load_optimiser_state, optimiser_state, regularised
from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.data.mapped import Mapped
from securevfl.errors import PlanError, ProtocolError, TrainingDiverged
from securevfl.models import (
    StackedEncoders,
    build_encoder,
    clipped_gradient_sum,
    drawn_noise,
    why_not_stackable,
)
from securevfl.models.seeds import torch_generator
from securevfl.privacy.gate import Gate, clip_rows
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan
from securevfl.transfers import Index, to_device


class Records:
    """A party's feature rows, training part first; sparse ones become dense, files are read, by batches."""

    def __init__(self, train: Any, test: Any, device: torch.device) -> None:
        self.device, self.index = device, Index(device)
        self._sparse: sparse.csr_matrix | None = None
        self._files: tuple[Mapped, Mapped] | None = None
        if sparse.issparse(train):
            self._sparse = sparse.vstack([train, test]).tocsr()
            self.count = int(self._sparse.shape[0])
        elif isinstance(train, Mapped):
            self._files = train, test
            self.count = len(train) + len(test)
        else:
            joined = np.concatenate([np.asarray(train, np.float32), np.asarray(test, np.float32)])
            self._dense = to_device(joined, device)
            self.count = len(joined)

    @property
    def sparse(self) -> bool:
        """True where the rows are kept sparse, or in a file."""
        return self._sparse is not None or self._files is not None

    def first(self, count: int) -> Any:
        """The first rows as they are kept, flat."""
        if self._sparse is not None:
            return self._sparse[:count]
        if self._files is not None:
            return self._files[0][:count]
        return self._dense[:count].flatten(1).numpy(force=True)

    def __getitem__(self, rows: Rows) -> Tensor:
        if self._sparse is not None:
            dense = np.asarray(self._sparse[rows].todense(), dtype=np.float32)
            return to_device(dense, self.device)
        if self._files is not None:
            return to_device(self._read(*self._files, rows), self.device)
        return self._dense.index_select(0, self.index(rows))

    def _read(self, train: Mapped, test: Mapped, rows: Rows) -> Any:
        """Rows of the two files, of each those that are in it."""
        out = np.empty((len(rows), train.shape[1]), np.float32)
        apart = rows >= len(train)
        out[~apart] = train[rows[~apart]]
        out[apart] = test[rows[apart] - len(train)]
        return out


class Learner:
    """A module and its optimiser, if it learns.

    Attributes:
        name: Whose it is.
        module: The model.
        optimiser: Updates it; None where it stays as it is.
    """

    def __init__(self, name: str, module: nn.Module, optimiser: torch.optim.Optimizer | None) -> None:
        self.name, self.module, self.optimiser = name, module, optimiser

    @property
    def trains(self) -> bool:
        """True where the module learns."""
        return self.optimiser is not None

    def check_finite(self) -> None:
        """Raises `TrainingDiverged` if a parameter is no longer a number."""
        if not all(bool(torch.isfinite(p).all()) for p in self.module.parameters()):
            raise TrainingDiverged(f"{self.name}: the model is no longer finite; lower the learning rate")

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and the optimiser's memory, as explicit data."""
        state: dict[str, Any] = {"module": dict(self.module.state_dict())}
        return state if self.optimiser is None else state | {"optimiser": optimiser_state(self.optimiser)}

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        self.module.load_state_dict(state["module"])
        if self.optimiser is not None:
            load_optimiser_state(self.optimiser, state["optimiser"])


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that can learn."""
    return [p for p in module.parameters() if p.requires_grad]


class LocalModel(Learner):
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
        super().__init__(name, encoder, optimiser)
        self.records, self.encoder, self.gate, self.private = records, encoder, gate, private
        self.stack: StackedModels | None = None
        self._leaf: Tensor | None = None
        self._hidden_noise: dict[str, Tensor] = {}

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
        with torch.set_grad_enabled(learning and self.optimiser is not None):
            if learning and self.stack is not None:
                self._leaf = vectors = self.stack.embed(self, rows)
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

    def embed(self, inputs: Tensor) -> Tensor:
        """Embeddings for a local step, as a release would compute them, with their graph; nothing leaves."""
        self._set_mode("")
        vectors: Tensor = self.encoder(inputs)
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
            gradient: One row per record, as it arrived, or a tensor where it was computed.
            rows: The records.
        """
        if self.optimiser is None:
            return
        source = released if isinstance(released, Tensor) else released.source
        if self.stack is not None and source is self._leaf:
            self.stack.learn(self, gradient)
            return
        upstream = gradient
        if not isinstance(gradient, Tensor):
            upstream = to_device(np.array(gradient, np.float32), source.device)
        if self.stack is not None and self._leaf is not None:  # back through the clipping
            self.stack.learn(self, torch.autograd.grad(source, self._leaf, upstream)[0])
            return
        self.optimiser.zero_grad(set_to_none=True)
        if self.private:
            self._private_gradient(upstream, rows)
        else:
            source.backward(upstream)
        self.optimiser.step()

    def descend(self, loss: Tensor) -> None:
        """One step of a model without private updates on a loss that was computed from its embeddings."""
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()

    def _private_gradient(self, upstream: Tensor, rows: Rows) -> None:
        """Sum of per-record clipped gradients plus noise, over the batch size.

        The gradient that arrives belongs to the mean loss; times the batch size it is each record's own.
        """
        own, inputs = upstream * len(rows), self.records[rows]
        sums = self.gate.clipped_sum(
            lambda clip: clipped_gradient_sum(self.encoder, inputs, own, clip, noise=self._hidden_noise)
        )
        noisy = self.gate.noisy_update(sums, rows=rows)
        for parameter, gradient in zip(trainable(self.encoder), noisy, strict=True):
            parameter.grad = gradient / len(rows)


class StackedModels:
    """The encoders of all parties as one stack, with one step for all of them.

    Args:
        models: Every party's model. Use `of`, which checks that they fit.
        plan: The plan; its learning rate serves all.
    """

    def __init__(self, models: Sequence[LocalModel], plan: Plan) -> None:
        self.stack = StackedEncoders([model.encoder for model in models])
        everything = np.arange(models[0].records.count)
        self.inputs = self.stack.join([model.records[everything] for model in models])
        # One optimiser serves all parties, whichever is named.
        groups = regularised(self.stack.named(), plan, models[0].name)
        self.optimiser = build_optimiser(groups, plan, plan.learning_rate)
        self._rows: Rows | None = None
        self._batch: Tensor | None = None
        self._outputs: Tensor | None = None
        self._leaves: tuple[Tensor, ...] = ()
        self._clips = any(model.gate.mechanism.sigma for model in models)
        self._index = models[0].records.index
        self._places = {model.name: place for place, model in enumerate(models)}
        self._gradients: dict[int, Any] = {}

    @classmethod
    def of(cls, models: Sequence[LocalModel], plan: Plan) -> StackedModels | None:
        """A stack of these models; None where they must be computed one by one.

        Optimisers with a memory and rates of single parties stay with the parties. With random delays or
        latency a party could be at its next batch before another has learned from this one.
        """
        if plan.simulation.delays != "constant" or plan.simulation.latency:
            return None
        alike = not (plan.optimisers or plan.learning_rates or plan.encoders)
        plain = plan.optimiser == "sgd" and alike and not plan.hidden_noise
        dense = all(model.trains and not model.private and not model.records.sparse for model in models)
        if not plain or not dense or len(models) < 2 or why_not_stackable([m.encoder for m in models]):
            return None
        return cls(models, plan)

    def embed(self, model: LocalModel, rows: Rows) -> Tensor:
        """The embeddings of one party, as a leaf of the graph that its gate goes on with."""
        if self._rows is not rows and (self._rows is None or not np.array_equal(self._rows, rows)):
            if self._gradients:
                raise ProtocolError("a party is at its next batch before all have learned from the last one")
            self._rows = rows
            self._batch = self.inputs.index_select(1, self._index(rows))
            with torch.set_grad_enabled(not self.stack.linear):
                self._outputs = self.stack(self._batch)
            self._leaves = self._outputs.detach().unbind()
        leaf = self._leaves[self._places[model.name]]
        return leaf.requires_grad_() if self._clips else leaf

    def learn(self, model: LocalModel, gradient: Any) -> None:
        """Takes one party's gradient; the last one makes the step of all."""
        self._gradients[self._places[model.name]] = gradient
        if self._outputs is None or self._batch is None or len(self._gradients) < len(self._leaves):
            return
        ordered = [self._gradients[place] for place in range(len(self._leaves))]
        if isinstance(ordered[0], Tensor):
            gradients = torch.stack(ordered)
        else:
            gradients = to_device(np.stack(ordered).astype(np.float32, copy=False), self.inputs.device)
        self.optimiser.zero_grad(set_to_none=True)
        if self.stack.linear:
            self.stack.pull_back(self._batch, gradients)
        else:
            self._outputs.backward(gradients)  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self._rows, self._outputs, self._gradients = None, None, {}


def planned_encoder(plan: Plan, data: VerticalData, party: str) -> nn.Module:
    """The encoder with its first weights; of the data only shapes are used.

    Raises:
        PlanError: The plan's model does not fit the party's columns.
    """
    index = data.parties.index(party)
    if plan.model == "trees":
        return nn.Identity()  # trees take the columns as they are
    if plan.model in ("scorecard", "profile"):
        columns = card_columns(data)[index]
        several = data.task == "multiclass"
        return ClassCardEncoder(columns, data.outputs) if several else ScorecardEncoder(columns)
    return party_encoder(
        plan,
        party,
        data.widths[index],
        generator=torch_generator(plan.seed, "encoder", index),
        image_shape=_image_shape(data, index),
    )


def party_encoder(
    plan: Plan,
    party: str,
    width: int,
    *,
    generator: torch.Generator,
    image_shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """An encoder of the kind that the plan gives to a party with so many columns."""
    own = plan.encoder(party)
    return build_encoder(
        own.model,
        width,
        own.embedding,
        generator=generator,
        hidden=own.hidden,
        channels=own.channels,
        units=own.units,
        steps=own.steps or None,
        image_shape=image_shape,
        prepared=plan.mode == "sealed",
    )


def _image_shape(data: VerticalData, index: int) -> tuple[int, ...] | None:
    """The band of whole pixel rows that a party holds, where the data are images."""
    shape = data.train[index].shape[1:]
    if len(shape) == 3:
        return tuple(shape)
    if data.image_size is not None and data.widths[index] % data.image_size[1] == 0:
        return (1, data.widths[index] // data.image_size[1], data.image_size[1])
    return None


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
    groups = regularised(encoder.named_parameters(), plan, party)
    frozen = (leaves and plan.encoder_training == "none") or not groups
    return LocalModel(
        name=party,
        records=Records(data.train[index], data.test[index], setup.device),
        encoder=encoder,
        optimiser=None if frozen else build_optimiser(groups, plan, setup.rate(party), party),
        gate=setup.gates[setup.hosts[party]],
        private=leaves and plan.encoder_training == "dp",
    )
