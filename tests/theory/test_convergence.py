"""Convergence bounds hold on runs of the papers' own recursions, and the printed slips are slips.

The recursions are simulated on problems whose constants are known exactly: half the squares |A_i (w - c_i)|^2
and their means. A simulated mean over runs is compared with a bound that is far above it, so no tolerance for
sampling is needed; where a bound is tight, the comparison is deterministic.
"""

import itertools
import math

import numpy as np
import pytest

from securevfl.algorithms.flex import gradient_weights
from securevfl.algorithms.steps import MOMENTUM
from securevfl.errors import InputError
from securevfl.theory import afsgd, fdml, flex, vafl

BLOCKS = [slice(0, 2), slice(2, 4), slice(4, 6)]  # two parties; the last one is the server's


class Quadratics:
    """f_i(w) = |A_i (w - c_i)|^2 / 2 with L = 1 for every record and the mean's minimum known."""

    def __init__(self, seed: int = 0, records: int = 12, width: int = 6) -> None:
        rng = np.random.default_rng(seed)
        self.maps = rng.normal(size=(records, width, width))
        self.maps /= np.linalg.norm(self.maps, ord=2, axis=(1, 2))[:, None, None]
        self.centres = 0.5 * rng.normal(size=(records, width))
        self.hessians = np.einsum("nij,nik->njk", self.maps, self.maps)
        mean = self.hessians.mean(axis=0)
        self.convexity = float(np.linalg.eigvalsh(mean)[0])
        self.best = np.linalg.solve(mean, np.einsum("nij,nj->ni", self.hessians, self.centres).mean(axis=0))

    def gradient(self, w, record=None):
        each = np.einsum("nij,nj->ni", self.hessians, w - self.centres)
        return each.mean(axis=0) if record is None else each[record]

    def value(self, w):
        return 0.5 * float(np.square(np.einsum("nij,nj->ni", self.maps, w - self.centres)).sum(axis=1).mean())

    def variance(self, block, w):
        each = np.einsum("nij,nj->ni", self.hessians, w - self.centres)[:, block]
        return float(np.square(each - each.mean(axis=0)).sum(axis=1).mean())


def asynchronous(problem, rates, *, shares, delay, iterations, rng):
    """VAFL's recursion: one party and the server step at blocks that are up to `delay` iterations old."""
    w = np.zeros(6)
    past, norms, largest = [w.copy()], [], np.zeros(3)
    for k in range(iterations):
        norms.append(float(np.square(problem.gradient(w)).sum()))
        largest = np.maximum(largest, [problem.variance(block, w) for block in BLOCKS])
        stale = w.copy()
        active = int(rng.choice(2, p=shares))
        for block in BLOCKS[:2]:
            age = int(rng.integers(0, delay + 1))
            stale[block] = past[max(len(past) - 1 - age, 0)][block]
        stale[BLOCKS[active]] = w[BLOCKS[active]]
        step = problem.gradient(stale, int(rng.integers(12)))
        w = w.copy()
        for block in (BLOCKS[active], BLOCKS[2]):
            w[block] -= rates(k) * step[block]
        past = [*past[-delay - 1 :], w.copy()]
    return w, float(np.mean(norms)), largest


def constants(problem, largest, shares):
    return vafl.Constants(
        smoothness=1.0,
        shares=shares,
        variances=tuple(largest[:2]),
        server_variance=float(largest[2]),
        gap=problem.value(np.zeros(6)) - problem.value(problem.best),
    )


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_vafl_theorem_1_bounds_simulated_gradient_norms(delay):
    problem, rng, shares = Quadratics(), np.random.default_rng(1), (0.3, 0.7)
    rate = 1 / (4 * (1 + delay))
    runs = [
        asynchronous(problem, lambda k: rate, shares=shares, delay=delay, iterations=200, rng=rng)
        for _ in range(10)
    ]
    largest = np.max([each[2] for each in runs], axis=0)
    found = vafl.bounded_delay(constants(problem, largest, shares), delay=delay, iterations=200, rate=rate)
    assert found.limit == pytest.approx(rate)
    assert np.mean([each[1] for each in runs]) < found.bound


def test_vafl_theorem_1_is_not_vacuous_without_noise():
    """One block, no delay, no variance: gradient descent's own bound, 4 gap / (eta K), within its factor."""
    plain = vafl.Constants(smoothness=1.0, shares=(1.0,), variances=(0.0,), gap=1.0)
    found = vafl.bounded_delay(plain, delay=0, iterations=100)
    assert found.rate == found.limit == 0.25
    assert found.bound == pytest.approx(4 / (0.25 * 100))


