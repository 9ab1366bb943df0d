"""Seeded construction: initial weights are a function of the plan and of one generator, of nothing else.

Modules are laid out on torch's meta device and filled from the caller's generator, so torch's global
generator is neither read nor advanced. Weights are drawn on the CPU on every device: the same seed, the same
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from securevfl.errors import PlanError
from securevfl.models.encoders import (
    CNNEncoder,
    LinearEncoder,
    LSTMEncoder,
    MLPEncoder,
    PreparedLinear,
    check_positive,
)
from securevfl.models.layers import LSTMLayer


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What a builder in `ENCODERS` may look at; each builder reads only what concerns it."""

    width: int
    embedding: int
    hidden: tuple[int, ...] = (64,)
    activation: str = "relu"
    image_shape: tuple[int, ...] | None = None
    channels: tuple[int, ...] = (8, 16)
    steps: int | None = None
    units: int = 16


def _linear(spec: EncoderSpec) -> nn.Module:
    return LinearEncoder(spec.width, spec.embedding)


def _mlp(spec: EncoderSpec) -> nn.Module:
    return MLPEncoder(spec.width, spec.embedding, spec.hidden, activation=spec.activation)


def _cnn(spec: EncoderSpec) -> nn.Module:
    shape = spec.image_shape or (1, spec.width)
    if math.prod(shape) != spec.width:
        sides = "x".join(map(str, shape))
        raise PlanError(
            f"image shape {sides} has {math.prod(shape)} pixels, but the party has {spec.width} columns"
        )
    return CNNEncoder(shape, spec.embedding, spec.channels, activation=spec.activation)


def _lstm(spec: EncoderSpec) -> nn.Module:
    steps = spec.width if spec.steps is None else spec.steps
    check_positive(steps=steps)
    if spec.width % steps:
        raise PlanError(f"{spec.width} columns do not divide into {steps} steps of equal width")
    return LSTMEncoder(steps, spec.width // steps, spec.embedding, spec.units)


ENCODERS: dict[str, Callable[[EncoderSpec], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "lstm": _lstm,
}


def build_encoder(
    name: str,
    width: int,
    embedding: int,
    *,
    generator: torch.Generator,
    hidden: Sequence[int] = (64,),
    activation: str = "relu",
    image_shape: Sequence[int] | None = None,
    channels: Sequence[int] = (8, 16),
    steps: int | None = None,
    units: int = 16,
    prepared: bool = False,
) -> nn.Module:
    """Builds a ready-made encoder with weights from `generator`.

    Args:
        name: A name in `ENCODERS`.
        width: Number of the party's columns.
        embedding: Length of the embedding.
        generator: A CPU generator, seeded by the caller. It serves initialisation only, never noise.
        hidden: Hidden widths (`mlp`).
        activation: A name in `ACTIVATIONS` (`mlp`, `cnn`).
        image_shape: The party's band of the image, channels first (`cnn`); by default one row of pixels.
        channels: Channels of the convolutions (`cnn`).
        steps: Length of the sequence (`lstm`); by default every column is a step.
        units: Units of each layer (`lstm`).
        prepared: Rows are centred, scaled and clipped on their way in (`linear`), as in sealed training.

    Raises:
        PlanError: The name is unknown or the sizes do not fit together.
    """
    if name not in ENCODERS:
        raise PlanError(f"unknown encoder {name!r}; choose one of {', '.join(ENCODERS)}")
    check_positive(width=width, embedding=embedding)
    spec = EncoderSpec(
        width=width,
        embedding=embedding,
        hidden=tuple(hidden),
        activation=activation,
        image_shape=None if image_shape is None else tuple(image_shape),
        channels=tuple(channels),
        steps=steps,
        units=units,
    )
    made = seeded(lambda: ENCODERS[name](spec), generator)
    return PreparedLinear(made) if prepared and isinstance(made, LinearEncoder) else made


def seeded(make: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """Lays out a module without drawing a number, then fills it from `generator` (see `initialise`)."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    initialise(module, generator)
    return module


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Overwrites every parameter of a module made of this package's layers, in the order of its submodules.

    Uniform on +-1/sqrt(fan-in), for LSTM layers on +-1/sqrt(units): torch's own defaults.

    Raises:
        TypeError: A parameter belongs to a layer this function does not know.
    """
    with torch.no_grad():
        for name, part in module.named_modules():
            own = list(part.parameters(recurse=False))
            if own:
                bound = _init_bound(name, part)
                for parameter in own:
                    parameter.uniform_(-bound, bound, generator=generator)


def _init_bound(name: str, part: nn.Module) -> float:
    if isinstance(part, nn.Linear):
        return 1 / math.sqrt(part.in_features)
    if isinstance(part, nn.Conv2d):
        return 1 / math.sqrt(part.in_channels * math.prod(part.kernel_size))
    if isinstance(part, LSTMLayer):
        return 1 / math.sqrt(part.units)
    raise TypeError(f"no initial distribution is known for layer {name!r} of type {type(part).__name__}")
