"""Places that strangers and clients take: streams whose answer nobody reads, doors of a scoring service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from federation import identities
from scoring import http
from victims import Consortium
from warm import Command

from securevfl.errors import InputError
from securevfl.network import http as doors
from securevfl.network import transport
from securevfl.network.api import ScoringApi, load_own
from securevfl.network.config import ScoringConfig
from securevfl.network.transport import STREAMS_EACH

HEADERS, SETTINGS, PING = 1, 4, 6
REQUEST = {
    ":method": "POST",
    ":scheme": "https",
    ":path": "/securevfl.Network/Stream",
    ":authority": "bank",
    "content-type": "application/grpc",
    "te": "trailers",
}


class Unread:
    """A stranger's HTTP/2 connection that opens streams and lets nobody write to them.

    Args:
        port: Whose door.
        folder: The stranger's certificate and key.

    Attributes:
        allowed: How many streams the other side says that it takes.
    """

    def __init__(self, port: int, folder: Path) -> None:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.check_hostname = False
        context.load_cert_chain(str(folder / "stranger.pem"), str(folder / "stranger.key"))
        context.set_alpn_protocols(["h2"])
        self.allowed = 1 << 31
        self._socket = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))
        window = _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))  # of nothing
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + window)
        threading.Thread(target=self._read, daemon=True).start()

    def open(self, count: int) -> None:
        words = [(name.encode(), value.encode()) for name, value in REQUEST.items()]
        block = b"".join(b"\0" + bytes((len(n),)) + n + bytes((len(v),)) + v for n, v in words)
        with contextlib.suppress(OSError):  # too many for the other side's patience
            for number in range(count):
                self._socket.sendall(_frame(HEADERS, 4, 2 * number + 1, block))

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        """Answers settings and pings, so that the connection passes for alive."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(None)
            file = self._socket.makefile("rb")
            while len(head := file.read(9)) == 9:
                kind, flags = head[3], head[4]
                body = file.read(int.from_bytes(head[:3], "big"))
                if kind == SETTINGS and not flags & 1:
                    limits = dict(struct.iter_unpack(">HI", body))
                    self.allowed = min(self.allowed, limits.get(3, 1 << 31))
                if kind in (SETTINGS, PING) and not flags & 1:
                    self._socket.sendall(_frame(kind, 1, 0, body if kind == PING else b""))


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


class Deaf:
    """A stream whose other side takes nothing."""

    async def write(self, data: bytes) -> None:
        await asyncio.Event().wait()


def test_whoever_takes_no_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, without an end, in as many streams of one connection as it liked."""
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.05)
    bank = Consortium(tmp_path).bank()

    async def attempt() -> None:
        with pytest.raises(TimeoutError):
            await transport._write_soon(Deaf(), b"")
        async with asyncio.timeout(60):
            await bank.mesh.transport._refuse("stranger", Deaf(), "no part in this run", "stranger")
        await bank.mesh.close()

    asyncio.run(attempt())
    assert bank.mesh.transport.refused == 1
    assert ("grpc.max_concurrent_streams", STREAMS_EACH) in transport._OPTIONS
    assert STREAMS_EACH * transport.MAX_CONNECTIONS <= transport.MAX_STREAMS


@pytest.mark.slow
def test_a_stranger_that_takes_no_answers_keeps_nobody_out(tmp_path: Path) -> None:
    """One connection with 1,500 streams kept every member out for as long as it liked."""
    victims = Consortium(tmp_path)
    bank = Command(["serve", "--config", str(tmp_path / "bank" / "config.toml")])
    held: list[Unread] = []
    try:
        assert bank.has_said("listens at")
        held += [Unread(victims.port, tmp_path / "keys" / "stranger") for _ in range(3)]
        for each in held:
            each.open(1500)
        time.sleep(1)
        clinic = victims.join("clinic")
        said = clinic.communicate(timeout=240)[0]
        assert clinic.returncode == 0, said
    finally:
        bank.kill()
        for each in held:
            each.close()


# -- a scoring service --------------------------------------------------------------------------------------


class Answers:
    """In the place of a model's dispatcher: what each key stands for."""

    ready, draining, queued, used, served = True, False, 0, 0, None

    def __init__(self) -> None:
        self.kept: dict[str, tuple[str, ...]] = {}

    def away(self) -> list[str]:
        return []

    def knows(self, key: str) -> bool:
        return key in self.kept

    async def score(self, key: str, ids: list[str]) -> bytes:
        if self.kept.setdefault(key, tuple(ids)) != tuple(ids):
            raise AssertionError("a key of another request")
        return json.dumps(sorted(self.kept)).encode()


