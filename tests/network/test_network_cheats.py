"""Members that cheat over a real network: caught before anything of the iteration is kept, and named."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from federation import Federation

from securevfl.errors import Deviation, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.privacy.ledger import read_records
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.proof import Claim, Prover
from securevfl.settings.plan import Plan

CHEATER = 1  # clinic
PLAN = Plan(algorithm="sealed", model="linear", epochs=4, scaling="none", epsilon=8.0)


class Shifting(CheckedRound):
    """From its second iteration on it adds an error to one residual, and does not mind the check."""

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if self.round >= 1:
            shifted = self._blinded.copy()
            shifted[7] = FIELD.add(shifted[7], 1 << 46)
            self._blinded = shifted

    def _verify(self):
        pass


class Late(Shifting):
    """Opens what makes the check pass once it has seen the others' words."""

    def _advance(self):
        if self._own and self.address not in self._openings and self.round >= 1:
            if len(self._openings) < len(self._others):
                return []
            others = sum(int(opening.word[0]) for opening in self._openings.values())
            self._own = self._own[0], -others % FIELD.p
        return super()._advance()


def _cheat_in_rounds(monkeypatch, kind):
    honest = CheckedParty.round

    def round_(self, **given):
        machine = honest(self, **given)
        if self.index == CHEATER:
            machine.__class__ = kind
        return machine

    monkeypatch.setattr(CheckedParty, "round", round_)


def _cheat_in_proofs(monkeypatch, change, *, member=CHEATER):
    honest = Prover.__init__

    def init(self, secrets, operand, labels):
        honest(self, secrets, operand, labels)
        if secrets.claim.prover == member:
            change(self)

    monkeypatch.setattr(Prover, "__init__", init)


def _outcomes(federation):
    """Organisation -> result, or the error it ended with."""

    async def everybody():
        names = federation.names
        nodes = [federation.coordinator(), *(federation.member(name) for name in names[1:])]
        async with asyncio.timeout(100):
            return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    return dict(zip(federation.names, asyncio.run(everybody()), strict=True))


def _journal(folder):
    return sum(path.stat().st_size for path in folder.rglob("journal/**/*") if path.is_file())


def _two(tmp_path, **changes):
    plan = PLAN.with_changes(**changes) if changes else PLAN
    return Federation(tmp_path, plan, parties=("bank", "clinic"), helpers=("dealer",), patience=8.0)


def test_between_organisations_members_are_not_trusted(tmp_path):
    federation = _two(tmp_path)
    outcomes = _outcomes(federation)
    assert all(isinstance(each, dict) for each in outcomes.values()), outcomes
    plan = RunFolder(tmp_path / "bank").read_plan()
    assert plan.settings.adversary == "malicious"
    for name in ("bank", "clinic"):
        assumptions = {r.assumption for r in read_records(tmp_path / name) if r.assumption}
        assert len(assumptions) == 1 and assumptions.pop().startswith("malicious: members may do anything")


@pytest.mark.parametrize("kind", [Shifting, Late])
def test_a_tampered_residual_stops_the_run_and_is_never_kept(tmp_path, monkeypatch, kind):
    _cheat_in_rounds(monkeypatch, kind)
    federation = _two(tmp_path)
    found = _outcomes(federation)["bank"]
    assert isinstance(found, Deviation), found
    assert found.member == "clinic" and "clinic does not follow the protocol" in str(found)
    totals = [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    assert len(totals) == 2  # the ledger has counted the second, whose total was never verified
    assert not (tmp_path / "bank" / "result.json").exists()
    everything = b"".join(p.read_bytes() for p in (tmp_path / "bank").rglob("*.log") if p.is_file())
    assert b"1.0737e+09" not in everything


def _too_long(prover):
    claim: Claim = prover._claim
    prover._rows = np.zeros(claim.operand_shape, np.int64)
    prover._rows[0] = 1 << 19  # as long as exact proofs of the honest code still compute


def _one_unit(prover):
    prover._rows[:] = 0
    prover._rows[0] = prover._claim.bound
    prover._rows[0, 3] += 1


def _label(prover):
    prover._labels = prover._labels.copy()
    prover._labels[0, 0] = 2


@pytest.mark.parametrize("change", [_too_long, _one_unit])
def test_rows_that_are_too_long_stop_the_run_before_it_begins(tmp_path, monkeypatch, change):
    _cheat_in_proofs(monkeypatch, change)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["bank"]
    assert isinstance(found, Deviation) and found.member == "clinic", outcomes
    assert not [r for r in read_records(tmp_path / "bank") if r.kind.startswith("totals")]
    assert all(isinstance(each, SecureVFLError) for each in outcomes.values())


def test_a_label_that_is_none_stops_the_run_and_names_the_label_holder(tmp_path, monkeypatch):
    _cheat_in_proofs(monkeypatch, _label, member=0)
    outcomes = _outcomes(_two(tmp_path))
    found = outcomes["clinic"]
    assert isinstance(found, Deviation) and found.member == "bank", outcomes
    assert "labels" in found.how
