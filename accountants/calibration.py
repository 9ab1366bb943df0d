"""Calibration: from a promise to the noise, or to the number of releases. Never under-protects."""

import math
from collections.abc import Callable
from dataclasses import replace

from securevfl.accountants import checks
from securevfl.accountants.accountants import best_upper_bound
from securevfl.accountants.events import ADJACENCIES, Adjacency, GaussianRelease
from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.accountants.records import MODES
from securevfl.errors import AccountingError

# Added to every calibrated noise, so that a filter that adds the planned releases one by one in floating
# point does not refuse the last of ten million.
_MARGIN = 1e-9


def calibrate_sigma(
    *,
    epsilon: float,
    delta: float,
    releases: int,
    mode: str = "strict",
    clip: float | None = None,
    sensitivity: float | None = None,
    updates: int = 0,
    gradient_clip: float | None = None,
    gradient_sigma: float | None = None,
    sampling_rate: float = 1.0,
    ids_visible: bool = True,
    adjacency: Adjacency = "replace-one",
) -> float:
    """Return the smallest noise that keeps `releases` within (epsilon, delta), rounded up.

    Args:
        epsilon: The promise.
        delta: The promise; below 1 / (number of records).
        releases: What the worst record pays for. In mode `strict` that is every vector that the party
            releases; in `frozen` and `dp-encoder` the releases of one record; in `sealed` the openings
            that contain it.
        mode: The accounting mode.
        clip: Clip norm C; the sensitivity is 2C under replace-one and C otherwise.
        sensitivity: Instead of `clip`; mode `sealed` needs it (`sealed_sensitivity`).
        updates: Mode `dp-encoder`: noisy updates that one record takes part in.
        gradient_clip: Clip norm of per-record gradients in those updates.
        gradient_sigma: Noise of those updates.
        sampling_rate: Below 1 only if the observer cannot tell who was sampled.
        ids_visible: Whether the observers know the record IDs.
        adjacency: Which inputs count as neighbours.

    Raises:
        AccountingError: A value is out of range, or the updates alone exceed the promise.
        AmplificationRefused: The sampling rate is below 1 although the IDs are visible.
    """
    epsilon, delta = _promise(epsilon, delta)
    releases = checks.count("releases", releases, least=1)
    reach = _sensitivity(mode, clip, sensitivity, adjacency)
    spent = _updates_mu(mode, updates, gradient_clip, gradient_sigma, adjacency)
    if checks.probability("sampling_rate", sampling_rate, zero=False) < 1:
        if spent:
            raise AccountingError("updates cannot be combined with sampling_rate; account for them apart")
        probe = GaussianRelease(
            sigma=1.0,
            sensitivity=reach,
            count=releases,
            sampling_rate=sampling_rate,
            ids_visible=ids_visible,
            adjacency=adjacency,
        )
        return _sampled_sigma(probe, epsilon, delta)
    budget = _left(gdp_mu(epsilon, delta), spent)
    sigma = reach * math.sqrt(releases) / budget * (1 + _MARGIN)
    # Checked after solving: rounding anywhere above must not cost privacy.
    while gdp_epsilon(math.hypot(spent, reach * math.sqrt(releases) / sigma), delta) > epsilon:
        sigma *= 1 + _MARGIN
    return sigma


def max_releases(
    *,
    epsilon: float,
    delta: float,
    sigma: float,
    mode: str = "strict",
    clip: float | None = None,
    sensitivity: float | None = None,
    updates: int = 0,
    gradient_clip: float | None = None,
    gradient_sigma: float | None = None,
    adjacency: Adjacency = "replace-one",
) -> int:
    """Return how many releases, counted as in `calibrate_sigma`, fit (epsilon, delta); 0 if none does."""
    epsilon, delta = _promise(epsilon, delta)
    ratio = _sensitivity(mode, clip, sensitivity, adjacency) / checks.positive("sigma", sigma)
    spent = _updates_mu(mode, updates, gradient_clip, gradient_sigma, adjacency)
    budget = gdp_mu(epsilon, delta)
    if spent >= budget:
        return 0
    found = math.floor((budget - spent) / ratio * ((budget + spent) / ratio) * (1 + _MARGIN)) + 1
    while found and gdp_epsilon(math.hypot(spent, ratio * math.sqrt(found)), delta) > epsilon:
        found -= 1
    return found


def party_sigma(*, sigma: float, parties: int, colluders: int = 1) -> float:
    """Return each party's share of the noise of a secure sum so that honest parties alone reach `sigma`.

    Every party that sees the sum can subtract its own share, hence `colluders` is at least 1 unless the
    sum goes to an outsider. Independent Gaussians add in variance: sigma / sqrt(parties - colluders).
    """
    parties = checks.count("parties", parties, least=1)
    colluders = checks.count("colluders", colluders)
    if colluders >= parties:
        raise AccountingError(f"colluders is {colluders}; expected fewer than the {parties} parties")
    return checks.positive("sigma", sigma) / math.sqrt(parties - colluders)


