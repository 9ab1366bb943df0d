"""A scoring service for tests: all organisations in one event loop, a client over real HTTP."""

from __future__ import annotations

import asyncio
import copy
import csv
import json
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from federation import Federation, free_port

from securevfl.network.config import ParticipantConfig, ScoringConfig
from securevfl.network.service import Service
from securevfl.privacy.ledger import read_ledger
from securevfl.settings.plan import Plan

LINEAR = Plan(algorithm="sealed", model="linear", sigma=2.0, epochs=2, settings={"adversary": "semi-honest"})


def people(count: int, seed: int = 5) -> tuple[list[str], Callable[[str], np.ndarray]]:
    """IDs of new people, and a party's features of them."""

    def block(name: str) -> np.ndarray:
        return np.random.default_rng([seed, *name.encode()]).uniform(-1, 1, (count, 3)).astype(np.float32)

    return [f"new{i:04d}" for i in range(count)], block


def copied(federation: Federation, folder: Path) -> Federation:
    """The same organisations, with what they have trained, in folders of their own."""
    made = copy.copy(federation)
    for name in federation.names:
        shutil.copytree(federation.folder / name, folder / name)
    made.folder = folder
    made.server = replace(federation.server, base=folder, folder=folder / federation.names[0])
    made.members = {
        name: replace(config, base=folder, folder=folder / name)
        for name, config in federation.members.items()
    }
    return made


class Scorers:
    """Organisations that have trained, and the people whom they can score."""

    def __init__(
        self,
        federation: Federation,
        *,
        count: int = 40,
        also: Sequence[str] = (),
        **scoring: Any,
    ) -> None:
        self.federation, (self.ids, self.block) = federation, people(count)
        self.port = free_port()
        self.services: dict[str, Service] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.said: list[str] = []
        self.more: dict[str, list[ParticipantConfig]] = {}
        given = {"people": 1000, "requests": 1000, "timeout": 5.0} | scoring
        listen = f"127.0.0.1:{self.port}"
        for name, table in federation.tables.items():
            rows = [*self.block(name), *(table.block[table.ids.tolist().index(each)] for each in also)]
            write_people(federation.folder / f"people-{name}.csv", [*self.ids, *also], rows)
        self.configs: dict[str, ParticipantConfig] = {
            name: replace(
                config,
                scoring=ScoringConfig(
                    file=f"people-{name}.csv" if name in federation.tables else "", listen=listen, **given
                ),
            )
            for name, config in {federation.names[0]: federation.server, **federation.members}.items()
        }
        self.configs = {
            name: config
            if name == federation.names[0]
            else replace(config, accept=replace(config.accept, requests=1_000_000))
            for name, config in self.configs.items()
        }

    def start(self, name: str) -> None:
        """A new process of an organisation."""
        configs = [self.configs[name], *self.more.get(name, [])]
        service = Service(configs, say=lambda text: self.said.append(f"{name}: {text}"))
        self.services[name] = service
        self.tasks[name] = asyncio.create_task(service.run())

    async def kill(self, name: str) -> None:
        """No goodbye, no notice to anybody."""
        for node in self.services[name].nodes.values():
            node._stop = node._tell_failure = _nothing  # type: ignore[attr-defined]
            node.mesh.tell = node.mesh.tell_all = lambda *_, **__: None  # type: ignore[method-assign]
        for dispatcher in self.services[name].dispatchers.values():
            for task in dispatcher._writing:
                task.cancel()
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks.pop(name), return_exceptions=True)

    @asynccontextmanager
    async def running(self) -> Any:
        """Everybody, until the block ends; the label holder drains first."""
        for name in self.configs:
            self.start(name)
        try:
            await self.ready()
            yield self
            if (first := self.federation.names[0]) in self.tasks:
                self.services[first].stop()
                async with asyncio.timeout(240):
                    await self.tasks.pop(first)
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def ready(self) -> None:
        async with asyncio.timeout(240):
            while True:
                if len(self.said) > 200:
                    raise AssertionError(self.said[:60])
                for task in self.tasks.values():
                    if task.done():
                        task.result()
                try:
                    if (await self.get("/health"))[0] == 200:
                        return
                except OSError:
                    pass
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await http(self.port, "GET", path)

    async def score(self, *ids: str, key: str = "", **more: Any) -> tuple[int, Any]:
        """What a client gets: the status, and scores or the line that says why not."""
        status, body = await self.raw(*ids, key=key, **more)
        content = json.loads(body)
        if "scores" in content:
            return status, {each["id"]: each["score"] for each in content["scores"]}
        return status, content["error"]

    async def raw(self, *ids: str, key: str = "", **more: Any) -> tuple[int, bytes]:
        content = {"ids": list(ids), **more}
        return await http(self.port, "POST", "/v1/score", json.dumps(content).encode(), key=key)

    def scored(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Kind and rows of every entry of a ledger that counts scores."""
        return scored_in(self.federation.folder / name / "ledger" / f"{name}.jsonl")


def scored_in(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    from securevfl.privacy.ledger import rows_from_text

    return [
        (entry.content["kind"], tuple(rows_from_text(entry.content["rows"]).tolist()))
        for entry in read_ledger(path)
        if entry.content["kind"] in ("prediction", "scoring")
    ]


async def _nothing(*_: Any, **__: Any) -> None:
    pass


def write_people(path: Path, ids: Sequence[str], block: Sequence[np.ndarray]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", *(f"x{i}" for i in range(len(block[0])))])
        table.writerows([each, *row.tolist()] for each, row in zip(ids, block, strict=True))


async def http(
    port: int, method: str, path: str, body: bytes = b"", *, key: str = "", ssl: Any = None
) -> tuple[int, bytes]:
    """One request of a plain client."""
    host = {} if ssl is None else {"ssl": ssl, "server_hostname": "bank.securevfl"}
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **host)
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close"]
    if method == "POST":
        key = key or secrets.token_hex(8)
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", f"Idempotency-Key: {key}"]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content
