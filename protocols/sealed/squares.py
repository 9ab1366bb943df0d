"""Every integer as four squares (Lagrange): the slack that fills a row's norm up to its bound exactly.

The search runs in time that depends on the numbers.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError

Integers = npt.NDArray[np.int64]
_TABLE = 1 << 14
_TRIES = 512


@functools.cache
def _two_squares() -> Integers:
    """(2, table): a and b with a^2 + b^2 = n; -1 where there are none."""
    found = np.full((2, _TABLE), -1, np.int64)
    roots = np.arange(int(_TABLE**0.5) + 1)
    one, two = (each.ravel() for each in np.meshgrid(roots, roots))
    sums = one**2 + two**2
    fits = sums < _TABLE
    found[:, sums[fits]] = one[fits], two[fits]
    return found


def _root(values: Integers) -> Integers:
    """The integer square root; exact below 2^52."""
    return np.sqrt(values.astype(np.float64)).astype(np.int64)


def four_squares(values: npt.NDArray[np.int64]) -> Integers:
    """(4, n) integers whose squares add up to each value.

    The first root is near the largest possible one, the second near that of what is left; what remains then
    is small, and a table says whether it is a sum of two squares. If not, the next roots are tried.

    Raises:
        InputError: A value is negative or not below 2^40.
    """
    if values.size and not (values.min() >= 0 and values.max() < 1 << 40):
        raise InputError("only integers below 2^40 are written as four squares here")
    table, out = _two_squares(), np.zeros((4, values.size), np.int64)
    values, scale = values.copy(), np.ones_like(values)
    while (even := (values % 4 == 0) & (values > 0)).any():  # 4^a u has few forms but those of u, doubled
        values[even] //= 4
        scale[even] *= 2
    open_ = np.arange(values.size)
    for attempt in range(_TRIES):
        if not open_.size:
            return out * scale
        first = np.maximum(_root(values[open_]) - attempt // 16, 0)
        rest = values[open_] - first**2
        second = np.maximum(_root(rest) - attempt % 16, 0)
        rest -= second**2
        small = np.where(rest < _TABLE, rest, 0)
        found = (rest < _TABLE) & (table[0, small] >= 0)
        places = open_[found]
        out[:2, places] = first[found], second[found]
        out[2:, places] = table[:, small[found]]
        open_ = open_[~found]
    raise InputError(f"four squares were not found for {open_.size} numbers")
