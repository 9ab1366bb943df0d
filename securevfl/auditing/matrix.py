"""Owner x observer: what is claimed, what is promised soundly, what was measured, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from securevfl.accountants import Spend, claim_for, privacy_matrix
from securevfl.accountants.records import ReleaseRecord
from securevfl.attacks.canary.audit import CanaryResult
from securevfl.attacks.runner import Outcome
from securevfl.attacks.source import Source
from securevfl.auditing.checks import FAILED, Check
from securevfl.auditing.report import HOLDS, NO_GUARANTEE, VIOLATED


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a verdict rests on."""

    source: Source
    outcomes: Sequence[Outcome]
    checks: Sequence[Check]
    canaries: Mapping[str, CanaryResult]


def matrix(findings: Findings) -> dict[str, dict[str, Any]]:
    """The owners, their observers, and a cell for each pair."""
    source = findings.source
    spends = privacy_matrix(source.records, source.plan.delta)
    return {
        owner: {"observers": {name: _cell(findings, spend) for name, spend in observers.items()}}
        for owner, observers in spends.items()
        if observers
    }


def _cell(findings: Findings, spend: Spend) -> dict[str, Any]:
    claim = _claim(findings.source, spend)
    canaries = _canaries(findings.canaries, spend)
    measured = max(canaries.values(), key=lambda result: result.mu_lower, default=None)
    reasons = _violations(findings, spend, canaries)
    verdict = VIOLATED if reasons else (HOLDS if math.isfinite(spend.mu) else NO_GUARANTEE)
    return {
        "claimed": None if claim is None else number(claim.epsilon),
        "claim": None
        if claim is None
        else {"source": claim.source, "reason": claim.reason, "mu": number(claim.mu)},
        "epsilon_upper": number(spend.epsilon),
        "epsilon_lower": None if measured is None else number(measured.epsilon_gdp),
        "mu_upper": number(spend.mu),
        "mu_lower": None if measured is None else number(measured.mu_lower),
        "delta": spend.delta,
        "mode": spend.mode,
        "releases": spend.releases,
        "exact": spend.exact,
        "verdict": verdict,
        "reasons": reasons or [_why(findings.source.records, spend)],
        "assumptions": list(spend.assumptions),
    }


def _canaries(found: Mapping[str, CanaryResult], spend: Spend) -> dict[str, CanaryResult]:
    """The audits that concern this owner; none where nothing is promised."""
    if not (math.isfinite(spend.mu) and spend.mu > 0):
        return {}
    return {name: each for name, each in found.items() if not each.owners or spend.owner in each.owners}


def number(value: float | None) -> float | None:
    """A number for JSON; infinite or unknown is None."""
    return None if value is None or not math.isfinite(value) else float(value)


def _claim(source: Source, spend: Spend) -> Any:
    plan = source.plan
    # The papers train encoders on raw records; what is not their algorithm they promise nothing about.
    if spend.owner == source.label_holder or source.data is None or plan.encoder_training != "raw":
        return None
    return claim_for(
        plan.algorithm,
        sigma=plan.sigma or None,
        clip=plan.clip,
        records=source.data.n_train,
        batch=min(plan.batch, source.data.n_train),
        releases=spend.releases,
        delta=plan.delta,
    )


def _violations(findings: Findings, spend: Spend, canaries: Mapping[str, CanaryResult]) -> list[str]:
    """Everything that contradicts the promise for this pair."""
    reasons = [
        f"{check.name}: {check.detail}"
        for check in findings.checks
        if check.status == FAILED and check.owner in ("", spend.owner, spend.observer)
    ]
    reasons += [
        f"canary audit of {name}: mu is at least {result.mu_lower:.3g}, but {result.claim:.3g} is promised"
        for name, result in canaries.items()
        if result.violated
    ]
    for outcome in findings.outcomes:
        score = outcome.score
        if outcome.owner != spend.owner or spend.observer not in outcome.observers or score is None:
            continue
        if score.ceiling is not None and score.low > score.ceiling:
            reasons.append(
                f"attack {outcome.name}: {score.metric} is at least {score.low:.3g}; "
                f"the promise allows at most {score.ceiling:.3g}"
            )
    return reasons


def _why(records: Sequence[ReleaseRecord], spend: Spend) -> str:
    """The reason for a verdict without contradictions."""
    if math.isfinite(spend.mu):
        return "no check, attack or canary contradicts the promise"
    kinds = sorted(
        {
            r.kind
            for r in records
            if r.owner == spend.owner and spend.observer in r.observers and math.isinf(r.mu)
        }
    )
    return f"left without noise: {', '.join(kinds) or 'exact values'}"
