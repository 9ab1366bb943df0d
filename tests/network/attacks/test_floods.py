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
from pathlib import Path
from typing import Any

import pytest
from federation import Federation
from test_network_transport import Attacker, refusal, waiting
from victims import Consortium

from securevfl.errors import WireError
from securevfl.network import mesh, transport
from securevfl.network.frames import Frame, Kind
from securevfl.network.transport import raise_file_limit
from securevfl.protocols import wire
from securevfl.protocols.wire import pack, unpack
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl", unprotected=True)
CONNECTIONS = 1_500


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
            said = clinic.communicate(timeout=120)[0]
        finally:
            clinic.kill()
        assert clinic.returncode == 0, said
        assert bank.wait(timeout=60) == 0
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
                async with asyncio.timeout(60):
                    return await work(attacker, node)
            finally:
                await attacker.close()

    return asyncio.run(attempt())


def test_bytes_of_control_messages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "MAX_UNREAD", 3_000_000)

    async def work(attacker: Attacker, node: Any) -> str:
        kept, node.mesh.control = node.mesh.control, asyncio.Queue()  # a coordinator that is busy
        call = await attacker.greet()
        payload = pack("failed", {"reason": "x" * 900_000})
        for number in range(1, 5):
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=payload).to_bytes())
        reason = await refusal(call)
        assert node.mesh.control.qsize() == 3
        node.mesh.control = kept
        return reason

    assert "bytes of control messages wait" in play(tmp_path, work)


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
        node.mesh.control = asyncio.Queue()
        call = await attacker.greet()
        for number, size in enumerate((10, 50_000), start=1):
            payload = pack("failed", {"reason": "x" * size})
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=payload).to_bytes())
        while len(threads) < 2:
            await asyncio.sleep(0.01)

    play(tmp_path, work)
    small, large = (threads[size] for size in sorted(threads))
    assert small is threading.main_thread() and large is not small
