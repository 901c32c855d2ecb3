"""Weights in the blocks of GGUF files, Q4_0 and Q8_0, as they are stored (SPEC 5.7).

A block is 32 weights that share a float16 scale. So their products with int8 activations add up in
no order, as those of `reference.quantization` do (SPEC 5.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.errors import QuantizationError
from reference.quantization import GROUP, linear_dequantized

BlockType = Literal["Q4_0", "Q8_0"]

BLOCK_BYTES: Mapping[BlockType, int] = {"Q4_0": 18, "Q8_0": 34}
"""Bytes of a block: the scale, and 32 codes of 4 or 8 bits (SPEC 5.7)."""

SCALE_LIMITS: Mapping[BlockType, float] = {"Q4_0": 16384.0, "Q8_0": 1024.0}
"""The sum of the magnitudes of one row's scales must be below this (SPEC 5.8)."""


@dataclass(frozen=True)
class BlockMatrix:
    """A weight matrix (N, K) of blocks (SPEC 5.7).

    codes: (N, K) int8, in -8..7 or -128..127. scales: (N, G) float16, of either sign.
    """

    kind: BlockType
    codes: NDArray[np.int8]
    scales: NDArray[np.float16]


def read_blocks(stored: NDArray[np.uint8], kind: BlockType) -> BlockMatrix:
    """The matrix whose blocks are these bytes, (N, G, 18 or 34) uint8 (SPEC 5.7)."""
    scales = np.ascontiguousarray(stored[:, :, :2]).view("<f2")[:, :, 0].astype(np.float16)
    codes = np.ascontiguousarray(stored[:, :, 2:])
    if kind == "Q4_0":  # the first 16 weights of a block, then the others
        signed = np.concatenate([codes & 15, codes >> 4], axis=2).astype(np.int8) - np.int8(8)
    else:
        signed = codes.view(np.int8)
    return BlockMatrix(kind, signed.reshape(len(stored), -1), scales)


def dequantize_blocks(m: BlockMatrix) -> F32:
    """The weights, `d * q`, (N, K) float32, exact (SPEC 5.7)."""
    return np.multiply(m.codes, np.repeat(m.scales, GROUP, axis=1), dtype=np.float32)


def check_blocks(m: BlockMatrix, name: str) -> None:
    """Raise QuantizationError where a scale is not finite, or a row's reach the limit (SPEC 5.8).

    name: of the tensor, for the message.
    """
    scales = np.abs(m.scales.astype(np.float64))
    if not np.isfinite(scales).all():
        raise QuantizationError(
            f"{name}: a {m.kind} scale is infinite or NaN; convert the model again"
        )
    worst, limit = scales.sum(axis=1).max(initial=0), SCALE_LIMITS[m.kind]
    if worst >= limit:
        raise QuantizationError(
            f"{name}: the {m.kind} scales of a row sum up to {worst:g}, and sums are exact only "
            f"below {limit:g}; take the weights as float32"
        )


def linear_q4_0(x: F32, blocks: NDArray[np.uint8]) -> F32:
    """Multiply x (T, K) float32 by a Q4_0 matrix, (N, G, 18) uint8 -> (T, N) (SPEC 5.7)."""
    return linear_blocks(x, read_blocks(blocks, "Q4_0"))


def linear_q8_0(x: F32, blocks: NDArray[np.uint8]) -> F32:
    """Multiply x (T, K) float32 by a Q8_0 matrix, (N, G, 34) uint8 -> (T, N) (SPEC 5.7)."""
    return linear_blocks(x, read_blocks(blocks, "Q8_0"))


def linear_blocks(x: F32, m: BlockMatrix) -> F32:
    """Multiply x (T, K) float32 by a matrix of blocks (N, K) -> (T, N) float32 (SPEC 5.5, 5.7)."""
    return linear_dequantized(x, dequantize_blocks(m).astype(np.float64))
