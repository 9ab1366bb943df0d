"""The virtual runtime: time jumps, order is fixed, deadlocks are reported."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.algorithms.steps import StepDelay, read_trace
from securevfl.errors import DeadlockError, PlanError, ProtocolError, WireError
from securevfl.federation.clock import VirtualClock, run_virtual
from securevfl.federation.virtual import VirtualNetwork
from securevfl.privacy.messages import Head, Packet, Stop
from securevfl.privacy.schemas import PARTY, Content, fact


class Hello(Content, kind="test-hello", senders=(PARTY,)):
    number: int | None = fact(int, default=None)


class Question(Content, kind="test-question", senders=(PARTY,)):
    pass


def test_time_jumps_and_is_exact() -> None:
    async def main() -> list[float]:
        clock, seen = VirtualClock(), []
        for delay in (0.5, 1e6, 0.0):
            await clock.sleep_until(clock.now() + delay)
            seen.append(clock.now())
        return seen

    begun = time.monotonic()
    seen, end = run_virtual(main(), start=10.0)
    assert seen == [10.5, 1000010.5, 1000010.5] and end == seen[-1]
    assert time.monotonic() - begun < 60  # a million units did not pass


def test_sleep_ends_early_when_told() -> None:
    async def main() -> tuple[bool, float, bool]:
        clock, stop = VirtualClock(), Stop()
        asyncio.get_running_loop().call_later(2.0, stop.set)
        finished = await clock.sleep_until(5.0, stop)
        return finished, clock.now(), await clock.sleep_until(9.0, stop)

    assert run_virtual(main())[0] == (False, 2.0, False)


def test_latency_applies_between_organisations_only() -> None:
    network = VirtualNetwork({"a": "A", "b": "B", "a2": "A"}, latency=3.0)

    async def main() -> list[tuple[str, float]]:
        arrived = []
        for target in ("b", "a2"):
            await network.links["a"].send(target, Hello())
        for target in ("a2", "b"):
            await network.links[target].receive()
            arrived.append((target, VirtualClock().now()))
        return arrived

    assert run_virtual(main())[0] == [("a2", 0.0), ("b", 3.0)]
    assert network.messages == 1  # inside A nothing is counted


def test_messages_arrive_in_the_order_of_sending() -> None:
    """Also where they leave at the same moment, and however many: timers alone would not keep the order."""
    network = VirtualNetwork({"a": "A", "b": "B", "c": "C"}, latency=0.02)

    async def main() -> list[int]:
        for number in range(50):
            await network.links["a"].send("c" if number % 3 else "b", Hello(number=number))
        return [(await network.links["c"].receive())["number"] for _ in range(33)]

    assert run_virtual(main())[0] == [number for number in range(50) if number % 3]


def test_deadlock_names_who_waits() -> None:
    network = VirtualNetwork({"a": "A", "b": "B"})

    async def main() -> None:
        call = network.links["a"].call("b", Question())
        await network.links["b"].receive()
        await asyncio.gather(call, network.links["a"].receive())

    with pytest.raises(DeadlockError, match=r"a waits for the answer of b and a message"):
        run_virtual(main(), explain=network.explain)


def test_foreign_and_repeated_answers_are_refused() -> None:
    network = VirtualNetwork({"a": "A", "b": "B", "c": "C"})

    async def main() -> None:
        call = network.links["a"].call("b", Question())
        message = await network.links["b"].receive()
        with pytest.raises(ProtocolError, match="did not make"):
            await network.links["c"].reply(message, Hello())
        await network.links["b"].reply(message, Hello())
        await call
        with pytest.raises(ProtocolError, match="did not make"):
            await network.links["b"].reply(message, Hello())
        with pytest.raises(ProtocolError, match="unknown address"):
            await network.links["a"].send("z", Hello())

    run_virtual(main())


def test_one_listener_per_address() -> None:
    network = VirtualNetwork({"a": "A"})

    async def main() -> None:
        message = network.links["a"].receive()
        with pytest.raises(ProtocolError, match="one listener"):
            await network.links["a"].receive()
        message.cancel()

    run_virtual(main())


@pytest.mark.parametrize(("kind", "mean"), [("constant", 1.0), ("poisson", 2 / 3), ("exponential", 2.0)])
def test_delays_of_the_second_of_three_parties(kind: str, mean: float) -> None:
    """Means of VAFL's appendix G: Poisson(2m)/2M and exponential with mean m, here m = 2, M = 3."""
    delay = StepDelay(kind, party=1, parties=3, generator=np.random.default_rng(0))
    drawn = np.array([delay.draw() for _ in range(20_000)])
    # Standard deviations are 0, sqrt(4)/6 and 2: 5 standard errors of the mean at most.
    assert drawn.mean() == pytest.approx(mean, abs=5 * 2.0 / np.sqrt(drawn.size) if kind != "constant" else 0)


