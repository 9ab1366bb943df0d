"""A few lines of HTTP/1.1, strict: what is not understood wholly is refused, and its connection ends.

No library of this kind is among the dependencies, and what is served is small: a line, headers without
folding, a body of a stated length. There are no chunks, no upgrades, no compression; two lengths, or a
length and an encoding, are refused, so that no proxy can read a request otherwise. Connections are few, a
slow client is cut off, and one that keeps its connection may use it again.

Without TLS it listens on loopback alone where it takes requests that change anything; see `serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from securevfl.errors import InputError

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 16
TIMEOUT = 5.0
IDLE = 60.0
"""Seconds that a connection may wait for its next request."""
LINGER = 1.0
"""Seconds in which the rest of too long a body is thrown away."""
HANDSHAKES = 1024
"""Connections that may be open at the same time before they have shown a certificate."""
NO_FILES = 1.0
"""Seconds without new connections after this process could open no more files."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t -~\x80-\xff]*)")
_ONCE = ("content-length", "transfer-encoding", "host", "content-type", "idempotency-key")

log = logging.getLogger("securevfl.network")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        method: Such as GET.
        path: Without a query.
        headers: By name in lower case.
        body: What came with it.
        certificate: The client's, in DER; empty without TLS.
        last: Whether the client wants the connection to end.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    certificate: bytes = b""
    last: bool = False


