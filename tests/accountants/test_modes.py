"""The ledger's arithmetic against brute force, and the cases that shipped systems got wrong."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.accountants import (
    COALITION,
    Filter,
    ReleaseRecord,
    coalition_spend,
    gdp_epsilon,
    gdp_mu,
    mu_of,
    privacy_matrix,
)
from securevfl.accountants.records import pure_mu
from securevfl.errors import AccountingError, BudgetExceeded

few = settings(max_examples=60, deadline=None)


def release(rows=(0,), *, sigma=2.0, mode="frozen", observers=("server",), **fields):
    rows = None if rows is None else np.array(rows, dtype=int)
    fields = {"clip": 1.0, "vectors": 1 if rows is None else rows.size, **fields}
    return ReleaseRecord(
        owner="p1", observers=observers, mechanism="gaussian", sigma=sigma, rows=rows, mode=mode, **fields
    )


def update(rows, *, sigma=4.0, mode="dp-encoder", vectors=1):
    return ReleaseRecord(
        owner="p1",
        kind="update",
        mechanism="dp-update",
        clip=1.0,
        sigma=sigma,
        rows=rows,
        vectors=vectors,
        mode=mode,
    )


def brute_mu(records, mode):
    """Every record index pays; loops instead of arrays."""
    paid = defaultdict(float)
    shared = 0.0
    for record in records:
        if record.mechanism == "dp-update" and mode != "dp-encoder":
            continue
        square = (2 * record.clip / record.sigma) ** 2
        if mode == "strict" or record.rows is None:
            shared += square * record.vectors
            continue
        for row in record.rows:
            paid[int(row)] += square * (record.vectors if record.mechanism == "dp-update" else 1)
    return math.sqrt(shared + max(paid.values(), default=0.0))


def a_record(mode):
    rows = st.lists(st.integers(0, 6), min_size=0, max_size=8)
    sigma = st.floats(0.5, 8)
    released = st.builds(lambda r, s: release(r, sigma=s, mode=mode), rows, sigma)
    whole = st.builds(lambda n, s: release(None, sigma=s, mode=mode, vectors=n), st.integers(0, 5), sigma)
    if mode != "dp-encoder":
        return released | whole
    unique = st.lists(st.integers(0, 6), unique=True, max_size=7).map(np.array).map(lambda a: a.astype(int))
    return (
        released
        | whole
        | st.builds(lambda r, s, n: update(r, sigma=s, vectors=n), unique, sigma, st.integers(1, 3))
    )


@few
@given(st.data(), st.sampled_from(["strict", "frozen", "dp-encoder"]))
def test_mu_matches_brute_force_and_the_filter(data, mode):
    records = data.draw(st.lists(a_record(mode), max_size=8))
    expected = brute_mu(records, mode)
    assert mu_of(records, mode) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    budget = Filter(mode=mode, budget_mu=math.inf, records=7)
    for record in records:
        budget.charge(record)
    assert budget.spent_mu == pytest.approx(expected, rel=1e-12, abs=1e-15)


@few
@given(st.data(), st.sampled_from(["strict", "frozen", "dp-encoder"]))
def test_a_filter_never_lets_the_budget_be_broken(data, mode):
    records = data.draw(st.lists(a_record(mode), max_size=10))
    budget = Filter(mode=mode, budget_mu=3.0, records=7)
    kept = []
    for record in records:
        before = budget.spent_mu
        try:
            budget.charge(record)
            kept.append(record)
        except BudgetExceeded:
            assert budget.spent_mu == before
            assert mu_of([*kept, record], mode) > 3.0 * (1 - 1e-12)
    assert mu_of(kept, mode) <= 3.0 * (1 + 1e-12)


def test_modes_are_ordered():
    records = [release([0, 1, 2]), release([0, 1])]
    assert mu_of(records, "frozen") == pytest.approx(math.sqrt(2))
    assert mu_of(records, "strict") == pytest.approx(math.sqrt(5))
    assert mu_of(records, "none") == math.inf
    assert mu_of([], "none") == 0


def test_the_amplification_error_of_shipped_systems():
    """N = 60,000, batch 256, 10 epochs, sigma/C = 1: not epsilon 1.0 but 46.2, or 17.9 with sensitivity C."""
    rng = np.random.default_rng(0)
    batches = [b for _ in range(10) for b in np.array_split(rng.permutation(60_000), 235)]
    for reach, expected in ((2.0, 46.2), (1.0, 17.9)):
        records = [release(b, sigma=1.0, sensitivity=reach) for b in batches]
        frozen = privacy_matrix(records, 1e-5)["p1"]["server"]
        assert frozen.epsilon == pytest.approx(expected, abs=0.05)
        assert (frozen.worst_releases, frozen.releases) == (10, 600_000)
        assert gdp_epsilon(mu_of(records, "strict"), 1e-5) > frozen.epsilon


def test_dp_encoder_adds_updates_of_the_record():
    records = [release([0, 1], mode="dp-encoder"), update(np.array([1, 2]), vectors=3)]
    # Record 1: one release of mu 1 and three updates of mu 0.5.
    assert mu_of(records, "dp-encoder") == pytest.approx(math.sqrt(1 + 3 * 0.25))
    spend = privacy_matrix(records, 1e-5)["p1"]["server"]
    assert (spend.mode, spend.updates, spend.worst_releases) == ("dp-encoder", 3, 1)


def test_updates_count_against_every_observer():
    records = [
        release([0], mode="dp-encoder", observers=("a",)),
        release([0], mode="dp-encoder", observers=("b",)),
        update(np.array([0])),
    ]
    matrix = privacy_matrix(records, 1e-5)["p1"]
    assert matrix["a"].mu == matrix["b"].mu == pytest.approx(math.sqrt(1.25))


def test_mixed_modes_are_accounted_as_strict():
    spend = privacy_matrix([release([0]), release([1], mode="dp-encoder")], 1e-5)["p1"]["server"]
    assert (spend.mode, spend.worst_releases) == ("strict", 2)
    assert spend.mu == pytest.approx(math.sqrt(2))


def test_a_shared_release_counts_once_for_the_coalition():
    records = [release([0], observers=("a", "b")), release([0], observers=("b",))]
    matrix = privacy_matrix(records, 1e-5)["p1"]
    together = coalition_spend(records, 1e-5)["p1"]
    assert [matrix[name].releases for name in ("a", "b")] == [1, 2]
    assert (together.releases, together.observer) == (2, COALITION)
    assert together.mu == matrix["b"].mu == pytest.approx(math.sqrt(2))


def test_exact_and_void_releases_promise_nothing():
    exact = ReleaseRecord(owner="p1", observers=("s",), mechanism="exact", rows=[3], mode="frozen")
    spend = privacy_matrix([release([0], observers=("s",)), exact], 1e-5)["p1"]["s"]
    assert (spend.mu, spend.epsilon, spend.exact) == (math.inf, math.inf, 1)
    void = release([0], mode="none")
    assert privacy_matrix([void], 1e-5)["p1"]["server"].mu == math.inf


@pytest.mark.parametrize("mechanism", ["masked", "encrypted"])
def test_hidden_messages_cost_nothing_under_their_assumption(mechanism):
    hidden = ReleaseRecord(
        owner="p1", observers=("s",), mechanism=mechanism, vectors=9, assumption="no collusion"
    )
    spend = privacy_matrix([hidden], 1e-5)["p1"]["s"]
    assert (spend.mu, spend.epsilon, spend.releases) == (0, 0, 0)
    assert spend.assumptions == ("no collusion",)
    mixed = privacy_matrix([hidden, release([0], observers=("s",))], 1e-5)["p1"]["s"]
    assert (mixed.mode, mixed.mu) == ("frozen", 1.0)


def test_sealed_openings_are_paid_by_the_batch():
    def opening(rows):
        return release(rows, mode="sealed", sensitivity=2.0, vectors=1)

    records = [opening([0, 1, 2]), opening([2, 3]), opening(None)]
    assert mu_of(records, "sealed") == pytest.approx(math.sqrt(3))
    budget = Filter(mode="sealed", budget_mu=2.0, records=4)
    for record in records:
        budget.charge(record)
    assert budget.spent_mu == pytest.approx(math.sqrt(3))


def predicted(rows):
    return ReleaseRecord(
        owner="p1", observers=("server",), kind="prediction", mechanism="exact", rows=rows, mode="sealed"
    )


def test_sealed_predictions_of_other_records_are_counted_apart():
    opening = release([0, 1], mode="sealed", sensitivity=2.0, vectors=1)
    spend = privacy_matrix([opening, predicted([2])], 1e-5)["p1"]["server"]
    assert (spend.mu, spend.predictions, spend.exact) == (1.0, 1, 0)
    budget = Filter(mode="sealed", budget_mu=2.0, records=3)
    budget.charge(opening)
    budget.charge(predicted([2]))
    assert budget.spent_mu == 1.0


@pytest.mark.parametrize("rows", [[1], [1, 2], None])
def test_sealed_predictions_of_trained_records_void_the_promise(rows):
    opening = release([0, 1], mode="sealed", sensitivity=2.0, vectors=1)
    spend = privacy_matrix([opening, predicted(rows)], 1e-5)["p1"]["server"]
    assert spend.mu == math.inf
    assert coalition_spend([opening, predicted(rows)], 1e-5)["p1"].mu == math.inf
    for order in ([opening, predicted(rows)], [predicted(rows), opening]):
        unlimited = Filter(mode="sealed", budget_mu=math.inf, records=3)
        for record in order:
            unlimited.charge(record)
        assert unlimited.spent_mu == math.inf
        strict = Filter(mode="sealed", budget_mu=2.0, records=3)
        with pytest.raises(BudgetExceeded):
            [strict.charge(record) for record in order]


def test_another_observer_of_a_trained_record_learns_it_exactly():
    opening = release([0, 1], mode="sealed", sensitivity=2.0, vectors=1, observers=("a",))
    assert privacy_matrix([opening, predicted([0])], 1e-5)["p1"]["server"].mu == math.inf


def test_randomised_labels_are_paid_by_their_own_record_in_every_mode():
    labels = ReleaseRecord(
        owner="p1", observers=("s",), mechanism="randomised-response", epsilon=1.0, rows=[0, 1, 2], vectors=3
    )
    mu = pure_mu(1.0)
    assert mu_of([labels], "strict") == pytest.approx(mu)
    # exp(1)/(1+exp(1)) is the power of the best test at its corner: Phi(mu/2).
    assert mu == pytest.approx(2 * 0.6160, abs=1e-3)
    budget = Filter(mode="strict", budget_mu=mu * 1.5, records=3)
    budget.charge(labels)
    with pytest.raises(BudgetExceeded):
        budget.charge(labels) or budget.charge(labels)


def test_far_apart_indices_need_no_large_array():
    records = [release([0, 10**12]), release([10**12])]
    assert mu_of(records, "frozen") == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "fields",
    [
        {"mechanism": "laplace"},
        {"mode": "magic"},
        {"sigma": 0.0},
        {"sigma": None},
        {"clip": None},
        {"vectors": -1},
        {"vectors": 3},
        {"rows": np.array([0.5])},
        {"rows": np.array([-1])},
        {"rows": np.array([[1]])},
    ],
)
def test_records_refuse_bad_fields(fields):
    good = {"owner": "p1", "mechanism": "gaussian", "clip": 1.0, "sigma": 1.0, "rows": [0], "vectors": 1}
    ReleaseRecord(**good)
    with pytest.raises(AccountingError):
        ReleaseRecord(**{**good, **fields})


def test_a_batch_must_not_name_a_record_twice():
    with pytest.raises(AccountingError, match="twice"):
        update(np.array([1, 1]))


def test_records_keep_their_own_copy_of_rows():
    rows = np.array([0, 1])
    record = release(rows)
    rows[0] = 5
    assert record.rows.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        record.rows[0] = 7


def test_filter_names_the_overdraft():
    budget = Filter(mode="frozen", budget_mu=1.5, records=3)
    budget.charge(release([0, 1]))
    budget.check(release([1, 2]))
    budget.charge(release([1, 2], sigma=4.0))
    with pytest.raises(
        BudgetExceeded, match=r"owner 'p1' has spent mu 1\.118.* of 1\.5 .* would make it 1\.53"
    ):
        budget.charge(release([1], sigma=1.9))
    budget.charge(release([0], sigma=4.0))
    assert budget.remaining() == pytest.approx(1.0)
    assert budget.remaining_releases(0.5) == 4
    assert budget.remaining_releases(1.1) == 0
    assert budget.spent_epsilon(1e-5) == gdp_epsilon(budget.spent_mu, 1e-5)


def test_filter_allows_exactly_the_planned_releases():
    from securevfl.accountants import calibrate_sigma

    sigma = calibrate_sigma(epsilon=3, delta=1e-5, releases=10_000, mode="strict", clip=1.0)
    budget = Filter(mode="strict", budget_mu=gdp_mu(3, 1e-5), records=1)
    one = release([0], sigma=sigma, mode="strict")
    for _ in range(10_000):
        budget.charge(one)
    with pytest.raises(BudgetExceeded):
        budget.charge(one)


def test_filter_refuses_strangers():
    budget = Filter(mode="frozen", budget_mu=9.0, records=3)
    with pytest.raises(AccountingError, match="mode 'strict'"):
        budget.check(release([0], mode="strict"))
    with pytest.raises(AccountingError, match="row index 3"):
        budget.check(release([3]))
    with pytest.raises(AccountingError, match="dp-update"):
        budget.check(update(np.array([0]), mode="frozen"))
    with pytest.raises(AccountingError):
        Filter(mode="frozen", budget_mu=-1, records=3)
    with pytest.raises(AccountingError):
        Filter(mode="frozen", budget_mu=1, records=0)


def test_filter_refuses_exact_releases_under_any_finite_budget():
    exact = ReleaseRecord(owner="p1", mechanism="exact", rows=[0], mode="frozen")
    with pytest.raises(BudgetExceeded):
        Filter(mode="frozen", budget_mu=1e6, records=1).check(exact)
    unlimited = Filter(mode="frozen", budget_mu=math.inf, records=1)
    unlimited.charge(exact)
    assert unlimited.spent_mu == unlimited.remaining() == math.inf
