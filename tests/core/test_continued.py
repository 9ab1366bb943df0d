"""A scorecard that goes on from a profile: one ledger, one budget, and an audit that follows both."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.scorecard import ScorecardNoise
from securevfl.cli import main
from securevfl.errors import LedgerError, PlanError, RunError
from securevfl.federation import continued
from securevfl.federation.callbacks import Callback
from securevfl.privacy.ledger import read_records

FIRST, BOTH = 2.0, 8.0


def some_data(seed: int = 0, *, ids: int = 0) -> VerticalData:
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(1500, 4))
    labels = (rows[:, 0] + np.abs(rows[:, 2]) + generator.normal(size=1500) > 1).astype(int)
    names = np.arange(ids, ids + 1500)
    blocks = [rows[:, :2], rows[:, 2:]]
    test = ([block[1200:] for block in blocks], labels[1200:], names[1200:])
    return VerticalData.from_arrays(
        [block[:1200] for block in blocks], labels[:1200], ids=names[:1200], test=test
    )


def a_plan(**changes: Any) -> Plan:
    return Plan(**{"algorithm": "sealed", "epsilon": BOTH, "record_views": True} | changes)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continued") / "profile"
    train(some_data(), a_plan(model="profile", epsilon=FIRST), folder)
    return folder


@pytest.fixture(scope="module")
def card(profiled: Path) -> Path:
    folder = profiled.parent / "card"
    train(some_data(), a_plan(), folder, profile=profiled)
    return folder


def kinds(folder: Path, owner: str = "p0") -> list[str]:
    return [each.kind for each in read_records(folder) if each.owner == owner and each.mu]


def test_both_stand_in_one_ledger_under_one_budget(profiled: Path, card: Path) -> None:
    run = load_run(card)
    assert run.plan.model == "scorecard" and run.plan.settings.profile_epsilon == FIRST
    for spend in run.privacy.values():
        assert spend["mu"] == pytest.approx(gdp_mu(BOTH, 1e-5), rel=1e-6) and spend["epsilon"] <= BOTH
    before, now = kinds(profiled), kinds(card)
    assert before == ["bins"] * 3 + ["label histogram"] and now[: len(before)] == before
    assert not {"bins", "label histogram"} & set(now[len(before) :])
    for name in ("p0", "p1"):
        ledgers = [(folder / "ledger" / f"{name}.jsonl").read_bytes() for folder in (profiled, card)]
        assert ledgers[1].startswith(ledgers[0]) and len(ledgers[1]) > len(ledgers[0])


def test_the_model_is_as_good_as_one_that_opens_everything_itself(card: Path) -> None:
    alone = train(some_data(), a_plan(record_views=False)).test["auc"]
    # 300 test records: a standard error of .02 each; noise at epsilon 8 is far below that.
    assert abs((load_run(card).test["auc"] or 0.0) - (alone or 0.0)) < 0.05


def test_an_audit_follows_both(card: Path) -> None:
    report = audit(load_run(card), data=some_data(), isolated=False, canaries=2000)
    assert report.verdict == "holds", report.content["words"]
    opened = {each.kind for each in read_records(card) if each.mu}
    assert opened <= {finding["path"] for finding in report.content["findings"]}
    assert {"label histogram", "second label histogram", "party, last fit"} <= set(report.content["canaries"])
    tried = [each for each in report.content["attacks"] if each["applicable"]]
    assert tried and not [each for each in tried if each["score"] > each["baseline"]]


def test_a_card_cannot_pretend_that_nothing_was_spent_before(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continued, "TAKEN", ("receipts",))  # what observers hold of the profile's ledgers
    with pytest.raises(LedgerError, match="rewritten"):
        train(some_data(), a_plan(), tmp_path / "card", profile=profiled)


@pytest.mark.slow
def test_an_audit_misses_views_that_a_profile_does_not_hand_over(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continued, "EVIDENCE", ("journal",))
    train(some_data(), a_plan(), tmp_path / "card", profile=profiled)
    assert audit(load_run(tmp_path / "card"), attacks="none", data=some_data()).verdict != "holds"


def test_the_budget_refuses_what_the_profile_has_spent(profiled: Path, tmp_path: Path) -> None:
    run = train(some_data(), a_plan(budget_epsilon=FIRST), tmp_path / "card", profile=profiled)
    assert run.stopped is not None and "budget" in run.stopped
    assert all(spend["epsilon"] <= FIRST for spend in run.privacy.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon": FIRST}, "above that"),
        ({"seed": 1}, "the profile has seed 0"),
        ({"delta": 1e-6}, "the profile has delta"),
        ({"settings": {"stack": True}}, "held nobody back"),
        ({"model": "linear"}, "the beginning of a scorecard"),
        ({"model": "profile"}, "not from another one"),
    ],
)
def test_another_plan_is_refused(changes: dict[str, Any], said: str, profiled: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        train(some_data(), a_plan(**changes), tmp_path / "card", profile=profiled)
    assert not (tmp_path / "card").exists()


def test_other_records_are_refused(profiled: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="of other records"):
        train(some_data(ids=7), a_plan(), tmp_path / "card", profile=profiled)


def test_views_begin_with_the_profile(tmp_path: Path) -> None:
    train(some_data(), a_plan(model="profile", epsilon=FIRST, record_views=False), tmp_path / "profile")
    with pytest.raises(PlanError, match="recorded no views"):
        train(some_data(), a_plan(), tmp_path / "card", profile=tmp_path / "profile")


def test_what_is_no_profile_is_refused(card: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a profile"):
        train(some_data(), a_plan(), tmp_path / "next", profile=card)
    with pytest.raises(PlanError, match="name its folder"):
        train(some_data(), a_plan(settings={"profile_epsilon": FIRST}), tmp_path / "next")
    with pytest.raises(PlanError, match="give an output folder"):
        train(some_data(), a_plan(record_views=False), profile=card.parent / "profile")


def test_a_killed_card_goes_on(profiled: Path, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Killer(Callback):
        def on_epoch(self, line: dict[str, Any]) -> None:
            if line["epoch"] == 5:
                raise Killed

    out = tmp_path / "card"
    with pytest.raises(Killed):
        train(some_data(), a_plan(), out, profile=profiled, callbacks=[Killer()])
    run = train(some_data(), load_plan(out), out, resume=True)
    # The opening that was broken off counts twice, so the budget refuses the last total.
    assert run.result["epochs"] == run.plan.epochs - 1 and "last fit" in str(run.stopped)
    assert all(spend["epsilon"] <= BOTH for spend in run.privacy.values())


def load_plan(folder: Path) -> Plan:
    return Plan.from_toml(folder / "plan.toml")


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["securevfl", *options, "--json"])
        with suppress(SystemExit):
            main()
        return dict(json.loads(capsys.readouterr().out))

    first, second = str(tmp_path / "profile"), str(tmp_path / "card")
    run("profile", "--data", "breast-cancer", "--epsilon", "4", "--out", first)
    found = run("train", "--profile", first, "--epsilon", "8", "--out", second)
    assert found["model"] == "scorecard"
    assert 7.9 < found["privacy"]["p0"]["epsilon"] <= 8


@pytest.mark.parametrize("profiled_mu", [0.05, 0.15, 0.29])
@pytest.mark.parametrize("binned", [0, 5])
def test_every_coalition_stays_within_the_budget(profiled_mu: float, binned: int) -> None:
    noise = ScorecardNoise(
        mu=0.3,
        records=100_000,
        columns=(3, 4),
        binned=binned,
        residual_bound=1.002,
        residual_change=1.004,
        profiled=profiled_mu,
    )
    assert sum(noise.shares.values()) == pytest.approx(1) and min(noise.shares.values()) > 0
    assert noise.spent() == pytest.approx(0.3, rel=1e-9)
    for coalition in (frozenset(), frozenset({0}), frozenset({1})):
        assert noise.spent(coalition) <= 0.3 * (1 + 1e-9)
    before = noise.before
    for opening in ("labels", *(["bins"] if binned else [])):
        assert noise.mu_of(opening) == before.mu_of(opening)
    assert noise.variances["labels"] == before.variances["labels"]
    # Together both histograms have the noise of a card's own, or less where the profile had more.
    whole = ScorecardNoise(**{**vars_of(noise), "profiled": 0.0})
    assert noise.label_std(0) <= whole.std("labels", 0) * (1 + 0.02)


def vars_of(noise: ScorecardNoise) -> dict[str, Any]:
    return {name: getattr(noise, name) for name in noise.__dataclass_fields__}
