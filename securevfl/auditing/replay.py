"""Replay: the run is trained again without noise, along the path that it really took.

All roles run once more on the virtual carrier, from plan, data and first models. Whatever carried noise is
taken from the owners' journals instead of being drawn, and messages between organisations from the views, so
that every model goes through the states it went through. What the replay computes where a noisy value was
made is that value without its noise; the difference is the noise that was really added, and is tested against
the ledger. Besides, the replay must write the same ledgers, send the same noisy messages and end with the
same models: noise that was computed and not used shows there.

Trained models amplify rounding. Where the replay ends with the very models that were kept, it was exact.
Where it does not, a second one starts from models that are changed in their last digits, and the difference
of the two says how much of what was found is rounding. That decision depends on the data, so a `not tested`
for this reason is for data holders.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from securevfl.accountants.records import HIDDEN, PREDICTION, ReleaseRecord
from securevfl.algorithms import SERVER, find_algorithm
from securevfl.algorithms.messages import Scores, Sum
from securevfl.attacks.source import Source
from securevfl.auditing.evidence import (
    CELL,
    ERROR_LIMIT,
    FINE_ERROR,
    FINE_VALUES,
    FLIPPED_TO,
    FLIPS,
    NOISE_TESTS,
    REPETITION,
    SHARED,
    VARIANCE,
    NoiseEvidence,
    Outcome,
    RepetitionTest,
    SharedTest,
    SquaresTest,
    VarianceTest,
    conclude,
    judge_flips_to,
)
from securevfl.auditing.index import Lines
from securevfl.auditing.own_noise import TESTS as OWN_TESTS
from securevfl.auditing.own_noise import OwnNoise
from securevfl.auditing.predicted import Predicted
from securevfl.auditing.reconciliation import was_resumed
from securevfl.auditing.shares import FRESH, MemberNoise
from securevfl.auditing.verdicts import VISIBLE, ErrorBudget, Finding, Verdict
from securevfl.data.described import files_digest
from securevfl.data.description import is_description
from securevfl.errors import ProtocolError, SecureVFLError
from securevfl.federation.clock import VirtualClock, run_virtual
from securevfl.federation.recorder import DECLARED
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.site import PARTS as PHASES_OF
from securevfl.federation.site import Site, hosts_of, load_own, open_gate, own_arrays
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.chain import LedgerReader
from securevfl.privacy.defences import keep_probability
from securevfl.privacy.gate import HANDED_ON, Gate, Mechanism, clip_exactly
from securevfl.privacy.journal import (
    AS_GIVEN,
    DATA,
    FILES,
    GIVEN,
    GRADIENT,
    INNER,
    LABELS,
    LOCK,
    MODEL,
    ORIGIN,
    PREDICTED,
    RELEASE,
    ROWS,
    SCORED,
    STATISTIC,
    TOTAL,
    UPDATE,
    Array,
    Journal,
    fingerprint,
)
from securevfl.privacy.ledger import each_kept, read_homes
from securevfl.privacy.messages import Packet
from securevfl.privacy.noise import Floats, Noise
from securevfl.privacy.payloads import Accounted, Link, Released
from securevfl.privacy.rows import fixed
from securevfl.privacy.schemas import MESSAGES
from securevfl.privacy.views import Seen, View, ViewWriter
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.session import ProofMachine
from securevfl.protocols.stream import KEY_BYTES, KeyStream
from securevfl.protocols.wire import Value
from securevfl.settings.protocols import FACTS

PATHS = {
    RELEASE: "embeddings",
    GRADIENT: "gradients",
    UPDATE: "updates",
    STATISTIC: "statistics",
    LABELS: "randomised labels",
    TOTAL: "noisy totals",
    INNER: "noise inside encoders",
}
"""Kind in the journal -> the path that findings name."""
PARTS, REACH, BEYOND, EXCESS = "variance by part", "reach", "reach beyond the clip", "excess"
TRAINED, NEW = "records of the training", "noise of new records"
EVERYBODY = ""
"""In the place of a name: what all organisations opened, together."""
_TESTS = (*NOISE_TESTS, PARTS, REACH, BEYOND, EXCESS)
_ON_LATTICE = (RELEASE, UPDATE, STATISTIC)
_OWN = (RELEASE, UPDATE, STATISTIC)
"""Kinds with noise of one owner's own; that of two owners is independent."""
_CLIPPED = (RELEASE, GRADIENT, UPDATE)
"""Kinds that are clipped before the noise."""
# A norm that no gradient has; and how many updates are looked at without clipping, which takes as long again.
_FREE, _UNCLIPPED = 1e30, 256
# Of figures where two replays differ in rounding: a score that crosses another moves them a little.
_FIGURE_MARGIN = 0.01
# What carries no noise, where the replay ends with the very models: rounding of sums in another order.
_SAME_VALUES = 1e-4
# Sums over parties of float32 values that are handed on, record by record: a few of its last digits.
_SAME_SUMS = 2.0**-19
_LAST_DIGITS = 1e-7
# First models are drawn one value after the other; only products may round otherwise elsewhere.
_SAME_START = 1e-5
# Rounding at every step adds up to more than one change at the beginning.
_MORE_ROUNDING = 30
# Tables and masks of sealed training round each record's residual, by less than this in rms.
_RING_ERROR = 2.0**-12
_TOTAL_CELL = 2.0**-8


WHOLE = "the run as a whole"


def replay(source: Source, budget: ErrorBudget, *, audience: str = VISIBLE) -> list[Finding]:
    """Replays a run and judges the noise of every path by which something noisy was released.

    Args:
        source: The run, with its data.
        budget: How often a run that keeps its promises may be called violated.
        audience: Who sees the verdicts.

    Returns:
        A finding for each owner, observer and path; `not tested` with the reason where evidence is missing.
    """
    promises, predicted = _promises(source.records), Predicted(source)
    if promises and (reason := _other_than_given(source)):
        return [_violated(f"{owner} against {observer}", WHOLE, reason) for owner, observer in promises]
    missing = _missing(source) if promises else ""
    if missing or not promises:
        levels = budget.split(audience, predicted.tests) if predicted.tests else {}
        found = [_untested(owner, observer, "all releases", missing) for owner, observer in promises]
        return found + predicted.findings(levels)
    with tempfile.TemporaryDirectory() as scratch:
        judge = _Judge(source, budget, audience, promises, Path(scratch), predicted)
        return judge.findings() + predicted.findings(judge.levels)


def _promises(records: list[ReleaseRecord]) -> list[tuple[str, str]]:
    """(owner, observer) of everything that was promised."""
    found = {
        (record.owner, observer)
        for record in records
        if record.mechanism not in (*HIDDEN, "exact")
        for observer in record.observers
    }
    return sorted(found)


