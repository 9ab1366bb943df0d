"""How many local steps a round holds, and when it ends."""

from __future__ import annotations

import math

MOST_STEPS = 10_000
"""Local steps in one round at most: random durations can be arbitrarily short."""


def capacity(timeout: float, pace: float) -> int:
    """Steps of duration `pace` that fit the timeout; at least one, as the algorithm assumes."""
    if timeout >= pace * MOST_STEPS:
        return MOST_STEPS
    # A billionth absorbs the rounding of quotients that are whole numbers, such as 0.3 / 0.1.
    return max(1, math.floor(timeout / pace + 1e-9))


def round_end(begun: float, timeout: float, steps: int, pace: float, *, wait: bool) -> float:
    """When local training ends: after the steps, and not before the timeout where everybody waits for it."""
    return begun + max(timeout if wait else 0.0, steps * pace)
