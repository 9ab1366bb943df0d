"""Protocol attacks: coalitions that solve tree messages, masks that are broken, keys that leak."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attack_cases import Runs, case_of, outcome, score
from attack_conformance import AttackConformance, Case
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from securevfl import Plan, VerticalData
from securevfl.algorithms.channels import build_sum
from securevfl.attacks.contract import Evidence, Info
from securevfl.attacks.protocol import (
    KeyScan,
    MaskStatistics,
    TreeCollusion,
    TreeLeak,
    scan_files,
    secrets_in,
)
from securevfl.attacks.reading import tree_sums
from securevfl.attacks.source import Source
from securevfl.privacy.messages import Packet
from securevfl.privacy.views import View, ViewWriter
from securevfl.protocols import Driver
from securevfl.protocols.stream import KeyStream


@pytest.fixture(scope="module")
def four() -> VerticalData:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(200, 2)).astype(np.float32) for _ in range(4)]
    return VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int))


@pytest.fixture(scope="module")
def masked(runs: Runs, four: VerticalData) -> Source:
    return runs(four, algorithm="afsgd", protocol="two-tree", collusion=1, batch=64, record_words=True)


@pytest.fixture(scope="module")
def plain_tree(runs: Runs, four: VerticalData) -> Source:
    return runs(four, algorithm="afsgd", protocol="plain-tree", batch=64)


class TestTreeLeak(AttackConformance):
    attack = TreeLeak

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, plain_tree: Source) -> Case:
        return case_of(plain_tree, cls.attack, "p1", "p0")


class TestTreeCollusion(AttackConformance):
    attack = TreeCollusion

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, plain_tree: Source) -> Case:
        return case_of(plain_tree, cls.attack, "p1", "p0", "p2")


class TestMaskStatistics(AttackConformance):
    attack = MaskStatistics

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, masked: Source) -> Case:
        return case_of(masked, cls.attack, "p1", "p0")


class TestKeyScan(AttackConformance):
    attack = KeyScan

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, masked: Source) -> Case:
        return case_of(masked, cls.attack, "p1", "p0")


# -- trees -------------------------------------------------------------------------------------------------


def simulate(folder: Path, protocol_name: str, parties: int, receiver: int, collusion: int, width: int = 5):
    """One round of a tree sum with known inputs, written as the views of all parties."""
    rng = np.random.default_rng(parties)
    values = rng.normal(size=(parties, width, 1))
    names = tuple(f"p{i}" for i in range(parties))
    protocol = build_sum(protocol_name, workers=parties, receiver=receiver, collusion=collusion)
    machines = {a: protocol.node(a).round(values[a], round=0) for a in protocol.addresses}
    driver = Driver(machines)
    driver.start()
    driver.run()
    writers = {name: ViewWriter(folder / name, name) for name in names}
    request = {"channel": names[receiver], "round": 0, "rows": np.arange(width, dtype=np.int32)}
    for name in names:
        message = Packet(kind="sum-request", sender="server", receiver=name, fields={**request, "for": name})
        writers[name].record(message, time=0.0, sent=False)
    for envelope in driver.transcript:
        route = {"channel": names[receiver], "from": envelope.sender, "to": envelope.receiver}
        message = Packet(
            kind=envelope.message.kind,
            sender=names[envelope.sender],
            receiver=names[envelope.receiver],
            fields={**route, **vars(envelope.message)},
        )
        writers[message.sender].record(message, time=0.0, sent=True)
        writers[message.receiver].record(message, time=0.0, sent=False)
    for writer in writers.values():
        writer.close()
    return names, values, protocol


def learned(folder: Path, names: tuple[str, ...], protocol: str, collusion: int, coalition: tuple[int, ...]):
    observers = tuple(names[i] for i in coalition)
    info = Info(
        plan=Plan(algorithm="vafl", protocol=protocol, collusion=collusion, unprotected=True),
        parties=names,
        label_holder="p0",
        owner=next(name for name in names if name not in observers),
        observers=observers,
    )
    views = {name: View(folder / name) for name in observers}
    return tree_sums(Evidence(info=info, views=views, auxiliary={}, rng=np.random.default_rng(0)))


@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize("coalition", [(0,), (1,), (0, 1), (1, 3), (0, 2, 4), (1, 2, 3)])
@pytest.mark.parametrize("protocol", ["plain-tree", "two-tree"])
def test_what_a_coalition_solves_is_right(
    tmp_path: Path, protocol: str, coalition: tuple[int, ...], receiver: int
) -> None:
    names, values, built = simulate(tmp_path, protocol, 6, receiver, 1)
    found = learned(tmp_path, names, protocol, 1, coalition)
    for moment in found:
        expected = sum(values[names.index(name)] for name in moment.parties)
        # Each input is rounded to 2^-33.
        assert np.abs(moment.values - expected).max() < 6 * 2.0**-33
    if protocol == "two-tree":
        predicted = {frozenset(names[i] for i in part) for part in built.trees.learned_by(coalition)}
        everyone = frozenset(names) - {names[i] for i in coalition}
        # The theorem counts the total as known to all; messages alone tell it to its receiver.
        assert {moment.parties for moment in found} | {everyone} >= predicted
        assert {moment.parties for moment in found} <= predicted


def test_two_trees_hide_from_one_and_plain_trees_do_not(masked: Source, plain_tree: Source) -> None:
    for observer in ("p0", "p2", "p3"):
        assert score(masked, TreeLeak, "p1", observer) == 0
    assert score(plain_tree, TreeLeak, "p1", "p0") > 0
    found = outcome(plain_tree, TreeLeak, "p1", "p0").score
    assert found is not None and f"{int(found.score)} of them are values of p1 alone" in found.note


def test_trees_for_one_colluder_fall_to_more(runs: Runs) -> None:
    """Five workers: the pair for one colluder is not made for two, the pair for two is."""
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(40, 2)).astype(np.float32) for _ in range(5)]
    data = VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int))
    weak = runs(data, algorithm="fsgd", protocol="two-tree", collusion=1, epochs=1)
    strong = runs(data, algorithm="fsgd", protocol="two-tree", collusion=2, epochs=1)
    everyone = [f"p{i}" for i in range(5)]
    pairs = [(a, b) for i, a in enumerate(everyone) for b in everyone[i + 1 :]]

    def total(source: Source) -> float:
        return sum(
            score(source, TreeCollusion, owner, *pair)
            for pair in pairs
            for owner in everyone
            if owner not in pair
        )

    assert total(weak) > 0
    assert total(strong) == 0


def test_what_trees_give_away_is_counted_without_their_words(runs: Runs) -> None:
    """Whether messages can be solved follows from who got which of them; words are kept only on request."""
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(40, 2)).astype(np.float32) for _ in range(5)]
    data = VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int))
    settings: dict[str, Any] = {"algorithm": "fsgd", "protocol": "two-tree", "epochs": 1}
    sketched, whole = (runs(data, **settings, record_words=words) for words in (False, True))
    found = []
    for source in (sketched, whole):
        found.append([
            score(source, TreeCollusion, owner, *pair)
            for pair in itertools.combinations([f"p{i}" for i in range(5)], 2)
            for owner in sorted({f"p{i}" for i in range(5)} - {*pair})
        ])  # fmt: skip
        subtotal = next(View(source.view_folder("p1")).messages("tree.subtotal"))
        assert ("total" in subtotal.fields) == (source is whole)
    assert found[0] == found[1] and sum(found[0]) > 0
    assert "record_words" in outcome(sketched, MaskStatistics, "p1", "p0").reason


def test_where_the_total_gives_the_last_one_away(runs: Runs, masked: Source, cancer: VerticalData) -> None:
    source = runs(cancer, algorithm="afsgd", protocol="two-tree", epochs=1)
    assert "total alone" in outcome(source, TreeCollusion, "p1", "p0", "p2").reason
    plain = runs(cancer, algorithm="afsgd", protocol="plain", epochs=1)
    assert "no trees" in outcome(plain, TreeLeak, "p1", "p0").reason


# -- masks -------------------------------------------------------------------------------------------------


def masks_seen(folder: Path, rounds: list[np.ndarray], tree: int = 2) -> str:
    """What mask statistics say of tree messages with these words."""
    writer = ViewWriter(folder / "p0", "p0")
    for number, words in enumerate(rounds):
        fields = {"channel": "p0", "from": 1, "to": 0, "round": number, "attempt": 0, "tree": tree}
        message = Packet(kind="tree.subtotal", sender="p1", receiver="p0", fields={**fields, "total": words})
        writer.record(message, time=0.0, sent=False)
    writer.close()
    info = Info(
        plan=Plan(algorithm="vafl", protocol="two-tree", unprotected=True),
        parties=("p0", "p1", "p2"),
        label_holder="p0",
        owner="p1",
        observers=("p0",),
    )
    views = {"p0": View(folder / "p0")}
    guess = MaskStatistics().run(Evidence(info=info, views=views, auxiliary={}, rng=np.random.default_rng(0)))
    return MaskStatistics.score(guess, {}, info).note


def fresh(count: int = 10, size: int = 500) -> list[np.ndarray]:
    stream = KeyStream.from_os_entropy()
    return [stream.words(size, np.uint64) for _ in range(count)]


def test_sound_masks_raise_no_alarm(tmp_path: Path, masked: Source) -> None:
    assert "uniform, fresh, no small seed" in masks_seen(tmp_path, fresh())
    assert score(masked, MaskStatistics, "p1", "p0") == 0


def test_a_mask_that_is_used_twice_is_found(tmp_path: Path) -> None:
    rounds = fresh()
    assert "used twice" in masks_seen(tmp_path, [*rounds, rounds[3]])


def test_masked_values_with_the_same_mask_are_found(tmp_path: Path) -> None:
    """The same mask on other values: no word repeats, but differences are small."""
    mask = fresh(1)[0]
    rng = np.random.default_rng(0)
    values = [(rng.normal(size=500) * 2**32).astype(np.int64).astype(np.uint64) for _ in range(3)]
    assert "used twice" in masks_seen(tmp_path, [mask + value for value in values], tree=1)


def test_masks_in_half_of_the_ring_are_found(tmp_path: Path) -> None:
    assert "not uniform" in masks_seen(tmp_path, [words >> np.uint64(1) for words in fresh()])


@pytest.mark.parametrize("source", ["pcg", "mersenne", "aes"])
def test_generators_with_small_seeds_are_found(tmp_path: Path, source: str) -> None:
    made = {
        "pcg": lambda: np.random.default_rng(77).integers(0, 2**64, 2000, dtype=np.uint64),
        "mersenne": lambda: np.random.RandomState(77).randint(0, 2**64, 2000, dtype=np.uint64),
        "aes": lambda: KeyStream((77).to_bytes(16, "little")).words(2000, np.uint64),
    }[source]()
    assert "small seed" in masks_seen(tmp_path, [made])


@pytest.fixture(scope="module")
def sealed_data() -> VerticalData:
    blocks = list(np.random.default_rng(5).uniform(-1, 1, (3, 400, 2)))
    return VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int), bounds=(-1, 1))


def test_words_of_sealed_training_raise_no_alarm(runs: Runs, sealed_data: VerticalData) -> None:
    source = runs(sealed_data, algorithm="sealed", epochs=6, sigma=5.0, batch=400, record_words=True)
    for observers in (("p0",), ("p2",), ("p0", "p2")):
        found = outcome(source, MaskStatistics, "p1", *observers)
        assert found.score is not None and found.score.score == 0, found
        assert "uniform, fresh" in found.score.note


def test_a_dealer_that_repeats_itself_is_found(
    sealed_data: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same seeds in every round: what changes from round to round is then open."""
    seeds = SimpleNamespace(urandom=lambda size: b"s" * size)
    monkeypatch.setattr("securevfl.protocols.sealed.dealer.os", seeds)
    source = Runs(tmp_path)(
        sealed_data, algorithm="sealed", epochs=6, sigma=5.0, batch=400, record_words=True
    )
    found = outcome(source, MaskStatistics, "p1", "p0")
    assert found.score is not None and "used twice" in found.score.note


