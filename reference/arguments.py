"""Numbers that a caller gives: of the right kind, or refused by name."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

from reference.config import show
from reference.errors import RequestError


def whole(name: str, value: Any, least: int = 0, stop: int | None = None) -> int:
    """A whole number of any type, from `least` on and below `stop`. Raises RequestError."""
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
    """A number of any type, as float64. Raises RequestError."""
    if not isinstance(value, Real):
        raise RequestError(f"{name}: {show(value)} is no number; give one")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name}: it is out of range; give a smaller number") from None
