"""Private ID alignment: roles with a stand-in for the cryptography, and with openmined-psi if installed."""

import dataclasses
import hashlib
import importlib.util
import itertools
import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psi_stand_in import stand_in

from securevfl.errors import DataError, DropoutError, InputError, MissingExtra, ProtocolError, WireError
from securevfl.protocols import Envelope, PrivateAlignment, drive
from securevfl.protocols.alignment.protocol import AlignRequest, AlignResponse, CommonIds, prepare_ids
from securevfl.protocols.alignment.psi import Client, Server

INSTALLED = importlib.util.find_spec("private_set_intersection") is not None
needs_psi = pytest.mark.skipif(
    not INSTALLED, reason="openmined-psi is not installed: pip install 'securevfl[psi]'"
)


@pytest.fixture(params=["stand-in", pytest.param("openmined", marks=needs_psi)])
def backend(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch)
    return request.param


def started(protocol, sets):
    machines = [protocol.machine(address, ids) for address, ids in enumerate(sets)]
    return machines, [envelope for machine in machines for envelope in machine.start()]


SETS = [["d", "a", "b", "c", "x"], ["c", "b", "y", "d"], ["z", "d", "c"], ["c", "q", "d", "b"]]


@pytest.mark.parametrize("parties", [2, 3, 4])
def test_all_parties_learn_the_intersection_and_their_rows(backend, parties):
    sets = SETS[:parties]
    common = sorted(set.intersection(*map(set, sets)))
    results = PrivateAlignment(parties=parties).align(sets)
    for own, result in zip(sets, results, strict=True):
        assert list(result.ids) == common
        assert [own[row] for row in result.rows] == common


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.lists(st.sets(st.text("abcdeä😀", min_size=1, max_size=3), max_size=12), min_size=2, max_size=4))
def test_any_sets(backend, sets):
    results = PrivateAlignment(parties=len(sets)).align([sorted(ids) for ids in sets])
    assert all(set(result.ids) == set.intersection(*sets) for result in results)


@pytest.mark.parametrize(
    "sets", [[["a"], ["b"], ["a"]], [["a", "b"], [], ["a"]], [[], ["a"], ["b"]], [["a"], ["a"], []]]
)
def test_empty_intersections(backend, sets):
    assert [result.ids for result in PrivateAlignment(parties=3).align(sets)] == [(), (), ()]


def test_through_the_wire_and_who_sees_what(backend):
    protocol = PrivateAlignment(parties=4)
    sent = drive([protocol.machine(address, ids) for address, ids in enumerate(SETS)], codec=protocol)
    assert all(0 in (each.sender, each.receiver) for each in sent)  # members never talk to each other
    asked = [(e.receiver, e.message.count) for e in sent if isinstance(e.message, AlignRequest)]
    assert asked == [(1, 5), (2, 3), (3, 2)]  # sizes of the running intersection, as documented


def test_wrong_messages_change_nothing(backend):
    protocol = PrivateAlignment(parties=3)
    machines, pending = started(protocol, SETS[:3])
    past = []
    while pending:
        envelope = pending.pop(0)
        machine = machines[envelope.receiver]
        bad = [Envelope(other, envelope.receiver, envelope.message) for other in (1, 2, 3, -1)]
        bad += [old for old in past if old.receiver == envelope.receiver]
        bad += [
            Envelope(envelope.sender, envelope.receiver, dataclasses.replace(envelope.message, **changes))
            for changes in broken(envelope.message)
        ]
        for wrong in bad:
            if wrong.sender == envelope.sender and wrong.message is envelope.message:
                continue
            with pytest.raises(ProtocolError):
                machine.receive(wrong)
        past.append(envelope)
        pending += machine.receive(envelope)
        with pytest.raises(ProtocolError):
            machine.receive(envelope)
    assert [machine.alignment().ids for machine in machines] == [("c", "d")] * 3


def broken(message):
    yield {"round": 1}
    match message:
        case AlignRequest():
            yield {"request": message.request[:-1]}
            yield {"count": message.count + 1}
            yield {"count": 0}
            yield {"count": 1 << 40}
            yield {"normalisation": "trim"}
        case AlignResponse():
            yield {"response": message.response[:-1]}
            yield {"response": b""}
            yield {"setup": message.setup[:-1]}
        case CommonIds():
            yield {"ids": [*message.ids, "zzz"]}
            yield {"ids": message.ids[::-1]}
            yield {"ids": message.ids + message.ids}


def test_an_announcement_before_the_question_must_be_empty(backend):
    for ids, fine in ((["c"], False), ([], True)):
        member = PrivateAlignment(parties=3).machine(2, SETS[2])
        member.start()
        envelope = Envelope(0, 2, CommonIds(round=0, ids=ids))
        if fine:
            assert member.receive(envelope) == []
            assert member.alignment().ids == ()
        else:
            with pytest.raises(ProtocolError, match="announced"):
                member.receive(envelope)


