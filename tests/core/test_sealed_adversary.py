"""Sealed training as a whole among members that may cheat: what is kept, refused and promised."""

import json
import math
from typing import ClassVar

import numpy as np
import pytest
from safetensors import safe_open
from test_sealed_training import make_data

from securevfl import audit
from securevfl.accountants import records
from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.accountants.sealed import checked_slack
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.adversary import settled, slack
from securevfl.auditing.page import render
from securevfl.errors import BudgetExceeded, Deviation, InputError, PlanError, ProtocolError
from securevfl.federation.run import train
from securevfl.privacy.journal import TOTAL
from securevfl.privacy.ledger import read_records
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.proof import Prover
from securevfl.protocols.sealed.protocol import WORDS
from securevfl.protocols.sealed.round import RoundMachine
from securevfl.settings.plan import Plan

PLAN = {"algorithm": "sealed", "model": "linear", "epochs": 6, "epsilon": 8.0, "budget_epsilon": 12.0}
ERROR = 1 << 47


class Shifting(CheckedRound):
    """Steers the victim: an error on record 7 from the fourth iteration on."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if self.round >= 3:
            self._blinded = self._blinded.copy()
            self._blinded[7] = FIELD.add(self._blinded[7], ERROR)

    def _verify(self):
        pass


class Early(Shifting):
    """The same in every iteration: no session outlives its first."""

    __module__ = CheckedRound.__module__

    def _share_residual(self, deal):
        CheckedRound._share_residual(self, deal)
        self._blinded = FIELD.add(self._blinded, 1)


def cheat(monkeypatch, kind, victim=CheckedRound):
    honest = CheckedParty.round

    def round_(self, **given):
        machine = honest(self, **given)
        machine.__class__ = kind if self.index == 1 else victim
        return machine

    monkeypatch.setattr(CheckedParty, "round", round_)


def _totals(folder, owner="p0"):
    return [r for r in read_records(folder) if r.owner == owner and r.kind.startswith("totals")]


def _journalled(folder):
    """Totals in the victim's journal."""
    lines = (folder / "journal" / "p0" / "messages.jsonl").read_text().splitlines()
    return sum(json.loads(line)["kind"] == TOTAL for line in lines)


@pytest.mark.parametrize("model", ["linear", "scorecard"])
def test_a_cheater_ends_the_run_and_leaves_nothing_behind(tmp_path, monkeypatch, model):
    data = make_data(records=300 if model == "linear" else 600)
    fields = {**PLAN, "model": model, "adversary": "malicious", "record_views": True}
    if model == "scorecard":
        del fields["epochs"]
    plan = Plan.from_flat(fields)
    cheat(monkeypatch, Shifting)
    folder = tmp_path / "run"
    with pytest.raises(Deviation, match="p1 does not follow the protocol") as found:
        train(data, plan, folder)
    assert found.value.member == "p1"
    counted, kept = len([r for r in read_records(folder) if r.owner == "p0"]), _journalled(folder)
    assert not (folder / "result.json").exists()
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    # Three iterations were verified; the fourth is counted in the ledger and has no line and no total.
    assert (len(lines), kept) == (3, 3) and len(_totals(folder)) == (4 if model == "linear" else 0)
    monkeypatch.undo()
    if model == "linear":  # whom somebody else stopped is not blamed for what is missing
        stopped = audit(folder, attacks="none", canaries=-1, data=data)
        cell = stopped.content["owners"]["p0"]["observers"]["p1"]
        assert cell["verdict"] == "not tested" and "did not come to its end" in cell["reasons"][0]
    again = train(data, plan, folder, resume=True)
    assert again.result["epochs"] == (6 if model == "linear" else again.result["epochs"])
    assert len([r for r in read_records(folder) if r.owner == "p0"]) > counted  # the repeat is counted again
    assert _journalled(folder) > kept
    report = audit(folder, attacks="none", canaries=-1, data=data)
    said = "p0 has seen that p1 does not follow the protocol: "
    said += "an opened residual is not what was dealt and proved"
    assert report.content["run"]["deviations"] == [said] and f"{said}." in report.content["words"]
    assert report.verdict != "violated" and said in render(report.content)


def _found(folder, total):
    """Whether a number of a total is in some file, as a word, as a float or as what weights are made of."""
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    words = np.rint(total * 2.0**42).astype(np.int64)
    forms = (words, total.astype("<f8"), total.astype("<f4"))
    return [each.tobytes() in content for form in forms for each in form.ravel() if each]


class Watching(CheckedRound):
    """The victim's software with somebody beside it who knows what the total would have been."""

    __module__ = CheckedRound.__module__
    totals: ClassVar[list] = []

    def _verify(self):
        self.totals.append(WORDS.decode(self._open(self._deal)))
        super()._verify()


