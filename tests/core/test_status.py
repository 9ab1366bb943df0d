"""The status page answers whoever asks properly, and nobody else for long; logs keep secrets in."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.errors import InputError
from securevfl.network.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES, parse_address
from securevfl.network.monitoring import Readings, StatusServer, health_page, log_to, metrics_page

VALUES = {"organisation": "bank", "phase": "epoch", "epoch": 3, "mu": 0.25, "connected": True}


def values() -> Mapping[str, float | int | str]:
    return VALUES


def with_server(
    use: Callable[[StatusServer], Awaitable[bytes]], snapshot: Readings = values, timeout: float = 60
) -> bytes:
    async def run() -> bytes:
        async with StatusServer("127.0.0.1:0", snapshot, timeout=timeout) as server:
            return await use(server)

    return asyncio.run(run())


async def exchange(server: StatusServer, request: bytes, *, end: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(request)
    if end:
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def ask(request: bytes, **options: object) -> bytes:
    end = bool(options.pop("end", False))
    return with_server(lambda server: exchange(server, request, end=end), **options)  # type: ignore[arg-type]


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# -- what it answers ----------------------------------------------------------------------------------------


def test_health_is_json() -> None:
    answer = ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n", 1)
    assert status(answer) == 200 and b"Content-Type: application/json" in head
    assert f"Content-Length: {len(body)}".encode() in head and b"Connection: close" in head
    assert json.loads(body) == {"status": "ok", **VALUES}


def test_metrics_are_prometheus_text() -> None:
    answer = ask(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"text/plain; version=0.0.4" in head
    assert body.decode().splitlines() == [
        "# TYPE securevfl_info gauge",
        'securevfl_info{organisation="bank",phase="epoch"} 1',
        "# TYPE securevfl_epoch gauge",
        "securevfl_epoch 3",
        "# TYPE securevfl_mu gauge",
        "securevfl_mu 0.25",
        "# TYPE securevfl_connected gauge",
        "securevfl_connected 1",
    ]


def test_head_has_no_body() -> None:
    head, body = ask(b"HEAD /health HTTP/1.1\r\n\r\n").split(b"\r\n\r\n", 1)
    assert body == b"" and re.search(rb"Content-Length: [1-9]", head)


def test_each_request_sees_the_present() -> None:
    count = iter(range(10))

    async def twice(server: StatusServer) -> bytes:
        first = await exchange(server, b"GET /metrics HTTP/1.1\r\n\r\n")
        return first + await exchange(server, b"GET /metrics HTTP/1.1\r\n\r\n")

    answer = with_server(twice, lambda: {"n": next(count)})
    assert re.findall(rb"securevfl_n (\d)", answer) == [b"0", b"1"]


# -- what it refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /health/x HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /health\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\n\r\n", 400),
        (b"get /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\n\r\n", 400),
        (b"GET http://x/health HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nA: " + b"x" * MAX_REQUEST_BYTES + b"\r\n\r\n", 431),
        (b"x" * 2 * MAX_REQUEST_BYTES, 431),
    ],
)
def test_malformed_requests(request_: bytes, code: int) -> None:
    assert status(ask(request_)) == code


def test_half_a_request() -> None:
    assert status(ask(b"GET /health HTTP/1.1\r\n", end=True)) == 400
    assert status(ask(b"", end=True)) == 400


def test_wrong_method_names_the_right_ones() -> None:
    assert b"\r\nAllow: GET, HEAD\r\n" in ask(b"PUT /health HTTP/1.1\r\n\r\n")


@given(st.binary(max_size=300))
def test_garbage_never_gets_a_page(garbage: bytes) -> None:
    answer = ask(garbage, end=True)
    assert answer == b"" or status(answer) in (400, 404, 405, 431)


def test_slow_clients_are_cut_off() -> None:
    async def use(server: StatusServer) -> bytes:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /health HTTP/1.1\r\nA: ")  # and never the rest
        try:
            left = await reader.read()
        except ConnectionResetError:
            left = b""
        writer.close()
        return left + await exchange(server, b"GET /health HTTP/1.1\r\n\r\n")

    answer = with_server(use, timeout=2)
    assert answer.count(b"HTTP/1.1 ") == 1 and status(answer) == 200


def test_clients_that_trickle_are_cut_off() -> None:
    async def use(server: StatusServer) -> bytes:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        try:
            while True:  # a byte now and then does not buy more time
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.02)
                if reader.at_eof() or writer.is_closing():
                    return b"cut off"
        except ConnectionError:
            return b"cut off"
        finally:
            writer.close()

    assert with_server(use, timeout=2) == b"cut off"


def test_too_many_clients_do_not_pile_up() -> None:
    async def use(server: StatusServer) -> bytes:
        idle = [await asyncio.open_connection(server.host, server.port) for _ in range(MAX_CONNECTIONS)]
        while len(server._connections) < MAX_CONNECTIONS:
            await asyncio.sleep(0)
        refused = await exchange(server, b"GET /health HTTP/1.1\r\n\r\n")
        for _, writer in idle:
            writer.close()
        while server._connections:
            await asyncio.sleep(0)
        return refused + b"|" + await exchange(server, b"GET /health HTTP/1.1\r\n\r\n")

    refused, answered = with_server(use).split(b"|", 1)
    assert refused == b"" and status(answered) == 200


def test_closing_does_not_wait_for_idle_clients() -> None:
    async def run() -> bytes:
        server = StatusServer("127.0.0.1:0", values, timeout=3600)
        await server.start()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        while not server._connections:
            await asyncio.sleep(0)
        await server.close()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    assert asyncio.run(run()) == b""


def test_broken_snapshot_tells_nothing(log: Path) -> None:
    def broken() -> Mapping[str, float]:
        raise RuntimeError("internal detail")

    answer = ask(b"GET /health HTTP/1.1\r\n\r\n", snapshot=broken)
    assert status(answer) == 500 and b"internal detail" not in answer
    assert "internal detail" in log.read_text()


# -- pages --------------------------------------------------------------------------------------------------


def test_numbers_that_are_none() -> None:
    odd = {"a": float("inf"), "b": float("-inf"), "c": float("nan"), "d": 1e-300}
    assert json.loads(health_page(odd)) == {"status": "ok", "a": None, "b": None, "c": None, "d": 1e-300}
    lines = [line for line in metrics_page(odd).splitlines() if not line.startswith(("#", "securevfl_info"))]
    assert lines == ["securevfl_a +Inf", "securevfl_b -Inf", "securevfl_c NaN", "securevfl_d 1e-300"]


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=20), st.floats(), st.integers())))
def test_labels_cannot_forge_lines(values: dict[str, float | str]) -> None:
    numbers = [value for value in values.values() if not isinstance(value, str)]
    text = metrics_page(values)
    assert text.count("\n") == 2 + 2 * len(numbers)
    line = text.split("\n")[1]
    label = r'[a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
    assert re.fullmatch(rf"securevfl_info\{{(?:{label}(?:,{label})*)?\}} 1", line)


# -- addresses ----------------------------------------------------------------------------------------------


def test_addresses() -> None:
    assert parse_address("9750") == ("127.0.0.1", 9750) == parse_address(":9750")
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("0.0.0.0:1") == ("0.0.0.0", 1)
    for wrong in ("", "host", "host:", "host:x", "1:70000", "1:-1", "1:²"):
        with pytest.raises(InputError, match="expected PORT or HOST:PORT"):
            parse_address(wrong)


def test_port_in_use_is_one_line() -> None:
    async def use(server: StatusServer) -> bytes:
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await StatusServer(str(server.port), values).start()
        return b""

    with_server(use)


# -- logs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    logger = logging.getLogger("securevfl.network")
    before = logger.level, logger.propagate
    handler = log_to(tmp_path / "new" / "run.log", organisation="bank", run="first")
    yield tmp_path / "new" / "run.log"
    logger.removeHandler(handler)
    handler.close()
    logger.setLevel(before[0])
    logger.propagate = before[1]


def test_log_lines_are_json(log: Path) -> None:
    logging.getLogger("securevfl.network").info("joined", extra={"peer": "shop", "epoch": 3})
    logging.getLogger("securevfl.network").debug("not shown")
    (line,) = log.read_text().splitlines()
    content = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", content.pop("time"))
    assert content == {
        "level": "info", "event": "joined", "organisation": "bank", "run": "first", "peer": "shop", "epoch": 3
    }  # fmt: skip
    assert log.stat().st_mode & 0o777 == 0o600


def test_logs_let_no_data_out(log: Path) -> None:
    facts = {"key": "secret", "rows": np.array([7777.25]), "peer": b"secret", "reason": {"secret": 7777.25}}
    logging.getLogger("securevfl.network").warning("odd", extra=facts)
    assert "secret" not in log.read_text() and "7777.25" not in log.read_text()
    content = json.loads(log.read_text())
    assert content["peer"] == "<bytes>" and content["reason"] == "<dict>" and "rows" not in content


def test_log_lines_cannot_be_forged(log: Path) -> None:
    forged = 'x\n{"level": "info", "event": "all is well"}'
    logging.getLogger("securevfl.network").error(forged, extra={"reason": forged * 100})
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["event"] == forged and len(json.loads(line)["reason"]) == 500


def test_errors_are_logged_on_one_line(log: Path) -> None:
    try:
        raise ValueError("what was\nwrong")
    except ValueError:
        logging.getLogger("securevfl.network").exception("failed")
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["error"] == "ValueError: what was\nwrong"


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("securevfl.network.monitoring.MAX_BYTES", 1000)
    logger = logging.getLogger("securevfl.network")
    handler = log_to(tmp_path / "run.log", organisation="bank", run="first")
    try:
        for number in range(100):
            logger.warning("connection refused", extra={"count": number})
    finally:
        logger.removeHandler(handler)
        handler.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["run.log", "run.log.1"]
    assert all(file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert json.loads(files[0].read_text().splitlines()[-1])["count"] == 99


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.usefixtures("log")
def test_a_full_disk_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("securevfl.network")
    handler = log_to(Path("/dev/full"), organisation="bank", run="first")
    try:
        logger.info("one")
        logger.info("two")
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert capsys.readouterr().err == "securevfl: the log /dev/full can no longer be written\n"
