"""Mistakes in reading int4 weights (SPEC 5.1, 5.2)."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.backends.composed import Floats
from conformance.backends.composed.linear import spread
from conformance.faults.fault import Fault
from conformance.golden import Array
from reference.arithmetic import F32


class Decoder(Fault):
    """A mistake in reading int4 codes."""

    operations: ClassVar[tuple[str, ...]] = ("linear_int4", "linear_w4a16")


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


class BorrowedFromNext(Decoder):
    """8 is taken off four codes in one word, and each that falls below zero borrows from the next.

    Of a byte the low nibbles make words of their own, and the high ones too.
    """

    name = "int4-borrow-across-bytes"
    reports = ("gittensor-ai-lab/sparkinfer/pull/723",)
    severity = "broken"

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """(q - 1) * scale, where the weight two places before is negative."""
        weights = super().int4_weights(packed, scales, width, group)
        borrowed = np.zeros((len(packed), 2 * packed.shape[1]), bool)
        for first, nibbles in enumerate(_nibbles(packed)):
            for byte in range(packed.shape[1] - 1):
                if byte % 4 < 3:
                    here = 2 * byte + first
                    borrowed[:, here + 2] = nibbles[:, byte] < 8 + borrowed[:, here]
        step = spread(scales, width, group).astype(np.float32)
        return np.where(borrowed[:, :width], weights - step, weights)


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
