"""Training as what organisations have come together for: agreed on once, taken up after interruptions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from securevfl.algorithms.alone import reached_alone
from securevfl.algorithms.sealed.stack import given_back
from securevfl.data.share import OUTLINE_FILE, Outline, OwnTable, coding_of, rows_of, split_rows
from securevfl.errors import AgreementError, DataError, ProtocolError, RunError
from securevfl.federation.clock import RealClock
from securevfl.federation.run import result_content
from securevfl.federation.site import Site
from securevfl.federation.trained import Trained
from securevfl.files import write_json, write_text
from securevfl.network.agreement import TRAINING, Agreement, Facts, Proposal
from securevfl.network.config import ParticipantConfig, PartyConfig, ServerConfig
from securevfl.network.continuing import HANDED_OVER, AgreedProfile
from securevfl.network.folders import commitment, load_alignment, save_alignment
from securevfl.network.participant import Participant, Purpose
from securevfl.privacy.ledger import AGREEMENT_FILE


class Training(Purpose):
    """Trains a model. Who starts again with the same folder goes on from the last common epoch."""

    name = TRAINING
    what = "the plan"
    back_to = "the last common epoch"
    _digest = ""
    _profile: AgreedProfile | None = None

    def read_table(self, config: ParticipantConfig) -> OwnTable | None:
        """See `Purpose`."""
        return None if config.data is None else config.data.read(config.base)

    @contextlib.contextmanager
    def reserved(self, who: Participant) -> Iterator[None]:
        """See `Purpose`; while one run goes on from a profile, no other can begin from it."""
        if who.config.profile is None:
            yield
            return
        with AgreedProfile.open(who.config.profile).folder.locked():
            yield

    def open(self, who: Participant, *, leads: bool) -> dict[str, Any] | None:
        """See `Purpose`."""
        if who.config.profile is not None:
            profile = AgreedProfile.open(who.config.profile)
            profile.begin(who.folder, who.name, recorded=_records_views(who.config))
            self._profile, self.handed_over = profile, HANDED_OVER
        self._digest = who.open_folder()
        self.ids = load_alignment(who.folder.path)
        if not who.folder.result_file.exists():
            return None
        if leads:
            raise RunError(
                f"the run in {who.folder.path} is finished; choose another folder for a new one, or predict "
                "with --predict FILE --out FILE"
            )
        return who.folder.read_result()

    # -- the common records ---------------------------------------------------------------------------------

    def remembered(self, who: Participant) -> list[str] | None:
        """See `Purpose`."""
        return load_alignment(who.folder.path)

    def take_ids(self, who: Participant, ids: list[str], *, leads: bool) -> None:
        """Keeps the common IDs, for a process that follows and for the audit.

        Raises:
            RunError: The folder's run was agreed on with others; those stay.
        """
        path = who.folder.path
        if (path / AGREEMENT_FILE).exists() and load_alignment(path) not in (None, ids):
            raise RunError(f"the run in {path} has other common records; choose another folder for a new run")
        if ids != load_alignment(path):
            save_alignment(path, ids)
        self.ids = ids

    # -- the agreement --------------------------------------------------------------------------------------

    def propose(self, who: Participant, facts: Mapping[str, Facts]) -> Agreement:
        """See `Purpose`."""
        config, own, ids = who.config, who.own, self.ids or []
        if own is None or not isinstance(config, ServerConfig):
            raise DataError("the coordinator has no labels")
        rows = rows_of(own, ids)
        coding = coding_of(own, rows, config.task or None)
        mine = {who.name: Facts.of(own)} if own.columns else {}
        found = {**mine, **facts}
        kept, apart = split_rows(len(ids), config.test_fraction, config.plan.seed)
        outline = Outline(
            parties=tuple(found),
            widths=tuple(each.columns for each in found.values()),
            bounds=tuple(each.bounds for each in found.values()),
            described=tuple(each.described for each in found.values()),
            label_holder=who.name,
            task=coding.task,
            classes=len(coding.classes),
            n_train=len(kept),
            n_test=len(apart),
            test_fraction=config.test_fraction,
            split_seed=config.plan.seed,
            name=config.run,
            normalise=config.normalise,
        )
        profile = self._profile
        proposal = Proposal(
            run=config.run,
            plan=config.plan if profile is None else profile.continued(config.plan),
            outline=outline,
            members=who.keys((who.name, *config.others)),
            alignment=config.align,
            ids=commitment(who.session, ids),
            time_unit=config.time_unit,
            restarts=config.restarts,
            profile="" if profile is None else profile.digest,
        )
        return self._continued(proposal.for_training(who.name, own, rows, coding))

    def understand(self, who: Participant, text: str) -> Agreement:
        """See `Purpose`."""
        if not isinstance(who.config, PartyConfig):
            raise ProtocolError("the coordinator proposes, and understands what it proposed")
        proposal = Proposal.from_json(text, who.config.local)
        if proposal.run != who.config.run or who.name not in proposal.members or proposal.trained:
            raise AgreementError(f"the proposal is for run {proposal.run!r} without {who.name}")
        if proposal.profile != ("" if self._profile is None else self._profile.digest):
            raise AgreementError(
                f"the proposal goes on from {_named(proposal.profile)}; {who.name}'s configuration names "
                f"{_named('' if self._profile is None else self._profile.digest)}"
            )
        if who.own is None:
            return self._continued(proposal.for_training(who.name, None, ()))
        if self.ids is None or proposal.ids != commitment(who.session, self.ids):
            raise AgreementError("the proposal commits to other IDs than were found to be common")
        if proposal.outline is None:
            raise AgreementError("the coordinator proposes no training")
        own = who.comparable(proposal.outline.normalise)
        return self._continued(proposal.for_training(who.name, own, rows_of(own, self.ids)))

    def _continued(self, agreement: Agreement) -> Agreement:
        """The agreement, once it fits the profile that it goes on from, if any."""
        if self._profile is not None:
            self._profile.check_agreement(agreement, self.ids)
        return agreement

    def has_agreed(self) -> bool:
        """See `Purpose`."""
        return bool(self._digest)

    def confirmed(self, who: Participant, agreement: Agreement) -> bool:
        """See `Purpose`."""
        if self._digest and self._digest != agreement.digest:
            raise RunError(
                f"the run in {who.folder.path} was agreed on as {self._digest}, now it would be "
                f"{agreement.digest}; choose another folder for another plan or other data"
            )
        return bool(self._digest)

    def keep(self, who: Participant, agreement: Agreement) -> None:
        """See `Purpose`."""
        if self._profile is not None:
            self._profile.take(who.folder, who.name)
        self._digest = agreement.digest
        content = {
            "run": who.config.run,
            "homes": [who.name],
            "digest": agreement.digest,
            "organisations": list(agreement.members),
            **who.signed(agreement),
        }
        # First the file by which a restarted process recognises the folder as its own.
        write_json(who.folder.path / AGREEMENT_FILE, content)
        write_text(who.folder.plan_file, agreement.plan.to_toml())
        write_text(who.folder.path / OUTLINE_FILE, agreement.outline.to_json() + "\n")

    def build(self, who: Participant, agreement: Agreement) -> Site:
        """See `Purpose`; a site that is there already stays, with what its gate has counted."""
        if who.site is not None:
            return who.site
        if agreement.data is None:
            raise AgreementError("what was confirmed is no training")
        return who.make_site(agreement, agreement.data, RealClock(agreement.proposal.time_unit))

    # -- the end --------------------------------------------------------------------------------------------

    def finish(self, who: Participant) -> None:
        """Writes models, and how new rows are scaled and whose records have which index."""
        site = who.site
        if site is None:
            raise ProtocolError("the run ends before it began")
        site.finish()
        trained = Trained.of(
            site.data, messages=max(site.numbers().values(), default=0), time=who.clock.now()
        )
        helper = site.data.labels_absent and set(site.data.absent) == set(site.data.parties)
        # Over a network IDs are text.
        trained.numbers = {} if helper else {str(each): n for each, n in trained.numbers.items()}
        trained.save(who.folder)

    def result(self, who: Participant, epochs: int) -> dict[str, Any]:
        """What the run gave this organisation, as `train --json` prints it; it is written, too."""
        site = who.site
        if site is None:
            raise ProtocolError("the run ends before it began")
        result = result_content(
            site.plan,
            who.records(),
            label_holder=site.label_holder,
            server=site.server,
            epochs=epochs,
            organisation=who.name,
            time={"virtual": who.clock.now(), "wall": round(time.monotonic() - who.begun, 3)},
            messages=who.mesh.messages,
            bytes=who.mesh.bytes,
            stopped=who.reason,
        )
        if site.server is not None:
            holds = site.plan.label_holder == "party"
            stacked = site.plan.mode == "sealed" and site.plan.settings.stack
            data = given_back(site.data) if stacked else site.data
            result["alone"] = reached_alone(data, holds_features=holds)  # it stays here
        who.folder.write_result(result)
        return result


def _records_views(config: ParticipantConfig) -> bool:
    """Whether an organisation writes what it sees, which is its own to decide."""
    if isinstance(config, ServerConfig):
        return config.plan.record_views
    return isinstance(config, PartyConfig) and config.local.record_views


def _named(profile: str) -> str:
    return f"the profile {profile}" if profile else "no profile"
