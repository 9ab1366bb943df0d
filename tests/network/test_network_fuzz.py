"""Malformed messages thrown at every endpoint of a running federation: refused, and the run does not care."""

from __future__ import annotations

import asyncio
import resource
import tracemalloc
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from crashes import Process, check_ledgers, finish, models, processes
from federation import Federation
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import any_value, bad_frame

from securevfl.errors import InputError, NetworkError, ProtocolError, SecureVFLError, WireError
from securevfl.network.frames import OF_COORDINATOR, OF_MEMBERS, Frame, Kind, read_control, read_greeting
from securevfl.network.participant import understanding
from securevfl.network.session import Session
from securevfl.privacy.messages import Packet
from securevfl.protocols.wire import pack
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", protocol="two-tree", epochs=2, batch=16, seed=3, unprotected=True)


def state(node: Any) -> tuple[Any, ...]:
    """All that a message could change at an endpoint."""
    mesh, site = node.mesh, node.site
    sessions = {name: (each.received, each._sent, each.waiting) for name, each in mesh.sessions.items()}
    ciphers = {name: (each._sealed, each._opened) for name, each in mesh._ciphers.items()}
    links = {
        address: (dict(link.backlog), len(link._inbox), link.number) for address, link in mesh.links.items()
    }
    ledger = None if site is None else site.gate.ledger.head
    spent = None if site is None else site.spent()
    receipts = None if site is None else dict(site.receipts.heads)
    counts = mesh.control.qsize(), len(mesh._early), +mesh._early_bytes, mesh.messages, mesh.bytes
    return sessions, ciphers, links, ledger, spent, receipts, counts, mesh._phase, node.part, node.epoch


def read(node: Any, session: Session, raw: bytes) -> None:
    """What a stream does with one message, without a stream."""
    given = iter([raw, None])

    async def following() -> bytes | None:
        return next(given)

    with pytest.raises(StopIteration):
        node.mesh.transport._read_all(session, following).send(None)


def throw(node: Any, peer: str, random: Random, count: int) -> None:
    """Each is refused with an error of ours, and changes nothing."""
    before = state(node)
    for _ in range(count):
        session = Session(peer)
        session.attach(bytes(16), 0)
        raw = bad_frame(random, node.mesh, peer, 1)
        with pytest.raises((ProtocolError, NetworkError)) as caught:
            read(node, session, raw)
        assert "\n" not in str(caught.value)
        assert session.received == 0
        assert state(node) == before, raw


def fuzzed(folder: Path, seed: int, count: int) -> None:
    """Throws messages at all three endpoints in the middle of an epoch; then the run goes on."""
    federation, random = Federation(folder, PLAN), Random(seed)
    thrown = 0

    def arm(process: Process, peers: list[str]) -> None:
        posting, posts = process.node.mesh.post, 0

        def post(message: Packet) -> None:
            nonlocal posts, thrown
            posts += process.node.part == "epoch"
            if process.node.part == "epoch" and posts in (8, 9, 10, 11):
                for peer in peers:
                    throw(process.node, peer, random, count)
                    thrown += count
            posting(message)

        process.node.mesh.post = post

    async def play() -> dict[str, Process]:
        found = processes(federation)
        for each in found.values():
            each.start()
        arm(found["bank"], ["clinic", "shop"])
        arm(found["clinic"], ["bank", "shop"])
        arm(found["shop"], ["bank", "clinic"])
        await finish(found, seconds=120 + count / 4)  # a busy machine throws a hundred in a second or so
        return found

    found = asyncio.run(play())
    assert thrown == 24 * count
    check_ledgers(federation, found)
    for name, value in undisturbed().items():
        assert np.array_equal(models(folder)[name], value), name


@cache
def undisturbed() -> dict[str, np.ndarray]:
    with TemporaryDirectory() as folder:
        asyncio.run(Federation(Path(folder), PLAN).run())
        return models(Path(folder))


@settings(max_examples=3)
@given(st.integers(0, 1 << 32))
def test_a_running_federation_does_not_care(seed):
    with TemporaryDirectory() as folder:
        fuzzed(Path(folder), seed, 40)


