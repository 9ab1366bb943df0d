"""Exact inference: linear products, and totals that are summed repeatedly, give features away."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from attack_cases import REPEATED, Runs, SlowConformance, case_of, outcome, score
from attack_conformance import Case

from securevfl import Plan, VerticalData
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.steps import Batches
from securevfl.attacks.contract import Evidence
from securevfl.attacks.exact import (
    ApproximateInference,
    ExactInference,
    ReverseMultiplication,
    TotalsInference,
)
from securevfl.attacks.reading import moments
from securevfl.attacks.source import Source
from securevfl.federation.folder import RunFolder
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.views import View


@functools.cache
def small(widths: tuple[int, ...], records: int = 200, seed: int = 0) -> VerticalData:
    rng = np.random.default_rng(seed)
    blocks = [rng.normal(size=(records, width)).astype(np.float32) for width in widths]
    return VerticalData.from_arrays(blocks, (blocks[0][:, 0] + blocks[1][:, 0] > 0).astype(int))


def probing(folder: Path, data: VerticalData, **changes: object) -> Source:
    """An AFSGD run in which p0 always asks for all records, twice as often as the others step on one.

    Nothing in the protocol forbids that: a worker chooses its batches.
    """
    settings = {"algorithm": "afsgd", "batch": 1, "epochs": 1, "l2": 0.0, "learning_rate": 0.5}
    speeds = {"p0": 2.0, **dict.fromkeys(data.parties[2:], 1e-6)}
    plan = Plan.from_flat(
        {
            "algorithm": "vafl",
            "unprotected": True,
            **settings,
            "speeds": speeds,
            "record_views": True,
            **changes,
        }
    )
    resolved, scaled = resolve(plan, data)
    files = RunFolder(folder)
    files.create(resolved)
    carrier = VirtualCarrier(resolved, scaled, folder=files)
    (prober,) = [role for role in carrier.roles[1:] if role.address == "p0"]
    prober.batches = Batches(scaled.n_train, scaled.n_train, np.random.default_rng(0))
    try:
        drive(Schedule(carrier).train())
    finally:
        carrier.close()
    return Source(folder, data)


@pytest.fixture(scope="module")
def linear_run(runs: Runs) -> Source:
    """VAFL on linear models as it is by default; p1 has three columns."""
    return runs(small((2, 3, 3)), epochs=8, batch=64)


@pytest.fixture(scope="module")
def totals_run(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Two-tree masks, three workers: p0 sees totals of the others only."""
    folder = tmp_path_factory.mktemp("probing") / "run"
    return probing(folder, small((2, 3, 2)), protocol="two-tree", epochs=5)


@pytest.fixture(scope="module")
def steps_run(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return probing(tmp_path_factory.mktemp("steps") / "run", small((2, 3)), protocol="plain", epochs=8)


class TestExactInference(SlowConformance):
    attack = ExactInference

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, linear_run: Source) -> Case:
        return case_of(linear_run, cls.attack, "p1", "p0")


class TestTotalsInference(SlowConformance):
    attack = TotalsInference

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, totals_run: Source) -> Case:
        return case_of(totals_run, cls.attack, "p1", "p0")


class TestReverseMultiplication(SlowConformance):
    attack = ReverseMultiplication

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, steps_run: Source) -> Case:
        return case_of(steps_run, cls.attack, "p1", "p0")


class TestApproximateInference(SlowConformance):
    attack = ApproximateInference

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, runs: Runs) -> Case:
        return case_of(runs(one_column(), scaling="none"), cls.attack, "p1", "p0")


def errors(source: Source, attack: type, owner: str, observer: str) -> np.ndarray:
    case = case_of(source, attack, owner, observer)
    checker = TestExactInference()
    checker.attack = attack
    guess = super(SlowConformance, checker).guess(case)
    return np.abs(guess["features"] - case.truth["features"][guess["rows"]])


# -- totals ------------------------------------------------------------------------------------------------


def test_totals_alone_give_features_away_exactly(totals_run: Source) -> None:
    """The Gram-matrix attack. Ring rounding of 2^-33 is amplified by the equations' condition, below 1e3."""
    assert score(totals_run, TotalsInference, "p1", "p0") == 1.0
    assert errors(totals_run, TotalsInference, "p1", "p0").max() < 1e-6


