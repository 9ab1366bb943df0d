"""Members that do what harms nobody else: an honest owner's promise holds by its own noise, and only then."""

import numpy as np
import pytest

from securevfl import Plan, audit, train
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.data import VerticalData
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import LOCK
from securevfl.privacy.views import View
from securevfl.protocols.contract import Envelope
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.messages import Bits, CheckedOperand
from securevfl.protocols.sealed.proof import Prover, Secrets, Verifier
from securevfl.protocols.sealed.session import ProofMachine
from securevfl.protocols.sealed.unlocked import lock

COLUMNS, EPOCHS = 12, 6


def _data(parties=2, records=300):
    generator = np.random.default_rng(0)
    blocks = [generator.uniform(-1, 1, (records, COLUMNS)) for _ in range(parties)]
    labels = (sum(block[:, 0] for block in blocks) > 0).astype(int)
    return VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), task="binary", seed=0)


# -- what members do ----------------------------------------------------------------------------------------


class Lying(CheckedRound):
    """Any phases at all."""

    def _start(self):
        self._phase = np.random.default_rng(self.round).integers(0, 1 << 32, self._phase.shape, np.uint32)
        return super()._start()


class Wrong(CheckedRound):
    """Products that are off by far more than the noise, whose own noise is as it should be."""

    def _share_for(self, member, deal):
        share = super()._share_for(member, deal)
        share.product[...] += np.uint64(1 << 56)
        return share


class Silent(CheckedRound):
    """No noise."""

    def _start(self):
        self._noise = {m: np.zeros_like(words) for m, words in self._noise.items()}
        return super()._start()


class Repeating(CheckedRound):
    """The same noise in all rounds."""

    def _start(self):
        kept = self._session.__dict__.setdefault("repeated", dict(self._noise))
        self._noise = dict(kept)
        return super()._start()


