"""A party's rows for sealed training: centred, scaled and clipped by public rules, rounded toward zero.

Weights may depend on a party's rows through noisy totals only. So may the preparation of its rows: columns
are centred and scaled with noisy means that are paid for, never with the means themselves.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.errors import TrainingDiverged
from securevfl.models.encoders import PreparedLinear
from securevfl.privacy.gate import Gate
from securevfl.privacy.rows import Rows
from securevfl.protocols.sealed.protocol import OPERAND_BITS

Floats = npt.NDArray[np.float64]
CHUNK = 1 << 13
_LEAST = 1e-4  # of the squared diameter: noise cannot make the scale vanish
_MARGIN = 1 - 2.0**-40  # rounding of norm, quotient and product


def records_named(rows: Rows | None) -> bytes:
    """A digest of records in their order; nothing where they cannot be told from others."""
    return b"" if rows is None else hashlib.sha256(np.ascontiguousarray(rows, "<i8").tobytes()).digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Preparation:
    """How rows become vectors of norm at most `clip`.

    Attributes:
        centre: Subtracted from each row.
        scale: Multiplies each column.
        clip: Bound of the L2 norm.
    """

    centre: Floats
    scale: Floats
    clip: float

    @classmethod
    def of(cls, encoder: PreparedLinear) -> Preparation:
        """The one that a trained encoder carries."""
        centre, scale = (each.detach().cpu().numpy().copy() for each in (encoder.centre, encoder.scale))
        return cls(centre=centre, scale=scale, clip=float(encoder.clip))

    def __call__(self, block: Any) -> npt.NDArray[Any]:
        """Rows as integers at 2^14, (width, rows): each row's norm is at most clip * 2^14, exactly."""
        out = np.empty((self.centre.size, block.shape[0]), narrowest(self.clip))
        self.into(out, block)
        return out

    def into(self, out: npt.NDArray[Any], block: Any) -> None:
        """The same, written into an array of these integers."""
        for start in range(0, block.shape[0], CHUNK):
            rows = (dense(block[start : start + CHUNK]) - self.centre) * self.scale
            out[:, start : start + CHUNK] = clip_to_integers(rows, self.clip).T


def narrowest(clip: float) -> type[np.signedinteger[Any]]:
    """The type that holds integers at 2^14 up to the clip."""
    return np.int16 if clip * 2.0**OPERAND_BITS < 2**15 else np.int32


def dense(block: Any) -> Floats:
    """Rows of a block as a dense table of float64."""
    rows = block.toarray() if sparse.issparse(block) else np.asarray(block)
    return np.asarray(rows, np.float64).reshape(len(rows), -1)


def clip_to_integers(rows: Floats, clip: float) -> npt.NDArray[np.int32]:
    """Clips the L2 norm of each row, then rounds toward zero at 2^14, so that no norm grows."""
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    if not np.isfinite(norms).all():
        raise TrainingDiverged("a record's row or Jacobian is not finite; lower the learning rate")
    factors = np.minimum(1.0, clip / np.maximum(norms, 1e-300)) * (_MARGIN * 2.0**OPERAND_BITS)
    return np.asarray(np.trunc(rows * factors[:, None]), np.int32)


def prepare_rows(
    settings: SealedGeometry, party: int, gate: Gate, observers: tuple[str, ...], *, clip: float
) -> Preparation:
    """The party's preparation; with centring it releases noisy means of its columns through the gate.

    Args:
        settings: The run's settings.
        party: Index of the party.
        gate: Its gate.
        observers: All other organisations: they see what is computed from the statistics.
        clip: Bound of the prepared rows.
    """
    data, width = settings.data, settings.data.widths[party]
    bounds = data.bounds[party]
    if not settings.plan.settings.centring or bounds is None:
        return Preparation(centre=np.zeros(width), scale=np.ones(width), clip=clip)
    low, high = bounds[:, 0], bounds[:, 1]
    diameter = max(float(np.linalg.norm(high - low)), 1e-9)
    own = settings.scales_columns(width)
    # With scales of their own every column's squares, in units of its width, are at most 1.
    units = np.maximum(high - low, 1e-9) if own else np.ones(width)
    moved = math.sqrt(width) if own else diameter**2
    first, second, factor = settings.centring_sigmas(diameter, moved)
    block, count = data.train[party], data.n_train
    rows = np.arange(count, dtype=np.int64)
    shared: dict[str, Any] = {"rows": rows, "observers": observers}
    sums = gate.noisy_statistic(
        _total(block, lambda piece: np.clip(piece, low, high)),
        **shared,
        change=diameter,
        counted=diameter * factor,
        sigma=first,
        kind="means",
    )
    centre = np.clip(sums / count, low, high)

    def squares_of(piece: Floats) -> Floats:
        found = np.square((np.clip(piece, low, high) - centre) / units)
        return found if own else found.sum(1, keepdims=True)

    squares = gate.noisy_statistic(
        _total(block, squares_of),
        **shared,
        change=moved,
        counted=moved * factor,
        sigma=second,
        kind="scale",
    )
    if not own:
        spread = max(float(squares[0]) / count, _LEAST * diameter**2)
        return Preparation(centre=centre, scale=np.full(width, clip / math.sqrt(spread)), clip=clip)
    # Half a row's worth of noise at least, so that a column of noise alone is not blown up.
    mean = np.maximum(squares / count, max(_LEAST, 2 * second / count))
    return Preparation(centre=centre, scale=clip / (units * np.sqrt(width * mean)), clip=clip)


def _total(block: Any, part: Any) -> Floats:
    pieces = [part(dense(block[s : s + CHUNK])).sum(0) for s in range(0, block.shape[0], CHUNK)]
    return np.asarray(np.sum(pieces, axis=0), np.float64)
