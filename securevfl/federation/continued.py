"""A scorecard that goes on from a profile: the same ledgers, the same budget, the openings that are left.

A profile has made the first two openings of a card. A run that starts from it takes over its ledgers (and
with them what everybody has spent), its state after the last opening, and what observers saw. So it must be
about the same records of the same members under the same rules.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from securevfl.data import VerticalData
from securevfl.errors import PlanError, RunError
from securevfl.federation.folder import CHECKPOINT, EVIDENCE, RunFolder
from securevfl.federation.trained import Trained
from securevfl.privacy.ledger import read_records
from securevfl.settings.plan import Plan

PROFILE = "profile"
TAKEN = ("ledger", "receipts")
"""Folders of a profile that belong to what follows it."""
FREE = (
    *("model", "epochs", "epsilon", "sigma", "budget_epsilon", "profile_epsilon", "evaluate_every"),
    *("record_views", "record_words", "device", "data", "data_folder"),
)
"""Settings that a card may choose anew; all others describe members, records or rules."""


@dataclass(frozen=True)
class Profile:
    """A finished profile to go on from."""

    folder: RunFolder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a run's folder.

        Raises:
            RunError: It holds no finished profile.
        """
        found = cls(RunFolder(Path(path)))
        model = found.plan.model
        found.folder.read_result()
        if model != PROFILE:
            raise RunError(f"{path} is a run of model {model!r}, not a profile; make one: securevfl profile")
        return found

    @property
    def plan(self) -> Plan:
        """What it was made by."""
        return self.folder.read_plan()

    @property
    def epsilon(self) -> float:
        """What its openings may have cost."""
        return self.plan.budget_epsilon

    def continued(self, plan: Plan) -> Plan:
        """The plan of a card that starts from it.

        Raises:
            PlanError: Nothing would be left for the card.
        """
        if not self.epsilon or not plan.epsilon > self.epsilon:
            raise PlanError(
                f"the profile in {self.folder.path} has spent epsilon {self.epsilon:g} of {plan.epsilon:g}; "
                "set epsilon to what both together may cost, above that"
            )
        return plan.with_changes(settings={"profile_epsilon": self.epsilon})

    def check_rules(self, plan: Plan) -> None:
        """Whether a card by this resolved plan has the same rules.

        Raises:
            PlanError: It has not; the message names what differs.
        """
        before, now = self.plan.to_flat(), plan.to_flat()
        for name, value in before.items():
            if name not in FREE and now.get(name) != value:
                raise PlanError(
                    f"the profile has {name} {value!r}, this run {now.get(name)!r}: a card starts from a "
                    "profile of the same records under the same rules"
                )
        if plan.record_views and not self.plan.record_views:
            raise PlanError(
                "the profile recorded no views, so that no audit could follow this run from its beginning; "
                "make the profile with --record-views, or leave it out here"
            )

    def check(self, plan: Plan, data: VerticalData) -> None:
        """Whether a card by this resolved plan is about the same records, members and rules.

        Raises:
            PlanError: It is not; the message names what differs.
        """
        self.check_rules(plan)
        kept, found = Trained.load(self.folder), Trained.of(data, messages=0, time=0.0)
        mine, theirs = found.template, kept.template
        opened = [each for each in read_records(self.folder.path) if each.kind == "label histogram"]
        differ = {
            "parties": (mine.parties, mine.label_holder) != (theirs.parties, theirs.label_holder),
            "columns": mine.columns != theirs.columns
            or [each.columns for each in mine.described] != [each.columns for each in theirs.described],
            "records": found.numbers != kept.numbers
            or any(each.rows is None or each.rows.size != data.n_train for each in opened),
        }
        for what, differs in differ.items():
            if differs:
                raise PlanError(f"the profile in {self.folder.path} is of other {what}; make one of these")

    def hand_over(self, target: RunFolder, *, recorded: bool, state: str = CHECKPOINT) -> None:
        """Copies into a new run's folder what it goes on with; the profile itself stays as it is.

        Args:
            target: The new run's folder.
            recorded: Whether that records views, which begin with the profile's.
            state: Where a folder has the state after the last opening.
        """
        for name in (*TAKEN, *(EVIDENCE if recorded else ()), state, self.folder.metrics_file.name):
            source = self.folder.path / name
            if source.is_dir():
                shutil.copytree(source, target.path / name)
            elif source.is_file():
                (target.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target.path / name)
