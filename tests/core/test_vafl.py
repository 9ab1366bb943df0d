"""VAFL against its centralised counterpart, its delay rule, and the ledger that comes out of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.vafl import VAFLServer
from securevfl.errors import PlanError
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier
from securevfl.models import task_loss

TINY = "synthetic:rows=240,features=12,informative=6"


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    return VerticalData.load(TINY, parties=3)


@pytest.fixture(scope="module")
def cancer() -> VerticalData:
    return VerticalData.load("breast-cancer", parties=3)


def weights(run: Any) -> torch.Tensor:
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().reshape(-1) for module in modules for p in module.parameters()])


@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_one_party_without_delay_is_centralised_sgd(model: str, optimiser: str) -> None:
    data = VerticalData.load(TINY, parties=1)
    plan = Plan(
        algorithm="vafl",
        label_holder="server",
        epochs=3,
        batch=16,
        model=model,
        optimiser=optimiser,
        learning_rate=0.02,
        unprotected=True,
    )
    federated = train(data, plan)
    central = train(data, plan.with_changes(algorithm="central"))
    assert federated.result["messages"] > 0
    # The same float32 operations in the same order, but for one copy: far below 1e-6.
    assert torch.allclose(weights(federated), weights(central), atol=1e-6, rtol=0)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
@pytest.mark.parametrize("fusion", ["concat", "sum"])
def test_synchronous_training_is_the_centralised_block_model(task: str, fusion: str) -> None:
    name = {"binary": TINY, "multiclass": TINY + ",classes=4", "regression": TINY + ",task=regression"}[task]
    data = VerticalData.load(name, parties=3)
    plan = Plan(
        algorithm="vafl-sync",
        epochs=4,
        batch=20,
        fusion=fusion,
        model="mlp",
        hidden=(8,),
        learning_rate=0.05,
        unprotected=True,
    )
    federated, central = train(data, plan), train(data, plan.with_changes(algorithm="central"))
    # Sums over parties may be taken in another order: a few float32 units per step, 40 steps.
    assert torch.allclose(weights(federated), weights(central), atol=1e-5, rtol=0)
    key = "r2" if task == "regression" else "auc"
    assert federated.test[key] == pytest.approx(central.test[key], abs=1e-5)


def test_label_holder_without_features_learns_the_same(tiny: VerticalData) -> None:
    plan = Plan(algorithm="vafl-sync", epochs=2, unprotected=True)
    with_features, without = train(tiny, plan), train(tiny, plan.with_changes(label_holder="server"))
    assert torch.allclose(weights(with_features), weights(without), atol=1e-6)
    assert set(with_features.privacy) == {"p0", "p1", "p2"}
    assert set(without.privacy) == {"server", "p0", "p1", "p2"}
    assert with_features.result["messages"] < without.result["messages"]


class Watch(VAFLServer):
    """Keeps, for every iteration, who uploaded what, to check the delays against eq. (3)."""

    log: list[tuple[list[tuple[int, list[int]]], np.ndarray]]

    async def _iterate(self, messages: Any) -> None:
        await super()._iterate(messages)
        uploads = [self._upload(message, self._rows(message)) for message in messages]
        kept = getattr(self, "log", [])
        kept.append(([(party, rows.tolist()) for party, rows, *_ in uploads], self.updated_at.copy()))
        self.log = kept


def watched(data: VerticalData, **changes: Any) -> Watch:
    import securevfl.algorithms.vafl as module

    original = module.VAFLServer
    module.VAFLServer = Watch  # type: ignore[misc]
    try:
        plan, scaled = resolve(Plan.from_flat({"algorithm": "vafl", **changes}), data)
        carrier = VirtualCarrier(plan, scaled)
        drive(Schedule(carrier).train())
        carrier.close()
    finally:
        module.VAFLServer = original  # type: ignore[misc]
    return carrier.server  # type: ignore[return-value]


def test_delays_follow_equation_3(tiny: VerticalData) -> None:
    """tau is 1 after an upload and grows by one per iteration, for every record and party."""
    server = watched(tiny, epochs=2, batch=16, delays="exponential")
    tau = np.zeros((tiny.n_train, 3), np.int64)  # at iteration 0 all embeddings are fresh
    for iteration, (uploads, updated_at) in enumerate(server.log, start=1):
        tau += 1
        for party, rows in uploads:
            tau[rows, party] = 1
        # the server's clock counts the next iteration as iteration + 1
        assert (iteration + 1 - updated_at == np.where(updated_at > 0, tau, iteration + 1)).all()
    assert len({party for uploads, _ in server.log for party, _ in uploads}) == 3


@pytest.mark.parametrize("bound", [1, 3, 10])
def test_no_embedding_older_than_the_bound_is_used(tiny: VerticalData, bound: int) -> None:
    server = watched(tiny, epochs=2, batch=16, delays="exponential", delay_bound=bound)
    assert server.oldest_used <= bound
    assert watched(tiny, epochs=2, batch=16, delays="exponential").oldest_used > 10


@pytest.mark.parametrize("t", [1, 2, 3])
def test_t_sync_waits_for_t_distinct_parties(tiny: VerticalData, t: int) -> None:
    server = watched(tiny, algorithm="vafl-tsync", wait_for=t, epochs=2, batch=16, delays="exponential")
    for uploads, _ in server.log:
        assert len({party for party, _ in uploads}) == len(uploads) == t


def test_stragglers_hold_up_only_synchronous_training(tiny: VerticalData) -> None:
    slow = {"p2": 0.1}
    asynchronous = train(
        tiny, Plan(algorithm="vafl", epochs=5, settings={"speeds": slow}, unprotected=True)
    ).result["time"]["virtual"]
    synchronous = train(
        tiny, Plan(algorithm="vafl-sync", epochs=5, settings={"speeds": slow}, unprotected=True)
    ).result["time"]["virtual"]
    assert asynchronous * 3 < synchronous
    assert synchronous == pytest.approx(5 * 3 * 10)  # 5 epochs of 3 steps at 10 units


def test_a_straggler_slower_than_an_epoch_still_takes_part(tiny: VerticalData) -> None:
    """Its step goes on across epoch boundaries instead of starting anew."""
    run = train(
        tiny, Plan(algorithm="vafl", epochs=12, batch=64, settings={"speeds": {"p2": 0.1}}, unprotected=True)
    )
    assert (
        run.privacy["p2"]["releases"] > tiny.n_train + tiny.n_test
    )  # more than initial upload and evaluation


@pytest.mark.parametrize("wire", [False, True])
def test_same_seed_same_metrics(tiny: VerticalData, wire: bool) -> None:
    plan = Plan(
        algorithm="vafl",
        epochs=3,
        evaluate_every=1,
        settings={"delays": "poisson", "latency": 0.3, "delay_bound": 20},
        unprotected=True,
    )
    first, second = train(tiny, plan), train(tiny, plan.with_changes(settings={"wire": wire}))
    assert first.metrics == second.metrics
    assert torch.equal(weights(first), weights(second))
    assert train(tiny, plan.with_changes(seed=1)).metrics != first.metrics


def test_vafl_reaches_the_centralised_model(cancer: VerticalData) -> None:
    plan = Plan(algorithm="vafl", epochs=20, batch=32, unprotected=True)
    central = train(cancer, plan.with_changes(algorithm="central")).test["auc"]
    for algorithm in ("vafl", "vafl-tsync", "vafl-sync"):
        slow = plan.with_changes(algorithm=algorithm, settings={"delays": "poisson", "wait_for": 2})
        federated = train(cancer, slow).test["auc"]
        assert federated is not None and central is not None and federated >= central - 0.01


@pytest.mark.parametrize("training", ["raw", "dp", "none"])
def test_ledger_matches_the_formula_of_its_mode(tiny: VerticalData, training: str) -> None:
    """Synchronous, 4 epochs, evaluated after each: the schedule is known exactly."""
    plan = Plan(
        algorithm="vafl-sync", epochs=4, batch=25, sigma=4.0, clip=0.5, encoder_training=training,
        evaluate_every=1, gradient_sigma=2.0 if training == "dp" else 0.0, gradient_clip=0.3,
        scaling="public",
    )  # fmt: skip
    spend = train(tiny, plan).privacy["p1"]
    once = (2 * 0.5 / 4.0) ** 2
    update = (2 * 0.3 / 2.0) ** 2
    square = {
        "raw": once * (5 * tiny.n_train + 4 * tiny.n_test),  # initial, 4 epochs, 4 evaluations
        "dp": 5 * once
        + 4 * update,  # a training record: 5 releases, 4 updates; a test record only 4 releases
        "none": once,  # released once, then the same bytes again
    }[training]
    assert spend["mode"] == {"raw": "strict", "dp": "dp-encoder", "none": "frozen"}[training]
    assert spend["mu"] == pytest.approx(math.sqrt(square), rel=1e-9)
    released = tiny.n_train + tiny.n_test if training == "none" else 5 * tiny.n_train + 4 * tiny.n_test
    assert spend["releases"] == released


def test_refreshes_are_counted(tiny: VerticalData) -> None:
    plan = Plan(algorithm="vafl", epochs=2, batch=16, sigma=4.0)
    assert (
        train(tiny, plan.with_changes(settings={"delay_bound": 2})).privacy["p1"]["releases"]
        > train(tiny, plan).privacy["p1"]["releases"]
    )


def test_frozen_mode_sends_no_gradients(tiny: VerticalData) -> None:
    run = train(tiny, Plan(algorithm="vafl", encoder_training="none", sigma=1.0, epochs=3))
    assert set(run.privacy) == {"p1", "p2"}
    assert run.result["labels"].startswith("not exposed")
    before = VirtualCarrier(
        *resolve(Plan(algorithm="vafl", encoder_training="none", sigma=1.0), tiny)
    ).encoders
    for party in ("p1", "p2"):
        for old, new in zip(before[party].parameters(), run.encoders[party].parameters(), strict=True):
            assert torch.equal(old, new)
    assert not torch.equal(next(before["p0"].parameters()), next(run.encoders["p0"].parameters()))


@pytest.mark.parametrize(("training", "epsilon"), [("raw", 200.0), ("dp", 4.0), ("none", 1.0)])
@pytest.mark.parametrize("delays", ["constant", "poisson", "exponential"])
def test_a_target_epsilon_is_kept(tiny: VerticalData, training: str, epsilon: float, delays: str) -> None:
    plan = Plan(
        algorithm="vafl",
        encoder_training=training,
        epsilon=epsilon,
        epochs=3,
        scaling="public",
        seed=5,
        settings={"delays": delays},
    )
    run = train(tiny, plan)
    assert run.stopped is None
    for owner in ("p1", "p2"):
        assert run.privacy[owner]["epsilon"] <= epsilon


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_private_updates_are_ordinary_ones_but_for_clip_and_noise(tiny: VerticalData, model: str) -> None:
    """With a wide clip and next to no noise the per-record path gives the raw path's weights."""
    common = {"algorithm": "vafl", "sigma": 1e-7, "clip": 1e4, "scaling": "public", "epochs": 4}
    common |= {"model": model, "hidden": (8,)}
    raw = train(tiny, Plan.from_flat(common))
    private = train(
        tiny,
        Plan.from_flat(
            {
                "encoder_training": "dp",
                "gradient_sigma": 1e-7,
                "gradient_clip": 1e4,
                **common,
            }
        ),
    )
    # Noise of 1e-7 on embeddings and gradients, rate 0.1, 12 steps, and float32 rounding.
    assert torch.allclose(weights(raw), weights(private), atol=1e-5)
    clipped = train(
        tiny,
        Plan.from_flat(
            {
                "encoder_training": "dp",
                "gradient_sigma": 1e-7,
                "gradient_clip": 1e-3,
                **common,
            }
        ),
    )
    assert not torch.allclose(weights(raw), weights(clipped), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "fashion_mnist")])
