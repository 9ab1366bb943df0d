"""Prediction as what organisations have come together for, with the model that they have trained.

The same connections, alignment and confirmation as in training, then one phase: the trained roles run once
more on new records, whatever leaves an organisation passes its own gate, and the label holder writes the
scores. There are no checkpoints: when somebody is lost the prediction stops, and what was released until then
stays counted.
"""

from __future__ import annotations

import contextlib
import csv
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import Algorithm
from securevfl.algorithms.prediction import KIND
from securevfl.data import VerticalData
from securevfl.data.share import Outline, OwnTable, read_outline, rows_of
from securevfl.errors import AgreementError, DataError, InputError, NetworkError, ProtocolError, RunError
from securevfl.federation.clock import RealClock
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import Floats, in_label_units, predicting
from securevfl.federation.run import counted
from securevfl.federation.schedule import Schedule
from securevfl.federation.site import Site, spent_so_far
from securevfl.federation.trained import Trained
from securevfl.files import PART, create, sync
from securevfl.network.agreement import PREDICTION, Agreement, Facts, Proposal, commitments
from securevfl.network.config import ParticipantConfig, ServerConfig
from securevfl.network.consent import cost_in_words
from securevfl.network.frames import PREDICT, SALT_BYTES
from securevfl.network.participant import Participant, Purpose
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.settings.plan import Plan


def check_finished(folder: RunFolder) -> None:
    """Raises `RunError` unless a folder holds a finished run over a network."""
    if not (folder.path / AGREEMENT_FILE).is_file():
        raise RunError(f"{folder.path} holds no run over a network; train first, without --predict")
    if not folder.result_file.is_file():
        raise RunError(
            f"the run in {folder.path} has not finished; finish the training first, without --predict"
        )


