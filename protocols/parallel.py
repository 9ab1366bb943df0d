"""Large arrays in pieces on several threads; numpy and the cipher let go of the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 4
PARTS = 4  # per thread, so that one which the system delays does not hold up the rest
LEAST = 1 << 19  # values; below that a thread costs more than it saves


def threads() -> int:
    """How many threads large arrays are worked on with."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, available)


def in_parts(size: int, unit: int, act: Callable[[int, int], None]) -> None:
    """Calls `act(start, stop)` for consecutive parts of range(size), each a multiple of `unit` but the last.

    The first error that a part raises is raised here, after all parts have ended.
    """
    workers = threads() if size >= LEAST else 1
    if workers == 1:
        act(0, size)
        return
    step = -(-size // (PARTS * workers * unit)) * unit
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(act, start, min(start + step, size)) for start in range(0, size, step)]
    for future in futures:
        future.result()
