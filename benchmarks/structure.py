"""How far a reader must jump: files that one upload passes through, and the size of each room.

An upload is followed with `sys.setprofile` from the party's first call to the end of its local step, in a run
where no other party works meanwhile. Calls into other packages, and into this file, do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import securevfl
from securevfl import Plan, VerticalData, train
from securevfl.algorithms import vafl

ROOT = Path(securevfl.__file__).resolve().parents[1]
ROOMS = ("securevfl", "protocols", "accountants", "attacks")
OURS = tuple(f"{ROOT / room}/" for room in ROOMS)
FOLLOWED = 6  # which upload: the first ones still build things
SLOW = 1e-6
GOALS = {"plain": 40, "pairwise": 150}


class Trace(NamedTuple):
    """What an upload passed through: calls of ours, files, and how often the file changed."""

    functions: int
    files: int
    changes: int


@contextmanager
def followed(role: type, found: list[str]) -> Iterator[None]:
    """Collects the file of every call of ours during one upload of a role."""
    original, count = role._upload, 0  # type: ignore[attr-defined]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(OURS):
            found.append(name)

    async def upload(self: Any, *given: Any) -> None:
        nonlocal count
        count += 1
        if count != FOLLOWED:
            return await original(self, *given)
        sys.setprofile(note)
        try:
            return await original(self, *given)
        finally:
            sys.setprofile(None)

    role._upload = upload  # type: ignore[attr-defined]
    try:
        yield
    finally:
        role._upload = original  # type: ignore[attr-defined]


def one_upload(protocol: str) -> Trace:
    """Follows one upload of asynchronous VAFL."""
    parties = 2 if protocol == "plain" else 3
    role = vafl.VAFLParty if protocol == "plain" else vafl.SummingParty
    data = VerticalData.load("breast-cancer", parties=parties)
    speeds = {f"p{i}": SLOW for i in range(parties) if i != 1}
    found: list[str] = []
    with followed(role, found):
        train(
            data, Plan(algorithm="vafl", protocol=protocol, sigma=1.0, epochs=1, settings={"speeds": speeds})
        )
    changes = sum(before != after for before, after in pairwise(found))
    return Trace(len(found), len(set(found)), changes)


def size(folder: Path) -> tuple[int, int]:
    """Lines and files of a room."""
    files = list(folder.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files), len(files)


def main() -> None:
    for room in ROOMS:
        print("{:12} {:7,} lines {:4} files".format(room, *size(ROOT / room)))
    print(
        "{:12} {:7,} lines {:4} files (goal 5,000)".format("trusted core", *size(ROOT / "securevfl/privacy"))
    )
    for protocol, goal in GOALS.items():
        trace = one_upload(protocol)
        print(f"one upload, {protocol}: {trace.functions} calls, {trace.files} files, ", end="")
        print(f"{trace.changes} changes of file (goal {goal})")


if __name__ == "__main__":
    main()
