"""Masks: words that are not uniform and fresh are found, whatever the reason; sound ones raise no alarm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl import Plan, VerticalData, audit, train
from securevfl.attacks.source import Source
from securevfl.auditing.masks import MaskEvidence, ReuseTest, WordTest
from securevfl.auditing.reconciliation import reconcile
from securevfl.auditing.verdicts import ErrorBudget, Verdict
from securevfl.privacy.messages import Packet
from securevfl.privacy.schemas import MESSAGES
from securevfl.privacy.views import SAMPLE, View, ViewWriter, sketch_of
from securevfl.protocols.sealed import large
from securevfl.protocols.stream import KeyStream

DATA = "synthetic:rows=60,features=6,informative=4"
BUDGET = ErrorBudget(delta=1e-5, epsilon=1.0)


def uniform(count: int, dtype: Any = np.uint64) -> Any:
    return KeyStream.from_os_entropy().words(count, dtype)


def p_value(*messages: Any) -> float:
    test = WordTest(8 * messages[0].itemsize)
    for words in messages:
        test.add(sketch_of(words), words.size)
    return test.p_value()


@pytest.mark.parametrize("bits", [60, 61])
def test_words_of_fewer_bits_than_their_type_are_judged_in_those(bits: int) -> None:
    """Elements of a field of 61 bits, and rows masked by 60: uniform there, zero above."""
    spare = np.uint64(64 - bits)
    found = []
    for _ in range(200):
        test = WordTest(bits)
        for _ in range(2):
            words = uniform(200) >> spare
            test.add(sketch_of(words), words.size)
        found.append(test.p_value())
    assert sum(value < 1e-4 for value in found) <= 1
    narrow = WordTest(bits)
    narrow.add(sketch_of(uniform(200) >> spare >> np.uint64(3)), 200)
    assert narrow.p_value() < 1e-9
    # A mask used twice leaves the leading bits of those 61 as they were.
    mask, again = uniform(40) >> spare, ReuseTest()
    for n in range(2):
        again.add(sketch_of(mask + np.uint64(n)), ("k", "f", 0, n), bits, (n,))
    assert again.reused() == {(1,)}


@pytest.mark.parametrize("dtype", [np.uint64, np.uint32])
def test_sound_masks_have_no_small_p_values(dtype: Any) -> None:
    """400 streams: fewer than 1 in 100 may be below 1e-4, else the tests are not what they say."""
    found = [p_value(uniform(40, dtype), uniform(300, dtype)) for _ in range(400)]
    assert sum(value < 1e-4 for value in found) <= 1


def values(count: int) -> Any:
    """What is encoded in a ring of 64 bits with 32 of them for fractions."""
    return np.random.default_rng(1).normal(0, 2.0**34, count).astype(np.int64).view(np.uint64)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda words, values: values,
        lambda words, values: np.where(np.arange(len(words)) % 2, words, values),
        lambda words, values: (words & np.uint64(2**32 - 1)) + values,
        lambda words, values: words | np.uint64(1 << 40),
        lambda words, values: np.where(np.arange(len(words)) == 130, 0, words).astype(np.uint64),
    ],
    ids=["none", "every-second", "lower-half", "one-bit", "a-single-zero"],
)
def test_words_that_are_not_uniform_are_found(spoil: Callable[[Any, Any], Any]) -> None:
    assert p_value(*(spoil(uniform(200), values(200)) for _ in range(6))) < 1e-9


def test_a_mask_that_is_used_twice_is_found_and_fresh_ones_are_not() -> None:
    mask = uniform(40)
    for reused in (False, True):
        test = ReuseTest()
        for number in range(20):
            words = (mask if reused else uniform(40)) + values(40) * np.uint64(number + 1)
            test.add(sketch_of(words), ("k", "f", 1, number), 64, (number,))
        assert bool(test.reused()) is reused
        assert test.odds() < 1e-12


def test_the_same_words_may_go_to_several_receivers_and_in_one_round_only() -> None:
    words, test = sketch_of(uniform(40)), ReuseTest()
    for number, place in enumerate([1, 1, 2]):
        test.add(words, ("k", "f", 0, place), 64, (number,))
    assert test.reused() == {(2,)}


@pytest.mark.parametrize("again", [False, True])
def test_masks_that_are_left_when_others_cancel_are_fresh(tmp_path: Path, again: bool) -> None:
    """Two senders' words look fresh one by one; what they add up to is the same mask in every round."""
    writer, pool = ViewWriter(tmp_path / "bank", "bank"), uniform(8)
    for number in range(3):
        bound, left = uniform(8), pool if again else uniform(8)
        for sender, words in (("clinic", left + bound), ("shop", values(8) - bound)):
            fields = {"round": number, "attempt": 0, "words": words.reshape(8, 1), "tag": bytes(32)}
            message = Packet(kind="sealed-score", sender=sender, receiver="server", fields=fields)
            writer.record(message, time=0.0, sent=False)
    writer.close()
    view, evidence = View(tmp_path / "bank"), MaskEvidence()
    for header in view.headers():
        ends, schema = (header["sender"], "bank"), MESSAGES[header["kind"]]
        evidence.add(view, header, schema, ends)
        evidence.add_received(view, header, schema, ends, 2)
    found = {each.verdict for each in evidence.findings(BUDGET)}
    assert found == {Verdict.VIOLATED if again else Verdict.HOLDS}


