"""Callbacks: follow a run from outside, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.settings.plan import Plan


class Callback:
    """Override what you need; by default nothing happens.

    Callbacks get figures, never records, embeddings or keys. They run in the process of the run, which waits
    for them. An error in one ends the run; what was released until then is in the ledgers.
    """

    def on_start(self, plan: Plan) -> None:
        """The run begins; every choice of the plan is filled in. A resumed run begins again."""

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        """An epoch is over; `line` is what ``metrics.jsonl`` holds of it. Test metrics may come later."""

    def on_finish(self, result: Mapping[str, Any]) -> None:
        """The run is over; `result` is what ``train --json`` prints."""

    def on_error(self, error: BaseException) -> None:
        """The run broke off; the error goes on to the caller."""


def call_each(callbacks: Sequence[Callback], event: str, given: Any) -> None:
    """Tells callbacks of an event, such as ``on_epoch``, in their order."""
    for callback in callbacks:
        getattr(callback, event)(given)
