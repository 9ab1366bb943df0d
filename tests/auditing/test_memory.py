"""The audit reads views, ledgers and journals as they come: memory does not follow the number of messages."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securevfl import Plan, VerticalData, train
from securevfl.attacks.source import Source
from securevfl.auditing.index import AskedRecords, Balance, Calls, Entries, Lines, Log, Spool
from securevfl.auditing.reconciliation import reconcile
from securevfl.auditing.replay import replay
from securevfl.auditing.verdicts import ErrorBudget, Finding, Verdict
from securevfl.privacy import chain
from securevfl.privacy.ledger import read_ledger

BUDGET = ErrorBudget(delta=1e-5, epsilon=1.0)
DATA = "synthetic:rows=40,features=6,informative=4"
PLANS: dict[str, dict[str, Any]] = {
    "embeddings": {"algorithm": "vafl-sync", "sigma": 20.0, "batch": 4},
    "sums": {"algorithm": "vafl-sync", "sigma": 20.0, "batch": 4, "protocol": "two-tree"},
    "sealed": {"algorithm": "sealed", "model": "linear", "epsilon": 8.0, "batch": 4},
}


def peak(folder: Path, plan: dict[str, Any], epochs: int, task: Callable[..., list[Finding]]) -> list[int]:
    """Messages of a run, and the most memory that a task takes on top of ledgers' records."""
    data = VerticalData.load(DATA, parties=3)
    run = train(data, Plan(**plan, epochs=epochs, record_views=True), folder)
    source = Source(folder, data)
    assert source.records  # what accountants read
    gc.collect()
    tracemalloc.start()
    found = list(task(source, BUDGET))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found and all(each.verdict is not Verdict.VIOLATED for each in found)
    return [int(run.result["messages"]), most]


def growth(folder: Path, plan: dict[str, Any], sizes: tuple[int, int], task: Any) -> float:
    (few, less), (many, more) = (peak(folder / str(epochs), plan, epochs, task) for epochs in sizes)
    assert many > 4 * few
    return (more - less) / (many - few)


def test_reconciliation_keeps_some_bytes_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 bytes of a call, 40 of an entry and its round; it was 850. A ledger's text is read in pieces."""
    monkeypatch.setattr(chain, "_PIECE", 4096)
    assert growth(tmp_path, PLANS["embeddings"], (3, 14), reconcile) < 150


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize(("task", "most"), [(reconcile, 150), (replay, 250)])
def test_the_audit_of_many_messages_takes_hardly_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, task: Any, most: float
) -> None:
    """Some 500 against 4,000 messages of equal size."""
    monkeypatch.setattr(chain, "_PIECE", 4096)
    share = {"embeddings": 1.0, "sums": 0.5, "sealed": 0.25}[case]
    assert growth(tmp_path, PLANS[case], (int(14 * share), int(112 * share)), task) < most


# -- what is kept ------------------------------------------------------------------------------------------


def test_entries_are_those_of_the_ledger(tmp_path: Path) -> None:
    train(VerticalData.load(DATA, parties=2), Plan(**PLANS["embeddings"], epochs=1), tmp_path / "run")
    path = next((tmp_path / "run" / "ledger").glob("*.jsonl"))
    whole, entries = read_ledger(path), Entries(path)
    assert list(entries) == whole and len(entries) == len(whole) > 5
    assert [entries[number] for number in range(len(whole))] == whole
    assert entries[-1] == whole[-1] and entries[2:4] == whole[2:4]
    with pytest.raises(IndexError):
        entries[len(whole)]


def test_calls_are_found_by_number_in_whatever_order_they_come() -> None:
    calls, asked = Calls(), {}
    for place, number in enumerate([3, 1, 2, 9, 5, 2]):
        asked[number] = AskedRecords((8 * place, "<i8", (place + 1,)), f"purpose {place % 2}", "p1")
        calls.put("p0", number, asked[number])
    assert {number: calls.get("p0", number) for number in asked} == asked
    assert calls.get("p0", 4) is None and calls.get("p1", 3) is None and calls.get("p0", None) is None
    assert [calls.mark("p0", number) for number in (3, 3, 4, 4, 9)] == [False, True, False, False, False]


def test_a_log_knows_what_came_again_and_what_changed() -> None:
    log = Log()
    assert log.others() == log.beyond(1) == []
    for key, value, about in [(7, 1, 0), (2**64 - 1, 5, 1), (7, 1, 2), (7, 9, 3), (3, 3, 4), (7, 1, 5)]:
        log.add(key, value, about)
    assert log.others() == [(3, 9)]
    assert log.beyond(1) == [(2, 1), (3, 9), (5, 1)] and log.beyond(3) == [(5, 1)]


def test_a_balance_is_open_where_the_two_ends_differ() -> None:
    balance = Balance()
    for key in (5, 69, 12, 69):
        balance.add(key, sent=True)
    for key in (69, 12, 69):
        balance.add(key, sent=False)
    assert balance.open() == {5}
    balance.add(5, sent=False)
    assert not balance.open()


def test_lines_and_digests_in_files_are_what_was_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, plain = Lines(), [f"line {number} é" for number in range(40)]
    lines.extend(plain)
    lines[-1] = plain[-1] = "signed"
    assert list(lines) == plain and lines[-2] == plain[-2] and len(lines) == 40
    with pytest.raises(IndexError, match="only the last"):
        lines[3] = "forged"
    monkeypatch.setattr(Spool, "_PART", 160)
    spools, given = (Spool(), Spool()), (array("Q", range(200)), array("Q", range(150, 250)))
    for spool, numbers in zip(spools, given, strict=True):
        spool.add(numbers.tobytes())
    parts = list(Spool.parts(*spools))
    assert len(parts) > 4
    for spool, found in zip(given, zip(*parts, strict=True), strict=True):
        assert sorted(b"".join(each.tobytes() for each in found)) == sorted(spool.tobytes())
