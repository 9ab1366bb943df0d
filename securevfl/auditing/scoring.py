"""What a scoring service opened, by everybody's books: entries, the label holder's notes, and the quota.

Every score that the label holder notes must stand in the ledger of each party whose part is in it, for the
same people; what all parties have written down, the label holder has obtained and must have noted. Nobody may
have written down more people, or more requests, than the agreement that everybody signed allows, earlier
predictions included. All of it is in the ledgers: no view is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.accountants.records import PREDICTION
from securevfl.auditing.agreements import signed_timetable
from securevfl.auditing.matrix import EVERYBODY
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.errors import AgreementError, CertificateError, RunError
from securevfl.federation.agreed import SCORING, Quota
from securevfl.federation.site import SERVING
from securevfl.files import read_json
from securevfl.network.agreement import Signed
from securevfl.network.folders import AGREEMENTS
from securevfl.privacy.chain import PHASE, Entry, with_agreement
from securevfl.privacy.chain import SCORING as NOTE
from securevfl.privacy.ledger import AGREEMENT_FILE, read_ledger

PATH = "scoring service"
UNDER_WAY = 4
"""Requests that a service which was killed for good may have left without a note."""


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What one ledger says of a scoring service: people of each request, in order, by digest of agreement."""

    requests: tuple[tuple[str, str], ...]
    notes: tuple[Mapping[str, Any], ...]
    earlier: tuple[int, int]


def check_scoring(folder: Path, label_holder: str) -> list[Finding]:
    """Findings on a scoring service; none where there was none."""
    books = {path.stem: _served(read_ledger(path)) for path in sorted((folder / "ledger").glob("*.jsonl"))}
    if not any(each.requests or each.notes for each in books.values()):
        return []
    found, quotas = [], dict[str, Quota]()
    for path in sorted((folder / SERVING / AGREEMENTS).glob("*.json")):
        try:
            digest, quota = _signed_quota(path, folder)
            quotas[digest] = quota
        except (AgreementError, CertificateError, RunError) as error:
            said = f"what was agreed on for scoring: {error}"
            found.append(_finding(EVERYBODY, Verdict.VIOLATED, said))
    for owner in sorted(set(books) - {label_holder}):
        found += _check_owner(owner, label_holder, books, quotas)
    return found


def scoring_facts(folder: Path) -> dict[str, dict[str, int]]:
    """Per owner: people and requests that a scoring service had it open."""
    facts = {}
    for path in sorted((folder / "ledger").glob("*.jsonl")):
        if requests := _served(read_ledger(path)).requests:
            people = sum(count for _, count in (_named(text) for _, text in requests))
            facts[path.stem] = {"people": people, "requests": len(requests)}
    return facts


def _served(entries: list[Entry]) -> _Served:
    requests, notes, earlier, serving = [], [], [0, 0], False
    for agreement, entry in with_agreement(entries):
        content = entry.content
        if entry.is_session or content["kind"] == PHASE:
            serving = content.get("part") in SCORING
        elif content["kind"] == NOTE:
            notes.append(content)
        elif content["kind"] == PREDICTION and serving:
            requests.append((agreement, f"{content.get('rows')}/{content['vectors']}"))
        elif content["kind"] == PREDICTION:
            earlier = [earlier[0] + content["vectors"], earlier[1] + 1]
    return _Served(requests=tuple(requests), notes=tuple(notes), earlier=(earlier[0], earlier[1]))


def _named(text: str) -> tuple[str, int]:
    rows, count = text.rsplit("/", 1)
    return rows, int(count)


def _signed_quota(path: Path, folder: Path) -> tuple[str, Quota]:
    """Digest and quota of an agreement, once everybody's signature fits, with the keys that trained."""
    content, trained = read_json(path), Signed.of(read_json(folder / AGREEMENT_FILE))
    try:
        signed = Signed.of({**content["signed"], "digest": content["digest"]})
        quota = Quota(**signed.content["schedule"]["quota"])
    except (KeyError, TypeError) as error:
        raise AgreementError(f"{path.name} does not hold a quota and who signed it") from error
    signed_timetable(signed)
    same = (signed.authority, signed.content.get("trained")) == (trained.authority, trained.digest)
    if not same or signed.members.keys() != trained.members.keys():
        raise AgreementError(f"{path.name} is not of this run's model, members and authority")
    return signed.digest, quota


def _check_owner(
    owner: str, label_holder: str, books: Mapping[str, _Served], quotas: Mapping[str, Quota]
) -> Iterator[Finding]:
    mine, promise = books[owner], f"{owner} against {label_holder}"
    notes = Counter(_note(each) for b in books.values() for each in b.notes if owner in each["owners"])
    if not mine.requests and not notes:
        return
    written = Counter(text for _, text in mine.requests)
    if unwritten := sum((notes - written).values()):
        said = f"{label_holder} noted {unwritten} requests that {owner} did not write down"
        yield _finding(promise, Verdict.VIOLATED, said)
    elif over := _over_quota(mine, quotas):
        yield _finding(promise, Verdict.VIOLATED, f"{owner} {over}")
    elif label_holder not in books:
        yield _finding(promise, Verdict.NOT_TESTED, f"the ledger of {label_holder} is not here")
    elif unnoted := _unnoted(owner, label_holder, books):
        said = f"{label_holder} obtained {unnoted} requests that it did not note"
        yield _finding(promise, Verdict.VIOLATED, said)
    elif not {agreement for agreement, _ in mine.requests} <= quotas.keys():
        said = "the agreement on a quota is not here; gather the folders of the organisations again"
        yield _finding(promise, Verdict.NOT_TESTED, said)
    else:
        people = sum(_named(text)[1] for _, text in mine.requests)
        tested = f"{len(mine.requests)} requests for {people} people, with the notes of {label_holder}"
        yield Finding(
            promise=promise, path=PATH, verdict=Verdict.HOLDS, tested=(f"{tested} and the signed quota",)
        )


def _note(content: Mapping[str, Any]) -> str:
    return f"{content['rows']}/{content['vectors']}"


def _over_quota(mine: _Served, quotas: Mapping[str, Quota]) -> str:
    """How an owner opened more than its agreement allows, earlier predictions included; empty if not."""
    people, requests = mine.earlier
    for agreement, text in mine.requests:
        people, requests = people + _named(text)[1], requests + 1
        quota = quotas.get(agreement)
        if quota is not None and people > quota.people:
            return f"opened scores of {people} people; the signed quota is {quota.people}"
        if quota is not None and requests > quota.requests:
            return f"answered {requests} requests; the signed quota is {quota.requests}"
    return ""


def _unnoted(owner: str, label_holder: str, books: Mapping[str, _Served]) -> int:
    """Requests that all parties have written down and the label holder has not noted.

    What another party refused has no note. A service that was killed for good leaves a few: those at the end.
    """
    parties = [each for name, each in books.items() if name != label_holder and each.requests]
    noted = Counter(_note(each) for each in books[label_holder].notes)
    everybody = [Counter(text for _, text in each.requests) for each in parties]
    written = books[owner].requests
    last = Counter(text for _, text in written[max(0, len(written) - UNDER_WAY) :])
    shared = Counter({text: min(each[text] for each in everybody) for text in everybody[0]})
    missing = shared - noted
    return 0 if not missing - last else sum(missing.values())


def _finding(promise: str, verdict: Verdict, reason: str) -> Finding:
    return Finding(promise=promise, path=PATH, verdict=verdict, reasons=(reason,))
