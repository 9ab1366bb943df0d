"""Exact matrix products modulo 2^64.

numpy's `@` on uint64 takes no account of the memory layout: on 41 x 32,561 by a vector it needs about ten
times as long as `einsum` over rows that are contiguous along the summed axis, which runs at the speed of
memory. Hence the one layout of this package: left operands are (width, records), C-contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError
from securevfl.protocols.ring import Ring

PIECE = 1 << 15
"""Integers that are widened at a time: they stay in the cache."""


def ring_product(left: npt.NDArray[Any], right: Ring) -> Ring:
    """The product left @ right modulo 2^64.

    Args:
        left: (width, records); uint64, or int32 integers that stand for their residues.
        right: (records, columns) of uint64.

    Raises:
        InputError: Shapes or types do not fit.
    """
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise InputError(f"a product of shapes {left.shape} and {right.shape} does not exist")
    if right.dtype != np.uint64 or left.dtype not in (np.uint64, np.int32):
        raise InputError(f"a ring product of {left.dtype} by {right.dtype} is not offered")
    out = np.empty((left.shape[0], right.shape[1]), np.uint64)
    for column, values in enumerate(right.T):
        out[:, column] = _by_vector(left, np.ascontiguousarray(values))
    return out


def _by_vector(left: npt.NDArray[Any], values: Ring) -> Ring:
    if left.dtype == np.uint64:
        product: Ring = np.einsum("dn,n->d", left, values)
        return product
    total = np.zeros(left.shape[0], np.uint64)
    step = max(64, PIECE // max(1, left.shape[0]))
    for start in range(0, left.shape[1], step):
        # Sign extension, then the same bits read as unsigned: the residue modulo 2^64.
        piece = left[:, start : start + step].astype(np.int64).view(np.uint64)
        total += np.einsum("dn,n->d", piece, values[start : start + step])
    return total
