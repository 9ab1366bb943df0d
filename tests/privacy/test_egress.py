"""Nothing leaves but declared messages with what a gate has let out, on every carrier."""

from __future__ import annotations

import ast
import asyncio
import copy
import dataclasses
import functools
import pickle
import sys
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
    BatchReady,
    Embed,
    Embedding,
    End,
    Gradient,
    Labels,
    MeanLoss,
    Predict,
    SealedJoins,
    SealedOutputs,
    Snapshot,
    Step,
    Sum,
    SumOwn,
)
from securevfl.errors import EgressError, InputError, PlanError, ProtocolError, RunError, WireError
from securevfl.federation.stepped import SteppedNetwork
from securevfl.federation.virtual import VirtualNetwork
from securevfl.models import losses, metrics, task_loss
from securevfl.models.losses import predictions, refute
from securevfl.network.authority import create_authority, issue
from securevfl.network.identity import Identity, load_identity
from securevfl.network.mesh import Mesh
from securevfl.privacy.alignments import let_align
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.passing import Arrivals, Totals, computed, joined
from securevfl.privacy.payloads import (
    Accounted,
    Arrived,
    Contribution,
    Inside,
    Link,
    Masked,
    Passed,
    Released,
)
from securevfl.privacy.rows import fixed
from securevfl.privacy.schemas import MESSAGES, Content, fact, released
from securevfl.protocols.contract import Envelope
from securevfl.protocols.keys import Authenticator
from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.sealed.protocol import Operand
from securevfl.protocols.sums.pairwise import PairwiseMaskSum
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
    "a float for a payload": lambda: MeanLoss(value=0.5),
    "features for records": lambda: Embedding(rows=FEATURES),
    "features as integers for records": lambda: Embedding(rows=(1000 * FEATURES).astype(np.int64)),
    "a column of integers for records": lambda: Step(rows=np.array([5, 7, 5])),
    "negative integers for records": lambda: Step(rows=np.array([-5, 7, 3])),
    "integers beyond any record": lambda: Step(rows=np.array([1 << 40, 3])),
    "features as a list of places": lambda: SealedJoins(
        places=(1000 * FEATURES).astype(int).ravel().tolist()
    ),
    "labels as a list of places": lambda: SealedJoins(places=[0, 1, 1, 0, 3]),
    "a count that is all features": lambda: BatchReady(iteration=int.from_bytes(FEATURES.tobytes())),
    "an array for a fact": lambda: BatchReady(iteration=FEATURES),
    "labels for a purpose": lambda: Embed(rows=ROWS, purpose="0110100110010110"),
    "a float for a count": lambda: BatchReady(iteration=0.25),
    "a numpy number for a count": lambda: BatchReady(iteration=np.int64(3)),
    "bytes for a word": lambda: BatchReady(iteration=b"123"),
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
    return Exchange(links["p1"], places, protocol.read, channel="server", totals=Totals())


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
    if leaves:
        assert asyncio.run(exchange.act(machine, "start")) == [] and exchange.link.number == 1
    else:
        with pytest.raises(EgressError, match="not for p0"):
            asyncio.run(exchange.act(machine, "start"))


def test_machines_and_messages_past_the_gate_are_not_sent(exchange: Exchange) -> None:
    envelope = Envelope(1, -1, PlainValue(round=0, values=FEATURES))
    machine = PlainSum(workers=3).node(1).round(FEATURES, round=0)
    with pytest.raises(EgressError, match="no gate has accounted for"):
        asyncio.run(exchange.act(machine, "start"))
    with pytest.raises(EgressError, match="no dealer sends"):
        asyncio.run(exchange.deal([Envelope(1, 0, Operand(round=0, words=np.zeros((2, 2), np.uint64)))]))
    with pytest.raises(EgressError, match="only declared"):
        asyncio.run(exchange.link.send("server", envelope.message))
    with pytest.raises(EgressError, match="only declared"):
        asyncio.run(exchange.link.send("p2", Operand(round=0, words=FEATURES.view(np.uint32))))


