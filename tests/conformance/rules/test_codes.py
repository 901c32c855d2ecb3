"""Codes of stored activations: how far they move, and that the bound needs it (SPEC 16.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.golden import Golden
from conformance.rules import gauges, judge, judging, unit_roundoff
from conformance.rules.codes import moved, weights_of
from reference.blocks import dequantize_blocks, linear_q8_0, read_blocks
from reference.quantization import (
    Int4Matrix,
    dequantize,
    linear_int4,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
)

F32 = NDArray[Any]
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def golden(seed: int, width: int = 32) -> tuple[Golden, Int4Matrix]:
    """One token, and a matrix of int4."""
    matrix = quantize_int4(normal(seed + 1, 3, width))
    return of(normal(seed, 1, width), matrix), matrix


def of(x: F32, matrix: Int4Matrix) -> Golden:
    """The golden of a layer."""
    codes, scale = quantize_int8(x)
    y = linear_int4(x, matrix)
    gauge = gauges.linear_int4(codes.astype(np.float32), scale, dequantize(matrix), y)
    inputs = {"x": x, "packed": matrix.packed, "scales": matrix.scales}
    return Golden(
        "kernel/linear_int4/x", "5.5", "linear_int4", {"group": 32}, inputs, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_stored_activations_are_within_the_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would not be, where many lie near the edge of a step, if codes were taken for exact."""
    u = unit_roundoff({"operands": name, "accumulator": "float32"})
    answers = []
    for seed in range(200):
        made, matrix = golden(seed)
        if seed == 0:
            matrix = quantize_int4(np.abs(normal(1, 3, 32)))
            made = of(np.array([[127.0] + [1.4999] * 31], np.float32), matrix)
        stored = made.inputs["x"].astype(TYPES[name]).astype(np.float32)
        y = linear_int4(stored, matrix).astype(TYPES[name]).astype(np.float32)
        assert judge("gauge", made, {"y": y}, u).outcome == "pass"
        answers.append((made, {"y": y}))
    monkeypatch.setattr(judging, "moved", lambda golden, v: 0.0)
    assert judge("gauge", *answers[0], u).outcome == "fail"


def test_what_a_code_moves_by() -> None:
    """By one step of the row's scale times the weight, where x / s is near an edge, else not.

    10.47 is 10.5 where x is off by v and s by v the other way: 10.47 (1 + 2 / 512).
    """
    made, matrix = golden(0, width=2)
    weights = np.abs(dequantize(matrix)).astype(np.float64)
    for second, steps in ((10.47, 1), (10.45, 0), (10.0, 0), (60.4, 1)):
        made.inputs["x"][:] = [[127.0, second]]
        codes, scale = quantize_int8(made.inputs["x"])
        assert (codes.tolist(), scale.tolist()) == ([[127, round(second)]], [1.0])
        found = np.asarray(moved(made, 2.0**-9))
        assert np.array_equal(found[0], steps * weights[:, 1]), second


def test_a_step_is_worth_its_rows_scale_and_nothing_without_one() -> None:
    """Scales of 2, of a row of zeros, and of a row with an infinity."""
    made, matrix = golden(0, width=2)
    x = np.array([[254.0, 2 * 10.47], [0, 0], [np.inf, 10.47]], np.float32)
    made = replace(made, inputs={**made.inputs, "x": x})
    found = np.asarray(moved(made, 2.0**-9))
    weights = np.abs(dequantize(matrix)).astype(np.float64)
    assert np.array_equal(found, [2 * weights[:, 1], np.zeros(3), np.zeros(3)])


def test_weights_have_their_groups_scales_or_their_rows() -> None:
    w = normal(6, 3, 64)
    for matrix, group in ((quantize_int4(w), 32), (quantize_int4_row(w), 0)):
        made = replace(of(normal(5, 1, 64), matrix), parameters={"group": group})
        assert np.array_equal(weights_of(made), dequantize(matrix))


def test_nothing_moves_where_operands_are_float32() -> None:
    made, _ = golden(3)
    assert unit_roundoff({"operands": "float32", "accumulator": "bfloat16"}).stored == 0
    assert moved(made, 0.0) == 0
    assert np.asarray(moved(made, 2.0**-8)).max() > 0


def test_blocks_of_gguf_too() -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (5, 3, 34)).astype(np.uint8)
    blocks[:, :, 1] = 0x20  # a finite scale
    x = normal(5, 4, 96)
    y = linear_q8_0(x, blocks)
    weights = dequantize_blocks(read_blocks(blocks, "Q8_0"))
    codes, scale = quantize_int8(x)
    gauge = gauges.linear_int4(codes.astype(np.float32), scale, weights, y)
    made = Golden(
        "kernel/linear_q8_0/x", "5.7", "linear_q8_0", {}, {"x": x, "blocks": blocks}, {"y": y},
        ("gauge",), gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip
    u = unit_roundoff({"operands": "bfloat16", "accumulator": "float32"})
    stored = linear_q8_0(x.astype(ml_dtypes.bfloat16).astype(np.float32), blocks)
    assert judge("gauge", made, {"y": stored}, u).outcome == "pass"
    far = np.asarray(moved(made, u.stored))
    assert far.shape == y.shape
    assert far.min() > 0
