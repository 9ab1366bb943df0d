"""The one way of arrays to the device that models are on.

The host never waits for it: on a GPU the values are copied from memory that is pinned for the purpose, while
the host goes on. What comes back is asked for by `.cpu()` or `.numpy(force=True)`, where it leaves the
machine anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def to_device(values: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor on a device; on the CPU it shares the array's memory where types agree."""
    tensor = torch.from_numpy(values)
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Index:
    """Record indices on a device. The last ones stay there: the steps on a batch ask for them again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: tuple[Any, Tensor] | None = None

    def __call__(self, rows: np.ndarray[Any, Any]) -> Tensor:
        """The rows as a tensor on the device."""
        if self._last is None or self._last[0] is not rows:
            # Tensors know no memory that cannot be written to.
            own = rows if rows.flags.writeable else rows.copy()
            self._last = rows, to_device(own, self.device)
        return self._last[1]


class OnHost(nn.Module):
    """A module that computes with arrays: it stays on the CPU, in its own types, wherever others go."""

    def _apply(self, fn: Any, recurse: bool = True) -> OnHost:
        return self
