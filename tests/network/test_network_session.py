"""Sessions: whatever happens to streams, each frame arrives once and in order, or is void."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.errors import ProtocolError, WireError
from securevfl.network import session as sessions
from securevfl.network.frames import MAX_PAYLOAD, Frame, Kind
from securevfl.network.session import FRAME_COST, Flood, Session, new_incarnation


class Side:
    """One process: its session, what it has taken, and its greeting."""

    def __init__(self, peer: str) -> None:
        self.session, self.me = Session(peer), new_incarnation()
        self.posted: list[bytes] = []
        self.taken: list[bytes] = []
        self.written: list[bytes] = []
        self.pump: asyncio.Task[None] | None = None

    def post(self, content: bytes) -> None:
        self.session.post(Kind.DATA, content)
        self.posted.append(content)

    def claim(self, other: Side) -> int:
        """How many frames of the other process it says to have received."""
        return self.session.received if self.session.incarnation == other.me else 0

    def read(self, raw: bytes) -> None:
        frame = Frame.from_bytes(raw)
        if self.session.expects(frame):
            self.taken.append(frame.payload)
            self.session.take(frame)

    async def write(self, raw: bytes) -> None:
        self.written.append(raw)

    async def stop(self) -> None:
        if self.pump is not None:
            self.pump.cancel()
            await asyncio.gather(self.pump, return_exceptions=True)
        self.pump = None
        self.written = []
        self.session.detach()


class Pair:
    """Two processes, and a stream between them that a test may abuse."""

    def __init__(self) -> None:
        self.sides = [Side("other"), Side("one")]

    async def connect(self) -> None:
        for side in self.sides:
            await side.stop()
        one, other = self.sides
        claims = one.claim(other), other.claim(one)
        for side, peer, claim in ((one, other, claims[1]), (other, one, claims[0])):
            side.session.attach(peer.me, claim)
            side.pump = asyncio.create_task(side.session.pump(side.write))

    async def restart(self, index: int) -> None:
        """One process starts anew: what was under way in either direction is void."""
        for side in self.sides:
            await side.stop()
        self.sides[index] = Side(self.sides[index].session.peer)
        peer = self.sides[1 - index]
        peer.posted, peer.taken = [], []

    async def flow(self, index: int, count: int) -> None:
        """Some of what one side has written reaches the other."""
        side, peer = self.sides[index], self.sides[1 - index]
        await settle()
        for _ in range(min(count, len(side.written))):
            raw = side.written.pop(0)
            peer.read(raw)

    async def drain(self) -> None:
        await self.connect()
        for _ in range(3):
            for index in (0, 1):
                await self.flow(index, 10_000)

    def check(self) -> None:
        for index in (0, 1):
            side, peer = self.sides[index], self.sides[1 - index]
            assert peer.taken == side.posted[: len(peer.taken)]
            assert side.session.waiting <= len(side.posted)


async def settle() -> None:
    """Lets the pumps run until they have nothing to do."""
    for _ in range(4):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(0, 1), st.integers(1, 5)),
        st.tuples(st.just("flow"), st.integers(0, 1), st.integers(1, 6)),
        st.tuples(st.just("break"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("repeat"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS)
def test_every_frame_arrives_once_and_in_order(steps):
    async def play() -> None:
        pair, number, seen = Pair(), 0, [[], []]
        await pair.connect()
        for step, index, count in steps:
            side, peer = pair.sides[index], pair.sides[1 - index]
            if step == "post":
                for _ in range(count):
                    number += 1
                    side.post(b"%d" % number)
            elif step == "flow":
                await settle()
                seen[index] += side.written[:count]
                await pair.flow(index, count)
            elif step == "break":
                await pair.connect()  # what was written but has not arrived is lost with the stream
            elif step == "repeat" and seen[index]:
                taken = list(peer.taken)
                peer.read(seen[index][-1 - count % len(seen[index])])
                assert peer.taken == taken
            elif step == "restart":
                await pair.restart(index)
                seen = [[], []]
                await pair.connect()
            pair.check()
        await pair.drain()
        for index in (0, 1):
            assert pair.sides[1 - index].taken == pair.sides[index].posted
        for side in pair.sides:
            await side.stop()

    run(play())


@given(st.permutations(range(1, 6)))
def test_frames_out_of_order_are_refused(order):
    async def play() -> None:
        side = Side("peer")
        side.session.attach(b"p" * 16, 0)
        taken = 0
        for number in order:
            raw = Frame(kind=Kind.DATA, payload=b"%d" % number, number=number).to_bytes()
            if number > taken + 1:
                with pytest.raises(WireError, match=f"sends frame {number} after frame {taken}"):
                    side.read(raw)
            else:
                side.read(raw)
                taken += number == taken + 1
            assert side.session.received == taken
        assert side.taken == [b"%d" % number for number in range(1, taken + 1)]

    run(play())


def test_a_frame_that_was_not_accepted_is_expected_again():
    async def play() -> None:
        session = Session("peer")
        session.attach(b"p" * 16, 0)
        frame = Frame(kind=Kind.DATA, number=1)
        assert session.expects(frame)
        assert session.expects(frame)
        session.take(frame)
        assert not session.expects(frame)

    run(play())


@pytest.mark.parametrize("number", [1, 3, 2**63])
def test_what_was_never_sent_cannot_be_acknowledged(number):
    session = Session("peer")
    session.attach(b"p" * 16, 0)
    if number > 1:
        session.post(Kind.DATA, b"")
        session.post(Kind.DATA, b"")
    waiting = session.waiting
    with pytest.raises(WireError, match="acknowledges frame"):
        session.expects(Frame(kind=Kind.ACK, acknowledged=number))
    with pytest.raises(WireError, match="claims"):
        session.attach(b"p" * 16, number)
    assert session.waiting == waiting


def test_a_new_process_voids_the_rest_and_the_old_one_cannot_come_back():
    session = Session("peer")
    assert not session.attach(b"a" * 16, 0)
    session.post(Kind.DATA, b"for a")
    with pytest.raises(WireError, match="claims 1 frames; 0 were sent"):
        session.attach(b"b" * 16, 1)
    assert session.incarnation == b"a" * 16
    assert session.attach(b"b" * 16, 0)
    assert session.waiting == 0
    with pytest.raises(WireError, match="a later process of peer has taken the place"):
        session.attach(b"a" * 16, 0)
    assert session.incarnation == b"b" * 16


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_WAITING", 10 * FRAME_COST)
    session = Session("peer")
    for _ in range(10):
        session.post(Kind.DATA, b"")
    with pytest.raises(ProtocolError, match="peer does not take its messages"):
        session.post(Kind.DATA, b"")
    session.attach(b"p" * 16, 0)
    session.expects(Frame(kind=Kind.ACK, acknowledged=10))
    session.post(Kind.DATA, bytes(9 * FRAME_COST))
    with pytest.raises(ProtocolError, match="does not take"):
        session.post(Kind.DATA, b"x")
    assert session.waiting == 1


def test_who_floods_a_relay_costs_nobody_else_a_message(monkeypatch):
    """One bound per organisation over all receivers, given back when frames are taken or become void."""
    monkeypatch.setattr(sessions, "MAX_WAITING", 10 * FRAME_COST)
    passed = Counter[str]()
    shop, lab = Session("shop", passed), Session("lab", passed)
    shop.attach(bytes(16), 0)
    for session in (shop, lab) * 5:
        session.post(Kind.RELAY, b"", origin="clinic")
    with pytest.raises(Flood, match="clinic floods: 2,560 bytes wait to be passed on, some to lab"):
        lab.post(Kind.RELAY, b"", origin="clinic")
    lab.post(Kind.RELAY, b"", origin="mill")
    lab.post(Kind.CONTROL, b"")
    shop.expects(Frame(Kind.ACK, acknowledged=2))
    assert passed == {"clinic": 8 * FRAME_COST, "mill": FRAME_COST}
    shop.attach(bytes(15) + b"x", 0)
    assert passed == {"clinic": 5 * FRAME_COST, "mill": FRAME_COST}


def test_a_message_that_no_stream_carries_is_refused_at_once():
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD + 1

    session = Session("peer")
    with pytest.raises(ProtocolError, match="at most 268,435,432 travel at once"):
        session.post(Kind.DATA, Huge())
    assert session.waiting == 0


@pytest.mark.parametrize("count", [1, sessions.ACK_EVERY])
def test_what_arrives_is_acknowledged_without_traffic_back(count, monkeypatch):
    monkeypatch.setattr(sessions, "ACK_AFTER", 0.01)

    async def play() -> None:
        pair = Pair()
        await pair.connect()
        for _ in range(count):
            pair.sides[0].post(b"x")
        await pair.flow(0, count)
        async with asyncio.timeout(240):
            while not pair.sides[1].written:
                await asyncio.sleep(0.001)
        await pair.flow(1, 1)
        assert pair.sides[0].session.waiting == 0
        for side in pair.sides:
            await side.stop()

    run(play())
