"""Replay of runs over a network: alone from an organisation's own folder, and of all together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from federation import Federation

from securevfl.attacks.source import Source
from securevfl.auditing.replay import replay
from securevfl.auditing.verdicts import ErrorBudget, Finding, Verdict, worst
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.noise import Noise
from securevfl.settings.plan import Plan

BUDGET = ErrorBudget(delta=1e-5, epsilon=2.0)
PLAN: dict[str, Any] = {
    "algorithm": "vafl-sync",
    "epochs": 3,
    "batch": 16,
    "seed": 7,
    "sigma": 2.0,
    "embedding": 4,
    "record_views": True,
}


def run(folder: Path, **fields: Any) -> Federation:
    given = Federation(folder / "net", Plan(**{**PLAN, **fields}))
    asyncio.run(given.run())
    return given


def alone(given: Federation, name: str) -> list[Finding]:
    folder = given.folder / name
    return replay(Source(folder, load_truth(folder, {name: given.tables[name]})), BUDGET)


def joint(given: Federation, out: Path) -> list[Finding]:
    gather([given.folder / name for name in given.names], out)
    return replay(Source(out, load_truth(out, given.tables)), BUDGET)


@pytest.mark.parametrize("training", ["raw", "dp", "none"])
def test_an_organisation_alone_replays_what_it_sent(training: str, tmp_path: Path) -> None:
    noise = {"gradient_sigma": 2.0} if training == "dp" else {}
    given = run(tmp_path, encoder_training=training, **noise)
    found = alone(given, given.names[1])
    assert worst(found) is Verdict.HOLDS, found
    assert ("updates" in {finding.path for finding in found}) is (training == "dp")
    assert worst(joint(given, tmp_path / "joint")) is Verdict.HOLDS


def test_an_organisation_alone_notices_that_its_noise_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaussian = Noise.gaussian
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "gaussian", lambda self, shape, std: gaussian(self, shape, std / 3))
        given = run(tmp_path)
    assert worst(alone(given, given.names[1])) is Verdict.VIOLATED
    assert worst(joint(given, tmp_path / "joint")) is Verdict.VIOLATED


def test_totals_are_not_tested_until_all_come_together(tmp_path: Path) -> None:
    given = run(tmp_path, protocol="two-tree", fusion="sum")
    found = alone(given, given.names[1])
    assert {finding.verdict for finding in found} == {Verdict.NOT_TESTED}
    assert "securevfl gather" in found[0].reasons[0]
    assert worst(joint(given, tmp_path / "joint")) is Verdict.HOLDS


@pytest.mark.parametrize("algorithm", ["vafl", "fdml"])
def test_an_order_that_cannot_be_repeated_is_no_violation(algorithm: str, tmp_path: Path) -> None:
    given = run(tmp_path, algorithm=algorithm, embedding=0)
    for found in (alone(given, given.names[1]), joint(given, tmp_path / "joint")):
        assert worst(found) in (Verdict.HOLDS, Verdict.NOT_TESTED), found
