"""Two members that encrypt: exact totals, correlations that serve once, and attacks on what each one sees."""

import dataclasses
import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2
from sealed_federation import copies, unit_rows
from test_sealed_views import ALARM, fits, is_uniform

from securevfl.errors import DropoutError, EncodingError, InputError, ProtocolError
from securevfl.protocols import Envelope, SealedProtocol, drive
from securevfl.protocols.sealed import EncryptedParty, Kernel, Waves, cipher, kernel, party_of, residues
from securevfl.protocols.sealed.cipher import DEGREE, ROWS, Keys, Receiver, shared_cipher
from securevfl.protocols.sealed.messages import Answer, Blinded, Factors, Offer
from securevfl.protocols.sealed.residues import T
from securevfl.protocols.stream import KeyStream


class Pair:
    """Two members with random rows, scores and labels."""

    def __init__(self, widths=(3, 2), *, records=40, holder=0, std=0, seed=0, **changes):
        self.rng = np.random.default_rng(seed)
        given = {
            "widths": widths,
            "static": (True, True),
            "clips": (1.0, 1.0),
            "label_holder": holder,
            "records": records,
            "batch": records,
            "outputs": 1,
            "series": Kernel(),
            "share_stds": ((std, std), (std, std)),
            "dealing": "encrypted",
        }
        self.protocol = SealedProtocol(**given | changes)
        self.operands = [unit_rows(self.rng, max(w, 1), records)[:w] for w in widths]
        self.parties = [party_of(self.protocol, m, operand=self.operands[m]) for m in (0, 1)]
        self.scores = [self.rng.standard_normal((records, 1)) * 3 for _ in (0, 1)]
        self.labels = (self.rng.random((records, self.protocol.outputs)) < 0.5).astype(float)
        self.transcript: list[Envelope] = []

    def run(self, machines, choose=None):
        sent = drive(machines, choose=choose, codec=self.protocol)
        self.transcript += sent
        return sent

    def setup(self, *rounds, choose=None):
        self.run([party.setup() for party in self.parties], choose)
        if rounds:
            self.run([party.prepare([(n, None) for n in rounds]) for party in self.parties], choose)
        return self

    def machine_of(self, member, number, rows=None):
        chosen, party = slice(None) if rows is None else rows, self.parties[member]
        return party.round(
            round=number,
            rows=rows,
            scores=None if self.protocol.series is None else self.scores[member][chosen],
            labels=self.labels[chosen] if party.first and self.protocol.labelled else None,
        )

    def machines(self, number, rows=None):
        return [self.machine_of(member, number, rows) for member in (0, 1)]

    def totals(self, number, rows=None):
        machines = self.machines(number, rows)
        self.run(machines)
        return [machine.result() for machine in machines]

    def exact(self, member, rows=None):
        """By integers, without any of the machines' arithmetic."""
        chosen = slice(None) if rows is None else rows
        holder = self.protocol.label_holder
        residual = self.protocol.series.of(self.scores[holder], self.scores[1 - holder]) - self.labels
        whole = np.trunc(self.operands[member] / 4) @ np.eye(self.protocol.records)[:, chosen]
        return whole * 2.0**-12 @ residual[chosen]


# -- tables -------------------------------------------------------------------------------------------------


def test_the_range_of_the_tables_by_enumeration():
    alpha, beta, *rest = kernel.logistic_tables()
    f, g = np.stack(rest[:4]), np.stack(rest[4:])
    values = alpha[:, None] + beta[None, :] + f.T @ g
    assert (values.min(), values.max()) == (kernel.LOW, kernel.HIGH)
    protocol = Pair().protocol
    assert protocol.residual_bound == max(kernel.HIGH, 2**20 - kernel.LOW) / 2**20 < 1.0053
    assert protocol.residual_change == (kernel.HIGH - kernel.LOW) / 2**20 < 1.0105
    grid = np.linspace(-kernel.CLAMP, kernel.CLAMP, kernel.ENTRIES)
    assert np.abs(values / 2**20 - 1 / (1 + np.exp(-(grid[:, None] + grid)))).max() < 0.0071
    # One sign that differs between the members is what constants are for.
    flipped = alpha[:, None] + beta[None, :] + f.T @ (g * np.array([[-1], [1], [1], [1]]))
    assert max(flipped.max(), 2**20 - flipped.min()) / 2**20 > 1.4


