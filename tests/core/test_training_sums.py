"""Secure sums in training: what is summed, who sees what, what the ledger says, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from securevfl import Plan, VerticalData, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.algorithms.channels import BUILDERS, build_channel, build_sum
from securevfl.algorithms.exchange import READABLE
from securevfl.algorithms.messages import SumRequest
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.algorithms.vafl import VAFLServer
from securevfl.errors import (
    BudgetExceeded,
    DeadlockError,
    DropoutError,
    PlanError,
    ProtocolError,
    TrainingDiverged,
)
from securevfl.federation.clock import run_virtual
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.ledger import read_records
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside
from securevfl.privacy.views import View
from securevfl.protocols.ring import FixedPoint
from securevfl.settings.protocols import FACTS, HIDING, PROTOCOLS

SUMS = tuple(name for name in PROTOCOLS if name != "plain")
EXACT = ("two-tree", "pairwise", "bfv")
TINY = "synthetic:rows=150,features=12,informative=6"
FAMILY = ("vafl", "vafl-tsync", "vafl-sync")


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    return VerticalData.load(TINY, parties=4)


def weights_of(run) -> np.ndarray:
    modules = [*run.encoders.values(), run.head]
    return np.concatenate([p.detach().numpy().ravel() for module in modules for p in module.parameters()])


def plan_of(**changes) -> Plan:
    return Plan.from_flat({"algorithm": "vafl", "unprotected": True, "epochs": 2, "batch": 30, **changes})


# -- the totals are right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "holder"), [*((name, "party") for name in FAMILY), ("vafl-sync", "server")]
)
def test_all_protocols_train_the_same_model(algorithm: str, holder: str, tiny: VerticalData) -> None:
    runs = {
        protocol: train(tiny, plan_of(algorithm=algorithm, protocol=protocol, label_holder=holder, epochs=1))
        for protocol in SUMS
    }
    reference = weights_of(runs["plain-tree"])
    for run in runs.values():
        # BFV rounds to 2^-20, the coarsest: totals off by 2 * 2^-20, gradients by a quarter, over at most 16
        # steps of rate 0.1 on features below 12.
        np.testing.assert_allclose(weights_of(run), reference, atol=2 * 2**-20 / 4 * 16 * 0.1 * 12)


def test_synchronous_sums_equal_centralised_training(tiny: VerticalData) -> None:
    plan = plan_of(algorithm="vafl-sync", protocol="two-tree", learning_rate=0.1)
    central = train(tiny, plan.with_changes(algorithm="central", protocol="plain", fusion="sum", head="sum"))
    # 8 steps in float32 on weights of order 1, and rounding to 2^-32 in the sums.
    np.testing.assert_allclose(weights_of(train(tiny, plan)), weights_of(central), atol=8 * 2**-21)


@pytest.mark.parametrize("protocol", SUMS)
def test_wire_form_changes_nothing(protocol: str, tiny: VerticalData) -> None:
    plan = plan_of(epochs=1, protocol=protocol, latency=0.25)
    direct, wired = train(tiny, plan), train(tiny, plan.with_changes(settings={"wire": True}))
    if protocol == "ckks":  # its error is fresh in every run, of size 1e-9
        np.testing.assert_allclose(weights_of(direct), weights_of(wired), atol=1e-6)
        return
    assert np.array_equal(weights_of(direct), weights_of(wired))
    assert direct.result["messages"] == wired.result["messages"]


def test_messages_may_arrive_before_the_announcement(tiny: VerticalData) -> None:
    """With latency, subtotals of the near overtake the announcement to the far; nothing is lost."""
    plan = plan_of(algorithm="afsgd", protocol="two-tree", latency=0.4, delays="exponential")
    assert train(tiny, plan).result["epochs"] == 2


# -- who sees what ----------------------------------------------------------------------------------------


def masked_words(folder: Path, observer: str) -> np.ndarray:
    view = View(folder / "views" / observer)
    fields = {"tree.subtotal": "total", "pairwise.masked-input": "values"}
    found = [seen.fields[fields[seen.kind]] for seen in view.messages(*fields, sent=False)]
    return np.concatenate([words.ravel() for words in found]) if found else np.zeros(0, np.uint64)


@pytest.mark.parametrize(
    ("protocol", "observers"), [("two-tree", ("p0", "p1", "p2", "p3")), ("pairwise", ("p0",))]
)
def test_masked_values_look_uniform_to_everybody(
    protocol: str, observers: tuple[str, ...], tiny: VerticalData, tmp_path: Path
) -> None:
    train(tiny, plan_of(protocol=protocol, record_views=True, record_words=True), tmp_path / "run")
    for observer in observers:
        words = masked_words(tmp_path / "run", observer)
        assert words.size > 200
        bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
        # Each bit position: Binomial(n, 1/2); 6.5 standard deviations, 64 positions: 64 * 8e-11 < 1e-8.
        excess = np.abs(bits.mean(axis=0) - 0.5) * 2 * np.sqrt(len(bits))
        assert excess.max() < 6.5
    for bystander in {"p0", "p1", "p2", "p3"} - set(observers):
        assert masked_words(tmp_path / "run", bystander).size == 0


def test_the_plain_tree_shows_leaves_to_their_hosts(tiny: VerticalData, tmp_path: Path) -> None:
    """The same test has teeth: unmasked fixed-point words are far from uniform, and are the very values."""
    train(tiny, plan_of(protocol="plain-tree", record_views=True, epochs=1), tmp_path / "run")
    words = masked_words(tmp_path / "run", "p2")  # host of p3, a leaf
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() > 0.3
    assert np.abs(FixedPoint().decode(words)).max() < 20
    records = read_records(tmp_path / "run")
    evaluated = {r.observers for r in records if r.owner == "p3" and r.kind == "evaluation"}
    assert evaluated == {("p0", "p2")}


def test_homomorphic_sums_show_ciphertexts_to_one_and_the_total_to_another(
    tiny: VerticalData, tmp_path: Path
) -> None:
    train(tiny, plan_of(protocol="bfv", record_views=True, epochs=1), tmp_path / "run")
    kinds = {
        name: {seen.kind for seen in View(tmp_path / "run" / "views" / name).messages(sent=False)}
        for name in ("p0", "p1", "p2")
    }
    assert "he-value" in kinds["p1"] and "he-total" not in kinds["p1"]  # the aggregator
    assert "he-total" in kinds["p0"] and "he-value" not in kinds["p0"]  # the key holder
    assert not kinds["p2"] & {"he-value", "he-total"}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """What each party put into each round of each channel, in the unit of its values."""
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    join = SumParticipant.join

    async def spy(self: SumParticipant, request: SumRequest, contribution: Contribution) -> None:
        values = self.channel(request.channel).floats(contribution.values)
        found.setdefault((request.channel, request.number), {})[self.address] = values
        await join(self, request, contribution)

    monkeypatch.setattr(SumParticipant, "join", spy)
    return found


@pytest.mark.parametrize("protocol", ["pairwise", "ckks", "bfv"])
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "vafl"},
        {"algorithm": "vafl", "label_holder": "server"},
        {"algorithm": "fdml", "staleness": 0},  # the receiver's own part is in the sum
        {"algorithm": "afsgd"},  # everybody receives
        {"algorithm": "vafl-sync", "sigma": 0.5, "collusion": 2},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_views_hold_the_totals_that_their_owners_opened_and_no_others(
    protocol: str, changes: dict, tiny: VerticalData, tmp_path: Path, entered: dict
) -> None:
    train(tiny, plan_of(**changes, protocol=protocol, record_views=True, epochs=1), tmp_path / "run")
    holder = changes.get("label_holder", "p0")
    seen = {}
    for folder in sorted((tmp_path / "run" / "views").glob("*")):
        for line in View(folder).messages("opened-total"):
            channel = line.fields["channel"]
            assert line.at_home and line.sender == channel and line.head is None
            assert folder.name == (holder if channel == "server" else channel)
            seen[channel, line.fields["round"]] = line.fields["values"]
    assert seen.keys() == entered.keys() and len(seen) >= 5
    for (channel, number), parts in entered.items():
        receiver = holder if channel == "server" else channel
        others = sum(values for party, values in parts.items() if party != receiver)
        # Four parties round to 2^-21 each, coarsest; the receiver's own part is taken out as it was rounded.
        np.testing.assert_allclose(seen[channel, number], others, atol=5 * 2**-21)


@pytest.mark.parametrize("protocol", ["plain-tree", "two-tree"])
def test_totals_that_follow_from_messages_are_not_written_twice(
    protocol: str, tiny: VerticalData, tmp_path: Path
) -> None:
    train(tiny, plan_of(protocol=protocol, record_views=True, record_words=True, epochs=1), tmp_path / "run")
    assert not any(
        list(View(folder).messages("opened-total")) for folder in (tmp_path / "run" / "views").glob("*")
    )


def test_encrypted_totals_are_exact_whatever_the_scheme(tiny: VerticalData) -> None:
    """CKKS's error tells about the secret key, and parties get what is computed from totals: it must go."""
    runs = [train(tiny, plan_of(algorithm="vafl-sync", protocol=name)) for name in ("ckks", "bfv")]
    assert np.array_equal(weights_of(runs[0]), weights_of(runs[1]))


