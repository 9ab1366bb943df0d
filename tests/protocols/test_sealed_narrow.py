"""Histograms in words of 32 bits: right to the last unit, uniform to whoever looks, and never wrapped."""

from __future__ import annotations

import numpy as np
import pytest
from test_sealed_views import is_uniform

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols import SealedDealer, SealedParty, SealedProtocol, drive
from securevfl.protocols.sealed import logistic_series
from securevfl.protocols.sealed.protocol import Operand, Share, narrow_fraction

SERIES = logistic_series()


def protocol_of(members=2, *, records=64, width=6, std=0, series=SERIES, **changes):
    fields = {
        "widths": (width,) * members,
        "static": (True,) * members,
        "clips": (1.0 + 2**-40,) * members,
        "label_holder": 0,
        "records": records,
        "batch": records,
        "outputs": 1 if series else 2,
        "series": series,
        "share_stds": ((std,) * members,) * members,
        "entry": 1.0,
        "fraction": narrow_fraction(records),
    }
    return SealedProtocol(**(fields | changes))


def one_hot(generator, columns, records):
    operand = np.zeros((columns, records), np.int32)
    operand[generator.integers(columns, size=records), np.arange(records)] = 1
    return operand


class Histograms:
    """A label histogram and, over the same masked operands, a residual histogram."""

    def __init__(self, members=2, *, columns=4, records=64, seed=0, std=0):
        generator = np.random.default_rng(seed)
        self.labels = (generator.random((records, 1)) < 0.3).astype(float)
        self.scores = [generator.standard_normal((records, 1)) * 2 for _ in range(members)]
        self.operands = [one_hot(generator, columns - m, records) for m in range(members)]
        self.first = protocol_of(members, records=records, series=None, std=std)
        self.second = protocol_of(members, records=records, std=std)
        self.parties = [SealedParty(self.first, m, operand=x) for m, x in enumerate(self.operands)]
        self.dealer = SealedDealer(self.first)
        self.sent = drive([p.setup() for p in self.parties], self.dealer.setup(), codec=self.first)

    def open(self, number, *, series):
        both = np.column_stack([self.labels, 1 - self.labels])
        machines = [
            party.round(
                round=number,
                scores=self.scores[m] if series else None,
                labels=None if m else (self.labels if series else both),
            )
            for m, party in enumerate(self.parties)
        ]
        self.sent += drive(machines, self.dealer.deal(round=number), codec=self.first)
        return [machine.result() for machine in machines]

    def go_on(self, places):
        self.parties = [party.continued(self.second) for party in self.parties]
        self.dealer = self.dealer.continued(self.second)
        for party in self.parties:
            for member, each in places.items():
                party.join(member, np.array(each))

    @property
    def residuals(self):
        return SERIES(sum(self.scores)) - self.labels


@pytest.mark.parametrize("members", [2, 3])
def test_both_histograms_over_operands_that_are_opened_once(members):
    run = Histograms(members)
    counts = run.open(0, series=False)
    for operand, found in zip(run.operands, counts, strict=True):
        assert (found == operand @ np.column_stack([run.labels, 1 - run.labels])).all()
    places = [0, 1, 1, 0]
    run.go_on({0: places})
    totals = run.open(1, series=True)
    joined = np.zeros((2, 4))
    joined[places, np.arange(4)] = 1
    for operand, found, by in zip(run.operands, totals, [joined, *map(np.eye, (3, 2))], strict=False):
        exact, records = by @ operand @ run.residuals, (by @ operand).sum(1, keepdims=True)
        # Every residual is off by the series' rounding and by half a unit of every member.
        assert (np.abs(found - exact) <= records * (SERIES.rounding + run.second.cutting / 2 + 1e-6)).all()
    assert sum(isinstance(e.message, Operand) for e in run.sent) == members * (members - 1)
    assert all(e.message.words.dtype == np.uint32 for e in run.sent if isinstance(e.message, Operand))


def test_what_members_drop_moves_a_residual_by_less_than_is_counted():
    """Exhaustive in the fractions: shares of 64 bits, two and three members, all of the ring's corners."""
    generator = np.random.default_rng(1)
    for members, cut in ((2, 14), (3, 7), (5, 19)):
        residual = generator.integers(-(2**28), 2**28, 4000)
        residual[:4] = [2**28, -(2**28), 0, -1]
        shares = generator.integers(0, 2**64, (members - 1, 4000), dtype=np.uint64)
        shares[:, 4:8] = np.uint64(2**64 - 1)
        last = residual.view(np.uint64) - shares.sum(0, dtype=np.uint64) + np.uint64(members << cut >> 1)
        found = sum((s >> np.uint64(cut)).astype(np.uint32) for s in (*shares, last)).view(np.int32)
        assert (np.abs(found - residual / 2**cut) <= members / 2).all()


def test_words_are_uniform_and_fresh_whatever_the_bins():
    """A coalition sees the operand once and every product under a pad of its own."""
    run = Histograms(records=2048, columns=4)
    run.go_on({})
    for number in range(1, 5):
        run.open(number, series=True)
    opened = [e.message for e in run.sent if e.sender == 0 and e.receiver == 1]
    operand = next(m.words for m in opened if isinstance(m, Operand))
    blinded = np.stack([m.blinded for m in opened if isinstance(m, Share)])
    assert is_uniform(operand) and is_uniform(blinded) and is_uniform(blinded[1:] - blinded[:-1])
    # Every record is in one bin: the sum over all bins, 1 before it was masked, is as uniform as each.
    assert not is_uniform(run.operands[0].astype(np.uint32))
    assert is_uniform(np.concatenate([operand.sum(0, dtype=np.uint32), (operand[1:] - operand[:-1]).ravel()]))


def test_the_largest_total_fits_and_one_more_is_refused():
    records = 500
    widest = protocol_of(records=records, width=1, std=2**20)
    everybody = np.ones((1, records), np.int32)
    parties = [SealedParty(widest, m, operand=everybody) for m in range(2)]
    dealer = SealedDealer(widest)
    drive([p.setup() for p in parties], dealer.setup())
    machines = [
        p.round(round=0, scores=np.full((records, 1), 9.0), labels=None if m else np.zeros((records, 1)))
        for m, p in enumerate(parties)
    ]
    drive(machines, dealer.deal(round=0))
    # Noise of two members, ten deviations, in the unit of the totals.
    off = 10 * 2**20 * np.sqrt(2) * widest.words.resolution
    for machine in machines:
        assert abs(float(machine.result()[0, 0]) - records) < 5 + off
    with pytest.raises(EncodingError, match="ring holds"):
        protocol_of(records=records, fraction=23)
    with pytest.raises(EncodingError, match="ring holds"):
        protocol_of(records=records, std=2**27)


def test_what_does_not_fit_short_words_is_refused():
    for changes in ({"static": (True, False)}, {"entry": np.inf}, {"checked": True}):
        with pytest.raises(InputError, match="32 bits"):
            protocol_of(**changes)
    with pytest.raises(EncodingError, match="0 and 1"):
        SealedParty(protocol_of(clips=(3.0, 3.0)), 0, operand=np.full((6, 64), -1, np.int32))
    with pytest.raises(InputError, match="shape"):
        SealedParty(protocol_of(), 0, operand=np.zeros((7, 64), np.int32))
    party = Histograms().parties[0]
    for places in ([0, 1], [0, 1, 2, 4], [0, -1, 1, 1]):
        with pytest.raises(ProtocolError, match="joins"):
            party.join(0, np.array(places))
    assert narrow_fraction(24_000) == 14
    assert narrow_fraction(2**20) is None