@dataclass(frozen=True)
class Response:
    """One answer."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self, *, with_body: bool, last: bool) -> bytes:
        """As it is sent."""
        content = self.body or f"{self.status.phrase}\n".encode()
        fields = {
            "Content-Type": self.kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close" if last else "keep-alive",
            **self.headers,
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        lines += [f"{name}: {text}" for name, text in fields.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + (content if with_body else b"")


class BadRequest(Exception):
    """A request that is not understood, or too large."""

    def __init__(self, status: HTTPStatus) -> None:
        self.status = status


class HttpServer(ABC):
    """Answers requests until it is closed.

    Args:
        address: ``HOST:PORT``, or ``PORT`` on loopback; port 0 takes a free one.
        what: What it is called where it cannot listen.
        timeout: Seconds in which a request must come, and an answer be taken.
        most: Bytes that a body may have.
        connections: How many at the same time; others are turned away. Whoever has not shown the certificate
            that TLS asks for does not count, and takes nobody's place.
        keeps: Whether a connection may bring several requests.
        tls: Asks for certificates; None without TLS.

    Raises:
        InputError: The address cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        what: str,
        timeout: float = TIMEOUT,
        most: int = 0,
        connections: int = MAX_CONNECTIONS,
        keeps: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host, self.port = parse_address(address)
        self._what, self._timeout, self._most, self._keeps, self._tls = what, timeout, most, keeps, tls
        self._limit = connections
        self._doors: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None] | None] = set()

    @abstractmethod
    async def answer(self, request: Request) -> Response:
        """What a request gets; whatever it raises becomes an internal error."""

    def lets_in(self, certificate: bytes) -> bool:
        """Whether a connection with this certificate, in DER, may stay and takes one of the places."""
        return True

    async def start(self) -> None:
        """Begins to listen; `port` is then the one in use."""
        loop = asyncio.get_running_loop()
        try:
            places = await loop.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, place in dict.fromkeys(places):
                at = (place[0], self.port, *place[2:])
                self._doors.append(socket.create_server(at, family=family, backlog=HANDSHAKES))
                self._doors[-1].setblocking(False)
                self.port = int(self._doors[-1].getsockname()[1])
        except OSError as error:
            self._shut()
            raise InputError(
                f"{self._what} cannot listen on {self.host}:{self.port}: {error.strerror or error}"
            ) from error
        for door in self._doors:
            self._begin(self._accept_all(door))
        log.info(self._what.removeprefix("the "), extra={"address": f"{self.host}:{self.port}"})

    async def close(self) -> None:
        """Stops listening and ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shut()

    def _shut(self) -> None:
        while self._doors:
            self._doors.pop().close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- one connection -------------------------------------------------------------------------------------

    async def _accept_all(self, door: socket.socket) -> None:
        """Lets connections begin; where there are no more files for them, they wait at the door."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(door)
            except OSError as error:
                log.warning("no new connections for a moment", extra={"reason": str(error)})
                await asyncio.sleep(NO_FILES)
                continue
            most = self._limit + (0 if self._tls is None else HANDSHAKES)
            if len(self._tasks) - len(self._doors) < most:
                self._begin(self._welcome(connection))
            else:
                connection.close()

    async def _welcome(self, connection: socket.socket) -> None:
        """A connection from TLS to its end; until it has shown who it is it takes nobody's place."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        more: Any = {} if self._tls is None else {"ssl_handshake_timeout": self._timeout}
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, **more
            )
        except OSError:  # no certificate, not in time, or gone
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        if not self.lets_in(_certificate(writer)):  # is told so, if it asks soon
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await self._serve(reader, writer)
        elif len(self._connections) >= self._limit:
            transport.abort()
        else:
            self._connections.add(task)
            try:
                await self._serve(reader, writer)
            finally:
                self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests and answers in turn, until one of the two sides ends the connection."""
        try:
            last = False
            while not last:
                last = await self._exchange(reader, writer)
            async with asyncio.timeout(self._timeout):
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # the other side is gone or too slow
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request, one answer; returns whether the connection ends."""
        request: Request | None = None
        try:
            request = await self._read(reader, writer)
            response = await self._respond(request)
        except BadRequest as bad:
            response = Response(bad.status)
        last = request is None or request.last or not self._keeps
        head = request is not None and request.method == "HEAD"
        writer.write(response.to_bytes(with_body=not head, last=last))
        if last or writer.transport.get_write_buffer_size():
            async with asyncio.timeout(self._timeout):
                await writer.drain()
        if response.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and request is None:
            async with asyncio.timeout(LINGER):
                while await reader.read(1 << 16):  # else the rest of the body would wipe out the answer
                    pass
        return last

    async def _respond(self, request: Request) -> Response:
        try:
            return await self.answer(request)
        except Exception:
            log.exception("an answer fails")
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
        try:
            async with asyncio.timeout(IDLE if self._keeps else self._timeout):
                head = await reader.readuntil(b"\r\n\r\n")
            request = self._parse(head, writer)
            length = self._length(request)
            if length:
                if request.headers.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                async with asyncio.timeout(self._timeout):
                    object.__setattr__(request, "body", await reader.readexactly(length))
        except asyncio.LimitOverrunError:
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial and self._keeps:
                raise ConnectionResetError from None  # nobody has asked anything more
            raise BadRequest(HTTPStatus.BAD_REQUEST) from None
        return request

    def _parse(self, head: bytes, writer: asyncio.StreamWriter) -> Request:
        first, *lines = head[:-4].split(b"\r\n")
        found = _REQUEST_LINE.fullmatch(first)
        headers: dict[str, str] = {}
        for line in lines:
            pair = _HEADER.fullmatch(line)
            name = "" if pair is None else pair[1].decode().lower()
            if pair is None or (name in headers and name in _ONCE):
                raise BadRequest(HTTPStatus.BAD_REQUEST)
            headers[name] = pair[2].decode("latin-1").strip()
        if found is None:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        return Request(
            method=found[1].decode(),
            path=found[2].decode().partition("?")[0],
            headers=headers,
            certificate=_certificate(writer),
            last=found[3] == b"0" or headers.get("connection", "").lower() == "close",
        )

    def _length(self, request: Request) -> int:
        """How many bytes follow; a body that nothing here takes is not read."""
        stated = request.headers.get("content-length")
        if "transfer-encoding" in request.headers:
            raise BadRequest(HTTPStatus.LENGTH_REQUIRED)
        if stated is None:
            return 0
        if not (stated.isascii() and stated.isdigit()) or len(stated) > 12:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if not self._most:
            object.__setattr__(request, "last", True)
            return 0
        if int(stated) > self._most:
            raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return int(stated)


def _certificate(writer: asyncio.StreamWriter) -> bytes:
    """The client's certificate, in DER; empty without TLS."""
    tls = writer.get_extra_info("ssl_object")
    return (tls.getpeercert(binary_form=True) or b"") if tls is not None else b""


def parse_address(address: str) -> tuple[str, int]:
    """Host and port; loopback where only a port is given.

    Raises:
        InputError: It is neither ``HOST:PORT`` nor ``PORT``.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"status is {address!r}; expected PORT or HOST:PORT, such as 127.0.0.1:9750")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
