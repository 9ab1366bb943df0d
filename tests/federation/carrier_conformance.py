"""What every carrier must do alike. Inherit `CarrierConformance` and say how a plan is run on the carrier.

The same plan on the same records gives the same models, ledgers, views, metrics and reason for stopping,
whatever carries the messages. What it is compared with is the run of one process.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from federation import tables, together
from safetensors.numpy import load_file

from securevfl import Plan, train
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import OPENED, View

PARTIES = ("bank", "clinic", "shop")
BASE = Plan(algorithm="vafl-sync", epochs=2, batch=16, learning_rate=0.5, record_views=True, unprotected=True)
CARD = Plan(
    algorithm="sealed",
    model="scorecard",
    epsilon=60.0,
    insecure_reproducible_noise=True,
    record_views=True,
    settings={"adversary": "semi-honest"},
)
TASKS = {"a scorecard of three classes": "multiclass", "a scorecard of numbers": "regression"}
"""Cases whose labels are not two classes."""
CASES = {
    "plain": BASE.with_changes(evaluate_every=1),
    "embeddings on two trees": BASE.with_changes(protocol="two-tree"),
    "pairwise masks": BASE.with_changes(protocol="pairwise"),
    "fdml on encrypted sums": BASE.with_changes(algorithm="fdml", protocol="bfv", learning_rate=0.1),
    "fdml without a server": BASE.with_changes(
        algorithm="fdml", learning_rate=0.1, settings={"decentralised": True}
    ),
    "flex on a plain tree": BASE.with_changes(algorithm="flex", protocol="plain-tree"),
    "linear models on two trees": BASE.with_changes(algorithm="fsgd", protocol="two-tree", learning_rate=0.1),
    "noise and flipped labels": BASE.with_changes(
        sigma=2.0, label_epsilon=3.0, insecure_reproducible_noise=True, evaluate_every=1
    ),
    "parties of different kinds": BASE.with_changes(
        model="mlp",
        hidden=(4,),
        encoders={
            "clinic": {"model": "lstm", "embedding": 3, "units": 2},
            "shop": {"model": "linear", "embedding": 2},
        },
        optimisers={"shop": "adam"},
        learning_rates={"shop": 0.01},
        losses={"clinic": "hinge"},
    ),
    "a scorecard": CARD,
    "members that deal for each other": CARD.with_changes(settings={"dealer": "none", "adversary": "auto"}),
    "a scorecard of three classes": CARD,
    "a scorecard of numbers": CARD.with_changes(settings={"label_low": -1.0, "label_high": 1.0}),
    "frozen encoders": BASE.with_changes(
        encoder_training="none", sigma=1.0, insecure_reproducible_noise=True
    ),
}
# At this rate the loss grows from epoch to epoch, so that two of them bring no improvement.
IMPATIENT = BASE.with_changes(learning_rate=400.0, patience=2, epochs=12)
# In mode strict every vector counts for everybody: a few epochs use up what this allows.
SMALL_BUDGET = BASE.with_changes(sigma=6.0, budget_epsilon=30.0, epochs=12)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left behind, in a form that can be compared.

    Attributes:
        models: File and tensor -> values.
        releases: How often each owner released what, how, of which records, to whom.
        views: How often each observer saw which kind from whom; opened totals included.
        metrics: The label holder's lines.
        result: The label holder's result.
    """

    models: dict[str, np.ndarray]
    releases: Counter[tuple[Any, ...]]
    views: Counter[tuple[str, ...]]
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, home: Path | None = None) -> Outcome:
        """Reads run folders.

        Args:
            folder: Holds ledgers, views and models of all organisations.
            home: The label holder's folder, if that is another one.
        """
        home = home or folder
        return cls(
            models={
                f"{file.stem}/{name}": values
                for file in sorted((folder / "models").glob("*.safetensors"))
                for name, values in load_file(file).items()
            },
            releases=Counter(
                (each.owner, each.kind, each.mechanism, each.observers, each.vectors, _rows(each.rows))
                for each in read_records(folder)
            ),
            views=Counter(
                (observer.name, seen.kind, seen.sender, seen.receiver)
                for observer in sorted((folder / "views").iterdir())
                for seen in View(observer)
            ),
            metrics=[json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()],
            result=json.loads((home / "result.json").read_text()),
        )


def _known(figures: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}


def _rows(rows: Any) -> tuple[int, ...] | None:
    return None if rows is None else tuple(rows.tolist())


def simulated(plan: Plan, folder: Path, task: str = "binary", **options: Any) -> Outcome:
    """A run of the same organisations on one machine."""
    train(together(tables(PARTIES, task=task), plan), plan, folder, **options)
    return Outcome.read(folder)


_EXPECTED: dict[str, Outcome] = {}


def expected_of(plan: Plan, task: str = "binary") -> Outcome:
    """The run of one process that all carriers' runs are compared with, made once."""
    key = f"{task} {plan}"
    if key not in _EXPECTED:
        with TemporaryDirectory() as folder:
            _EXPECTED[key] = simulated(plan, Path(folder) / "run", task)
    return _EXPECTED[key]


