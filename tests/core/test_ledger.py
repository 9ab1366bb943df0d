"""The ledger: every way to tamper with it is detected, and a crash never under-counts."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import securevfl.privacy.chain
import securevfl.privacy.ledger
from securevfl.accountants.records import ReleaseRecord
from securevfl.errors import LedgerError, RunError
from securevfl.privacy.chain import Chain, Entry, LedgerReader, verify_lines
from securevfl.privacy.ledger import (
    Ledger,
    read_ledger,
    rows_from_text,
    rows_to_text,
    to_record,
)
from securevfl.privacy.rows import fixed


def record(rows: list[int], owner: str = "p1") -> ReleaseRecord:
    return ReleaseRecord(
        owner=owner,
        observers=("p0",),
        kind="embedding",
        mechanism="gaussian",
        clip=1.0,
        sigma=2.0,
        sensitivity=2.0,
        rows=np.array(rows),
        vectors=len(rows),
        mode="strict",
    )


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Ledger]:
    path = tmp_path / "p1.jsonl"
    ledger = Ledger("p1", path)
    for start in range(5):
        ledger.append(record([start, start + 1, start + 7]))
    ledger.close()
    return path, ledger


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def rewrite(path: Path, new: list[str]) -> None:
    path.write_text("\n".join(new) + "\n")


def test_what_was_written_comes_back(written: tuple[Path, Ledger]) -> None:
    path, ledger = written
    entries = read_ledger(path, heads=[ledger.head])
    assert [entry.is_session for entry in entries] == [True] + [False] * 5
    back = to_record("p1", entries[3].content)
    assert (back.kind, back.observers, back.sigma, back.vectors) == ("embedding", ("p0",), 2.0, 3)
    assert back.rows is not None and back.rows.tolist() == [2, 3, 9]


@pytest.mark.parametrize("read", [read_ledger, lambda path: Ledger("p1", path)], ids=["audit", "owner"])
@pytest.mark.parametrize("number", range(6))
def test_edited_entry(written: tuple[Path, Ledger], number: int, read: Callable[[Path], Any]) -> None:
    """An owner that starts again trusts no edit either: a session's last signature covers all before it."""
    path, _ = written
    text = lines(path)
    content = json.loads(text[number])
    content["observers" if number else "guarantee"] = "changed"
    text[number] = json.dumps(content)
    rewrite(path, text)
    with pytest.raises(LedgerError, match="edited"):
        read(path)


