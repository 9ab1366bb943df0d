"""Scorecards by the real protocol: what is opened, what it costs, what comes out, and what is left behind."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from securevfl import Plan, VerticalData, load_run, train
from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.card import CardGeometry, CardMember, choose
from securevfl.auditing.cards import Line, _words, about_buckets, range_in_words, short_bin, to_csv
from securevfl.cli import app
from securevfl.data.binning import card_columns
from securevfl.data.columns import Column
from securevfl.errors import PlanError
from securevfl.federation.callbacks import Callback
from securevfl.privacy.ledger import read_records

ROOT = Path(__file__).resolve().parents[2]
CARD = Plan(algorithm="sealed", model="scorecard", epsilon=1.0)
KINDS = {
    "bins": 0.10,
    "label histogram": 0.35,
    "first fit": 0.15,
    "residual histogram": 0.20,
    "last fit": 0.20,
}


def people(rows=6000, parties=2, columns=2, seed=0, **options):
    """Numbers with a shape that a linear model misses in the first column of each party."""
    generator = np.random.default_rng(seed)
    blocks = [generator.uniform(0, 100, (rows, columns)).round() for _ in range(parties)]
    score = sum(1.5 * np.cos(block[:, 0] / 12) for block in blocks) - 1
    labels = (generator.random(rows) < 1 / (1 + np.exp(-score))).astype(int)
    return VerticalData.from_arrays(blocks, labels, **options)


def spent(folder):
    """Squared mu by owner and kind, as the ledger has it."""
    found = defaultdict(lambda: defaultdict(float))
    for record in read_records(folder):
        if record.sigma:
            found[record.owner][record.kind] += (record.sensitivity / record.sigma) ** 2
    return found


@pytest.fixture(scope="module")
def credit(tmp_path_factory):
    data = VerticalData.load("credit")
    folder = tmp_path_factory.mktemp("card") / "run"
    return data, train(data, CARD, folder), folder


@pytest.mark.parametrize(
    ("parties", "collusion", "holder"), [(2, 1, "party"), (2, 1, "server"), (3, 2, "party"), (3, 1, "server")]
)
def test_every_share_of_the_budget_is_in_the_ledger(tmp_path, parties, collusion, holder):
    plan = CARD.with_changes(epsilon=4.0, collusion=collusion, label_holder=holder)
    run = train(people(parties=parties), plan, tmp_path / "run")
    target = gdp_mu(4.0, 1e-5) ** 2
    found = spent(tmp_path / "run")
    assert len(found) == parties + (holder == "server")
    for kinds in found.values():
        # An owner's own label or features may be better protected than the worst case, never worse.
        # Test records are other people: what they pay is all of theirs, and nothing of training's.
        assert kinds.pop("evaluation totals") == pytest.approx(target, rel=1e-6)
        assert kinds.keys() == KINDS.keys()
        assert all(kinds[kind] <= share * target * (1 + 1e-9) for kind, share in KINDS.items())
        assert kinds["bins"] == pytest.approx(0.10 * target, rel=1e-6)
    worst = max(sum(kinds.values()) for kinds in found.values())
    assert gdp_epsilon(math.sqrt(worst), 1e-5) == pytest.approx(4.0, rel=1e-3)
    assert max(each["epsilon"] for each in run.privacy.values()) <= 4.0
    assert run.test["auc"] > 0.7


@pytest.mark.parametrize("holder", ["party", "server"])
def test_every_opening_carries_the_noise_that_it_is_accounted_with(monkeypatch, holder):
    """Opened less exact totals, as somebody could compute who had everybody's rows."""
    opened = defaultdict(dict)
    learn = CardMember._learn

    def watch(self, total, count):
        scores = None if self.opening == "labels" else self._train_scores()
        operand = self._operand() / self._protocol().operand_one
        opened[self.steps][self.index] = (self.opening, operand, scores, self.labels, total)
        learn(self, total, count)

    monkeypatch.setattr(CardMember, "_learn", watch)
    data = people(rows=4000, columns=6)
    plan, scaled = resolve(CARD.with_changes(epsilon=8.0, label_holder=holder), data)
    settings = CardGeometry(plan=plan, data=scaled)
    train(data, CARD.with_changes(epsilon=8.0, label_holder=holder))
    noise = defaultdict(list)
    for members in opened.values():
        opening = members[0][0]
        y = members[settings.label_holder][3]
        if opening == "labels":
            residuals = np.column_stack([y, 1 - y])
        else:
            residuals = settings.series(sum(each[2] for each in members.values())) - y
        for member, (_, operand, _, _, total) in members.items():
            exact = operand @ residuals
            noise[opening, member] += list(((total - exact) / settings.noise.std(opening, member)).ravel())
    assert {opening for opening, _ in noise} == {"labels", "first", "residuals", "last"}
    for (_, member), found in noise.items():
        if not found:
            assert member == settings.label_holder  # without columns it has no residuals of its own
            continue
        # Five standard errors of a variance; the sine table and rounding add less than 1e-3 of it.
        assert abs(np.mean(np.square(found)) - 1) < 5 * math.sqrt(2 / len(found)) + 1e-3


