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

from securevfl import Plan
from securevfl.accountants.sealed import SealedShifts
from securevfl.attacks.canary import replay as canary_replay
from securevfl.attacks.canary.replay import sealed_settings
from securevfl.attacks.statistics import Errors, mu_lower
from securevfl.protocols.driver import drive
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_dealer import CheckedDealer
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.dealer import SealedDealer
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.protocols.sealed.series import logistic_series

RECORDS, ITERATIONS, RATE, ROW = 512, 40, 100.0, 0.2
TRIALS = 2000
PULL = -12.0  # score of the canary through the observer's public initial weight
SERIES = logistic_series()
BOUND = SERIES.range[1] + SERIES.rounding
CHANGE = SERIES.range[1] - SERIES.range[0] + 2 * SERIES.rounding


LOWEST = min(np.linspace(-24, 0, 2001), key=SERIES)


def step(weight, sign, pull=PULL):
    """Exact totals of one iteration: the observer's common column, and the victim's column."""
    ordinary = (RECORDS - 1) * SERIES(ROW * weight) - RECORDS // 2
    return ordinary, ROW * ordinary + sign * (SERIES(pull + sign * weight) - 1)


def watch(sign, sigmas, generator, *, active=False):
    """What the observer has after a run, for many runs at once: its totals, and its noise on the victim's.

    Args:
        sign: The canary.
        sigmas: Victim's noise on the observer's total, observer's on the victim's, victim's on its own.
        generator: Source of the simulated noise.
        active: Uses what a cheater may do unnoticed: it leaves out its noise, waits for its own total, and
            shifts the victim's so that all but the canary cancels and the weight stays where it shows most,
            and lies about its phase of the canary, whose residual is then as large as any can be.
    """
    on_observer, known, self_share = sigmas
    weight = np.zeros(TRIALS)
    seen = []
    for _ in range(ITERATIONS):
        mine, theirs = step(weight, sign, LOWEST if active else PULL)
        opened = mine + generator.normal(0, on_observer, TRIALS)
        added = -ROW * opened if active else generator.normal(0, known, TRIALS)
        seen += [opened, added]
        total = theirs + added + (generator.normal(0, self_share, TRIALS) if self_share else 0)
        weight = np.clip(weight - RATE * total / RECORDS, -16, 16)
    return np.stack([*seen, np.ones(TRIALS)], axis=1)


def watch_actively(sign, sigmas, generator):
    """See `watch`."""
    return watch(sign, sigmas, generator, active=True)


def certified(sigmas, seed=0, *, watch=watch):
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


def test_an_active_observer_stays_below_the_sound_figure():
    """Every deviation that passes unnoticed, at the noise of the sound figure; at less it is refuted."""
    sigma = 2 * BOUND * math.sqrt(ITERATIONS) / 1.5
    assert 1.0 < certified((sigma,) * 3, watch=watch_actively) <= 1.5
    assert certified((sigma / 2,) * 3, watch=watch_actively) > 1.5


def watch_person(sign, sigmas, generator):
    """An active observer without labels; the canary's label *and* features differ, at the label holder.

    Its wrong products drive the victim's weight to its bound and keep it there, so that all other records
    cancel; its lies about the canary's phase make the residual as large as any can be, on either side.
    """
    on_observer, self_share = sigmas
    weight, seen = np.full(TRIALS, -16.0), []
    for _ in range(ITERATIONS):
        ordinary = (RECORDS - 1) * SERIES(ROW * weight) - RECORDS // 2
        opened = ordinary + sign * BOUND + generator.normal(0, on_observer, TRIALS)
        seen += [opened]
        total = ROW * ordinary + sign * BOUND + 1e6 + generator.normal(0, self_share, TRIALS)
        weight = np.clip(weight - RATE * total / RECORDS, -16, 16)
    return np.stack([*seen, np.ones(TRIALS)], axis=1)


def test_an_active_observer_of_whole_persons_stays_below_the_figure_that_training_uses():
    """Label and features of one person against a member that leaves out its noise, lies and shifts totals."""
    claim = 1.5
    shifts = SealedShifts(
        clips=(1.0, 1.0), label_holder=0, residual_bound=BOUND, residual_change=CHANGE, protects="person"
    )
    found = shifts.variances(mu=claim / math.sqrt(ITERATIONS), colluders=1)
    sigmas = np.sqrt([found[1][0], found[0][0]])
    assert 0.9 < certified(sigmas, watch=watch_person) <= claim
    assert certified(sigmas / 2, watch=watch_person) > claim


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


