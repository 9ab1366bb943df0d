"""A device that is not there: tensors on it hold real values, and behave as on a GPU.

Whatever mixes them with tensors of the CPU raises, except for numbers (tensors without dimensions), which a
GPU takes too. So does `.numpy()` without a transfer, and an operation whose result's shape depends on values:
on a GPU the host would have to wait for it. Transfers are counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PLACE = torch.device("meta")
WAITING = ("nonzero", "masked_select", "_unique", "unique_")


class Elsewhere(torch.Tensor):
    """A tensor that says it lives on `PLACE`."""

    held: torch.Tensor
    is_meta = False  # torch loads no parameters into tensors that hold nothing
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        like = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=PLACE, **like)
        made.held = held
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Elsewhere) -> None:
        torch.Tensor.data.__set__(self, other)
        self.held = other.held

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("a tensor of another device has no array; bring it to the CPU first")
        return self.detach().cpu().numpy()

    def __repr__(self) -> str:
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the device's mode")


class Device(TorchDispatchMode):
    """While active, `PLACE` is a device with memory of its own.

    Attributes:
        transfers: How often something went ``up`` to the device or ``down`` from it; ``waiting`` counts those
            of the first that make the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transfers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        away = [each for each in tensors if isinstance(each, Elsewhere)]
        target = kwargs.get("device")
        if target is None and not away:
            return func(*args, **kwargs)
        if target is None:
            self._check(func, tensors, args)
            if func is torch.ops.aten._local_scalar_dense.default:
                self.transfers["down"] += 1
                return func(away[0].held)
            return self._run(func, args, kwargs, wrap=True)
        wrap = torch.device(target) == PLACE
        if wrap:
            kwargs["device"] = "cpu"
        if func is torch.ops.aten._to_copy.default and wrap != bool(away):
            self._count(up=wrap, waits=not kwargs.get("non_blocking"))
        return self._run(func, args, kwargs, wrap=wrap)

    def _check(self, func: Any, tensors: list[torch.Tensor], args: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            up = isinstance(args[0], Elsewhere)
            if up != isinstance(args[1], Elsewhere) and args[1].ndim:
                self._count(up=up, waits=not (len(args) > 2 and args[2]))
            return
        if any(each.ndim and not isinstance(each, Elsewhere) for each in tensors):
            raise RuntimeError(f"{name} mixes tensors of two devices")
        masks = name.startswith("index") and any(each.dtype is torch.bool for each in tensors[1:])
        if masks or name.startswith(WAITING):
            raise RuntimeError(f"{name} makes the host wait: its result's shape depends on values")

    def _count(self, *, up: bool, waits: bool) -> None:
        self.transfers["up" if up else "down"] += 1
        self.transfers["waiting"] += up and waits

    def _run(self, func: Any, args: Any, kwargs: Any, *, wrap: bool) -> Any:
        bare_args, bare_kwargs = tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
        found = func(*bare_args, **bare_kwargs)
        if args and isinstance(args[0], torch.Tensor) and found is bare_args[0]:
            return args[0]
        return tree_map_only(torch.Tensor, Elsewhere, found) if wrap else found
