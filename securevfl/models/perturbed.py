"""Perturbed local embeddings after VAFL eq. (10)-(11): noise in the hidden layers.

The noise Z_l of a hidden layer smooths the objective; **it is never counted as privacy**: uniform noise on
[-a, a] has bounded support, so moving its centre by d is seen with probability at least min(1, d/2a) whatever
epsilon is. The Gaussian Z_L of the last layer is not added here at all. The gate adds it after clipping, and
that is the only noise an accountant hears of.

Noise is drawn on the CPU from the `NoiseSource` that the party was given (a cryptographic stream) and copied
to the embedding's device; torch's generators are not involved. It is added in training mode only, like
dropout: `module.eval()` gives the unperturbed encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from securevfl.errors import PlanError
from securevfl.models.encoders import HiddenLayer, LSTMLayer
from securevfl.transfers import to_device


class NoiseSource(Protocol):
    """Where noise comes from. Successive calls give independent values."""

    def uniform(self, shape: tuple[int, ...], half_width: float) -> npt.NDArray[np.float64]:
        """Independent values, uniform on [-half_width, half_width]."""
        ...

    def gaussian(self, shape: tuple[int, ...], std: float) -> npt.NDArray[np.float64]:
        """Independent normal values with mean zero."""
        ...


class HiddenNoise(nn.Module):
    """Adds fresh noise of standard deviation `level` to its input, in training mode only.

    Args:
        level: c_l of eq. (11b), the standard deviation; zero adds nothing.
        source: Where the values come from. Shared, not copied, when the module is copied.
        gaussian: Normal noise instead of uniform noise on [-sqrt(3) c_l, sqrt(3) c_l].
    """

    drawn: Tensor

    def __init__(self, level: float, source: NoiseSource, *, gaussian: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(level) and level >= 0):
            raise PlanError(f"hidden noise level is {level!r}; expected a finite number of at least 0")
        self.level = float(level)
        self.source = source
        self.gaussian = gaussian
        self.replaying = False
        self.register_buffer("drawn", torch.empty(0), persistent=False)

    @property
    def active(self) -> bool:
        """Whether the next forward pass adds noise."""
        return self.training and self.level > 0

    def draw(self, like: Tensor) -> Tensor:
        """Fresh noise in the shape, type and place of `like`."""
        shape = tuple(like.shape)
        if self.gaussian:
            values = self.source.gaussian(shape, self.level)
        else:
            values = self.source.uniform(shape, math.sqrt(3) * self.level)
        return to_device(np.ascontiguousarray(values), like.device, like.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Adds noise to a batch and remembers it in `drawn`, or replays what is there."""
        if not self.replaying:
            if not self.active:
                return inputs
            self.drawn = self.draw(inputs)
        return inputs + self.drawn

    def __deepcopy__(self, memo: dict[int, Any]) -> HiddenNoise:
        # A copied stream would repeat the original's values; a source with a key must not be copied either.
        twin = HiddenNoise(self.level, self.source, gaussian=self.gaussian)
        twin.drawn = self.drawn.clone()
        return twin.train(self.training)


class Perturbed(HiddenLayer):
    """u = activation(linear(x) + Z), eq. (10), for use in one's own modules.

    Args:
        linear: The affine map, such as `nn.Linear` or `nn.Conv2d`.
        activation: Any module without parameters.
        level: c_l, the standard deviation of the uniform noise.
        noise: Where the noise comes from.
    """

    def __init__(self, linear: nn.Module, activation: nn.Module, level: float, noise: NoiseSource) -> None:
        super().__init__(linear, activation)
        self.noise = HiddenNoise(level, noise)


def perturb(encoder: nn.Module, levels: float | Sequence[float], noise: NoiseSource) -> nn.Module:
    """Switches on the hidden noise of a ready-made encoder, in place, and returns the encoder.

    Fully connected and convolutional layers get uniform noise before the activation, eq. (10) and (11b); LSTM
    layers get Gaussian noise at their output, as in appendix G.3.2. Parameters and their names stay as they
    are.

    Args:
        encoder: One of this package's encoders. Own modules use `Perturbed` layers instead.
        levels: c_l for every hidden layer, or one number for all.
        noise: Where the noise comes from.

    Raises:
        PlanError: The module is not a ready-made encoder, or has another number of hidden layers.
    """
    layers = getattr(encoder, "hidden", None)
    if not isinstance(layers, nn.ModuleList) or not all(
        isinstance(x, HiddenLayer | LSTMLayer) for x in layers
    ):
        raise PlanError(f"{type(encoder).__name__} is not a ready-made encoder; use Perturbed layers in it")
    each = [float(levels)] * len(layers) if isinstance(levels, int | float) else list(levels)
    if len(each) != len(layers):
        raise PlanError(f"{len(each)} noise levels for {len(layers)} hidden layers; give one for each")
    slots = [
        HiddenNoise(level, noise, gaussian=isinstance(x, LSTMLayer))
        for x, level in zip(layers, each, strict=True)
    ]
    for layer, slot in zip(layers, slots, strict=True):
        layer.noise = slot.train(layer.training)
    return encoder


def drawn_noise(encoder: nn.Module) -> dict[str, Tensor]:
    """The noise of the last forward pass by buffer name, for `replaying`; empty without active noise."""
    return {name: part.drawn for name, part in _slots(encoder) if part.active}


@contextmanager
def replaying(encoder: nn.Module, noise: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, the encoder adds this noise instead of drawing any, in training and in evaluation mode.

    Args:
        encoder: A perturbed encoder.
        noise: What `drawn_noise` gave after an earlier forward pass.

    Raises:
        PlanError: An active noise layer has no noise in it.
    """
    slots = _slots(encoder)
    missing = [name for name, part in slots if part.active and name not in noise]
    if missing:
        raise PlanError(f"no noise was kept for {', '.join(missing)}; take drawn_noise after a training pass")
    kept = [(part, part.drawn) for name, part in slots if name in noise]
    for name, part in slots:
        if name in noise:
            part.replaying, part.drawn = True, noise[name]
    try:
        yield
    finally:
        for part, drawn in kept:
            part.replaying, part.drawn = False, drawn


def _slots(encoder: nn.Module) -> list[tuple[str, HiddenNoise]]:
    """Every noise layer with the name of its buffer."""
    parts = encoder.named_modules()
    return [(f"{name}.drawn".lstrip("."), part) for name, part in parts if isinstance(part, HiddenNoise)]
