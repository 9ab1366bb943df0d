"""Per-record clipped gradients of an encoder, the deterministic half of `dp-encoder` training.

A party holds dl/dh for every record of a batch. The gradient that record n alone would give the encoder's
weights is the vector-Jacobian product of its own embedding with its own dl/dh. Each is clipped to L2 norm C_g
over **all** trainable parameters together, then they are summed: replacing one record moves the sum by at
most 2 C_g. The caller adds N(0, sigma_g^2) from its noise source before anything uses the sum, and counts the
update.

The bound needs embeddings that depend on one record each, so modules that couple records are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from securevfl.errors import PlanError
from securevfl.models.build import couples_records
from securevfl.models.encoders import LinearEncoder, MLPEncoder
from securevfl.models.perturbed import drawn_noise, replaying

# Float32 norms and products are off by a few units of 6e-8; the margin keeps every clipped gradient inside
# C_g.
CLIP_MARGIN = 1 - 1e-5
CHUNK_VALUES = 2**24  # per-record gradients held at a time: 64 MB of float32


def clipped_gradient_sum(
    encoder: nn.Module,
    inputs: Tensor,
    upstream: Tensor,
    clip: float,
    *,
    noise: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """Sums the per-record gradients of an encoder, each clipped to L2 norm `clip`.

    A record whose gradient is not finite contributes nothing, so the bound holds for every input.

    Args:
        encoder: Any module that treats records one by one; its hidden noise is added as in any forward pass.
        inputs: (rows, ...), the batch.
        upstream: (rows, embedding), the loss's gradient at each record's embedding.
        clip: C_g, positive.
        noise: What `drawn_noise(encoder)` gave after the forward pass that led to `upstream`, to
            differentiate the same perturbed encoder. By default fresh hidden noise is drawn.

    Returns:
        One tensor per trainable parameter, in the order of `encoder.parameters()`.

    Raises:
        PlanError: The encoder couples records, the clip is not positive, or the batch's sizes differ.
    """
    _check(encoder, inputs, upstream, clip)
    hidden = _fresh_noise(encoder, inputs) if noise is None else dict(noise)
    for name, values in hidden.items():
        if len(values) != len(inputs):
            raise PlanError(f"hidden noise {name} is for {len(values)} records, the batch has {len(inputs)}")
    with replaying(encoder, hidden):
        if _is_closed_form(encoder):
            return _closed_form(encoder, inputs, upstream, clip)
        return _explicit(encoder, inputs, upstream, hidden, clip)


def _check(encoder: nn.Module, inputs: Tensor, upstream: Tensor, clip: float) -> None:
    if not (math.isfinite(clip) and clip > 0):
        raise PlanError(f"gradient clip is {clip!r}; expected a positive number")
    if upstream.ndim != 2 or len(upstream) != len(inputs):
        wanted = f"({len(inputs)}, embedding)"
        raise PlanError(f"upstream gradients have shape {tuple(upstream.shape)}; expected {wanted}")
    narrow = [p.dtype for p in encoder.parameters() if p.dtype not in (torch.float32, torch.float64)]
    kind = inputs.device.type
    if narrow or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        raise PlanError(
            "mixed precision is not offered where gradients of single records are clipped: the bound is "
            "derived for float32; leave autocast, and keep parameters in float32"
        )
    if hasattr(encoder, "_orig_mod"):
        raise PlanError("gradients of single records cannot pass a compiled encoder; give the module itself")
    mixing = couples_records(encoder)
    if mixing:
        raise PlanError(f"the encoder couples records through {', '.join(mixing)}; use LayerNorm or no norm")


def _fresh_noise(encoder: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    if drawn_noise(encoder):
        with torch.no_grad():
            encoder(inputs)
    return drawn_noise(encoder)


def _clip_factors(squares: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Which records have a finite gradient, and the factor min(1, clip / norm) for those, else 0."""
    keep = torch.isfinite(squares)
    norms = squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny)
    return keep, torch.where(keep, (clip * CLIP_MARGIN / norms).clamp_max(1), 0)


