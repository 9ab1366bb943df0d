"""A member's model in sealed training: what it scores records with, and what its noisy total is made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from securevfl.algorithms.base import Setup
from securevfl.algorithms.local import Records, planned_encoder
from securevfl.algorithms.sealed.rows import CHUNK, Preparation, clip_to_integers, narrowest
from securevfl.algorithms.sealed.settings import BIAS
from securevfl.models.encoders import PreparedLinear
from securevfl.privacy.rows import Rows
from securevfl.protocols.sealed.protocol import OPERAND_BITS
from securevfl.transfers import to_device

OperandRows = npt.NDArray[Any]
"""Of int16, or int32 where that is too narrow."""
Floats = npt.NDArray[np.float64]
_UNIT = 2.0**-OPERAND_BITS
_VALUES = 1 << 24  # Jacobian entries formed at a time


class SealedModel(ABC):
    """Scores of records, the operand that multiplies residuals, and gradients from totals.

    Attributes:
        static: Whether the operand is the same in every iteration.
        width: Rows of the operand.
        parameters: What is learned from totals, and nothing else.
    """

    static: bool
    width: int
    parameters: list[nn.Parameter]

    @abstractmethod
    def scores(self, rows: Rows | None) -> Floats:
        """(rows, outputs) for training records, all by default."""

    @abstractmethod
    def test_scores(self) -> Floats:
        """(rows, outputs) for the test part."""

    @property
    def constant(self) -> float:
        """What is the same in all scores of a single output; 0 where that is not known."""
        return 0.0

    @abstractmethod
    def operand(self, rows: Rows | None) -> OperandRows:
        """The integers of the given records; a static model is asked for all of them, once."""

    @abstractmethod
    def set_gradients(self, total: Floats, count: int, *, ridge: float) -> None:
        """Writes the gradients of the mean loss, from a total over `count` records; ridge pulls to zero."""


class LinearModel(SealedModel):
    """A linear model on prepared rows, and the bias at the label holder: the fast path.

    Args:
        blocks: Training and test rows; None for a label holder without features.
        preparation: How rows are centred, scaled and clipped.
        weight: (outputs, width) parameter; None without features.
        bias: The label holder's bias, fed by a constant column; None at the others.
        clip: The member's clip C.
    """

    static = True

    def __init__(
        self,
        blocks: tuple[Any, Any] | None,
        preparation: Preparation | None,
        *,
        counts: tuple[int, int],
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        clip: float,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.parameters = [p for p in (weight, bias) if p is not None]
        self._constant = math.trunc(clip * 2.0**OPERAND_BITS)
        self._counts = counts
        self._features = 0 if weight is None else weight.shape[1]
        self.width = self._features + (bias is not None)
        kind = narrowest(clip if preparation is None else preparation.clip)
        self._operand = np.zeros((self.width, counts[0]), kind)
        self._test = np.zeros((self._features, counts[1]), kind)
        if blocks is not None and preparation is not None:
            preparation.into(self._operand[: self._features], blocks[0])
            preparation.into(self._test, blocks[1])
        if bias is not None:
            self._operand[-1] = self._constant

    def _score(self, operand: OperandRows, rows: Rows | None = None) -> Floats:
        count = operand.shape[1] if rows is None else len(rows)
        result = np.zeros((count, self.parameters[0].shape[0]))
        if self.weight is not None:
            # In float32 as the integers stand for them; exact for clips up to 2^10.
            weight = self.weight.detach().numpy(force=True) * np.float32(_UNIT)
            for start in range(0, count, CHUNK):
                here = slice(start, start + CHUNK)
                piece = operand[: self._features, here if rows is None else _together(rows[here])]
                result[here] = (weight @ piece.astype(np.float32)).T
        return result if self.bias is None else result + self.bias.detach().numpy(force=True)

    def scores(self, rows: Rows | None) -> Floats:
        return self._score(self._operand, rows)

    def test_scores(self) -> Floats:
        return self._score(self._test)

    @property
    def constant(self) -> float:
        return 0.0 if self.bias is None or self.bias.numel() > 1 else float(self.bias.detach())

    def operand(self, rows: Rows | None) -> OperandRows:
        return self._operand if rows is None else self._operand[:, rows]

    def set_gradients(self, total: Floats, count: int, *, ridge: float) -> None:
        if self.weight is not None:
            found = to_device(total[: self._features].T / count, self.weight.device, self.weight.dtype)
            self.weight.grad = found + ridge * self.weight.detach()
        if self.bias is not None:
            # The parameter is constant * bias': one step on bias' moves it by constant^2.
            scaled = total[-1] * (self._constant * _UNIT / count)
            self.bias.grad = to_device(scaled, self.bias.device, self.bias.dtype)


def _together(rows: Rows) -> slice | Rows:
    """The rows as a slice, where they are neighbours: no copy is made then."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if (np.diff(rows) == 1).all() else rows