# -- the ledger -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", SUMS)
def test_without_noise_a_total_is_an_exact_release(protocol: str, tiny: VerticalData, tmp_path: Path) -> None:
    run = train(tiny, plan_of(protocol=protocol), tmp_path / "run")
    assert all(run.privacy[name]["epsilon"] is None for name in ("p1", "p2", "p3"))
    records = [r for r in read_records(tmp_path / "run") if r.owner == "p3"]
    totals = [r for r in records if r.mechanism == "exact"]
    assert sum(r.vectors for r in totals) == 2 * 4 * tiny.n_train + tiny.n_test
    hidden = [r for r in records if r.mechanism != "exact"]
    if protocol == "plain-tree":
        assert not hidden
    else:
        mechanism, text = FACTS[protocol][:2]
        passing = ("p1",) if mechanism == "encrypted" else ("p1", "p2")  # ciphertexts go to who adds alone
        assert [(r.mechanism, r.observers, r.assumption) for r in hidden] == [
            (mechanism, passing, text.format(1))
        ]
        seen = {(r.kind, r.observers) for r in totals}
        assert seen == {("embedding", ("p0", "p1", "p2")), ("evaluation", ("p0",))}  # gradients of the sum


@pytest.mark.parametrize("protocol", SUMS)
@pytest.mark.parametrize("collusion", [1, 2])
def test_noise_in_sums_costs_what_it_costs_without(
    protocol: str, collusion: int, tiny: VerticalData, tmp_path: Path
) -> None:
    plan = plan_of(protocol=protocol, sigma=3.0, clip=0.5, epochs=1, collusion=collusion)
    train(tiny, plan, tmp_path / "run")
    paid = [r for r in read_records(tmp_path / "run") if r.owner == "p2" and r.mechanism == "gaussian"]
    assert paid and all(r.clip == 0.5 for r in paid)
    for record in paid:  # never more than 2C/sigma, and less only by the margin for rounding
        assert 2 * 0.5 / 3.0 * (1 - 1e-5) < record.mu <= 2 * 0.5 / 3.0