class PredictionPurpose(Purpose):
    """Applies the trained model to new records.

    Args:
        file: The table of new records, with the columns that it trained with; of no use to a helper.
        out: At the label holder: where to write the scores; the file must not exist yet.
    """

    suffix = PREDICT
    name = PREDICTION
    what = "the prediction"
    back_to = "the beginning; nothing was released yet"
    plan: Plan
    trained: Trained
    digest: str
    organisations: tuple[str, ...]
    label_holder: str
    normalise: str
    outline: Outline

    def __init__(self, file: Path, out: Path | None = None) -> None:
        self.file, self.scores = file, None if out is None else ScoresFile(out)
        self.count = self.known = 0
        self._confirmed = ""
        self._begun, self._settled = False, True

    def read_table(self, config: ParticipantConfig) -> OwnTable | None:
        """See `Purpose`."""
        folder, name = RunFolder(config.folder), config.identity.name
        check_finished(folder)
        if config.data is None:
            return None
        data = Trained.load_share(folder, name).template
        columns = data.columns[data.parties.index(name)] if name in data.parties else ()
        return config.data.read_new(self.file, columns)

    @contextlib.contextmanager
    def reserved(self, who: Participant) -> Iterator[None]:
        """Makes sure that there is a trained model, and that its scores can be written."""
        check_finished(who.folder)
        if self.scores is None:
            yield
            return
        self.scores.reserve()
        try:
            yield
        finally:
            self.scores.release()

    def open(self, who: Participant, *, leads: bool) -> None:
        """Takes up the finished run in the folder.

        Raises:
            RunError: There is none, or it is another.
            DataError: The configuration is no longer that of the run.
        """
        check_finished(who.folder)
        self.digest = who.open_folder()
        content, outline = read_agreement(who.folder.path), read_outline(who.folder.path)
        if outline is None:
            raise RunError(f"{who.folder.path} is not the folder of {who.name}")
        self.organisations, self.label_holder = content["organisations"], outline.label_holder
        self.outline, self.normalise = outline, outline.normalise
        self.plan = who.folder.read_plan()
        self.trained = Trained.load_share(who.folder, who.name)
        if leads:
            self.check_config(who)

    def check_config(self, who: Participant) -> None:
        """Raises `DataError` where the coordinator's configuration is no longer that of the run."""
        config = who.config
        if not isinstance(config, ServerConfig):
            return
        if set(self.organisations) != {who.name, *config.others}:
            raise DataError(f"the run was of {', '.join(self.organisations)}; the configuration names others")
        if config.normalise != self.normalise:
            raise DataError(
                f"the run compared IDs by {self.normalise!r}, the configuration says "
                f"{config.normalise!r}; known people would pass for new ones, so leave it as it was"
            )

    # -- the common records ---------------------------------------------------------------------------------

    def check_comparison(self, who: Participant, way: str) -> None:
        """IDs are compared as in training: spelt otherwise, a known person would pass for a new one."""
        if way != self.normalise:
            raise ProtocolError(
                f"the coordinator compares IDs by {way!r}; the run {who.config.run!r} did by "
                f"{self.normalise!r}"
            )

    def remembered(self, who: Participant) -> None:
        """Every prediction is of other records."""
        return

    def take_ids(self, who: Participant, ids: list[str], *, leads: bool) -> None:
        """The common IDs are kept with their record numbers, once a prediction of these is confirmed.

        The label holder gives them numbers: whoever is known keeps the old one.
        """
        self.ids, self.numbers = ids, ()
        if not leads:
            who.agreement = None
        else:
            self.count, self.trained = len(ids), Trained.load_share(who.folder, who.name)
            self.known = sum(each in self.trained.numbers for each in ids)
            self.numbers = tuple(self.trained.number(ids, self.count).tolist())
            self.salt = self.salt or secrets.token_bytes(SALT_BYTES)

    def take_numbers(self, who: Participant, numbers: list[int], salt: bytes) -> None:
        """Takes up the record numbers, unless they contradict those under which records have paid here."""
        if who.own is None or not self.ids or len(numbers) != len(self.ids):
            raise ProtocolError("the coordinator numbers other records than were found to be common")
        self.trained = Trained.load_share(who.folder, who.name)
        self.known = self.trained.adopt(self.ids, numbers)
        self.numbers, self.salt, who.agreement = tuple(numbers), salt, None

    # -- the agreement --------------------------------------------------------------------------------------

    def propose(self, who: Participant, facts: Mapping[str, Facts]) -> Agreement:
        """See `Purpose`."""
        ids, numbers = commitments(who.session, self.salt, self.ids or [], self.numbers)
        proposal = Proposal(
            run=who.config.run,
            members=who.keys(self.organisations),
            alignment=who.config.align if isinstance(who.config, ServerConfig) else "",
            ids=ids,
            trained=self.digest,
            records=self.count,
            numbers=numbers,
            token=self.token(who.mesh.incarnation),
            **self.asked(who),
        )
        return proposal.for_prediction(self.plan, self.outline, known=self.known)

    def token(self, process: bytes) -> str:
        """Ties a confirmation to the coordinator's process: one confirmation is for one prediction."""
        return process.hex()

    def asked(self, who: Participant) -> dict[str, Any]:
        """What is asked for besides."""
        return {}

    def understand(self, who: Participant, text: str) -> Agreement:
        """See `Purpose`."""
        request, coordinator = Proposal.from_json(text, self.plan.local), who.mesh.coordinator
        if (request.quota is None) != (self.name == PREDICTION):
            raise AgreementError(f"the coordinator proposes something else than {self.what}")
        if (request.run, request.trained) != (who.config.run, self.digest):
            raise AgreementError(
                f"the coordinator predicts with the model of {request.trained}; {who.name} agreed on "
                f"{self.digest}"
            )
        if tuple(request.members) != self.organisations or self.label_holder != coordinator:
            raise AgreementError(f"the prediction is not of {', '.join(self.organisations)}")
        if request.token != self.token(who.mesh.sessions[coordinator].incarnation):
            raise AgreementError("the coordinator asks what another process of it asked")
        cost = ""
        if who.own is not None:
            self._check_records(who, request)
            cost = self._cost(who, request)
        self.count = request.records
        return request.for_prediction(self.plan, self.outline, known=self.known, cost=cost)

    def _cost(self, who: Participant, request: Proposal) -> str:
        """What the prediction costs this party, by its ledger and its plan."""
        plan, count = self.plan, request.people or len(self.numbers)
        if plan.mode == "sealed":
            return (
                f"the exact scores of {count} records, counted apart; records that training used are refused"
            )
        if not plan.sigma or plan.insecure_reproducible_noise:
            return f"{count} exact embeddings, without any guarantee (epsilon is infinite)"
        spent = spent_so_far(who.name, plan, records=self.trained.records, folder=who.folder)
        before = spent.spent_mu
        spent.charge(
            ReleaseRecord(
                owner=who.name,
                observers=(self.label_holder,),
                kind=KIND,
                mechanism="gaussian",
                clip=plan.clip,
                sigma=plan.sigma,
                sensitivity=2 * plan.clip,
                # A service may be asked for one person again and again: the worst record pays for all.
                rows=None if request.people else np.asarray(self.numbers, np.int64),
                vectors=count,
                mode=plan.mode,
            )
        )
        return cost_in_words(count, plan, before, spent.spent_mu)

    def _check_records(self, who: Participant, request: Proposal) -> None:
        """The records that are asked for are those that were found and numbered here, no others."""
        ids, numbers = self.ids or [], self.numbers
        numbered = len(ids) == len(numbers) == request.records
        if not numbered or (request.ids, request.numbers) != commitments(
            who.session, self.salt, ids, numbers
        ):
            raise AgreementError("the coordinator asks for other records than were found to be common")

    def confirmed(self, who: Participant, agreement: Agreement) -> bool:
        """See `Purpose`; who is asked once more for the very same need not be asked again."""
        return self._confirmed == agreement.digest

    def keep(self, who: Participant, agreement: Agreement) -> None:
        """A prediction leaves no agreement behind, only record numbers and ledger entries."""
        self._confirmed = agreement.digest

    def build(self, who: Participant, agreement: Agreement) -> Site:
        """The site with the trained models; record numbers are on disk before anything is charged to them."""
        if self._begun:
            raise ProtocolError("the coordinator announces the prediction, which was not confirmed here")
        own, block = who.own, None
        if own is not None and own.columns:
            block = own.block[rows_of(own, self.ids or ())]
        rows = self.trained.take_share(block, self.count)
        self.trained.save_records(who.folder)
        if who.site is not None:
            who.site.close()
            who.site = None
        algorithm = self.algorithm()
        clock = RealClock()
        clock.set(self.trained.time)
        records = self.trained.records
        who.site = site = who.make_site(agreement, rows, clock, algorithm=algorithm, records=records)
        for link in site.links.values():
            link.number = max(link.number, self.trained.messages)
        self._settled = False
        return site

    def algorithm(self) -> Algorithm:
        """What the site runs."""
        return predicting(self.plan, np.asarray(self.numbers, np.int64), identified=True)

    def begin(self) -> None:
        """From now on there is no way back; the site refuses a second time by itself."""
        self._begun = True

    def check_restart(self, reason: str) -> None:
        """Before anything is released all start over; after that a person decides whether to pay again."""
        if self._begun:
            raise NetworkError(
                f"{reason} while predicting; what was released stays counted: start everybody again"
            )

    # -- the end --------------------------------------------------------------------------------------------

    async def follow(self, schedule: Schedule) -> None:
        """See `Purpose`."""
        await schedule.predict()

    def finish(self, who: Participant) -> None:
        """The label holder writes the scores, in the order of its table."""
        site = who.site
        if site is None or not self._begun:
            raise ProtocolError("the prediction ends before it began")
        if self.scores is not None and site.server is not None and who.own is not None:
            ids = self.ids or []
            outputs = site.server.predictions.detach().cpu().double().numpy()
            order = np.argsort(rows_of(who.own, ids))
            found = in_label_units(site.data, outputs)[order]
            self.scores.write(site.data, [ids[i] for i in order], found)
        self.close(who)

    def result(self, who: Participant, epochs: int) -> dict[str, Any]:
        """See `Purpose`."""
        scores = {} if self.scores is None else {"scores": str(self.scores.path)}
        return {
            "run": who.config.run,
            "organisation": who.name,
            "records": self.count,
            "known": self.known,
            **scores,
            **counted(self.plan, who.records()),
            "messages": who.mesh.messages,
            "bytes": who.mesh.bytes,
        }

    def close(self, who: Participant) -> None:
        """Keeps what was seen and spent, and from where the next prediction goes on."""
        if self._settle(who):
            who.folder.write_result(who.folder.read_result() | counted(self.plan, who.records()))

    def _settle(self, who: Participant) -> bool:
        """Keeps what was seen and where to go on; False where there was nothing, or it was kept before."""
        site = who.site
        if site is None or self._settled:
            return False
        self._settled = True
        site.write_observed()
        self.trained.messages, self.trained.time = max(site.numbers().values(), default=0), who.clock.now()
        self.trained.save_records(who.folder)
        return True