def client(name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=identities()["bank"].ca_pem.decode())
    load_own(context, identities()[name])
    return context


def serving(folder: Path, use: Callable[[ScoringApi], Awaitable[Any]], **options: Any) -> Any:
    """A service's interface for clients called lab and shop, with two models."""
    scoring = ScoringConfig(listen="127.0.0.1:0", clients=["lab", "shop"], **options)
    models: Any = {"old": Answers(), "new": Answers()}

    async def run() -> Any:
        async with ScoringApi(scoring, identities()["bank"], models, folder / "default.json") as api:
            return await asyncio.wait_for(use(api), 120)

    return asyncio.run(run())


async def ask(api: ScoringApi, name: str, body: dict[str, Any], key: str = "1") -> tuple[int, bytes]:
    path = "/v1/models/default" if set(body) == {"model"} else "/v1/score"
    return await http(api.port, "POST", path, json.dumps(body).encode(), key=key, ssl=client(name))


def test_a_key_is_of_the_client_that_used_it(tmp_path: Path) -> None:
    """Another client's key gave its answer to whoever guessed whom it had asked for, or took the key away."""

    async def use(api: ScoringApi) -> list[tuple[int, bytes]]:
        return [await ask(api, "lab", {"id": "a"}), await ask(api, "shop", {"id": "b"})]

    found = serving(tmp_path, use)
    assert [status for status, _ in found] == [200, 200]
    assert json.loads(found[1][1]) == ["lab 1", "shop 1"]


def test_only_operators_choose_the_model_of_all(tmp_path: Path) -> None:
    """Any client could send all others to another version."""

    async def use(api: ScoringApi) -> list[int]:
        asked = [await ask(api, name, {"model": "new"}) for name in ("lab", "mill", "shop", "clinic")]
        asked += [await ask(api, "mill", {"id": "a"})]
        return [status for status, _ in asked] + [api.default == "new"]

    assert serving(tmp_path, use, operators=["mill"]) == [403, 200, 403, 403, 200, True]
    with pytest.raises(InputError, match="operators are known by certificates"):
        ScoringApi(
            ScoringConfig(operators=["mill"]),
            identities()["bank"],
            {"old": Answers()},  # type: ignore[dict-item]
            tmp_path / "other.json",
        )


async def held(api: ScoringApi, count: int, name: str = "") -> list[asyncio.StreamWriter]:
    """Connections on which nothing is asked: in the middle of TLS, or with a certificate."""
    made = []
    for _ in range(count):
        tls = {"ssl": client(name), "server_hostname": "bank.securevfl"} if name else {}
        with contextlib.suppress(OSError):
            made.append((await asyncio.open_connection("127.0.0.1", api.port, **tls))[1])
    return made


@pytest.mark.parametrize("name", ["", "clinic"], ids=["no certificate", "no client's certificate"])
def test_who_is_no_client_takes_no_clients_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Handshakes were not counted at all, and any certificate of the consortium held a place for a minute."""
    monkeypatch.setattr("securevfl.network.api.CONNECTIONS", 4)
    monkeypatch.setattr(doors, "HANDSHAKES", 12)

    async def use(api: ScoringApi) -> tuple[int, int]:
        kept = await held(api, 10, name)
        await asyncio.sleep(0.2)
        status, _ = await ask(api, "lab", {"id": "a"})
        kept += await held(api, 10, name)
        await asyncio.sleep(0.2)
        open_ = len(api._tasks) - 1
        for writer in kept:
            writer.transport.abort()
        return status, open_

    status, open_ = serving(tmp_path, use)
    assert status == 200 and open_ <= 16


def test_where_there_are_no_more_files_a_service_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "NO_FILES", 0.01)
    accept, failures = asyncio.SelectorEventLoop.sock_accept, iter([24, 23])

    async def short(loop: Any, door: socket.socket) -> Any:
        if (number := next(failures, 0)) != 0:
            raise OSError(number, "Too many open files")
        return await accept(loop, door)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", short)

    async def use(api: ScoringApi) -> int:
        return (await ask(api, "lab", {"id": "a"}))[0]

    assert serving(tmp_path, use) == 200 and next(failures, 0) == 0
