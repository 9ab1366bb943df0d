"""What the tests of the models share: seeded encoders of every kind, and a noise source that can be
repeated."""

from __future__ import annotations

import numpy as np
import torch

from securevfl.models import build_encoder

# name -> (width, options)
KINDS = {
    "linear": (6, {}),
    "mlp": (6, {"hidden": (5, 4)}),
    "cnn": (28, {"image_shape": (4, 7), "channels": (3, 4)}),
    "lstm": (6, {"steps": 3, "units": 4}),
    "fm": (6, {"units": 4}),
}


class SeededNoise:
    """A `NoiseSource` for tests; it counts what it gave."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.calls = []

    def uniform(self, shape, half_width):
        self.calls.append(("uniform", shape, half_width))
        return self.rng.uniform(-half_width, half_width, shape)

    def gaussian(self, shape, std):
        self.calls.append(("gaussian", shape, std))
        return self.rng.normal(0, std, shape)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def encoder(kind, seed=0, embedding=3):
    width, options = KINDS[kind]
    return build_encoder(kind, width, embedding, generator=generator(seed), **options)


def batch(kind, rows, seed=1):
    return torch.randn(rows, KINDS[kind][0], generator=generator(seed))