def _missing(source: Source) -> str:
    """What keeps a run from being replayed at all, and how to supply it; empty if nothing does."""
    files, plan = source.files, source.plan
    if files.result_file.is_file() and files.read_result().get("guarantee") == DECLARED:
        return "the program that was recorded is not here to be run again, so its noise cannot be recomputed"
    if source.data is None:
        return "replay needs the data of the run; give it with --data"
    algorithm = find_algorithm(plan.algorithm)
    hosts = hosts_of(plan, source.data, algorithm)
    names = sorted(set(hosts.values()) - set(algorithm.assistants(plan).values()))
    if (mine := _alone(source)) is not None:
        names = [mine]
    absent = [
        name for name in names if not _has_journal(files.journal(name)) or not files.view(name).is_dir()
    ]
    if absent:
        return (
            f"views and journals of {', '.join(absent)} are not here; record them with --record-views, and "
            "bring the folders of all organisations together with securevfl gather"
        )
    for name in names:
        given, kept = fingerprint(own_arrays(source.data, name, hosts)), digests(source, name)
        if any(not np.array_equal(each, given) for where, each in kept.items() if where == ROWS):
            return f"the data that was given is not what {name} trained on; give the run's own with --data"
    brought = [
        own for name in names for own, origin in origins(View(files.journal(name))).items() if origin == GIVEN
    ]
    if brought:
        return (
            f"{', '.join(brought)} brought a model of its own, which is not here to be run again; whether it "
            "depends on private records cannot be seen"
        )
    hiding = [hosts[party] for party in source.parties if plan.encoder(party).hidden_noise]
    if any(not any(View(files.journal(name)).messages(INNER)) for name in hiding if name in names):
        return "noise inside encoders (hidden_noise) was not kept, so nothing behind it can be recomputed"
    if plan.threshold and read_homes(files.path) is not None:
        return "sums that go on without a party are not replayed; train with everybody (threshold 0)"
    ledgers = [LedgerReader(path) for path in (files.path / "ledger").glob("*.jsonl")]
    if any(was_resumed(ledger.entries(), plan) for ledger in ledgers):
        return "the run was interrupted and resumed; replay needs one that was not"
    return ""


def digests(source: Source, name: str) -> dict[str, Array]:
    """The digests of an organisation's rows that its journal keeps: as they were given, and as trained on."""
    lines = View(source.files.journal(name)).messages(DATA)
    return {str(seen.fields["where"]): seen.fields["values"] for seen in lines}


def _other_than_given(source: Source) -> str:
    """Why rows are not the plan's although the audit has been given the run's own data; empty if they are."""
    if others := _other_rows(source):
        return f"{', '.join(others)} trained on other rows than the plan makes of those that were given"
    if others := _read_otherwise(source):
        return f"{', '.join(others)} trained on other rows than the description makes of the run's own files"
    return ""


def _other_rows(source: Source) -> list[str]:
    """Organisations that were given these very rows, and trained on others than the plan makes of them.

    Not where columns or labels are scaled by statistics of the rows: those round differently elsewhere.
    """
    plan, data, given = source.plan, source.data, source.given
    if data is None or given is None or plan.scaling not in ("none", "public"):
        return []
    if data.task == "regression" and plan.mode != "sealed":
        return []
    hosts, found = hosts_of(plan, data, find_algorithm(plan.algorithm)), []
    for name in sorted({name for name in hosts.values() if _has_journal(source.files.journal(name))}):
        kept = digests(source, name)
        same = AS_GIVEN in kept and np.array_equal(
            kept[AS_GIVEN], fingerprint(own_arrays(given, name, hosts))
        )
        rows = fingerprint(own_arrays(data, name, hosts))
        if same and any(not np.array_equal(each, rows) for where, each in kept.items() if where == ROWS):
            found.append(name)
    return found


def _read_otherwise(source: Source) -> list[str]:
    """Organisations whose rows are not what the description makes of the very files that the run has read.

    Not where columns are on a logarithmic scale, which rounds differently on other machines.
    """
    given = source.given
    if given is None or not given.described or not is_description(given.described[0].source):
        return []
    if any(column.scale == "log" for own in given.described for column in own.columns):
        return []
    hosts, found = hosts_of(source.plan, given, find_algorithm(source.plan.algorithm)), []
    files: Array | None = None
    for name in sorted({name for name in hosts.values() if _has_journal(source.files.journal(name))}):
        kept = digests(source, name)
        if FILES in kept and AS_GIVEN in kept:
            files = files_digest(given.described[0].source) if files is None else files
            rows = fingerprint(own_arrays(given, name, hosts))
            if np.array_equal(kept[FILES], files) and not np.array_equal(kept[AS_GIVEN], rows):
                found.append(name)
    return found


def _has_journal(folder: Path) -> bool:
    """Whether a journal of the training is here; one of predictions alone may have been begun later."""
    return folder.is_dir() and any(any(View(folder).messages(kind)) for kind in (DATA, ORIGIN))


def _alone(source: Source) -> str | None:
    """The one organisation whose files are here, if it can replay what it sent: one role, no secure sum."""
    homes = read_homes(source.files.path)
    if homes is None or len(homes) != 1 or source.plan.protocol != "plain" or source.plan.mode == "sealed":
        return None
    return homes[0] if homes[0] in source.parties and homes[0] != source.label_holder else None


def _untested(owner: str, observer: str, path: str, *reasons: str) -> Finding:
    return Finding(
        promise=f"{owner} against {observer}", path=path, verdict=Verdict.NOT_TESTED, reasons=reasons
    )


# -- the same run without noise -----------------------------------------------------------------------------


class Broken(SecureVFLError):
    """The evidence does not fit what the plan's roles do.

    Attributes:
        owner: Whose it is.
        doubt: What else may be the reason; empty where nothing can, and None where it depends on the run.
    """

    def __init__(self, owner: str, reason: str, *, doubt: str | None = None) -> None:
        super().__init__(reason)
        self.owner, self.doubt = owner, doubt


class _Zeros(KeyStream):
    """A stream of zeros: every discrete Gaussian that is drawn from it is 0."""

    def fill(self, out: Any) -> Any:
        out[...] = 0
        return out


