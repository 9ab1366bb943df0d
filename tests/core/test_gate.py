"""The gate: nothing leaves unclipped, unaccounted, over budget, or before it is on disk."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from securevfl.accountants.records import Filter
from securevfl.errors import BudgetExceeded, LedgerError, PlanError, TrainingDiverged
from securevfl.privacy.gate import Gate, Mechanism, clip_rows
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.noise import Noise, snap
from securevfl.protocols.sums.noise import NoisySum
from securevfl.protocols.sums.tree_sums import TwoTreeSum


def make_gate(
    *,
    mode: str = "strict",
    sigma: float = 2.0,
    clip: float = 1.0,
    budget: float = math.inf,
    once: bool = False,
    update: Mechanism = Mechanism(clip=0.5, sigma=3.0),  # noqa: B008 - it cannot be changed
) -> Gate:
    return Gate(
        owner="p1",
        mode=mode,
        ledger=Ledger("p1"),
        mechanism=Mechanism(clip=clip, sigma=sigma),
        update=update,
        budget=Filter(mode=mode, budget_mu=budget, records=100),
        noise=Noise(),
        release_once=once,
    )


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def release(gate: Gate, numbers: np.ndarray, value: float = 5.0, width: int = 3):
    vectors = torch.full((len(numbers), width), value, requires_grad=True)
    return gate.release(vectors, rows=numbers, kind="embedding", observers=("p0",))


@pytest.mark.parametrize("size", [0.5, 5.0, 1e6])
def test_what_enters_a_sum_is_clipped(size: float) -> None:
    """The ledger's sensitivity of a sum is 2 C, so that is how far a party's part may move at most."""
    gate = make_gate(clip=0.7)
    protocol = TwoTreeSum(workers=4)
    noisy = NoisySum(protocol, sigma=1e-3, colluders=1)
    vectors = torch.nn.functional.normalize(torch.randn((50, 6)), dim=1) * size
    entered = gate.contribute(
        vectors, rows=rows(*range(50)), kind="embedding", observers=("p0",), noise=noisy
    )
    values = protocol.fixed_point.decode(entered.values)
    expected = vectors.double().numpy() * min(1.0, 0.7 / size)
    # A share has standard deviation 1e-3 / sqrt(3); eight of them are never exceeded by 300 draws.
    assert np.abs(values - expected).max() < 8e-3 / math.sqrt(3)
    (entry,) = [json.loads(line) for line in gate.ledger.lines if "embedding" in line]
    assert entry["sensitivity"] == pytest.approx(2 * 0.7, rel=1e-6)
    assert entry["sigma"] == pytest.approx(1e-3, rel=1e-5)


def test_clipped_norms_never_exceed_the_bound() -> None:
    """In float64, after all rounding: over many scales and widths, no norm is above C."""
    generator = torch.Generator().manual_seed(3)
    for width in (1, 2, 7, 64, 513):
        for scale in (1e-20, 1e-3, 1.0, 1e6, 1e18):
            gate = make_gate(sigma=1e-9, clip=0.7)
            gate.noise.gaussian = lambda shape, std: np.zeros(shape)  # type: ignore[method-assign]
            vectors = torch.randn((40, width), generator=generator) * scale
            source = clip_rows(vectors, 0.7).double().numpy()
            from securevfl.privacy.gate import clip_exactly

            assert np.linalg.norm(clip_exactly(source, 0.7), axis=1).max() <= 0.7


def test_noise_is_gaussian_with_the_right_scale() -> None:
    """Kolmogorov-Smirnov; the threshold sqrt(-ln(p/2)/2n) alarms falsely with p = 1e-6 (DKW)."""
    gate = make_gate(sigma=2.0)
    values = np.concatenate(
        [release(gate, np.arange(100), value=0.0, width=300).values.ravel() for _ in range(4)]
    )
    statistic = stats.kstest(values / 2.0, "norm").statistic
    assert statistic < math.sqrt(-0.5 * math.log(1e-6 / 2)) / math.sqrt(values.size)


def test_two_gates_never_share_noise() -> None:
    first, second = release(make_gate(), rows(1, 2)).values, release(make_gate(), rows(1, 2)).values
    assert not (first[:, None] == second).all(axis=-1).any()  # three equal values: P < 1e-18


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_processes_never_share_noise() -> None:
    """Workers that a server forks after it has loaded a run: the same noise twice shows a difference."""
    script = """
import os
from securevfl.privacy.noise import Noise
noise = Noise()
noise.gaussian((3,), 1.0)
for _ in range(2):
    if os.fork() == 0:
        os.write(1, f"{noise.gaussian((2,), 1.0).tolist()} {noise.stream.words(1)[0]}\\n".encode())
        os._exit(0)
    os.wait()
