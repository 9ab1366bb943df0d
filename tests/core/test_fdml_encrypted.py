"""FDML on homomorphic sums: the server adds what it cannot read, and a worker elsewhere has the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_data import tiny
from torch import nn

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.algorithms.channels import build_channel, build_sum
from securevfl.algorithms.fdml import AddingServer, KeyHolder
from securevfl.algorithms.messages import SumRequest
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sums import SumParticipant
from securevfl.attacks.protocol import scan_files
from securevfl.errors import PlanError, ProtocolError, RunError
from securevfl.federation.clock import run_virtual
from securevfl.federation.run import Run
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside
from securevfl.privacy.views import View
from securevfl.protocols.contract import AGGREGATOR
from securevfl.protocols.sums.encryption import Encryption
from securevfl.protocols.sums.homomorphic import HomomorphicNode, HomomorphicSum
from securevfl.settings.protocols import FACTS

PROTOCOLS = ("ckks", "bfv")
HOLDERS = {"party": "p1", "server": "p0"}
"""Label holder -> who has the key: the first worker of another organisation than the server's."""
both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)
both_holders = pytest.mark.parametrize(("holder", "key_holder"), HOLDERS.items())


def plan(**changes: Any) -> Plan:
    given = {
        "epochs": 2,
        "batch": 8,
        "learning_rate": 0.2,
        "protocol": "bfv",
        "record_words": True,
        **changes,
    }
    return Plan.from_flat({"unprotected": True, "algorithm": "fdml", **given})


def vector(run: Run) -> torch.Tensor:
    assert run.head is not None
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[int, HomomorphicNode]:
    """The participants of the sum, by address: what each of them has of the key."""
    found: dict[int, HomomorphicNode] = {}
    build = HomomorphicSum.node

    def noted(self: HomomorphicSum, address: int) -> HomomorphicNode:
        found[address] = build(self, address)
        return found[address]

    monkeypatch.setattr(HomomorphicSum, "node", noted)
    return found


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, np.ndarray]]:
    """Every worker's own predictions, by round of the sum."""
    found: dict[int, dict[str, np.ndarray]] = {}
    join = SumParticipant.join

    async def spy(self: SumParticipant, request: SumRequest, contribution: Contribution) -> None:
        found.setdefault(request.number, {})[self.address] = contribution.values
        await join(self, request, contribution)

    monkeypatch.setattr(SumParticipant, "join", spy)
    return found


# -- who has what -------------------------------------------------------------------------------------------


@both_protocols
@both_holders
def test_only_the_key_holder_can_decrypt(holder: str, key_holder: str, protocol: str, nodes: dict) -> None:
    train(tiny(), plan(protocol=protocol, label_holder=holder, epochs=1))
    private = {address: node.encryption.is_private for address, node in nodes.items()}
    assert private == {AGGREGATOR: False} | {i: f"p{i}" == key_holder for i in range(3)}


@both_protocols
def test_the_server_sees_ciphertexts_and_figures_alone(protocol: str, tmp_path: Path) -> None:
    train(tiny(), plan(protocol=protocol, label_holder="server", record_views=True), tmp_path / "run")
    received = list(View(tmp_path / "run" / "views" / "server").messages(sent=False))
    assert {seen.kind for seen in received} == {"ready", "he-value", "loss", "metrics"}
    for seen in received:
        floats = {name for name, value in seen.fields.items() if isinstance(value, float)}
        arrays = {name for name, value in seen.fields.items() if isinstance(value, np.ndarray | bytes)}
        assert arrays == ({"ciphertexts"} if seen.kind == "he-value" else set())
        assert floats == {"loss": {"value"}, "metrics": {"auc", "accuracy", "loss"}}.get(seen.kind, set())
    assert {seen.sender for seen in received if seen.kind == "he-value"} == {"p0", "p1", "p2"}
    assert {seen.sender for seen in received if seen.kind in ("loss", "metrics")} == {"p0"}


@both_protocols
def test_the_role_of_a_server_with_features_gets_no_sum_either(protocol: str, tmp_path: Path) -> None:
    """p0's organisation has the sums nevertheless, as every worker of FDML: p1 sends them to the worker."""
    train(tiny(), plan(protocol=protocol, record_views=True), tmp_path / "run")
    received = list(View(tmp_path / "run" / "views" / "p0").messages(sent=False))
    to_role = {seen.kind for seen in received if seen.receiver == "server"}
    to_worker = {(seen.kind, seen.sender) for seen in received if seen.receiver == "p0"}
    assert to_role == {"ready", "he-value", "loss", "metrics"}
    assert to_worker == {("he-key", "p1"), ("sum", "p1")}


