"""`credit`: a synthetic set of two organisations, described as a user would describe files of her own.

20,000 people who never lived: p0 lends and knows who fell behind (the label), p1 sells on account. Numbers
have heavy tails, values are missing, categories are text, and most effects bend: risk is high for the young
and for the old, for people without any debt and for those with too much. A linear model misses that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.build import Rows, build
from securevfl.data.columns import Column, Floats, bucket_of, code_columns
from securevfl.data.described import settings_of
from securevfl.data.description import parse_description
from securevfl.data.vertical import VerticalData

ROWS = 20_000
_SEED = 20_260
_SHARE = 0.15
"""Of the people fall behind."""
DESCRIPTION = """\
name = "credit"
id = "person"
label = "late"
label_holder = "p0"
task = "binary"
test = 0.2
missing = "error"
[parties.p0]
file = "p0.csv"
[parties.p0.columns]
age = { bounds = [18, 100] }
income = { kind = "number", missing = "bin" }
debt = { kind = "number" }
utilisation = { kind = "number", missing = "bin" }
loans = { kind = "number" }
late_before = { kind = "number" }
job = { values = ["employed", "self-employed", "retired", "student", "other"], missing = "bin" }
housing = { values = ["owner", "tenant", "family", "other"] }
salary_account = { kind = "flag" }
[parties.p1]
file = "p1.csv"
[parties.p1.columns]
months = { kind = "number" }
spending = { kind = "number" }
last_order = { kind = "number", missing = "bin" }
returned = { bounds = [0, 1] }
reminders = { kind = "number" }
payment = { values = ["card", "invoice", "instalments", "other"], missing = "bin" }
region = { kind = "category" }
night = { bounds = [0, 1] }
app = { kind = "flag" }
"""


def credit(seed: int, test_fraction: float) -> VerticalData:
    """The set; the people are always the same, `seed` only decides who is in the test part."""
    described = parse_description(DESCRIPTION, Path("credit"))
    columns = tuple(tuple(party.columns.values()) for party in described.parties)
    values, labels = _people(np.random.default_rng(_SEED))
    raw = tuple(np.column_stack([_raw(column, values[column.name]) for column in mine]) for mine in columns)
    settings = settings_of(
        columns,
        parties=tuple(party.name for party in described.parties),
        label_holder=described.label_holder,
        name=described.name,
        task=described.task,
        seed=seed,
        test_fraction=test_fraction,
    )
    blocks = tuple(code_columns(mine, each) for mine, each in zip(columns, raw, strict=True))
    return build(Rows(blocks=blocks, labels=labels, ids=np.arange(ROWS), raw=raw), None, settings)


def _raw(column: Column, values: NDArray[Any]) -> Floats:
    """Categories are drawn as text and coded by the description; an empty text is missing."""
    if column.kind != "category":
        return values.astype(np.float64)
    names, places = np.unique(values, return_inverse=True)
    codes = [
        np.nan if not name else column.values.index(name) if column.values else bucket_of(name)
        for name in names.tolist()
    ]
    return np.array(codes, np.float64)[places]


def _people(draw: np.random.Generator) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Every column by name, and the labels."""
    own, risk = _lender(draw)
    other, more = _shop(draw, own)
    score = risk + more + draw.logistic(scale=0.9, size=ROWS)
    return own | other, (score > np.quantile(score, 1 - _SHARE)).astype(np.int64)


