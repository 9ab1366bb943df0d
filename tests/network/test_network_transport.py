"""Attackers at the coordinator's door: each is refused clearly, and nothing changes for the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from federation import Federation, identities

from securevfl.errors import NOTICES, NetworkError
from securevfl.network import authority, mesh, transport
from securevfl.network import identity as identity_module
from securevfl.network.authority import create_authority, issue
from securevfl.network.coordinator import Coordinator
from securevfl.network.frames import Frame, Greeting, Kind, reason_of
from securevfl.network.identity import Identity, load_identity, server_name
from securevfl.network.session import Session, new_incarnation
from securevfl.protocols.wire import pack
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=1, batch=16, unprotected=True)
METHOD = f"/{transport.SERVICE}/{transport.METHOD}"


class Attacker:
    """A client of its own making, with somebody's certificate."""

    def __init__(self, federation: Federation, identity: Identity, **options: Any) -> None:
        credentials = grpc.ssl_channel_credentials(
            identity.ca_pem, identity.key_pem, identity.certificate_pem
        )
        override = ("grpc.ssl_target_name_override", server_name("bank"))
        self.channel = grpc.aio.secure_channel(federation.server.listen, credentials, [override])
        self.options, self.me = options, new_incarnation()

    def open(self, *greetings: bytes) -> Any:
        metadata = tuple((transport.GREETING, each) for each in greetings)
        return self.channel.stream_stream(METHOD)(metadata=metadata, **self.options)

    def hello(self, **changes: Any) -> bytes:
        fields = {
            "sender": "clinic",
            "receiver": "bank",
            "run": "test",
            "incarnation": self.me,
            "known": b"",
            "received": 0,
        }
        return Greeting(**{**fields, **changes}).to_bytes(Kind.HELLO)

    async def greet(self) -> Any:
        """A stream that was welcomed."""
        call = self.open(self.hello())
        assert Frame.from_bytes(await call.read()).kind is Kind.WELCOME
        return call

    async def close(self) -> None:
        await self.channel.close()


REASONS: list[str] = []
"""Why the coordinator has refused, as it says at home."""


async def refusal(call: Any) -> str:
    """Why the coordinator refuses; what it says before is skipped."""
    async with asyncio.timeout(240):
        while True:
            data = await call.read()
            assert data is not grpc.aio.EOF, "the stream ended without a refusal"
            frame = Frame.from_bytes(data)
            if frame.kind is Kind.REFUSE:
                assert reason_of(frame) in NOTICES.values()  # others are told no more than that
                return REASONS[-1]


