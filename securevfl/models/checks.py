"""Whether a user's module can serve as an encoder, and whether it mixes the records of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from securevfl.errors import PlanError


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