def test_where_there_are_no_masks(plain_tree: Source) -> None:
    assert "no masks" in outcome(plain_tree, MaskStatistics, "p1", "p0").reason


# -- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["two-tree", "pairwise", "bfv", "ckks"])
def test_runs_hold_no_secret_key(runs: Runs, four: VerticalData, protocol: str) -> None:
    source = runs(four, algorithm="fsgd", protocol=protocol, epochs=1, batch=200)
    for owner, observer in (("p0", "p1"), ("p1", "p0")):
        assert score(source, KeyScan, owner, observer) == 0
    assert scan_files(source.files.path) == 0


def test_raw_secret_beside_its_public_key_is_found() -> None:
    exchange, signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    publics = [exchange.public_key().public_bytes_raw(), signing.public_key().public_bytes_raw()]
    assert secrets_in(publics) == 0
    assert secrets_in([*publics, exchange.private_bytes_raw()]) == 1
    assert secrets_in([*publics, exchange.private_bytes_raw(), signing.private_bytes_raw()]) == 2
    joined = b"".join([publics[0], signing.private_bytes_raw()])
    assert secrets_in([publics[1], joined]) == 1


def test_pem_block_is_found() -> None:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    assert secrets_in([b"key: " + Ed25519PrivateKey.generate().private_bytes(*form)]) == 1


