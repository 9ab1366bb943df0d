"""Sealed training without a dealer as a whole: who deals, what is promised, what an audit says, resuming."""

import numpy as np
import pytest
from test_sealed_scorecard import people
from test_sealed_training import make_data, run

from securevfl.accountants.sealed import flooding_slack
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed import tables
from securevfl.algorithms.sealed.adversary import flooding, settled, settled_dealer
from securevfl.auditing import audit
from securevfl.errors import PlanError, ProtocolError
from securevfl.federation.run import load_run, train
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.protocols.sealed.encrypted import EncryptedParty, EncryptedRound
from securevfl.protocols.sealed.third import ThirdParty, ThirdRound
from securevfl.settings.plan import Plan


def plan_of(**fields):
    return Plan.from_flat({"algorithm": "sealed", "model": "linear", "epsilon": 8.0, "epochs": 6, **fields})


# -- the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parties,close", [(2, 0.02), (3, 2e-3)])
def test_the_model_is_that_of_a_dealer(parties, close):
    """Two members clamp each score and have tables; three share the very same series."""
    data = make_data(parties=parties)
    here, there = (run(data, dealer=dealer, centring=0.0, epochs=8) for dealer in ("none", "auto"))
    assert here.test["auc"] == pytest.approx(there.test["auc"], abs=close)
    opened = [each.result["evaluation"] for each in (here, there)]
    assert opened[0]["auc"] == pytest.approx(opened[1]["auc"], abs=close)


@pytest.mark.parametrize(
    "parties,fields",
    [
        (2, {"batch": 120, "epochs": 2}),
        (3, {"batch": 60, "epochs": 12}),
        (2, {"label_holder": "server", "epochs": 6}),  # a third member without features
        (5, {"epochs": 12}),
    ],
)
def test_batches_more_members_and_labels_apart(parties, fields):
    assert run(make_data(parties=parties), dealer="none", **fields).test["auc"] > 0.85


@pytest.mark.parametrize("parties", [2, 3])
def test_scorecards_and_predictions(tmp_path, parties):
    data = make_data(parties=parties, records=600)
    plan = Plan.from_flat({"algorithm": "sealed", "model": "scorecard", "epsilon": 12.0, "dealer": "none"})
    done = train(data, plan, tmp_path / "run")
    assert done.test["auc"] > 0.8 and done.result["evaluation"]["se"] > 0
    new = [np.full((2, 4), 0.5), *[np.full((2, 4), -0.5)] * (parties - 1)]
    first = done.predict(new, ids=["one", "two"])
    assert np.allclose(first, load_run(tmp_path / "run").predict(new, ids=["three", "four"]))
    assert done.result["privacy"] and "dealer" not in {r.owner for r in read_records(tmp_path / "run")}


# -- who deals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parties,fields,apart,who,why",
    [
        (2, {}, False, "dealer", "simulated"),
        (2, {"dealer": "none"}, False, "none", "encrypt"),
        (2, {}, True, "none", "the two of them encrypt"),
        (3, {}, True, "none", "deal for each other"),
        (2, {"dealer": "broker"}, True, "broker", "as the plan says"),
        (3, {"collusion": 2, "dealer": "broker"}, True, "broker", "as the plan says"),
    ],
)
def test_the_plan_says_who_deals(parties, fields, apart, who, why):
    found, reason = settled_dealer(plan_of(**fields), make_data(parties=parties), apart=apart)
    assert found == who and why in reason


@pytest.mark.parametrize(
    "parties,task,fields,why",
    [
        (3, "binary", {"collusion": 2}, "no two of them collude"),
        (2, "binary", {"model": "mlp"}, "change in every iteration"),
        (2, "regression", {"label_low": -9.0, "label_high": 9.0}, "regression"),
        (3, "multiclass", {}, "multiclass"),
        (2, "binary", {"adversary": "malicious"}, "may cheat"),
    ],
)
@pytest.mark.parametrize("dealer,apart", [("none", False), ("auto", True)])
def test_who_needs_a_dealer_is_told_why_in_one_line(parties, task, fields, why, dealer, apart):
    plan, data = plan_of(**fields, dealer=dealer), make_data(parties=parties, task=task)
    with pytest.raises(PlanError, match=why) as caught:
        resolve(plan, data, apart=apart)
    assert "set dealer to the name" in str(caught.value) and "\n" not in str(caught.value)
    named, _ = resolve(plan.with_changes(settings={"dealer": "broker"}), data, apart=apart)
    assert named.settings.dealer == "broker"


