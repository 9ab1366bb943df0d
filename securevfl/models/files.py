"""Model files: safetensors, which hold tensors and no code. A model is its party's own, so 0600."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from securevfl.errors import RunError
from securevfl.files import write_bytes


def save_module(path: Path | str, module: nn.Module) -> None:
    """Writes a module's parameters and persistent buffers, readable by their owner alone.

    Raises:
        RunError: The module has state that is not a tensor, or the folder cannot be written.
    """
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise RunError(f"model state {name!r} is a {type(value).__name__}; only tensors can be saved")
    # Clones, because encoders of a stack share one storage, which safetensors refuses.
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    write_bytes(path, content)


def load_module(path: Path | str, module: nn.Module) -> None:
    """Fills a module, in place, from a file of `save_module`; on an error the module is unchanged.

    Raises:
        RunError: The file is missing or damaged, or its names, shapes or types are not the module's.
    """
    try:
        found = load(Path(path).read_bytes())
    except OSError as error:
        raise RunError(f"cannot read the model file {path}: {error.strerror}") from error
    except SafetensorError as error:
        raise RunError(f"{path} is not a safetensors file: {error}") from error
    expected = module.state_dict()
    if found.keys() != expected.keys():
        odd = ", ".join(sorted(found.keys() ^ expected.keys())[:4])
        raise RunError(f"{path} belongs to another model: names differ ({odd})")
    for name, value in found.items():
        if value.shape != expected[name].shape or value.dtype != expected[name].dtype:
            here, there = tuple(value.shape), tuple(expected[name].shape)
            raise RunError(
                f"{path} belongs to another model: {name} is {here} {value.dtype}, "
                f"expected {there} {expected[name].dtype}"
            )
    module.load_state_dict(found)
