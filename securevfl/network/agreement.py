"""What all organisations agree on before anything leaves one of them.

The coordinator proposes a plan and an outline of the data. Every organisation completes the plan by itself,
from the outline and its own share, and compares: the digest covers the completed plan, the outline, the
common IDs and who takes part. It is what a person, or a rule in `party.toml`, confirms.

Before a trained model is applied to new records the label holder asks: which records, under which numbers,
with the model of which agreement. Everybody puts that together with the plan it trained by, and compares a
digest over all of it: the agreement of the training, the common IDs, their record numbers, the privacy mode,
the protocol and the noise. That is confirmed, too, once for each prediction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms.prediction import KIND
from securevfl.algorithms.resolve import resolve
from securevfl.data import VerticalData
from securevfl.data.labels import Coding
from securevfl.data.share import Outline, OwnTable, share
from securevfl.errors import DataError, InputError, PlanError
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import spent_so_far
from securevfl.network.config import Acceptance
from securevfl.network.folders import commitment
from securevfl.privacy.rows import Rows
from securevfl.protocols.wire import pack
from securevfl.settings.families import LocalSettings
from securevfl.settings.plan import Plan


class CommonDataError(DataError):
    """Something is wrong with the data as everybody knows it; the text holds nothing of anybody's table."""


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
        self.plan.check_protection()
        plan, data = resolve(self.plan, share(self.outline, name, own, rows, coding), apart=True)
        content = pack(
            "agreement",
            {
                **vars(self),
                "plan": plan.to_agreement(),
                "outline": self.outline.to_json(),
                "organisations": list(self.organisations),
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

    @property
    def plan(self) -> Plan:
        """The completed plan."""

    @property
    def proposal(self) -> Proposal | Request:
        """What was proposed."""

    def summary(self) -> list[str]:
        """What to read before confirming."""

    def objection(self, accept: Acceptance) -> str:
        """Why an organisation's rules do not allow it; empty if they do."""


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
        noise = (
            f"sigma {plan.sigma:g}, clip {plan.clip:g}"
            if plan.sigma
            else "UNPROTECTED, no noise: nothing is promised"
        )
        budget = (
            f"refuses whatever exceeds epsilon {plan.budget_epsilon:g} at delta {plan.delta:g}"
            if plan.budget_epsilon
            else "no budget: releases are counted but never refused"
        )
        stay = f" (goes on with {plan.threshold} parties)" if plan.threshold else ""
        steps = f"{plan.epochs} epochs, batch {plan.batch}"
        held = ", ".join(f"{p} ({w} columns)" for p, w in zip(outline.parties, outline.widths, strict=True))
        members = plan.adversary_in_words
        return [
            *([f"members       {members}"] if members else []),
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

    def objection(self, accept: Acceptance) -> str:
        """See `Understanding`."""
        return accept.objection(self.plan, self.digest)


# -- prediction ----------------------------------------------------------------------------------------------


def commitments(session: str, salt: bytes, ids: Sequence[str], numbers: Sequence[int]) -> tuple[str, str]:
    """Binds a prediction to its common IDs, and these to their record numbers.

    A prediction may be of a single person, whom a helper without data could find by trying all IDs there may
    be. So the salt, which only those with data get, is part of both.
    """
    place = f"{session} {salt.hex()}"
    numbered = [f"{number} {each}" for number, each in zip(numbers, ids, strict=True)]
    return commitment(place, ids), commitment(place, numbered)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the label holder asks for.

    Attributes:
        run: Name of the run that trained the model.
        trained: Digest of the agreement that it was trained by.
        organisations: Who takes part, the coordinator first.
        records: How many new records.
        ids: Commitment to their common IDs.
        numbers: Commitment to their record numbers.
        token: The coordinator's process, so that nobody's confirmation serves another one.
    """

    run: str
    trained: str
    organisations: tuple[str, ...]
    records: int
    ids: str
    numbers: str
    token: str

    def to_json(self) -> str:
        """As text."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Reads it back.

        Raises:
            InputError: It is malformed.
        """
        try:
            content = json.loads(text)
            organisations = tuple(str(name) for name in content.pop("organisations"))
            request = cls(organisations=organisations, **content)
            texts = (request.run, request.trained, request.ids, request.numbers, request.token)
            if not all(isinstance(each, str) for each in texts) or type(request.records) is not int:
                raise ValueError("a field has another type")
            if not 0 < request.records < 1 << 31:
                raise ValueError(f"{request.records} records")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"what the coordinator asks to predict cannot be read: {error}") from error
        return request

    def understood(self, plan: Plan, *, label_holder: str, known: int = 0, cost: str = "") -> Prediction:
        """The request as one organisation understands it, by the plan that it trained by.

        Args:
            plan: The resolved plan in its folder.
            label_holder: Who obtains the scores.
            known: How many of the records it knows by number already.
            cost: What it costs this organisation, in words.
        """
        content = pack(
            "prediction",
            {
                **vars(self),
                "organisations": list(self.organisations),
                "scores": label_holder,
                "mode": plan.mode,
                "protocol": plan.protocol,
                "clip": float(plan.clip),
                "sigma": float(plan.sigma),
                "collusion": int(plan.collusion),
                "threshold": int(plan.threshold),
                "secure": not plan.insecure_reproducible_noise,
            },
        )
        digest = hashlib.sha256(content).hexdigest()[:32]
        return Prediction(
            proposal=self, plan=plan, label_holder=label_holder, known=known, cost=cost, digest=digest
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A request as one organisation understands it.

    Attributes:
        proposal: What was asked.
        plan: The resolved plan of the training.
        label_holder: Who obtains the scores.
        known: How many of the records have a number already.
        cost: What it costs this organisation, in words.
        digest: The same for everybody who understands the same.
    """

    proposal: Request
    plan: Plan
    label_holder: str
    known: int
    cost: str
    digest: str

    def summary(self) -> list[str]:
        """What a person should read before agreeing."""
        plan, request = self.plan, self.proposal
        noise = f"sigma {plan.sigma:g}, clip {plan.clip:g}" if _has_noise(plan) else "no noise"
        return [
            f"predict       with the model of run {request.run}, agreement {request.trained}",
            f"organisations {', '.join(request.organisations)}",
            f"records       {request.records}, {self.known} of them known from before",
            f"scores        go to {self.label_holder}",
            f"privacy       mode {plan.mode} on {plan.protocol}, {noise}",
            f"cost          {self.cost or 'nothing leaves this organisation'}",
            f"IDs           {request.ids[:32]}",
            f"agreement     {self.digest}",
        ]

    def objection(self, accept: Acceptance) -> str:
        """See `Understanding`."""
        return accept.objection_to_prediction(self.plan, self.proposal.trained, self.proposal.records)


def _has_noise(plan: Plan) -> bool:
    """Whether what is released of new records is noisy; sealed models open exact scores."""
    return bool(plan.sigma) and plan.mode != "sealed"


def cost_in_words(
    owner: str, plan: Plan, numbers: Rows, *, label_holder: str, records: int, folder: RunFolder
) -> str:
    """What a prediction costs a party, by its ledger and its plan; its gate decides when the time comes.

    `records` is how many record numbers are in use.
    """
    count = len(numbers)
    if plan.mode == "sealed":
        return f"the exact scores of {count} records, counted apart; records that training used are refused"
    if not _has_noise(plan) or plan.insecure_reproducible_noise:
        return f"{count} exact embeddings, without any guarantee (epsilon is infinite)"
    spent = spent_so_far(owner, plan, records=records, folder=folder)
    before = spent.spent_mu
    spent.charge(_planned(owner, plan, numbers, label_holder))
    after, delta = spent.spent_mu, plan.delta
    words = (
        f"{count} noisy embeddings; epsilon of the worst record {_figure(before, delta)} so far, "
        f"{_figure(after, delta)} then, at delta {delta:g}"
    )
    if not plan.budget_epsilon:
        return f"{words} (no budget)"
    over = after > gdp_mu(plan.budget_epsilon, delta)
    return f"{words} (budget {plan.budget_epsilon:g}{': the gate will refuse' if over else ''})"


def _planned(owner: str, plan: Plan, numbers: Rows, label_holder: str) -> ReleaseRecord:
    return ReleaseRecord(
        owner=owner,
        observers=(label_holder,),
        kind=KIND,
        mechanism="gaussian",
        clip=plan.clip,
        sigma=plan.sigma,
        sensitivity=2 * plan.clip,
        rows=np.asarray(numbers, np.int64),
        vectors=len(numbers),
        ids_visible=True,
        mode=plan.mode,
    )


def _figure(mu: float, delta: float) -> str:
    return f"{gdp_epsilon(mu, delta):.4g}" if mu else "0"
