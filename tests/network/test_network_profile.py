"""A card between organisations that goes on from their profile: one digest, one ledger, one budget."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Federation
from test_network_described import write_tables

from securevfl import audit
from securevfl.accountants.gdp import gdp_mu
from securevfl.auditing.agreements import check_agreement
from securevfl.data.share import OwnTable
from securevfl.errors import AgreementError, LedgerError, RunError
from securevfl.federation.agreed import Timetable
from securevfl.federation.folder import RunFolder
from securevfl.network import training
from securevfl.network.agreement import Proposal
from securevfl.network.config import read_party_config
from securevfl.network.continuing import AgreedProfile
from securevfl.network.folders import PROFILE_FILE
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import read_ledger, read_records
from securevfl.settings.plan import Plan

FIRST, BOTH = 2.0, 8.0
NAMES = ("bank", "shop", "dealer")


def federation_in(
    folder: Path, model: str, epsilon: float, *, profile: Path | None = None, **server: Any
) -> Federation:
    """Everybody names its own folder of the profile."""
    folder.mkdir(exist_ok=True)
    plan = Plan(algorithm="sealed", model=model, epsilon=epsilon, record_views=True)
    plan = plan.with_changes(settings={"adversary": "semi-honest"})
    found = Federation(folder, plan, parties=NAMES[:2], helpers=NAMES[2:], **{"test_fraction": 0.3, **server})
    found.tables = write_tables(folder)
    if profile is not None:
        found.server = replace(found.server, profile=profile / "bank")
        found.members = {name: replace(each, profile=profile / name) for name, each in found.members.items()}
    return found


def attempt(federation: Federation) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What everybody's run gave or raised, and what each was told."""
    said: dict[str, list[str]] = {name: [] for name in federation.names}

    async def play() -> list[Any]:
        nodes = [
            federation.coordinator(say=said["bank"].append),
            *(federation.member(name, say=said[name].append) for name in federation.members),
        ]
        async with asyncio.timeout(240):
            return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    return dict(zip(federation.names, asyncio.run(play()), strict=True)), said


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    asyncio.run(federation_in(folder, "profile", FIRST).run())
    return folder


@pytest.fixture
def own(profiled: Path, tmp_path: Path) -> Path:
    """Everybody's folders of the profile, as if nobody had gone on from it."""
    return Path(shutil.copytree(profiled, tmp_path / "profile"))


@pytest.fixture(scope="module")
def trained(profiled: Path) -> Any:
    profile = Path(shutil.copytree(profiled, profiled.parent / "used"))
    federation = federation_in(profiled.parent / "card", "scorecard", BOTH, profile=profile)
    results, said = attempt(federation)
    return federation, profile, results, said


def test_both_stand_in_one_ledger_under_one_budget(trained: Any) -> None:
    federation, profile, results, _ = trained
    assert results["bank"]["model"] == "scorecard" and results["bank"]["stopped"] is None
    for name in NAMES[:2]:
        spend = results[name]["privacy"][name]
        assert spend["mu"] == pytest.approx(gdp_mu(BOTH, 1e-5), rel=1e-6) and spend["epsilon"] <= BOTH
        before, now = (
            (folder / name / "ledger" / f"{name}.jsonl").read_bytes()
            for folder in (profile, federation.folder)
        )
        assert now.startswith(before) and len(now) > len(before)
        kinds = [each.kind for each in read_records(federation.folder / name) if each.mu]
        assert kinds[:4] == ["bins"] * 3 + ["label histogram"]
        assert not {"bins", "label histogram"} & set(kinds[4:])


def test_consent_names_the_profile_and_shows_what_both_cost(trained: Any) -> None:
    _, profile, _, said = trained
    digest = json.loads((profile / "shop" / "agreement.json").read_text())["digest"]
    (line,) = [each for each in said["shop"] if each.startswith("profile ")]
    assert digest in line and f"epsilon {FIRST:g} at delta 1e-05" in line
    assert [each for each in said["shop"] if each.startswith(f"price         epsilon {BOTH:g} to bank")]


