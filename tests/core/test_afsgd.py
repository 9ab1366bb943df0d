"""The AFSGD-VP family: equal to its centralised counterpart, convergent, sparse, and O(q) in messages."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, sparse

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.linear import ESTIMATORS, SAGA, LinearBlock, loss_derivative, mean_loss
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.steps import Batches, Draws
from securevfl.errors import PlanError, TrainingDiverged
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier
from securevfl.models import task_loss
from securevfl.privacy.views import View

ASYNCHRONOUS = ("afsgd", "afsvrg", "afsaga")
SYNCHRONOUS = ("fsgd", "fsvrg", "fsaga")
TASKS = {
    "binary": "synthetic:rows=300,features=9",
    "multiclass": "synthetic:rows=300,features=9,classes=3",
    "regression": "synthetic:rows=300,features=9,task=regression",
}


@pytest.fixture(scope="module")
def three() -> VerticalData:
    return VerticalData.load(TASKS["binary"], parties=3)


def weights_of(run) -> np.ndarray:
    """All weights of a run, the bias last, one row per feature."""
    parts = [encoder.output.weight.detach().numpy().T for encoder in run.encoders.values()]
    return np.vstack([*parts, run.head.bias.detach().numpy()])


def objective(data: VerticalData, weights: np.ndarray, l2: float) -> float:
    features = np.hstack([np.asarray(block, np.float64) for block in data.train])
    scores = features @ weights[:-1] + weights[-1]
    return mean_loss(data.task, scores, data.y_train) + l2 / 2 * float((weights[:-1] ** 2).sum())


def optimum(data: VerticalData, l2: float) -> tuple[np.ndarray, float]:
    features = np.hstack(
        [*(np.asarray(block, np.float64) for block in data.train), np.ones((data.n_train, 1))]
    )

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(features.shape[1], data.outputs)
        gradient = features.T @ loss_derivative(data.task, features @ weights, data.y_train) / data.n_train
        pull = np.vstack([l2 * weights[:-1], np.zeros_like(weights[-1:])])  # the bias is free
        return objective(data, weights, l2), (gradient + pull).ravel()

    start = np.zeros(features.shape[1] * data.outputs)
    found = optimize.minimize(value, start, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 5000})
    return found.x.reshape(features.shape[1], data.outputs), float(found.fun)


# -- mathematics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_hand_written_losses_are_those_of_the_models(task: str) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(50, 3 if task == "multiclass" else 1)) * 4
    labels = (
        rng.normal(size=50)
        if task == "regression"
        else rng.integers(0, scores.shape[1] + (task == "binary"), 50)
    )
    outputs = torch.from_numpy(scores).requires_grad_()
    each = task_loss(task, outputs, torch.from_numpy(labels), reduction="none")
    each.sum().backward()
    # Both sides are a few float64 operations on values below 20.
    np.testing.assert_allclose(loss_derivative(task, scores, labels), outputs.grad.numpy(), atol=1e-13)
    assert mean_loss(task, scores, labels) == pytest.approx(float(each.detach().mean()), abs=1e-13)


def block_and_labels(seed: int = 3) -> tuple[LinearBlock, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(40, 6))
    weights = rng.normal(size=(7, 1))
    return (
        LinearBlock(features, features[:4], weights, bias=True),
        (rng.random(40) < 0.5).astype(float),
        features,
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 8])
def test_estimates_are_unbiased(name: str, size: int) -> None:
    """The mean over all batches of a partition is the full gradient, wherever the snapshot was taken."""
    block, labels, _ = block_and_labels()
    rows = np.arange(40)

    def derivative(weights: np.ndarray) -> np.ndarray:
        return loss_derivative("binary", block.batch(rows).product(weights), labels)

    now, before = derivative(block.weights), derivative(block.weights * -2 + 1)
    directions = []
    for batch in np.split(rows, 40 // size):
        estimator = ESTIMATORS[name](block)
        estimator.remember(rows, before)
        estimator.finish_snapshot()
        directions.append(estimator.direction(block.batch(batch), batch, now[batch]))
    # Sums of 40 products of size below 10 in float64.
    np.testing.assert_allclose(np.mean(directions, axis=0), block.full_gradient(now), atol=1e-13)


def test_variance_vanishes_towards_the_optimum_only_with_memory(three: VerticalData) -> None:
    """Snapshot and present weights both at distance e from the optimum: variance of order e^2; 1 for SGD."""
    best, _ = optimum(three, 1e-2)
    features = np.hstack([np.asarray(block, np.float64) for block in three.train])
    block = LinearBlock(features, features[:1], best, bias=True)
    rows = np.arange(three.n_train)
    away = np.ones_like(best) / np.sqrt(best.size)

    def spread(kind: type, distance: float) -> float:
        there, here = (
            loss_derivative("binary", block.batch(rows).product(best + sign * distance * away), three.y_train)
            for sign in (1, -1)
        )
        steps = []
        for i in rows:
            estimator = kind(block)
            estimator.remember(rows, there)
            steps.append(estimator.direction(block.batch(rows[i : i + 1]), rows[i : i + 1], here[i : i + 1]))
        return float(np.var(steps, axis=0).sum())

    near, far = ({name: spread(kind, e) for name, kind in ESTIMATORS.items()} for e in (1e-3, 1e-1))
    assert near["sgd"] > 0.5 * far["sgd"] > 0.05
    for name in ("svrg", "saga"):  # (1e-3 / 1e-1)^2, and a factor for the curvature of the logistic function
        assert near[name] < 2e-4 * far[name]


def test_memory_needs_draws_that_forget() -> None:
    """A batch must not avoid the records of the last one: those are exactly the ones with fresh memories."""
    draws, passes = (kind(100, 50, np.random.default_rng(1)) for kind in (Draws, Batches))
    overlaps = []
    for _ in range(200):
        first, second = draws.next(), draws.next()
        assert np.unique(first).size == 50
        overlaps.append(np.intersect1d(first, second).size)
    # Hypergeometric: mean 25, deviation sqrt(50 / 4 * 50 / 99) = 2.51; six standard errors.
    assert abs(np.mean(overlaps) - 25) < 6 * 2.52 / np.sqrt(200)
    assert np.intersect1d(passes.next(), passes.next()).size == 0
    assert [ESTIMATORS[name].draws for name in ("sgd", "svrg", "saga")] == [False, True, True]


def test_saga_moves_its_mean_with_its_table() -> None:
    block, labels, _ = block_and_labels()
    rows = np.arange(40)
    saga = SAGA(block)
    saga.remember(rows, loss_derivative("binary", block.product(rows), labels))
    saga.finish_snapshot()
    rng = np.random.default_rng(5)
    for _ in range(100):
        batch = rng.permutation(40)[:5]
        saga.direction(block.batch(batch), batch, rng.normal(size=(5, 1)))
    # 100 additions of terms below 10, each rounded at 2^-53 of its size.
    np.testing.assert_allclose(saga.mean, block.full_gradient(saga.remembered), atol=1e-12)
    assert saga.remembered.shape == (40, 1)


def test_saga_keeps_numbers_not_vectors() -> None:
    """At most 16 bytes per record on top of the features, whatever their width."""
    n = 200_000
    features = np.zeros((n, 8), np.float32)
    block = LinearBlock(features, features[:1], np.zeros((8, 1)), bias=False)
    tracemalloc.start()
    try:
        saga = SAGA(block)
        for start in range(0, n, 1024):
            rows = np.arange(start, min(n, start + 1024))
            saga.remember(rows, np.ones((len(rows), 1)))
        saga.finish_snapshot()
        saga.direction(block.batch(np.arange(64)), np.arange(64), np.ones((64, 1)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * n


# -- equality with centralised training -------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fsaga", "afsaga"])
def test_snapshots_miss_no_record_on_a_slow_network(algorithm: str) -> None:
    """Scores come in several messages, with the order to take the snapshot at their heels."""
    data = VerticalData.load("synthetic:rows=3000,features=24", parties=8)
    plan = Plan(algorithm=algorithm, batch=200, epochs=1, settings={"latency": 0.02}, unprotected=True)
    carrier = VirtualCarrier(*resolve(plan, data))
    drive(Schedule(carrier).train())
    for worker in carrier.roles[1:]:
        memory = worker.estimator
        np.testing.assert_allclose(memory.mean, worker.block.full_gradient(memory.remembered), atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("algorithm", "parties"), [("afsgd", 1), ("fsgd", 1), ("fsgd", 3)])
def test_without_delay_it_is_centralised_training(task: str, algorithm: str, parties: int) -> None:
    data = VerticalData.load(TASKS[task], parties=parties)
    plan = Plan(
        algorithm=algorithm,
        epochs=3,
        batch=16,
        learning_rate=0.05,
        decay="inverse",
        decay_steps=20,
        sampling="draws",
        fusion="sum",
        head="sum",
        unprotected=True,
    )
    ours = train(data, plan)
    central = train(data, plan.with_changes(algorithm="central"))
    # The centralised run rounds to float32 in each of its 45 steps on weights of order 1.
    np.testing.assert_allclose(weights_of(ours), weights_of(central), atol=45 * 2**-22)
    assert ours.result["loss"] == pytest.approx(central.result["loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["svrg", "saga"])
def test_one_worker_is_the_textbook_algorithm(name: str, three: VerticalData) -> None:
    """One worker, any runtime: the sequential algorithm, written here once more in a few lines."""
    data = three.split(1)
    plan = Plan(
        algorithm=f"af{name}",
        epochs=3,
        batch=20,
        learning_rate=0.05,
        settings={"snapshot_every": 2},
        unprotected=True,
    )
    run = train(data, plan)
    resolved, scaled = resolve(plan, data)
    start = VirtualCarrier(resolved, scaled)
    features = np.hstack([np.asarray(scaled.train[0], np.float64), np.ones((scaled.n_train, 1))])
    labels = scaled.y_train.astype(float)[:, None]
    weights = np.array(start.roles[1].block.weights)
    batches = start.roles[1].batches
    residual = 1 / (1 + np.exp(-features @ weights)) - labels
    memory, mean = residual.copy(), features.T @ residual / len(labels)
    for epoch in range(3):
        if name == "svrg" and epoch % 2 == 0:
            memory = 1 / (1 + np.exp(-features @ weights)) - labels
            mean = features.T @ memory / len(labels)
        for _ in range(scaled.n_train // 20):
            rows = batches.next()
            now = 1 / (1 + np.exp(-features[rows] @ weights)) - labels[rows]
            change = features[rows].T @ (now - memory[rows])
            weights = weights - 0.05 * (change / len(rows) + mean + 1e-4 * weights)
            if name == "saga":
                mean = mean + change / len(labels)
                memory[rows] = now
    np.testing.assert_allclose(weights_of(run), weights, atol=1e-6)  # published as float32


# -- convergence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*ASYNCHRONOUS, *SYNCHRONOUS])
def test_memory_converges_linearly_where_sgd_stalls(algorithm: str) -> None:
    data = VerticalData.load("synthetic:rows=100,features=6", parties=2)
    plan = Plan(algorithm=algorithm, epochs=20, batch=4, learning_rate=0.3, l2=0.05, unprotected=True)
    carrier = VirtualCarrier(*resolve(plan, data))
    drive(Schedule(carrier).train())
    first, second = (worker.block.weights for worker in carrier.roles[1:])
    weights = np.vstack([first[:-1], second, first[-1:]])
    gap = objective(carrier.home.data, weights, plan.l2) - optimum(carrier.home.data, plan.l2)[1]
    if algorithm.endswith("sgd"):
        assert gap > 1e-4  # the noise of single steps keeps it away
    else:
        assert gap < 1e-6


def test_ridge_regression_converges() -> None:
    data = VerticalData.load("synthetic:rows=100,features=6,task=regression", parties=2)
    plan = Plan(algorithm="afsaga", epochs=20, batch=4, learning_rate=0.1, l2=0.05, unprotected=True)
    run = train(data, plan)
    scaled = resolve(plan, data)[1]
    assert objective(scaled, weights_of(run), plan.l2) - optimum(scaled, plan.l2)[1] < 1e-6


@pytest.mark.parametrize("pair", list(zip(ASYNCHRONOUS, SYNCHRONOUS, strict=True)))
def test_a_straggler_holds_up_only_the_synchronous_one(pair: tuple[str, str], three: VerticalData) -> None:
    """Virtual time, hence exact: a synchronous step lasts 4; asynchronously 2.25 steps fit into a unit."""
    times = {}
    for algorithm in pair:
        plan = Plan(
            algorithm=algorithm,
            epochs=2,
            batch=12,
            settings={"speeds": {"p1": 0.25}, "snapshot_every": 1},
            unprotected=True,
        )
        times[algorithm] = train(three, plan).result["time"]["virtual"]
    steps = 2 * three.n_train // 12
    snapshot = {"sgd": 0, "vrg": 2, "aga": 1}[pair[0][-3:]] * (three.n_train // 12) * 4
    assert times[pair[1]] == 4 * steps + snapshot
    # All workers together take 3 * steps at a rate of 2.25; the last step of an epoch may last 4 more.
    assert times[pair[0]] - snapshot <= 3 * steps / 2.25 + 2 * 4


def test_others_read_the_freshest_product(three: VerticalData, tmp_path: Path) -> None:
    """A replay of one worker's view: what it sends in the middle of a step has all steps before in it."""
    rates = {"p0": 1.0, "p1": 0.31, "p2": 0.77}  # no two steps end at the same instant
    plan = Plan(
        algorithm="afsgd",
        epochs=2,
        batch=30,
        scaling="none",
        settings={"speeds": rates, "latency": 0.01},
        unprotected=True,
    )
    train(three, plan.with_changes(record_views=True, learning_rate=0.5), tmp_path / "run")
    start = train(three, plan.with_changes(learning_rate=1e-30, l2=0.0))
    weights = start.encoders["p2"].output.weight.detach().numpy().T.astype(np.float64)
    features, labels = np.asarray(three.train[2], np.float64), three.y_train
    rows: dict[int, np.ndarray] = {}
    totals: dict[int, list[np.ndarray]] = {}
    due: list[tuple[float, int, np.ndarray]] = []
    during = 0
    for seen in View(tmp_path / "run" / "views" / "p2"):
        while due and due[0][0] <= seen.time:
            _, number, total = due.pop(0)
            direction = features[rows[number]].T @ loss_derivative("binary", total, labels[rows[number]])
            weights = weights - 0.5 * (direction / len(rows[number]) + plan.l2 * weights)
        number = seen.fields.get("round", -1)
        if seen.kind == "sum-request" and seen.fields["purpose"] == "product":
            rows[number] = seen.fields["rows"]
            if seen.fields["for"] == "p2":
                totals[number] = [features[rows[number]] @ weights]
        elif seen.kind == "plain.value" and seen.sent and number in rows:
            np.testing.assert_allclose(seen.fields["values"], features[rows[number]] @ weights, atol=1e-6)
            during += bool(due)
        elif seen.kind == "plain.value" and not seen.sent:
            totals[number].append(seen.fields["values"])
            if len(totals[number]) == 3:
                due.append((seen.time + 1 / 0.77, number, np.sum(totals[number], axis=0)))
    assert during > 10


