"""Sealed rounds: the right totals in every order, and nothing moved by wrong messages."""

import numpy as np
import pytest
from sealed_conformance import deliver_with_intruder, same
from sealed_federation import Federation

from securevfl.errors import EncodingError, InputError, ProtocolError, WireError
from securevfl.protocols import SealedParty, SealedProtocol
from securevfl.protocols.sealed import class_series, identity_series, logistic_series
from securevfl.protocols.sealed.protocol import Deal, Operand, Phase, Share
from securevfl.protocols.sealed.series import encode_phase


@pytest.mark.parametrize("members", range(2, 9))
@pytest.mark.parametrize("static", [True, False])
def test_totals_equal_the_plain_gradient(members, static):
    federation = Federation(members, static=static, seed=members, label_holder=members - 1, codec=True)
    generator = np.random.default_rng(members)
    federation.setup(lambda pending: int(generator.integers(len(pending))))
    for number in range(3):
        federation.check(federation.totals(number, choose=lambda p: int(generator.integers(len(p)))))


def test_several_outputs_mixed_operands_and_batches():
    federation = Federation(3, outputs=4, static=(True, False, True), records=20, seed=5)
    federation.setup()
    for number, rows in enumerate([np.array([3, 1, 19]), np.arange(20), np.array([7])]):
        federation.check(federation.totals(number, rows), rows)


def test_the_identity_series_serves_least_squares():
    federation = Federation(2, series=identity_series(period=6.0), scale=0.4, seed=3)
    federation.setup()
    totals = federation.totals()
    federation.check(totals)
    exact = federation.operands[0] * 2.0**-14 @ (sum(federation.scores) - federation.labels)
    near = np.abs(sum(federation.scores)).max() < 1.2
    assert not near or np.abs(totals[0] - exact).max() < 12 * 0.02  # records times the series' error


def test_residuals_of_classes_need_no_product():
    """Half a period at a record's own class turns one series into both of its residuals."""
    series = class_series(5)
    federation = Federation(3, records=20, outputs=5, series=series, scale=2.0)
    federation.labels[:] = 0.0
    federation.scores[0] += series.period / 2 * np.eye(5)[np.arange(20) % 5]
    federation.setup()
    federation.check(federation.totals())


def test_wrong_messages_of_a_setup_change_nothing():
    federation = Federation(3, seed=2)
    deliver_with_intruder([p.setup() for p in federation.parties], federation.dealer.setup())
    federation.check(federation.totals(0))


def test_a_round_number_serves_once():
    federation = Federation()
    with pytest.raises(ProtocolError, match="setup"):
        federation.machines(0)
    with pytest.raises(ProtocolError, match="masks"):
        federation.dealer.deal(round=0)
    federation.setup()
    federation.totals(3)
    for number in (0, 3):
        with pytest.raises(ProtocolError, match="round"):
            federation.machines(number)
        with pytest.raises(ProtocolError, match="dealt before"):
            federation.dealer.deal(round=number)
    federation.totals(4)


def test_a_finished_machine_keeps_no_secrets():
    federation = Federation(2, std=2**20)
    federation.setup()
    machines = federation.machines(0)
    federation.deliver(machines, federation.dealer.deal(round=0))
    kept = vars(machines[0])
    assert kept["_deal"].seed == b"" and kept["_noise"] == {}
    assert all(kept[name].size == 0 for name in ("_residual", "_blind", "_blinded"))


# -- ranges -------------------------------------------------------------------------------------------------


def _protocol(**changes):
    plain = {
        "widths": (1, 1),
        "static": (True, True),
        "clips": (1.0, 1.0),
        "label_holder": 0,
        "records": 16,
        "batch": 16,
        "outputs": 1,
        "series": logistic_series(),
        "share_stds": ((0, 0), (0, 0)),
    }
    return SealedProtocol(**{**plain, **changes})