def test_dropout_ends_the_alignment(backend):
    machines, pending = started(PrivateAlignment(parties=3), SETS[:3])
    for machine in machines:
        with pytest.raises(DropoutError):
            machine.drop((machine.address + 1) % 3)
        for stranger in (machine.address, 3, -1):
            with pytest.raises(ProtocolError):
                machine.drop(stranger)
        with pytest.raises(ProtocolError, match="not done"):
            machine.alignment()
    while pending:
        envelope = pending.pop(0)
        pending += machines[envelope.receiver].receive(envelope)
    assert machines[0].drop(1) == []


def test_bad_settings(backend):
    with pytest.raises(InputError):
        PrivateAlignment(parties=1)
    with pytest.raises(InputError, match="trim-casefold"):
        PrivateAlignment(parties=2, normalisation="upper")
    protocol = PrivateAlignment(parties=2)
    with pytest.raises(InputError):
        protocol.machine(2, ["a"])
    with pytest.raises(InputError):
        protocol.align([["a"]])
    with pytest.raises(WireError):
        protocol.decode(b"SVFL nonsense")


@pytest.mark.parametrize("ids", [["a", "a"], [""], [3], [None], ["x" * 1025], ["\ud800"], [b"a"]])
def test_bad_ids_are_refused(ids):
    with pytest.raises(DataError):
        prepare_ids(ids)


def test_normalisation_is_explicit():
    assert prepare_ids([" A", "a"]) == {" A": 0, "a": 1}
    assert prepare_ids([" A ", "e\u0301"], "trim") == {"A": 0, "é": 1}
    assert prepare_ids([" STRASSE "], "trim-casefold") == prepare_ids(["straße"], "trim-casefold")
    with pytest.raises(DataError, match="positions 0 and 1"):
        prepare_ids([" A", "a"], "trim-casefold")
    with pytest.raises(DataError, match="empty"):
        prepare_ids(["  "], "trim")


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "private_set_intersection.python", None)
    with pytest.raises(MissingExtra, match=r"pip install 'securevfl\[psi\]'"):
        PrivateAlignment(parties=2)


@needs_psi
class TestCryptography:
    ids = tuple(f"patient-{number}" for number in range(40))

    def exchange(self):
        client, server = Client(list(self.ids[:25])), Server(list(self.ids[15:]))
        return client, server, *server.answer(client.request, 25)

    def test_intersection(self):
        client, _, setup, response = self.exchange()
        assert client.intersect(setup, response) == list(self.ids[15:25])

    def test_no_id_or_plain_hash_is_sent(self):
        client, _, setup, response = self.exchange()
        for text in self.ids:
            for form in (text.encode(), hashlib.sha256(text.encode()).digest()):
                assert form not in client.request + setup + response

    def test_every_exchange_has_fresh_keys(self):
        first, second = (self.exchange() for _ in range(2))
        pieces = [first[0].request, first[2], first[3], second[0].request, second[2], second[3]]
        for one, other in itertools.combinations(pieces, 2):
            windows = {one[i : i + 32] for i in range(len(one) - 32)}
            assert not any(other[i : i + 32] in windows for i in range(len(other) - 32))

    def test_the_setup_does_not_show_the_order_of_the_rows(self):
        import private_set_intersection.python as library

        setup = library.ServerSetup()
        setup.ParseFromString(self.exchange()[2])
        elements = list(setup.raw.encrypted_elements)
        assert elements == sorted(elements)

    def test_hostile_bytes_raise(self):
        client, server, setup, response = self.exchange()
        draw = random.Random(5)

        def spoil(data):
            data = bytearray(data)
            if draw.random() < 0.3:
                return bytes(data[: draw.randrange(len(data))])
            for _ in range(3):
                data[draw.randrange(len(data))] = draw.randrange(256)
            return bytes(data)

        refused = 0
        for _ in range(40):
            for attempt in (
                lambda: server.answer(spoil(client.request), 25),
                lambda: client.intersect(setup, spoil(response)),
                lambda: client.intersect(spoil(setup), response),
            ):
                try:
                    attempt()
                except ProtocolError:
                    refused += 1
        assert refused > 40
        with pytest.raises(ProtocolError, match="exact form"):
            client.intersect(gcs_setup(), response)


def gcs_setup():
    import private_set_intersection.python as library

    server = library.server.CreateWithNewKey(True)
    return server.CreateSetupMessage(0.01, 25, ["a"], library.DataStructure.GCS).SerializeToString()
