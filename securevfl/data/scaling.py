"""Scaling of one party's block, by its own training rows or by public bounds.

Standard scaling makes every scaled record depend on all training records of that party. A guarantee that a
record pays only for its own releases does not survive that; public scaling treats each record alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data import sparse
from securevfl.data.blocks import Block, flat
from securevfl.data.mapped import CHUNK, Mapped

Scaling: TypeAlias = Literal["none", "standard", "public"]
SCALINGS: tuple[Scaling, ...] = ("none", "standard", "public")

# float32 cannot hold a spread below this share of the mean: such a column counts as constant.
_RESOLUTION = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Scale:
    """How one party's columns are scaled: (value - shift) * factor, then clipped to [-1, 1] on request.

    It depends on the party's training rows if it was fitted on them, so it is the party's own.
    """

    shift: NDArray[np.float64]
    factor: NDArray[np.float64]
    clip: bool = False

    def __call__(self, block: Block) -> Block:
        """The scaled block; one in a file is scaled when it is read."""
        if isinstance(block, Mapped):
            return block.scaled(self)
        scaled = _affine(block, self.shift, self.factor)
        if self.clip:
            values = scaled.data if sparse.issparse(scaled) else scaled
            np.clip(values, -1.0, 1.0, out=values)
        return scaled

    def columns(self, numbers: NDArray[np.intp]) -> Scale:
        """The same for some of the columns."""
        return Scale(self.shift[numbers], self.factor[numbers], self.clip)

    def to_mapping(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"shift": self.shift.tolist(), "factor": self.factor.tolist(), "clip": self.clip}

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any]) -> Scale:
        """Reverses `to_mapping`."""
        shift, factor = (np.asarray(content[name], np.float64) for name in ("shift", "factor"))
        return cls(shift, factor, bool(content["clip"]))


def joined_columns(scales: Sequence[Sequence[Scale]], numbers: NDArray[np.intp]) -> tuple[Scale, ...]:
    """Of all parties' columns side by side, the scalings of some; all parties took the same steps."""
    return tuple(
        Scale(
            np.concatenate([scale.shift for scale in step]),
            np.concatenate([scale.factor for scale in step]),
            step[0].clip,
        ).columns(numbers)
        for step in zip(*scales, strict=True)
    )


def unscaled(columns: int) -> Scale:
    """Leaves columns as they are."""
    return Scale(np.zeros(columns), np.ones(columns))


def standard(train: Block) -> Scale:
    """Mean 0 and deviation 1 on the training part; constant columns become 0.

    Sparse blocks are divided by the deviation but not centred, so that they stay sparse.
    """
    mean, deviation = _moments(train)
    constant = deviation <= _RESOLUTION * np.abs(mean)
    factor = np.where(constant, 1.0, 1.0 / np.where(constant, 1.0, deviation))
    return Scale(np.zeros_like(mean) if sparse.issparse(train) else mean, factor)


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
    if isinstance(block, Mapped):
        return _piecewise_moments(block)
    values = flat(block)
    return values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)


def _piecewise_moments(block: Mapped) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sums = [piece.sum(axis=0, dtype=np.float64) for _, piece in block.pieces()]
    mean = np.sum(sums, axis=0) / len(block)
    squares = [np.square(piece - mean).sum(axis=0) for _, piece in block.pieces()]
    return mean, np.sqrt(np.sum(squares, axis=0) / len(block))


def _affine(block: Block, shift: NDArray[np.float64], factor: NDArray[np.float64]) -> Block:
    if sparse.issparse(block) and shift.any():  # fitted on dense rows
        block = block.toarray()
    if sparse.issparse(block):
        data = (block.data * factor[block.indices]).astype(np.float32)
        return sparse.csr_array((data, block.indices.copy(), block.indptr.copy()), shape=block.shape)
    rows = flat(block)
    out = np.empty(rows.shape, np.float32)
    for start in range(0, len(rows), CHUNK):  # in float64, but never all of it
        out[start : start + CHUNK] = (rows[start : start + CHUNK] - shift) * factor
    return out.reshape(block.shape)


def public(block: Block, bounds: NDArray[np.float64]) -> Scale:
    """Map `bounds` to [-1, 1] and clip there; a column with equal bounds becomes 0.

    Sparse blocks are divided by the larger absolute bound instead, so that 0 stays 0.
    """
    low, high = bounds[:, 0], bounds[:, 1]
    if sparse.issparse(block):
        reach, centre = np.maximum(np.abs(low), np.abs(high)), np.zeros_like(low)
    else:
        reach, centre = (high - low) / 2, (high + low) / 2
    factor = np.where(reach > 0, 1.0 / np.where(reach > 0, reach, 1.0), 0.0)
    return Scale(centre, factor, clip=True)