# -- nobody else makes payloads -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [Released, Contribution, Accounted, Masked, Arrived, Passed])
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


MAKERS = {"alignments.py", "gate.py", "passing.py", "payloads.py"}
PAYLOADS = {"Released", "Contribution", "Accounted", "Masked", "Arrived", "Passed"}


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
    tree = parsed(path)
    aliases = [
        each for node in ast.walk(tree) for each in getattr(node, "names", ()) if hasattr(each, "asname")
    ]
    imported = {each.asname or each.name.split(".")[0] for each in aliases}
    for node in ast.walk(tree):
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
        if roles and (why := _reaches_past(node, path.name, imported)):
            found.append(f"line {node.lineno} {why}")
    return found


PARTS = {"arrived", "reach", "fields", "hosts", "phase", "address", "noise", "budget", "ledger", "journal"}
PARTS |= {"allows", "answers", "mechanism", "totals", "values", "source", "machine", "protocol", "round"}
DYNAMIC = {"__setattr__", "__dict__", "__globals__", "__closure__", "__code__", "__class__", "__reduce__"}
DYNAMIC |= {"setflags", "writeable", "ctypes", "gc", "__module__"}
CALLS = {"exec", "eval", "compile", "__import__", "Envelope", "Totals", "Arrivals", "register_loss"}
FOREIGN = {"_predictors", "_baseline_prediction"}  # scikit-learn's


def _reaches_past(node: ast.AST, file: str, imported: set[str]) -> str:
    """How a line of a role could change what the trusted core has made, or make what arrives."""
    name, owner = getattr(node, "attr", getattr(node, "id", "")), getattr(node, "value", None)
    base = getattr(getattr(owner, "func", None), "id", "") == "super"
    own = base or getattr(owner, "id", "") in ("self", "cls")
    stores = isinstance(getattr(node, "ctx", None), ast.Store)
    if isinstance(node, ast.Import | ast.ImportFrom) and {alias.name for alias in node.names} & DYNAMIC:
        return "imports what changes anything"
    if name in DYNAMIC:
        return f"uses {name}"
    if isinstance(node, ast.Attribute) and not own:
        if name.startswith("_") and not name.startswith("__") and name not in FOREIGN:
            return f"uses {name}, which is another's own"
        if stores and (name in PARTS or getattr(owner, "id", "") in imported):
            return f"changes {name} of something else"
        if name in ("load", "state") and getattr(owner, "attr", getattr(owner, "id", "")) == "gate":
            return "loads the gate's memory"
    if isinstance(node, ast.Subscript) and stores and getattr(owner, "id", "") in ("MESSAGES", "LOSSES"):
        return "changes what is declared"
    if (
        isinstance(node, ast.Subscript)
        and stores
        and getattr(getattr(owner, "func", None), "id", "") == "vars"
    ):
        return "sets attributes of something else"
    if isinstance(node, ast.ClassDef) and file != "messages.py":
        return "declares a message" if {getattr(each, "id", "") for each in node.bases} & {"Content"} else ""
    called = getattr(getattr(node, "func", None), "id", "")
    if called == "setattr" and getattr(node.args[0], "id", "") != "self":
        return "sets attributes of something else"
    if called in CALLS and (called, file) != DEALERS:
        return f"calls {called}"
    return ""


DEALERS = ("Envelope", "roles.py")  # a dealer, who has no data, hears public facts and deals randomness


