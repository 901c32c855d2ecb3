"""The gated feed-forward layer against the oracle (SPEC 9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from reference.arithmetic import matmul
from reference.feedforward import ACTIVATIONS, gated_mlp
from reference.quantization import linear_int4, quantize_int4, unpack
from tests.oracle import elementary, nasty
from tests.oracle import layers as oracle
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32
from tests.oracle.numbers import multiply
from tests.oracle.quantization import linear_row

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

Linear = Callable[[Float32], Float32]


def by(w: Float32, bias: Float32 | None = None) -> Linear:
    """x to x w^T, with a bias added after the product."""
    return lambda x: matmul(x, w) if bias is None else matmul(x, w) + bias


def linear(w: Float32, bias: Float32 | None = None) -> oracle.Linear:
    """The oracle's own, of one row."""
    return oracle.linear(nasty.tolist(w), None if bias is None else nasty.tolist(bias))


def weights(rng: np.random.Generator, inner: int, width: int) -> tuple[Float32, Float32, Float32]:
    gate, up = (rng.standard_normal((inner, width)).astype(np.float32) for _ in range(2))
    return gate, up, rng.standard_normal((width, inner)).astype(np.float32)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_mlp_is_the_oracles(name: str) -> None:
    rng = np.random.default_rng(1)
    gate, up, down = weights(rng, 35, 33)
    bias = rng.standard_normal((3, 35)).astype(np.float32)
    x = np.concatenate([rng.standard_normal((3, 33)), [nasty.row(rng, "spike", 33)]])
    x = x.astype(np.float32)
    both = np.concatenate([gate, up])
    plain = [
        oracle.gated_mlp(row, linear(gate), linear(up), linear(down), name)
        for row in nasty.tolist(x)
    ]
    assert_bits(gated_mlp(x, by(both), by(down), ACTIVATIONS[name]), plain)
    biased = [
        oracle.gated_mlp(
            row,
            linear(gate, bias[0]),
            linear(up, bias[1]),
            linear(down, bias[2, :33]),
            name,
        )
        for row in nasty.tolist(x)
    ]
    joined = by(both, np.concatenate([bias[0], bias[1]]))
    assert_bits(gated_mlp(x, joined, by(down, bias[2, :33]), ACTIVATIONS[name]), biased)


def test_gated_mlp_over_int4_layers() -> None:
    rng = np.random.default_rng(2)
    gate, up, down = weights(rng, 40, 36)
    matrices = {name: quantize_int4(w) for name, w in zip("gud", (gate, up, down), strict=True)}
    both = quantize_int4(np.concatenate([gate, up]))
    x = rng.standard_normal((4, 36)).astype(np.float32)

    def layer(name: str) -> oracle.Linear:
        m = matrices[name]
        codes, scales = unpack(m).tolist(), nasty.tolist(m.scales)
        return lambda row: linear_row(row, codes, scales, 32)

    expected = [
        oracle.gated_mlp(row, layer("g"), layer("u"), layer("d"), "silu") for row in nasty.tolist(x)
    ]
    found = gated_mlp(
        x,
        lambda rows: linear_int4(rows, both),
        lambda rows: linear_int4(rows, matrices["d"]),
        ACTIVATIONS["silu"],
    )
    assert_bits(found, expected)


def test_the_gate_comes_first() -> None:
    both = f32([[1.0], [2.0]])
    found = gated_mlp(f32([[3.0]]), by(both), by(f32([[1.0]])), ACTIVATIONS["silu"])
    assert_bits(found, [[multiply(elementary.silu(3.0), 6.0)]])


def test_hard_values() -> None:
    # silu and gelu at their ends, products that overflow, and -inf * 0.
    rng = np.random.default_rng(3)
    x = f32([[v] for v in (0.0, -0.0, 1e-45, -1e-45, 88.7, -88.8, -104.0, 3e38, -3e38)])
    x = np.concatenate([x, [[np.nan]], [[np.inf]], nasty.matrix(rng, 6, 1)]).astype(np.float32)
    gate, up, down = f32([[1.0]]), f32([[-2.0]]), f32([[0.5]])
    for (name, activation), limit in itertools.product(ACTIVATIONS.items(), (None, 7.0)):
        expected = [
            oracle.gated_mlp(row, linear(gate), linear(up), linear(down), name, limit)
            for row in nasty.tolist(x)
        ]
        found = gated_mlp(x, by(np.concatenate([gate, up])), by(down), activation, limit)
        assert_bits(found, expected, name)


def test_rows_do_not_know_each_other() -> None:
    rng = np.random.default_rng(4)
    gate, up, down = weights(rng, 70, 50)
    x = nasty.matrix(rng, 20, 50)
    run = (by(np.concatenate([gate, up])), by(down), ACTIVATIONS["silu"])
    whole = gated_mlp(x, *run)
    for t in (0, 11, 19):
        assert_same(gated_mlp(x[t : t + 1], *run), whole[t : t + 1])
    x[5, 3] = np.nan
    spoiled = gated_mlp(x, *run)
    whole[5] = np.nan
    assert_bits(spoiled, whole)
