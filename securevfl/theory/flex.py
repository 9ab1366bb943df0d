"""Flex-VFL, Theorem 1, its corollaries and the adaptive extension: eqs. (14), (15), (17), (18) and (20).

Slips of the paper, repaired here:

* (17) divides its first term by K + 1 and does not sum the variances: the left side of (15) is then the mean
  over blocks, not the squared norm of the whole gradient. `uniform_bound` gives the latter.
* (18) must bound the change from *below*: (19) asks for A_k <= ratio / (16 max(L, L_k)), so that (20), A_k <=
  alpha / (16 max(L, L_k)), suffices where every ratio is at least alpha.
* Proximal steps have weights (1 - eta mu)^(tau - 1 - t), as the recursion above them shows, not tau - t + 1.
  They are at most 1, like those of decaying steps, although (8) asks for w >= 1.
* The proof of (15) has slips, the bound none: (55) loses a factor eta in both terms of the drift, and (56)
  forgets their variance and uses tau <= sum of w where tau max w <= sum of w is needed, which holds for equal
  weights alone. Lemma 1 is proved for steps eta w_t g_t, which momentum's are not, and is generous. Where a
  party stands after t steps is eta times a sum of its gradients with coefficients of at most max w, for all
  optimisers here; so with (14) |g_t - g_0| <= ((1 + x)^t - 1) |g_0|, x = eta L_k max w <= 1 / (16 tau), and
  (12) and (13) hold with 0.36 in place of 8. Then (15) follows while tau max w is at most `UNEVEN` times the
  sum of w: 1 + r (1/4 + 1/32) 0.36/8 <= 4/2 (1 - 1/8 - r (1/32 + 1/256) 0.36/8) for r up to 47.

The weights w_t themselves are computed where Flex takes its steps (`gradient_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from securevfl.errors import InputError
from securevfl.theory.checks import at_least_zero, positive

UNEVEN = 47
"""How many times the mean weight the largest may be."""


def rate_limit(*, smoothness: float, block_smoothness: float, weights: Sequence[float]) -> float:
    """(14): the largest rate for a party with these weights of its local steps (ones for plain SGD)."""
    positive(smoothness=smoothness, block_smoothness=block_smoothness)
    _check_steps(len(weights))
    return 1 / (16 * len(weights) * max(smoothness, block_smoothness) * max(weights))


@dataclass(frozen=True, kw_only=True)
class Block:
    """One party, or the server, in one round.

    Attributes:
        rate: eta_k.
        weights: w_k^t of its local steps.
        variance: sigma_k^2 of its gradient for one batch.
    """

    rate: float
    weights: tuple[float, ...]
    variance: float

    def __post_init__(self) -> None:
        positive(rate=self.rate)
        at_least_zero(variance=self.variance)
        _check_steps(len(self.weights))
        uneven = len(self.weights) * max(self.weights) / sum(self.weights)
        if not 1 - 1e-9 <= uneven <= UNEVEN:
            raise InputError(
                f"the largest weight is {uneven:.3g} times the mean; (15) is proved for up to {UNEVEN}"
            )

    @property
    def mass(self) -> float:
        """eta_k W_k: what the block adds to S."""
        return self.rate * sum(self.weights)


def bound(rounds: Sequence[Sequence[Block]], *, smoothness: float, gap: float) -> float:
    """(15): bounds the mean of the blocks' squared gradient norms, weighted with eta_k W_k over all rounds.

    Args:
        rounds: For every round its blocks; each keeps to `rate_limit`.
        smoothness: L.
        gap: F(start) - F_inf.
    """
    positive(smoothness=smoothness)
    at_least_zero(gap=gap)
    blocks = [block for each in rounds for block in each]
    mass = sum(block.mass for block in blocks)
    if not blocks:
        raise InputError("no rounds; expected at least one")
    noise = sum(
        block.rate * block.mass * max(block.weights) * len(block.weights) * block.variance for block in blocks
    )
    return 4 * (gap + smoothness * noise) / mass


def uniform_bound(
    *, rounds: int, rate: float, steps: int, smoothness: float, gap: float, variances: Sequence[float]
) -> float:
    """Corollary 1, repaired: the mean over rounds of the whole gradient's squared norm, plain SGD."""
    block = [Block(rate=rate, weights=(1.0,) * steps, variance=variance) for variance in variances]
    if rounds < 1:
        raise InputError(f"{rounds} rounds; expected at least 1")
    first = 4 * gap / (rounds * rate * steps)
    return first + 4 * smoothness * rate * steps * sum(each.variance for each in block)


def vanishes(power: float) -> bool:
    """Corollary 2: whether rates eta / r^power, below (14), drive the bound to zero: 1/2 < power <= 1."""
    return 0.5 < power <= 1


def adaptive_limit(*, smoothness: float, block_smoothness: float, slowest_change: float) -> float:
    """(20): the largest A_k for rates A_k / (tau w) of the round before.

    Args:
        smoothness: L.
        block_smoothness: L_k.
        slowest_change: alpha: tau w of a round is at least alpha times that of the next one.
    """
    positive(smoothness=smoothness, block_smoothness=block_smoothness, slowest_change=slowest_change)
    return min(slowest_change, 1.0) / (16 * max(smoothness, block_smoothness))


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise InputError(f"{steps} local steps; expected at least 1")