print(noise.gaussian((2,), 1.0).tolist(), noise.stream.words(1)[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.split("\n")[:3]
    assert len(set(lines)) == 3


def test_reproducible_noise_voids_the_guarantee() -> None:
    noise = Noise.insecure(7, "p1")
    gate = make_gate()
    gate.noise = noise
    release(gate, rows(1))
    assert gate.budget.spent_mu == math.inf
    assert '"mechanism":"exact"' in gate.ledger.lines[-1]


def test_updates_with_noise_that_others_know_are_exact() -> None:
    gate = make_gate(mode="dp-encoder")
    gate.noise = Noise.insecure(7, "p1")
    (noisy,) = gate.noisy_update([torch.zeros(4)], rows=rows(3, 5))
    assert noisy.any() and gate.budget.spent_mu == math.inf
    entry = json.loads(gate.ledger.lines[-1])
    assert (entry["mechanism"], entry["vectors"], entry["rows"]) == ("exact", 2, "3,5")


def test_ledger_is_written_before_noise_is_even_drawn() -> None:
    gate = make_gate()

    def refuse(*_: object) -> None:
        raise AssertionError("noise was drawn")

    gate.noise.gaussian = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(AssertionError):
        release(gate, rows(1, 2))
    assert len(gate.ledger.lines) == 2  # session and the entry: a crash here over-counts


def test_over_budget_nothing_happens() -> None:
    gate = make_gate(budget=3.0)  # each vector costs mu^2 = 1, so nine fit
    for number in range(9):
        release(gate, rows(number))
    before = list(gate.ledger.lines)
    with pytest.raises(BudgetExceeded, match="'p1' has spent mu 3 of 3"):
        release(gate, rows(50))
    assert gate.ledger.lines == before
    assert gate.budget.spent_mu == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("strict", math.sqrt(8)), ("dp-encoder", math.sqrt(3 + 2 * (1 / 3) ** 2)), ("frozen", math.sqrt(3))],
)
def test_spending_per_mode(mode: str, expected: float) -> None:
    """2C/sigma = 1; record 1 leaves three times of eight; two updates with 2 C_g / sigma_g = 1/3."""
    gate = make_gate(mode=mode)
    for numbers in (rows(1, 2, 3), rows(1, 4), rows(5, 6, 1)):
        release(gate, numbers)
    if mode == "dp-encoder":
        for numbers in (rows(1, 2), rows(1, 9)):
            gate.noisy_update([torch.zeros(4)], rows=numbers)
    assert gate.budget.spent_mu == pytest.approx(expected, rel=1e-12)


def test_release_once_sends_the_same_bytes_at_no_cost() -> None:
    gate = make_gate(mode="frozen", once=True)
    first = release(gate, rows(3, 1, 2)).values
    entries, spent = len(gate.ledger.lines), gate.budget.spent_mu
    again = release(gate, rows(1, 2, 3)).values
    assert (again == first[[1, 2, 0]]).all()
    assert (len(gate.ledger.lines), gate.budget.spent_mu) == (entries, spent)
    mixed = release(gate, rows(2, 8)).values
    assert (mixed[0] == first[2]).all()
    assert '"rows":"8"' in gate.ledger.lines[-1]


def test_release_once_survives_a_restart() -> None:
    gate = make_gate(mode="frozen", once=True)
    first = release(gate, rows(3, 1, 2)).values
    other = make_gate(mode="frozen", once=True)
    other.load(gate.state())
    assert (release(other, rows(3, 1, 2)).values == first).all()
    assert len(other.ledger.lines) == 1


def test_another_observer_gets_fresh_noise_and_pays() -> None:
    gate = make_gate(mode="frozen", once=True)
    first = release(gate, rows(1)).values
    vectors = torch.full((1, 3), 5.0)
    second = gate.release(vectors, rows=rows(1), kind="embedding", observers=("p2",)).values
    assert (first != second).any()
    assert gate.budget.spent_mu == pytest.approx(math.sqrt(2))


def test_exact_release_is_infinite() -> None:
    gate = make_gate(sigma=0.0)
    out = release(gate, rows(1), value=9.0)
    assert (out.values == 9.0).all()
    assert gate.budget.spent_mu == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stay_inside(bad: float) -> None:
    gate = make_gate()
    with pytest.raises(TrainingDiverged, match="p1: embeddings are not finite"):
        release(gate, rows(1), value=bad)
    assert len(gate.ledger.lines) == 1


def test_shape_must_fit() -> None:
    with pytest.raises(PlanError, match="for 2 rows"):
        make_gate().release(torch.zeros((3, 2)), rows=rows(1, 2), kind="x", observers=("p0",))


