"""The whole recipe in simulation, on made data with a shape that a linear model misses."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.scorecards")


@pytest.fixture(scope="module")
def people(bench):
    generator, n = np.random.default_rng(0), 12_000
    age = generator.integers(18, 90, n).astype(float)
    income = generator.lognormal(8, 1, n)
    income[generator.random(n) < 0.1] = np.nan
    job = generator.choice(["clerk", "manager", "king"], n)
    rubbish = generator.standard_normal(n)
    score = np.cos((age - 20) / 12) * 1.5 + np.where(np.isnan(income), 1.0, 0.0) + 1.2 * (job == "clerk") - 2
    labels = (generator.random(n) < 1 / (1 + np.exp(-score))).astype(float)
    columns = [
        bench.Column("income", income),
        bench.Column("job", job, ("clerk", "manager")),
        bench.Column("age", age),
        bench.Column("rubbish", rubbish),
    ]
    return columns, labels, score


def blocks(bench, columns, parties, chosen):
    return [[columns[i].rows(chosen) for i in group] for group in bench.halves(len(columns), parties)]


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("mu", [1.0, 1e5])
def test_a_card_comes_near_the_truth(bench, people, parties, mu):
    columns, labels, score = people
    train, test = np.arange(9000), np.arange(9000, 12_000)
    card = bench.Card(blocks(bench, columns, parties, train), labels[train], mu, seed=1)
    found = roc_auc_score(labels[test], card.predict(blocks(bench, columns, parties, test)))
    best = roc_auc_score(labels[test], score[test])
    assert best - found < 0.03 and card.noise.spent() == pytest.approx(mu, rel=1e-12)


def test_training_records_score_as_the_card_predicts(bench, people):
    columns, labels, _ = people
    here = blocks(bench, columns, 2, np.arange(6000))
    card = bench.Card(here, labels[:6000], 1.0, seed=2)
    assert card.predict(here) == pytest.approx(sum(card.scores()), abs=1e-9)


def test_columns_are_divided_in_order(bench):
    assert [list(part) for part in bench.halves(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [len(part) for part in bench.halves(23, 3)] == [8, 8, 7]