def test_vafl_theorem_2_bounds_the_distance_to_the_best_loss():
    problem, rng, shares, delay = Quadratics(), np.random.default_rng(2), (0.4, 0.6), 2
    first = vafl.bounded_delay_convex(
        constants(problem, (1, 1, 1), shares), convexity=problem.convexity, delay=delay, iterations=1
    )
    runs = [
        asynchronous(
            problem,
            lambda k: first.numerator / (k + first.offset),
            shares=shares,
            delay=delay,
            iterations=400,
            rng=rng,
        )
        for _ in range(5)
    ]
    known = constants(problem, np.max([each[2] for each in runs], axis=0), shares)
    found = vafl.bounded_delay_convex(known, convexity=problem.convexity, delay=delay, iterations=400)
    gap = np.mean([problem.value(each[0]) for each in runs]) - problem.value(problem.best)
    assert gap < found.bound
    late, later = (
        vafl.bounded_delay_convex(known, convexity=problem.convexity, delay=delay, iterations=count).bound
        for count in (10**6, 10**7)
    )
    assert late / later == pytest.approx(10, rel=0.01)  # O(1/K) once K is far above K_0 = 531


def test_vafl_rates_at_the_start_keep_to_the_limit():
    """The printed K_0 of Theorem 4 lets the first rate be twice the largest that its proof admits."""
    known = vafl.Constants(smoothness=2.0, shares=(0.5, 0.5), variances=(1.0, 1.0), gap=1.0)
    found = vafl.stochastic_delay_convex(known, convexity=0.1, tails=(0.5, 0.9), decay=0.5, iterations=10)
    spread = max(vafl.delay_spreads((0.5, 0.9), 0.5))
    largest = 1 / (4 * (1 + math.sqrt(spread)) * 2.0)
    assert found.numerator / found.offset <= largest * (1 + 1e-12)
    contraction = 2 / found.numerator
    printed = 4 * (1 + math.sqrt(spread)) * 2.0 / contraction
    assert found.numerator / printed > 1.9 * largest


def test_delay_spreads_are_the_sums_they_stand_for():
    tail, decay = 0.7, 0.6
    sums = sum(
        sum(s * tail * decay**s for s in range(d, 400)) for d in range(1, 400)
    )  # the rest is below 0.6^400
    assert vafl.delay_spreads((tail,), decay)[0] == pytest.approx(sums, rel=1e-9)


def test_vafl_theorem_3_takes_the_slowest_party():
    known = vafl.Constants(smoothness=1.0, shares=(0.5, 0.5), variances=(0.0, 0.0), gap=1.0)
    even = vafl.stochastic_delay(known, tails=(0.5, 0.5), decay=0.5, iterations=10)
    uneven = vafl.stochastic_delay(known, tails=(0.5, 50.0), decay=0.5, iterations=10)
    assert uneven.limit < even.limit


def test_vafl_together_is_the_asynchronous_theorem_with_shares_over_t():
    alone = vafl.Constants(smoothness=1.0, shares=(0.25, 0.75), variances=(0.0, 0.0), gap=1.0)
    twice = vafl.Constants(smoothness=1.0, shares=(0.5, 1.0, 0.5), variances=(0.0,) * 3, gap=1.0, together=2)
    assert vafl.bounded_delay(twice, delay=3, iterations=9).bound == pytest.approx(
        vafl.bounded_delay(alone, delay=3, iterations=9).bound
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"smoothness": 0.0},
        {"shares": (0.5, 0.6)},
        {"shares": (1.0,)},
        {"variances": (-1.0, 0.0)},
        {"gap": math.nan},
        {"together": 2},
    ],
)
def test_vafl_constants_are_checked(wrong):
    good = {"smoothness": 1.0, "shares": (0.5, 0.5), "variances": (0.0, 0.0), "gap": 1.0}
    with pytest.raises(InputError):
        vafl.Constants(**{**good, **wrong})


def test_vafl_refuses_a_rate_above_its_limit():
    known = vafl.Constants(smoothness=1.0, shares=(1.0,), variances=(0.0,), gap=1.0)
    with pytest.raises(InputError, match=r"above the theorem's limit of 0\.0625"):
        vafl.bounded_delay(known, delay=3, iterations=5, rate=0.1)


