"""Record indices as short text, such as ``0-99,105``, for ledgers that people read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from securevfl.errors import LedgerError

Rows = npt.NDArray[np.int64]


def rows_to_text(rows: Rows) -> str:
    """Writes distinct row indices as sorted ranges."""
    if rows.size == 0:
        return ""
    ordered = np.sort(rows)
    gaps = ordered[1:] - ordered[:-1]
    if ordered[0] < 0 or not gaps.all():
        raise LedgerError("row indices must be distinct and not negative")
    breaks = gaps != 1
    firsts = ordered[np.concatenate(([True], breaks))].tolist()
    lasts = ordered[np.concatenate((breaks, [True]))].tolist()
    pieces = [
        str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    ]
    return ",".join(pieces)


def rows_from_text(text: str) -> Rows:
    """Reads what `rows_to_text` wrote."""
    if not text:
        return np.empty(0, np.int64)
    try:
        ends = [[int(end) for end in piece.split("-")] for piece in text.split(",")]
        return np.concatenate([np.arange(piece[0], piece[-1] + 1, dtype=np.int64) for piece in ends])
    except ValueError as error:
        raise LedgerError(f"row list {text[:40]!r} cannot be read") from error
