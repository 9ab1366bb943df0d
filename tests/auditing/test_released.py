"""Released values tell about their own noise; what is fresh stays fresh, and messages come in their turn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securevfl import Plan, audit, load_run, train
from securevfl.auditing.released import ApartTest, ReleasedEvidence
from securevfl.auditing.verdicts import ErrorBudget, Verdict
from securevfl.privacy.gate import Gate
from securevfl.privacy.noise import Noise, snap
from securevfl.privacy.payloads import _KEY, Released
from securevfl.protocols.sealed import checked, checked_dealer
from securevfl.settings.source import load_planned

BUDGET = ErrorBudget(delta=1e-5, epsilon=1.0)
PATH = ("p1", "p0", "prediction")
SOURCE = {"data": "synthetic:rows=60,features=6,informative=4", "parties": 2}


def verdict_on(values: np.ndarray[Any, Any], std: float, **options: bool) -> Verdict:
    evidence = ReleasedEvidence(**options)
    evidence.add(PATH, values, std)
    return next(iter(evidence.findings(BUDGET))).verdict


def test_values_spread_as_far_as_their_noise_whatever_lies_below_it() -> None:
    rng = np.random.default_rng(0)
    for clip in (0.0, 1.0, 30.0):
        below = rng.normal(size=(50, 4))
        below *= clip / np.linalg.norm(below, axis=1, keepdims=True)
        noisy = Noise().perturb(below, 2.0).astype(np.float32)
        assert verdict_on(noisy, 2.0) is Verdict.HOLDS
    bare = below / 30
    assert verdict_on(snap(bare, 2.0), 2.0) is Verdict.VIOLATED, "too short"
    half = snap(bare + rng.normal(size=bare.shape), 2.0)
    assert verdict_on(half, 2.0) is Verdict.VIOLATED, "half of the noise"


def test_values_of_our_gate_lie_on_its_lattice() -> None:
    values = np.random.default_rng(1).normal(size=(50, 4)) * 2
    assert verdict_on(values, 2.0) is Verdict.VIOLATED
    assert verdict_on(values, 2.0, lattice=False) is Verdict.HOLDS, "another program has no lattice"


def test_spread_keeps_its_level() -> None:
    budget, rng, alarms = ErrorBudget(delta=1e-5, epsilon=1.0, released=0.05), np.random.default_rng(2), 0
    for _ in range(1000):
        evidence = ReleasedEvidence()
        evidence.add(PATH, snap(rng.normal(size=(5, 2)), 1.0), 1.0)
        alarms += next(iter(evidence.findings(budget))).verdict is Verdict.VIOLATED
    assert alarms <= 50 + 4 * 7  # 5 % of them and four standard errors


def verdict_on_messages(*messages: np.ndarray[Any, Any], observers: tuple[str, ...] = ("p0",)) -> Verdict:
    evidence = ReleasedEvidence(lattice=False)
    for number, values in enumerate(messages):
        evidence.add(("p1", observers[number % len(observers)], f"kind {number}"), values, 2.0)
    return min((found.verdict for found in evidence.findings(BUDGET)), key=lambda verdict: verdict.rank)


def test_messages_are_as_far_apart_as_their_noise_whatever_lies_below_it() -> None:
    rng = np.random.default_rng(3)
    below = rng.normal(size=(40, 4))
    below /= np.linalg.norm(below, axis=1, keepdims=True)
    noise, other = rng.normal(size=(2, 40, 4)) * 2
    first = below + noise
    assert verdict_on_messages(first, below + other) is Verdict.HOLDS, "the same values, fresh noise"
    for sign in (1, -1):  # the noise of the first once more, or its mirror image, at the largest distance
        assert verdict_on_messages(first, sign * (noise - below)) is Verdict.VIOLATED
        assert verdict_on_messages(below + other, first, sign * noise) is Verdict.VIOLATED
    assert verdict_on_messages(first, first) is Verdict.HOLDS, "the very same values tell nothing new"
    assert verdict_on_messages(first, below[:20] + noise[:20]) is Verdict.HOLDS, (
        "of another size: not compared"
    )
    told = (first, -below + noise)
    assert verdict_on_messages(*told, observers=("p0", "p2")) is Verdict.HOLDS, "for each observer alone"


def test_distances_keep_their_level() -> None:
    rng, alarms, level = np.random.default_rng(4), 0, 0.4
    for _ in range(500):
        test = ApartTest()
        test.add("first", np.zeros((3, 2)), 1.0)
        test.add("second", rng.normal(size=(3, 2)), 1.0)
        alarms += test.near("second", level)
    # From zero the mirror image is as far, so that of two comparisons one does not count: half of the level,
    # and four standard errors.
    assert abs(alarms - 100) <= 4 * 9


def test_predictions_without_noise_are_found_although_nobody_has_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(
        algorithm="vafl", epochs=1, sigma=3.0, encoder_training="none", record_views=True, source=SOURCE
    )
    data = load_planned(plan)
    train(data, plan, tmp_path / "run")
    honest = Gate.release

    def bare(self: Gate, vectors: torch.Tensor, **said: Any) -> Released:
        made = honest(self, vectors, **said)
        return Released(
            values=vectors.detach().numpy(),
            head=made.head,
            observers=made.observers,
            kind=made.kind,
            rows=said["rows"],
            key=_KEY,
        )

    monkeypatch.setattr(Gate, "release", bare)
    load_run(tmp_path / "run").predict([np.ones((9, w)) for w in data.widths], ids=list(range(900, 909)))
    monkeypatch.undo()
    report = audit(tmp_path / "run", "none", canaries=-1)
    assert report.verdict == "violated"
    assert "shorter than their noise" in json.dumps(report.content["owners"]["p1"])


class _Known:
    """In the place of the module `os`: known bytes wherever 32 of them are asked for."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def urandom(self, size: int) -> bytes:
        return bytes(32) if size == 32 else bytes(self._real.urandom(size))


@pytest.mark.parametrize("module", [checked, checked_dealer])
def test_coins_and_nonces_never_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    settings = {"adversary": "malicious"}
    plan = Plan(
        algorithm="sealed", model="linear", epochs=2, sigma=20.0, record_views=True, settings=settings,
        source=SOURCE,
    )  # fmt: skip
    monkeypatch.setattr(module, "os", _Known(module.os))
    train(load_planned(plan), plan, tmp_path / "run")
    monkeypatch.undo()
    report = audit(tmp_path / "run", "none", canaries=-1)
    assert report.verdict == "violated"
    assert any("used twice" in reason for f in report.content["findings"] for reason in f["reasons"])


def test_a_message_out_of_its_turn_is_found(tmp_path: Path) -> None:
    plan = Plan(algorithm="sealed", model="linear", epochs=2, sigma=20.0, record_views=True, source=SOURCE)
    train(load_planned(plan), plan, tmp_path / "run")
    path = tmp_path / "run" / "views" / "p1" / "messages.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    place = next(i for i, pair in enumerate(itertools.pairwise(kinds)) if pair[0] != pair[1])
    assert audit(tmp_path / "run", "none", canaries=-1).verdict != "violated"
    lines[place : place + 2] = reversed(lines[place : place + 2])
    path.write_text("".join(lines))
    report = audit(tmp_path / "run", "none", canaries=-1)
    assert report.verdict == "violated"
