"""Fixed-point numbers: the exact overflow rule, rounding, refusals."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols import FixedPoint
from securevfl.protocols.ring import CHUNK
from securevfl.protocols.stream import KeyStream

RINGS = [FixedPoint(), FixedPoint(32, 16), FixedPoint(64, 0), FixedPoint(32, 30), FixedPoint(64, 62)]


def fits(value: float, terms: int, ring: FixedPoint, error: Fraction = Fraction(1, 2)) -> bool:
    """The rule in exact arithmetic: terms (|v| 2^f + 1/2) < 2^(k-1)."""
    return terms * (abs(Fraction(value)) * 2**ring.fraction_bits + error) < 2 ** (ring.bits - 1)


@given(st.sampled_from(RINGS), st.integers(1, 5000), st.floats(allow_nan=False, allow_infinity=False))
def test_exactly_the_values_that_cannot_overflow_are_accepted(ring, terms, value):
    if fits(value, terms, ring):
        ring.encode(value, terms)
    else:
        with pytest.raises(EncodingError):
            ring.encode(value, terms)


@given(st.sampled_from(RINGS), st.integers(1, 5000), st.integers(-3, 3))
def test_the_limit_to_the_last_float(ring, terms, steps):
    value = ring.max_abs(terms)
    assert fits(value, terms, ring)
    for _ in range(abs(steps)):
        value = math.nextafter(value, math.inf if steps > 0 else 0.0)
    for signed in (value, -value):
        if fits(signed, terms, ring):
            ring.encode(signed, terms)
        else:
            with pytest.raises(EncodingError):
                ring.encode(signed, terms)
    assert not fits(math.nextafter(ring.max_abs(terms), math.inf), terms, ring)


@given(st.sampled_from(RINGS), st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.booleans())
def test_sums_are_right_within_half_a_step_per_term(ring, shares, extreme):
    terms = len(shares)
    values = [share * ring.max_abs(terms) for share in shares]
    if extreme:
        values = [math.copysign(ring.max_abs(terms), values[0])] * terms
    total = sum((ring.encode(v, terms) for v in values), start=np.zeros((), ring.dtype))
    exact = sum(map(Fraction, values))
    signed = int(total) - (1 << ring.bits if int(total) >> (ring.bits - 1) else 0)
    error = abs(Fraction(signed, 2**ring.fraction_bits) - exact)
    assert error <= Fraction(terms, 2 ** (ring.fraction_bits + 1))


def test_ties_go_to_even_and_zero_is_zero():
    ring = FixedPoint(64, 0)
    encoded = ring.encode(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0]))
    assert ring.decode(encoded).tolist() == [0, 2, 2, 0, -2, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300, -1e308])
@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 4])
def test_one_bad_value_anywhere_is_refused(bad, position):
    values = np.zeros(2 * CHUNK + 5)
    values[position] = bad
    for ring in RINGS:
        with pytest.raises(EncodingError, match=f"value {position} cannot be encoded"):
            ring.encode(values)


def test_errors_do_not_show_private_values():
    with pytest.raises(EncodingError) as caught:
        FixedPoint().encode([1.0, 123456789123.0], 8)
    assert "1234567" not in str(caught.value)
    assert "too large" in str(caught.value)


def test_shapes_types_and_strides():
    ring = FixedPoint()
    for shape in [(), (0,), (5,), (2, 3), (2, 0, 3)]:
        values = np.full(shape, -1.25)
        encoded = ring.encode(values, 3)
        assert encoded.shape == shape
        assert encoded.dtype == np.uint64
        np.testing.assert_array_equal(ring.decode(encoded), values)
    grid = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(ring.decode(ring.encode(grid.T)), grid.T)
    np.testing.assert_array_equal(ring.decode(ring.encode(grid)[:, ::2]), grid[:, ::2])
    whole = np.arange(-3, 3, dtype=np.int32)
    np.testing.assert_array_equal(ring.decode(ring.encode(whole)), whole)
    np.testing.assert_array_equal(ring.decode(ring.encode([1, 2.5])), [1.0, 2.5])
    for bad in (np.array(["x"]), np.array([1j]), np.array([None])):
        with pytest.raises(EncodingError):
            ring.encode(bad)


@given(hnp.arrays(np.float32, st.integers(0, 9), elements=st.floats(-1000, 1000, width=32)))
def test_single_precision_is_widened_exactly(values):
    for ring in (FixedPoint(), FixedPoint(32, 16)):
        np.testing.assert_array_equal(ring.encode(values, 8), ring.encode(values.astype(np.float64), 8))
        np.testing.assert_array_equal(ring.encode(values[::2], 8), ring.encode(values, 8)[::2])


def test_single_precision_is_checked():
    for bad in (np.inf, np.nan, 3e38):
        with pytest.raises(EncodingError):
            FixedPoint().encode(np.array([0, bad], dtype=np.float32))
    assert FixedPoint().encode(np.float32(1.5)).shape == ()


def test_integers_that_floats_do_not_hold_are_refused():
    ring = FixedPoint(64, 0)
    assert ring.encode(np.array([2**53, -(2**53)]), 2).tolist() == [2**53, 2**64 - 2**53]
    for bad in (2**53 + 1, -(2**53) - 1, 2**62):
        with pytest.raises(EncodingError, match="2\\^53"):
            ring.encode(np.array([0, bad]))
    with pytest.raises(EncodingError):
        ring.encode(np.array([2**64 - 1], dtype=np.uint64))
    with pytest.raises(EncodingError):
        ring.encode(np.array([np.longdouble("1e400")]))


def test_decode_refuses_foreign_types():
    for foreign in (np.zeros(2, np.uint32), np.zeros(2, np.int64), np.zeros(2)):
        with pytest.raises(EncodingError):
            FixedPoint().decode(foreign)
        with pytest.raises(ProtocolError):
            FixedPoint().check(foreign, (2,))
    with pytest.raises(ProtocolError):
        FixedPoint().check([1, 2], (2,))
    with pytest.raises(ProtocolError):
        FixedPoint().check(np.zeros(2, np.uint64), (3,))


@pytest.mark.parametrize(("bits", "fraction"), [(16, 4), (63, 4), (64, 63), (32, 31), (64, -1)])
def test_bad_rings_are_refused(bits, fraction):
    with pytest.raises(InputError):
        FixedPoint(bits, fraction)


def test_bad_terms_are_refused():
    for terms in (0, -1):
        with pytest.raises(InputError):
            FixedPoint().encode(1.0, terms)


def test_stochastic_rounding_is_unbiased():
    """n = 2^17 coins of probability p: the count is binomial, tested at a false alarm of 1e-9 per value."""
    ring, n = FixedPoint(32, 4), 1 << 17
    stream = KeyStream(b"stochastic test.")
    for value in (0.0, 0.01, 0.03125, 0.05, -0.01, -0.06, 2.51):
        scaled = value * 16
        low = math.floor(scaled)
        decoded = ring.decode(ring.encode(np.full(n, value), 8, stochastic=stream)) * 16
        assert set(np.unique(decoded)) <= {low, low + 1}
        up = int((decoded == low + 1).sum())
        chance = scaled - low
        if chance in (0.0, 1.0):
            assert up == n * chance
        else:
            assert stats.binomtest(up, n, chance).pvalue > 1e-9


def test_stochastic_rounding_needs_a_whole_step_of_room():
    ring, stream = FixedPoint(32, 0), KeyStream(bytes(16))
    ring.encode(2.0**31 - 1)
    ring.encode(2.0**31 - 1.5, stochastic=stream)
    with pytest.raises(EncodingError):
        ring.encode(2.0**31 - 1, stochastic=stream)


@given(st.sampled_from(RINGS), st.integers(1, 300), st.floats(allow_nan=False, allow_infinity=False))
def test_stochastic_rounding_never_overflows(ring, terms, value):
    stream = KeyStream(bytes(16))
    if not fits(value, terms, ring, Fraction(1)):
        with pytest.raises(EncodingError):
            ring.encode(value, terms, stochastic=stream)
        return
    decoded = float(ring.decode(ring.encode(value, terms, stochastic=stream)))
    assert abs(Fraction(decoded) - Fraction(value)) < Fraction(ring.resolution) + abs(Fraction(value)) / 2**52