@pytest.mark.parametrize(
    "line",
    [
        "from securevfl.privacy.payloads import _KEY",
        "payloads._KEY",
        "getattr(payloads, '_KEY')",
        "object.__setattr__(fake, '_made_with', key)",
        "Released(values=raw)",
        "payloads.Masked(message=raw)",
        "Packet(kind='sum', fields=raw)",
        "self.link._post(raw)",
        "self.link.deliver(raw)",
        "message.fields = {'values': raw}",
        "message.arrived = raw",
        "self.link.hosts = {'p2': 'p0'}",
        "self.link.phase = ''",
        "self.gate.noise = none",
        "self.gate.journal = Replaying(raw)",
        "self.gate.totals = totals",
        "self.gate.totals._opened['server', 0] = raw",
        "self.gate.totals.enter('server', 0, abstained); Totals()",
        "self.gate.load({'arrived': {'kept': raw}, 'released': {}})",
        "kept._values[:] = raw",
        "machine.machine.receive(Envelope(0, -1, PlainValue(round=0, values=raw)))",
        "machine.machine._values = raw",
        "object.__setattr__(released, 'values', raw)",
        "setattr(released, 'values', raw)",
        "released.values.flags.writeable = True",
        "released.values.setflags(write=True)",
        "released.__dict__['values'] = raw",
        "task_loss.__code__ = mine.__code__",
        "from securevfl.models import losses; losses.task_loss = mine",
        "import ctypes",
        "import gc",
        "exec(text)",
        "LOSSES['mine'] = mine",
        "register_loss(mine)",
        "MESSAGES['mine'] = mine",
        "class Features(Content, kind='features'): pass",
        "class Node(PlainNode): __module__ = PlainNode.__module__",
        "vars(node)['_round'] = mine",
    ],
)
def test_the_search_finds_what_it_is_for(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    role = tmp_path / "securevfl" / "algorithms" / "role.py"
    role.parent.mkdir(parents=True)
    role.write_text(line)
    assert _makes(role)


# -- receipt ------------------------------------------------------------------------------------------------

GOOD = {"rows": ROWS.astype(np.int32), "purpose": "refresh"}


@pytest.mark.parametrize(
    ("kind", "sender", "fields", "match"),
    [
        ("features", "server", {}, "'features', a kind of message that nobody has declared"),
        ("embed", "server", GOOD | {"features": FEATURES}, "a field 'features' that it does not have"),
        ("embed", "server", {"purpose": "refresh"}, "without rows"),
        ("embed", "server", GOOD | {"rows": FEATURES}, "'rows' is not a list of distinct record indices"),
        ("embed", "server", GOOD | {"purpose": 3}, "'purpose' is not embedding or initial"),
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
    total = gate_of("p0").hand_on(opened(), kind="sum", observers=("p1",), dtype=np.float32)
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
    with pytest.raises(InputError, match="two payloads"):

        class Both(Content, kind="both"):
            own: Any = released("embedding")
            others: Any = released("embedding")

    assert MESSAGES["embedding"] is before
    with pytest.raises(TypeError, match="features"):
        Embedding(rows=ROWS, features=FEATURES)


# -- handing on ---------------------------------------------------------------------------------------------


def opened(*entering: tuple[str, ...], gate: Gate | None = None, number: int = 0) -> Passed:
    """The total of a sum over three parties, obtained at p0, whose own part is written down for others."""
    gate = gate or gate_of("p0")
    places = {0: "p0", 1: "p1", 2: "p2", -1: "server"}
    links, protocol = VirtualNetwork(HOSTS).links, PlainSum(workers=3)
    exchange = Exchange(links["server"], places, protocol.read, channel="server", totals=gate.totals)
    for observers in entering:
        own = gate.contribute(
            torch.from_numpy(FEATURES), rows=ROWS, kind="embedding", observers=observers, noise=None
        )
        exchange.enter(protocol.node(0), own, round=number)
    machine = exchange.attend(
        protocol.node(-1), round=number, shape=FEATURES.shape, head=gate.ledger.released
    )
    machine.machine.start()
    for worker in range(3):
        for envelope in protocol.node(worker).round(FEATURES.astype(np.float64), round=number).start():
            machine.machine.receive(envelope)
    gate.totals.open("server", number, machine)
    return gate.total("server", number)


def arrived(links: dict[str, Link], sender: str, values: Any) -> Packet:
    """A message with embeddings, as the server's link gives it to a role that hands things on."""
    links["server"].handing = frozenset({"embedding"})
    send(links, sender, "server", Embedding(rows=ROWS, values=values))
    if not links["server"]._inbox:  # the other carriers have given it to the wire
        packet = Packet(kind="embedding", sender=sender, receiver="server", fields={"values": values.values})
        links["server"].deliver(Packet.from_bytes(packet.to_bytes()))
    return asyncio.run(next_of(links["server"]))


def empty() -> Arrivals:
    return Arrivals((3, 2, 2), device=torch.device("cpu"))


def received_labels() -> Arrivals:
    """Labels, all of them 0, that p0 let out to p1, as p1 keeps them."""
    links, kept = VirtualNetwork(HOSTS).links, Arrivals((0,), device=torch.device("cpu"))
    links["p1"].handing = frozenset({"labels"})
    labels = gate_of("p0").release_exact(np.zeros(3, np.int64), rows=ROWS, kind="labels", observers=("p1",))
    send(links, "server", "p1", Labels(values=labels))
    kept.put(asyncio.run(next_of(links["p1"])).arrived)
    return kept


def test_what_is_handed_on_has_a_name() -> None:
    with pytest.raises(PlanError, match="'embedding' is not handed on"):
        gate_of("p0").hand_on(opened(), kind="embedding", observers=("p1",))


@pytest.mark.parametrize("values", [FEATURES, torch.from_numpy(FEATURES), 0.5, Inside(values=FEATURES)])
def test_a_role_cannot_hand_on_what_it_likes(values: Any) -> None:
    gate = gate_of("p0")
    with pytest.raises(EgressError, match="cannot be handed on"):
        gate.hand_on(values, kind="sum", observers=("p1",))
    with pytest.raises(EgressError, match="cannot be handed on"):
        gate.hand_on(let_out("p1", owner="p0"), kind="sum", observers=("p1",))  # type: ignore[arg-type]
    with pytest.raises(EgressError, match="cannot be handed on"):
        joined([opened(), values])
    with pytest.raises(EgressError, match="did not come over a link"):
        empty().put(values, slice(None), 0)


def test_totals_come_from_machines_alone() -> None:
    class Mine:
        done = True

        def result(self) -> Any:
            return FEATURES

    gate = gate_of("p0")
    with pytest.raises(EgressError, match="not a machine of a protocol"):
        gate.hide(Mine(), mechanism="masked", observers=("p1",), assumption="")  # type: ignore[arg-type]
    with pytest.raises(EgressError, match="not a machine that was accounted for"):
        gate.totals.open("server", 0, Mine())  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="no machine has opened"):
        gate.total("server", 0)


def test_a_total_goes_to_those_who_may_know_ones_own_part() -> None:
    gate = gate_of("p0")
    anybody = gate.hand_on(opened(gate=gate), kind="sum", observers=("p1", "p2"))
    assert np.allclose(anybody.values, 3 * FEATURES.astype(np.float64))
    both = opened(("p1", "p2"), gate=gate, number=1)
    assert gate.hand_on(both, kind="sum", observers=("p1", "p2")).head == gate.ledger.released
    for entering in ((("p1",),), (("p1",), ("p1", "p2")), (("p1", "p2"), ("p1",))):
        narrow = opened(*entering, gate=gate, number=2)
        assert gate.hand_on(narrow, kind="sum", observers=("p1",)).observers == ("p1",)
        with pytest.raises(EgressError, match="own part of a sum was not let out to p2"):
            gate.hand_on(narrow, kind="sum", observers=("p1", "p2"))
    with pytest.raises(ProtocolError, match="no machine has opened"):
        gate.total("server", 2)


def test_forgotten_parts_are_handed_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("securevfl.privacy.passing.WINDOW", 2)
    totals, gate = Totals(), gate_of("p0")
    own = gate.contribute(
        torch.from_numpy(FEATURES), rows=ROWS, kind="embedding", observers=("p1",), noise=None
    )
    for number in range(3):
        totals.enter("server", number, own)
    totals._opened["server", 0] = FEATURES.astype(np.float64)
    assert totals.take("server", 0)[1] == frozenset()


def test_what_arrived_goes_to_those_who_may_know_ones_own_part(carrier: Carrier) -> None:
    links, _ = carrier
    gate, kept = gate_of("p0"), empty()
    kept.put(arrived(links, "p1", let_out("p0")).arrived, slice(None), 0)
    assert gate.hand_on(kept.sums(ROWS), kind="sum", observers=("p1", "p2")).kind == "sum"
    kept.put(arrived(links, "p0", let_out("p1", owner="p0")).arrived, slice(None), 1)
    assert gate.hand_on(kept.sums(ROWS), kind="sum", observers=("p1",)).kind == "sum"
    with pytest.raises(EgressError, match="not let out to p2"):
        gate.hand_on(kept.sums(ROWS), kind="sum", observers=("p1", "p2"))
    kept.put(arrived(links, "p0", Inside(values=FEATURES)).arrived, slice(None), 1)
    with pytest.raises(EgressError, match="not let out to p1"):
        gate.hand_on(kept.rows(ROWS), kind="sum", observers=("p1",))


def test_what_arrived_is_kept_by_the_gate_with_who_may_know_it(carrier: Carrier) -> None:
    links, _ = carrier
    gate, again = gate_of("p0"), gate_of("p0")
    kept = gate.arrivals("kept", (3, 2, 2), device=torch.device("cpu"))
    restored = again.arrivals("kept", (3, 2, 2), device=torch.device("cpu"))
    kept.put(arrived(links, "p0", let_out("p1", owner="p0")).arrived, slice(None), 1)
    again.load(gate.state(), fresh=False)
    assert np.array_equal(restored.rows(ROWS).values, kept.rows(ROWS).values)
    assert again.hand_on(restored.sums(ROWS), kind="sum", observers=("p1",)).kind == "sum"
    with pytest.raises(EgressError, match="not let out to p2"):
        again.hand_on(restored.sums(ROWS), kind="sum", observers=("p2",))
    again.arrivals("another", (3,), device=torch.device("cpu"))
    with pytest.raises(RunError, match="another version has saved"):
        again.load(gate.state(), fresh=False)


def test_what_arrived_cannot_be_exchanged_for_something_else(carrier: Carrier) -> None:
    """A role has the packet in its hands before the table has it."""
    links, _ = carrier
    released = let_out("p0")
    packet, secret = arrived(links, "p1", released), FEATURES + 100
    packet.fields = {"values": secret}
    other = dataclasses.replace(packet, fields={"values": secret})
    assert other.arrived is None
    with pytest.raises(TypeError):
        packet.arrived.fields["values"] = secret
    with pytest.raises(ValueError, match="read-only"):
        packet.arrived.fields["values"][:] = secret
    with pytest.raises(TypeError, match="arrived"):
        Packet(kind="embedding", sender="p1", receiver="server", arrived=packet.arrived)  # type: ignore[call-arg]
    kept = empty()
    kept.put(packet.arrived, slice(None), 0)
    passed = kept.rows(ROWS)
    passed.source[:] = 100
    with pytest.raises(ValueError, match="read-only"):
        passed.values[:] = 100
    assert np.array_equal(passed.values[:, 0], released.values)


def test_a_table_and_figures_cannot_be_filled_by_hand() -> None:
    kept = empty()
    with pytest.raises(AttributeError, match="values"):
        kept.values = torch.from_numpy(FEATURES)  # type: ignore[misc]
    kept.values[:] = 100
    kept.state()["values"][:] = 100
    kept.rows(slice(None)).source[:] = 100
    assert not kept.rows(ROWS).values.any()
    total, labels = opened(), received_labels()
    gate, figures = gate_of("p0"), computed(metrics, "multiclass", total, labels.rows(slice(None)))
    for each in (figures, gate.hand_on(figures, kind="metrics", observers=("p1",))):
        with pytest.raises(TypeError, match="item assignment"):
            each.values["loss"] = 100.0


def test_figures_are_computed_at_the_gate() -> None:
    total = opened()
    for other in (lambda outputs: FEATURES, functools.partial(task_loss, "regression"), refute, predictions):
        with pytest.raises(EgressError, match=r"is not task_loss or metrics of securevfl\.models\.losses"):
            computed(other, total, total)
    with pytest.raises(EgressError, match="cannot be handed on"):
        computed(task_loss, "regression", total, FEATURES)  # type: ignore[arg-type]
    with pytest.raises(EgressError, match="not a public word"):
        computed(task_loss, "regression", total, total, loss=FEATURES)  # type: ignore[arg-type]
    labels = torch.zeros(3, dtype=torch.int64)
    outputs = torch.from_numpy((3 * FEATURES.astype(np.float64)).astype(np.float32))
    loss = computed(task_loss, "multiclass", total, received_labels().rows(slice(None)), loss="auto")
    assert loss.values == float(task_loss("multiclass", outputs, labels))


# -- ten more ways around -----------------------------------------------------------------------------------


class Leaking:
    """Looks like a participant's state, and makes a shipped protocol's machine of whatever it likes."""

    def __init__(self) -> None:
        self.protocol = PlainSum(workers=3)

    def round(self, *args: Any, **named: Any) -> Any:
        return self.protocol.node(1).round(FEATURES.astype(np.float64), round=0)

    def setup(self) -> Any:
        return self.round()


class LeakingNode(type(PlainSum(workers=3).node(1))):  # type: ignore[misc]
    round = Leaking.round
    setup = Leaking.setup


def plain_machine() -> Any:
    return PlainSum(workers=3).node(1).round(FEATURES.astype(np.float64), round=0)


def test_payloads_cannot_be_made_writeable_again() -> None:
    exact = gate_of("p0").release_exact({"values": FEATURES}, rows=ROWS, kind="x", observers=("p1",))
    own = gate_of("p1").contribute(
        torch.from_numpy(FEATURES), rows=ROWS, kind="embedding", observers=("p0",), noise=None
    )
    for values in (let_out("p0").values, exact.values["values"], own.values, opened().values):
        while isinstance(values, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                values.flags.writeable = True
            values = values.base
        assert type(values) is bytes


def test_payloads_of_a_class_of_ones_own_are_refused(carrier: Carrier) -> None:
    links, left = carrier

    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
    class MyReleased(Released):
        def __post_init__(self, key: object) -> None:
            pass

    class MyPassed(Passed):
        def __post_init__(self, key: object) -> None:
            pass

    mine = MyReleased(values=FEATURES, head=Head("p1", 0, "0" * 64), observers=("p0",), kind="embedding")
    with pytest.raises(EgressError, match="which passed no gate"):
        send(links, "p1", "server", Embedding(rows=ROWS, values=mine))
    with pytest.raises(EgressError, match="cannot be handed on"):
        gate_of("p0").hand_on(MyPassed(values=FEATURES, reach=None), kind="sum", observers=("p1",))
    assert left == []


def test_a_role_cannot_say_who_is_inside(carrier: Carrier) -> None:
    links, left = carrier
    with pytest.raises(TypeError, match="item assignment"):
        links["p1"].hosts["server"] = "p1"  # type: ignore[index]
    HOSTS["server"] = "p1"
    try:
        with pytest.raises(EgressError, match="must stay inside"):
            send(links, "p1", "server", Embedding(values=Inside(values=FEATURES)))
    finally:
        HOSTS["server"] = "p0"
    assert left == []


@pytest.mark.parametrize("node", [Leaking, lambda: LeakingNode(PlainSum(workers=3), 1)])
def test_machines_come_from_the_nodes_of_shipped_protocols(
    node: Callable[[], Any], exchange: Exchange
) -> None:
    head = gate_of("p1").ledger.released
    with pytest.raises(EgressError, match="not of a protocol that is shipped"):
        exchange.attend(node(), round=0, shape=FEATURES.shape, head=head)
    with pytest.raises(EgressError, match="not of a protocol that is shipped"):
        exchange.agree(node(), head)
    with pytest.raises(EgressError, match="not of a protocol that is shipped"):
        exchange.enter(node(), gate_of("p1").abstain(FEATURES.shape, noise=None), round=0)


@pytest.mark.parametrize("name", ["start", "_start"])
@pytest.mark.parametrize("make", ["round", "_round"])
def test_a_method_put_before_a_protocols_own_is_not_called(make: str, name: str, exchange: Exchange) -> None:
    secret = Envelope(1, -1, PlainValue(round=0, values=FEATURES.astype(np.float64) + 100))
    abstained, node = gate_of("p1").abstain(FEATURES.shape, noise=None), PlainSum(workers=3).node(1)
    setattr(node, make, Leaking().round)
    with pytest.raises(EgressError, match="PlainNode is not of a protocol that is shipped"):
        exchange.enter(node, abstained, round=0)
    sent: list[Packet] = []
    exchange.link._post = sent.append
    machine = exchange.enter(PlainSum(workers=3).node(1), abstained, round=0)
    setattr(machine.machine, name, lambda: [secret])
    with pytest.raises(EgressError, match="is not a machine of a protocol that is shipped"):
        asyncio.run(exchange.act(machine, "start"))
    with pytest.raises(EgressError, match="is not a machine of a protocol that is shipped"):
        asyncio.run(exchange.follow(machine))
    assert sent == []


class LeakingSum(PlainSum):
    def encode(self, value: Any) -> Any:
        return FEATURES.astype(np.float64)


def changed_sum() -> PlainSum:
    changed = PlainSum(workers=3)
    changed.encode = lambda value: FEATURES.astype(np.float64)  # type: ignore[method-assign]
    return changed


def changed_point() -> PlainSum:
    class Leaking(FixedPoint):
        def encode(self, *args: Any, **named: Any) -> Any:
            return FEATURES.astype(np.float64)

    changed = PlainSum(workers=3)
    changed.fixed_point = Leaking()
    return changed


@pytest.mark.parametrize("make", [lambda: LeakingSum(workers=3), changed_sum, changed_point])
def test_a_sum_of_ones_own_says_nothing_in_a_shipped_ones_name(
    make: Callable[[], PlainSum], exchange: Exchange
) -> None:
    """Machines ask their sum how values are written; the entry is of what the gate let in."""
    given = gate_of("p1").abstain(FEATURES.shape, noise=None)
    with pytest.raises(EgressError, match="not of a protocol that is shipped"):
        exchange.enter(make().node(1), given, round=0)


def test_features_are_no_signature(exchange: Exchange) -> None:
    class Signing(Authenticator):
        def sign(self, statement: bytes) -> bytes:
            return FEATURES.tobytes()

        def verify(self, address: int, statement: bytes, signature: bytes) -> None:
            pass

    node = PairwiseMaskSum(workers=3, threshold=3).node(1, Signing())
    with pytest.raises(EgressError, match="Signing does not sign with a certificate"):
        exchange.agree(node, gate_of("p1").ledger.released)


def test_records_cannot_be_changed_after_they_were_looked_at() -> None:
    """In one process a receiver gets them by reference."""
    links, _ = virtual()
    for mine in (ROWS.copy(), np.arange(6, dtype=np.int64)[:3]):
        view = mine.view()
        view.flags.writeable = False
        send(links, "server", "p1", Embed(rows=view, purpose="refresh"))
        mine[:] = (1000 * FEATURES[:, 0]).astype(np.int64)
        packet = asyncio.run(next_of(links["p1"]))
        for named in (packet.rows, packet["rows"]):
            assert np.array_equal(named, ROWS)
    for named in (packet.rows, fixed(ROWS), fixed(ROWS[:0])):
        if named.size:
            with pytest.raises(ValueError, match="WRITEABLE"):
                named.flags.writeable = True


def test_machines_that_may_send_their_values_need_a_contribution() -> None:
    gate, said = gate_of("p1"), {"observers": ("p0",)}
    before = gate.ledger.head
    for attempt in (
        lambda: gate.hide(plain_machine(), mechanism="masked", assumption="", **said),  # type: ignore[arg-type]
        lambda: gate.open_totals(plain_machine(), rows=ROWS, sensitivity=1e-9, sigma=9.0, kind="x", **said),  # type: ignore[arg-type]
        lambda: gate.open_scores(plain_machine(), rows=ROWS, vectors=3, **said),  # type: ignore[arg-type]
    ):
        with pytest.raises(EgressError, match="protocol that hides all it sends"):
            attempt()
    with pytest.raises(EgressError, match="not a machine of an alignment"):
        let_align(gate.ledger, plain_machine(), way="x", ids=3, most=3, times=1, before=0, **said)  # type: ignore[arg-type]
    assert gate.ledger.head == before


def test_a_sum_is_entered_where_it_is_known_who_may_learn_it(exchange: Exchange) -> None:
    gate = gate_of("p1")
    own = gate.contribute(
        torch.from_numpy(FEATURES), rows=ROWS, kind="embedding", observers=("p0",), noise=None
    )
    nowhere = Exchange(exchange.link, exchange.places, exchange.read, channel="server")
    with pytest.raises(EgressError, match="nobody knows here"):
        nowhere.enter(PlainSum(workers=3).node(1), own, round=0)
    totals = Totals()
    totals.enter("server", 0, own)
    totals.enter("server", 0, gate.abstain(FEATURES.shape, noise=None))
    totals._opened["server", 0] = FEATURES.astype(np.float64)
    assert totals.take("server", 0)[1] == frozenset({"p0"})


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, 1, 1]),
        np.array([1, 0, 0]),
        np.array([0, -3]),
        np.array([True, False, True]),
        np.array([[0, 1]]),
        [0.0, 1.0],
    ],
)
def test_nothing_is_spelt_with_what_arrived(index: Any) -> None:
    """Two records whose values the other knows would be an alphabet, and a role's labels the word."""
    for choose in (empty().rows, empty().sums):
        with pytest.raises(EgressError, match="named once each"):
            choose(index)
    zero, one = empty().rows(ROWS[:1]), empty().rows(ROWS[1:2])
    assert len(joined([one, zero]).values) == 2
    with pytest.raises(EgressError, match="named once each"):
        joined([one, zero, one])


