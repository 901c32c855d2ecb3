"""The oracle's own rounding against the machine's, where the machine does one IEEE operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.oracle import numbers
from tests.oracle.arrays import Float32, assert_bits

OPERATIONS: dict[str, tuple[Callable[[float, float], float], Callable[..., Any]]] = {
    "add": (numbers.add, np.add),
    "subtract": (numbers.subtract, np.subtract),
    "multiply": (numbers.multiply, np.multiply),
    "divide": (numbers.divide, np.divide),
}


def pool(rng: np.random.Generator, count: int) -> Float32:
    """Any bits, subnormals, and every special value."""
    words = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    small = (rng.integers(-(2**20), 2**20, count) * 2.0**-149).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1.5], np.float32)
    near = rng.standard_normal(count).astype(np.float32)
    return rng.permutation(np.concatenate([words, small, near, np.repeat(special, count // 8)]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_float32_operations_are_the_machines(name: str) -> None:
    rng = np.random.default_rng(1)
    a, b = pool(rng, 300), pool(rng, 300)
    ours, theirs = OPERATIONS[name]
    with np.errstate(all="ignore"):
        expected = theirs(a, b)
    expected[np.isnan(expected)] = np.float32(np.nan)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    assert_bits(expected, [ours(x, y) for x, y in pairs])


def test_roundings_are_the_machines() -> None:
    rng = np.random.default_rng(2)
    x: NDArray[np.float64] = rng.standard_normal(2000) * 2.0 ** rng.integers(-160, 140, 2000)
    with np.errstate(all="ignore"):
        assert_bits(x.astype(np.float32), [numbers.narrow(v) for v in x.tolist()])
        y = rng.standard_normal(2000) * 2.0 ** rng.integers(-27, 18, 2000)
        y[:6] = 65519.999, 65520, -65520, 2.0**-25, 1.5 * 2.0**-24, 2.0**-25 * (1 + 2.0**-52)
        half = y.astype(np.float16).astype(np.float64)
    assert half.tolist() == [numbers.rn16(Fraction(v)) for v in y.tolist()]


def test_square_roots_are_the_machines() -> None:
    rng = np.random.default_rng(3)
    x = np.abs(rng.standard_normal(500)) * 2.0 ** rng.integers(-1060, 1000, 500)
    x[:4] = 0, 4, 2, 5e-324
    assert [numbers.square_root(v) for v in x.tolist()] == [math.sqrt(v) for v in x.tolist()]


def test_fused_multiply_add_rounds_once() -> None:
    tie = 1 + 2.0**-12
    assert numbers.fma(tie, tie, 2.0**-80) == 1 + 2.0**-11 + 2.0**-23
    assert numbers.fma(tie, tie, -(2.0**-80)) == 1 + 2.0**-11
    assert numbers.fma(3.0, 4.0, -12.0) == 0
    assert math.copysign(1, numbers.fma(-0.0, 1.0, -0.0)) == -1
    assert math.copysign(1, numbers.fma(1.0, 1.0, -1.0)) == 1
    assert math.isnan(numbers.fma(math.inf, 0.0, 1.0))
    assert math.isnan(numbers.fma(math.inf, 1.0, -math.inf))
    assert numbers.fma(1.0, 1.0, math.inf) == math.inf
    assert numbers.fma(1e38, 1e38, -1e38) == math.inf


def test_settling_needs_more_digits_near_a_boundary() -> None:
    """A value just above a tie, which 80 bits cannot tell from it."""
    value = 1 + numbers.power(-24) + numbers.power(-300)
    asked: list[int] = []

    def approximate(bits: int) -> Fraction:
        asked.append(bits)
        return numbers.rint(value * numbers.power(bits + 2)) * numbers.power(-bits - 2)

    assert numbers.settle(approximate) == 1 + 2.0**-23
    assert len(asked) > 1
