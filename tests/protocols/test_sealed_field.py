"""The field of authentication against Python's integers: end points, all limbs, small fields to the end."""

import numpy as np
import pytest

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.sealed.field import FIELD, Field
from securevfl.protocols.stream import KeyStream

P = FIELD.p
EDGES = [0, 1, 2, P - 1, P - 2, P // 2, P // 2 + 1]
EDGES += [1 << e for e in (15, 16, 17, 30, 31, 32, 47, 48, 49, 60)]
EDGES += [(1 << e) - 1 for e in (16, 31, 32, 48, 60)] + [((1 << 16) - 1) << s for s in (16, 32)]


def _random(count, seed=0):
    stream = KeyStream(seed.to_bytes(16, "big"))
    return FIELD.draw(stream, count)


def _elements(values):
    return np.array(values, np.uint64)


def test_entries_at_all_end_points():
    one, two = np.meshgrid(_elements(EDGES), _elements(EDGES))
    pairs = [(int(a), int(b)) for a, b in zip(one.ravel(), two.ravel(), strict=True)]
    for name, exact in (
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
    ):
        found = getattr(FIELD, name)(one, two).ravel().tolist()
        assert found == [exact(a, b) % P for a, b in pairs]
    assert FIELD.negative(_elements(EDGES)).tolist() == [-e % P for e in EDGES]
    for places in range(130):
        assert FIELD.shift(_elements(EDGES), places).tolist() == [(e << places) % P for e in EDGES]


def test_words_and_signed_integers_reduce():
    words = [0, P - 1, P, P + 1, 2 * P, 2 * P + 1, 2**61, 2**62, 2**63, 2**64 - 1, 7 * P, 8 * P, 8 * P + 7]
    assert FIELD.reduce(_elements(words)).tolist() == [w % P for w in words]
    signed = [0, -1, 1, -(2**60), 2**60, 1 - P, P - 1]
    assert FIELD.reduce(np.array(signed)).tolist() == [w % P for w in signed]
    assert FIELD.centred(_elements([0, 1, P - 1, P // 2, P // 2 + 1])).tolist() == [
        0,
        1,
        -1,
        P // 2,
        -(P // 2),
    ]


@pytest.mark.parametrize("length", [1, 3, (1 << 15) - 1, (1 << 15) + 1])
def test_sums_of_products_are_exact(length):
    one, two = _random(length), _random(length, 1)
    one[: min(length, len(EDGES))] = _elements(EDGES)[:length]
    exact = sum(int(a) * int(b) for a, b in zip(one, two, strict=True)) % P
    assert FIELD.dot(one, two) == exact
    assert FIELD.total(one) == sum(map(int, one)) % P


def test_the_largest_sums_do_not_overflow():
    top = np.full(1 << 16, P - 1, np.uint64)
    assert FIELD.dot(top, top) == (1 << 16) % P
    limbs = np.full(1 << 16, ((1 << 60) - 1), np.uint64)
    assert FIELD.dot(limbs, limbs) == (((1 << 60) - 1) ** 2 << 16) % P
    factors = np.full((1 << 12, 2), -(1 << 15) + 1)
    found = FIELD.by_small(factors, np.full((1 << 12, 2), P - 1, np.uint64))
    assert found.tolist() == [((1 << 12) * ((1 << 15) - 1)) % P] * 2
    with pytest.raises(InputError, match="4096"):
        FIELD.by_small(np.zeros(4097, np.int64), np.zeros(4097, np.uint64))


def test_matrices_and_combinations():
    left, right = _random(15).reshape(3, 5), _random(20, 2).reshape(5, 4)
    exact = (left.astype(object) @ right.astype(object)) % P
    assert (FIELD.matmul(left, right) == exact.astype(np.uint64)).all()
    factors = [P - 1, 0, 1, 2**60 + 12345, P // 3]
    combined = sum(f * r for f, r in zip(factors, right.astype(object), strict=True)) % P
    assert (FIELD.combine(factors, right) == combined.astype(np.uint64)).all()
    many = np.full((600, 3), P - 1, np.uint64)  # sums of 600 limbs' products exceed 2^40
    assert FIELD.combine([P - 2] * 600, many).tolist() == [(P - 2) * (P - 1) * 600 % P] * 3
    with pytest.raises(InputError, match="does not exist"):
        FIELD.matmul(left, left)


def test_small_factors():
    generator = np.random.default_rng(0)
    factors = generator.integers(-(2**15), 2**15, (12, 40))
    elements = _random(480).reshape(12, 40)
    exact = (factors.astype(object) * elements.astype(object)).sum(0) % P
    assert (FIELD.by_small(factors, elements) == exact.astype(np.uint64)).all()


@pytest.mark.parametrize("bits", [3, 5, 7])
def test_small_fields_to_the_end(bits):
    field = Field(bits)
    one, two = np.meshgrid(np.arange(field.p, dtype=np.uint64), np.arange(field.p, dtype=np.uint64))
    a, b = one.astype(object), two.astype(object)
    assert (field.mul(one, two) == a * b % field.p).all() and (field.add(one, two) == (a + b) % field.p).all()
    assert (field.sub(one, two) == (a - b) % field.p).all()
    assert (field.matmul(one, two) == (a @ b) % field.p).all()
    assert all(field.inverse(x) * x % field.p == 1 for x in range(1, field.p))
    with pytest.raises(InputError):
        field.inverse(field.p)


class _Fixed:
    """A stream that begins with the word that would be p."""

    def __init__(self, words):
        self._words = list(words)

    def words(self, count):
        found, self._words = self._words[:count], self._words[count:]
        return np.array(found, np.uint64)

    def fill(self, out):
        out[:] = self.words(out.size)


def test_the_word_that_equals_p_is_drawn_again():
    top = 2**64 - 1  # its upper 61 bits are p
    drawn = FIELD.draw(_Fixed([8, top, 16, top, 24]), (3,))
    assert drawn.tolist() == [1, 3, 2]
    stream, out = KeyStream(bytes(16)), _random(40_000, 5)
    drawn, before = FIELD.draw(KeyStream(bytes(16)), 40_000), out.copy()
    FIELD.subtract_drawn(out, stream)
    assert np.array_equal(out, FIELD.sub(before, drawn))
    small = Field(3).draw(KeyStream(bytes(16)), 7000)
    counts = np.bincount(small.astype(int), minlength=8)
    # 1,000 each, five standard deviations of a binomial are 147; the value p never.
    assert counts[7] == 0 and np.abs(counts[:7] - 1000).max() < 147


def test_what_is_no_element_is_refused():
    good = _elements([0, P - 1])
    assert FIELD.check(good, (2,)) is good
    for wrong in (_elements([P, 0]), good[:1], good.astype(np.int64), [0, 1]):
        with pytest.raises(ProtocolError, match=r"expected|no element"):
            FIELD.check(wrong, (2,))
    with pytest.raises(InputError, match="prime"):
        Field(11)