class NetworkModel(SealedModel):
    """Any module: the operand is the Jacobian of each record's outputs, clipped to C and masked anew.

    Args:
        encoder: Gives one score per output.
        records: The party's rows, training part first.
        counts: Training and test records.
        outputs: Scores per record.
        clip: Bound C of the Frobenius norm of a record's Jacobian.
    """

    static = False

    def __init__(
        self, encoder: nn.Module, records: Records, *, counts: tuple[int, int], outputs: int, clip: float
    ) -> None:
        self.encoder, self.records = encoder, records
        self.parameters = [p for p in encoder.parameters() if p.requires_grad]
        self.width = sum(p.numel() for p in self.parameters)
        self._counts, self._outputs, self._clip = counts, outputs, clip
        self._chunk = max(1, _VALUES // (self.width * outputs))

    def _score(self, rows: Rows) -> Floats:
        self.encoder.eval()
        with torch.no_grad():
            pieces = [self.encoder(self.records[rows[s : s + 4096]]) for s in range(0, len(rows), 4096)]
        return np.asarray(torch.cat(pieces).cpu().numpy(), np.float64)

    def scores(self, rows: Rows | None) -> Floats:
        return self._score(self._rows(rows))

    def test_scores(self) -> Floats:
        return self._score(np.arange(self._counts[1], dtype=np.int64) + self._counts[0])

    def _rows(self, rows: Rows | None) -> Rows:
        return np.arange(self._counts[0], dtype=np.int64) if rows is None else rows

    def operand(self, rows: Rows | None) -> OperandRows:
        chosen = self._rows(rows)
        out = np.empty((self.width, len(chosen) * self._outputs), np.int32)
        for start in range(0, len(chosen), self._chunk):
            found = self._jacobians(self.records[chosen[start : start + self._chunk]])
            integers = clip_to_integers(found, self._clip).reshape(len(found) * self._outputs, self.width)
            place = start * self._outputs
            out[:, place : place + len(integers)] = integers.T
        return out

    def _jacobians(self, inputs: Tensor) -> Floats:
        """(rows, outputs * width): each record's Jacobian, flat."""
        self.encoder.eval()
        weights = {name: p.detach() for name, p in self.encoder.named_parameters() if p.requires_grad}

        def score(values: dict[str, Tensor], row: Tensor) -> Tensor:
            out: Tensor = functional_call(self.encoder, values, (row.unsqueeze(0),))
            return out.squeeze(0)

        one = jacrev(score)
        if any(isinstance(part, nn.RNNBase) for part in self.encoder.modules()):
            # torch's fused recurrent layers have no batching rule: one record after the other.
            singles = [one(weights, row) for row in inputs]
            found = {name: torch.stack([single[name] for single in singles]) for name in weights}
        else:
            found = vmap(one, in_dims=(None, 0))(weights, inputs)
        flat = torch.cat([found[name].reshape(len(inputs), self._outputs, -1) for name in weights], dim=2)
        return np.asarray(flat.reshape(len(inputs), -1).cpu().numpy(), np.float64)

    def set_gradients(self, total: Floats, count: int, *, ridge: float) -> None:
        first = self.parameters[0]
        flat = to_device(total[:, 0] / count, first.device, first.dtype)
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape)


def is_linear(setup: Setup, party: str) -> bool:
    """Whether a party's model takes the fast path."""
    return isinstance(encoder_form(setup, party), PreparedLinear)


def encoder_form(setup: Setup, party: str) -> nn.Module:
    """A party's encoder; of one that is elsewhere only the form matters, which the plan describes."""
    found = setup.encoders.get(party)
    return planned_encoder(setup.plan, setup.data, party) if found is None else found


def build_model(
    setup: Setup, index: int | None, preparation: Preparation | None, *, biased: bool
) -> SealedModel:
    """A member's model on the rows of `setup`.

    Args:
        setup: What the run is built from.
        index: Index of the party; None for a label holder without features.
        preparation: How a linear model's rows are prepared; the encoder takes it over.
        biased: Whether the label holder's bias belongs to it.
    """
    if index is None:
        return _build_linear(setup, None, None, biased=biased)
    encoder = setup.encoders[setup.data.parties[index]]
    if not isinstance(encoder, PreparedLinear):
        return _build_network(setup, index)
    if preparation is not None:
        centre, scale = (torch.from_numpy(np.array(each)) for each in (preparation.centre, preparation.scale))
        encoder.prepare(centre=centre, scale=scale, clip=preparation.clip)
    return _build_linear(setup, index, preparation, biased=biased)


def _build_network(setup: Setup, index: int) -> NetworkModel:
    """The party's encoder as it is."""
    data = setup.data
    return NetworkModel(
        setup.encoders[data.parties[index]],
        Records(data.train[index], data.test[index], setup.device),
        counts=(data.n_train, data.n_test),
        outputs=data.outputs,
        clip=setup.plan.clip,
    )


def _build_linear(
    setup: Setup, index: int | None, preparation: Preparation | None, *, biased: bool
) -> LinearModel:
    """The linear model of a party, or of a label holder without features (index None)."""
    data = setup.data
    blocks, weight = None, None
    if index is not None:
        blocks = (data.train[index], data.test[index])
        weight = setup.encoders[data.parties[index]].output.weight  # type: ignore[union-attr]
    bias = setup.head.bias if biased else None
    return LinearModel(
        blocks,
        preparation,
        counts=(data.n_train, data.n_test),
        weight=weight,  # type: ignore[arg-type]
        bias=bias,  # type: ignore[arg-type]
        clip=setup.plan.clip * BIAS,
    )