@pytest.mark.parametrize("coin", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_ring_opens_what_the_audit_simulates(coin, victim):
    plan = Plan(algorithm="sealed", sigma=4.0, embedding=1)
    replay = canary_replay.Replay(settings=sealed_settings(plan, ("a", "b"), "a"), victim=victim)
    operands, labels, start = _scenario(replay, coin)
    records = len(labels)
    stds = replay.settings.share_stds
    protocol = SealedProtocol(
        widths=(2, 2),
        static=(True, True),
        clips=(1.0, 1.0),
        label_holder=0,
        records=records,
        batch=records,
        outputs=1,
        series=SERIES,
        share_stds=stds,
    )
    dealer = SealedDealer(protocol)
    parties = [SealedParty(protocol, m, operand=rows) for m, rows in enumerate(operands)]
    drive([party.setup() for party in parties], dealer.setup())
    weight = np.zeros(1)
    for number in range(4):
        weights = [each + np.array([0.0, weight[0] * (m == victim)]) for m, each in enumerate(start)]
        machines = [
            party.round(
                round=number,
                scores=operands[m].T * 2.0**-14 @ weights[m][:, None],
                labels=labels if m == 0 else None,
            )
            for m, party in enumerate(parties)
        ]
        noise = [
            sum(machine._noise[m].view(np.int64).astype(float) for machine in machines) * 2.0**-42
            for m in (0, 1)
        ]
        drive(machines, dealer.deal(round=number))
        found = [machine.result() - noise[m] for m, machine in enumerate(machines)]
        mine, theirs = replay.totals(weight, np.array([coin]))
        # Each residual is off by the series' rounding and by its rows' rounding at 2^-14 times a slope of at
        # most 1/4 and weights of at most 8 spreads; rows are at most 1.
        slack = records * (SERIES.rounding + 2.0**-14 * (1 + 0.25 * 8 * replay.spread))
        assert np.abs(found[1 - victim] - mine).max() <= slack
        assert np.abs(found[victim][1] - theirs).max() <= slack
        weight = replay.step(weight, machines[victim].result()[1])


def _scenario(replay, coin):
    """Operands, labels and public initial weights of the audit's scenario, as integers of the ring."""
    canary, count, share = replay.canary, replay.ordinary, canary_replay.PULL
    world = int(coin)
    moving = canary.scores[0] != canary.scores[1]
    observer = np.zeros((2, count + 1), np.int32)
    observer[0, 0], observer[1, 1:] = 2**14, 2**14
    victim = np.zeros((2, count + 1), np.int32)
    victim[1, 1:] = math.trunc(replay.row * 2**14)
    victim[1, 0] = math.trunc(canary.signs[world] * math.sqrt(1 - share * share) * 2**14)
    pull = int(share * 2**14)
    victim[0, 0] = (1 if canary.scores[world] > 0 else -1) * pull if moving else 0
    start = [np.zeros(2), np.zeros(2)]
    start[replay.victim][0] = abs(canary.scores[world]) / (pull * 2.0**-14) if moving else 0.0
    start[1 - replay.victim][0] = 0.0 if moving else canary.scores[world]
    labels = np.concatenate([[canary.labels[world]], np.arange(count) % 2])[:, None]
    operands = [victim, observer] if replay.victim == 0 else [observer, victim]
    return operands, labels, start


class Harmless(CheckedRound):
    """All that passes unnoticed at once: no noise, phases of its own choosing, products that are off."""

    shift = round(1e6 * 2**42)

    def _start(self):
        self._noise = {m: np.zeros_like(words) for m, words in self._noise.items()}
        return super()._start()

    def _share_for(self, member, deal):
        share = super()._share_for(member, deal)
        share.product[...] += np.uint64(self.shift)
        return share


@pytest.mark.parametrize("sign", [1, -1])
def test_checked_machines_open_what_the_active_observer_of_persons_simulates(sign):
    """Every proof and tag holds, and both totals are those of `watch_person` but for the honest noise."""
    records, weight, std = 64, -16.0, 1 << 44
    victim = np.full((1, records), math.trunc(ROW * 2**14), np.int32)
    victim[0, 0] = 2**14
    observer = np.full((1, records), 2**14, np.int32)
    labels = (np.arange(records) % 2).astype(float)[:, None]
    labels[0] = (1 - sign) / 2
    protocol = SealedProtocol(
        widths=(1, 1),
        static=(True, True),
        clips=(1.0, 1.0),
        label_holder=0,
        records=records,
        batch=records,
        outputs=1,
        series=SERIES,
        share_stds=((std, std), (std, std)),
        checked=True,
    )
    dealer = CheckedDealer(protocol)
    parties = [
        CheckedParty(protocol, 0, operand=victim, labels=labels),
        CheckedParty(protocol, 1, operand=observer),
    ]
    drive([dealer.session(), *(party.setup() for party in parties)])
    own = weight * victim.T * 2.0**-14
    grid = np.linspace(-24, 24, 48001)
    lies = np.zeros((records, 1))
    lies[0] = (max if sign > 0 else min)(grid, key=SERIES) - own[0]
    machines = [
        party.round(round=0, scores=scores) for party, scores in zip(parties, (own, lies), strict=True)
    ]
    machines[1].__class__ = Harmless
    honest = [machines[0]._noise[m].view(np.int64)[0, 0] * 2.0**-42 for m in (0, 1)]
    drive([dealer.iteration(round=0), *machines])
    mine, theirs = machines[1].result()[0, 0] - honest[1], machines[0].result()[0, 0] - honest[0]
    ordinary = (records - 1) * SERIES(ROW * weight) - records // 2
    # Residuals are off by the series' rounding, and by the rows' at 2^-14 times a slope of at most 1/4.
    slack = records * (SERIES.rounding + 2.0**-14 * (1 + abs(weight) / 4)) + 1e-3
    assert abs(mine - (ordinary + sign * BOUND)) <= slack
    assert abs(theirs - (ROW * ordinary + sign * BOUND + 1e6)) <= slack
