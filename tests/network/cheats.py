"""Ways to cheat in sealed training, for tests; run as a program, a whole process of securevfl that cheats.

python cheats.py KIND MEMBER join --config party.toml
"""

from __future__ import annotations

import sys

import numpy as np

from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.proof import Prover


class Shifting(CheckedRound):
    """From its second iteration on it adds an error to one residual, and does not mind the check."""

    def _share_residual(self, deal):
        super()._share_residual(deal)
        if self.round >= 1:
            shifted = self._blinded.copy()
            shifted[7] = FIELD.add(shifted[7], 1 << 46)
            self._blinded = shifted

    def _verify(self):
        pass


class Late(Shifting):
    """Opens what makes the check pass once it has seen the others' words."""

    def _advance(self):
        if self._own and self.address not in self._openings and self.round >= 1:
            if len(self._openings) < len(self._others):
                return []
            others = sum(int(opening.word[0]) for opening in self._openings.values())
            self._own = self._own[0], -others % FIELD.p
        return super()._advance()


def too_long(prover):
    """Rows 32 times as long as declared; what would read labels is longer still, and caught alike."""
    if prover._claim.width:
        prover._rows = np.zeros(prover._claim.operand_shape, np.int64)
        prover._rows[0] = 1 << 19


def one_unit(prover):
    """One row longer than declared by one unit."""
    prover._rows[:] = 0
    prover._rows[0] = prover._claim.bound
    prover._rows[0, 3] += 1


def label(prover):
    """A label that is 2."""
    prover._labels = prover._labels.copy()
    prover._labels[0, 0] = 2


KINDS = {"shifting": Shifting, "late": Late, "too-long": too_long, "one-unit": one_unit, "label": label}


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
        return
    honest_init = Prover.__init__

    def init(self, secrets, operand, labels):
        honest_init(self, secrets, operand, labels)
        if secrets.claim.prover == member:
            made(self)

    replace(Prover, "__init__", init)


if __name__ == "__main__":
    from securevfl.cli import main

    apply(sys.argv[1], int(sys.argv[2]))
    sys.argv[:] = ["securevfl", *sys.argv[3:]]
    main()
