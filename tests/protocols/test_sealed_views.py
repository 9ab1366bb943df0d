"""What a coalition of sealed training sees: uniform words, the noise it was promised, and faults that show.

Thresholds: every statistic is compared with a quantile of its exact or asymptotic distribution such that one
test function raises a false alarm with probability below 1e-6.
"""

import itertools

import numpy as np
import pytest
from scipy.stats import chi2
from sealed_federation import Federation

import securevfl.protocols.sealed.dealer as dealing
from securevfl.protocols import SealedDealer, SealedParty
from securevfl.protocols.sealed.protocol import Operand, Phase, Share, ring_product

ALARM = 1e-8  # per statistic; no test looks at more than 50


def is_uniform(words) -> bool:
    """Chi-square of the top and of the bottom byte over all words; 20 expected per cell at least."""
    flat = np.ascontiguousarray(words).reshape(-1)
    size = flat.dtype.itemsize
    table = flat.view(np.uint8).reshape(-1, size)
    assert len(flat) >= 20 * 256
    for byte in (0, size - 1):
        counts = np.bincount(table[:, byte], minlength=256)
        if chi2.sf(((counts - len(flat) / 256) ** 2).sum() / (len(flat) / 256), 255) < ALARM:
            return False
    return True


def seen_by(federation, members, rounds):
    """Everything but totals that a coalition receives, as word arrays per sender, receiver and kind."""
    federation.setup()
    words: dict[tuple[int, int, str], list[np.ndarray]] = {}
    for number in range(rounds):
        federation.totals(number)
    for envelope in federation.transcript:
        if envelope.receiver in members and envelope.sender not in members and envelope.sender >= 0:
            for name in ("words", "blinded", "product"):
                if hasattr(envelope.message, name):
                    key = envelope.sender, envelope.receiver, f"{envelope.message.kind}/{name}"
                    words.setdefault(key, []).append(getattr(envelope.message, name))
    return {key: np.stack(arrays) for key, arrays in words.items()}


def _extreme(federation, sign):
    """All rows, scores and labels at one end of their ranges: data that leak if anything does."""
    for member, operand in enumerate(federation.operands):
        operand[:] = 0
        operand[0] = sign * 2**14
        federation.scores[member][:] = sign * 4.0
    federation.labels[:] = sign < 0
    federation.parties = [
        SealedParty(federation.protocol, m, operand=federation.operands[m] if federation.static[m] else None)
        for m in range(len(federation.operands))
    ]
    return federation


@pytest.mark.parametrize("members,coalition", [(2, {1}), (3, {0, 2})])
@pytest.mark.parametrize("sign", [1, -1])
def test_all_words_but_totals_are_uniform_whatever_the_data(members, coalition, sign):
    federation = _extreme(Federation(members, records=128, width=43, static=False), sign)
    views = seen_by(federation, coalition, 130)
    assert {kind.split("/")[0] for *_, kind in views} == {"sealed-phase", "sealed-operand", "sealed-share"}
    for key, words in views.items():
        assert is_uniform(words), key
        assert is_uniform(words[1:] - words[:-1]), key  # the same data in two rounds: independent words


def test_sums_over_members_stay_uniform_too():
    """The opened phase, and the residual that one member could put together from all blinded shares."""
    federation = _extreme(Federation(3, records=256, width=2), 1)
    federation.setup()
    phases, residuals = [], []
    for number in range(30):
        federation.transcript.clear()
        federation.totals(number)
        heard = {e.sender: e.message.words for e in federation.transcript if isinstance(e.message, Phase)}
        shares = {e.sender: e.message.blinded for e in federation.transcript if isinstance(e.message, Share)}
        phases.append(sum(heard.values()))
        residuals.append(sum(shares.values()))
    assert is_uniform(np.stack(phases)) and is_uniform(np.stack(residuals))


def test_the_opened_phase_is_independent_of_scores_on_a_toy_ring():
    """Exhaustive on Z_8 with two members: given one member's own mask, the opened sum is still uniform."""
    ring = range(8)
    for u0, u1, own in itertools.product(ring, repeat=3):
        opened = sorted((u0 - own + u1 - mask) % 8 for mask in ring)
        assert opened == list(ring)


# -- noise --------------------------------------------------------------------------------------------------


