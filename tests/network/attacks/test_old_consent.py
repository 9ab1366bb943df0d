"""Consent that was given once, used again: old signatures, changed agreements, and clocks that are wrong."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from crashes import Process, processes
from federation import Federation, identities

from securevfl.errors import AgreementError, CertificateError
from securevfl.network import identity
from securevfl.network.coordinator import Coordinator
from securevfl.network.joining import Joined
from securevfl.network.relay import Introducer
from securevfl.network.session import new_incarnation
from securevfl.privacy.ledger import read_ledger
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, sigma=4.0, seed=3)


def played(given: Federation, bank: Coordinator | None = None, *names: str) -> dict[str, Any]:
    """Everybody named, and the bank, to the end: what each ends with."""
    nodes: dict[str, Any] = {"bank": given.coordinator() if bank is None else bank}
    nodes |= {name: given.member(name) for name in names or given.members}

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(*(node.run() for node in nodes.values()), return_exceptions=True)

    return {**dict(zip(nodes, asyncio.run(play()), strict=True)), "nodes": nodes}


def released(folder: Path) -> list[str]:
    """What an organisation has let out by its own ledger, alignments apart."""
    path = folder / "ledger" / f"{folder.name}.jsonl"
    kinds = [str(each.content["kind"]) for each in read_ledger(path)] if path.exists() else []
    return [kind for kind in kinds if kind not in ("alignment", "session", "phase")]


# -- an old signature ---------------------------------------------------------------------------------------


class Raiser(Coordinator):
    """Plays an absent member from what it kept of a run with the same text: introduction and signature.

    Alignment needs the member alive. So this one skips it, leaves the member out of it, or says that the
    member has no data to compare.
    """

    way: str
    old: Joined
    signature: str

    def _lying(self) -> None:
        tell = self.mesh.tell

        def lie(peer: str, kind: str, **fields: Any) -> None:
            if peer != "shop":
                tell(peer, kind, **fields)

        self.mesh.tell = lie  # type: ignore[method-assign]
        self.mesh.lost_since.pop("shop", None)  # it does not stop itself

    async def _join(self) -> None:
        self._lying()
        self.joined["shop"] = self.old
        await super()._join()

    async def collect(self, kind: str, who: Collection[str], **match: Any) -> dict[str, dict[str, Any]]:
        found = await super().collect(kind, set(who) - {"shop"}, **match)
        return {**found, "shop": {"signature": self.signature, **match}}

    def _sizes(self) -> dict[str, int]:
        sizes = super()._sizes()
        return {name: size for name, size in sizes.items() if self.way != "helper" or name != "shop"}

    async def _align_all(self, with_data: list[str]) -> list[str]:
        if self.way == "skip":
            return sorted(self.comparable(self.config.normalise).ids)
        return await super()._align_all([name for name in with_data if name != "shop"])


REFUSED = {
    "skip": "commits to other IDs than were found to be common",
    "leave out": "an alignment of others than were invited",
    "helper": "features of others than compared their records",
}


@pytest.mark.parametrize("way", REFUSED)
def test_an_old_signature_does_not_stand_for_a_member_that_is_away(tmp_path: Path, way: str) -> None:
    """The same members, plan and records: the text of the agreement is the same, word for word."""
    first = Federation(tmp_path / "first", PLAN)
    done = played(first)
    assert done["clinic"]["stopped"] is None
    bank = done["nodes"]["bank"]
    second = Federation(tmp_path / "second", PLAN, patience=1.5)
    cls = type(
        "Way", (Raiser,), {"way": way, "old": bank.joined["shop"], "signature": bank.signatures["shop"]}
    )
    liar = cls(replace(second.server, data=None))
    liar.config, liar.own = second.server, second.tables["bank"]
    ended = played(second, liar, "clinic")
    assert isinstance(ended["clinic"], AgreementError) and REFUSED[way] in str(ended["clinic"])
    assert released(tmp_path / "second" / "clinic") == []


def test_a_signature_of_another_run_is_refused(tmp_path: Path) -> None:
    """Every field of the text counts: the name of the run, the plan, the people, how often to go back."""
    done = played(Federation(tmp_path / "first", PLAN))["nodes"]["bank"]
    agreement, certificates = done.agreement, done.mesh.certificates()
    agreement.verify(done.signatures, certificates)
    proposal, own = agreement.proposal, done.own
    for change in (
        {"run": "other"},
        {"ids": "0" * 64},
        {"restarts": 21},
        {"time_unit": 0.002},
        {"plan": PLAN.with_changes(sigma=3.9)},
        {"members": dict(reversed(proposal.members.items()))},
    ):
        other = replace(proposal, **change).for_training("bank", own, range(len(own.ids)))
        with pytest.raises(AgreementError, match="has not signed this agreement"):
            other.verify({**done.signatures, "bank": other.sign(identities()["bank"])}, certificates)


# -- a run that is taken up again ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a run whose coordinator died in the second epoch."""
    folder = tmp_path_factory.mktemp("halfway")

    async def play() -> None:
        found: dict[str, Process] = processes(Federation(folder, PLAN))
        for each in found.values():
            each.start()
        bank = found["bank"]
        bank.crash_when_told("done", 4)  # two organisations in two phases
        async with asyncio.timeout(240):
            await bank.crashed.wait()
        for each in found.values():
            await each.crash()

    asyncio.run(play())
    return folder