# -- secure sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*ASYNCHRONOUS, *SYNCHRONOUS])
def test_masked_and_plain_runs_agree_to_fixed_point_precision(algorithm: str, three: VerticalData) -> None:
    plan = Plan(algorithm=algorithm, epochs=2, batch=16, learning_rate=0.05, unprotected=True)
    carriers = []
    for protocol in ("plain", "two-tree"):
        carrier = VirtualCarrier(*resolve(plan.with_changes(protocol=protocol), three))
        drive(Schedule(carrier).train())
        carriers.append(carrier)
    # A total is off by q/2 steps of 2^-32, a logistic derivative by a quarter of that, and SAGA's and SVRG's
    # directions use three derivatives. A step adds rate * |x| times it, |x| <= 4 * 3; logistic steps at this
    # rate do not expand differences. There are at most 2 * 3 * 15 steps.
    tolerance = 3 / 2 * 2**-32 / 4 * 3 * 0.05 * 12 * 90
    for plain, masked in zip(carriers[0].roles[1:], carriers[1].roles[1:], strict=True):
        np.testing.assert_allclose(masked.block.weights, plain.block.weights, atol=tolerance, rtol=0)


@pytest.mark.parametrize("protocol", ["plain-tree", "pairwise", "bfv", "ckks"])
def test_every_other_sum_serves_too(protocol: str, three: VerticalData) -> None:
    plan = Plan(algorithm="afsgd", epochs=1, batch=60, learning_rate=0.05, unprotected=True)
    plain = weights_of(train(three, plan))
    ours = weights_of(train(three, plan.with_changes(protocol=protocol)))
    # BFV has 20 fraction bits: totals off by 3/2 * 2^-20, over 12 steps of rate 0.05 on |x| <= 12.
    np.testing.assert_allclose(ours, plain, atol=3 / 2 * 2**-20 / 4 * 0.05 * 12 * 12 + 2**-22)


