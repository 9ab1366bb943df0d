"""Tiny vertical data for the tests of algorithms that share a schedule."""

import numpy as np

from securevfl import VerticalData


def tiny(parties: int = 3, rows: int = 50, width: int = 3, classes: int = 2) -> VerticalData:
    """Separable-with-noise data: 40 training rows and 10 test rows by default."""
    generator = np.random.default_rng(5)
    blocks = [generator.normal(size=(rows, width)) for _ in range(parties)]
    scores = np.concatenate(blocks, axis=1) @ generator.normal(size=(parties * width, classes))
    labels = (scores + 0.3 * generator.normal(size=scores.shape)).argmax(1)
    return VerticalData.from_arrays(blocks, labels, test_fraction=0.2)
