"""Members that cheat, for tests on real machines: a prover of anything, rounds with shifted residuals."""

from __future__ import annotations

import numpy as np
import pytest

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.driver import Driver
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.proof import Prover

P = FIELD.p
RECORDS, WIDTH, STD = 64, 8, 1 << 49  # an epsilon of 1 or so: sigma 66 at 42 fraction bits is 2^48


def huge_rows():
    """Column c holds 2^(28 + k) for its k-th record, k = 0..7: residuals of +-2^27 fill separate bits."""
    rows = np.zeros((WIDTH, RECORDS), np.int64)
    for record in range(RECORDS):
        rows[record // 8, record] = 1 << (28 + record % 8)
    return rows


def read_labels(total):
    """Labels from totals over `huge_rows` at zero scores: sums of +-2^(55 + k), k = 0..7, and noise."""
    found = []
    words = np.rint(total[:, 0] * 2.0**42).astype(object)
    for word in words:
        # sum (1 - 2 y_k) 2^(55 + k) = 2^63 - 2^55 - sum y_k 2^(56 + k)
        packed = round(((1 << 63) - (1 << 55) - int(word)) % (1 << 64) / (1 << 56)) % 256
        found += [packed >> k & 1 for k in range(8)]
    return np.array(found)


def victims(federation):
    federation.scores = [np.zeros((RECORDS, 1)) for _ in range(2)]
    return federation


class Liar(Prover):
    """Proves whatever it likes as well as anybody could: exact arithmetic on any numbers."""

    rows = labels = None

    def __init__(self, secrets, operand, labels):
        claim = secrets.claim
        honest = np.zeros((claim.width, claim.records), np.int32)
        if claim.groups:
            honest[np.cumsum((0, *claim.groups[:-1]))] = 1
        super().__init__(secrets, honest, labels)
        if self.rows is not None:
            self._rows = self.rows(claim, secrets)
        if self.labels is not None:
            self._labels = claim.pack_labels(self.labels.astype(np.uint64))

    def opened_bits(self, coin, session):
        claim = self._claim
        if not claim.blocks:
            return super().opened_bits(coin, session)
        signs = [
            claim.projections(coin, session, block).astype(np.int64) for block in range(len(claim.blocks))
        ]
        each = zip(signs, claim.blocks, strict=True)
        numbers = [sign.astype(object) @ self._rows[:, part].T.astype(object) for sign, part in each]
        numbers = np.stack(numbers).reshape(-1) + (1 << (2 * claim.half - 1))
        whole = np.array([int(n) % (1 << 2 * claim.half) for n in numbers])  # a lie where they do not fit
        both = np.concatenate([whole & ((1 << claim.half) - 1), whole >> claim.half])
        self._bits = (both[None] >> np.arange(claim.half)[:, None]) & 1
        return claim.field.add(self._bits.view(np.uint64), self._secrets.bits)

    def prove(self, pair, first, second, session):
        claim, words = self._claim, []
        for name, packing, _ in claim.parts:
            values, weights, tops = self._columns(name, pair, second, session)
            if name == "line":
                plain = packing.line_values(values, tops, weights)
            else:
                plain = squares(packing, values, tops, weights, bits=name != "norm")
            masked = claim.field.add(plain, self._secrets.mask(pair, name, packing))
            words.append(masked if name in ("norm", "line") else packing.without_zeros(masked))
        return np.concatenate(words)


def squares(packing, values, tops, weights, *, bits):
    rows = np.concatenate([tops[None].astype(object), values.astype(object) % P])
    out = []
    for x in range(2 * packing.length + 1):
        at = np.array(packing.basis(packing.length, x), object) @ rows % P
        out.append(int((weights.astype(object) * (at * at - (at if bits else 0))).sum() % P))
    return np.array(out, np.uint64)


def lie(federation, member, *, rows=None, labels=None):
    """The member's set-up machine with a prover that lies."""
    machine = federation.parties[member].setup()
    made = type("Made", (Liar,), {"rows": staticmethod(rows) if rows else None, "labels": labels})
    machine._make_prover = lambda secrets: made(secrets, machine._operand, machine._labels.astype(np.uint64))
    return machine


def run_setup(federation, liar, machine, tamper=None):
    machines = [machine if m == liar else party.setup() for m, party in enumerate(federation.parties)]
    drive([federation.dealer.session(), *machines], tamper)


class Tampering(Driver):
    tamper = None

    def step(self):
        if self.tamper is not None:
            self.pending[0] = self.tamper(self.pending[0])
        super().step()


def drive(machines, tamper=None):
    driver = Tampering({machine.address: machine for machine in machines})
    driver.tamper = tamper
    driver.start()
    driver.run()


def caught(federation, liar, how, **lies):
    with pytest.raises(Deviation, match=how) as found:
        run_setup(federation, liar, lie(federation, liar, **lies))
    assert found.value.member == liar
    for member, party in enumerate(federation.parties):
        if member != liar:
            with pytest.raises(ProtocolError, match="no verified session"):
                party.round(round=0, scores=federation.scores[member])


class Shifting(CheckedRound):
    """Adds an error to its own residual share, before signing and sending it, and uses it itself."""

    error, record = 1, 3

    def _share_residual(self, deal):
        super()._share_residual(deal)
        shifted = self._blinded.copy()
        shifted[self.record] = FIELD.add(shifted[self.record], self.error % P)
        self._blinded = shifted

    def _verify(self):
        """Does not mind."""


def cheated_round(federation, liar, kind=CheckedRound, tamper=None, number=0, rows=None, **changes):
    """One round in which a member has a machine of another kind; what honest ones have is noted."""
    machines = federation.machines(number, rows)
    machines[liar].__class__ = kind
    for name, value in changes.items():
        setattr(machines[liar], name, value)
    try:
        drive([federation.dealer.iteration(round=number, rows=rows), *machines], tamper)
    finally:
        honest = [machine for m, machine in enumerate(machines) if m != liar]
        unverified = all(machine._total is None for machine in honest)
        federation.honest, federation.unverified = honest, unverified
    return machines


def nothing_is_left(federation, liar):
    """No honest machine has a total, keys or noise; the session is gone at whoever noticed."""
    assert federation.unverified
    for machine in federation.honest:
        with pytest.raises(ProtocolError, match="not verified"):
            machine.result()
    burnt = [m for m, party in enumerate(federation.parties) if m != liar and is_burnt(party)]
    assert burnt


def is_burnt(party):
    session = party._proof.session
    erased = not session.masked and not session.labels.size and session.constants is None
    return session.burnt and session.key == 0 and erased
