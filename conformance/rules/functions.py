"""What an elementary function may give where numbers are stored in less than float32 (SPEC 16.2).

A stored argument is another argument: near an edge of exp, or far out on sin, the function of it
may be anything between the least and the greatest value within reach. Outside of that interval
n units in the last place of the declared type are allowed, as they are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from conformance.golden import Golden
from conformance.rules.precision import Precision
from reference.arithmetic import F32, F64

FLOAT32 = 2.0**-24
"""Unit roundoff of float32."""


def coarse(declared: Precision) -> bool:
    """Whether anything is declared that is less than float32 with its subnormals."""
    return declared.coarsest > FLOAT32 or declared.underflow > FLOAT32 * 2.0**-126


def legal(golden: Golden, n: int, declared: Precision) -> tuple[F64, F64]:
    """The least and the greatest value of each answer, (n,) float64; both NaN where it must be NaN.

    The whole line where the argument is beyond the declared type, or is a negative number that may
    be stored as zero, of which log is no NaN.
    """
    unit = max(FLOAT32, float(declared.coarsest))
    with np.errstate(all="ignore"):
        x, y = (a.astype(np.float64) for a in (golden.inputs["x"], golden.outputs["y"]))
        reach = np.where(x == 0, 0.0, declared.stored * np.abs(x) + declared.underflow)
        low, high = _RANGES[golden.operation](x, y, reach)
        low = low - 2 * n * (unit * np.abs(low) + declared.underflow)
        high = high + 2 * n * (unit * np.abs(high) + declared.underflow)
        zero = np.isnan(y) & (x + reach >= 0)
    low, high = (np.where(np.isnan(y), np.nan, end) for end in (low, high))
    free = np.isfinite(x) & ((np.abs(x) > declared.largest) | zero)
    return np.where(free, -np.inf, low), np.where(free, np.inf, high)


def margins(golden: Golden, n: int, declared: Precision, answer: F32) -> F64:
    """The error of each answer (n,) over what it may err by, (n,) float64; NaN where it is free."""
    low, high = legal(golden, n, declared)
    with np.errstate(invalid="ignore"):
        y, a = golden.outputs["y"].astype(np.float64), answer.astype(np.float64)
    top = min(float(np.finfo(np.float32).max), declared.largest)
    inside = (low <= a) & (a <= high) | (np.isnan(low) & np.isnan(a))
    inside |= ((a == np.inf) & (high >= top)) | ((a == -np.inf) & (low <= -top))
    end = np.where(a < y, low, high)
    plain = np.isfinite(a) & np.isfinite(y) & np.isfinite(end)
    with np.errstate(invalid="ignore"):
        share = np.divide(a - y, end - y, out=np.where(inside, 0.0, np.inf), where=plain)
    return np.where((low == -np.inf) & (high == np.inf), np.nan, share)


def _rising(function: Callable[[F64], F64]) -> Callable[[F64, F64, F64], tuple[F64, F64]]:
    """Of a function that rises: its values at both ends, and what it has between."""

    def ends(x: F64, y: F64, reach: F64) -> tuple[F64, F64]:
        return np.fmin(function(x - reach), y), np.fmax(function(x + reach), y)

    return ends


def _turning(x: F64, y: F64, reach: F64) -> tuple[F64, F64]:
    """Of sin and cos, whose slope is one at most."""
    return np.maximum(y - reach, -1), np.minimum(y + reach, 1)


def _log(x: F64) -> F64:
    """-inf where the argument may be stored as zero."""
    return np.log(np.maximum(x, 0))


_RANGES: Mapping[str, Callable[[F64, F64, F64], tuple[F64, F64]]] = {
    "exp": _rising(np.exp),
    "log": _rising(_log),
    "tanh": _rising(np.tanh),
    "sin": _turning,
    "cos": _turning,
}
