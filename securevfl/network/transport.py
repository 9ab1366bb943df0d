"""gRPC streams with mutual TLS between organisations.

One bidirectional stream for each pair that can reach each other. Both sides show certificates of the
consortium's authority; the organisation is the one that the certificate names, whatever a message says.
Whoever dials keeps dialling: a lost network is bridged by the session, which sends again what was not
received.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from securevfl.errors import (
    CertificateError,
    MissingExtra,
    NetworkError,
    ProtocolError,
    SecureVFLError,
    WireError,
)
from securevfl.network.frames import (
    MAX_FRAME,
    Frame,
    Greeting,
    Kind,
    OtherRun,
    OtherVersion,
    other_run,
    read_greeting,
    reason_of,
    refusal,
)
from securevfl.network.identity import (
    Identity,
    check_not_revoked,
    organisation_of,
    parse_certificate,
    server_name,
)
from securevfl.network.session import Session, Write

try:
    import resource
except ImportError:  # pragma: no cover - not on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

# gRPC would write lines of its own to standard error for every handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise MissingExtra("training over a network needs: pip install 'securevfl[network]'") from error

SERVICE, METHOD = "securevfl.Network", "Stream"
HANDSHAKE_SECONDS = 10.0
SLOWEST_RETRY = 5.0
MAX_STREAMS = 1024
"""All streams that come in; who takes part is not known yet where listening begins."""
MAX_CONNECTIONS = 256
"""Connections that may be open at the same time, those included that have not shown a certificate yet."""
STREAMS_EACH = 4
"""Streams that one connection may have; whoever belongs to a run needs one, two while a new one begins. All
connections together cannot have more than `MAX_STREAMS`, so that nobody takes others' places."""
FILES = 4096
"""How many files a process that listens should be able to open: connections, ledger, views, checkpoints."""
OFF_LOOP = 1 << 20
"""Frames above this many bytes are decoded in a thread, so that nobody else waits for them."""
GREETING = "greeting-bin"
"""Where the dialler's greeting travels: whoever has no part in a run is refused before a message is read."""

HINTS = {
    "Hostname Verification": "somebody else answers at its address: check address and name",
    "CERTIFICATE_VERIFY_FAILED": "the certificate there is not of this authority or not valid now: compare "
    "ca.pem and clocks",
}
"""What TLS says when a peer is not who it should be -> what to do."""

log = logging.getLogger("securevfl.network")

Read = Callable[[], Awaitable[Any]]

