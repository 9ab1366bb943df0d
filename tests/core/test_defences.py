"""Defences of labels and gradients: what they do, what they promise, and that the result says which."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from securevfl import Plan, VerticalData, train
from securevfl.errors import PlanError
from securevfl.federation.run import Run
from securevfl.models import build_encoder
from securevfl.models.seeds import torch_generator
from securevfl.privacy.defences import DEFENCES, keep_probability, marvell_variances, randomise_labels
from securevfl.privacy.ledger import read_records
from securevfl.privacy.noise import Noise
from securevfl.privacy.views import View
from securevfl.settings import plan as plans


class Crash(Exception):
    """Ends a run from outside."""


ALARM = 1e-7  # each statistical test below; there are fewer than ten


@pytest.fixture(scope="module")
def data() -> VerticalData:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(60, 3)).astype(np.float32) for _ in range(2)]
    return VerticalData.from_arrays(blocks, (blocks[0][:, 0] + blocks[1][:, 0] > 0).astype(int))


def test_a_plan_knows_every_defence() -> None:
    """Plans name them without loading them."""
    assert tuple(DEFENCES) == plans.DEFENCES


def gradients(share: float = 0.1, count: int = 4000, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    labels = (rng.random(count) < share).astype(np.float32)
    values = (share - labels)[:, None] * np.ones((1, width)) + 0.02 * rng.normal(size=(count, width))
    return values, labels


class TestRandomisedResponse:
    @pytest.mark.parametrize("classes", [2, 3, 10])
    @pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
    def test_frequencies(self, classes: int, epsilon: float) -> None:
        count = 40_000
        labels = np.arange(count) % classes
        jumps = (randomise_labels(labels, classes, epsilon, Noise()) - labels) % classes
        keep = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
        expected = np.array([keep, *[(1 - keep) / (classes - 1)] * (classes - 1)]) * count
        found = np.bincount(jumps, minlength=classes)
        assert stats.chisquare(found, expected).pvalue > ALARM

    def test_probability_is_rounded_to_the_safe_side(self) -> None:
        for epsilon in (0.1, 1.0, 8.0):
            kept = keep_probability(epsilon, 2)
            assert math.log(kept / (1 - kept)) <= epsilon

    def test_type_of_labels_is_kept(self) -> None:
        for kind in (np.float32, np.int64):
            flipped = randomise_labels(np.array([0, 1, 1], kind), 2, 1.0, Noise())
            assert flipped.dtype == kind and set(flipped.tolist()) <= {0, 1}

    def test_huge_epsilon_flips_nothing(self) -> None:
        labels = np.arange(1000) % 7
        assert np.array_equal(randomise_labels(labels, 7, 60.0, Noise()), labels)

    def test_run_writes_it_down_once_and_says_so(self, data: VerticalData, tmp_path: Path) -> None:
        run = train(
            data,
            Plan(algorithm="vafl", epochs=2, batch=16, label_epsilon=1.5, unprotected=True),
            tmp_path / "run",
        )
        (record,) = [r for r in read_records(tmp_path / "run") if r.mechanism == "randomised-response"]
        assert (record.owner, record.epsilon, record.vectors) == ("p0", 1.5, data.n_train)
        assert record.observers == ("p1",) and record.mu < math.inf
        assert "randomised response" in run.result["labels"] and "epsilon 1.5" in run.result["labels"]

    def test_parties_that_share_labels_get_flipped_ones(self, data: VerticalData, tmp_path: Path) -> None:
        train(
            data,
            Plan(algorithm="fdml", epochs=1, label_epsilon=0.01, record_views=True, unprotected=True),
            tmp_path / "run",
        )
        (seen,) = View(tmp_path / "run" / "views" / "p1").messages("labels")
        changed = float((seen.fields["values"] != data.y_train).mean())
        # 48 flips with probability 1/2: fewer than 5 or more than 43 have probability below 1e-8.
        assert 5 / 48 <= changed <= 43 / 48

    def test_resumed_run_goes_on_with_the_same_labels(self, data: VerticalData, tmp_path: Path) -> None:
        def crash(progress: object) -> None:
            if progress.epoch == 3:  # type: ignore[attr-defined]
                raise Crash

        plan = Plan(
            algorithm="vafl",
            fusion="sum",
            epochs=4,
            batch=16,
            label_epsilon=0.1,
            record_views=True,
            unprotected=True,
        )
        with pytest.raises(Crash):
            train(data, plan, tmp_path / "run", progress=crash)
        train(data, plan, tmp_path / "run", resume=True)
        records = [r for r in read_records(tmp_path / "run") if r.mechanism == "randomised-response"]
        assert len(records) == 1
        assert len(signs_of(tmp_path / "run")) == 48  # no record's label changed between visits

    @pytest.mark.parametrize("plan", [{"algorithm": "central"}, {"algorithm": "sealed"}])
    def test_no_use_where_no_label_leaves(self, data: VerticalData, plan: dict) -> None:
        with pytest.raises(PlanError, match="label_epsilon"):
            train(
                data,
                Plan.from_flat(
                    {"algorithm": "vafl", "label_epsilon": 1.0, "sigma": 10.0, "scaling": "none", **plan}
                ),
            )


def signs_of(folder: Path) -> dict[int, float]:
    """The label of each record as its logit's gradients tell it; fails if two visits disagree."""
    uploads, found = {}, {}
    for seen in View(folder / "views" / "p1").messages("embedding", "gradient"):
        if seen.kind == "embedding" and "rows" in seen.fields:
            uploads[seen.number] = seen.fields["rows"]
        elif seen.kind == "gradient":
            for row, value in zip(uploads[seen.reply_to], seen.fields["values"][:, 0], strict=True):
                assert found.setdefault(int(row), np.sign(value)) == np.sign(value)
    return found


