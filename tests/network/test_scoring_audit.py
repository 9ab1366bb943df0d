"""What a scoring service opened is reconciled: entries, notes, quota and what was signed for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import Federation, together
from scoring import LINEAR, Scorers, copied

from securevfl import audit
from securevfl.auditing.scoring import check_scoring
from securevfl.federation.agreed import Quota
from securevfl.network.dispatcher import ServiceDispatcher
from securevfl.network.gathering import gather
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import Ledger

QUOTA = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Federation:
    """Three organisations and a dealer: parties share a key in the pool of masks."""
    plan = LINEAR.with_changes(record_views=True)
    folder = tmp_path_factory.mktemp("trio")
    federation = Federation(folder, plan, parties=("bank", "clinic", "shop"), helpers=("dealer",))
    asyncio.run(federation.run())
    return federation


def served(federation: Federation, folder: Path) -> Path:
    """A service that is asked for as many as its quota allows, and for some more; the folders together."""
    made = copied(federation, folder / "homes")
    scorers = Scorers(made, count=QUOTA + 2, people=QUOTA, rounds=1)

    async def use() -> None:
        async with scorers.running():
            for start in range(0, QUOTA + 2, 2):
                await scorers.score(*scorers.ids[start : start + 2])

    asyncio.run(use())
    gather([made.folder / name for name in ("bank", "clinic", "shop")], folder / "joint")
    return folder / "joint"


def reasons(folder: Path) -> str:
    return " ".join(reason for each in check_scoring(folder, "bank") for reason in each.reasons)


def test_a_sound_service_is_reconciled_and_said(trained, tmp_path):
    folder = served(trained, tmp_path)
    report = audit(folder, "none", data=together(trained.tables, trained.plan), canaries=-1, isolated=False)
    assert report.verdict == "not tested", "what was predicted is not replayed"
    found = [each for each in report.content["findings"] if each["path"] == "scoring service"]
    assert [each["verdict"] for each in found] == ["holds", "holds"]
    assert found[0]["tested"] == ["4 requests for 8 people, with the notes of bank and the signed quota"]
    assert report.content["run"]["scoring"]["shop"] == {"people": 8, "requests": 4}
    said = " ".join(report.content["words"])
    assert "had shop open its part of 8 scores, by 4 requests" in said


def _unwritten(patch: pytest.MonkeyPatch) -> None:
    honest = Gate._account

    def account(self: Gate, mechanism: Any, **said: Any) -> Any:
        mine = said["kind"] == "prediction" and self.owner == "shop"
        return self.ledger.released if mine else honest(self, mechanism, **said)

    patch.setattr(Gate, "_account", account)


def _unnoted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "note_scores", lambda self, **said: self.head)


def _over_quota(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quota, "check", lambda self, *said: None)
    patch.setattr(ServiceDispatcher, "_promised", lambda self: -1000)


@pytest.mark.parametrize(
    "fault, says",
    [
        (_unwritten, "bank noted 4 requests that shop did not write down"),
        (_over_quota, "opened scores of 10 people; the signed quota is 8"),
        (_unnoted, "bank obtained 4 requests that it did not note"),
    ],
)
def test_books_that_do_not_agree_are_found(trained, tmp_path, monkeypatch, fault: Callable[..., None], says):
    if fault is _unnoted:  # a service that was killed for good may leave as many
        monkeypatch.setattr("securevfl.auditing.scoring.UNDER_WAY", 2)
    fault(monkeypatch)
    assert says in reasons(served(trained, tmp_path))


def test_a_quota_that_was_changed_after_it_was_signed_is_found(trained, tmp_path):
    folder = served(trained, tmp_path)
    path = next((folder / "serving" / "agreements").glob("*.json"))
    content = json.loads(path.read_text())
    signed = json.loads(content["signed"]["text"])
    signed["schedule"]["quota"]["people"] = 1000
    path.write_text(json.dumps({**content, "signed": {**content["signed"], "text": json.dumps(signed)}}))
    assert "the digest is not that of the text" in reasons(folder)
    path.unlink()
    assert "the agreement on a quota is not here" in reasons(folder)