def test_other_tables_are_refused(monkeypatch, tmp_path):
    kernel.logistic_tables.cache_clear()
    monkeypatch.setattr(kernel, "DIGEST", "0" * 64)
    with pytest.raises(ProtocolError, match="install securevfl again"):
        kernel.logistic_tables()
    monkeypatch.undo()
    pair = Pair()
    machines = [party.setup() for party in pair.parties]
    key = next(e for e in machines[0].start() if e.message.kind == "sealed-public-key")
    machines[1].start()
    with pytest.raises(ProtocolError, match="other tables"):
        machines[1].receive(Envelope(0, 1, dataclasses.replace(key.message, tables="0")))


def test_scores_that_are_not_finite_never_index_a_table():
    pair = Pair().setup(0)
    pair.scores[1][3] = np.nan
    with pytest.raises(EncodingError, match="not finite"):
        pair.machines(0)
    assert kernel.entries(np.array([-1e9, 0.0, 1e9])).tolist() == [0, 1024, 2048]


# -- arithmetic ---------------------------------------------------------------------------------------------


def test_residues_are_exact():
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2, T // 2, T - 2, T - 1], np.uint64)
    one = np.concatenate([np.repeat(ends, 6), rng.integers(0, T, 500, dtype=np.uint64)])
    two = np.concatenate([np.tile(ends, 6), rng.integers(0, T, 500, dtype=np.uint64)])
    for name, plain in (("multiply", int.__mul__), ("subtract", int.__sub__), ("add", int.__add__)):
        found = getattr(residues, name)(one, two)
        assert [int(w) for w in found] == [plain(int(a), int(b)) % T for a, b in zip(one, two, strict=True)]
    left = np.where(rng.random((3, 5000)) < 0.5, -(2**16), 2**16).astype(np.int32)
    right = np.full((5000, 2), T - 1, np.uint64)
    assert (residues.product(left, right) == left.astype(object) @ right.astype(object) % T).all()
    drawn = residues.draw(KeyStream(bytes(16)), 20_000)
    assert drawn.max() < T and is_uniform(_bytes(drawn))


def test_draws_that_are_no_residues_are_drawn_again():
    class Full(KeyStream):
        first = True

        def fill(self, out):
            super().fill(out)
            if self.first:
                out[...], self.first = np.uint64(2**64 - 1), False
            return out

    assert residues.draw(Full(bytes(16)), 50).max() < T


