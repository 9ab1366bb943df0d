"""Mode `sealed`: the sensitivity of one iteration's noisy totals, all parties' totals counted together.

A record's features, its label, or both are replaced. Given all past totals every weight is fixed, so one
iteration is a Gaussian release of L2 sensitivity D and T iterations have mu = (D / sigma) sqrt(T). All
parties' totals count for every observer: a party's later weights depend on its own earlier totals.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from securevfl.accountants import checks
from securevfl.errors import AccountingError

Protects: TypeAlias = Literal["features", "label", "person"]
PROTECTS: tuple[Protects, ...] = ("features", "label", "person")

# Range of the sine-series residual s(u) - y, and of its change between two scores, rounding included.
RESIDUAL_BOUND = 1.00322
RESIDUAL_CHANGE = 1.00644


def sealed_sensitivity(
    clips: Sequence[float],
    *,
    protects: Protects = "features",
    party: int | None = None,
    residual_bound: float = RESIDUAL_BOUND,
    residual_change: float = RESIDUAL_CHANGE,
) -> float:
    """Return D, the L2 sensitivity of one iteration's totals of all parties.

    Args:
        clips: The row norm bound of every party.
        protects: What of one record is replaced: one party's `features`, the `label`, or the whole
            `person` (equally: features and label).
        party: Index of the party whose features are replaced; None takes the worst party.
        residual_bound: Bound R of the absolute residual.
        residual_change: Bound of the residual's change when the score changes.
    """
    bounds = [checks.positive("clip", clip) for clip in clips]
    if not bounds:
        raise AccountingError("clips is empty; expected the row norm bound of every party")
    checks.choice("protects", protects, PROTECTS)
    everything = math.fsum(clip * clip for clip in bounds)
    if protects == "label":
        return math.sqrt(everything)
    if protects == "person":
        return 2 * residual_bound * math.sqrt(everything)
    if party is not None and checks.count("party", party) >= len(bounds):
        raise AccountingError(f"party is {party}; expected an index below {len(bounds)}")
    own = max(bounds) if party is None else bounds[party]
    return max(2 * residual_bound * own, residual_change * math.sqrt(everything))


def sealed_mu(*, sensitivity: float, sigma: float, iterations: int) -> float:
    """Return mu for a record that `iterations` openings contain."""
    ratio = checks.positive("sensitivity", sensitivity) / checks.positive("sigma", sigma)
    return ratio * math.sqrt(checks.count("iterations", iterations))


def sealed_sigma(*, sensitivity: float, mu: float, iterations: int) -> float:
    """Return the noise of a total's honest part that gives `mu` after `iterations` openings."""
    spread = checks.positive("sensitivity", sensitivity) * math.sqrt(checks.count("iterations", iterations))
    return spread / checks.positive("mu", mu)