class Silence(Noise):
    """A source that adds nothing, so that what the gate computes is what would have left without noise."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = _Zeros(bytes(KEY_BYTES))

    def uniform(self, shape: tuple[int, ...], half_width: float) -> Floats:
        """The lower end, at which randomised response keeps every label."""
        return np.full(shape, -half_width)

    def gaussian(self, shape: tuple[int, ...], std: float) -> Floats:
        """Nothing."""
        return np.zeros(shape)

    def perturb(self, values: npt.ArrayLike, std: float) -> Floats:
        """The values themselves, off any lattice."""
        return np.asarray(values, np.float64)


class _Kept(Journal):
    """An owner's journal, read: values that carry noise are replaced by those that were kept.

    What the replay computed goes to a spool in scratch, with the place of what was kept.
    """

    def __init__(self, folder: Path, spool: ViewWriter, part: Callable[[], str], *, shake: float) -> None:
        self.owner, self.new = folder.name, True
        self.beyond: Floats | None = None
        self._view, self._spool, self._part, self._shake = View(folder), spool, part, shake
        keys = array(
            "q", (_place(line["kind"], line["fields"].get("where")) for line in self._view.headers())
        )
        self._keys = np.frombuffer(keys, np.int64)
        self._left = ~np.isin(self._keys, [_place(kind, None) for kind in _UNREPLAYED])
        self._next = 0

    def keep(self, kind: str, values: Array, *, std: float, where: str) -> Array:
        """What was kept at this place."""
        if kind in (LOCK, ORIGIN):
            return values
        place = self._find(kind, where)
        kept = np.array(self._view[place].fields["values"])
        if kept.shape != np.shape(values):
            raise Broken(
                self.owner, f"{self.owner} kept a {kind} of shape {kept.shape}, not {np.shape(values)}"
            )
        if kind == MODEL:
            self._check_first(where, kept, values)
            shaken: Array = kept * (1 + self._shake * np.resize([1, -1], kept.shape)).astype(kept.dtype)
            return shaken
        fields: dict[str, Value] = {
            "place": place,
            "std": std,
            "part": self._part(),
            "values": np.asarray(values),
        }
        cut, self.beyond = self.beyond, None
        if cut is not None and kind in _CLIPPED and cut.size == kept.size:
            fields["beyond"] = cut.reshape(kept.shape)
        self._spool.note(kind, fields, address=self.owner, time=0.0)
        return kept

    def _check_first(self, name: str, kept: Array, planned: Array) -> None:
        """The promises of encoders that see no raw records rest on models that begin without them, too."""
        if np.allclose(kept, planned, rtol=_SAME_START, atol=_SAME_START):
            return
        made = origins(self._view).get(name, "")
        doubt = "" if made == torch.__version__ else f"torch {made} made it, and this is {torch.__version__}"
        if not made:  # journals of before did not say it; the model may be one that its owner brought
            doubt = "its journal does not say where it is from"
        raise Broken(self.owner, f"the first model of {name} is not the one that the plan makes", doubt=doubt)

    def _find(self, kind: str, where: str) -> int:
        """The first line that is about such a value and was not taken: mostly the one after the last."""
        key = _place(kind, where)
        if not (self._next < len(self._keys) and self._left[self._next] and self._keys[self._next] == key):
            found = np.flatnonzero(self._left & (self._keys == key))
            if not len(found):
                raise Broken(self.owner, f"{self.owner} kept no {kind} at {where}, where its roles make one")
            self._next = int(found[0])
        place, self._next = self._next, self._next + 1
        self._left[place] = False
        return place

    def total(self, where: str) -> Floats | None:
        """The total that was kept at a place; None where none was."""
        found = np.flatnonzero(self._left & (self._keys == _place(TOTAL, where)))
        return np.array(self._view[int(found[0])].fields["values"], np.float64) if len(found) else None

    def left(self) -> str:
        """A kept value that the replay did not make; empty if it made all."""
        if not self._left.any():
            return ""
        seen = self._view[int(np.argmax(self._left))]
        return f"{seen.kind} at {seen.fields.get('where')}"

    def flush(self) -> None:
        """Nothing is written."""

    close = flush


def origins(journal: View) -> dict[str, str]:
    """Where first models are from, by name."""
    return {
        str(seen.fields["where"]): bytes(seen.fields["values"].tolist()).decode(errors="replace")
        for seen in journal.messages(ORIGIN)
    }


_UNREPLAYED = (DATA, LOCK, PREDICTED, SCORED, ORIGIN)
"""Kinds that no role makes again."""


def _place(kind: str, where: str | None) -> int:
    """64 bits for a place in a journal; what is not made again has none."""
    return hash((kind, None if kind in _UNREPLAYED else where))


class _Watched(Gate):
    """A gate of the replay that keeps what clipping cuts off beside what it leaves.

    Sealed openings are shown to whoever tells the members' noise apart.
    """

    own: OwnNoise | None = None
    part: Callable[[], str] = staticmethod(lambda: "")
    updates = 0

    def _cut(self, values: Floats, clipped: Floats) -> None:
        if isinstance(self.journal, _Kept):
            self.journal.beyond = values - clipped

    def _protect(self, values: Array) -> npt.NDArray[np.float32]:
        whole = values.astype(np.float64)
        self._cut(whole, clip_exactly(whole, self.mechanism.clip))
        return super()._protect(values)

    def release_noisy(self, values: Floats, mechanism: Mechanism, **given: Any) -> Released:
        """Keeps what is cut off; all of it is divided alike."""
        self._cut(values, clip_exactly(values, mechanism.clip))
        return super().release_noisy(values, mechanism, **given)

    def clipped_sum(self, compute: Callable[[float], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Computes it once more without clipping, for the first updates."""
        sums, self.updates = super().clipped_sum(compute), self.updates + 1
        if self.updates <= _UNCLIPPED:
            self._cut(_joined(compute(_FREE)), _joined(sums))
        return sums

    def hide(self, machine: Machine | None = None, **given: Any) -> Accounted:
        """Shows what is brought to a session."""
        if self.own is not None and isinstance(machine, ProofMachine):
            self.own.begin(machine)
        return super().hide(machine, **given)

    def open_totals(self, machine: Machine | None, **given: Any) -> Accounted:
        """Shows what is brought to an opening, with the total that was kept of it."""
        opened = super().open_totals(machine, **given)
        if self.own is not None and isinstance(machine, CheckedRound) and isinstance(self.journal, _Kept):
            self.own.take(machine, self.journal.total(str(self.ledger.releases)), self.part())
        return opened


def _joined(tensors: Iterable[torch.Tensor]) -> Floats:
    return torch.cat([each.detach().flatten() for each in tensors]).double().numpy(force=True)


def _ends(view: View) -> Iterator[tuple[str, str, str]]:
    """Sender, receiver and kind of what was sent between organisations, in order."""
    found = ((line["sender"], line["receiver"], line["kind"]) for line in view.headers())
    return (each for each in found if each[0] != each[1])


class _Sent:
    """The messages between organisations, as their receivers have them, in order."""

    def __init__(self, source: Source) -> None:
        self._views = {observer: View(source.view_folder(observer)) for observer in source.observers}
        self._places = {
            observer: {
                key: places[::-1]
                for key, places in view.index("sender", "receiver", "kind", sent=False).items()
            }
            for observer, view in self._views.items()
        }

        self._order = {observer: _ends(view) for observer, view in self._views.items()}

    def in_order(self, observer: str, message: Packet) -> bool:
        """Whether the observer's next line is of such a message; nobody asks after the first other one."""
        lines = self._order.get(observer)
        if lines is None or next(lines, None) == (message.sender, message.receiver, message.kind):
            return True
        del self._order[observer]
        return False

    def close(self) -> None:
        """Closes views whose lines were not read to the end."""
        self._order.clear()

    def next(self, observer: str, message: Packet) -> Seen | None:
        """The recorded message in the place of this one; None where the observer recorded nothing."""
        if observer not in self._views:
            return None
        waiting = self._places[observer].get((message.sender, message.receiver, message.kind))
        if not waiting:
            raise Broken(
                message.sender, f"{message.sender} sends {message.kind!r}, which {observer} never got"
            )
        return self._views[observer][waiting.pop()]


