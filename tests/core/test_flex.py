"""Flex-VFL and its baselines: steps, weights, rates, time, equality with each other, and who sees what."""

import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from round_data import tiny
from torch import nn

from securevfl import Plan, VerticalData, train
from securevfl.algorithms import flex
from securevfl.algorithms.flex import LOCAL_OPTIMISERS, MOST_STEPS, LocalSGD, capacity, gradient_weights
from securevfl.algorithms.resolve import resolve
from securevfl.errors import PlanError, ProtocolError
from securevfl.federation.run import Run
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet

FAMILY = ("flex", "flex-adaptive", "sync-min", "sync-max", "p-bcd")
SPEEDS = {"p0": 0.25, "p1": 0.5, "p2": 0.75, "server": 1.0}  # 5, 10, 15 and 20 steps in 20 time units


def plan(algorithm: str = "flex", **changes: Any) -> Plan:
    own = {"timeout": 4.0} if algorithm in FAMILY else {}
    given = {"epochs": 2, "batch": 10, "learning_rate": 0.2, **own, **changes}
    return Plan.from_flat({"unprotected": True, "algorithm": algorithm, **given})


def vector(run: Run) -> torch.Tensor:
    assert run.head is not None
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


# -- optimisers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOCAL_OPTIMISERS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_round_is_the_weighted_sum_of_its_gradients(kind: str, steps: int) -> None:
    """Eq. (8), with gradients that depend on nothing; the second round must not remember the first."""
    generator = torch.Generator().manual_seed(steps)
    parameter = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimiser = LocalSGD([{"params": [parameter]}], kind=kind, proximal=0.4)
    for rate in (0.3, 0.05):
        start = parameter.detach().clone()
        optimiser.begin(rate)
        gradients = torch.randn(steps, 5, generator=generator, dtype=torch.float64)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimiser.step()
        weights = torch.from_numpy(gradient_weights(kind, steps, rate=rate, proximal=0.4))
        expected = start - rate * weights @ gradients
        # 7 steps in float64 on numbers of order 1 round by a few units of 2^-52.
        assert torch.allclose(parameter.detach(), expected, rtol=0, atol=1e-14)


def test_weights_by_hand() -> None:
    assert gradient_weights("sgd", 3, rate=1, proximal=1).tolist() == [1, 1, 1]
    assert gradient_weights("momentum", 3, rate=1, proximal=1) == pytest.approx([2.71, 1.9, 1])
    assert gradient_weights("proximal", 3, rate=0.5, proximal=0.2) == pytest.approx([0.81, 0.9, 1])
    assert gradient_weights("decaying", 4, rate=1, proximal=1) == pytest.approx(1 / np.sqrt([1, 2, 3, 4]))


# -- steps and time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "pace", "steps"),
    [(20, 5, 4), (20, 10, 2), (0.3, 0.1, 3), (20, 4 / 3, 15), (1, 7, 1), (2.9, 1, 2), (1, 1e-12, MOST_STEPS)],
)
def test_capacity(timeout: float, pace: float, steps: int) -> None:
    assert capacity(timeout, pace) == steps


@pytest.mark.parametrize(
    ("algorithm", "steps", "units"),
    [
        ("flex", (5, 10, 15, 20), 20),
        ("flex-adaptive", (5, 10, 15, 20), 20),
        ("sync-min", (5, 5, 5, 5), 20),
        ("sync-max", (20, 20, 20, 20), 80),
        ("p-bcd", (1, 1, 1, 1), 4),
    ],
)
def test_steps_and_time_units_are_the_papers(algorithm: str, steps: tuple[int, ...], units: float) -> None:
    """The speeds of the paper's MOSEI experiment; a round takes t_comm (twice our latency) on top."""
    chosen = plan(algorithm, timeout=20.0, speeds=SPEEDS, latency=5.0, label_holder="server")
    run = train(tiny(), chosen)
    line = run.metrics[-1]
    assert line["steps"] == dict(zip(("p0", "p1", "p2", "server"), steps, strict=True))
    assert line["rounds"] == 8
    labels, evaluation = 5.0, 10.0
    assert run.metrics[0]["time"] == pytest.approx(labels + 4 * (10 + units))
    assert run.result["time"]["virtual"] == pytest.approx(labels + 8 * (10 + units) + evaluation + 5.0)


