"""What all organisations agree on and sign before anything leaves one of them.

First an `Invitation`: who takes part with which key, for what, and how the common records are looked for.
Then, over those records, an `Agreement`: one canonical text with the completed plan, the outline of the data,
the members and their keys, the alignment, the timetable, the forecast of every epsilon and the constants that
everybody computes with. The coordinator proposes; each organisation completes the text by itself and
compares. Each signs the text with the key of its certificate, and verifies everybody's signature before its
site is built. The digest of the text is part of every session and of the keys of every sum, and stands in
the ledger.

A prediction with a trained model is an agreement, too: on the model of which agreement, on which records,
under which numbers. It is confirmed once for each prediction. A scoring service is an agreement that stands:
its quota takes the place of a list of who will be scored, and it is confirmed once for all its processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from cryptography.exceptions import InvalidSignature

from securevfl.algorithms import find_algorithm
from securevfl.algorithms.resolve import resolve
from securevfl.data import VerticalData
from securevfl.data.columns import Column, count_features
from securevfl.data.labels import Coding
from securevfl.data.share import MAX_COLUMNS, Outline, OwnTable, share
from securevfl.errors import (
    AgreementError,
    CertificateError,
    DataError,
    InputError,
    PlanError,
    readable,
)
from securevfl.federation.agreed import Quota, Timetable
from securevfl.federation.clock import MAX_TIME_UNIT
from securevfl.federation.forecast import Forecast, forecast
from securevfl.network.folders import commitment
from securevfl.network.identity import (
    Identity,
    check_issuer,
    check_name,
    fingerprint,
    parse_certificate,
)
from securevfl.network.signing import sign, verify
from securevfl.protocols.alignment.ids import MAX_IDS
from securevfl.protocols.wire import pack
from securevfl.settings.families import LocalSettings
from securevfl.settings.plan import Plan

TRAINING, PREDICTION, SCORING = "training", "prediction", "scoring"
_FORMAT = 2
_SIGNED = "securevfl agreement 1"
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class CommonDataError(DataError):
    """Something is wrong with the data as everybody knows it; the text holds nothing of anybody's table."""

    notice = "common"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an organisation tells about its table: no values.

    Attributes:
        columns: How many features it has; 0 for a helper.
        bounds: Public bounds, as nested lists, NaN where unknown; None without any.
        records: How many IDs it brings.
        described: How described columns are coded, without names and values; None where nothing is described.
    """

    columns: int
    bounds: list[list[float]] | None
    records: int = 0
    described: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, own: OwnTable | None) -> Facts:
        """The facts about a table."""
        if own is None:
            return cls(columns=0, bounds=None)
        bounds = None if own.bounds is None else own.bounds.tolist()
        described = [column.facts for column in own.described] or None
        return cls(columns=len(own.columns), bounds=bounds, records=len(own.ids), described=described)

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
            if type(facts.columns) is not int or type(facts.records) is not int:
                raise ValueError("a count is no number")
            if not (0 <= facts.columns <= MAX_COLUMNS and 0 <= facts.records < 1 << 40):
                raise ValueError("a count is out of range")
            if facts.bounds is not None and np.asarray(facts.bounds, float).shape != (facts.columns, 2):
                raise ValueError("bounds do not fit the columns")
            if facts.described is not None:
                if count_features(facts.described) != facts.columns:
                    raise ValueError("described columns do not make the features that are announced")
                for i, each in enumerate(facts.described):
                    Column.from_facts(each, str(i))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CommonDataError(f"an organisation's facts cannot be read: {error}") from error
        return facts


# -- before the common records are known --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What an organisation consents to before its records are compared with others'.

    Attributes:
        run: Name of the run.
        purpose: `TRAINING`, `PREDICTION` or `SCORING`.
        members: Everybody who takes part -> fingerprint of its key; the coordinator first.
        kind: How the common records are looked for.
        normalise: How IDs are made comparable.
        sizes: Those with data -> how many IDs each brings.
    """

    run: str
    purpose: str
    members: dict[str, str]
    kind: str
    normalise: str
    sizes: dict[str, int]

    def to_json(self) -> str:
        """As text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads it back.

        Raises:
            InputError: It is malformed.
        """
        try:
            invitation = cls(**json.loads(text))
            texts = (invitation.run, invitation.purpose, invitation.kind, invitation.normalise)
            if not all(isinstance(each, str) for each in texts):
                raise ValueError("a field has another type")
            _check_members(invitation.members)
            if not invitation.sizes.keys() <= invitation.members.keys():
                raise ValueError("records of somebody who does not take part")
            counts = invitation.sizes.values()
            if not all(type(count) is int and 0 <= count < 1 << 40 for count in counts):
                raise ValueError("a count is no number")
        except _MALFORMED as error:
            raise InputError(f"the coordinator's invitation cannot be read: {error}") from error
        return invitation


