"""How many threads a run works with."""

from __future__ import annotations

from contextlib import AbstractContextManager

from securevfl.data import VerticalData
from securevfl.models.threads import few_threads
from securevfl.settings.plan import Plan


def step_work(plan: Plan, data: VerticalData) -> int:
    """Multiply-adds of the widest party's first layer for one batch."""
    work = []
    for party, width in zip(data.parties, data.widths, strict=True):
        own = plan.encoder(party)
        hidden = own.hidden if own.model in ("mlp", "cnn", "lstm") else ()
        work.append(width * max((own.embedding, data.outputs, *hidden)))
    return min(plan.batch, data.n_train) * max(work)


def fitting_threads(plan: Plan, data: VerticalData) -> AbstractContextManager[None]:
    """One thread while a run's steps are small; see `few_threads`."""
    return few_threads(step_work(plan, data))