def test_the_largest_declared_total_does_not_wrap():
    clip = 130_000.0  # 16 records * 130,000 * 1.0021 = 2,084,368 < 2^21, and 130,000 * 2^14 < 2^31
    federation = Federation(2, records=16, width=1)
    federation.protocol = _protocol(clips=(clip, clip))
    full = np.full((1, 16), int(clip * 2**14), np.int32)
    federation.operands = [full, -full]
    federation.scores = [np.full((16, 1), 12.0), np.zeros((16, 1))]  # the top of the series
    federation.labels = np.zeros((16, 1))
    federation.dealer = type(federation.dealer)(federation.protocol)
    federation.parties = [SealedParty(federation.protocol, m, operand=federation.operands[m]) for m in (0, 1)]
    federation.setup()
    totals = federation.totals()
    federation.check(totals)
    assert totals[0][0, 0] > 2_000_000 and totals[1][0, 0] < -2_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"clips": (140_000.0, 1.0)},
        {"share_stds": ((2**59, 2**58), (0, 0))},
        {"records": 2**21, "batch": 2**21},
    ],
)
def test_totals_that_could_wrap_are_refused(changes):
    with pytest.raises(EncodingError, match="ring holds"):
        _protocol(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"widths": (1,)},
        {"label_holder": 2},
        {"static": (True,)},
        {"batch": 17},
        {"outputs": 0},
        {"share_stds": ((0, -1), (0, 0))},
        {"share_stds": ((0,), (0,))},
        {"clips": (-1.0, 1.0)},
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes):
    with pytest.raises(InputError):
        _protocol(**changes)


def test_inputs_outside_their_declared_range_are_refused():
    federation = Federation(2)
    federation.setup()
    first, second = federation.parties
    scores, labels = federation.scores[0], federation.labels
    with pytest.raises(EncodingError, match="labels"):
        first.round(round=0, scores=scores, labels=labels + 0.5)
    with pytest.raises(EncodingError, match="not finite"):
        second.round(round=0, scores=np.full_like(scores, np.nan))
    with pytest.raises(InputError, match="brings labels"):
        second.round(round=0, scores=scores, labels=labels)
    with pytest.raises(InputError, match="brings labels"):
        first.round(round=0, scores=scores)
    with pytest.raises(InputError, match="shape"):
        second.round(round=0, scores=scores[:-1])
    long = federation.operands[0].copy()
    long[:, 0] = [2**14, 1, 0]
    with pytest.raises(EncodingError, match="above the clip"):
        SealedParty(federation.protocol, 0, operand=long)
    with pytest.raises(EncodingError, match="type"):
        SealedParty(federation.protocol, 0, operand=federation.operands[0].astype(np.int64))
    changing = Federation(2, static=False, outputs=2)
    changing.setup()
    with pytest.raises(EncodingError, match="above the clip"):  # each output alone would pass
        changing.parties[1].round(
            round=0, scores=changing.scores[1], operand=np.full((3, 24), 2**14 // 2, np.int32)
        )


def test_phases_wrap_around_the_period_and_nowhere_else():
    period = 48.0
    scores = np.array([[0.0], [-(2.0**-40)], [period], [12.0], [-12.0], [1e6 * period + 12.0]])
    phases = encode_phase(scores, period)[:, 0].tolist()
    assert phases == [0, 0, 0, 2**30, 3 * 2**30, 2**30]


# -- messages and predictions -------------------------------------------------------------------------------


def test_messages_survive_the_wire_and_strangers_do_not():
    words, protocol = np.arange(3, dtype=np.uint64), Federation().protocol
    for message in (
        Phase(round=1, words=words.astype(np.uint32)),
        Operand(round=1, words=words),
        Share(round=2, blinded=words, product=words),
        Deal(round=2, seed=bytes(16), product=words, waves=words),
    ):
        assert same(protocol.decode(message.to_bytes()), message)
    with pytest.raises(WireError, match="does not belong"):
        protocol.decode(Phase(round=1, words=words).to_bytes().replace(b"sealed-phase", b"sealed-phaze"))


@pytest.mark.parametrize("members", [2, 3, 5])
def test_predictions_reach_the_label_holder_alone(members):
    federation = Federation(members, outputs=2, label_holder=1, codec=True)
    federation.setup()
    generator = np.random.default_rng(0)
    values = [generator.standard_normal((7, 2)) for _ in range(members)]
    machines = [party.score(values[m], round=0) for m, party in enumerate(federation.parties)]
    federation.deliver(machines, federation.dealer.deal_scores(round=0, count=7))
    # Each of the members rounds to 2^-32, half a step each.
    assert np.abs(machines[1].result() - sum(values)).max() <= members * 2.0**-33
    with pytest.raises(ProtocolError, match="does not receive"):
        machines[0].result()
    with pytest.raises(ProtocolError, match="out of turn"):
        machines[1].receive(federation.transcript[-1])