@pytest.mark.parametrize(
    "change",
    [{"sigma": 3.9}, {"epochs": 3}, {"batch": 17}, {"seed": 4}, {"clip": 1.1}, {"evaluate_every": 1}],
    ids=str,
)
def test_a_resumed_run_has_the_agreement_that_it_began_with(
    tmp_path: Path, halfway: Path, change: dict[str, Any]
) -> None:
    """The coordinator has forgotten what it signed, and proposes the same run with one field changed."""
    shutil.copytree(halfway / "clinic", tmp_path / "clinic")
    shutil.copytree(halfway / "shop", tmp_path / "shop")
    before = released(tmp_path / "clinic")
    ended = played(Federation(tmp_path, PLAN.with_changes(**change)))
    said = [str(ended[name]) for name in ("clinic", "shop")]
    assert any("was agreed on as" in each and "now it would be" in each for each in said), ended
    assert before and released(tmp_path / "clinic") == before


def test_a_resumed_run_as_it_was_agreed_on_goes_on(tmp_path: Path, halfway: Path) -> None:
    shutil.copytree(halfway, tmp_path / "all")
    ended = played(Federation(tmp_path / "all", PLAN))
    assert [ended[name]["epochs"] for name in ("bank", "clinic", "shop")] == [2, 2, 2]


# -- clocks -------------------------------------------------------------------------------------------------


def travel(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """What this process takes for the time; TLS asks the machine itself."""
    then = identity.now() + timedelta(days=days)
    monkeypatch.setattr(identity, "now", lambda: then)


@pytest.mark.parametrize(("days", "reason"), [(-1, "check this machine's clock"), (91, "expired")])
def test_an_introduction_is_checked_by_the_clock_of_who_hears_it(
    monkeypatch: pytest.MonkeyPatch, days: float, reason: str
) -> None:
    """One whose clock is a day behind meets a certificate that is not yet valid to it, and says so."""
    shown = Introducer(identities()["clinic"], run="test", incarnation=new_incarnation()).introduction
    shown.check("test", identities()["bank"])
    travel(monkeypatch, days)
    with pytest.raises(CertificateError, match=reason):
        shown.check("test", identities()["bank"])


@pytest.mark.parametrize("days", [-400.0, 400.0])
def test_a_clock_that_jumps_during_a_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    """Patience, absence and phases are by a clock that only goes forward; a ledger's order is its chain."""
    given = Federation(tmp_path / "run", PLAN)
    bank = given.coordinator()
    phase, wall = bank.phase, time.time

    async def jumping(part: str, epoch: int) -> None:
        if (part, epoch) == ("epoch", 1):
            travel(monkeypatch, days)
            monkeypatch.setattr(time, "time", lambda: wall() + days * 86400)
        await phase(part, epoch)

    bank.phase = jumping  # type: ignore[method-assign]
    ended = played(given, bank)
    assert [ended[name]["stopped"] for name in ("bank", "clinic", "shop")] == [None] * 3
    assert identity.now() != datetime.now(identity.UTC) and released(tmp_path / "run" / "clinic")
