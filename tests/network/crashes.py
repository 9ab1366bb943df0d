"""Processes that die at a chosen moment and start again, for tests: as tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from federation import Federation
from safetensors.numpy import load_file

from securevfl.network.participant import Participant
from securevfl.privacy.ledger import read_ledger, read_records
from securevfl.privacy.messages import Packet
from securevfl.privacy.views import read_heads


class Crash(BaseException):
    """Ends a process in the middle of a function, as a kill would."""


class Process:
    """One organisation's process, and the one that follows it."""

    def __init__(self, federation: Federation, name: str) -> None:
        self.federation, self.name = federation, name
        self.crashed = asyncio.Event()
        self.left: set[tuple[str, int]] = set()
        self.said: list[str] = []

    def start(self) -> asyncio.Task[dict[str, Any]]:
        first = self.name == self.federation.names[0]
        build: Callable[..., Any] = self.federation.coordinator if first else self.federation.member
        self.node: Any = build(say=self.said.append) if first else build(self.name, say=self.said.append)
        self._count_releases(self.node)
        self.task = asyncio.create_task(self.node.run())
        return self.task

    def _count_releases(self, node: Participant) -> None:
        post = node.mesh.post

        def counting(message: Packet) -> None:
            if message.head is not None:
                self.left.add((message.head.owner, message.head.position))
            post(message)

        node.mesh.post = counting  # type: ignore[method-assign]

    async def crash(self) -> None:
        """No goodbye, no notice to anybody."""

        async def nothing(*_: Any, **__: Any) -> None:
            pass

        self.node._stop = self.node._tell_failure = nothing
        self.node.mesh.tell = self.node.mesh.tell_all = lambda *_, **__: None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.node.close()

    # -- when -----------------------------------------------------------------------------------------------

    def crash_when_told(self, kind: str, count: int = 1) -> None:
        """Dies when the count-th control message of a kind has arrived, before it is handled."""
        following, seen = self.node.next_control, Counter[str]()

        async def next_control() -> Any:
            item = await following()
            seen[item[1]] += 1
            if item[1] == kind and seen[kind] == count:
                self.crashed.set()
                await asyncio.Event().wait()
            return item

        self.node.next_control = next_control

    def crash_before_telling(self, kind: str, count: int = 1) -> None:
        """Dies instead of sending the count-th control message of a kind."""
        telling, seen = self.node.mesh.tell, Counter[str]()

        def tell(peer: str, told: str, **fields: Any) -> None:
            seen[told] += 1
            if told == kind and seen[told] == count:
                self.crashed.set()
                raise Crash
            telling(peer, told, **fields)

        self.node.mesh.tell = tell

    def crash_in_phase(self, part: str, posts: int = 1) -> None:
        """Dies in a phase, in place of its posts-th message."""
        posting, seen = self.node.mesh.post, Counter[str]()
        links = self.node.mesh

        def post(message: Packet) -> None:
            seen[self.node.part] += 1
            if self.node.part == part and seen[part] == posts:
                self.crashed.set()
                raise Crash
            posting(message)

        links.post = post

    def crash_with_relays(self, count: int) -> None:
        """Dies with what others have sent each other through it, from the count-th message on."""
        relaying, seen = self.node.mesh._relay, 0

        def relay(peer: str, *content: Any) -> None:
            nonlocal seen
            seen += 1
            if seen >= count:
                self.crashed.set()
            else:
                relaying(peer, *content)

        self.node.mesh._relay = relay


def processes(federation: Federation) -> dict[str, Process]:
    return {name: Process(federation, name) for name in federation.names}


async def finish(found: dict[str, Process], seconds: float = 240) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(seconds):
        results = await asyncio.gather(*(each.task for each in found.values()))
    return dict(zip(found, results, strict=True))


async def run_with_crash(
    federation: Federation, victim: str, arm: Callable[[Process], None]
) -> tuple[dict[str, Process], dict[str, dict[str, Any]]]:
    """Everybody runs; the victim dies where `arm` says, and starts again in the same folder."""
    found = processes(federation)
    for each in found.values():
        each.start()
    arm(found[victim])
    async with asyncio.timeout(240):
        await found[victim].crashed.wait()
    await found[victim].crash()
    found[victim].start()
    return found, await finish(found)


def models(folder: Path) -> dict[str, np.ndarray]:
    """All weights of all organisations."""
    return {
        f"{path.parent.parent.name}/{path.stem}/{key}": value
        for path in sorted(folder.glob("*/models/*.safetensors"))
        for key, value in load_file(path).items()
    }


def check_ledgers(federation: Federation, found: dict[str, Process], *, more: int | None = None) -> None:
    """Every ledger verifies and holds whatever left and whatever others received.

    Args:
        federation: Whose.
        found: Its processes.
        more: How many entries may be there for what did not leave; None where not every entry is a message.
    """
    left = {entry for each in found.values() for entry in each.left}
    heads = [head for name in federation.names for head in read_heads(federation.folder / name)]
    for name in federation.names:
        folder = federation.folder / name
        read_records(folder)
        entries = read_ledger(folder / "ledger" / f"{name}.jsonl", heads=heads)
        released = {entry.index for entry in entries if entry.is_release}
        own = {position for owner, position in left if owner == name}
        written = {entry.index for entry in entries}  # the session's entry too: setups show it as their head
        assert own <= written, (name, own - written)
        assert more is None or len(released - own) <= more, (name, released - own)
