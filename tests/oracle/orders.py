"""Orders of float32 summation (SPEC 3), each operation an exact rational rounded once."""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracle.numbers import BINARY64, add, fma, multiply, narrow


def _step(acc: float, a: float, b: float, fused: bool) -> float:
    return fma(a, b, acc) if fused else add(acc, multiply(a, b))


def sequential(a: Sequence[float], b: Sequence[float], fused: bool) -> float:
    acc = 0.0
    for x, y in zip(a, b, strict=True):
        acc = _step(acc, x, y, fused)
    return acc


def pairwise(a: Sequence[float], b: Sequence[float], fused: bool) -> float:
    length = len(a)
    if length == 0:
        return 0.0
    if length == 1:
        return multiply(a[0], b[0])
    if length == 2 and fused:
        return fma(a[1], b[1], multiply(a[0], b[0]))
    half = (length + 1) // 2
    return add(pairwise(a[:half], b[:half], fused), pairwise(a[half:], b[half:], fused))


def lanes8(a: Sequence[float], b: Sequence[float], fused: bool) -> float:
    lanes = [sequential(a[i::8], b[i::8], fused) for i in range(8)]
    for width in (4, 2, 1):
        lanes = [add(lanes[i], lanes[i + width]) for i in range(width)]
    return lanes[0]


def float64(a: Sequence[float], b: Sequence[float], fused: bool) -> float:
    acc = 0.0
    for x, y in zip(a, b, strict=True):
        product = multiply(x, y, BINARY64)
        acc = fma(x, y, acc, BINARY64) if fused else add(acc, product, BINARY64)
    return narrow(acc)


ORDERS = {"sequential": sequential, "pairwise": pairwise, "lanes8": lanes8, "float64": float64}
