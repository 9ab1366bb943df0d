"""An organisation's own encoder: a function in a file of its own, which nobody else needs to know about.

The plan says how wide embeddings are; what computes them is each organisation's own business. The gate clips
whatever comes out, so the promises do not depend on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from securevfl.errors import InputError

Builder = Callable[[int, int], nn.Module]


def load_builder(base: Path, text: str) -> Builder:
    """The function that makes an encoder.

    Args:
        base: Folder of the configuration, where relative paths start.
        text: `file.py:function`. The function gets the number of columns and the width of embeddings.

    Raises:
        InputError: There is no such file or function.
    """
    file, colon, name = text.rpartition(":")
    path = base / file
    if not (colon and name.isidentifier() and path.suffix == ".py"):
        raise InputError(f"encoder is {text!r}; write file.py:function")
    if not path.is_file():
        raise InputError(f"encoder: {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"securevfl_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"encoder: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"encoder: {path} fails: {type(error).__name__}: {error}") from error
    builder: Builder | None = getattr(module, name, None)
    if not callable(builder):
        raise InputError(f"encoder: {path} has no function {name!r}")
    return builder


def build_own(builder: Builder, columns: int, width: int, *, generator: torch.Generator) -> nn.Module:
    """A new encoder, whose parameters begin the same every time.

    Args:
        builder: Makes it.
        columns: Number of columns.
        width: Width of embeddings.
        generator: Its seed is the one that parameters are drawn with.

    Raises:
        InputError: The function fails or returns something else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        try:
            made = builder(columns, width)
        except Exception as error:
            raise InputError(f"encoder: the function fails: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"encoder: the function returns {type(made).__name__}, not a torch.nn.Module")
    return made
