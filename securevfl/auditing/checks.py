"""Do the views agree with the ledgers? Checks that need no attack.

- Integrity: every ledger's chain, signatures, and the heads that observers hold.
- Keys: no secret key lies in any file of the run.
- Messages: a view holds declared messages alone, with their declared fields.
- Bypass: what an observer received must name an entry of the sender's ledger.
- Sums: whoever let values into a secure sum must have written them down, vector by vector.
- Noise: what left at the end of training, minus what the final model gives for the same records, must be
  as wide as the ledger says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from securevfl.accountants.records import HIDDEN, ReleaseRecord
from securevfl.attacks.protocol import scan_files
from securevfl.attacks.source import Source
from securevfl.errors import LedgerError, WireError
from securevfl.privacy.ledger import Entry, read_homes, read_ledger
from securevfl.privacy.payloads import check_fields
from securevfl.privacy.schemas import roles_of
from securevfl.privacy.views import Seen, View, read_heads

# How often a check of one owner that holds alarms falsely; an audit has many owners, and is repeated.
FALSE_ALARM = 1e-8
OK, FAILED, UNKNOWN = "ok", "failed", "not checked"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was looked at, and what came out."""

    name: str
    status: str
    detail: str
    owner: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def check_integrity(source: Source) -> Check:
    """Verifies all ledgers against each other's heads."""
    name = "ledger integrity"
    try:
        count = len(source.records)
    except LedgerError as error:
        return Check(name=name, status=FAILED, detail=str(error))
    heads = len(read_heads(source.files.path))
    if not count:
        return Check(name=name, status=OK, detail="nothing was released, so there is nothing to verify")
    detail = f"{count:,} entries: chain, signatures and {heads} heads held by observers agree"
    homes = read_homes(source.files.path)
    if homes is not None:
        detail += f"; only the files of {', '.join(homes)} are here"
    return Check(name=name, status=OK, detail=detail)


def check_keys(source: Source) -> Check:
    """Looks for secret keys in every file of the run."""
    found = scan_files(source.files.path)
    detail = f"{found} secret keys in the run's files" if found else "no secret key in any file of the run"
    return Check(name="no keys in files", status=FAILED if found else OK, detail=detail)


def check_messages(source: Source) -> list[Check]:
    """Compares every message of every view with what its kind declares: nothing unknown, nothing more."""
    checks = []
    for observer in source.observers:
        count, wrong = 0, None
        for seen in View(source.view_folder(observer)):
            count += 1
            wrong = wrong or _undeclared(seen)
        checks.append(
            Check(
                name="declared messages only",
                status=FAILED if wrong else OK,
                detail=wrong or f"all {count:,} messages that {observer} got or sent are as declared",
                owner=observer,
            )
        )
    return checks


def _undeclared(seen: Seen) -> str | None:
    try:
        schema = check_fields(seen.sender, seen.kind, seen.fields)
    except WireError as error:
        return f"message {seen.index}: {error}"
    if not roles_of(seen.sender).isdisjoint(schema.senders) or (seen.at_home and not schema.senders):
        return None
    return f"message {seen.index}: {seen.sender} may not send {seen.kind!r}"


def check_bypass(source: Source) -> list[Check]:
    """Compares every message with values that an observer received with the sender's ledger."""
    name = "everything in the ledger"
    if not source.observers:
        return [Check(name=name, status=UNKNOWN, detail="no views were recorded (--record-views)")]
    ledgers = {
        path.stem: read_ledger(path) for path in sorted((source.files.path / "ledger").glob("*.jsonl"))
    }
    homes = read_homes(source.files.path)
    checks = []
    for observer in source.observers:
        received = View(source.view_folder(observer)).messages(sent=False)
        messages = [seen for seen in received if _carries_values(seen) and not seen.at_home]
        known = [seen for seen in messages if _can_be_checked(seen, homes)]
        elsewhere = len(messages) - len(known)
        wrong = next((text for seen in known if (text := _contradiction(seen, ledgers))), None)
        detail = wrong or f"all {len(known):,} messages with values that {observer} got are accounted for"
        if elsewhere:
            detail += f"; the ledgers behind {elsewhere:,} more are not here"
        status = FAILED if wrong else OK if known or not elsewhere else UNKNOWN
        checks.append(Check(name=name, status=status, detail=detail, owner=observer))
    return checks


def _can_be_checked(seen: Seen, homes: tuple[str, ...] | None) -> bool:
    """Whether the ledger that a message names is among those that are here; one without a name is wrong."""
    return homes is None or seen.head is None or seen.head.owner in homes


def _carries_values(seen: Seen) -> bool:
    """True for a message with real-valued content; masked words and ciphertexts are integers and bytes."""
    return any(isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in seen.fields.values())


