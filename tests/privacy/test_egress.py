"""Nothing leaves but declared messages with what a gate has let out, on every carrier."""

from __future__ import annotations

import ast
import asyncio
import copy
import dataclasses
import functools
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securevfl.accountants.records import Filter
from securevfl.algorithms.exchange import Exchange
from securevfl.algorithms.messages import (
    Embed,
    Embedding,
    End,
    Gradient,
    Labels,
    Loss,
    Predict,
    Ready,
    SealedOutputs,
    Snapshot,
    Step,
    Sum,
    SumOwn,
)
from securevfl.errors import EgressError, InputError, PlanError, ProtocolError, WireError
from securevfl.federation.stepped import SteppedNetwork
from securevfl.federation.virtual import VirtualNetwork
from securevfl.network.authority import create_authority, issue
from securevfl.network.identity import Identity, load_identity
from securevfl.network.mesh import Mesh
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import Accounted, Contribution, Inside, Link, Masked, Released
from securevfl.privacy.schemas import MESSAGES, Content, fact
from securevfl.protocols.contract import Envelope
from securevfl.protocols.sealed.protocol import Operand
from securevfl.protocols.sums.plain import PlainSum, PlainValue

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {"p0": "p0", "p1": "p1", "p2": "p2", "server": "p0", "dealer": "dealer"}
ROWS = np.arange(3, dtype=np.int64)
FEATURES = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)


def gate_of(owner: str) -> Gate:
    return Gate(
        owner=owner,
        mode="strict",
        ledger=Ledger(owner),
        mechanism=Mechanism(clip=1.0, sigma=2.0),
        budget=Filter(mode="strict", budget_mu=float("inf"), records=10),
        noise=Noise(),
    )


def let_out(*observers: str, kind: str = "embedding", owner: str = "p1") -> Released:
    return gate_of(owner).release(torch.from_numpy(FEATURES), rows=ROWS, kind=kind, observers=observers)


# -- the three carriers -------------------------------------------------------------------------------------

Carrier = tuple[dict[str, Link], list[Packet]]


def virtual() -> Carrier:
    left: list[Packet] = []
    network = VirtualNetwork(HOSTS, observe=lambda packet, time: left.append(packet))
    return network.links, left


def stepped() -> Carrier:
    left: list[Packet] = []
    links = {}
    for name in dict.fromkeys(HOSTS.values()):
        links |= SteppedNetwork(name, HOSTS, observe=lambda packet, time: left.append(packet)).links
    return links, left


@functools.cache
def identities() -> dict[str, Identity]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        organisations = tuple(dict.fromkeys(HOSTS.values()))
        issue(create_authority(folder / "ca", name="test"), organisations, out=folder)
        return {each: load_identity(folder / each) for each in organisations}


def grpc() -> Carrier:
    left: list[Packet] = []
    links = {}
    for name, identity in identities().items():
        others = tuple(each for each in identities() if each != name)
        mesh = Mesh(identity, run="test", coordinator="p0", others=others)
        mesh._direct = set(others)
        mesh.observe = left.append
        links |= mesh.connect(HOSTS)
    return links, left


@pytest.fixture(params=[virtual, stepped, grpc])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    async def build() -> Carrier:
        return request.param()

    return asyncio.run(build())


def send(links: dict[str, Link], sender: str, receiver: str, content: Any) -> None:
    asyncio.run(links[sender].send(receiver, content))


async def next_of(link: Link) -> Packet:
    return await link.receive()


class Pretender:
    """Looks like a declared message."""

    kind = "embedding"
    rows = ROWS
    values = FEATURES


def forged() -> Released:
    """Made without the constructor."""
    fake = object.__new__(Released)
    fields = {"values": FEATURES, "head": Head("p1", 0, "0" * 64), "observers": ("p0",), "kind": "embedding"}
    for name, value in (fields | {"rows": ROWS, "source": None}).items():
        object.__setattr__(fake, name, value)
    return fake