class ScoresFile:
    """Where the label holder writes scores; readable by its owner alone.

    Args:
        path: The file, which must not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._part = self.path.with_name(self.path.name + PART)

    def reserve(self) -> None:
        """Makes sure that the scores can be written later: releases for scores that are lost are paid too.

        Raises:
            InputError: The file exists, or its folder does not or cannot be written.
        """
        if self.path.exists():
            raise InputError(f"{self.path} exists already; choose another file for the scores")
        try:
            self._part.unlink(missing_ok=True)
            create(self._part, b"")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Leaves nothing behind where there were no scores."""
        if self._part.exists() and not self._part.stat().st_size:
            self._part.unlink()

    def write(self, data: VerticalData, ids: Sequence[str], scores: Floats) -> None:
        """Writes one line per record: its ID, and its score or one score per class.

        Raises:
            RunError: The file cannot be written, or somebody has made it meanwhile; the message says where
                the scores are.
        """
        values = np.asarray(scores).reshape(len(ids), -1)
        several = data.task == "multiclass"
        titles = [f"score_{each}" for each in data.classes] if several else ["score"]
        try:
            with self._part.open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                table.writerow(["id", *titles])
                table.writerows(
                    [each, *map(repr, row)] for each, row in zip(ids, values.tolist(), strict=True)
                )
                sync(file)
        except OSError as error:
            raise RunError(f"{self._part} cannot be written: {error.strerror}") from error
        if self.path.exists():
            raise RunError(f"{self.path} was made by somebody else meanwhile; the scores are in {self._part}")
        self._part.replace(self.path)