def test_images_with_seven_parties(data_folder: str, name: str, folder: str) -> None:
    data = VerticalData.load(name, parties=7, folder=f"{data_folder}/{folder}")
    plan = Plan(
        algorithm="vafl",
        epochs=5,
        batch=600,
        optimiser="momentum",
        learning_rate=0.05,
        settings={"delays": "poisson"},
        unprotected=True,
    )
    central = train(data, plan.with_changes(algorithm="central")).test["accuracy"]
    federated = train(data, plan).test["accuracy"]
    assert federated is not None and central is not None and federated >= central - 0.01


@pytest.mark.slow
def test_a9a(data_folder: str) -> None:
    data = VerticalData.load("a9a", parties=[67, 56], folder=f"{data_folder}/a9a")
    plan = Plan(algorithm="vafl", epochs=5, batch=100, scaling="none", learning_rate=0.3, unprotected=True)
    central = train(data, plan.with_changes(algorithm="central")).test["auc"]
    federated = train(data, plan).test["auc"]
    assert federated is not None and central is not None and federated >= central - 0.005


@pytest.mark.parametrize("sigma", [0.0, 1e-7])
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_parties_computed_together_are_parties_computed_alone(
    tiny: VerticalData, model: str, sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders of one shape share a batched product; nothing else changes, clip and gates included."""
    from securevfl.algorithms.local import StackedModels

    plan = Plan(
        algorithm="vafl-sync",
        epochs=3,
        batch=20,
        model=model,
        hidden=(8,),
        sigma=sigma,
        clip=0.5,
        unprotected=True,
    )
    carrier = VirtualCarrier(*resolve(plan, tiny))
    assert all(role.model.stack is not None for role in carrier.roles[1:])  # type: ignore[attr-defined]
    together = train(tiny, plan)
    monkeypatch.setattr(StackedModels, "of", classmethod(lambda cls, models, plan: None))
    alone = train(tiny, plan)
    # Products in another order: a few float32 units per step, 30 steps; noise of 1e-7 where there is any.
    assert torch.allclose(weights(together), weights(alone), atol=1e-5, rtol=0)
    assert together.privacy["p1"]["releases"] == alone.privacy["p1"]["releases"]


def test_memory_and_own_rates_stay_with_the_parties(tiny: VerticalData) -> None:
    for changes in ({"optimiser": "adam"}, {"learning_rates": {"p1": 0.2}}, {"encoder_training": "none"}):
        carrier = VirtualCarrier(
            *resolve(Plan.from_flat({"unprotected": True, "algorithm": "vafl-sync", **changes}), tiny)
        )
        assert all(role.model.stack is None for role in carrier.roles[1:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("delays", ["poisson", "exponential"])
def test_synchronous_schedules_never_drift_apart(tiny: VerticalData, delays: str) -> None:
    """A party that is early at the end of an epoch has its upload put off; the batch comes again."""
    plan = Plan(
        algorithm="vafl-sync",
        epochs=6,
        batch=50,
        learning_rate=0.1,
        settings={"delays": delays, "latency": 0.7},
        unprotected=True,
    )
    federated, central = train(tiny, plan), train(tiny, plan.with_changes(algorithm="central"))
    assert torch.allclose(weights(federated), weights(central), atol=1e-5, rtol=0)


# -- the footnote of Algorithm 1 ----------------------------------------------------------------------------


def test_records_sent_besides_are_younger_and_count(tiny: VerticalData) -> None:
    """Step 5 may also send what step 4 did not select, so that embeddings are younger."""
    plan = Plan(
        algorithm="vafl", epochs=4, batch=16, sigma=0.5, sampling="draws", settings={"delays": "poisson"}
    )
    usual, besides = train(tiny, plan), train(tiny, plan.with_changes(settings={"also": 16}))
    assert besides.metrics[-1]["oldest"] < 0.6 * usual.metrics[-1]["oldest"]
    before, after = (run.privacy["p1"]["releases"] for run in (usual, besides))
    assert 1.4 * before < after < 2 * before  # the initial upload is the same, and some were in the batch
    target = plan.with_changes(sigma=0.0, epsilon=8.0, settings={"also": 16})
    assert train(tiny, target).privacy["p1"]["epsilon"] <= 8.0


def test_asking_first_steps_on_the_newest_server_and_uploads_the_newest_model() -> None:
    """One party, two batches, by hand: upload, server's step, gradient, party's step, and so on."""
    data = VerticalData.load("synthetic:rows=100,features=4", parties=1)
    plan = Plan(
        algorithm="vafl",
        label_holder="server",
        epochs=1,
        batch=40,
        learning_rate=0.5,
        l2=0.0,
        record_views=False,
        settings={"query_first": True},
        unprotected=True,
    )
    run, start = train(data, plan), VirtualCarrier(*resolve(plan, data))
    server, party = start.roles
    rows = torch.from_numpy(np.array(party.setup.data.train[0], np.float32))
    labels = torch.from_numpy(np.array(party.setup.data.y_train))
    encoder, head = party.model.encoder, server.top.module
    for number in range(2):
        chosen = torch.from_numpy(party.batches.next())
        sent = encoder(rows[chosen])
        _descend(head, task_loss("binary", head(sent.detach()), labels[chosen]))
        if number == 0:  # of the last batch nobody learns
            _descend(encoder, task_loss("binary", head(sent), labels[chosen]))
    torch.testing.assert_close(run.encoders["p0"].output.weight.detach(), encoder.output.weight.detach())
    torch.testing.assert_close(run.head.weight.detach(), head.weight.detach())


def _descend(module: torch.nn.Module, loss: torch.Tensor) -> None:
    parameters = list(module.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter -= 0.5 * gradient


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "vafl-tsync", "settings": {"also": 3}}, "variants of algorithm 'vafl'"),
        ({"protocol": "two-tree", "settings": {"query_first": True}}, "variants of algorithm 'vafl'"),
        ({"batch": 2, "settings": {"also": 3}}, "as large as the batch"),
    ],
)
def test_the_footnote_is_of_algorithm_1(changes: dict, said: str, tiny: VerticalData) -> None:
    with pytest.raises(PlanError, match=said):
        train(tiny, Plan(**{"algorithm": "vafl", "unprotected": True, **changes}))
