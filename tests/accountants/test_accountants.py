"""Every accountant against the contract, the reference values and each other."""

import json
import math
import tracemalloc
from pathlib import Path

import pytest
from accountant_conformance import AccountantConformance

from securevfl.accountants import (
    ACCOUNTANTS,
    CLTApproximation,
    GaussianRelease,
    GDPAccountant,
    MaskedRelease,
    MomentsAccountant,
    PLDAccountant,
    PRVAccountant,
    RandomisedResponse,
    best_upper_bound,
    compare,
)
from securevfl.accountants.accountants import compositions
from securevfl.accountants.base import reduce_events

CASES = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))["cases"]


def cases(kind):
    chosen = [case for case in CASES if case["kind"] == kind]
    return [pytest.param(case, id=" ".join(str(value) for value in case.values())) for case in chosen]


def sampled(sigma, rate, count, adjacency="add-remove"):
    """A release whose noise multiplier is `sigma` with respect to the clip norm 1."""
    reach = 2.0 if adjacency == "replace-one" else 1.0
    hidden = {"sampling_rate": rate, "ids_visible": rate == 1}
    return GaussianRelease(sigma=sigma, sensitivity=reach, count=count, adjacency=adjacency, **hidden)


class TestGDP(AccountantConformance):
    def make(self):
        return GDPAccountant()


class TestMoments(AccountantConformance):
    def make(self):
        return MomentsAccountant()


class TestPRV(AccountantConformance):
    def make(self):
        return PRVAccountant()


class TestPLD(AccountantConformance):
    def make(self):
        return PLDAccountant()


class TestCLT(AccountantConformance):
    def make(self):
        return CLTApproximation()


def test_only_the_approximation_is_no_bound():
    assert {name for name, kind in ACCOUNTANTS.items() if not kind.bound} == {"clt"}


@pytest.mark.parametrize("case", cases("release"))
def test_release_vectors(case):
    reach = case["clip"] * (2 if case["adjacency"] == "replace-one" else 1)
    event = GaussianRelease(
        sigma=case["sigma"], sensitivity=reach, count=case["count"], adjacency=case["adjacency"]
    )
    best = best_upper_bound(event, case["delta"])
    assert best.accountant == "GDPAccountant"
    assert case["value"] * (1 - 1e-15) <= best.epsilon <= case["value"] * (1 + 1e-11)


@pytest.mark.parametrize("case", cases("pld"))
def test_loss_distribution_vectors(case):
    event = sampled(case["sigma"], case["rate"], case["count"], case["adjacency"])
    found = PLDAccountant().epsilon(event, case["delta"])
    # Both are upper bounds with different grids; the reference's own error is below 1e-4.
    assert found == pytest.approx(case["value"], abs=1e-4)


@pytest.mark.parametrize("case", cases("rdp"))
def test_renyi_vectors(case):
    _, rdp = MomentsAccountant([case["order"]]).rdp(sampled(case["sigma"], case["rate"], 1))
    assert rdp[0] == pytest.approx(case["value"], rel=1e-10)


@pytest.mark.parametrize("case", cases("rdp-epsilon"))
def test_moments_vectors(case):
    event = sampled(case["sigma"], case["rate"], case["count"])
    assert MomentsAccountant(range(2, 257)).epsilon(event, case["delta"]) == pytest.approx(
        case["value"], rel=1e-9
    )


@pytest.mark.parametrize("case", cases("clt-mu"))
def test_limit_vector(case):
    event = sampled(case["sigma"], case["rate"], case["count"])
    assert CLTApproximation().mu(event) == pytest.approx(case["value"], rel=1e-12)
    assert CLTApproximation().epsilon(event, 1e-5) == pytest.approx(1.617711809, abs=1e-8)


def test_the_approximation_under_reports():
    event = sampled(0.5, 0.01, 200)
    assert CLTApproximation().epsilon(event, 1e-5) == pytest.approx(4.557, abs=1e-3)
    assert best_upper_bound(event, 1e-5).epsilon == pytest.approx(7.725, abs=1e-3)


def test_prv_upper_end_brackets_the_loss_distribution():
    event = sampled(1.0, 0.01, 300)
    prv, pld = PRVAccountant().figure(event, 1e-5), PLDAccountant().epsilon(event, 1e-5)
    assert prv.accountant == "PRVAccountant"
    # Its bracket is +-0.01 around the truth and the upper end is printed.
    assert pld <= prv.epsilon <= pld + 0.025


@pytest.mark.parametrize(
    ("event", "delta", "reason"),
    [
        (sampled(0.5, 0.1, 10**4), 1e-5, "grid points"),
        (sampled(1.0, 0.01, 10**6), 1e-5, "grid points"),
        (sampled(1.0, 0.01, 1000), 1e-12, "round-off"),
        (sampled(1.0, 0.01, 1000, "replace-one"), 1e-5, "add-remove only"),
        (RandomisedResponse(epsilon=1.0, count=20), 1e-5, "randomised response"),
    ],
)
def test_prv_falls_back_and_says_so(event, delta, reason):
    figure = PRVAccountant().figure(event, delta)
    assert figure.accountant == "PLDAccountant"
    assert reason in figure.explanation
    assert figure.epsilon == PLDAccountant().epsilon(event, delta)