def _contradiction(seen: Seen, ledgers: dict[str, list[Entry]]) -> str | None:
    what = f"message {seen.index} ({seen.kind} from {seen.sender})"
    if seen.head is None:
        return f"{what} left without a ledger entry"
    entries = ledgers.get(seen.head.owner, [])
    if seen.head.position >= len(entries) or entries[seen.head.position].digest != seen.head.digest:
        return f"{what} names an entry that is not in the ledger of {seen.head.owner}"
    return None


def check_sums(source: Source) -> list[Check]:
    """Compares the sums that each party put values into, as the views have them, with its ledger."""
    homes, sums = read_homes(source.files.path), _sums(source)
    return [
        _sums_of(owner, rounds, source.records)
        for owner, rounds in sorted(sums.items())
        if homes is None or owner in homes
    ]


def _sums_of(owner: str, rounds: list[dict[str, Any]], records: list[ReleaseRecord]) -> Check:
    due, written = Counter[str](), Counter[str]()
    for each in rounds:
        due[each["purpose"]] += len(each["rows"])
    for record in records:
        if record.owner == owner and record.mechanism not in HIDDEN:
            written[record.kind] += record.vectors
    short = next((kind for kind in sorted(due) if written[kind] < due[kind]), None)
    detail = f"all {due.total():,} vectors in {len(rounds):,} sums are accounted for"
    if short is not None:
        detail = f"{due[short]:,} vectors went into sums ({short}), but the ledger has {written[short]:,}"
    status = OK if short is None else FAILED
    return Check(name="every sum in the ledger", status=status, detail=detail, owner=owner)


def _sums(source: Source) -> dict[str, list[dict[str, Any]]]:
    """Party -> announcements of the sums that it sent something into, for other organisations' totals."""
    asked: dict[tuple[str, int], dict[str, Any]] = {}
    sent: set[tuple[str, str, int]] = set()
    for observer in source.observers:
        for seen in View(source.view_folder(observer)):
            if seen.kind == "sum-request":
                asked[seen.fields["channel"], seen.fields["round"]] = seen.fields
            elif {"channel", "round", "from", "to"} <= seen.fields.keys():
                sent.add((seen.sender, seen.fields["channel"], seen.fields["round"]))
    found: dict[str, list[dict[str, Any]]] = {}
    for sender, channel, number in sorted(sent):
        receiver = source.label_holder if channel == "server" else channel
        if sender in source.parties and sender != receiver and (channel, number) in asked:
            found.setdefault(sender, []).append(asked[channel, number])
    return found


def check_noise(source: Source) -> list[Check]:
    """Tests the noise of the final evaluation against the ledger, where vectors leave one by one."""
    name = "noise as written"
    plan = source.plan
    if plan.protocol != "plain" or plan.sigma <= 0:
        return []
    if source.deployed is None or source.label_holder not in source.observers:
        detail = "needs the data, the models and the label holder's view"
        return [Check(name=name, status=UNKNOWN, detail=detail)]
    return [
        _noise_of(party, residuals, plan.sigma)
        for party in source.parties
        if (residuals := _residuals(source, party)).size
    ]


def _noise_of(party: str, residuals: Any, sigma: float) -> Check:
    """A chi-square test that the noise is not smaller than promised."""
    total, count = float(np.square(residuals / sigma).sum()), residuals.size
    measured = float(np.sqrt(np.square(residuals).mean()))
    too_small = stats.chi2.cdf(total, count) < FALSE_ALARM
    detail = f"{count:,} values: measured standard deviation {measured:.4g}, written {sigma:.4g}"
    return Check(name="noise as written", status=FAILED if too_small else OK, detail=detail, owner=party)


def _residuals(source: Source, party: str) -> Any:
    """Released minus recomputed vectors of the last evaluation."""
    if source.deployed is None:
        return np.empty(0)
    released: dict[int, Any] = {}
    for rows, values in _evaluations(source, party):
        released |= dict(zip(rows.tolist(), values, strict=True))
    if not released:
        return np.empty(0)
    rows = np.fromiter(released, np.int64)
    exact = source.deployed.embed(party, rows)
    return np.stack([released[row] for row in rows.tolist()]).astype(np.float64) - exact


def _evaluations(source: Source, party: str) -> Iterator[tuple[Any, Any]]:
    """(rows, values) of the party's answers to the label holder's requests for the test part."""
    asked: dict[int, Any] = {}
    for seen in View(source.view_folder(source.label_holder)):
        if seen.sent and seen.kind == "embed" and seen.receiver == party:
            if seen.fields.get("purpose") == "evaluation":
                asked[seen.number] = seen.fields["rows"]
        elif not seen.sent and seen.sender == party and seen.reply_to in asked:
            yield asked[seen.reply_to], seen.fields["values"]