def test_without_a_residual_histogram_its_share_goes_to_the_last_fit(tmp_path):
    run = train(people(rows=2000), CARD.with_changes(epsilon=2.0), tmp_path / "run")
    kinds = spent(tmp_path / "run")["p0"]
    assert "residual histogram" not in kinds and run.result["epochs"] == 61
    assert kinds["last fit"] == pytest.approx(0.40 * gdp_mu(2.0, 1e-5) ** 2, rel=1e-3)


def test_the_histogram_is_exact_where_nothing_is_protected():
    data = people(rows=500)
    run = train(data, CARD.with_changes(epsilon=0.0, unprotected=True))
    for party, block in zip(data.parties, data.train, strict=True):
        card = run.predictor.encoders[party]
        for place, values in enumerate(card.split(np.asarray(block, np.float64))):
            index, bins = card.bins(place).assign(values), card.bins(place).size
            positive = np.bincount(index, data.y_train, bins)
            negative = np.bincount(index, 1 - data.y_train, bins)
            np.testing.assert_allclose(card.part("positive", place), positive, atol=1e-6)
            np.testing.assert_allclose(card.part("negative", place), negative, atol=1e-6)


@pytest.mark.parametrize("parties", [2, 3])
def test_the_protocol_does_what_the_simulation_does(monkeypatch, parties):
    """Without noise; the protocol's rows are at 2^-14, its sine table at 2^-16 of a turn."""
    monkeypatch.syspath_prepend(str(ROOT))
    bench = importlib.import_module("benchmarks.scorecards")
    data = people(rows=3000, parties=parties)
    run = train(data, CARD.with_changes(epsilon=0.0, unprotected=True))
    blocks = [
        [bench.Column(str(i), np.asarray(block[:, i], float)) for i in range(block.shape[1])]
        for block in data.train
    ]
    others = [
        [bench.Column(str(i), np.asarray(b[:, i], float)) for i in range(b.shape[1])] for b in data.test
    ]

    class Silence:
        def standard_normal(self, shape):
            return np.zeros(shape)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Silence())
    card = bench.Card(blocks, np.asarray(data.y_train, float), bench.NO_NOISE, seed=0)
    mine = sum(
        run.predictor.encoders[party].score(np.asarray(block, float))[:, 0]
        for party, block in zip(data.parties, data.test, strict=True)
    )
    assert np.abs(mine - card.predict(others)).max() < 0.02


def test_a_card_sees_shapes_that_a_linear_model_misses():
    data = people(rows=8000, bounds=(0.0, 100.0))
    card, linear = (
        train(data, CARD.with_changes(model=model, epsilon=2.0)) for model in ("scorecard", "linear")
    )
    assert card.test["auc"] > linear.test["auc"] + 0.1


def test_a_killed_run_goes_on_from_its_last_opening(tmp_path):
    data, plan = people(rows=1500), CARD.with_changes(epsilon=8.0)

    class Killed(Exception):
        pass

    for last in (1, 7, 21, 30):  # in the histogram's, the first fit's, the last fit's epochs

        class Kill(Callback):
            def on_epoch(self, line, last=last):
                if line["epoch"] == last:
                    raise Killed

        folder = tmp_path / f"run{last}"
        with pytest.raises(Killed):
            train(data, plan, folder, callbacks=(Kill(),))
        run = train(data, plan, folder, resume=True)
        assert run.test["auc"] > 0.7
        assert max(each["epsilon"] for each in run.privacy.values()) <= 8.0 + 1e-6


