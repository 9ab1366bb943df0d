"""Where the torch work runs."""

from __future__ import annotations

import torch

from securevfl.errors import PlanError

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