@pytest.mark.parametrize("kept", [False, True])
def test_a_view_that_holds_a_seed_is_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    schema, writer = MESSAGES["sealed-seed"], ViewWriter(tmp_path / "p1", "p1")
    message = Packet(kind="sealed-seed", sender="dealer", receiver="p1", fields={"seed": bytes(range(16))})
    monkeypatch.setitem(MESSAGES, "sealed-seed", replace(schema, secret=() if kept else schema.secret))
    writer.record(message, time=0.0, sent=False)
    writer.close()
    view, evidence = View(tmp_path / "p1"), MaskEvidence()
    for header in view.headers():
        evidence.add(view, header, schema, ("dealer", "p1"))
    assert (Verdict.VIOLATED in {found.verdict for found in evidence.findings(BUDGET)}) is kept


def test_a_sketch_holds_the_first_words_and_others_without_a_pattern() -> None:
    words = uniform(4096)
    sketch = sketch_of(words)
    assert len(sketch.sample) == SAMPLE and np.array_equal(sketch.sample[:32], words[:32])
    places = [int(np.flatnonzero(words == word)[0]) for word in sketch.sample[32:]]
    assert {place % 2 for place in places} == {0, 1}
    assert sketch.least == min(min(int(w), 2**64 - int(w)) for w in words)


# -- runs ---------------------------------------------------------------------------------------------------


def trained(folder: Path, **options: Any) -> Path:
    plan = Plan(
        algorithm="sealed", model="linear", epsilon=1.0, epochs=3, batch=16, record_views=True,
        source={"data": DATA, "parties": 3}, **options,
    )  # fmt: skip
    train(VerticalData.load(DATA, parties=3), plan, folder)
    return folder


