"""Do the views and the ledgers tell the same story? Every message is matched with its entry, both ways.

A message that leaves an organisation and holds what depends on private data names an entry of the sender's
ledger; the entry must be of a kind that such a message may carry, name the receiver's organisation, and be
about the same records and as many vectors. An entry is used by one message per receiver, and by one at least.
What was released once may be sent again, byte for byte. Words of a secure sum belong to an announced round,
one entry per round and sender; words of sealed training to the round that their entry opens. Undeclared kinds
and fields are violations, and so is what a receiver got and its sender's own view does not know.

Views and ledgers are read line by line; of each line some numbers are kept (`securevfl.auditing.index`).
Arrays are looked at only where rows or repeated values are compared; sets of rows are compared in the text
form of the ledger.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import re
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from securevfl.accountants.records import HIDDEN, PREDICTION
from securevfl.algorithms.messages import MESSAGES
from securevfl.algorithms.sealed import evaluation
from securevfl.algorithms.vafl import EVALUATION
from securevfl.attacks.reading import sum_at
from securevfl.attacks.source import Source
from securevfl.auditing.index import AskedRecords, Balance, Calls, Entries, Log, word
from securevfl.auditing.masks import MaskEvidence
from securevfl.auditing.released import ReleasedEvidence
from securevfl.auditing.verdicts import ErrorBudget, Finding, Verdict
from securevfl.errors import LedgerError, WireError
from securevfl.federation.recorder import DECLARED
from securevfl.privacy.chain import Entry
from securevfl.privacy.gate import HANDED_ON
from securevfl.privacy.ledger import read_homes, rows_from_text, rows_to_text
from securevfl.privacy.messages import Head
from securevfl.privacy.payloads import check_fields, keep_newest
from securevfl.privacy.schemas import DEALER, FACT, PARTY, ROWS, SERVER, Schema, roles_of
from securevfl.privacy.views import BYTES, Receipts, View
from securevfl.protocols.sealed.messages import CheckedShare
from securevfl.protocols.sealed.protocol import MaskedScores, Phase, Share
from securevfl.protocols.sums.tree_sums import TreeSum
from securevfl.protocols.sums.trees import ParentMap
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import HIDING

RECONCILED = "reconciled with the ledger"
GATHER = "bring the organisations' folders together with `securevfl gather`"
MOST_REASONS = 3
# Of sealed words, the array with a line per record.
_LINES = {
    Phase.kind: "words",
    Share.kind: "blinded",
    CheckedShare.kind: "blinded",
    MaskedScores.kind: "words",
}
# Of words in secure sums: arrays, and the announced shape of ciphertexts, that begin with the records.
_SUMMED = ("values", "total")


def reconcile(source: Source, budget: ErrorBudget | None = None) -> list[Finding]:
    """A finding for every owner, observer and kind of release, of ledgers that have been verified.

    Args:
        source: The run.
        budget: How often masks that are sound may be called otherwise; nothing else here can err.
    """
    known = budget or ErrorBudget(delta=source.plan.delta, epsilon=0.0)
    return _Reconciliation(source).findings(known)


@lru_cache(maxsize=8)
def rows_in(text: str) -> int:
    """How many rows a ledger's row list names."""
    if not text:
        return 0
    return text.count(",") + 1 + sum(int(last) - int(first) for first, last in _RANGE.findall(text))


_RANGE = re.compile(r"(\d+)-(\d+)")


def last_row(text: str) -> int:
    """The largest of the rows that a ledger's row list names in order."""
    return int(re.split("[,-]", text[text.rfind(",") + 1 :])[-1])


class _Line(NamedTuple):
    """One message of a view as it is judged: its header, its schema, the organisations at both ends."""

    header: Mapping[str, Any]
    schema: Schema
    view: View
    sender: str
    receiver: str

    @property
    def name(self) -> str:
        return f"message {self.header['index']} of {self.view.observer}'s view ({self.header['kind']})"

    def shape(self, field: str) -> list[int]:
        return list(self.header["arrays"][field][2])

    def rows(self) -> npt.NDArray[Any] | None:
        return self.view.array(self.header, "rows") if "rows" in self.header["arrays"] else None

    def payload(self) -> str | None:
        """Name of the first field that depends on private data; None where there is none."""
        present = [*self.header["arrays"], *self.header["fields"]]
        return next((n for n in present if (form := self.schema.form_of(n)) and form.payload), None)


PROFILED = ("bins", "label histogram")
"""What a profile opens, in this order."""


AFTERWARDS = (EVALUATION, evaluation.KIND, PREDICTION)
"""Kinds of what may come after training."""