class Halved(CheckedRound):
    """Noise of half the size."""

    def _start(self):
        self._noise = {m: (w.view(np.int64) // 2).view(np.uint64) for m, w in self._noise.items()}
        return super()._start()


class Biased(CheckedRound):
    """Noise around something else than 0."""

    def _start(self):
        self._noise = {m: words + np.uint64(1 << 52) for m, words in self._noise.items()}
        return super()._start()


class Unsent(CheckedRound):
    """Its own noise is left out of the own total alone, where nobody else ever sees it."""

    def _open(self, deal):
        return super()._open(deal) - self._noise[self.address]


def _rounds(monkeypatch, **kinds):
    """Makes members' rounds of other kinds: m0=..., m1=..."""
    for kind in kinds.values():  # whoever cheats has changed the shipped machine
        kind.__module__ = CheckedRound.__module__
    honest = CheckedParty.round

    def round_(self, **given):
        machine = honest(self, **given)
        machine.__class__ = kinds.get(f"m{self.index}", CheckedRound)
        return machine

    monkeypatch.setattr(CheckedParty, "round", round_)


def _other_rows(monkeypatch, member):
    """Rows that are others' of the same length: permuted records."""
    honest = SealedMember._operand
    monkeypatch.setattr(
        SealedMember,
        "_operand",
        lambda self: honest(self)[:, ::-1].copy() if self.index == member else honest(self),
    )


def _other_labels(monkeypatch, member):
    honest = SealedMember._session_labels
    monkeypatch.setattr(
        SealedMember,
        "_session_labels",
        lambda self: 1 - honest(self) if self.index == member else honest(self),
    )


class TwoFaced(ProofMachine):
    """Opens other rows to the last member than to the rest, and proves both."""

    def _open(self, seed):
        sent = super()._open(seed)
        other = Secrets(self._claims[self.address], seed.seed)
        self._second = Prover(other, self._operand[:, ::-1].copy(), self._labels.astype(np.uint64))
        last = max(self._others)
        return [
            Envelope(e.sender, last, self._as(e.message, words=self._second.opened()))
            if e.receiver == last and isinstance(e.message, CheckedOperand)
            else e
            for e in sent
        ]

    @staticmethod
    def _as(message, **changes):
        return type(message)(**{**vars(message), **changes})

    def _take_coin(self, message):
        sent, last = super()._take_coin(message), max(self._others)
        name = self._seed.session
        for place, envelope in enumerate(sent):
            if envelope.receiver != last:
                continue
            if isinstance(envelope.message, Bits):
                words = self._second.opened_bits(message.coin, name)
            else:
                pair = self._seed.pairs[last * 16 : (last + 1) * 16]
                words = self._second.prove(pair, self._coins[0].coin, message.coin, name)
            sent[place] = Envelope(envelope.sender, last, self._as(envelope.message, words=words))
        return sent


def _two_faced(monkeypatch, member):
    honest = CheckedParty.setup

    def setup(self):
        machine = honest(self)
        if self.index == member and self.operand.any():
            TwoFaced.__module__ = ProofMachine.__module__
            machine.__class__ = TwoFaced
        return machine

    monkeypatch.setattr(CheckedParty, "setup", setup)


def _plan(**fields):
    flat = {"algorithm": "sealed", "model": "linear", "epochs": EPOCHS, "epsilon": 8.0, "record_views": True}
    return Plan.from_flat({**flat, "adversary": "malicious", **fields})


def _verdicts(tmp_path, monkeypatch, data, **fields):
    """(owner, observer) -> cell of the joint audit of a run; what was changed is put back before it."""
    train(data, _plan(record_words=True, **fields), tmp_path / "run")
    monkeypatch.undo()
    return _audit(tmp_path / "run", data)


def _audit(run, data):
    owners = audit(run, attacks="none", canaries=-1, data=data).content["owners"]
    return {(o, w): cell for o, found in owners.items() for w, cell in found["observers"].items()}


def _said(cells):
    return {pair: cell["verdict"] for pair, cell in cells.items()}


# -- harmless ones ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (CheckedRound, "holds"),
        (Lying, "not tested"),
        (Wrong, "not tested"),
        (Biased, "not tested"),
        (Silent, "violated"),
        (Repeating, "violated"),
    ],
)
def test_an_honest_owners_promise_holds_whatever_the_other_member_does(tmp_path, monkeypatch, kind, own):
    _rounds(monkeypatch, m1=kind)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert _said(cells) == {("p0", "p1"): "holds", ("p1", "p0"): own}, cells["p0", "p1"]["reasons"]
    named = [said for said in cells["p0", "p1"]["tested"] if "noisy totals: p1: " in said]
    assert len(named) == (kind is not CheckedRound)


def test_rows_that_are_not_its_own_harm_nobody_else(tmp_path, monkeypatch):
    _other_rows(monkeypatch, 1)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert _said(cells) == {("p0", "p1"): "holds", ("p1", "p0"): "not tested"}
    assert "its rows are not those of its table" in cells["p1", "p0"]["reasons"][0]


def test_labels_that_are_not_its_own_harm_nobody_else(tmp_path, monkeypatch):
    _other_labels(monkeypatch, 0)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert _said(cells) == {("p1", "p0"): "holds", ("p0", "p1"): "not tested"}
    assert "its labels are not those of its table" in cells["p0", "p1"]["reasons"][0]


def test_different_rows_for_different_members_harm_nobody_else(tmp_path, monkeypatch):
    _two_faced(monkeypatch, 1)
    cells = _verdicts(tmp_path, monkeypatch, _data(3))
    assert "holds" not in (_said(cells)["p1", "p0"], _said(cells)["p1", "p2"])
    assert {said for pair, said in _said(cells).items() if pair[0] != "p1"} == {"holds"}


def test_of_three_members_that_add_alike_the_one_without_noise_is_named(tmp_path, monkeypatch):
    _rounds(monkeypatch, m1=Silent)
    cells = _verdicts(tmp_path, monkeypatch, _data(3))
    assert _said(cells)["p0", "p1"] == _said(cells)["p2", "p1"] == "holds"
    assert _said(cells)["p1", "p0"] == _said(cells)["p1", "p2"] == "violated"
    assert "noise of p1" in cells["p1", "p0"]["reasons"][0]


# -- faults at the honest owner, under a deviation of the other ----------------------------------------------


