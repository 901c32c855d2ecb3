"""Aligned arithmetic (SPEC 2) in Python integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

from tests.oracle.numbers import NAN, exponent_of, narrow, power, rint, rn64

BLOCK = 32


def blocks(length: int) -> list[range]:
    """Blocks of consecutive indices; the last may be shorter (SPEC 2.1)."""
    return [range(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def finite(x: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in x)


def align_block(x: Sequence[Fraction]) -> tuple[list[int], int]:
    """The integers A_i of one block and the exponent of its grid: x_i is about A_i * 2^grid."""
    largest = max((abs(value) for value in x), default=Fraction(0))
    if largest == 0:
        return [0] * len(x), 0
    grid = exponent_of(largest) - 24
    scale = power(-grid)
    return [rint(value * scale) for value in x], grid


@lru_cache(maxsize=1 << 13)
def _aligned(x: tuple[float, ...]) -> tuple[list[int], int]:
    """The same for floats, once however many rows a row is multiplied with."""
    return align_block([Fraction(value) for value in x])


def align(x: Sequence[float]) -> list[float]:
    """The aligned values of a row, block by block."""
    out: list[float] = []
    for block in blocks(len(x)):
        integers, grid = align_block([Fraction(x[i]) for i in block])
        out += [math.ldexp(a, grid) for a in integers]
    return out


def accumulate(block_sums: Iterable[Fraction]) -> float:
    """Block sums added one by one in float64, from +0.0."""
    total = 0.0
    for block_sum in block_sums:
        total = rn64(Fraction(total) + block_sum)
    return total


def block_dot(a: Sequence[float], b: Sequence[float]) -> Fraction:
    """S_b: exact on the aligned values."""
    left, left_grid = _aligned(tuple(a))
    right, right_grid = _aligned(tuple(b))
    return sum(p * q for p, q in zip(left, right, strict=True)) * power(left_grid + right_grid)


def dot64(a: Sequence[float], b: Sequence[float]) -> float:
    if not (finite(a) and finite(b)):
        return NAN
    return accumulate(
        block_dot([a[i] for i in block], [b[i] for i in block]) for block in blocks(len(a))
    )


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return narrow(dot64(a, b))


def sum64(p: Sequence[float]) -> float:
    return dot64(p, [1.0] * len(p))


def matmul(x: Sequence[Sequence[float]], w: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[dot(row, column) for column in w] for row in x]


def weighted_sum(
    weights: dict[int, float], rows: dict[int, Sequence[float]]
) -> tuple[list[float], float]:
    """num and den over a set of absolute positions (SPEC 2.5)."""
    positions = sorted(weights)
    width = len(next(iter(rows.values())))
    num = [0.0] * width
    den = 0.0
    for number in sorted({j // BLOCK for j in positions}):
        members = [j for j in positions if j // BLOCK == number]
        vectors, scaled = [], []
        for j in members:
            row = [Fraction(value) for value in rows[j]]
            integers, grid = align_block(row)
            vectors.append(integers)
            exponent = grid + 24
            scaled.append(Fraction(weights[j]) * power(exponent) if any(row) else Fraction(0))
        heavy, grid = align_block(scaled)
        for d in range(width):
            exact = sum(w * v[d] for w, v in zip(heavy, vectors, strict=True))
            num[d] = rn64(Fraction(num[d]) + exact * power(grid - 24))
        light, grid = align_block([Fraction(weights[j]) for j in members])
        den = rn64(Fraction(den) + sum(light) * power(grid))
    return num, den
