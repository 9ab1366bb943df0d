"""Makes statistics_vectors.json from the definitions alone, with 40 digits; independent of the package.

Run it as ``python tests/attacks/make_statistics_vectors.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from mpmath import betainc, binomial, e, erfinv, findroot, log, mp, mpf, ncdf, sqrt

mp.dps = 40

NASR = "Nasr et al., Tightly auditing differentially private machine learning, 2023: Clopper-Pearson and GDP"
KAIROUZ = "Kairouz, Oh and Viswanath, The composition theorem for differential privacy, 2015, Theorem 2.1"
STEINKE = "Steinke, Nasr and Jagielski, Privacy auditing with one (1) training run, 2023, Theorem 5.2"
DONG = "Dong, Roth and Su, Gaussian differential privacy, 2022, equation 6"


def quantile(p):
    return sqrt(mpf(2)) * erfinv(2 * p - 1)


def bisect(holds, low, high):
    for _ in range(120):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def upper(k, n):
    """P[Bin(n, p) <= k] = 2.5 % solved for p, by the incomplete beta function."""
    target = mpf(25) / 1000
    return bisect(lambda p: betainc(n - k, k + 1, 0, 1 - p, regularized=True) > target, mpf(0), mpf(1))


def tail(v, r, q):
    return sum(binomial(r, i) * q**i * (1 - q) ** (r - i) for i in range(v, r + 1))


def one_run(m, r, v, delta):
    def p(epsilon):
        q = 1 / (1 + e ** (-epsilon))
        masses = [binomial(r, i) * q**i * (1 - q) ** (r - i) for i in range(r + 1)]
        total, best = mpf(0), mpf(0)
        for i in range(1, v + 1):
            total += masses[v - i]
            best = max(best, total / i)
        return sum(masses[v:]) + 2 * m * delta * best

    return bisect(lambda epsilon: p(epsilon) < mpf(5) / 100, mpf(0), mpf(16))


def games():
    for fp, fn, n in [(0, 0, 1000), (50, 60, 1000), (3, 0, 40), (400, 420, 1000)]:
        alpha, beta = upper(fp, n), upper(fn, n)
        mu = quantile(1 - alpha) - quantile(beta)
        delta = mpf(1) / 100000
        epsilon = max(log((1 - delta - alpha) / beta), log((1 - delta - beta) / alpha), mpf(0))
        yield {
            "false_positives": fp,
            "false_negatives": fn,
            "trials": n,
            "delta": 1e-5,
            "alpha": float(alpha),
            "beta": float(beta),
            "mu_lower": float(max(mu, 0)),
            "epsilon_lower": float(epsilon),
            "source": f"{NASR}; {KAIROUZ}",
        }


def runs():
    for m, r, v, delta in [
        (1000, 1000, 750, 1e-5),
        (1000, 100, 100, 1e-5),
        (1000, 100, 95, 0),
        (50, 20, 15, 1e-3),
    ]:
        value = one_run(m, r, v, mpf(delta))
        yield {
            "canaries": m,
            "guesses": r,
            "correct": v,
            "delta": delta,
            "epsilon_lower": float(value),
            "source": STEINKE,
        }


def ceilings():
    for mu in (mpf("0.1"), mpf(1), mpf("1.66603059785"), mpf(4)):
        yield {
            "mu": float(mu),
            "balanced_accuracy": float(ncdf(mu / 2)),
            "auc": float(ncdf(mu / sqrt(mpf(2)))),
            "tpr_at_0.001": float(ncdf(quantile(mpf(1) / 1000) + mu)),
            "guess_of_10": float(ncdf(quantile(mpf(1) / 10) + mu)),
            "source": DONG,
        }


if __name__ == "__main__":
    assert abs(findroot(lambda x: ncdf(x) - mpf(975) / 1000, 2) - quantile(mpf(975) / 1000)) < mpf(10) ** -30
    content = {"games": list(games()), "one_run": list(runs()), "ceilings": list(ceilings())}
    target = Path(__file__).with_name("statistics_vectors.json")
    target.write_text(json.dumps(content, indent=1) + "\n")
