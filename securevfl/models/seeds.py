"""Seeds of everything that may be reproduced: initial models, batch order, simulated delays. Never noise."""

from __future__ import annotations

import numpy as np
import torch

_PURPOSES = ("encoder", "head", "batches", "delays", "split", "trial")


def numpy_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A generator for one purpose and one party, independent of all others."""
    key = (_PURPOSES.index(purpose), index)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def torch_generator(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """The same for torch, on the CPU, so that initial models do not depend on the device."""
    word = int(numpy_generator(seed, purpose, index).integers(0, 2**63 - 1))
    return torch.Generator().manual_seed(word)