def test_wire_changes_nothing(three: VerticalData) -> None:
    plan = Plan(
        algorithm="afsvrg",
        protocol="two-tree",
        epochs=2,
        batch=16,
        settings={"active": ("p0", "p1")},
        unprotected=True,
    )
    direct, wired = train(three, plan), train(three, plan.with_changes(settings={"wire": True}))
    assert np.array_equal(weights_of(direct), weights_of(wired))  # masks cancel exactly
    assert (direct.result["messages"], direct.result["bytes"]) == (
        wired.result["messages"], wired.result["bytes"],
    )  # fmt: skip


@pytest.mark.parametrize(("protocol", "trees"), [("plain", 1), ("plain-tree", 1), ("two-tree", 2)])
@pytest.mark.parametrize("q", [3, 5, 8])
def test_messages_per_iteration_grow_with_the_workers(protocol: str, trees: int, q: int) -> None:
    """A step: ask, announce to everybody, one message per worker and tree. p0 hosts the coordinator."""
    data = VerticalData.load("synthetic:rows=125,features=16", parties=q)
    run = train(data, Plan(algorithm="afsgd", protocol=protocol, epochs=3, batch=25, unprotected=True))
    second = run.metrics[1]["messages"] - run.metrics[0]["messages"]
    steps = 100 // 25
    own = steps * ((q - 1) + trees * (q - 1))  # p0 asks and is answered inside its organisation
    others = (q - 1) * steps * (2 + (q - 2) + trees * (q - 1))
    around = 4 * (q - 1)  # start, a last question, its answer, end
    assert second == own + others + around