def test_speed_divides_and_traces_repeat(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"p0": [1, 2], "p1": [3.5]}))
    trace = read_trace(path, ("p0", "p1"))
    delay = StepDelay(
        "trace", party=0, parties=2, speed=2.0, generator=np.random.default_rng(0), trace=trace["p0"]
    )
    assert [delay.draw() for _ in range(4)] == [0.5, 1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "must be JSON"),
        ("[1]", "must be JSON"),
        ('{"p0": [1]}', "no durations for party 'p1'"),
        ('{"p0": [1], "p1": []}', "'p1' must be"),
        ('{"p0": [-1], "p1": [1]}', "'p0' must be"),
    ],
)
def test_bad_traces(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=match):
        read_trace(path, ("p0", "p1"))


def test_missing_trace_and_unknown_delay(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_trace(tmp_path / "no.json", ("p0",))
    with pytest.raises(PlanError, match="unknown delay"):
        StepDelay("gamma", party=0, parties=1, generator=np.random.default_rng(0))


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(-5, 5), max_size=4),
)


@given(
    fields=st.dictionaries(st.text("abcdefgh_", min_size=1, max_size=8), values, max_size=5),
    number=st.integers(0, 2**40),
    reply=st.none() | st.integers(0, 2**40),
    head=st.none()
    | st.builds(
        Head, st.text("pqä", max_size=9), st.integers(-1, 99), st.text("0f", min_size=64, max_size=64)
    ),
    route=st.tuples(st.text(max_size=60), st.text(max_size=60)),
)
def test_messages_survive_the_wire(
    fields: dict, number: int, reply: int | None, head: Head | None, route: tuple[str, str]
) -> None:
    sender, receiver = route
    message = Packet(
        kind="k", sender=sender, receiver=receiver, fields=fields, number=number, reply_to=reply, head=head
    )
    data = message.to_bytes()
    assert Packet.from_bytes(data) == message
    assert message.size() == len(data)


def _sample(**changes: Any) -> bytes:
    head = Head("p1", 7, "0f" * 32)
    fields = {"kind": "k", "sender": "p1", "receiver": "server", "reply_to": 3, "head": head} | changes
    return Packet(**fields).to_bytes()


def test_every_truncation_of_a_message_is_refused() -> None:
    whole = _sample()
    for size in range(len(whole)):
        with pytest.raises(WireError):
            Packet.from_bytes(whole[:size])


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, ord("X"), "not a securevfl message"),
        (4, 9, "has version 9, this side has 1"),
        (5, 4, "unknown form of envelope"),
        (5, 2, "unknown form of envelope"),  # a call is answered, but the envelope does not say so
        (6, 0, "who sent it to whom"),
        (7, 1, "who sent it to whom"),
        (24, 99, "who sent it to whom"),
        (25, 0xFF, "not UTF-8"),
        (41, 0xFF, "broken ledger head"),
        (105, 99, "ends inside its ledger head|not a securevfl message|shorter than its header"),
    ],
)
def test_changed_envelopes_are_refused(place: int, value: int, says: str) -> None:
    raw = bytearray(_sample())
    raw[place] = value
    with pytest.raises(WireError, match=says):
        Packet.from_bytes(bytes(raw))


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
def test_nothing_but_a_wire_error_comes_out_of_changed_messages(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(_sample(fields={"a": np.arange(3), "b": "text"}))
    for place, value in changes:
        raw[place % len(raw)] = value
    with contextlib.suppress(WireError):
        Packet.from_bytes(bytes(raw))


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": "s" * 256},
        {"receiver": "ä" * 128},
        {"number": 2**63},
        {"reply_to": -(2**63) - 1},
        {"head": Head("p1", 7, "0f")},
        {"head": Head("p" * 256, 7, "0f" * 32)},
        {"head": Head("p1", 2**63, "0f" * 32)},
        {"head": Head("p1", 7, "ä" * 64)},
    ],
)
def test_what_no_envelope_holds_is_refused(changes: dict) -> None:
    with pytest.raises(WireError):
        _sample(**changes)


def test_an_interrupt_that_takes_a_wake_up_with_it_is_no_deadlock(capfd: pytest.CaptureFixture[str]) -> None:
    """It may come when the loop has taken a callback from its queue and has not called it yet."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()
        reader = asyncio.ensure_future(_read(news))
        await asyncio.sleep(0)
        news.set_result(None)
        assert loop._ready.pop() and not reader.done()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    gc.collect()
    assert capfd.readouterr().err == ""


async def _read(news: asyncio.Future[None]) -> None:
    await news


@pytest.mark.parametrize("moment", ["making", "closing"])
def test_an_interrupt_waits_while_a_loop_is_made_or_closed(
    moment: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loop that is interrupted half way complains when it is thrown away, and nobody knows what about."""
    method = {"making": "__init__", "closing": "close"}[moment]
    original = getattr(asyncio.SelectorEventLoop, method)

    def interrupted(self: asyncio.SelectorEventLoop, *arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        original(self, *arguments)

    monkeypatch.setattr(asyncio.SelectorEventLoop, method, interrupted)

    async def main() -> None:
        return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtual(main())
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    gc.collect()
    assert capfd.readouterr().err == ""
