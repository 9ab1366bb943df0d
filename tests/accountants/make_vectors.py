"""Writes vectors.json: reference values that share no code with securevfl.

GDP and Rényi figures come from mpmath at 60 digits (closed forms of Balle and Wang 2018, Mironov 2017 and
Mironov, Talwar and Zhang 2019), PLD figures from dp-accounting's pessimistic discretisation.
Run: python tests/accountants/make_vectors.py
"""

import json
from pathlib import Path

import dp_accounting
import mpmath as mp
from dp_accounting.pld import PLDAccountant

mp.mp.dps = 60
NEIGHBOURS = {
    "add-remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def gdp_delta(mu, epsilon):
    mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def bisect(function, low, high):
    """Root of a decreasing function."""
    low, high = mp.mpf(low), mp.mpf(high)
    for _ in range(180):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def gdp_epsilon(mu, delta):
    top = mp.mpf(mu) ** 2 / 2 + mu * mp.sqrt(-2 * mp.log(mp.mpf(delta))) + 1
    return bisect(lambda e: gdp_delta(mu, e) - mp.mpf(delta), 0, top)


def gdp_mu(epsilon, delta):
    return bisect(lambda m: mp.mpf(delta) - gdp_delta(m, epsilon), mp.mpf(10) ** -12, 1000)


def sampled_rdp(rate, sigma, order):
    q, s = mp.mpf(rate), mp.mpf(sigma)
    terms = [
        mp.binomial(order, k) * (1 - q) ** (order - k) * q**k * mp.exp(k * (k - 1) / (2 * s**2))
        for k in range(order + 1)
    ]
    return mp.log(mp.fsum(terms)) / (order - 1)


def fractional_rdp(rate, sigma, order):
    q, s, a = mp.mpf(rate), mp.mpf(sigma), mp.mpf(order)

    def integrand(x):
        return mp.npdf(x, 0, s) * (1 - q + q * mp.exp((x - mp.mpf(1) / 2) / s**2)) ** a

    points = mp.linspace(-14 * s, a + 14 * s, 40)
    return mp.log(mp.quad(integrand, points)) / (a - 1)


def rdp_epsilon(rdp_of_order, orders, delta):
    figures = [
        rdp_of_order(a) + mp.log((a - 1) / mp.mpf(a)) - (mp.log(mp.mpf(delta)) + mp.log(a)) / (a - 1)
        for a in orders
    ]
    return min(figures)


def pld_epsilon(sigma, rate, count, adjacency, delta=1e-5):
    accountant = PLDAccountant(NEIGHBOURS[adjacency], value_discretization_interval=2e-5)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, count))
    return accountant.get_epsilon(delta)


def number(value):
    return float(mp.nstr(value, 17)) if isinstance(value, mp.mpf) else float(value)


def cases():
    for mu, epsilon in ((1, 1), (1, 0), (0.5, 1), (0.1, 0.5), (20, 150), (400, 8e4)):
        yield {"kind": "gdp-delta", "mu": mu, "epsilon": epsilon, "value": number(gdp_delta(mu, epsilon))}
    for mu in (0.1, 0.5, 1, 2, 4, 10, 200, 440):
        for delta in (1e-2, 1e-5, 1e-6, 1e-15):
            value = number(gdp_epsilon(mu, delta)) if gdp_delta(mu, 0) > delta else 0.0
            yield {"kind": "gdp-epsilon", "mu": mu, "delta": delta, "value": value}
    for epsilon in (1e-3, 1, 8, 1e3, 1e5):
        for delta in (1e-2, 1e-5, 1e-15):
            value = number(gdp_mu(epsilon, delta))
            yield {"kind": "gdp-mu", "epsilon": epsilon, "delta": delta, "value": value}
    for clip, sigma, count, delta, adjacency in (
        (1, 4, 50, 1e-5, "replace-one"),
        (1, 4, 50, 1e-5, "add-remove"),
        (1, 8, 10, 1e-6, "add-remove"),
        (1, 8, 10, 1e-6, "replace-one"),
        (1, 1, 10, 1e-5, "replace-one"),
        (1, 1, 10, 1e-5, "add-remove"),
    ):
        reach = 2 * clip if adjacency == "replace-one" else clip
        value = number(gdp_epsilon(mp.mpf(reach) / sigma * mp.sqrt(count), delta))
        release = {"clip": clip, "sigma": sigma, "count": count, "adjacency": adjacency}
        yield {"kind": "release", **release, "delta": delta, "value": value}
    for rate, sigma, order in ((0.01, 1, 2), (0.01, 1, 8), (0.01, 1, 32), (0.1, 2, 64)):
        value = number(sampled_rdp(rate, sigma, order))
        yield {"kind": "rdp", "rate": rate, "sigma": sigma, "order": order, "value": value}
    for rate, sigma, order in ((0.01, 1, 1.1), (0.1, 0.5, 1.05), (0.1, 0.5, 2.5), (0.001, 4, 7.5)):
        value = number(fractional_rdp(rate, sigma, order))
        yield {"kind": "rdp", "rate": rate, "sigma": sigma, "order": order, "value": value}
    orders = range(2, 257)
    gaussian = number(rdp_epsilon(lambda a: mp.mpf(a) / 2, orders, 1e-5))
    yield {"kind": "rdp-epsilon", "rate": 1.0, "sigma": 1, "count": 1, "delta": 1e-5, "value": gaussian}
    sampled = number(rdp_epsilon(lambda a: 1000 * sampled_rdp(0.01, 1, a), orders, 1e-5))
    yield {"kind": "rdp-epsilon", "rate": 0.01, "sigma": 1, "count": 1000, "delta": 1e-5, "value": sampled}
    for sigma, rate, count, adjacency in (
        (1, 0.01, 1000, "add-remove"),
        (1, 0.01, 1000, "replace-one"),
        (0.5, 0.01, 200, "add-remove"),
        (2, 0.1, 200, "add-remove"),
        (1.1, 0.004, 14000, "add-remove"),
        (0.8, 0.005, 1000, "add-remove"),
        (1, 0.01, 10000, "add-remove"),
        (2, 0.001, 100000, "add-remove"),
    ):
        value = pld_epsilon(sigma, rate, count, adjacency)
        release = {"sigma": sigma, "rate": rate, "count": count, "adjacency": adjacency}
        yield {"kind": "pld", **release, "delta": 1e-5, "value": value}
    limit = mp.mpf("0.01") * mp.sqrt(1000 * mp.expm1(1))
    yield {"kind": "clt-mu", "rate": 0.01, "sigma": 1, "count": 1000, "value": number(limit)}


def main():
    header = {
        "gdp": "mpmath 60 digits; Balle and Wang 2018, Theorem 8",
        "rdp": "mpmath 60 digits; Mironov, Talwar and Zhang 2019; Canonne, Kamath and Steinke 2020, Prop. 12",
        "pld": "dp-accounting 0.6.0 PLDAccountant, interval 2e-5",
        "clt": "Bu, Dong, Long and Su 2020",
    }
    lines = ",\n".join(json.dumps(case) for case in cases())
    text = f'{{"sources": {json.dumps(header)},\n"cases": [\n{lines}\n]}}\n'
    Path(__file__).with_name("vectors.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
