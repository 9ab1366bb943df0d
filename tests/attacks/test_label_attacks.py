"""Label attacks succeed where gradients tell, and fall to their baseline where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from attack_cases import REPEATED, Runs, SlowConformance, case_of, outcome, rare_positives, score
from attack_conformance import Case

from securevfl import VerticalData
from securevfl.attacks.contract import Attack
from securevfl.attacks.label import DirectLabels, GradientDirection, GradientNorm, LabelAttack, Spectral
from securevfl.attacks.label_models import ActiveModelCompletion, BatchLabelInversion, ModelCompletion
from securevfl.attacks.registry import ATTACKS
from securevfl.attacks.source import Source

LABEL_ATTACKS = [attack for attack in ATTACKS.values() if attack.family == "label"]
MLP = {"model": "mlp", "hidden": (16,), "embedding": 8, "head": "mlp", "batch": 128, "epochs": 6}


@pytest.fixture(scope="module")
def rare() -> VerticalData:
    return rare_positives(0.05)


@pytest.fixture(scope="module")
def even() -> VerticalData:
    return rare_positives(0.5)


@pytest.fixture(scope="module")
def rare_run(runs: Runs, rare: VerticalData) -> Source:
    return runs(rare, **MLP)


@pytest.fixture(scope="module")
def logit_run(runs: Runs, cancer: VerticalData) -> Source:
    """Linear encoders whose sum is the logit: no top model."""
    return runs(cancer, fusion="sum", batch=16, epochs=3)


class LabelConformance(SlowConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, logit_run: Source) -> Case:
        return case_of(logit_run, cls.attack, "p0", "p1")


class TestGradientNorm(LabelConformance):
    attack = GradientNorm


class TestGradientDirection(LabelConformance):
    attack = GradientDirection


class TestDirectLabels(LabelConformance):
    attack = DirectLabels


class TestSpectral(LabelConformance):
    attack = Spectral


class TestModelCompletion(LabelConformance):
    attack = ModelCompletion


class TestActiveModelCompletion(SlowConformance):
    attack = ActiveModelCompletion

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, runs: Runs, cancer: VerticalData) -> Case:
        return case_of(runs(cancer, optimisers={"p1": "malicious"}), cls.attack, "p0", "p1")


class TestBatchLabelInversion(LabelConformance):
    attack = BatchLabelInversion


# -- where they must succeed -------------------------------------------------------------------------------


def test_norm_finds_rare_positives(rare_run: Source) -> None:
    """At 5 % positives the reference AUC is .977."""
    assert score(rare_run, GradientNorm, "p0", "p1") > 0.95


def test_norm_tells_nothing_where_classes_are_even(runs: Runs, even: VerticalData) -> None:
    """The negative control, .499. 0.1 is above six standard errors (.016 at 600 and 600 records)."""
    assert abs(score(runs(even, **MLP), GradientNorm, "p0", "p1") - 0.5) < 0.1


def test_norm_says_what_single_batches_tell(rare_run: Source) -> None:
    found = outcome(rare_run, GradientNorm, "p0", "p1").score
    assert found is not None and "single batches: median" in found.note


@pytest.mark.parametrize("share", ["rare", "even"])
def test_direction_works_whatever_the_share_of_positives(
    runs: Runs, share: str, request: pytest.FixtureRequest
) -> None:
    """The reference is .87 to .90 with a top model."""
    assert score(runs(request.getfixturevalue(share), **MLP), GradientDirection, "p0", "p1") > 0.8


def test_one_logit_gives_every_label_away(logit_run: Source) -> None:
    """The gradient p - 1[y = 1] has the label's sign: exact by algebra."""
    assert score(logit_run, DirectLabels, "p0", "p1") == 1.0
    assert score(logit_run, GradientDirection, "p0", "p1") == 1.0


def test_ten_logits_give_every_label_away(runs: Runs, digits: VerticalData) -> None:
    assert score(runs(digits, fusion="sum", epochs=1), DirectLabels, "p0", "p1") == 1.0


def test_batch_sums_do_not_hide_labels(logit_run: Source) -> None:
    """15-odd equations for 16 labels per batch, three visits per record: far above the majority's .63."""
    found = outcome(logit_run, BatchLabelInversion, "p0", "p1").score
    assert found is not None and found.low > found.baseline + 0.1


def test_embeddings_separate_the_classes(logit_run: Source) -> None:
    """The reference is .56 to .71; breast cancer is easier."""
    assert score(logit_run, Spectral, "p0", "p1") > 0.7


def test_completion_reports_what_raw_features_achieve(logit_run: Source) -> None:
    found = outcome(logit_run, ModelCompletion, "p0", "p1").score
    assert found is not None and "raw features" in found.note and found.score > 0.8
    assert found.baseline > 0.63  # never less than the most frequent label


# -- where they must not -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fdml", "flex", "afsgd"])
@pytest.mark.parametrize("attack", LABEL_ATTACKS, ids=lambda attack: attack.name)
def test_shared_labels_make_the_attack_vacuous(
    runs: Runs, cancer: VerticalData, algorithm: str, attack: type[Attack]
) -> None:
    source = runs(cancer, algorithm=algorithm, epochs=1)
    found = outcome(source, attack, "p0", "p1")
    assert found.status == "n/a" and found.reason.startswith("vacuous")


