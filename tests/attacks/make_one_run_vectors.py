"""Makes one_run_vectors.json with 30 digits from the masses of right guesses; independent of the package.

Run it as ``python tests/attacks/make_one_run_vectors.py`` (about two minutes).
"""

from __future__ import annotations

import json
from pathlib import Path

from mpmath import erfinv, mp, mpf, ncdf, sqrt

mp.dps = 30

PAPER = "Mahloujifar, Melis and Chaudhuri, Auditing f-differential privacy in one run, arXiv 2410.22235, 2024"
JAX = "jax_privacy 2.0, auditing._epsilon_one_run_fdp(0, canaries, guesses, correct, level, 1e-5), run apart"
ROBBINS = "Robbins, Statistical methods related to the law of the iterated logarithm, 1970"

# (canaries, guesses, correct, level) -> epsilon at delta 1e-5 printed by JAX, which solves to 1e-6.
CASES = {
    (2000, 100, 93, "0.05"): 2.6861785249616887,
    (2000, 400, 397, "0.05"): 6.453428625497292,
    (2000, 1400, 1399, "0.05"): 10.893638206506736,
    (2000, 2000, 1400, "0.05"): 1.3758171932761956,
    (2000, 2000, 2000, "0.05"): 13.496206010239856,
    (20000, 5000, 4500, "0.001"): 2.2024925145950625,
    (500, 50, 40, "0.01"): 0.745195010815987,
    (10, 10, 9, "0.05"): None,
    (10, 10, 5, "0.05"): None,
    (400, 280, 279, "0.549280271653059"): None,
}


def quantile(p):
    return sqrt(mpf(2)) * erfinv(2 * p - 1)


def possible(mu, m, g, v, level):
    """Whether masses of 0..g right guesses exist with P[w >= v] = level: the smallest that mu allows."""
    masses = {v: level}
    for w in range(v - 1, -1, -1):
        right = sum(k * p for k, p in masses.items()) / m
        wrong = sum((g - k) * p for k, p in masses.items()) / m
        if right >= 1:
            return False
        missing = ncdf(quantile(right) - mu) - wrong
        if missing < mpf(10) ** -25:
            return True
        masses[w] = missing * m / (g - w)
        if sum(masses.values()) > 1:
            return False
    return True


def bisect(holds, low, high):
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def runs():
    for (m, g, v, level), epsilon in CASES.items():

        def refuted(mu, case=(m, g, v), level=level):
            return not possible(mu, *case, mpf(level))

        mu = bisect(refuted, mpf(0), mpf(4)) if refuted(mpf(0)) else mpf(0)
        vector = {"canaries": m, "guesses": g, "correct": v, "level": float(level), "mu_lower": float(mu)}
        if epsilon is not None:
            vector |= {"epsilon_lower": epsilon, "epsilon_source": JAX}
        yield vector | {"source": PAPER}


def sequences():
    for k, n, level in [(0, 10, "0.05"), (50, 1000, "0.025"), (400, 1000, "0.001"), (9, 10, "0.05")]:
        mixture = mp.beta(k + mpf(1) / 2, n - k + mpf(1) / 2) / mp.beta(mpf(1) / 2, mpf(1) / 2)

        def kept(p, k=k, n=n, mixture=mixture, level=level):
            return mixture * mpf(level) <= p**k * (1 - p) ** (n - k)

        upper = bisect(kept, mpf(k) / n, mpf(1))
        yield {"events": k, "trials": n, "level": float(level), "upper": float(upper), "source": ROBBINS}


if __name__ == "__main__":
    content = {"one_run": list(runs()), "anytime": list(sequences())}
    target = Path(__file__).with_name("one_run_vectors.json")
    target.write_text(json.dumps(content, indent=1) + "\n")
