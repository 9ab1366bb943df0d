"""Encoders, built from a seed or brought by a user and checked, and the device they run on.

Initial weights are a function of the plan and of one generator, of nothing else. Modules are laid out on
torch's meta device and filled from the caller's generator, so torch's global generator is neither read nor
advanced. Weights are drawn on the CPU on every device: the same seed, the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from securevfl.errors import PlanError
from securevfl.models.encoders import (
    CNNEncoder,
    FMEncoder,
    LinearEncoder,
    LSTMEncoder,
    LSTMLayer,
    MLPEncoder,
    PreparedLinear,
    check_positive,
)

MAX_PARAMETERS = 1 << 28
MAX_LAYERS = 256
"""Of a single model. Over a network others propose its shape; what is laid out for it must have an end."""


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


def _fm(spec: EncoderSpec) -> nn.Module:
    return FMEncoder(spec.width, spec.embedding, spec.units)


ENCODERS: dict[str, Callable[[EncoderSpec], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "lstm": _lstm,
    "fm": _fm,
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
        units: Units of each layer (`lstm`), or factors (`fm`).
        prepared: Rows are centred, scaled and clipped on their way in (`linear`), as in sealed training.

    Raises:
        PlanError: The name is unknown or the sizes do not fit together.
    """
    if name not in ENCODERS:
        raise PlanError(f"unknown encoder {name!r}; choose one of {', '.join(ENCODERS)}")
    check_positive(width=width, embedding=embedding)
    if len(hidden) + len(channels) > MAX_LAYERS:
        raise PlanError(f"a model of {len(hidden) + len(channels):,} layers; at most {MAX_LAYERS} are built")
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
    size = sum(parameter.numel() for parameter in module.parameters())
    if size > MAX_PARAMETERS:
        raise PlanError(f"a model of {size:,} parameters; at most {MAX_PARAMETERS:,} are built")
    # `to_empty` would load sympy, which takes as long as a small run.
    module._apply(_empty)  # type: ignore[no-untyped-call]
    initialise(module, generator)
    return module


def _empty(laid_out: Tensor) -> Tensor:
    return torch.empty(laid_out.shape, dtype=laid_out.dtype)


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


DEVICES = ("cpu", "cuda", "auto")


def pick_device(name: str = "cpu") -> torch.device:
    """The torch device for a plan's `device` setting.

    Args:
        name: `cpu`, `cuda` (the current CUDA device) or `auto` (CUDA where there is one, else the CPU).

    Raises:
        PlanError: The name is unknown, or `cuda` is asked for and torch finds none.
    """
    if name not in DEVICES:
        raise PlanError(f"unknown device {name!r}; choose one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise PlanError("device 'cuda' was asked for, but torch finds no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def evaluate(module: nn.Module, inputs: Tensor) -> Tensor:
    """The module's output in evaluation mode, without a graph; the mode of every submodule is restored."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            out: Tensor = module(inputs)
            return out
    finally:
        for part, training in modes:
            part.training = training


def check_encoder(module: nn.Module, sample: Tensor, embedding: int | None = None) -> int:
    """Checks that a module maps rows to embeddings, and returns the embedding's length.

    Args:
        module: Any module.
        sample: A few of the party's rows, on the module's device.
        embedding: The length that is expected, if one is.

    Raises:
        PlanError: The output is not a finite floating-point matrix with one row per record.
    """
    rows = sample.shape[0]
    try:
        out = evaluate(module, sample)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(f"the encoder fails on rows of shape {tuple(sample.shape)}: {reason}") from error
    if not isinstance(out, Tensor) or not out.is_floating_point():
        raise PlanError(f"the encoder must return a floating-point tensor, not {_describe(out)}")
    if out.ndim != 2 or out.shape[0] != rows or out.shape[1] < 1:
        wanted = "embedding" if embedding is None else str(embedding)
        raise PlanError(f"the encoder returns shape {tuple(out.shape)}; expected ({rows}, {wanted})")
    if embedding is not None and out.shape[1] != embedding:
        raise PlanError(f"the encoder returns embeddings of length {out.shape[1]}; the plan says {embedding}")
    if not torch.isfinite(out).all():
        raise PlanError("the encoder returns NaN or infinite embeddings on the sample; check its weights")
    return int(out.shape[1])


def _describe(out: object) -> str:
    return str(out.dtype) if isinstance(out, Tensor) else type(out).__name__


def couples_records(module: nn.Module, sample: Tensor | None = None) -> list[str]:
    """Names what makes one record's embedding depend on other records; empty if nothing was found.

    Batch normalisation mixes the records of a batch and keeps running statistics of them; instance
    normalisation mixes records only through running statistics. With such a layer no accounting by record
    holds, so every mode but `strict` forbids it. `LayerNorm`, `GroupNorm` and instance normalisation without
    running statistics work on each record by itself.

    The layers are found by type. A module can also mix records in its own `forward` (`x - x.mean(0)`): with a
    `sample` of at least two rows that is tried out in evaluation mode, and reported as `forward`. Neither
    test can prove that a module's code does not remember records between calls.

    Args:
        module: The encoder.
        sample: Rows to try it on.
    """
    found = [
        f"{name or 'module'} ({type(part).__name__})" for name, part in module.named_modules() if _mixes(part)
    ]
    if sample is not None and sample.shape[0] > 1 and _forward_mixes(module, sample):
        found.append("forward")
    return found


def _mixes(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) or (isinstance(part, _InstanceNorm) and part.track_running_stats)


def _forward_mixes(module: nn.Module, sample: Tensor) -> bool:
    """Replaces all other rows by copies of the first, which are legal inputs; its embedding must stay."""
    copies = sample[:1].expand_as(sample).clone()
    before, after = evaluate(module, sample)[0], evaluate(module, copies)[0]
    # The same kernel runs on the same shape; 1e-5 leaves room for float32 reductions in another order.
    return not torch.allclose(before, after, rtol=1e-5, atol=1e-5 * float(before.abs().max()))
