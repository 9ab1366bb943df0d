"""Reading local files: plain, gzip or a zip with one member, told apart by content and not by name."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from pathlib import Path

from securevfl.errors import DataError


def read_bytes(path: Path | str) -> bytes:
    """The unpacked content of a file.

    Raises:
        DataError: The file is missing, unreadable, empty or a damaged archive.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"file not found: {path}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        content = _unpack(raw, path)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is a damaged archive: {error}") from None
    if not content:
        raise DataError(f"{path} is empty")
    return content


def _unpack(raw: bytes, path: Path) -> bytes:
    if raw[:2] == b"\x1f\x8b":
        return gzip.decompress(raw)
    if raw[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [name for name in archive.namelist() if not name.endswith("/")]
            if len(members) != 1:
                raise DataError(f"{path} holds {len(members)} files; expected a zip with exactly one")
            return archive.read(members[0])
    return raw


def read_text(path: Path | str) -> str:
    """The unpacked content as UTF-8 text, without a byte order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def find_files(data_set: str, folder: Path | str | None, names: tuple[str, ...]) -> list[Path]:
    """The paths of a set's own files in `folder`, each plain, .gz or .zip.

    Raises:
        DataError: No folder was given, or a file is not there; the message lists all files expected.
    """
    expected = ", ".join(names)
    if folder is None:
        raise DataError(
            f"data set {data_set!r} is read from local files: give the folder with {expected} (or .gz)"
        )
    base = Path(folder)
    if not base.is_dir():
        raise DataError(f"data set {data_set!r}: {base} is not a folder; expected one that holds {expected}")
    found = [next((p for p in _candidates(base, name) if p.is_file()), None) for name in names]
    absent = [name for name, path in zip(names, found, strict=True) if path is None]
    if absent:
        raise DataError(
            f"data set {data_set!r}: {', '.join(absent)} not found in {base}; expected {expected} (or .gz)"
        )
    return [path for path in found if path is not None]


def _candidates(base: Path, name: str) -> list[Path]:
    return [base / name, base / f"{name}.gz", base / f"{name}.zip"]