@pytest.mark.slow
def test_a_hundred_thousand_malformed_messages(tmp_path):
    """No crash, no hang, no state change; and no memory kept: a leak of 100 bytes each would be 9.6 MB."""
    fuzzed(tmp_path / "warm", 1, 100)
    tracemalloc.start()
    fuzzed(tmp_path / "first", 2, 100)
    kept, _ = tracemalloc.get_traced_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzzed(tmp_path / "all", 3, 4200)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - kept < 5 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # in kilobytes


# -- contents of the right form but without sense -----------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "",
            "null",
            "[]",
            "{}",
            "NaN",
            "[" * 100_000,
            '{"columns": 3}',
            '{"columns": "3", "bounds": null}',
            '{"columns": 3, "bounds": [["a", "b"], ["a", "b"], ["a", "b"]]}',
            '{"columns": 3, "bounds": [[0, 1]]}',
            '{"columns": -1, "bounds": null}',
            '{"columns": 1e400, "bounds": null}',
            '{"columns": 3, "bounds": null, "more": 1}',
            '{"plan": "a = 1", "outline": "{}", "organisations": [], "run": "test", "ids": ""}',
            '{"plan": 3, "outline": {}, "organisations": 7}',
        ]
    ),
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: st.one_of(st.integers(-3, 5), st.integers(-(1 << 63), (1 << 63) - 1)),
    bool: st.booleans(),
    list: st.lists(st.integers(0, 1 << 30), max_size=4),
}


def fields_of(form: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields as a form asks for them, with any content."""
    sizes = {"phase": 16, "round": 8, "incarnation": 16, "public_key": 32}

    def values(name: str, kind: Any) -> st.SearchStrategy[Any]:
        if kind is not bytes:
            return VALUES[kind]
        return st.binary(min_size=sizes.get(name, 0), max_size=sizes.get(name, 40))

    return st.fixed_dictionaries({name: values(name, kind) for name, kind in form.items()})


SENSELESS = ["introduction", "align", "propose", "agreed", "begin"]


@pytest.fixture(scope="module")
def idle(tmp_path_factory) -> Federation:
    return Federation(tmp_path_factory.mktemp("idle"), PLAN)


@settings(max_examples=100)
@given(kind=st.sampled_from(["introduction", "align", "propose", "agreed", "begin"]), data=st.data())
def test_a_party_understands_or_refuses_what_the_coordinator_says(idle, kind, data):
    member = idle.member("clinic")
    fields = data.draw(fields_of(OF_COORDINATOR[kind]))
    assert read_control(pack(kind, fields), OF_COORDINATOR) == (kind, fields)

    async def handle() -> None:
        with understanding("bank", kind):
            await member._handle(kind, fields)
            if kind == "introduction":
                await member._handle("meet", {"round": bytes(8), "away": ""})

    try:
        asyncio.run(handle())
    except SecureVFLError:
        assert member.site is None
        assert member.agreement is None
        assert not member.mesh.introductions


@settings(max_examples=100)
@given(facts=TEXTS, aligned=TEXTS, checkpoints=VALUES[list])
def test_the_coordinator_understands_or_refuses_how_a_party_joins(idle, facts, aligned, checkpoints):
    coordinator, member = idle.coordinator(), idle.member("clinic")
    session = coordinator.mesh.sessions["clinic"]
    session.attach(member.mesh.incarnation, 0)
    fields = {
        **member.mesh.introducer.introduction.fields(),
        "facts": facts,
        "aligned": aligned,
        "checkpoints": checkpoints,
        "finished": False,
    }
    read_control(pack("join", fields), OF_MEMBERS)
    with pytest.raises(InputError):
        coordinator.check_event("clinic", "join", fields)
    assert not coordinator.joined


@given(st.binary(max_size=60), st.integers(0, 1 << 32))
def test_any_first_frame_is_a_greeting_or_refused(noise, seed):
    random = Random(seed)
    names = ("sender", "receiver", "run", "incarnation", "known", "received")
    fields = {name: any_value(random) for name in names if random.random() < 0.9}
    for payload in (noise, pack("hello", fields)):
        try:
            found = read_greeting(Frame(kind=Kind.HELLO, payload=payload))
        except WireError:
            continue
        assert len(found.incarnation) == 16
        assert isinstance(found.sender, str)
        assert found.received >= 0
