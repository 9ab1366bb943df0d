"""Faults of ledgers, budgets, views and receipts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.contract import DEFENCE, LABELS, OWN, SEALED, SUMS, fault, swap
from securevfl.accountants.records import Filter, ReleaseRecord
from securevfl.privacy import payloads
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import Ledger, to_record
from securevfl.privacy.messages import Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.views import ViewWriter

EVERYWHERE = (*OWN, *SUMS, *SEALED)
MANY_ENTRIES = tuple(case for case in EVERYWHERE if case != "frozen")
"""Where nothing is released twice, four entries name all records."""
SOME = ("strict", "frozen", "dp-encoder", "two-tree", "sealed")


def _writes(change: Any) -> None:
    """Entries of noisy releases are written as `change` leaves them."""

    def make(honest: Any) -> Any:
        def changed(self: Ledger, record: ReleaseRecord) -> Any:
            return honest(self, change(record) if record.mechanism in ("gaussian", "dp-update") else record)

        return changed

    swap(Ledger, "append", make)


@fault("ledger", "entries with half the sensitivity", (*EVERYWHERE, *DEFENCE))
def entry_sensitivity_halved() -> None:
    _writes(lambda record: replace(record, sensitivity=record.sensitivity / 2))


@fault("ledger", "entries with twice the noise", (*EVERYWHERE, *DEFENCE))
def entry_sigma_doubled() -> None:
    _writes(lambda record: replace(record, sigma=record.sigma * 2))


@fault("ledger", "entries with half the clip norm, and a sensitivity that follows it", SOME)
def entry_clip_halved() -> None:
    _writes(lambda record: replace(record, clip=record.clip / 2, sensitivity=record.clip))


@fault("ledger", "entries that leave one record out", EVERYWHERE)
def entry_row_missing() -> None:
    def change(record: ReleaseRecord) -> ReleaseRecord:
        if record.rows is None or len(record.rows) < 2:
            return record
        fewer = record.vectors if record.pays_per_batch else record.vectors - 1
        return replace(record, rows=record.rows[:-1], vectors=fewer)

    _writes(change)


@fault("ledger", "entries about other records", MANY_ENTRIES)
def entry_other_rows() -> None:
    def change(record: ReleaseRecord) -> ReleaseRecord:
        if record.rows is None:
            return record
        return replace(record, rows=np.where(record.rows % 2, record.rows - 1, record.rows + 1))

    _writes(change)


@fault("ledger", "entries that leave an observer out", EVERYWHERE)
def entry_observer_missing() -> None:
    _writes(lambda record: replace(record, observers=record.observers[:-1]))


@fault("ledger", "entries of training that are written as an evaluation", SOME)
def entry_other_kind() -> None:
    _writes(lambda record: replace(record, kind="evaluation"))


@fault("ledger", "noisy releases are written as masked ones, which cost nothing", SOME)
def entry_as_masked() -> None:
    _writes(lambda record: replace(record, mechanism="masked"))


@fault(
    "ledger", "entries of raw training are written in the mode of frozen encoders", ("strict", "fdml", "flex")
)
def entry_other_mode() -> None:
    _writes(lambda record: replace(record, mode="frozen"))


@fault("ledger", "every tenth release has no entry", MANY_ENTRIES)
def entry_tenth_missing() -> None:
    count: list[int] = []

    def make(honest: Any) -> Any:
        def skipping(self: Ledger, record: ReleaseRecord) -> Any:
            count.append(1)
            return self.head if len(count) % 10 == 0 else honest(self, record)

        return skipping

    swap(Ledger, "append", make)


@fault("ledger", "one party writes no entries", EVERYWHERE)
def entries_missing() -> None:
    def make(honest: Any) -> Any:
        return lambda self, record: self.head if self.owner == "p2" else honest(self, record)

    swap(Ledger, "append", make)


@fault("ledger", "messages carry the head of an older entry", EVERYWHERE)
def older_head() -> None:
    def make(honest: Any) -> Any:
        def late(self: Ledger, record: ReleaseRecord) -> Any:
            before = self.head
            honest(self, record)
            return before

        return late

    swap(Ledger, "append", make)


@fault("ledger", "an entry is written when the next release comes, so the last one is lost", EVERYWHERE)
def entry_late() -> None:
    waiting: dict[str, ReleaseRecord] = {}

    def make(honest: Any) -> Any:
        def late(self: Ledger, record: ReleaseRecord) -> Any:
            last = waiting.get(self.owner)
            waiting[self.owner] = record
            return self.head if last is None else honest(self, last)

        return late

    swap(Ledger, "append", make)


def _afterwards(change: Any) -> None:
    """Does something to the file of p1's ledger when the run is over."""
    from benchmarks.faults import places

    def make(honest: Any) -> Any:
        def tampered(data: Any, plan: Any, folder: Path, **given: Any) -> Any:
            run = honest(data, plan, folder, **given)
            change(folder / "ledger" / "p1.jsonl")
            return run

        return tampered

    swap(places, "train", make)


@fault("ledger", "a ledger is written anew after the run, without half of its entries", EVERYWHERE)
def ledger_rewritten() -> None:
    append = Ledger.append

    def change(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        ledger = Ledger(path.stem, path)
        for content in [each for each in lines if each["kind"] != "session"][::2]:
            append(ledger, to_record(path.stem, content))
        ledger.close()

    _afterwards(change)


@fault("ledger", "the last entries of a ledger are cut off", EVERYWHERE)
def ledger_cut() -> None:
    _afterwards(lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3])))


@fault("ledger", "a ledger is gone", ("strict", "frozen", "two-tree", "sealed"))
def ledger_gone() -> None:
    _afterwards(lambda path: path.unlink())


