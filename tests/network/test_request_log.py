"""The request log: rounds survive the process, answers the disk, and neither the other's trouble."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securevfl.algorithms.serving import Round
from securevfl.errors import RunError
from securevfl.network import request_log as module
from securevfl.network.request_log import Asked, RequestLog


def asked(key: str, *numbers: int) -> Asked:
    return Asked(
        key=key, digest=key.encode(), ids=tuple(f"p{each}" for each in numbers), numbers=np.array(numbers)
    )


def begin(log: RequestLog, name: str, *requests: Asked) -> None:
    log.open(Round(name=name, rows=np.concatenate([each.numbers for each in requests])), requests)


def left(path: Path) -> dict[str, tuple[list[tuple[str, tuple[str, ...], list[int]]], bool]]:
    """What another process finds, without an end of this one."""
    log = RequestLog(path)
    found = {
        each.name: ([(r.key, r.ids, r.numbers.tolist()) for r in requests], answered)
        for each, requests, answered in log.unsettled()
    }
    log.close()
    return found


def test_another_process_finds_open_rounds_whole(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    begin(log, "a", asked("k1", 4, 2), asked("k2", 9))
    begin(log, "b", asked("k3", 1))
    begin(log, "c", asked("k4", 5))
    log.answer([([asked("k3", 1)], {"k3": b"three"})])
    log.close_round("c")
    assert left(log.path) == {
        "a": ([("k1", ("p4", "p2"), [4, 2]), ("k2", ("p9",), [9])], False),
        "b": ([("k3", ("p1",), [1])], True),
    }
    assert log.find("k1") == (b"k1", None) and log.find("k4") is None
    log.close_round("b")
    assert log.find("k3") == (b"k3", b"three")
    log.close()


def test_a_round_counts_as_answered_only_when_all_its_keys_are(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    begin(log, "a", asked("k1", 4), asked("k2", 9))
    log.answer([([asked("k1", 4)], {"k1": b"one"})])
    log.close()
    assert not left(log.path)["a"][1]


def test_a_full_disk_spoils_no_other_round(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    begin(log, "a", asked("k1", 1))
    kept = log._rounds._file

    class Full:
        def write(self, line: bytes) -> int:
            return kept.write(line[:20])

        def close(self) -> None:
            kept.close()

    log._rounds._file = Full()
    with pytest.raises(RunError, match="No space left"):
        begin(log, "b", asked("k2", 2))
    assert log.find("k2") is None
    log._rounds._file = kept
    begin(log, "c", asked("k3", 3))
    log.close()
    assert set(left(log.path)) == {"a", "c"}


def test_ended_rounds_leave_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 2000)
    log = RequestLog(tmp_path / "requests.db")
    begin(log, "stays", asked("k", 7))
    for number in range(100):
        begin(log, f"r{number}", asked(f"k{number}", number))
        log.close_round(f"r{number}")
    log.close()
    assert log._rounds.path.stat().st_size < 2500
    assert log._rounds.path.stat().st_mode & 0o777 == 0o600
    assert set(left(log.path)) == {"stays"}


def test_a_file_that_cannot_be_written_anew_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 0)
    log = RequestLog(tmp_path / "requests.db")
    begin(log, "a", asked("k1", 1))
    begin(log, "b", asked("k2", 2))

    def full(*_: object) -> None:
        raise RunError("No space left on device")

    monkeypatch.setattr(module, "write_bytes", full)
    log.close_round("a")
    begin(log, "c", asked("k3", 3))
    monkeypatch.undo()
    log.close()
    assert set(left(log.path)) >= {"b", "c"}


def test_only_the_newest_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    log = RequestLog(tmp_path / "requests.db")
    for number in range(5):
        log.answer([([asked(f"k{number}", number)], {f"k{number}": b"x"})])
    assert [number for number in range(5) if log.find(f"k{number}")] == [2, 3, 4]
    log.close()