class _Evidence:
    """What a replay takes from the run: gates that take noisy values from journals, and messages compared.

    Attributes:
        wrong: Owner -> the first message that is not what the same roles send, or not what its gate had made.
        apart: Organisation and kind -> how far values that carry no noise are from what was sent, relatively.
        part: Where the run is.
    """

    def __init__(
        self, source: Source, spool: ViewWriter, *, shake: float, own: OwnNoise | None = None
    ) -> None:
        self.source, self.spool, self.shake, self._own = source, spool, shake, own
        self.journals: dict[str, _Kept] = {}
        self.gates: dict[str, Gate] = {}
        self.wrong: dict[str, str] = {}
        self.apart: dict[tuple[str, str], float] = defaultdict(float)
        self.local = read_homes(source.files.path) is None
        self.part = "start"

    def open_gate(self, name: str, label_holder: str) -> Gate:
        """A gate as the run had it, without noise."""
        data = self.source.known
        gate = open_gate(
            name,
            self.source.plan,
            records=data.n_train + data.n_test,
            test_records=data.n_test,
            holds_labels=name == label_holder,
            folder=None,
            made=_Watched,
        )
        gate.noise = Silence()
        gate.ledger.keep_in(Lines())
        if isinstance(gate, _Watched):
            gate.own, gate.part = self._own, lambda: self.part
        self._begin_alike(gate)
        folder = self.source.files.journal(name)
        if folder.is_dir():
            kept = _Kept(folder, self.spool, lambda: self.part, shake=self.shake)
            gate.journal = self.journals[name] = kept
        self.gates[name] = gate
        return gate

    def _begin_alike(self, gate: Gate) -> None:
        """Over a network notes precede the first release; journals name values by their entry's place."""
        path = self.source.files.ledger(gate.owner)
        entries = LedgerReader(path).entries() if path.is_file() else iter(())
        releases = (entry.index for entry in entries if entry.is_release)
        for _ in range(gate.ledger.head.position + 1, next(releases, 0)):
            gate.ledger.note_alignment(way="replay", observers=(), ids=0, most=0)

    def hides(self, kind: str) -> bool:
        """Whether messages of a kind are masked or encrypted, and so never the same twice."""
        return MESSAGES[kind].of_machine and not FACTS[self.source.plan.protocol].parts_are_read

    def compare(self, message: Packet, seen: Seen, host: str) -> None:
        """Notes what is not what was sent, and puts what was sent in its place."""
        said = f"message {message.number} ({message.kind})"
        if found := self._other_facts(message, seen):
            self.wrong.setdefault(host, f"{said}: {found} is not what the same roles send")
        noisy = message.head is not None and self._is_noisy(*message.head[:2])
        if message.head is not None and not _handed_on(message.kind) and noisy:
            for name, value in message.fields.items():
                if isinstance(value, np.ndarray) and not _same(value, seen.fields.get(name)):
                    self.wrong.setdefault(message.head.owner, f"{said} is not what the gate had made of it")
        else:
            for name, value in message.fields.items():
                if (form := MESSAGES[message.kind].form_of(name)) is not None and form.payload:
                    gap = _gap(value, sent := seen.fields.get(name))
                    shapes = [each.shape for each in (value, sent) if isinstance(each, np.ndarray)]
                    if not self.local and len(set(shapes)) > 1:
                        raise Broken(
                            host, f"the {name} of {said} have another shape: it answers something else"
                        )
                    self.apart[host, message.kind] = max(self.apart[host, message.kind], gap)
        message.fields = {name: seen.fields.get(name, value) for name, value in message.fields.items()}

    def _other_facts(self, message: Packet, seen: Seen) -> str:
        """A public part of a message that is not what the same roles send; empty if there is none.

        Paces and numbers follow from time, which only a simulation repeats.
        """
        if message.fields.keys() != seen.fields.keys():
            return f"field {min(message.fields.keys() ^ seen.fields.keys())!r}"
        if not self.local:
            return ""
        if message.number != seen.number:
            return f"number {seen.number}"
        mine, theirs = (None if m.head is None else m.head[:2] for m in (message, seen))
        if mine != theirs:
            return "its ledger entry"
        for name, value in message.fields.items():
            form = MESSAGES[message.kind].form_of(name)
            if form is not None and not form.payload and not _equal(value, seen.fields[name]):
                return f"field {name!r}"
        return ""

    def _is_noisy(self, owner: str, position: int) -> bool:
        return self.gates[owner].ledger.says(position, '"mechanism":"gaussian"')


class _Carrier(VirtualCarrier):
    """Runs all roles again; what one organisation sends another is what was sent."""

    def __init__(self, evidence: _Evidence) -> None:
        plan, data = evidence.source.plan, evidence.source.known
        hosts = hosts_of(plan, data, find_algorithm(plan.algorithm))
        self.evidence, self._sent = evidence, _Sent(evidence.source)
        self._broken: Broken | None = None
        gates = {name: evidence.open_gate(name, hosts[SERVER]) for name in dict.fromkeys(hosts.values())}
        super().__init__(plan, data, gates=gates)

    async def phase(self, part: str, epoch: int = 0) -> None:
        """Notes where the run is; a message without its like in the run ends the replay."""
        self.evidence.part = f"{part} {epoch}"
        if self.plan.profiled and (part, epoch) == ("epoch", 2):
            _take_up(self.sites.values())
        try:
            await super().phase(part, epoch)
        finally:
            if self._broken is not None:
                raise self._broken

    def _observe(self, message: Packet, time: float) -> None:
        if self._broken is not None:
            return
        ends = [self.hosts[message.receiver], self.hosts[message.sender]]
        fits = [self._sent.in_order(end, message) for end in ends]
        if self.evidence.local and not all(fits):
            reason = f"message {message.number} ({message.kind}) was not sent where the same roles send it"
            self.evidence.wrong.setdefault(ends[1], reason)
        if self.evidence.hides(message.kind):
            return
        try:
            seen = self._sent.next(self.hosts[message.receiver], message)
            if seen is not None:
                self.evidence.compare(message, seen, self.hosts[message.sender])
        except Broken as broken:  # a timer may have brought the message, where nobody would hear of it
            self._broken = broken

    def play(self) -> None:
        """Runs the whole schedule."""
        try:
            drive(Schedule(self).train())
        finally:
            self._sent.close()


def _take_up(sites: Iterable[Site]) -> None:
    """Where a run goes on from a profile: new processes with its state, a new session in every ledger."""
    for site in sites:
        state = site.state()
        if site.gate is not None:
            site.gate.ledger = copy.deepcopy(site.gate.ledger)
        site.reset()
        site.load(state, fresh=False)


