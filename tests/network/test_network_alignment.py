"""Alignment between organisations: every kind, within what each of them allows, counted and written down."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from federation import Federation

from securevfl.data.share import OwnTable
from securevfl.errors import BudgetExceeded, PlanError
from securevfl.network.config import AlignmentLimits, _check_server
from securevfl.network.coordinator import Coordinator
from securevfl.privacy.chain import Entry
from securevfl.privacy.ledger import read_ledger
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=1, batch=16, unprotected=True)


def alignments(federation: Federation, name: str) -> list[Entry]:
    """What an organisation's ledger says about alignments."""
    path = federation.folder / name / "ledger" / f"{name}.jsonl"
    return [each for each in read_ledger(path) if each.content["kind"] == "alignment"]


def with_own_people(federation: Federation) -> list[str]:
    """The clinic and the shop lack some of the bank's people; returns whom all have."""
    for name, kept in (("clinic", slice(5, None)), ("shop", slice(None, 50))):
        table = federation.tables[name]
        order = np.random.default_rng(1).permutation(len(table.ids[kept]))
        federation.tables[name] = replace(table, ids=table.ids[kept][order], block=table.block[kept][order])
    return sorted(set.intersection(*(set(table.ids.tolist()) for table in federation.tables.values())))


@pytest.mark.parametrize("direct", [False, True], ids=["relayed", "direct"])
@pytest.mark.parametrize("kind", ["private", "helper"])
def test_everybody_finds_the_common_records_and_writes_it_down(tmp_path, kind, direct):
    helper = ("dealer",) if kind == "helper" else ()
    federation = Federation(
        tmp_path, PLAN, align=kind, helpers=helper, direct=direct, **({"helper": "dealer"} if helper else {})
    )
    common = with_own_people(federation)
    asyncio.run(federation.run())
    for name in ("bank", "clinic", "shop"):
        assert json.loads((tmp_path / name / "alignment.json").read_text()) == common
        (entry,) = alignments(federation, name)
        others = [each for each in ("bank", "clinic", "shop", *helper) if each != name]
        assert entry.content["observers"] == others
        assert (entry.content["way"], entry.content["ids"]) == (kind, len(federation.tables[name].ids))
    assert not (tmp_path / "dealer" / "alignment.json").exists()


def test_the_dealer_of_a_sealed_run_can_help(tmp_path):
    plan = Plan(algorithm="sealed", model="linear", epochs=1, scaling="none", epsilon=0.0, unprotected=True)
    federation = Federation(tmp_path, plan, align="helper", helpers=("dealer",))
    common = with_own_people(federation)
    results = asyncio.run(federation.run())
    assert results["dealer"]["privacy"] == {}
    assert json.loads((tmp_path / "shop" / "alignment.json").read_text()) == common


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"align": "helper"}, "nobody helps"),
        ({"align": "helper", "helper": "clinic"}, "brings no data"),
        ({"align": "private", "helper": "dealer"}, "is for align"),
        ({"align": "psi"}, "align is 'psi'; use one of private, helper, none"),
    ],
)
def test_a_helper_must_be_somebody_without_data(tmp_path, changes, match):
    server = Federation(tmp_path, PLAN).server
    with pytest.raises(PlanError, match=match):
        _check_server(replace(server, **changes))


# -- what an organisation does not allow --------------------------------------------------------------------


def ended(federation: Federation, bank: Coordinator | None = None) -> dict[str, Any]:
    async def play() -> list[Any]:
        nodes = [bank or federation.coordinator(), *(federation.member(name) for name in federation.members)]
        async with asyncio.timeout(240):
            return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    return dict(zip(federation.names, asyncio.run(play()), strict=True))


def limited(federation: Federation, **limits: Any) -> None:
    clinic = federation.members["clinic"]
    federation.members["clinic"] = replace(clinic, alignment=AlignmentLimits(**limits))


@pytest.mark.parametrize(
    ("limits", "align", "match"),
    [
        ({"kinds": ("private", "helper")}, "none", "clinic takes part in no alignment of kind 'none'"),
        ({"kinds": ("none",)}, "private", "clinic takes part in no alignment of kind 'private'"),
        ({"ids": 59}, "private", "brings 60 IDs; at most 59 are accepted here"),
        ({"times": 0}, "private", "were aligned 0 times and may be 0 times"),
    ],
)
def test_what_is_not_allowed_does_not_happen(tmp_path, limits, align, match):
    federation = Federation(tmp_path, PLAN, align=align)
    limited(federation, **limits)
    found = ended(federation)
    assert match in str(found["clinic"])
    assert not (tmp_path / "clinic" / "alignment.json").exists()


