"""How many threads a piece of work is given: torch's, OpenMP's and those of linear algebra.

Steps of most runs take well under a millisecond. Shared between threads they wait for each other longer than
they work, the more so beside other processes: boosted trees on 350 records took twenty times the time on two
threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LARGE = 20_000_000
"""Multiply-adds, some milliseconds on one core, above which threads are worth it."""


@contextmanager
def few_threads(work: float) -> Iterator[None]:
    """One thread while work is small; the machine's number where it is large, or what the user has chosen.

    Args:
        work: Multiply-adds of one step.
    """
    if "OMP_NUM_THREADS" in os.environ or work > LARGE:
        yield
        return
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    with threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