class TestGradients:
    def test_max_norm_levels_expected_norms(self) -> None:
        values, labels = gradients()
        squares = (DEFENCES["max-norm"].change(values, labels, 1.0, Noise()) ** 2).sum(axis=1)
        longest = (values**2).sum(axis=1).max()
        # E[(1 + s e)^2] |g|^2 = max |g|^2; a mean of 4000 squared Gaussians is within 12 % (six deviations).
        assert abs(squares.mean() / longest - 1) < 0.12

    def test_sign_has_one_size_per_batch(self) -> None:
        values, labels = gradients()
        changed = DEFENCES["sign"].change(values, labels, 1.0, Noise())
        assert len(np.unique(np.abs(changed))) == 1 and np.array_equal(np.sign(changed), np.sign(values))

    def test_discrete_has_few_values(self) -> None:
        values, labels = gradients()
        assert len(np.unique(DEFENCES["discrete"].change(values, labels, 6.0, Noise()).round(9))) <= 7

    def test_marvell_spends_its_power_and_lowers_the_divergence(self) -> None:
        values, labels = gradients()
        gap = values[labels == 1].mean(0) - values[labels == 0].mean(0)
        power = 2.0 * float(gap @ gap)
        changed = DEFENCES["marvell"].change(values, labels, 2.0, Noise())
        spent = float(((changed - values) ** 2).sum(axis=1).mean())
        assert spent < 1.3 * power  # the mean of 400 squares of the rarer class is within 30 %
        spreads = [float(values[labels == c].var(axis=0).mean()) for c in (0, 1)]
        even = power / 4
        along, across = marvell_variances(spreads, [0.9, 0.1], float(gap @ gap), 4, power)
        assert divergence(spreads, along, across, float(gap @ gap), 4) < divergence(
            spreads, [even] * 2, [even] * 2, float(gap @ gap), 4
        )

    def test_batches_of_one_class_or_without_gradient_pass(self) -> None:
        for name in ("marvell", "max-norm", "discrete", "sign"):
            level = DEFENCES[name].level
            for values in (np.zeros((3, 2)), np.ones((3, 2))):
                changed = DEFENCES[name].change(values, np.ones(3), level, Noise())
                assert np.isfinite(changed).all()

    @pytest.mark.parametrize("name", [n for n, d in DEFENCES.items() if n != "none" and not d.counted])
    def test_heuristics_are_called_heuristics(self, data: VerticalData, tmp_path: Path, name: str) -> None:
        run = train(
            data, Plan(algorithm="vafl", epochs=1, batch=16, defence=name, unprotected=True), tmp_path / "run"
        )
        assert f"changed by {name} (a heuristic)" in run.result["labels"]
        assert run.result["labels"].endswith("no guarantee")
        assert run.result["privacy"]["p0"]["mu"] is None

    def test_noise_is_counted(self, data: VerticalData, tmp_path: Path) -> None:
        plan = Plan(
            algorithm="vafl",
            epochs=1,
            batch=16,
            defence="noise",
            defence_level=5.0,
            gradient_clip=0.5,
            unprotected=True,
        )
        run = train(data, plan, tmp_path / "run")
        assert "Gaussian noise" in run.result["labels"] and run.result["labels"].endswith("as accounted")
        records = [r for r in read_records(tmp_path / "run") if r.owner == "p0"]
        assert {(r.mechanism, r.clip, r.sigma) for r in records} == {("gaussian", 0.5, 2.5)}
        count = sum(r.vectors for r in records)
        assert run.result["privacy"]["p0"]["mu"] == pytest.approx(2 * 0.5 / 2.5 * math.sqrt(count))

    @pytest.mark.parametrize("changes", [{}, {"algorithm": "flex", "private_labels": True}])
    def test_in_a_plain_tree_others_read_what_came_of_a_gradient(self, changes: dict, tmp_path: Path) -> None:
        """A party's subtotals reach other parties, and carry what the gradients before have taught it."""
        three = VerticalData.load("synthetic:rows=40,features=6", parties=3)
        plan = Plan.from_flat(
            {
                "algorithm": "vafl",
                "unprotected": True,
                "epochs": 1,
                "batch": 16,
                "defence": "noise",
                "defence_level": 5.0,
                "protocol": "plain-tree",
                **changes,
            }
        )
        run = train(three, plan, tmp_path / "run")
        records = [r for r in read_records(tmp_path / "run") if r.owner == "p0"]
        assert {r.observers for r in records} == {("p1", "p2")}
        count = sum(r.vectors for r in records)
        assert run.result["privacy"]["p0"]["mu"] == pytest.approx(2 / 5.0 * math.sqrt(count))

    def test_noise_has_the_size_that_is_written_down(self, data: VerticalData, tmp_path: Path) -> None:
        plan = Plan(
            algorithm="vafl",
            epochs=20,
            batch=16,
            defence="noise",
            defence_level=50.0,
            record_views=True,
            unprotected=True,
        )
        train(data, plan, tmp_path / "run")
        values = [
            seen.fields["values"].ravel() * len(seen.fields["values"])
            for seen in View(tmp_path / "run" / "views" / "p1").messages("gradient")
        ]
        noise = np.concatenate(values) / 50.0
        # Gradients are at most 1/50 of the noise: the variance is 1 up to 4e-4 and sampling.
        bounds = stats.chi2.ppf([ALARM, 1 - ALARM], len(noise)) / len(noise)
        assert bounds[0] - 1e-3 < noise.var() < bounds[1] + 1e-3

    def test_flex_with_private_labels_is_defended_too(self, data: VerticalData, tmp_path: Path) -> None:
        plan = Plan(
            algorithm="flex",
            epochs=1,
            batch=16,
            defence="sign",
            settings={"private_labels": True},
            unprotected=True,
        )
        assert "sign" in train(data, plan, tmp_path / "run").result["labels"]


