"""Two members that encrypt go on with rows that were sent once: histograms of labels, then of residuals."""

import numpy as np
import pytest
from test_sealed_narrow import one_hot
from test_sealed_views import is_uniform

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols import Envelope, SealedProtocol, drive
from securevfl.protocols.sealed import Kernel, party_of, residues
from securevfl.protocols.sealed.messages import EncryptedRows

PLACES = {0: [0, 1, 1, 0, 1], 1: [1, 0, 1]}
RECORDS = 40


def protocol_of(*, series=None, std=0, **changes):
    fields = {
        "widths": (40, 24),
        "static": (True, True),
        "clips": (1.0 + 2**-40,) * 2,
        "label_holder": 0,
        "records": RECORDS,
        "batch": RECORDS,
        "outputs": 1 if series else 2,
        "series": series,
        "share_stds": ((std, std), (std, std)),
        "entry": 1.0,
        "dealing": "encrypted",
    }
    return SealedProtocol(**fields | changes)


class Histograms:
    """A label histogram and, over the same ciphertexts, a residual histogram of joined bins."""

    def __init__(self, *, std=0, seed=0):
        rng = np.random.default_rng(seed)
        self.std = std
        self.labels = (rng.random((RECORDS, 1)) < 0.3).astype(float)
        self.scores = [rng.standard_normal((RECORDS, 1)) * 2 for _ in (0, 1)]
        self.one_hot = [one_hot(rng, len(PLACES[m]), RECORDS) for m in (0, 1)]
        self.first = protocol_of(std=std)
        self.parties = [party_of(self.first, m, operand=x << 14) for m, x in enumerate(self.one_hot)]
        self.sent = drive([party.setup() for party in self.parties], codec=self.first)

    def prepare(self, *numbers):
        self.sent += drive([p.prepare([(n, None) for n in numbers]) for p in self.parties], codec=self.first)

    def machines(self, number):
        both = np.column_stack([self.labels, 1 - self.labels])
        return [
            party.round(
                round=number,
                scores=self.scores[m] if party.protocol.series else None,
                labels=None if m else (self.labels if party.protocol.series else both),
            )
            for m, party in enumerate(self.parties)
        ]

    def totals(self, number):
        machines = self.machines(number)
        self.sent += drive(machines, codec=self.first)
        return [machine.result() for machine in machines]

    def go_on(self, places=PLACES):
        protocol = protocol_of(series=Kernel(), std=self.std)
        self.parties = [party.continued(protocol) for party in self.parties]
        for party in self.parties:
            for member, each in places.items():
                party.join(member, np.array(each))
        return self

    def joined(self, member):
        """The one-hot operand of the joined bins."""
        rows = np.zeros((max(PLACES[member]) + 1, RECORDS))
        np.add.at(rows, PLACES[member], self.one_hot[member])
        return rows

    def residuals(self):
        return Kernel().of(*self.scores) - self.labels


def test_both_histograms_over_rows_that_are_encrypted_once():
    run = Histograms()
    run.prepare(0)
    both = np.column_stack([run.labels, 1 - run.labels])
    for operand, found in zip(run.one_hot, run.totals(0), strict=True):
        assert np.array_equal(found, operand @ both)
    run.go_on().prepare(1, 2)
    for number in (1, 2):
        for member, found in enumerate(run.totals(number)):
            assert np.array_equal(found, run.joined(member) @ run.residuals())
    # One group of columns each, where widths of 40 and 24 would take three and two; sent once.
    assert sum(isinstance(e.message, EncryptedRows) for e in run.sent) == 2
    assert [len(party.rows) for party in run.parties] == [1, 1]


def test_joined_columns_are_masked_each_and_only_their_sum_is_told():
    """The key's holder knows X'(s + D): less it, each column's part is the residuals' total and a share."""
    party = Histograms().go_on().parties[1]
    shares = np.stack([party._spread_noise(1)[:, 0] for _ in range(1200)])
    assert is_uniform((shares >> np.uint64(34)).astype(np.uint16))
    for place in (0, 1):  # without noise they add up to nothing
        columns = [column for column, each in enumerate(PLACES[0]) if each == place]
        assert not (shares[:, columns].sum(1) % residues.T).any()


def test_a_joined_total_has_one_share_of_noise_of_each_member():
    run, rounds = Histograms(std=1 << 30).go_on(), range(15)
    run.prepare(*rounds)
    found = [(m, total) for n in rounds for m, total in enumerate(run.totals(n))]
    errors = np.concatenate([total - run.joined(m) @ run.residuals() for m, total in found])
    # Not one for each of the three columns of a place: sqrt(3) would be 8 deviations away.
    assert abs(float(np.std(errors)) * 2.0**32 / (2**0.5 * 2**30) - 1) < 4.5 / (2 * errors.size) ** 0.5


def test_correlations_stay_behind_and_are_bound_to_what_is_joined():
    run = Histograms()
    run.prepare(0, 1)
    run.totals(0)
    before = run.parties
    run.go_on()
    assert not any(party.pool for party in run.parties)
    with pytest.raises(ProtocolError, match="no correlation"):
        run.machines(1)
    with pytest.raises(ProtocolError, match="before; masks serve once"):
        run.parties[0].prepare([(0, None)])
    run.go_on({0: PLACES[0]}).parties[0].join(1, np.array([0, 0, 1]))
    machines = [party.prepare([(2, None)]) for party in run.parties]
    with pytest.raises(ProtocolError, match="something else"):
        drive(machines)
    assert before[0].pool  # its own session may go on


@pytest.mark.parametrize("places", [[0, 2, 2, 0, 2], [0, 1], [0, 1, 2, 5, 3], [-1, 0, 0, 0, 0]])
def test_places_that_are_left_out_are_refused(places):
    party = Histograms().go_on({}).parties[1]
    with pytest.raises(ProtocolError, match="joins"):
        party.join(0, np.array(places))


def test_rows_of_other_columns_are_refused():
    parties = [party_of(protocol_of(), m, operand=np.zeros((5, RECORDS), np.int32)) for m in (0, 1)]
    machines = [party.setup() for party in parties]
    started = [machine.start() for machine in machines]
    machines[0].receive(next(e for e in started[1] if e.message.kind == "sealed-public-key"))
    (chunk,) = machines[0].proceed()
    for columns in (0, -1, 41):
        message = EncryptedRows(round=chunk.message.round, columns=columns, chunk=0, data=chunk.message.data)
        with pytest.raises(ProtocolError, match="columns"):
            machines[1].receive(Envelope(0, 1, message))
    with pytest.raises(InputError, match="shape"):
        party_of(protocol_of(entry=np.inf), 0, operand=np.zeros((5, RECORDS), np.int32))
    with pytest.raises(ProtocolError, match="run the setup"):
        parties[0].continued(protocol_of(series=Kernel()))