def test_the_joint_audit_follows_both(trained: Any, tmp_path: Path) -> None:
    federation, *_ = trained
    gather([federation.folder / name for name in NAMES], tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    report = audit(tmp_path / "joint", attacks="none", data=data, canaries=-1)
    assert report.verdict == "holds", report.content["words"]
    assert any("signatures of profile" in each for f in report.content["findings"] for each in f["tested"])
    (tmp_path / "joint" / PROFILE_FILE).unlink()
    (finding,) = check_agreement(tmp_path / "joint")
    assert finding.verdict.value == "violated" and "whose agreement is missing" in finding.reasons[0]


def test_one_organisation_audits_its_own_part_of_both(trained: Any) -> None:
    federation, _, _, _ = trained
    folder = federation.folder / "shop"
    data = load_truth(folder, {"shop": federation.tables["shop"]})
    report = audit(folder, attacks="none", data=data, canaries=-1)
    assert report.verdict != "violated", report.content["words"]


# -- sides that lie -----------------------------------------------------------------------------------------


def assert_refused(found: dict[str, Any], name: str, said: str) -> None:
    assert isinstance(found[name], AgreementError) and said in str(found[name]), found
    assert all(isinstance(each, Exception) for each in found.values())


def releases(folder: Path) -> list[str]:
    ledgers = [folder / name / "ledger" / f"{name}.jsonl" for name in NAMES[:2]]
    return [entry.content["kind"] for path in ledgers for entry in read_ledger(path) if entry.is_release]


def test_another_profile_is_refused(own: Path, tmp_path: Path) -> None:
    """Of the same people by the same rules, but not the one that the others know."""
    other = tmp_path / "other"
    asyncio.run(federation_in(other, "profile", FIRST, time_unit=0.002).run())
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)
    federation.server = replace(federation.server, profile=other / "bank")
    found, _ = attempt(federation)
    assert_refused(found, "shop", "the proposal goes on from the profile")
    assert releases(tmp_path / "card") == releases(own)


@pytest.mark.parametrize("liar", ["bank", "shop"])
def test_a_profile_that_one_side_does_not_know_of_is_refused(own: Path, tmp_path: Path, liar: str) -> None:
    """A member that says nothing of it would pay for a whole card; a coordinator would, too."""
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)
    if liar == "bank":
        federation.server = replace(federation.server, profile=None)
    else:
        federation.members["shop"] = replace(federation.members["shop"], profile=None)
    assert_refused(attempt(federation)[0], "shop", "no profile")


def test_a_profile_begins_one_run(trained: Any, tmp_path: Path) -> None:
    """The coordinator has a copy of its folder and would go on twice; the shop's folder knows."""
    _, profile, _, _ = trained
    federation = federation_in(tmp_path / "second", "scorecard", BOTH, profile=profile)
    shutil.copytree(profile / "bank", tmp_path / "copy")
    (tmp_path / "copy" / "continued.json").unlink()
    federation.server = replace(federation.server, profile=tmp_path / "copy")

    async def join() -> None:
        await federation.member("shop").run()

    with pytest.raises(RunError, match="a profile begins one run"):
        asyncio.run(join())
    assert not (tmp_path / "second" / "shop" / "ledger").exists()


def test_nor_does_it_go_on_with_one_that_stood_still_meanwhile(trained: Any, tmp_path: Path) -> None:
    """A first run was agreed on and stopped before it released anything; the second one has released."""
    _, profile, _, _ = trained
    (tmp_path / "agreement.json").write_text("{}")
    with pytest.raises(RunError, match="a profile begins one run"):
        AgreedProfile.open(profile / "shop").begin(RunFolder(tmp_path), "shop", recorded=True)


def test_two_runs_cannot_begin_at_the_same_time(own: Path, tmp_path: Path) -> None:
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)

    async def join() -> None:
        await federation.member("shop").run()

    with RunFolder(own / "shop").locked(), pytest.raises(RunError, match="in use"):
        asyncio.run(join())


def test_a_run_that_was_never_agreed_on_does_not_use_a_profile_up(own: Path, tmp_path: Path) -> None:
    federation = federation_in(tmp_path / "refused", "scorecard", BOTH, profile=own)
    rules = federation.members["dealer"].accept
    assert rules is not None
    federation.members["dealer"] = replace(
        federation.members["dealer"], accept=replace(rules, members=("bank",))
    )
    assert all(isinstance(each, Exception) for each in attempt(federation)[0].values())
    for name in NAMES:
        folder = federation_in(tmp_path / "again", "scorecard", BOTH).folder / name
        folder.mkdir()
        AgreedProfile.open(own / name).begin(RunFolder(folder), name, recorded=True)


def test_other_columns_are_refused(own: Path, tmp_path: Path) -> None:
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)
    table = federation.tables["shop"]
    federation.tables["shop"] = OwnTable.from_arrays(table.block[:, :2], ids=list(table.ids))
    assert_refused(attempt(federation)[0], "bank", "columns, test part or split")


