"""Private ID alignment: what comes out of it, in every kind, order and size, and what is refused."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.errors import DataError, DropoutError, InputError, ProtocolError, WireError
from securevfl.protocols import Driver, Envelope, PrivateAlignment, drive
from securevfl.protocols.alignment import curve, helper, lists, workers
from securevfl.protocols.alignment.ids import prepare_ids
from securevfl.protocols.alignment.keyed import Values, ordered
from securevfl.protocols.alignment.messages import AlignDigest, AlignHello
from securevfl.protocols.alignment.protocol import KINDS
from securevfl.protocols.contract import HELPER

SETS = [["d", "a", "b", "c", "x"], ["c", "b", "y", "d"], ["z", "d", "c"], ["c", "q", "d", "b"]]
FINDING = ("private", "helper")


def machines_of(protocol, sets):
    ids = dict(enumerate(sets))
    return [protocol.machine(address, ids.get(address, ())) for address in protocol.addresses]


def in_any_order(seed):
    """Any order of delivery that a network may have: what one sends to another arrives as it was sent."""
    draw = random.Random(seed)

    def choose(pending):
        first = {}
        for index, envelope in enumerate(pending):
            first.setdefault((envelope.sender, envelope.receiver), index)
        return draw.choice(sorted(first.values()))

    return choose


def check(sets, results):
    common = set.intersection(*map(set, sets))
    found = [[own[row] for row in result.rows.tolist()] for own, result in zip(sets, results, strict=True)]
    assert set(found[0]) == common and len(found[0]) == len(common)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("kind", FINDING)
@pytest.mark.parametrize("parties", [2, 3, 4])
def test_all_parties_learn_their_own_rows_in_one_order(kind, parties):
    check(SETS[:parties], PrivateAlignment(parties=parties, kind=kind).align(SETS[:parties]))


@settings(max_examples=15, deadline=None)
@given(
    sets=st.lists(st.sets(st.text("abcdeä😀", min_size=1, max_size=3), max_size=12), min_size=2, max_size=4),
    kind=st.sampled_from(FINDING),
)
def test_any_sets(sets, kind):
    own = [sorted(ids) for ids in sets]
    check(own, PrivateAlignment(parties=len(sets), kind=kind).align(own))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parties", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_delivery_through_the_wire(kind, parties, seed):
    protocol = PrivateAlignment(parties=parties, kind=kind)
    sets = [random.Random(i).sample(SETS[0], 5) for i in range(parties)] if kind == "none" else SETS[:parties]
    machines = machines_of(protocol, sets)
    drive(machines, choose=in_any_order(seed), codec=protocol)
    check(sets, [machine.alignment() for machine in machines if machine.address >= 0])


@pytest.mark.parametrize("parties", [2, 3])
def test_lists_travel_in_pieces(monkeypatch, parties):
    """With pieces of three values, more are needed than may be under way at once."""
    for module in (lists, helper):
        monkeypatch.setattr(module, "PIECE", 3)
    monkeypatch.setattr(lists.Outgoing.__init__, "__defaults__", (3 * curve.POINT_BYTES,))
    sets = [[f"p{i}" for i in range(start, start + 23 + start)] for start in range(parties)]
    for kind in FINDING:
        protocol = PrivateAlignment(parties=parties, kind=kind)
        driver = Driver({each.address: each for each in machines_of(protocol, sets)}, choose=in_any_order(1))
        driver.start()
        most = 0
        while driver.pending:
            driver.step()
            pieces = [each for each in driver.pending if each.message.kind == "align-piece"]
            most = max(most, len(pieces))
        check(sets, [driver.machines[address].alignment() for address in range(parties)])
        assert most <= parties * lists.WINDOW


def test_worker_processes_give_the_same(monkeypatch):
    monkeypatch.setattr(workers, "LEAST", 8)
    texts, secret, salt = [b"%d" % i for i in range(41)], b"\7" * 32, b"\1" * 32
    several, alone = workers.Workers(2), workers.Workers(1)
    points = alone.hash_and_blind(secret, salt, texts)
    assert several.hash_and_blind(secret, salt, texts) == points
    assert several.blind(secret, points) == alone.blind(secret, points)
    with pytest.raises(ProtocolError, match="small order"):
        several.blind(secret, points + bytes(32))
    assert several.blind(secret, points) == alone.blind(secret, points)  # with new processes
    several.close()
    check(SETS[:2], PrivateAlignment(parties=2, processes=2).align(SETS[:2]))


def test_a_worker_process_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(workers, "LEAST", 2)
    pool = workers.Workers(2)
    pool.blind(b"\7" * 32, b"\x09" + bytes(31) + b"\x0a" + bytes(31))
    pool._processes[1]._process.kill()
    with pytest.raises(ProtocolError, match="worker process of the alignment has ended"):
        pool.blind(b"\7" * 32, (b"\x09" + bytes(31)) * 40_000)
    assert pool._processes == []


def test_the_two_ways_to_the_legendre_symbol_agree():
    draw = random.Random(3)
    for number in [0, 1, 2, curve.PRIME - 1, curve.PRIME, *(draw.getrandbits(300) for _ in range(100))]:
        assert curve.legendre(number % curve.PRIME) == curve._legendre_by_power(number)
    found = sum(curve.on_curve(draw.getrandbits(255)) for _ in range(1000))
    assert abs(found - 500) < 5 * 1000**0.5 / 2  # five standard deviations


@pytest.mark.parametrize("sets", [[["a"], ["b"], ["a"]], [["a", "b"], [], ["a"]], [[], ["a"]], [["a"], []]])
@pytest.mark.parametrize("kind", FINDING)
def test_empty_intersections(kind, sets):
    results = PrivateAlignment(parties=len(sets), kind=kind).align(sets)
    assert [result.rows.tolist() for result in results] == [[]] * len(sets)


def test_the_same_ids_are_confirmed_and_others_are_not():
    same = PrivateAlignment(parties=3, kind="none")
    check([list("abc"), list("cab"), list("bca")], same.align([list("abc"), list("cab"), list("bca")]))
    with pytest.raises(ProtocolError, match="does not have the same records"):
        same.align([list("abc"), list("abc"), list("abd")])
    with pytest.raises(ProtocolError, match="the same number"):
        same.align([list("abc"), list("abc"), list("ab")])


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_senders_rounds_and_kinds(kind):
    protocol = PrivateAlignment(parties=2, kind=kind)
    machines = {each.address: each for each in machines_of(protocol, SETS[:2])}
    pending = [each for machine in machines.values() for each in machine.start()]
    envelope = pending[0]
    machine = machines[envelope.receiver]
    wrong = [
        Envelope(3, envelope.receiver, envelope.message),
        Envelope(envelope.sender, 7, envelope.message),
        Envelope(envelope.sender, envelope.receiver, dataclasses.replace(envelope.message, round=1)),
    ]
    for each in wrong:
        with pytest.raises(ProtocolError):
            machine.receive(each)
    with pytest.raises(ProtocolError, match="where 'align-hello' is expected"):
        machine.receive(Envelope(envelope.sender, machine.address, AlignDigest(round=0, digest=b"")))
    with pytest.raises(ProtocolError, match="the alignment has failed"):  # it ends with the first wrong one
        machine.receive(envelope)
    assert not machine.done


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"normalisation": "trim"}, "in another way"),
        ({"kind": "none"}, "in another way"),
        ({"context": b"another run"}, "in another way"),
        ({"most": 4}, "party-a brings 5 IDs; at most 4"),
        ({"sizes": [3, 4]}, "party-a brings 5 IDs and has said 3"),
    ],
)
def test_parties_that_mean_different_things_refuse_each_other(changes, match):
    one = PrivateAlignment(parties=2).machine(0, SETS[0])
    other = PrivateAlignment(**{"parties": 2, "names": ["party-a", "party-b"], **changes}).machine(1, SETS[1])
    with pytest.raises(ProtocolError, match=match):
        drive([other, one])


def test_a_short_salt_is_refused():
    machine = PrivateAlignment(parties=2).machine(0, SETS[0])
    (sent,) = machine.start()
    hello = dataclasses.replace(sent.message, nonce=b"1234")
    assert isinstance(hello, AlignHello)
    with pytest.raises(ProtocolError, match="4 bytes of salt"):
        machine.receive(Envelope(1, 0, hello))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_ends_the_alignment(kind):
    protocol = PrivateAlignment(parties=3, kind=kind)
    for machine in machines_of(protocol, [SETS[0]] * 3):
        machine.start()
        for stranger in (machine.address, 3, -1):
            with pytest.raises(ProtocolError):
                machine.drop(stranger)
        with pytest.raises(DropoutError):
            machine.drop((max(0, machine.address) + 1) % 3)
        with pytest.raises(ProtocolError, match="not done"):
            machine.alignment()


def test_bad_settings():
    for wrong in (
        {"parties": 1},
        {"parties": 2, "kind": "psi"},
        {"parties": 2, "most": 0},
        {"parties": 2, "sizes": [1]},
    ):
        with pytest.raises(InputError):
            PrivateAlignment(**wrong)
    with pytest.raises(InputError, match="trim-casefold"):
        PrivateAlignment(parties=2, normalisation="upper")
    protocol = PrivateAlignment(parties=2)
    for address in (2, HELPER):
        with pytest.raises(InputError):
            protocol.machine(address, ["a"])
    with pytest.raises(InputError):
        protocol.align([["a"]])
    with pytest.raises(InputError, match="how many IDs"):
        PrivateAlignment(parties=2, kind="helper").machine(0, iter(["a"]))
    with pytest.raises(WireError):
        protocol.decode(b"SVFL nonsense")


def test_ids_may_come_one_by_one_where_a_helper_compares():
    protocol = PrivateAlignment(parties=2, kind="helper")
    parties = [protocol.machine(i, iter(SETS[i]), count=len(SETS[i])) for i in range(2)]
    drive([*parties, protocol.machine(HELPER)])
    check(SETS[:2], [each.alignment() for each in parties])
    wrong = protocol.machine(0, iter(SETS[0]), count=3)
    with pytest.raises(ProtocolError, match="3 IDs were announced"):
        drive([wrong, protocol.machine(1, SETS[1]), protocol.machine(HELPER)])


@pytest.mark.parametrize("ids", [["a", "a"], [""], [3], [None], ["x" * 1025], ["\ud800"], [b"a"]])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_ids_are_refused(kind, ids):
    with pytest.raises(DataError) as caught:
        PrivateAlignment(parties=2, kind=kind).align([ids, ids])
    assert "x" * 5 not in str(caught.value)


def test_normalisation_is_explicit():
    assert prepare_ids([" A", "a"]) == {b" A": 0, b"a": 1}
    assert prepare_ids([" A ", "e\u0301"], "trim") == {b"A": 0, "é".encode(): 1}
    assert prepare_ids([" STRASSE "], "trim-casefold") == prepare_ids(["straße"], "trim-casefold")
    for kind in FINDING:
        with pytest.raises(DataError, match="positions 0 and 1"):
            PrivateAlignment(parties=2, normalisation="trim-casefold", kind=kind).align([[" A", "a"], ["a"]])
    with pytest.raises(DataError, match="empty"):
        prepare_ids(["  "], "trim")


# -- the helper's comparison --------------------------------------------------------------------------------


def oracle(all_values: list[Values]) -> list[list[bool]]:
    sets = [set(map(tuple, values.tolist())) for values in all_values]
    common = set.intersection(*sets)
    return [[tuple(value) in common for value in values.tolist()] for values in all_values]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sets(st.tuples(st.sampled_from([0, 1, 5, 2**64 - 1]), st.integers(0, 3)), max_size=12),
        min_size=2,
        max_size=4,
    )
)
def test_values_that_share_their_first_word_are_told_apart(sets):
    """Among ten million IDs two such values come up once in ten thousand times; here all the time."""
    found = [np.array(sorted(each), np.uint64).reshape(-1, 2) for each in sets]
    assert [marks.tolist() for marks in helper.in_all(found)] == oracle(found)
    for each in found:
        shuffled = np.random.default_rng(0).permutation(each)
        assert (shuffled[ordered(shuffled)] == each).all()
