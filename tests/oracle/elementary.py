"""Correctly rounded functions by mpmath, and the activations built on them (SPEC 4)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import mpmath

from tests.oracle.aligned import sum64
from tests.oracle.numbers import (
    INF,
    NAN,
    add,
    divide,
    multiply,
    narrow,
    power,
    rn64,
    settle,
    subtract,
)


def fraction_of(value: mpmath.mpf) -> Fraction:
    """An mpmath number, exactly."""
    sign, mantissa, exponent, _ = value._mpf_
    magnitude = int(mantissa) * power(int(exponent))
    return -magnitude if sign else magnitude


def _correctly_rounded(name: str, x: float) -> float:
    def approximate(bits: int) -> Fraction:
        with mpmath.workprec(bits + 20):
            return fraction_of(getattr(mpmath, name)(mpmath.mpf(x)))

    return settle(approximate)


def exp(x: float) -> float:
    if math.isnan(x):
        return NAN
    if x > 89:  # e^89 > 2^128
        return INF
    if x < -104:  # e^-104 < 2^-150
        return 0.0
    return 1.0 if x == 0 else _correctly_rounded("exp", x)


def log(x: float) -> float:
    if math.isnan(x) or x < 0:
        return NAN
    if x == 0:
        return -INF
    if math.isinf(x):
        return INF
    return 0.0 if x == 1 else _correctly_rounded("log", x)


def sin(x: float) -> float:
    if not math.isfinite(x):
        return NAN
    return x if x == 0 else _correctly_rounded("sin", x)


def cos(x: float) -> float:
    if not math.isfinite(x):
        return NAN
    return 1.0 if x == 0 else _correctly_rounded("cos", x)


def tanh(x: float) -> float:
    if math.isnan(x):
        return NAN
    if x == 0:
        return x
    if abs(x) > 20:  # 1 - tanh(20) < 2^-50
        return math.copysign(1.0, x)
    return _correctly_rounded("tanh", x)


def sigmoid(x: float) -> float:
    return divide(1.0, add(1.0, exp(-x)))


def silu(x: float) -> float:
    return multiply(x, sigmoid(x))


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


CUBIC = _from_bits(0x3D372713)  # about 0.044715
ROOT = _from_bits(0x3F4C422A)  # about sqrt(2 / pi)


def gelu_tanh(x: float) -> float:
    u = multiply(x, x)
    u = multiply(u, x)
    u = multiply(CUBIC, u)
    u = add(x, u)
    u = multiply(ROOT, u)
    t = add(1.0, tanh(u))
    return multiply(multiply(0.5, x), t)


def softmax(x: Sequence[float]) -> list[float]:
    if any(math.isnan(value) or value == INF for value in x) or all(value == -INF for value in x):
        return [NAN] * len(x)
    largest = max(x)
    p = [exp(subtract(value, largest)) for value in x]
    den = Fraction(sum64(p))
    return [narrow(rn64(Fraction(value) / den)) for value in p]
