"""Products modulo 2^64 against Python integers and numpy's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.errors import InputError
from securevfl.protocols.sealed.protocol import ring_product


@given(st.integers(0, 5), st.integers(0, 300), st.integers(1, 3), st.integers(0, 2**32), st.booleans())
def test_products_are_exact_modulo_two_to_the_64(width, records, columns, seed, small):
    generator = np.random.default_rng(seed)
    right = generator.integers(0, 2**64, (records, columns), dtype=np.uint64)
    if small:
        left = generator.integers(-(2**31), 2**31, (width, records), dtype=np.int64).astype(np.int32)
        wide = left.astype(np.int64).view(np.uint64)
    else:
        left = wide = generator.integers(0, 2**64, (width, records), dtype=np.uint64)
    assert np.array_equal(ring_product(left, right), wide @ right)


def test_one_product_by_hand():
    left = np.array([[2**63, 2**64 - 1]], np.uint64)
    right = np.array([[3], [2]], np.uint64)
    assert int(ring_product(left, right)[0, 0]) == (2**63 * 3 + (2**64 - 1) * 2) % 2**64


def test_what_does_not_fit_is_refused():
    words = np.zeros((2, 3), np.uint64)
    for left, right in [(words, words), (words[0], words), (words.astype(float), words.T)]:
        with pytest.raises(InputError):
            ring_product(left, right)
