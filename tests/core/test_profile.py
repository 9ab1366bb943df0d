"""A profile: missing rates, distributions and information values through the gates, with one budget."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.scorecard import ScorecardNoise
from securevfl.algorithms.sealed import tables
from securevfl.auditing.cards import read_card
from securevfl.auditing.profiles import profile_page, read_profile
from securevfl.cli import main
from securevfl.errors import PlanError, RunError
from securevfl.privacy.ledger import read_records


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerticalData, Path]:
    data = VerticalData.load("credit")
    folder = tmp_path_factory.mktemp("profile") / "run"
    train(data, Plan(algorithm="sealed", model="profile", epsilon=1.0, record_views=True), folder)
    return data, folder


def test_it_says_what_the_columns_are_like(made: tuple[VerticalData, Path]) -> None:
    data, folder = made
    found = {(each.party, each.column): each for each in read_profile(folder)}
    assert len(found) == sum(len(mine.columns) for mine in data.described)
    for party, mine in zip(data.parties, data.described, strict=True):
        for place, column in enumerate(mine.columns):
            profile = found[party, column.name]
            gaps = float(np.isnan(mine.train[:, place]).mean())
            # Noise of a cell at epsilon 1 is below 60 of 16,000 records; five deviations of two cells.
            assert abs((profile.missing or 0.0) - gaps) < 5 * 60 * 2**0.5 / 16_000
            assert sum(part.share for part in profile.bins) == pytest.approx(1)
    best = max(found.values(), key=lambda each: each.information)
    assert best == read_profile(folder)[0] and best.information > 0.1


def test_the_budget_is_one(made: tuple[VerticalData, Path]) -> None:
    _, folder = made
    run = load_run(folder)
    for spend in run.privacy.values():
        assert spend["mu"] == pytest.approx(gdp_mu(1.0, 1e-5), rel=1e-6)
    kinds = [(record.owner, record.kind) for record in read_records(folder)]
    assert {kind for _, kind in kinds if not kind.startswith("session")} >= {"bins", "label histogram"}
    assert not any("evaluation" in kind for _, kind in kinds)
    assert run.test == {}


def test_an_audit_tests_all_of_it(made: tuple[VerticalData, Path]) -> None:
    data, folder = made
    report = audit(load_run(folder), attacks="none", data=data)
    assert report.verdict == "holds"


@pytest.mark.parametrize("coalition", [frozenset(), frozenset({0}), frozenset({1})])
def test_every_coalition_stays_within_the_budget(coalition: frozenset[int]) -> None:
    noise = ScorecardNoise(
        mu=0.3,
        records=1000,
        columns=(3, 4),
        binned=5,
        residual_bound=1.002,
        residual_change=1.004,
        profile=True,
    )
    assert sum(noise.shares.values()) == pytest.approx(1) and set(noise.shares) == {"bins", "labels"}
    assert noise.spent(coalition) <= 0.3 * (1 + 1e-9)
    assert noise.spent() == pytest.approx(0.3, rel=1e-9)


def test_information_is_ranked_without_noise_as_by_hand() -> None:
    positive, negative = np.array([30.0, 60.0, 110.0]), np.array([470.0, 440.0, 390.0])
    counts = tables.Counts(positive=positive, negative=negative, ordered=True)
    q = 200 / 1500
    found = tables.expected_information(counts, q=q, records=1500, std=1e-6)
    good, bad = negative / 1300, positive / 200
    by_hand = float(((good - bad) * np.log(good / bad)).sum())
    # Sampling error is shrunk away: a standard error of .12 in logit differences of up to .7, squared.
    assert found == pytest.approx(by_hand, rel=0.2)


def test_a_profile_is_no_card(made: tuple[VerticalData, Path], tmp_path: Path) -> None:
    _, folder = made
    with pytest.raises(RunError, match="--model scorecard"):
        read_card(folder)
    with pytest.raises(PlanError, match="a profile cannot be made: the task is regression"):
        train(
            VerticalData.load("diabetes"),
            Plan(
                algorithm="sealed", model="profile", epsilon=1.0, settings={"label_low": 0, "label_high": 400}
            ),
        )


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "run", tmp_path / "page.html"
    options = ["--data", "breast-cancer", "--epsilon", "2", "--out", str(out), "--html", str(page), "--json"]
    monkeypatch.setattr(sys, "argv", ["securevfl", "profile", *options])
    with suppress(SystemExit):
        main()
    content = json.loads(capsys.readouterr().out)
    assert len(content["columns"]) == 30 and content["privacy"]["p0"]["epsilon"] <= 2
    assert "information value" in page.read_text()
    assert profile_page(read_profile(out), title="t", spent="s").count("<h2>") == 30
