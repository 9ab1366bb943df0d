"""Owner x observer: what is claimed and promised, what was tested on the run, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from securevfl.accountants import Spend, claim_for, privacy_matrix
from securevfl.accountants.records import HIDDEN, ReleaseRecord
from securevfl.attacks.canary.audit import CanaryResult
from securevfl.attacks.runner import AttackOutcome
from securevfl.attacks.source import Source
from securevfl.attacks.statistics import epsilon_of, mu_certified, mu_lower
from securevfl.auditing.reconciliation import RECONCILED
from securevfl.auditing.verdicts import ErrorBudget, Finding, Verdict

EVERYBODY = "everybody"
"""Promise of a finding that concerns every owner and observer."""
REPLAY_PATHS = {
    "gradient": ("gradients",),
    "totals": ("noisy totals",),
    "means": ("statistics",),
    "scale": ("statistics",),
    "update": ("updates",),
    "randomised labels": ("randomised labels",),
    "prediction": ("predictions",),
}
"""How the kind of an entry begins -> how the paths begin whose replay tests it; else embeddings or totals."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that verdicts rest on.

    Attributes:
        source: The run.
        reconciled: Findings about messages and entries.
        replayed: Findings about noise that was really added.
        outcomes: Attacks.
        canaries: Audits of the software on made-up records.
        levels: Canary audit -> its share of the error budget.
        budget: How often an audit may call a sound run violated.
    """

    source: Source
    reconciled: Sequence[Finding]
    replayed: Sequence[Finding] = ()
    outcomes: Sequence[AttackOutcome] = ()
    canaries: Mapping[str, CanaryResult] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    budget: ErrorBudget | None = None

    def refuted(self, name: str) -> float | None:
        """What a canary audit certifies above its claim at its share of the error budget; None if nothing."""
        result = self.canaries[name]
        certified = mu_certified(result.errors, self.levels[name])
        return certified if certified > result.claim else None


def matrix(evidence: Findings) -> dict[str, dict[str, Any]]:
    """The owners, their observers, and a cell for each pair."""
    source = evidence.source
    spends = privacy_matrix(source.records, source.plan.accounted_delta)
    return {
        owner: {"observers": {name: _cell(evidence, spend) for name, spend in observers.items()}}
        for owner, observers in spends.items()
        if observers
    }


def overall(evidence: Findings, owners: Mapping[str, Any]) -> Verdict:
    """The worst verdict of all pairs; what contradicts the books outside of any pair counts too."""
    cells = [Verdict(c["verdict"]) for row in owners.values() for c in row["observers"].values()]
    if any(f.verdict is Verdict.VIOLATED for f in (*evidence.reconciled, *evidence.replayed)):
        return Verdict.VIOLATED
    return min(cells, key=lambda verdict: verdict.rank, default=Verdict.HOLDS)


def _cell(evidence: Findings, spend: Spend) -> dict[str, Any]:
    source = evidence.source
    claim = _claim(source, spend)
    records = _records(source.records, spend)
    measured = _measured(evidence, spend)
    mine = [f for f in (*evidence.reconciled, *evidence.replayed) if _concerns(f, spend)]
    verdict, reasons = _judge(evidence, spend, records, mine)
    powers = {path: power for f in mine for path, power in f.powers.items() if math.isfinite(spend.mu)}
    return {
        "claimed": None if claim is None else number(claim.epsilon),
        "claim": None
        if claim is None
        else {"source": claim.source, "reason": claim.reason, "mu": number(claim.mu)},
        "epsilon_upper": number(spend.epsilon),
        "epsilon_lower": None if measured is None else number(epsilon_of(measured, spend.delta)),
        "mu_upper": number(spend.mu),
        "mu_lower": number(measured),
        "delta": source.plan.delta,
        "mode": spend.mode,
        "releases": spend.releases,
        "exact": spend.exact,
        "exact_kinds": sorted({r.kind for r in records if math.isinf(r.mu)}) if math.isinf(spend.mu) else [],
        "verdict": verdict.value,
        "tested": sorted({f"{f.path}: {test}" for f in mine for test in f.tested}),
        "power": min((f.power for f in mine if f.power is not None and powers), default=None),
        "powers": powers,
        "reasons": reasons,
        "covers": _covers(spend),
        "assumptions": list(spend.assumptions),
        "private": any(f.private for f in mine),
    }


def _concerns(finding: Finding, spend: Spend) -> bool:
    if finding.promise == EVERYBODY:
        return True
    owner, _, observer = finding.promise.partition(" against ")
    return (owner, observer) == (spend.owner, spend.observer)


def _records(records: Sequence[ReleaseRecord], spend: Spend) -> list[ReleaseRecord]:
    """What the owner let this observer learn from, its own noisy updates included."""
    return [
        record
        for record in records
        if record.owner == spend.owner
        and record.mechanism not in HIDDEN
        and (spend.observer in record.observers or record.mechanism == "dp-update")
    ]


def _judge(
    evidence: Findings, spend: Spend, records: Sequence[ReleaseRecord], mine: Sequence[Finding]
) -> tuple[Verdict, list[str]]:
    """The verdict on a pair, and why."""
    broken = [f"{f.path}: {reason}" for f in mine if f.verdict is Verdict.VIOLATED for reason in f.reasons]
    broken += _beyond(evidence, spend)
    if broken:
        return Verdict.VIOLATED, broken
    if math.isinf(spend.mu):
        kinds = sorted({record.kind for record in records if math.isinf(record.mu)})
        return Verdict.NO_GUARANTEE, [f"left without noise: {', '.join(kinds) or 'exact values'}"]
    missing = _missing(evidence, spend, records, mine)
    return (Verdict.NOT_TESTED, missing) if missing else (Verdict.HOLDS, [])


def _missing(
    evidence: Findings, spend: Spend, records: Sequence[ReleaseRecord], mine: Sequence[Finding]
) -> list[str]:
    """What was not tested of a promise that nothing contradicts."""
    gaps = [f"{f.path}: {reason}" for f in mine if f.verdict is Verdict.NOT_TESTED for reason in f.reasons]
    reconciled = {f.path for f in mine if RECONCILED in f.tested}
    tested = [f.path for f in evidence.replayed if _concerns(f, spend) and f.verdict is Verdict.HOLDS]
    named = {f.path for f in mine}
    for kind in sorted({record.kind for record in records}):
        noisy = any(r.kind == kind and r.mechanism != "exact" for r in records)
        seen = any(r.kind == kind and r.observers for r in records)
        if seen and kind not in reconciled and kind not in named:
            gaps.append(f"{kind}: not reconciled with messages")
        if noisy and not any(path.startswith(replay_paths(kind)) for path in (*tested, *gaps)):
            gaps.append(f"{kind}: the noise that was added was not recomputed")
    return list(dict.fromkeys(gaps))


def replay_paths(kind: str) -> tuple[str, ...]:
    """How the paths begin whose replay tests entries of a kind."""
    found = [paths for start, paths in REPLAY_PATHS.items() if kind.startswith(start)]
    return (found[0] if found else ("embeddings", "noisy totals")) + ("all releases", "the run as a whole")


def _covers(spend: Spend) -> str:
    """Whose records a cell is about, where it is not everybody's."""
    if not spend.predictions:
        return ""
    return f"training records only: scores of {spend.predictions:,} other records were shown without noise"


def _measured(evidence: Findings, spend: Spend) -> float | None:
    """The best bound of mu by canaries, all of them together at 95 %."""
    found = _canaries(evidence.canaries, spend)
    bounds = [mu_lower(result.errors, 0.05 / len(found)) for result in found.values()]
    return max(bounds, default=None)


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


def _beyond(evidence: Findings, spend: Spend) -> list[str]:
    """Canaries that achieve more than the promise allows, at their share of the error budget.

    Attacks on real records cannot: how well one does depends on what records have in common with each other,
    about which a promise to each single record says nothing.
    """
    return [
        f"canary audit of {name}: mu is at least {certified:.3g}, but {result.claim:.3g} is promised"
        for name, result in _canaries(evidence.canaries, spend).items()
        if (certified := evidence.refuted(name)) is not None
    ]
