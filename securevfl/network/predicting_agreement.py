"""What all organisations agree on before a trained model is applied to new records over a network.

The label holder asks: which records, under which numbers, with the model of which agreement. Everybody puts
that together with the plan it trained by, and compares a digest over all of it: the agreement of the
training, the common IDs, their record numbers, the privacy mode, the protocol and the noise. It is what a
person, or a rule in `party.toml`, confirms, once for each prediction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms.prediction import KIND
from securevfl.errors import InputError
from securevfl.federation.folder import RunFolder
from securevfl.federation.organisations import spent_so_far
from securevfl.network.agreement import commitment
from securevfl.privacy.rows import Rows
from securevfl.protocols.wire import pack
from securevfl.settings.plan import Plan


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
                "run": self.run,
                "trained": self.trained,
                "organisations": list(self.organisations),
                "records": self.records,
                "ids": self.ids,
                "numbers": self.numbers,
                "token": self.token,
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
            request=self, plan=plan, label_holder=label_holder, known=known, cost=cost, digest=digest
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A request as one organisation understands it.

    Attributes:
        request: What was asked.
        plan: The resolved plan of the training.
        label_holder: Who obtains the scores.
        known: How many of the records have a number already.
        cost: What it costs this organisation, in words.
        digest: The same for everybody who understands the same.
    """

    request: Request
    plan: Plan
    label_holder: str
    known: int
    cost: str
    digest: str

    def summary(self) -> list[str]:
        """What a person should read before agreeing."""
        plan, request = self.plan, self.request
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


def _has_noise(plan: Plan) -> bool:
    """Whether what is released of new records is noisy; sealed models open exact scores."""
    return bool(plan.sigma) and plan.mode != "sealed"


def cost_in_words(
    owner: str, plan: Plan, numbers: Rows, *, label_holder: str, records: int, folder: RunFolder
) -> str:
    """What a prediction costs a party, by its ledger and its plan; its gate decides when the time comes.

    Args:
        owner: The party.
        plan: The resolved plan.
        numbers: Record numbers.
        label_holder: Who obtains what is released.
        records: How many record numbers are in use.
        folder: Where the party's ledger is.
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
