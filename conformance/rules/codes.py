"""What int8 codes of activations may move by where activations are stored in less (SPEC 16.4).

A code is a step function of its activation. Rounding an activation first moves the code only where
x / s lies near the edge of a step, and then by the whole step: no unit roundoff accounts for that.
"""

from __future__ import annotations

import numpy as np

from conformance.golden import Golden
from reference.arithmetic import F32, F64
from reference.blocks import BlockType, dequantize_blocks, read_blocks
from reference.quantization import Int4Matrix, dequantize, quantize_int8

BLOCK_TYPES: dict[str, BlockType] = {"linear_q4_0": "Q4_0", "linear_q8_0": "Q8_0"}


def moved(golden: Golden, v: float) -> F64 | float:
    """How far the bounded output may move, (T, N); v: the roundoff of operands, 0 where none is.

    A stored activation is off by v |x|, and the row's scale by v s, so that x / s is off by up to
    2 v |x / s|, and a code by what rounding makes of that.
    """
    if not v or golden.operation not in ("linear_int4", *BLOCK_TYPES):
        return 0.0
    x = golden.inputs["x"]
    codes, scale = quantize_int8(x)
    usable = np.where(np.isfinite(scale), scale, 0).astype(np.float64)[:, None]
    ratio = np.divide(x, usable, out=np.zeros(x.shape), where=usable > 0)
    reach = 2.01 * v * np.abs(ratio) + 2.0**-20  # and the division's own roundings
    ends = (np.clip(np.rint(ratio + side), -127, 127) for side in (-reach, reach))
    steps = np.maximum(*(np.abs(end - codes) for end in ends))
    weights = np.abs(weights_of(golden)).astype(np.float64)
    return np.asarray(usable * (steps @ weights.T))


def weights_of(golden: Golden) -> F32:
    """The dequantized weights of a layer, (N, K)."""
    inputs, width = golden.inputs, golden.inputs["x"].shape[1]
    if golden.operation in BLOCK_TYPES:
        return dequantize_blocks(read_blocks(inputs["blocks"], BLOCK_TYPES[golden.operation]))
    group = golden.parameters["group"] or width
    matrix = Int4Matrix(inputs["packed"], inputs["scales"], width, group)
    return dequantize(matrix, inputs.get("zeros"))
