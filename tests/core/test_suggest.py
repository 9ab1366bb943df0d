"""Suggestions: tried on rows that belong to nobody."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from securevfl import VerticalData
from securevfl.cli.suggest import suggest as command
from securevfl.errors import DataError, PlanError
from securevfl.settings.plan import Plan
from securevfl.sweeps import suggest as module
from securevfl.sweeps.suggest import Shape, public_shape, suggest

FEW = {
    "frozen": {"algorithm": "vafl", "encoder_training": "none", "embedding": 1, "epochs": 2},
    "impossible": {"algorithm": "vafl", "encoder_training": "none", "protocol": "two-tree"},
    "dp": {"algorithm": "vafl", "encoder_training": "dp", "epochs": 1},
}
NAME = "synthetic:rows=200,features=6"


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter candidates than users get."""
    monkeypatch.setattr(module, "CANDIDATES", FEW)
    monkeypatch.setattr(module, "STEPS", 10)


def _data(seed: int, share: float) -> VerticalData:
    rng = np.random.default_rng(seed)
    labels = (rng.random(120) < share).astype(int)
    labels[:2] = 0, 1
    return VerticalData.from_arrays([rng.normal(size=(120, 3)), rng.normal(size=(120, 2))], labels)


def test_only_the_shape_of_private_data_matters() -> None:
    one, other = Shape.of(_data(0, 0.5)), Shape.of(_data(1, 0.05))
    assert one == other == Shape(rows=120, widths=(3, 2), task="binary", classes=2, bounded=False)
    stand_in = one.stand_in(0)
    assert stand_in.widths == (3, 2)
    labels = np.concatenate([stand_in.y_train, stand_in.y_test])
    assert labels.mean() == 0.5


def test_the_best_candidate_is_proposed_with_its_calibrated_noise() -> None:
    plan = Plan(epsilon=4.0, delta=1e-4, source={"data": NAME, "parties": 2})
    found = suggest(plan, seeds=(0,))
    scores = [trial.score for trial in found.trials if trial.score is not None]
    assert scores == sorted(scores, reverse=True)
    assert found.best.plan is not None
    assert found.best.plan.sigma > 0
    assert {t.name: bool(t.reason) for t in found.trials} == {
        "frozen": False,
        "dp": False,
        "impossible": True,
    }
    assert [t.name for t in found.references] == ["label holder alone", "all features in one place"]
    assert "not even how frequent each class is" in found.basis
    frozen = next(t for t in found.trials if t.name == "frozen")
    assert frozen.releases == 1


def test_the_command_line_can_be_run_as_it_is(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from securevfl.cli import app

    plan = Plan(epsilon=4.0, delta=1e-4, source={"data": NAME, "parties": 2})
    found = suggest(plan, seeds=(0,))
    words = shlex.split(found.command({"data": NAME}, out=str(tmp_path / "run")))
    assert words[:4] == ["securevfl", "train", "--data", NAME]
    done = CliRunner().invoke(app, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    spent = json.loads(done.stdout)["privacy"]["p1"]
    assert spent["epsilon"] <= 4.0
    assert spent["delta"] == 1e-4


def test_public_rows_are_used_instead(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, extra in (("a", ",label"), ("b", "")):
        lines = [f"id,x{extra}"] + [
            f"{i},{rng.normal():.3f}" + (f",{i % 2}" if extra else "") for i in range(80)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    plan = Plan(epsilon=2.0, source={"data": NAME, "parties": 2})
    rows = module.public_rows([tmp_path / "a.csv", tmp_path / "b.csv"], plan)
    found = suggest(plan, public=rows, seeds=(0,))
    assert "80 public rows" in found.basis
    assert found.best.fields["scaling"] == "none"


def test_sets_whose_files_are_not_at_hand_are_known_by_their_entry() -> None:
    assert public_shape(Plan(source={"data": "a9a"})) == Shape(
        rows=48842, widths=(67, 56), task="binary", classes=2
    )
    assert public_shape(Plan(source={"data": "mnist", "parties": 5})).widths == (157, 157, 157, 157, 156)
    assert public_shape(Plan(source={"data": "mnist"})).classes == 10
    with pytest.raises(DataError, match="give --data-folder or --parties"):
        public_shape(Plan(source={"data": "mfeat"}))
    with pytest.raises(DataError, match="cannot be split"):
        public_shape(Plan(source={"data": "a9a", "parties": 500}))


def test_a_missing_folder_is_left_open_in_the_command() -> None:
    plan = Plan(epsilon=4.0, source={"data": NAME, "parties": 2})
    found = suggest(plan, seeds=(0,))
    assert "--data-folder DIR" in found.command({"data": "a9a"})
    assert "--data-folder /d" in found.command({"data": "a9a", "data_folder": "/d"})
    assert "--data a.csv --data b.csv" in found.command({"data": "a.csv,b.csv"})


def test_what_cannot_be_suggested() -> None:
    with pytest.raises(PlanError, match="give --epsilon"):
        suggest(Plan(unprotected=True, source={"data": NAME}))
    with pytest.raises(PlanError, match="at least two"):
        suggest(Plan(epsilon=1.0, source={"data": NAME, "parties": 1}))


def test_a_careless_delta_is_pointed_out() -> None:
    found = suggest(Plan(epsilon=4.0, delta=0.01, source={"data": NAME, "parties": 2}), seeds=(0,))
    assert any("delta 0.01 is not below 1 / 200" in text for text in found.warnings)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command([NAME], 4.0, parties=2, json=True)
    content = json.loads(capsys.readouterr().out)
    assert content["proposal"]["mode"] in ("frozen", "dp-encoder")
    assert content["command"].startswith("securevfl train")
    command([NAME], 4.0, parties=2)
    shown = capsys.readouterr().out
    assert "Proposal:" in shown
    assert "impossible is not possible" in shown
