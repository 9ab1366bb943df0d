"""FDML: equal to centralised training where it must be, and never more stale than allowed."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_data import tiny
from torch import nn

from securevfl import Plan, VerticalData, train
from securevfl.algorithms.fdml import FDMLServer, FDMLWorker, output_gradient
from securevfl.algorithms.messages import Embedding
from securevfl.errors import EgressError, PlanError, ProtocolError
from securevfl.federation.run import Run
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet
from securevfl.privacy.passing import computed
from securevfl.privacy.payloads import Inside
from securevfl.privacy.views import View


def plan(**changes: Any) -> Plan:
    usual = {
        "unprotected": True,
        "algorithm": "fdml",
        "epochs": 3,
        "batch": 7,
        "learning_rate": 0.3,
        "decay": "none",
    }
    return Plan.from_flat({"algorithm": "vafl", "unprotected": True, **usual, **changes})


def weights(run: Run) -> dict[str, torch.Tensor]:
    parts = {party: module.state_dict() for party, module in run.encoders.items()}
    assert run.head is not None
    parts["server"] = run.head.state_dict()
    return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}


def largest_difference(left: Run, right: Run) -> float:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_one_worker_is_centralised_sgd(model: str, optimiser: str) -> None:
    data = tiny(parties=1)
    ours = train(data, plan(model=model, staleness=5, decay="sqrt", optimiser=optimiser))
    central = plan(model=model, decay="sqrt", optimiser=optimiser, fusion="sum", head="sum", embedding=1)
    theirs = train(data, central.with_changes(algorithm="central"))
    # 18 float32 steps of size below 1: each rounds by at most 2^-24, and the gradients agree to that too.
    assert largest_difference(ours, theirs) < 1e-6
    assert ours.test["auc"] == theirs.test["auc"]
    assert ours.privacy == {}


@pytest.mark.parametrize("classes", [2, 4])
def test_without_staleness_it_is_synchronous(classes: int) -> None:
    data = tiny(classes=classes)
    unequal = plan(staleness=0, speeds={"p0": 3.0, "p2": 0.4}, latency=0.7, delays="exponential")
    ours = train(data, unequal)
    central = plan(fusion="sum", head="sum").with_changes(algorithm="central", embedding=data.outputs)
    assert largest_difference(ours, train(data, central)) < 1e-6
    assert ours.metrics[-1]["lead"] == 0


@pytest.mark.parametrize("decay", ["none", "sqrt"])
def test_one_worker_against_a_loop_written_out(decay: str) -> None:
    """The same training without any of our code but the initial model and the order of records."""
    data = tiny(parties=1)
    run = train(data, plan(l2=0.01, scaling="none", decay=decay))
    again = train(data, plan(l2=0.01, scaling="none").with_changes(learning_rate=1e-30))
    module = nn.Linear(3, 1)
    with torch.no_grad():
        module.weight.copy_(weights(again)["p0.output.weight"])
        module.bias.zero_()
    groups = [{"params": [module.weight], "weight_decay": 0.01}, {"params": [module.bias]}]  # a free bias
    optimiser = torch.optim.SGD(groups, lr=0.3)
    from securevfl.models.seeds import numpy_generator

    order = numpy_generator(0, "batches", 0)
    inputs, labels = torch.from_numpy(np.array(data.train[0])), torch.from_numpy(np.array(data.y_train))
    step = 0
    for _ in range(3):
        for rows in np.split(order.permutation(40), range(7, 40, 7)):
            step += 1
            if decay == "sqrt":  # Proposition 1: eta / sqrt(t)
                for group in optimiser.param_groups:
                    group["lr"] = 0.3 / np.sqrt(step)
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(
                module(inputs[rows])[:, 0], labels[rows]
            ).backward()
            optimiser.step()
    assert torch.allclose(weights(run)["p0.output.weight"], module.weight, atol=1e-6)
    assert torch.allclose(weights(run)["server.bias"], module.bias, atol=1e-6)


def replay(view: View) -> tuple[int, Counter[str]]:
    """The largest lead of an answered pull, from the server's own messages alone."""
    pushed: Counter[str] = Counter()
    calls: dict[tuple[str, int], int] = {}
    largest = 0
    for seen in view:
        if seen.kind == "embedding" and not seen.sent and "iteration" in seen.fields:
            pushed[seen.sender] = seen.fields["iteration"]
            calls[seen.sender, seen.number] = seen.fields["iteration"]
        elif seen.kind == "sum" and seen.sent:
            slowest = min(pushed[party] for party in ("p0", "p1", "p2"))
            largest = max(largest, calls[seen.receiver, seen.reply_to] - slowest)
    return largest, pushed


