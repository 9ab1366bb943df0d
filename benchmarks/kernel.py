"""Makes the tables of `securevfl.protocols.sealed.kernel`: python -m benchmarks.kernel FILE.

The logistic function of a sum of two clamped scores as alpha(a) + beta(b) + sum_k f_k(a) g_k(b): the doubly
centred kernel is symmetric, its largest eigenvalues give the products, and weights are moved towards the rows
where the error is largest. The result is shipped, never computed at run time: one sign that differs between
two members' linear algebra would make residuals half as large again as the bound that noise is sized for.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

ENTRIES, CLAMP, TERMS = 2049, 6.0, 4
COARSE, ROUNDS = 513, 60
ADDED_BITS, FACTOR_BITS = 20, 10


def fitted() -> np.ndarray:
    """(2 + 2 K, entries) of int32: alpha, beta, f_k, g_k."""
    grid = np.linspace(-CLAMP, CLAMP, COARSE)
    kernel = 1 / (1 + np.exp(-(grid[:, None] + grid[None, :])))
    weights, best, least = np.ones(COARSE), None, np.inf
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        scaled, centre = root[:, None] * kernel * root[None, :], root / np.linalg.norm(root)
        project = np.eye(COARSE) - np.outer(centre, centre)
        values, vectors = np.linalg.eigh(project @ scaled @ project)
        chosen = np.argsort(-np.abs(values))[:TERMS]
        lost = project @ scaled @ project - (vectors[:, chosen] * values[chosen]) @ vectors[:, chosen].T
        error = np.abs(lost / np.outer(root, root)).max(1)
        if error.max() < least:
            least, best = error.max(), (root, centre, values[chosen], vectors[:, chosen])
        weights = weights * (error / error.mean())
        weights /= weights.mean()
    return _tables(grid, *best)


def _tables(grid, root, centre, values, vectors) -> np.ndarray:
    """From the coarse grid to all entries: functions of one score are the kernel's own combinations."""
    fine = np.linspace(-CLAMP, CLAMP, ENTRIES)
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


if __name__ == "__main__":
    content = fitted().tobytes()
    Path(sys.argv[1]).write_bytes(content)
    print(hashlib.sha256(content).hexdigest())