def same_models(found: Outcome, expected: Outcome) -> None:
    assert found.models.keys() == expected.models.keys()
    for name, values in expected.models.items():
        # float32, where parties of one process may compute together, over a few dozen steps.
        np.testing.assert_allclose(found.models[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


class CarrierConformance(ABC):
    """Tests that every carrier passes."""

    @abstractmethod
    def run(self, plan: Plan, folder: Path, task: str = "binary", profile: Path | None = None) -> Outcome:
        """Runs a plan on the carrier, with the tables of `PARTIES`; goes on from its own profile."""

    @pytest.mark.parametrize("case", CASES)
    def test_a_run_is_the_same_everywhere(self, tmp_path: Path, case: str) -> None:
        plan, task = CASES[case], TASKS.get(case, "binary")
        expected, found = expected_of(plan, task), self.run(plan, tmp_path / "here", task)
        same_models(found, expected)
        assert found.releases == expected.releases and found.releases
        assert found.views == expected.views and found.views
        self.assert_same_metrics(found, expected)
        assert found.result["stopped"] is expected.result["stopped"] is None

    def test_a_card_from_a_profile_is_the_same_everywhere(self, tmp_path: Path) -> None:
        first = CARD.with_changes(model="profile", epsilon=10.0)
        one, here = tmp_path / "one", tmp_path / "here"
        simulated(first, one)
        self.run(first, here)
        expected = simulated(CARD, tmp_path / "one card", profile=one)
        found = self.run(CARD, tmp_path / "card here", profile=here)
        same_models(found, expected)
        assert found.releases == expected.releases and found.views == expected.views
        self.assert_same_metrics(found, expected)
        kinds = [kind for owner, kind, *_ in found.releases.elements() if owner == "bank"]
        assert kinds.count("label histogram") == kinds.count("second label histogram") == 1

    def assert_same_metrics(self, found: Outcome, expected: Outcome) -> None:
        assert len(found.metrics) == len(expected.metrics)
        for line, wanted in zip(found.metrics, expected.metrics, strict=True):
            assert (line["epoch"], line["processed"]) == (wanted["epoch"], wanted["processed"])
            assert line["loss"] == (wanted["loss"] and pytest.approx(wanted["loss"], rel=1e-4))
            if "evaluation" not in expected.result:
                assert line["test"] == pytest.approx(wanted["test"], rel=1e-3)
            assert line["mu"].get("bank") == wanted["mu"].get("bank")
        assert found.metrics[-1]["test"] == found.result["test"]
        # Of sealed models a simulation knows exact figures besides; what the federation opens is the same.
        same = "evaluation" if "evaluation" in expected.result else "test"
        known, wanted = _known(found.result[same]), _known(expected.result[same])
        # Shares are random: how they round moves figures of 12 records by 1e-4 (standard errors: .05 to .4).
        assert known == pytest.approx(wanted, rel=1e-3, abs=5e-4), (known, wanted)
        assert found.result["epochs"] == expected.result["epochs"]

    @pytest.mark.parametrize(
        ("case", "observer"), [("pairwise masks", "bank"), ("fdml on encrypted sums", "clinic")]
    )
    def test_opened_totals_are_in_the_view(self, tmp_path: Path, case: str, observer: str) -> None:
        """Whoever obtains a total, label holder or not, has it written down: attacks on totals need it."""
        views = self.run(CASES[case], tmp_path / "here").views
        opened = {seer: count for (seer, kind, *_), count in views.items() if kind == OPENED}
        assert set(opened) == {observer} and opened[observer] > 5

    def test_impatience_ends_training(self, tmp_path: Path) -> None:
        expected, found = expected_of(IMPATIENT), self.run(IMPATIENT, tmp_path / "here")
        reason = "early: the training loss has not improved for 2 epochs"
        assert found.result["stopped"] == expected.result["stopped"] == reason
        assert found.result["epochs"] == expected.result["epochs"] == len(found.metrics) < 12

    def test_a_budget_ends_training(self, tmp_path: Path) -> None:
        """Who was refused first may differ, not that somebody was, when, and that the test part was kept."""
        expected, found = expected_of(SMALL_BUDGET), self.run(SMALL_BUDGET, tmp_path / "here")
        for outcome in (expected, found):
            assert outcome.result["stopped"].startswith("budget: ")
            assert all(value is not None for value in outcome.result["test"].values())
        assert 0 < found.result["epochs"] == expected.result["epochs"] < 12

    @pytest.mark.parametrize("adversary", ["semi-honest", "malicious"])
    def test_sealed_training_releases_the_same(self, tmp_path: Path, adversary: str) -> None:
        """Shares are drawn at random, so the models differ by rounding; what left and was seen does not."""
        plan = Plan(algorithm="sealed", epochs=3, scaling="none", epsilon=8.0, record_views=True)
        plan = plan.with_changes(settings={"adversary": adversary})
        expected, found = expected_of(plan), self.run(plan, tmp_path / "here")
        assert found.releases == expected.releases and found.views == expected.views
        assert found.result["epochs"] == expected.result["epochs"] == 3
