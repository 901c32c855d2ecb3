"""Correctly rounded elementary functions, activations and softmax (SPEC 4).

A function is evaluated in float64, whose error is taken to be below 16 units in the last place.
Where the two ends of that interval round to different float32 the value is *doubtful*; those few
inputs (about one in 2^23) are settled one by one in decimal arithmetic of 120 digits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from functools import cache, lru_cache

import torch
from torch import Tensor

from conformance.backends.torch.arithmetic import NAN, canonical, like, sum64

DIGITS = 120
MARGIN = 2.0**-48
"""Relative half-width of the interval: 16 to 32 units in the last place of a float64."""


# Exact side: real numbers as Decimal, rounded once.


def precise() -> Context:
    """Return a decimal context of 120 digits with room for every exponent."""
    return Context(prec=DIGITS, rounding=ROUND_HALF_EVEN, Emin=-9999999, Emax=9999999)


def round_float32(value: Decimal | Fraction) -> float:
    """RN32 of a real number, subnormals and overflow included."""
    exact = Fraction(value)
    if exact == 0:
        return 0.0
    # 2^(e-1) <= |exact| < 2^e, or one more; the second line corrects e.
    e = abs(exact.numerator).bit_length() - exact.denominator.bit_length() + 1
    e -= abs(exact) < Fraction(2) ** (e - 1)
    quantum = Fraction(2) ** max(e - 24, -149)
    rounded = round(exact / quantum) * quantum
    if abs(rounded) >= 2**128:
        return float("inf") if rounded > 0 else float("-inf")
    return float(rounded)


@cache
def pi() -> Decimal:
    """Pi to 180 digits, by Machin's formula in integers."""
    one = 10**190

    def arctan_inverse(n: int) -> int:
        term, total, k = one // n, 0, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= n * n
            k += 2
        return total

    with localcontext(Context(prec=180)):
        return Decimal(4 * (4 * arctan_inverse(5) - arctan_inverse(239))) / Decimal(one)


def _taylor(r: Decimal, first: int) -> Decimal:
    """Sum the series of sin(r) (first = 1) or cos(r) (first = 0), |r| < 1."""
    term, total, k = (r if first else Decimal(1)), Decimal(0), first
    while term and term.adjusted() > -DIGITS - 60:
        total += term
        term = -term * r * r / ((k + 1) * (k + 2))
        k += 2
    return total


def _quarter_turn(x: Decimal, shift: int) -> Decimal:
    """Return sin(x + shift * pi/2) by a reduction that keeps 120 digits of the remainder."""
    with localcontext(Context(prec=180)):
        quarter = pi() / 2
        turns = int((x / quarter).to_integral_value())
        r = x - turns * quarter
    sine = _taylor(r, (turns + shift + 1) % 2)
    return -sine if (turns + shift) % 4 >= 2 else sine


def _tanh(x: Decimal) -> Decimal:
    e = (-2 * abs(x)).exp()
    return ((1 - e) / (1 + e)).copy_sign(x)


REAL: dict[str, Callable[[Decimal], Decimal]] = {
    "exp": Decimal.exp,
    "log": Decimal.ln,
    "sin": lambda x: _quarter_turn(x, 0),
    "cos": lambda x: _quarter_turn(x, 1),
    "tanh": _tanh,
}


@lru_cache(maxsize=1 << 16)
def settle(name: str, x: float) -> float:
    """Return the correctly rounded value of a function at a finite float32 in its domain."""
    with localcontext(precise()):
        return round_float32(REAL[name](Decimal(x)))


# Float64 side.


def _rounded(name: str, evaluate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Evaluate in float64, settle what is doubtful, round to float32."""
    y = evaluate(x.double())
    result = y.float()
    error = y.abs() * MARGIN
    doubtful = ((y - error).float() != (y + error).float()) & torch.isfinite(y)
    if bool(doubtful.any()):
        settled = [settle(name, value) for value in x[doubtful].tolist()]
        result[doubtful] = torch.tensor(settled, dtype=torch.float32, device=x.device)
    return canonical(result)


def exp(x: Tensor) -> Tensor:
    """Exponential, correctly rounded (4.1)."""
    return _rounded("exp", torch.exp, x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm, correctly rounded (4.1)."""
    return _rounded("log", torch.log, x)


def sin(x: Tensor) -> Tensor:
    """Sine of radians over the full range, correctly rounded (4.1)."""
    return _rounded("sin", torch.sin, x)


def cos(x: Tensor) -> Tensor:
    """Cosine of radians over the full range, correctly rounded (4.1)."""
    return _rounded("cos", torch.cos, x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, correctly rounded (4.1)."""
    return _rounded("tanh", torch.tanh, x)


def sigmoid(x: Tensor) -> Tensor:
    """RN32(1 / RN32(1 + exp(-x))) (4.2)."""
    one = like(x, 1.0)
    return canonical(torch.div(one, one + exp(-x)))


def silu(x: Tensor) -> Tensor:
    """RN32(x * sigmoid(x)) (4.2)."""
    return canonical(x * sigmoid(x))


def _from_bits(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form, every step rounded to float32 (4.2)."""
    u = (x * x) * x
    u = x + like(x, _from_bits(0x3D372713)) * u
    t = 1 + tanh(like(x, _from_bits(0x3F4C422A)) * u)
    return canonical((0.5 * x) * t)


def quick_gelu(x: Tensor) -> Tensor:
    """RN32(x * sigmoid(RN32(1.702 x))) (9.1)."""
    return canonical(x * sigmoid(like(x, 1.702) * x))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": exp,
    "log": log,
    "sin": sin,
    "cos": cos,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}
"""The elementwise functions, activations among them, by name."""


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension of (R, K) float32 (4.3)."""
    m = x.amax(-1, keepdim=True)
    good = torch.isfinite(m)  # amax passes NaN on, and +inf; -inf is a row of nothing else
    p = exp(torch.where(good, x - m, 0))
    y = p.double() / sum64(p)[..., None]
    return torch.where(good, y.float(), NAN)
