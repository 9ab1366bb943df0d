"""What the papers would promise for the same run: claimed, not sound.

A claim is never used for a verdict. It stands beside the sound figure so that a reader of the paper finds
the number expected there, the reason why it does not hold, and a case that refutes it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from securevfl.accountants import checks
from securevfl.accountants.gdp import gdp_epsilon

from securevfl.errors import AccountingError

LABEL = "claimed, not sound"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One paper's promise for a run.

    Attributes:
        source: Where the paper says it.
        mu: GDP parameter that the paper would state; None where it states no number.
        epsilon: The same at `delta`; None where it states no number.
        delta: The delta asked for.
        reason: Why it does not hold.
        counter_example: A case that refutes it.
        label: Always `LABEL`.
    """

    source: str
    mu: float | None
    epsilon: float | None
    delta: float
    reason: str
    counter_example: str
    label: str = LABEL


def vafl_claim(*, sigma: float, clip: float, records: int, batch: int, releases: int, delta: float) -> Claim:
    """VAFL, Theorem 6: noise c = O(N_m sqrt(K) / (mu N)) suffices for mu-GDP after K rounds of batch N_m.

    Read with the constant that its cited moments bound has for the clip norm C, that is
    mu = (N_m / N) (2C / c) sqrt(K).
    """
    sigma, clip = checks.positive("sigma", sigma), checks.positive("clip", clip)
    records, batch = checks.count("records", records, least=1), checks.count("batch", batch, least=1)
    if batch > records:
        raise AccountingError(f"batch is {batch}; expected at most the {records} records")
    rounds = checks.count("releases", releases) / batch
    mu = batch / records * 2 * clip / sigma * math.sqrt(rounds)
    return Claim(
        source="VAFL (Chen et al. 2020), Theorem 6",
        mu=mu,
        epsilon=gdp_epsilon(mu, delta),
        delta=delta,
        reason=(
            "amplification by sampling is claimed although the server knows the record IDs of every vector; "
            "the cited bound is for one noisy sum over a secret sample; the path from one record through the "
            "trained weights to other records' vectors is ignored; (epsilon, delta) does not imply mu-GDP"
        ),
        counter_example=(
            "batch 1, N rounds: the claimed noise goes to 0 as N grows, while the single release of a record "
            "already has mu = 2C/c without bound"
        ),
    )


def fdml_claim(*, sigma: float, clip: float | None, releases: int, delta: float) -> Claim:
    """FDML: noise "levels" up to 3 on local predictions, without a clip norm and without an epsilon."""
    checks.positive("sigma", sigma)
    example = 2 * 5 / 3 * math.sqrt(40)
    return Claim(
        source="FDML (Hu et al. 2019), Section on privacy: noise level",
        mu=None,
        epsilon=None,
        delta=checks.probability("delta", delta),
        reason=(
            "the predictions are not clipped, so their sensitivity is unbounded and no epsilon follows"
            + ("" if clip is None else f"; with the clip norm {clip:g} used here see the sound figure")
        ),
        counter_example=(
            "its largest level, with predictions clipped to 5 and 40 epochs, even for a frozen encoder: "
            f"mu {example:.2f}, epsilon {gdp_epsilon(example, 1e-5):.0f} at delta 1e-5"
        ),
    )


def flex_claim(*, sigma: float, clip: float | None, releases: int, delta: float) -> Claim:
    """Flex-VFL: "gradient attacks cannot be performed", since parties exchange embeddings only."""
    return Claim(
        source="Flex-VFL (Castiglia et al. 2022), discussion of privacy",
        mu=None,
        epsilon=None,
        delta=checks.probability("delta", delta),
        reason=(
            "it argues about gradients; embeddings go to all parties and can be inverted, and nothing bounds "
            "what they tell"
        ),
        counter_example="a linear encoder with at least as many outputs as inputs is inverted exactly",
    )


# Algorithm family -> the claim of its paper; families without one (AFSGD-VP) promise no epsilon at all.
CLAIMS: dict[str, Callable[..., Claim]] = {"vafl": vafl_claim, "fdml": fdml_claim, "flex": flex_claim}