def _check_members(members: Mapping[str, str]) -> None:
    for name, key in members.items():
        if check_name(name) and not (isinstance(key, str) and len(key) == 64):
            raise ValueError("a member without the fingerprint of its key")


# -- the agreement ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the coordinator proposes; everybody else can compute the rest.

    Attributes:
        run: Name of the run.
        plan: The plan as the coordinator wrote it; None for a prediction, which is by the plan of training.
        outline: The data as everybody may know it; None for a prediction.
        members: Who takes part -> fingerprint of its key; the coordinator first.
        alignment: How the common records were looked for.
        ids: Commitment to the common IDs.
        time_unit: Seconds that a simulated time unit lasts.
        restarts: How often everybody may go back after a crash.
        trained: Digest of the agreement whose model predicts; empty for training.
        records: How many new records are predicted.
        numbers: Commitment to their record numbers.
        token: The coordinator's process, so that nobody's confirmation of a prediction serves another one.
        people: Of a scoring service: how many scores it may open in all; 0 elsewhere.
        requests: Of a scoring service: by how many requests.
        profile: Digest of the agreement of the profile that a scorecard starts from; empty without one.
    """

    run: str
    members: dict[str, str]
    alignment: str
    ids: str
    plan: Plan | None = None
    outline: Outline | None = None
    time_unit: float = 0.0
    restarts: int = 0
    trained: str = ""
    records: int = 0
    numbers: str = ""
    token: str = ""
    people: int = 0
    requests: int = 0
    profile: str = ""

    @property
    def quota(self) -> Quota | None:
        """How much a scoring service may open; None for anything else."""
        return Quota(people=self.people, requests=self.requests) if self.people else None

    def to_json(self) -> str:
        """As text."""
        content = dict(vars(self))
        content["plan"] = None if self.plan is None else self.plan.to_agreement()
        content["outline"] = None if self.outline is None else self.outline.to_json()
        return json.dumps(content)  # the order of members counts

    @classmethod
    def from_json(cls, text: str, local: LocalSettings) -> Proposal:
        """Reads what the coordinator sent; what concerns this machine alone comes from its own configuration.

        Raises:
            InputError: It is malformed, its plan is not valid or names something that is not agreed on.
        """
        try:
            content = json.loads(text)
            plan, outline = content.pop("plan"), content.pop("outline")
            proposal = cls(
                plan=None if plan is None else Plan.from_agreement(plan, local),
                outline=None if outline is None else Outline.from_json(outline),
                **content,
            )
            proposal._check()
        except _MALFORMED as error:
            raise InputError(f"the coordinator's proposal cannot be read: {error}") from error
        return proposal

    def _check(self) -> None:
        texts = (self.run, self.alignment, self.ids, self.trained, self.numbers, self.token, self.profile)
        if not all(isinstance(each, str) for each in texts):
            raise ValueError("a field has another type")
        _check_members(self.members)
        for name in () if self.outline is None else (*self.outline.parties, self.outline.label_holder):
            check_name(name)
        counts = (self.restarts, self.records, self.people, self.requests)
        if not all(type(count) is int and 0 <= count < 1 << 31 for count in counts):
            raise ValueError("a count is no number")
        if self.records > MAX_IDS:
            raise ValueError(f"more than {MAX_IDS:,} records, which nobody can align")
        if type(self.time_unit) not in (float, int) or not 0 <= self.time_unit <= MAX_TIME_UNIT:
            raise ValueError(f"a time unit that is no number from 0 to {MAX_TIME_UNIT:,.0f}")
        if bool(self.trained) != (self.plan is None) or bool(self.trained) != (self.records > 0):
            raise ValueError("it is neither a training nor a prediction")
        if bool(self.profile) != (self.plan is not None and self.plan.profiled):
            raise ValueError("a profile that the plan does not count, or the other way round")
        if bool(self.people) != bool(self.requests) or (self.people and not self.trained):
            raise ValueError("a quota without people, requests or a trained model")

    def for_training(
        self, name: str, own: OwnTable | None, rows: Sequence[int], coding: Coding | None = None
    ) -> Agreement:
        """Completes the plan from one organisation's share of the data.

        Raises:
            PlanError: The plan cannot work.
        """
        if self.plan is None or self.outline is None:
            raise AgreementError("the coordinator proposes no training")
        if self.plan.label_holder == "server":
            raise PlanError("over a network the label holder is the coordinator; leave label_holder alone")
        if self.plan.source.data:
            raise PlanError("a plan for a network names no data; every organisation has its own")
        self.plan.check_protection()
        plan, data = resolve(self.plan, share(self.outline, name, own, rows, coding), apart=True)
        table = Timetable.of_training(
            plan,
            parties=len(data.parties),
            n_train=data.n_train,
            n_test=data.n_test,
            restarts=self.restarts,
        )
        return Agreement(
            proposal=self,
            plan=plan,
            outline=self.outline,
            timetable=table,
            forecast=forecast(plan, data),
            constants=constants_of(plan, self.outline.parties, self.outline.label_holder),
            data=data,
        )

    def for_prediction(self, plan: Plan, outline: Outline, *, known: int = 0, cost: str = "") -> Agreement:
        """Puts what is asked together with what this organisation trained by.

        Args:
            plan: The resolved plan in its folder.
            outline: The outline in its folder.
            known: How many of the records it knows by number already.
            cost: What it costs this organisation, in words.
        """
        return Agreement(
            proposal=self,
            plan=plan,
            outline=outline,
            timetable=Timetable.of_prediction(self.records, self.quota),
            known=known,
            cost=cost,
        )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A proposal as one organisation understands it.

    Attributes:
        proposal: What was proposed.
        plan: The completed plan.
        outline: The data as everybody knows it.
        timetable: What will happen.
        forecast: Owner -> observer -> epsilon at the end; empty for a prediction, whose cost is its own.
        constants: Numbers of the package that everybody must compute with -> digest or value.
        data: The organisation's share, scaled; None for a prediction.
        known: Of a prediction: how many of the records have a number already.
        cost: Of a prediction: what it costs this organisation, in words.
        text: The canonical form, the same for everybody who understands the same.
        digest: SHA-256 of the text.
    """

    proposal: Proposal
    plan: Plan
    outline: Outline
    timetable: Timetable
    forecast: Forecast = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    data: VerticalData | None = None
    known: int = 0
    cost: str = ""
    text: str = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self._text())
        object.__setattr__(self, "digest", hashlib.sha256(self.text.encode()).hexdigest())

    def _text(self) -> str:
        asked = self.proposal
        promised = {
            owner: {name: epsilon if math.isfinite(epsilon) else None for name, epsilon in seen.items()}
            for owner, seen in self.forecast.items()
        }
        content = {
            "format": _FORMAT,
            "purpose": self.purpose,
            "run": self.run,
            "members": list(self.members.items()),
            "plan": self.plan.to_agreement(),
            "outline": asdict(self.outline),
            "alignment": {"kind": asked.alignment, "ids": self.ids, "normalise": self.outline.normalise},
            "schedule": self.timetable.content(),
            "forecast": promised,
            "constants": self.constants,
            "delta": self.plan.delta,
            "time_unit": float(asked.time_unit),
            "trained": self.trained,
            "numbers": asked.numbers,
            "token": asked.token,
            **({"profile": asked.profile} if asked.profile else {}),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @property
    def purpose(self) -> str:
        """`TRAINING`, `PREDICTION` or `SCORING`."""
        if self.proposal.quota is not None:
            return SCORING
        return PREDICTION if self.trained else TRAINING

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.proposal.run

    @property
    def members(self) -> dict[str, str]:
        """Who takes part -> fingerprint of its key."""
        return self.proposal.members

    @property
    def ids(self) -> str:
        """Commitment to the common IDs."""
        return self.proposal.ids

    @property
    def trained(self) -> str:
        """Digest of the agreement whose model predicts; empty for training."""
        return self.proposal.trained

    def sign(self, identity: Identity) -> str:
        """An organisation's signature, in hexadecimal form."""
        return sign(identity, _signed(self.text)).hex()

    def verify(self, signatures: Mapping[str, str], certificates: Mapping[str, bytes]) -> None:
        """Checks that everybody has signed this very text with the key that it names.

        Raises:
            AgreementError: Somebody has not, or with another key.
        """
        verify_all(self.text, self.members, signatures, certificates)


def constants_of(plan: Plan, parties: Sequence[str], label_holder: str) -> dict[str, str]:
    """What everybody must compute with, by this installation, for a completed plan."""
    return find_algorithm(plan.algorithm).constants(plan, len({*parties, label_holder}))


def _signed(text: str) -> bytes:
    return pack(_SIGNED, {"text": text})


def verify_all(
    text: str,
    members: Mapping[str, str],
    signatures: Mapping[str, str],
    certificates: Mapping[str, bytes],
) -> None:
    """Checks everybody's signature of an agreement's text; whether to trust the certificates is for others.

    Args:
        text: The canonical text.
        members: Everybody -> fingerprint of its key, as the text has it.
        signatures: Everybody -> signature in hexadecimal form.
        certificates: Everybody -> certificate.

    Raises:
        AgreementError: Somebody has not signed, or with another key.
    """
    for name, key in members.items():
        if name not in signatures or name not in certificates:
            raise AgreementError(f"{name} has not signed the agreement")
        if fingerprint(parse_certificate(certificates[name])) != key:
            raise AgreementError(f"{name} has another key than the agreement names")
        try:
            verify(certificates[name], name, _signed(text), bytes.fromhex(signatures[name]))
        except (InvalidSignature, ValueError) as error:
            raise AgreementError(
                f"{name} has not signed this agreement: it may have been shown another one"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Signed:
    """What an `agreement.json` holds: a text, and who has signed it with which key.

    Attributes:
        text: The canonical text.
        digest: Its SHA-256.
        content: What it says.
        signatures: Organisation -> signature in hexadecimal form.
        certificates: Organisation -> certificate.
        authority: The certificate of the authority that issued these, as the file has it. Whoever made the
            file may have made that, too: whether to trust it is for the reader.
    """

    text: str
    digest: str
    content: Mapping[str, Any]
    signatures: Mapping[str, str]
    certificates: Mapping[str, bytes]
    authority: bytes

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Reads it.

        Raises:
            AgreementError: It is malformed, or the digest is not that of the text.
        """
        try:
            signed = cls(
                text=said["text"],
                digest=said["digest"],
                content=json.loads(said["text"]),
                signatures=dict(said["signatures"]),
                certificates={name: pem.encode() for name, pem in said["certificates"].items()},
                authority=said["authority"].encode(),
            )
            for name in signed.members:
                check_name(name)
        except (*_MALFORMED, CertificateError) as error:
            raise AgreementError(
                "agreement.json does not hold what was agreed on and who signed it"
            ) from error
        if hashlib.sha256(signed.text.encode()).hexdigest() != signed.digest:
            raise AgreementError("agreement.json: the digest is not that of the text")
        return signed

    @property
    def members(self) -> dict[str, str]:
        """Who takes part -> fingerprint of its key."""
        return {str(name): str(key) for name, key in self.content["members"]}

    @property
    def authority_in_words(self) -> str:
        """The authority, so that a reader can compare it with the own one."""
        found = parse_certificate(self.authority, "the authority's certificate in agreement.json")
        return f"{readable(found.subject.rfc4514_string(), 80)}, key {fingerprint(found)[:16]}"

    def verify(self) -> None:
        """Checks everybody's signature and certificate.

        Raises:
            AgreementError: Somebody has not signed, or with another key.
            CertificateError: A certificate is not of this authority.
        """
        authority = parse_certificate(self.authority, "the authority's certificate in agreement.json")
        for name, pem in self.certificates.items():
            check_issuer(parse_certificate(pem), authority, f"the certificate of {name}")
        verify_all(self.text, self.members, self.signatures, self.certificates)


def commitments(session: str, salt: bytes, ids: Sequence[str], numbers: Sequence[int]) -> tuple[str, str]:
    """Binds a prediction to its common IDs, and these to their record numbers.

    A prediction may be of a single person, whom a helper without data could find by trying all IDs there may
    be. So the salt, which only those with data get, is part of both.
    """
    place = f"{session} {salt.hex()}"
    numbered = [f"{number} {each}" for number, each in zip(numbers, ids, strict=True)]
    return commitment(place, ids), commitment(place, numbered)
