"""The named orders of float32 summation against exact rational arithmetic (SPEC 3)."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given

from reference.arithmetic import Order, matmul_float32
from tests.oracle import nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, bits, f32
from tests.oracle.orders import ORDERS
from tests.oracle.strategies import paired

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

NAMED: list[tuple[Order, bool]] = [
    ("sequential", False),
    ("sequential", True),
    ("pairwise", False),
    ("pairwise", True),
    ("lanes8", False),
    ("lanes8", True),
    ("float64", False),
]


def steps(rng: np.random.Generator, rows: int, length: int) -> Float32:
    """Rows whose sums depend on their order even in float64."""
    return rng.choice([2.0**55, -(2.0**55), 1.0, 3.0, 2.0**30], (rows, length)).astype(np.float32)


def test_every_order_is_tried() -> None:
    assert {name for name, _ in NAMED} | {"blas"} == set(get_args(Order))


@pytest.mark.parametrize(("order", "fused"), NAMED)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
def test_orders_are_the_oracles(order: Order, fused: bool, length: int) -> None:
    rng = np.random.default_rng(length)
    x = np.concatenate([nasty.matrix(rng, 6, length), steps(rng, 3, length)])
    w = np.concatenate([nasty.matrix(rng, 5, length), np.ones((1, length), np.float32)])
    expected = [[ORDERS[order](a, b, fused) for b in nasty.tolist(w)] for a in nasty.tolist(x)]
    assert_bits(matmul_float32(x, w, order, fused), expected)


@pytest.mark.parametrize(("order", "fused"), NAMED)
@given(pair=paired(0, 12))
def test_orders_on_anything(
    order: Order, fused: bool, pair: tuple[list[float], list[float]]
) -> None:
    x, w = f32(pair[0])[None], f32(pair[1])[None]
    assert_bits(matmul_float32(x, w, order, fused), [[ORDERS[order](*pair, fused)]])


def test_fma_rounds_once() -> None:
    # (1 + 2^-12)^2 lies halfway between two float32; 2^-80 decides, and float64 would drop it.
    tie = 1 + 2.0**-12
    for small, expected in ((2.0**-40, 1 + 2.0**-11 + 2.0**-23), (-(2.0**-40), 1 + 2.0**-11)):
        x, w = f32([[small, tie]]), f32([[2.0**-40, tie]])
        assert_bits(matmul_float32(x, w, "sequential", True), [[expected]])
        assert_bits(matmul_float32(x, w, "pairwise", True), [[expected]])


def test_fma_keeps_what_a_rounded_product_loses() -> None:
    x, w = f32([[1.0, 1 + 2.0**-12]]), f32([[-1.0, 1 - 2.0**-12]])
    assert_bits(matmul_float32(x, w, "sequential", True), [[-(2.0**-24)]])
    assert_bits(matmul_float32(x, w, "sequential", False), [[-(2.0**-24)]])
    x, w = f32([[1.0, 1 + 2.0**-13]]), f32([[-1.0, 1 - 2.0**-13]])
    assert_bits(matmul_float32(x, w, "sequential", True), [[-(2.0**-26)]])
    assert_bits(matmul_float32(x, w, "sequential", False), [[0.0]])


def test_orders_differ() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 100)).astype(np.float32)
    w = rng.standard_normal((40, 100)).astype(np.float32)
    results = [bits(matmul_float32(x, w, order, fused)) for order, fused in NAMED]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert (one != other).mean() > 0.1


def test_overflow_gives_the_one_nan_at_most() -> None:
    x = f32([[3e38, 3e38, 3e38, 3e38]])
    w = f32([[2, -2, 2, -2], [1, 1, -1, -1]])
    for order, fused in NAMED:
        expected = [[ORDERS[order](a, b, fused) for b in nasty.tolist(w)] for a in nasty.tolist(x)]
        assert_bits(matmul_float32(x, w, order, fused), expected)


def test_float64_order_rounds_once_at_the_end() -> None:
    x, w = f32([[2.0**60, 1.0, -(2.0**60)]]), f32([[1.0, 1.0, 1.0]])
    assert_bits(matmul_float32(x, w, "float64"), [[0.0]])
    x = f32([[2.0**50, 1.0, -(2.0**50)]])
    assert_bits(matmul_float32(x, w, "float64"), [[1.0]])
    assert_bits(matmul_float32(x, w, "sequential"), [[0.0]])


def test_blas_stays_within_the_bound_of_any_order() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((30, 200)).astype(np.float32)
    w = rng.standard_normal((20, 200)).astype(np.float32)
    result = matmul_float32(x, w, "blas")
    assert result.dtype == np.float32
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    gauge = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    assert (np.abs(result - exact) <= 201 * 2.0**-24 * gauge).all()


def test_rows_of_a_named_order_do_not_know_each_other() -> None:
    rng = np.random.default_rng(3)
    x, w = nasty.matrix(rng, 12, 40), nasty.matrix(rng, 9, 40)
    for order, fused in NAMED:
        whole = matmul_float32(x, w, order, fused)
        assert_same(matmul_float32(x[3:4], w[5:], order, fused), whole[3:4, 5:])
