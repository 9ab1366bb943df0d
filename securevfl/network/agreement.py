"""What all organisations agree on before anything leaves one of them.

The coordinator proposes a plan and an outline of the data. Every organisation completes the plan by itself,
from the outline and its own share, and compares: the digest covers the completed plan, the outline, the
common IDs and who takes part. It is what a person, or a rule in `party.toml`, confirms.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from securevfl.algorithms.resolve import resolve
from securevfl.data import VerticalData
from securevfl.data.labels import Coding
from securevfl.data.share import Outline, OwnTable, share
from securevfl.errors import DataError, InputError, PlanError, RunError
from securevfl.files import read_json, write_text
from securevfl.protocols.wire import pack, pack_strings
from securevfl.settings.families import LocalSettings
from securevfl.settings.plan import Plan

ALIGNMENT_FILE = "alignment.json"


class CommonDataError(DataError):
    """Something is wrong with the data as everybody knows it; the text holds nothing of anybody's table."""


def commitment(run: str, ids: Sequence[str]) -> str:
    """Binds a run to its common IDs; only those who know the IDs can compute it."""
    return hmac.new(run.encode(), pack_strings(list(ids)), hashlib.sha256).hexdigest()


def save_alignment(folder: Path, ids: Sequence[str]) -> None:
    """Keeps the common IDs, so that a restarted process need not align again; only the owner can read it.

    Raises:
        RunError: They cannot be written.
    """
    write_text(folder / ALIGNMENT_FILE, json.dumps(list(ids)))


def load_alignment(folder: Path) -> list[str] | None:
    """The common IDs of an earlier process; None if there are none yet."""
    path = folder / ALIGNMENT_FILE
    if not path.exists():
        return None
    try:
        return [str(each) for each in read_json(path)]
    except TypeError as error:
        raise RunError(f"{path} is damaged: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an organisation tells about its table: no values.

    Attributes:
        columns: How many features it has; 0 for a helper.
        bounds: Public bounds, as nested lists, NaN where unknown; None without any.
    """

    columns: int
    bounds: list[list[float]] | None

    @classmethod
    def of(cls, own: OwnTable | None) -> Facts:
        """The facts about a table."""
        if own is None:
            return cls(columns=0, bounds=None)
        bounds = None if own.bounds is None else own.bounds.tolist()
        return cls(columns=len(own.columns), bounds=bounds)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """Reads them back.

        Raises:
            DataError: They are malformed.
        """
        try:
            content = json.loads(text)
            facts = cls(**content)
            if type(facts.columns) is not int:
                raise ValueError("a count is no number")
            if not 0 <= facts.columns < 1 << 32:
                raise ValueError("a count is out of range")
            if facts.bounds is not None and np.asarray(facts.bounds, float).shape != (facts.columns, 2):
                raise ValueError("bounds do not fit the columns")
        except (ValueError, TypeError, RecursionError) as error:
            raise CommonDataError(f"an organisation's facts cannot be read: {error}") from error
        return facts


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the coordinator proposes.

    Attributes:
        run: Name of the run.
        plan: The plan as the coordinator wrote it.
        outline: The data as everybody may know it.
        organisations: Who takes part, the coordinator first.
        ids: Commitment to the common IDs.
        time_unit: Seconds that a simulated time unit lasts.
    """

    run: str
    plan: Plan
    outline: Outline
    organisations: tuple[str, ...]
    ids: str
    time_unit: float = 0.0

    def to_json(self) -> str:
        """As text."""
        content = {**vars(self), "plan": self.plan.to_agreement(), "outline": self.outline.to_json()}
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, local: LocalSettings) -> Proposal:
        """Reads what the coordinator sent; what concerns this machine alone comes from its own configuration.

        Raises:
            InputError: It is malformed, its plan is not valid or names something that is not agreed on.
        """
        try:
            content = json.loads(text)
            plan = Plan.from_agreement(content.pop("plan"), local)
            outline = Outline.from_json(content.pop("outline"))
            organisations = tuple(str(name) for name in content.pop("organisations"))
            return cls(plan=plan, outline=outline, organisations=organisations, **content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"the coordinator's proposal cannot be read: {error}") from error

    def complete(
        self, name: str, own: OwnTable | None, rows: Sequence[int], coding: Coding | None = None
    ) -> Agreement:
        """Completes the plan from one organisation's share of the data.

        Raises:
            PlanError: The plan cannot work.
        """
        if self.plan.label_holder == "server":
            raise PlanError("over a network the label holder is the coordinator; leave label_holder alone")
        if self.plan.source.data:
            raise PlanError("a plan for a network names no data; every organisation has its own")
        plan, data = resolve(self.plan, share(self.outline, name, own, rows, coding))
        content = pack(
            "agreement",
            {
                "run": self.run,
                "plan": plan.to_agreement(),
                "outline": self.outline.to_json(),
                "organisations": list(self.organisations),
                "ids": self.ids,
                "time_unit": float(self.time_unit),
            },
        )
        digest = hashlib.sha256(content).hexdigest()[:32]
        return Agreement(proposal=self, plan=plan, data=data, digest=digest)


class Understanding(Protocol):
    """What a person is shown and asked to confirm."""

    @property
    def digest(self) -> str:
        """The same for everybody who understands the same."""

    def summary(self) -> list[str]:
        """What to read before confirming."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A proposal as one organisation understands it.

    Attributes:
        proposal: What was proposed.
        plan: The completed plan.
        data: The organisation's share, scaled.
        digest: The same for everybody who understands the same.
    """

    proposal: Proposal
    plan: Plan
    data: VerticalData
    digest: str

    def summary(self) -> list[str]:
        """What a person should read before agreeing."""
        plan, outline = self.plan, self.proposal.outline
        noise = f"sigma {plan.sigma:g}, clip {plan.clip:g}" if plan.sigma else "no noise"
        budget = (
            f"refuses whatever exceeds epsilon {plan.budget_epsilon:g} at delta {plan.delta:g}"
            if plan.budget_epsilon
            else "no budget: releases are counted but never refused"
        )
        stay = f" (goes on with {plan.threshold} parties)" if plan.threshold else ""
        steps = f"{plan.epochs} epochs, batch {plan.batch}"
        held = ", ".join(f"{p} ({w} columns)" for p, w in zip(outline.parties, outline.widths, strict=True))
        return [
            f"run           {self.proposal.run}",
            f"organisations {', '.join(self.proposal.organisations)}",
            f"features      {held}",
            f"labels        {outline.label_holder}, {outline.task}",
            f"records       {outline.n_train} to train, {outline.n_test} to test",
            f"algorithm     {plan.algorithm} on {plan.protocol}{stay}, {steps}",
            f"privacy       mode {plan.mode}, {noise}",
            f"budget        {budget}",
            f"IDs           {self.proposal.ids[:32]}",
            f"agreement     {self.digest}",
        ]