def test_a_trace_changes_the_steps_from_round_to_round(tmp_path: Any) -> None:
    trace = tmp_path / "trace.json"
    # Time per step 1 / (1 - utilisation); tau = timeout * (1 - utilisation).
    trace.write_text(json.dumps({"p0": [1.0, 2.0, 4.0, 1.0], "p1": [2.0], "p2": [1.0, 8.0]}))
    seen: list[dict[str, int]] = []
    chosen = plan("flex-adaptive", delays="trace", delay_trace=str(trace), batch=40, epochs=5, timeout=8.0)
    run = train(tiny(), chosen)
    seen = [line["steps"] for line in run.metrics]
    assert [steps["p0"] for steps in seen] == [8, 4, 2, 8, 8]
    assert [steps["p1"] for steps in seen] == [4] * 5
    assert [steps["p2"] for steps in seen] == [8, 1, 8, 1, 8]
    rates = [line["rates"] for line in run.metrics]
    # Algorithm 2: the rate follows the steps of the round before; the first round estimates its own.
    assert [rate["p0"] for rate in rates] == pytest.approx([0.2 / 8, 0.2 / 8, 0.2 / 4, 0.2 / 2, 0.2 / 8])
    assert [rate["p2"] for rate in rates] == pytest.approx([0.2 / 8, 0.2 / 8, 0.2, 0.2 / 8, 0.2])


@pytest.mark.parametrize("kind", LOCAL_OPTIMISERS)
def test_adaptive_rates_match_the_formula(kind: str) -> None:
    chosen = plan(
        "flex-adaptive",
        timeout=20.0,
        speeds=SPEEDS,
        learning_rates={"p1": 0.05},
        server_learning_rate=0.01,
        optimisers={"p1": kind, "server": "momentum"},
    )
    run = train(tiny(), chosen)
    rates = run.metrics[-1]["rates"]
    largest = {"momentum": (1 - 0.9**10) / 0.1}.get(kind, 1.0)
    assert rates["p0"] == pytest.approx(0.2 / 5)
    assert rates["p1"] == pytest.approx(0.05 / (10 * largest))
    assert rates["server"] == pytest.approx(0.01 / (20 * (1 - 0.9**20) / 0.1))


# -- equalities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fusion", "private", "optimiser"),
    [
        pytest.param(fusion, private, kind, marks=pytest.mark.slow if kind != "sgd" and not alone else ())
        for fusion, private in itertools.product(("concat", "sum"), (False, True))
        for kind in LOCAL_OPTIMISERS
        for alone in [(fusion, private) == ("concat", True)]
    ],
)
def test_equal_speeds_make_flex_synchronous(fusion: str, private: bool, optimiser: str) -> None:
    runs = [
        train(tiny(), plan(name, fusion=fusion, private_labels=private, optimiser=optimiser))
        for name in ("flex", "sync-min", "sync-max")
    ]
    assert runs[0].metrics[-1]["steps"] == {"p0": 4, "p1": 4, "p2": 4, "server": 4}
    for other in runs[1:]:
        assert torch.equal(vector(runs[0]), vector(other))
        assert other.metrics[-1]["time"] == runs[0].metrics[-1]["time"]


