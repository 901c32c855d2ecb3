"""Linear layers: exact, and float or int8 activations on int4, Q4_0, Q8_0 weights (SPEC 2, 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases import weight_only
from conformance.cases.recipe import BOTH, EXACT, GaugeOf, Recipe, array32
from conformance.generator import integers, normal, uniform, words
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32
from reference.blocks import BLOCK_BYTES, SCALE_LIMITS, BlockType, dequantize_blocks, read_blocks
from reference.quantization import Int4Matrix, dequantize, quantize_int8


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    return gauges.linear(arguments["x"], arguments["w"], arguments.get("bias"), outputs["y"])


def _linear(
    name: str,
    x: F32,
    w: F32,
    bias: F32 | None = None,
    rules: tuple[str, ...] = BOTH,
    note: str = "",
) -> Recipe:
    inputs = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    return Recipe(
        f"kernel/linear/{name}",
        "2.2",
        {},
        inputs,
        rules,
        _gauge if "gauge" in rules else None,
        note,
    )


def _spiky(x: F32, name: str) -> F32:
    """Multiply each element by 2^-20 .. 2^11: heavy tails, so that alignment really cuts."""
    power = (words(len(name), x.size) >> np.uint64(59)).astype(np.int32).reshape(x.shape)
    return np.ldexp(x, power - 20)


def linear_recipes() -> Iterator[Recipe]:
    """Linear layers at the edges of blocks, on hard data, and with what is not finite."""
    for width in (1, 31, 32, 33, 63, 64, 65, 96, 127, 288):
        for rows in (1, 5):
            name = f"k{width}_t{rows}"
            x, w = normal(f"{name}/x", rows, width), normal(f"{name}/w", 33, width)
            yield _linear(name, x, w)
    x, w = normal("k2049_t1/x", 1, 2049), normal("k2049_t1/w", 3, 2049)
    yield _linear("k2049_t1", x, w, note="one row, more terms than 1,024 threads take at once")
    x, w = normal("columns_261/x", 2, 5), normal("columns_261/w", 261, 5)
    yield _linear("columns_261", x, w, note="5 columns beyond tiles of 128 or 256")
    x, w = normal("k4096/x", 2, 4096), normal("k4096/w", 7, 4096)
    yield _linear("k4096", x, w, note="one term among 4,096 hardly matters")
    for rows in (1, 16):
        name = f"tiles_t{rows}"
        x, w = normal(f"{name}/x", rows, 256), normal(f"{name}/w", 128, 256)
        yield _linear(name, x, w, note="whole tiles of any kernel")
    x, w = normal("bias/x", 3, 96), normal("bias/w", 20, 96)
    yield _linear("bias", x, w, normal("bias/b", 20))
    some = x.copy()
    some[1] = 0
    yield _linear("bias_zero_row", some, w, normal("bias/b", 20), note="of a zero row it is all")
    small, large = x * np.float32(2.0**-22), normal("bias_large/b", 20)
    yield _linear("bias_large", small, w, large, note="a sum may begin with it, on its grid")
    yield _linear("bias_t1", x[:1].copy(), w, normal("bias_t1/b", 20), note="one row has it too")
    yield _linear("heavy_tails", _spiky(x, "x"), _spiky(w, "ww"), note="elements over 31 binades")
    outliers = x.copy()
    outliers[:, ::31] *= 1000
    yield _linear("outlier_channels", outliers, w, note="channels 1,000 times the rest")
    yield _linear("subnormal", np.ldexp(x, -140), np.ldexp(w, 10), note="subnormal operands")
    yield _linear(
        "one_hot",
        np.eye(40, 70, dtype=np.float32),
        normal("one_hot/w", 9, 70),
        note="each term alone",
    )
    yield _linear(
        "wide_block",
        array32([[2**30, 1]]),
        array32([[0, 1]]),
        note="alignment is no identity",
    )
    signs = np.where(uniform("zeros/s", 4, 40) > 0, np.float32(0.0), np.float32(-0.0))
    yield _linear("zeros", signs, normal("zeros/w", 5, 40), note="sums start at +0")
    huge = np.full((2, 64), 2.0**100, np.float32)
    huge[1, 32:] *= -1
    yield _linear(
        "overflow",
        huge,
        np.full((3, 64), 2.0**100, np.float32),
        rules=("bits",),
        note="infinity, and +0",
    )
    poison_x, poison_w = normal("poison/x", 5, 70), normal("poison/w", 6, 70)
    poison_x[1, 3], poison_x[2, 69], poison_w[4, 0], poison_w[:, 40] = np.inf, np.nan, -np.inf, 0
    poison_x[3, 40] = np.inf
    one = normal("nan_row/x", 3, 70)
    one[1, 69] = np.nan
    yield _linear("nan_row", one, normal("nan_row/w", 6, 70), note="one row alone is NaN")
    yield _linear(
        "not_finite", poison_x, poison_w, rules=("bits",), note="one is enough, 0 * inf too"
    )


def _int4_gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    x = arguments["x"]
    group = arguments["group"] or x.shape[1]
    matrix = Int4Matrix(arguments["packed"], arguments["scales"], x.shape[1], group)
    codes, scale = quantize_int8(x)
    return gauges.linear_int4(codes.astype(np.float32), scale, dequantize(matrix), outputs["y"])


def int4_recipes() -> Iterator[Recipe]:
    """Encoders with their edges, and the int4 linear layer."""
    edges = normal("edges/w", 12, 70)
    edges[0, :32], edges[1], edges[2, :32] = 0, 0, -0.0
    edges[3, :32] = 2.0**-30
    edges[4, :32] = np.arange(32) * 0.5 - 7
    edges[4, 0] = -7
    edges[5] = -np.abs(edges[5])
    edges[6] = np.ldexp(edges[6], -145)
    edges[7] = np.ldexp(edges[7], 16)
    edges[8, 32:] *= 2.0**-12
    for group, form in ((32, "group"), (0, "row")):
        yield Recipe(
            f"kernel/quantize_int4/edges_{form}",
            "5.1" if group else "5.3",
            {"group": group},
            {"w": edges},
            note="zero groups, -0, tiny and large scales, exact halves, negative maximum",
        )
        for width in (1, 7, 31, 32, 33, 64, 65):
            name = f"kernel/quantize_int4/k{width}_{form}"
            yield Recipe(name, "5.2", {"group": group}, {"w": normal(f"{name}/w", 6, width)})
    halves = np.zeros((4, 32), np.float32)
    halves[:, :29] = np.ldexp(np.arange(-14, 15) * np.float32(0.5), [[0], [-3], [5], [-24]])
    yield Recipe(
        "kernel/quantize_int4/halves",
        "5.1",
        {"group": 32},
        {"w": halves},
        note="every half between two codes, at scales that are powers of two",
    )
    x = normal("int8/x", 9, 50)
    x[0], x[1], x[2, 5], x[3, 5] = 0, np.ldexp(x[1], -147), np.nan, -np.inf
    x[4] = np.ldexp(x[4], -149 + 7)
    x[5, :20] = np.arange(20) * 0.5
    x[5, 20:] = 127
    yield Recipe(
        "kernel/quantize_int8/edges",
        "5.4",
        {},
        {"x": x},
        note="zero, subnormal, not finite, exact halves",
    )
    tiny = np.ldexp(np.arange(-185, 186, 5, dtype=np.float32)[None], -149)
    yield Recipe(
        "kernel/quantize_int8/clamp",
        "5.4",
        {},
        {"x": tiny},
        note="the scale is the least float32, and codes up to 185 are clamped",
    )
    for rows, width in ((1, 160), (34, 64), (65, 96)):
        name = f"kernel/linear_int4/rows_{rows}"
        w, x = normal(f"{name}/w", 17, width), normal(f"{name}/x", rows, width)
        w = np.ldexp(w, np.arange(width) // 32)  # so that no two groups have like scales
        x[5:6] = 0
        packed, scales = EXACT.quantize_int4(w, 32)
        inputs = {"x": x, "packed": packed, "scales": scales}
        yield Recipe(name, "5.5", {"group": 32}, inputs, BOTH, _int4_gauge, "one row, and many")
    for group, form in ((32, "group"), (0, "row")):
        for width in (1, 31, 32, 33, 63, 64, 96, 288):
            name = f"kernel/linear_int4/k{width}_{form}"
            w, x = normal(f"{name}/w", 17, width), normal(f"{name}/x", 5, width)
            packed, scales = EXACT.quantize_int4(w, group)
            inputs = {"x": x, "packed": packed, "scales": scales}
            yield Recipe(name, "5.5", {"group": group}, inputs, BOTH, _int4_gauge)
    for rows in (1, 16):
        name = f"kernel/linear_int4/tiles_t{rows}"
        packed, scales = EXACT.quantize_int4(normal(f"{name}/w", 128, 256), 32)
        inputs = {"x": normal(f"{name}/x", rows, 256), "packed": packed, "scales": scales}
        note = "whole tiles of any kernel"
        yield Recipe(name, "5.5", {"group": 32}, inputs, BOTH, _int4_gauge, note)
    packed, scales = EXACT.quantize_int4(edges[:7], 32)
    x = normal("linear_int4/edges/x", 4, 70)
    x[0], x[1, 3] = 0, np.nan
    inputs = {"x": x, "packed": packed, "scales": scales}
    yield Recipe(
        "kernel/linear_int4/edges",
        "5.5",
        {"group": 32},
        inputs,
        note="zero and NaN rows, edge groups",
    )
    codes = np.full((3, 128), 0xF1, np.uint8)
    large = np.full((3, 8), 2040.0, np.float16)
    inputs = {"x": normal("linear_int4/limit/x", 4, 256), "packed": codes, "scales": large}
    yield Recipe(
        "kernel/linear_int4/limit",
        "5.6",
        {"group": 32},
        inputs,
        BOTH,
        _int4_gauge,
        "scales sum up to 16,320",
    )


def _blocks_gauge(kind: BlockType) -> GaugeOf:
    def gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
        weights = dequantize_blocks(read_blocks(arguments["blocks"], kind))
        codes, scale = quantize_int8(arguments["x"])
        return gauges.linear_int4(codes.astype(np.float32), scale, weights, outputs["y"])

    return gauge


def _blocks(kind: BlockType, scales: NDArray[np.float16], codes: Array) -> NDArray[np.uint8]:
    """Blocks (N, G, 18 or 34) of scales (N, G), their codes being the low bits of `codes`."""
    size = BLOCK_BYTES[kind]
    stored = np.empty((*scales.shape, size), np.uint8)
    stored[:, :, :2] = scales.astype("<f2")[:, :, None].view(np.uint8)
    stored[:, :, 2:] = np.resize(codes, (*scales.shape, size - 2)) & 255
    return stored


def random_blocks(kind: BlockType, name: str, rows: int, groups: int) -> NDArray[np.uint8]:
    """Scales of either sign, no two groups of a row of like size; all bytes are codes."""
    scales = np.ldexp(normal(f"{name}/d", rows, groups), np.arange(groups) % 9 - 9)
    codes = integers(f"{name}/q", 256, rows, groups, BLOCK_BYTES[kind] - 2)
    return _blocks(kind, scales.astype(np.float16), codes)


def block_recipes(kind: BlockType) -> Iterator[Recipe]:
    """Linear layers on the blocks of GGUF files."""
    operation = f"linear_{kind.lower()}"

    def recipe(case: str, x: F32, blocks: Array, section: str, note: str) -> Recipe:
        finite = bool(np.isfinite(x).all())
        return Recipe(
            f"kernel/{operation}/{case}",
            section,
            {},
            {"x": x, "blocks": blocks},
            BOTH if finite else ("bits",),
            _blocks_gauge(kind) if finite else None,
            note,
        )

    for rows, width in ((5, 32), (1, 64), (5, 96), (34, 96), (3, 288), (130, 32)):
        case, columns = f"k{width}_t{rows}", 3 if rows > 100 else 17
        blocks = random_blocks(kind, f"{operation}/{case}", columns, width // 32)
        x = normal(f"{operation}/{case}/x", rows, width)
        yield recipe(case, x, blocks, "5.7", "scales of either sign, all codes")

    for rows in (1, 16):
        case = f"tiles_t{rows}"
        blocks = random_blocks(kind, f"{operation}/{case}", 64, 8)
        x = normal(f"{operation}/{case}/x", rows, 256)
        yield recipe(case, x, blocks, "5.7", "whole tiles of any kernel")

    ones = np.eye(32, 32, dtype=np.float32)
    every = _blocks(kind, np.ones((16, 1), np.float16), np.arange(16 * 32))
    yield recipe("one_hot", ones, every, "5.7", "each weight alone, so that its place is seen")

    x = normal(f"{operation}/edges/x", 4, 64)
    x[0], x[1, 3], x[2, 60] = 0, np.nan, -np.inf
    edges = random_blocks(kind, f"{operation}/edges", 9, 2)
    tiny = 2.0**-24
    scales = np.array(
        [[0, 0], [-0.0, 1], [tiny, -tiny], [-tiny, 3 * tiny], [-1023 * tiny, 0], [1, -1], [-1, -1]],
        np.float16,
    )
    edges[:7, :, :2] = scales[:, :, None].view(np.uint8)
    note = "zero, negative and subnormal scales; zero rows and rows that are not finite"
    yield recipe("edges", x, edges, "5.7", note)

    x = np.repeat(normal(f"{operation}/cancel/x", 3, 32), 2, axis=0).reshape(3, 64)
    block = random_blocks(kind, f"{operation}/cancel", 4, 1)
    opposite = block.copy()
    opposite[:, :, 1] ^= 0x80
    cancelling = np.concatenate([block, opposite], axis=1)
    yield recipe("cancel", x, cancelling, "5.7", "blocks that differ in sign alone: +0")

    largest = SCALE_LIMITS[kind] / 8 - SCALE_LIMITS[kind] / 2048
    signs = np.where(integers(f"{operation}/limit/s", 2, 4, 8) > 0, 1, -1)
    signs[0], signs[1] = 1, -1
    codes = integers(f"{operation}/limit/q", 256, 4, 8, BLOCK_BYTES[kind] - 2)
    codes[:2] = 0x00 if kind == "Q4_0" else 0x80
    x = normal(f"{operation}/limit/x", 3, 256)
    x[0], x[1] = 1, np.where(x[1] < 0, -1, 1)
    limit = _blocks(kind, (largest * signs).astype(np.float16), codes)
    limit[:, -1, 0] |= 1
    note = "magnitudes of scales that sum up to nearly the limit, codes of the largest"
    yield recipe("limit", x, limit, "5.8", note)


def recipes() -> Iterator[Recipe]:
    """Every golden of linear layers."""
    yield from linear_recipes()
    yield from int4_recipes()
    yield from weight_only.recipes()
    yield from block_recipes("Q4_0")
    yield from block_recipes("Q8_0")
