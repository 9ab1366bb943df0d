"""Packed polynomials: L secrets of a record in one polynomial, proved by its value at a secret point.

A column of values v_1..v_L and a random top v_0 make the polynomial f of degree L with f(l) = v_l, l = 0..L.
Its value at one further point tells nothing about v_1..v_L. Statements about many columns are about

    P(x) = sum_i c_i f_i(x)^2      degree 2L        norms: sum of P(1..L); with - f_i: bits, zero at 1..L
    F(x) = sum_i c_i f_i(x)        degree L         linear combinations

which the prover tells by their values at 0, 1, 2, ... under a mask of the same form, and which the verifier
compares at its own point: two polynomials of degree d agree in d points at most.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError
from securevfl.protocols.sealed.field import FIELD, Elements, Field
from securevfl.protocols.stream import KeyStream

Integers = npt.NDArray[np.int64]


@functools.cache
def _scales(field: Field, degree: int) -> list[int]:
    """1 over the product of node - other, for every node."""
    found = []
    for node in range(degree + 1):
        below = math.factorial(node) * math.factorial(degree - node) * (-1) ** (degree - node)
        found.append(field.inverse(below))
    return found


def _inner(one: list[int], two: list[int]) -> int:
    return sum(a * b for a, b in zip(one, two, strict=True))


@dataclass(frozen=True)
class Packing:
    """Polynomials with `length` values each.

    Args:
        length: L.
        field: 2^61 - 1, but for tests.
    """

    length: int
    field: Field = FIELD

    def __post_init__(self) -> None:
        if not self.length >= 1 or 2 * self.length + 2 > self.field.p:
            raise InputError(f"polynomials of {self.length} values do not fit the field")

    def basis(self, degree: int, x: int) -> list[int]:
        """Values at x of the polynomials that are 1 at one of 0..degree and 0 at the others."""
        p, ahead, behind = self.field.p, [1], [1]
        for node in range(degree):  # products of x - other over the nodes before, and after
            ahead.append(ahead[-1] * (x - node) % p)
            behind.append(behind[-1] * (x - degree + node) % p)
        scales = _scales(self.field, degree)
        return [a * b * s % p for a, b, s in zip(ahead, reversed(behind), scales, strict=True)]

    def at(self, values: Elements, x: int, tops: Elements | None = None) -> Elements:
        """f_i(x) for values (L, n) and tops (n,), zero by default."""
        factors = self.basis(self.length, x)
        found = self.field.combine(factors[1:], values)
        return found if tops is None else self.field.add(found, self.field.mul(tops, factors[0]))

    def evaluate(self, words: Elements, x: int) -> int:
        """The polynomial with these values at 0, 1, 2, ... at x."""
        factors = self.basis(len(words) - 1, x)
        return sum(f * int(w) for f, w in zip(factors, words, strict=True)) % self.field.p

    # -- what the prover tells ------------------------------------------------------------------------------

    def squares(
        self,
        values: Integers,
        tops: Elements,
        weights: Elements,
        *,
        bound: int,
        bits: bool,
        known: dict[str, list[list[int]]] | None = None,
    ) -> Elements:
        """P at 0..2L: sum c f^2, less sum c f if `bits`, of integers of magnitude at most `bound`.

        What does not depend on the tops is kept in `known`, for the next verifier.
        """
        field, known = self.field, {} if known is None else known
        if not known:
            known["squares"] = field.weighted_gram(weights, values, bound)
            known["values"] = [field.weighted_sums(weights, values, bound)] if bits else []
        weighted = field.mul(tops, weights)
        side = field.weighted_sums(weighted, values, bound)
        inner = ([s, *row] for s, row in zip(side, known["squares"], strict=True))
        gram = [[field.dot(weighted, tops), *side], *inner]
        line = [field.total(weighted), *known["values"][0]] if bits else []
        out = []
        for x in range(2 * self.length + 1):
            at = self.basis(self.length, x)
            square = sum(a * _inner(row, at) for a, row in zip(at, gram, strict=True))
            out.append((square - (_inner(line, at) if bits else 0)) % field.p)
        return np.array(out, np.uint64)

    def line_values(self, values: Integers, tops: Elements, weights: Elements) -> Elements:
        """F at 0..L, of bits."""
        sums = self.field.weighted_sums(weights, values, 1)
        return np.array([self.field.dot(weights, tops), *sums], np.uint64)

    # -- masks of the same form -----------------------------------------------------------------------------

    def norm_mask(self, stream: KeyStream) -> Elements:
        """At 0..2L, with values at 1..L that add up to 0."""
        words = self.field.draw(stream, 2 * self.length + 1)
        words[self.length] = -self.field.total(words[1 : self.length]) % self.field.p
        return words

    def bits_mask(self, stream: KeyStream) -> Elements:
        """At 0..2L, zero at 1..L."""
        return self.with_zeros(self.field.draw(stream, self.length + 1))

    def line_mask(self, stream: KeyStream) -> Elements:
        """At 0..L."""
        return self.field.draw(stream, self.length + 1)

    def with_zeros(self, words: Elements) -> Elements:
        """Values at 0..2L from those at 0 and L + 1..2L: the others are zero, and not sent."""
        return np.concatenate([words[:1], np.zeros(self.length, np.uint64), words[1:]])

    def without_zeros(self, words: Elements) -> Elements:
        """What `with_zeros` takes."""
        return np.concatenate([words[:1], words[self.length + 1 :]])