def test_private_labels_of_flex_are_attacked(runs: Runs, cancer: VerticalData) -> None:
    source = runs(cancer, algorithm="flex", private_labels=True, epochs=1)
    assert score(source, GradientDirection, "p0", "p1") > 0.95


def test_private_labels_of_flex_are_attacked_on_sums_too(runs: Runs) -> None:
    """The gradient of the sum is not the answer to an upload; it belongs to the batch that was announced."""
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(200, 2)).astype(np.float32) for _ in range(3)]
    data = VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int))
    source = runs(data, algorithm="flex", protocol="pairwise", private_labels=True, batch=40, epochs=1)
    assert score(source, DirectLabels, "p0", "p2") == 1.0


@pytest.mark.parametrize("attack", LABEL_ATTACKS, ids=lambda attack: attack.name)
def test_frozen_encoders_get_no_gradient(runs: Runs, cancer: VerticalData, attack: type[Attack]) -> None:
    source = runs(cancer, encoder_training="none", scaling="none", sigma=1.0, epochs=1)
    found = outcome(source, attack, "p0", "p1")
    assert found.status == "n/a" and ("gradient" in found.reason or "not trained" in found.reason)


def test_reasons_name_what_stands_in_the_way(runs: Runs, cancer: VerticalData, digits: VerticalData) -> None:
    concat = runs(cancer, epochs=1)
    assert "linear model stands between" in outcome(concat, DirectLabels, "p0", "p1").reason
    assert "malicious" in outcome(concat, ActiveModelCompletion, "p0", "p1").reason
    many = runs(digits, epochs=1)
    assert "multiclass" in outcome(many, GradientNorm, "p0", "p1").reason
    deep = runs(cancer, model="mlp", fusion="sum", embedding=1, head="sum", epochs=1)
    assert "not in the view" in outcome(deep, BatchLabelInversion, "p0", "p1").reason


def test_gradients_on_secure_sums_are_read_too(runs: Runs, cancer: VerticalData) -> None:
    """The server gets sums, but its answers are the same gradients."""
    assert score(runs(cancer, protocol="two-tree"), DirectLabels, "p0", "p1") == 1.0


# -- defences ----------------------------------------------------------------------------------------------


def test_counted_noise_brings_both_attacks_down(runs: Runs, rare: VerticalData) -> None:
    """Noise of ten clips. Six standard errors of an AUC with 60 positives are .23."""
    source = runs(rare, **MLP, defence="noise", defence_level=10.0, **REPEATED)
    for attack in (GradientNorm, GradientDirection):
        assert abs(score(source, attack, "p0", "p1") - 0.5) < 0.23


def test_marvell_lowers_both_attacks(runs: Runs, rare: VerticalData, rare_run: Source) -> None:
    source = runs(rare, **MLP, defence="marvell", defence_level=4.0, **REPEATED)
    for attack in (GradientNorm, GradientDirection):
        assert score(source, attack, "p0", "p1") < score(rare_run, attack, "p0", "p1") - 0.1


def test_max_norm_lowers_the_norm_attack(runs: Runs, rare: VerticalData, rare_run: Source) -> None:
    source = runs(rare, **MLP, defence="max-norm", **REPEATED)
    assert score(source, GradientNorm, "p0", "p1") < score(rare_run, GradientNorm, "p0", "p1") - 0.1


def test_signs_hide_norms_but_not_labels(runs: Runs, rare: VerticalData, cancer: VerticalData) -> None:
    source = runs(rare, **MLP, defence="sign")
    assert abs(score(source, GradientNorm, "p0", "p1") - 0.5) < 0.1
    assert score(source, GradientDirection, "p0", "p1") > 0.8
    assert score(runs(cancer, fusion="sum", defence="sign"), DirectLabels, "p0", "p1") == 1.0


def test_randomised_response_bounds_what_gradients_tell(runs: Runs, cancer: VerticalData) -> None:
    """Labels are kept with probability .525: reading all flipped labels exactly is hardly better than a coin.

    160 records: six standard deviations are .24.
    """
    source = runs(cancer, fusion="sum", label_epsilon=0.1, **REPEATED)
    assert abs(score(source, DirectLabels, "p0", "p1") - 0.525) < 0.24


@pytest.mark.parametrize("algorithm", ["afsgd", "fsvrg"])
def test_passive_workers_read_labels_off_derivatives(
    runs: Runs, cancer: VerticalData, algorithm: str
) -> None:
    source = runs(cancer, algorithm=algorithm, protocol="two-tree", active=("p0",), epochs=1)
    assert score(source, DirectLabels, "p0", "p1") == 1.0


def test_known_records_are_not_scored(logit_run: Source) -> None:
    for attack in (GradientNorm, GradientDirection, Spectral, ModelCompletion):
        case = case_of(logit_run, attack, "p0", "p1")
        checker = TestGradientNorm()
        checker.attack = attack  # type: ignore[misc]
        guess = checker.guess(case)
        assert not np.isin(guess["rows"], case.auxiliary["known_labels/rows"]).any()


def test_every_label_attack_checks_for_vacuity() -> None:
    assert all(issubclass(attack, LabelAttack) for attack in LABEL_ATTACKS)