def was_resumed(entries: Iterable[Entry], plan: Plan, *, itself: bool = False) -> bool:
    """Whether somebody was interrupted while a ledger's owner trained: it began a session, or went back.

    A run that goes on from a profile begins right after the label histogram, over a network after notes.

    Args:
        entries: The ledger.
        plan: The run's.
        itself: Whether only the owner itself counts, which began a session between its releases.
    """
    before, after, planned = "", set[str](), False
    waiting = first = later = 0  # beginnings since the last release; those before the second part, and after
    for entry in entries:
        content = entry.content
        if entry.is_session or (not itself and content.get("back") is not None):
            waiting += bool(before)
        elif entry.is_release and content["kind"] != PREDICTION and content["mechanism"] not in HIDDEN:
            if waiting and not first:
                first, planned = waiting, before == PROFILED[-1]
            else:
                later += waiting
            waiting, before = 0, content["kind"]
            if first:
                after.add(before)
    planned &= plan.profiled and not set(PROFILED) & after
    return bool(later or (first and not planned))


class _Reconciliation:
    """Reads every view once and hands each message to the books of its sender."""

    def __init__(self, source: Source) -> None:
        self.source = source
        folder = source.files.path
        self.views = {name: View(source.view_folder(name)) for name in source.observers}
        self.finished = source.files.result_file.is_file()
        stopped = source.files.read_result().get("stopped") if self.finished else None
        self.ended = str(stopped or "").startswith("budget")
        self.foreign = self.finished and source.files.read_result().get("guarantee") == DECLARED
        self.books = {
            path.stem: _Books(path.stem, Entries(path), self)
            for path in sorted((folder / "ledger").glob("*.jsonl"))
        }
        self.resumed = {
            owner
            for owner, books in self.books.items()
            if was_resumed(books.entries, source.plan, itself=True)
        }
        self.repeats = any(was_resumed(books.entries, source.plan) for books in self.books.values())
        self.homes = read_homes(folder)
        self.problems: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        self.unknown: set[tuple[str, str, str]] = set()
        self.totals: set[tuple[str, str]] = set()
        self.secret = os.urandom(16)
        self.balances: dict[tuple[str, str], Balance] = defaultdict(Balance)
        self.trees: dict[str, tuple[ParentMap, ...]] = {}
        hides = source.plan.protocol in HIDING or source.plan.mode == "sealed"
        self.masks = MaskEvidence() if hides else None
        self.released = ReleasedEvidence(lattice=not self.foreign)

    def host(self, address: str) -> str:
        return self.source.label_holder if address == SERVER else address

    def parent(self, channel: str, tree: int, address: int) -> int | None:
        """To whom a participant of a tree sum passes its subtotal."""
        if channel not in self.trees:
            found = sum_at(self.source.plan, self.source.parties, self.host(channel))
            self.trees[channel] = found.parent_maps if isinstance(found, TreeSum) else ()
        trees = self.trees[channel]
        return trees[tree - 1].get(address) if 0 < tree <= len(trees) else None

    def findings(self, budget: ErrorBudget) -> list[Finding]:
        for observer, view in self.views.items():
            _Reading(self, observer, view).read()
        self._compare_views()
        for books in self.books.values():
            books.close()
        masks = [] if self.masks is None else self.masks.findings(budget)
        return [*self._judged(), *self._elsewhere(), *masks, *self.released.findings(budget)]

    def violate(self, owner: str, observers: Sequence[str], path: str, reason: str) -> None:
        for observer in observers:
            self.problems[owner, observer, path].append(reason)

    def _compare_views(self) -> None:
        """What one organisation got, the other must have sent; what is still on its way may be missing.

        Where sums of hashes do not agree, the views are read again for the messages behind them.
        """
        # A process that dies takes the last lines of its view along.
        parts = {pair: b.open() for pair, b in self.balances.items() if pair[0] not in self.resumed}
        parts = {pair: open_parts for pair, open_parts in parts.items() if open_parts}
        sent: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        got: dict[tuple[str, str], dict[int, list[Any]]] = defaultdict(dict)
        for observer in {name for pair in parts for name in pair}:
            reading = _Reading(self, observer, self.views[observer])
            for line in reading.lines():
                pair = (line.sender, line.receiver)
                if pair not in parts or (key := reading.key(line)) % Balance.PARTS not in parts[pair]:
                    continue
                if line.header["sent"]:
                    sent[pair][key] += 1
                else:
                    known = got[pair].setdefault(key, [0, line.header["kind"], line.header["index"]])
                    known[0] += 1
        for (sender, receiver), lines in got.items():
            for key, (count, kind, index) in lines.items():
                if count > sent[sender, receiver][key]:
                    reason = f"message {index} of {receiver}'s view is not what {sender}'s own view says"
                    self.violate(sender, [receiver], kind, reason)

    def _judged(self) -> Iterator[Finding]:
        """Findings about owners whose ledgers are here."""
        paths = {key: key for key in self.problems}
        for owner, books in self.books.items():
            paths |= {(owner, *path): (owner, *path) for path in books.paths}
        for owner, observer, path in paths:
            yield self._finding(owner, observer, path)

    def _finding(self, owner: str, observer: str, path: str) -> Finding:
        said: dict[str, Any] = {"promise": f"{owner} against {observer}", "path": path}
        reasons = list(dict.fromkeys(self.problems.get((owner, observer, path), ())))
        if reasons:
            more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
            shown = (*reasons[:MOST_REASONS], *more)
            return Finding(**said, verdict=Verdict.VIOLATED, tested=(RECONCILED,), reasons=shown)
        books = self.books.get(owner)
        missing = self._missing(owner, observer) or ("" if books is None else books.open.get(path, ""))
        if missing:
            return Finding(**said, verdict=Verdict.NOT_TESTED, reasons=(missing,))
        return Finding(**said, verdict=Verdict.HOLDS, tested=(RECONCILED,))

    def _missing(self, owner: str, observer: str) -> str:
        """What a pair needs to be reconciled and is not here; empty if nothing."""
        if owner in self.views or observer in self.views:
            return ""
        if not self.views:
            return "no views were recorded; train with --record-views"
        return f"neither the view of {owner} nor that of {observer} is here; {GATHER}"

    def _elsewhere(self) -> Iterator[Finding]:
        """Owners that sent something to an organisation whose view is here, and whose ledgers are not."""
        for owner, observer, kind in sorted(self.unknown):
            yield Finding(
                promise=f"{owner} against {observer}",
                path=kind,
                verdict=Verdict.NOT_TESTED,
                reasons=(f"the ledger of {owner} is not here; {GATHER}",),
            )


