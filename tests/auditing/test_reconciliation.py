"""Reconciliation: every way in which messages and ledger entries can fail to match is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.attacks.source import Source
from securevfl.auditing.reconciliation import reconcile, rows_in, was_resumed
from securevfl.auditing.verdicts import Verdict
from securevfl.errors import LedgerError, RunError
from securevfl.federation.schedule import Schedule
from securevfl.privacy.ledger import Ledger, LedgerReader, rows_from_text, rows_to_text

DATA = "synthetic:rows=60,features=6,informative=4"
PLANS: dict[str, dict[str, Any]] = {
    "strict": {"sigma": 2.0},
    "frozen": {"sigma": 2.0, "encoder_training": "none", "epochs": 2, "algorithm": "vafl-sync"},
    "sums": {"sigma": 2.0, "protocol": "two-tree"},
    "sealed": {"algorithm": "sealed", "model": "linear", "epsilon": 1.0},
    "recovering": {"sigma": 2.0, "protocol": "pairwise", "threshold": 3, "epochs": 2, "parties": 4},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    for name, options in PLANS.items():
        given = {"algorithm": "vafl", "epochs": 1, "batch": 16, "embedding": 2, "parties": 3, **options}
        parties = given.pop("parties")
        data = VerticalData.load(DATA, parties=parties)
        if name == "sealed":
            given.pop("embedding")
        train(data, Plan(**given, record_views=True, source={"data": DATA, "parties": parties}), base / name)
    return base


def found(folder: Path) -> tuple[set[str], str]:
    """Verdicts, and all reasons of violations."""
    findings = reconcile(Source(folder))
    reasons = [r for f in findings if f.verdict is Verdict.VIOLATED for r in f.reasons]
    return {f.verdict.value for f in findings}, " | ".join(reasons)


@pytest.mark.parametrize("name", PLANS)
def test_honest_runs_agree(runs: Path, name: str) -> None:
    assert found(runs / name) == ({"holds"}, "")


def edited(runs: Path, name: str, target: Path, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """The reasons after the same change of all views."""
    shutil.copytree(runs / name, target)
    for path in (target / "views").glob("*/messages.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found(target)[1]


def first(lines: list[dict[str, Any]], kind: str, sender: str = "p1") -> dict[str, Any] | None:
    return next((line for line in lines if (line["kind"], line["sender"]) == (kind, sender)), None)


def changing(kind: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[list[dict[str, Any]]], None]:
    def apply(lines: list[dict[str, Any]]) -> None:
        line = first(lines, kind)
        if line is not None:
            change(line)

    return apply


def doubling(kind: str) -> Callable[[list[dict[str, Any]]], None]:
    def apply(lines: list[dict[str, Any]]) -> None:
        line = first(lines, kind)
        if line is not None:
            lines.insert(lines.index(line), {**line, "number": line["number"] + 10_000, "reply_to": None})

    return apply


def dropping(kind: str) -> Callable[[list[dict[str, Any]]], None]:
    def apply(lines: list[dict[str, Any]]) -> None:
        line = first(lines, kind)
        if line is not None:
            lines.remove(line)

    return apply


def fewer_lines(name: str) -> Callable[[dict[str, Any]], None]:
    def apply(line: dict[str, Any]) -> None:
        line["arrays"][name][2][0] -= 1

    return apply


@pytest.mark.parametrize(
    ("run", "change", "says"),
    [
        ("strict", changing("embedding", lambda line: line.update(head=None)), "without a ledger entry"),
        ("strict", changing("embedding", lambda line: line["head"].__setitem__(0, "p2")), "not its sender's"),
        (
            "strict",
            changing("embedding", lambda line: line["head"].__setitem__(2, "0" * 64)),
            "is not in the",
        ),
        ("strict", changing("embedding", lambda line: line["fields"].update(age=7)), "a field 'age' that"),
        (
            "strict",
            changing("embedding", lambda line: line["fields"].update(weight=0.7)),
            "has 'weight', which vafl never states",
        ),
        (
            "sums",
            changing("tree.subtotal", lambda line: line["fields"].update(to=9)),
            "does not go along tree",
        ),
        ("strict", changing("embedding", lambda line: line.update(kind="features")), "nobody has declared"),
        ("strict", changing("embedding", fewer_lines("values")), "vectors for"),
        ("strict", doubling("embedding"), "second message for entry"),
        ("strict", dropping("embedding"), "has no message"),
        ("frozen", changing("embedding", fewer_lines("values")), "vectors for"),
        ("sums", doubling("tree.subtotal"), "second message of its kind"),
        ("sums", changing("tree.subtotal", fewer_lines("total")), "records were announced"),
        ("sums", changing("tree.subtotal", lambda line: line["fields"].update(round=77)), "nobody announced"),
        ("sealed", doubling("sealed-phase"), "second message of its kind"),
        ("sealed", doubling("sealed-operand"), "second message of its kind"),
        ("sealed", changing("sealed-phase", fewer_lines("words")), "lines, entry"),
        ("sealed", changing("sealed-share", lambda line: line.update(head=None)), "without a ledger entry"),
        ("sealed", dropping("sealed-share"), "got no sealed-share"),
    ],
)
def test_every_mismatch_is_found(runs: Path, tmp_path: Path, run: str, change: Any, says: str) -> None:
    assert says in edited(runs, run, tmp_path / "run", change)


def test_a_repeated_release_must_be_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    """Frozen encoders release each record once: one changed bit in a repetition is a violation."""
    shutil.copytree(runs / "frozen", tmp_path / "run")
    for folder in (tmp_path / "run" / "views" / "p0", tmp_path / "run" / "views" / "p1"):
        lines = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
        line = [x for x in lines if x["kind"] == "embedding" and x["sender"] == "p1"][3]
        content = bytearray((folder / "arrays.bin").read_bytes())
        content[line["arrays"]["values"][0]] ^= 1
        (folder / "arrays.bin").write_bytes(bytes(content))
    assert "other values than at first" in found(tmp_path / "run")[1]


@pytest.mark.parametrize("back", [None, 1])
def test_whoever_goes_back_with_another_was_interrupted_too(
    runs: Path, tmp_path: Path, back: int | None
) -> None:
    """One that was killed begins a session; the others' ledgers say only that everybody went back."""
    source = Source(runs / "sealed")
    ledger = Ledger("p1", tmp_path / "p1.jsonl")
    ledger.begin("prepare", 0, -1)
    ledger.append(source.records[0])
    ledger.begin("epoch", 2, back)
    ledger.append(source.records[0])
    ledger.close()
    entries = list(LedgerReader(tmp_path / "p1.jsonl").entries())
    assert was_resumed(entries, source.plan) is (back is not None)
    assert not was_resumed(entries, source.plan, itself=True)