class Silent(nn.Module):
    """An encoder whose embeddings are zeros, so that totals are pure noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.output(rows)


@pytest.mark.parametrize(
    ("protocol", "collusion", "shares"),
    [("two-tree", 1, 4 / 3), ("pairwise", 2, 4 / 2), ("bfv", 1, 4 / 3), ("plain-tree", 1, 3), ("ckks", 1, 3)],
)
def test_the_noise_is_really_there(protocol: str, collusion: int, shares: float) -> None:
    """Distributed: every party a share, sized for 4 - t honest ones. Otherwise 3 parties add all of it."""
    data = VerticalData.load("synthetic:rows=1500,features=8", parties=4)
    plan = Plan(
        algorithm="vafl",
        protocol=protocol,
        sigma=2.0,
        collusion=collusion,
        encoder_training="none",
        epochs=1,
        batch=1200,
    )
    resolved, scaled = resolve(plan, data)
    encoders = {name: Silent(width) for name, width in zip(scaled.parties, scaled.widths, strict=True)}
    carrier = VirtualCarrier(resolved, scaled, encoders=encoders)
    drive(Schedule(carrier).train())
    noise = carrier.server.others.numpy().ravel()
    # The standard deviation of n Gaussians has standard error std / sqrt(2n); 6 of them: 2e-9.
    expected = 2.0 * np.sqrt(shares)
    assert abs(noise.std() - expected) < 6 * expected / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 6 * expected / np.sqrt(noise.size)


def test_colluders_cannot_subtract_the_honest_noise(tiny: VerticalData) -> None:
    """What t colluders leave, computed from the shares themselves, has the promised deviation."""
    for collusion in (1, 2, 3):
        plan = plan_of(protocol="pairwise", sigma=1.5, collusion=collusion, encoder_training="none")
        if collusion == 3:
            with pytest.raises(PlanError, match="at most 2 colluders"):
                resolve(plan, tiny)
            continue
        carrier = VirtualCarrier(*resolve(plan, tiny))
        channel = build_channel(carrier.home.setup, "server")
        gates = [carrier.sites[name].gate for name in ("p0", "p1", "p2", "p3")]
        ring = channel.protocol.fixed_point
        shares = np.stack(
            [ring.decode(gate.abstain((20_000,), noise=channel.noise).values) for gate in gates]
        )
        honest = shares[collusion:].sum(axis=0)
        assert abs(honest.std() - 1.5) < 6 * 1.5 / np.sqrt(2 * honest.size)


@pytest.mark.parametrize("protocol", SUMS)
def test_frozen_encoders_release_each_sum_once(protocol: str, tiny: VerticalData, tmp_path: Path) -> None:
    plan = plan_of(protocol=protocol, encoder_training="none", sigma=2.0, epochs=4, evaluate_every=1)
    run = train(tiny, plan, tmp_path / "run")
    rows = np.concatenate(
        [r.rows for r in read_records(tmp_path / "run") if r.owner == "p1" and r.mechanism == "gaussian"]
    )
    assert np.array_equal(np.sort(rows), np.arange(tiny.n_train + tiny.n_test))
    assert 0.999 < run.privacy["p1"]["mu"] <= 1.0
    assert run.result["labels"].startswith("not exposed")


@pytest.mark.parametrize("protocol", ["two-tree", "plain-tree"])
@pytest.mark.parametrize("algorithm", ["vafl", "vafl-sync", "afsgd", "fsgd"])
def test_the_budget_ends_training_and_holds(algorithm: str, protocol: str, tiny: VerticalData) -> None:
    plan = plan_of(algorithm=algorithm, protocol=protocol, sigma=20.0, budget_epsilon=8.0, epochs=30)
    run = train(tiny, plan)
    assert run.stopped is not None and run.stopped.startswith("budget")
    assert run.test["auc"] is not None  # enough was held back for the evaluation
    spent = max(run.privacy[name]["mu"] for name in ("p1", "p2", "p3"))
    assert 0.3 * gdp_mu(8.0, 1e-5) < spent <= gdp_mu(8.0, 1e-5)


def test_a_target_is_met_on_sums(tiny: VerticalData) -> None:
    run = train(tiny, plan_of(protocol="two-tree", epsilon=5.0))
    assert run.stopped is None
    assert run.privacy["p1"]["epsilon"] <= 5.0


def test_private_updates_work_on_sums(tiny: VerticalData) -> None:
    plan = plan_of(protocol="two-tree", encoder_training="dp", sigma=2.0, gradient_sigma=1.0, epochs=1)
    run = train(tiny, plan)
    assert run.privacy["p1"]["mode"] == "dp-encoder" and run.privacy["p1"]["mu"] is not None


def test_a_budget_without_room_for_a_step_says_what_to_do(tiny: VerticalData) -> None:
    with pytest.raises(BudgetExceeded, match="not one step fits: raise the budget or sigma"):
        train(tiny, plan_of(protocol="two-tree", sigma=1.0, budget_epsilon=0.01))


@pytest.mark.parametrize("protocol", HIDING)
def test_values_that_no_sum_can_hold_are_divergence(protocol: str, tiny: VerticalData) -> None:
    plan = plan_of(algorithm="fdml", protocol=protocol, learning_rate=1e12)
    with pytest.raises(TrainingDiverged, match=rf"p\d: values are too large for protocol '{protocol}'"):
        train(tiny, plan)


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", HIDING)
def test_two_parties_hide_nothing_from_each_other(protocol: str) -> None:
    data = VerticalData.load(TINY, parties=2)
    with pytest.raises(PlanError, match="at least 3 parties"):
        train(data, plan_of(protocol=protocol))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol": "two-tree", "sigma": 1e-7}, "below the resolution"),
        ({"protocol": "bfv", "sigma": 1e5}, "cannot carry noise"),
        ({"protocol": "two-tree", "collusion": 3}, "two-tree"),
        ({"protocol": "pairwise", "delay_bound": 3}, "never stale"),
        ({"protocol": "pairwise", "fusion": "concat"}, "concat"),
        ({"collusion": 0}, "at least 1"),
    ],
)
def test_combinations_that_cannot_work_say_so(changes: dict, match: str, tiny: VerticalData) -> None:
    with pytest.raises(PlanError, match=match):
        train(tiny, plan_of(**changes))


def test_outside_receivers_need_fewer_parties() -> None:
    assert build_sum("bfv", workers=2, receiver=None, collusion=1).receivers == (-3,)
    with pytest.raises(PlanError, match="at least 3"):
        build_sum("two-tree", workers=2, receiver=None, collusion=1)


# -- participants, without any algorithm ------------------------------------------------------------------


class Federation:
    """Participants of one channel on a virtual network, driven by hand."""

    def __init__(self, data: VerticalData, protocol: str) -> None:
        self.carrier = VirtualCarrier(*resolve(plan_of(protocol=protocol), data))
        self.parties = data.parties
        self.channel = build_channel(self.carrier.home.setup, "server")
        self.sums = {
            address: SumParticipant(site.setup, address, [self.channel])
            for site in self.carrier.sites.values()
            for address in site.roles
        }

    def run(self, body) -> object:
        async def everything() -> object:
            async with asyncio.TaskGroup() as group:
                for each in self.sums.values():
                    group.create_task(each.begin())
            return await body()

        return run_virtual(everything())[0]

    def let_in(self, party: str, vectors: torch.Tensor, rows: np.ndarray) -> Contribution | Inside:
        gate = self.sums[party].gate
        return self.channel.protect(gate, vectors, party=party, rows=rows, kind="test")

    async def join(self, party: str, value: float) -> None:
        """Waits for the announcement and joins with a constant."""
        sums = self.sums[party]
        message = await sums.receive()
        request = read_request(message)
        vectors = torch.full((len(request.rows), sums.width), value)
        await sums.join(request, self.let_in(party, vectors, request.rows))
        while True:
            await sums.receive()


@pytest.mark.parametrize("protocol", ["plain", *SUMS])
def test_a_total_is_the_sum_of_all_and_own_stays_apart(protocol: str, tiny: VerticalData) -> None:
    net = Federation(tiny, protocol)

    async def body():
        tasks = [asyncio.create_task(net.join(p, 10.0**i)) for i, p in enumerate(net.parties)]
        total = await net.sums["server"].total(np.arange(3), "evaluation")
        for task in tasks:
            task.cancel()
        return total

    total = net.run(body)
    np.testing.assert_allclose(total.values, np.full((3, 1), 1111.0), atol=1e-5)
    np.testing.assert_allclose(total.summed, np.full((3, 1), 1110.0), atol=1e-5)


@pytest.mark.parametrize("protocol", SUMS)
def test_a_missing_party_is_never_zeros(protocol: str, tiny: VerticalData) -> None:
    """Without p3 no total appears; once it is declared gone, the round fails and later ones are refused."""
    net = Federation(tiny, protocol)

    async def stalled() -> None:
        tasks = [asyncio.create_task(net.join(p, 1.0)) for p in ("p0", "p1", "p2")]
        try:
            await net.sums["server"].total(np.arange(3), "evaluation")
        finally:
            for task in tasks:
                task.cancel()

    with pytest.raises(DeadlockError):
        net.run(stalled)
    failures = []
    for sums in net.sums.values():
        try:
            run_virtual(sums.drop("p3"))
        except DropoutError as error:
            failures.append(error)
    assert failures
    with pytest.raises(DropoutError, match="p3 is gone"):
        run_virtual(net.sums["server"].announce(np.arange(3), "evaluation", channel="server"))


def test_a_round_is_never_joined_twice(tiny: VerticalData) -> None:
    net = Federation(tiny, "two-tree")
    request = SumRequest(
        channel="server", number=7, rows=np.arange(2), purpose="evaluation", requester="server"
    )

    async def body() -> None:
        sums = net.sums["p1"]
        part = net.let_in("p1", torch.zeros(2, 1), request.rows)
        await sums.join(request, part)
        await sums.join(request, part)

    with pytest.raises(ProtocolError, match="masks are never used twice"):
        net.run(body)


def test_forged_and_malformed_messages_are_refused(tiny: VerticalData) -> None:
    net = Federation(tiny, "two-tree")
    good = {
        "channel": "server", "from": 3, "to": 2, "round": 0, "attempt": 0, "tree": 1,
        "total": np.zeros((1, 1), np.uint64),
    }  # fmt: skip
    message = Packet(kind="tree.subtotal", sender="p3", receiver="p2", number=1, fields=good)
    bad = [
        (dataclasses.replace(message, sender="p1"), "does not play address 3"),
        (dataclasses.replace(message, fields={**good, "to": 1}), "does not play"),
        (dataclasses.replace(message, fields={**good, "channel": "elsewhere"}), "no channel"),
        (dataclasses.replace(message, fields={**good, "total": 3}), "total"),
        (
            dataclasses.replace(message, kind="sum-result", fields={"channel": "server", "round": 0}),
            "without values",
        ),
        (
            dataclasses.replace(
                message,
                kind="sum-own",
                fields={
                    "channel": "server",
                    "round": 0,
                    "values": np.zeros((1, 1)),
                    "entered": np.zeros((1, 1)),
                },
            ),
            "stays inside one organisation",
        ),
    ]
    for forged, match in bad:

        async def body(forged=forged) -> None:
            net.carrier.network.links["p2"].deliver(forged)
            await net.sums["p2"].receive()

        with pytest.raises(ProtocolError, match=match):
            net.run(body)
    with pytest.raises(ProtocolError, match="no sum for 'p9'"):
        net.sums["p2"].channel("p9")
    with pytest.raises(ProtocolError, match="p9"):
        net.channel.observers("p2", also=("p9",))
    good = {"channel": "server", "purpose": "evaluation", "for": "p1", "round": 0, "rows": np.arange(2)}
    link = net.carrier.network.links["p1"]
    for sender, fields, match in (
        ("p2", good, "p2 may not send 'sum-request'"),
        ("server", good | {"round": True}, "'round' is not a public int"),
        ("server", good | {"rows": np.array([1, 1])}, "'rows' is not a list of distinct record indices"),
        ("server", {"channel": "server"}, "without for, purpose, round, rows"),
    ):
        with pytest.raises(ProtocolError, match=match):
            link.deliver(Packet(kind=REQUEST, sender=sender, receiver="p1", number=1, fields=fields))


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("changes", [{}, {"encoder_training": "none"}])
def test_resumed_runs_agree_on_new_keys_and_end_the_same(
    changes: dict, tiny: VerticalData, tmp_path: Path
) -> None:
    plan = plan_of(protocol="pairwise", epochs=3, **changes)
    straight = train(tiny, plan, tmp_path / "straight")

    def stop(progress) -> None:
        if progress.epoch == 2 and progress.done > 0.5:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(tiny, plan, tmp_path / "broken", progress=stop)
    resumed = train(tiny, plan, tmp_path / "broken", resume=True)
    assert np.array_equal(weights_of(resumed), weights_of(straight))


@pytest.mark.parametrize("word", ["update", "session", "contributions", "", "of another"])
@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"algorithm": "vafl"}, "embedding"),
        ({"algorithm": "vafl", "protocol": "pairwise"}, "prediction"),
        ({"algorithm": "afsgd", "protocol": "pairwise"}, "prediction"),
    ],
)
def test_a_label_holder_that_asks_under_another_name_gets_nothing(
    changes: dict, other: str, word: str, tiny: VerticalData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses the word that the party's ledger writes down; only those that stand for a cost are taken."""
    ask, announce = VAFLServer._ask, SumParticipant.announce
    says = "field 'purpose' is not"  # no message has the word
    if word == "of another":
        word, says = other, f"for {other!r}, not for training"

    async def asking(self, party, rows, purpose):
        return await ask(self, party, rows, word)

    monkeypatch.setattr(VAFLServer, "_ask", asking)
    monkeypatch.setattr(
        SumParticipant, "announce", lambda self, rows, _, **options: announce(self, rows, word, **options)
    )
    with pytest.raises(ProtocolError, match=says):
        train(tiny, plan_of(sigma=1.0, **changes))


def test_every_protocol_that_a_plan_may_name_is_built_and_described() -> None:
    assert tuple(BUILDERS) == PROTOCOLS
    for name, facts in FACTS.items():
        assert facts.hides in ("", "masked", "encrypted") and bool(facts.hides) == bool(facts.assumption)
        protocol = build_sum(name, workers=4, receiver=None, collusion=1)
        assert isinstance(protocol, READABLE) == (not facts.hides)
        messages = protocol.messages
        if facts.hides:
            assert any(each.uniform or each.opaque for each in messages)