class _Reading:
    """One view from its first line to its last, with the calls and announcements that it holds."""

    def __init__(self, whole: _Reconciliation, observer: str, view: View) -> None:
        self.whole, self.observer, self.view = whole, observer, view
        self.calls, self.rounds = Calls(), Calls()
        self.announced: Counter[int] = Counter()
        self.heads: dict[str, Head] = {}

    def read(self) -> None:
        for header in self.view.headers():
            self._line(header)
        if self.whole.finished:
            self._check_receipts()

    def _check_receipts(self) -> None:
        """The observer keeps the newest head of every owner, which is what exposes a ledger that was cut."""
        kept = Receipts(self.observer)
        kept.load(self.whole.source.files.path)
        for owner, head in self.heads.items():
            if owner not in kept.heads or kept.heads[owner].position < head.position:
                reason = f"{self.observer} kept no receipt of entry {head.position}, the newest that it saw"
                self.whole.violate(owner, [self.observer], "receipts", reason)

    def lines(self) -> Iterator[_Line]:
        """Messages that were sent by somebody, and are what their kind declares."""
        for header in self.view.headers():
            if header["sender"] != header["receiver"]:
                with suppress(WireError):
                    yield self._declared(header)

    def _declared(self, header: Mapping[str, Any]) -> _Line:
        schema = check_fields(header["sender"], header["kind"], self._forms(header))
        return _Line(header, schema, self.view, *self._ends(header))

    def _ends(self, header: Mapping[str, Any]) -> tuple[str, str]:
        """The organisations that sent and received."""
        sent, host = header["sent"], self.whole.host
        return (
            self.observer if sent else host(header["sender"]),
            host(header["receiver"]) if sent else self.observer,
        )

    def _line(self, header: Mapping[str, Any]) -> None:
        whole = self.whole
        try:
            line = self._declared(header)
        except WireError as error:
            sender, receiver = self._ends(header)
            reason = f"message {header['index']} of {self.observer}'s view: {error}"
            whole.violate(sender, [receiver], header["kind"], reason)
            return
        if header["sender"] == header["receiver"]:
            return  # noted at home, sent by nobody
        schema, twin = line.schema, self._is_twin(line)
        self._note(line)
        if schema.of_machine and whole.masks is not None and not twin:
            whole.masks.add(self.view, header, schema, (line.sender, line.receiver))
        senders = len(whole.source.parties) - 1
        if schema.summed and whole.masks is not None and not header["sent"] and senders > 1:
            whole.masks.add_received(self.view, header, schema, (line.sender, line.receiver), senders)
        if roles_of(header["sender"]).isdisjoint(schema.senders):
            self._violate(line, f"{header['sender']} may not send {header['kind']!r}")
        if any(form.inside for _, _, form in schema.sent):
            self._violate(line, "must stay inside one organisation")
        if foreign := self._foreign(schema, header):
            self._violate(line, f"has {foreign!r}, which {whole.source.plan.algorithm} never states")
        if not twin:
            self._judge(line)

    def _judge(self, line: _Line) -> None:
        if not line.schema.of_machine and line.payload() is None:
            return
        books = self.whole.books.get(line.sender)
        if books is None:
            if line.schema.senders != (DEALER,):
                self.whole.unknown.add((line.sender, line.receiver, line.header["kind"]))
        elif line.schema.of_machine:
            books.words(line, self)
        else:
            books.release(line, self)

    def _foreign(self, schema: Schema, header: Mapping[str, Any]) -> str:
        """A fact that the run's algorithm does not state; empty if there is none."""
        family = self.whole.source.plan.family.name
        forms = ((name, schema.form_of(name)) for name in header["fields"])
        return next((n for n, f in forms if f and f.what == FACT and f.of and family not in f.of), "")

    def _violate(self, line: _Line, reason: str) -> None:
        self.whole.violate(line.sender, [line.receiver], line.header["kind"], f"{line.name}: {reason}")

    def _forms(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The fields as their declaration is checked; of arrays other than rows only type and shape."""
        fields, schema = dict(header["fields"]), MESSAGES.get(header["kind"])
        for name, (_, dtype, shape, *mark) in header["arrays"].items():
            form = None if schema is None else schema.form_of(name)
            if BYTES in mark:
                fields[name] = b""
            elif form is not None and form.what == ROWS:
                fields[name] = self.view.array(header, name)
            else:
                fields[name] = np.broadcast_to(np.zeros((), dtype), shape)
        return fields

    def _note(self, line: _Line) -> None:
        """Keeps what later messages refer to: calls by their numbers, announced rounds of sums."""
        header, fields = line.header, line.header["fields"]
        if header["head"] is not None and not header["sent"]:
            keep_newest(self.heads, Head(*header["head"]))
        if "rows" not in header["arrays"]:
            return
        offset, dtype, shape, *_ = header["arrays"]["rows"]
        said = (sys.intern(str(fields.get(word, ""))) for word in ("purpose", "for"))
        asked = AskedRecords((offset, dtype, tuple(shape)), *said)
        self.calls.put(header["sender"], header["number"], asked)
        if {"channel", "round", "purpose"} <= fields.keys():
            place = (fields["channel"], fields["round"])
            self.whole.totals.add((self.whole.host(place[0]), asked.purpose))
            if self.rounds.get(*place) is None:
                self.announced[shape[0]] += 1
            self.rounds.put(*place, asked)

    def _is_twin(self, line: _Line) -> bool:
        """Keeps what both ends say about a message; True where the sender's own view is the one to judge."""
        if not (line.sender in self.whole.views and line.receiver in self.whole.views):
            return False
        self.whole.balances[line.sender, line.receiver].add(self.key(line), sent=line.header["sent"])
        return not line.header["sent"]

    def key(self, line: _Line) -> int:
        """64 bits that stand for all that a message says; nobody can choose messages by them."""
        header = line.header
        content = [header[name] for name in ("sender", "receiver", "kind", "number", "reply_to", "head")]
        arrays = {name: place[1:3] for name, place in header["arrays"].items()}
        if line.schema.of_machine:
            arrays |= {name: [*arrays[name], digest] for name, (digest, *_) in header["sketches"].items()}
        elif line.payload() is not None:
            arrays |= {n: [*a, zlib.crc32(self.view.array(header, n).tobytes())] for n, a in arrays.items()}
        text = json.dumps([content, header["fields"], arrays])
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.whole.secret).digest()
        return int.from_bytes(digest, "little")

    def rows_of(self, line: _Line) -> npt.NDArray[Any] | None:
        """The records that a message is about: named in it, or in the call that it answers."""
        rows = line.rows()
        call = self.calls.get(line.header["receiver"], line.header["reply_to"])
        if rows is None and call is not None:
            rows = self.view.at(call.rows)
        return rows

    def answers_twice(self, line: _Line) -> bool:
        """True where a call with rows has been answered before."""
        return self.calls.mark(line.header["receiver"], line.header["reply_to"])