@pytest.mark.parametrize(
    ("guesses", "match"),
    [(["x"], "no ID in common"), (["id0007"], "all 1 labels are the same"), ([], "no ID in common")],
)
def test_a_list_of_one_guess_or_none_is_answered_counted_and_trained_on_by_nobody(tmp_path, guesses, match):
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    bank = federation.coordinator()
    rows = np.zeros((len(guesses), 3))
    ids = np.array(guesses, dtype="U6")
    bank.own = OwnTable(ids=ids, columns=("x0", "x1", "x2"), block=rows, labels=np.zeros(len(guesses)))
    found = ended(federation, bank)
    assert match in str(found["bank"]) and len(alignments(federation, "clinic")) == 1
    assert not (tmp_path / "clinic" / "agreement.json").exists()


class Guessing(Coordinator):
    """Has its guesses answered, and starts over with the next ones before there is anything to agree on."""

    answers: list[list[str]]
    guesses: list[list[str]]
    invites = True
    understates = False

    async def _agree(self) -> None:
        self.answers.append(list(self.purpose.ids or ()))
        if self.guesses:
            self._guess()
            self.joined = {name: replace(each, aligned="") for name, each in self.joined.items()}
            self.purpose.remembered = lambda who: None
            await self._introduce()
            if self.invites:
                await self._invite()
            await self._align()
            await self._agree()

    def _sizes(self) -> dict[str, int]:
        return super()._sizes() | ({self.name: 2} if self.understates else {})

    def _guess(self) -> None:
        own, names = self.own, self.guesses.pop(0)
        self.own = self._table = replace(
            own, ids=np.array(names), block=own.block[: len(names)], labels=own.labels[: len(names)]
        )


def attacker(federation: Federation, answers: list[list[str]]) -> Guessing:
    bank = Guessing(replace(federation.server, data=None))
    bank.config, bank.own, bank.answers = federation.server, federation.tables["bank"], answers
    real = federation.tables["clinic"].ids.tolist()
    bank.guesses = [[*real[10 * i : 10 * i + 5], *(f"nobody-{i}-{j}" for j in range(5))] for i in range(6)]
    bank._guess()
    return bank


def test_a_coordinator_that_guesses_again_and_again_is_stopped_and_leaves_traces(tmp_path):
    """Each round tells it which of its guesses the clinic has. It gets as many as the clinic allows, over all
    processes, and each stands in the clinic's ledger with who asked and how many IDs were let in."""
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    limited(federation, times=3, ids=60)
    answers: list[list[str]] = []
    found = ended(federation, attacker(federation, answers))
    assert isinstance(found["clinic"], BudgetExceeded)
    assert "were aligned 3 times and may be 3 times" in str(found["clinic"])
    assert [len(each) for each in answers] == [5, 5, 5]
    assert len(alignments(federation, "clinic")) == 3
    (tmp_path / "bank" / "alignment.json").unlink()
    found = ended(federation, attacker(federation, answers))  # both start again: the count goes on
    assert isinstance(found["clinic"], BudgetExceeded)
    assert len(answers) == 3
    for entry in alignments(federation, "clinic"):
        assert entry.content["observers"] == ["bank"] and entry.content["most"] == 60
    assert len(alignments(federation, "bank")) >= 3


def test_each_alignment_needs_an_invitation_of_its_own(tmp_path):
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    bank = attacker(federation, answers := [])
    bank.invites = False
    assert "a second alignment for one invitation" in str(ended(federation, bank)["clinic"])
    assert len(answers) == len(alignments(federation, "clinic")) == 1


def test_more_ids_than_the_invitation_says_are_refused(tmp_path):
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    bank = attacker(federation, answers := [])
    bank.understates = True
    found = ended(federation, bank)
    assert "bank brings 10 IDs and has said 2" in str(found["clinic"])
    assert answers == []


def test_a_deleted_ledger_line_does_not_give_attempts_back(tmp_path):
    """Nobody but the owner can write there, and it refuses a ledger that is not whole."""
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    limited(federation, times=1)
    asyncio.run(federation.run())
    path = tmp_path / "clinic" / "ledger" / "clinic.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[2:]))
    (tmp_path / "clinic" / "alignment.json").unlink()
    (tmp_path / "clinic" / "result.json").unlink()
    (tmp_path / "bank" / "result.json").unlink()
    found = ended(federation)
    assert "ledger of clinic, entry 1" in str(found["clinic"])


def test_one_that_is_there_and_says_nothing_ends_the_alignment(tmp_path):
    federation = Federation(tmp_path, PLAN, parties=("bank", "clinic"), align="private")
    quick = replace(federation.server.network, phase_timeout=4.0)
    federation.server = replace(federation.server, network=quick)
    clinic = federation.member("clinic")
    clinic.mesh.post = lambda message: None

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            nodes = (federation.coordinator(), clinic)
            return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    bank, _ = asyncio.run(play())
    assert "the alignment took more than 4 s" in str(bank)