def sums_of(source: Source) -> list[tuple[frozenset[str], list[int]]]:
    """Of which parties and records p0 has sums."""
    evidence = Evidence(
        info=source.info("p1", ("p0",)),
        views={"p0": View(source.view_folder("p0"))},
        auxiliary={},
        rng=np.random.default_rng(0),
    )
    return [(moment.parties, moment.rows.tolist()) for moment in moments(evidence)]


def test_observer_of_totals_sees_nothing_else(totals_run: Source) -> None:
    assert {parties for parties, _ in sums_of(totals_run)} == {frozenset({"p1", "p2"})}


@pytest.mark.parametrize(("protocol", "error"), [("pairwise", 1e-6), ("ckks", 1e-4), ("bfv", 1e-4)])
def test_no_protocol_hides_totals_from_their_receiver(
    protocol: str, error: float, totals_run: Source, tmp_path: Path
) -> None:
    """What a key or unmasking opens gives away the same; homomorphic sums round 2^12 times coarser."""
    source = probing(tmp_path / "run", small((2, 3, 2)), protocol=protocol, epochs=5)
    assert sums_of(source) == sums_of(totals_run)
    assert score(source, TotalsInference, "p1", "p0") == score(totals_run, TotalsInference, "p1", "p0") == 1.0
    assert errors(source, TotalsInference, "p1", "p0").max() < error


def test_bystanders_of_opened_totals_have_none(runs: Runs) -> None:
    source = runs(small((2, 3, 2)), protocol="pairwise", epochs=2)
    assert "no total" in outcome(source, TotalsInference, "p1", "p2").reason


@pytest.mark.parametrize("protocol", ["plain", "pairwise"])
def test_sums_that_are_handed_on_give_features_away(runs: Runs, protocol: str) -> None:
    """Flex gives every party the sum over all; with one batch, the same records come in every round."""
    steady = {"learning_rate": 0.3}  # a rate that decays moves the weights, and with them the sums, less
    source = runs(
        small((2, 3, 2)), algorithm="flex", protocol=protocol, fusion="sum", epochs=12, batch=200, **steady
    )
    assert score(source, TotalsInference, "p1", "p2") == 1.0


@pytest.mark.parametrize("observer", ["p0", "p1", "p2"])
def test_sums_of_an_encrypted_fdml_give_features_away_to_every_worker(runs: Runs, observer: str) -> None:
    """p1 opens them and hands them on; p0, whose organisation adds ciphertexts, is a worker like p2."""
    source = runs(
        small((2, 3, 2)),
        algorithm="fdml",
        protocol="bfv",
        epochs=12,
        batch=200,
        learning_rate=2.0,
        decay="none",
    )
    owner = "p2" if observer == "p1" else "p1"
    assert score(source, TotalsInference, owner, observer) > 0.5


def test_an_encrypted_fdml_shows_its_server_no_total(runs: Runs) -> None:
    source = runs(small((2, 3, 2)), algorithm="fdml", protocol="bfv", epochs=2, label_holder="server")
    evidence = Evidence(
        info=source.info("p1", ("server",)),
        views={"server": View(source.view_folder("server"))},
        auxiliary={},
        rng=np.random.default_rng(0),
    )
    assert moments(evidence) == []
    assert not any(source.info("p1", ("server",)).seen.get(kind) for kind in ("sum", "opened-total"))


def test_honest_snapshots_give_features_away(runs: Runs) -> None:
    """AFSVRG tells everybody the scores of all records once per epoch: seven columns, nine epochs."""
    source = runs(small((2, 3, 2)), algorithm="afsvrg", protocol="two-tree", epochs=9, batch=64)
    assert score(source, TotalsInference, "p2", "p1") == 1.0


def test_few_totals_do_not(runs: Runs) -> None:
    source = runs(small((2, 6, 6)), algorithm="afsgd", protocol="two-tree", epochs=2, batch=16)
    assert score(source, TotalsInference, "p1", "p0") < 0.05


def test_noise_in_the_sum_prevents_it(tmp_path: Path) -> None:
    source = probing(tmp_path / "run", small((2, 3, 2)), protocol="two-tree", epochs=5, sigma=0.5, **REPEATED)
    assert score(source, TotalsInference, "p1", "p0") < 0.05


# -- products ----------------------------------------------------------------------------------------------


def test_vafl_with_linear_models_gives_features_away(linear_run: Source) -> None:
    """Three columns, nine products per training record."""
    assert score(linear_run, ExactInference, "p1", "p0") > 0.95
    assert np.median(errors(linear_run, ExactInference, "p1", "p0")) < 1e-4


