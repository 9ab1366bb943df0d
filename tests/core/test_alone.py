"""Every run says what the label holder reaches alone, and a model that is none is an error."""

from __future__ import annotations

import json
import stat
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from securevfl import Plan, VerticalData, load_run, train
from securevfl.algorithms.alone import below_alone, cache_folder, reached_alone
from securevfl.cli import main
from securevfl.errors import TrainingDiverged
from securevfl.federation import run as runs


def test_it_is_what_the_local_baselines_reach(tmp_path: Path) -> None:
    data = VerticalData.load("credit")
    run = train(data, Plan(algorithm="central", epochs=1, batch=1000), tmp_path / "run")
    for kind in ("linear", "trees"):
        plain = train(data, Plan(algorithm="local", model=kind))
        # The same trees; the solver's tolerance may swap pairs of the 4,000 test records.
        assert run.alone is not None and run.alone[kind] == pytest.approx(plain.test["auc"], abs=1e-3)
    assert load_run(tmp_path / "run").alone == run.alone
    assert json.loads((tmp_path / "run" / "result.json").read_text())["alone"] == run.alone


def test_it_depends_on_nobody_else() -> None:
    data = VerticalData.load("breast-cancer", parties=2)
    found = reached_alone(data)
    others = VerticalData.from_arrays(
        [data.train[0], -data.train[1]],
        data.y_train,
        test=([data.test[0], data.test[1] * 0], data.y_test),
        parties=data.parties,
    )
    assert found is not None and reached_alone(others) == found


@pytest.mark.parametrize("column", [{"kind": "number"}, {"values": ["a", "b"]}, {"kind": "flag"}])
def test_a_column_without_a_single_value_stops_nobody(tmp_path: Path, column: dict[str, object]) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{i},{draw.normal()},,{int(draw.random() < 0.3)}" for i in range(400)]
    (tmp_path / "bank.csv").write_text("\n".join(["id,a,gap,y", *rows]))
    (tmp_path / "shop.csv").write_text("\n".join(["id,b", *(f"{i},{i % 7}" for i in range(400))]))
    described = ", ".join(f"{name} = {json.dumps(value)}" for name, value in column.items())
    (tmp_path / "data.toml").write_text(
        'id = "id"\nlabel = "y"\nlabel_holder = "bank"\ntask = "binary"\n[parties.bank]\nfile = "bank.csv"\n'
        f'[parties.bank.columns]\ngap = {{ {described} }}\n[parties.shop]\nfile = "shop.csv"\n'
    )
    found = reached_alone(VerticalData.from_description(tmp_path / "data.toml"))
    assert found is not None and found["trees"] is not None


def test_it_is_computed_once_and_kept_privately(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = VerticalData.load("breast-cancer")
    first = reached_alone(data)
    files = list(cache_folder().iterdir())
    assert len(files) == 1 and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    monkeypatch.setattr("securevfl.algorithms.alone._measured", lambda *given: pytest.fail("computed again"))
    assert reached_alone(data) == first


def test_a_holder_without_features_has_nothing_to_compare_with(tmp_path: Path) -> None:
    data = VerticalData.load("breast-cancer")
    plan = Plan(algorithm="sealed", model="linear", epsilon=1.0, epochs=2, label_holder="server")
    assert train(data, plan, tmp_path / "run").alone is None


def test_a_run_in_memory_computes_it_when_asked() -> None:
    run = train(VerticalData.load("breast-cancer"), Plan(algorithm="local"))
    assert "alone" not in run.result
    assert run.alone is not None and run.alone["linear"] == pytest.approx(run.test["auc"], abs=1e-3)


@pytest.mark.parametrize(
    "reached, alone, said",
    [
        (
            0.80,
            {"metric": "auc", "linear": 0.7, "trees": 0.81},
            "boosted trees on its own features reach 0.8100",
        ),
        (
            0.80,
            {"metric": "auc", "linear": 0.82, "trees": None},
            "a linear model on its own features reaches 0.8200",
        ),
        (0.80, {"metric": "auc", "linear": 0.7, "trees": 0.8}, ""),
        (None, {"metric": "auc", "linear": 0.7, "trees": 0.8}, ""),
        (0.80, None, ""),
    ],
)
def test_worse_than_alone_in_words(reached: float | None, alone: dict | None, said: str) -> None:
    words = below_alone({"test": {"auc": reached, "loss": 1.0}, "alone": alone})
    assert said in words and bool(words) == bool(said)


def test_the_first_line_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    options = ["--algorithm", "sealed", "--model", "linear", "--epsilon", "0.05", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["securevfl", "train", "--data", "breast-cancer", *options])
    with suppress(SystemExit):
        main()
    _, *lines = capsys.readouterr().out.splitlines()  # the line before the result says what is planned
    assert lines[0].startswith("below the label holder alone: auc")
    assert any(line.startswith("the label holder alone: auc") for line in lines)


def test_nothing_of_it_in_the_public_dossier(tmp_path: Path) -> None:
    data = VerticalData.load("breast-cancer")
    plan = Plan(algorithm="sealed", model="linear", epsilon=1.0, epochs=2, record_views=True)
    run = train(data, plan, tmp_path / "run")
    from securevfl import audit
    from securevfl.auditing.dossier import write_dossier

    folder = write_dossier(audit(run, attacks="none", data=data), tmp_path / "run", auditor="test")
    assert run.alone is not None
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert '"alone"' not in text and repr(run.alone["trees"]) not in text


@pytest.mark.parametrize("test", [{"loss": 300.0, "r2": -632.0}, {"loss": None, "r2": None}])
def test_models_that_are_none_are_errors(test: dict[str, float | None]) -> None:
    with pytest.raises(TrainingDiverged, match="diverged"):
        runs._check_converged(Mock(test=test, opened={}), stopped=None)
    runs._check_converged(Mock(test=dict.fromkeys(test), opened={}), stopped="budget: spent")


def test_a_diverging_regression_is_no_success(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 4))
    data = VerticalData.from_arrays([rows[:, :2], rows[:, 2:]], rows.sum(axis=1), task="regression")
    plan = Plan(algorithm="central", epochs=7, learning_rate=1.9, optimiser="momentum", batch=200)
    with pytest.raises(TrainingDiverged, match="diverged: r2 is -"):
        train(data, plan, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
