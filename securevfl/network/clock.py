"""Real time for roles."""

from __future__ import annotations

import asyncio
import time


class RealClock:
    """Seconds since the run began, going on where a checkpoint left off.

    Computation and network take the time they take. The delays that a plan simulates are slept only if a time
    unit is given.

    Args:
        unit: Seconds that a simulated time unit lasts; 0 does not sleep.
    """

    def __init__(self, unit: float = 0.0) -> None:
        self.unit = unit
        self.set(0.0)

    def set(self, now: float) -> None:
        """Makes it this time now."""
        self._origin = time.monotonic() - now * (self.unit or 1.0)

    def now(self) -> float:
        """Time since the run began: in time units, or in seconds where none is given."""
        return (time.monotonic() - self._origin) / (self.unit or 1.0)

    async def sleep_until(self, when: float, stop: asyncio.Event | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        if stop is not None and stop.is_set():
            return False
        delay = (when - self.now()) * self.unit
        if delay <= 0:
            await asyncio.sleep(0)
            return stop is None or not stop.is_set()
        if stop is None:
            await asyncio.sleep(delay)
            return True
        try:
            async with asyncio.timeout(delay):
                await stop.wait()
        except TimeoutError:
            return True
        return False
