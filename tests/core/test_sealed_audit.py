"""Audit of sealed training: an observer that replays the victim's weights with the noise it knows.

Setting: the observer (member 0, holds the labels) has a column that is 1 for every record, so its own total
shows the victim's weight; it knows the noise it put on the victim's total, so the weight's movement shows
that total. The canary is one record of the victim (member 1): x = +1 or -1, with a residual near -1 through a
public initial weight. All other rows of the victim are 0.2, which makes the weight's movement visible above
the noise on the observer's total. A linear score is fitted on held-out runs, the threshold is fixed at 0.
"""

import math

import numpy as np
import pytest

from securevfl.accountants.sealed_noise import SealedShifts
from securevfl.attacks.statistics import Errors, mu_lower
from securevfl.protocols.sealed import SealedProtocol
from securevfl.protocols.sealed_dealer import SealedDealer
from securevfl.protocols.sealed_party import SealedParty
from securevfl.protocols.sealed_series import logistic_series

RECORDS, ITERATIONS, RATE, ROW = 512, 40, 100.0, 0.2
TRIALS = 2000
PULL = -12.0  # score of the canary through the observer's public initial weight
SERIES = logistic_series()
BOUND = SERIES.range[1] + SERIES.rounding
CHANGE = SERIES.range[1] - SERIES.range[0] + 2 * SERIES.rounding


def step(weight, sign):
    """Exact totals of one iteration: the observer's common column, and the victim's column."""
    ordinary = (RECORDS - 1) * SERIES(ROW * weight) - RECORDS // 2
    return ordinary, ROW * ordinary + sign * (SERIES(PULL + sign * weight) - 1)


def watch(sign, sigmas, generator):
    """What the observer has after a run, for many runs at once: its totals, and its noise on the victim's.

    Args:
        sign: The canary.
        sigmas: Victim's noise on the observer's total, observer's on the victim's, victim's on its own.
        generator: Source of the simulated noise.
    """
    on_observer, known, self_share = sigmas
    weight = np.zeros(TRIALS)
    seen = []
    for _ in range(ITERATIONS):
        mine, theirs = step(weight, sign)
        added = generator.normal(0, known, TRIALS)
        seen += [mine + generator.normal(0, on_observer, TRIALS), added]
        total = theirs + added + (generator.normal(0, self_share, TRIALS) if self_share else 0)
        weight = np.clip(weight - RATE * total / RECORDS, -16, 16)
    return np.stack([*seen, np.ones(TRIALS)], axis=1)


def certified(sigmas, seed=0):
    """The lower bound of mu that the observer certifies, at 95 %."""
    generator = np.random.default_rng(seed)
    known = np.concatenate([watch(sign, sigmas, generator) for sign in (1, -1)])
    worlds = np.repeat([1.0, -1.0], TRIALS)
    score = np.linalg.lstsq(known, worlds, rcond=None)[0]
    fresh = np.concatenate([watch(sign, sigmas, generator) for sign in (1, -1)])
    return mu_lower(Errors.of(fresh @ score > 0, worlds > 0))


def test_counting_only_the_observers_own_totals_is_refuted():
    naive = 1.5
    sigma = CHANGE * math.sqrt(ITERATIONS) / naive
    sound = 2 * BOUND * math.sqrt(ITERATIONS) / sigma
    measured = certified((sigma,) * 3)
    assert naive < measured < sound
    assert measured > 2.4  # the attack is strong enough to mean something


def test_noise_for_the_sound_figure_holds():
    sigma = 2 * BOUND * math.sqrt(ITERATIONS) / 1.5
    assert 1.0 < certified((sigma,) * 3) <= 1.5


def test_the_noise_that_training_uses_holds_against_the_label_holder():
    """Less noise on the label holder's own total than on the victim's: what `variances` gives."""
    shifts = SealedShifts(
        clips=(1.0, 1.0), label_holder=0, residual_bound=BOUND, residual_change=CHANGE, protects="person"
    )
    claim = 1.5
    found = shifts.variances(mu=claim / math.sqrt(ITERATIONS), colluders=1)
    assert found[0][1] < found[1][1]
    sigmas = tuple(math.sqrt(v) for v in (found[0][1], found[1][0], found[1][1]))
    assert 1.0 < certified(sigmas) <= claim


def test_without_the_victims_own_noise_there_is_no_guarantee():
    sigma = CHANGE * math.sqrt(ITERATIONS) / 1.0
    assert certified((sigma, sigma, 0.0)) > 5 * 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_the_ring_opens_what_the_audit_simulates(sign):
    std = int(4.24 * 2**42)
    protocol = SealedProtocol(
        widths=(2, 1),
        static=(True, True),
        clips=(1.0, 1.0),
        label_holder=0,
        records=RECORDS,
        batch=RECORDS,
        outputs=1,
        series=SERIES,
        share_stds=((std, std), (std, std)),
    )
    mine = np.zeros((2, RECORDS), np.int32)
    mine[0, 0], mine[1, 1:] = -(2**14), 2**14
    theirs = np.full((1, RECORDS), math.trunc(ROW * 2**14), np.int32)
    theirs[0, 0] = sign * 2**14
    labels = (np.arange(RECORDS) % 2 == 0).astype(float)[:, None]  # the canary and 255 others
    labels[2] = 0.0
    labels[1] = 1.0
    dealer = SealedDealer(protocol)
    parties = [SealedParty(protocol, m, operand=rows) for m, rows in enumerate((mine, theirs))]
    _deliver([party.setup() for party in parties], dealer.setup())
    weight = 0.0
    row = math.trunc(ROW * 2**14) * 2.0**-14
    for number in range(4):
        scores = [mine.T * 2.0**-14 @ np.array([[-PULL], [0.0]]), theirs.T * 2.0**-14 * weight]
        machines = [
            party.round(round=number, scores=scores[m], labels=labels if m == 0 else None)
            for m, party in enumerate(parties)
        ]
        noise = [
            sum(int(machine._noise[m].view(np.int64)[-1, 0]) for machine in machines) * 2.0**-42
            for m in (0, 1)
        ]
        _deliver(machines, dealer.deal(round=number))
        ordinary = (RECORDS - 1) * SERIES(row * weight) - labels[1:].sum()
        wanted = ordinary, row * ordinary + sign * (SERIES(PULL + sign * weight) - 1)
        for m in (0, 1):
            # 512 residuals, each off by the series' rounding, times rows of at most 1.
            error = machines[m].result()[-1, 0] - noise[m] - wanted[m]
            assert abs(error) <= RECORDS * (SERIES.rounding + 1e-6)
        weight -= RATE * machines[1].result()[0, 0] / RECORDS


def _deliver(machines, pending):
    for machine in machines:
        pending = pending + machine.start()
    while pending:
        envelope = pending.pop(0)
        pending += machines[envelope.receiver].receive(envelope)
