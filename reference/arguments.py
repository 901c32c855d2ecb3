"""Arguments that a caller gives: of the right kind and in range, or refused by name (SPEC 14.2)."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import numpy as np

from reference.config import show
from reference.errors import RequestError


def whole(name: str, value: Any, least: int = 0, stop: int | None = None) -> int:
    """Return a whole number of any type as int. Raises RequestError, naming the argument.

    It must be `least` or more, and below `stop` unless that is None.
    """
    wanted = f"{least} or more" if stop is None else f"from {least} to {stop - 1}"
    try:
        number = operator.index(value)
    except TypeError:
        raise RequestError(
            f"{name}: {show(value)} is no whole number; it must be {wanted}"
        ) from None
    if number < least or (stop is not None and number >= stop):
        raise RequestError(f"{name}: {show(number)} is out of range; it must be {wanted}")
    return number


def real(name: str, value: Any) -> float:
    """Return a real number of any type as float64. Raises RequestError, naming the argument."""
    if not isinstance(value, Real):
        raise RequestError(f"{name}: {show(value)} is no number; give one")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name}: it is out of range; give a smaller number") from None


def flag(name: str, value: Any) -> bool:
    """Return a truth value, numpy's too, as bool. Raises RequestError, naming the argument."""
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{name}: {show(value)} is neither true nor false")
    return bool(value)