def test_a_loaded_run_predicts_and_its_csv_scores_alike(credit, tmp_path):
    data, _, folder = credit
    rows = [block[:200] for block in data.test]
    ids = [f"new{i}" for i in range(200)]
    chances = load_run(folder).predict(rows, ids=ids)
    for file in (folder / "models").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    done = CliRunner().invoke(
        app,
        [
            "scorecard",
            str(folder),
            "--csv",
            str(tmp_path / "card.csv"),
            "--html",
            str(tmp_path / "card.html"),
        ],
    )
    assert done.exit_code == 0, done.output
    with (tmp_path / "card.csv").open() as file:
        card = list(csv.DictReader(file))
    example = example_that_scores()
    for number in range(200):
        person = {}
        for mine in data.described:
            for column, value in zip(mine.columns, mine.test[number], strict=True):
                person[column.name] = cell_of(column, value)
        points, odds = example.score(card, person)
        assert 1 / (1 + math.exp(-odds)) == pytest.approx(chances[number], rel=1e-6)
        assert points == pytest.approx(600 - 20 / math.log(2) * (odds + math.log(50)), abs=1e-6)
    with (tmp_path / "people.csv").open("w") as file:
        writer = csv.DictWriter(file, list(person))
        writer.writeheader()
        writer.writerow(person)
    script = [sys.executable, str(ROOT / "examples" / "score_from_csv.py")]
    said = subprocess.run(
        [*script, str(tmp_path / "card.csv"), str(tmp_path / "people.csv")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"{points:.0f} points, chance {chances[199]:.3f}\n"
    page = (tmp_path / "card.html").read_text()
    assert page.count("<svg") > 5 and "http" not in page.replace("http://www.w3.org", "")


def example_that_scores():
    spec = importlib.util.spec_from_file_location("score_from_csv", ROOT / "examples" / "score_from_csv.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


JOBS = Column(name="job", kind="category", values=("clerk", "driver", "other"))


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        (Column(name="city", kind="category"), "Ulm "),
        (Column(name="city", kind="category"), "N/A"),
        (Column(name="vip", kind="flag"), "Y"),
        (Column(name="vip", kind="flag"), "False"),
        (JOBS, "driver"),
        (JOBS, "pilot"),
    ],
)
def test_a_csv_scores_cells_as_files_have_them(column, cell):
    """A card of one bin for each code, whose score is the code: what the reader of files would make of it."""
    kind = {"party": "shop", "column": column.name, "kind": column.kind, "bin": ""}
    lines = [
        Line(**kind, values=_words(column, code), points=float(code), score=float(code))
        for code in range(column.codes or 2)
    ]
    lines.append(Line(**kind, missing=True, points=-1.0, score=-1.0))
    card = list(csv.DictReader(io.StringIO(to_csv(lines))))
    read = column.read([cell], "here")[0]
    assert example_that_scores().score(card, {column.name: cell})[1] == (-1.0 if np.isnan(read) else read)


def cell_of(column, value):
    if math.isnan(value):
        return ""
    if column.kind == "category":
        return column.values[int(value)] if column.values else f"bucket {int(value)}"
    return str(int(value)) if column.kind == "flag" else repr(float(value))


def test_the_command_prints_one_party(credit):
    _, _, folder = credit
    done = CliRunner().invoke(app, ["scorecard", str(folder), "--party", "p1"])
    assert done.exit_code == 0 and "points to start with" in done.output and "p0" not in done.output
    wrong = CliRunner().invoke(app, ["scorecard", str(folder), "--party", "nobody"])
    assert wrong.exit_code != 0 and "not of nobody" in str(wrong.exception)
    for scale in (("--pdo", "inf"), ("--base-odds", "nan"), ("--base-score", "nan")):
        wrong = CliRunner().invoke(app, ["scorecard", str(folder), *scale])
        assert wrong.exit_code != 0 and "all are numbers" in str(wrong.exception)


def test_a_card_says_what_to_do_about_hashes():
    kind = {"party": "shop", "kind": "category", "bin": "", "points": 0.0, "score": 0.0}
    lines = [
        Line(**kind, column=name, values=(value,)) for name, value in (("city", "bucket 4"), ("job", "clerk"))
    ]
    ((_, words),) = about_buckets(lines)
    assert "text in city; with a public list" in words and "job" not in words
    assert about_buckets(lines[1:]) == []


def test_the_command_prints_one_object(credit):
    _, _, folder = credit
    shown = CliRunner().invoke(app, ["scorecard", str(folder), "--json"])
    facts, lines = json.loads(shown.stdout).values()
    assert facts["predicts"] == "'1' (positive) against '0'" and facts["promise"].startswith("epsilon 1 at")
    result = json.loads((folder / "result.json").read_text())
    # The simulator's exact figure was not paid for; the card names the one that was.
    assert f"AUC {result['evaluation']['auc']:.3f} ± {result['evaluation']['se']:.3f}" in facts["test"]
    assert lines[0]["kind"] == "constant" and {line["party"] for line in lines[1:]} == {"p0", "p1"}
    assert any(line["low"] is None for line in lines[1:]) and all("points" in line for line in lines)


def test_auto_decides_by_public_facts(tmp_path):
    auto = Plan(algorithm="sealed", epsilon=1.0)
    large, small = people(rows=20_000), people(rows=500, bounds=(0.0, 100.0))
    assert choose(auto, large)[0] == "scorecard" and "at least 300" in choose(auto, large)[1]
    assert resolve(auto, large)[0].model == "scorecard"
    assert resolve(auto, small)[0].model == "linear" and "below 300" in choose(auto, small)[1]
    assert (
        "two values"
        in choose(
            auto,
            VerticalData.from_arrays(
                [np.eye(2)[np.arange(20_000) % 2]] * 2, np.arange(20_000) % 2, bounds=(0.0, 1.0)
            ),
        )[1]
    )
    model, why = choose(auto, people(rows=500))
    assert model == "scorecard" and "no public bounds, which a linear model needs" in why
    assert "sets epochs" in choose(auto.with_changes(epochs=20), large)[1]
    assert "nothing is protected" in choose(Plan(algorithm="sealed", unprotected=True), large)[1]
    with pytest.raises(PlanError, match="62 openings"):
        resolve(CARD.with_changes(epsilon=4.0, epochs=20), large)
    with pytest.raises(PlanError, match="whole person"):
        resolve(CARD.with_changes(settings={"protect": "label"}), large)


def test_widths_of_operands_follow_from_public_facts():
    """Whatever the rows are, every message has the same size: nobody learns how many bins there are."""
    sizes = set()
    for seed in (1, 2):
        data = people(rows=1000, seed=seed)
        plan, scaled = resolve(CARD.with_changes(epsilon=8.0), data)
        settings = CardGeometry(plan=plan, data=scaled)
        sizes.add(tuple(settings.widths_of(opening) for opening in dict.fromkeys(settings.openings)))
        assert card_columns(scaled) == settings.columns
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0, math.nextafter(0.0, 1.0), "0"),
        (math.nextafter(0.0, 1.0), 1.5, "above 0 to 1.5"),
        (math.nextafter(0.0, 1.0), math.inf, "above 0"),
        (-math.inf, math.nextafter(0.0, 1.0), "0 or less"),
        (-2.0, math.nextafter(0.0, 1.0), "-2 to 0, both"),
        (-math.inf, -1.0, "below -1"),
        (-1.0, 0.0, "-1 to 0"),
        (1936.0, 10_000.0, "1936 to 10,000"),
    ],
)
def test_bins_read_as_an_analyst_would_say_them(low, high, words):
    assert range_in_words(low, high) == words


def test_a_chart_never_shows_half_a_number():
    assert short_bin("29.5312 to 32.0137") == "from 29.5312" and short_bin("512 to 928") == "512 to 928"
    assert (
        short_bin("married, two incomes") == "married, two …"
        and short_bin("69.25 and more") == "69.25 and more"
    )
