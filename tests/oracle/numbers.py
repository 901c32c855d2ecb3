"""Rounding exact rationals to IEEE-754 formats, and the IEEE operations built on it (SPEC 1.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

INF = math.inf
NAN = math.nan


class Format(NamedTuple):
    """A binary format: significant bits and the exponents of its smallest and largest binade."""

    precision: int
    emin: int
    emax: int


BINARY16 = Format(11, -14, 15)
BINARY32 = Format(24, -126, 127)
BINARY64 = Format(53, -1022, 1023)


def power(exponent: int) -> Fraction:
    """2^exponent, exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def exponent_of(x: Fraction) -> int:
    """The integer e with 2^(e-1) <= |x| < 2^e, for x that is not zero."""
    x = abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e + 1 if x >= power(e) else e


def rint(x: Fraction) -> int:
    """The nearest integer, ties to even."""
    floor, rest = divmod(x.numerator, x.denominator)
    twice = 2 * rest
    if twice > x.denominator or (twice == x.denominator and floor % 2 == 1):
        return floor + 1
    return floor


def round_to(x: Fraction, fmt: Format) -> float:
    """x rounded once, to nearest, ties to even: zero is +0, and what vanishes keeps its sign."""
    if x == 0:
        return 0.0
    e = max(exponent_of(x) - 1, fmt.emin)
    quantum = e - (fmt.precision - 1)
    n = rint(abs(x) * power(-quantum))
    magnitude = INF if n * power(quantum) >= power(fmt.emax + 1) else math.ldexp(n, quantum)
    return -magnitude if x < 0 else magnitude


def rn16(x: Fraction) -> float:
    return round_to(x, BINARY16)


def rn32(x: Fraction) -> float:
    return round_to(x, BINARY32)


def rn64(x: Fraction) -> float:
    return round_to(x, BINARY64)


def narrow(x: float, fmt: Format = BINARY32) -> float:
    """A wider float converted to fmt."""
    if x == 0 or not math.isfinite(x):
        return x
    return round_to(Fraction(x), fmt)


def is_negative(x: float) -> bool:
    """The sign bit, of zeros too."""
    return math.copysign(1.0, x) < 0


def _signed(magnitude: float, negative: bool) -> float:
    return -magnitude if negative else magnitude


def add(a: float, b: float, fmt: Format = BINARY32) -> float:
    if math.isnan(a) or math.isnan(b):
        return NAN
    if math.isinf(a) or math.isinf(b):
        if math.isinf(a) and math.isinf(b) and a != b:
            return NAN
        return a if math.isinf(a) else b
    if a == 0 and b == 0:
        return -0.0 if is_negative(a) and is_negative(b) else 0.0
    return round_to(Fraction(a) + Fraction(b), fmt)


def subtract(a: float, b: float, fmt: Format = BINARY32) -> float:
    return add(a, -b, fmt)


def multiply(a: float, b: float, fmt: Format = BINARY32) -> float:
    if math.isnan(a) or math.isnan(b):
        return NAN
    negative = is_negative(a) != is_negative(b)
    if math.isinf(a) or math.isinf(b):
        return NAN if a == 0 or b == 0 else _signed(INF, negative)
    if a == 0 or b == 0:
        return _signed(0.0, negative)
    return round_to(Fraction(a) * Fraction(b), fmt)


def divide(a: float, b: float, fmt: Format = BINARY32) -> float:
    if math.isnan(a) or math.isnan(b):
        return NAN
    negative = is_negative(a) != is_negative(b)
    if math.isinf(a):
        return NAN if math.isinf(b) else _signed(INF, negative)
    if b == 0:
        return NAN if a == 0 else _signed(INF, negative)
    if math.isinf(b) or a == 0:
        return _signed(0.0, negative)
    return round_to(Fraction(a) / Fraction(b), fmt)


def fma(a: float, b: float, c: float, fmt: Format = BINARY32) -> float:
    """a * b + c with one rounding."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        product = multiply(a, b, fmt)
        if math.isfinite(a) and math.isfinite(b):
            return c
        return add(product, c, fmt)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product_negative = is_negative(a) != is_negative(b)
        zero_product = a == 0 or b == 0
        return -0.0 if zero_product and product_negative and is_negative(c) else 0.0
    return round_to(exact, fmt)


def square_root(a: float, fmt: Format = BINARY64) -> float:
    """The square root, correctly rounded: an integer root of enough bits with a sticky bit."""
    if math.isnan(a) or a < 0:
        return NAN
    if a == 0 or math.isinf(a):
        return a
    x = Fraction(a)
    shift = 2 * (fmt.precision + 8)
    shift -= exponent_of(x)
    shift += shift % 2
    scaled = x * power(shift)
    floor = scaled.numerator // scaled.denominator
    root = math.isqrt(floor)
    sticky = Fraction(0) if root * root == scaled else Fraction(1, 2)
    return round_to((root + sticky) * power(-shift // 2), fmt)


def settle(approximate: Callable[[int], Fraction], fmt: Format = BINARY32) -> float:
    """The rounding of a real number that `approximate(bits)` gives within 2^-bits of itself.

    More bits are asked for until both ends of the enclosure round alike. A number that lies exactly
    on a boundary between two roundings never would: after 4,000 bits it is taken as it stands.
    """
    bits = 80
    while True:
        centre = approximate(bits)
        spread = abs(centre) * power(-bits)
        low, high = round_to(centre - spread, fmt), round_to(centre + spread, fmt)
        if low == high and is_negative(low) == is_negative(high):
            return low
        if bits > 4000:
            return round_to(centre, fmt)
        bits *= 2