def test_prv_falls_back_when_the_library_fails(monkeypatch):
    import prv_accountant

    def broken(*_, **__):
        raise RuntimeError("Discrete mean differs from continuous mean significantly.")

    monkeypatch.setattr(prv_accountant, "PRVAccountant", broken)
    figure = PRVAccountant().figure(sampled(1.0, 0.01, 100), 1e-5)
    assert figure.accountant == "PLDAccountant"
    assert "Discrete mean" in figure.explanation


@pytest.mark.parametrize("count", [10**4, 10**6])
@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_hard_cases_stay_sound_and_small(count, delta):
    """Where prv-accountant needs more than 12 GB or 100 s; the moments are the independent upper bound."""
    event = sampled(0.5, 0.1, count)
    tracemalloc.start()
    best = best_upper_bound(event, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e9
    moments = MomentsAccountant().epsilon(event, delta)
    # The moments' conversion loses at most a few percent at such budgets, and never wins.
    assert 0.9 * moments < best.epsilon < moments
    assert best.bound


@pytest.mark.parametrize(
    ("sigma", "rate", "count"),
    [
        (1e-4, 0.3, 10**9),
        (1e-4, 1e-9, 37),
        (0.02, 0.3, 37),
        (0.3, 1e-9, 1),
        (3.0, 0.999999, 10**9),
        (1e4, 1e-9, 10**9),
        (1e4, 0.5, 10**15),
    ],
)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_extreme_workloads_stay_finite_and_below_the_other_bounds(sigma, rate, count, adjacency):
    event = sampled(sigma, rate, count, adjacency)
    best = best_upper_bound(event, 1e-13)
    others = [kind().epsilon(event, 1e-13) for kind in (GDPAccountant, MomentsAccountant)]
    assert 0 <= best.epsilon <= min(others) * 1.001
    assert math.isfinite(best.epsilon)


def test_bounded_losses_have_bounded_epsilon():
    """Adding a record to a sample can raise the density by at most 1/(1-q), however small the noise."""
    composed = compositions(reduce_events(sampled(0.02, 0.3, 37)))
    add = [c for c in composed if c.losses[0].cells[-1] * c.step < 1]
    assert len(add) == 1
    assert add[0].epsilon(1e-13) == pytest.approx(-37 * math.log(0.7), rel=1e-6)


def test_best_is_the_smallest_sound_figure():
    event = sampled(1.5, 0.02, 200)
    figures = compare(event, 1e-5)
    best = best_upper_bound(event, 1e-5)
    sound = [figure.epsilon for figure in figures.values() if figure.bound]
    assert best.epsilon == min(sound)
    assert best.accountant == "PLDAccountant"


def test_best_of_nothing_and_of_hidden_values():
    assert best_upper_bound([], 1e-5).epsilon == 0
    hidden = best_upper_bound([MaskedRelease(assumption="a"), MaskedRelease(assumption="b")], 1e-5)
    assert (hidden.epsilon, hidden.assumptions) == (0, ("a", "b"))


def test_moments_join_where_the_grid_was_widened(monkeypatch):
    from securevfl.accountants import composition

    monkeypatch.setattr(composition.compose, "__kwdefaults__", {"cells": 2000})
    event = sampled(0.6, 0.05, 2000)
    best = best_upper_bound(event, 1e-5)
    assert PLDAccountant().figure(event, 1e-5).explanation == "grid widened to fit memory"
    assert best.epsilon == min(PLDAccountant().epsilon(event, 1e-5), MomentsAccountant().epsilon(event, 1e-5))


def test_moments_need_orders_above_one():
    from securevfl.errors import AccountingError

    for orders in ([], [1.0], [0.5, 2]):
        with pytest.raises(AccountingError, match="orders"):
            MomentsAccountant(orders)


def test_default_orders_reach_large_budgets():
    # With dp-accounting's default orders this case comes out at 2231.
    assert MomentsAccountant().epsilon(sampled(0.5, 0.1, 10**4), 1e-5) < 810


def test_mixed_workload_is_tighter_together():
    events = [
        RandomisedResponse(epsilon=0.5, classes=4, count=10),
        GaussianRelease(sigma=4.0, sensitivity=2.0, count=3, adjacency="replace-one"),
    ]
    apart = GDPAccountant().epsilon(events[1], 1e-5) + 5.0
    pld = PLDAccountant().epsilon(events, 1e-5)
    moments = MomentsAccountant().epsilon(events, 1e-5)
    assert pld < moments < apart
    assert GDPAccountant().epsilon(events, 1e-5) <= apart
    assert best_upper_bound(events, 1e-5).epsilon == pld


def test_gdp_covers_randomised_response():
    """The covering Gaussian's curve lies above the exact one of binary randomised response."""
    event = RandomisedResponse(epsilon=1.5)
    keep = math.exp(1.5) / (1 + math.exp(1.5))
    for epsilon in (0.0, 0.3, 1.0, 1.4):
        exact = keep - math.exp(epsilon) * (1 - keep)
        assert GDPAccountant().delta(event, epsilon) >= exact
        assert PLDAccountant().delta(event, epsilon) == pytest.approx(exact, rel=1e-3)
        assert PLDAccountant().delta(event, epsilon) >= exact * (1 - 1e-12)


def test_figures_come_without_delay_for_a_million_releases():
    """Not a timing: counts are merged, so that a million equal releases are one."""
    events = [GaussianRelease(sigma=50.0, sensitivity=1.0, count=1000) for _ in range(1000)]
    assert GDPAccountant().mu(events) == pytest.approx(20.0, rel=1e-14)
