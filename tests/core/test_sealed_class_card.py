"""Scorecards of several classes: learnt, bounded, audited, printed, and scored from their CSV."""

from __future__ import annotations

import csv
import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.scorecard import ScorecardNoise
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.card import CardGeometry, choose
from securevfl.algorithms.sealed.class_card import ClassCardMember
from securevfl.auditing.cards import class_labels, read_card, to_csv, to_page
from securevfl.cli import app
from securevfl.errors import PlanError
from securevfl.federation.callbacks import Callback
from securevfl.privacy.ledger import read_records

ROOT = Path(__file__).parents[2]
CLASSES = ("bad", "fair", "good", "none")


def waves(count: int = 1500, *, parties: int = 2) -> VerticalData:
    """Shapes that no line follows, one in each of two parties."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(-3, 3, (count, 6))
    scores = np.stack(
        [
            2 * np.cos(2 * rows[:, 0]),
            np.abs(rows[:, 3]) - 1,
            rows[:, 1] + 1.5 * (rows[:, 4] > 1),
            np.zeros(count),
        ],
        axis=1,
    )
    labels = np.array(CLASSES)[(1.3 * scores + rng.gumbel(size=scores.shape)).argmax(axis=1)]
    blocks, cut = np.split(rows, parties, axis=1), int(0.8 * count)
    return VerticalData.from_arrays(
        [block[:cut] for block in blocks],
        labels[:cut],
        test=([block[cut:] for block in blocks], labels[cut:]),
        bounds=[(-3.0, 3.0)] * parties,
    )


def a_plan(**changes: Any) -> Plan:
    return Plan(**{"algorithm": "sealed", "model": "scorecard", "epsilon": 8.0} | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes") / "run"
    train(waves(), a_plan(record_views=True), folder)
    return folder


def test_it_sees_shapes_that_lines_miss(made: Path) -> None:
    card, line = load_run(made).test["auc"], train(waves(), a_plan(model="linear")).test["auc"]
    # .82 and .71 in trials; 300 test records have a standard error of .02.
    assert card is not None and line is not None and card > line + 0.04


def test_it_costs_what_it_says_and_opens_nothing_else(made: Path) -> None:
    for spend in load_run(made).privacy.values():
        assert spend["mu"] == pytest.approx(gdp_mu(8.0, 1e-5), rel=1e-5)
    kinds = {each.kind for each in read_records(made) if each.mu}
    assert kinds == {"bins", "label histogram", "first fit", "last fit"}


def test_an_audit_tests_all_of_it(made: Path) -> None:
    report = audit(load_run(made), data=waves(), isolated=False, canaries=2000)
    assert report.verdict == "holds", report.content["words"]
    kinds = {each.kind for each in read_records(made) if each.mu}
    assert kinds <= {finding["path"] for finding in report.content["findings"]}
    assert {"bins", "label histogram", "party", "party, last fit"} <= set(report.content["canaries"])
    tried = [each for each in report.content["attacks"] if each["applicable"]]
    assert tried and not [each for each in tried if each["score"] > each["baseline"]]


def geometry(**changes: Any) -> CardGeometry:
    return CardGeometry(**dict(zip(("plan", "data"), resolve(a_plan(**changes), waves(600)), strict=True)))


def test_more_classes_cost_no_more_noise_in_the_histogram() -> None:
    """A record is in one (bin, class) cell per column: neighbours by brute force, three columns, two bins."""
    rows = np.array(list(itertools.product(range(2), repeat=3)))
    cells = np.stack([np.eye(2 * 5)[rows * 5 + label] for label in range(5)]).reshape(-1, 3 * 10)
    worst = max(float(((a - b) ** 2).sum()) for a in cells for b in cells)
    assert worst == 2 * 3
    few, many = (
        ScorecardNoise(
            mu=0.3, records=5000, columns=(2, 1), binned=3, residual_bound=1.4, residual_change=1.4, classes=k
        )
        for k in (3, 50)
    )
    assert few.variances == many.variances and few.spent() == pytest.approx(0.3)
    # Two parties: the noise that a coalition of one does not know, over all totals, covers that shift.
    for member in (0, 1):
        unknown = [sum(v for j, v in enumerate(few.variances["labels"][m]) if j != member) for m in (0, 1)]
        moved = [0 if m == member and member == 0 else 2 * few.columns[m] for m in (0, 1)]
        square = sum(each / noise for each, noise in zip(moved, unknown, strict=True) if each)
        assert square <= few.mu_of("labels") ** 2 * (1 + 1e-9)


def test_no_record_has_a_larger_jacobian_or_score_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []
    before = ClassCardMember._round

    def watched(self: ClassCardMember, party: Any, rows: Any, chosen: Any) -> Any:
        if self.fit is not None:
            self.fit.weights = self.fit.weights * 50  # as if noise had carried it far away
            squares = (np.asarray(self._rows, np.float64) ** 2).sum(axis=0).reshape(-1, len(CLASSES))
            norm = float(np.sqrt(squares.sum(axis=1).max()))
            seen.append((norm, float(np.abs(self._train_scores()).max())))
        return before(self, party, rows, chosen)

    monkeypatch.setattr(ClassCardMember, "_round", watched)
    train(waves(600), a_plan())
    norms, scores = np.array(seen).max(axis=0)
    assert 0.5 * 2**14 < norms <= 2**14
    assert scores == pytest.approx(geometry().score_bound(0))


def test_the_card_can_be_printed_and_scored_from_its_csv(made: Path, tmp_path: Path) -> None:
    data = waves()
    lines = read_card(made)
    assert class_labels(lines) == list(CLASSES)
    page = to_page(lines, title="t")
    assert all(name in page for name in CLASSES)
    said = CliRunner().invoke(app, ["scorecard", str(made)]).output
    assert f"predicts: one of {len(CLASSES)} classes" in said and "points by class" in said
    path = tmp_path / "card.csv"
    path.write_text(to_csv(lines))
    spec = importlib.util.spec_from_file_location("score_from_csv", ROOT / "examples" / "score_from_csv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    card = list(csv.DictReader(path.read_text().splitlines()))
    rows = np.concatenate([block[:8] for block in data.test], axis=1)
    run = load_run(made)
    wanted = run.predict([block[:8] for block in data.test], ids=[f"new {i}" for i in range(8)])
    names = [name for mine in data.columns for name in mine]
    for row, chances in zip(rows, np.asarray(wanted), strict=True):
        person = {name: repr(float(value)) for name, value in zip(names, row, strict=True)}
        found = np.array([module.score(card, person, label)[1] for label in CLASSES])
        odds = np.exp(found - found.max())
        np.testing.assert_allclose(odds / odds.sum(), chances, atol=1e-5)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Killer(Callback):
        def on_epoch(self, line: dict[str, Any]) -> None:
            if line["epoch"] == 5:
                raise Killed

    out = tmp_path / "run"
    with pytest.raises(Killed):
        train(waves(600), a_plan(), out, callbacks=[Killer()])
    run = train(waves(600), Plan.from_toml(out / "plan.toml"), out, resume=True)
    assert run.result["epochs"] >= run.plan.epochs - 1
    assert all(spend["epsilon"] <= 8.0 for spend in run.privacy.values())


@pytest.mark.parametrize("changes", [{"label_holder": "server"}, {"parties": 3, "collusion": 2}])
def test_other_federations(changes: dict[str, Any]) -> None:
    parties = changes.pop("parties", 2)
    run = train(waves(parties=parties), a_plan(**changes))
    assert (run.test["auc"] or 0.0) > 0.72


def test_what_is_not_offered() -> None:
    data = waves(600)
    assert choose(a_plan(model="auto"), data)[0] == "linear"
    bare = replace(data, bounds=tuple(None for _ in data.parties))
    assert choose(a_plan(model="auto"), bare) == (
        "scorecard",
        "columns have no public bounds, which a linear model needs",
    )
    with pytest.raises(PlanError, match="rows of every round its own"):
        resolve(a_plan(settings={"adversary": "malicious"}), data)
    with pytest.raises(PlanError, match="a profile is for two classes"):
        resolve(a_plan(model="profile"), data)