class _Alone:
    """Runs one party's role again, against what its own view says that it received and sent.

    The view is a script: a message that arrived is delivered once everything is sent that was sent before.
    """

    def __init__(self, evidence: _Evidence, name: str) -> None:
        source = evidence.source
        plan, data = source.plan, source.known
        hosts = hosts_of(plan, data, find_algorithm(plan.algorithm))
        self.evidence, self.name, self.label_holder = evidence, name, hosts[SERVER]
        self._view, self._place = View(source.view_folder(name)), 0
        self._numbers: dict[int, int] = {}
        self._link = Link(name, self._post, hosts)
        self.sites = {
            name: Site(
                name,
                plan,
                data,
                hosts=hosts,
                links={name: self._link},
                clock=VirtualClock(),
                gate=evidence.open_gate(name, hosts[SERVER]),
            )
        }

    def play(self) -> None:
        """Runs the parts that the run had."""
        files, every = self.evidence.source.files, self.evidence.source.plan.evaluate_every
        epochs = int(files.read_result()["epochs"])
        self._part("prepare", 0)
        for epoch in range(1, epochs + 1):
            self._part("epoch", epoch)
            if every and epoch % every == 0 and epoch < self.evidence.source.plan.epochs:
                self._part("evaluate", epoch)
        self._part("final", epochs)

    def _part(self, part: str, epoch: int) -> None:
        site = self.sites[self.name]
        self.evidence.part, self._link.phase = f"{part} {epoch}", PHASES_OF[part]
        if site.plan.profiled and (part, epoch) == ("epoch", 2):
            _take_up([site])

        async def work() -> None:
            self._deliver()
            await site.run(part, epoch)

        run_virtual(work(), explain=lambda: f"{self.name} waits for {self._link.waiting}")

    def _deliver(self) -> None:
        while self._place < len(self._view) and not (seen := self._view[self._place]).sent:
            self._place += 1
            answered = None if seen.reply_to is None else self._numbers.get(seen.reply_to)
            packet = Packet(kind=seen.kind, sender=seen.sender, receiver=seen.receiver, fields=seen.fields)
            packet.number, packet.reply_to, packet.head, packet.checked = (
                seen.number,
                answered,
                seen.head,
                True,
            )
            if isinstance(rows := seen.fields.get("rows"), np.ndarray):
                packet.rows = fixed(rows)
            self._link.deliver(packet)

    def _post(self, message: Packet) -> None:
        seen = self._view[self._place] if self._place < len(self._view) else None
        if seen is None or (seen.kind, seen.receiver) != (message.kind, message.receiver):
            raise Broken(self.name, f"{self.name} sends {message.kind!r}, which its view does not hold there")
        self._place += 1
        self._numbers[seen.number] = message.number
        self.evidence.compare(message, seen, self.name)
        self._deliver()


def _same(mine: Array, other: Any) -> bool:
    return (
        isinstance(other, np.ndarray)
        and mine.shape == other.shape
        and bool(np.allclose(mine, other, rtol=1e-6, atol=0.0))
    )


def _equal(mine: Any, other: Any) -> bool:
    """Whether public facts are the same; numbers that were computed may differ in their last digits."""
    if isinstance(mine, float) and isinstance(other, float):
        return bool(np.isclose(mine, other, rtol=1e-6, atol=0.0, equal_nan=True))
    if isinstance(mine, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(mine, other))
    return bool(mine == other)


def _handed_on(kind: str) -> bool:
    """Whether messages of a kind carry what was computed from others' releases."""
    return any(form.of and form.of <= set(HANDED_ON) for _, _, form in MESSAGES[kind].sent if form.payload)


def _gap(mine: Any, other: Any) -> float:
    """How far values are from what was sent, as a share of the largest; infinite for another shape."""
    if mine is None or other is None:
        return 0.0 if mine is other else np.inf
    left, right = np.asarray(mine, np.float64), np.asarray(other, np.float64)
    if left.shape != right.shape:
        return np.inf
    scale = float(np.abs(left).max(initial=1e-12))
    return float(np.nan_to_num(np.abs(left - right), nan=np.inf).max(initial=0.0)) / scale


_Replayed: TypeAlias = _Carrier | _Alone


# -- what it says -------------------------------------------------------------------------------------------


@dataclass
class _Path:
    """The noise of one path: all of it together, each part of the run alone, and how far values reach."""

    evidence: NoiseEvidence
    limit: float
    parts: dict[str, VarianceTest] = field(default_factory=dict)
    reach: float = 0.0
    rows: int = 0
    lean: float = 0.0
    messages: int = 0
    error: float = 0.0

    def add(
        self,
        part: str,
        released: Floats,
        exact: Floats,
        std: float,
        error: float,
        on_lattice: bool,
        beyond: Floats | None = None,
    ) -> None:
        noise = released - exact
        self.evidence.add(
            noise,
            std,
            error=error,
            released=released if on_lattice else None,
            largest=float(np.abs(released).max(initial=0.0)),
        )
        self.error = max(self.error, error)
        if error > ERROR_LIMIT:
            return
        self.parts.setdefault(part, VarianceTest(self.limit)).add(noise / std)
        rows = noise.reshape(len(noise), -1) if noise.ndim > 1 else noise.reshape(1, -1)
        flat = exact.reshape(rows.shape)
        norms = np.sqrt(np.einsum("nd,nd->n", flat, flat))
        along = np.einsum("nd,nd->n", rows, flat)[norms > 0] / norms[norms > 0]
        self.reach += float(along.sum()) / std
        self.rows += len(along)
        # Every message counts once, so that how many count does not depend on what was released.
        ways = (each for each in (beyond, exact, np.ones_like(exact)) if each is not None and each.any())
        way = np.asarray(next(ways), np.float64)
        self.lean += float(np.vdot(noise, way)) / std / float(np.linalg.norm(way))
        self.messages += 1

    @property
    def fine(self) -> bool:
        """Whether replay is exact enough to say where noise leans."""
        return (
            bool(self.rows)
            and self.error * max(self.evidence.variance.values, FINE_VALUES) ** 0.5 < FINE_ERROR
        )

    def judge(self, levels: Mapping[str, float]) -> list[Outcome]:
        """All outcomes."""
        outcomes = self.evidence.judge(levels)
        for part, test in self.parts.items():
            outcome = test.judge(levels[PARTS] / len(self.parts))
            if outcome.verdict is Verdict.VIOLATED:
                outcomes.append(Outcome(PARTS, Verdict.VIOLATED, f"{outcome.reason} ({part})"))
        if not self.fine:
            return outcomes
        # Beside exact values Gaussian noise leans neither way.
        leans = self.reach / self.rows**0.5
        outward, inward = (stats.norm.sf(way) < levels[REACH] / 2 for way in (leans, -leans))
        more = self.evidence.variance.excessive(levels[EXCESS])
        reason = (
            "noise leans against the values"
            if inward
            else "released values reach further than the clip allows"
        )
        outcomes.append(_outcome(REACH, bool(outward or inward), reason))
        outcomes.append(_lean([self], levels[BEYOND]))
        outcomes.append(_outcome(EXCESS, more, "what was added is not the declared noise"))
        return outcomes


