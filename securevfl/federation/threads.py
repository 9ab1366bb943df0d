"""How many threads torch works with.

Steps of most runs take well under a millisecond. Shared between threads they wait for each other longer than
they work: FDML with small networks took ten times the processor time on two threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from securevfl.data import VerticalData
from securevfl.settings.plan import Plan

LARGE = 20_000_000
"""Multiply-adds of a party's step, some milliseconds on one core, above which threads are worth it."""


def step_work(plan: Plan, data: VerticalData) -> int:
    """Multiply-adds of the widest party's first layer for one batch."""
    work = []
    for party, width in zip(data.parties, data.widths, strict=True):
        own = plan.encoder(party)
        hidden = own.hidden if own.model in ("mlp", "cnn", "lstm") else ()
        work.append(width * max((own.embedding, data.outputs, *hidden)))
    return min(plan.batch, data.n_train) * max(work)


@contextmanager
def fitting_threads(plan: Plan, data: VerticalData) -> Iterator[None]:
    """One thread while steps are small; torch's number where they are large, or what the user has chosen."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or step_work(plan, data) > LARGE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
