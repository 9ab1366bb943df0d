"""Scoring as what organisations have come together for: a service that stands, with the model they trained.

The same connections, alignment and agreement as in a prediction, then one phase that lasts: whoever of the
common people is asked for is scored. The agreement names a quota in place of who will be scored, and stands:
a process that starts anew with the same people takes it up, and everybody's gate goes on counting by its
ledger. Only where somebody's table names other people is there a new alignment, and a new agreement.

When a process dies everybody comes together again; rounds that were not answered are asked again under their
names, and nobody pays for one twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.algorithms import Algorithm
from securevfl.algorithms.sealed.serving import SealedServing
from securevfl.algorithms.serving import Outputs, Serving
from securevfl.data import VerticalData
from securevfl.data.share import OwnTable, own_ids
from securevfl.errors import InputError, PlanError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import in_label_units
from securevfl.federation.schedule import Schedule
from securevfl.federation.site import SERVING, Site
from securevfl.files import read_json, write_json
from securevfl.network.agreement import SCORING, Agreement
from securevfl.network.config import ParticipantConfig, ScoringConfig
from securevfl.network.dispatcher import Served, ServiceDispatcher
from securevfl.network.folders import AGREEMENTS
from securevfl.network.frames import SCORE
from securevfl.network.participant import Participant
from securevfl.network.prediction import PredictionPurpose
from securevfl.privacy.chain import SCORING as NOTED
from securevfl.privacy.chain import LedgerReader
from securevfl.protocols.alignment.ids import NORMALISATIONS

STANDING_FILE = "standing.json"
GAP = 1 << 24
"""How far message numbers go on above those of an earlier process, which may have been killed."""
EXACT = "none: exact scores carry no epsilon; they are counted, and limited by the quota"
"""What clients are told of scores of sealed models."""


def scoring_of(config: ParticipantConfig) -> ScoringConfig:
    """What an organisation brings to the service.

    Raises:
        PlanError: Its configuration does not say.
    """
    if config.scoring is None or (config.data is not None and not config.scoring.file):
        raise PlanError('[scoring] is missing, or its file; write [scoring] and file = "people.csv" below it')
    return config.scoring


class ScoringPurpose(PredictionPurpose):
    """Scores people on request.

    Args:
        file: The table of people who may be scored; of no use to a helper.
        dispatcher: At the label holder: where clients' requests come in.
    """

    suffix = SCORE
    name = SCORING
    what = "the scoring service"
    back_to = "the rounds that were not answered"

    def __init__(self, file: Path, dispatcher: ServiceDispatcher | None = None) -> None:
        super().__init__(file)
        self.dispatcher = dispatcher
        self._standing: dict[str, Any] = {}

    @contextmanager
    def reserved(self, who: Participant) -> Iterator[None]:
        """A service has no file of scores to reserve."""
        yield

    def open(self, who: Participant, *, leads: bool) -> None:
        """Takes up the finished run, and what stands from an earlier process of the service."""
        super().open(who, leads=leads)
        who.patience = math.inf  # whoever is away may come back
        if who.own is not None:
            who.comparable(self.normalise)
        path = _standing_file(who.folder)
        known = read_json(path) if path.is_file() else {}
        mine = "" if who.own is None else self._mark(who.own)
        if isinstance(known, dict) and known.get("table") == mine:
            self._standing = known
            self.ids, self.salt = known.get("ids"), bytes.fromhex(str(known.get("salt", "")))
        else:
            self._standing = {"table": mine}

    def _mark(self, own: OwnTable) -> str:
        """Whom the own table names."""
        ids = sorted(own_ids(own.normalised(self.normalise)))
        return hashlib.sha256("\n".join(ids).encode()).hexdigest()

    # -- the common people ----------------------------------------------------------------------------------

    def remembered(self, who: Participant) -> list[str] | None:  # type: ignore[override]
        """The people that an earlier process has found, while the own table names the same."""
        return self.ids

    def has_agreed(self) -> bool:
        """See `Purpose`."""
        return bool(self._standing.get("digest"))

    def take_ids(self, who: Participant, ids: list[str], *, leads: bool) -> None:
        """See `PredictionPurpose`; a new alignment ends what stood."""
        if ids != self._standing.get("ids"):
            self._standing = {"table": self._standing.get("table", "")}
            self.salt = b""
        super().take_ids(who, ids, leads=leads)

    # -- the agreement --------------------------------------------------------------------------------------

    def token(self, process: bytes) -> str:
        """One confirmation is for all processes of the service."""
        return ""

    def asked(self, who: Participant) -> dict[str, Any]:
        """The quota."""
        scoring = scoring_of(who.config)
        if not (scoring.people and scoring.requests):
            raise InputError("[scoring] names no quota; write people = 10000 and requests = 10000 below it")
        return {"people": scoring.people, "requests": scoring.requests}

    def confirmed(self, who: Participant, agreement: Agreement) -> bool:
        """See `Purpose`."""
        return self._standing.get("digest") == agreement.digest

    def keep(self, who: Participant, agreement: Agreement) -> None:
        """Keeps what was agreed on, with everybody's signatures as soon as they are known."""
        self._standing |= {
            "digest": agreement.digest,
            "ids": self.ids,
            "salt": self.salt.hex(),
            "signed": self._standing.get("signed"),
        }
        if who.agreement is not None and who.agreement.digest == agreement.digest and who.signatures:
            signed = self._standing["signed"] = who.signed(agreement)
            path = who.folder.path / SERVING / AGREEMENTS / f"{agreement.digest}.json"
            write_json(path, {"digest": agreement.digest, "signed": signed})
        write_json(_standing_file(who.folder), self._standing)

    def algorithm(self) -> Algorithm:
        """See `PredictionPurpose`."""
        made = SealedServing if self.plan.mode == "sealed" else Serving
        return made(np.asarray(self.numbers, np.int64), self.dispatcher)

    def build(self, who: Participant, agreement: Agreement) -> Site:
        """See `PredictionPurpose`; the dispatcher goes on with the new site."""
        self._begun = False
        self.trained.messages += GAP
        site = super().build(who, agreement)
        if self.dispatcher is not None and site.gate is not None and agreement.timetable.quota is not None:
            used, noted = self._noted(who, self.dispatcher.unsettled())
            served = Served(
                ledger=site.gate.ledger,
                numbers=dict(zip(self.ids or (), self.numbers, strict=True)),
                comparable=lambda ids: [NORMALISATIONS[self.normalise](each) for each in ids],
                trained=self.outline.records,
                owners=tuple(each for each in self.organisations if each in self.outline.parties),
                quota=agreement.timetable.quota,
                used=used,
                convert=lambda outputs: _scores(site.data, outputs),
                promise=EXACT if self.plan.mode == "sealed" or not self.plan.sigma else _noisy(site),
            )
            self.dispatcher.away = who.mesh.unsettled  # one that came back as another process is away, too
            self.dispatcher.attach(served, noted)
        return site

    def _noted(self, who: Participant, rounds: Collection[str]) -> tuple[int, set[str]]:
        """How many scores the label holder's ledger notes, and which of these rounds."""
        used, noted = 0, set[str]()
        for entry in LedgerReader(who.folder.ledger(who.name), thorough=False).entries(NOTED):
            used += int(entry.content["vectors"])
            if entry.content["name"] in rounds:
                noted.add(entry.content["name"])
        return used, noted

    def check_restart(self, reason: str) -> None:
        """Everybody comes together again."""

    # -- the end --------------------------------------------------------------------------------------------

    async def follow(self, schedule: Schedule) -> None:
        """See `Purpose`."""
        await schedule.score()

    def finish(self, who: Participant) -> None:
        """See `Purpose`."""
        self.close(who)

    def result(self, who: Participant, epochs: int) -> dict[str, Any]:
        """See `Purpose`."""
        return {
            "run": who.config.run,
            "organisation": who.name,
            "records": self.count,
            "messages": who.mesh.messages,
            "bytes": who.mesh.bytes,
        }

    def close(self, who: Participant) -> None:
        """As `PredictionPurpose`, but what was spent stands in the ledger alone: it may be long by now."""
        self._settle(who)


def _standing_file(folder: RunFolder) -> Path:
    return folder.path / SERVING / STANDING_FILE


def _noisy(site: Site) -> str:
    plan = site.plan
    return f"noise of sigma {plan.sigma:g} in every party's part, counted in its ledger; mode {plan.mode}"


def _scores(data: VerticalData, outputs: Outputs) -> list[Any]:
    """What clients get of each record: a chance, a value, or a chance of each class."""
    found = in_label_units(data, outputs)
    if not np.isfinite(found).all():
        raise RunError("the model gives values that are not finite")
    if data.task != "multiclass":
        return list(found.tolist())
    return [dict(zip(map(str, data.classes), row, strict=True)) for row in found.tolist()]