# -- FDML ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "iterations"), [(1, 10), (5, 40), (9, 9), (30, 200)])
def test_fdml_counts_the_steps_of_parties_that_are_ahead(staleness, iterations):
    """sum_t of the steps within tau of t, behind or ahead; the printed bound counts only those behind."""
    rates = [1 / math.sqrt(t) for t in range(1, iterations + staleness + 1)]
    ahead = sum(sum(rates[t - 1 : t - 1 + staleness]) for t in range(1, iterations + 1))
    behind = sum(sum(rates[max(t - 1 - staleness, 0) : t - 1]) for t in range(1, iterations + 1))
    ours = staleness**2 + 2 * staleness * math.sqrt(iterations)
    assert max(ahead, behind) <= ours


def test_fdml_printed_start_is_too_small_for_parties_that_are_ahead():
    staleness = 20
    rates = [1 / math.sqrt(t) for t in range(1, 2 * staleness + 1)]
    first = sum(sum(rates[t - 1 : t - 1 + staleness]) for t in range(1, 4))  # three iterations
    assert first > sum(range(1, 4))  # eta_1 t each, as (30) has it


def test_fdml_regret_bounds_a_simulated_run():
    """A convex quadratic in two blocks, each seeing the other's block `staleness` iterations late."""
    problem, staleness, iterations = Quadratics(3), 3, 300
    diameter = 2 * float(np.linalg.norm(problem.best))
    gradient = float(
        max(np.linalg.norm(h, 2) * (diameter + np.linalg.norm(c - problem.best))
            for h, c in zip(problem.hessians, problem.centres, strict=True))
    )  # fmt: skip
    known = {
        "iterations": iterations, "parties": 2, "staleness": staleness,
        "smoothness": 1.0, "gradient": gradient, "diameter": diameter,
    }  # fmt: skip
    rate = fdml.best_rate(**known)
    rng = np.random.default_rng(4)
    w, past, lost = np.zeros(6), [], 0.0
    for t in range(1, iterations + 1):
        past.append(w.copy())
        record = int(rng.integers(12))
        assert np.linalg.norm(w - problem.best) <= diameter
        lost += 0.5 * float(np.square(problem.maps[record] @ (w - problem.centres[record])).sum())
        lost -= 0.5 * float(np.square(problem.maps[record] @ (problem.best - problem.centres[record])).sum())
        old, w = past[max(len(past) - 1 - staleness, 0)], w.copy()
        for own in (slice(0, 3), slice(3, 6)):
            seen = old.copy()
            seen[own] = past[-1][own]
            w[own] -= rate / math.sqrt(t) * problem.gradient(seen, record)[own]
    assert lost / iterations <= fdml.regret(rate=rate, **known)


def test_fdml_best_rate_is_best():
    known = {
        "iterations": 50, "parties": 3, "staleness": 2, "smoothness": 0.5, "gradient": 2.0, "diameter": 1.5,
    }  # fmt: skip
    rate = fdml.best_rate(**known)
    best = fdml.regret(rate=rate, **known)
    assert all(fdml.regret(rate=rate * factor, **known) > best for factor in (0.5, 0.9, 1.1, 2.0))


# -- AFSGD-VP -----------------------------------------------------------------------------------------------


class Reduced:
    """Two workers in turn on strongly convex quadratics; a worker sees the other's block one step late."""

    def __init__(self, convexity, records):
        rng = np.random.default_rng(5)
        turns = np.linalg.qr(rng.normal(size=(records, 4, 4)))[0]
        curves = rng.uniform(convexity, 1.0, size=(records, 4))
        self.hessians = np.einsum("nij,nj,nkj->nik", turns, curves, turns)
        self.centres = rng.normal(size=(records, 4)) / 4
        mean = self.hessians.mean(axis=0)
        self.best = np.linalg.solve(mean, np.einsum("nij,nj->ni", self.hessians, self.centres).mean(axis=0))
        self.mean, self.records, self.rng = mean, records, rng
        self.start = self.best + 0.5

    def each(self, w):
        return np.einsum("nij,nj->ni", self.hessians, w - self.centres)

    def gap(self, w):
        return 0.5 * float((w - self.best) @ self.mean @ (w - self.best))

    def constants(self, convexity):
        steep = max(float(np.square(self.each(w)).sum(axis=1).max()) for w in (self.start, self.best))
        return afsgd.Constants(
            convexity=convexity, smoothness=1.0, block_smoothness=1.0, gradient=steep, workers=2,
            gap=self.gap(self.start), visits=1, overlap=1, overlapping=1, records=self.records,
        )  # fmt: skip

    def walk(self, rate, epochs, *, saga, w=None):
        """One inner loop of SVRG, or SAGA: `epochs` times a step of each of the two blocks."""
        w = (self.start if w is None else w).copy()
        memory = self.each(w)
        full, before = memory.mean(axis=0), w.copy()
        for step in range(2 * epochs):
            own = slice(0, 2) if step % 2 == 0 else slice(2, 4)
            seen = before.copy()
            seen[own] = w[own]
            before = w.copy()
            record = int(self.rng.integers(self.records))
            now = self.hessians[record] @ (seen - self.centres[record])
            w[own] -= rate * (now - memory[record] + full)[own]
            if saga:
                full, memory[record] = full + (now - memory[record]) / self.records, now
        return w