def test_views_of_sealed_training_hold_neither_seeds_nor_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seed that the dealer drew and every masked word is searched for in the bytes of all files."""
    seeds: list[bytes] = []
    honest = large._key_of

    def key_of(seed: bytes, purpose: str) -> bytes:
        seeds.append(seed)
        return honest(seed, purpose)

    monkeypatch.setattr(large, "_key_of", key_of)
    folder = trained(tmp_path / "run")
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert len(set(seeds)) > 6
    assert not any(seed in everything or seed.hex().encode() in everything for seed in seeds)
    view = View(folder / "views" / "p1")
    kinds = {seen.kind: seen for seen in view}
    assert "seed" not in kinds["sealed-deal"].fields and "words" not in kinds["sealed-operand"].fields
    whole = trained(tmp_path / "whole", record_words=True)
    again = {seen.kind: seen for seen in View(whole / "views" / "p1")}
    assert "seed" not in again["sealed-deal"].fields and "words" in again["sealed-operand"].fields
    size, full = ((f / "views" / "p1" / "arrays.bin").stat().st_size for f in (folder, whole))
    assert size < full


@pytest.mark.parametrize(
    ("protocol", "field"), [("two-tree", "total"), ("pairwise", "values"), ("bfv", "ciphertexts")]
)
def test_views_of_sums_hold_neither_words_nor_ciphertexts_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, field: str
) -> None:
    """What was sent is searched for in the bytes of all files; the opened total is there for attacks."""
    sent: list[bytes] = []
    honest = ViewWriter.record

    def record(self: ViewWriter, message: Packet, **rest: Any) -> None:
        if field in message.fields and message.sender != message.receiver:
            sent.append(np.asarray(message.fields[field]).tobytes())
        honest(self, message, **rest)

    monkeypatch.setattr(ViewWriter, "record", record)
    data = VerticalData.load("synthetic:rows=160,features=6,informative=4", parties=3)
    plan = Plan(algorithm="vafl-sync", protocol=protocol, sigma=3.0, epochs=1, batch=128, record_views=True)
    for words in (False, True):
        sent.clear()
        folder = tmp_path / f"words-{words}"
        train(data, plan.with_changes(record_words=words), folder)
        everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        long = [each for each in sent if len(each) > 8 * SAMPLE]
        assert long and all((each in everything) == words for each in long)
        opened = any(seen.kind == "opened-total" for seen in View(folder / "views" / "p0"))
        assert opened != (words and protocol == "two-tree")  # there it follows from the words


@pytest.mark.parametrize("members", [2, 3])
def test_runs_without_a_dealer_keep_nothing_that_was_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Whatever of 16 bytes or more the operating system gave is searched for in the bytes of all files."""
    drawn: list[bytes] = []
    honest = os.urandom

    def urandom(count: int) -> bytes:
        drawn.append(honest(count))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    data = VerticalData.load(DATA, parties=members)
    plan = Plan(epsilon=4.0, model="linear", epochs=2, record_views=True, settings={"dealer": "none"})
    train(data, plan, out=tmp_path / "run")
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    secrets = [each for each in drawn if len(each) >= 16]
    assert len(secrets) >= 8 - members and b"sealed-pair-seed" in everything
    assert not any(each in everything or each.hex().encode() in everything for each in secrets)


def test_a_run_whose_rows_travel_unmasked_is_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = large._key_of

    class Nothing:
        def words(self, shape: Any, dtype: Any) -> Any:
            return np.zeros(shape, dtype)

        def fill(self, out: Any) -> Any:
            out[...] = 0
            return out

    with monkeypatch.context() as patch:
        patch.setattr(
            large, "_key_of", lambda s, purpose: b"" if purpose == "operand" else honest(s, purpose)
        )
        patch.setattr(large, "KeyStream", lambda key, *more: KeyStream(key, *more) if key else Nothing())
        folder = trained(tmp_path / "run")
    report = audit(folder, "none", canaries=-1)
    assert report.verdict == "violated"
    assert any("masked words are not uniform" in r for f in report.content["findings"] for r in f["reasons"])


def test_words_that_nobody_declared_uniform_are_not_tested(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    for path in (folder / "views").glob("*/messages.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["sketches"].pop("words", None)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [f for f in reconcile(Source(folder)) if f.verdict is not Verdict.HOLDS]
    assert found and {f.verdict for f in found} == {Verdict.NOT_TESTED}
    assert all("not declared uniform" in f.reasons[0] for f in found)


def test_receipts_that_are_lost_or_old_are_violations(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    path = folder / "receipts" / "p1.json"
    kept = json.loads(path.read_text())
    owner = next(iter(kept))
    for change in ({}, {**kept, owner: [owner, 0, kept[owner][2]]}):
        path.write_text(json.dumps(change))
        reasons = [r for f in reconcile(Source(folder)) if f.verdict is Verdict.VIOLATED for r in f.reasons]
        assert any("kept no receipt" in reason for reason in reasons)


def test_nothing_masked_gives_no_finding() -> None:
    assert list(MaskEvidence().findings(BUDGET)) == []


def test_a_run_for_members_that_cheat_holds_with_all_its_masks_tested(tmp_path: Any) -> None:
    """Its words live on three moduli; canaries have no operands, hence nothing to prove."""
    data = VerticalData.load("synthetic:rows=400,features=6,informative=4", parties=2)
    plan = Plan(
        algorithm="sealed", model="linear", epsilon=8.0, epochs=24, record_views=True,
        settings={"adversary": "malicious"},
    )  # fmt: skip
    report = audit(train(data, plan, tmp_path / "run"), attacks="none", data=data)
    (label_holder, other) = (report.content["owners"][name]["observers"] for name in ("p0", "p1"))
    assert label_holder["p1"]["verdict"] == "holds"
    assert [each for each in other["p0"]["reasons"] if "so few totals" not in each] == []