def _lean(paths: Iterable[_Path], level: float) -> Outcome:
    """Whether noise leans to where clipping cut something off: then less was cut off than should be."""
    found = [(path.lean, path.messages) for path in paths if path.fine]
    lean, messages = (sum(each) for each in zip(*found, strict=True)) if found else (0.0, 0)
    beyond = bool(messages) and stats.norm.sf(lean / max(messages, 1) ** 0.5) < level
    return _outcome(BEYOND, bool(beyond), "less was cut off than the clip asks for")


def _outcome(test: str, violated: bool, reason: str) -> Outcome:
    return Outcome(test, Verdict.VIOLATED if violated else Verdict.HOLDS, reason if violated else "")


class _Judge:
    """Replays once, or twice where the first was not exact, and concludes."""

    def __init__(
        self,
        source: Source,
        budget: ErrorBudget,
        audience: str,
        promises: list[tuple[str, str]],
        scratch: Path,
        predicted: Predicted,
    ) -> None:
        self.source, self.promises, self.scratch = source, promises, scratch
        self.local = read_homes(source.files.path) is None
        self.alone = _alone(source)
        journals = sorted(path for path in (source.files.path / "journal").glob("*") if path.is_dir())
        self.views = {path.name: View(path) for path in journals}
        kinds = {(name, kind) for name, view in self.views.items() for (kind,) in view.index("kind")}
        kinds |= {(EVERYBODY, kind) for _, kind in kinds if kind == TOTAL}
        paths = sorted((name, kind) for name, kind in kinds if kind in PATHS)
        self.unknown = sorted({kind for _, kind in kinds if kind not in (*PATHS, *_UNREPLAYED, MODEL)})
        tests = [_test(name, kind, test) for name, kind in paths for test in _tests_of(kind)]
        self.shared = {
            kind: SharedTest(owners)
            for kind in _OWN
            if len(owners := sorted(name for name, other in paths if other == kind)) > 1
        }
        tests += [_test(EVERYBODY, kind, SHARED) for kind in self.shared]
        own = [kind for _, kind in paths if kind in _CLIPPED]
        self.clipped = sorted(kind for kind in set(own) if own.count(kind) > 1)
        tests += [_test(EVERYBODY, kind, BEYOND) for kind in self.clipped]
        self.predicted = predicted
        self.again = {
            owner: SharedTest((TRAINED, NEW)) for owner in predicted.owners if (owner, RELEASE) in paths
        }
        tests += [_test(owner, RELEASE, SHARED) for owner in self.again]
        self.inner: dict[str, tuple[SquaresTest, RepetitionTest]] = {}
        self.members = MemberNoise.of(source.plan, source.data)
        algorithm = find_algorithm(source.plan.algorithm)
        hosts = {} if source.data is None else hosts_of(source.plan, source.data, algorithm)
        self.own = OwnNoise.of(source, self.members, hosts)
        if self.own is not None:  # totals hold everybody's noise; each member's own says more
            tests = [test for test in tests if f", {PATHS[TOTAL]}: " not in test]
            tests += [_test(name, TOTAL, test) for name in self.own.members for test in OWN_TESTS]
        elif self.members is not None:
            tests += [_test(name, TOTAL, FRESH) for name in self.members.tests]
        tests += predicted.tests
        self.levels = budget.split(audience, tests) if tests else {}

    def findings(self) -> list[Finding]:
        """All of them."""
        try:
            first = self._replay("first", 0.0)
            exact, both = self._compare(first)
            second = None if exact else self._replay("second", _LAST_DIGITS)
        except Broken as broken:
            return self._broken(broken.owner, str(broken), broken.doubt)
        except ProtocolError as error:  # roles refuse what the record says that others sent them
            return self._broken("", str(error))
        except SecureVFLError as error:
            return [_untested(*pair, "all releases", f"replay failed: {error}") for pair in self.promises]
        ledgers = {name: reason for name in first.sites if (reason := self._ledger(name, first))}
        if ledgers and not self.local:  # values would be compared with those of other records
            foreign = {name: reason for name in ledgers if (reason := self._foreign(name, first))}
            found = [
                _violated(f"{o} against {w}", WHOLE, foreign[o]) for o, w in self.promises if o in foreign
            ]
            return found or self._broken(*next(iter(ledgers.items())))
        faults = first.evidence.wrong | ledgers | self._other_models(second, both)
        if exact:
            faults = self._other_values(first) | faults
        judged = self._judged(second is not None)
        found = self._figures(first, second)
        for owner, observer in self.promises:
            promise = f"{owner} against {observer}"
            if owner in faults:
                found.append(_violated(promise, WHOLE, faults[owner]))
            for (name, kind), (outcomes, unreplayed) in judged.items():
                if name == owner or (kind == TOTAL and name == EVERYBODY):
                    finding = conclude(promise, PATHS[kind], outcomes, unreplayed)
                    if kind == INNER and finding.verdict is Verdict.NOT_TESTED:
                        continue  # too few values; nothing is promised of it
                    finding = replace(finding, private=not exact and self._is_chaotic(kind))
                    if kind == TOTAL and self.members is not None:
                        finding = self.members.conclude(finding, outcomes)
                    found.append(finding)
            if self.own is not None and {owner, observer} <= set(self.own.members):
                found.append(self.own.conclude(owner, observer))
            if not exact:
                found += [
                    _untested(owner, observer, kind, "replay is not exact enough to compare it")
                    for host, kind in first.evidence.apart
                    if host == owner and _handed_on(kind)
                ]
            found += [
                _untested(owner, observer, kind, "what was kept of it is of a kind that replay does not know")
                for kind in self.unknown
            ]
        if self.members is not None and (EVERYBODY, TOTAL) in judged:
            found += self.members.somebody(judged[EVERYBODY, TOTAL][0])
        promised = {owner for owner, _ in self.promises}
        return [*found, *(_violated(name, WHOLE, faults[name]) for name in faults if name not in promised)]

    def _is_chaotic(self, kind: str) -> bool:
        """Whether two replays may be any distance apart: then the data decide whether they tell anything."""
        plan = self.source.plan
        if plan.mode in ("sealed", "frozen") or kind == STATISTIC:
            return False
        return not plan.models(self.source.parties) <= {"linear", "fm"} or plan.head not in ("linear", "sum")

    def _other_values(self, carrier: _Replayed) -> dict[str, str]:
        """Organisations that sent, without noise, other values than the same roles compute."""
        return {
            host: f"{kind}: holds other values than the same roles compute"
            for (host, kind), gap in carrier.evidence.apart.items()
            if gap > (_SAME_SUMS if kind in (Sum.kind, Scores.kind) else _SAME_VALUES)
        }

    def _figures(self, carrier: _Replayed, again: _Replayed | None) -> list[Finding]:
        """A finding where the figures that the run printed are not those of its models.

        Where the replay is not exact, by more than a hundredth and far more than two replays differ.
        """
        if not isinstance(carrier, _Carrier) or not self.local or not self.source.files.result_file.is_file():
            return []
        test, said = carrier.server.test, self.source.files.read_result()["test"]
        other = again.server.test if isinstance(again, _Carrier) else None
        wrong = []
        for name, value in test.items():
            if value is None:
                continue
            margin = 1e-4 * abs(value) + 1e-6
            if other is not None:
                margin = max(_FIGURE_MARGIN, _MORE_ROUNDING * abs((other.get(name) or 0.0) - value))
            if not abs((said.get(name) or np.inf) - value) <= margin:
                wrong.append(name)
        reason = f"the models do not give the {' and '.join(wrong)} that the result states"
        return [_violated(carrier.label_holder, "test figures", reason)] if wrong else []

    def _broken(self, owner: str, reason: str, doubt: str | None = None) -> list[Finding]:
        """The evidence does not fit the roles: a contradiction where they alone decide what happens."""
        words = f"replay ended early: {reason}"
        unsure = "" if self.local else "order over a network is not repeatable"
        if not self.source.files.result_file.is_file():  # whatever was under way then was never kept
            unsure = "the run did not come to its end"
        unsure = unsure if doubt is None else doubt
        if unsure:
            return [_untested(*pair, "all releases", f"{words} ({unsure})") for pair in self.promises]
        return [
            _violated(f"{mine} against {observer}", WHOLE, reason)
            if mine == owner or all(owner != name for name, _ in self.promises)
            else _untested(mine, observer, "all releases", words)
            for mine, observer in self.promises
        ]

    def _replay(self, name: str, shake: float) -> _Replayed:
        spool = ViewWriter(self.scratch / name, name)
        evidence = _Evidence(self.source, spool, shake=shake, own=None if shake else self.own)
        try:
            carrier = _Carrier(evidence) if self.alone is None else _Alone(evidence, self.alone)
            carrier.play()
        finally:
            spool.close()
        return carrier

    def _models(self, carrier: _Replayed) -> Iterator[tuple[str, Floats, Floats]]:
        """(owner, kept, replayed) parameters of each model that the run kept."""
        for name, site in carrier.sites.items():
            modules = {**site.encoders, **({SERVER: site.setup.head} if site.keeps_head else {})}
            for address, module in modules.items():
                if self.source.files.model(address).is_file():
                    mine = _flat(module)
                    load_own(self.source.files, address, module)
                    yield name, _flat(module), mine

    def _compare(self, carrier: _Replayed) -> tuple[bool, dict[str, tuple[Floats, Floats]]]:
        """Whether the replay ended with the very models that were kept; and by owner, both."""
        pairs: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
        for name, kept, mine in self._models(carrier):
            pairs[name].append((kept, mine))
        both = {
            name: (np.concatenate([k for k, _ in found]), np.concatenate([m for _, m in found]))
            for name, found in pairs.items()
        }
        return all(np.array_equal(kept, mine, equal_nan=True) for kept, mine in both.values()), both

    def _other_models(
        self, second: _Replayed | None, both: dict[str, tuple[Floats, Floats]]
    ) -> dict[str, str]:
        """Owners whose models are not those that the replay ends with, by more than rounding.

        Encoders that never learn are the first models, to the last bit.
        """
        if second is None:
            return {}
        _, again = self._compare(second)
        found = {}
        for name, (kept, mine) in both.items():
            if self._is_fixed(name) and not np.array_equal(kept, mine, equal_nan=True):
                found[name] = "the model that was kept is not the one that should have stayed as it was"
                continue
            rounding = _furthest(again[name][1], mine)
            scale = float(np.abs(mine[np.isfinite(mine)]).max(initial=0.0))
            if _furthest(kept, mine) > _MORE_ROUNDING * rounding + 1e-4 * scale:
                found[name] = "the model that was kept is not the one that its updates lead to"
        return found

    def _is_fixed(self, name: str) -> bool:
        """Whether all that an organisation has is an encoder that never learns."""
        return (
            self.source.plan.mode == "frozen"
            and name in self.source.parties
            and name != self.source.label_holder
        )

    def _ledger(self, name: str, carrier: _Replayed) -> str:
        """How the owner's ledger differs from what the same roles write; empty if it does not."""
        gate = carrier.sites[name].gate
        path = self.source.files.ledger(name)
        if gate is None or not path.is_file():
            return ""
        # Over a network exact releases, such as answers to several parties, have no order of their own.
        passing = () if self.local else (*HIDDEN, "exact")
        mine = _story(each_kept(gate.ledger), passing)
        theirs = _story((r for r in self.source.records if r.owner == name), passing)
        if mine == theirs:
            left = carrier.evidence.journals[name].left() if name in carrier.evidence.journals else ""
            return f"the journal holds {left}, which no role makes" if left else ""
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if place is None:
            return f"the ledger has {len(theirs)} releases, where the same roles write {len(mine)}"
        return f"release {place} in the ledger is not what the same roles write there"

    def _foreign(self, name: str, carrier: _Replayed) -> str:
        """What an entry says that the same roles never write, in whatever order; empty if there is none.

        Over a network the order of records is not repeatable. Mechanism, clip and noise do not depend on it.
        """
        gate = carrier.sites[name].gate
        mine = {_content(record)[3:7] for record in (each_kept(gate.ledger) if gate else ())}
        for record in self.source.records:
            if record.owner == name and record.kind != "prediction" and _content(record)[3:7] not in mine:
                return f"an entry about {record.kind} names another mechanism, clip or noise than the plan's"
        return ""

    def _judged(self, twice: bool) -> dict[tuple[str, str], tuple[list[Outcome], int]]:
        """Feeds all noise to its tests; path -> outcomes, and how many messages were not replayed.

        Every total holds something of everybody, so all totals are one path.
        """
        paths: dict[tuple[str, str], _Path] = {}
        judged: dict[tuple[str, str], tuple[list[Outcome], int]] = {}
        again = iter(View(self.scratch / "second")) if twice else None
        for spooled in View(self.scratch / "first"):
            other = next(again, None) if again is not None else None
            name, kind, std = spooled.sender, spooled.kind, float(spooled.fields["std"])
            released = np.asarray(self.views[name][spooled.fields["place"]].fields["values"], np.float64)
            exact = np.asarray(spooled.fields["values"], np.float64)
            if kind == INNER:
                self._inner(name, std, released)
                continue
            if kind == LABELS:
                judged[name, kind] = self._flips(name, released, exact), 0
            if kind == TOTAL and self.source.plan.mode == "sealed":  # one vector, however its model folds it
                released, exact = released.reshape(1, -1), exact.reshape(1, -1)
            if std > 0 and not (kind == TOTAL and self.own is not None):
                error = self._error(spooled, exact, std, other) if twice else self._rounding(kind, std)
                for where in {name, EVERYBODY} if kind == TOTAL else {name}:
                    path = paths.setdefault((where, kind), self._path(kind))
                    beyond = spooled.fields.get("beyond")
                    path.add(spooled.fields["part"], released, exact, std, error, kind in _ON_LATTICE, beyond)
                if kind == TOTAL and self.members is not None and error <= ERROR_LIMIT:
                    self.members.add(name, (released - exact) / std, std)
                compared = [(self.shared.get(kind), name)]
                compared += [(self.again.get(name), TRAINED)] if kind == RELEASE else []
                for test, whose in compared if error <= ERROR_LIMIT else ():
                    if test is not None:
                        noise = (released - exact) / std
                        test.add(whose, noise.reshape(len(noise) if noise.ndim > 1 else 1, -1))
        for (name, kind), path in paths.items():
            levels = {test: self.levels[_test(name, kind, test)] for test in _TESTS}
            outcomes = path.judge(levels)
            if kind == TOTAL and name != EVERYBODY:
                part = f"opened by {name}"
                outcomes = [o._replace(reason=f"{o.reason} ({part})", part=part) for o in outcomes]
            place = (EVERYBODY if kind == TOTAL else name, kind)
            earlier, unreplayed = judged.get(place, ([], 0))
            judged[place] = [*earlier, *outcomes], max(unreplayed, path.evidence.unreplayed)
        self._together(judged, paths)
        for name, (squares, repeated) in self.inner.items():
            level = {test: self.levels[_test(name, INNER, test)] for test in _tests_of(INNER)}
            judged[name, INNER] = [squares.judge(level[VARIANCE]), repeated.judge(level[REPETITION])], 0
        if self.members is not None and (EVERYBODY, TOTAL) in judged:
            levels = {name: self.levels[_test(name, TOTAL, FRESH)] for name in self.members.tests}
            judged[EVERYBODY, TOTAL][0].extend(self.members.judge(levels))
        if self.own is not None:
            self.own.judge(
                {
                    name: {test: self.levels[_test(name, TOTAL, test)] for test in OWN_TESTS}
                    for name in self.own.members
                }
            )
        return judged

    def _together(
        self, judged: dict[tuple[str, str], tuple[list[Outcome], int]], paths: dict[tuple[str, str], _Path]
    ) -> None:
        """Adds what is seen by looking at several paths at once."""
        for (name, kind), path in paths.items():
            if kind in self.shared:
                level = self.levels[_test(EVERYBODY, kind, SHARED)]
                judged[name, kind][0].append(self.shared[kind].judge(level, path.evidence.error))
        for kind in self.clipped:  # what one owner's few values do not show, those of all may
            leaning = {name: path for (name, other), path in paths.items() if other == kind and path.fine}
            if leaning:
                most = max(leaning, key=lambda name: leaning[name].lean / leaning[name].messages ** 0.5)
                outcome = _lean(leaning.values(), self.levels[_test(EVERYBODY, kind, BEYOND)])
                judged[most, kind][0].append(outcome)
        for name, test in self.again.items():
            for noise, std in self.predicted.noise(name):
                test.add(NEW, noise / std)
            level = self.levels[_test(name, RELEASE, SHARED)]
            outcome = test.judge(level, paths[name, RELEASE].evidence.error)
            if outcome.verdict is Verdict.VIOLATED:
                outcome = outcome._replace(reason="noise of the training came again in predictions")
            judged[name, RELEASE][0].append(outcome._replace(test=NEW))

    def _path(self, kind: str) -> _Path:
        sealed = self.source.plan.mode == "sealed"
        limit = 0.0 if kind == STATISTIC or self.source.plan.mode in ("sealed", "frozen") else ERROR_LIMIT
        cell = _TOTAL_CELL if sealed and kind == TOTAL else CELL
        return _Path(NoiseEvidence(cell=cell, limit=limit), limit)

    def _rounding(self, kind: str, std: float) -> float:
        """The error of an exact replay: masks make sealed totals round differently each time."""
        sealed = kind == TOTAL and self.source.plan.mode == "sealed"
        records = max(self.source.known.n_train, self.source.known.n_test)
        return _RING_ERROR * float(records**0.5) / std if sealed else 0.0

    def _error(self, first: Seen, exact: Floats, std: float, second: Seen | None) -> float:
        """How far two replays are apart at one value, with a margin, in standard deviations of its noise."""
        if second is None or second.fields["place"] != first.fields["place"] or second.kind != first.kind:
            return float("inf")
        apart = np.asarray(second.fields["values"], np.float64).reshape(exact.shape) - exact
        error = _MORE_ROUNDING * float(np.sqrt(np.mean(apart**2))) / std
        return max(error, self._rounding(first.kind, std))

    def _inner(self, name: str, std: float, values: Floats) -> None:
        """Takes noise inside an encoder, which is not Gaussian: how much of it there is, and is it fresh?"""
        test, again = self.inner.setdefault(name, (SquaresTest(), RepetitionTest()))
        test.add(values / std)
        again.add(values.reshape(len(values), -1) / std)

    def _flips(self, name: str, released: Array, exact: Array) -> list[Outcome]:
        """Whether as many labels were flipped as randomised response flips, and to all classes alike."""
        plan, classes = self.source.plan, len(self.source.known.classes)
        chance = 1 - keep_probability(plan.label_epsilon, classes)
        flips = int((released != exact).sum())
        few = stats.binom.cdf(flips, len(exact), chance) < self.levels[_test(name, LABELS, FLIPS)]
        level = self.levels[_test(name, LABELS, FLIPPED_TO)]
        return [
            _outcome(FLIPS, bool(few), "fewer labels were flipped than claimed"),
            judge_flips_to(exact, released, classes, level),
        ]