@both_protocols
@both_holders
def test_the_key_holder_gets_totals_and_no_single_ciphertext(
    holder: str, key_holder: str, protocol: str, tmp_path: Path, predictions: dict
) -> None:
    train(tiny(), plan(protocol=protocol, label_holder=holder, record_views=True), tmp_path / "run")
    view = View(tmp_path / "run" / "views" / key_holder)
    kinds = {seen.kind for seen in view.messages(sent=False)}
    assert kinds == {"labels", "test-labels", "sum-request", "he-total", "opened-total", "end"}
    opened = [seen.fields["values"] for seen in view.messages("opened-total")]
    assert len(opened) == len(predictions) == 2 * 5 + 1
    for numbers in opened:
        for parts in predictions.values():
            assert not any(
                v.shape == numbers.shape and np.allclose(v, numbers, atol=1e-3) for v in parts.values()
            )


@both_holders
def test_books_name_everybody_who_gets_something(holder: str, key_holder: str, tmp_path: Path) -> None:
    data = tiny()
    run = train(data, plan(label_holder=holder), tmp_path / "run")
    server = "p0" if holder == "party" else "server"
    everyone = {"p0", "p1", "p2", server}
    records = read_records(tmp_path / "run")
    for owner in ("p0", "p1", "p2"):
        mine = [r for r in records if r.owner == owner]
        seen = {r.kind: set(r.observers) for r in mine if r.mechanism == "exact" and "labels" not in r.kind}
        # The server's figures are computed from totals, so it is an observer, though no total reaches it.
        assert seen == {"embedding": everyone - {owner}, "evaluation": {key_holder, server} - {owner}}
        passed = [(r.mechanism, r.observers, r.assumption) for r in mine if r.kind == "contributions"]
        assert passed == ([] if owner == server else [("encrypted", (server,), FACTS["bfv"].assumption)])
    (tested,) = [r for r in records if r.kind == "test labels"]
    assert (tested.owner, tested.observers, tested.mechanism) == (server, (key_holder,), "exact")
    assert tested.rows is not None and tested.rows.tolist() == list(range(data.n_train, data.n_train + 10))
    assert f"all test labels, as they are, to {key_holder}" in run.result["labels"]


def test_flipped_labels_are_not_claimed_for_the_test_part() -> None:
    said = train(tiny(), plan(label_epsilon=1.0, epochs=1)).result["labels"]
    assert "test labels, as they are, to p1; randomised response: all else is" in said


@both_holders
def test_an_audit_finds_nothing_outside_the_books(holder: str, key_holder: str, tmp_path: Path) -> None:
    run = train(tiny(), plan(label_holder=holder, record_views=True, epochs=1), tmp_path / "run")
    findings = audit(run, "none", canaries=-1).content["findings"]
    assert findings and "violated" not in {each["verdict"] for each in findings}


# -- what the server could make of its view -----------------------------------------------------------------


def ciphertexts(view: View, encryption: Encryption) -> dict[tuple[int, str], Any]:
    """The single ciphertexts of the server's view, by round and worker."""
    return {
        (seen.fields["round"], seen.sender): encryption.load(bytes(seen.fields["ciphertexts"]))
        for seen in view.messages("he-value", sent=False)
    }


def opened(encryption: Encryption, ciphertext: Any, like: np.ndarray) -> np.ndarray | None:
    """What a key makes of a ciphertext, in the unit of predictions; None where the scheme itself refuses."""
    try:
        numbers = encryption.decrypt(ciphertext)[: like.size].astype(np.float64)
    except ProtocolError:
        return None
    return numbers / (2.0**20 if encryption.parameters.exact else 1.0)


