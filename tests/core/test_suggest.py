"""Suggestions: settings from public facts, a forecast that holds, and the courage to say no."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from securevfl import VerticalData, train
from securevfl.cli import app
from securevfl.data.described import load_with_stand_ins
from securevfl.errors import DataError, PlanError
from securevfl.settings.plan import Plan
from securevfl.sweeps.suggest import CANDIDATES, held_back, public_rows, suggest

NAME = "synthetic:rows=900,features=6,informative=6"


def cli(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def plan(epsilon: float = 8.0, **source: Any) -> Plan:
    return Plan(epsilon=epsilon, source={"data": NAME, "parties": 2, **source})


def files(folder: Path, *, helpful: bool, rows: int = 600) -> str:
    """Two tables; where the shop's column is not helpful, it is noise."""
    draw = np.random.default_rng(3)
    own, other = draw.uniform(0, 1, rows), draw.uniform(0, 1, rows)
    label = (own + (other if helpful else 0) + draw.normal(0, 0.1, rows) > (1 if helpful else 0.5)).astype(
        int
    )
    table = "\n".join(f"c{i},{own[i]:.4f},{label[i]}" for i in range(rows))
    (folder / "bank.csv").write_text(f"id,debt,late\n{table}\n")
    table = "\n".join(f"c{i},{other[i]:.4f}" for i in range(rows))
    (folder / "shop.csv").write_text(f"id,orders\n{table}\n")
    (folder / "data.toml").write_text(
        'id = "id"\nlabel = "late"\nlabel_holder = "bank"\ntask = "binary"\n'
        '[parties.bank]\nfile = "bank.csv"\n[parties.bank.columns]\ndebt = { bounds = [0, 1] }\n'
        '[parties.shop]\nfile = "shop.csv"\n[parties.shop.columns]\norders = { bounds = [0, 1] }\n'
    )
    return str(folder / "data.toml")


