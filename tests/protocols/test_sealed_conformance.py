"""Sealed rounds by a dealer, by the third member, by encryption: one conformance suite for all."""

import numpy as np
from sealed_conformance import SealedConformance
from sealed_federation import Federation, NoDealer
from test_sealed_encrypted import Pair


class TestDealt(SealedConformance):
    members = (2, 4)

    def made(self, members, **changes):
        return Federation(members, **changes)


class TestDealtChangingRows(SealedConformance):
    members = (2, 3)

    def made(self, members, **changes):
        return Federation(members, static=False, **changes)


class TestThirdDeals(SealedConformance):
    members = (3, 4)

    def made(self, members, **changes):
        return Federation(members, dealing="third", **changes)


class EncryptedPair(Pair):
    """With correlations for some rounds once it is set up."""

    dealer = NoDealer()

    def __init__(self, *, codec=False, std=0, **changes):
        super().__init__(std=std >> 10, **changes)  # totals have fewer bits

    def setup(self, choose=None):
        return super().setup(*range(4), choose=choose)

    def deliver(self, machines, pending):
        self.run(machines)

    def totals(self, number, choose=None):
        machines = self.machines(number)
        self.run(machines, choose)
        return [machine.result() for machine in machines]

    def check(self, totals):
        assert all(np.array_equal(total, self.exact(member)) for member, total in enumerate(totals))


class TestEncrypted(SealedConformance):
    members = (2,)

    def made(self, members, **changes):
        return EncryptedPair(**changes)
