"""AFSGD-VP, Theorems 4, 6 and 8: the rate and the number of epochs that reach a given accuracy.

An *epoch* of these theorems visits every worker's block at least once; it is not a pass over the records.
Slips of the paper, repaired here:

* Remark 5 reads O(1/sqrt(eps) log(1/eps)) off Theorem 4; its rate (11) is linear in eps for small eps, so the
  order is 1/eps log(1/eps).
* Theorem 6 asks for rho < 0 in (13); the proof divides by rho and needs 0 < rho < 1.
* Theorem 8: c_0 has gamma q eta_1^2 + L_max where the units (and the proof's other terms) have gamma L^2 q
  eta_1^2 + L_max; its number of epochs needs rho > 1 - gamma mu / 4, which the statement leaves out.
* Remarks 7 and 9 call the order O(log(1/eps)) although (15) and (16) shrink the rate with eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from securevfl.errors import InputError
from securevfl.theory.checks import at_least_zero, positive


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Assumptions 1 to 6.

    Attributes:
        convexity: mu of every record's loss.
        smoothness: L.
        block_smoothness: L_max, the largest of the blocks.
        gradient: G: a bound on the *squared* norm of a block's gradient of one record.
        workers: q.
        visits: eta_1: how often one block is updated while all are visited, at most.
        overlap: tau: how old a product may be, in iterations.
        overlapping: eta_2: updates of one block within that time, at most.
        gap: f(w_0) - f(w_*).
        records: l, for SAGA.
    """

    convexity: float
    smoothness: float
    block_smoothness: float
    gradient: float
    workers: int
    gap: float
    visits: int = 1
    overlap: int = 0
    overlapping: int = 0
    records: int = 1

    def __post_init__(self) -> None:
        positive(
            convexity=self.convexity,
            smoothness=self.smoothness,
            block_smoothness=self.block_smoothness,
            gradient=self.gradient,
            workers=self.workers,
            visits=self.visits,
            gap=self.gap,
            records=self.records,
        )
        at_least_zero(overlap=self.overlap, overlapping=self.overlapping)
        if self.convexity > self.smoothness:
            raise InputError(f"strong convexity {self.convexity} exceeds the smoothness {self.smoothness}")
        if self.smoothness > self.workers * self.block_smoothness * (1 + 1e-9):
            raise InputError(
                f"L is {self.smoothness}, above q L_max = {self.workers * self.block_smoothness}; "
                "blocks that smooth make a smoother whole"
            )


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a theorem asks for.

    Attributes:
        rate: gamma.
        epochs: Epochs of visiting all blocks; for SVRG those of one inner loop.
        outer: Snapshots of SVRG; 1 for the others.
    """

    rate: float
    epochs: int
    outer: int = 1


def sgd(constants: Constants, accuracy: float) -> Requirement:
    """Theorem 4: gamma of (11), the epochs of (12)."""
    positive(accuracy=accuracy)
    c = constants
    drag = c.smoothness**2 * (c.workers * c.visits**2 + c.overlapping * c.overlap)
    inside = 2 * c.convexity * accuracy * drag / (c.gradient * c.visits * c.workers)
    # sqrt(a^2 + b) - a loses all digits for small b; b / (sqrt(a^2 + b) + a) does not.
    rise = inside / (math.sqrt(c.block_smoothness**2 + inside) + c.block_smoothness)
    rate = rise / (2 * drag)
    epochs = 2 / (c.convexity * rate) * math.log(max(2 * c.gap / accuracy, 1))
    return Requirement(rate=rate, epochs=math.ceil(epochs))


def sgd_error(constants: Constants, *, rate: float, epochs: int) -> float:
    """The bound behind Theorem 4, (28): E f - f* after so many epochs with this rate."""
    positive(rate=rate)
    at_least_zero(epochs=epochs)
    c = constants
    drag = rate * c.smoothness**2 * (c.workers * c.visits**2 + c.overlapping * c.overlap)
    floor = rate * c.visits * c.workers * (drag + c.block_smoothness) * c.gradient / c.convexity
    return max(1 - rate * c.convexity / 2, 0.0) ** epochs * c.gap + floor


def svrg(constants: Constants, accuracy: float) -> Requirement:
    """Theorem 6 with 0 < rho < 1: the largest gamma that meets (13) to (15)."""
    positive(accuracy=accuracy)
    c = constants

    def rho(rate: float) -> float:
        return (
            rate * c.convexity / 2 - 16 * c.smoothness**2 * c.visits * c.workers * _c(c, rate) / c.convexity
        )

    def admitted(rate: float) -> bool:
        left, pull = _c(c, rate), rho(rate)
        if not 0 < pull < 1:
            return False
        stale = (0.5 + 2 * left / rate) * c.overlapping * c.overlap
        stale += 4 * left / rate * c.visits**2 * c.workers
        push = rate**3 * stale * c.visits * c.workers * c.smoothness**2 * c.gradient / pull
        reach = 8 * c.smoothness**2 * c.visits * c.workers * left / (pull * c.convexity)
        return reach <= 0.5 and push <= accuracy / 8

    rate = _largest(admitted, 2 / c.convexity)
    inner = math.log(0.25) / math.log1p(-rho(rate))
    outer = math.log(max(2 * c.gap / accuracy, 1)) / math.log(4 / 3)
    return Requirement(rate=rate, epochs=math.ceil(inner), outer=max(math.ceil(outer), 1))


def saga(constants: Constants, accuracy: float) -> Requirement:
    """Theorem 8: the largest gamma that meets (16) to (19) with 1 - rho = min(gamma mu / 8, 1 / (2 l))."""
    positive(accuracy=accuracy)
    c = constants

    def parts(rate: float) -> tuple[float, float, float, float, float]:
        drag = rate * c.smoothness**2 * c.workers * c.visits**2
        own = drag + c.block_smoothness
        c0 = (c.overlapping**2 + 3 * own * (c.visits + 2 * c.overlapping)) * c.overlap
        c0 += (drag + 8 * c.block_smoothness) * c.visits * c.workers * c.visits
        c0 *= rate**4 * c.smoothness**2 * c.visits * c.workers * c.gradient
        c1 = own * rate**2 * c.visits * c.workers * 2 * c.smoothness**2
        c2 = 4 * own * c.smoothness**2 * c.visits**2 * c.workers / c.records * rate**2
        loss = min(rate * c.convexity / 8, 1 / (2 * c.records))  # 1 - rho, which may be below its last digit
        return c0, c1, c2, loss, rate * c.convexity**2 / 4 - 2 * c1 - c2

    def admitted(rate: float) -> bool:
        c0, c1, c2, loss, left = parts(rate)
        if left <= 0 or rate * c.convexity >= 4:
            return False
        memory = (1 - loss) / (1 / c.records - loss)
        pull = rate * c.convexity**2 / 4
        return (
            4 * c0 / (rate * c.convexity * loss * left) <= accuracy / 2
            and 2 * c1 + c2 * (1 + memory) <= pull
            and c2 + c1 * (2 + memory) <= pull
        )

    rate = _largest(admitted, 4 / c.convexity)
    _, _, _, loss, left = parts(rate)
    pull = rate * c.convexity / 4
    reach = 2 * (1 - 2 * loss + pull) * c.gap / (accuracy * (pull - loss) * left)
    return Requirement(rate=rate, epochs=max(math.ceil(math.log(max(reach, 1)) / -math.log1p(-loss)), 1))


def _c(c: Constants, rate: float) -> float:
    """C of Theorem 6."""
    return (c.visits**2 * rate * c.smoothness**2 * c.workers + c.block_smoothness) * rate**2 / 2


def _largest(admitted: Callable[[float], bool], high: float) -> float:
    """The largest rate that is admitted with all smaller ones, to six digits.

    Every condition is a power series in gamma without a constant term on its small side, so that all hold
    from some rate downwards.
    """
    low = high
    while not admitted(low):
        low /= 2
        if low < 1e-300:
            raise InputError("no rate meets the theorem's conditions; check the constants")
    if low == high:
        return high
    high = 2 * low
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if admitted(middle) else (low, middle)
    return low
