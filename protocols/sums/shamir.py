"""Shamir's secret sharing over the prime field of 2^255 - 19, for short seeds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from securevfl.errors import InputError

PRIME = 2**255 - 19
SHARE_BYTES = 32


def split(
    secret: int, threshold: int, points: Sequence[int], *, draw: Callable[[int], int] = secrets.randbelow
) -> list[int]:
    """Shares a secret so that any `threshold` shares give it back and fewer tell nothing.

    Args:
        secret: A field element.
        threshold: How many shares are needed.
        points: The distinct non-zero points at which the shares lie, one per holder.
        draw: Uniform integers below its argument; replaced only by tests.
    """
    check_points(points)
    if not 0 <= secret < PRIME:
        raise InputError("the secret is not an element of the field")
    if not 1 <= threshold <= len(points):
        raise InputError(f"threshold {threshold} does not fit {len(points)} shares")
    coefficients = [draw(PRIME) for _ in range(threshold - 1)]
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def weights(points: Sequence[int]) -> list[int]:
    """The factors by which the shares at these points add up to the secret."""
    check_points(points)
    factors = []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        factors.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return factors


def combine(shares: Sequence[int], factors: Sequence[int]) -> int:
    """The secret, from as many shares as the threshold and the `weights` of their points."""
    return sum(share * factor for share, factor in zip(shares, factors, strict=True)) % PRIME


def check_points(points: Sequence[int]) -> None:
    """Raises unless the points are distinct and not zero, where the secret itself lies."""
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise InputError(f"share points {list(points)} are not distinct positive numbers")