@pytest.mark.parametrize("fusion", ["concat", "sum"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_one_step_per_round_is_synchronous_sgd(fusion: str, private: bool, classes: int) -> None:
    data = tiny(classes=classes)
    one = train(data, plan("p-bcd", fusion=fusion, private_labels=private, model="mlp", hidden=(4,)))
    central = train(data, plan("central", fusion=fusion, model="mlp", hidden=(4,)))
    fits_one = train(data, plan(timeout=1.0, fusion=fusion, private_labels=private, model="mlp", hidden=(4,)))
    # 8 float32 steps of size below 1, each rounded to 2^-24 of its value.
    assert float((vector(one) - vector(central)).abs().max()) < 1e-6
    assert torch.equal(vector(one), vector(fits_one))


def one_round(start: Run, data: VerticalData, chosen: Plan) -> torch.Tensor:
    """A round written out (Alg. 1): everybody steps on its own part, the others' staying as they were."""
    assert start.head is not None
    inputs = [torch.from_numpy(np.array(x)) for x in data.train]
    labels = torch.from_numpy(np.array(data.y_train))
    with torch.no_grad():
        snapshot = [encoder(x) for encoder, x in zip(start.encoders.values(), inputs, strict=True)]
    names, found = ("p0", "p1", "p2", "server"), []
    for k, module in enumerate([*start.encoders.values(), start.head]):
        own = copy.deepcopy(module)
        momentum = 0.9 if chosen.optimiser == "momentum" else 0.0
        decay = [0.0 if k == 3 or "bias" in name else chosen.l2 for name, _ in own.named_parameters()]
        groups = [{"params": [p], "weight_decay": d} for p, d in zip(own.parameters(), decay, strict=True)]
        optimiser = torch.optim.SGD(groups, lr=0.2, momentum=momentum)
        for _ in range(round(chosen.settings.timeout * SPEEDS[names[k]])):
            each = [own(x) if i == k else snapshot[i] for i, x in enumerate(inputs)]
            fused = sum(each[1:], each[0]) if chosen.fusion == "sum" else torch.cat(each, dim=1)
            outputs = (own if k == 3 else start.head)(fused)[:, 0]
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(outputs, labels).backward()
            optimiser.step()
        found += [p.detach().flatten() for p in own.parameters()]
    return torch.cat(found)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum"])
@pytest.mark.parametrize(
    ("fusion", "protocol"),
    [("concat", "plain"), ("sum", "plain"), ("sum", "plain-tree"), ("sum", "two-tree")],
)
def test_local_steps_against_a_loop_written_out(fusion: str, protocol: str, optimiser: str) -> None:
    data = tiny()
    chosen = plan(
        epochs=1, batch=40, timeout=20.0, speeds=SPEEDS, scaling="none", fusion=fusion, optimiser=optimiser
    ).with_changes(protocol=protocol, model="mlp", hidden=(4,), embedding=3, head="linear")
    run = train(data, chosen)
    start = train(data, chosen.with_changes(learning_rate=1e-30))
    # 20 float32 steps that move parameters by at most 0.2 * 10 * gradient each; sums round to 2^-32.
    assert float((vector(run) - one_round(start, data, chosen)).abs().max()) < 2e-6


def both_ways(
    data: VerticalData, chosen: Plan, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters after a run whose steps are written out, and after one that torch differentiates."""
    walks: list[int] = []
    walk = LocalSGD.walk
    monkeypatch.setattr(LocalSGD, "walk", lambda self, *given: walks.append(1) or walk(self, *given))
    written = vector(train(data, chosen))
    assert walks
    walks.clear()
    monkeypatch.setattr(flex, "written_out", lambda module: False)
    graph = vector(train(data, chosen))
    assert not walks
    return written, graph


@pytest.mark.parametrize(
    ("fusion", "head", "more"),
    [
        ("concat", "linear", {}),
        ("sum", "sum", {"embedding": 1}),
        ("sum", "linear", {"optimiser": "momentum", "embedding": 3}),
        ("concat", "linear", {"optimiser": "proximal", "proximal": 0.3}),
        ("concat", "linear", {"optimiser": "decaying", "losses": {"p1": "hinge"}}),
        ("concat", "linear", {"private_labels": True}),
        ("sum", "linear", {"protocol": "two-tree", "embedding": 3}),
        ("concat", "linear", {"encoders": {"p1": {"embedding": 3}}}),
    ],
)
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_linear_steps_written_out_are_those_of_torch(
    fusion: str, head: str, more: dict[str, Any], sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"embedding": 2, "clip": 0.4, "sigma": sigma, "insecure_reproducible_noise": sigma > 0, **more}
    chosen = plan(fusion=fusion, head=head, speeds=SPEEDS, timeout=8.0, model="linear", l2=0.05, **given)
    written, graph = both_ways(tiny(), chosen, monkeypatch)
    # 8 rounds of up to 8 float32 steps; each rounds parameters of order 1 to 2^-24 of their value.
    assert float((written - graph).abs().max()) < 1e-5
    assert float(graph.abs().max()) > 1e-2


def test_linear_steps_of_classes_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    written, graph = both_ways(tiny(classes=3), plan(model="linear"), monkeypatch)
    assert float((written - graph).abs().max()) < 1e-5


def test_a_head_of_another_shape_is_refused() -> None:
    _, party, *_ = VirtualCarrier(*resolve(plan(model="linear"), tiny())).roles
    wrong = Packet(kind="snapshot", sender="server", receiver="p0", fields={"head:bias": np.zeros(2)})
    with pytest.raises(ProtocolError, match="bias is of shape"):
        party._part(wrong, "bias", torch.zeros(1))
    with pytest.raises(ProtocolError, match="without head:weight"):
        party._part(wrong, "weight", torch.zeros(1, 3))


@pytest.mark.parametrize("more", [{"model": "mlp", "head": "mlp", "hidden": (4,)}, {"head": "mlp"}])
def test_what_is_not_linear_is_left_to_torch(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSGD, "walk", lambda self, *given: pytest.fail("not linear"))
    train(tiny(), plan(epochs=1, **{"model": "linear", "hidden": (4,), **more}))


def test_an_encoder_of_ones_own_that_is_a_single_layer_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex.FlexParty, "_walk", lambda self, *given: pytest.fail("not the plan's own"))
    widths = dict(zip(tiny().parties, tiny().widths, strict=True))
    own = {name: nn.Linear(width, 3) for name, width in widths.items()}
    run = train(tiny(), plan(epochs=1, model="linear", embedding=3, head="linear"), encoders=own)
    assert run.encoders["p1"] is own["p1"]


def test_decay_is_by_round() -> None:
    run = train(tiny(), plan(decay="sqrt"))
    assert run.metrics[-1]["rates"]["p1"] == pytest.approx(0.2 / np.sqrt(8))


def test_more_local_steps_learn_more_per_round() -> None:
    slow, fast = (train(tiny(), plan(timeout=t, learning_rate=0.02)) for t in (1.0, 10.0))
    assert fast.metrics[-1]["loss"] < slow.metrics[-1]["loss"]


# -- privacy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", FAMILY)
def test_embeddings_go_to_everybody_once_per_round(algorithm: str, tmp_path: Any) -> None:
    run = train(tiny(), plan(algorithm, sigma=2.0, speeds=SPEEDS, timeout=8.0), tmp_path / "run")
    records = read_records(tmp_path / "run")
    for owner, others in (("p0", ("p1", "p2")), ("p1", ("p0", "p2")), ("p2", ("p0", "p1"))):
        uploads = [r for r in records if r.owner == owner and r.kind == "embedding"]
        assert {r.observers for r in uploads} == {others}
        assert {r.mechanism for r in uploads} == {"gaussian"}
        assert sum(r.vectors for r in uploads) == 2 * 40
    assert run.result["labels"].startswith("shared")
    assert run.privacy["p2"]["mu"] == pytest.approx(np.sqrt(2 * 40 + 10))


def test_private_labels_answer_with_gradients_that_depend_on_everybody(tmp_path: Any) -> None:
    run = train(tiny(), plan(private_labels=True), tmp_path / "run")
    records = read_records(tmp_path / "run")
    mine = {(r.kind, r.observers) for r in records if r.owner == "p1"}
    assert mine == {("embedding", ("p0", "p2")), ("evaluation", ("p0",))}
    assert {r.kind for r in records if r.owner == "p0"} == {"gradient"}
    assert run.result["labels"].startswith("exposed")


def test_frozen_encoders_get_no_gradients_of_private_labels(tmp_path: Any) -> None:
    run = train(tiny(), plan(private_labels=True, encoder_training="none", scaling="none"), tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert not [r for r in records if r.owner == "p0"]
    assert not run.result["labels"].startswith("exposed")


def test_every_local_step_is_a_private_update() -> None:
    chosen = plan(encoder_training="dp", sigma=5.0, gradient_sigma=40.0, scaling="none")
    run = train(tiny(), chosen)
    # A record is released twice and takes part in 2 * 4 updates.
    assert run.privacy["p1"]["mu"] == pytest.approx(np.sqrt(2 * 0.4**2 + 8 * 0.05**2))


def test_a_target_epsilon_is_kept_with_local_steps() -> None:
    chosen = plan(encoder_training="dp", epsilon=3.0, scaling="none")
    run = train(tiny(), chosen)
    assert run.stopped is None
    assert 1.5 < run.privacy["p1"]["epsilon"] <= 3.0


def test_a_target_epsilon_counts_the_steps_of_a_fast_server() -> None:
    """With sync-max the parties take as many steps as the server manages, and pay for them."""
    chosen = plan("sync-max", encoder_training="dp", epsilon=3.0, scaling="none", speeds={"server": 5.0})
    run = train(tiny(), chosen)
    assert run.metrics[-1]["steps"]["p1"] == 20
    assert run.stopped is None


def test_one_step_per_round_needs_no_timeout() -> None:
    slow, usual = (train(tiny(), plan("p-bcd", timeout=t, delays="poisson")) for t in (0.1, 4.0))
    assert torch.equal(vector(slow), vector(usual))


def test_frozen_encoders_pay_once() -> None:
    before = train(tiny(), plan(encoder_training="none", sigma=1.0, scaling="none", epochs=1))
    run = train(tiny(), plan(encoder_training="none", sigma=1.0, scaling="none", epochs=4))
    assert run.privacy["p1"]["mu"] == pytest.approx(2.0)
    for party, encoder in run.encoders.items():
        for ours, theirs in zip(encoder.parameters(), before.encoders[party].parameters(), strict=True):
            assert torch.equal(ours, theirs)


# -- runs ---------------------------------------------------------------------------------------------------


def test_resuming_changes_nothing(tmp_path: Any) -> None:
    class Crash(Exception):
        pass

    def crash(progress: Any) -> None:
        if progress.epoch == 2:
            raise Crash

    chosen = plan("flex-adaptive", speeds=SPEEDS, optimiser="momentum", delays="exponential", decay="sqrt")
    whole = train(tiny(), chosen)
    with pytest.raises(Crash):
        train(tiny(), chosen, tmp_path / "run", progress=crash)
    resumed = train(tiny(), chosen, tmp_path / "run", resume=True)
    assert torch.equal(vector(whole), vector(resumed))


@pytest.mark.parametrize("algorithm", FAMILY)
def test_adam_is_refused(algorithm: str) -> None:
    with pytest.raises(PlanError, match="has no optimiser 'adam'"):
        train(tiny(), plan(algorithm, optimiser="adam"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timeout": 0.0}, "timeout"),
        ({"optimisers": {"p9": "sgd"}}, "names 'p9'"),
        ({"optimisers": {"p1": "sdg"}}, "did you mean 'sgd'"),
        ({"decay": "linear"}, "unknown decay"),
        ({"proximal": -1.0}, "proximal"),
        ({"timeout": 0.5}, "too short for one local step of p0, which takes 1"),
        ({"speeds": {"p2": 0.2}}, "too short for one local step of p2, which takes 5"),
        ({"speeds": {"server": 0.1}}, "too short for one local step of server"),
        ({"timeout": 1e300}, "room for more than 10000 local steps of p0"),
        ({"delays": "poisson"}, "steps that take no time"),
    ],
)
def test_plans_that_cannot_work(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        train(tiny(), plan(**changes))


def test_a_trace_without_time_is_refused(tmp_path: Any) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"p0": [1.0], "p1": [2.0, 0.0], "p2": [99.0]}))
    with pytest.raises(PlanError, match="more than 10000 local steps of p1, which takes 0"):
        train(tiny(), plan(delays="trace", delay_trace=str(trace)))


def test_a_round_carries_embeddings_to_the_server_and_all_of_them_with_its_model_to_every_party() -> None:
    """Section IV: K (|server's model| + B sum_k O_k) numbers to the parties; B sum_k O_k to the server."""
    data, more = tiny(), 8
    batch, parties = data.n_train, len(data.parties)

    def second(width: int) -> int:
        fields = {"embedding": width, "fusion": "concat", "head": "linear", "label_holder": "server"}
        run = train(data, plan(epochs=3, batch=batch, timeout=2.0, evaluate_every=3, **fields))
        return int(run.metrics[1]["bytes"] - run.metrics[0]["bytes"])

    embeddings = batch * parties * more  # of 4 bytes; what wider embeddings do not change cancels
    model = parties * more  # weights of one output
    assert second(2 + more) - second(2) == 4 * (embeddings + parties * (model + embeddings))
