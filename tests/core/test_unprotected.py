"""Nothing leaves unprotected unless somebody says the word, and then every page says it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import here
from typer.testing import CliRunner

from securevfl import Plan, VerticalData, audit, train
from securevfl.algorithms import ALGORITHMS
from securevfl.cli import app
from securevfl.errors import PlanError
from securevfl.settings.families import ALGORITHM_FAMILIES, family_of
from securevfl.sklearn import VerticalClassifier
from securevfl.sweeps import parse_sweep

TINY = "synthetic:rows=80,features=6"
FEDERATED = sorted(set(ALGORITHM_FAMILIES) - {"central", "local"})


@pytest.fixture(scope="module")
def data() -> VerticalData:
    return VerticalData.load(TINY, parties=3)


def cli(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("algorithm", FEDERATED)
def test_without_noise_the_word_is_needed(algorithm: str, data: VerticalData) -> None:
    plan = Plan(algorithm=algorithm, sigma=0.0)  # a plan may be built, compared and read
    assert plan.is_unprotected
    with pytest.raises(PlanError, match=r"unprotected=True, --unprotected"):
        train(data, plan)
    assert not plan.with_changes(sigma=1.0).is_unprotected


def test_plans_and_algorithms_agree_on_what_is_federated() -> None:
    for name, each in ALGORITHMS.items():
        assert each.federated == family_of(name).federated == (name in FEDERATED)


@pytest.mark.parametrize("protocol", ["two-tree", "pairwise", "bfv"])
def test_secure_sums_alone_protect_nothing(protocol: str, data: VerticalData) -> None:
    with pytest.raises(PlanError, match=f"protocol '{protocol}' too"):
        train(data, Plan(algorithm="vafl", protocol=protocol, epochs=1))


@pytest.mark.parametrize("algorithm", ["central", "local"])
def test_what_sends_nothing_needs_no_word(algorithm: str, data: VerticalData) -> None:
    assert train(data, Plan(algorithm=algorithm, epochs=1)).result["guarantee"] == "as accounted"


def test_the_default_is_sealed_at_epsilon_1(data: VerticalData) -> None:
    plan = Plan()
    assert (plan.algorithm, plan.model, plan.epsilon) == ("sealed", "auto", 1.0)
    assert plan == Plan.from_flat({}) == Plan.from_mapping({}) == parse_sweep("seed = 0\n").points[0].plan()
    run = train(data)
    assert run.result["guarantee"] == "as accounted" and run.result["labels"].startswith("sealed")
    assert all(spend["epsilon"] <= 1.0 for spend in run.privacy.values())


def test_noise_that_is_settled_leaves_no_room_for_the_default_target() -> None:
    assert Plan(sigma=2.0).epsilon == 0 and Plan(unprotected=True).epsilon == 0
    assert Plan(unprotected=False).epsilon == 1 and Plan(epsilon=3.0).epsilon == 3
    assert Plan().with_changes(sigma=2.0).epsilon == 0
    again = Plan.from_mapping(Plan(unprotected=True).to_mapping())
    assert again == Plan(unprotected=True) and again.is_unprotected


def test_images_ask_for_an_algorithm() -> None:
    digits = VerticalData.load("digits", parties=2)
    with pytest.raises(PlanError, match="images or sequences; name an algorithm"):
        train(digits, Plan(epochs=1))
    with pytest.raises(PlanError, match="name an algorithm"):
        train(digits.images())
    assert train(digits, Plan(algorithm="sealed", epochs=1, scaling="none")).result["algorithm"] == "sealed"


def test_every_way_in_asks_for_the_word(tmp_path: Path, data: VerticalData) -> None:
    words = ("train", "--data", TINY, "--parties", 3, "--algorithm", "vafl", "--out", tmp_path / "run")
    refused = cli(*words)
    assert isinstance(refused.exception, PlanError) and not (tmp_path / "run").exists()
    (tmp_path / "plan.toml").write_text('algorithm = "vafl"\nepochs = 1\n')
    read = cli("train", "--data", TINY, "--plan", tmp_path / "plan.toml", "--out", tmp_path / "run")
    assert isinstance(read.exception, PlanError)
    with pytest.raises(PlanError, match="--unprotected"):
        parse_sweep(f'data = "{TINY}"\nalgorithm = "vafl"\n')
    swept = parse_sweep(f'data = "{TINY}"\nalgorithm = "vafl"\n[grid]\nunprotected = [true, false]\n')
    assert [bool(point.error) for point in swept.points] == [False, True]
    with pytest.raises(PlanError, match="unprotected=True"):
        VerticalClassifier().fit(data.train[0], data.y_train)


def test_every_page_says_it_first(tmp_path: Path, data: VerticalData) -> None:
    words = ("--data", TINY, "--parties", 3, "--algorithm", "vafl", "--unprotected", "--epochs", 1)
    shown = cli("train", *words, "--record-views", "--out", tmp_path / "run")
    planned, first = shown.stdout.splitlines()[:2]
    assert "UNPROTECTED: exact values leave" in planned
    assert first.startswith("UNPROTECTED, labels exposed: exact gradients"), shown.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["guarantee"] == "none: unprotected"
    report = audit(tmp_path / "run", attacks="none", data=data, canaries=-1)
    assert report.content["words"][0].startswith("UNPROTECTED, labels exposed")
    report.save(tmp_path)
    assert "UNPROTECTED, labels exposed" in (tmp_path / "report.html").read_text()


def test_a_page_of_a_sweep_names_what_is_unprotected(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        f'data = "{TINY}"\nparties = 3\nepochs = 1\nbatch = 16\n[audit]\nattacks = "none"\ncanaries = -1\n'
        '[[point]]\nlabel = "bare"\nalgorithm = "vafl"\nunprotected = true\n'
        '[[point]]\nlabel = "noisy"\nalgorithm = "vafl"\nsigma = 1.0\n'
    )
    with here():
        done = cli("sweep", tmp_path / "sweep.toml", "--workers", 1, "--out", tmp_path / "s")
    assert done.exit_code == 0, done.output
    said = [line for line in done.output.splitlines() if line.startswith("UNPROTECTED")]
    assert said and said[0].startswith("UNPROTECTED, nothing is promised: bare: labels exposed")
    assert "noisy: labels" not in done.output
    page = (tmp_path / "s" / "sweep.html").read_text()
    assert "<li>bare: labels exposed: exact gradients" in page and "<li>noisy: labels" not in page