def test_afsgd_theorem_6_bounds_runs_of_svrg():
    problem, accuracy = Reduced(0.9, 4), 0.1
    known = problem.constants(0.9)
    found = afsgd.svrg(known, accuracy * known.gap)
    gaps = []
    for _ in range(3):
        w = problem.start
        for _ in range(found.outer):
            w = problem.walk(found.rate, found.epochs, saga=False, w=w)
        gaps.append(problem.gap(w))
    assert np.mean(gaps) <= accuracy * known.gap
    # The bound holds with room to spare: one outer loop of the theorem's many is enough here.
    once = [problem.gap(problem.walk(found.rate, found.epochs, saga=False)) for _ in range(3)]
    assert found.outer > 5 and np.mean(once) <= accuracy * known.gap


def test_afsgd_theorem_8_bounds_runs_of_saga_long_before_its_time():
    """Millions of epochs are asked for; at the theorem's rate a hundredth of them reaches the accuracy."""
    problem, accuracy = Reduced(0.9, 2), 0.5
    known = problem.constants(0.9)
    found = afsgd.saga(known, accuracy * known.gap)
    few = math.ceil(math.log(1 / accuracy) / (found.rate * 0.9))
    assert few < found.epochs / 100 and few < 200_000
    assert problem.gap(problem.walk(found.rate, few, saga=True)) <= accuracy * known.gap


def afsgd_constants(**changes):
    known = {
        "convexity": 0.1, "smoothness": 1.0, "block_smoothness": 0.6, "gradient": 2.0, "workers": 2,
        "visits": 2, "overlap": 3, "overlapping": 2, "gap": 1.0, "records": 10,
    }  # fmt: skip
    return afsgd.Constants(**{**known, **changes})


