"""Scorecards of numbers: means per bin by the real protocol, printed in the unit of the labels."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from securevfl import Plan, VerticalData, audit, train
from securevfl.accountants.gdp import gdp_epsilon
from securevfl.algorithms.sealed import tables
from securevfl.cli import app
from securevfl.errors import PlanError
from securevfl.privacy.ledger import read_records

RANGE = {"label_low": 0.0, "label_high": 150.0}
CARD = Plan(algorithm="sealed", model="scorecard", epsilon=2.0, settings=RANGE)


def rents(rows: int = 5000, seed: int = 0) -> VerticalData:
    """Numbers with shapes that a linear model misses, at both parties."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(0, 100, (rows, 4)).round()
    y = 60 + 20 * np.cos(x[:, 0] / 12) + 20 * (x[:, 2] > 60) + generator.normal(0, 8, rows)
    return VerticalData.from_arrays([x[:, :2], x[:, 2:]], y, task="regression", bounds=[(0.0, 100.0)] * 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "run"
    return train(rents(), CARD.with_changes(record_views=True), folder), folder


def test_a_card_of_numbers_sees_shapes_within_its_budget(made) -> None:
    run, folder = made
    line = train(rents(), CARD.with_changes(model="linear")).test["r2"]
    assert run.test["r2"] > max(0.6, line + 0.1)  # .72 to .78 in ten runs, a line .38
    squares = {"p0": 0.0, "p1": 0.0}
    for record in read_records(folder):
        if record.sigma and record.kind != "evaluation totals":
            squares[record.owner] += (record.sensitivity / record.sigma) ** 2
    for square in squares.values():
        assert gdp_epsilon(square**0.5, CARD.delta) <= 2.0 + 1e-6


def test_an_audit_tests_all_of_it(made) -> None:
    report = audit(made[1], data=rents(), isolated=False, canaries=2000)
    assert report.verdict == "holds", report.content["words"]
    kinds = {each.kind for each in read_records(made[1]) if each.mu}
    assert kinds <= {finding["path"] for finding in report.content["findings"]}
    assert {"bins", "label histogram", "party", "party, last fit"} <= set(report.content["canaries"])
    tried = [each for each in report.content["attacks"] if each["applicable"]]
    assert tried and not [each for each in tried if each["score"] > each["baseline"]]
    assert not [each for each in report.content["attacks"] if "images" in str(each["reason"])]


def test_bins_of_the_printed_card_add_up_to_the_prediction(made, tmp_path) -> None:
    run, folder = made
    done = CliRunner().invoke(app, ["scorecard", str(folder), "--csv", str(tmp_path / "card.csv")])
    assert done.exit_code == 0, done.output
    with (tmp_path / "card.csv").open() as file:
        lines = list(csv.DictReader(file))
    data, total = rents(), float(lines[0]["score"])
    for party, block in zip(data.parties, data.test, strict=True):
        for place, name in enumerate(sorted({x["column"] for x in lines[1:] if x["party"] == party})):
            mine = [x for x in lines[1:] if (x["party"], x["column"]) == (party, name)]
            value = float(np.asarray(block)[0, place])
            total += sum(float(x["score"]) for x in mine if float(x["low"]) <= value < float(x["high"]))
    predicted = float(run.predict([np.asarray(b)[:1] + 0.0 for b in data.test], ids=["new"])[0])
    assert total == pytest.approx(predicted, abs=0.01)
    shown = CliRunner().invoke(app, ["scorecard", str(folder), "--html", str(tmp_path / "card.html")])
    assert shown.exit_code == 0 and "A prediction starts at" in (tmp_path / "card.html").read_text()
    said = CliRunner().invoke(app, ["scorecard", str(folder)]).output
    assert "predicted label" in said and "predicts: a number from" in said


def test_tables_of_means_are_right_without_noise_and_nothing_in_noise() -> None:
    n = np.full(8, 1000.0)
    means = np.linspace(0.3, 0.7, 8)
    exact = tables.Counts(positive=n * means, negative=n * (1 - means), ordered=True)
    table = tables.means(exact, q=0.5, records=8000, std=0.1)
    assert np.abs(table.values - 2 * (means - 0.5)).max() < 0.02
    flat = np.random.default_rng(0).normal(0, 300, (2, 8))
    nothing = tables.Counts(positive=n / 2 + flat[0], negative=n / 2 + flat[1], ordered=True)
    assert not tables.means(nothing, q=0.5, records=8000, std=300.0).used


def test_a_profile_is_for_two_classes() -> None:
    with pytest.raises(PlanError, match="two classes"):
        train(rents(500), CARD.with_changes(model="profile"))