class _Books:
    """One owner's ledger, and what each of its entries was used for.

    Of an entry are kept: the receivers and kinds of its messages as bits of a number, and its round.
    """

    def __init__(self, owner: str, entries: Entries, whole: _Reconciliation) -> None:
        self.owner, self.entries, self.whole = owner, entries, whole
        # Somebody else's program may let a record out anew, under an entry that counts it.
        self.once = whole.source.plan.mode == "frozen" and not whole.foreign
        self._heard: dict[tuple[str, str], set[str]] | None = None
        self.uses = [0] * len(entries)
        self._bits: dict[tuple[str, str], int] = {}
        self._alike: dict[int, int] = {}  # one object for equal numbers
        self.used: set[str] = set()
        self._places_of, self._sealed_rounds = array("Q", bytes(8 * len(entries))), bytearray(len(entries))
        self._rounds, self._words = Log(), dict[int, Log]()
        self._lines: dict[tuple[str, str, str, str], int] = {}
        self.phases = 1 + whole.source.plan.epochs + whole.source.plan.evaluations  # one prepares
        self.places: dict[str, npt.NDArray[np.int64]] = {}
        self.handed: Counter[tuple[str, str, int]] = Counter()
        self.open: dict[str, str] = {}
        self._sessions, self.handlers = list[int](), set[str]()
        self.paths: dict[tuple[str, str], None] = {}
        for entry in entries:
            observers = entry.content.get("observers", ())
            self.paths |= dict.fromkeys((name, entry.content["kind"]) for name in observers)
            if entry.is_session:
                self._sessions.append(entry.index)
            if entry.content.get("mechanism") in HIDDEN:
                self.handlers.update(observers)

    def session(self, index: int) -> int:
        """Which session an entry belongs to."""
        return bisect.bisect_right(self._sessions, index)

    def use(self, entry: Entry, receiver: str, kind: str) -> bool:
        """Notes that a message is for an entry; True where one was, of this kind and to this receiver."""
        bit = 1 << self._bits.setdefault((receiver, kind), len(self._bits))
        before = self.uses[entry.index]
        self.uses[entry.index] = self._alike.setdefault(before | bit, before | bit)
        self.used.add(entry.content["kind"])
        return bool(before & bit)

    def uses_of(self, index: int) -> set[tuple[str, str]]:
        """Receivers and kinds of the messages for an entry."""
        found = self.uses[index]
        return {use for use, bit in self._bits.items() if found >> bit & 1} if found else set()

    @property
    def repeats(self) -> bool:
        """Whether somebody was interrupted: all go back then, and rounds come again, each with its entry."""
        return self.whole.repeats

    def _violate(self, line: _Line, reason: str, path: str = "") -> None:
        self.whole.violate(self.owner, [line.receiver], path or line.header["kind"], f"{line.name}: {reason}")

    def _entry(self, line: _Line) -> Entry | None:
        """The entry that a message names; None, and a violation, where it is not this ledger's."""
        head = line.header["head"]
        if head is None:
            self._violate(line, "left without a ledger entry")
            return None
        owner, position, digest = str(head[0]), int(head[1]), head[2]
        if owner != self.owner:
            self._violate(line, f"names the ledger of {owner}, which is not its sender's")
            return None
        if not 0 <= position < len(self.entries) or self.entries[position].digest != digest:
            self._violate(line, f"names an entry that is not in the ledger of {owner}")
            return None
        return self.entries[position]

    # -- releases -------------------------------------------------------------------------------------------

    def release(self, line: _Line, reading: _Reading) -> None:
        """A message with values that a gate let out."""
        entry = self._entry(line)
        if reading.answers_twice(line):
            self._violate(line, "is a second answer to one call")
        field = line.payload()
        form = None if field is None else line.schema.form_of(field)
        if entry is None or field is None or form is None:
            return
        kind = entry.content["kind"]
        if kind in form.of and kind not in HANDED_ON:
            self._own(line, reading, entry, field)
        elif not form.of.isdisjoint(HANDED_ON):
            self._handed_on(line, reading, field)
        else:
            said = ", ".join(sorted(form.of))
            self._violate(line, f"carries {said}; its entry {entry.index} is about {kind}")

    def _own(self, line: _Line, reading: _Reading, entry: Entry, field: str) -> None:
        content, index = entry.content, entry.index
        if line.receiver not in content["observers"]:
            self._violate(line, f"entry {index} is not for {line.receiver}", content["kind"])
        if content["mechanism"] in HIDDEN:
            self._violate(line, f"lies open, and entry {index} says {content['mechanism']}", content["kind"])
        self._spread(line, entry, field, reading.rows_of(line) if self.once else None)
        again = self.use(entry, line.header["receiver"], line.header["kind"])
        count, rows = line.shape(field)[0] if field in line.header["arrays"] else 1, reading.rows_of(line)
        if rows is not None and len(rows) != count:
            self._violate(line, f"has {count} vectors for {len(rows)} records", content["kind"])
        elif self.once and rows is not None and content.get("rows") is not None:
            self._repeated(line, entry, field, rows, again=again)
        elif again:
            self._violate(line, f"is a second message for entry {index}", content["kind"])
        elif count != content["vectors"]:
            self._violate(line, f"has {count} vectors, entry {index} {content['vectors']}", content["kind"])
        elif rows is not None and content.get("rows") not in (None, _text(rows)):
            self._violate(line, f"is about other records than entry {index}", content["kind"])

    def _spread(self, line: _Line, entry: Entry, field: str, rows: npt.NDArray[Any] | None) -> None:
        """Hands values with noise of the sender's own to a test; gradients were divided since."""
        content = entry.content
        if content["mechanism"] != "gaussian" or content["kind"].startswith("gradient"):
            return
        if field in line.header["arrays"]:
            values = line.view.array(line.header, field)
            if rows is not None and len(rows) == len(values):
                known = self._places(line.receiver, rows)
                values = values[known[rows] < 0]  # what is released once counts once
            self.whole.released.add((self.owner, line.receiver, content["kind"]), values, content["sigma"])

    def _repeated(
        self, line: _Line, entry: Entry, field: str, rows: npt.NDArray[Any], *, again: bool
    ) -> None:
        """Of what is released once: new records are the entry's, all others the same bytes as before."""
        offset, dtype, shape = line.header["arrays"][field][:3]
        width = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
        places = offset + width * np.arange(len(rows), dtype=np.int64)
        known = self._places(line.receiver, rows)
        old = known[rows] >= 0
        fresh = "" if again else entry.content["rows"]
        if _text(rows[~old]) != fresh:
            self._violate(line, f"has records that entry {entry.index} does not name", entry.content["kind"])
        if not line.view.same_bytes(known[rows[old]], places[old], width):
            self._violate(line, "repeats records with other values than at first", entry.content["kind"])
        known[rows[~old]] = places[~old]

    def _places(self, receiver: str, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        known, size = self.places.get(receiver, np.empty(0, np.int64)), int(rows.max(initial=-1)) + 1
        if size > len(known):
            known = np.concatenate([known, np.full(size - len(known), -1, np.int64)])
            self.places[receiver] = known
        return known

    def _handed_on(self, line: _Line, reading: _Reading, field: str) -> None:
        """What is computed from others' releases: as many vectors as were asked for, once per request."""
        if field not in line.header["arrays"]:
            return
        count, rows = line.shape(field)[0], reading.rows_of(line)
        if rows is not None and len(rows) != count:
            self._violate(line, f"has {count} vectors for {len(rows)} records")
        if line.header["reply_to"] is not None:
            return
        key = (line.header["receiver"], line.header["kind"], count)
        self.handed[key] += 1
        if self.handed[key] > reading.announced[count]:
            self._violate(line, f"hands on {count} values that no sum or batch was asked for")

    # -- words of protocol machines -------------------------------------------------------------------------

    def words(self, line: _Line, reading: _Reading) -> None:
        """A message of a protocol machine: masked words, ciphertexts, keys."""
        header = line.header
        if header["head"] is None and line.schema.senders == (DEALER,):
            return
        entry = self._entry(line)
        if entry is None:
            return
        before_rounds = header["fields"].get("round", -1) < 0
        # Masks are dealt anew in the middle of a run too: operands belong to the entry that says so.
        operand = before_rounds and "channel" not in header["fields"]
        session = ("entry", entry.index) if operand or self.repeats else self.session(entry.index)
        key = word((session, header["receiver"], header["kind"], _facts(header)))
        # Where sums go on without parties that are gone, keys are agreed on anew in every phase.
        allowed = self.phases if before_rounds and self.whole.source.plan.threshold else 1
        about = self._about(line, entry)
        self._words.setdefault(allowed, Log()).add(key, header["index"], about)
        if before_rounds:
            if operand:
                self._use(line, entry)
        elif "channel" in header["fields"]:
            self._summed(line, reading, entry)
        else:
            self._sealed(line, entry)

    def _use(self, line: _Line, entry: Entry) -> None:
        self.use(entry, line.receiver, line.header["kind"])
        if line.receiver not in entry.content.get("observers", ()):
            self._violate(line, f"entry {entry.index} is not for {line.receiver}", entry.content["kind"])

    def _sealed(self, line: _Line, entry: Entry) -> None:
        content, number = entry.content, line.header["fields"]["round"]
        if not entry.is_release or content["mechanism"] in HIDDEN:
            self._violate(line, f"opens a round that no entry is about, it names entry {entry.index}")
            return
        self._use(line, entry)
        self._one_round(line, entry, ("", number))
        records = content["vectors"] if content.get("rows") is None else rows_in(content["rows"])
        field = _LINES.get(line.header["kind"])
        # Whoever totals nothing in a round gets shares without lines.
        if field is not None and line.shape(field)[0] not in (0, records):
            reason = f"has {line.shape(field)[0]} lines, entry {entry.index} {records} records"
            self._violate(line, reason, content["kind"])

    def _one_round(self, line: _Line, entry: Entry, place: tuple[str, int]) -> None:
        """One entry per round, one round per entry."""
        index, kind, here = entry.index, entry.content["kind"], word(place) | 1
        if self._places_of[index] not in (0, here):
            self._violate(line, f"uses entry {index}, which is about another round", kind)
        if not self._places_of[index]:
            self._places_of[index], self._sealed_rounds[index] = here, not place[0]
            if not self.repeats:  # else rounds come again, each with an entry of its own
                self._rounds.add(word((self.session(index), *place)), index, self._about(line, entry))

    def _about(self, line: _Line, entry: Entry) -> int:
        """A number for all messages of one kind from one view to one receiver, under one kind of entry."""
        said = (line.receiver, line.view.observer, line.header["kind"], entry.content["kind"])
        return self._lines.setdefault(said, len(self._lines))

    def _close_rounds(self) -> None:
        """Words that came twice, and rounds that two entries are about."""
        named = list(self._lines)
        for allowed, log in self._words.items():
            for about, index in log.beyond(allowed):
                receiver, observer, sent, kind = named[about]
                reason = f"message {index} of {observer}'s view ({sent}): is a second message of its kind"
                self.whole.violate(self.owner, [receiver], kind, f"{reason} in one round")
        for about, index in self._rounds.others():
            receiver, observer, sent, kind = named[about]
            reason = f"entry {index} of {sent} in {observer}'s view belongs to a round of another entry"
            self.whole.violate(self.owner, [receiver], kind, reason)

    def _summed(self, line: _Line, reading: _Reading, entry: Entry) -> None:
        fields = line.header["fields"]
        place = (fields["channel"], fields["round"])
        asked = reading.rounds.get(*place)
        if asked is None:
            self._violate(line, f"belongs to round {place[1]} of {place[0]}, which nobody announced")
            return
        if "tree" in fields and self.whole.parent(place[0], fields["tree"], fields["from"]) != fields["to"]:
            self._violate(line, f"does not go along tree {fields['tree']} of the run")
        receiver, records = self.whole.host(place[0]), asked.rows[2][0]
        counts = [line.shape(name)[0] for name in _SUMMED if name in line.header["arrays"]]
        for count in [*counts, *fields.get("shape", [])[:1]]:
            if count != records:
                self._violate(line, f"has {count} lines, {records} records were announced")
        content = entry.content
        fits = entry.is_release and content["kind"] == asked.purpose
        if fields["from"] < 0 or receiver == self.owner:
            return  # none of its own values are in it, or it obtains the total itself
        if fits and content["mechanism"] in HIDDEN:
            reason = f"entry {entry.index} says {content['mechanism']}, and the sum is opened"
            self._violate(line, reason, content["kind"])
        if not fits:
            reason = f"went into a sum of {asked.purpose}; entry {entry.index} is about"
            self._violate(line, f"{reason} {content['kind']}", asked.purpose)
            return
        self._contribution(line, reading, entry, asked)

    def _contribution(self, line: _Line, reading: _Reading, entry: Entry, asked: AskedRecords) -> None:
        content, fields = entry.content, line.header["fields"]
        place = (fields["channel"], fields["round"])
        first = not self.uses[entry.index]
        self.use(entry, line.receiver, line.header["kind"])
        learn = {self.whole.host(place[0]), self.whole.host(asked.by)} - {self.owner}
        if not learn <= set(content["observers"]):
            missing = ", ".join(sorted(learn - set(content["observers"])))
            self._violate(line, f"entry {entry.index} is not for {missing}", content["kind"])
        if line.receiver not in {*content["observers"], *self.handlers, *learn}:
            self._violate(line, f"went to {line.receiver}, whom no entry names", content["kind"])
        if self.once and content["mechanism"] == "gaussian" and not self.handlers:
            return  # what was released once may enter many sums
        self._one_round(line, entry, place)
        if first and content.get("rows") is not None:
            rows = _text(reading.view.at(asked.rows))
            if rows != content["rows"]:
                self._violate(
                    line, f"is of a sum over other records than entry {entry.index}", content["kind"]
                )

    # -- entries without messages ---------------------------------------------------------------------------

    def close(self) -> None:
        """Entries that no message was for, and rounds that not everybody heard of."""
        self._never_refused()
        self._close_rounds()
        views = self.whole.views.keys()
        if self.owner not in views and not {name for name, _ in self.paths} <= views:
            return
        carried = self._carried()
        unused: list[Entry] = []
        last: list[Entry] = []  # such as come after all of training that has a message
        for entry in self.entries:
            content = entry.content
            if not entry.is_release:
                if entry.is_session or content.get("back") is not None:
                    self._report(unused, broken=True)
                    unused = []
            elif content["mechanism"] in HIDDEN or not content["observers"]:
                continue
            elif self.uses[entry.index]:
                last, unused = last + unused, []
                if content["kind"] not in AFTERWARDS:
                    self._report(last, broken=False)
                    last = []
                self._heard_by_all(entry)
            elif content["kind"] in carried and not self._stays_inside(entry):
                unused.append(entry)
        # Whoever's budget is spent stops all, after some have written what they were about to send.
        self._report(last, broken=self.whole.ended)
        self._report(unused, broken=self.whole.ended or not self.whole.finished)

    def _never_refused(self) -> None:
        """Exact scores of records that a sealed run promises something about, which a gate refuses."""
        if self.whole.source.plan.mode != "sealed":
            return
        noisy = (e.content["rows"] for e in self.entries if e.content.get("mechanism") == "gaussian")
        promised = max((last_row(rows) for rows in noisy if rows), default=-1)
        for entry in self.entries:
            content = entry.content
            if entry.is_release and content["kind"] == PREDICTION and content["mechanism"] == "exact":
                rows = rows_from_text(content.get("rows") or "0")  # without rows, any record may be meant
                if int(rows.min(initial=promised + 1)) <= promised:
                    reason = f"entry {entry.index} opens exact scores of records that were trained on"
                    self.whole.violate(self.owner, content["observers"], content["kind"], reason)

    def _report(self, unused: list[Entry], *, broken: bool) -> None:
        """Entries at the end of a session that was broken off may have lost their messages."""
        for entry in unused:
            content = entry.content
            if content["kind"] == "prediction":
                self.open[content["kind"]] = "views do not hold what was predicted after the run"
            elif not broken:
                reason = f"entry {entry.index} ({content['vectors']} vectors) has no message"
                self.whole.violate(self.owner, content["observers"], content["kind"], reason)

    def _carried(self) -> set[str]:
        """Kinds of entries that a message stands for."""
        kinds = {kind for s in MESSAGES.values() for _, _, form in s.sent if form.payload for kind in form.of}
        return (kinds - set(HANDED_ON)) | self.used

    def _stays_inside(self, entry: Entry) -> bool:
        """Whether its values went to a role of the same organisation, which hands on what follows."""
        if (self.owner, entry.content["kind"]) in self.whole.totals:
            return True
        if self.owner != self.whole.source.label_holder:
            return False
        return any(
            PARTY in schema.senders and form.payload and entry.content["kind"] in form.of
            for schema in MESSAGES.values()
            for _, _, form in schema.sent
        )

    def _heard_by_all(self, entry: Entry) -> None:
        """Of sealed rounds: every observer got each kind of words.

        Where members deal for each other, not everybody gets every kind: then whoever got it in another
        round of the same kind. Which words a round has at all is the replay's to say.
        """
        uses, content = self.uses_of(entry.index), entry.content
        if not self._sealed_rounds[entry.index]:
            return
        for kind in {kind for _, kind in uses}:
            missing = [name for name in self._hearing(content, kind) if (name, kind) not in uses]
            if missing and entry.index != len(self.entries) - 1:
                reason = f"entry {entry.index}: {', '.join(missing)} got no {kind}"
                self.whole.violate(self.owner, missing, content["kind"], reason)

    def _hearing(self, content: Mapping[str, Any], kind: str) -> list[str]:
        """Who should get words of a kind in the rounds that an entry like this is about."""
        if getattr(self.whole.source.plan.settings, "dealer", "") != "none":
            return list(content["observers"])
        if self._heard is None:
            self._heard = defaultdict(set)
            for entry in self.entries:
                for name, sent in self.uses_of(entry.index):
                    self._heard[entry.content["kind"], sent].add(name)
        return sorted(self._heard[content["kind"], kind] & set(content["observers"]))


def _facts(header: Mapping[str, Any]) -> str:
    return json.dumps(header["fields"], sort_keys=True)


def _text(rows: npt.NDArray[Any]) -> str:
    try:
        return rows_to_text(rows.astype(np.int64))
    except LedgerError:
        return "repeated rows"