def test_other_people_are_refused(own: Path, tmp_path: Path) -> None:
    """Everybody has lost the common IDs, so that they are looked for again, among other people."""
    for name in NAMES[:2]:
        (own / name / "alignment.json").unlink()
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)
    for name in NAMES[:2]:
        table = federation.tables[name]
        federation.tables[name] = replace(table, ids=np.array([f"new {each}" for each in table.ids]))
    assert_refused(lied_to(federation, lambda proposal: proposal), "shop", "other records than the profile")


def test_another_split_is_refused(own: Path, tmp_path: Path) -> None:
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own, test_fraction=0.4)
    found = lied_to(federation, lambda proposal: proposal)
    assert_refused(found, "shop", "columns, test part or split")


@pytest.mark.parametrize("said", [0.5, 3.0])
def test_a_profile_that_is_said_to_have_cost_something_else_is_refused(
    own: Path, tmp_path: Path, said: float
) -> None:
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)

    def lie(proposal: Proposal) -> Proposal:
        assert proposal.plan is not None
        return replace(proposal, plan=proposal.plan.with_changes(settings={"profile_epsilon": said}))

    assert_refused(lied_to(federation, lie), "shop", f"a profile of epsilon {said:g}")


def lied_to(federation: Federation, lie: Any) -> dict[str, Any]:
    """The coordinator proposes something else, and checks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        checks = AgreedProfile.check_agreement

        def check(profile: AgreedProfile, agreement: Any, ids: Any) -> None:
            if profile.path.name != "bank":
                checks(profile, agreement, ids)

        proposed = training.Proposal

        def proposal(**given: Any) -> Proposal:
            return lie(Proposal(**given))

        proposal.from_json = proposed.from_json  # type: ignore[attr-defined]
        patch.setattr(AgreedProfile, "check_agreement", check)
        patch.setattr(training, "Proposal", proposal)
        return attempt(federation)[0]


def test_a_ledger_that_forgets_the_profile_is_found(own: Path, tmp_path: Path) -> None:
    """The bank begins a ledger of its own; the shop holds the newest head of the old one."""
    shutil.rmtree(own / "bank" / "ledger")
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)
    found, _ = attempt(federation)
    assert not any(isinstance(each, Exception) for each in found.values())
    gather([federation.folder / name for name in NAMES], tmp_path / "joint")
    with pytest.raises(LedgerError):
        read_records(tmp_path / "joint")
    data = load_truth(tmp_path / "joint", federation.tables)
    assert audit(tmp_path / "joint", attacks="none", data=data, canaries=-1).verdict == "violated"


def test_nothing_of_the_profile_comes_again() -> None:
    plan = Plan(algorithm="sealed", model="scorecard", epochs=62, settings={"profile_epsilon": FIRST})
    table = Timetable.of_training(plan, parties=2, n_train=10, n_test=2, restarts=3)
    table.check("epoch", 2)
    table.check("final", 1)
    for part, epoch in (("prepare", 0), ("epoch", 1)):
        with pytest.raises(AgreementError, match="belongs to the profile"):
            table.check(part, epoch)


def test_a_killed_member_goes_on(own: Path, tmp_path: Path) -> None:
    federation = federation_in(tmp_path / "card", "scorecard", BOTH, profile=own)

    async def play() -> list[Any]:
        first = federation.member("shop")
        others = [federation.coordinator(), federation.member("dealer")]
        tasks = [asyncio.create_task(node.run()) for node in others]
        gone = asyncio.create_task(first.run())
        first.on_progress = lambda now: now.epoch == 5 and gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        async with asyncio.timeout(240):
            return await asyncio.gather(federation.member("shop").run(), *tasks)

    shop, bank, _ = asyncio.run(play())
    # What was opened again counts twice, so that the budget may refuse the last totals.
    assert shop["privacy"]["shop"]["epsilon"] <= BOTH and bank["epochs"] >= 55


def test_the_key_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from securevfl.network import config

    monkeypatch.setattr(config, "load_identity", lambda path: Federation(tmp_path, Plan()).server.identity)
    text = 'run = "card"\nfolder = "card"\ncertificates = "c"\ncoordinator = "shop"\naddress = "h:1"\n'
    (tmp_path / "party.toml").write_text(text + 'profile = "runs/profile"\n')
    assert read_party_config(tmp_path / "party.toml").profile == tmp_path / "runs/profile"
