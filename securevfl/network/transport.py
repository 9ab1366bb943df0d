"""gRPC streams with mutual TLS between organisations.

One bidirectional stream for each pair that can reach each other. Both sides show certificates of the
consortium's authority; the organisation is the one that the certificate names, whatever a message says.
Whoever dials keeps dialling: a lost network is bridged by the session, which sends again what was not
received.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from securevfl import __version__
from securevfl.errors import (
    CertificateError,
    InputError,
    MissingExtra,
    NetworkError,
    ProtocolError,
    WireError,
)
from securevfl.network.frames import MAX_FRAME, Frame, Kind
from securevfl.network.identity import Identity, organisation_of, server_name
from securevfl.network.session import Session
from securevfl.protocols.wire import Value, pack, unpack

try:
    import grpc
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise MissingExtra("training over a network needs: pip install 'securevfl[network]'") from error

SERVICE, METHOD = "securevfl.Network", "Stream"
HANDSHAKE_SECONDS = 10.0
SLOWEST_RETRY = 5.0
MAX_HELLO = 4096

Read = Callable[[], Awaitable[Any]]
Write = Callable[[bytes], Awaitable[None]]

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """Whom the transport tells what.

    Attributes:
        frame: A new frame of a peer arrived, in order.
        connected: A stream with a peer began; True if the peer is a new process.
        lost: The stream with a peer is gone.
        failed: A peer refuses this organisation for good, or breaks the rules.
    """

    frame: Callable[[str, Frame], None]
    connected: Callable[[str, bool], None]
    lost: Callable[[str], None]
    failed: Callable[[NetworkError], None]


class Transport:
    """One organisation's streams.

    Args:
        identity: Who it is.
        run: Name of the run; only peers of the same run may talk.
        incarnation: This process.
        sessions: Organisation -> session; whoever is not named here is refused.
        handlers: Whom to tell.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        run: str,
        incarnation: bytes,
        sessions: Mapping[str, Session],
        handlers: Handlers,
    ) -> None:
        self.identity, self.run, self.incarnation = identity, run, incarnation
        self.sessions, self.handlers = sessions, handlers
        self.refused = 0
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[str, asyncio.Task[Any]] = {}

    # -- both sides -----------------------------------------------------------------------------------------

    def _hello(self, kind: Kind, peer: str) -> bytes:
        session = self.sessions[peer]
        fields: dict[str, Value] = {
            "from": self.identity.name,
            "to": peer,
            "run": self.run,
            "software": __version__,
            "incarnation": self.incarnation,
            "known": session.incarnation,
            "received": session.received,
        }
        return Frame(kind=kind, payload=pack("hello", fields)).to_bytes()

    def _read_hello(self, frame: Frame, peer: str) -> tuple[bytes, int]:
        """The peer's incarnation, and how much of this process's frames it has; checks who and what."""
        if len(frame.payload) > MAX_HELLO:
            raise WireError(f"a greeting of {len(frame.payload)} bytes")
        kind, fields = unpack(frame.payload, max_bytes=MAX_HELLO)
        incarnation, received = fields.get("incarnation"), fields.get("received")
        if kind != "hello" or not isinstance(incarnation, bytes) or len(incarnation) != 16:
            raise WireError("a greeting without incarnation")
        if type(received) is not int or received < 0:
            raise WireError("a greeting that does not say what was received")
        if fields.get("from") != peer:
            raise WireError(f"{peer}'s certificate, but the greeting says {fields.get('from')!r}")
        if fields.get("to") != self.identity.name:
            raise WireError(f"a greeting for {fields.get('to')!r}; this is {self.identity.name!r}")
        if fields.get("run") != self.run:
            raise WireError(f"the run here is {self.run!r}, {peer} takes part in {fields.get('run')!r}")
        return incarnation, received if fields.get("known") == self.incarnation else 0

    async def _converse(self, peer: str, frame: Frame, read: Read, write: Write) -> None:
        """Runs one stream from the peer's greeting to its end."""
        session = self.sessions[peer]
        incarnation, received = self._read_hello(frame, peer)
        await self._replace(peer)
        restarted = session.attach(incarnation, received)
        self.handlers.connected(peer, restarted)
        writer = asyncio.create_task(session.pump(write))
        try:
            await self._read_all(session, read)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await writer
            if self._streams.get(peer) is asyncio.current_task():
                del self._streams[peer]
                session.detach()
                self.handlers.lost(peer)

    async def _replace(self, peer: str) -> None:
        """The newest stream of a peer is the one that counts."""
        old = self._streams.pop(peer, None)
        task = asyncio.current_task()
        if task is not None:
            self._streams[peer] = task
        if old is not None and old is not task:
            old.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await old

    async def _read_all(self, session: Session, read: Read) -> None:
        while True:
            data = await read()
            if data is None or data is grpc.aio.EOF:
                return
            frame = Frame.from_bytes(data)
            if session.accept(frame):
                self.handlers.frame(session.peer, frame)

    # -- listening ------------------------------------------------------------------------------------------

    async def listen(self, address: str) -> int:
        """Accepts streams at an address, `host:port`; returns the port.

        Raises:
            NetworkError: The address cannot be used.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=4 * len(self.sessions) + 4)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        credentials = grpc.ssl_server_credentials(
            [(self.identity.key_pem, self.identity.certificate_pem)],
            root_certificates=self.identity.ca_pem,
            require_client_auth=True,
        )
        try:
            port = server.add_secure_port(address, credentials)
            await server.start()
        except RuntimeError as error:
            raise NetworkError(
                f"cannot listen at {address}: is the port free and the host of this machine?"
            ) from error
        self._server = server
        return int(port)

    async def _serve(self, _: Any, context: Any) -> None:
        try:
            peer = self._peer_of(context)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                data = await context.read()
            if data is None or data is grpc.aio.EOF:
                return
            frame = Frame.from_bytes(data)
            if frame.kind is not Kind.HELLO:
                raise WireError(f"a stream that begins with {frame.kind.name}")
            self._read_hello(frame, peer)
            await context.write(self._hello(Kind.WELCOME, peer))
            await self._converse(peer, frame, context.read, context.write)
        except (ProtocolError, CertificateError, TimeoutError) as error:
            await self._refuse(context, str(error) or "no greeting came in time")

    def _peer_of(self, context: Any) -> str:
        """The organisation at the other end, from its certificate."""
        (pem,) = context.auth_context().get("x509_pem_cert", (b"",))
        peer = organisation_of(pem)
        if peer not in self.sessions:
            raise CertificateError(f"{peer} has a certificate, but no part in this run")
        return peer

    async def _refuse(self, context: Any, reason: str) -> None:
        self.refused += 1
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            await context.write(
                Frame(kind=Kind.REFUSE, payload=pack("refuse", {"reason": reason})).to_bytes()
            )

    # -- dialling -------------------------------------------------------------------------------------------

    def dial(self, peer: str, address: str) -> None:
        """Keeps a stream to a peer, from now on."""
        task = asyncio.create_task(self._keep(peer, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, peer: str, address: str) -> None:
        wait = 0.1
        while True:
            try:
                await asyncio.create_task(self._dial_once(peer, address))
                wait = 0.1
            except grpc.aio.BaseError:
                wait = min(2 * wait, SLOWEST_RETRY)
            except (ProtocolError, NetworkError, TimeoutError, asyncio.InvalidStateError) as error:
                if isinstance(error, NetworkError):
                    self.handlers.failed(error)
                wait = SLOWEST_RETRY
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
            await asyncio.sleep(wait)

    async def _dial_once(self, peer: str, address: str) -> None:
        credentials = grpc.ssl_channel_credentials(
            self.identity.ca_pem, self.identity.key_pem, self.identity.certificate_pem
        )
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", server_name(peer))]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await channel.channel_ready()
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await call.write(self._hello(Kind.HELLO, peer))
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                data = await call.read()
            frame = Frame.from_bytes(_some(data, peer))
            if frame.kind is Kind.REFUSE:
                raise NetworkError(f"{peer} refuses {self.identity.name}: {_reason(frame)}")
            if frame.kind is not Kind.WELCOME:
                raise WireError(f"{peer} answers with {frame.kind.name}")
            await self._converse(peer, frame, call.read, call.write)

    async def close(self) -> None:
        """Ends all streams."""
        for task in [*self._tasks, *self._streams.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.5)


def check_address(text: str) -> str:
    """An address of the form `host:port`.

    Raises:
        InputError: It is not.
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"{text!r} is no address; write host:port, such as bank.example:8750")
    return text


def _some(data: Any, peer: str) -> bytes:
    if not isinstance(data, bytes):
        raise WireError(f"{peer} ends the stream without a greeting")
    return data


def _reason(frame: Frame) -> str:
    reason = unpack(frame.payload, max_bytes=MAX_HELLO)[1].get("reason")
    return reason if isinstance(reason, str) else "no reason given"
