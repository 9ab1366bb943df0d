"""Makes the tables of `securevfl.protocols.sealed.kernel`: python -m benchmarks.kernel [FILE].

Without a FILE: what other clamps and numbers of products would give (`--clamps`, `--terms`), and with
`--sets` their test AUC less that of the dealer's series, by the simulation of `benchmarks.scorecards` with
the same noise in all (scaled as each one's range demands). Sets are read from SECUREVFL_DATA.

The logistic function of a sum of two clamped scores as alpha(a) + beta(b) + sum_k f_k(a) g_k(b): the doubly
centred kernel is symmetric, its largest eigenvalues give the products, and weights are moved towards the rows
where the error is largest. The result is shipped, never computed at run time: one sign that differs between
two members' linear algebra would make residuals half as large again as the bound that noise is sized for.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.scorecards import DELTA, GOALS, Card, halves, load
from securevfl.accountants.gdp import gdp_mu
from securevfl.protocols.sealed.kernel import ADDED_BITS, CLAMP, ENTRIES, FACTOR_BITS, TERMS, Kernel

COARSE, ROUNDS = 513, 60


def fitted(clamp: float = CLAMP, terms: int = TERMS) -> np.ndarray:
    """(2 + 2 K, entries) of int32: alpha, beta, f_k, g_k."""
    grid = np.linspace(-clamp, clamp, COARSE)
    kernel = 1 / (1 + np.exp(-(grid[:, None] + grid[None, :])))
    weights, best, least = np.ones(COARSE), None, np.inf
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        scaled, centre = root[:, None] * kernel * root[None, :], root / np.linalg.norm(root)
        project = np.eye(COARSE) - np.outer(centre, centre)
        values, vectors = np.linalg.eigh(project @ scaled @ project)
        chosen = np.argsort(-np.abs(values))[:terms]
        lost = project @ scaled @ project - (vectors[:, chosen] * values[chosen]) @ vectors[:, chosen].T
        error = np.abs(lost / np.outer(root, root)).max(1)
        if error.max() < least:
            least, best = error.max(), (root, centre, values[chosen], vectors[:, chosen])
        weights = weights * (error / error.mean())
        weights /= weights.mean()
    return _tables(grid, *best)


def _tables(grid, root, centre, values, vectors) -> np.ndarray:
    """From the coarse grid to all entries: functions of one score are the kernel's own combinations."""
    fine = np.linspace(grid[0], grid[-1], ENTRIES)
    cross = 1 / (1 + np.exp(-(fine[:, None] + grid[None, :])))
    mean = cross @ (root * centre) / np.linalg.norm(root)  # weighted mean over the other score
    at_grid = mean[:: (ENTRIES - 1) // (COARSE - 1)]
    whole = float(at_grid @ (root * centre)) / np.linalg.norm(root)
    added = mean - whole / 2
    flat = (cross - at_grid[None, :]) @ (root[:, None] * vectors)  # the centred kernel on each eigenvector
    factors = flat / values * np.sqrt(np.abs(values))
    left = np.rint(factors.T * 2**FACTOR_BITS)
    right = np.rint((factors * np.sign(values)).T * 2**FACTOR_BITS)
    side = np.rint(added * 2**ADDED_BITS)[None]
    return np.concatenate([side, side, left, right]).astype("<i4")


@dataclass(frozen=True)
class Candidate(Kernel):
    """Tables that do not come with the package, evaluated as shares would."""

    clamp: float = CLAMP
    tables: np.ndarray = field(default_factory=fitted)

    @property
    def values(self) -> np.ndarray:
        """Of all pairs of entries."""
        alpha, beta, *rest = self.tables.astype(np.int64)
        left, right = np.split(np.stack(rest).astype(np.float64), 2)
        return ((alpha[:, None] + beta) + left.T @ right) * 2.0**-ADDED_BITS

    @property
    def range(self) -> tuple[float, float]:
        """By enumeration."""
        values = self.values
        return float(values.min()), float(values.max())

    @property
    def error(self) -> float:
        """Largest distance from the logistic function of the clamped scores."""
        grid = np.linspace(-self.clamp, self.clamp, ENTRIES)
        return float(np.abs(self.values - 1 / (1 + np.exp(-(grid[:, None] + grid)))).max())

    def of(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Of both members' scores."""
        unit = (ENTRIES - 1) / (2 * self.clamp)
        one, two = (
            np.rint((np.clip(s, -self.clamp, self.clamp) + self.clamp) * unit).astype(np.intp)
            for s in (first, second)
        )
        alpha, beta, *rest = self.tables.astype(np.int64)
        left, right = np.split(np.stack(rest), 2)
        return (alpha[one] + beta[two] + (left[:, one] * right[:, two]).sum(0)) * 2.0**-ADDED_BITS


def compare(name: str, candidates: dict[str, Candidate], splits: int, epsilon: float) -> None:
    """Test AUC with each, less that with the series: mean and standard error over splits."""
    data, mu = load(name), gdp_mu(epsilon, DELTA)
    found: dict[str, list[float]] = {"": [], **{each: [] for each in candidates}}
    for split in range(splits):
        order = np.random.default_rng(split).permutation(len(data.labels))
        cut = round(len(order) * data.test)
        here = [[data.columns[i] for i in group] for group in halves(len(data.columns), 2)]
        test, train = (
            [[c.rows(rows) for c in block] for block in here] for rows in (order[:cut], order[cut:])
        )
        for each, series in (("", None), *candidates.items()):
            card = Card(train, data.labels[order[cut:]], mu, seed=split, series=series)
            found[each].append(roc_auc_score(data.labels[order[:cut]], card.predict(test)))
    print(f"\n{name}, epsilon {epsilon:g}, {splits} splits; the series has {np.mean(found['']):.4f}")
    for each in candidates:
        apart = np.subtract(found[each], found[""])
        error = apart.std(ddof=1) / splits**0.5
        print(f"{each:22} {apart.mean():>+8.5f}, standard error {error:.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--clamps", type=float, nargs="+", default=[CLAMP])
    parser.add_argument("--terms", type=int, nargs="+", default=[TERMS])
    parser.add_argument("--sets", nargs="+", choices=GOALS, default=[])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    if options.file:
        content = fitted().tobytes()
        options.file.write_bytes(content)
        print(hashlib.sha256(content).hexdigest())
        return
    candidates = {}
    for terms, clamp in itertools.product(options.terms, options.clamps):
        made = Candidate(clamp=clamp, tables=fitted(clamp, terms))
        candidates[f"{terms} products, clamp {clamp:g}"] = made
        low, high = made.range
        bound = max(high, 1 - low)
        print(
            f"{terms} products, clamp {clamp:g}: R {bound:.4f}, rho {high - low:.4f}, error {made.error:.4f}"
        )
    for name in options.sets:
        compare(name, candidates, options.splits, options.epsilon)


if __name__ == "__main__":
    main()