def test_a_total_that_was_not_verified_is_in_no_file(tmp_path, monkeypatch):
    """Neither checkpoint nor journal, view, ledger or metrics has a number of it; verified ones are there."""
    Watching.totals.clear()
    cheat(monkeypatch, Shifting, victim=Watching)
    plan = Plan.from_flat({**PLAN, "adversary": "malicious", "record_views": True})
    with pytest.raises(Deviation):
        train(make_data(), plan, tmp_path / "run")
    *verified, last = Watching.totals
    assert len(verified) == 3 and all(any(_found(tmp_path / "run", total)) for total in verified)
    assert not any(_found(tmp_path / "run", last))
    with safe_open(tmp_path / "run" / "checkpoint.safetensors", "numpy") as kept:
        assert kept.keys()


@pytest.mark.parametrize(
    ("fields", "task", "kept"),
    [
        ({"batch": 60}, "binary", 3),
        ({}, "multiclass", 3),
        ({"model": "scorecard", "epochs": 0}, "binary", 0),
    ],
    ids=["mini-batches", "several outputs", "label histogram"],
)
def test_a_cheater_is_named_in_every_kind_of_opening(tmp_path, monkeypatch, fields, task, kept):
    cheat(monkeypatch, Early if fields.get("model") else Shifting)
    flat = {**PLAN, "adversary": "malicious", "record_views": True, **fields}
    flat = {name: value for name, value in flat.items() if value or name != "epochs"}
    with pytest.raises(Deviation, match="p1 does not follow the protocol"):
        train(make_data(records=600, task=task), Plan.from_flat(flat), tmp_path / "run")
    assert _journalled(tmp_path / "run") == kept


def test_after_a_resume_everything_is_proved_again(tmp_path, monkeypatch):
    """Rows that were as long as declared until somebody was lost, and are longer in the next session."""
    data, folder = make_data(), tmp_path / "run"
    plan = Plan.from_flat({**PLAN, "adversary": "malicious", "record_views": True, "budget_epsilon": 0.0})
    cheat(monkeypatch, Quits)
    with pytest.raises(ProtocolError, match="enough"):
        train(data, plan, folder)
    monkeypatch.undo()
    counted, honest = len(_totals(folder)), Prover.__init__

    def init(self, secrets, operand, labels):
        honest(self, secrets, operand, labels)
        if secrets.claim.prover == 1:
            self._rows[0] += 1 << 15

    monkeypatch.setattr(Prover, "__init__", init)
    with pytest.raises(Deviation, match="p1 does not follow the protocol"):
        train(data, plan, folder, resume=True)
    assert len(_totals(folder)) == counted and _journalled(folder) == 0


def test_the_same_cheat_goes_unseen_among_members_that_are_trusted(tmp_path, monkeypatch):
    data = make_data()
    honest = RoundMachine._residual_share

    def shifted(self, deal):
        share = honest(self, deal)
        if self.address == 1 and self.round >= 3:
            share[7] += np.uint64(ERROR)
        return share

    monkeypatch.setattr(RoundMachine, "_residual_share", shifted)
    done = train(data, Plan.from_flat({**PLAN, "adversary": "semi-honest"}), tmp_path / "run")
    assert done.result["epochs"] == 6 and len(_totals(tmp_path / "run")) == 6


def test_the_ledger_says_first_which_adversary(tmp_path):
    data = make_data()
    for adversary in ("malicious", "semi-honest"):
        train(data, Plan.from_flat({**PLAN, "adversary": adversary}), tmp_path / adversary)
        said = {r.assumption for r in read_records(tmp_path / adversary) if r.assumption}
        assert said and all(text.startswith(f"{adversary}: ") for text in said)


def test_a_tenth_of_delta_is_set_aside_and_stated(tmp_path):
    data = make_data()
    plan = Plan.from_flat({**PLAN, "adversary": "malicious", "budget_epsilon": 0.0})
    done = train(data, plan, tmp_path / "run")
    spent = done.result["privacy"]["p0"]
    assert spent["delta"] == plan.delta and spent["epsilon"] <= 8.0
    assert spent["epsilon"] == pytest.approx(gdp_epsilon(spent["mu"], 0.9 * plan.delta), rel=1e-6)
    assert spent["mu"] < gdp_mu(8.0, 0.9 * plan.delta) < gdp_mu(8.0, plan.delta)
    assert 0 < slack(done.plan, data) < plan.delta / 10