@pytest.mark.parametrize(
    ("clip", "sigma"), [(0.0, 1.0), (-1.0, 1.0), (math.inf, 1.0), (1.0, -1.0), (1.0, math.nan)]
)
def test_bad_mechanisms(clip: float, sigma: float) -> None:
    with pytest.raises(PlanError, match="must be"):
        Mechanism(clip=clip, sigma=sigma)


def test_gradient_reaches_through_the_clip() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.4]], requires_grad=True)
    clip_rows(vectors, 1.0).sum().backward()
    # d(x/|x|)/dx for x = (3, 4): (I - uu^T)/5, u = (.6, .8); the second row is inside the ball.
    unit = np.array([0.6, 0.8])
    expected = (np.eye(2) - np.outer(unit, unit)) / 5 @ np.ones(2)
    assert vectors.grad is not None
    assert np.allclose(vectors.grad[0].numpy(), expected, atol=1e-6)  # float32
    assert np.allclose(vectors.grad[1].numpy(), 1.0)
    zero = torch.zeros((1, 2), requires_grad=True)
    clip_rows(zero, 1.0).sum().backward()
    assert zero.grad is not None and torch.isfinite(zero.grad).all()


def test_snap_hides_low_bits() -> None:
    values = np.array([0.1234567890123, -3.3, 0.0])
    snapped = snap(values, 1.5)
    assert np.abs(snapped - values).max() <= 2.0**-21
    assert (snapped * 2.0**20 == np.rint(snapped * 2.0**20)).all()


def test_uniform_noise_covers_its_range() -> None:
    values = Noise().uniform((200_000,), 2.0)
    assert -2 <= values.min() < -1.999 and 1.999 < values.max() <= 2
    statistic = stats.kstest(values, stats.uniform(-2, 4).cdf).statistic
    assert statistic < math.sqrt(-0.5 * math.log(1e-6 / 2)) / math.sqrt(values.size)


def test_negative_seed_is_refused() -> None:
    with pytest.raises(PlanError, match="negative"):
        Noise.insecure(-1, "p0")


@pytest.mark.parametrize("mode", ["strict", "dp-encoder"])
def test_what_a_release_is_called_does_not_change_what_it_costs(mode: str) -> None:
    """The word comes from the one who asks: a vector named like a local update, which in mode strict costs
    nothing, would leave for free."""
    costs = {}
    for kind in ("embedding", "update", "contributions", "randomised labels", "means"):
        gate = make_gate(mode=mode, sigma=2.0, budget=1.5)
        vectors = torch.ones((1, 3))
        gate.release(vectors, rows=rows(4), kind=kind, observers=("p0",))
        costs[kind] = gate.budget.spent_mu
        with pytest.raises(BudgetExceeded):
            for _ in range(9):
                gate.release(vectors, rows=rows(4), kind=kind, observers=("p0",))
    assert set(costs.values()) == {1.0}


def test_a_release_cannot_pass_for_a_session() -> None:
    """Sessions are not counted when a ledger is read again, so nothing is released under that name."""
    gate = make_gate()
    with pytest.raises(LedgerError, match="cannot be of kind 'session'"):
        gate.release(torch.ones((1, 3)), rows=rows(4), kind="session", observers=("p0",))
    assert gate.budget.spent_mu == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [4.0, 0.3])
def test_low_order_bits_of_noisy_updates_tell_nothing(sigma: float, dtype: torch.dtype) -> None:
    """The worlds of a gradient 0 and of one at the clip norm, and a sum far above the noise, share a lattice.

    Added in float32, 3,352 of 100,000 values below a quarter of the clip norm were no multiples of 2^-25 in
    one world and none in the other.
    """
    step = 2.0 ** (math.floor(math.log2(sigma)) - 20)
    counts = []
    for gradient in (0.0, 1.0, 1 / 3, 1e4 / 3):
        gate = make_gate(mode="dp-encoder", update=Mechanism(clip=1.0, sigma=sigma))
        (noisy,) = gate.noisy_update([torch.full((100_000,), gradient, dtype=dtype)], rows=rows(1))
        assert noisy.dtype == dtype
        multiples = noisy.double().numpy() / step
        assert (multiples == np.rint(multiples)).all()
        assert abs(float(noisy.double().mean()) - gradient) < 6 * sigma / math.sqrt(noisy.numel())
        if gradient <= 1:
            counts.append(np.bincount(multiples.astype(np.int64) % 8, minlength=8))
    # Of 100,000 draws each of the eight endings has 12,500 +- 105 (one standard error).
    assert np.abs(np.array(counts) - 12_500).max() < 6 * 105
