"""Audits of networked runs: each organisation's own folder, and all of them together."""

from __future__ import annotations

import asyncio
import json
import os
import shutil

import numpy as np
import pytest
from federation import Federation, together

from securevfl import audit
from securevfl.errors import RunError
from securevfl.federation.site import Site
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import Ledger
from securevfl.settings.plan import Plan


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Federation:
    plan = Plan(
        algorithm="vafl-sync", epochs=2, batch=16, sigma=0.8, encoder_training="none", record_views=True
    )
    federation = Federation(tmp_path_factory.mktemp("run"), plan)
    asyncio.run(federation.run())
    return federation


@pytest.fixture
def joint(federation, tmp_path):
    out = tmp_path / "joint"
    gather([federation.folder / name for name in federation.names], out)
    return out


def test_one_folder_alone(federation):
    report = audit(federation.folder / "clinic", attacks="none")
    assert report.verdict == "not tested"
    assert set(report.content["owners"]) == {"clinic"}
    mine = [f for f in report.content["findings"] if f["promise"] == "clinic against bank"]
    assert any("reconciled with the ledger" in f["tested"] for f in mine)
    bank = audit(federation.folder / "bank", attacks="none")
    unknown = [f for f in bank.content["findings"] if f["promise"] == "clinic against bank"]
    assert unknown and {f["verdict"] for f in unknown} == {"not tested"}
    assert "the ledger of clinic is not here" in unknown[0]["reasons"][0]


def test_all_together(federation, joint):
    data = load_truth(joint, federation.tables)
    np.testing.assert_array_equal(data.train[1], together(federation.tables, federation.plan).train[1])
    report = audit(joint, attacks=["embedding-inversion"], data=data, isolated=False)
    assert set(report.content["owners"]) >= {"clinic", "shop"}
    assert report.verdict in ("holds", "not tested")
    assert json.dumps(report.content["owners"]["clinic"]).count("bank")
    assert any(each["applicable"] for each in report.content["attacks"])


def test_a_cut_ledger_is_found_only_where_the_heads_are(federation, joint):
    path = joint / "ledger" / "clinic.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    report = audit(joint, attacks="none")
    assert report.verdict == "violated"
    assert "cut" in report.content["findings"][0]["reasons"][0]


def test_a_ledger_that_should_be_here_is_missed(joint):
    (joint / "ledger" / "shop.jsonl").unlink()
    assert "missing" in audit(joint, attacks="none").content["findings"][0]["reasons"][0]


def _with_link(folder):
    secret = folder.with_name("secret")
    secret.write_text("private")
    (folder / "models" / "x.json").symlink_to(secret)


def _with_linked_folder(folder):
    (folder / "views" / "clinic").rename(folder.with_name("elsewhere"))
    (folder / "views" / "clinic").symlink_to(folder.with_name("elsewhere"))


def _with_pipe(folder):
    os.mkfifo(folder / "receipts" / "clinic-2.json")


def _with_ledger_of_another(folder):
    shutil.copy(folder / "ledger" / "clinic.jsonl", folder / "ledger" / "bank.jsonl")


def _with_model_of_another(folder):
    (folder / "models" / "bank.json").write_text("{}")


def _with_head_of_another(folder):
    (folder / "models" / "server.json").write_text("{}")


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (_with_link, "is a link"),
        (_with_linked_folder, "is a link"),
        (_with_pipe, "or no file"),
        (_with_ledger_of_another, "is not of clinic"),
        (_with_model_of_another, "is not of clinic"),
        (_with_head_of_another, "than an earlier folder brings"),
    ],
)
def test_a_folder_brings_nothing_but_its_own_files(federation, tmp_path, lie, says):
    """A link took a file of whoever gathers along; a pipe never ends; another's ledger replaced that."""
    brought = tmp_path / "brought"
    shutil.copytree(federation.folder / "clinic", brought)
    lie(brought)
    with pytest.raises(RunError, match=says):
        gather([federation.folder / "bank", brought], tmp_path / "joint")


def test_gathering_refuses_what_does_not_belong_together(federation, tmp_path):
    folders = [federation.folder / name for name in federation.names]
    with pytest.raises(RunError, match="same organisation"):
        gather([folders[0], folders[0]], tmp_path / "a")
    with pytest.raises(RunError, match="no run over a network"):
        gather([tmp_path], tmp_path / "b")
    other = tmp_path / "other"
    shutil.copytree(folders[1], other)
    content = json.loads((other / "agreement.json").read_text())
    (other / "agreement.json").write_text(json.dumps({**content, "digest": "f" * 32}))
    with pytest.raises(RunError, match="different agreements"):
        gather([folders[0], other], tmp_path / "c")
    found = gather(folders[:2], tmp_path / "d")
    assert found["missing"] == ["shop"]
    with pytest.raises(RunError, match="exists already"):
        gather(folders, tmp_path / "d")