def noise_ratio(federation, rounds, known):
    """Variance of the totals' errors, without the known members' shares, over what the others should add."""
    federation.setup()
    errors = []
    for number in range(rounds):
        machines = federation.machines(number)
        shares = [{m: s.copy() for m, s in machine._noise.items()} for machine in machines]
        federation.deliver(machines, federation.dealer.deal(round=number))
        for member, machine in enumerate(machines):
            rest = machine.result() - federation.expected(member)
            for j in known:
                rest = rest - shares[j][member].view(np.int64) * 2.0**-42
            errors.append(rest)
    stds = federation.protocol.share_stds
    wanted = sum(stds[0][j] ** 2 for j in range(len(stds)) if j not in known) * 4.0**-42
    return np.concatenate(errors).reshape(-1) ** 2 / wanted


def fits(squares) -> bool:
    """Whether squared errors over their variance are chi-square, both tails; 1e-3 is for rounding."""
    total, count = float(squares.sum()), squares.size
    low, high = chi2.ppf(ALARM, count), chi2.isf(ALARM, count)
    return low * (1 - 1e-3) <= total <= high * (1 + 1e-3)


@pytest.mark.parametrize("known", [(), (0,), (0, 2)])
def test_totals_carry_the_noise_that_a_coalition_cannot_subtract(known):
    federation = Federation(3, records=4, width=40, std=2**43, seed=1)
    assert fits(noise_ratio(federation, 12, known))


def test_each_share_has_its_own_deviation():
    federation = Federation(2, records=4, width=400)
    stds = ((2**43, 2**41), (2**42, 2**44))
    object.__setattr__(federation.protocol, "share_stds", stds)
    for drawer, target in itertools.product((0, 1), repeat=2):
        draws = np.concatenate([federation.parties[drawer].noise_for(target) for _ in range(5)])
        assert fits((draws.view(np.int64).reshape(-1) / stds[target][drawer]) ** 2)


# -- faults -------------------------------------------------------------------------------------------------


def test_masks_reused_across_rounds_are_caught(monkeypatch):
    monkeypatch.setattr(dealing.os, "urandom", lambda size: bytes(range(size)))
    federation = Federation(2, records=128, width=43)
    views = seen_by(federation, {1}, 60)
    blinded = views[0, 1, "sealed-share/blinded"]
    assert not is_uniform(blinded[1:] - blinded[:-1])


def test_a_missing_noise_share_is_caught(monkeypatch):
    honest = SealedParty.noise_for

    def lazy(party, target):
        share = honest(party, target)
        return np.zeros_like(share) if party.index == 1 else share

    monkeypatch.setattr(SealedParty, "noise_for", lazy)
    federation = Federation(3, records=4, width=40, std=2**43, seed=1)
    assert not fits(noise_ratio(federation, 12, ()))


def product_masks(federation, rounds):
    """The words c'_mj that hide each member's part of a total, read with the seeds of both sides."""
    federation.setup()
    found = []
    for number in range(rounds):
        federation.transcript.clear()
        machines = federation.machines(number)
        deals = federation.dealer.deal(round=number)
        federation.deliver(machines, list(deals))
        for envelope in federation.transcript:
            if isinstance(envelope.message, Share) and envelope.receiver == 0:
                seed = deals[envelope.sender].message.seed
                blind = dealing.expand(seed, "blind", envelope.message.blinded.shape)
                open_part = ring_product(federation.parties[envelope.sender].masked[0], blind)
                found.append(envelope.message.product - open_part)
    return np.stack(found)


def test_a_member_sees_no_part_of_its_total(monkeypatch):
    assert is_uniform(product_masks(Federation(3, records=4, width=64), 50))

    def bare(seed, purpose, shape, dtype=np.uint64):
        words = plain(seed, purpose, shape, dtype)
        return np.zeros_like(words) if purpose.startswith("product") else words

    plain = dealing.expand
    monkeypatch.setattr(dealing, "expand", bare)
    monkeypatch.setattr("securevfl.protocols.sealed.round.expand", bare)
    assert not is_uniform(product_masks(Federation(3, records=4, width=64), 50))


def test_an_operand_opened_twice_shows_nothing_new():
    """A new session masks the same rows anew; the two openings are independent."""
    federation = Federation(2, records=200, width=60)
    opened = []
    for _ in range(2):
        federation.transcript.clear()
        federation.setup()
        opened.append(next(e.message.words for e in federation.transcript if isinstance(e.message, Operand)))
    assert is_uniform(opened[0] - opened[1])


def test_the_dealer_receives_nothing():
    federation = Federation(3, static=False)
    federation.setup()
    federation.totals(0)
    assert all(envelope.receiver >= 0 for envelope in federation.transcript)
    assert not hasattr(SealedDealer, "receive")
