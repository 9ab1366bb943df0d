"""The small HTTP server: what it understands it answers, what it does not it refuses, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.errors import InputError
from securevfl.network.http import HttpServer, Request, Response

POST = b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"


class Echo(HttpServer):
    """Answers with what it was sent."""

    async def answer(self, request: Request) -> Response:
        if request.path == "/fails":
            raise RuntimeError("a secret")
        return Response(HTTPStatus.OK, request.body or request.path.encode())


def using(use: Callable[[Echo], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        given = {"what": "the echo", "timeout": 60, "most": 10, "keeps": True} | options
        async with Echo("127.0.0.1:0", **given) as server:
            return await asyncio.wait_for(use(server), 240)

    return asyncio.run(run())


async def talk(server: Echo, *parts: bytes, end: bool = True) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if end:
            writer.write_eof()
        return await reader.read()
    except OSError:
        return b""
    finally:
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def statuses(answer: bytes) -> list[int]:
    return [int(each[:3]) for each in answer.split(b"HTTP/1.1 ")[1:]]


def test_one_connection_brings_several_requests():
    answer = using(lambda server: talk(server, POST + b"GET /a HTTP/1.1\r\n\r\n", POST))
    assert statuses(answer) == [200, 200, 200]
    assert answer.count(b"\r\n\r\nabc") == 2 and b"\r\n\r\n/a" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /a HTTP/1.1\r\nContent-Length: 11\r\n\r\n", 413),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc", 411),
        (b"POST /a HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: \xc2\xb2\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nab", 400),
        (b"GET  /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/2.0\r\n\r\n", 400),
        (b"GET http://else/a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nname : x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /fails HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_what_is_not_understood_is_refused(request_, status):
    answer = using(lambda server: talk(server, request_))
    assert statuses(answer) == [status]
    assert b"secret" not in answer


def test_after_a_bad_request_nothing_of_that_connection_is_read_any_more():
    smuggled = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcGET /b HTTP/1.1\r\n\r\n"
    assert statuses(using(lambda server: talk(server, smuggled))) == [400]


def test_old_clients_and_those_that_want_it_end_their_connection():
    for head in (b"GET /a HTTP/1.0\r\n\r\n", b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"):
        answer = using(lambda server, head=head: talk(server, head, end=False))
        assert statuses(answer) == [200] and b"Connection: close" in answer


def test_a_body_that_waits_for_leave_gets_it():
    head = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    assert statuses(using(lambda server: talk(server, head, b"abc", end=False))) == [100, 200]


def test_a_slow_client_is_cut_off_and_too_many_are_turned_away():
    async def use(server: Echo) -> tuple[bytes, list[bytes]]:
        idle = [await asyncio.open_connection(server.host, server.port) for _ in range(3)]
        half = b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"
        slow = asyncio.create_task(talk(server, half, end=False))
        while len(server._connections) < 4:
            await asyncio.sleep(0.01)
        found = [await talk(server, POST) for _ in range(2)]
        cut = await slow
        for _, writer in idle:
            await closed(writer)
        return cut, found

    slow, found = using(use, connections=4, timeout=3)
    assert slow == b"" and found == [b"", b""]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=4))
def test_noise_ends_a_connection_and_nothing_else(parts):
    async def use(server: Echo) -> bytes:
        await talk(server, *parts)
        return await talk(server, POST)

    assert statuses(using(use)) == [200]


def test_an_address_in_use_is_one_line():
    async def use(server: Echo) -> None:
        with pytest.raises(InputError, match="the echo cannot listen on"):
            await Echo(f"127.0.0.1:{server.port}", what="the echo").start()

    using(use)