def rounded_sensitivity(*, clip: float, fraction_bits: int, dimension: int) -> float:
    """Return the replace-one sensitivity, in ring units, of a clipped vector rounded to a grid.

    Rounding moves each of two neighbours by at most half a unit per coordinate: 2C 2^f + sqrt(d).
    """
    scale = 2.0 ** checks.count("fraction_bits", fraction_bits)
    return 2 * checks.positive("clip", clip) * scale + math.sqrt(
        checks.count("dimension", dimension, least=1)
    )


def _promise(epsilon: float, delta: float) -> tuple[float, float]:
    epsilon = checks.positive("epsilon", epsilon)
    delta = checks.probability("delta", delta, zero=False)
    if delta == 1:
        raise AccountingError("delta is 1, which promises nothing; expected a number below 1")
    return epsilon, delta


def _sensitivity(mode: str, clip: float | None, sensitivity: float | None, adjacency: str) -> float:
    checks.choice("adjacency", adjacency, ADJACENCIES)
    if checks.choice("mode", mode, MODES) == "none":
        raise AccountingError("mode is 'none', which promises nothing at any noise")
    if (clip is None) == (sensitivity is None):
        raise AccountingError("give exactly one of clip and sensitivity")
    if sensitivity is not None:
        return checks.positive("sensitivity", sensitivity)
    if mode == "sealed":
        raise AccountingError("mode 'sealed' needs sensitivity, from sealed_sensitivity(clips, protects=...)")
    return checks.positive("clip", clip) * (2 if adjacency == "replace-one" else 1)


def _updates_mu(mode: str, updates: int, clip: float | None, sigma: float | None, adjacency: str) -> float:
    if checks.count("updates", updates) == 0:
        return 0.0
    if mode != "dp-encoder":
        raise AccountingError(f"updates is {updates} in mode {mode!r}; only dp-encoder counts updates")
    reach = checks.positive("gradient_clip", clip) * (2 if adjacency == "replace-one" else 1)
    return reach / checks.positive("gradient_sigma", sigma) * math.sqrt(updates)


def _left(budget: float, spent: float) -> float:
    if spent >= budget:
        raise AccountingError(
            f"the updates alone spend mu {spent:.6g} of {budget:.6g}; raise gradient_sigma or epsilon"
        )
    return math.sqrt((budget - spent) * (budget + spent))


def _sampled_sigma(probe: GaussianRelease, epsilon: float, delta: float) -> float:
    """Solve for the noise of a sampled release to one part in 2,000; the upper end of the bracket is kept.

    Both ends have been accounted for: the result meets the promise, 0.9995 of it does not.
    """

    def excess(log_sigma: float) -> float:
        figure = best_upper_bound(replace(probe, sigma=math.exp(log_sigma)), delta)
        return math.log(max(figure.epsilon, 1e-300) / epsilon)

    low, below, high, above = _bracket(excess, math.log(_limit_sigma(probe, gdp_mu(epsilon, delta))))
    while high - low > 5e-4:
        # The secant in logarithms is nearly exact once the ends are near; stay inside so that either moves.
        share = below / (below - above) if max(below, -above) < 1 else 0.5
        inset = max(1e-4, (high - low) / 50)
        guess = min(max(low + (high - low) * share + 1e-4, low + inset), high - inset)
        value = excess(guess)
        low, below, high, above = (guess, value, high, above) if value > 0 else (low, below, guess, value)
    return math.exp(high)


def _limit_sigma(probe: GaussianRelease, mu: float) -> float:
    """Return the noise that the central limit theorem asks for: where to start, never the answer."""
    square = (mu / probe.sampling_rate) ** 2 / probe.count
    if probe.adjacency == "replace-one":
        return probe.sensitivity / 2 / math.sqrt(math.asinh(square / 4))
    return probe.sensitivity / math.sqrt(math.log1p(square))


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float, float, float]:
    """Return two arguments with their values, positive at the first and not at the second, which is above.

    Epsilon falls at least as fast as the noise grows, mostly: the first stride reaches across the root.
    """
    value = excess(start)
    stride = min(abs(value) + 5e-4, math.log(2))
    while True:
        following = start + math.copysign(stride, value)
        found = excess(following)
        if value > 0 >= found:
            return start, value, following, found
        if found > 0 >= value:
            return following, found, start, value
        start, value, stride = following, found, min(2 * stride, math.log(2))
