"""A coordinator that sends what is well formed at the wrong time; the party ends in an error that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import EVERYTHING, Federation, _with_table
from victims import plain

from securevfl.errors import AgreementError, SecureVFLError
from securevfl.network.coordinator import Coordinator
from securevfl.network.member import NotAccepted
from securevfl.privacy.ledger import read_records
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=1, batch=16, sigma=4.0)
EARLY = {
    "finish": {"epochs": 3, "stopped": ""},
    "agreed": {"digest": "", "signatures": "[]"},
    "records": {"numbers": [1], "salt": bytes(32)},
    "begin": {"phase": bytes(16), "part": "epoch", "epoch": 1, "restore": -1, "signature": b""},
}


def lie(tmp_path: Path, place: str, kind: str, fields: dict[str, Any]) -> tuple[Any, Path]:
    """What a party ends with if the coordinator sends something else in the place of a control message."""
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=3.0)
    bank, clinic = federation.coordinator(), federation.member("clinic")
    tell = bank.mesh.tell

    def lying(peer: str, said: str, **given: Any) -> None:
        tell(peer, kind if said == place else said, **(fields if said == place else given))

    bank.mesh.tell = lying
    bank.mesh.tell_all = lambda said, **given: [lying(peer, said, **given) for peer in bank.mesh.sessions]

    async def attempt() -> Any:
        task = asyncio.create_task(bank.run())
        try:
            async with asyncio.timeout(240):
                return (await asyncio.gather(clinic.run(), return_exceptions=True))[0]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(attempt()), tmp_path / "clinic"


@pytest.mark.parametrize("kind", EARLY)
@pytest.mark.parametrize("place", ["invite", "agreed"])
def test_a_control_message_out_of_turn_is_refused(tmp_path: Path, place: str, kind: str) -> None:
    found, folder = lie(tmp_path, place, kind, EARLY[kind])
    assert isinstance(found, SecureVFLError), found
    assert "\n" not in str(found) and "object has no" not in str(found)
    assert not (folder / "ledger").exists() or read_records(folder) == []


def test_a_run_is_not_said_to_have_had_more_epochs_than_it_had(tmp_path: Path) -> None:
    found, folder = lie(tmp_path, "finish", "finish", {"epochs": 1000, "stopped": ""})
    assert isinstance(found, AgreementError)
    assert str(found) == "the run is said to have had 1000 epochs; 1 were begun here"
    assert not (folder / "result.json").exists()


def test_why_a_run_stops_cannot_draw_on_the_screen(tmp_path: Path) -> None:
    found, _ = lie(tmp_path, "finish", "finish", {"epochs": 1, "stopped": "\x1b[2J\u202eepsilon 0"})
    assert found["stopped"] == plain(found["stopped"]) == "\\x1b[2J\\u202eepsilon 0"


class Second(Coordinator):
    """Has a plan confirmed, then proposes one with less protection, and begins with that."""

    async def _propose(self, who: Collection[str], proposal: str, digest: str, signature: str) -> None:
        await super()._propose(who, proposal, digest, signature)
        agreement: Any = self.agreement
        quiet = agreement.plan.with_changes(sigma=agreement.plan.sigma / 1000)
        rows = np.argsort(self.own.ids)  # type: ignore[union-attr]
        other = replace(agreement.proposal, plan=quiet).for_training(self.name, self.own, rows, None)
        own = other.sign(self.config.identity)
        await super()._propose(who, other.proposal.to_json(), other.digest, own)


def test_a_weaker_plan_after_the_confirmation_meets_the_same_rules(tmp_path: Path) -> None:
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), patience=3.0)
    rules = replace(EVERYTHING, epsilon=50.0)
    federation.members["clinic"] = replace(federation.members["clinic"], accept=rules)
    bank, clinic = (
        _with_table(Second, federation.server, federation.tables["bank"]),
        federation.member("clinic"),
    )

    async def attempt() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    found = asyncio.run(attempt())[1]
    assert isinstance(found, NotAccepted) and "epsilon" in str(found), found
    assert read_records(tmp_path / "clinic") == [] if (tmp_path / "clinic" / "ledger").exists() else True
