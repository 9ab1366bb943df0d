"""Ways to cheat in sealed training, for tests."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

import numpy as np

from securevfl.errors import ProtocolError
from securevfl.network.transport import Transport
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.proof import Prover
from securevfl.protocols.sealed.series import Waves


class Shifting(CheckedRound):
    """From its second iteration on it adds an error to one residual, and does not mind the check."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if self.round >= 1:
            shifted = self._blinded.copy()
            shifted[7] = FIELD.add(shifted[7], 1 << 46)
            self._blinded = shifted

    def _verify(self):
        pass


class Figures(CheckedRound):
    """An error in the waves of the first test record alone: training is as it should be."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if isinstance(self._protocol.series, Waves):
            shifted = self._blinded.copy()
            shifted[0] = FIELD.add(shifted[0], 1 << 44)
            self._blinded = shifted

    def _verify(self):
        pass


class Late(Shifting):
    """Opens what makes the check pass once it has seen the others' words."""

    __module__ = CheckedRound.__module__

    def _advance(self):
        if self._own and self.address not in self._openings and self.round >= 1:
            if len(self._openings) < len(self._others):
                return []
            others = sum(int(opening.word[0]) for opening in self._openings.values())
            self._own = self._own[0], -others % FIELD.p
        return super()._advance()


class Twice(CheckedRound):
    """Commits a second time, as if the connection had been lost."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _take_coin(self, message):
        return super()._take_coin(message) * (2 if self.round >= 1 else 1)


class Again(Shifting):
    """Cuts its connections once it knows the coin, and asks for another one that its error may pass."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine
    transports: ClassVar[list] = []

    def _take_coin(self, message):
        if self.round < 1:
            return super()._take_coin(message)
        for transport in self.transports:
            for stream in transport._streams.values():
                stream.cancel()
        return [self._ready(1), *super()._take_coin(message)]


class Dies(CheckedRound):
    """Its process ends once it knows the coin."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _take_coin(self, message):
        if self.round < 1:
            return super()._take_coin(message)
        os._exit(7)


class Equivocates(CheckedRound):
    """Tells the last member another residual than the others, and signs both."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _share_for(self, member, deal):
        share = super()._share_for(member, deal)
        if self.round < 1 or member != max(self._others):
            return share
        words = share.blinded.copy()
        words[3] = FIELD.add(words[3], 1)
        digest = self._digest(self.address, words)
        signature = self._session.signer.sign(self._signed(self.address, digest))
        return dataclasses.replace(share, blinded=words, signature=signature)

    def _verify(self):
        pass


class Blames(Shifting):
    """Shows the first of the others what the last one signed in the iteration before."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine
    kept: ClassVar[dict] = {}

    def _take_coin(self, message):
        sent, blamed = super()._take_coin(message), max(self._others)
        old = self.kept.get(self._session.name)
        self.kept[self._session.name] = self._seen[blamed]
        if old is None:
            return sent
        parts = [self._seen[m] if m != blamed else old for m in range(self._protocol.members)]
        shown = dataclasses.replace(sent[0].message, seen=b"".join(parts))
        return [dataclasses.replace(e, message=shown) if e.receiver != blamed else e for e in sent]


def too_long(prover):
    """Rows 32 times as long as declared; what would read labels is longer still, and caught alike."""
    if prover._claim.width:
        prover._rows = np.zeros(prover._claim.operand_shape, np.int64)
        prover._rows[0] = 1 << 19


def two_classes(prover):
    """A test record that counts in both classes: its waves would be read from the totals of an evaluation."""
    if prover._claim.groups:
        prover._rows[:2, 0] = 1


def one_unit(prover):
    """One row longer than declared by one unit."""
    prover._rows[:] = 0
    prover._rows[0] = prover._claim.bound
    prover._rows[0, 3] += 1


def label(prover):
    """A label that is 2."""
    prover._labels = prover._labels.copy()
    prover._labels[0, 0] = 2


class Products(CheckedRound):
    """Wrong products: the victim's total moves by what the cheater knows, far more than its noise."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _share_for(self, member, deal):
        share = super()._share_for(member, deal)
        return dataclasses.replace(share, product=share.product + np.uint64(1 << 56))


class Phases(CheckedRound):
    """Any phase at all in place of its scores: the series is bounded everywhere."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _start(self):
        drawn = np.random.default_rng(self.round).integers(0, 1 << 32, self._phase.shape, dtype=np.uint32)
        self._phase = drawn
        return super()._start()


class NoNoise(CheckedRound):
    """No noise of its own: others' protection never counted on it."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _start(self):
        self._noise = {m: np.zeros_like(words) for m, words in self._noise.items()}
        return super()._start()


class Reused(CheckedRound):
    """The same noise in every iteration."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    kept: ClassVar[dict] = {}

    def _start(self):
        self._noise = {m: self.kept.setdefault((m, w.shape), w) for m, w in self._noise.items()}
        return super()._start()


class Quits(CheckedRound):
    """Ends its part once it has its own total's shares, before it opens anything."""

    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _take_coin(self, message):
        if self.round >= 1:
            raise ProtocolError("enough")
        return super()._take_coin(message)


KINDS = {"shifting": Shifting, "late": Late, "too-long": too_long, "one-unit": one_unit, "label": label}
HARMLESS = {"products": Products, "phases": Phases, "no-noise": NoNoise, "reused-noise": Reused}
KINDS |= {
    "figures": Figures,
    "again": Again,
    "dies": Dies,
    **HARMLESS,
    "quits": Quits,
    "twice": Twice,
    "equivocates": Equivocates,
    "blames": Blames,
    "two-classes": two_classes,
}


def _watch_connections(replace):
    """Notes the transport of the clinic, which is the one that cheats in this way."""
    Again.transports.clear()
    honest = Transport.__init__

    def init(self, identity, **given):
        honest(self, identity, **given)
        if identity.name == "clinic":
            Again.transports.append(self)

    replace(Transport, "__init__", init)


def apply(kind, member, replace=setattr):
    """Makes a member cheat; `replace` sets an attribute of a class."""
    made = KINDS[kind]
    if isinstance(made, type):
        honest_round = CheckedParty.round

        def round_(self, **given):
            machine = honest_round(self, **given)
            if self.index == member:
                machine.__class__ = made
            return machine

        replace(CheckedParty, "round", round_)
        if made is Again:
            _watch_connections(replace)
        return
    honest_init = Prover.__init__

    def init(self, secrets, operand, labels):
        honest_init(self, secrets, operand, labels)
        if secrets.claim.prover == member:
            made(self)

    replace(Prover, "__init__", init)