@both_protocols
def test_nothing_in_the_servers_view_decrypts_a_prediction(
    protocol: str, tmp_path: Path, nodes: dict, predictions: dict
) -> None:
    train(
        tiny(), plan(protocol=protocol, label_holder="server", record_views=True, epochs=1), tmp_path / "run"
    )
    assert scan_files(tmp_path / "run") == 0
    view = View(tmp_path / "run" / "views" / "server")
    assert not list(view.messages("he-key"))  # not even the public key
    parameters, key = nodes[0].encryption.parameters, nodes[0].encryption
    guess = Encryption.generate(parameters)
    for (number, worker), ciphertext in ciphertexts(view, key).items():
        truth = predictions[number][worker].ravel()
        # The control: this is the very prediction, to the grid of 2^-20, for whoever has the key.
        found = opened(key, ciphertext, truth)
        assert found is not None and np.abs(found - truth).max() <= 2.0**-20
        with pytest.raises(ProtocolError, match="only the key holder"):
            nodes[AGGREGATOR].encryption.decrypt(ciphertext)
        wrong = opened(guess, guess.load(key.dump(ciphertext)), truth)
        assert wrong is None or not np.any(np.abs(wrong - truth) < 1.0)


def numbers_of(view: View) -> dict[int, list[np.ndarray]]:
    """By round: the numbers of every message that the server received for it; bytes count as numbers too."""
    found: dict[int, list[np.ndarray]] = {}
    for seen in view.messages("he-value", sent=False):
        content = np.frombuffer(seen.fields["ciphertexts"], np.uint8)
        found.setdefault(seen.fields["round"], []).append(content.astype(np.float64))
    return found


def regressors(numbers: list[np.ndarray], count: int) -> np.ndarray:
    """One row per record of a batch, one column per message: the mean of its part at the record's place."""
    columns = [np.zeros(count)]
    for message in numbers:
        parts = np.array_split(message, count) if message.size >= count else [message] * count
        columns.append(np.array([part.mean() for part in parts]))
    return np.stack(columns, axis=1)


