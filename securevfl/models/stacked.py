"""The encoders of several parties evaluated and differentiated in one batched call.

A simulation holds all parties in one process; seven small matrix products then cost seven times the overhead
of one. A stack keeps the parties' parameters in common tensors with a leading party axis. The encoders' own
parameters become views of them, so a step of either is seen by both.

This is a matter of speed within one process: each embedding still depends on its own party's rows and weights
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from securevfl.errors import PlanError
from securevfl.models.encoders import (
    CNNEncoder,
    FMEncoder,
    HiddenLayer,
    LinearEncoder,
    LSTMEncoder,
    MLPEncoder,
)
from securevfl.models.perturbed import HiddenNoise

_STACKABLE = (LinearEncoder, MLPEncoder, CNNEncoder, LSTMEncoder, FMEncoder)
MAX_PADDING = 1.5  # padded width over true width beyond which padding costs more than it saves


def why_not_stackable(encoders: Sequence[nn.Module]) -> str | None:
    """Why these encoders cannot be stacked, in a few words; None if they can.

    They must be ready-made encoders of one type, structure, dtype and device: the first one's code serves
    all, and a user's module may hide differences in attributes that no comparison finds. Linear and MLP
    encoders may differ in their number of columns (narrower ones are padded with zeros). Hidden noise is
    stacked in MLP encoders only.
    """
    if not encoders:
        return "there is no encoder"
    first = encoders[0]
    if type(first) not in _STACKABLE:
        return f"{type(first).__name__} is not a ready-made encoder"
    if any(_structure(one) != _structure(first) for one in encoders):
        return "types, layers or shapes differ"
    if len({id(p) for one in encoders for p in one.parameters()}) < len(encoders) * len(_names(first)):
        return "encoders share parameters"
    if _is_plain(first):
        widths = [_input_weight(one).shape[1] for one in encoders]
        wide = max(widths) * len(widths) > MAX_PADDING * sum(widths)
        return f"numbers of columns differ too much ({min(widths)} to {max(widths)})" if wide else None
    if any(isinstance(part, HiddenNoise) for one in encoders for part in one.modules()):
        return "hidden noise is stacked in MLP encoders only"
    return None


def _is_plain(encoder: nn.Module) -> bool:
    return type(encoder) in (LinearEncoder, MLPEncoder)


def _names(encoder: nn.Module) -> list[str]:
    return [name for name, _ in encoder.named_parameters()]


def _structure(encoder: nn.Module) -> list[object]:
    """What must be equal for two ready-made encoders to be computed by the same code."""
    plain = _is_plain(encoder)
    free = _input_weight(encoder) if plain else None
    parts: list[object] = [type(encoder), getattr(encoder, "image_shape", None)]
    parts.append(getattr(encoder, "sequence_shape", None))
    parts += [
        (name, type(p)) for name, p in encoder.named_modules() if not isinstance(p, HiddenNoise | nn.Identity)
    ]
    for name, p in encoder.named_parameters():
        shape = p.shape[:1] if p is free else p.shape
        parts.append((name, tuple(shape), p.dtype, p.device, p.requires_grad))
    return parts


def _affine_layers(encoder: nn.Module) -> list[nn.Linear]:
    chain = cast(LinearEncoder | MLPEncoder, encoder)
    return [cast(nn.Linear, cast(HiddenLayer, layer).affine) for layer in chain.hidden] + [chain.output]


def _input_weight(encoder: nn.Module) -> Tensor:
    return _affine_layers(encoder)[0].weight


class StackedEncoders(nn.Module):
    """One module for M parties' encoders; its parameters have a leading party axis.

    Optimise `parameters()` of the stack with one optimiser, or the encoders with their own; both move the
    same numbers. Gradients arrive at the stack. Move encoders to their device before stacking, not after.

    Args:
        encoders: The parties' encoders in the parties' order. Their parameters are rebound to views of the
            stack.

    Raises:
        PlanError: The encoders cannot be stacked; see `why_not_stackable`.
    """

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        reason = why_not_stackable(encoders)
        if reason:
            raise PlanError(f"these encoders cannot be stacked: {reason}")
        self._encoders = tuple(encoders)  # a tuple, so that torch does not register them a second time
        self._plain = _is_plain(encoders[0])
        self._names = _names(encoders[0])
        self.width = max(_input_weight(one).shape[1] for one in encoders) if self._plain else None
        own = [list(encoder.parameters()) for encoder in encoders]
        self.stacked = nn.ParameterList(_join(same, self._plain) for same in zip(*own, strict=True))
        self._leaves = tuple(self.stacked)  # iterating over a ParameterList costs as much as a small product
        self._chain = _chain(encoders) if self._plain else []
        self.linear = self._chain == [(False, ())]
        self.training = encoders[0].training

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stacked parameters with the names that they have in one encoder."""
        return zip(self._names, self.stacked, strict=True)

    def train(self, mode: bool = True) -> StackedEncoders:
        """Sets the mode of the stack and of every encoder in it."""
        for encoder in self._encoders:
            encoder.train(mode)
        return super().train(mode)

    def join(self, inputs: Sequence[Tensor]) -> Tensor:
        """Stacks the parties' rows to (parties, rows, columns), padded with zeros to the widest.

        Whole data sets can be joined once; batches are then cut out of axis 1, fastest by `index_select`.
        """
        if len(inputs) != len(self._encoders):
            raise PlanError(f"{len(inputs)} inputs for {len(self._encoders)} stacked encoders")
        if self.width is None:
            return torch.stack(list(inputs))
        for encoder, one in zip(self._encoders, inputs, strict=True):
            if one.ndim != 2 or one.shape[1] != _input_weight(encoder).shape[1]:
                expected = _input_weight(encoder).shape[1]
                raise PlanError(f"input of shape {tuple(one.shape)} for an encoder of {expected} columns")
        return torch.stack([functional.pad(one, (0, self.width - one.shape[1])) for one in inputs])

    def forward(self, inputs: Sequence[Tensor] | Tensor) -> Tensor:
        """Embeds a batch of every party: (parties, rows, embedding).

        Args:
            inputs: One (rows, columns) tensor per party, or what `join` made of them.
        """
        values = inputs if isinstance(inputs, Tensor) else self.join(inputs)
        if self._plain:
            return self._forward_plain(values)
        first = self._encoders[0]

        def embed(parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
            out: Tensor = functional_call(first, parameters, (rows,))
            return out

        out: Tensor = vmap(embed)(dict(zip(self._names, self.stacked, strict=True)), values)
        return out

    def pull_back(self, batch: Tensor, gradient: Tensor) -> None:
        """Sets the gradient of linear encoders, from that in their embeddings of a batch, without a graph."""
        self._leaves[0].grad = torch.bmm(batch.transpose(1, 2), gradient)

    def _forward_plain(self, values: Tensor) -> Tensor:
        leaves = iter(self._leaves)
        for biased, layers in self._chain:
            weight = next(leaves)
            if biased:
                values = torch.baddbmm(next(leaves).unsqueeze(1), values, weight)
            else:
                values = torch.bmm(values, weight)
            if layers:
                values = _activate(layers, values)
        return values


def _activate(layers: tuple[HiddenLayer, ...], values: Tensor) -> Tensor:
    """Noise and activation of one hidden layer of all parties; each party has its own noise."""
    slots = [layer.noise for layer in layers]
    if any(isinstance(slot, HiddenNoise) and slot.active for slot in slots):
        values = torch.stack([slot(one) for slot, one in zip(slots, values.unbind(0), strict=True)])
    out: Tensor = layers[0].activation(values)
    return out


def _chain(encoders: Sequence[nn.Module]) -> list[tuple[bool, tuple[HiddenLayer, ...]]]:
    """For each affine layer: whether it has a bias, and the parties' hidden layers around it."""
    hidden = [cast(nn.ModuleList, encoder.hidden) for encoder in encoders]
    around: list[tuple[HiddenLayer, ...]] = [
        tuple(cast(HiddenLayer, layer) for layer in same) for same in zip(*hidden, strict=True)
    ]
    affine = _affine_layers(encoders[0])
    return [(one.bias is not None, here) for one, here in zip(affine, [*around, ()], strict=True)]


def _join(same: Sequence[nn.Parameter], plain: bool) -> nn.Parameter:
    """Stacks one parameter of all parties and makes the originals views of the stack.

    Weights of linear and MLP encoders are stored transposed and padded: `bmm` and its gradient then need no
    transposed copies, which is a tenth of a small step.
    """
    turned = [p.detach().T if plain and p.ndim == 2 else p.detach() for p in same]
    if plain:
        rows = max(value.shape[0] for value in turned)
        joined = torch.stack([_pad_rows(value, rows) for value in turned])
    else:
        joined = torch.stack(turned)
    for party, (p, value) in enumerate(zip(same, turned, strict=True)):
        view = joined[party, : value.shape[0]] if plain else joined[party]
        p.data = view.T if plain and p.ndim == 2 else view
    return nn.Parameter(joined, requires_grad=same[0].requires_grad)


def _pad_rows(value: Tensor, rows: int) -> Tensor:
    padded = value.new_zeros(rows, *value.shape[1:])
    padded[: value.shape[0]] = value
    return padded
