"""Organisations without a dealer: what they sign, what is written down, what an audit makes of it."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from federation import Federation, _with_table

from securevfl import audit
from securevfl.algorithms.sealed import training
from securevfl.errors import AgreementError
from securevfl.network.consent import agreement_lines
from securevfl.network.coordinator import Coordinator
from securevfl.privacy.ledger import read_records
from securevfl.protocols.sealed.cipher import ENCRYPTION
from securevfl.protocols.sealed.correlations import PoolMachine
from securevfl.protocols.sealed.kernel import DIGEST, TABLES
from securevfl.settings.plan import Plan

PARTIES = {2: ("bank", "clinic"), 3: ("bank", "clinic", "shop")}


def plan_of(**fields):
    return Plan.from_flat({"algorithm": "sealed", "model": "linear", "epsilon": 8.0, "epochs": 2, **fields})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two members that encrypt."""
    federation = Federation(tmp_path_factory.mktemp("two"), plan_of(), parties=PARTIES[2])
    proceed, federation.threads = PoolMachine._proceed, set()

    def noted(machine):
        federation.threads.add(threading.current_thread())
        return proceed(machine)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PoolMachine, "_proceed", noted)
        asyncio.run(federation.run())
    return federation


def agreed(folder, name="clinic"):
    return json.loads(json.loads((folder / name / "agreement.json").read_text())["text"])


def test_two_members_sign_for_tables_and_encryption(two):
    for name in two.names:
        assert agreed(two.folder, name)["constants"] == {TABLES: DIGEST, "encryption": ENCRYPTION}
        hidden = [r.assumption for r in read_records(two.folder / name) if r.mechanism == "encrypted"]
        assert hidden and all(DIGEST[:16] in words for words in hidden)


def test_connections_are_served_while_correlations_are_made(two):
    assert two.threads and threading.main_thread() not in two.threads


def test_whoever_deals_otherwise_signs_for_no_tables(tmp_path):
    federation = Federation(tmp_path, plan_of(), parties=PARTIES[3])
    asyncio.run(federation.run())
    assert agreed(tmp_path)["constants"] == {}


class OtherTables(Coordinator):
    """Would compute with other tables than those that bound everybody's residuals."""

    async def confirm(self, who):
        self.agreement = replace(self.agreement, constants={TABLES: "0" * 64, "encryption": ENCRYPTION})
        self.shown = agreement_lines(self.agreement, self.name)
        await super().confirm(who)


def test_members_with_other_tables_sign_nothing(tmp_path):
    federation = Federation(tmp_path, plan_of(), parties=PARTIES[2])
    bank = _with_table(OtherTables, federation.server, federation.tables["bank"])

    async def both():
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), federation.member("clinic").run(), return_exceptions=True)

    found = asyncio.run(both())
    assert isinstance(found[1], AgreementError) and "same version" in str(found[1])
    assert isinstance(found[0], Exception)
    assert f"constant      {TABLES} {'0' * 64}" in bank.shown
    assert read_records(tmp_path / "clinic") == []


def test_an_audit_with_other_tables_says_so(two, monkeypatch):
    monkeypatch.setattr(training, "tables_digest", lambda: "0" * 64)
    findings = audit(two.folder / "clinic", attacks="none", canaries=-1).content["findings"]
    about = [each for each in findings if f"members signed for {TABLES} {DIGEST}" in str(each["reasons"])]
    assert [each["verdict"] for each in about] == ["not tested"]
