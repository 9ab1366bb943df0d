"""A coordinator that lies, against parties that run the unmodified command as processes of their own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from victims import Consortium, plain

from securevfl import audit
from securevfl.federation.agreed import Enforcer
from securevfl.network.coordinator import Coordinator
from securevfl.privacy.ledger import read_records


def disarm(bank: Coordinator) -> None:
    """A coordinator that cheats does not refuse itself."""
    enforcer: Any = bank.home._enforcer
    enforcer.begin = enforcer.check_release = lambda *given: None


class TwoFaced(Coordinator):
    """Proposes another plan to the last party, and collects everybody's signatures as if they were of one."""

    async def _propose(self, who: Collection[str], proposal: str, digest: str, signature: str) -> None:
        agreement: Any = self.agreement
        *honest, victim = who
        quiet = agreement.plan.with_changes(sigma=agreement.plan.sigma / 1000)
        rows = np.argsort(self.own.ids)
        other = replace(agreement.proposal, plan=quiet).for_training(self.name, self.own, rows, None)
        self.other = other
        await super()._propose(honest, proposal, digest, signature)
        own = other.sign(self.config.identity)
        await super()._propose([victim], other.proposal.to_json(), other.digest, own)

    def take_signatures(self, agreement: Any, signatures: Any) -> None:
        self.signatures = dict(signatures)
        self.purpose.keep(self, agreement)
        self.site = self.purpose.build(self, agreement)
        tell = self.mesh.tell

        def lying(peer: str, kind: str, **fields: Any) -> None:
            if kind == "agreed" and peer == self.members[-1]:
                fields["digest"] = self.other.digest
            tell(peer, kind, **fields)

        self.mesh.tell = lying  # type: ignore[method-assign]


def test_different_plans_are_noticed_before_anything_leaves(tmp_path: Path) -> None:
    """Attack 6: the noise of one party would be 1,000 times smaller than the others' ledgers say."""
    victims = Consortium(tmp_path, ("clinic", "shop"))
    _, said = victims.play(victims.bank(TwoFaced))
    assert any(
        "has not signed this agreement: it may have been shown another one" in each for each in said.values()
    )
    for name in victims.parties:
        assert read_records(victims.run_folder(name)) == []
    assert any(
        "has not signed" in each["reason"] for name in victims.parties for each in victims.evidence(name)
    )


class Greedy(Coordinator):
    """Asks for one part more than was agreed on."""

    more: tuple[str, int]

    async def phase(self, part: str, epoch: int) -> None:
        await super().phase(part, epoch)
        if (part, epoch) == ("epoch", 2):
            disarm(self)
            await super().phase(*self.more)


@pytest.mark.parametrize("more", [("epoch", 3), ("epoch", 2), ("evaluate", 1), ("prepare", 0)])
def test_phases_that_were_not_agreed_on_are_refused_and_named(tmp_path: Path, more: tuple[str, int]) -> None:
    """Attack 7: more epochs than agreed, an epoch twice, an evaluation that the plan does not have."""
    victims = Consortium(tmp_path)
    cls = type("Greedier", (Greedy,), {"more": more})
    ended, said = victims.play(victims.bank(cls))
    assert "clinic stops: it was asked for what was not agreed on" in str(ended)
    assert "agreed on" in said["clinic"]
    kept = victims.evidence("clinic")
    assert [each["asked"] for each in kept] == ["begin"]
    kinds = [record.kind for record in read_records(victims.run_folder("clinic"))]
    assert kinds.count("evaluation") == 0
    assert len(kinds) == 2 * 3 + kinds.count("initial")  # two epochs of 48 records in batches of 16
    report = audit(victims.run_folder("clinic"), attacks="none")
    reasons = [reason for each in report.content["findings"] for reason in each["reasons"]]
    assert report.verdict == "violated"
    assert any(
        "bank asked for what was not agreed on" in each and "signed by bank" in each for each in reasons
    )


class Endless(Coordinator):
    """Evaluates, and asks for the same test records again and again."""

    async def phase(self, part: str, epoch: int) -> None:
        if part == "final":
            disarm(self)
            server: Any = self.server
            asking = server._ask

            async def again(party: str, rows: Any, *given: Any) -> Any:
                for _ in range(20):
                    last = await asking(party, rows, *given)
                return last

            server._ask = again
        await super().phase(part, epoch)


def test_phases_with_repeated_records_are_refused(tmp_path: Path) -> None:
    """Noise would average out: each answer has fresh noise, and without a budget no gate would refuse."""
    victims = Consortium(tmp_path)
    _, said = victims.play(victims.bank(Endless))
    assert "is asked for a record twice in one final" in said["clinic"]
    records = [each for each in read_records(victims.run_folder("clinic")) if each.kind == "evaluation"]
    assert sum(each.vectors for each in records) <= 12


class Impatient(Coordinator):
    """Looks for common records before anybody has consented."""

    async def _invite(self) -> None:
        return


def test_no_records_are_compared_before_consent(tmp_path: Path) -> None:
    victims = Consortium(tmp_path)
    _, said = victims.play(victims.bank(Impatient))
    assert "to which clinic was not invited" in said["clinic"]
    assert not (victims.run_folder("clinic") / "alignment.json").exists()


def test_a_false_summary_cannot_be_drawn_on_the_screen(tmp_path: Path) -> None:
    """Attack 5: escape sequences and turned text in whatever the coordinator may choose."""
    victims = Consortium(tmp_path)
    bank = victims.bank()
    tell = bank.mesh.tell

    def lying(peer: str, kind: str, **fields: Any) -> None:
        if kind == "invite":
            fields["invitation"] = fields["invitation"].replace(
                '"kind": "none"', '"kind": "\\u001b[2J\\u202enone\\u001b]0;epsilon 1\\u0007"'
            )
        if kind == "stop":
            fields["about"] = "\x1b[2J\x1b[1;1Hepsilon 1"
        tell(peer, kind, **fields)

    bank.mesh.tell = lying  # type: ignore[method-assign]
    bank.mesh.tell_all = lambda kind, **fields: [lying(peer, kind, **fields) for peer in bank.mesh.sessions]  # type: ignore[method-assign,assignment,func-returns-value]
    _, said = victims.play(bank)
    assert said["clinic"] == plain(said["clinic"])
    assert "does not accept the invitation" in said["clinic"]


def test_the_enforcer_is_what_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same greed, with the enforcer taken out of the simulated site, goes through: the test can fail."""
    from securevfl import Plan, VerticalData, train

    plan = Plan(algorithm="vafl-sync", epochs=1, batch=64, sigma=4.0, evaluate_every=0)
    monkeypatch.setattr(Enforcer, "begin", lambda self, part, epoch, back=None: None)
    monkeypatch.setattr(Enforcer, "check_release", lambda self, *given: None)
    run = train(VerticalData.load("breast-cancer", parties=2), plan)
    assert run.privacy
