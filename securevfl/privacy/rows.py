"""Record indices: one number per record, the same at all parties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

_MOST_KEPT = 1 << 16
_newest: list[Rows] = [np.empty(0, np.int64)]


def fixed(rows: npt.NDArray[Any]) -> Rows:
    """Rows that cannot change. Those that come again at once are the same object: checked and written once.

    All parties of synchronous training name one batch after the other, in one process as the same object.
    """
    last = _newest[0]
    if rows is last or (rows.shape == last.shape and bool((rows == last).all())):
        return last
    copy = rows.astype(np.int64)
    copy.setflags(write=False)
    if copy.size <= _MOST_KEPT:
        _newest[0] = copy
    return copy
