"""Files: the one way to replace, create and extend one. Readable by the owner alone from the first moment on.

A file that is replaced is written beside its place, synced, and moved there, so that a crash or a full disk
leaves the old content or the new one, never half of one. A link in its place is replaced, not followed; a
file that is extended must not be one.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from securevfl.errors import RunError, SecureVFLError

PRIVATE = 0o600
ATTEMPTS, PAUSE = 300, 0.05
"""How often, and after how many seconds, an open is tried again while there are too many open files."""
PART = ".part"
"""What follows the name of a file that is not yet in its place."""


def is_full(error: BaseException | None) -> bool:
    """True if an error comes from a disk that is full, or from a quota that is used up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def clear_errors(path: Path, raises: type[SecureVFLError] = RunError) -> Iterator[None]:
    """One line in place of an `OSError`: which file cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise raises(f"{path} cannot be written: {error.strerror or error}") from error


def check_new(folder: Path) -> None:
    """A folder for results, before anything is done for them: one that is not there, or is empty.

    Raises:
        RunError: There is something of this name.
    """
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise RunError(f"{folder} exists already; choose another folder, or --resume to go on with it")


@contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well; otherwise nothing has changed.

    Its folder is made where there is none.

    Raises:
        RunError: It cannot be written, or a folder, a device or a pipe is in its place.
    """
    target = Path(path)
    with clear_errors(target):
        if target.exists() and not target.is_file():  # an administrator's process would replace /dev/null
            raise RunError(f"{target} is a {'folder' if target.is_dir() else 'device or pipe'}; name a file")
        part = target.with_name(target.name + PART)
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.unlink(missing_ok=True)  # what an earlier process left; its mode may be another
        with os.fdopen(_new(part), "wb") as file:
            try:
                yield file
                sync(file)
                part.replace(target)
            except BaseException:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
        _sync_folder(target.parent)


def write_bytes(path: Path | str, content: bytes) -> None:
    """Replaces a file in one step; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path | str, text: str) -> None:
    """Replaces a file in one step; see `replacing`."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, content: Any) -> None:
    """Replaces a file in one step by readable JSON, in which every number is finite."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def create(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Writes and syncs a file that must not exist yet, not even as a link to nowhere.

    Raises:
        OSError: It exists or cannot be written; half of one is not left behind.
    """
    with os.fdopen(_new(path, mode), "wb") as file:
        try:
            file.write(content)
            sync(file)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
    _sync_folder(path.parent)


def appending(path: Path | str, *, binary: bool = False) -> IO[Any]:
    """Opens a file for writing at its end; a new one is readable by its owner alone.

    Raises:
        OSError: It cannot be opened.
    """
    if binary:
        return open(path, "ab", opener=private_opener)
    return open(path, "a", encoding="utf-8", opener=private_opener)


def append_line(path: Path, line: str) -> None:
    """Adds a line; when this returns, it has reached the disk.

    Raises:
        RunError: It cannot be written.
    """
    with clear_errors(path), appending(path) as file:
        file.write(line + "\n")
        sync(file)


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=)`: what this makes is readable by its owner alone; no link is followed."""
    try:
        return _opened(path, flags | getattr(os, "O_NOFOLLOW", 0), PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", path) from error
        raise


def _opened(path: Path | str, flags: int, mode: int) -> int:
    """Opens a file. A process that has run out of files waits: connections that took them time out."""
    for _ in range(ATTEMPTS):
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            time.sleep(PAUSE)
    return os.open(path, flags, mode)


def sync(file: IO[Any]) -> None:
    """Returns when what was written has reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        RunError: It cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _new(path: Path, mode: int = PRIVATE) -> int:
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder last; some file systems cannot, and need not."""
    if os.name != "posix":
        return
    descriptor = _opened(folder, os.O_RDONLY, 0)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# -- arrays in files ----------------------------------------------------------------------------------------


def file_of(array: Any) -> mmap.mmap | None:
    """The mapped file that an array lies in; None for an array in memory."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def give_back(array: Any) -> None:
    """Lets go of what was read of an array that lies in a file; of any other nothing."""
    file = file_of(array)
    if file is not None and hasattr(file, "madvise"):
        file.madvise(mmap.MADV_DONTNEED)
