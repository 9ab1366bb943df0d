"""What a canary audit measures: the rule that guesses coins, certified bounds and the ledger's claim."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.accountants.modes import mu_of
from securevfl.accountants.records import ReleaseRecord
from securevfl.attacks.one_run import choose_guesses, count_correct, one_run_mu
from securevfl.attacks.statistics import (
    Errors,
    balanced_accuracy_ceiling,
    epsilon_lower,
    epsilon_of,
    mu_lower,
    noticed_mu,
    usual_mu,
)
from securevfl.errors import AttackError
from securevfl.federation.site import open_gate
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import to_record
from securevfl.settings.plan import Plan

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]
MakeGate: TypeAlias = Callable[[int], Gate]

# Added to the covariance, relative to the features' size: without any noise it would not be invertible.
_RIDGE = 1e-9


@dataclass(frozen=True, kw_only=True)
class LinearRule:
    """Guesses world 1 where the weighted sum of the features exceeds the threshold.

    Attributes:
        weights: One weight per feature.
        threshold: Where the guess changes.
        origin: How it was found, for the report.
    """

    weights: Floats
    threshold: float
    origin: str

    @classmethod
    def fixed(cls, weights: Floats, threshold: float) -> LinearRule:
        """A score that was fixed before any trial."""
        return cls(weights=np.asarray(weights, np.float64), threshold=threshold, origin="fixed beforehand")

    @classmethod
    def fitted(cls, features: Floats, worlds: NDArray[np.bool_]) -> LinearRule:
        """Fisher's linear discriminant of held-out trials, with the threshold half way between the worlds.

        For Gaussian releases this is the likelihood ratio, and half way is the best threshold (mu/2).

        Raises:
            AttackError: One of the worlds has fewer than two trials.
        """
        one, zero = features[worlds], features[~worlds]
        if min(len(one), len(zero)) < 2:
            raise AttackError(f"{len(zero)} and {len(one)} held-out trials are too few to fit a score")
        centres = [zero.mean(0), one.mean(0)]
        spread = np.concatenate([zero - centres[0], one - centres[1]])
        covariance = spread.T @ spread / max(1, len(spread) - 2)
        difference = centres[1] - centres[0]
        ridge = _RIDGE * (np.trace(covariance) + difference @ difference + np.finfo(np.float64).tiny)
        weights = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), difference)
        threshold = float(weights @ (centres[0] + centres[1]) / 2)
        return cls(weights=weights, threshold=threshold, origin=f"fitted on {len(worlds)} held-out trials")

    def __call__(self, features: Floats) -> Floats:
        """The scores, with the threshold at 0."""
        return np.asarray(features @ self.weights - self.threshold, np.float64)


OWNER = "canary"


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """What a canary audit found.

    Attributes:
        mode: The accounting mode that the gate wrote down.
        accounting: The accounting whose claim these trials must keep: the mode, or ``per-record`` where the
            encoder does not depend on the canaries.
        claims: Accounting -> the mu it promises for these trials. ``per-record`` is the accounting that
            counts a record's own releases only, whatever the training.
        errors: How often each world was taken for the other.
        mu_lower: Certified lower bound of mu.
        delta: The delta of the following.
        epsilon_gdp: Lower bound of epsilon that follows from `mu_lower`; valid against claims of GDP.
        epsilon_free: Lower bound of epsilon without any assumption on the mechanism.
        epsilon_one_run: The one-run bound for Gaussian privacy (`one_run_mu`) on the same scores.
        rule: How the guessing rule was found.
        owners: Whose promise it concerns; empty for every owner of the run.
    """

    mode: str
    accounting: str
    claims: Mapping[str, float]
    errors: Errors
    mu_lower: float
    delta: float
    epsilon_gdp: float
    epsilon_free: float
    epsilon_one_run: float
    rule: str
    owners: tuple[str, ...] = ()

    @property
    def claim(self) -> float:
        """The promised mu that these trials must keep."""
        return self.claims[self.accounting]

    @property
    def violated(self) -> bool:
        """True where the certified lower bound exceeds the promise."""
        return self.refutes(self.accounting)

    def refutes(self, accounting: str) -> bool:
        """True where the certified lower bound exceeds what that accounting promises."""
        return self.mu_lower > self.claims[accounting]

    def to_mapping(self) -> dict[str, Any]:
        """The result ready for JSON; infinite is None."""
        claims = {name: mu if math.isfinite(mu) else None for name, mu in self.claims.items()}
        content = {**vars(self), "claims": claims, **self.errors._asdict(), "owners": list(self.owners)}
        del content["errors"]
        noticed = noticed_mu(self.errors.negatives, self.errors.positives, self.claim)
        content["noticed"] = noticed if math.isfinite(noticed) else None
        trials = self.errors.negatives, self.errors.positives
        content["usual"], content["most"] = usual_mu(*trials, self.claim), mu_lower(Errors(0, 0, *trials))
        wrong = (self.errors.false_positives / max(self.errors.negatives, 1)) + (
            self.errors.false_negatives / max(self.errors.positives, 1)
        )
        content["right"] = 1 - wrong / 2
        content["allowed"] = balanced_accuracy_ceiling(self.claim)
        return {**content, "violated": self.violated}


class CanaryGuesses(NamedTuple):
    """Scores of independent trials (world 1 is guessed above 0), their worlds, and where the rule is from."""

    scores: Floats
    worlds: Coins
    rule: str


def guess_worlds(
    watch: Callable[[Coins], tuple[Floats, Gate]],
    worlds: int,
    *,
    seed: int,
    progress: Callable[[float], None],
) -> tuple[CanaryGuesses, Gate]:
    """Throws a coin per world, fits the rule on the first half, and guesses the second.

    Args:
        watch: Runs worlds side by side: from coins to features, one line per world, and the gate they used.
        worlds: How many there are.
        seed: Seed of the coins, never of noise.
        progress: Called with the share done.
    """
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(0, 2, n).astype(np.bool_) for n in (worlds // 2, worlds - worlds // 2))
    rule = LinearRule.fitted(watch(first)[0], first)
    progress(0.5)
    features, gate = watch(second)
    progress(1.0)
    return CanaryGuesses(rule(features), second, rule.origin), gate


def conclude(
    guesses: CanaryGuesses,
    *,
    mode: str,
    accounting: str,
    claims: Mapping[str, float],
    delta: float,
    owners: tuple[str, ...] = (),
) -> CanaryResult:
    """Turns guesses into certified bounds."""
    scores, worlds, rule = guesses
    errors = Errors.of(scores > 0, worlds)
    mu = mu_lower(errors)
    return CanaryResult(
        mode=mode,
        accounting=accounting,
        claims=dict(claims),
        errors=errors,
        mu_lower=mu,
        delta=delta,
        epsilon_gdp=epsilon_of(mu, delta),
        epsilon_free=epsilon_lower(errors, delta),
        epsilon_one_run=_one_run(scores, worlds, delta, claim=claims[accounting]),
        rule=rule,
        owners=owners,
    )


def _one_run(scores: Floats, worlds: NDArray[np.bool_], delta: float, *, claim: float) -> float:
    """Guesses the coins of the most extreme scores, as many as promise most under the claim alone."""
    if not 0 < claim < math.inf:
        return 0.0
    run = count_correct(scores, worlds, choose_guesses(canaries=len(scores), mu=claim))
    return epsilon_of(one_run_mu(**run._asdict()), delta)


def claims_of(gate: Gate, worlds: int = 1) -> dict[str, float]:
    """The mu that a gate's ledger promises: under its mode, and counting each record's own entries only.

    Args:
        gate: A gate with its ledger in memory.
        worlds: How many worlds its rows stand for; world k has the rows that leave k modulo `worlds`.
    """
    entries = [json.loads(line) for line in gate.ledger.lines]
    records = [to_record(gate.owner, entry) for entry in entries if entry["kind"] != "session"]
    if worlds > 1:
        records = [_of_first_world(record, worlds) for record in records]
    return {"per-record": mu_of(records, "dp-encoder"), gate.mode: mu_of(records, gate.mode)}


def _of_first_world(record: ReleaseRecord, worlds: int) -> ReleaseRecord:
    """The part of a stacked release that belongs to world 0."""
    if record.rows is None:
        raise AttackError("a release of the audit names no rows")
    rows = record.rows[record.rows % worlds == 0] // worlds
    vectors = record.vectors if record.pays_per_batch else len(rows)
    content = {spec.name: getattr(record, spec.name) for spec in fields(record) if spec.init}
    return ReleaseRecord(**{**content, "rows": rows, "vectors": vectors})


def gate_of(plan: Plan) -> MakeGate:
    """Makes gates exactly as a run of the plan does, with the ledger in memory and no budget to stop them."""
    free = plan.with_changes(budget_epsilon=0.0, record_views=False)

    def make(records: int) -> Gate:
        return open_gate(OWNER, free, records=records, test_records=0, holds_labels=False, folder=None)

    return make
