"""What every bound asks of its constants."""

from __future__ import annotations

import math

from securevfl.errors import InputError


def positive(**values: float) -> None:
    """Raises `InputError` for the first value that is not a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; expected a positive number")


def at_least_zero(**values: float) -> None:
    """Raises `InputError` for the first value that is not a finite number of at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} is {value}; expected a number of at least 0")
