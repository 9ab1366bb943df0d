"""The hidden layers that the ready-made encoders are built from.

Every hidden layer has a `noise` slot, empty (`nn.Identity`) until `perturb` fills it, so that a plain and a
perturbed encoder hold the same parameters under the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
