"""Input checks shared by events, accountants and calibration; every refusal is an `AccountingError`."""

import math
import operator
from collections.abc import Collection
from numbers import Real

from securevfl.errors import AccountingError


def real(name: str, value: object, expected: str) -> float:
    """Return a real number as a float; booleans, text and NaN are refused."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise AccountingError(f"{name} is {value!r}; expected {expected}")
    return float(value)


def positive(name: str, value: object, *, hint: str = "") -> float:
    """Return a finite number above zero."""
    expected = "a finite number above 0" + (f" ({hint})" if hint else "")
    number = real(name, value, expected)
    if not 0 < number < math.inf:
        raise AccountingError(f"{name} is {number!r}; expected {expected}")
    return number


def non_negative(name: str, value: object) -> float:
    """Return a number from zero to infinity, both included."""
    number = real(name, value, "a number of at least 0")
    if number < 0:
        raise AccountingError(f"{name} is {number!r}; expected a number of at least 0")
    return number


def probability(name: str, value: object, *, zero: bool = True) -> float:
    """Return a number in [0, 1], or in (0, 1] when `zero` is false."""
    expected = "a number in [0, 1]" if zero else "a number above 0 and at most 1"
    number = real(name, value, expected)
    if not 0 <= number <= 1 or (number == 0 and not zero):
        raise AccountingError(f"{name} is {number!r}; expected {expected}")
    return number


def count(name: str, value: object, *, least: int = 0) -> int:
    """Return an integer of at least `least`; floats are refused even when whole."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < least or isinstance(value, bool):
        raise AccountingError(f"{name} is {value!r}; expected an integer of at least {least}")
    return number


def choice(name: str, value: object, allowed: Collection[str]) -> str:
    """Return one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise AccountingError(f"{name} is {value!r}; expected one of {', '.join(sorted(allowed))}")
    return value