WRONG: dict[str, Callable[[], Any]] = {
    "an array": lambda: FEATURES,
    "a float list": lambda: FEATURES.tolist(),
    "a tensor": lambda: torch.from_numpy(FEATURES),
    "bytes": FEATURES.tobytes,
    "a mapping": lambda: {"values": FEATURES},
    "a packet": lambda: Packet(kind="end", sender="p1", receiver="server"),
    "a payload without a message": lambda: let_out("p0"),
    "a message that looks declared": Pretender,
    "an array for a payload": lambda: Embedding(rows=ROWS, values=FEATURES),
    "a tensor for a payload": lambda: Embedding(rows=ROWS, values=torch.from_numpy(FEATURES)),
    "a list for a payload": lambda: Embedding(rows=ROWS, values=FEATURES.tolist()),
    "bytes for a payload": lambda: Embedding(rows=ROWS, values=FEATURES.tobytes()),
    "a float for a payload": lambda: Loss(value=0.5),
    "features for records": lambda: Embedding(rows=FEATURES),
    "features as integers for records": lambda: Embedding(rows=(1000 * FEATURES).astype(np.int64)),
    "a column of integers for records": lambda: Step(rows=np.array([5, 7, 5])),
    "negative integers for records": lambda: Step(rows=np.array([-5, 7, 3])),
    "integers beyond any record": lambda: Step(rows=np.array([1 << 40, 3])),
    "an array for a fact": lambda: Ready(iteration=FEATURES),
    "a float for a count": lambda: Ready(iteration=0.25),
    "a numpy number for a count": lambda: Ready(iteration=np.int64(3)),
    "bytes for a word": lambda: Ready(iteration=b"123"),
    "a forged payload": lambda: Embedding(rows=ROWS, values=forged()),
    "another's observers": lambda: Embedding(rows=ROWS, values=let_out("p2")),
    "values that stay inside": lambda: Embedding(rows=ROWS, values=Inside(values=FEATURES)),
    "a payload of another kind": lambda: Embedding(rows=ROWS, values=let_out("p0", kind="labels")),
    "a payload about other records": lambda: Embedding(rows=ROWS + 1, values=let_out("p0")),
    "a message of another role": lambda: Gradient(values=let_out("p0", kind="gradient")),
    "the receiver's own part": lambda: SumOwn(
        channel="server", round=0, values=Inside(values=FEATURES), entered=Inside(values=FEATURES)
    ),
    "opened scores": lambda: SealedOutputs(values=Inside(values=FEATURES)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_gate_has_let_out_does_not_leave(what: str, carrier: Carrier) -> None:
    links, left = carrier
    with pytest.raises(EgressError):
        send(links, "p1", "server", WRONG[what]())
    assert left == [] and links["p1"].number == 0 and not links["server"]._inbox


def test_what_a_gate_has_let_out_leaves_with_its_entry(carrier: Carrier) -> None:
    links, left = carrier
    released = let_out("p0", "p2")
    for receiver in ("server", "p2"):
        send(links, "p1", receiver, Embedding(rows=ROWS, values=released))
    assert [(packet.receiver, packet.head) for packet in left] == [
        ("server", released.head),
        ("p2", released.head),
    ]
    assert left[0].fields["values"] is released.values and left[0].fields["rows"].dtype == np.int32


def test_values_inside_one_organisation_need_no_gate(carrier: Carrier) -> None:
    links, left = carrier
    send(links, "p0", "server", Embedding(values=Inside(values=FEATURES)))
    packet = asyncio.run(next_of(links["server"]))
    assert packet.head is None and np.array_equal(packet["values"], FEATURES) and left == []


def test_a_message_leaves_in_its_phase_alone(carrier: Carrier) -> None:
    links, left = carrier
    links["server"].phase = "evaluate"
    labels = gate_of("p0").release_exact(np.zeros(3), rows=ROWS, kind="labels", observers=("p1",))
    with pytest.raises(EgressError, match="may not send 'labels' in phase 'evaluate'"):
        send(links, "server", "p1", Labels(values=labels))
    links["server"].phase = "prepare"
    send(links, "server", "p1", Labels(values=labels))
    assert len(left) == 1


# -- machines -----------------------------------------------------------------------------------------------


@pytest.fixture
def exchange() -> Exchange:
    links = VirtualNetwork(HOSTS).links
    protocol = PlainSum(workers=3)
    places = {0: "p0", 1: "p1", 2: "p2", -1: "server"}
    return Exchange(links["p1"], places, protocol.read, channel="server", hides=False)


def test_a_machine_takes_contributions_of_the_gate_alone(exchange: Exchange) -> None:
    node = PlainSum(workers=3).node(1)
    with pytest.raises(EgressError, match="did not pass the gate"):
        exchange.enter(node, FEATURES, round=0)  # type: ignore[arg-type]
    with pytest.raises(EgressError, match="did not pass the gate"):
        exchange.enter(node, Inside(values=FEATURES), round=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("observers", "leaves"), [(("p0",), True), (("p2",), False)])
def test_an_open_sum_goes_to_those_it_was_written_down_for(
    observers: tuple[str, ...], leaves: bool, exchange: Exchange
) -> None:
    given = gate_of("p1").contribute(
        torch.from_numpy(FEATURES), rows=ROWS, kind="embedding", observers=observers, noise=None
    )
    machine = exchange.enter(PlainSum(workers=3).node(1), given, round=0)
    (envelope,) = machine.machine.start()
    if leaves:
        assert asyncio.run(exchange.send(machine, envelope))
    else:
        with pytest.raises(EgressError, match="not for p0"):
            asyncio.run(exchange.send(machine, envelope))


def test_machines_and_messages_past_the_gate_are_not_sent(exchange: Exchange) -> None:
    envelope = Envelope(1, -1, PlainValue(round=0, values=FEATURES))
    machine = PlainSum(workers=3).node(1).round(FEATURES, round=0)
    with pytest.raises(EgressError, match="no gate has accounted for"):
        asyncio.run(exchange.send(machine, envelope))
    with pytest.raises(EgressError, match="no dealer sends"):
        asyncio.run(exchange.deal([Envelope(1, 0, Operand(round=0, words=np.zeros((2, 2), np.uint64)))]))
    with pytest.raises(EgressError, match="only declared"):
        asyncio.run(exchange.link.send("server", envelope.message))
    with pytest.raises(EgressError, match="only declared"):
        asyncio.run(exchange.link.send("p2", Operand(round=0, words=FEATURES.view(np.uint32))))


# -- nobody else makes payloads -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [Released, Contribution, Accounted, Masked])
def test_payloads_are_made_with_the_key_alone(payload: type) -> None:
    fields = {field.name: None for field in dataclasses.fields(payload)}
    for key in (None, object(), "key"):
        with pytest.raises(EgressError, match="made by a gate alone"):
            payload(**fields, key=key)
    with pytest.raises(EgressError):
        payload(**fields)


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, pickle.dumps, lambda x: dataclasses.replace(x, values=FEATURES)]
)
def test_payloads_cannot_be_copied(change: Callable[[Any], Any]) -> None:
    with pytest.raises(EgressError):
        change(let_out("p0"))