@settings(max_examples=8)
@given(
    staleness=st.integers(0, 6),
    speeds=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    delays=st.sampled_from(["constant", "exponential", "poisson"]),
)
def test_no_pull_is_answered_beyond_the_bound(
    tmp_path_factory: pytest.TempPathFactory, staleness: int, speeds: list[float], delays: str
) -> None:
    out = tmp_path_factory.mktemp("run") / "run"
    chosen = plan(
        staleness=staleness,
        delays=delays,
        speeds=dict(zip(("p0", "p1", "p2"), speeds, strict=True)),
        record_views=True,
        label_holder="server",
    )
    run = train(tiny(), chosen, out)
    largest, pushed = replay(View(out / "views" / "server"))
    assert largest <= staleness
    # Sums leave the server in the order in which it computes them, without latency at the same instant.
    assert run.metrics[-1]["lead"] <= staleness
    assert set(pushed.values()) == {18}


def test_the_bound_is_used() -> None:
    run = train(tiny(), plan(staleness=3, speeds={"p1": 50.0}))
    assert run.metrics[-1]["lead"] == 3
    assert run.metrics[-1]["processed"] == 3 * 3 * 40


def test_everybody_observes_and_the_label_holder_is_gated(tmp_path: Any) -> None:
    run = train(tiny(), plan(sigma=2.0, record_views=True), tmp_path / "run")
    records = read_records(tmp_path / "run")
    for owner, others in (("p0", ("p1", "p2")), ("p1", ("p0", "p2")), ("p2", ("p0", "p1"))):
        pushes = [r for r in records if r.owner == owner and r.kind == "embedding"]
        assert {r.observers for r in pushes} == {others}
        assert {r.mechanism for r in pushes} == {"gaussian"}
        assert sum(r.vectors for r in pushes) == 3 * 40
    assert "shared" in run.result["labels"] and "p1, p2" in run.result["labels"]
    assert run.privacy["p1"]["mu"] == pytest.approx(2 * 1.0 / 2.0 * np.sqrt(3 * 40 + 10))
    assert run.privacy["p0"]["mu"] is None


def test_what_a_worker_pulls_is_the_sum_of_what_was_released(tmp_path: Any) -> None:
    """With two parties the pulled sum minus one's own push is the other's noisy prediction, and only that."""
    train(tiny(parties=2), plan(sigma=2.0, record_views=True), tmp_path / "run")
    mine = [s for s in View(tmp_path / "run" / "views" / "p1") if s.kind in ("embedding", "sum")]
    pushes = {s.number: s.fields["values"] for s in mine if s.sent and "iteration" in s.fields}
    others = [s.fields["values"] - pushes[s.reply_to] for s in mine if s.kind == "sum"]
    spread = np.concatenate(others).std()
    # Predictions are clipped to 1, so their variance is at most 1; the rest is noise of std 2. With 120
    # values the sample deviation of the noise alone lies within 2 +- 5 * 2 / sqrt(240) (five deviations).
    assert 2 - 0.65 < spread < np.sqrt(5) + 0.75


def test_resuming_changes_nothing(tmp_path: Any) -> None:
    class Crash(Exception):
        pass

    def crash(progress: Any) -> None:
        if progress.epoch == 3:
            raise Crash

    chosen = plan(staleness=2, speeds={"p1": 3.0}, decay="sqrt", optimiser="momentum")
    whole = train(tiny(), chosen)
    with pytest.raises(Crash):
        train(tiny(), chosen, tmp_path / "run", progress=crash)
    resumed = train(tiny(), chosen, tmp_path / "run", resume=True)
    assert largest_difference(whole, resumed) == 0.0
    assert resumed.test == whole.test