def test_synchronous_messages(three: VerticalData) -> None:
    run = train(three, Plan(algorithm="fsgd", protocol="two-tree", epochs=3, batch=24, unprotected=True))
    second = run.metrics[1]["messages"] - run.metrics[0]["messages"]
    assert second == 10 * (2 + 4 + 2 + 2) + 2  # announce, two trees, scores, done; and the end


# -- labels, active and passive workers -------------------------------------------------------------------


def test_passive_workers_never_see_a_label_but_its_derivative(three: VerticalData, tmp_path: Path) -> None:
    plan = Plan(
        algorithm="afsaga",
        protocol="two-tree",
        epochs=2,
        batch=16,
        settings={"active": ("p0", "p1")},
        unprotected=True,
    )
    run = train(three, plan, tmp_path / "run")
    everybody = train(three, plan.with_changes(settings={"active": ()}))
    assert run.result["labels"] == (
        "shared: all training labels were sent to p1; exposed: exact gradients of the loss go to p2; "
        "no guarantee"
    )
    assert everybody.result["labels"] == "shared: all training labels were sent to p1, p2; no guarantee"
    np.testing.assert_allclose(weights_of(run), weights_of(everybody), atol=1e-6)  # published as float32
    from securevfl.privacy.ledger import read_records

    records = read_records(tmp_path / "run")
    assert {r.observers for r in records if r.kind == "labels"} == {("p1",)}
    assert {r.observers for r in records if r.kind == "derivative"} == {("p2",)}
    # What p1 lets into p2's totals is seen by the label holder and, as a derivative, by p2; what it lets into
    # p0's totals, by p2 in p0's later products. What p2 lets into its own is seen by the label holder alone.
    steps = [{r.observers for r in records if r.owner == f"p{i}" and r.kind == "product"} for i in (1, 2)]
    assert steps == [{("p0", "p2")}, {("p0",), ("p0", "p1")}]


