"""Floods: whoever sends nothing, too much or something huge costs itself, not the others."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federation import Federation
from test_network_transport import Attacker, refusal, waiting
from victims import Consortium

from securevfl.algorithms.sealed.exchange import AHEAD, SealedExchange
from securevfl.errors import ProtocolError, WireError
from securevfl.network import mesh, transport
from securevfl.network.frames import Frame, Kind
from securevfl.network.identity import load_identity
from securevfl.network.transport import raise_file_limit
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Link
from securevfl.protocols import wire
from securevfl.protocols.wire import pack, unpack
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=1, unprotected=True)
CONNECTIONS = 1_500


@pytest.mark.slow
def test_a_stranger_cannot_make_the_coordinator_read_anything(tmp_path: Path) -> None:
    """With a certificate and no part in the run: a first message of 255 MiB took 0.8 GB there, each time."""
    victims = Consortium(tmp_path)
    config = tmp_path / "bank" / "config.toml"
    config.write_text(config.read_text().replace("patience = 20.0", "patience = 90.0"))
    command = "from securevfl.cli import main; main()"
    bank = subprocess.Popen([sys.executable, "-c", command, "serve", "--config", str(config)])

    def peak() -> int:
        status = Path(f"/proc/{bank.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    async def flood() -> None:
        identity = load_identity(tmp_path / "keys" / "stranger")
        given = SimpleNamespace(server=SimpleNamespace(listen=f"127.0.0.1:{victims.port}"))
        for _ in range(3):
            attacker = Attacker(given, identity)  # type: ignore[arg-type]
            call = attacker.open(attacker.hello(sender="stranger"))
            with contextlib.suppress(*transport._BROKEN):
                await call.write(bytes(255 << 20))
            await attacker.close()

    try:
        wait_for(victims.port)
        before = peak()
        asyncio.run(flood())
        assert bank.poll() is None and peak() - before < 64
    finally:
        bank.kill()
        bank.wait()


def wait_for(port: int) -> None:
    """Until somebody listens there."""
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)


@pytest.mark.slow
def test_idle_connections_of_an_outsider_do_not_end_the_coordinator(tmp_path: Path) -> None:
    """Attack 9: 1,500 connections without a certificate, at a process that may open 1,024 files at first."""
    victims = Consortium(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    config = tmp_path / "bank" / "config.toml"
    code = (
        "import resource, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard));"
        f"sys.argv = ['securevfl', 'serve', '--config', {str(config)!r}];"
        "from securevfl.cli import main; main()"
    )
    bank = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    idle: list[socket.socket] = []
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", victims.port)))
                break
            time.sleep(0.2)
        while len(idle) < CONNECTIONS:
            idle.append(socket.create_connection(("127.0.0.1", victims.port), timeout=30))
        clinic = victims.join("clinic")
        try:
            said = clinic.communicate(timeout=300)[0]
        finally:
            clinic.kill()
        assert clinic.returncode == 0, said
        assert bank.wait(timeout=300) == 0
    finally:
        bank.kill()
        print(bank.communicate()[0])
        for each in idle:
            each.close()


def test_a_process_that_listens_may_open_as_many_files_as_it_is_let() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_list_of_texts_does_not_unfold_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack 10: an empty text takes 4 bytes on the wire and fifteen times that as a list of texts."""
    monkeypatch.setattr(wire, "MAX_TEXTS", 1000)
    assert len(unpack(pack("x", {"f": [""] * 1000}))[1]["f"]) == 1000  # type: ignore[arg-type]
    raw = bytearray(pack("x", {"f": [""] * 1000}))
    raw[8:16] = struct.pack("<Q", len(raw) + 4 * 1000)  # the whole message's length
    place = raw.index(b"l") + 1
    raw[place : place + 8] = struct.pack("<Q", 8 * 1000)
    with pytest.raises(WireError, match="more than 1,000 texts"):
        unpack(bytes(raw) + bytes(4 * 1000))


def play(tmp_path: Path, work: Any) -> Any:
    async def attempt() -> Any:
        federation = Federation(tmp_path, PLAN)
        async with waiting(federation) as node:
            attacker = Attacker(federation, federation.members["clinic"].identity)
            try:
                async with asyncio.timeout(240):
                    return await work(attacker, node)
            finally:
                await attacker.close()

    return asyncio.run(attempt())


def test_bytes_of_control_messages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "MAX_UNREAD", 3_000_000)

    async def work(attacker: Attacker, node: Any) -> str:
        kept, node.mesh.control = node.mesh.control, mesh.Controls()  # a coordinator that is busy
        call = await attacker.greet()
        payload = pack("failed", {"reason": "x" * 900_000})
        for number in range(1, 5):
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=payload).to_bytes())
        reason = await refusal(call)
        assert node.mesh.control.qsize() == 3
        node.mesh.control = kept
        return reason

    assert "clinic floods: 2,7" in play(tmp_path, work)


def test_a_large_frame_is_decoded_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "OFF_LOOP", 10_000)
    threads: dict[int, threading.Thread] = {}

    async def work(attacker: Attacker, node: Any) -> None:
        decode = node.mesh.transport.handlers.decode

        def watched(peer: str, frame: Frame) -> Any:
            threads[len(frame.payload)] = threading.current_thread()
            return decode(peer, frame)

        object.__setattr__(node.mesh.transport.handlers, "decode", watched)
        node.mesh.control = mesh.Controls()
        call = await attacker.greet()
        for number, size in enumerate((10, 50_000), start=1):
            payload = pack("failed", {"reason": "x" * size})
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=payload).to_bytes())
        while len(threads) < 2:
            await asyncio.sleep(0.01)

    play(tmp_path, work)
    small, large = (threads[size] for size in sorted(threads))
    assert small is threading.main_thread() and large is not small


