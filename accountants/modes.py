"""Accounting modes: from ledger records to what each owner has promised to each observer.

Adjacency is the replacement of one record of the owner; IDs, labels and the other parties' data are
fixed, and the observer knows which records were released. All mechanisms are Gaussian, so that a squared
mu is additive under adaptive composition (Dong, Roth and Su 2022, Corollary 3.3).

- `strict`: the encoder is trained on raw records, so that every vector may depend on every record: a
  record pays for all vectors of the owner.
- `dp-encoder`: a record pays for its own releases and for the noisy updates that it took part in.
- `frozen`: a record pays for its own releases only.
- `sealed`: a record pays for the openings of noisy totals over batches that contain it.
- `none`: nothing is promised.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from securevfl.accountants import checks
from securevfl.accountants.gdp import gdp_epsilon
from securevfl.accountants.records import HIDDEN, MODES, Mode, ReleaseRecord

# Above this many unused indices per row an array over all record indices would waste memory.
_SPARSE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Spend:
    """What one owner has let one observer learn.

    Attributes:
        owner: Whose records.
        observer: Who saw it; `COALITION` for all observers together.
        mode: The mode that the figures hold under.
        mu: GDP parameter for the worst record; infinite without a guarantee.
        epsilon: Smallest epsilon at `delta` for that mu, rounded up.
        delta: The delta asked for.
        releases: How many vectors or openings the observer has received.
        worst_releases: The largest number of releases that a single record pays for.
        updates: The largest number of noisy updates that a single record took part in.
        exact: How many of the releases carried no countable noise.
        assumptions: Under which masked or encrypted messages told nothing.
        predictions: Mode `sealed` only: how many scores of single records were opened besides, for evaluation
            or prediction, of records that no training batch held. The figures above do not cover those.
    """

    owner: str
    observer: str
    mode: Mode
    mu: float
    epsilon: float
    delta: float
    releases: int
    worst_releases: int
    updates: int = 0
    exact: int = 0
    assumptions: tuple[str, ...] = ()
    predictions: int = 0


COALITION = "all observers"


def weakest_mode(records: Iterable[ReleaseRecord]) -> Mode:
    """Return the one mode of all countable records; a mixture is accounted as `strict`."""
    found = {record.mode for record in records if record.mechanism not in HIDDEN}
    if "none" in found:
        return "none"
    return found.pop() if len(found) == 1 else "strict"  # type: ignore[return-value]


def mu_of(records: Iterable[ReleaseRecord], mode: str) -> float:
    """Return the GDP parameter of these releases of one owner, for the worst record under `mode`."""
    checks.choice("mode", mode, MODES)
    ledger = list(records)
    if mode == "strict":
        common = sum(r.mu * r.mu * r.vectors for r in ledger if r.vectors and _counts_as_release(r))
        paid = [r for r in ledger if r.mechanism == "randomised-response"]
        return math.sqrt(common + _worst(paid, [r.mu * r.mu for r in paid]))
    if mode == "none" and any(r.vectors and r.mechanism not in HIDDEN for r in ledger):
        return math.inf
    paid = [r for r in ledger if r.mechanism not in HIDDEN and (mode == "dp-encoder" or _is_release(r))]
    return math.sqrt(_worst(paid, [r.mu * r.mu for r in paid]))


def privacy_matrix(records: Iterable[ReleaseRecord], delta: float) -> dict[str, dict[str, Spend]]:
    """Return owner -> observer -> what was spent, for every observer that received something."""
    delta = checks.probability("delta", delta)
    matrix: dict[str, dict[str, Spend]] = {}
    for owner, ledger in _by_owner(records).items():
        names = sorted({name for record in ledger for name in record.observers})
        counted, apart = _set_apart(ledger)
        matrix[owner] = {
            name: _spend(
                owner,
                name,
                [r for r in counted if _concerns(r, name)],
                [r for r in apart if _concerns(r, name)],
                delta,
            )
            for name in names
        }
    return matrix


def coalition_spend(records: Iterable[ReleaseRecord], delta: float) -> dict[str, Spend]:
    """Return owner -> what all observers together have learned; a shared release counts once."""
    delta = checks.probability("delta", delta)
    owners = _by_owner(records)
    return {name: _spend(name, COALITION, *_set_apart(ledger), delta) for name, ledger in owners.items()}


def _set_apart(ledger: Sequence[ReleaseRecord]) -> tuple[list[ReleaseRecord], list[ReleaseRecord]]:
    """Return what is accounted for together, and sealed predictions of records that were not trained on.

    A prediction of a record that took part in training stays with the rest: it makes epsilon infinite.
    """
    if not any(r.is_prediction for r in ledger):
        return list(ledger), []
    trained = [r.rows for r in ledger if _is_release(r) and not r.is_prediction and r.vectors]
    known = [rows for rows in trained if rows is not None]
    everybody = len(known) < len(trained)
    rows = np.unique(np.concatenate(known)) if known else np.zeros(0, dtype=np.int64)

    def apart(record: ReleaseRecord) -> bool:
        if not record.is_prediction or record.rows is None or everybody:
            return False
        return not np.isin(record.rows, rows, assume_unique=True).any()

    flags = [apart(record) for record in ledger]
    kept = [record for record, flag in zip(ledger, flags, strict=True) if not flag]
    return kept, [record for record, flag in zip(ledger, flags, strict=True) if flag]


def _spend(
    owner: str,
    observer: str,
    ledger: Sequence[ReleaseRecord],
    predictions: Sequence[ReleaseRecord],
    delta: float,
) -> Spend:
    mode: Mode = weakest_mode(ledger) if ledger else "sealed"
    mu = mu_of(ledger, mode)
    counted = [r for r in ledger if _is_release(r)]
    releases = sum(r.vectors for r in counted)
    per_record = round(_worst(counted, [1.0] * len(counted)))
    updates = [r for r in ledger if r.mechanism == "dp-update"]
    return Spend(
        owner=owner,
        observer=observer,
        mode=mode,
        mu=mu,
        epsilon=gdp_epsilon(mu, delta),
        delta=delta,
        releases=releases,
        worst_releases=releases if mode == "strict" else per_record,
        updates=round(_worst(updates, [1.0] * len(updates))),
        exact=sum(r.vectors for r in counted if math.isinf(r.mu)),
        assumptions=tuple(sorted({r.assumption for r in ledger if r.mechanism in HIDDEN and r.vectors})),
        predictions=sum(r.vectors for r in predictions),
    )


def _is_release(record: ReleaseRecord) -> bool:
    return record.mechanism not in HIDDEN and record.mechanism != "dp-update"


def _counts_as_release(record: ReleaseRecord) -> bool:
    """Whether any record may shift it; a randomised label depends on its own record alone."""
    return _is_release(record) and record.mechanism != "randomised-response"


def _concerns(record: ReleaseRecord, observer: str) -> bool:
    return record.mechanism == "dp-update" or observer in record.observers


def _by_owner(records: Iterable[ReleaseRecord]) -> dict[str, list[ReleaseRecord]]:
    owners: dict[str, list[ReleaseRecord]] = {}
    for record in records:
        owners.setdefault(record.owner, []).append(record)
    return owners


def _worst(records: Sequence[ReleaseRecord], costs: Sequence[float]) -> float:
    """Return the largest sum of costs that a single row index pays."""
    common = 0.0
    rows, weights = [], []
    for record, cost in zip(records, costs, strict=True):
        each = cost * record.vectors if record.pays_per_batch or record.rows is None else cost
        if record.rows is None:
            common += each if record.vectors else 0.0
        elif record.rows.size and record.vectors:
            rows.append(record.rows)
            weights.append(each)
    if not rows:
        return common
    index = np.concatenate(rows)
    weight = np.repeat(weights, [part.size for part in rows])
    if int(index.max()) > 4 * index.size + _SPARSE:
        index = np.unique(index, return_inverse=True)[1]
    return common + float(np.bincount(index, weight).max())