HIDDEN = {("afsaga", "two-tree"), ("afsvrg", "pairwise"), ("afsgd", "bfv")}  # sums do not know what they add


@pytest.mark.parametrize(
    ("algorithm", "protocol"),
    [
        pytest.param(
            name,
            protocol,
            marks=() if protocol == "plain" or (name, protocol) in HIDDEN else pytest.mark.slow,
        )
        for protocol in ("plain", "two-tree", "pairwise", "bfv")
        for name in ASYNCHRONOUS
    ],
)
def test_every_product_counts_against_everybody(
    algorithm: str, protocol: str, three: VerticalData, tmp_path: Path
) -> None:
    """A worker's step carries the others' products into all that it lets out later: mode strict, all vectors.

    The requests are counted in the views.
    """
    plan = Plan(algorithm=algorithm, protocol=protocol, epochs=2, batch=30, sigma=5.0, record_views=True)
    run = train(three, plan.with_changes(settings={"delays": "exponential"}), tmp_path / "run")
    views = [View(tmp_path / "run" / "views" / party) for party in three.parties]
    asked = {seen.fields["round"]: seen.fields for view in views for seen in view.messages("sum-request")}
    for owner in ("p1", "p2"):
        counted = sum(
            len(each["rows"])
            for each in asked.values()
            if each["for"] != owner  # of one's own step the product stays at home
        )
        assert run.privacy[owner]["releases"] == counted
        assert run.privacy[owner]["mu"] == pytest.approx(2 / 5.0 * np.sqrt(counted), rel=1e-4)


