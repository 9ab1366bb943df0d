"""FDML without a server: workers push predictions to each other and add them up themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_data import tiny

from securevfl import Plan, audit, train
from securevfl.algorithms.fdml import LabelKeeper, PeerWorker
from securevfl.algorithms.resolve import resolve
from securevfl.errors import PlanError, ProtocolError
from securevfl.federation.clock import run_virtual
from securevfl.federation.run import Run
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.views import View

PARTIES = ("p0", "p1", "p2")
UNEQUAL: dict[str, Any] = {"speeds": {"p0": 3.0, "p2": 0.4}, "delays": "exponential"}


def plan(**changes: Any) -> Plan:
    usual = {"epochs": 3, "batch": 7, "learning_rate": 0.3, "decay": "none", "unprotected": True}
    return Plan.from_flat({"algorithm": "fdml", "decentralised": True, **usual, **changes})


def vector(run: Run) -> torch.Tensor:
    assert run.head is not None
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


# -- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("parties", [1, 2, 3])
def test_without_staleness_it_is_centralised_sgd(parties: int, classes: int) -> None:
    data = tiny(parties=parties, classes=classes)
    speeds = {name: 0.4 + at for at, name in enumerate(data.parties)}
    ours = train(data, plan(speeds=speeds, latency=0.7, delays="exponential"))
    central = plan(fusion="sum", head="sum", decentralised=False)
    theirs = train(data, central.with_changes(algorithm="central", embedding=data.outputs))
    # 18 float32 steps of size below 1: each rounds by at most 2^-24, and the gradients agree to that too.
    assert float((vector(ours) - vector(theirs)).abs().max()) < 1e-6
    assert ours.test["accuracy"] == theirs.test["accuracy"]


@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("staleness", [1, 4])
def test_messages_that_take_no_time_give_the_server_s_run(staleness: int, model: str) -> None:
    """Everybody then has at every moment the predictions that a server would have."""
    chosen = plan(staleness=staleness, model=model, optimiser="momentum", **UNEQUAL)
    ours = train(tiny(), chosen)
    theirs = train(tiny(), chosen.with_changes(settings={"decentralised": False}))
    assert theirs.metrics[-1]["lead"] > 0
    assert torch.equal(vector(ours), vector(theirs))
    assert ours.test == theirs.test


def test_drawn_records_are_never_used_ahead_of_their_turn() -> None:
    """A record may be in two batches that follow each other; the push for the second may come too early."""
    chosen = plan(sampling="draws", **UNEQUAL)
    soon, late = train(tiny(), chosen), train(tiny(), chosen.with_changes(settings={"latency": 0.9}))
    assert torch.equal(vector(soon), vector(late))


def test_the_loss_is_that_of_the_label_holders_sums() -> None:
    """At a rate of nearly nothing everybody predicts the same in every pass; those of the first come late."""
    run = train(tiny(), plan(learning_rate=1e-30, staleness=2, batch=8, speeds={"p0": 50.0}))
    central = plan(learning_rate=1e-30, batch=8, decentralised=False).with_changes(algorithm="central")
    pooled = train(tiny(), central.with_changes(fusion="sum", head="sum", embedding=1))
    losses = [line["loss"] for line in run.metrics]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert losses[1:] == pytest.approx([pooled.metrics[-1]["loss"]] * 2)
    assert run.metrics[-1]["processed"] == 3 * 3 * 40


def test_resuming_changes_nothing(tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(progress: Any) -> None:
        if progress.epoch == 3:
            raise Crash

    chosen = plan(staleness=2, decay="sqrt", optimiser="momentum", latency=0.3, **UNEQUAL)
    whole = train(tiny(), chosen)
    with pytest.raises(Crash):
        train(tiny(), chosen, tmp_path / "run", progress=crash)
    resumed = train(tiny(), chosen, tmp_path / "run", resume=True)
    assert torch.equal(vector(whole), vector(resumed))
    assert resumed.test == whole.test


# -- who sees what ------------------------------------------------------------------------------------------


def lead(view: View, mine: str) -> int:
    """How far a worker was ahead of the slowest when it stepped, at most, by its own messages alone."""
    heard: Counter[str] = Counter(dict.fromkeys(set(PARTIES) - {mine}, 0))
    done, largest = 0, 0
    for seen in view:
        if seen.kind != "embedding" or "iteration" not in seen.fields:
            continue
        if not seen.sent:
            heard[seen.sender] = seen.fields["iteration"]
        elif seen.fields["iteration"] > done + 1:  # so the step before it has been made
            done = seen.fields["iteration"] - 1
            largest = max(largest, done - min(heard.values()))
    return largest


@settings(max_examples=8)
@given(
    staleness=st.integers(0, 6),
    speeds=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    delays=st.sampled_from(["constant", "exponential", "poisson"]),
    latency=st.floats(0, 2),
)
def test_no_worker_steps_beyond_the_bound(
    tmp_path_factory: pytest.TempPathFactory,
    staleness: int,
    speeds: list[float],
    delays: str,
    latency: float,
) -> None:
    out = tmp_path_factory.mktemp("run") / "run"
    pace = {"speeds": dict(zip(PARTIES, speeds, strict=True)), "delays": delays, "latency": latency}
    train(tiny(), plan(staleness=staleness, record_views=True, **pace), out)
    assert all(lead(View(out / "views" / party), party) <= staleness for party in PARTIES)


def test_the_bound_is_used(tmp_path: Path) -> None:
    train(tiny(), plan(staleness=3, speeds={"p1": 50.0}, record_views=True), tmp_path / "run")
    assert lead(View(tmp_path / "run" / "views" / "p1"), "p1") == 3


def test_in_training_the_label_holder_hears_no_more_than_anybody(tmp_path: Path) -> None:
    train(tiny(), plan(record_views=True, epochs=1), tmp_path / "run")
    seen = {party: list(View(tmp_path / "run" / "views" / party)) for party in PARTIES}
    for party in PARTIES:
        others = tuple(name for name in PARTIES if name != party)
        training = [each for each in seen[party] if each.kind == "embedding" and "iteration" in each.fields]
        assert Counter((each.sender, each.receiver) for each in training) == Counter(
            {pair: 6 for other in others for pair in ((party, other), (other, party))}
        )
        assert not [each for each in seen[party] if each.kind in ("sum", "loss")]
    to_server = [each for each in seen["p1"] if each.receiver == "server" or each.sender == "server"]
    assert {each.kind for each in to_server} == {"labels", "embed", "embedding", "end"}
    assert all("iteration" not in each.fields for each in to_server)


def test_what_is_pushed_is_counted_once_for_all_that_see_it(tmp_path: Path) -> None:
    run = train(tiny(), plan(sigma=2.0, record_views=True), tmp_path / "run")
    records = read_records(tmp_path / "run")
    for owner in PARTIES:
        pushes = [each for each in records if each.owner == owner and each.kind == "embedding"]
        assert {each.observers for each in pushes} == {tuple(name for name in PARTIES if name != owner)}
        assert {each.mechanism for each in pushes} == {"gaussian"}
        assert sum(each.vectors for each in pushes) == 3 * 40
    assert run.privacy["p1"]["mu"] == pytest.approx(2 * 1.0 / 2.0 * np.sqrt(3 * 40 + 10))
    for other in ("p0", "p2"):
        mine = [s for s in View(tmp_path / "run" / "views" / "p1") if s.sent and s.receiver == other]
        theirs = [s for s in View(tmp_path / "run" / "views" / other) if s.receiver == other]
        theirs = [s for s in theirs if s.sender == "p1"]
        for left, right in zip(mine, theirs, strict=True):
            if left.kind == "embedding" and "iteration" in left.fields:
                assert np.array_equal(left.fields["values"], right.fields["values"])


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "holds"), (0.5, "violated")])
def test_an_audit_looks_at_what_every_other_worker_saw(
    share: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Noise.gaussian
    monkeypatch.setattr(Noise, "gaussian", lambda self, shape, std: honest(self, shape, std * share))
    train(tiny(), plan(sigma=20.0, record_views=True), tmp_path / "run")
    report = audit(tmp_path / "run", "none", canaries=-1, isolated=False, data=tiny())
    found = {(owner, observer): cell["verdict"] for owner, observer, cell in report.cells()}
    others = [("p1", "p0"), ("p1", "p2"), ("p2", "p0"), ("p2", "p1")]
    assert {each: found[each] for each in others} == dict.fromkeys(others, verdict)


# -- faults -------------------------------------------------------------------------------------------------


def worker(staleness: int = 0) -> Any:
    """p0 in its first iteration, with p1 and p2 beside it."""
    found = VirtualCarrier(*resolve(plan(staleness=staleness), tiny())).roles[1]
    assert isinstance(found, PeerWorker)
    found._pass = [found.batches.next() for _ in range(found.batches.per_pass)]
    found.iteration = 1
    return found


def push(role: Any, iteration: int = 1, sender: str = "p1", **fields: Any) -> Packet:
    good: dict[str, Any] = {"iteration": iteration, "values": np.ones((7, 1), np.float32)}
    good["rows"] = role._pass[min(iteration, 6) - 1]
    return Packet(kind="embedding", sender=sender, receiver="p0", fields=good | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"iteration": 2}, "p1 pushes iteration 2 to p0; 1 is its next"),
        ({"iteration": 0}, "p1 pushes iteration 0"),
        ({"rows": np.arange(7)}, "p1 uploads other records"),
        ({"values": np.zeros((7, 2), np.float32)}, "p1 sent vectors of shape"),
        ({"sender": "p0"}, "p0, which is no other worker"),
        ({"sender": "server"}, "server, which is no other worker"),
    ],
)
def test_a_worker_refuses_what_the_schedule_does_not_say(fields: dict[str, Any], words: str) -> None:
    role = worker()
    with pytest.raises(ProtocolError, match=words):
        role._read(push(role, **fields))
    assert role.pushed == {"p1": 0, "p2": 0}
    assert role._read(push(role)).iteration == 1


@pytest.mark.parametrize("staleness", [0, 2, 9])
def test_whoever_runs_further_ahead_than_it_can_have_been_answered_is_refused(staleness: int) -> None:
    role = worker(staleness)
    last = min(1 + staleness + 1, 6)
    for iteration in range(1, last + 1):
        rows = role._pass[iteration - 1]
        role._read(push(role, iteration, values=np.ones((len(rows), 1), np.float32)))
    with pytest.raises(ProtocolError, match=f"pushes iteration {last + 1}.*{last} the last that may come"):
        role._read(push(role, last + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "pairwise"}, "take 'plain', or algorithm 'afsgd'"),
        ({"protocol": "bfv"}, "take 'plain', or algorithm 'afsgd'"),
        ({"label_holder": "server"}, "labels are at 'server', which has no features"),
    ],
)
def test_plans_that_need_a_server_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        train(tiny(), plan(**changes))


def test_a_label_holder_without_features_is_refused() -> None:
    with pytest.raises(PlanError, match="labels are at 'clinic', which has no features"):
        train(replace(tiny(), label_holder="clinic"), plan())


def test_the_label_holder_believes_its_own_worker_alone() -> None:
    carrier = VirtualCarrier(*resolve(plan(), tiny()))
    assert isinstance(carrier.server, LabelKeeper)
    loss = Packet(kind="loss", sender="p1", receiver="server", fields={"value": 0.5})
    carrier.server.link.deliver(loss)
    with pytest.raises(ProtocolError, match="due is 'loss' from p0"):
        run_virtual(carrier.server._train())
