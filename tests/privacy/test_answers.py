"""Answers of a scoring service: kept before they are counted, counted before they leave."""

from __future__ import annotations

import shutil
import stat

import numpy as np
import pytest
import torch

from securevfl.accountants.records import Filter, ReleaseRecord
from securevfl.errors import AgreementError, BudgetExceeded, PlanError, QuotaExceeded, RunError
from securevfl.federation.agreed import Enforcer, Quota, Timetable
from securevfl.privacy import answers as module
from securevfl.privacy.answers import Answers
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger, read_ledger, to_record
from securevfl.privacy.noise import Noise
from securevfl.protocols.contract import Machine

ROWS = np.array([3, 1])
QUOTA = Quota(people=6, requests=3)


def open_gate(folder, *, mode="strict", sigma=0.5, quota=QUOTA) -> Gate:
    ledger = Ledger("shop", folder / "shop.jsonl")
    found = read_ledger(folder / "shop.jsonl")
    budget = Filter(mode=mode, budget_mu=np.inf, records=10)
    for each in found:
        if each.is_release:
            budget.charge(to_record("shop", each.content))
    gate = Gate(
        owner="shop", mode=mode, ledger=ledger, mechanism=Mechanism(sigma=sigma), budget=budget, noise=Noise()
    )
    entered = {each.index for each in found if each.content["kind"] == "prediction"}
    gate.answers = Answers(folder / "answers.db", entered.__contains__)
    enforcer = Enforcer(Timetable.of_prediction(10, quota), budget=budget)
    enforcer.begin("score", 0)
    gate.allows = enforcer.check_release
    return gate


def close(gate: Gate) -> None:
    gate.ledger.close()
    gate.answers.close()


def release(gate: Gate, name: str, rows=ROWS, values=None) -> np.ndarray:
    vectors = torch.ones(len(rows), 2) if values is None else values
    return gate.release(vectors, rows=rows, kind="prediction", observers=("bank",), name=name).values


def entries(folder) -> int:
    return sum(each.is_release for each in read_ledger(folder / "shop.jsonl"))


def test_the_same_name_gives_the_same_noise_and_no_second_entry(tmp_path):
    gate = open_gate(tmp_path)
    first = release(gate, "a")
    np.testing.assert_array_equal(release(gate, "a", values=torch.zeros(2, 2)), first)
    assert not np.array_equal(release(gate, "b"), first)
    close(gate)
    again = open_gate(tmp_path)
    np.testing.assert_array_equal(release(again, "a"), first)
    close(again)
    assert entries(tmp_path) == 2
    assert stat.S_IMODE((tmp_path / "answers.db").stat().st_mode) == 0o600


def test_a_name_stands_for_its_records(tmp_path):
    gate = open_gate(tmp_path)
    release(gate, "a")
    with pytest.raises(AgreementError, match="for other records"):
        release(gate, "a", rows=np.array([1, 3]))
    with pytest.raises(PlanError, match="keeps no answers"):
        gate.answers = None
        release(gate, "c")
    gate.ledger.close()


def test_what_was_kept_but_not_counted_was_not_sent_and_is_forgotten(tmp_path, monkeypatch):
    """As a kill between the two leaves it: the answer is there, its entry is not."""
    gate = open_gate(tmp_path)
    first = release(gate, "a")
    close(gate)
    shutil.copy(tmp_path / "shop.jsonl", tmp_path / "before.jsonl")
    gate = open_gate(tmp_path)
    lost = release(gate, "b")
    close(gate)
    shutil.copy(tmp_path / "before.jsonl", tmp_path / "shop.jsonl")
    again = open_gate(tmp_path)
    np.testing.assert_array_equal(release(again, "a"), first)
    assert not np.array_equal(release(again, "b"), lost)
    close(again)
    assert entries(tmp_path) == 2


def test_the_quota_is_counted_by_the_ledger(tmp_path):
    gate = open_gate(tmp_path)
    release(gate, "a", rows=np.array([1, 2, 3, 4, 5]))
    with pytest.raises(QuotaExceeded, match="5 of 6 people were scored; 2 more exceed the quota"):
        release(gate, "b")
    close(gate)
    again = open_gate(tmp_path)
    with pytest.raises(QuotaExceeded, match="5 of 6 people"):
        release(again, "b")
    release(again, "a", rows=np.array([1, 2, 3, 4, 5]))  # a repetition costs nothing
    release(again, "c", rows=np.array([9]))
    close(again)
    assert entries(tmp_path) == 2
    few = open_gate(tmp_path, quota=Quota(people=100, requests=2))
    with pytest.raises(QuotaExceeded, match="all 2 requests"):
        release(few, "d")
    close(few)


def test_a_full_disk_refuses_and_what_follows_is_right(tmp_path, monkeypatch):
    gate = open_gate(tmp_path)

    def full(record: ReleaseRecord) -> None:
        raise RunError("the ledger of shop cannot be written (No space left on device); nothing was released")

    monkeypatch.setattr(gate.ledger, "append", full)
    with pytest.raises(RunError, match="No space left"):
        release(gate, "a")
    monkeypatch.undo()
    release(gate, "a")
    assert entries(tmp_path) == 1
    close(gate)


def test_exact_scores_are_opened_once_and_never_of_people_with_a_promise(tmp_path):
    gate = open_gate(tmp_path, mode="sealed")
    gate.open_totals(None, rows=np.array([0, 1]), sensitivity=1.0, sigma=5.0, kind="training", observers=())
    built: list[np.ndarray] = []

    def build(values: np.ndarray) -> Machine:
        built.append(values)
        return None

    words = np.array([[5], [6]], np.uint64)
    for values in (words, words + np.uint64(1)):
        gate.open_scores_once("a", values, build, rows=np.array([4, 5]), observers=("bank",))
    np.testing.assert_array_equal(built[0], built[1])
    with pytest.raises(BudgetExceeded, match="trained on or tested with"):
        gate.open_scores_once("b", words, build, rows=np.array([1, 5]), observers=("bank",))
    close(gate)
    assert len(built) == 2 and entries(tmp_path) == 2


def test_only_the_newest_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 4)
    kept = Answers(tmp_path / "answers.db", lambda place: True)
    for place in range(513):
        with kept.keeping(str(place), ROWS, np.ones((2, 1)), position=place):
            pass
    assert kept.find("1", ROWS) is None and kept.find("512", ROWS) is not None
    kept.close()
