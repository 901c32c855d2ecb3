"""Mistakes of int4, Q4_0 and Q8_0 weights and of int8 activations (SPEC 5)."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.backends.composed import Floats
from conformance.backends.composed.linear import spread
from conformance.faults.fault import Fault, SessionFault, bfloat16
from conformance.golden import Array
from reference.arithmetic import BLOCK, F32, F64, dot64, largest, one_nan
from reference.quantization import Int4Matrix, quantize_int4_row


class Encoder(Fault):
    """A mistake in making int4 codes."""

    operations = ("quantize_int4",)


class Decoder(Fault):
    """A mistake in reading int4 codes."""

    operations: ClassVar[tuple[str, ...]] = ("linear_int4", "linear_w4a16")


class Activations(Fault):
    """A mistake in int8 activations."""

    operations = ("quantize_int8", "linear_int4", "linear_q4_0", "linear_q8_0")


class Blocks(Fault):
    """A mistake in the blocks of GGUF files."""

    operations: ClassVar[tuple[str, ...]] = ("linear_q4_0", "linear_q8_0")


def _nibbles(packed: Array) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    whole = packed.astype(np.uint8)
    return whole & np.uint8(15), whole >> np.uint8(4)


def _packed(low: Array, high: Array) -> NDArray[np.uint8]:
    joined: NDArray[np.uint8] = (low | high << 4).astype(np.uint8)
    return joined


class NibblesSwapped(Decoder):
    """The high nibble of a byte is read first."""

    name = "int4-nibbles-swapped"
    reports = ("kekzl/imp/pull/567",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """High, low."""
        low, high = _nibbles(packed)
        return super().int4_weights(_packed(high, low), scales, width, group)


class NibblesSplit(Decoder):
    """The low nibbles of a group are taken for its first half, the high ones for its second."""

    name = "int4-nibbles-split"
    reports = ("kekzl/imp/pull/567", "1bit-MONSTER/1bit-MONSTER/pull/572")
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """Whole groups of 32 in split order."""
        whole = packed.shape[1] // 16
        low, high = (n[:, : whole * 16].reshape(-1, whole, 16) for n in _nibbles(packed))
        codes = np.concatenate([low, high], axis=2).reshape(len(packed), -1)
        out = packed.copy()
        out[:, : whole * 16] = _packed(codes[:, 0::2], codes[:, 1::2])
        return super().int4_weights(out, scales, width, group)


class NibblesSplitByRow(Decoder):
    """The low nibbles of a row are taken for its first half, the high ones for its second."""

    name = "int4-nibbles-split-by-row"
    reports = ()
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """All low nibbles, then all high ones."""
        codes = np.concatenate(_nibbles(packed), axis=1)
        reordered = _packed(codes[:, 0::2], codes[:, 1::2])
        return super().int4_weights(reordered, scales, width, group)


class ZeroPointSeven(Decoder):
    """7 is taken off a stored code instead of 8."""

    name = "int4-zero-point-seven"
    reports = ()
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """(q + 1) * scale."""
        weights = super().int4_weights(packed, scales, width, group)
        return weights + spread(scales, width, group).astype(np.float32)


class ZeroPointOffByOne(Decoder):
    """The zero point is one too high."""

    name = "int4-zero-point-off-by-one"
    reports = ("vllm-project/vllm/pull/26092",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """(q - 1) * scale."""
        weights = super().int4_weights(packed, scales, width, group)
        return weights - spread(scales, width, group).astype(np.float32)


class TwosComplement(Decoder):
    """Nibbles are read as two's complement instead of excess 8."""

    name = "int4-twos-complement"
    reports = ("1bit-MONSTER/1bit-MONSTER/pull/572",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """The sign bit turned over."""
        return super().int4_weights(packed ^ np.uint8(0x88), scales, width, group)


class FirstGroupScale(Decoder):
    """A single row of activations meets the scale of the first group throughout."""

    name = "int4-first-group-scale"
    reports = ("intel/torch-xpu-ops/pull/5001",)
    severity = "broken"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """The same on floats."""
        if len(x) == 1:
            scales = np.broadcast_to(scales[:, :1], scales.shape)
        return super().linear_w4a16(x, packed, scales, group, zeros)

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """Group 0 for all, where there is one row."""
        if len(x) == 1:
            scales = np.broadcast_to(scales[:, :1], scales.shape)
        return super().linear_int4(x, packed, scales, group)


class FirstGroupThroughout(Decoder):
    """The scale of a row's first group serves the whole row."""

    name = "int4-first-group-throughout"
    reports = ()
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """Group 0 for all."""
        first = np.ascontiguousarray(np.broadcast_to(scales[:, :1], scales.shape))
        return super().int4_weights(packed, first, width, group)


class ScaleReadAsBfloat16(Decoder):
    """The bits of a float16 scale are read as bfloat16."""

    name = "int4-scale-read-as-bfloat16"
    reports = ("1bit-MONSTER/1bit-MONSTER/issues/677",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """The other format."""
        read = np.ascontiguousarray(scales).view(ml_dtypes.bfloat16).astype(np.float32)
        weights = super().int4_weights(packed, np.ones_like(scales), width, group)
        return (weights * spread(read, width, group)).astype(np.float32)


class GroupOf64(Decoder):
    """Scales are taken as if groups held 64 weights."""

    name = "int4-group-of-64"
    reports = ("intel/torch-xpu-ops/pull/5001",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """Group g of 32 uses scale g // 2."""
        used = scales[:, np.arange(scales.shape[1]) // (2 if group == 32 else 1)]
        return super().int4_weights(packed, used, width, group)


class RaggedGroup(Decoder):
    """A last group that is not whole takes the scale of the one before."""

    name = "int4-ragged-group-scale"
    reports = ("karpathy/llama2.c/pull/532",)
    severity = "wrong"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """The last scale twice, where the last group is short."""
        if width % group and scales.shape[1] > 1:
            scales = scales.copy()
            scales[:, -1] = scales[:, -2]
        return super().int4_weights(packed, scales, width, group)


class RowsBeyond32(Decoder):
    """From 33 rows on, the rows from the 33rd are wrong."""

    name = "int4-rows-beyond-32"
    reports = ("huggingface/optimum-quanto/pull/315",)
    severity = "broken"
    operations = ("linear_int4", "linear_w4a16", "linear_q4_0", "linear_q8_0")

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """They read the tile of rows before."""
        sums = super().int4_sums(codes, weights)
        sums[32:] = sums[: max(0, len(sums) - 32)].copy()
        return sums

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """The same on floats."""
        y = super().linear_w4a16(x, packed, scales, group, zeros)
        y[32:] = y[: max(0, len(y) - 32)].copy()
        return y


class ZeroGroup(Encoder):
    """The scale of a group of zeros is 0 instead of 1."""

    name = "int4-zero-group-scale"
    reports = ("ggml-org/llama.cpp/pull/3010",)
    severity = "wrong"

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """Zero where all is zero."""
        scales = super().group_scales(w, group)
        starts = range(0, w.shape[1], group)
        empty = np.stack([~w[:, i : i + group].any(axis=1) for i in starts], axis=1)
        scales[empty] = 0
        return scales

    def codes(self, w: F32, scales: F64) -> F64:
        """0 where the scale is."""
        return super().codes(w, np.where(scales == 0, 1, scales))


class TinyScaleFlushed(Encoder):
    """A scale too small for float16 becomes 0 instead of the least float16."""

    name = "int4-tiny-scale-flushed"
    reports = ("ggml-org/llama.cpp/issues/25221",)
    severity = "wrong"

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """No exception for tiny scales."""
        scales = super().group_scales(w, group)
        starts = range(0, w.shape[1], group)
        peak = np.stack([np.abs(w[:, i : i + group]).max(axis=1) for i in starts], axis=1)
        scales[(peak > 0) & (self.ideal_scale(peak.astype(np.float64)) < 2.0**-25)] = 0
        return scales

    def codes(self, w: F32, scales: F64) -> F64:
        """0 where the scale is."""
        return np.where(scales == 0, 0, super().codes(w, np.where(scales == 0, 1, scales)))


class SignedPeak(Encoder):
    """A group's scale comes from its largest weight, not from its largest magnitude."""

    name = "int4-signed-peak"
    reports = ("ModelTC/LightLLM/pull/943",)
    severity = "broken"

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """Negative weights do not count."""
        return super().group_scales(np.maximum(w, np.float32(0)), group)


class ScaleByEight(Encoder):
    """Scales are max|w| / 8, so that the largest weight does not fit."""

    name = "int4-scale-by-eight"
    reports = ("1bit-MONSTER/1bit-MONSTER/pull/572",)
    severity = "subtle"

    def ideal_scale(self, peak: F64) -> F64:
        """Of the asymmetric range."""
        return peak / 8


class HalvesToEven(Encoder):
    """Halves are rounded to even instead of away from zero."""

    name = "int4-halves-to-even"
    reports = ("tenstorrent/tt-metal/issues/56525", "hw-native-sys/pypto-lib/pull/279")
    severity = "subtle"

    def codes(self, w: F32, scales: F64) -> F64:
        """rint."""
        return np.clip(np.rint(w / scales), -7, 7)


class CodesCut(Encoder):
    """Codes are cut off towards zero instead of rounded."""

    name = "int4-codes-cut"
    reports = ("sgl-project/sglang-jax/pull/1598",)
    severity = "wrong"

    def codes(self, w: F32, scales: F64) -> F64:
        """trunc."""
        return np.clip(np.trunc(w / scales), -7, 7)


class ZeroRowNan(Decoder):
    """A row of zeros is divided by its scale of zero and gives NaN."""

    name = "int8-zero-row-is-nan"
    reports = ("huggingface/kernels-community/issues/681",)
    severity = "broken"
    operations = ("linear_int4",)

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """0 / 0."""
        y = super().linear_int4(x, packed, scales, group)
        y[~x.any(axis=1)] = np.nan
        return y


class Int8SignedPeak(Activations):
    """A row's scale comes from its largest element, not from its largest magnitude."""

    name = "int8-signed-peak"
    reports = ("ModelTC/LightLLM/pull/943",)
    severity = "broken"

    def int8_scale(self, x: F32) -> F32:
        """Negative elements do not count."""
        return super().int8_scale(np.maximum(x, np.float32(0)))


class NotQuantized(Fault):
    """Activations stay floats where the layer quantizes them to int8."""

    name = "int8-activations-not-quantized"
    reports = ()
    severity = "wrong"
    operations = ("linear_int4", "linear_q4_0", "linear_q8_0")

    def on_codes(self, x: F32, weights: F32) -> F32:
        """A float layer on dequantized weights."""
        return self.product(x, weights)


class ScaleBy128(Activations):
    """A row's scale is max|x| / 128, so that its largest element does not fit."""

    name = "int8-scale-by-128"
    reports = ()
    severity = "subtle"

    def int8_scale(self, x: F32) -> F32:
        """Of the asymmetric range."""
        return largest(np.ascontiguousarray(x)) / np.float32(128)


class PerTensor(Activations):
    """One scale serves all rows of a call, so that a row depends on its neighbours."""

    name = "int8-scale-per-tensor"
    reports = ("pytorch/executorch/issues/22431",)
    severity = "wrong"

    def int8_scale(self, x: F32) -> F32:
        """The largest of all that are finite."""
        scale = super().int8_scale(x)
        return np.full_like(scale, np.max(scale, where=np.isfinite(scale), initial=0))


class Int8CodesCut(Activations):
    """Codes are cut off towards zero instead of rounded."""

    name = "int8-codes-cut"
    reports = ("ROCm/aiter/pull/4637", "microsoft/onnxruntime/pull/32452")
    severity = "wrong"

    def int8_codes(self, ratio: F32) -> F32:
        """trunc."""
        return np.clip(np.trunc(ratio), -127, 127)


class Int8HalvesAway(Activations):
    """Halves are rounded away from zero instead of to even."""

    name = "int8-halves-away"
    reports = ("tenstorrent/tt-metal/issues/56525",)
    severity = "subtle"

    def int8_codes(self, ratio: F32) -> F32:
        """Half up in magnitude."""
        return np.clip(np.trunc(ratio + np.copysign(np.float32(0.5), ratio)), -127, 127)


class Int8Wraps(Activations):
    """Codes beyond 127 wrap round instead of saturating."""

    name = "int8-codes-wrap"
    reports = ("ROCm/aiter/pull/4637",)
    severity = "wrong"

    def int8_codes(self, ratio: F32) -> F32:
        """The low eight bits."""
        return np.rint(ratio).astype(np.int64).astype(np.int8).astype(np.float32)


class Reciprocal(Activations):
    """Rows are multiplied by 1 / scale, which overflows where the scale is subnormal."""

    name = "int8-reciprocal-overflows"
    reports = ("ggml-org/llama.cpp/issues/25221",)
    severity = "wrong"

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """x (1 / s), clamped."""
        _, scale = super().quantize_int8(x)
        with np.errstate(all="ignore"):
            ratio: F32 = x * (np.float32(1) / scale.astype(np.float32))[:, None]
        usable = np.isfinite(scale) & (scale > 0)
        codes = np.where(usable[:, None] & ~np.isnan(ratio), self.int8_codes(ratio), 0)
        return codes.astype(np.int8), scale


class ScaleBfloat16(Activations):
    """A row's scale is held in bfloat16."""

    name = "int8-scale-bfloat16"
    reports = ("ikawrakow/ik_llama.cpp/pull/292",)
    severity = "subtle"

    def int8_scale(self, x: F32) -> F32:
        """Rounded."""
        return bfloat16(super().int8_scale(x))


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
    reports = ("vllm-project/vllm/pull/26092",)
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


class Search(SessionFault):
    """A mistake in the search for a row's scale (SPEC 5.3)."""

    operations: ClassVar[tuple[str, ...]] = ("forward",)
    contract = True
    steps: ClassVar[range] = range(40, 21, -1)
    """40 times the factors, in the order of their trial; the first of the best stays."""

    def searched(self, w: F32) -> Int4Matrix:
        """One scale after the other."""
        peak, width = np.abs(w).max(axis=1, keepdims=True).astype(np.float64), w.shape[1]
        best, least = np.ones_like(peak), np.full(len(w), np.inf)
        for step in self.steps:
            scales = (peak * (step / 40) / 7).astype(np.float16).astype(np.float64)
            scales[scales == 0] = 1
            error = (w - scales * self.backend.codes(w, scales)).astype(np.float32)
            squares = self.squares(error)
            better = squares < least
            best[better], least[better] = scales[better], squares[better]
        codes = self.backend.codes(w, best)
        return Int4Matrix(self.backend.pack(codes), best.astype(np.float16), width, width)

    def squares(self, error: F32) -> F64:
        """The squared errors of each row, (N, K) -> (N,)."""
        return dot64(error, error)


class SearchTakesSmaller(Search):
    """Of equally good scales of a row the smaller is taken."""

    name = "int4-row-search-smaller-of-equal"
    reports = ()
    severity = "subtle"
    steps = range(22, 41)


class SearchFloat32(Search):
    """The squared errors of a row's scales are computed and added in float32."""

    name = "int4-row-search-float32"
    reports = ()
    severity = "subtle"

    def squares(self, error: F32) -> F64:
        """Term by term."""
        return np.cumsum(error * error, axis=1, dtype=np.float32)[:, -1].astype(np.float64)


class SearchDescending(SessionFault):
    """The search for a row's scale adds its blocks' squared errors from the last to the first."""

    name = "int4-row-search-descending"
    reports = ()
    severity = "subtle"
    operations = ("forward",)
    contract = True

    def searched(self, w: F32) -> Int4Matrix:
        """Scales of the row with its blocks turned round, codes of the row as it is."""
        width = w.shape[1]
        blocks = np.split(np.arange(width), range(BLOCK, width, BLOCK))
        turned = np.ascontiguousarray(w[:, np.concatenate(blocks[::-1])])
        scales = quantize_int4_row(turned, search=True).scales
        codes = self.backend.codes(w, scales.astype(np.float64))
        return Int4Matrix(self.backend.pack(codes), scales, width, width)