def test_members_are_malicious_where_somebody_deals_between_organisations():
    data = make_data()
    adversaries = {
        dealer: resolve(plan_of(dealer=dealer), data, apart=True)[0].settings.adversary
        for dealer in ("auto", "none", "broker")
    }
    assert adversaries == {"auto": "semi-honest", "none": "semi-honest", "broker": "malicious"}
    assert settled(plan_of(dealer="none"), data, apart=True)[1] == "there is no dealer"


def test_a_dealer_may_have_any_name_but_a_members(tmp_path):
    data = make_data()
    done = train(data, plan_of(dealer="broker", epochs=2, record_views=True), tmp_path / "run")
    assert (tmp_path / "run" / "views" / "broker").is_dir() or done.plan.settings.dealer == "broker"
    for name in ("p1", "p0"):
        with pytest.raises(PlanError, match="names a helper"):
            train(data, plan_of(dealer=name))


# -- promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parties,protect", [(2, "label"), (3, "features"), (4, "person")])
def test_the_ledger_adds_up_to_the_target(tmp_path, parties, protect):
    data = make_data(parties=parties)
    done = run(data, tmp_path / "run", dealer="none", epsilon=2.0, protect=protect, epochs=3)
    worst = max(each["epsilon"] for each in done.privacy.values() if each["epsilon"] is not None)
    assert 1.95 < worst <= 2.0 and done.plan.accounted_delta < done.plan.delta


def test_the_flooding_is_in_the_printed_delta():
    data = make_data()
    plan, _ = resolve(plan_of(dealer="none"), data, apart=False)
    needed = flooding(plan, data)
    assert 0 < needed < plan.delta - plan.accounted_delta
    with pytest.raises(PlanError, match=r"more than the .* set aside"):
        resolve(plan_of(dealer="none", epsilon=40.0), data, apart=False)
    # 32,561 records of 123 columns, 80 rounds: every answer of both members, at epsilon 1.
    size = {"records": 32_561, "widths": (67, 56), "outputs": 1, "products": 4}
    assert 2**-47 < flooding_slack(epsilon=1.0, rounds=80, **size) < 2**-45


# -- evidence -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parties", [2, 3])
def test_an_audit_holds_with_every_path_tested(tmp_path, parties):
    data = make_data(parties=parties)
    done = train(data, plan_of(dealer="none", record_views=True, epochs=4), tmp_path / "run")
    report = audit(done, attacks="none", data=data)
    assert report.verdict == "holds"
    words = {seen.kind for seen in View(tmp_path / "run" / "views" / "p1")}
    expected = {"sealed-factors", "sealed-offer"} if parties == 2 else {"sealed-peer-deal", "sealed-share"}
    assert expected <= words and "sealed-deal" not in words


@pytest.mark.parametrize(
    "fields,rounds", [({"epochs": 6}, 6), ({"epochs": 3, "batch": 120}, 6)], ids=["full", "batches"]
)
def test_a_pool_is_filled_while_rounds_run(tmp_path, fields, rounds):
    """Only the first correlation is waited for; all others are made beside a round, and each serves one."""
    train(make_data(records=300), plan_of(dealer="none", record_views=True, **fields), tmp_path / "run")
    seen = [each for each in View(tmp_path / "run" / "views" / "p1") if each.receiver == "p1"]
    offered = [each.fields["number"] for each in seen if each.kind == "sealed-offer"]
    assert offered == list(range(rounds + 1))  # the last one is the evaluation's
    kinds = [each.kind for each in seen if each.kind in ("sealed-factors", "sealed-offer", "sealed-blinded")]
    assert kinds[:5] == ["sealed-offer", "sealed-factors", "sealed-offer", "sealed-offer", "sealed-blinded"]
    beside = kinds[: len(kinds) - kinds[::-1].index("sealed-offer") - 1]  # all of training
    assert beside.count("sealed-offer") == rounds and beside.count("sealed-factors") == rounds


def _counted(monkeypatch, party):
    """Whoever sets up a session from now on."""
    sessions, honest = [], party.setup
    monkeypatch.setattr(party, "setup", lambda self: sessions.append(self.index) or honest(self))
    return sessions


