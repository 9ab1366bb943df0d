"""Faults of a scoring service: its entries, quota, noise, masks and notes.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.faults.contract import fault, swap
from securevfl.accountants.records import PREDICTION, Filter
from securevfl.federation.agreed import Quota
from securevfl.network import serving
from securevfl.network.dispatcher import Served, ServiceDispatcher
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import Ledger
from securevfl.protocols.sealed.pool import ScorePool

ROOM = "scoring service"
SCORES, EMBEDDINGS = ("scored",), ("scored-embeddings",)
SERVED = (*SCORES, *EMBEDDINGS)


def _accounted(change: Any) -> None:
    """Entries of served scores become change(gate, rows, write), where write(rows) writes one."""

    def make(honest: Any) -> Any:
        def account(self: Gate, mechanism: Any, *, rows: Any, kind: str, **rest: Any) -> Any:
            def write(chosen: Any) -> Any:
                return honest(self, mechanism, rows=chosen, kind=kind, **{**rest, "vectors": len(chosen)})

            if kind != PREDICTION:
                return honest(self, mechanism, rows=rows, kind=kind, **rest)
            return change(self, rows, write)

        return account

    swap(Gate, "_account", make)


@fault(ROOM, "served scores are not written down", SERVED)
def scoring_unwritten() -> None:
    _accounted(lambda gate, rows, write: gate.ledger.released)


@fault(ROOM, "of every request only the first person is written down", SERVED)
def scoring_counts_one() -> None:
    _accounted(lambda gate, rows, write: write(rows[:1]))


@fault(ROOM, "every other request is not written down", SERVED)
def scoring_every_other() -> None:
    count: list[int] = []
    _accounted(
        lambda gate, rows, write: (
            gate.ledger.released if (count.append(1) or len(count)) % 4 > 1 else write(rows)
        )
    )


@fault(ROOM, "nobody looks at the quota", SERVED)
def scoring_quota_ignored() -> None:
    swap(Quota, "check", lambda honest: lambda self, owner, vectors, budget: None)
    swap(ServiceDispatcher, "_promised", lambda honest: lambda self: -1_000_000)


@fault(ROOM, "people of the training are scored", SCORES)
def scoring_of_trained() -> None:
    swap(Filter, "promises", lambda honest: lambda self, rows: False)

    def make(honest: Any) -> Any:
        def attach(self: ServiceDispatcher, served: Served, noted: Any) -> None:
            honest(self, replace(served, trained=0, quota=Quota(people=10_000, requests=10_000)), noted)

        return attach

    swap(ServiceDispatcher, "attach", make)
    swap(Quota, "check", lambda honest: lambda self, owner, vectors, budget: None)


@fault(ROOM, "the label holder does not note what it has obtained", SERVED)
def scoring_unnoted() -> None:
    swap(Ledger, "note_scores", lambda honest: lambda self, **said: self.head)


@fault(ROOM, "the label holder notes other people than it has obtained", SERVED)
def scoring_notes_others() -> None:
    swap(
        Ledger,
        "note_scores",
        lambda honest: lambda self, **said: honest(self, **{**said, "rows": np.sort(said["rows"]) + 1000}),
    )


@fault(ROOM, "embeddings are served without noise", EMBEDDINGS)
def scoring_without_noise() -> None:
    swap(Gate, "_protect", lambda honest: lambda self, values: values.astype(np.float32))


@fault(ROOM, "everybody in a request gets the same noise", EMBEDDINGS)
def scoring_noise_shared() -> None:
    def make(honest: Any) -> Any:
        def protect(self: Gate, values: Any) -> Any:
            noisy = honest(self, values)
            return noisy if self.answers is None else values + (noisy[:1] - values[:1])

        return protect

    swap(Gate, "_protect", make)


@fault(ROOM, "served scores travel without masks", SCORES)
def scoring_unmasked() -> None:
    def make(honest: Any) -> Any:
        return lambda self, start, asked, shape: np.zeros_like(honest(self, start, asked, shape))

    swap(ScorePool, "_masks", make)


@fault(ROOM, "masks of the pool serve every request anew", SCORES)
def scoring_masks_again() -> None:
    def make(honest: Any) -> Any:
        return lambda self, start, asked, shape: honest(self, 0, asked, shape)

    swap(ScorePool, "_masks", make)


@fault(ROOM, "the quota that was signed is replaced by a larger one in what is kept", SERVED)
def scoring_quota_forged() -> None:
    def make(honest: Any) -> Any:
        def kept(path: Any, content: Any, *given: Any) -> None:
            signed = content.get("signed")
            if signed:
                text = json.loads(signed["text"])
                text["schedule"]["quota"]["people"] = 1_000_000
                signed = {**signed, "text": json.dumps(text)}
            honest(path, {**content, "signed": signed}, *given)

        return kept

    swap(serving, "write_json", make)
