"""A card that starts from a profile between organisations: each brings its own folder of the profile's run.

The agreement names the profile by the digest of the agreement under which it was made. Each organisation
compares that with its own folder, and records, members, keys and rules with what was signed then. It takes
over its own ledger, receipts and state before it joins, so that its gate has counted the profile before
anything else leaves. A profile begins one run: its folder says which one took it over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from securevfl.errors import AgreementError, RunError
from securevfl.federation.continued import TAKEN, Profile
from securevfl.federation.folder import CHECKPOINT, EVIDENCE, RunFolder
from securevfl.federation.site import complete_checkpoints
from securevfl.files import read_json, write_json
from securevfl.network.agreement import Agreement
from securevfl.network.folders import ALIGNMENT_FILE, PROFILE_FILE, commitment
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement, read_ledger

CONTINUED_FILE = "continued.json"
"""In the folder of a profile: the folder of the run that goes on from it."""
HANDED_OVER = (PROFILE_FILE, ALIGNMENT_FILE, *TAKEN, *EVIDENCE, "checkpoints", "metrics.jsonl")
"""What stands in the folder of such a run before anything is agreed on."""


class AgreedProfile(Profile):
    """One organisation's folder of a finished profile that was made over a network."""

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.folder.path

    @property
    def digest(self) -> str:
        """Of the agreement under which it was made."""
        return str(read_agreement(self.path)["digest"])

    def begin(self, target: RunFolder, name: str, *, recorded: bool) -> None:
        """Hands over what an organisation's new run goes on with, once.

        Args:
            target: The new run's folder.
            name: The organisation.
            recorded: Whether it records views.

        Raises:
            RunError: The profile is another organisation's, or another run has gone on from it.
        """
        homes = read_agreement(self.path)["homes"]
        if homes != (name,):
            raise RunError(f"the profile in {self.path} belongs to {', '.join(homes)}, not to {name}")
        self._check_unused(target, name)
        if (target.path / AGREEMENT_FILE).exists() or (target.path / PROFILE_FILE).exists():
            return
        for each in HANDED_OVER:  # half of it, where a process died meanwhile
            shutil.rmtree(target.path / each, ignore_errors=True)
            if (target.path / each).is_file():
                (target.path / each).unlink()
        if any(target.path.iterdir()):
            raise RunError(f"{target.path} holds something else; choose another folder")
        last = complete_checkpoints(self.folder)[-1]
        self.hand_over(target, recorded=recorded, state=f"checkpoints/{last:06d}/{CHECKPOINT}")
        if (self.path / ALIGNMENT_FILE).is_file():  # a helper knows no IDs
            shutil.copy2(self.path / ALIGNMENT_FILE, target.path / ALIGNMENT_FILE)
        write_json(target.path / PROFILE_FILE, read_json(self.path / AGREEMENT_FILE))

    def _check_unused(self, target: RunFolder, name: str) -> None:
        """Raises `RunError` where another run has released something after this profile.

        One that was never agreed on, or stopped before its first release, does not count.
        """
        taken = self._taken_by()
        if taken is None or taken == target.path.resolve():
            return
        theirs, own = (RunFolder(path).ledger(name) for path in (taken, self.path))
        if not taken.is_dir() or _releases(theirs) > _releases(own):
            raise RunError(
                f"the profile in {self.path} has begun the run in {taken}; a profile begins one run, and "
                "what both cost is one budget: make another profile, or train without one"
            )

    def _taken_by(self) -> Path | None:
        path = self.path / CONTINUED_FILE
        return Path(str(read_json(path)["folder"])) if path.is_file() else None

    def take(self, target: RunFolder, name: str) -> None:
        """Notes that a run goes on from it, before that has promised anything to anybody.

        Raises:
            RunError: Another one has done so meanwhile.
        """
        self._check_unused(target, name)
        if self._taken_by() != target.path.resolve():
            write_json(self.path / CONTINUED_FILE, {"folder": str(target.path.resolve())})

    def check_agreement(self, agreement: Agreement, ids: list[str] | None) -> None:
        """Whether a card is proposed of the same records of the same members under the same rules.

        Args:
            agreement: As this organisation understands it.
            ids: The common IDs; None for a helper.

        Raises:
            AgreementError: Members, columns or records are others than the profile's.
            PlanError: The rules are others.
        """
        content = read_json(self.path / AGREEMENT_FILE)
        if hashlib.sha256(content["text"].encode()).hexdigest() != self.digest:
            raise RunError(f"{self.path / AGREEMENT_FILE} is damaged: its digest is not that of its text")
        signed = json.loads(content["text"])
        now, before = (_comparable(each) for each in (_plain(asdict(agreement.outline)), signed["outline"]))
        known = None if ids is None else commitment(signed["run"], ids)
        differ = {
            "members or keys": dict(signed["members"]) != agreement.members,
            "records": known not in (None, signed["alignment"]["ids"]),
            "columns, test part or split": now != before,
        }
        for what, differs in differ.items():
            if differs:
                raise AgreementError(
                    f"the card is of other {what} than the profile in {self.path}; it goes on with the same"
                )
        if agreement.plan.settings.profile_epsilon != self.epsilon:
            raise AgreementError(
                f"the card is said to follow a profile of epsilon {agreement.plan.settings.profile_epsilon:g}"
                f"; the one in {self.path} may have cost {self.epsilon:g}"
            )
        self.check_rules(agreement.plan)


def _releases(ledger: Path) -> int:
    return sum(entry.is_release for entry in read_ledger(ledger)) if ledger.is_file() else 0


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """As it is read back from text."""
    return dict(json.loads(json.dumps(content)))


def _comparable(outline: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in outline.items() if name != "name"}
