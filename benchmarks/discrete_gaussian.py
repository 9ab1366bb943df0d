"""Exact discrete Gaussian samples per second, against the textbook sampler in plain Python, in one run.

The textbook is the rejection from a discrete Laplace distribution with rational arithmetic (Canonne, Kamath
and Steinke 2020, Algorithm 3), fed by the operating system's entropy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from fractions import Fraction

from securevfl.protocols.discrete_gaussian import DiscreteGaussian
from securevfl.protocols.stream import KeyStream

STDS = {"4": 4, "2^16": 1 << 16, "2^42": 1 << 42, "2^50": 1 << 50}
OURS, TEXTBOOK = 500_000, 300
ROUNDS = 5


def bernoulli_exp(gamma: Fraction) -> bool:
    while gamma > 1:
        if not bernoulli_exp_small(Fraction(1)):
            return False
        gamma -= 1
    return bernoulli_exp_small(gamma)


def bernoulli_exp_small(gamma: Fraction) -> bool:
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


def laplace(scale: int) -> int:
    while True:
        rest = secrets.randbelow(scale)
        if not bernoulli_exp(Fraction(rest, scale)):
            continue
        whole = 0
        while bernoulli_exp(Fraction(1)):
            whole += 1
        size = rest + scale * whole
        negative = secrets.randbelow(2)
        if size or not negative:
            return -size if negative else size


def textbook(std: int) -> int:
    scale = std + 1
    while True:
        candidate = laplace(scale)
        gap = abs(candidate) - Fraction(std * std, scale)
        if bernoulli_exp(gap * gap / (2 * std * std)):
            return candidate


def rate(act: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return count / min(times)


def main() -> dict[str, tuple[float, float]]:
    """Prints and returns samples per second of both."""
    stream = KeyStream.from_os_entropy()
    results = {}
    print("Discrete Gaussian samples per second")
    for name, std in STDS.items():
        sampler = DiscreteGaussian(std)
        ours = rate(lambda s=sampler: s.sample(OURS, stream), OURS)
        theirs = rate(lambda s=std: [textbook(s) for _ in range(TEXTBOOK)], TEXTBOOK)
        results[name] = ours, theirs
        print(
            f"  std {name:5} {ours / 1e6:6.1f} million, textbook {theirs:8,.0f}: {ours / theirs:,.0f} times"
        )
    return results


if __name__ == "__main__":
    main()