@pytest.mark.parametrize("protocol", ["plain", "plain-tree"])
def test_partial_sums_give_features_away(runs: Runs, protocol: str) -> None:
    source = runs(small((2, 3, 3)), algorithm="afsgd", protocol=protocol, epochs=8, batch=64)
    assert score(source, ExactInference, "p2", "p0") > 0.95


def test_noise_prevents_exact_inference(runs: Runs) -> None:
    source = runs(small((2, 3, 3)), epochs=8, batch=64, sigma=1.0, **REPEATED)
    assert score(source, ExactInference, "p1", "p0") < 0.02


def test_masks_hide_products(runs: Runs) -> None:
    source = runs(small((2, 3, 3)), algorithm="afsgd", protocol="two-tree", epochs=1, batch=64)
    assert "hides the products" in outcome(source, ExactInference, "p1", "p0").reason


def test_nonlinear_encoders_are_not_attacked(runs: Runs, cancer: VerticalData) -> None:
    source = runs(cancer, model="mlp", epochs=1)
    for attack in (ExactInference, TotalsInference, ReverseMultiplication):
        assert "mlp encoder" in outcome(source, attack, "p1", "p0").reason


# -- reverse multiplication --------------------------------------------------------------------------------


def test_steps_on_known_records_give_all_others_away(steps_run: Source) -> None:
    assert score(steps_run, ReverseMultiplication, "p1", "p0") > 0.99
    # Products are float64; differences of steps of size 0.1 keep ten digits.
    assert errors(steps_run, ReverseMultiplication, "p1", "p0").max() < 1e-6


def test_reverse_multiplication_names_what_it_lacks(runs: Runs) -> None:
    data = small((2, 3, 3), records=20)
    batches = runs(data, algorithm="afsgd", protocol="plain", epochs=1, batch=64)
    assert "batches of one" in outcome(batches, ReverseMultiplication, "p1", "p0").reason
    decay = runs(data, algorithm="afsgd", protocol="plain", epochs=1, batch=1)
    assert "l2 = 0" in outcome(decay, ReverseMultiplication, "p1", "p0").reason
    masked = runs(data, algorithm="afsgd", protocol="two-tree", epochs=1, batch=1, l2=0.0)
    assert "hides the products" in outcome(masked, ReverseMultiplication, "p1", "p0").reason


# -- approximate inference ---------------------------------------------------------------------------------


@functools.cache
def one_column(seed: int = 0) -> VerticalData:
    rng = np.random.default_rng(seed)
    blocks = [rng.normal(size=(120, 3)).astype(np.float32), rng.random((120, 1)).astype(np.float32)]
    labels = (blocks[0][:, 0] + blocks[1][:, 0] > 0.5).astype(int)
    return VerticalData.from_arrays(blocks, labels, bounds=[None, [(0.0, 1.0)]])


def test_the_range_of_a_column_gives_it_away(runs: Runs) -> None:
    """The largest of 96 uniform values is within .05 of the end but with probability .95^96 = .007."""
    data = one_column()
    assert score(runs(data, scaling="none"), ApproximateInference, "p1", "p0") > 0.9
    partial = runs(data, scaling="none", algorithm="afsgd", protocol="plain")
    assert score(partial, ApproximateInference, "p1", "p0") > 0.9


def test_noise_brings_approximate_inference_down(runs: Runs) -> None:
    source = runs(one_column(), scaling="none", sigma=3.0, **REPEATED)
    found = outcome(source, ApproximateInference, "p1", "p0").score
    assert found is not None and found.low <= found.baseline + 0.05


def test_several_columns_are_out_of_reach(linear_run: Source) -> None:
    assert "single column" in outcome(linear_run, ApproximateInference, "p1", "p0").reason


def test_few_records_leave_some_to_recover(runs: Runs) -> None:
    """The attacker is given three quarters of them at most, so that every attack has something to score."""
    rng = np.random.default_rng(3)
    blocks = [rng.uniform(-1, 1, (40, 3)).astype(np.float32) for _ in range(3)]
    data = VerticalData.from_arrays(blocks, (blocks[0][:, 0] > 0).astype(int), bounds=(-1.0, 1.0))
    for settings in ({"protocol": "plain"}, {"protocol": "two-tree"}):
        source = runs(data, algorithm="fdml", **settings)
        attack = ExactInference if settings["protocol"] == "plain" else TotalsInference
        assert outcome(source, attack, "p1", "p0").score is not None