def test_a_helpers_folder_alone_has_no_ids(federation, tmp_path):
    helper = tmp_path / "helper"
    shutil.copytree(federation.folder / "clinic", helper)
    (helper / "alignment.json").unlink()
    assert gather([helper], tmp_path / "joint")["missing"] == ["bank", "shop"]
    with pytest.raises(RunError, match="which records a networked run had in common"):
        load_truth(tmp_path / "joint", federation.tables)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": "test", "digest": "d", "homes": 3}'])
def test_a_damaged_agreement_is_named(federation, tmp_path, content):
    shutil.copytree(federation.folder / "clinic", tmp_path / "clinic")
    (tmp_path / "clinic" / "agreement.json").write_text(content)
    with pytest.raises(RunError, match=r"agreement\.json is damaged"):
        gather([tmp_path / "clinic"], tmp_path / "joint")
    member = Federation(tmp_path, federation.plan).member("clinic")
    with pytest.raises(RunError, match=r"agreement\.json is damaged"):
        asyncio.run(member.run())


def test_nobody_takes_up_anothers_folder(federation, tmp_path):
    shutil.copytree(federation.folder / "shop", tmp_path / "clinic")
    member = Federation(tmp_path, federation.plan).member("clinic")
    with pytest.raises(RunError, match="belongs to shop, not to clinic"):
        asyncio.run(member.run())


@pytest.mark.parametrize("lie", ["mode", "owner"])
def test_a_folder_in_which_others_write_is_not_used(federation, tmp_path, monkeypatch, lie):
    """Whoever made it before could plant an agreement, a shorter ledger, or links in their place."""
    (tmp_path / "clinic").mkdir()
    if lie == "mode":
        (tmp_path / "clinic").chmod(0o777)
    else:
        other = (tmp_path / "clinic").stat().st_uid + 4711
        monkeypatch.setattr(os, "geteuid", lambda: other)
        if (tmp_path / "clinic").stat().st_uid == 0:  # root's folders are taken; give it to somebody else
            os.chown(tmp_path / "clinic", 4712, -1)
    with pytest.raises(RunError, match="others may write in"):
        asyncio.run(Federation(tmp_path, federation.plan).member("clinic").run())


def test_a_ledger_that_was_begun_anew_is_gathered_and_found(federation, tmp_path):
    folders = [tmp_path / name for name in federation.names]
    for folder in folders:
        shutil.copytree(federation.folder / folder.name, folder)
    path = tmp_path / "clinic" / "ledger" / "clinic.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    gather(folders, tmp_path / "joint")
    assert audit(tmp_path / "joint", attacks="none").verdict == "violated"


def test_a_plan_that_was_not_signed_is_found(federation, joint):
    plan = joint / "plan.toml"
    plan.write_text(plan.read_text().replace("sigma = 0.8", "sigma = 8.0"))
    report = audit(joint, attacks="none", canaries=-1)
    assert report.verdict == "violated"
    assert "not the plan that was signed" in json.dumps(report.content["findings"])


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("note_alignment", lambda self, **said: self.head, "does not say that its records were aligned"),
        ("begin", lambda self, *said: None, "outside of any phase"),
    ],
)
def test_what_the_ledger_leaves_out_is_missed(federation, tmp_path, monkeypatch, name, fault, says):
    monkeypatch.setattr(Ledger, name, fault)
    other = Federation(tmp_path, federation.plan)
    asyncio.run(other.run())
    monkeypatch.undo()
    gather([other.folder / each for each in other.names], tmp_path / "joint")
    report = audit(tmp_path / "joint", attacks="none", canaries=-1)
    assert report.verdict == "violated" and says in json.dumps(report.content["findings"])


def test_an_entry_with_other_noise_than_the_plans_is_found(federation, tmp_path, monkeypatch):
    honest = Site.__init__

    def halved(self, name, plan, *given, **options):
        honest(self, name, plan.with_changes(sigma=plan.sigma / 2), *given, **options)

    monkeypatch.setattr(Site, "__init__", halved)
    other = Federation(tmp_path, federation.plan)
    asyncio.run(other.run())
    monkeypatch.undo()
    gather([other.folder / each for each in other.names], tmp_path / "joint")
    report = audit(
        tmp_path / "joint", attacks="none", canaries=-1, data=load_truth(tmp_path / "joint", other.tables)
    )
    assert report.verdict == "violated"
    assert "another mechanism, clip or noise" in json.dumps(report.content["findings"])
