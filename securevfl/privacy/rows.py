"""Record indices: one number per record, the same at all parties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

_MOST_KEPT = 1 << 16
_NONE = np.empty(0, np.int64)
_newest: list[Rows] = [_NONE]


def fixed(rows: npt.NDArray[Any]) -> Rows:
    """Rows that nobody can change. Those that come again at once are the same object: checked, written once.

    All parties of synchronous training name one batch after the other, in one process as the same object.
    """
    last = _newest[0]
    if rows is last:
        return last
    if not rows.size:
        return _NONE
    raw = rows.astype(np.int64, copy=False).tobytes()
    if raw == last.base:  # a tenth of the time that comparing arrays takes
        return last
    # An array that owns its memory can be made writeable again; one that reads bytes cannot.
    copy = np.frombuffer(raw, np.int64)
    if copy.size <= _MOST_KEPT:
        _newest[0] = copy
    return copy
