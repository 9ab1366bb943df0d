"""How many local steps a round holds, and when it ends."""

from __future__ import annotations

import math


def capacity(timeout: float, pace: float) -> int:
    """Steps of duration `pace` that fit the timeout; at least one, as the algorithm assumes."""
    # A billionth absorbs the rounding of quotients that are whole numbers, such as 0.3 / 0.1.
    return max(1, math.floor(timeout / pace + 1e-9)) if pace > 0 else 1


def round_end(begun: float, timeout: float, steps: int, pace: float, *, wait: bool) -> float:
    """When local training ends: after the steps, and not before the timeout where everybody waits for it."""
    return begun + max(timeout if wait else 0.0, steps * pace)