class TestPlans:
    @pytest.mark.parametrize(
        ("plan", "words"),
        [
            ({"defence": "marvel"}, "did you mean 'marvell'"),
            ({"defence": "sign", "algorithm": "fdml"}, "sends none"),
            ({"defence": "sign", "algorithm": "flex"}, "sends none"),
            ({"defence": "sign", "encoder_training": "none", "scaling": "none"}, "sends none"),
            ({"defence": "noise", "encoder_training": "dp", "epsilon": 8.0, "scaling": "none"}, "strict"),
            ({"label_epsilon": -1.0}, "0 or more"),
            ({"defence_level": math.nan}, "0 or more"),
            ({"optimiser": "malicious", "algorithm": "fdml"}, "no optimiser"),
        ],
    )
    def test_plans_that_make_no_sense(self, data: VerticalData, plan: dict, words: str) -> None:
        with pytest.raises(PlanError, match=words):
            train(data, Plan.from_flat({"algorithm": "vafl", "unprotected": True, "epochs": 1, **plan}))

    def test_marvell_needs_two_classes(self) -> None:
        rng = np.random.default_rng(0)
        blocks = [rng.normal(size=(60, 2)) for _ in range(2)]
        three = VerticalData.from_arrays(blocks, np.arange(60) % 3)
        with pytest.raises(PlanError, match="two classes"):
            train(three, Plan(algorithm="vafl", defence="marvell", unprotected=True))

    def test_regression_has_no_classes_to_flip(self) -> None:
        rng = np.random.default_rng(0)
        blocks = [rng.normal(size=(60, 2)) for _ in range(2)]
        values = VerticalData.from_arrays(blocks, rng.normal(size=60), task="regression")
        with pytest.raises(PlanError, match="regression"):
            train(values, Plan(algorithm="vafl", label_epsilon=1.0, unprotected=True))

    def test_malicious_party_steps_further(self, data: VerticalData) -> None:
        honest = train(data, Plan(epochs=4, batch=16, algorithm="vafl-sync", unprotected=True))
        attacked = train(
            data,
            Plan(epochs=4, batch=16, algorithm="vafl-sync", optimisers={"p1": "malicious"}, unprotected=True),
        )

        def moved(run: Run) -> float:
            first = build_encoder("linear", 3, 1, generator=torch_generator(0, "encoder", 1))
            ends = zip(run.encoders["p1"].parameters(), first.parameters(), strict=True)
            return sum(float((end - start).detach().norm()) for end, start in ends)

        assert moved(attacked) > 1.3 * moved(honest)

    def test_malicious_optimiser_survives_a_checkpoint(self, data: VerticalData, tmp_path: Path) -> None:
        def stop(progress: object) -> None:
            if progress.epoch == 2:  # type: ignore[attr-defined]
                raise Crash

        plan = Plan(algorithm="vafl", epochs=3, batch=16, optimisers={"p1": "malicious"}, unprotected=True)
        with pytest.raises(Crash):
            train(data, plan, tmp_path / "run", progress=stop)
        resumed = train(data, plan, tmp_path / "run", resume=True)
        whole = train(data, plan)
        assert resumed.test == whole.test
        assert json.dumps(resumed.plan.optimisers) == '{"p1": "malicious"}'


