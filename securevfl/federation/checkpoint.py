"""Checkpoints: the state of every role at an epoch boundary, without pickle.

A role's state is nested dictionaries of numbers, text, None, lists, arrays and tensors. Arrays go to one
safetensors file, the rest to the JSON in its header. A checkpoint replaces the one before it in one step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from securevfl.errors import RunError
from securevfl.files import write_bytes

NAME = "checkpoint.safetensors"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; a crash leaves the old one or the new one, never half of one."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _split(state, "", tensors)
    write_bytes(folder / NAME, save(tensors, {"state": json.dumps(plain)}))


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Reads the checkpoint of a run folder; None if there is none yet.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"checkpoint {path} is damaged: {error}") from error
    state = _join(plain, tensors)
    return dict(state)


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Moves arrays and tensors into `tensors` and leaves a mark in their place."""
    if isinstance(value, dict):
        return {str(key): _split(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"~tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {"~array": path}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _join(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"~tensor"}:
        return tensors[value["~tensor"]]
    if set(value) == {"~array"}:
        return tensors[value["~array"]].numpy()
    return {key: _join(item, tensors) for key, item in value.items()}
