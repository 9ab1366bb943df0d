"""Views hold exactly what arrived, in order, readable by their owner alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from securevfl.errors import RunError
from securevfl.privacy import views
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.views import Receipts, View, ViewWriter, read_heads


def message(number: int, head: Head | None = None) -> Packet:
    return Packet(
        kind="embedding" if number % 2 else "gradient",
        sender="p1",
        receiver="server",
        number=number,
        head=head,
        fields={
            "rows": np.arange(number, dtype=np.int32),
            "values": np.full((2, 2), number, np.float32),
            "x": 1,
            "ciphertext": bytes([number, 0, 255]),
        },
    )


def test_messages_come_back_in_order(tmp_path: Path) -> None:
    writer = ViewWriter(tmp_path / "p0", "p0")
    for number in range(4):
        writer.record(message(number, Head("p1", number, "ab" * 32)), time=number / 2, sent=number == 3)
    writer.close()
    view = View(tmp_path / "p0")
    assert [seen.number for seen in view] == [0, 1, 2, 3]
    assert [seen.number for seen in view.messages("embedding", sent=False)] == [1]
    seen = list(view)[2]
    assert (seen.time, seen.sender, seen.head) == (1.0, "p1", Head("p1", 2, "ab" * 32))
    assert seen.fields["rows"].tolist() == [0, 1] and seen.fields["x"] == 1
    assert seen.fields["ciphertext"] == b"\x02\x00\xff"
    assert (seen.fields["values"] == 2).all() and seen.fields["values"].dtype == np.float32
    assert seen.size == len(message(2, Head("p1", 2, "ab" * 32)).to_bytes())


def test_files_are_private(tmp_path: Path) -> None:
    ViewWriter(tmp_path / "p0", "p0").close()
    assert stat.S_IMODE((tmp_path / "p0").stat().st_mode) == 0o700
    for path in (tmp_path / "p0").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_line_is_dropped_on_resume(tmp_path: Path) -> None:
    writer = ViewWriter(tmp_path / "p0", "p0")
    writer.record(message(1), time=0, sent=False)
    writer.close()
    with (tmp_path / "p0" / "messages.jsonl").open("a") as file:
        file.write('{"index": 1, "ti')
    again = ViewWriter(tmp_path / "p0", "p0")
    again.record(message(2), time=1, sent=False)
    again.close()
    assert [seen.number for seen in View(tmp_path / "p0")] == [1, 2]


def test_what_a_full_disk_did_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some bytes are taken, then none: messages wait in memory, up to a limit, and none is lost."""
    writer, write, room = ViewWriter(tmp_path / "p0", "p0"), os.write, [500]

    def full(file: int, content: bytearray) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, content[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(views.os, "write", full)
        patch.setattr(views, "HELD", 1)
        for number in range(100):
            writer.record(message(number), time=0, sent=False)
        with pytest.raises(RunError, match=r"arrays\.bin cannot be written: No space left on device"):
            writer.flush()
        patch.setattr(views, "MOST_HELD", 1)
        with pytest.raises(RunError, match="No space left"):
            for number in range(100, 256):
                writer.record(message(number), time=0, sent=False)
                last = number
    writer.close()
    found = list(View(tmp_path / "p0"))
    assert [seen.number for seen in found] == list(range(last + 2))
    assert found[90].fields["rows"].tolist() == list(range(90))


def test_damaged_views_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no view"):
        View(tmp_path / "nobody")
    writer = ViewWriter(tmp_path / "p0", "p0")
    writer.record(message(3), time=0, sent=False)
    writer.close()
    os.truncate(tmp_path / "p0" / "arrays.bin", 5)
    with pytest.raises(RunError, match="is cut"):
        list(View(tmp_path / "p0"))
    (tmp_path / "p0" / "messages.jsonl").write_text("nonsense\n")
    with pytest.raises(RunError, match="damaged"):
        list(View(tmp_path / "p0"))


def test_receipts_keep_the_newest_head(tmp_path: Path) -> None:
    receipts = Receipts("p0")
    for position in (3, 5, 4):
        receipts.note(Head("p1", position, str(position)))
    receipts.note(Head("p2", 1, "x"))
    receipts.save(tmp_path)
    assert read_heads(tmp_path) == [Head("p1", 5, "5"), Head("p2", 1, "x")]
    other = Receipts("p0")
    other.load(tmp_path)
    assert other.heads == receipts.heads
