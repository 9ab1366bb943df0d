"""A sealed federation whose members may cheat, in one process: real machines, real dealer, any order."""

from __future__ import annotations

import dataclasses

import numpy as np
from sealed_federation import Federation

from securevfl.protocols import DEALER, Envelope, drive
from securevfl.protocols.driver import Choose
from securevfl.protocols.sealed import CheckedDealer, CheckedParty, SealedProtocol, logistic_series


class CheckedFederation(Federation):
    """Like `Federation`, with proofs and tags; `cheat` wraps machines of one member."""

    def __init__(self, members: int = 2, *, groups=(), complement=False, labels=None, **settings) -> None:
        super().__init__(members, **settings)
        self.protocol = dataclasses.replace(self.protocol, checked=True, groups=groups, complement=complement)
        if labels is not None:
            self.labels = labels
        self.dealer = CheckedDealer(self.protocol)
        self.parties = [self.party(m) for m in range(members)]
        self.transcript: list[Envelope] = []

    @classmethod
    def of(cls, operands, labels, *, series="logistic", clip=None, std=0, **settings):
        """A federation of these operands and labels, the first member holding the latter."""
        self = cls.__new__(cls)
        members, records = len(operands), labels.shape[0]
        norms = [np.sqrt((each.astype(float) ** 2).sum(0).max(initial=1)) for each in operands]
        self.protocol = SealedProtocol(
            widths=tuple(len(each) for each in operands),
            static=(True,) * members,
            clips=tuple((clip or norm / 2**14) * (1 + 2.0**-40) for norm in norms),
            label_holder=0,
            records=records,
            batch=records,
            outputs=labels.shape[1],
            series=logistic_series() if series == "logistic" else series,
            share_stds=((std,) * members,) * members,
            checked=True,
            **settings,
        )
        generator = np.random.default_rng(0)
        self.static, self.codec, self.series = (True,) * members, False, self.protocol.series
        self.operands, self.labels = list(operands), labels
        self.scores = [generator.standard_normal(labels.shape) for _ in operands]
        self.dealer, self.transcript = CheckedDealer(self.protocol), []
        self.parties = [self.party(m) for m in range(members)]
        return self

    def party(self, member: int) -> CheckedParty:
        """A member of this federation."""
        return CheckedParty(
            self.protocol,
            member,
            operand=self.operands[member],
            labels=self.labels if member == self.protocol.label_holder else None,
        )

    def setup(self, choose: Choose | None = None) -> None:
        self.run([self.dealer.session(), *(party.setup() for party in self.parties)], choose)

    def run(self, machines, choose: Choose | None = None) -> None:
        """Drives machines, the dealer's among them, keeping what was sent."""
        codec = self.protocol if self.codec else None
        self.transcript += drive(machines, choose=choose, codec=codec)

    def machines(self, number: int, rows=None):
        chosen = slice(None) if rows is None else rows
        series = self.protocol.series is not None
        return [
            party.round(round=number, rows=rows, scores=self.scores[m][chosen] if series else None)
            for m, party in enumerate(self.parties)
        ]

    def totals(self, number: int = 0, rows=None, choose: Choose | None = None):
        machines = self.machines(number, rows)
        self.run([self.dealer.iteration(round=number, rows=rows), *machines], choose)
        return [machine.result() for machine in machines]

    def seen_by_dealer(self):
        """All that members told the dealer."""
        return [e for e in self.transcript if e.receiver == DEALER]


def one_hot(generator, sizes, records):
    """(sum of sizes, records): one 2^14 in every group."""
    out = np.zeros((sum(sizes), records), np.int32)
    start = 0
    for size in sizes:
        out[start + generator.integers(0, size, records), np.arange(records)] = 1 << 14
        start += size
    return out