_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError, ConnectionError)
"""How a stream that breaks shows itself, depending on where it breaks."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it, a frozen peer is noticed after a minute or more
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", STREAMS_EACH),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
    ("grpc.max_connection_idle_ms", int(1000 * HANDSHAKE_SECONDS)),  # a certificate, and then no stream
    # Identity alone: a few compressed bytes must not unfold into gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


class Stranger(CertificateError):
    """A member of the consortium that has no part in this run."""

    notice = "stranger"


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """Whom the transport tells what.

    Attributes:
        frame: A new frame of a peer arrived, in order, with what it holds.
        decode: What a frame holds. It changes nothing, and may run in another thread.
        connected: A stream with a peer began; True if the peer is a new process.
        lost: The stream with a peer is gone; True if it was ended because the peer broke the rules.
        trouble: A peer cannot be reached, and why; once for each new reason.
        failed: A peer refuses this organisation, or a peer that was dialled breaks the rules, or something
            is wrong here; this process cannot go on.
        refused: A peer that dialled was refused, and why.
    """

    frame: Callable[[str, Frame, Any], None]
    decode: Callable[[str, Frame], Any]
    connected: Callable[[str, bool], None]
    lost: Callable[[str, bool], None]
    trouble: Callable[[str, str], None]
    failed: Callable[[SecureVFLError], None]
    refused: Callable[[str, str], None] = lambda peer, reason: None


class Transport:
    """One organisation's streams.

    Args:
        identity: Who it is.
        run: Name of the run; only peers of the same run may talk.
        incarnation: This process.
        sessions: Organisation -> session; whoever is not named here is refused.
        handlers: Whom to tell.

    `introduced` is False while this process has not been told yet who takes part; a stranger's stream then
    ends without an answer, so that it tries again instead of taking the refusal for final.
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
        self.introduced = True
        self.refused = 0
        self.trouble: dict[str, str] = {}
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[str, asyncio.Task[Any]] = {}

    # -- both sides -----------------------------------------------------------------------------------------

    def _hello(self, kind: Kind, peer: str) -> bytes:
        session = self.sessions[peer]
        greeting = Greeting(
            sender=self.identity.name,
            receiver=peer,
            run=self.run,
            incarnation=self.incarnation,
            known=session.incarnation,
            received=session.received,
        )
        return greeting.to_bytes(kind)

    def _read_hello(self, frame: Frame, peer: str) -> tuple[bytes, int]:
        """The peer's incarnation, and how much of this process's frames it has; checks who and what."""
        greeting = read_greeting(frame)
        if greeting.sender != peer:
            raise WireError(f"{peer}'s certificate, but the greeting says {greeting.sender!r}")
        if greeting.receiver != self.identity.name:
            raise WireError(f"a greeting for {greeting.receiver!r}; this is {self.identity.name!r}")
        if greeting.run != self.run:
            raise OtherRun(other_run(self.run, peer, greeting.run))
        received = greeting.received if greeting.known == self.incarnation else 0
        self.sessions[peer].check(greeting.incarnation, received)
        return greeting.incarnation, received

    async def _converse(self, peer: str, frame: Frame, read: Read, write: Write) -> None:
        """Runs one stream from the peer's greeting to its end."""
        session, broke = self.sessions[peer], False
        incarnation, received = self._read_hello(frame, peer)
        await self._replace(peer)
        try:
            restarted = session.attach(incarnation, received)
            self.handlers.connected(peer, restarted)
            await self._both_ways(session, read, write)
        except (ProtocolError, CertificateError):
            broke = True
            raise
        finally:
            if self._streams.get(peer) is asyncio.current_task():
                del self._streams[peer]
                session.detach()
                self.handlers.lost(peer, broke)

    async def _replace(self, peer: str) -> None:
        """The newest stream of a peer is the one that counts."""
        task = asyncio.current_task()
        old = self._streams.get(peer)
        if task is not None:
            self._streams[peer] = task
        if old is not None and old is not task:
            old.cancel()
            await asyncio.wait({old})  # unlike `await old`, this does not hide that we are replaced, too

    async def _both_ways(self, session: Session, read: Read, write: Write) -> None:
        """Reads and writes until one of the two ends."""
        reader = asyncio.create_task(self._read_all(session, read))
        writer = asyncio.create_task(session.pump(write))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                if task in done:
                    task.result()
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read_all(self, session: Session, read: Read) -> None:
        while True:
            data = await read()
            if data is None or data is grpc.aio.EOF:
                return
            frame = Frame.from_bytes(data)
            if not frame.number:
                self._check_unnumbered(session.peer, frame)
            if session.expects(frame):
                await self._hand_over(session.peer, frame)
                session.take(frame)

    def _check_unnumbered(self, peer: str, frame: Frame) -> None:
        """Of frames without a number, only acknowledgements belong in the middle of a stream."""
        if frame.kind is Kind.REFUSE:
            raise NetworkError(f"{peer} refuses {self.identity.name}: {reason_of(frame)}")
        if frame.kind is not Kind.ACK:
            raise WireError(f"{peer} greets in the middle of a stream")

    async def _hand_over(self, peer: str, frame: Frame) -> None:
        """A frame that cannot be processed is refused as a whole; it must not end this process."""
        decode, large = self.handlers.decode, len(frame.payload) > OFF_LOOP
        try:
            content = await asyncio.to_thread(decode, peer, frame) if large else decode(peer, frame)
            self.handlers.frame(peer, frame, content)
        except SecureVFLError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"a message of {peer} cannot be processed: {type(error).__name__}: {error}"
            ) from error

    # -- listening ------------------------------------------------------------------------------------------

    async def listen(self, address: str) -> int:
        """Accepts streams at an address, `host:port`; returns the port.

        Raises:
            NetworkError: The address cannot be used.
        """
        raise_file_limit()
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
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
                f"cannot listen at {address} ({_why_not(address)}): is the port free and the host of this "
                "machine?"
            ) from error
        self._server = server
        return int(port)

    async def _serve(self, _: Any, context: Any) -> None:
        peer = "somebody"
        try:
            (pem,) = context.auth_context().get("x509_pem_cert", (b"",))
            certificate = parse_certificate(pem)
            peer = organisation_of(certificate)
            check_not_revoked(certificate, self.identity.revoked)
            frame = self._greeting_of(peer, context)
            if frame is not None:
                await _write_soon(context, self._hello(Kind.WELCOME, peer))
                await self._converse(peer, frame, context.read, context.write)
        except (ProtocolError, CertificateError) as error:
            await self._refuse(peer, context, str(error), error.notice)
        except NetworkError as error:
            log.warning("a peer refuses", extra={"peer": peer, "reason": str(error)})
        except SecureVFLError as error:
            self.handlers.failed(error)
        except TimeoutError:
            log.warning("takes no answer", extra={"peer": peer})

    def _greeting_of(self, peer: str, context: Any) -> Frame | None:
        """The greeting that begins a stream; None if the stream must end without an answer."""
        if peer not in self.sessions:
            if self.introduced:
                raise Stranger(f"{peer} has a certificate, but no part in this run")
            return None
        found = [value for key, value in context.invocation_metadata() or () if key == GREETING]
        if len(found) != 1:
            raise OtherVersion(f"{peer} begins a stream with {len(found)} greetings: is its version older?")
        frame = Frame.from_bytes(found[0])
        if frame.kind is not Kind.HELLO:
            raise WireError(f"a stream that begins with {frame.kind.name}")
        self._read_hello(frame, peer)
        return frame

    async def _refuse(self, peer: str, context: Any, reason: str, notice: str) -> None:
        self.refused += 1
        log.warning("refused", extra={"peer": peer, "reason": reason})
        self.handlers.refused(peer, reason)
        with contextlib.suppress(*_BROKEN):
            await _write_soon(context, refusal(notice))

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
            except SecureVFLError as error:
                self.handlers.failed(error)
                wait = SLOWEST_RETRY
            except Exception as error:  # whatever gRPC raises: a lost network must not end the dialling
                self._note_trouble(peer, error)
                wait = min(2 * wait, SLOWEST_RETRY)
            except asyncio.CancelledError:
                pass  # of the stream alone, unless this task is asked to end
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # gRPC may say instead that a call has ended
                raise asyncio.CancelledError
            await asyncio.sleep(wait)

    def _note_trouble(self, peer: str, error: Exception) -> None:
        """Keeps why a peer cannot be reached; a log line for each new reason."""
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        reason = str(details or f"no answer ({type(error).__name__})")[:500]
        reason = reason.rpartition("last error: ")[2]
        reason += next((f"; {hint}" for part, hint in HINTS.items() if part in reason), "")
        if self.trouble.get(peer) != reason:
            self.trouble[peer] = reason
            self.handlers.trouble(peer, reason)
            log.warning("not reachable", extra={"peer": peer, "reason": reason})

    async def _dial_once(self, peer: str, address: str) -> None:
        credentials = grpc.ssl_channel_credentials(
            self.identity.ca_pem, self.identity.key_pem, self.identity.certificate_pem
        )
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", server_name(peer))]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            greeting = ((GREETING, self._hello(Kind.HELLO, peer)),)
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=greeting)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                data = await call.read()
            try:
                frame = self._welcome(data, peer)
            except WireError as error:
                raise NetworkError(f"{self.identity.name} and {peer} do not understand: {error}") from error
            self.trouble.pop(peer, None)
            try:
                await self._converse(peer, frame, call.read, call.write)
            except ProtocolError as error:
                raise NetworkError(f"{peer} breaks the rules: {error}") from error

    def _welcome(self, data: Any, peer: str) -> Frame:
        """The answer to a greeting.

        Raises:
            NetworkError: The peer refuses.
            WireError: The answer is not understood.
        """
        if not isinstance(data, bytes):
            raise ConnectionError(f"{peer} ends the stream without a greeting")
        frame = Frame.from_bytes(data)
        if frame.kind is Kind.REFUSE:
            raise NetworkError(f"{peer} refuses {self.identity.name}: {reason_of(frame)}")
        if frame.kind is not Kind.WELCOME:
            raise WireError(f"{peer} answers with {frame.kind.name}")
        self._read_hello(frame, peer)
        return frame

    async def close(self) -> None:
        """Ends all streams."""
        for task in [*self._tasks, *self._streams.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.5)


async def _write_soon(context: Any, frame: bytes) -> None:
    """The first words of an answer; whoever asks and takes no answer would keep its stream for ever.

    Raises:
        TimeoutError: They were not taken.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        await context.write(frame)


def raise_file_limit() -> None:
    """Lets this process open as many files as it may; says so in the log where that is too few."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= allowed < FILES:
        log.warning("few files", extra={"allowed": allowed, "wanted": FILES})


def _why_not(address: str) -> str:
    """What the operating system has against listening at an address, which gRPC keeps to itself."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError as error:
        return str(error.strerror or error)
    return "unknown reason"
