"""Sealed training as a whole: agreement with plain training, what is promised, what is seen, resuming."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.records import Filter
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.algorithms.sealed.models import NetworkModel
from securevfl.algorithms.sealed.rows import Preparation, clip_to_integers
from securevfl.algorithms.sealed.settings import BIAS
from securevfl.data import VerticalData
from securevfl.errors import (
    BudgetExceeded,
    DropoutError,
    EncodingError,
    PlanError,
    RunError,
    TrainingDiverged,
)
from securevfl.federation.folder import RunFolder
from securevfl.federation.run import load_run, train
from securevfl.federation.virtual import VirtualCarrier
from securevfl.models import build_encoder, metrics
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger, read_records
from securevfl.privacy.noise import Noise
from securevfl.privacy.views import View
from securevfl.protocols.sealed.series import logistic_series
from securevfl.settings.plan import Plan

RECORDS = 300


def make_data(*, parties=2, task="binary", records=RECORDS, columns=4, seed=0):
    generator = np.random.default_rng(seed)
    blocks = [generator.uniform(-1, 1, (records, columns)) for _ in range(parties)]
    score = sum(block @ generator.standard_normal(columns) for block in blocks)
    if task == "binary":
        labels = (score + 0.3 * generator.standard_normal(records) > 0).astype(int)
    elif task == "multiclass":
        labels = np.digitize(score, np.quantile(score, [1 / 3, 2 / 3]))
    else:
        labels = score
    return VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), task=task, seed=0)


def run(data, out=None, **fields):
    """Trains; without noise where a test asks for none."""
    return train(
        data, Plan.from_flat({"algorithm": "sealed", "unprotected": True, "epochs": 30, **fields}), out
    )


# -- agreement ----------------------------------------------------------------------------------------------


def joined(blocks):
    """The constant column and all clipped rows side by side."""
    limits = [(1 - BIAS**2) ** 0.5, *[1.0] * (len(blocks) - 1)]
    clipped = [
        block * np.minimum(1, limit / np.linalg.norm(block, axis=1, keepdims=True))
        for limit, block in zip(limits, blocks, strict=True)
    ]
    return np.hstack([np.full((len(blocks[0]), 1), BIAS), *clipped])


def plain_training(data, plan, *, function):
    """The same model in the clear: rows clipped to 1, joint momentum steps, the mean of the last iterates."""
    train_rows, test_rows = joined(data.train), joined(data.test)
    weights, speed, kept = np.zeros(train_rows.shape[1]), 0.0, []
    rate = plan.learning_rate * 2 / len(data.parties)
    for iteration in range(plan.epochs):
        residual = function(train_rows @ weights) - data.y_train
        speed = 0.9 * speed + train_rows.T @ residual / data.n_train
        weights = weights - rate * speed
        if iteration >= plan.epochs * (1 - plan.settings.average_last):
            kept.append(weights)
    return test_rows @ np.mean(kept, axis=0)


@pytest.mark.parametrize("parties", [2, 3])
def test_without_noise_it_is_plain_logistic_regression(parties):
    data = make_data(parties=parties)
    sealed = run(data, centring=0.0)
    labels = torch.from_numpy(np.array(data.y_test))

    def auc(outputs):
        return metrics("binary", torch.from_numpy(outputs).float()[:, None], labels)["auc"]

    series = plain_training(data, sealed.plan, function=logistic_series())
    exact = plain_training(data, sealed.plan, function=lambda u: 1 / (1 + np.exp(-u)))
    # Shares round at random, which may turn pairs of records that nearly tie: two of 27 * 33 are 2.2e-3.
    assert abs(sealed.test["auc"] - auc(series)) <= 2.3e-3
    assert abs(sealed.test["auc"] - auc(exact)) <= 2.3e-3
    assert sealed.privacy["p0"]["epsilon"] is None  # without noise nothing is promised


def test_the_wire_and_the_label_holder_without_features_change_nothing_that_matters():
    data = make_data()
    here = run(data, centring=0.0)
    wired = run(data, centring=0.0, wire=True)
    apart = run(data, centring=0.0, label_holder="server")
    # Shares round at random by 3.4e-4 of a residual; the metric moves by far less than one pair of records.
    assert wired.test["auc"] == pytest.approx(here.test["auc"], abs=2e-3)
    assert apart.test["auc"] == pytest.approx(here.test["auc"], abs=0.02)


@pytest.mark.parametrize(
    "task,fields,metric,least",
    [
        ("binary", {"epsilon": 8.0}, "auc", 0.85),
        ("binary", {"batch": 60, "epochs": 12}, "auc", 0.95),
        ("binary", {"optimiser": "adam", "learning_rate": 0.1}, "auc", 0.9),
        ("binary", {"model": "mlp", "hidden": (4,), "epochs": 20, "learning_rate": 1.0}, "auc", 0.9),
        ("binary", {"label_holder": "server", "parties": 0, "epsilon": 8.0}, "auc", 0.8),
        ("multiclass", {}, "accuracy", 0.65),
        ("multiclass", {"model": "mlp", "hidden": (4,), "epochs": 20, "learning_rate": 1.0}, "accuracy", 0.5),
        ("regression", {"label_low": -4.0, "label_high": 4.0}, "r2", 0.8),
    ],
)
def test_every_kind_of_task_and_model_learns(task, fields, metric, least):
    result = run(make_data(task=task), **fields).result
    assert result["test"][metric] > least
    assert result["loss"] is None and result["stopped"] is None


# -- promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protect", ["person", "features", "label"])
@pytest.mark.parametrize("parties,collusion", [(2, 1), (3, 2)])
def test_the_ledger_adds_up_to_the_target(tmp_path, protect, parties, collusion):
    data = make_data(parties=parties)
    done = run(data, tmp_path / "run", epsilon=2.0, protect=protect, collusion=collusion, epochs=6)
    target = gdp_mu(2.0, 1e-5)
    assert max(spend["mu"] or 0.0 for spend in done.privacy.values()) == pytest.approx(target, rel=1e-6)
    assert all((spend["epsilon"] or 2.0) <= 2.0 for spend in done.privacy.values())
    assert (done.privacy["p1"]["mu"] is None) == (protect == "label")  # its features are not covered
    records = read_records(tmp_path / "run")
    for owner in data.parties:
        mine = [r for r in records if r.owner == owner]
        assert sum(r.kind.startswith("totals") for r in mine) == 6
        assert all(r.rows.size == data.n_train for r in mine if r.kind.startswith("totals"))
        # One session for training, one for the evaluation.
        assert [r.kind for r in mine if r.mechanism == "masked"] == ["contributions"] * 2
        others = tuple(p for p in data.parties if p != owner)
        assert all(r.observers == others for r in mine if r.mechanism != "masked")


def test_more_data_held_back_from_an_observer_needs_no_more_noise_than_the_plain_formula():
    plan = run(make_data(), epsilon=1.0, epochs=2, centring=0.0).plan
    # D = 2 R sqrt(2) for two clips of 1; sigma = D sqrt(T) / mu.
    bound = logistic_series().range[1] + logistic_series().rounding
    assert plan.sigma == pytest.approx(2 * bound * (2 * 2) ** 0.5 / gdp_mu(1.0, 1e-5), rel=1e-6)


def test_nothing_is_opened_but_totals():
    result = run(make_data(parties=3), epsilon=4.0, epochs=4, evaluate_every=2).result
    assert result["prediction"] == {}
    assert result["privacy"]["p1"]["epsilon"] <= 4.0
    assert result["labels"].startswith("sealed")


def test_a_budget_stops_training_before_anything_leaves(tmp_path):
    data = make_data()
    plan = Plan(algorithm="sealed", sigma=40.0, epochs=50, budget_epsilon=0.5, settings={"centring": 0.0})
    done = train(data, plan, tmp_path / "run")
    assert done.stopped is not None and done.stopped.startswith("budget")
    assert 0 < done.result["epochs"] < 50
    assert all(spend["epsilon"] <= 0.5 for spend in done.privacy.values())
    with pytest.raises(BudgetExceeded):
        train(data, plan.with_changes(sigma=1.0))


def test_reproducible_noise_promises_nothing():
    done = run(make_data(), epsilon=4.0, epochs=3, insecure_reproducible_noise=True)
    assert done.result["guarantee"].startswith("void")
    assert done.privacy["p0"]["epsilon"] is None


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({"patience": 2}, "early stopping"),
        ({"scaling": "standard"}, "couples records"),
        ({"collusion": 2}, "honest"),
        ({"encoder_training": "dp", "epsilon": 1.0}, "noisy totals"),
        ({"hidden_noise": (0.1,)}, "hidden_noise"),
        ({"protocol": "pairwise"}, "cannot run on protocol"),
        ({"optimiser": "proximal"}, "no optimiser"),
        ({"sigma": 1e-9}, "resolution"),
        ({"protect": "everything"}, "protect"),
        ({"average_last": 1.0}, "average_last"),
        ({"weight_bound": 0.0}, "weight_bound"),
    ],
)
def test_plans_that_would_void_the_promise_are_refused(fields, reason):
    with pytest.raises(PlanError, match=reason):
        run(make_data(), **fields)


def test_what_does_not_fit_the_ring_is_refused():
    with pytest.raises(EncodingError, match="ring holds"):
        run(make_data(), sigma=1e6)
    with pytest.raises(PlanError, match="label_low"):
        run(make_data(task="regression"))
    with pytest.raises(PlanError, match="label_low and label_high are for regression"):
        run(make_data(), label_low=0.0, label_high=1.0)
    with pytest.raises(PlanError, match="at least 2"):
        run(make_data(parties=1))
    with pytest.raises(PlanError, match="dealer"):
        data = make_data()
        blocks = {"dealer": data.train[0], "b": data.train[1]}
        run(VerticalData.from_arrays(blocks, data.y_train, bounds=(-1, 1)))


def test_statistics_of_the_rows_are_noisy_and_paid_for(tmp_path):
    data = make_data()
    run(data, tmp_path / "run", epsilon=2.0, epochs=3, centring=0.2)
    mine = [r for r in read_records(tmp_path / "run") if r.owner == "p1"]
    squares = {
        kind: sum(r.mu**2 for r in mine if r.kind.startswith(kind)) for kind in ("means", "scale", "totals")
    }
    whole = gdp_mu(2.0, 1e-5) ** 2
    assert squares["means"] == pytest.approx(0.15 * whole, rel=1e-6)
    assert squares["scale"] == pytest.approx(0.05 * whole, rel=1e-6)
    assert squares["totals"] <= 0.8 * whole * (1 + 1e-6)
    unbounded = VerticalData.from_arrays(list(data.train), data.y_train)
    assert run(unbounded, epochs=2, scaling="none").plan.settings.centring == 0.0
    with pytest.raises(PlanError, match="public bounds"):
        run(unbounded, epochs=2)


def test_a_statistic_carries_its_noise_and_counts_for_all():
    gate = Gate(
        owner="p0",
        mode="sealed",
        ledger=Ledger("p0"),
        mechanism=Mechanism(),
        budget=Filter(mode="sealed", budget_mu=10.0, records=4),
        noise=Noise(),
    )
    where = {"rows": np.arange(4), "kind": "means", "observers": ("p1",)}
    exact = np.linspace(0, 1, 4000)
    noisy = gate.noisy_statistic(exact, **where, change=2.0, counted=3.0, sigma=1.5)
    # 4,000 squared errors over their variance are chi-square; 1e-6 in both tails lies within 1 +- 0.12.
    assert abs(np.mean(((noisy - exact) / 1.5) ** 2) - 1) < 0.12
    assert gate.budget.spent_mu == pytest.approx(2.0)
    with pytest.raises(PlanError, match="cannot count"):
        gate.noisy_statistic(exact, **where, change=2.0, counted=1.0, sigma=1.5)
    with pytest.raises(BudgetExceeded):
        gate.open_totals(None, **{**where, "sensitivity": 30.0, "sigma": 1.0})


# -- views --------------------------------------------------------------------------------------------------


def test_the_dealer_sees_no_traffic_and_members_see_masks(tmp_path):
    run(make_data(parties=3), tmp_path / "run", epsilon=4.0, epochs=3, record_views=True)
    dealer = [seen for seen in View(tmp_path / "run" / "views" / "dealer") if not seen.sent]
    assert {seen.kind for seen in dealer} == {"sealed-hello", "sealed-ready"}
    assert all(set(seen.fields) <= {"round", "session", "stage"} for seen in dealer)
    received = [seen for seen in View(tmp_path / "run" / "views" / "p1") if not seen.sent]
    assert {seen.kind for seen in received} == {
        "sealed-begin",
        "sealed-seed",
        "sealed-operand",
        "sealed-deal",
        "sealed-phase",
        "sealed-share",
        "sealed-spread",
    }
    unmasked = ("dealer", "sealed-spread")
    assert all(s.head is not None for s in received if s.sender not in unmasked and s.kind not in unmasked)


def test_bytes_per_iteration(tmp_path):
    """Per ordered pair and iteration: 12 bytes a record, 8 a column, and headers of below 1 KB."""
    data = make_data(records=2000, columns=4)
    run(data, tmp_path / "run", epochs=2, record_views=True, centring=0.0)
    view = View(tmp_path / "run" / "views" / "p1")
    sizes = [seen.size for seen in view.messages("sealed-phase", "sealed-share", sent=True)]
    assert len(sizes) == 6
    assert 12 * data.n_train <= sum(sizes[:4]) / 2 <= 12 * data.n_train + 8 * 5 + 1024
    # An evaluation: a phase, and 48 waves of 8 bytes for each test record.
    assert 388 * data.n_test <= sum(sizes[4:]) <= 388 * data.n_test + 2 * 48 * 8 + 1024


# -- rows and networks --------------------------------------------------------------------------------------


def test_rows_never_exceed_the_clip_and_round_toward_zero():
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((500, 7)) * generator.uniform(0, 3, (500, 1))
    for clip in (0.3, 1.0, 17.7):
        whole = clip_to_integers(rows, clip).astype(object)
        assert all(sum(v * v for v in row) <= (clip * 2**14) ** 2 for row in whole)
        factors = np.minimum(1, clip / np.linalg.norm(rows, axis=1, keepdims=True))
        gap = np.abs(rows * factors * 2**14) - np.abs(whole.astype(float))
        assert gap.min() > -1e-9 and gap.max() < 1 + 1e-6
    with pytest.raises(TrainingDiverged):
        clip_to_integers(np.array([[np.inf]]), 1.0)
    prepared = Preparation(centre=np.ones(7), scale=np.full(7, 2.0), clip=1.0)(rows)
    assert np.array_equal(prepared.T, clip_to_integers((rows - 1) * 2, 1.0))


def test_a_networks_operand_is_its_clipped_jacobian():
    encoder = build_encoder("mlp", 5, 2, generator=torch.Generator().manual_seed(0), hidden=(3,))
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    model = NetworkModel(encoder, _Rows(inputs), counts=(6, 0), outputs=2, clip=0.7)
    operand = model.operand(None) * 2.0**-14
    assert operand.shape == (model.width, 12)
    for record in range(6):
        found = []
        for output in range(2):
            encoder.zero_grad()
            encoder(inputs[record : record + 1])[0, output].backward()
            found.append(np.concatenate([p.grad.numpy().reshape(-1) for p in encoder.parameters()]))
        wanted = np.stack(found) * min(1.0, 0.7 / np.linalg.norm(found))
        # float32 Jacobians (1e-6 relative) and truncation by less than 2^-14.
        assert np.abs(operand[:, 2 * record : 2 * record + 2].T - wanted).max() < 2.0**-14 + 1e-5
    total = np.arange(model.width, dtype=float)[:, None]
    model.set_gradients(total, 2, ridge=0.0)
    flat = torch.cat([p.grad.reshape(-1) for p in encoder.parameters()])
    assert np.allclose(flat.numpy(), total[:, 0] / 2)


class Recurrent(nn.Module):
    """A user's own module, with a layer that torch cannot batch over records."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(1, 3, batch_first=True)
        self.output = nn.Linear(3, 1)

    def forward(self, inputs):
        return self.output(self.layer(inputs.unsqueeze(-1))[0][:, -1])


