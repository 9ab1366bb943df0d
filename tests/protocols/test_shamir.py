"""Secret sharing: any threshold of shares gives the secret, fewer are independent of it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.errors import InputError
from securevfl.protocols.sums.shamir import PRIME, combine, split, weights


@given(st.integers(0, PRIME - 1), st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_gives_the_secret(secret, threshold, extra, random):
    points = random.sample(range(1, 50), threshold + extra)
    shares = dict(zip(points, split(secret, threshold, points), strict=True))
    chosen = random.sample(points, threshold)
    assert combine([shares[point] for point in chosen], weights(chosen)) == secret


def test_all_subsets():
    points = range(1, 6)
    shares = dict(zip(points, split(1234567, 3, points), strict=True))
    for size in range(3, 6):
        for chosen in itertools.combinations(points, size):
            assert combine([shares[p] for p in chosen], weights(chosen)) == 1234567
    for chosen in itertools.combinations(points, 2):
        assert combine([shares[p] for p in chosen], weights(chosen)) != 1234567


def test_fewer_shares_fit_every_secret():
    """For any two shares and any secret there are coefficients that explain them: nothing is learned."""
    shares = split(42, 3, [1, 2, 3])[:2]
    for secret in (0, 7, PRIME - 1):
        # The parabola through (0, secret) and the two shares is as good an explanation as the true one.
        third = combine([secret, *shares], _weights_at(3, [0, 1, 2]))
        assert combine([*shares, third], weights([1, 2, 3])) == secret


def _weights_at(target, points):
    factors = []
    for point in points:
        factor = 1
        for other in points:
            if other != point:
                factor = factor * (target - other) * pow(point - other, -1, PRIME) % PRIME
        factors.append(factor)
    return factors


def test_fixed_coefficients_give_known_shares():
    draws = iter([5, 3])  # 7 + 3 x + 5 x^2
    assert split(7, 3, [1, 2, 10], draw=lambda _: next(draws)) == [15, 33, 537]


def test_shares_are_fresh():
    assert split(1, 2, [1, 2]) != split(1, 2, [1, 2])


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [(-1, 2, [1, 2]), (PRIME, 2, [1, 2]), (1, 0, [1]), (1, 3, [1, 2]), (1, 2, [0, 1]), (1, 2, [1, 1])],
)
def test_bad_requests_are_refused(secret, threshold, points):
    with pytest.raises(InputError):
        split(secret, threshold, points)


def test_bad_points_are_refused():
    with pytest.raises(InputError):
        weights([1, 2, 2])