def test_payloads_cannot_be_changed() -> None:
    released = let_out("p0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        released.values = FEATURES  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        released.values[:] = FEATURES
    exact = gate_of("p0").release_exact(mine := FEATURES.copy(), rows=ROWS, kind="x", observers=("p1",))
    mine[:] = 0
    assert np.array_equal(exact.values, FEATURES)


MAKERS = {"alignments.py", "gate.py", "payloads.py"}
PAYLOADS = {"Released", "Contribution", "Accounted", "Masked"}


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; CPython 3.11.7 can lose count of its recursion, then it is asked again."""
    for _ in range(5):
        try:
            return ast.parse(path.read_text())
        except SystemError:
            continue
    return ast.parse(path.read_text())


def test_nobody_else_uses_the_key_or_makes_payloads_or_packets() -> None:
    """Over the syntax tree of everything that is shipped."""
    found = []
    for folder in ("securevfl", "protocols", "accountants", "attacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.parent == ROOT / "securevfl" / "privacy" and path.name in MAKERS
            driver = path == ROOT / "securevfl" / "algorithms" / "exchange.py"
            if not (inside or driver):
                found += [f"{path}: {each}" for each in _makes(path)]
    assert found == []


def _makes(path: Path) -> list[str]:
    found = []
    roles = path.is_relative_to(ROOT / "securevfl" / "algorithms")
    for node in ast.walk(parsed(path)):
        names = {getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "value", "")} - {None}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        called = getattr(node, "func", None)
        made = getattr(called, "id", getattr(called, "attr", ""))
        if names & {"_KEY", "_made_with"}:
            found.append(f"line {node.lineno} uses the key")
        if made in PAYLOADS:
            found.append(f"line {node.lineno} makes a payload")
        if roles and (made == "Packet" or names & {"_post", "deliver"}):
            found.append(f"line {node.lineno} goes around the link")
    return found


@pytest.mark.parametrize(
    "line",
    [
        "from securevfl.privacy.payloads import _KEY",
        "payloads._KEY",
        "getattr(payloads, '_KEY')",
        "object.__setattr__(fake, '_made_with', key)",
        "Released(values=raw)",
        "payloads.Masked(message=raw)",
    ],
)
def test_the_search_finds_what_it_is_for(line: str, tmp_path: Path) -> None:
    (tmp_path / "role.py").write_text(line)
    assert _makes(tmp_path / "role.py")


# -- receipt ------------------------------------------------------------------------------------------------

GOOD = {"rows": ROWS.astype(np.int32), "purpose": "refresh"}


@pytest.mark.parametrize(
    ("kind", "sender", "fields", "match"),
    [
        ("features", "server", {}, "'features', a kind of message that nobody has declared"),
        ("embed", "server", GOOD | {"features": FEATURES}, "a field 'features' that it does not have"),
        ("embed", "server", {"purpose": "refresh"}, "without rows"),
        ("embed", "server", GOOD | {"rows": FEATURES}, "'rows' is not a list of distinct record indices"),
        ("embed", "server", GOOD | {"purpose": 3}, "'purpose' is not a public str"),
        ("embedding", "p1", {"values": FEATURES.astype(np.int32)}, "'values' is not an array of f with 2"),
        ("embedding", "p1", {"values": FEATURES[0]}, "'values' is not an array of f with 2 dimensions"),
        ("embed", "p1", GOOD, "p1 may not send 'embed'"),
        ("labels", "server", {"values": np.zeros(3)}, "may not send 'labels' in phase 'epoch'"),
        ("sealed-outputs", "p1", {"values": FEATURES}, "may not send 'sealed-outputs' in phase 'epoch'"),
        ("sum-result", "p1", {"channel": "server", "round": 0, "values": FEATURES}, "stays inside"),
        ("plain.value", "p1", {"round": 0, "attempt": 0, "values": FEATURES}, "without channel, from, to"),
        ("opened-total", "p1", {"channel": "x", "round": 0, "values": FEATURES}, "may not send"),
    ],
)
def test_what_is_not_declared_is_refused_on_receipt(
    kind: str, sender: str, fields: dict[str, Any], match: str, carrier: Carrier
) -> None:
    links, _ = carrier
    links["p2"].phase = "epoch"
    packet = Packet.from_bytes(Packet(kind=kind, sender=sender, receiver="p2", fields=fields).to_bytes())
    with pytest.raises(ProtocolError, match=match) as refused:
        links["p2"].deliver(packet)
    assert isinstance(refused.value, WireError) or "may not" in match or "inside" in match
    assert not links["p2"]._inbox


def test_every_declared_message_survives_the_wire() -> None:
    """What may be sent is what may be received: one declaration, checked on both ends."""
    links = VirtualNetwork(HOSTS, codec=True).links
    snapshot = gate_of("p0").release_exact(
        {"values": FEATURES, "head:bias": np.zeros(2), "head:steps": np.array(3)},
        rows=ROWS,
        kind="snapshot",
        observers=("p1",),
    )
    total = gate_of("p0").hand_on(FEATURES, kind="sum", observers=("p1",))
    for content in (
        End(),
        Embed(rows=ROWS, purpose="refresh"),
        Predict(rows=ROWS),
        Snapshot(shared=snapshot, steps=2, rate=0.5),
        Sum(values=total),
    ):
        send(links, "server", "p1", content)
        packet = asyncio.run(next_of(links["p1"]))
        assert packet.kind == MESSAGES[packet.kind].kind and not packet.checked
    assert "head:bias" in MESSAGES["snapshot"].prefixes[0][0] + "bias"


def test_a_kind_is_declared_once() -> None:
    before = MESSAGES["embedding"]
    with pytest.raises(InputError, match="'embedding' are declared twice"):

        class Wider(Content, kind="embedding"):
            features: Any = fact(str)

    with pytest.raises(InputError, match="bytes cannot be a public fact"):
        fact(bytes)
    assert MESSAGES["embedding"] is before
    with pytest.raises(TypeError, match="features"):
        Embedding(rows=ROWS, features=FEATURES)


def test_what_is_handed_on_has_a_name() -> None:
    with pytest.raises(PlanError, match="'embedding' is not handed on"):
        gate_of("p0").hand_on(FEATURES, kind="embedding", observers=("p1",))