def _only(keep: Tensor, values: Tensor) -> Tensor:
    """The values, with zeros for records that are left out: picking the others would make a GPU wait."""
    return torch.where(keep.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _is_closed_form(encoder: nn.Module) -> bool:
    """Whether every parameter belongs to a `nn.Linear` that each record passes exactly once."""
    # The exact types: a subclass may compute something else.
    known = type(encoder) in (LinearEncoder, MLPEncoder)
    return known and all(p.requires_grad for p in encoder.parameters())


def _closed_form(encoder: nn.Module, inputs: Tensor, upstream: Tensor, clip: float) -> list[Tensor]:
    """A linear layer's gradient for one record is the outer product of its output gradient and its input.

    Its squared norm is |delta|^2 (|u|^2 + 1), the 1 for the bias, so no per-record gradient is ever formed.
    """
    trace: list[tuple[Tensor, Tensor]] = []
    layers = [part for part in encoder.modules() if isinstance(part, nn.Linear)]
    hooks = [
        layer.register_forward_hook(lambda _, given, out: trace.append((given[0], out))) for layer in layers
    ]
    try:
        with torch.enable_grad():
            embedding = encoder(inputs.detach())
    finally:
        for hook in hooks:
            hook.remove()
    deltas = torch.autograd.grad(embedding, [out for _, out in trace], upstream)
    squares = torch.zeros(len(inputs), dtype=embedding.dtype, device=embedding.device)
    for layer, (given, _), delta in zip(layers, trace, deltas, strict=True):
        squares += delta.square().sum(1) * (given.detach().square().sum(1) + (layer.bias is not None))
    keep, factors = _clip_factors(squares, clip)
    sums: list[Tensor] = []
    for layer, (given, _), delta in zip(layers, trace, deltas, strict=True):
        scaled = _only(keep, delta) * factors.unsqueeze(1)
        sums.append(scaled.T @ _only(keep, given.detach()))
        if layer.bias is not None:
            sums.append(scaled.sum(0))
    return sums


def _explicit(
    encoder: nn.Module, inputs: Tensor, upstream: Tensor, noise: dict[str, Tensor], clip: float
) -> list[Tensor]:
    """Forms every record's gradient, a chunk of records at a time."""
    weights = {name: p.detach() for name, p in encoder.named_parameters() if p.requires_grad}
    total = [torch.zeros_like(value) for value in weights.values()]
    rows = max(1, CHUNK_VALUES // max(1, sum(value.numel() for value in total)))
    for start in range(0, len(inputs), rows):
        here = slice(start, start + rows)
        part = {name: values[here] for name, values in noise.items()}
        found = _gradients(encoder, weights, inputs[here], upstream[here], part)
        squares = torch.stack([value.flatten(1).square().sum(1) for value in found]).sum(0)
        keep, factors = _clip_factors(squares, clip)
        for value, more in zip(total, found, strict=True):
            value += torch.tensordot(factors, _only(keep, more), dims=1)
    return total


def _gradients(
    encoder: nn.Module, weights: dict[str, Tensor], inputs: Tensor, upstream: Tensor, noise: dict[str, Tensor]
) -> list[Tensor]:
    """The unclipped gradient of each record: one (rows, *shape) tensor per parameter."""

    def score(values: dict[str, Tensor], row: Tensor, direction: Tensor, hidden: dict[str, Tensor]) -> Tensor:
        state = {**values, **{name: one.unsqueeze(0) for name, one in hidden.items()}}
        out: Tensor = functional_call(encoder, state, (row.unsqueeze(0),))
        return torch.dot(out.squeeze(0), direction)

    one = grad(score)
    if not any(isinstance(part, nn.RNNBase) for part in encoder.modules()):
        every = vmap(one, in_dims=(None, 0, 0, 0), randomness="different")
        return list(every(weights, inputs, upstream, noise).values())
    # torch's fused recurrent layers have no batching rule: one record after the other.
    singles = [
        one(weights, inputs[n], upstream[n], {name: values[n] for name, values in noise.items()})
        for n in range(len(inputs))
    ]
    return [torch.stack([single[name] for single in singles]) for name in weights]
