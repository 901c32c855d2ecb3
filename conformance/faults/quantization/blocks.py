"""Mistakes of the blocks of GGUF files, Q4_0 and Q8_0 (SPEC 5.7)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.faults.fault import Fault, half
from conformance.golden import Array
from reference.arithmetic import F32, one_nan


class Blocks(Fault):
    """A mistake in the blocks of GGUF files."""

    operations: ClassVar[tuple[str, ...]] = ("linear_q4_0", "linear_q8_0")


class Q40Interleaved(Blocks):
    """The nibbles of a Q4_0 byte are taken for neighbours instead of weights 16 apart."""

    name = "q4_0-nibbles-interleaved"
    reports = ("1bit-MONSTER/1bit-MONSTER/pull/572", "paiml/aprender/pull/2069")
    severity = "broken"
    operations = ("linear_q4_0",)

    def q4_0_codes(self, blocks: Array) -> F32:
        """Low, high, low, high."""
        codes = super().q4_0_codes(blocks)
        turns = np.stack([codes[:, :, :16], codes[:, :, 16:]], axis=3)
        return turns.reshape(codes.shape)


class Q40OffsetSeven(Blocks):
    """7 is taken off a Q4_0 code instead of 8."""

    name = "q4_0-offset-seven"
    reports = ()
    severity = "broken"
    operations = ("linear_q4_0",)

    def q4_0_codes(self, blocks: Array) -> F32:
        """One too many."""
        return super().q4_0_codes(blocks) + np.float32(1)


class Q80Negated(Blocks):
    """The code -128 is negated in 8 bits, and stays, where its activation is negative."""

    name = "q8_0-negated-in-8-bits"
    reports = ("ggml-org/ggml/issues/1393",)
    severity = "subtle"
    operations = ("linear_q8_0",)

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """|x| times the code with the sign of x, which -128 has but once."""
        xq, scale = self.quantize_int8(x)
        width = x.shape[1]
        weights = (codes * scales[:, :, None]).reshape(-1, width)
        least = np.where(codes.reshape(-1, width) == -128, weights, np.float32(0))
        below = np.minimum(xq, 0).astype(np.float32)
        sums = self.int4_sums(xq.astype(np.float32), weights) - 2 * self.int4_sums(below, least)
        with np.errstate(all="ignore"):
            return one_nan((sums * scale[:, None].astype(sums.dtype)).astype(np.float32))


class ScaleSignLost(Blocks):
    """The sign of a block's scale is lost, as by a format whose scales have none."""

    name = "block-scale-sign-lost"
    reports = ()
    severity = "broken"

    def block_scales(self, blocks: Array) -> F32:
        """Magnitudes."""
        return np.abs(super().block_scales(blocks))


class ScaleFlushed(Blocks):
    """A block's subnormal scale is taken for zero."""

    name = "block-scale-flushed"
    reports = ("kekzl/imp/pull/808",)
    severity = "wrong"

    def block_scales(self, blocks: Array) -> F32:
        """Nothing below 2^-14."""
        scales = super().block_scales(blocks)
        return np.where(np.abs(scales) < 2.0**-14, np.float32(0), scales)


class ActivationsByBlock(Blocks):
    """Activations have a scale for each block of 32 instead of one for the row."""

    name = "block-activation-scales"
    reports = ()
    severity = "subtle"

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """One product a block, added in float32."""
        parts = [
            super(ActivationsByBlock, self).on_blocks(
                x[:, 32 * g : 32 * g + 32], codes[:, g : g + 1], scales[:, g : g + 1]
            )
            for g in range(codes.shape[1])
        ]
        with np.errstate(all="ignore"):
            return one_nan(np.sum(parts, axis=0, dtype=np.float32))


class ScalesMultipliedInHalf(Blocks):
    """A block's scale meets the activations' in float16, where a small product is lost."""

    name = "block-scales-multiplied-in-half"
    reports = ("ikawrakow/ik_llama.cpp/pull/2503",)
    severity = "subtle"

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """Sums of codes are exact, their factors of 11 bits or fewer."""
        quantized, steps = self.quantize_int8(x)
        rows = quantized.astype(np.float64).reshape(len(x), -1, 32)
        sums = np.einsum("tgk,ngk->tng", rows, codes.astype(np.float64))
        with np.errstate(all="ignore"):
            factors = half(steps[:, None, None] * scales)
            return one_nan((sums * factors).sum(axis=2).astype(np.float32))


class BlockRowsOf64(Blocks):
    """Rows from the 65th on are never written by the kernels of Q4_0 and Q8_0."""

    name = "block-rows-beyond-64"
    reports = ("flashinfer-ai/flashinfer/pull/3533",)
    severity = "broken"

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """Zero."""
        y = super().on_blocks(x, codes, scales).copy()
        y[64:] = 0
        return y
