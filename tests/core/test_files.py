"""The one writer of files: private from the first moment, whole or not at all, one clear error."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from securevfl import files
from securevfl.errors import RunError
from securevfl.federation.folder import RunFolder, load_checkpoint, save_checkpoint
from securevfl.models import save_module
from securevfl.network.authority import create_authority
from securevfl.network.folders import save_alignment
from securevfl.network.monitoring import log_to
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.messages import Head
from securevfl.privacy.views import Receipts, ViewWriter
from securevfl.sweeps.records import PointLog


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def born(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Name -> mode of every file at the moment it was made, under a umask that forbids nothing."""
    opened, found = os.open, {}

    def watching(path: Any, flags: int, *more: Any, **named: Any) -> int:
        new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor = opened(path, flags, *more, **named)
        if new:
            found[Path(path).name] = stat.S_IMODE(os.fstat(descriptor).st_mode)
        return descriptor

    monkeypatch.setattr(os, "open", watching)
    before = os.umask(0)
    yield found
    os.umask(before)


def receipts(folder: Path) -> None:
    kept = Receipts("p0")
    kept.note(Head("p1", 3, "ab" * 32))
    kept.save(folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    "checkpoint.safetensors": lambda folder: save_checkpoint(folder, {"weights": torch.ones(3)}),
    "p0.safetensors": lambda folder: save_module(folder / "p0.safetensors", torch.nn.Linear(2, 1)),
    "alignment.json": lambda folder: save_alignment(folder, ["a", "b"]),
    "result.json": lambda folder: RunFolder(folder).write_result({"auc": 1.0}),
    "p0.json": receipts,
    "page.html": lambda folder: files.write_text(folder / "page.html", "<p>"),
}
APPENDERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda folder: RunFolder(folder).append_metrics({"epoch": 1}),
    "p1.jsonl": lambda folder: Ledger("p1", folder / "p1.jsonl").close(),
    "journal.jsonl": lambda folder: PointLog(folder / "journal.jsonl").append({"id": "a", "status": "done"}),
    "messages.jsonl": lambda folder: ViewWriter(folder, "p0").close(),
    "arrays.bin": lambda folder: ViewWriter(folder, "p0").close(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_replaced_files_are_private_from_their_first_moment(
    name: str, born: dict[str, int], tmp_path: Path
) -> None:
    WRITERS[name](tmp_path)
    assert born == {name + files.PART: 0o600}
    (path,) = tmp_path.rglob(name)
    path.chmod(0o666)
    WRITERS[name](tmp_path)
    assert mode(path) == 0o600 and not list(tmp_path.rglob("*" + files.PART))


@pytest.mark.parametrize("name", APPENDERS)
def test_files_that_grow_are_private_from_their_first_moment(
    name: str, born: dict[str, int], tmp_path: Path
) -> None:
    APPENDERS[name](tmp_path)
    assert born[name] == 0o600


def test_keys_are_private_and_certificates_are_not(born: dict[str, int], tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", name="us")
    assert born == {"ca.key": 0o600, "ca.pem": 0o644}


def test_what_an_earlier_process_left_is_not_taken_up(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    (tmp_path / "file.part").symlink_to(elsewhere)
    files.write_text(path, "new")
    assert path.read_text() == "new" and elsewhere.read_text() == "theirs" and mode(path) == 0o600


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_is_replaced_and_not_followed(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / "first")
    (path,) = (tmp_path / "first").rglob(name)
    target = tmp_path / "target"
    path.replace(target)
    content = target.read_bytes()
    path.symlink_to(target)
    target.chmod(0o644)
    WRITERS[name](tmp_path / "first")
    assert not path.is_symlink() and target.read_bytes() == content and mode(target) == 0o644


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_only_files_are_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(place := tmp_path / "place")
    kind = stat.S_IFMT(place.stat().st_mode)
    with pytest.raises(RunError, match="name a file"):
        files.write_text(place, "new")
    assert stat.S_IFMT(place.stat().st_mode) == kind and [*tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_folders_without_a_name_of_their_own_are_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="is a folder; name a file"):
        files.write_text(name, "new")


def test_a_new_file_takes_the_place_of_nothing(tmp_path: Path) -> None:
    for make in (lambda path: path.write_text("old"), lambda path: path.symlink_to("nowhere")):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.key"
        make(path)
        with pytest.raises(FileExistsError):
            files.create(path, b"new")
    assert not (tmp_path / "nowhere").exists()


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_crash_before_the_replacement_leaves_the_old_content(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](tmp_path)
    (path,) = tmp_path.rglob(name)
    before = path.read_bytes()

    def dies(*_: object) -> None:
        assert path.read_bytes() == before
        raise Killed

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), dies)
    with pytest.raises(Killed):
        WRITERS[name](tmp_path)
    assert path.read_bytes() == before


def test_a_full_disk_is_one_clear_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, write in WRITERS.items():
        write(tmp_path)
        (path,) = tmp_path.rglob(name)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _full)
            with pytest.raises(RunError, match=rf"^\S*/{name} cannot be written: No space left on device$"):
                write(tmp_path)
        assert path.read_bytes() == before and not list(tmp_path.rglob("*" + files.PART))
    state = load_checkpoint(tmp_path)
    assert state is not None and state["weights"].tolist() == [1, 1, 1]


def test_lines_on_a_full_disk_are_one_clear_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"epoch": 1})
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: No space left on device$"):
        folder.append_metrics({"epoch": 2})
    assert folder.read_metrics()[0] == {"epoch": 1}


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_inside_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    files.write_bytes(path, b"old")
    with pytest.raises(RunError, match="No space left"), files.replacing(path) as file:
        file.write(b"half")
        _full(0)
    with pytest.raises(KeyError), files.replacing(path):
        raise KeyError("the caller's own")
    assert path.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == ["large"]


def test_no_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(RunError, match=r"file cannot be written: Permission denied$"):
        files.write_text(tmp_path / "file", "text")


def test_a_file_system_that_cannot_sync_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync

    def plain(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", plain)
    files.write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_damaged_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(RunError, match=r"result\.json cannot be read: No such file"):
        files.read_json(path)
    path.write_text("{")
    with pytest.raises(RunError, match=r"result\.json is damaged: "):
        files.read_json(path)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Where others may write, as in /tmp, they could put one in the place of a log that is to come."""
    (tmp_path / "victim").write_text("old")
    (tmp_path / "run.log").symlink_to(tmp_path / "victim")
    with pytest.raises(RunError, match="it is a link"):
        files.append_line(tmp_path / "run.log", "new")
    with pytest.raises(RunError, match="it is a link"):
        log_to(tmp_path / "run.log", organisation="bank", run="test")
    assert (tmp_path / "victim").read_text() == "old"