def test_private_updates_are_counted() -> None:
    run = train(
        tiny(), plan(encoder_training="dp", sigma=5.0, gradient_sigma=4.0, scaling="none", staleness=1)
    )
    # A record is released and updated three times, and evaluated never: 3 (2/5)^2 + 3 (2/4)^2.
    assert run.privacy["p1"]["mu"] == pytest.approx(np.sqrt(3 * 0.16 + 3 * 0.25))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fusion": "concat"}, "sums local predictions"),
        ({"head": "linear"}, "sums local predictions"),
        ({"embedding": 4}, "have 1 values"),
        ({"encoder_training": "none", "scaling": "none"}, "nothing would learn"),
        ({"private_labels": True}, "private_labels is a setting of flex, not of fdml"),
        ({"optimiser": "proximal"}, "has no optimiser"),
        ({"staleness": -1}, "negative"),
    ],
)
def test_plans_that_cannot_work(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        train(tiny(), plan(**changes))


def test_a_head_is_refused() -> None:
    with pytest.raises(PlanError, match="do not give a head"):
        train(tiny(), plan(), head=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"iteration": 2}, "pushes iteration 2"),
        ({"rows": np.arange(7)}, "other records"),
        ({"values": np.zeros((7, 2), np.float32)}, "shape"),
    ],
)
def test_the_server_refuses_what_the_schedule_does_not_say(fields: dict[str, Any], words: str) -> None:
    server = _server(tiny())
    rows = _server(tiny()).batches.next()
    good: dict[str, Any] = {"iteration": 1, "rows": rows, "values": np.zeros((7, 1), np.float32)}
    message = Packet(kind="embedding", sender="p1", receiver="server", fields={**good, **fields})
    with pytest.raises(ProtocolError, match=words):
        server._push(message)


def _server(data: VerticalData) -> Any:
    from securevfl.algorithms.resolve import resolve
    from securevfl.federation.virtual import VirtualCarrier

    return VirtualCarrier(*resolve(plan(), data)).server


def test_gradient_of_the_sum_is_the_residual() -> None:
    outputs, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 0.0])
    expected = (torch.sigmoid(outputs) - labels[:, None]) / 2
    assert torch.allclose(output_gradient("binary", outputs, labels), expected)


# -- handing on ---------------------------------------------------------------------------------------------


def _features(role: Any, rows: Any) -> Any:
    return role.setup.data.train[0][rows].astype(np.float32)


def _labels(role: Any, rows: Any) -> Any:
    return role.setup.data.y_train[rows].astype(np.float32)[:, None]


def _shifted(role: Any, rows: Any) -> Any:
    """The right sum, with a label in the last digits of every value."""
    return role.local_predictions.sums(role._index(rows)).values + 1e-5 * _labels(role, rows)


@pytest.mark.parametrize("secret", [_features, _labels, _shifted])
@pytest.mark.parametrize("way", ["array", "source", "table"])
def test_a_server_that_hands_on_its_own_data_is_stopped(
    way: str, secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role with a fault: it puts something of its own where the sum of predictions belongs."""
    honest, sent = FDMLServer._send_sum, []

    async def faulty(self: Any, pull: Any, total: Any, outputs: Any) -> None:
        values = secret(self, pull.rows)
        sent.append((total.values.copy(), values))
        if way == "array":
            total = values
        elif way == "source":
            total.source[:] = torch.from_numpy(values[:, :1])
        else:
            own = Embedding(rows=pull.rows, values=Inside(values=values[:, :1]))
            await self.setup.links["p0"].send("server", own)
            self.local_predictions.put((await self.link.receive()).arrived, self._index(pull.rows), 0)
            total = self.local_predictions.sums(self._index(pull.rows))
        await honest(self, pull, total, outputs)

    monkeypatch.setattr(FDMLServer, "_send_sum", faulty)
    seen: list[Any] = []
    kept = FDMLWorker._pull

    async def watched(self: Any, rows: Any) -> Any:
        outputs, released = await kept(self, rows)
        seen.append(outputs.numpy())
        return outputs, released

    monkeypatch.setattr(FDMLWorker, "_pull", watched)
    if way == "source":
        train(tiny(), plan(epochs=1))  # the tensor is the role's own copy
        assert seen and all(any(np.array_equal(each, true) for true, _ in sent) for each in seen)
    else:
        with pytest.raises(EgressError, match=r"cannot be handed on|own part of a sum was not let out"):
            train(tiny(), plan(epochs=1))
        assert seen == []


def test_a_key_holder_that_tells_more_than_the_loss_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(function: Any, *given: Any, **words: str) -> Any:
        return computed(lambda *args: function(*args) + 1.0, *given, **words)

    monkeypatch.setattr("securevfl.algorithms.fdml.computed", faulty)
    with pytest.raises(EgressError, match="is not task_loss"):
        train(tiny(), plan(epochs=1, protocol="bfv", staleness=0))
