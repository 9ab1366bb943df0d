"""Every member's own noise in openings that were checked, whatever the others did in them.

A joint audit has the dealer's key and everybody's view, so it takes the masks off what each member sent: what
is left of its products is its own noise, apart from that of all others. An owner's promise is then judged by
the noise that it rests on, where rows, labels and residuals that met it are those that the proofs allow. A
member that brings other scores, labels or rows than its own harms no promise but its own, which is `not
tested`, and is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from securevfl.attacks.source import Source
from securevfl.auditing.evidence import (
    COLUMNS,
    NOISE_TESTS,
    REPETITION,
    SHAPE,
    VARIANCE,
    NoiseEvidence,
    Outcome,
    VarianceTest,
    conclude,
)
from securevfl.auditing.shares import MemberNoise
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.privacy.journal import LOCK
from securevfl.privacy.noise import Floats
from securevfl.privacy.views import View, sampled
from securevfl.protocols.contract import SETUP_ROUND
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.checked import Brought, CheckedRound
from securevfl.protocols.sealed.field import Elements
from securevfl.protocols.sealed.messages import CheckedDeal, CheckedOperand, CheckedShare, ProofSeed
from securevfl.protocols.sealed.proof import ProofClaim
from securevfl.protocols.sealed.protocol import Phase
from securevfl.protocols.sealed.session import ProofMachine
from securevfl.protocols.sealed.unlocked import (
    Kept,
    Signed,
    is_as_proved,
    lock,
    opened_rows,
    own_noise,
    phases_of,
    residual_excess,
)

PARTS, EXCESS = "variance by part", "excess"
TESTS = (*NOISE_TESTS, PARTS, EXCESS)
"""Of each member's own noise."""
_LESS = (VARIANCE, REPETITION, COLUMNS, SHAPE, PARTS)
PATH = "noisy totals"
_CELL = 2.0**-8
# Scores that replay rounds otherwise: 2^32 are one period.
_SAME_PHASE = 1 << 12
_KINDS = (ProofSeed.kind, CheckedOperand.kind, CheckedDeal.kind, CheckedShare.kind, Phase.kind)


class Unfit(Exception):
    """What views and keys say does not fit together; the words say what."""


def _line(lines: Sequence[dict[str, Any]], place: int) -> dict[str, Any]:
    if not 0 <= place < len(lines):
        raise Unfit(f"a view does not hold session {place}")
    return lines[place]