# -- one floods, the others are served ----------------------------------------------------------------------


def early(sender: str, size: int) -> bytes:
    """A message for a phase that never begins."""
    packet = Packet(kind="embedding", sender=sender, receiver="bank", fields={"v": bytes(size)})
    return b"not a phase yet!" + packet.to_bytes()


async def after_a_flood(folder: Path, filled: int) -> tuple[list[str], dict[str, Any], Counter[str]]:
    """Clinic fills its bound at the bank before it joins, and breaks no rule; then shop is early."""
    federation, full, refused = Federation(folder, PLAN), asyncio.Event(), list[str]()
    bank, clinic, shop = (
        federation.coordinator(),
        *(federation.member(name) for name in ("clinic", "shop")),
    )
    bank.mesh.on_refused = lambda peer, reason: refused.append(reason)
    arrived, frame = Counter[str](), bank.mesh.transport.handlers.frame

    def counted(peer: str, *given: Any) -> None:
        frame(peer, *given)
        arrived.update(peer for *_, message in bank.mesh._early[-1:] if message.sender == peer)

    object.__setattr__(bank.mesh.transport.handlers, "frame", counted)

    def joins(member: Any, before: Any) -> None:
        join = member._join
        member._join = lambda: tasks.append(asyncio.create_task(before(member, join)))

    async def floods(member: Any, join: Any) -> None:
        session = member.mesh.sessions["bank"]
        session.post(Kind.DATA, early("clinic", filled))
        while session.waiting:
            await asyncio.sleep(0.01)
        full.set()
        join()

    async def is_early(member: Any, join: Any) -> None:
        await full.wait()
        member.mesh.sessions["bank"].post(Kind.DATA, early("shop", 5_000))
        join()

    tasks: list[asyncio.Task[None]] = []
    joins(clinic, floods)
    joins(shop, is_early)
    async with asyncio.timeout(240):
        result, *_ = await asyncio.gather(bank.run(), clinic.run(), shop.run())
    return refused, result, arrived


def test_a_flood_costs_nobody_else_an_early_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "MAX_UNREAD", 300_000)
    refused, result, arrived = asyncio.run(after_a_flood(tmp_path, 150_000))
    assert refused == [] and result["epochs"] == PLAN.epochs
    assert arrived["clinic"] and arrived["shop"]


def test_a_flood_of_control_messages_costs_nobody_else_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "MAX_UNREAD", 3 * mesh.CONTROL_COST)

    async def work(attacker: Attacker, node: Any) -> None:
        kept, node.mesh.control = node.mesh.control, mesh.Controls()
        call = await attacker.greet()
        payload = pack("finished", {})
        for number in range(1, 4):
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=payload).to_bytes())
        assert "clinic floods" in await refusal(call)
        node.mesh._control("shop", "finished", {}, len(payload))
        heard = [node.mesh.control.get_nowait()[0] for _ in range(3)]
        assert heard == ["clinic", "clinic", "shop"] and not any(node.mesh.control.bytes.values())
        node.mesh.control = kept

    play(tmp_path, work)


def sends_ahead(member: Any, copies: int) -> None:
    """What it sends in its first sum, it sends for rounds that nobody has announced, too."""
    post, numbers = member.mesh.post, iter(range(10_000, 10_000 + copies))

    def ahead(message: Packet) -> None:
        post(message)
        if message.kind == "tree.subtotal":
            for number in numbers:
                post(replace(message, fields={**message.fields, "round": number}))

    member.mesh.post = ahead


def test_messages_for_rounds_that_nobody_announced_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role takes them from its link, to keep them for later; they wait all the same."""
    plan = Plan(algorithm="vafl-sync", protocol="two-tree", epochs=1, batch=16, unprotected=True)
    federation = Federation(tmp_path, plan, patience=1.0, absence=0.5)
    nodes = [federation.coordinator(), federation.member("clinic"), federation.member("shop")]
    sends_ahead(nodes[1], 500)
    refused: list[str] = []
    nodes[0].mesh.on_refused = lambda peer, reason: refused.append(reason)
    monkeypatch.setattr(mesh, "MAX_UNREAD", 100_000)

    async def attempt() -> None:
        async with asyncio.timeout(240):
            await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    asyncio.run(attempt())
    assert refused and "clinic floods" in refused[0]


def test_a_member_far_ahead_costs_another_nothing() -> None:
    """Sealed training without a dealer: what comes before its turn waits, so many messages of each member."""
    names = ("p0", "p1", "p2")
    settings: Any = SimpleNamespace(dealing="third", members=names)
    link = Link("p0", lambda packet: None, {name: name for name in names})
    exchange = SealedExchange(link, settings)

    def ready(sender: str) -> Packet:
        return Packet(kind="sealed-begin", sender=sender, receiver="p0", weight=100)

    async def hear(packets: list[Packet]) -> Packet:
        link._inbox.extend(packets)
        for packet in packets:
            link.hold(packet)
        return await exchange.hear("sealed-hello")

    hello = Packet(kind="sealed-hello", sender="p2", receiver="p0")
    assert asyncio.run(hear([ready("p1")] * AHEAD + [ready("p2"), hello])) is hello
    assert link.backlog == {"p1": 100 * AHEAD, "p2": 100}
    with pytest.raises(ProtocolError, match="p1 sends 'sealed-begin' long before its turn"):
        asyncio.run(hear([ready("p1")]))
