"""What the papers would promise for the same run: claimed, not sound.

A claim is never used for a verdict. It stands beside the sound figure so that a reader of the paper finds
the number expected there, the reason why it does not hold, and a case that refutes it.
"""

import math
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
    """VAFL, Theorem 6: noise c = O(N_m sqrt(K) / (mu N)) suffices for mu-GDP.

    N_m is the batch size, N the number of records and K the number of vectors released. The theorem hides
    its constant; it is read here as the sensitivity 2C, that is mu = (N_m / N) (2C / c) sqrt(K).
    """
    sigma, clip = checks.positive("sigma", sigma), checks.positive("clip", clip)
    records, batch = checks.count("records", records, least=1), checks.count("batch", batch, least=1)
    if batch > records:
        raise AccountingError(f"batch is {batch}; expected at most the {records} records")
    mu = batch / records * 2 * clip / sigma * math.sqrt(checks.count("releases", releases))
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


def fdml_claim(*, delta: float) -> Claim:
    """FDML: noise "levels" of up to 3 on local predictions, without a clip norm and without an epsilon."""
    example = 2 * 5 / 3 * math.sqrt(40)
    return Claim(
        source="FDML (Hu et al. 2019), noise on local predictions (Figure 4)",
        mu=None,
        epsilon=None,
        delta=checks.probability("delta", delta),
        reason="the predictions are not clipped, so their sensitivity is unbounded and no epsilon follows",
        counter_example=(
            "its level 3, with predictions clipped to 5 and 40 epochs, even for a frozen encoder: "
            f"mu {example:.2f}, epsilon {gdp_epsilon(example, 1e-5):.0f} at delta 1e-5"
        ),
    )


def flex_claim(*, delta: float) -> Claim:
    """Flex-VFL: gradient attacks "cannot be performed", since parties exchange embeddings only."""
    return Claim(
        source="Flex-VFL (Castiglia, Wang and Patterson 2022), remark on privacy",
        mu=None,
        epsilon=None,
        delta=checks.probability("delta", delta),
        reason=(
            "the remark is about gradients; embeddings go to all parties, the paper itself says that they "
            "may be open to inversion, and nothing bounds what they tell"
        ),
        counter_example="a linear encoder with at least as many outputs as inputs is inverted exactly",
    )


# Algorithm -> the family whose paper speaks about it; the others (AFSGD-VP's) promise no epsilon at all.
_FAMILIES = {
    "vafl": "vafl",
    "vafl-tsync": "vafl",
    "vafl-sync": "vafl",
    "fdml": "fdml",
    "flex": "flex",
    "flex-adaptive": "flex",
}


def claim_for(
    algorithm: str, *, sigma: float | None, clip: float, records: int, batch: int, releases: int, delta: float
) -> Claim | None:
    """Return what the algorithm's paper would promise for a run; None if it promises no privacy in numbers.

    Args:
        algorithm: Name of the algorithm.
        sigma: Noise on the released vectors; None without noise, about which VAFL's theorem says nothing.
        clip: Clip norm of the vectors.
        records: Number of training records.
        batch: Records per batch.
        releases: Vectors released in all.
        delta: At which delta to state it.
    """
    family = _FAMILIES.get(algorithm)
    if family == "fdml":
        return fdml_claim(delta=delta)
    if family == "flex":
        return flex_claim(delta=delta)
    if family is None or not sigma:
        return None
    return vafl_claim(sigma=sigma, clip=clip, records=records, batch=batch, releases=releases, delta=delta)