async def status_after(call: Any, raw: bytes) -> grpc.StatusCode:
    """How a stream ends after a write."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(raw)
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


@contextlib.asynccontextmanager
async def waiting(federation: Federation) -> AsyncIterator[Coordinator]:
    """A coordinator that waits for the others."""
    listening = asyncio.Event()
    node = federation.coordinator(say=lambda text: listening.set())
    node.mesh.on_refused = lambda peer, reason: REASONS.append(reason)
    task = asyncio.create_task(node.run())
    await asyncio.wait({asyncio.create_task(listening.wait()), task}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield node
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def state(node: Coordinator) -> dict[str, Any]:
    """All that a peer could change."""
    sessions = {name: (each.received, each.waiting) for name, each in node.mesh.sessions.items()}
    return {
        "sessions": sessions,
        "joined": dict(node.joined),
        "part": node.part,
        "control": node.mesh.control.qsize(),
        "early": len(node.mesh._early),
        "introductions": dict(node.mesh.introductions),
    }


def attack(
    tmp_path: Path,
    work: Callable[[Attacker, Coordinator], Awaitable[Any]],
    identity: Identity | None = None,
    bank: Identity | None = None,
    **options: Any,
) -> Any:
    """Runs an attack on a waiting coordinator; its state must be what it was."""

    async def play() -> Any:
        federation = Federation(tmp_path, PLAN)
        federation.server = replace(federation.server, identity=bank or identities()["bank"])
        async with waiting(federation) as node:
            before = state(node)
            attacker = Attacker(federation, identity or identities()["clinic"], **options)
            try:
                result = await work(attacker, node)
            finally:
                await attacker.close()
            assert state(node) == before
            return result

    return asyncio.run(play())


# -- certificates -------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Identity:
    """A clinic of another consortium that knows ours."""
    issue(create_authority(tmp_path / "other", name="other"), ["clinic"], out=tmp_path / "keys")
    return replace(load_identity(tmp_path / "keys" / "clinic"), ca_pem=identities()["clinic"].ca_pem)


async def try_to_greet(attacker: Attacker, node: Coordinator) -> grpc.StatusCode:
    call = attacker.open(attacker.hello())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert node.mesh.transport.refused == 0  # TLS has refused before anybody of us was asked
    return caught.value.code()


def test_a_certificate_of_another_authority_is_refused(tmp_path, foreign):
    assert attack(tmp_path / "run", try_to_greet, foreign) is grpc.StatusCode.UNAVAILABLE


def test_whoever_does_not_know_the_coordinators_authority_does_not_talk_to_it(tmp_path, foreign):
    own = replace(identities()["clinic"], ca_pem=foreign.certificate_pem)
    assert attack(tmp_path / "run", try_to_greet, own) is grpc.StatusCode.UNAVAILABLE


def test_a_client_without_certificate_is_refused(tmp_path):
    async def work(attacker: Attacker, node: Coordinator) -> None:
        await attacker.channel.close()
        credentials = grpc.ssl_channel_credentials(identities()["clinic"].ca_pem)
        override = ("grpc.ssl_target_name_override", server_name("bank"))
        attacker.channel = grpc.aio.secure_channel(node.config.listen, credentials, [override])
        assert await try_to_greet(attacker, node) is grpc.StatusCode.UNAVAILABLE

    attack(tmp_path, work)


@pytest.mark.parametrize("days", [-30, 1], ids=["expired", "not yet valid"])
def test_a_certificate_out_of_its_time_is_refused(tmp_path, monkeypatch, days):
    """By TLS, at the door: of an organisation whose time is up, or whose authority's clock is a day ahead."""
    then = identity_module.now() - timedelta(days=30)

    def travel(time: datetime) -> None:
        past.setattr(authority, "now", lambda: time)
        past.setattr(identity_module, "now", lambda: time)

    with monkeypatch.context() as past:
        travel(then)
        root = create_authority(tmp_path / "ca", name="old")
        issue(root, ["bank"], out=tmp_path, days=200)
        bank = load_identity(tmp_path / "bank")
        travel(then + timedelta(days=30 + days))
        issue(root, ["clinic"], out=tmp_path, days=1)
        clinic = load_identity(tmp_path / "clinic")
    assert attack(tmp_path / "run", try_to_greet, clinic, bank) is grpc.StatusCode.UNAVAILABLE


def test_an_organisation_without_part_in_the_run_is_refused(tmp_path):
    async def work(attacker: Attacker, node: Coordinator) -> str:
        return await refusal(attacker.open(attacker.hello(sender="stranger")))

    reason = attack(tmp_path, work, identities()["stranger"])
    assert reason == "stranger has a certificate, but no part in this run"


# -- the first frame ----------------------------------------------------------------------------------------