def divergence(spreads: list, along: list, across: list, square: float, width: int) -> float:
    """Symmetric KL divergence (up to constants) of Gaussians with these variances and mean distance."""
    left, right = along[0] + spreads[0], along[1] + spreads[1]
    side0, side1 = across[0] + spreads[0], across[1] + spreads[1]
    return (width - 1) * (side0 / side1 + side1 / side0) + (left + square) / right + (right + square) / left


class TestEarlyStopping:
    """All see when a run ends, so that must not follow labels about which something is promised."""

    @staticmethod
    def records(label: int) -> VerticalData:
        blocks = [np.array([[1.0], [1.0], [-1.0]]), np.zeros((3, 1))]
        return VerticalData.from_arrays(
            blocks, np.array([1, label, 0]), test=([block[:2] for block in blocks], np.array([0, 1]))
        )

    @staticmethod
    def plan(**changes: object) -> Plan:
        fields = {
            "algorithm": "vafl-sync", "epochs": 8, "batch": 3, "patience": 1, "fusion": "sum", "head": "sum",
            "learning_rate": 1e-9, "learning_rates": {"p0": 30.0}, "sigma": 0.01, "scaling": "none",
        }  # fmt: skip
        return Plan(**{**fields, **changes})

    def test_one_label_decides_when_a_run_ends(self) -> None:
        """The attack itself, where nothing is promised: whoever counts epochs reads the label."""
        for _ in range(5):
            epochs = [len(train(self.records(label), self.plan()).metrics) for label in (0, 1)]
            assert epochs[0] != epochs[1]

    def test_the_report_of_such_a_run_promises_nothing(self) -> None:
        run = train(self.records(1), self.plan())
        assert run.privacy["p0"]["epsilon"] is None and "no guarantee" in run.result["labels"]

    @pytest.mark.parametrize(
        "changes", [{"defence": "noise", "defence_level": 200.0}, {"encoder_training": "none"}]
    )
    def test_where_something_is_promised_it_is_refused(self, changes: dict[str, object]) -> None:
        with pytest.raises(PlanError, match="leave patience at 0"):
            train(self.records(1), self.plan(**changes))
        train(self.records(1), self.plan(patience=0, epochs=2, **changes))