def test_the_forecast_holds_and_the_command_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = json.loads(cli("suggest", "--data", NAME, "--parties", 2, "--epsilon", 8, "--json").stdout)
    assert {"command", "worth_it", "expected", "low", "high"} <= set(content)
    assert content["low"] < content["expected"] < content["high"] <= 1
    words = shlex.split(content["command"])
    assert words[:4] == ["securevfl", "train", "--data", NAME]
    done = cli(*words[1:], "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert content["low"] <= result["test"][content["metric"]] <= content["high"]
    assert all(spend["epsilon"] <= 8.0 for spend in result["privacy"].values())
    again = json.loads(cli("suggest", "--data", NAME, "--parties", 2, "--epsilon", 8, "--json").stdout)
    assert again["command"].endswith("--out runs/suggested-2")  # the first folder is taken now


def test_it_says_no_where_the_other_party_has_nothing_to_give(tmp_path: Path) -> None:
    lone = files(tmp_path, helpful=False)
    shown = cli("suggest", "--data", lone, "--epsilon", 0.3)
    assert shown.stdout.startswith("Do not federate for this: the label holder alone reaches"), shown.output
    assert json.loads(cli("suggest", "--data", lone, "--epsilon", 0.3, "--json").stdout)["worth_it"] is False


def test_it_says_yes_where_it_pays(tmp_path: Path) -> None:
    found = suggest(Plan(epsilon=8.0, source={"data": files(tmp_path, helpful=True)}))
    assert found.worth_it and found.best_alone is not None and found.expected > found.best_alone + 0.05


def test_settings_depend_on_public_facts_only() -> None:
    """The same shape with other values, other labels, another class share: the same proposal."""
    one = suggest(plan(data=NAME), trials=2)
    other = suggest(plan(data=NAME + ",seed=9"), trials=2)
    assert one.fields == other.fields and one.plan is not None and other.plan is not None
    private = {"seed", "data"}
    both = [{k: v for k, v in each.plan.to_flat().items() if k not in private} for each in (one, other)]
    assert both[0] == both[1]


def test_the_test_part_is_never_touched() -> None:
    data = VerticalData.load(NAME, parties=2)
    part = held_back(data, seed=1)
    rows = {row.tobytes() for row in data.test[0]}
    assert not rows & {row.tobytes() for block in (part.train[0], part.test[0]) for row in block}
    assert part.n_train + part.n_test == data.n_train
    assert not {*part.ids_train.tolist()} & {*part.ids_test.tolist()}


def test_what_does_not_fit_has_no_command(tmp_path: Path) -> None:
    content = json.loads(cli("suggest", "--data", "diabetes", "--parties", 2, "--json").stdout)
    assert content["command"] is None and content["worth_it"] is False
    assert len(content["reasons"]) == len(CANDIDATES) and "label_low" in content["reasons"][0]
    shown = cli("suggest", "--data", "diabetes", "--parties", 2)
    assert "no way of training fits" in shown.stdout and "label_low" in shown.stdout


def test_public_rows_are_used_instead(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, extra in (("a", ",label"), ("b", "")):
        lines = [f"id,x{extra}"]
        lines += [f"{i},{draw.normal():.3f}" + (f",{i % 2}" if extra else "") for i in range(80)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    rows = public_rows([tmp_path / "a.csv", tmp_path / "b.csv"], plan())
    found = suggest(plan(), public=rows, trials=2)
    assert "public rows" in found.basis and found.expected is not None


def test_what_cannot_be_suggested() -> None:
    with pytest.raises(PlanError, match="give --epsilon"):
        suggest(Plan(unprotected=True, source={"data": NAME}))
    with pytest.raises(PlanError, match="at least two"):
        suggest(plan(parties=1))
    with pytest.raises(DataError, match="a9a"):
        suggest(Plan(source={"data": "a9a"}))


def test_a_careless_delta_is_pointed_out() -> None:
    found = suggest(Plan(epsilon=4.0, delta=0.01, source={"data": NAME, "parties": 2}), trials=2)
    assert any("delta 0.01 is not below 1 / 900" in text for text in found.warnings)


def test_more_rows_than_a_trial_has_weigh_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quarter of the rows and noise to match, the forecast is that of all rows."""
    import securevfl.sweeps.suggest as module

    whole = Plan(epsilon=2.0, source={"data": "synthetic:rows=4000,features=6,informative=6", "parties": 2})
    monkeypatch.setattr(module, "MOST_ROWS", 800)
    found = suggest(whole, trials=3)
    result = train(VerticalData.load(whole.source.data, parties=2), Plan(epsilon=2.0))
    assert found.low is not None and found.high is not None
    assert found.low <= float(result.test["auc"] or 0) <= found.high


def test_without_the_others_file_it_says_what_is_not_known(tmp_path: Path) -> None:
    described = files(tmp_path, helpful=True)
    (tmp_path / "shop.csv").unlink()
    found = json.loads(cli("suggest", "--data", described, "--epsilon", 8, "--json").stdout)
    assert found["absent"] == ["shop"]
    assert all(found[name] is None for name in ("command", "worth_it", "expected", "high"))
    assert 0.3 < found["low"] < max(found["alone"]["linear"], found["alone"]["trees"])
    shown = cli("suggest", "--data", described, "--epsilon", 8).stdout
    assert shown.startswith("Not known here: it depends on the columns of shop"), shown


def test_chance_columns_tell_nothing_about_labels(tmp_path: Path) -> None:
    described = files(tmp_path, helpful=True, rows=4000)
    whole = VerticalData.from_description(described)
    (tmp_path / "shop.csv").unlink()
    made = load_with_stand_ins(described, seed=0)
    assert made.parties == whole.parties and made.columns == whole.columns
    told, chance = (np.corrcoef(each.train[1][:, 0], each.y_train)[0, 1] for each in (whole, made))
    # 3,200 rows: the correlation of independent columns has a standard error of 0.018.
    assert abs(told) > 0.3 and abs(chance) < 0.09


@pytest.mark.parametrize("missing", ["bank.csv", "columns"])
def test_a_stand_in_needs_the_labels_and_the_columns(tmp_path: Path, missing: str) -> None:
    described = Path(files(tmp_path, helpful=True))
    (tmp_path / "shop.csv").unlink()
    if missing == "columns":
        text = described.read_text()
        described.write_text(text[: text.index("[parties.shop.columns]")])
    else:
        (tmp_path / missing).unlink()
    done = cli("suggest", "--data", described, "--epsilon", 8)
    assert done.exit_code != 0 and isinstance(done.exception, DataError | SystemExit)