@pytest.mark.parametrize("accuracy", [0.1, 1e-3, 1e-7])
def test_afsgd_theorem_4_reaches_its_accuracy(accuracy):
    """The rate solves (11)'s quadratic, and the bound of (28) at that schedule is the accuracy asked for."""
    known = afsgd_constants()
    found = afsgd.sgd(known, accuracy)
    floor = afsgd.sgd_error(known, rate=found.rate, epochs=10**15)
    assert floor == pytest.approx(accuracy / 2, rel=1e-9)
    assert afsgd.sgd_error(known, rate=found.rate, epochs=found.epochs) <= accuracy
    assert afsgd.sgd_error(known, rate=found.rate, epochs=found.epochs // 4) > accuracy


def test_afsgd_theorem_4_needs_one_over_the_accuracy_not_its_root():
    """Remark 5 says 1/sqrt(eps) log(1/eps); a hundredth of the accuracy costs a hundred times, not ten."""
    rough, fine = (afsgd.sgd(afsgd_constants(), accuracy).rate for accuracy in (1e-6, 1e-8))
    assert rough / fine == pytest.approx(100, rel=1e-3)


def test_afsgd_theorem_4_bounds_a_simulated_run():
    """Block SGD on regularised quadratics with products that are up to `overlap` iterations old."""
    problem, rng, overlap = Quadratics(5), np.random.default_rng(6), 2
    ridge = 0.2  # makes every record's loss strongly convex, as Assumption 1 asks
    hessians = problem.hessians + ridge * np.eye(6)

    def grad(w, i):
        return problem.gradient(w, i) + ridge * w

    def value(w):
        return problem.value(w) + ridge / 2 * float(w @ w)

    best = np.linalg.solve(
        hessians.mean(axis=0), np.einsum("nij,nj->ni", problem.hessians, problem.centres).mean(axis=0)
    )
    blocks = [slice(0, 3), slice(3, 6)]
    block_smoothness = max(np.linalg.norm(h[b, b], 2) for h in hessians for b in blocks)
    rate, epochs = 0.02, 300
    w, past, most = np.zeros(6), [], 0.0
    for _, block in itertools.product(range(epochs), blocks):
        past.append(w.copy())
        seen = past[max(len(past) - 1 - int(rng.integers(overlap + 1)), 0)].copy()
        seen[block] = w[block]
        step = grad(seen, int(rng.integers(12)))
        most = max(most, *(float(np.square(grad(w, i)[b]).sum()) for i in range(12) for b in blocks))
        w = w.copy()
        w[block] -= rate * step[block]
    known = afsgd.Constants(
        convexity=ridge, smoothness=1 + ridge, block_smoothness=block_smoothness, gradient=most, workers=2,
        visits=1, overlap=overlap, overlapping=overlap, gap=value(np.zeros(6)) - value(best),
    )  # fmt: skip
    assert value(w) - value(best) <= afsgd.sgd_error(known, rate=rate, epochs=epochs)


def test_afsgd_theorem_6_has_a_rate_only_with_a_positive_rho():
    known = afsgd_constants()
    found = afsgd.svrg(known, 1e-3)
    left = (known.visits**2 * found.rate * known.workers + known.block_smoothness) * found.rate**2 / 2
    rho = found.rate * known.convexity / 2 - 16 * known.visits * known.workers * left / known.convexity
    assert 0 < rho < 1  # the printed condition (13), rho < 0, admits no such rate
    assert (1 - rho) ** found.epochs <= 0.25
    assert (3 / 4) ** found.outer * known.gap <= 1e-3 / 2 * (1 + 1e-9)


def test_afsgd_finer_accuracy_means_smaller_rates():
    known = afsgd_constants()
    for theorem in (afsgd.svrg, afsgd.saga):
        rough, fine = theorem(known, 1e-2), theorem(known, 1e-6)
        assert fine.rate <= rough.rate
        assert fine.epochs * fine.outer > rough.epochs * rough.outer


def test_afsgd_remarks_7_and_9_leave_out_what_small_accuracies_cost():
    """O(log(1/eps)) would be 1.2 times the work for a hundredth of eps; the shrinking rates make it more."""
    known = afsgd_constants()
    for theorem in (afsgd.svrg, afsgd.saga):
        rough, fine = theorem(known, 1e-12), theorem(known, 1e-14)
        assert fine.epochs * fine.outer > 5 * rough.epochs * rough.outer


def test_afsgd_constants_are_checked():
    with pytest.raises(InputError, match="exceeds the smoothness"):
        afsgd_constants(convexity=2.0)
    with pytest.raises(InputError, match="q L_max"):
        afsgd_constants(block_smoothness=0.1)


# -- Flex-VFL -----------------------------------------------------------------------------------------------


def local_rounds(hessian, rate, steps, rounds, parties):
    """Flex-VFL without noise: every party takes `steps` steps while the others' blocks stand still."""
    width = hessian.shape[0] // parties
    w, norms = np.ones(hessian.shape[0]), []
    for _ in range(rounds):
        norms.append(float(np.square(hessian @ w).sum()))
        ends = w.copy()
        for k in range(parties):
            block, seen = slice(k * width, (k + 1) * width), w.copy()
            for _ in range(steps):
                seen[block] = seen[block] - rate * (hessian @ seen)[block]
            ends[block] = seen[block]
        w = ends
    return float(np.mean(norms))


@pytest.mark.parametrize("steps", [1, 4])
def test_flex_theorem_1_bounds_local_steps(steps):
    rng = np.random.default_rng(7)
    half = rng.normal(size=(6, 6))
    hessian = half @ half.T
    smoothness = float(np.linalg.norm(hessian, 2))
    rate = flex.rate_limit(smoothness=smoothness, block_smoothness=smoothness, weights=[1.0] * steps)
    gap = 0.5 * float(np.ones(6) @ hessian @ np.ones(6))
    block = flex.Block(rate=rate, weights=(1.0,) * steps, variance=0.0)
    bound = flex.bound([[block] * 3] * 50, smoothness=smoothness, gap=gap)
    seen = local_rounds(hessian, rate, steps, 50, parties=3)
    assert seen / 3 <= bound  # (15) is the mean over the three blocks
    uniform = flex.uniform_bound(
        rounds=50, rate=rate, steps=steps, smoothness=smoothness, gap=gap, variances=(0.0,) * 3
    )
    assert uniform == pytest.approx(3 * bound)


def local_drift(hessian, kind, steps):
    """Squared changes of the gradient along one party's steps at the rate of (14), and what they may be."""
    smoothness = float(np.linalg.norm(hessian, 2))
    weights = gradient_weights(kind, steps, rate=1 / (16 * steps * smoothness), proximal=smoothness)
    rate = flex.rate_limit(smoothness=smoothness, block_smoothness=smoothness, weights=list(weights))
    start = np.linalg.eigh(hessian)[1][:, -1]  # where the gradient changes fastest
    w, speed, first, drift = start.copy(), np.zeros_like(start), hessian @ start, []
    for step in range(steps):
        gradient = hessian @ w
        drift.append(float(np.square(gradient - first).sum()))
        speed = MOMENTUM * speed + gradient
        pull = smoothness * (w - start) if kind == "proximal" else 0.0
        scale = 1 / np.sqrt(step + 1) if kind == "decaying" else 1.0
        w = w - rate * scale * (speed if kind == "momentum" else gradient + pull)
    x = rate * smoothness * max(weights)
    most = 0.36 * steps**3 * x**2 * max(weights) * float(np.square(first).sum())
    return float(weights @ drift), most, tuple(weights), rate


@pytest.mark.parametrize("kind", ["sgd", "momentum", "proximal", "decaying"])
@pytest.mark.parametrize("steps", [2, 20])
def test_flex_lemma_1_holds_with_a_smaller_constant_for_every_optimiser(kind, steps):
    half = np.random.default_rng(8).normal(size=(4, 4))
    seen, most, weights, rate = local_drift(half @ half.T, kind, steps)
    assert 0 < seen <= most
    if kind == "sgd":
        assert seen > most / 7, "the constant is not 8 times too large, as the paper's is"
    flex.Block(rate=rate, weights=weights, variance=1.0)


def test_flex_theorem_1_follows_for_weights_that_differ_and_not_for_any():
    share = 0.36 / 8
    for r in (1, flex.UNEVEN):
        kept = (1 - 1 / 8 - r * (1 / 32 + 1 / 256) * share) / 2
        assert 1 / kept <= 4 and (1 + r * (1 / 4 + 1 / 32) * share) / kept <= 4
    with pytest.raises(InputError, match="times the mean"):
        flex.Block(rate=0.1, weights=(1.0,) + (1e-9,) * 99, variance=0.0)


def test_flex_corollary_1_as_printed_is_refuted():
    """Forty blocks, one round of one step: |grad F|^2 is above 4 gap / (R eta tau (K + 1))."""
    hessian, rate = np.eye(40), 1 / 16
    seen = local_rounds(hessian, rate, 1, 1, parties=40)
    gap = 0.5 * 40
    assert seen > 4 * gap / (rate * 40)
    ours = flex.uniform_bound(rounds=1, rate=rate, steps=1, smoothness=1.0, gap=gap, variances=(0.0,) * 40)
    assert seen <= ours


def test_flex_adaptive_rates_keep_to_the_limit_if_rounds_shrink_no_faster_than_said():
    """Steps per round 10, 5, 5, 10: the smallest ratio of a round to the next is alpha, a lower bound."""
    steps = [10, 5, 5, 10]
    ratio = min(a / b for a, b in itertools.pairwise(steps))
    given = flex.adaptive_limit(smoothness=2.0, block_smoothness=1.0, slowest_change=ratio)
    for before, now in itertools.pairwise(steps):
        limit = flex.rate_limit(smoothness=2.0, block_smoothness=1.0, weights=[1.0] * now)
        assert given / before <= limit * (1 + 1e-12)
    printed = flex.adaptive_limit(smoothness=2.0, block_smoothness=1.0, slowest_change=1.0)
    assert printed / 5 > flex.rate_limit(smoothness=2.0, block_smoothness=1.0, weights=[1.0] * 10)


def test_flex_corollary_2_needs_square_summable_rates():
    assert [flex.vanishes(power) for power in (0.5, 0.51, 1.0, 1.1)] == [False, True, True, False]