def test_figures_are_those_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    total, labels = opened(), received_labels().rows(slice(None))

    class Word(str):
        secret = FEATURES

    def task_loss(task: str, outputs: Any, labels: Any, loss: str = "auto") -> float:
        return float(FEATURES[0, 0])

    task_loss.__module__ = losses.__name__
    with pytest.raises(EgressError, match="is not task_loss"):
        computed(task_loss, "multiclass", total, labels)
    monkeypatch.setattr(losses, "task_loss", task_loss)
    with pytest.raises(EgressError, match="is not task_loss"):
        computed(task_loss, "multiclass", total, labels)
    with pytest.raises(EgressError, match="cannot be handed on"):
        computed(metrics, Word("multiclass"), total, labels)
    with pytest.raises(EgressError, match="not a public word"):
        computed(metrics, "multiclass", total, labels, loss=Word("auto"))
    monkeypatch.undo()
    with pytest.raises(PlanError):
        computed(metrics, "multiclass", total, labels, loss="0110100110010110")


@pytest.mark.parametrize("dtype", [object, np.complex128, "V8", "M8[s]", "S8"])
def test_another_type_does_not_carry_more(dtype: Any, carrier: Carrier) -> None:
    links, left = carrier
    try:
        given = gate_of("p0").hand_on(opened(), kind="sum", observers=("p1",), dtype=dtype)
    except (TypeError, ValueError):
        return
    with pytest.raises(EgressError, match="is not an array of f"):
        send(links, "server", "p1", Sum(values=given))
    assert left == []