def hello_with(**fields: Any) -> bytes:
    whole = {
        "sender": "clinic",
        "receiver": "bank",
        "run": "test",
        "incarnation": bytes(16),
        "known": b"",
        "received": 0,
    }
    return Frame(kind=Kind.HELLO, payload=pack("hello", {**whole, **fields})).to_bytes()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (hello_with(sender="shop"), "clinic's certificate, but the greeting says 'shop'"),
        (hello_with(receiver="shop"), "a greeting for 'shop'; this is 'bank'"),
        (hello_with(run="another"), "the run here is 'test', clinic takes part in 'another'"),
        (hello_with(received=-1), "does not say what was received"),
        (hello_with(received=True), "does not say what was received"),
        (hello_with(incarnation=b"short"), "a greeting without incarnation"),
        (hello_with(sender=np.zeros(3)), "who talks to whom"),
        (hello_with(known=["x"]), "a greeting without incarnation"),
        (hello_with(run="x" * 5000), "exceeds the limit of 4096"),
        (b"garbage", "a frame of 7 bytes"),
        (b"", "a frame of 0 bytes"),
        (b"GET / HTTP/1.1\r\nHost: bank.example\r\n\r\n", "not a securevfl frame"),
        (b"SVFN\x07" + bytes(60), "speaks version 7 of the network protocol, this side 3: upgrade the older"),
        (Frame(kind=Kind.DATA, number=1).to_bytes(), "a stream that begins with DATA"),
        (Frame(kind=Kind.HELLO, payload=b"SVFL").to_bytes(), "shorter than its header"),
        (Frame(kind=Kind.HELLO, payload=pack("hallo", {})).to_bytes(), "a greeting that is none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_greeting_that_makes_no_sense_is_refused(tmp_path, raw, reason):
    async def work(attacker: Attacker, node: Coordinator) -> str:
        found = await refusal(attacker.open(raw))
        assert node.mesh.transport.refused == 1
        return found

    found = attack(tmp_path, work)
    assert reason in found
    assert len(found) <= 500


def test_nothing_is_read_of_a_stranger():
    """One message may have 256 MiB, and gRPC takes three times as much for it."""
    written: list[bytes] = []

    class Context:
        def auth_context(self) -> dict[str, Any]:
            return {"x509_pem_cert": (identities()["stranger"].certificate_pem,)}

        async def read(self) -> bytes:
            raise AssertionError("it is read")

        async def write(self, data: bytes) -> None:
            written.append(data)

    node = Federation(Path("nowhere"), PLAN).coordinator()
    asyncio.run(node.mesh.transport._serve(None, Context()))
    assert Frame.from_bytes(written[0]).kind is Kind.REFUSE and node.mesh.transport.refused == 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_stream_begins_with_one_greeting(tmp_path, count):
    async def work(attacker: Attacker, node: Coordinator) -> str:
        return await refusal(attacker.open(*[attacker.hello()] * count))

    assert f"clinic begins a stream with {count} greetings" in attack(tmp_path, work)


def test_one_that_listens_before_it_knows_the_others_takes_them_all(tmp_path):
    names = [f"party-{number}" for number in range(12)]
    issue(create_authority(tmp_path / "ca", name="large"), ["yard", *names], out=tmp_path)
    known = {name: load_identity(tmp_path / name) for name in ("yard", *names)}

    def nobody(*anything: Any) -> None:
        pass

    def transport_of(name: str, *peers: str) -> transport.Transport:
        return transport.Transport(
            known[name],
            run="test",
            incarnation=new_incarnation(),
            sessions={peer: Session(peer) for peer in peers},
            handlers=transport.Handlers(
                frame=nobody, decode=nobody, connected=nobody, lost=nobody, trouble=nobody, failed=nobody
            ),
        )

    async def play() -> None:
        yard, others = transport_of("yard"), [transport_of(name, "yard") for name in names]
        port = await yard.listen("127.0.0.1:0")
        yard.sessions.update({name: Session(name) for name in names})
        try:
            for other in others:
                other.dial("yard", f"127.0.0.1:{port}")
            async with asyncio.timeout(240):
                while not all(session.connected for session in yard.sessions.values()):
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.gather(*(each.close() for each in (*others, yard)))

    asyncio.run(play())


def test_who_closes_ends_even_if_grpc_says_something_else_than_cancelled():
    """A stream that is cancelled may end with any of gRPC's errors; who dials must not begin anew then."""

    def nobody(*anything: Any) -> None:
        pass

    async def play() -> None:
        handlers = transport.Handlers(
            frame=nobody, decode=nobody, connected=nobody, lost=nobody, trouble=nobody, failed=nobody
        )
        dialling = transport.Transport(
            identities()["clinic"],
            run="test",
            incarnation=new_incarnation(),
            sessions={"bank": Session("bank")},
            handlers=handlers,
        )

        async def cancelled(peer: str, address: str) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise asyncio.InvalidStateError("the call is over") from None

        dialling._dial_once = cancelled
        dialling.dial("bank", "127.0.0.1:1")
        await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await dialling.close()

    asyncio.run(play())


# -- later frames -------------------------------------------------------------------------------------------


def control(kind: str, **fields: Any) -> bytes:
    return Frame(kind=Kind.CONTROL, number=1, payload=pack(kind, fields)).to_bytes()


def relay(**fields: Any) -> bytes:
    whole = {"from": "clinic", "to": "shop", "by": bytes(16), "for": bytes(16), "via": b"", "sealed": b"x"}
    return Frame(kind=Kind.RELAY, number=1, payload=pack("relay", {**whole, **fields})).to_bytes()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"garbage", "a frame of 7 bytes"),
        (bytes(100), "not a securevfl frame"),
        (Frame(kind=Kind.HELLO).to_bytes(), "greets in the middle"),
        (Frame(kind=Kind.WELCOME).to_bytes(), "greets in the middle"),
        (Frame(kind=Kind.DATA, number=2).to_bytes(), "sends frame 2 after frame 0"),
        (Frame(kind=Kind.ACK, acknowledged=1).to_bytes(), "acknowledges frame 1; 0 were sent"),
        (Frame(kind=Kind.DATA, number=1).to_bytes(), "without a phase"),
        (Frame(kind=Kind.DATA, number=1, payload=bytes(40)).to_bytes(), "not a securevfl message"),
        (Frame(kind=Kind.CONTROL, number=1).to_bytes(), "shorter than its header"),
        (control("restarted"), "'restarted', which this version does not know"),
        (control("away"), "'away', which this version does not know"),
        (control("begin", phase=bytes(16)), "'begin', which this version does not know"),
        (control("done"), "expected ['phase']"),
        (control("done", phase=7), "expected bytes"),
        (control("done", phase=b"short"), "has 5 bytes, expected 16"),
        (control("done", phase=np.zeros(2)), "of type ndarray"),
        (control("aborted", phase=bytes(16), checkpoints=["x"]), "not a list of epochs"),
        (control("failed", reason="x" * 2_000_000), "of 2,000,0"),
        (relay(**{"from": "shop"}), "relays from 'shop'"),
        (relay(to="clinic"), "relays from 'clinic' to 'clinic'"),
        (relay(to="stranger"), "relays from 'clinic' to 'stranger'"),
        (relay(to=np.zeros(2)), "does not say what it relays"),
        (relay(sealed=[1, 2]), "relays nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_makes_no_sense_is_refused(tmp_path, raw, reason):
    async def work(attacker: Attacker, node: Coordinator) -> str:
        call = await attacker.greet()
        await call.write(raw)
        return await refusal(call)

    assert reason in attack(tmp_path, work)


def test_a_refused_stream_leaves_the_session_where_it_was(tmp_path):
    async def work(attacker: Attacker, node: Coordinator) -> None:
        for _ in range(3):
            call = await attacker.greet()
            await call.write(control("done"))
            assert "expected ['phase']" in await refusal(call)
        session = node.mesh.sessions["clinic"]
        assert session.received == 0
        assert not session.connected
        assert "clinic" in node.mesh.lost_since

    attack(tmp_path, work)


def test_an_oversized_frame_ends_the_stream(tmp_path, monkeypatch):
    kept = [option for option in transport._OPTIONS if "receive" not in option[0]]
    monkeypatch.setattr(transport, "_OPTIONS", [*kept, ("grpc.max_receive_message_length", 1 << 20)])

    async def work(attacker: Attacker, node: Coordinator) -> grpc.StatusCode:
        call = await attacker.greet()
        return await status_after(call, Frame(kind=Kind.DATA, number=1, payload=bytes(2 << 20)).to_bytes())

    assert attack(tmp_path, work) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_compressed_frames_are_refused(tmp_path):
    """A megabyte of zeros fits a kilobyte; gRPC counts a message's size before it unfolds it."""

    async def work(attacker: Attacker, node: Coordinator) -> None:
        frame = Frame(kind=Kind.DATA, number=1, payload=bytes(1 << 20)).to_bytes()
        status = await status_after(attacker.open(attacker.hello()), frame)
        # Which one depends on whether the reset or the status of the server's gRPC arrives first.
        assert status in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert node.mesh.transport.refused == 0  # it was refused before anybody of us saw it
        assert not node.mesh.sessions["clinic"].connected

    attack(tmp_path, work, compression=grpc.Compression.Gzip)


def test_a_second_stream_replaces_the_first(tmp_path):
    async def work(attacker: Attacker, node: Coordinator) -> None:
        first = await attacker.greet()
        second = await attacker.greet()
        assert node.mesh.sessions["clinic"].connected
        await second.write(b"garbage")
        assert "a frame of 7 bytes" in await refusal(second)
        first.cancel()

    attack(tmp_path, work)


def test_an_old_process_cannot_take_its_place_back(tmp_path):
    async def work(attacker: Attacker, node: Coordinator) -> str:
        old = attacker.me
        await attacker.greet()
        attacker.me = new_incarnation()
        await attacker.greet()
        reason = await refusal(attacker.open(attacker.hello(incarnation=old)))
        assert node.mesh.sessions["clinic"].connected
        return reason

    async def restarted(attacker: Attacker, node: Coordinator) -> str:
        node.mesh.on_restart = lambda peer: None
        return await work(attacker, node)

    assert attack(tmp_path, restarted) == "a later process of clinic has taken the place of this one"


def test_a_flood_of_control_messages_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "MAX_UNREAD", 50 * (mesh.CONTROL_COST + len(pack("finished", {}))))

    async def work(attacker: Attacker, node: Coordinator) -> str:
        item, stopped = node.mesh.control, mesh.Controls()
        node.mesh.control = stopped  # a coordinator that is busy
        call = await attacker.greet()
        for number in range(1, 52):
            await call.write(Frame(kind=Kind.CONTROL, number=number, payload=pack("finished", {})).to_bytes())
        reason = await refusal(call)
        assert stopped.qsize() == 50
        node.mesh.control = item
        node.mesh.sessions["clinic"].received = 0
        return reason

    assert attack(tmp_path, work).startswith("clinic floods: ")