# -- sparse features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["afsgd", "afsvrg", "afsaga"])
def test_wide_sparse_features_never_become_dense(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    rows, columns = 400, 60_000
    features = sparse.random_array((rows, columns), density=2e-4, format="csr", rng=rng, dtype=np.float32)
    hidden = rng.normal(size=columns)
    labels = (features @ hidden > 0).astype(int)
    blocks = [features[:, part * 20_000 : (part + 1) * 20_000] for part in range(3)]
    data = VerticalData.from_arrays(blocks, labels, task="binary")
    plan = Plan(
        algorithm=algorithm,
        protocol="two-tree",
        epochs=2,
        batch=160,
        scaling="none",
        learning_rate=0.5,
        unprotected=True,
    )
    resolved, scaled = resolve(plan, data)
    carrier = VirtualCarrier(resolved, scaled)
    tracemalloc.start()
    try:
        drive(Schedule(carrier).train())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(sparse.issparse(part) for worker in carrier.roles[1:] for part in worker.block.parts)
    # One dense batch of one worker alone would take 160 * 20000 * 4 bytes.
    assert peak < 160 * 20_000 * 4
    assert carrier.server.loss < np.log(2)


# -- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "mlp"}, "trains linear models"),
        ({"embedding": 4}, "trains linear models"),
        ({"fusion": "concat"}, "leave fusion and head"),
        ({"encoder_training": "none"}, "can only be 'raw'"),
        ({"optimiser": "adam"}, "adam"),
        ({"algorithm": "afsaga", "sampling": "passes"}, "unbiased only with sampling 'draws'"),
        ({"encoders": {"p1": {"model": "mlp"}}}, "trains linear models"),
        ({"encoders": {"p1": {"embedding": 2}}}, "trains linear models"),
        ({"label_holder": "server"}, "label holder with features"),
        ({"active": ("p0", "p9")}, "p9"),
        ({"active": ("p1",)}, "p0 is always active"),
        ({"private_labels": True}, "private_labels is a setting of flex, not of afsgd"),
        ({"protocol": "two-tree", "collusion": 2}, "at least 4 are needed"),
    ],
)
def test_plans_that_cannot_work_say_so(changes: dict, match: str, three: VerticalData) -> None:
    with pytest.raises(PlanError, match=match):
        train(three, Plan.from_flat({"unprotected": True, "algorithm": "afsgd", **changes}))


def test_divergence_is_reported(three: VerticalData) -> None:
    data = VerticalData.load(TASKS["regression"], parties=3)
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        train(data, Plan(algorithm="afsgd", epochs=200, learning_rate=1e3, unprotected=True))
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):  # finite, but not as a float32
        train(three, Plan(algorithm="afsgd", epochs=1, learning_rate=1e38, l2=1.0, unprotected=True))


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["afsgd", "afsvrg", "afsaga", "fsaga"])
def test_resumed_runs_end_the_same(algorithm: str, three: VerticalData, tmp_path: Path) -> None:
    plan = Plan(
        algorithm=algorithm,
        protocol="two-tree",
        epochs=3,
        batch=30,
        settings={"delays": "exponential", "latency": 0.1},
        unprotected=True,
    )
    straight = train(three, plan, tmp_path / "straight")

    def stop_in_third_epoch(progress) -> None:
        if progress.epoch == 3 and progress.done > 0.8:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(three, plan, tmp_path / "broken", progress=stop_in_third_epoch)
    resumed = train(three, plan, tmp_path / "broken", resume=True)
    assert np.array_equal(weights_of(resumed), weights_of(straight))
    drop = {"messages", "bytes"}
    assert [{k: v for k, v in m.items() if k not in drop} for m in resumed.metrics] == [
        {k: v for k, v in m.items() if k not in drop} for m in straight.metrics
    ]