@pytest.mark.parametrize(("stopped", "verdict"), [("budget: p0 has spent it", "holds"), (None, "violated")])
def test_what_a_spent_budget_kept_from_leaving_needs_no_message(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str | None, verdict: str
) -> None:
    """One owner has written what it was about to send when another's gate refuses, and everybody stops."""
    evaluate = Schedule._final_evaluation
    record = next(
        each for each in Source(runs / "strict").records if (each.owner, each.kind) == ("p1", "embedding")
    )

    async def refused(self: Any) -> None:
        self.carrier.sites["p1"].gate.ledger.append(record)
        self.stopped = stopped
        await evaluate(self)

    monkeypatch.setattr(Schedule, "_final_evaluation", refused)
    data = VerticalData.load(DATA, parties=3)
    given: dict[str, Any] = {"algorithm": "vafl-sync", "epochs": 2, "batch": 16, "embedding": 2, "sigma": 2.0}
    plan = Plan(**given, record_views=True, source={"data": DATA, "parties": 3})
    train(data, plan, tmp_path / "run")
    verdicts, reasons = found(tmp_path / "run")
    assert verdict in verdicts and verdicts <= {"holds", verdict}
    assert ("has no message" in reasons) is (verdict == "violated")


def test_what_the_sender_does_not_know_is_found(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "strict", tmp_path / "run")
    path = tmp_path / "run" / "views" / "p0" / "messages.jsonl"
    path.write_text(
        path.read_text().replace('"kind": "ended", "number": ', '"kind": "ended", "number": 9', 1)
    )
    assert (
        "is not what p1's own view says" in found(tmp_path / "run")[1]
        or "p2's own view" in found(tmp_path / "run")[1]
    )


def test_without_views_nothing_is_tested(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "strict", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "views" / "p1")
    shutil.rmtree(tmp_path / "run" / "views" / "p2")
    findings = {(f.promise, f.verdict.value) for f in reconcile(Source(tmp_path / "run"))}
    assert ("p1 against p2", "not tested") in findings  # neither view is here
    assert ("p1 against p0", "holds") in findings  # what p0 got fits p1's ledger
    shutil.rmtree(tmp_path / "run" / "views")
    assert found(tmp_path / "run")[0] == {"not tested"}


def test_a_view_that_was_cut_is_one_clear_line(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "strict", tmp_path / "run")
    arrays = tmp_path / "run" / "views" / "p0" / "arrays.bin"
    arrays.write_bytes(arrays.read_bytes()[:100])
    with pytest.raises(RunError, match=r"is cut: message .* copy the run again"):
        reconcile(Source(tmp_path / "run"))


def test_row_lists() -> None:
    generator = np.random.default_rng(0)
    for count in (0, 1, 2, 7, 300):
        rows = np.sort(generator.choice(2 * count + 3, count, replace=False)).astype(np.int64)
        text = rows_to_text(rows)
        assert np.array_equal(rows_from_text(text), rows) and rows_in(text) == count
    for bad in ("a", "1,", "-1", "3-1", "1-2-3", "1,,2", " 1", "9" * 30):
        with pytest.raises(LedgerError, match="cannot be read"):
            rows_from_text(bad)