def within(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What is left of values without the means of their groups."""
    means = {group: values[groups == group].mean(axis=0) for group in np.unique(groups)}
    return values - np.stack([means[group] for group in groups])


def explained(design: np.ndarray, truth: np.ndarray) -> float:
    """The share of variance that least squares on one half of the rows explains on the other half."""
    design = design / np.maximum(design.std(axis=0), 1e-9)
    half = len(truth) // 2
    weights = np.linalg.lstsq(design[:half], truth[:half], rcond=1e-6)[0]
    rest = truth[half:] - design[half:] @ weights
    return 1 - float((rest**2).mean() / (truth[half:] ** 2).mean())


@both_protocols
def test_least_squares_on_the_servers_view_is_at_chance(
    protocol: str, tmp_path: Path, predictions: dict
) -> None:
    """The view tells the sum of no record; what a worker pulls does, by the same least squares.

    The server has the labels. So what is to be explained is how a record differs from those of its batch with
    the same label.
    """
    data = tiny(rows=250)
    chosen = plan(protocol=protocol, label_holder="server", record_views=True, epochs=4, batch=20)
    train(data, chosen, tmp_path / "run")
    views = {name: View(tmp_path / "run" / "views" / name) for name in ("server", "p1")}
    rows = {
        seen.fields["round"]: seen.fields["rows"]
        for seen in views["server"].messages("sum-request")
        if seen.fields["purpose"] == "embedding"
    }
    groups = np.concatenate([2 * number + data.y_train[rows[number]] for number in rows])
    totals = np.concatenate([sum(predictions[number].values()).ravel() for number in rows])
    pulled = [[seen.fields["values"].ravel()] for seen in views["p1"].messages("sum")]
    seen = {"server": numbers_of(views["server"]), "p1": dict(zip(rows, pulled, strict=True))}
    scores = {}
    for name, numbers in seen.items():
        design = np.concatenate([regressors(numbers[number], len(rows[number])) for number in rows])
        scores[name] = explained(within(groups, design), within(groups, totals))
    # 800 rows and 3 columns with content: by chance -3/400 with a deviation of 2 sqrt(3) / 400 = 0.009.
    assert abs(scores["server"]) < 0.08
    assert scores["p1"] > 0.999


def loss_of(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(np.where(labels > 0, -outputs, outputs)))


def single_losses(batches: list[np.ndarray], losses: list[float], records: int) -> np.ndarray:
    """The loss of each record, by ridge regression on mean losses of batches that are mixed every time."""
    design = np.zeros((len(batches), records))
    for row, batch in enumerate(batches):
        design[row, batch] = 1 / len(batch)
    middle = float(np.mean(losses))
    gram = len(batches[0]) * design.T @ design + 0.01 * np.eye(records)
    return np.asarray(
        middle + np.linalg.solve(gram, len(batches[0]) * design.T @ (np.array(losses) - middle))
    )


@pytest.mark.parametrize("batch", [8, 13])
def test_the_losses_that_the_server_is_told_are_no_system_for_those_of_records(
    batch: int, tmp_path: Path, predictions: dict
) -> None:
    """With the label, a record's loss is its prediction. From mean losses of batches, a few passes long, the
    server would solve for it; it is told one number per pass, in which all records count the same."""
    data, epochs = tiny(), 30
    chosen = plan(
        label_holder="server", batch=batch, epochs=epochs, record_views=True, decay="none", learning_rate=0.1
    )
    run = train(data, chosen, tmp_path / "run")
    view = View(tmp_path / "run" / "views" / "server")
    told = [seen.fields["value"] for seen in view.messages("loss")]
    rounds = [seen.fields for seen in view.messages("sum-request") if seen.fields["purpose"] == "embedding"]
    rows = {fields["round"]: fields["rows"] for fields in rounds}
    true = {
        number: loss_of(sum(predictions[number].values()).ravel(), data.y_train[batch])
        for number, batch in rows.items()
    }
    per_pass = len(rows) // epochs
    passes = [list(rows)[start : start + per_pass] for start in range(0, len(rows), per_pass)]
    assert len(told) == epochs
    for value, numbers in zip(told, passes, strict=True):
        assert value == pytest.approx(np.concatenate([true[n] for n in numbers]).mean(), abs=1e-6)
        assert sorted(np.concatenate([rows[n] for n in numbers])) == list(range(data.n_train))
    assert run.metrics[-1]["loss"] == told[-1]
    last = np.zeros(data.n_train)
    for number in passes[-1]:
        last[rows[number]] = true[number]
    # Why: what the batches' mean losses of the last twenty passes would have told.
    late = [number for numbers in passes[-20:] for number in numbers]
    found = single_losses([rows[n] for n in late], [float(true[n].mean()) for n in late], data.n_train)
    gaps = within(data.y_train, np.stack([found, last], axis=1))
    assert np.corrcoef(gaps.T)[0, 1] > 0.9


# -- the same training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
@both_protocols
@both_holders
def test_the_model_and_the_figures_are_those_of_plain_messages(
    holder: str, key_holder: str, protocol: str, classes: int
) -> None:
    chosen = plan(label_holder=holder, protocol="plain", evaluate_every=1)
    plain = train(tiny(classes=classes), chosen)
    summed = train(tiny(classes=classes), chosen.with_changes(protocol=protocol))
    # The grid is 2^-20: three workers are off by half of that each, in ten steps of rate 0.2 on rows of norm
    # below 6.
    assert float((vector(plain) - vector(summed)).abs().max()) < 1.5 * 2.0**-20 * 10 * 0.2 * 6
    for ours, theirs in zip(summed.metrics, plain.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["test"] == pytest.approx(theirs["test"], abs=1e-5)
        assert {n: ours[n] for n in ("processed", "iterations", "lead")} == {
            n: theirs[n] for n in ("processed", "iterations", "lead")
        }


def test_wire_form_latency_and_speeds_change_nothing() -> None:
    slow = plan(latency=0.7, speeds={"p0": 3.0, "p2": 0.4}, delays="exponential")
    direct, wired = train(tiny(), plan()), train(tiny(), slow.with_changes(settings={"wire": True}))
    assert torch.equal(vector(direct), vector(wired))


@both_holders
def test_resuming_changes_nothing(holder: str, key_holder: str, tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(progress: Any) -> None:
        if progress.epoch == 3 and progress.done > 0.8:
            raise Crash

    chosen = plan(label_holder=holder, epochs=3, optimiser="momentum", evaluate_every=1)
    whole = train(tiny(), chosen)
    with pytest.raises(Crash):
        train(tiny(), chosen, tmp_path / "run", progress=crash)
    resumed = train(tiny(), chosen, tmp_path / "run", resume=True)
    assert torch.equal(vector(whole), vector(resumed))
    assert resumed.test == whole.test and [m["loss"] for m in resumed.metrics] == [
        m["loss"] for m in whole.metrics
    ]


@both_protocols
@both_holders
def test_trained_models_predict(holder: str, key_holder: str, protocol: str, tmp_path: Path) -> None:
    """The label holder asks for a prediction and obtains it, under a key of its own."""
    data = tiny()
    run = train(data, plan(label_holder=holder, protocol=protocol, epochs=1), tmp_path / "run")
    plain = train(data, plan(label_holder=holder, protocol="plain", epochs=1))
    found = run.predict(data.test)
    np.testing.assert_allclose(found, plain.predict(data.test), atol=1e-5)
    np.testing.assert_array_equal(found, load_run(tmp_path / "run").predict(data.test))
    server = "p0" if holder == "party" else "server"
    asked = [r for r in read_records(tmp_path / "run") if r.kind == "prediction"]
    assert asked and {r.observers for r in asked} == {(server,)}


@pytest.mark.parametrize("task", ["regression", "multiclass"])
def test_other_tasks_are_measured_by_the_key_holder(task: str) -> None:
    generator = np.random.default_rng(2)
    blocks = [generator.normal(size=(60, 2)) for _ in range(3)]
    score = sum(block[:, 0] for block in blocks)
    labels = {"regression": score, "multiclass": np.digitize(score, [-1, 1]).astype(float)}[task]
    data = VerticalData.from_arrays(blocks, labels, task=task)
    ours, theirs = train(data, plan()), train(data, plan(protocol="plain"))
    assert ours.test == pytest.approx(theirs.test, abs=1e-5)


# -- noise --------------------------------------------------------------------------------------------------


class Silent(nn.Module):
    """An encoder whose predictions are zeros, so that sums are pure noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.output(rows)


@pytest.mark.parametrize(("protocol", "shares"), [("bfv", 3 / 2), ("ckks", 3)])
@both_holders
def test_every_workers_noise_is_in_the_sum_the_key_holders_too(
    holder: str, key_holder: str, protocol: str, shares: float, tmp_path: Path
) -> None:
    """Distributed: a share of everybody, sized for two honest workers. Otherwise all three add all of it."""
    data = tiny(rows=1500)
    chosen = plan(protocol=protocol, sigma=2.0, label_holder=holder, epochs=1, batch=1200, record_views=True)
    encoders = {name: Silent(width) for name, width in zip(data.parties, data.widths, strict=True)}
    train(data, chosen, tmp_path / "run", encoders=encoders)
    (handed,) = View(tmp_path / "run" / "views" / "p2").messages("sum")
    noise = handed.fields["values"].ravel()
    # The standard deviation of n Gaussians has standard error std / sqrt(2n); 6 of them: 2e-9.
    expected = 2.0 * np.sqrt(shares)
    assert abs(noise.std() - expected) < 6 * expected / np.sqrt(2 * noise.size)
    paid = [r for r in read_records(tmp_path / "run") if r.owner == key_holder and r.kind != "contributions"]
    released = {r.kind: r.vectors for r in paid if r.mechanism == "gaussian"}
    assert released == {"embedding": data.n_train, "evaluation": data.n_test}


@both_holders
def test_a_budget_ends_training_and_leaves_enough_to_measure(holder: str, key_holder: str) -> None:
    run = train(tiny(), plan(label_holder=holder, sigma=20.0, budget_epsilon=8.0, epochs=40))
    assert run.stopped is not None and run.stopped.startswith("budget")
    assert run.test["loss"] is not None
    assert run.privacy["p2"]["epsilon"] <= 8.0


# -- refusals -----------------------------------------------------------------------------------------------


@both_protocols
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("parties", [1, 2])
def test_two_workers_are_too_few_whoever_has_the_labels(parties: int, holder: str, protocol: str) -> None:
    with pytest.raises(PlanError, match="at least 3 parties"):
        train(tiny(parties=parties), plan(protocol=protocol, label_holder=holder))


def test_parts_of_one_record_are_refused() -> None:
    data = tiny()
    alone = ([block[:1] for block in data.test], data.y_test[:1])
    with pytest.raises(PlanError, match="a test part of 1 would tell the prediction"):
        train(VerticalData.from_arrays(list(data.train), data.y_train, test=alone), plan())


def test_staleness_is_refused() -> None:
    with pytest.raises(PlanError, match="set staleness to 0"):
        train(tiny(), plan(staleness=1))


def test_only_encrypted_sums_have_somebody_who_adds() -> None:
    with pytest.raises(PlanError, match="nobody who adds ciphertexts"):
        build_sum("pairwise", workers=3, receiver=0, collusion=1, aggregator=AGGREGATOR)
    carrier = VirtualCarrier(*resolve(plan(), tiny()))
    channel = build_channel(carrier.home.setup, "p1", hands_on=True, aggregator="server")
    assert channel.places == {0: "p0", 1: "p1", 2: "p2", AGGREGATOR: "server"}
    assert channel.handlers("p0") == () and channel.handlers("p1") == channel.handlers("p2") == ("p0",)


@pytest.fixture
def roles() -> dict[str, Any]:
    carrier = VirtualCarrier(*resolve(plan(), tiny()))
    return {role.address: role for role in carrier.roles}


def hearing(role: Any, *messages: Packet) -> None:
    """Lets a role receive these messages instead of any others."""
    waiting = list(messages)

    async def receive() -> Packet:
        return waiting.pop(0)

    role.sums.receive = receive


def message(kind: str, sender: str, **fields: Any) -> Packet:
    """As a link gives it to a role."""
    rows = fields.get("rows")
    return Packet(kind=kind, sender=sender, receiver="server", fields=fields, rows=rows)


def test_roles_are_where_they_belong(roles: dict[str, Any]) -> None:
    assert isinstance(roles["server"], AddingServer) and isinstance(roles["p1"], KeyHolder)
    assert {roles[name].source for name in ("p0", "p1", "p2")} == {"p1"}
    assert roles["server"].local_predictions.values.numel() == 0


@pytest.mark.parametrize(
    ("kind", "sender", "fields", "words"),
    [
        ("loss", "p2", {"round": 0, "value": 0.5}, "'loss' from p2 out of turn"),
        ("metrics", "p1", {"auc": 0.5}, "'metrics' from p1 out of turn"),
        ("loss", "p1", {"round": 1, "value": 0.5}, "no loss of the pass up to round 0"),
        ("loss", "p1", {"round": 0, "value": None}, "not a number"),
        ("ready", "p2", {"iteration": 2}, "'ready' from p2 out of turn"),
        ("loss", "p1", {"round": 0, "value": np.zeros(3)}, "not a number"),
        ("loss", "p1", {"round": 0, "value": "small"}, "not a number"),
    ],
)
def test_the_server_takes_figures_from_the_key_holder_alone(
    roles: dict[str, Any], kind: str, sender: str, fields: dict[str, Any], words: str
) -> None:
    server = roles["server"]
    server.sums.number = 0

    async def take() -> None:
        server.link.deliver(message(kind, sender, **fields))
        await server._hear_loss()

    with pytest.raises(ProtocolError, match=words):
        run_virtual(take())


@pytest.mark.parametrize(("kind", "sender"), [("sum", "server"), ("sum", "p0"), ("loss", "p1")])
def test_workers_take_sums_from_the_key_holder_alone(roles: dict[str, Any], kind: str, sender: str) -> None:
    worker, values = roles["p2"], np.zeros((3, 1), np.float32)
    released = Inside(values=values, source=torch.zeros(3, 1))

    async def upload(*args: Any, **options: Any) -> tuple[Packet, Inside]:
        return message(kind, sender, values=values), released

    worker._upload = upload
    with pytest.raises(ProtocolError, match=f"{kind!r} from {sender} out of turn"):
        run_virtual(worker._pull(np.arange(3)))


@pytest.mark.parametrize("rows", [[0, 1], [41, 42], list(range(40, 51)), [40, 40]])
def test_the_key_holder_measures_the_test_part_in_its_order_and_nothing_else(
    roles: dict[str, Any], rows: list[int]
) -> None:
    """A server that asks for one record after another, or for other records, gets no figures of them."""
    key_holder = roles["p1"]
    fields = {"channel": "p1", "round": 0, "rows": np.array(rows), "purpose": "evaluation", "for": "p1"}
    with pytest.raises(ProtocolError, match="other records than the test part's next"):
        run_virtual(key_holder._sum_evaluation(message("sum-request", "server", **fields)))


def test_states_of_workers_without_the_key_are_refused(roles: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="start the run anew"):
        roles["p1"].gate.load(roles["p2"].gate.state())


def test_labels_come_from_the_server_alone(roles: dict[str, Any]) -> None:
    labels = np.zeros(40, np.float32)
    with pytest.raises(ProtocolError, match="p0 may not send 'labels'"):
        roles["p2"].link.deliver(message("labels", "p0", values=labels))

    async def prepare() -> None:
        roles["p2"].link.deliver(message("labels", "server", values=labels[1:]))
        await roles["p2"].prepare()

    with pytest.raises(ProtocolError, match="not one per record"):
        run_virtual(prepare())