def _lender(draw: np.random.Generator) -> tuple[dict[str, NDArray[Any]], Floats]:
    age = np.clip(18 + draw.gamma(2.6, 11.0, ROWS), 18, 99).round()
    income = np.round(np.exp(draw.normal(7.8 - ((age - 48) / 40) ** 2, 0.7)))
    debt = np.where(draw.random(ROWS) < 0.25, 0.0, np.exp(draw.normal(-1.2, 1.1, ROWS)))
    debt = np.where(draw.random(ROWS) < 0.03, debt * 1000, debt).round(4)  # sums in place of ratios
    utilisation = np.where(draw.random(ROWS) < 0.02, draw.pareto(1.1, ROWS) * 50, draw.beta(0.7, 1.1, ROWS))
    loans, late = draw.poisson(2.2, ROWS), draw.negative_binomial(0.35, 0.5, ROWS)
    jobs = np.array(["employed", "self-employed", "retired", "student", "other"])
    job = jobs[
        _pick(
            draw, np.column_stack([3 + 0 * age, 0.6 + 0 * age, 4 * (age > 62), 3 * (age < 26), 0.3 + 0 * age])
        )
    ]
    housing = np.array(["owner", "tenant", "family", "other"])[
        draw.choice(4, ROWS, p=[0.4, 0.42, 0.14, 0.04])
    ]
    salary = draw.random(ROWS) < 0.7
    risk = 0.9 * ((age - 46) / 17) ** 2 * (1 - 0.35 * (age > 46))
    risk += np.select([income < 900, income < 2500, income < 6000], [0.8, 0.0, -0.5], 0.1)
    risk += np.select([debt == 0, debt < 0.35, debt < 0.8, debt < 10], [0.7, -0.6, 0.3, 1.1], 0.1)
    risk += np.select([utilisation < 0.05, utilisation < 0.5, utilisation < 0.9], [0.3, -0.6, 0.2], 1.0)
    risk += 0.7 * np.minimum(late, 3) + 0.25 * np.abs(loans - 2.5) - 0.3 * salary
    risk += _effect(job, {"self-employed": 0.4, "retired": -0.6, "student": 0.1, "other": 0.5})
    risk += _effect(housing, {"owner": -0.3, "tenant": 0.2, "other": 0.4})
    gaps = draw.random(ROWS) < np.where(job == "self-employed", 0.3, 0.06)
    own: dict[str, NDArray[Any]] = {
        "age": age,
        "income": np.where(gaps, np.nan, income),
        "debt": debt,
        "utilisation": np.where(draw.random(ROWS) < 0.05, np.nan, utilisation.round(4)),
        "loans": loans,
        "late_before": late,
        "job": np.where(draw.random(ROWS) < 0.03, "", job),
        "housing": housing,
        "salary_account": salary,
    }
    return own, risk


def _shop(draw: np.random.Generator, own: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], Floats]:
    months = np.minimum(draw.exponential(30, ROWS), 12 * (own["age"] - 17)).round()
    spending = np.exp(draw.normal(3.6, 1.2, ROWS)).round(2)
    last = draw.exponential(60, ROWS).round()
    returned, night = draw.beta(0.8, 3.0, ROWS).round(3), draw.beta(1.2, 4.0, ROWS).round(3)
    reminders = draw.negative_binomial(0.4, 0.4, ROWS)
    payment = np.array(["card", "invoice", "instalments", "other"])[
        draw.choice(4, ROWS, p=[0.45, 0.3, 0.2, 0.05])
    ]
    places = draw.integers(0, 40, ROWS)
    app = draw.random(ROWS) < np.where(own["age"] < 40, 0.7, 0.3)
    risk = np.select([months < 4, months < 24, months < 90], [0.9, 0.1, -0.5], 0.0)
    risk += 0.6 * np.abs(np.log(spending) - 3.4)
    risk += np.select([last < 7, last < 75, last < 180], [0.5, -0.5, 0.2], 0.7)
    risk += 1.3 * np.minimum(returned, 0.5) + 1.0 * (night > 0.4) + 0.5 * np.minimum(reminders, 3)
    risk += _effect(payment, {"card": -0.3, "instalments": 0.4, "other": 0.3})
    risk += 0.4 * draw.standard_normal(40)[places] + 0.6 * ((payment == "instalments") & (own["loans"] > 3))
    never = draw.random(ROWS) < 0.04
    other: dict[str, NDArray[Any]] = {
        "months": months,
        "spending": spending,
        "last_order": np.where(never, np.nan, last),
        "returned": returned,
        "reminders": reminders,
        "payment": np.where(never, "", payment),
        "region": np.char.add("region ", places.astype(str)),
        "night": night,
        "app": app,
    }
    return other, risk


def _pick(draw: np.random.Generator, weights: Floats) -> NDArray[np.intp]:
    """One column of each row, with probabilities in proportion to the weights."""
    ends = np.cumsum(weights, axis=1)
    return np.asarray((draw.random(len(weights))[:, None] * ends[:, -1:] > ends).sum(axis=1))


def _effect(values: NDArray[Any], effects: dict[str, float]) -> Floats:
    return np.asarray(sum(effect * (values == value) for value, effect in effects.items()), np.float64)