def _story(records: Iterable[ReleaseRecord], passing: tuple[str, ...]) -> array[int]:
    """What records say, 64 bits each, up to the last release of the training.

    Predictions hide scores in sessions of their own. Records of a `passing` mechanism are left out.
    """
    found, end = array("q"), 0
    for record in records:
        if record.kind != PREDICTION:
            if record.mechanism not in passing:
                found.append(hash(_content(record)))
            if record.mechanism not in HIDDEN:
                end = len(found)
    return found[:end]


def _violated(promise: str, path: str, reason: str) -> Finding:
    return Finding(promise=promise, path=path, verdict=Verdict.VIOLATED, reasons=(reason,))


def _tests_of(kind: str) -> tuple[str, ...]:
    return {LABELS: (FLIPS, FLIPPED_TO), INNER: (VARIANCE, REPETITION)}.get(kind, _TESTS)


def _test(name: str, kind: str, test: str) -> str:
    return f"{name or 'all'}, {PATHS[kind]}: {test}"


def _flat(module: torch.nn.Module) -> Floats:
    values = [each.detach().cpu().double().flatten() for each in module.state_dict().values()]
    return torch.cat(values).numpy() if values else np.zeros(0)


def _furthest(left: Floats, right: Floats) -> float:
    """How far apart two vectors are anywhere; what is infinite or undefined in both alike is not."""
    apart = ~((left == right) | (np.isnan(left) & np.isnan(right)))
    gap = np.abs(left[apart] - right[apart])
    return float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _content(record: ReleaseRecord) -> tuple[Any, ...]:
    """What a ledger entry says, comparable."""
    rows = None if record.rows is None else hashlib.sha256(record.rows.tobytes()).digest()
    plain = ("observers", "kind", "mechanism", "clip", "sigma", "sensitivity", "vectors", "mode", "epsilon")
    return (rows, *(getattr(record, name) for name in plain))