@pytest.mark.parametrize(("members", "stated"), [(3, 7.5e-8), (7, 1.5e-7), (15, 3.0e-7)])
def test_the_slack_is_the_theorems(members, stated):
    """80 iterations of one output and one session: masks of 59, 58 and 57 bits."""
    bits = ((FIELD.p - (1 << 31)) // members).bit_length() - 1
    found = checked_slack(
        epsilon=1.0,
        iterations=80,
        outputs=1,
        residual_bound=1.00208,
        blind_bits=bits,
        bounds=[1 << 14] * members,
        columns=[64] * members,
        sessions=1,
    )
    assert found == pytest.approx(stated, rel=0.01)


def test_a_delta_that_checks_would_use_up_is_refused():
    plan = Plan.from_flat({**PLAN, "adversary": "malicious", "delta": 1e-9})
    with pytest.raises(PlanError, match="more than a tenth of 1e-09"):
        resolve(plan, make_data())


@pytest.mark.parametrize(
    ("fields", "task", "reason"),
    [({"model": "mlp"}, "binary", "change in every iteration"), ({}, "regression", "regression")],
)
def test_what_has_no_proof_is_refused_or_trusted_with_the_reason(fields, task, reason):
    data = make_data(task=task)
    bounds = {"label_low": -6.0, "label_high": 6.0} if task == "regression" else {}
    flat = {**PLAN, **fields, **bounds, "dealer": "broker"}
    with pytest.raises(PlanError, match=reason):
        resolve(Plan.from_flat({**flat, "adversary": "malicious"}), data)
    plan = Plan.from_flat(flat)
    chosen, why = settled(plan, data, apart=True)
    assert chosen == "semi-honest" and reason in why
    assert resolve(plan, data, apart=True)[0].settings.adversary == "semi-honest"


def test_auto_is_malicious_between_organisations_alone():
    data, plan = make_data(), Plan.from_flat({**PLAN, "dealer": "broker"})
    assert resolve(plan, data, apart=True)[0].settings.adversary == "malicious"
    assert resolve(plan, data)[0].settings.adversary == "semi-honest"


def test_a_module_of_ones_own_is_not_silently_trusted(tmp_path):
    from torch import nn

    plan = Plan.from_flat({**PLAN, "adversary": "malicious"})
    with pytest.raises((PlanError, InputError), match="every round"):
        train(
            make_data(),
            plan,
            tmp_path / "run",
            encoders={"p1": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))},
        )


def test_sessions_are_counted_over_restarts_and_the_next_one_is_refused(tmp_path, monkeypatch):
    """Each has a chance of its own that a false proof passes, and delta pays for so many and no more."""
    monkeypatch.setattr(records, "SESSIONS", 2)
    data, folder = make_data(), tmp_path / "run"
    plan = Plan.from_flat({**PLAN, "adversary": "malicious", "evaluate_every": 0})
    cheat(monkeypatch, Early)
    for begun in (1, 2):
        with pytest.raises(Deviation):
            train(data, plan, folder, resume=begun > 1)
        assert _sessions(folder) == begun
    counted = len(_totals(folder))
    monkeypatch.undo()
    monkeypatch.setattr(records, "SESSIONS", 2)
    with pytest.raises(BudgetExceeded, match="2 sessions, the most that the promised delta covers"):
        train(data, plan, folder, resume=True)
    assert _sessions(folder) == 2 and len(_totals(folder)) == counted


class Quits(CheckedRound):
    """Leaves as soon as it could compute its own total, before anything is judged."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _take_coin(self, message):
        raise ProtocolError("enough")


def test_totals_collected_by_quitting_again_and_again_are_all_paid(tmp_path, monkeypatch):
    """Each attempt gives the one who quits a fresh noisy total: the others' ledgers end it at the budget."""
    data, folder = make_data(), tmp_path / "run"
    plan = {**PLAN, "epochs": 3, "adversary": "malicious", "evaluate_every": 0, "record_views": True}
    plan = Plan.from_flat(plan)
    cheat(monkeypatch, Quits)
    for attempt in range(12):
        with pytest.raises((ProtocolError, BudgetExceeded)) as found:
            train(data, plan, folder, resume=attempt > 0)
        if isinstance(found.value, BudgetExceeded):
            break
        assert len(_totals(folder)) == attempt + 1
    assert isinstance(found.value, BudgetExceeded)
    paid = _totals(folder)
    spent = math.sqrt(sum((each.sensitivity / each.sigma) ** 2 for each in paid))
    assert 3 < len(paid) < 12 and gdp_epsilon(spent, 0.9 * plan.delta) <= plan.budget_epsilon
    assert _journalled(folder) == 0 and not (folder / "result.json").exists()


def test_sessions_among_members_that_are_trusted_are_not_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "SESSIONS", 0)
    done = train(make_data(), Plan.from_flat({**PLAN, "adversary": "semi-honest"}), tmp_path / "run")
    assert done.result["epochs"] == 6


def _sessions(folder):
    return sum(r.is_checked_session for r in read_records(folder) if r.owner == "p0")