# -- everybody else -----------------------------------------------------------------------------------------


def test_a_party_that_is_refused_says_why(tmp_path):
    federation = Federation(tmp_path, PLAN)
    federation.members["clinic"] = replace(federation.members["clinic"], run="another")

    async def play() -> None:
        async with waiting(federation):
            await federation.member("clinic").run()

    with pytest.raises(NetworkError, match="bank refuses clinic: the other side takes part in another run"):
        asyncio.run(play())


def test_a_party_of_another_version_says_so(tmp_path):
    federation = Federation(tmp_path, PLAN)

    async def play() -> None:
        async with waiting(federation):
            member = federation.member("clinic")
            hello = member.mesh.transport._hello
            member.mesh.transport._hello = lambda kind, peer: b"SVFN\x07" + hello(kind, peer)[5:]
            await member.run()

    with pytest.raises(NetworkError, match="the two sides speak different versions"):
        asyncio.run(play())


def test_an_honest_run_finishes_among_attackers(tmp_path):
    federation = Federation(tmp_path, PLAN)

    async def harass(identity: Identity, name: str) -> None:
        attacker = Attacker(federation, identity)
        try:
            while not over.is_set():  # gRPC may take a task's cancellation for that of its call
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    for raw in (b"garbage", attacker.hello(sender=name), attacker.hello(run="x")):
                        await attacker.open(raw).read()
                await asyncio.sleep(0.01)
        finally:
            await attacker.close()

    over = asyncio.Event()

    async def play() -> dict[str, Any]:
        attacks = [asyncio.create_task(harass(identities()["stranger"], "clinic")) for _ in range(2)]
        try:
            return await federation.run()
        finally:
            over.set()
            for task in attacks:
                task.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)

    results = asyncio.run(play())
    assert results["bank"]["epochs"] == 1