@pytest.mark.parametrize(
    ("fault", "deviation"),
    [
        *((fault, Wrong) for fault in (Silent, Repeating, Halved, Unsent)),
        (Halved, Lying),
        *(pytest.param(fault, Lying, marks=pytest.mark.slow) for fault in (Silent, Repeating, Unsent)),
    ],
)
def test_missing_noise_of_the_owner_is_seen_under_a_harmless_deviation(
    tmp_path, monkeypatch, fault, deviation
):
    _rounds(monkeypatch, m0=fault, m1=deviation)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert cells["p0", "p1"]["verdict"] == "violated"
    assert "noise of p0" in " ".join(cells["p0", "p1"]["reasons"])


def test_another_sigma_in_the_ledger_is_seen_under_a_harmless_deviation(tmp_path, monkeypatch):
    _rounds(monkeypatch, m1=Lying)
    honest = Gate.open_totals

    def open_totals(self, machine, **given):
        given["sigma"] *= 2 if self.owner == "p0" else 1
        return honest(self, machine, **given)

    monkeypatch.setattr(Gate, "open_totals", open_totals)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert cells["p0", "p1"]["verdict"] == "violated"


def test_rows_that_no_proof_allows_are_seen_though_nobody_checked_the_proof(tmp_path, monkeypatch):
    monkeypatch.setattr(Verifier, "check", lambda self, **given: None)
    honest = Prover.__init__

    def init(self, secrets, operand, labels):
        honest(self, secrets, operand, labels)
        if secrets.claim.prover == 1 and secrets.claim.width:
            self._rows[0, :] = 1 << 15

    monkeypatch.setattr(Prover, "__init__", init)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert cells["p0", "p1"]["verdict"] == "violated"
    assert "no proof allows" in " ".join(cells["p0", "p1"]["reasons"])


class Shifting(CheckedRound):
    """A residual that is no score's."""

    def _share_residual(self, deal):
        super()._share_residual(deal)
        self._blinded[7] = FIELD.add(self._blinded[7], 1 << 36)


def test_a_residual_that_is_too_large_is_seen_though_nobody_checked_the_tag(tmp_path, monkeypatch):
    _rounds(monkeypatch, m1=Shifting)
    monkeypatch.setattr(CheckedRound, "_verify", lambda self: None)
    cells = _verdicts(tmp_path, monkeypatch, _data())
    assert cells["p0", "p1"]["verdict"] == "violated"
    assert "larger than any score and label give" in " ".join(cells["p0", "p1"]["reasons"])


# -- evidence that is missing or wrong -----------------------------------------------------------------------


def test_a_key_that_is_not_the_dealers_opens_nothing(tmp_path, monkeypatch):
    data = _data()
    assert set(_said(_verdicts(tmp_path, monkeypatch, data)).values()) == {"holds"}
    arrays = tmp_path / "run" / "journal" / "dealer" / "arrays.bin"
    content = bytearray(arrays.read_bytes())
    arrays.write_bytes(content[:-33] + bytes([content[-33] ^ 1]) + content[-32:])
    cells = _audit(tmp_path / "run", data)
    assert set(_said(cells).values()) <= {"not tested", "holds"} and "not tested" in _said(cells).values()


@pytest.mark.parametrize("words", [False, True])
def test_no_seed_is_kept_in_any_form_unless_words_are_asked_for(tmp_path, monkeypatch, words):
    """Every seed that a dealer drew, and its key, is searched for in all files of the run."""
    drawn, locked = set(), set()

    def noting(key, seed, **where):
        drawn.update((key, seed))
        locked.add(found := lock(key, seed, **where))
        return found

    monkeypatch.setattr("securevfl.protocols.sealed.checked_dealer.lock", noting)
    train(_data(), _plan(record_words=words), tmp_path / "run")
    keys = [*View(tmp_path / "run" / "journal" / "dealer").messages(LOCK)] if words else []
    content = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    kept = {each for each in drawn if each in content or each.hex().encode() in content}
    assert len(drawn) > 2 * EPOCHS and kept == {each.fields["values"].tobytes() for each in keys}
    assert {each in content for each in locked} == {words} and bool(keys) == words
