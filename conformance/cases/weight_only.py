"""Weight-only int4: float activations on int4 codes, in the shapes of its kernels (SPEC 5.9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.recipe import BOTH, Recipe
from conformance.generator import integers, normal
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32
from reference.quantization import Int4Matrix, dequantize


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    x, zeros, scales = arguments["x"], arguments.get("zeros"), arguments["scales"]
    group = arguments["group"] or x.shape[1]
    matrix = Int4Matrix(arguments["packed"], scales, x.shape[1], group)
    offset = scales.astype(np.float32) * (np.float32(8) if zeros is None else zeros)
    offsets = np.repeat(offset, group, axis=1)[:, : x.shape[1]].astype(np.float32)
    return gauges.linear_w4a16(x, dequantize(matrix, zeros), offsets, outputs["y"])


def _recipe(
    name: str,
    x: F32,
    packed: Array,
    scales: Array,
    group: int,
    zeros: Array | None = None,
    note: str = "",
) -> Recipe:
    inputs = {"x": x, "packed": packed, "scales": scales}
    inputs |= {} if zeros is None else {"zeros": zeros}
    return Recipe(
        f"kernel/linear_w4a16/{name}", "5.9", {"group": group}, inputs, BOTH, _gauge, note
    )


def _zeros(name: str, rows: int, groups: int) -> NDArray[np.uint8]:
    """All of 0 to 15."""
    return integers(f"{name}/z", 16, rows, groups).astype(np.uint8)


def _random(name: str, rows: int, outputs: int, width: int, group: int, zeros: bool) -> Recipe:
    """All codes; scales of which no two of neighbouring groups are alike."""
    at = f"kernel/linear_w4a16/{name}"
    groups = -(-width // group) if group else 1
    steps = np.abs(normal(f"{at}/d", outputs, groups)) + np.float32(0.25)
    scales = np.ldexp(steps, np.arange(groups) % 5 - 7).astype(np.float16)
    return _recipe(
        name,
        normal(f"{at}/x", rows, width),
        integers(f"{at}/q", 256, outputs, (width + 1) // 2).astype(np.uint8),
        scales,
        group,
        _zeros(at, outputs, groups) if zeros else None,
        "a zero point for each group" if zeros else "symmetric, codes -8 to 7",
    )


def recipes() -> Iterator[Recipe]:
    """Groups of 32, 64 and 128, symmetric and not; tiles, edges, and each weight alone."""
    for group, zeros in ((32, False), (64, True), (128, True), (128, False), (0, False)):
        kind = "zeros" if zeros else "symmetric"
        yield _random(f"k256_g{group}_{kind}", 3, 64, 256, group, zeros)
    yield _random("k256_g128_one_row", 1, 64, 256, 128, True)
    yield _random("k4096_g128", 1, 16, 4096, 128, True)
    yield _random("rows_34", 34, 24, 128, 64, True)
    yield _random("rows_130", 130, 3, 32, 32, True)
    yield _random("columns_261", 2, 261, 32, 32, True)
    for width, group in ((1, 32), (33, 32), (72, 64), (160, 128)):
        yield _random(f"ragged_k{width}_g{group}", 2, 17, width, group, True)

    every = np.arange(16, dtype=np.uint8)
    pairs = np.tile(every[0::2] | every[1::2] << 4, (16, 2))
    yield _recipe(
        "one_hot",
        np.eye(32, dtype=np.float32),
        pairs,
        np.ones((16, 1), np.float16),
        32,
        every[:, None].copy(),
        "each of 16 codes with each of 16 zero points, each weight alone",
    )
    at = "kernel/linear_w4a16/symmetric"
    yield _recipe(
        "symmetric",
        normal(f"{at}/x", 2, 64),
        np.tile(np.array([0x00, 0x88, 0xFF, 0x08, 0xF0, 0x1F, 0x80, 0x71], np.uint8), (8, 4)),
        np.ones((8, 2), np.float16),
        32,
        None,
        "codes of the largest magnitude: -8 is not clamped, 8 is zero",
    )
    at = "kernel/linear_w4a16/edges"
    x = normal(f"{at}/x", 5, 64)
    x[0], x[1, 3] = 0, np.nan
    x[3] = np.ldexp(x[3], -130)
    tiny = 2.0**-24
    scales = np.array(
        [[tiny, 3 * tiny], [1023 * tiny, 1], [-1, 1], [65504, 1], [0, 1], [0, 0], [tiny, 65504]],
        np.float16,
    )
    edges = _recipe(
        "edges",
        x,
        integers(f"{at}/q", 256, 7, 32).astype(np.uint8),
        scales,
        32,
        _zeros(at, 7, 2),
        "scales subnormal, zero, negative and the largest; rows zero, tiny and NaN",
    )
    yield edges
    infinite = x.copy()
    infinite[2, 60], infinite[4, :2] = -np.inf, np.inf
    yield replace(
        edges,
        id="kernel/linear_w4a16/not_finite",
        inputs={**edges.inputs, "x": infinite},
        rules=("bits",),
        gauge=None,
        note="one infinity is enough, 0 * inf too",
    )
