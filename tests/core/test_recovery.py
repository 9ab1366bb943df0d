"""Training that goes on without a party: pairwise masks with a threshold, on the virtual network."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from securevfl import Plan, VerticalData, train
from securevfl.accountants.modes import privacy_matrix
from securevfl.algorithms import ABSENT, ALGORITHMS, SERVER, find_algorithm
from securevfl.algorithms.channels import build_channel
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.vafl import SummingServer
from securevfl.attacks.canary.audit import _noisy_sum
from securevfl.attacks.reading import moments
from securevfl.cli import main
from securevfl.cli.train import show_absences
from securevfl.errors import DropoutError, PlanError, ProtocolError
from securevfl.federation.clock import run_virtual
from securevfl.federation.folder import RunFolder
from securevfl.federation.run import run_result
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.site import PARTS, run_roles
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.messages import Packet
from securevfl.privacy.views import OPENED, View
from securevfl.protocols.keys import PairKeys
from securevfl.protocols.sums.pairwise import PairwiseMaskSum

TINY = "synthetic:rows=150,features=12,informative=6"
VICTIM = "p2"


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    return VerticalData.load(TINY, parties=4)


def plan_of(**changes) -> Plan:
    settings = {"epochs": 2, "batch": 30, "protocol": "pairwise", "threshold": 3}
    return Plan.from_flat({"algorithm": "vafl", "unprotected": True, **settings, **changes})


def weights_of(run) -> np.ndarray:
    modules = [*run.encoders.values(), run.head]
    return np.concatenate([p.detach().numpy().ravel() for module in modules for p in module.parameters()])


class Disturbed(VirtualCarrier):
    """A run in which the server is told, at a chosen message of a party, that this party is away.

    The message itself comes right after that, and so does whatever the party sends from then on: it is alive
    and knows nothing.
    """

    def disturb(self, kind: str, count: int, *, party: str = VICTIM, part: str = "epoch") -> None:
        self.seen: Counter[str] = Counter()
        self.late: list[str] = []
        self.victim, self.told = party, False
        post = self.network.post

        def posting(message: Packet) -> None:
            if message.sender == party and message.receiver == SERVER and self.part == part:
                self.seen[message.kind] += 1
                if message.kind == kind and self.seen[kind] == count:
                    self.told = True
                    self.network.links[SERVER].deliver(Packet(kind=ABSENT, sender=party, receiver=SERVER))
                if self.told:
                    self.late.append(message.kind)
            post(message)

        for link in self.network.links.values():
            link._post = posting

    async def _play(self, part: str) -> None:
        self.part = part = PARTS[part]
        self.told = False
        roles = {role.address: role for role in self.roles}
        victim = roles.pop(getattr(self, "victim", "p1"))

        away = asyncio.create_task(getattr(victim, part)())
        await run_roles(roles.values(), part)
        if not self.told:
            await away
        away.cancel()
        (error,) = await asyncio.gather(away, return_exceptions=True)
        if isinstance(error, Exception):
            raise error
        self.network.forget_undelivered()


def disturbed(plan: Plan, data: VerticalData, kind: str, count: int, **where) -> Disturbed:
    carrier = Disturbed(*resolve(plan, data))
    carrier.disturb(kind, count, **where)
    return carrier


# -- nobody is away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["party", "server"])
@pytest.mark.parametrize("algorithm", ["vafl", "vafl-tsync"])
def test_with_everybody_there_the_model_is_the_same(algorithm: str, holder: str, tiny: VerticalData) -> None:
    plan = plan_of(algorithm=algorithm, label_holder=holder)
    recovering, waiting = train(tiny, plan), train(tiny, plan.with_changes(threshold=0))
    # Totals are the same integers, so all that follows is the same too.
    np.testing.assert_array_equal(weights_of(recovering), weights_of(waiting))
    assert recovering.result["absent_rounds"] == {}
    assert "absent_rounds" not in waiting.result
    assert recovering.metrics[-1]["absent_rounds"] == {}


def test_a_threshold_of_all_parties_is_none(tiny: VerticalData) -> None:
    run, none = train(tiny, plan_of(threshold=4)), train(tiny, plan_of(threshold=0))
    assert run.result["messages"] == none.result["messages"]


def test_wire_form_changes_nothing(tiny: VerticalData) -> None:
    plan = plan_of(epochs=1, latency=0.25)
    direct, wired = train(tiny, plan), train(tiny, plan.with_changes(settings={"wire": True}))
    assert np.array_equal(weights_of(direct), weights_of(wired))


def test_predictions_come_from_recovering_sums_too(tiny: VerticalData) -> None:
    run = train(tiny, plan_of(epochs=1))
    waiting = train(tiny, plan_of(epochs=1, threshold=0))
    rows = [np.asarray(block[:5]) for block in tiny.train]
    np.testing.assert_array_equal(run.predict(rows), waiting.predict(rows))


# -- somebody is away ---------------------------------------------------------------------------------------

MOMENTS = [
    ("pairwise.public-keys", 1),
    ("pairwise.sealed-shares", 3),
    ("pairwise.masked-input", 1),
    ("pairwise.masked-input", 4),
    ("pairwise.confirmation", 2),
    ("pairwise.opened-shares", 2),
    ("embedding", 1),
    ("ended", 1),
]


@pytest.mark.parametrize(("kind", "count"), MOMENTS)
@pytest.mark.parametrize(("algorithm", "holder"), [("vafl", "party"), ("vafl-tsync", "server")])
def test_training_goes_on_and_says_so(
    kind: str, count: int, algorithm: str, holder: str, tiny: VerticalData
) -> None:
    plan = plan_of(algorithm=algorithm, label_holder=holder, epochs=3, latency=0.05)
    carrier = disturbed(plan, tiny, kind, count)
    schedule = Schedule(carrier)
    drive(schedule.train())
    result = run_result(schedule, carrier, carrier.records())
    assert carrier.late[0] == kind
    assert carrier.server.epochs_done == 3 and np.isfinite(result["loss"])
    missed = result["absent_rounds"]
    assert missed == schedule.metrics[-1]["absent_rounds"] == carrier.server.absences()
    assert set(missed) <= {VICTIM}
    assert bool(missed) == (kind != "ended")
    if kind != "ended":  # away for the rest of one epoch of three, back for the others
        assert 0 < missed[VICTIM] < carrier.server.iteration * (2 if algorithm == "vafl-tsync" else 1)
        lines = [line["absent_rounds"].get(VICTIM, 0) for line in schedule.metrics]
        assert lines == sorted(lines) and lines[0] == lines[-1]


def spy(monkeypatch) -> list[tuple[np.ndarray, tuple[str, ...], list[np.ndarray]]]:
    """Every training sum that the server obtains, with who is missing."""
    found = []
    total = SummingServer._collect

    async def watching(self, rows, purpose):
        values = await total(self, rows, purpose)
        found.append((rows, purpose, values.numpy()))
        return values

    monkeypatch.setattr(SummingServer, "_collect", watching)
    return found


@pytest.mark.parametrize("holder", ["party", "server"])
def test_the_sum_is_over_those_present(holder: str, tiny: VerticalData, monkeypatch) -> None:
    """With rates of nearly 0 nothing changes, so each sum is known in advance, with and without the party."""
    found = spy(monkeypatch)
    plan = plan_of(learning_rate=1e-12, l2=0.0, label_holder=holder, epochs=1)
    carrier = disturbed(plan, tiny, "pairwise.masked-input", 3)
    parts = {}
    for role in carrier.roles[1:]:
        encoder, data = carrier.encoders[role.address], carrier.home.data
        with torch.no_grad():
            inputs = torch.from_numpy(np.array(data.train[data.parties.index(role.address)], np.float32))
            parts[role.address] = encoder(inputs).numpy()
    drive(Schedule(carrier).train())
    steps = [(rows, values) for rows, purpose, values in found if purpose == "embedding"]
    missing, full, partial = 0, {}, {}
    for rows, values in steps:
        everybody = sum(part[rows] for part in parts.values())
        without = everybody - parts[VICTIM][rows]
        near = [np.abs(values - one).max() < 1e-5 for one in (everybody, without)]
        assert near in ([True, False], [False, True])
        missing += near[1]
        (partial if near[1] else full).update(zip(rows.tolist(), values, strict=True))
    assert missing == carrier.server.absences()[VICTIM] > 0
    assert missing < len(steps)
    # The documented leak: a record's full sum less its sum without the party is the party's very embedding.
    both = sorted(full.keys() & partial.keys())
    assert len(both) > 10
    differences = np.stack([full[row] - partial[row] for row in both])
    np.testing.assert_allclose(differences, parts[VICTIM][both], atol=1e-5)


def test_keys_are_new_in_every_phase_and_nothing_is_sealed_twice(tiny: VerticalData, monkeypatch) -> None:
    sealed: Counter[tuple[bytes, int, int]] = Counter()
    keys: set[bytes] = set()
    seal = PairKeys.seal

    def counting(self, plain, *, round, attempt):  # noqa: A002
        sealed[(self._key, self.adds, round, attempt)] += 1
        keys.add(self._key)
        return seal(self, plain, round=round, attempt=attempt)

    monkeypatch.setattr(PairKeys, "seal", counting)
    carrier = disturbed(plan_of(epochs=3), tiny, "pairwise.masked-input", 3)
    drive(Schedule(carrier).train())
    assert max(sealed.values()) == 1
    # Three epochs and the final evaluation, six pairs each; prepare seals nothing.
    assert len(keys) == 4 * 6


def test_views_say_who_is_missing_and_the_late_input_shows_nothing(
    tiny: VerticalData, tmp_path: Path
) -> None:
    plan, data = resolve(plan_of(record_views=True, record_words=True, epochs=2), tiny)
    folder = RunFolder(tmp_path / "run")
    folder.create(plan)
    carrier = Disturbed(plan, data, folder=folder)
    carrier.disturb("pairwise.masked-input", 3)
    drive(Schedule(carrier).train())
    carrier.close()
    view = View(tmp_path / "run" / "views" / "p0")
    without = [seen for seen in view.messages(OPENED) if seen.fields.get("missing")]
    assert len(without) == carrier.server.absences()[VICTIM]
    assert all(seen.fields["missing"] == [VICTIM] for seen in without)
    # In the round that it dropped out of, its masked input is there: uniform words, like all others.
    words = np.concatenate(
        [seen.fields["values"].ravel() for seen in view.messages("pairwise.masked-input", sent=False)]
    )
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
    assert (np.abs(bits.mean(axis=0) - 0.5) * 2 * np.sqrt(len(bits))).max() < 6.5
    rounds = Counter(
        seen.fields["round"] for seen in view.messages("pairwise.masked-input", sent=False)
        if seen.sender == VICTIM
    )  # fmt: skip
    assert without[0].fields["round"] in rounds


def test_attacks_count_a_sum_for_those_in_it(tiny: VerticalData, tmp_path: Path) -> None:
    plan, data = resolve(plan_of(record_views=True, epochs=1), tiny)
    folder = RunFolder(tmp_path / "run")
    folder.create(plan)
    carrier = Disturbed(plan, data, folder=folder)
    carrier.disturb("pairwise.masked-input", 3)
    drive(Schedule(carrier).train())
    carrier.close()
    info = SimpleNamespace(parties=data.parties, plan=plan, seen={}, hosts=carrier.hosts)
    found = moments(SimpleNamespace(info=info, views={"p0": View(tmp_path / "run" / "views" / "p0")}))
    counts = Counter(moment.parties for moment in found)
    assert set(counts) == {frozenset({"p1", "p2", "p3"}), frozenset({"p1", "p3"})}
    assert counts[frozenset({"p1", "p3"})] == carrier.server.absences()[VICTIM]


@pytest.mark.parametrize("mode", ["raw", "dp"])
def test_every_mode_that_trains_encoders_goes_on(mode: str, tiny: VerticalData) -> None:
    noise = {"sigma": 5.0, "gradient_sigma": 1.0} if mode == "dp" else {"sigma": 5.0}
    carrier = disturbed(plan_of(encoder_training=mode, **noise), tiny, "pairwise.masked-input", 3)
    schedule = Schedule(carrier)
    drive(schedule.train())
    privacy = run_result(schedule, carrier, carrier.records())["privacy"]
    assert carrier.server.absences()[VICTIM] > 0
    assert all(privacy[name]["mu"] is not None for name in ("p1", "p2", "p3"))


def test_below_the_threshold_nothing_is_summed(tiny: VerticalData) -> None:
    carrier = disturbed(plan_of(), tiny, "pairwise.masked-input", 3)
    before = carrier.network.links[SERVER].deliver

    def both(message: Packet, *size) -> None:
        before(message, *size)
        if message.kind == ABSENT:
            before(dataclasses.replace(message, sender="p3"))

    carrier.network.links[SERVER].deliver = both
    with pytest.raises(DropoutError, match="without p2, p3: the 2 workers left"):
        drive(Schedule(carrier).train())


@pytest.mark.parametrize("part", ["evaluate", "prepare"])
def test_evaluation_needs_everybody(part: str, tiny: VerticalData) -> None:
    carrier = disturbed(plan_of(), tiny, "pairwise.public-keys", 1, part=part)
    with pytest.raises(DropoutError, match="p2 is gone, and this phase needs everybody"):
        drive(Schedule(carrier).train())


def test_the_label_holders_own_party_is_never_away(tiny: VerticalData) -> None:
    carrier = disturbed(plan_of(), tiny, "pairwise.masked-input", 3, party="p0")
    with pytest.raises(ProtocolError, match="p0 receives the totals"):
        drive(Schedule(carrier).train())


def test_a_stranger_cannot_be_away(tiny: VerticalData) -> None:
    carrier = VirtualCarrier(*resolve(plan_of(), tiny))
    with pytest.raises(ProtocolError, match="no party"):
        run_virtual(carrier.server.sums.drop("p9"))


def test_the_count_survives_a_checkpoint(tiny: VerticalData) -> None:
    carrier = disturbed(plan_of(), tiny, "pairwise.masked-input", 3)
    drive(Schedule(carrier).train())
    other = VirtualCarrier(*resolve(plan_of(), tiny))
    other.server.load(carrier.server.state())
    assert other.server.absences() == carrier.server.absences() != {}


# -- noise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parties", "threshold", "collusion"), [(4, 3, 1), (6, 4, 1), (6, 5, 2)])
def test_the_smallest_sum_less_the_colluders_keeps_the_promise(
    parties: int, threshold: int, collusion: int
) -> None:
    data = VerticalData.load(TINY, parties=parties)
    plan = plan_of(sigma=1.5, threshold=threshold, collusion=collusion, encoder_training="raw")
    carrier = VirtualCarrier(*resolve(plan, data))
    channel = build_channel(carrier.home.setup, SERVER)
    assert channel.noise is not None
    honest = threshold - collusion
    ring = channel.protocol.fixed_point
    assert honest * channel.noise.noise.share_std**2 >= (1.5 * 2**ring.fraction_bits) ** 2
    gates = [carrier.sites[name].gate for name in data.parties]
    shares = np.stack([ring.decode(gate.abstain((20_000,), noise=channel.noise).values) for gate in gates])
    left = shares[collusion:threshold].sum(axis=0)  # the colluders' are known, the last ones' are missing
    # The deviation of n Gaussians has standard error 1 / sqrt(2n); six of them: P < 1e-8.
    assert left.std() > 1.5 * (1 - 6 / math.sqrt(2 * left.size))
    assert stats.kstest(left / channel.noise.noise.honest_sigma, "norm").pvalue > 1e-6


def test_the_ledger_promises_what_the_smallest_sum_gives(tiny: VerticalData) -> None:
    plan = plan_of(sigma=20.0, epochs=1)
    carrier = disturbed(plan, tiny, "pairwise.masked-input", 3)
    drive(Schedule(carrier).train())
    noise = build_channel(carrier.home.setup, SERVER).noise
    records = [r for r in carrier.records() if r.owner == "p1" and r.mechanism == "gaussian"]
    units = noise.noise.share_std * noise.fixed_point.resolution
    assert {record.sigma for record in records}
    for record in records:
        assert record.sigma <= units * math.sqrt(3 - 1)  # three survivors, of whom the receiver is one
        assert record.sensitivity / record.sigma <= 2 * plan.clip / plan.sigma * (1 + 1e-12)
    everybody = train(tiny, plan.with_changes(threshold=0)).privacy["p1"]
    spent = privacy_matrix(carrier.records(), plan.delta)["p1"]
    worst = max(each.mu / math.sqrt(each.releases) for each in spent.values())
    assert worst <= everybody["mu"] / math.sqrt(everybody["releases"]) * (1 + 1e-6)


def test_the_canary_is_tried_on_the_smallest_sum() -> None:
    plan = plan_of(sigma=1.0, parties=6, threshold=4)
    assert _noisy_sum(plan, 6).noise.honest == 3
    assert _noisy_sum(plan.with_changes(threshold=0), 6).noise.honest == 5


def test_the_budget_holds_while_somebody_is_away(tiny: VerticalData) -> None:
    plan = plan_of(sigma=20.0, budget_epsilon=8.0, epochs=30)
    carrier = disturbed(plan, tiny, "pairwise.masked-input", 3)
    schedule = Schedule(carrier)
    drive(schedule.train())
    assert schedule.stopped is not None and schedule.stopped.startswith("budget")
    privacy = run_result(schedule, carrier, carrier.records())["privacy"]
    assert all(0 < privacy[name]["epsilon"] <= 8.0 for name in ("p1", "p2", "p3"))


def test_ledgers_name_the_smallest_sum(tiny: VerticalData) -> None:
    carrier = VirtualCarrier(*resolve(plan_of(epochs=1), tiny))
    drive(Schedule(carrier).train())
    noted = {r.assumption for r in carrier.records() if r.mechanism == "masked"}
    assert len(noted) == 1 and noted.pop().endswith("sums are of 3 to 4 parties")
    counts = Counter(r.owner for r in carrier.records() if r.mechanism == "masked")
    assert set(counts.values()) == {1}  # noted once, although every phase agrees on keys


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"threshold": 2}, "use 3 to 4"),
        ({"threshold": 5}, "use 3 to 4"),
        ({"threshold": 3, "collusion": 2}, "use 4 to 4"),
        ({"threshold": -1}, "negative"),
        ({"protocol": "two-tree"}, "belongs to protocol 'pairwise'"),
        ({"protocol": "plain"}, "belongs to protocol 'pairwise'"),
        ({"encoder_training": "none"}, "each record is summed once"),
        ({"algorithm": "vafl-sync"}, "one order"),
        ({"algorithm": "fdml"}, "one order"),
        ({"algorithm": "flex"}, "one order"),
        ({"algorithm": "p-bcd"}, "one order"),
        ({"algorithm": "afsgd"}, "receive sums of their own"),
        ({"algorithm": "fsvrg"}, "barrier"),
    ],
)
def test_thresholds_that_cannot_work_say_why(changes: dict, match: str, tiny: VerticalData) -> None:
    with pytest.raises(PlanError, match=match) as caught:
        train(tiny, plan_of(**changes))
    assert "\n" not in str(caught.value)


def test_who_goes_on_without_a_party() -> None:
    tolerant = {
        name
        for name in ALGORITHMS
        if "pairwise" in find_algorithm(name).protocols
        and find_algorithm(name).tolerates_absence(plan_of(algorithm=name))
    }
    assert tolerant == {"vafl", "vafl-tsync"}
    assert not find_algorithm("vafl").tolerates_absence(plan_of(threshold=0))
    assert find_algorithm("vafl").tolerates_absence(Plan(algorithm="vafl", unprotected=True))
    assert find_algorithm("vafl").fewest(plan_of()) == 3


def test_three_parties_cannot_lose_one() -> None:
    data = VerticalData.load(TINY, parties=3)
    with pytest.raises(PlanError, match="use 3 to 3"):
        train(data, plan_of(threshold=2))
    assert not PairwiseMaskSum(workers=3, threshold=3).recovers


# -- what people read ---------------------------------------------------------------------------------------


def test_the_summary_says_which_sums_are_without_whom(capsys) -> None:
    show_absences(Console(width=200), {"absent_rounds": {"p2": 1400, "p3": 1}})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sums of training without p2: 1,400; the model took those steps without its part"
    assert len(said) == 2
    show_absences(Console(), {})
    assert capsys.readouterr().out == ""


def test_the_command_takes_a_threshold(tmp_path: Path, capsys, monkeypatch) -> None:
    command = [
        "securevfl",
        "train",
        "--data",
        TINY,
        "--parties",
        "4",
        "--protocol",
        "pairwise",
        "--epochs",
        "1",
        "--algorithm",
        "vafl",
        "--unprotected",
    ]

    def run(threshold: int, folder: str) -> int:
        line = [*command, "--threshold", str(threshold), "--out", str(tmp_path / folder), "--json"]
        monkeypatch.setattr("sys.argv", line)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert run(3, "good") == 0
    assert json.loads(capsys.readouterr().out)["absent_rounds"] == {}
    assert RunFolder(tmp_path / "good").read_plan().threshold == 3
    assert run(2, "bad") == 2
    assert "use 3 to 4" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