class _Book:
    """What one member's view holds of checked sessions, by session and round."""

    def __init__(self, view: View, places: Mapping[str, int]) -> None:
        self.view = view
        self.seeds: list[dict[str, Any]] = []
        self.operands: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.rounds: dict[int, _Round] = {}
        for line in view.headers():
            if line["kind"] not in _KINDS:
                continue
            ends = places.get(line["sender"], -1), places.get(line["receiver"], -1)
            if line["kind"] == ProofSeed.kind:
                self.seeds.append(line)
            elif line["kind"] == CheckedOperand.kind:
                self.operands.setdefault(ends, []).append(line)
            else:
                found = self.rounds.setdefault(line["fields"]["round"], _Round())
                if line["kind"] == CheckedDeal.kind:
                    found.deal, found.session = line, len(self.seeds) - 1
                else:
                    (found.shares if line["kind"] == CheckedShare.kind else found.phases)[ends] = line

    def round(self, number: int) -> _Round:
        return self.rounds.get(number, _Round())

    def words(self, line: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Ring:
        """Words of a line, of this shape.

        Raises:
            Unfit: The view kept a sketch of them, or they have another form.
        """
        place = line["arrays"].get(name, [None])
        found = None if place[0] is None else self.view.at(place)
        if found is None or found.shape != shape or found.dtype != np.uint64:
            raise Unfit(f"the view of {self.view.observer} holds no {name} of {line['kind']}, or others")
        return found


@dataclass
class _Round:
    session: int = -1
    deal: dict[str, Any] | None = None
    shares: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    phases: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Noise:
    """One member's own noise: all tests, and each part of the run alone."""

    evidence: NoiseEvidence = field(default_factory=lambda: NoiseEvidence(cell=_CELL, limit=0.0))
    parts: dict[str, VarianceTest] = field(default_factory=dict)

    def add(self, part: str, noise: Floats, std: float) -> None:
        self.evidence.add(noise.reshape(1, -1), std)
        self.parts.setdefault(part, VarianceTest(0.0)).add(noise.reshape(1, -1) / std)

    def judge(self, levels: Mapping[str, float]) -> list[Outcome]:
        outcomes = self.evidence.judge(levels)
        tried = {part: test.judge(levels[PARTS] / len(self.parts)) for part, test in self.parts.items()}
        short = [part for part, outcome in tried.items() if outcome.verdict is Verdict.VIOLATED]
        if short:
            words = (
                f"less noise was added than claimed ({len(short)} of {len(tried)} parts, {short[0]} first)"
            )
            outcomes.append(Outcome(PARTS, Verdict.VIOLATED, words))
        if self.evidence.variance.excessive(levels[EXCESS]):
            outcomes.append(Outcome(EXCESS, Verdict.VIOLATED, "what was added is not the declared noise"))
        return outcomes


class OwnNoise:
    """Takes every opening of a replay, and says what each member's own noise in it was.

    Args:
        source: The run.
        shares: Whose noise each promise rests on.
        addresses: The members' addresses, in the order of the protocol.
        keys: The dealer's keys of all sessions, in order.

    Attributes:
        strange: Member -> what it brought that is not its own: scores, labels or rows.
        broken: What no proof allows and was opened all the same; empty if nothing.
        unfit: Member -> what of its evidence does not fit together.
    """

    def __init__(
        self, source: Source, shares: MemberNoise, addresses: Sequence[str], keys: Sequence[bytes]
    ) -> None:
        self._shares, self._keys = shares, keys
        self.members = shares.members
        places = {address: place for place, address in enumerate(addresses)}
        self._books = [_Book(View(source.view_folder(name)), places) for name in self.members]
        self._sessions = [0] * len(self.members)
        self._noise = {name: _Noise() for name in self.members}
        self._judged: dict[str, list[Outcome]] = {}
        self.strange: dict[str, str] = {}
        self.unfit: dict[str, str] = {}
        self.broken = ""

    @classmethod
    def of(cls, source: Source, shares: MemberNoise | None, hosts: Mapping[str, str]) -> OwnNoise | None:
        """Of a run whose members may cheat, if the dealer's keys and all views are here; else None."""
        if shares is None or not set(shares.addresses) <= set(hosts):
            return None
        keys = [
            np.asarray(seen.fields["values"], np.uint8).tobytes()
            for path in sorted((source.files.path / "journal").glob("*"))
            if path.name not in shares.members and path.is_dir()
            for seen in View(path).messages(LOCK)
        ]
        here = [name for name in shares.members if source.view_folder(name).is_dir()]
        if not keys or len(set(here)) < len(shares.members):
            return None
        return cls(source, shares, shares.addresses, keys)

    # -- what the replay makes ------------------------------------------------------------------------------

    def begin(self, machine: ProofMachine) -> None:
        """Takes what a member brings to a session: are its rows and labels what it opened?"""
        member = machine.address
        name, session = self.members[member], self._sessions[member]
        self._sessions[member] += 1
        claim, operand, labels = machine.brought
        told = claim.pack_labels(labels.astype(np.uint64)).reshape(-1)[: claim.labels]
        try:
            for other in range(len(self.members)):
                if other == member:
                    continue
                rows, opened = self._opened(member, other, session, claim)
                if not is_as_proved(claim, rows, opened):
                    self.broken = f"{name} opened rows or labels that no proof allows"
                if not np.array_equal(rows, operand) or not np.array_equal(opened, told):
                    what = "labels" if np.array_equal(rows, operand) else "rows"
                    self.strange.setdefault(name, f"its {what} are not those of its table")
        except Unfit as wrong:
            self.unfit.setdefault(name, str(wrong))

    def take(self, machine: CheckedRound, total: Floats | None, part: str) -> None:
        """Takes one opening: what the member brings to it, and the total that it kept."""
        brought = machine.brought
        name = self.members[brought.member]
        try:
            kept = self._kept(brought)
            self._check(brought, kept)
            noise = own_noise(brought, kept, total)
        except Unfit as wrong:
            self.unfit.setdefault(name, str(wrong))
            return
        for target, words in noise.items():
            std = brought.protocol.share_stds[target][brought.member]
            if std and words.size:
                self._noise[name].add(part, words.astype(np.float64), float(std))

    def _opened(self, member: int, other: int, session: int, claim: ProofClaim) -> tuple[Signed, Elements]:
        """Rows and labels of a member as another one received them, without their masks."""
        book, seed = self._books[other], self._seed(member, session)
        line = _line(book.operands.get((member, other), []), session)
        words = book.words(line, "words", claim.operand_shape)
        return opened_rows(claim, seed, words, book.words(line, "labels", claim.labels_shape))

    def _seed(self, member: int, session: int, number: int = SETUP_ROUND) -> bytes:
        """A member's seed, unlocked; its own view has the digest."""
        book, name = self._books[member], self.members[member]
        line = _line(book.seeds, session) if number == SETUP_ROUND else book.round(number).deal
        if line is None or session >= len(self._keys):
            raise Unfit(f"there is no seed of {name} in round {number}")
        locked = book.view.array(line, "locked").tobytes()
        seed = lock(self._keys[session], locked, round=number, member=member)
        if "seed" not in line["sketches"]:
            raise Unfit(f"the view of {name} holds no digest of its seeds")
        if hashlib.sha256(seed).hexdigest() != book.view.sketch(line, "seed").digest:
            raise Unfit(f"the dealer's key does not open the seeds that {name} received")
        return seed

    def _kept(self, brought: Brought) -> Kept:
        """What the member's own view says of a round."""
        me, number, protocol = brought.member, brought.round, brought.protocol
        book, others = self._books[me], [m for m in range(len(self.members)) if m != me]
        found = book.round(number)
        ends = [(me, m) for m in others] + [(m, me) for m in others]
        if found.deal is None or not set(ends) <= found.shares.keys():
            raise Unfit(f"its view does not hold round {number}")
        blinded = protocol.count(brought.rows), protocol.outputs
        shares = {
            (j, m): (
                book.words(found.shares[j, m], "blinded", blinded),
                book.words(found.shares[j, m], "product", protocol.total_shape(m)),
            )
            for j, m in ends
        }
        masked = {m: _line(book.operands.get((m, me), []), found.session) for m in others}
        return Kept(
            seed=self._seed(me, found.session, number),
            correction=book.words(found.deal, "product", protocol.total_shape(me)),
            masked={
                m: book.words(line, "words", protocol.claims[m].operand_shape) for m, line in masked.items()
            },
            blinded={j: words for (j, _), (words, _) in shares.items()},
            sent={m: shares[me, m][1] for m in others},
            received={m: shares[m, me][1] for m in others},
        )

    def _check(self, brought: Brought, kept: Kept) -> None:
        """Whether others received what it says that it sent, of its own scores, and residuals are bounded."""
        me, number = brought.member, brought.round
        name, found = self.members[me], self._books[me].round(number)
        for other, product in kept.sent.items():
            theirs = self._books[other].rounds.get(number, _Round()).shares.get((me, other))
            if theirs is None or not np.array_equal(
                self._books[other].view.array(theirs, "product"), product
            ):
                raise Unfit(f"{self.members[other]} received other products than {name} sent")
        seeds = {m: self._seed(m, found.session, number) for m in range(len(self.members))}
        if residual_excess(brought.protocol, seeds, kept.opened) > 1 + 1e-9:
            self.broken = "a residual was opened that is larger than any score and label give"
        if brought.phase is not None and not self._tells_scores(brought, kept.seed):
            self.strange.setdefault(name, "its scores are not those of its model")

    def _tells_scores(self, brought: Brought, seed: bytes) -> bool:
        """Whether phases that others received are those of the member's model; replay may round otherwise."""
        words = phases_of(brought, seed).reshape(-1)
        digest = hashlib.sha256(words.tobytes()).hexdigest()
        for other, book in enumerate(self._books):
            line = book.round(brought.round).phases.get((brought.member, other))
            if line is None or other == brought.member:
                continue
            theirs = book.view.sketch(line, "words")
            if theirs.digest == digest:
                continue
            apart = (words[sampled(theirs.digest, words.size)] - theirs.sample).view(np.int32)
            if np.abs(apart.astype(np.int64)).max(initial=0) > _SAME_PHASE:
                return False
        return True

    # -- what it says ---------------------------------------------------------------------------------------

    def judge(self, levels: Mapping[str, Mapping[str, float]]) -> None:
        """Judges every member's own noise; `levels` has one for each member and each of `TESTS`."""
        self._judged = {
            name: [outcome._replace(part=f"noise of {name}") for outcome in noise.judge(levels[name])]
            for name, noise in self._noise.items()
        }

    def conclude(self, owner: str, observer: str) -> Finding:
        """The verdict on one owner's promise against one observer: by the noise that it rests on."""
        promise = f"{owner} against {observer}"
        if self.broken:
            return Finding(promise=promise, path=PATH, verdict=Verdict.VIOLATED, reasons=(self.broken,))
        short = {name: said for name in self.members if (said := self._short(name))}
        other = {name: said for name in self.members if name not in short and (said := self._other(name))}
        larger = self._grows(owner, observer, short)
        if larger > 1:
            words = "; ".join(f"noise of {name}: {said}" for name, said in short.items())
            return Finding(promise=promise, path=PATH, verdict=Verdict.VIOLATED, reasons=(words,))
        own = self.strange.get(owner, "")
        if own or self._grows(owner, observer, short | other) > 1:
            words = f"{owner}: {own}" if own else "; ".join(f"{n}: {said}" for n, said in other.items())
            return Finding(promise=promise, path=PATH, verdict=Verdict.NOT_TESTED, reasons=(words,))
        rests = [name for name in self.members if self._grows(owner, observer, (name,)) > 1]
        finding = conclude(promise, PATH, self._among(rests))
        harmless = [f"{name}: {said}; it does not rest on that" for name, said in self._deviations.items()]
        return replace(finding, tested=(*finding.tested, *harmless))

    @property
    def _deviations(self) -> dict[str, str]:
        """Member -> what it did otherwise than the protocol has it."""
        found = {}
        for name in self.members:
            said = [self._short(name), self._other(name), self.strange.get(name, "")]
            if any(said):
                found[name] = "; ".join(filter(None, said))
        return found

    def _grows(self, owner: str, observer: str, absent: Collection[str]) -> float:
        """By what factor mu grows without the noise of some; rounding apart."""
        factor = self._shares.remaining(owner, observer, absent) if absent else 1.0
        return factor if factor > 1 + 1e-9 else 1.0

    def _among(self, names: Sequence[str]) -> list[Outcome]:
        """Outcomes of several members' noise; a test that one of them could not be put to was not made."""
        found = [outcome for name in names for outcome in self._judged[name]]
        blind = [o for o in found if o.test == VARIANCE and o.verdict is Verdict.NOT_TESTED]
        return blind + [o for o in found if o.test != VARIANCE] if blind else found

    def _short(self, name: str) -> str:
        """What shows that noise is missing or not independent; empty if nothing does.

        What a member adds besides its noise is not independent either: that alone shows nothing.
        """
        found = [o for o in self._judged[name] if o.verdict is Verdict.VIOLATED]
        if name in self.unfit:
            return ""
        if any(outcome.test == EXCESS for outcome in found):
            found = [outcome for outcome in found if outcome.test in _LESS]
        return ", ".join(dict.fromkeys(outcome.reason for outcome in found))

    def _other(self, name: str) -> str:
        """What keeps a member's noise from being tested."""
        if name in self.unfit:
            return self.unfit[name]
        excess = any(o.test == EXCESS and o.verdict is Verdict.VIOLATED for o in self._judged[name])
        return "its products are not what its shares and its noise give" if excess else ""