def test_rehashed_entry_needs_the_key(written: tuple[Path, Ledger]) -> None:
    """An attacker who fixes the hashes of everything after an edit still cannot sign."""
    import hashlib

    path, _ = written
    text = lines(path)
    previous = json.loads(text[1])["hash"]
    for number in range(2, 6):
        content = json.loads(text[number])
        signature = content.pop("signature")
        content.pop("hash")
        content["previous"] = previous
        if number == 2:
            content["vectors"] = 1
        body = json.dumps(content, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256(body.encode()).hexdigest()
        text[number] = f'{body[:-1]},"hash":"{previous}","signature":"{signature}"}}'
    rewrite(path, text)
    with pytest.raises(LedgerError, match="forged"):
        read_ledger(path)


def test_removed_and_reordered_entries(written: tuple[Path, Ledger]) -> None:
    path, _ = written
    text = lines(path)
    rewrite(path, text[:2] + text[3:])
    with pytest.raises(LedgerError, match="removed, moved or copied"):
        read_ledger(path)
    rewrite(path, [*text[:2], text[3], text[2], *text[4:]])
    with pytest.raises(LedgerError, match="removed, moved or copied"):
        read_ledger(path)


def test_cut_tail_contradicts_the_observers_head(written: tuple[Path, Ledger]) -> None:
    path, ledger = written
    rewrite(path, lines(path)[:4])
    read_ledger(path)  # the chain alone cannot see it
    with pytest.raises(LedgerError, match="cut"):
        read_ledger(path, heads=[ledger.head])


def test_rewritten_ledger_with_fresh_keys(written: tuple[Path, Ledger]) -> None:
    path, ledger = written
    path.unlink()
    forged = Ledger("p1", path)
    for start in range(5):
        forged.append(record([start]))
    forged.close()
    read_ledger(path)
    with pytest.raises(LedgerError, match="rewritten"):
        read_ledger(path, heads=[ledger.head])


def test_entry_of_another_owner(written: tuple[Path, Ledger], tmp_path: Path) -> None:
    path, _ = written
    other = Ledger("p2", tmp_path / "p2.jsonl")
    other.append(record([1], owner="p2"))
    other.close()
    text = lines(path)
    text[1] = lines(tmp_path / "p2.jsonl")[1]
    rewrite(path, text)
    with pytest.raises(LedgerError, match="belongs elsewhere"):
        read_ledger(path)


@pytest.mark.parametrize("garbage", ["", "{}", "[]", "null", "not json", '{"hash":"00","signature":"zz"}'])
def test_garbage_is_not_an_entry(written: tuple[Path, Ledger], garbage: str) -> None:
    path, _ = written
    text = lines(path)
    text[2] = garbage
    rewrite(path, text)
    with pytest.raises(LedgerError, match="entry 2"):
        read_ledger(path)


def test_torn_line_is_dropped_and_the_chain_goes_on(written: tuple[Path, Ledger]) -> None:
    path, _ = written
    with path.open("a") as file:
        file.write('{"clip":1.0,"half')
    again = Ledger("p1", path)
    again.append(record([40]))
    again.close()
    entries = read_ledger(path, heads=[again.head])
    assert [entry.is_session for entry in entries].count(True) == 2
    assert len(entries) == 8


def together(path: Path) -> Ledger:
    ledger = Ledger("p1", path)
    with ledger.together():
        for start in range(3):
            ledger.append(record([start]))
    ledger.close()
    return ledger


def test_entries_that_leave_together_have_one_signature_and_one_sync(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(securevfl.privacy.ledger, "sync", lambda file: (file.flush(), synced.append(1)))
    ledger = together(tmp_path / "p1.jsonl")
    assert len(synced) == 2  # the session, and the three
    signed = [bool(json.loads(line)["signature"]) for line in lines(tmp_path / "p1.jsonl")]
    assert signed == [True, False, False, True]
    assert len(read_ledger(tmp_path / "p1.jsonl", heads=[ledger.head, ledger.released])) == 4


def test_nothing_of_a_block_is_on_disk_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "p1.jsonl"
    ledger = Ledger("p1", path)
    with pytest.raises(KeyboardInterrupt), ledger.together():
        ledger.append(record([1]))
        with ledger.together():
            ledger.append(record([2]))
        assert len(lines(path)) == 1
        raise KeyboardInterrupt
    ledger.close()
    assert len(read_ledger(path, heads=[ledger.head])) == 3  # what was counted is written down all the same


def test_a_full_disk_takes_back_all_that_was_to_leave_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = Ledger("p1", tmp_path / "p1.jsonl")
    before = ledger.head

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(securevfl.privacy.ledger, "sync", full)
    with pytest.raises(RunError, match="nothing was released"), ledger.together():
        ledger.append(record([1]))
        ledger.append(record([2]))
    assert ledger.head == before == ledger.released
    ledger.close()


@pytest.mark.parametrize("torn", [2, 60, 300, 700])
def test_a_crash_within_a_group_leaves_none_of_it(tmp_path: Path, torn: int) -> None:
    """Cut anywhere before its signature, the group was never synced: nothing of it has left."""
    path = tmp_path / "p1.jsonl"
    together(path)
    path.write_bytes(path.read_bytes()[:-torn])
    with pytest.raises(LedgerError):
        read_ledger(path)
    again = Ledger("p1", path)
    again.close()
    assert [entry.is_session for entry in read_ledger(path, heads=[again.head])] == [True, True]


def test_a_ledger_in_memory_signs_what_is_read(tmp_path: Path) -> None:
    ledger = Ledger("p1")
    ledger.append(record([1]))
    ledger.append(record([2]))
    first = ledger.lines
    assert [bool(json.loads(line)["signature"]) for line in first] == [False, False, True]
    ledger.append(record([3]))
    assert ledger.lines[:3] == first and len(verify_lines("p1", ledger.lines)) == 4


def test_tampered_ledger_is_not_continued(written: tuple[Path, Ledger]) -> None:
    path, _ = written
    rewrite(path, lines(path)[1:])
    with pytest.raises(LedgerError):
        Ledger("p1", path)


def test_full_disk_releases_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ledger = Ledger("p1", tmp_path / "p1.jsonl")
    before = ledger.head

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*nothing was released"):
        ledger.append(record([1]))
    assert ledger.head == before
    monkeypatch.undo()
    ledger.close()


def test_no_private_key_on_disk(written: tuple[Path, Ledger]) -> None:
    path, ledger = written
    secret = ledger._key.private_bytes_raw()
    assert secret.hex() not in path.read_text() and secret not in path.read_bytes()


@pytest.mark.parametrize(
    ("rows", "text"),
    [([], ""), ([3], "3"), ([2, 1, 0], "0-2"), ([5, 1, 2, 9, 8], "1-2,5,8-9"), ([0, 2, 4], "0,2,4")],
)
def test_rows_as_text(rows: list[int], text: str) -> None:
    assert rows_to_text(np.array(rows, np.int64)) == text
    assert rows_from_text(text).tolist() == sorted(rows)


@pytest.mark.parametrize("rows", [[1, 1], [-1, 0]])
def test_bad_rows(rows: list[int]) -> None:
    with pytest.raises(LedgerError):
        rows_to_text(np.array(rows))


# -- what was verified before --------------------------------------------------------------------------------


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are verified from now on."""
    seen: list[str] = []
    honest = Chain.take

    def watched(self: Chain, line: str) -> Entry:
        seen.append(line)
        return honest(self, line)

    monkeypatch.setattr(Chain, "take", watched)
    return seen


def test_only_new_entries_are_verified_again(written: tuple[Path, Ledger], verifications: list[str]) -> None:
    path, _ = written
    first = read_ledger(path)
    assert len(verifications) == 6
    assert read_ledger(path) == first and len(verifications) == 6
    again = Ledger("p1", path)  # a session entry of its own
    again.append(record([1]))
    again.close()
    assert len(verifications) == 6 + 6  # which verifies the last signature of a session alone
    assert len(read_ledger(path)) == 8 and len(verifications) == 6 + 6 + 2


@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_edit_of_what_was_verified_is_found(written: tuple[Path, Ledger], number: int) -> None:
    path, _ = written
    read_ledger(path)
    content = lines(path)
    content[number] = (
        content[number].replace('"clip":1.0', '"clip":0.5').replace("as accounted", "as  counted")
    )
    rewrite(path, content)
    with pytest.raises(LedgerError, match=f"entry {number}: content"):
        read_ledger(path)


def test_a_cut_after_verification_is_found(written: tuple[Path, Ledger]) -> None:
    path, ledger = written
    read_ledger(path)
    rewrite(path, lines(path)[:-1])
    with pytest.raises(LedgerError, match="cut"):
        read_ledger(path, heads=[ledger.head])
    assert len(read_ledger(path)) == 5


def test_the_same_bytes_do_not_pass_as_somebody_elses(written: tuple[Path, Ledger], tmp_path: Path) -> None:
    path, _ = written
    read_ledger(path)
    with pytest.raises(LedgerError, match="belongs elsewhere"):
        Ledger("p2", path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rows": np.array([3, 1, 2, 9]), "vectors": 4},
        {"rows": np.array([9, 4, 1]), "vectors": 3, "clip": 1, "sigma": 2},
        {"rows": np.array([9, 4, 1]), "vectors": 3, "clip": 1.0, "sigma": 2.0, "sensitivity": 2.0},
        {"mechanism": "masked", "assumption": 'no "index":7,"previous":"x" in it'},
        {"mechanism": "randomised-response", "epsilon": 0.5},
        {"kind": 'a "quoted", kind', "observers": ("p0", "ümläut")},
    ],
)
def test_entries_have_the_one_form_whatever_was_written_before(fields: dict[str, Any]) -> None:
    ledger = Ledger("p1")
    protected = "sigma" in fields and "mechanism" not in fields
    given: dict[str, Any] = {"mechanism": "gaussian" if protected else "exact"} | fields
    for _ in range(2):
        ledger.append(ReleaseRecord(owner="p1", **given))
        ledger.append(ReleaseRecord(owner="p1", mechanism="exact"))
    entries = verify_lines("p1", ledger.lines)  # which compares every line with the one form
    written = entries[1].content
    assert written["observers"] == list(given.get("observers", ()))
    assert ("rows" in written, "epsilon" in written) == ("rows" in given, "epsilon" in given)
    for name in ("clip", "sigma", "kind", "assumption", "epsilon"):
        if name in given:
            assert written[name] == given[name]
            assert type(written[name]) is type(given[name])


def test_rows_that_can_change_are_written_anew() -> None:
    rows = np.array([5, 1, 8])
    first = rows_to_text(rows)
    rows[0] = 6
    assert (first, rows_to_text(rows)) == ("1,5,8", "1,6,8")
    kept = fixed(rows)
    assert fixed(rows) is kept
    assert not kept.flags.writeable
    rows[0] = 7
    assert kept.tolist() == [6, 1, 8]
    assert fixed(rows).tolist() == [7, 1, 8]


# -- of any length -------------------------------------------------------------------------------------------


def long_ledger(path: Path, entries: int) -> None:
    ledger = Ledger("p1", path)
    with ledger.together():
        for place in range(entries):
            ledger.append(record([place, place + 2]))
    ledger.close()


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python's objects take at most while something is done."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_opening_a_long_ledger_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    def reopen(path: Path) -> None:
        spent = sum(len(each.content["rows"]) for each in LedgerReader(path).entries("embedding"))
        assert spent
        Ledger("p1", path).close()
        assert sum(1 for _ in LedgerReader(path, thorough=False).entries("session")) == 2

    for entries in (10, 100, 3000):
        long_ledger(tmp_path / str(entries) / "p1.jsonl", entries)
    peak(lambda: reopen(tmp_path / "10" / "p1.jsonl"))  # what is loaded once
    short, long = (peak(lambda n=n: reopen(tmp_path / n / "p1.jsonl")) for n in ("100", "3000"))
    # An entry is a line of 320 bytes and some 2 kB of objects; a buffer of a file is 8 kB, a piece 1 MB.
    assert long < short + (tmp_path / "3000" / "p1.jsonl").stat().st_size + 100_000


def test_kinds_are_found_alike_before_and_after_verification(tmp_path: Path) -> None:
    path = tmp_path / "p1.jsonl"
    ledger = Ledger("p1", path)
    ledger.append(record([1]))
    ledger.append(ReleaseRecord(owner="p1", kind='"kind":"phase"', mechanism="exact", assumption="phase"))
    ledger.begin("epoch", 1, None)
    ledger.note_alignment(way="plain", observers=["p0"], ids=3, most=5)
    ledger.close()
    for kinds in (("phase",), ("embedding", "alignment"), ("nothing",), ()):
        securevfl.privacy.chain._KNOWN.clear()
        fresh = list(LedgerReader(path).entries(*kinds))
        assert list(LedgerReader(path).entries(*kinds)) == fresh
        assert [e.content["kind"] for e in fresh if kinds] == [k for k in kinds if k != "nothing"]


def test_a_changed_signature_is_found_by_an_audit_and_the_last_of_a_session_by_its_owner(
    written: tuple[Path, Ledger],
) -> None:
    path, _ = written
    Ledger("p1", path).close()  # a second session: the first ends with entry 5
    honest = lines(path)
    for number, found_by_its_owner in ((3, False), (5, True), (6, True)):
        signature = json.loads(honest[number])["signature"]
        text = [line.replace(signature, signature[::-1]) for line in honest]
        rewrite(path, text)
        with pytest.raises(LedgerError, match=f"entry {number}: signature"):
            read_ledger(path)
        if found_by_its_owner:
            with pytest.raises(LedgerError, match=f"entry {number}: signature"):
                Ledger("p1", path)
        else:
            LedgerReader(path, thorough=False).end()


def test_a_tail_signed_by_another_key_is_not_continued(written: tuple[Path, Ledger]) -> None:
    """Entries after the last honest signature, rehashed and signed by whoever wrote them."""
    path, ledger = written
    forger = Ledger("p1", path.with_name("other.jsonl"))
    forger.head = forger.released = forger._signed = ledger.head
    forger.append(record([9]))
    forger.close()
    rewrite(path, [*lines(path), lines(path.with_name("other.jsonl"))[-1]])
    with pytest.raises(LedgerError, match="entry 6: signature"):
        Ledger("p1", path)
