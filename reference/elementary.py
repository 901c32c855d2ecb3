"""Correctly rounded exp, log, sin, cos and tanh (SPEC 4.1), and what they make (SPEC 4.2, 4.3).

Libraries differ in the last bits of a float64 exponential, but all of them get the first 48 right.
That is enough to round to the nearest float32, unless the value lies within a relative 2^-48 of a
boundary: a midpoint between neighbours, where the rounding changes. Hardly any float32 has such a
value: at most a few hundred a function, out of 2^32. `tools/settle_elementary.py` found them by
trying all inputs, and decided each with as many digits as it took; `hard_cases.json` lists them.
None is a tie: by the Lindemann-Weierstrass theorem all values are transcendental, except that
exp(0), log(1), sin(0), cos(0) and tanh(0) are 0 or 1.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import numpy as np

from reference.arithmetic import F32, F64, NAN, one_nan, sum64, to_float32
from reference.errors import PlatformError

SLACK = 2.0**-48
"""The largest relative error that numpy's float64 values may have: 16 units of 2^-52."""

_CHUNK = 1 << 14
"""Elements evaluated at a time: as float64 they take 128 KiB, which stays in a core's cache."""

_CUBIC = np.uint32(0x3D372713).view(np.float32)  # 0.044715
_ROOT = np.uint32(0x3F4C422A).view(np.float32)  # sqrt(2 / pi)
_HALF, _ONE = np.float32(0.5), np.float32(1)


def exp(x: F32) -> F32:
    """Return e to the power x, correctly rounded, (...) -> (...) float32 (SPEC 4.1).

    Raises TypeError if x is not float32, PlatformError if numpy's float64 exp is off by 15 ulp.
    """
    return _correctly_rounded(np.exp, x)


def log(x: F32) -> F32:
    """Return the natural logarithm of x, correctly rounded, (...) -> (...) float32 (SPEC 4.1).

    Raises TypeError if x is not float32, PlatformError if numpy's float64 log is off by 15 ulp.
    """
    return _correctly_rounded(np.log, x)


def sin(x: F32) -> F32:
    """Return the sine of x radians, correctly rounded, (...) -> (...) float32 (SPEC 4.1).

    Raises TypeError if x is not float32, PlatformError if numpy's float64 sin is off by 15 ulp.
    """
    return _correctly_rounded(np.sin, x)


def cos(x: F32) -> F32:
    """Return the cosine of x radians, correctly rounded, (...) -> (...) float32 (SPEC 4.1).

    Raises TypeError if x is not float32, PlatformError if numpy's float64 cos is off by 15 ulp.
    """
    return _correctly_rounded(np.cos, x)


def tanh(x: F32) -> F32:
    """Return the hyperbolic tangent of x, correctly rounded, (...) -> (...) float32 (SPEC 4.1).

    Raises TypeError if x is not float32, PlatformError if numpy's float64 tanh is off by 15 ulp.
    """
    return _correctly_rounded(np.tanh, x)


def _correctly_rounded(function: np.ufunc, x: F32) -> F32:
    """Round function(x) to float32 by way of float64, a chunk at a time (SPEC 4.1).

    If the float64 value rounds alike with the slack subtracted and added, so does the real value,
    which lies between: whether negative, subnormal or at the edge of overflow. NaN is unequal to
    itself, so it counts as unsure and needs no test of its own.
    """
    x = _checked(x)
    inputs, result = x.reshape(-1), np.empty(x.size, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, x.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            y = inputs[chunk].astype(np.float64)
            function(y, out=y)
            low = result[chunk]
            low[:] = y * (1 - SLACK)
            y *= 1 + SLACK
            unsure = low != y.astype(np.float32)
            if unsure.any():
                low[unsure] = _settled(function.__name__, inputs[chunk][unsure], y[unsure])
    return result.reshape(x.shape)


def _checked(x: F32) -> F32:
    """Return x as an array, (...) float32, and refuse anything else: it would be rounded twice."""
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"an elementary function takes float32, not {x.dtype}")
    return x


def _settled(name: str, x: F32, y: F64) -> F32:
    """Return what float64 left undecided, (n,) -> (n,): NaN where y is NaN, else looked up by x."""
    result = np.full(x.shape, NAN)
    hard = ~np.isnan(y)
    table = _hard_cases(name)
    try:
        result[hard] = [table[bits] for bits in x[hard].view(np.uint32).tolist()]
    except KeyError as missing:
        raise PlatformError(
            f"{name} of the float32 {missing.args[0]:#010x}: numpy's float64 {name} is off by more "
            f"than 15 ulp on this machine; use another build of numpy"
        ) from None
    return result


@cache
def _hard_cases(name: str) -> dict[int, np.float32]:
    """Load the table of a function: from the bits of each hard input to the result."""
    tables = json.loads(resources.files("reference").joinpath("hard_cases.json").read_text())
    return {int(x, 16): np.uint32(int(y, 16)).view(np.float32) for x, y in tables[name].items()}


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + exp(-x)), each step rounded, (...) -> (...) float32 (SPEC 4.2).

    Raises as `exp` does.
    """
    with np.errstate(all="ignore"):
        return one_nan(np.asarray(_ONE / (_ONE + exp(-x))))


def silu(x: F32) -> F32:
    """Return x * sigmoid(x), each step rounded, (...) -> (...) float32 (SPEC 4.2).

    Raises as `exp` does.
    """
    with np.errstate(all="ignore"):
        return one_nan(np.asarray(x * sigmoid(x)))


def gelu_tanh(x: F32) -> F32:
    """Return GELU by its tanh formula, each step rounded, (...) -> (...) float32 (SPEC 4.2).

    Raises as `tanh` does.
    """
    x = _checked(x)
    with np.errstate(all="ignore"):
        u = _ROOT * (x + _CUBIC * (x * x * x))
        return one_nan(np.asarray(_HALF * x * (_ONE + tanh(u))))


def softmax(x: F32) -> F32:
    """Return each row's shares, which sum to about 1, (..., K) -> (..., K) float32 (SPEC 4.3).

    A row that holds NaN or +inf, or nothing but -inf, is NaN throughout: NaN, or inf - inf, is then
    in its denominator. K is 1 or more. Raises as `exp` does.
    """
    with np.errstate(all="ignore"):
        p = exp(x - x.max(axis=-1, keepdims=True))
        return to_float32(p / sum64(p)[..., None])