def _wholes(residues):
    """The integers of least magnitude that have these residues modulo the three primes."""
    primes = shared_cipher().primes
    product = primes[0] * primes[1] * primes[2]
    parts = [product // p * pow(product // p, -1, p) for p in primes]
    values = (
        sum(int(r) * part for r, part in zip(each, parts, strict=True)) % product
        for each in zip(*residues, strict=True)
    )
    return [value - product if value > product // 2 else value for value in values]


@pytest.mark.parametrize("prime", [0, 1, 2])
def test_flooding_has_its_range_by_chinese_remainders(prime):
    """The three residues of one coefficient are one integer, uniform on [-2^127, 2^127)."""
    primes, rng = shared_cipher().primes, np.random.default_rng(prime)
    top = np.array([0, 255, *rng.integers(0, 256, 60)], np.uint64)
    middle, low = (np.array([0, 2**60 - 1, *rng.integers(0, 2**60, 60)], np.uint64) for _ in range(2))
    found = [cipher.flooding_residues(top, middle, low, p) for p in primes]
    whole = _wholes(found)
    assert whole[0] == -(2**127) and whole[1] == 2**127 - 1
    drawn = zip(top, middle, low, strict=True)
    assert whole == [(int(t) << 120) + (int(m) << 60) + int(w) - 2**127 for t, m, w in drawn]


def test_answers_are_flooded_over_the_whole_range():
    """What is added to an answer: 128 uniform bits to each coefficient of its first half, nothing else."""
    made, count = shared_cipher()._flooding(KeyStream.from_os_entropy()), 2048
    flood = made.dyn_array()
    parts = [[flood.at(prime * DEGREE + place) for place in range(count)] for prime in range(3)]
    moved = [value + 2**127 for value in _wholes(parts)]
    words = np.array(
        [[value >> shift & 0xFFFFFFFF for shift in range(0, 128, 32)] for value in moved], np.uint32
    )
    assert all(0 <= value < 2**128 for value in moved) and is_uniform(words)
    assert not any(flood.at((3 + prime) * DEGREE + place) for prime in range(3) for place in range(count))


# -- totals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", [0, 1])
def test_totals_are_exact(holder):
    """More records than a block, more columns than a group; all of them and a batch of some."""
    pair = Pair((18, 3), records=600, holder=holder, batch=600)
    pair.setup(choose=lambda pending: int(pair.rng.integers(len(pending))))
    rows = np.sort(pair.rng.choice(600, 70, replace=False))
    pair.run([party.prepare([(2, None), (5, rows)]) for party in pair.parties])
    for number, chosen in ((2, None), (5, rows)):
        for member, total in enumerate(pair.totals(number, chosen)):
            assert np.array_equal(total, pair.exact(member, chosen))


def test_label_histograms_and_waves():
    pair = Pair((2, 3), series=None, outputs=2).setup(0)
    for member, total in enumerate(pair.totals(0)):
        assert np.array_equal(total, np.trunc(pair.operands[member] / 4) * 2.0**-12 @ pair.labels)
    pair = Pair((2, 0), series=Waves(24.0, (0.8, 0.6), 10), outputs=4).setup(0)
    turns = sum(pair.scores) * 2 * np.pi / 24 * np.array([1, 3])
    waves = np.concatenate([np.sin(turns), np.cos(turns)], 1) * np.array([0.8, 0.6, 0.8, 0.6])
    wanted = np.trunc(pair.operands[0] / 4) * 2.0**-12 @ waves
    totals = pair.totals(0)
    assert np.abs(totals[0] - wanted).max() < 40 * 4 * 2.0**-10 and totals[1].shape == (0, 4)


def test_totals_at_the_limit_of_the_range_do_not_wrap():
    clip = T / 2 / 2**32 / 40 / (kernel.HIGH / 2**20) * (1 - 1e-6)
    pair = Pair((1, 1), clips=(clip, clip))
    full = np.full((1, 40), int(clip * 2**14), np.int32)
    pair.parties = [party_of(pair.protocol, m, operand=full * (1 - 2 * m)) for m in (0, 1)]
    entry = np.unravel_index(np.argmax(_every_value()), (kernel.ENTRIES,) * 2)
    pair.scores = [np.full((40, 1), (place / 1024 - 1) * kernel.CLAMP) for place in entry]
    pair.labels[:] = 0
    first, second = pair.setup(0).totals(0)
    wanted = 40 * (full[0, 0] // 4) * 2.0**-12 * kernel.HIGH * 2.0**-20
    assert first[0, 0] == wanted == -second[0, 0] and wanted > 131_000 * 0.99
    with pytest.raises(EncodingError, match="ring holds"):
        Pair((1, 1), clips=(clip * 1.001, clip))
    with pytest.raises(EncodingError, match="ring holds"):
        Pair((1, 1), std=2**46)


def _every_value():
    alpha, beta, *rest = kernel.logistic_tables()
    return alpha[:, None] + beta[None, :] + np.stack(rest[:4]).T @ np.stack(rest[4:])


def test_scores_are_summed_without_keys_or_ciphertexts():
    pair = Pair((0, 0)).setup()
    assert pair.parties[0].keys is None
    machines = [party.score(pair.scores[party.index], round=0) for party in pair.parties]
    pair.run(machines)
    assert np.allclose(machines[0].result(), sum(pair.scores), atol=1e-8)


# -- single use ---------------------------------------------------------------------------------------------


def test_a_correlation_serves_once_and_only_what_it_was_made_for():
    pair = Pair(batch=40).setup(0, 1, 2)
    pair.totals(0)
    first = pair.parties[0]
    with pytest.raises(ProtocolError, match="used round 0"):
        first.round(round=0, scores=pair.scores[0], labels=pair.labels)
    with pytest.raises(ProtocolError, match="used round 0"):
        first.prepare([(0, None)])
    rows = np.arange(10)
    with pytest.raises(ProtocolError, match="something else"):
        first.round(round=1, rows=rows, scores=pair.scores[0][rows], labels=pair.labels[rows])
    with pytest.raises(ProtocolError, match="no correlation"):  # the attempt has used it up
        first.round(round=1, scores=pair.scores[0], labels=pair.labels)
    with pytest.raises(ProtocolError, match="no correlation"):
        first.round(round=9, scores=pair.scores[0], labels=pair.labels)


def test_a_new_session_has_new_keys_and_no_correlations():
    pair = Pair().setup(0, 1)
    key = pair.parties[0].keys.public
    pair.setup()
    assert pair.parties[0].keys.public != key and pair.parties[0].pool == {}
    with pytest.raises(ProtocolError, match="no correlation"):
        pair.machines(0)


def test_members_that_prepare_different_things_notice():
    pair = Pair().setup()
    noisier = dataclasses.replace(pair.protocol, share_stds=((1, 0), (0, 0)))
    other = EncryptedParty(noisier, 1, operand=pair.operands[1])
    other.__dict__ |= {k: v for k, v in vars(pair.parties[1]).items() if k != "protocol"}
    with pytest.raises(ProtocolError, match="prepares something else"):
        drive([pair.parties[0].prepare([(0, None)]), other.prepare([(0, None)])])


def test_used_twice_a_correlation_tells_the_difference_of_scores():
    """Why it must not be: the attack works on what a second use would send."""
    pair = Pair().setup(0)
    kept = {p.index: dict(p.pool) for p in pair.parties}
    pair.totals(0)
    for party in pair.parties:
        party.pool, party._next_round = kept[party.index], 0
    before = pair.scores[1].copy()
    pair.scores[1] = before + 0.5
    pair.totals(0)
    sent = [e.message.words for e in pair.transcript if isinstance(e.message, Factors) and e.sender == 1]
    seen = residues.centred(residues.subtract(sent[1], sent[0]))
    factors = [Kernel().factors(s, True)[1] for s in (before, pair.scores[1])]
    assert np.array_equal(seen, factors[1] - factors[0])


def _bytes(words):
    """The upper 32 of 50 bits."""
    return (words >> np.uint64(18)).astype(np.uint32)


# -- what members see ---------------------------------------------------------------------------------------


def _c1(ciphertext, prime):
    words = ciphertext.dyn_array()
    return [words.at(3 * DEGREE + prime * DEGREE + place) for place in range(ROWS)]


@pytest.mark.parametrize("refreshed", [False, True])
def test_the_quotient_of_second_halves_is_the_multiplier_unless_refreshed(monkeypatch, refreshed):
    """What the key holder sent and what it gets back, divided point by point."""
    shared = shared_cipher()
    keys, stream = Keys(shared), KeyStream.from_os_entropy()
    rows = shared.read(keys.encrypt(shared.plain(residues.draw(stream, DEGREE))))
    secret = shared.factor(shared.plain(residues.draw(stream, ROWS)))
    answer = shared.combine([(rows, secret)])
    if refreshed:
        zero, plain = shared.seal.Ciphertext(), shared.seal.Ciphertext()
        shared.evaluator.transform_from_ntt(answer, plain)
        shared._refresh(plain, Receiver(shared, keys.public))
        shared.evaluator.transform_to_ntt(plain, zero)
        answer = zero
    points, q = secret.dyn_array(), shared.primes[0]
    known = [points.at(place) for place in range(ROWS)]
    quotient = [a * pow(r, -1, q) % q for a, r in zip(_c1(answer, 0), _c1(rows, 0), strict=True)]
    assert (quotient == known) is not refreshed
    assert refreshed <= (sum(a == b for a, b in zip(quotient, known, strict=True)) == 0)


def test_words_are_uniform_whatever_the_data():
    pair = Pair((3, 3), records=1100, std=2**20)
    for member, score in enumerate(pair.scores):
        pair.operands[member][:], score[:] = 2**14 // 7, 6.0
    numbers = range(6)
    pair.setup(*numbers)
    for number in numbers:
        pair.totals(number)
    for kind, sender in itertools.product((Factors, Blinded), (0, 1)):
        words = (
            e.message.words for e in pair.transcript if isinstance(e.message, kind) and e.sender == sender
        )
        stacked = np.stack(list(words))
        for each in (stacked, residues.subtract(stacked[1:], stacked[:-1])):
            assert is_uniform(_bytes(each)), (kind, sender)


def test_masks_of_correlations_are_uniform_and_new_for_every_record_and_round():
    """Any one of them makes what is sent look uniform: they are looked at themselves, in the pools."""
    numbers = range(6)
    pair = Pair((1, 1), records=1100).setup(*numbers)
    made = [[party.pool[number] for number in numbers] for party in pair.parties]
    for drawn in (
        *(np.stack([each.blind for each in pool]) for pool in made),
        *(np.stack([each.factors for each in pool]) for pool in made),
        np.stack([each.products for each in made[1]]),  # -rho
    ):
        for words in (drawn, residues.subtract(drawn[1:], drawn[:-1])):
            assert is_uniform(_bytes(words)) and len(np.unique(words)) == words.size


def test_an_answer_is_a_masked_plaintext_and_nothing_else():
    """A simulator that knows the masked plaintext alone makes answers like the real ones, key in hand.

    Residuals of decryption (the noise that is left) are compared by their spread: flooding decides it.
    """
    shared = shared_cipher()
    keys, stream = Keys(shared), KeyStream.from_os_entropy()
    receiver = Receiver(shared, keys.public)
    budgets = {True: [], False: []}
    rows = shared.read(keys.encrypt(shared.plain(residues.draw(stream, DEGREE))))
    for real, _ in itertools.product((True, False), range(6)):
        mask = shared.plain(residues.draw(stream, DEGREE))
        factor = residues.draw(stream, ROWS) if real else np.ones(1, np.uint64)
        data = shared.close(
            shared.combine([(rows, shared.factor(shared.plain(factor)))]), mask, receiver, stream
        )
        found = cipher.load(shared.seal.Ciphertext(), shared.context, data)
        budgets[real].append(keys._decryptor.invariant_noise_budget(found))
    assert set(budgets[True]) == set(budgets[False]) and min(budgets[True]) >= 1


def test_each_total_has_the_noise_that_the_other_does_not_know():
    pair = Pair((40, 40), std=2**34)
    numbers = range(8)
    pair.setup(*numbers)
    own = {n: [party.pool[n].noise for party in pair.parties] for n in numbers}
    errors = {True: [], False: []}
    for number in numbers:
        for member, total in enumerate(pair.totals(number)):
            error = (total - pair.exact(member)) * 2.0**32
            errors[False].append(error / (2**34 * 2**0.5))
            errors[True].append((error - residues.centred(own[number][member])) / 2**34)
    for known, found in errors.items():
        assert fits(np.concatenate(found).reshape(-1) ** 2), known


def test_every_order_and_wrong_messages():
    pair = Pair().setup(0)
    fresh = copies(pair.machines(0))
    pair.parties[0].pool, pair.parties[1].pool = {}, {}
    done = copies(fresh)
    sent = drive(done)
    for member in (0, 1):
        mine = [e for e in sent if e.receiver == member]
        for order in itertools.permutations(mine):
            again = copies([fresh[member]])[0]
            again.start()
            for envelope in order:
                message, other = envelope.message, 1 - member
                changed = functools.partial(dataclasses.replace, message)
                for wrong in (
                    Envelope(member, member, message),
                    Envelope(-4, member, message),
                    Envelope(other, member, changed(round=1)),
                    Envelope(other, member, changed(words=message.words[1:])),
                    Envelope(other, member, changed(words=message.words + np.uint64(T))),
                ):
                    with pytest.raises(ProtocolError):
                        again.receive(wrong)
                again.receive(envelope)
                with pytest.raises(ProtocolError):
                    again.receive(envelope)
            assert np.array_equal(again.result(), done[member].result())
            assert not any(vars(again._made)[name].size for name in ("factors", "products", "blind", "noise"))
    with pytest.raises(DropoutError):
        fresh[0].start()
        fresh[0].drop(1)


def test_ciphertexts_that_are_none_are_refused():
    pair = Pair().setup()
    machines = [party.prepare([(0, None)]) for party in pair.parties]
    machines[0].start()
    offer = machines[0].proceed()[0]
    machines[1].start()
    for changes in (
        {"masks": b"x" * 40},
        {"masks": offer.message.masks + b"1"},
        {"product": b""},
        {"number": 3},
    ):
        with pytest.raises(ProtocolError):
            machines[1].receive(Envelope(0, 1, dataclasses.replace(offer.message, **changes)))
    broken = bytearray(offer.message.masks)
    broken[24] ^= 255
    with pytest.raises(ProtocolError):
        machines[1].receive(Envelope(0, 1, dataclasses.replace(offer.message, masks=bytes(broken))))
    with pytest.raises(ProtocolError, match="out of turn"):
        machines[0].receive(Envelope(1, 0, Offer(**vars(offer.message))))
    answer = machines[1].receive(offer)[0]
    assert isinstance(answer.message, Answer)
    machines[0].receive(answer)
    assert all(machine.done for machine in machines)


# -- the library --------------------------------------------------------------------------------------------


def test_another_format_of_the_library_is_refused(monkeypatch):
    monkeypatch.setattr(cipher, "FORMAT", (0xA15E, 16, 4, 9))
    with pytest.raises(ProtocolError, match="tenseal writes ciphertexts in form") as caught:
        cipher.Cipher()
    assert "\n" not in str(caught.value)


def test_secrets_never_touch_a_path(monkeypatch, tmp_path):
    """Everything that is opened while correlations are made is anonymous memory."""
    monkeypatch.chdir(tmp_path)
    opened = []
    original = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *a: opened.append(a) or original(*a))
    before = set(Path("/proc/self/fd").iterdir())
    Pair().setup(0).totals(0)
    assert opened and not list(tmp_path.iterdir())
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1  # the listing itself


@pytest.mark.parametrize(
    "changes", [{"static": (True, False)}, {"checked": True}, {"dealing": "third"}, {"dealing": "nobody"}]
)
def test_what_two_members_cannot_do_is_refused(changes):
    with pytest.raises(InputError):
        Pair(**changes)


def test_the_alarm_is_rare():
    assert chi2.sf(chi2.isf(ALARM, 255), 255) == pytest.approx(ALARM)
