"""Scaling of one party's block, by its own training rows or by public bounds.

Standard scaling makes every scaled record depend on all training records of that party. A guarantee that a
record pays only for its own releases does not survive that; public scaling treats each record alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from .checks import Block, flat

Scaling: TypeAlias = Literal["none", "standard", "public"]
SCALINGS: tuple[Scaling, ...] = ("none", "standard", "public")

# float32 cannot hold a spread below this share of the mean: such a column counts as constant.
_RESOLUTION = float(np.finfo(np.float32).eps)


def standard(train: Block, test: Block) -> tuple[Block, Block]:
    """Mean 0 and deviation 1 on the training part; constant columns become 0.

    Sparse blocks are divided by the deviation but not centred, so that they stay sparse.
    """
    mean, deviation = _moments(train)
    constant = deviation <= _RESOLUTION * np.abs(mean)
    factor = np.where(constant, 1.0, 1.0 / np.where(constant, 1.0, deviation))
    return _affine(train, mean, factor), _affine(test, mean, factor)


def _moments(block: Block) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if sparse.issparse(block):
        rows = block.shape[0]
        values = block.astype(np.float64)
        mean = np.asarray(values.sum(axis=0)).ravel() / rows
        # Deviations of the stored values, then the zeros' share: no difference of two large squares.
        counts = np.bincount(block.indices, minlength=block.shape[1])
        squares = (values.data - mean[block.indices]) ** 2
        stored = np.bincount(block.indices, weights=squares, minlength=block.shape[1])
        return mean, np.sqrt((stored + (rows - counts) * mean**2) / rows)
    values = flat(block)
    return values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)


def _affine(block: Block, shift: NDArray[np.float64], factor: NDArray[np.float64]) -> Block:
    if sparse.issparse(block):
        data = (block.data * factor[block.indices]).astype(np.float32)
        return sparse.csr_array((data, block.indices.copy(), block.indptr.copy()), shape=block.shape)
    scaled = flat(block) - shift
    scaled *= factor
    return scaled.astype(np.float32).reshape(block.shape)


def public(block: Block, bounds: NDArray[np.float64]) -> Block:
    """Map `bounds` to [-1, 1] and clip there; a column with equal bounds becomes 0.

    Sparse blocks are divided by the larger absolute bound instead, so that 0 stays 0.
    """
    low, high = bounds[:, 0], bounds[:, 1]
    if sparse.issparse(block):
        reach, centre = np.maximum(np.abs(low), np.abs(high)), np.zeros_like(low)
    else:
        reach, centre = (high - low) / 2, (high + low) / 2
    factor = np.where(reach > 0, 1.0 / np.where(reach > 0, reach, 1.0), 0.0)
    scaled = _affine(block, centre, factor)
    values = scaled.data if sparse.issparse(scaled) else scaled
    np.clip(values, -1.0, 1.0, out=values)
    return scaled