def test_own_modules_are_welcome_and_own_heads_are_not():
    data = make_data(records=60)
    plan = Plan(algorithm="sealed", epochs=3, epsilon=8.0, learning_rate=0.5)
    done = train(data, plan, encoders={"p1": Recurrent()})
    assert done.privacy["p1"]["epsilon"] <= 8.0
    with pytest.raises(PlanError, match="label holder"):
        train(data, plan, head=nn.Linear(1, 1))
    with pytest.raises(PlanError, match="couples records"):
        train(data, plan, encoders={"p1": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))})


class _Rows:
    def __init__(self, inputs):
        self.inputs = inputs

    def __getitem__(self, rows):
        return self.inputs[torch.from_numpy(rows)]


# -- stopping and going on ----------------------------------------------------------------------------------


def opened(folder):
    """How many openings p0 has written down."""
    return sum(r.owner == "p0" and r.kind.startswith("totals") for r in read_records(folder))


@pytest.mark.parametrize("fields", [{}, {"batch": 60, "optimiser": "adam", "learning_rate": 0.1}])
def test_a_party_that_drops_stops_the_run_and_it_can_be_resumed(tmp_path, monkeypatch, fields):
    data = make_data()
    plan = Plan.from_flat(
        {"algorithm": "sealed", "epochs": 8, "epsilon": 4.0, "budget_epsilon": 6.0, **fields}
    )
    whole = SealedMember.iterate
    calls = 0

    async def failing(member):
        nonlocal calls
        calls += member.address == "p1"
        if member.address == "p1" and calls == 6:
            raise DropoutError("p1 is gone")
        return await whole(member)

    monkeypatch.setattr(SealedMember, "iterate", failing)
    with pytest.raises(DropoutError, match="gone"):
        train(data, plan, tmp_path / "run")
    before = len(
        [r for r in read_records(tmp_path / "run") if r.owner == "p0" and r.kind.startswith("totals")]
    )
    monkeypatch.undo()
    done = train(data, plan, tmp_path / "run", resume=True)
    assert done.result["epochs"] == 8
    after = opened(tmp_path / "run")
    per_epoch = -(-data.n_train // min(plan.batch, data.n_train))
    assert after >= 8 * per_epoch and after > before  # what was repeated is counted again
    assert [line["epoch"] for line in done.metrics] == list(range(1, 9))


def test_resuming_after_the_last_epoch_still_evaluates(tmp_path, monkeypatch):
    data = make_data()
    plan = Plan(algorithm="sealed", epochs=3, epsilon=4.0)
    monkeypatch.setattr(SealedMember, "evaluate", _fail)
    with pytest.raises(DropoutError):
        train(data, plan, tmp_path / "run")
    monkeypatch.undo()
    done = train(data, plan, tmp_path / "run", resume=True)
    assert done.test["auc"] is not None
    assert load_run(tmp_path / "run").result == done.result
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved["evaluation"]["se"] > 0 and saved["prediction"] == {}


def test_what_the_last_evaluation_opened_outlives_a_full_disk(tmp_path, monkeypatch):
    data = make_data()
    plan = Plan(algorithm="sealed", epochs=3, epsilon=4.0)  # the budget allows each evaluation once

    def full(carrier, epochs, stopped):
        raise RunError("no space left on device")

    monkeypatch.setattr(VirtualCarrier, "finish", full)
    with pytest.raises(RunError, match="no space"):
        train(data, plan, tmp_path / "run")
    monkeypatch.undo()
    before = RunFolder(tmp_path / "run").read_metrics()[-1]
    done = train(data, plan, tmp_path / "run", resume=True)
    assert done.test["auc"] is not None and done.metrics[-1] == before
    assert done.result["evaluation"]["se"] > 0 and done.stopped is None


async def _fail(member):
    raise DropoutError(f"{member.address} is gone")


def test_no_seed_of_masks_or_noise_is_kept(tmp_path):
    run(make_data(), tmp_path / "run", epsilon=4.0, epochs=2)
    state = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    names = state[8 : 8 + int.from_bytes(state[:8], "little")]  # the header names every array and scalar
    assert b"weights" in names or b"parameters" in names or b"module" in names
    assert b"seed" not in names and b"operand" not in names