@fault("ledger", "a figure in a ledger is edited by hand", ("strict", "frozen", "two-tree", "sealed"))
def ledger_edited() -> None:
    def change(path: Path) -> None:
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(
            first + "".join(line.replace('"sensitivity":', '"sensitivity":0.', 1) for line in rest)
        )

    _afterwards(change)


# -- what is counted ----------------------------------------------------------------------------------------


def _uncounted(kinds: tuple[str, ...], *, every: int = 1) -> None:
    count: list[int] = []

    def make(honest: Any) -> Any:
        def account(self: Gate, mechanism: Any, *, kind: str, **rest: Any) -> Any:
            if kind.startswith(kinds):
                count.append(1)
                if len(count) % every == 0:
                    return self.ledger.head
            return honest(self, mechanism, kind=kind, **rest)

        return account

    swap(Gate, "_account", make)


@fault("budget", "evaluation is not counted", (*OWN, *SUMS, "sealed"))
def evaluation_uncounted() -> None:
    _uncounted(("evaluation",))


@fault("budget", "refreshes are not counted", ("strict", "dp-encoder"))
def refresh_uncounted() -> None:
    _uncounted(("initial", "refresh"))


@fault("budget", "the budget never refuses", ("budget",))
def budget_never_refuses() -> None:
    swap(Filter, "_allow", lambda honest: lambda self, record, square: None)


@fault("budget", "the budget forgets what was spent", ("budget",))
def budget_forgets() -> None:
    swap(Filter, "spend", lambda honest: lambda self, record, write: write(record))


@fault("budget", "the budget counts a quarter of what is spent", ("budget",))
def budget_counts_a_quarter() -> None:
    swap(Filter, "_allow", lambda honest: lambda self, record, square: honest(self, record, square / 4))


@fault("budget", "the budget overlooks refreshes", ("budget",))
def budget_overlooks_refreshes() -> None:
    def make(honest: Any) -> Any:
        def spend(self: Filter, record: ReleaseRecord, write: Any) -> Any:
            return write(record) if record.kind in ("initial", "refresh") else honest(self, record, write)

        return spend

    swap(Filter, "spend", make)


@fault("labels", "randomised response is written with half its epsilon", LABELS)
def label_epsilon_halved() -> None:
    def make(honest: Any) -> Any:
        def changed(self: Ledger, record: ReleaseRecord) -> Any:
            if record.epsilon is not None:
                record = replace(record, epsilon=record.epsilon / 2)
            return honest(self, record)

        return changed

    swap(Ledger, "append", make)


# -- views and receipts -------------------------------------------------------------------------------------


def _records(change: Any) -> None:
    """Views keep change(view, message, sent): a message, or None for nothing."""

    def make(honest: Any) -> Any:
        def recording(self: ViewWriter, message: Packet, *, time: float, sent: bool) -> None:
            kept = change(self, message, sent)
            if kept is not None:
                honest(self, kept, time=time, sent=sent)

        return recording

    swap(ViewWriter, "record", make)


@fault("views", "every fifth message is missing from the receiver's view", SOME)
def view_drops_received() -> None:
    count: list[int] = []

    def change(view: ViewWriter, message: Packet, sent: bool) -> Packet | None:
        count.extend([] if sent else [1])
        return None if not sent and len(count) % 5 == 0 else message

    _records(change)


@fault("views", "every fifth message is missing from both views", SOME)
def view_drops_both() -> None:
    # Journals have the form of views, and no numbers.
    _records(lambda view, message, sent: None if message.number and message.number % 5 == 0 else message)


@fault(
    "views", "gradients and embeddings of one party are missing from both views", ("strict", "frozen", "flex")
)
def view_drops_a_party() -> None:
    def change(view: ViewWriter, message: Packet, sent: bool) -> Packet | None:
        return None if message.sender == "p1" and "values" in message.fields else message

    _records(change)


@fault("views", "one observer's view is empty", SOME)
def view_empty() -> None:
    _records(lambda view, message, sent: None if view.observer == "p0" else message)


@fault("views", "views forget the ledger heads of messages", SOME)
def view_without_heads() -> None:
    _records(lambda view, message, sent: replace(message, head=None))


def _blurred(message: Packet, std: float = 1.0) -> Packet:
    values = message.fields.get("values")
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return message
    more = np.random.default_rng(message.number).normal(0, std, size=values.shape)
    return replace(message, fields={**message.fields, "values": (values + more).astype(values.dtype)})


@fault("views", "the receiver's view shows other values than the sender's", ("strict", "frozen", "flex"))
def view_blurred_received() -> None:
    _records(lambda view, message, sent: message if sent else _blurred(message))


@fault(
    "views",
    "messages leave without noise, and both views show noise that was never sent",
    ("strict", "frozen", "flex"),
    needs="what the receiver computed from the values: replay of the label holder's model and its gradients",
)
def view_blurred_both() -> None:
    asked: list[float] = [1.0]

    def make(honest: Any) -> Any:
        def nothing(self: Noise, shape: tuple[int, ...], std: float) -> Any:
            asked[0] = std
            return np.zeros(shape)

        return nothing

    swap(Noise, "gaussian", make)
    _records(
        lambda view, message, sent: _blurred(message, asked[0]) if message.sender != "server" else message
    )


@fault("views", "observers keep no receipts", SOME)
def receipts_missing() -> None:
    swap(payloads, "keep_newest", lambda honest: lambda heads, head: None)


@fault("views", "observers keep the first head instead of the newest", SOME)
def receipts_old() -> None:
    swap(payloads, "keep_newest", lambda honest: lambda heads, head: heads.setdefault(head.owner, head))
