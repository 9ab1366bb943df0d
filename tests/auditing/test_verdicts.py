"""The order of verdicts, and what false ones may cost."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import exp, mpf

from securevfl.auditing.verdicts import CANARIES, HOLDERS, VISIBLE, ErrorBudget, Finding, Verdict, worst
from securevfl.errors import InputError


def finding(verdict: Verdict) -> Finding:
    return Finding(
        promise="p1", path="embeddings", verdict=verdict, tested=("variance",), reasons=("because",)
    )


def test_the_worst_finding_decides() -> None:
    order = [Verdict.VIOLATED, Verdict.NO_GUARANTEE, Verdict.NOT_TESTED, Verdict.HOLDS]
    assert list(Verdict) == order
    for verdicts in itertools.product(order, repeat=3):
        expected = order[min(order.index(verdict) for verdict in verdicts)]
        assert worst(finding(verdict) for verdict in verdicts) is expected


def test_nothing_looked_at_is_not_tested() -> None:
    assert worst([]) is Verdict.NOT_TESTED


def test_holds_needs_a_test_and_everything_else_a_reason() -> None:
    with pytest.raises(InputError, match="needs a test"):
        Finding(promise="p1", path="embeddings", verdict=Verdict.HOLDS)
    for verdict in list(Verdict)[:3]:
        with pytest.raises(InputError, match="needs a reason"):
            Finding(promise="p1", path="embeddings", verdict=verdict, tested=("variance",))
    with pytest.raises(InputError, match="no share"):
        Finding(promise="p1", path="x", verdict=Verdict.HOLDS, tested=("variance",), power=1.5)


def test_a_finding_goes_through_json() -> None:
    mapping = json.loads(json.dumps(finding(Verdict.NOT_TESTED).to_mapping()))
    assert mapping["verdict"] == "not tested"
    assert mapping["reasons"] == ["because"]


@pytest.mark.parametrize(("delta", "epsilon"), [(1e-5, 0.0), (1e-5, 2.0), (1e-6, 8.0), (1e-5, 60.0)])
def test_a_visible_verdict_adds_a_tenth_of_delta(delta: float, epsilon: float) -> None:
    budget = ErrorBudget(delta=delta, epsilon=epsilon)
    expected = mpf(delta) / 10 / (1 + exp(mpf(epsilon)))
    assert budget.alpha(VISIBLE) == pytest.approx(float(expected), rel=1e-14)
    assert budget.added_delta == pytest.approx(0.1 * delta, rel=1e-14)
    assert f"{budget.added_delta:.2g}" in budget.sentence()


def test_a_chosen_level_is_paid_in_full() -> None:
    # 1e-3 seen by others at epsilon 2: delta grows by 0.0084.
    budget = ErrorBudget(delta=1e-5, epsilon=2.0, visible=1e-3)
    assert budget.added_delta == pytest.approx(1e-3 * (1 + math.exp(2.0)), rel=1e-14)


def test_private_levels_and_no_promise() -> None:
    budget = ErrorBudget(delta=1e-5, epsilon=math.inf)
    assert budget.alpha(HOLDERS) == budget.alpha(CANARIES) == 1e-3
    assert budget.alpha(VISIBLE) == budget.added_delta == 0.0


@given(st.integers(1, 200), st.floats(0.0, 30.0))
def test_shares_never_add_up_to_more(count: int, epsilon: float) -> None:
    budget = ErrorBudget(delta=1e-5, epsilon=epsilon)
    levels = budget.split(VISIBLE, [f"test {i}" for i in range(count)])
    assert len(levels) == count
    assert math.fsum(levels.values()) <= budget.alpha(VISIBLE)
    assert math.fsum(levels.values()) == pytest.approx(budget.alpha(VISIBLE), rel=1e-12)


def test_bad_budgets_are_refused() -> None:
    for delta, epsilon in [(0.0, 1.0), (1.0, 1.0), (1e-5, -1.0), (1e-5, math.nan)]:
        with pytest.raises(InputError, match="expected 0 < delta < 1"):
            ErrorBudget(delta=delta, epsilon=epsilon)
    with pytest.raises(InputError, match="no probability"):
        ErrorBudget(delta=1e-5, epsilon=1.0, holders=1.0)
    budget = ErrorBudget(delta=1e-5, epsilon=1.0)
    with pytest.raises(InputError, match="different names"):
        budget.split(VISIBLE, ["variance", "variance"])
    with pytest.raises(InputError, match="different names"):
        budget.split(VISIBLE, [])
    with pytest.raises(InputError, match="unknown"):
        budget.split("everybody", ["variance"])