def _ending(monkeypatch, machine, at):
    """A member's machine breaks off in a round, as a lost connection would."""
    honest, seen = machine._receive, []

    def broken(self, sender, message):
        if self.round >= at:
            raise ProtocolError("the connection is lost")
        seen.append(self.round)
        return honest(self, sender, message)

    monkeypatch.setattr(machine, "_receive", broken)


@pytest.mark.parametrize(
    "parties,party,machine", [(2, EncryptedParty, EncryptedRound), (3, ThirdParty, ThirdRound)]
)
def test_a_run_that_broke_off_begins_a_new_session(tmp_path, monkeypatch, parties, party, machine):
    """Masks, keys and correlations of a broken session serve nothing again; what is repeated is counted."""
    data, plan = make_data(parties=parties), plan_of(dealer="none", epochs=6, budget_epsilon=20.0)
    sessions = _counted(monkeypatch, party)
    with monkeypatch.context() as broken:
        _ending(broken, machine, 3)
        with pytest.raises(ProtocolError, match="lost"):
            train(data, plan, tmp_path / "run")
    before = len(sessions)
    counted = sum(r.kind.startswith("totals") for r in read_records(tmp_path / "run"))
    done = train(data, plan, tmp_path / "run", resume=True)
    assert done.result["epochs"] == 6 and len(sessions) - before >= parties
    assert sum(r.kind.startswith("totals") for r in read_records(tmp_path / "run")) > counted
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"sealed-offer" not in kept and b"\x5e\xa1\x10\x04" not in kept  # no ciphertext on disk


def card_plan(**fields):
    return Plan.from_flat(
        {"algorithm": "sealed", "model": "scorecard", "epsilon": 8.0, "dealer": "none", **fields}
    )


@pytest.mark.slow  # tests/protocols/test_sealed_continued.py has the machines
def test_a_card_encrypts_the_rows_of_both_histograms_once(tmp_path, monkeypatch):
    """Bins are joined between the two; the replayed totals have the noise of the joined ones."""
    honest = tables.join_weak_bins

    def joining(counts, std):
        """Noise alone decides whether a bin is weak; the first two are joined where none is."""
        place = honest(counts, std)
        return np.maximum(place - 1, 0) if place[-1] == len(place) - 1 else place

    monkeypatch.setattr(tables, "join_weak_bins", joining)
    sessions, data = _counted(monkeypatch, EncryptedParty), people(rows=1700, columns=1)
    done = train(data, card_plan(record_views=True), tmp_path / "run")
    kinds = [r.kind for r in read_records(tmp_path / "run") if r.owner == "p1"]
    assert kinds.count("label histogram") == kinds.count("residual histogram") == 1
    assert len(sessions) == 2 * 4  # histograms, first fit, last fit, evaluation
    seen = [each for each in View(tmp_path / "run" / "views" / "p1") if each.receiver == "p1"]
    (joins,) = [each.fields["places"] for each in seen if each.kind == "sealed-joins"]
    assert joins != list(range(len(joins)))  # otherwise this tests nothing
    rows = [each.fields["columns"] for each in seen if each.kind == "sealed-encrypted-rows"]
    assert len(joins) in rows
    report = audit(done, attacks="none", canaries=-1, data=data)
    assert report.verdict == "holds"


@pytest.mark.slow
def test_a_card_that_broke_off_encrypts_its_rows_again(tmp_path, monkeypatch):
    """The residuals' histogram goes on with rows of the first one, unless that session is gone."""
    data, plan = people(rows=1700, columns=1), card_plan(budget_epsilon=18.0)
    sessions, number = _counted(monkeypatch, EncryptedParty), 1 + 20  # a histogram, the first fit
    with monkeypatch.context() as broken:
        _ending(broken, EncryptedRound, number)
        with pytest.raises(ProtocolError, match="lost"):
            train(data, plan, tmp_path / "run")
    assert len(sessions) == 4  # histogram and first fit
    done = train(data, plan, tmp_path / "run", resume=True)
    assert done.result["stopped"] is None and len(sessions) == 10  # residuals, last fit, evaluation
    kinds = [r.kind for r in read_records(tmp_path / "run") if r.owner == "p1"]
    assert kinds.count("residual histogram") == 2  # what was repeated is counted
