"""The contract: binary forms of all messages, hostile bytes, the public surface."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sum_conformance import Foreign, snapshot

import securevfl.protocols
from securevfl.errors import InputError, WireError
from securevfl.protocols import Driver, PairwiseMaskSum, PlainTreeSum, TwoTreeSum, run_setup
from securevfl.protocols.sums.tree_sums import Subtotal
from securevfl.protocols.wire import pack

PROTOCOLS = [
    PlainTreeSum(workers=3),
    TwoTreeSum(workers=3),
    PairwiseMaskSum(workers=4),
    PairwiseMaskSum(workers=3, collusion=0, hybrid=True),
]


def recorded():
    """One message of every kind, as really sent."""
    found = {}
    for protocol in PROTOCOLS:
        nodes = {address: protocol.node(address) for address in protocol.addresses}
        sent = run_setup(nodes)
        machines = {a: node.round(np.ones(3) if a >= 0 else None, round=2) for a, node in nodes.items()}
        driver = Driver(machines)
        driver.start()
        driver.run()
        for envelope in sent + driver.transcript:
            found.setdefault(envelope.message.kind, (protocol, envelope.message))
    return found


RECORDED = recorded()


def test_every_kind_was_recorded():
    kinds = {message.kind for protocol in PROTOCOLS for message in protocol.messages}
    assert set(RECORDED) == kinds


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_round_trip_and_truncation(kind):
    protocol, message = RECORDED[kind]
    data = message.to_bytes()
    for again in (protocol.decode(data), type(message).from_bytes(data)):
        assert type(again) is type(message)
        assert snapshot(vars(again)) == snapshot(vars(message))
    step = max(1, len(data) // 300)
    for size in range(0, len(data), step):
        with pytest.raises(WireError):
            protocol.decode(data[:size])
    with pytest.raises(WireError):
        protocol.decode(data + b"\0")


@pytest.mark.parametrize("kind", sorted(RECORDED))
@pytest.mark.parametrize("wrong", [None, True, 1.5, "text", b"raw", [1], ["a"], np.zeros(2), 7])
def test_fields_of_another_type_are_refused(kind, wrong):
    protocol, message = RECORDED[kind]
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if type(value) is type(wrong) and not (isinstance(value, list) and wrong == ["a"]):
            continue
        with pytest.raises(WireError):
            protocol.decode(pack(kind, {**vars(message), field.name: wrong}))


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_missing_and_unknown_fields_are_refused(kind):
    protocol, message = RECORDED[kind]
    fields = dict(vars(message))
    with pytest.raises(WireError, match="fields"):
        protocol.decode(pack(kind, {**fields, "extra": 1}))
    for name in fields:
        with pytest.raises(WireError, match="fields"):
            protocol.decode(pack(kind, {k: v for k, v in fields.items() if k != name}))


@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_changed_bytes_decode_to_a_message_or_are_refused(kind, data):
    protocol, message = RECORDED[kind]
    changed = bytearray(message.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = protocol.decode(bytes(changed))
    except WireError:
        return
    assert type(decoded) in protocol.messages
    assert type(decoded.round) is int


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    for protocol in PROTOCOLS:
        with pytest.raises(WireError):
            protocol.decode(data)


def test_foreign_kinds_are_refused():
    data = Foreign(round=0).to_bytes()
    for protocol in PROTOCOLS:
        with pytest.raises(WireError, match="does not belong"):
            protocol.decode(data)
    with pytest.raises(WireError, match="expected"):
        Subtotal.from_bytes(data)


def test_messages_cannot_be_changed():
    message = Foreign(round=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.round = 1
    with pytest.raises(TypeError):
        Foreign(0)


def test_one_worker_is_refused():
    for make in (PlainTreeSum, TwoTreeSum, PairwiseMaskSum):
        with pytest.raises(InputError):
            make(workers=1)


def test_public_surface():
    for name in securevfl.protocols.__all__:
        assert getattr(securevfl.protocols, name) is not None
    promised = "FixedPoint build_trees TreePair PlainTreeSum TwoTreeSum PairwiseMaskSum CKKSSum BFVSum"
    assert set(promised.split()) <= set(securevfl.protocols.__all__)


def test_the_room_loads_no_heavy_library():
    heavy = ("torch", "tenseal", "scipy")
    code = f"import sys, securevfl.protocols; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