def test_private_context_is_found_and_a_public_one_is_not() -> None:
    tenseal = pytest.importorskip("tenseal")
    context = tenseal.context(tenseal.SCHEME_TYPE.BFV, 4096, plain_modulus=1032193)
    assert secrets_in([context.serialize(save_secret_key=True)]) == 1
    assert secrets_in([context.serialize(save_secret_key=False)]) == 0


def test_key_in_a_message_is_found(runs: Runs, four: VerticalData, tmp_path: Path) -> None:
    """An injected leak: a party sends its exchange key along with the public one."""
    source = runs(four, algorithm="fsgd", protocol="pairwise", epochs=1, batch=200)
    secret = X25519PrivateKey.generate()
    writer = ViewWriter(tmp_path / "p0", "p0")
    for value in (secret.public_key().public_bytes_raw(), secret.private_bytes_raw()):
        message = Packet(kind="x", sender="p1", receiver="p0", fields={"key": value})
        writer.record(message, time=0.0, sent=False)
    writer.close()
    info = source.info("p1", ("p0",))
    views = {"p0": View(tmp_path / "p0")}
    guess = KeyScan().run(Evidence(info=info, views=views, auxiliary={}, rng=np.random.default_rng(0)))
    assert KeyScan.score(guess, {}, info).score == 1


def test_key_that_signs_the_ledger_is_found_in_files(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "ledger").mkdir()
    line = {"public_key": key.public_key().public_bytes_raw().hex()}
    (tmp_path / "ledger" / "p1.jsonl").write_text(json.dumps(line))
    assert scan_files(tmp_path) == 0
    (tmp_path / "notes.json").write_text(json.dumps({"k": key.private_bytes_raw().hex()}))
    assert scan_files(tmp_path) == 1
