"""The ready-made encoders h_m: a party's rows in, one embedding vector per row out.

All of them work on each row by itself: none couples the records of a batch, so all may be used in every
accounting mode. Each has its hidden layers in `hidden` (a `ModuleList` whose members have a noise slot) and
an affine last layer in `output`. The slot is empty (`nn.Identity`) until `perturb` fills it, so that a plain
and a perturbed encoder hold the same parameters under the same names. The clip and the Gaussian noise of a
release belong to the gate, not to a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn import functional

from securevfl.errors import PlanError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


def build_activation(name: str) -> nn.Module:
    """A new activation module by its name in `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise PlanError(f"unknown activation {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class HiddenLayer(nn.Module):
    """u = activation(affine(x) + noise), VAFL eq. (9b), or (10) once the noise slot is filled.

    Args:
        affine: Any module; `nn.Linear` and `nn.Conv2d` in the ready-made encoders.
        activation: Any module without parameters.
    """

    def __init__(self, affine: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.affine = affine
        self.noise: nn.Module = nn.Identity()
        self.activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        """Applies the layer to a batch."""
        out: Tensor = self.activation(self.noise(self.affine(inputs)))
        return out


class LSTMLayer(nn.Module):
    """An LSTM layer from basic operations, with an optional second direction and a noise slot at its output.

    torch's fused `nn.LSTM` has no batching rule for `torch.func.vmap`, which per-record gradients and stacked
    parties need. Weights, gate order and the two biases are those of `nn.LSTM`.

    Args:
        features: Width of one step of the input.
        units: Width of the hidden state; a bidirectional layer puts out twice as much.
        bidirectional: Also read the sequence backwards.
    """

    def __init__(self, features: int, units: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.units = units
        self.directions = 2 if bidirectional else 1
        self.weight_ih = nn.Parameter(torch.zeros(self.directions, 4 * units, features))
        self.weight_hh = nn.Parameter(torch.zeros(self.directions, 4 * units, units))
        self.bias_ih = nn.Parameter(torch.zeros(self.directions, 4 * units))
        self.bias_hh = nn.Parameter(torch.zeros(self.directions, 4 * units))
        self.noise: nn.Module = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps (rows, steps, features) to (rows, steps, directions * units)."""
        out: Tensor = self.noise(self._run(inputs))
        return out

    def _run(self, inputs: Tensor) -> Tensor:
        rows, steps = inputs.shape[0], inputs.shape[1]
        both = [inputs, inputs.flip(1)][: self.directions]
        flat = torch.stack([one.flatten(0, 1) for one in both])
        driven = torch.bmm(flat, self.weight_ih.transpose(1, 2)) + (self.bias_ih + self.bias_hh).unsqueeze(1)
        driven = driven.reshape(self.directions, rows, steps, 4 * self.units)
        recurrent = self.weight_hh.transpose(1, 2)
        hidden = cell = driven.new_zeros(self.directions, rows, self.units)
        outputs = []
        for step in driven.unbind(2):
            admit, forget, candidate, emit = (step + torch.bmm(hidden, recurrent)).chunk(4, dim=2)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(admit) * torch.tanh(candidate)
            hidden = torch.sigmoid(emit) * torch.tanh(cell)
            outputs.append(hidden)
        sequence = torch.stack(outputs, dim=2)  # (directions, rows, steps, units)
        ways = [sequence[0]] if self.directions == 1 else [sequence[0], sequence[1].flip(1)]
        return torch.cat(ways, dim=2)


def check_positive(**sizes: int) -> None:
    """Raises `PlanError` unless every named size is a whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise PlanError(f"{name.replace('_', ' ')} is {size!r}; expected a whole number of at least 1")


class LinearEncoder(nn.Module):
    """h = W x, VAFL's linear embedding.

    Args:
        width: Number of the party's features.
        embedding: Length of the embedding.
        bias: Add a bias. Off by default: the head has one, and a second only makes the model redundant.
    """

    def __init__(self, width: int, embedding: int, *, bias: bool = False) -> None:
        super().__init__()
        check_positive(width=width, embedding=embedding)
        self.hidden = nn.ModuleList()
        self.output = nn.Linear(width, embedding, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds (rows, width)."""
        out: Tensor = self.output(inputs)
        return out


class PreparedLinear(LinearEncoder):
    """h = W p(x), where p centres, scales and clips a row: what sealed training learns.

    Before `prepare` is called, p changes nothing. What it is belongs to the model and is saved with it.

    Args:
        encoder: The linear encoder to take over.
    """

    centre: Tensor
    scale: Tensor
    clip: Tensor

    def __init__(self, encoder: LinearEncoder) -> None:
        nn.Module.__init__(self)
        self.hidden, self.output = encoder.hidden, encoder.output
        exact = torch.float64
        self.register_buffer("centre", torch.zeros(encoder.output.in_features, dtype=exact))
        self.register_buffer("scale", torch.ones(encoder.output.in_features, dtype=exact))
        self.register_buffer("clip", torch.full((), torch.inf, dtype=exact))

    def prepare(self, *, centre: Tensor, scale: Tensor, clip: float) -> None:
        """Sets what is subtracted from rows, what multiplies each column, and the bound of a row's norm."""
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.clip.fill_(clip)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds (rows, width)."""
        rows = (inputs - self.centre) * self.scale
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-300)
        rows = rows * (self.clip / norms).clamp(max=1.0)
        out: Tensor = self.output(rows.to(self.output.weight.dtype))
        return out


class MLPEncoder(nn.Module):
    """Fully connected layers with an affine last one.

    Args:
        width: Number of the party's features.
        embedding: Length of the embedding.
        hidden: Widths of the hidden layers, at least one.
        activation: A name in `ACTIVATIONS`.
    """

    def __init__(
        self, width: int, embedding: int, hidden: Sequence[int] = (64,), *, activation: str = "relu"
    ) -> None:
        super().__init__()
        check_positive(width=width, embedding=embedding)
        if not hidden:
            raise PlanError("an MLP encoder needs at least one hidden width; use the linear encoder for none")
        for size in hidden:
            check_positive(hidden_width=size)
        self.hidden = nn.ModuleList(
            HiddenLayer(nn.Linear(before, after), build_activation(activation))
            for before, after in pairwise((width, *hidden))
        )
        self.output = nn.Linear(hidden[-1], embedding)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds (rows, width)."""
        values = inputs
        for layer in self.hidden:
            values = layer(values)
        out: Tensor = self.output(values)
        return out


class FMEncoder(nn.Module):
    """A factorisation machine: h = W x + half of sum_f ((v_f . x)^2 - (v_f * v_f) . (x * x)), per output.

    The second part is the sum over all pairs of columns of <v_i, v_j> x_i x_j: interactions within a party,
    as FDML names them among its local models.

    Args:
        width: Number of the party's features.
        embedding: Length of the embedding; each value has factors of its own.
        factors: Length of a column's factors.
    """

    def __init__(self, width: int, embedding: int, factors: int = 16) -> None:
        super().__init__()
        check_positive(width=width, embedding=embedding, factors=factors)
        self.hidden = nn.ModuleList()
        self.output = nn.Linear(width, embedding, bias=False)
        self.factors = nn.Linear(width, embedding * factors, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds (rows, width)."""
        squares = self.factors(inputs).square() - functional.linear(
            inputs.square(), self.factors.weight.square()
        )
        width = self.output.out_features
        pairs = squares.reshape(inputs.shape[0], width, squares.shape[1] // width).sum(2) / 2
        out: Tensor = self.output(inputs) + pairs
        return out


class CNNEncoder(nn.Module):
    """3x3 convolutions, each followed by 2x2 pooling, with an affine last layer.

    A party of a vertically cut image often holds a thin band. A side of length 1 is not pooled any further,
    an odd side is rounded up, so every band works.

    Args:
        image_shape: (height, width) or (channels, height, width) of the party's part.
        embedding: Length of the embedding.
        channels: Output channels of each convolution, at least one.
        activation: A name in `ACTIVATIONS`.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        embedding: int,
        channels: Sequence[int] = (8, 16),
        *,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if len(image_shape) not in (2, 3):
            raise PlanError(f"an image shape has 2 or 3 sides (channels first), not {len(image_shape)}")
        if not channels:
            raise PlanError("a CNN encoder needs the channels of at least one convolution")
        for size in (*image_shape, *channels):
            check_positive(image_size=size)
        check_positive(embedding=embedding)
        planes, height, width = (1, *image_shape) if len(image_shape) == 2 else tuple(image_shape)
        self.image_shape = (planes, height, width)
        self.hidden, self.pools = nn.ModuleList(), nn.ModuleList()
        for before, after in pairwise((planes, *channels)):
            self.hidden.append(
                HiddenLayer(nn.Conv2d(before, after, 3, padding=1), build_activation(activation))
            )
            window = (min(2, height), min(2, width))
            self.pools.append(nn.MaxPool2d(window, ceil_mode=True))
            height, width = -(-height // window[0]), -(-width // window[1])
        self.output = nn.Linear(channels[-1] * height * width, embedding)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds flat rows (rows, channels * height * width), or images of the given shape."""
        values = inputs.reshape(inputs.shape[0], *self.image_shape)
        for layer, pool in zip(self.hidden, self.pools, strict=True):
            values = pool(layer(values))
        out: Tensor = self.output(values.flatten(1))
        return out


class LSTMEncoder(nn.Module):
    """Two LSTM layers, the first bidirectional (VAFL appendix G.3.2), and an affine map of the last state.

    Args:
        steps: Length of the sequence.
        features: Values per step; flat rows are read step by step.
        embedding: Length of the embedding.
        units: Units of each layer; 16 in the paper.
    """

    def __init__(self, steps: int, features: int, embedding: int, units: int = 16) -> None:
        super().__init__()
        check_positive(steps=steps, features=features, embedding=embedding, units=units)
        self.sequence_shape = (steps, features)
        self.hidden = nn.ModuleList(
            [LSTMLayer(features, units, bidirectional=True), LSTMLayer(2 * units, units)]
        )
        self.output = nn.Linear(units, embedding)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds flat rows (rows, steps * features), or (rows, steps, features)."""
        values = inputs.reshape(inputs.shape[0], *self.sequence_shape)
        for layer in self.hidden:
            values = layer(values)
        out: Tensor = self.output(values[:, -1])
        return out
