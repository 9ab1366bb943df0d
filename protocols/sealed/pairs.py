"""What members share where nobody deals: a seed for each pair, and predictions by these alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from securevfl.errors import ProtocolError
from securevfl.protocols.contract import SETUP_ROUND, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.messages import PairSeed
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import WORDS, Operand, ScoreDeal
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.protocols.sealed.scoring import ScoreMachine, score_mask, tag_key
from securevfl.protocols.stream import KEY_BYTES, derive_key

Seeds = dict[int, bytes]


class PairedParty(SealedParty):
    """One member's secret state where no dealer is; every session has seeds of its own."""

    seeds: Seeds
    _open_session = False

    def setup(self) -> Machine:
        """Shares a seed with everybody and opens what masks hide; calling it again begins a new session."""
        self.masked, self.seeds, self._next_round, self._open_session = {}, {}, 0, False
        return PairSetup(self)

    def _receives_from(self) -> set[int]:
        """Whose masked operand it gets."""
        return set()

    def _open(self) -> list[Envelope]:
        """What is opened once all seeds are there."""
        return []

    def _check_session(self) -> None:
        if not self._open_session:
            raise ProtocolError("members have shared no seeds and operands; run the setup first")

    def _score_machine(self, words: Ring, **given: Any) -> ScoreMachine:
        """Masks of pairs without the label holder cancel; with it each member shares a mask of its own."""
        self._check_session()
        holder, agreed = self.protocol.label_holder, given["agreed"]
        seeds = {m: derive_key(s, purpose=f"sealed/scores/{given['round']}") for m, s in self.seeds.items()}
        nothing = np.empty(0, np.uint64)
        if self.index == holder:
            masks = [score_mask(seeds[m], agreed, words.shape) for m in self.others]
            total: Ring = np.asarray(np.sum(masks, axis=0, dtype=np.uint64))
            keys = b"".join(tag_key(seeds[m]) for m in self.others)
            deal = ScoreDeal(round=given["round"], seed=b"", words=total, keys=keys)
        else:
            for other in set(self.others) - {holder}:
                mask = score_mask(seeds[other], agreed, words.shape)
                words = words + mask if self.index < other else words - mask
            deal = ScoreDeal(round=given["round"], seed=seeds[holder], words=nothing, keys=b"")
        return PairScoreMachine(self.index, self.protocol, words, deal=deal, **given)


class PairScoreMachine(ScoreMachine):
    """Opens summed scores with masks that members have made themselves."""

    def __init__(self, *args: Any, deal: ScoreDeal, **given: Any) -> None:
        super().__init__(*args, **given)
        self._own = deal

    def _start(self) -> list[Envelope]:
        self._take_deal(self._own)
        return self._advance()


class PairSetup(SealedMachine):
    """The lower of two members draws their seed; then masked operands are opened."""

    def __init__(self, party: PairedParty) -> None:
        super().__init__(party.index, round=SETUP_ROUND)
        self._party = party
        self._seeds = {m for m in party.others if m < party.index}
        self._operands = party._receives_from()
        self._opened = False

    @property
    def done(self) -> bool:
        """Whether the own operand is out, and all seeds and operands are in."""
        return self._opened and not self._operands

    def _start(self) -> list[Envelope]:
        sent = []
        for other in self._party.others:
            if other > self.address:
                seed = self._party.seeds[other] = os.urandom(KEY_BYTES)
                sent.append(Envelope(self.address, other, PairSeed(round=self.round, seed=seed)))
        return sent + self._open()

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        match message:
            case PairSeed() if sender in self._seeds:
                if len(message.seed) != KEY_BYTES:
                    raise ProtocolError(f"{name_of(sender)} sends a seed of {len(message.seed)} bytes")
                self._party.seeds[sender] = message.seed
                self._seeds.discard(sender)
                return self._open()
            case Operand() if sender in self._operands:
                shape = self._party.protocol.operand_shape(sender, self._party.protocol.records)
                self._party.masked[sender] = WORDS.check(message.words, shape)
                self._operands.discard(sender)
                return self._concluded([])
        raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn in the setup")

    def _open(self) -> list[Envelope]:
        if self._seeds or self._opened:
            return []
        self._opened = True
        return self._concluded(self._party._open())

    def _concluded(self, sent: list[Envelope]) -> list[Envelope]:
        self._party._open_session = self.done
        return sent
